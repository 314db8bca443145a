"""Progress of a benchmark: a bar on a terminal, an occasional line elsewhere."""

from __future__ import annotations

import sys
import time

#: Seconds between two lines where there is no terminal.
QUIET = 15.0


class Progress:
    """Progress: a bar on a terminal, an occasional line elsewhere. A context manager; needs rich.

    Args:
        title: what is under way.
        total: how many units of work it has.
        silent: show nothing, as on all ranks but one.
    """

    def __init__(self, title: str, total: float, *, silent: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.title, self.total, self.done, self.spoke = title, total, 0.0, time.monotonic()
        console = Console(stderr=True)
        self.lines = not silent and not console.is_terminal
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
        hidden = silent or self.lines
        self.bar = Progress(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=hidden, transient=True
        )
        self.task = self.bar.add_task(title, total=total, note="")

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def more(self, units: float) -> None:
        """There are `units` more to do than was known."""
        self.total += units
        self.bar.update(self.task, total=self.total)

    def advance(self, units: float, note: str = "") -> None:
        """`units` more are done; `note` says with which result."""
        self.done += units
        self.bar.update(self.task, advance=units, note=note)
        if self.lines and time.monotonic() - self.spoke > QUIET:
            self.spoke = time.monotonic()
            print(f"{self.title}: {self.done / self.total:.0%}  {note}", file=sys.stderr, flush=True)
