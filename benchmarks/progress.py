"""How far a benchmark is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import Any

#: Seconds between two lines where there is no terminal.
QUIET = 15.0


class Progress:
    """A bar over `total` steps; elsewhere than on a terminal, a line every `QUIET` seconds. Needs rich."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        console = Console(stderr=True)
        self.total, self.done, self.spoke = total, 0, time.monotonic()
        self.lines = not console.is_terminal
        columns: list[Any] = [TextColumn("{task.description:36}"), BarColumn(), TimeElapsedColumn()]
        self.bars = Bars(*columns, TimeRemainingColumn(), console=console, disable=self.lines, transient=True)
        self.task = self.bars.add_task("", total=total)

    def __enter__(self) -> Progress:
        self.bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bars.stop()

    def step(self, what: str) -> None:
        """`what` begins; whatever began before is done."""
        self.bars.update(self.task, description=what, completed=self.done)
        self.done += 1
        if self.lines and time.monotonic() - self.spoke > QUIET:
            self.spoke = time.monotonic()
            print(f"[{self.done}/{self.total}] {what}", flush=True)
