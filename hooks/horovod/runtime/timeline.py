"""When each operation waited and ran, as a Chrome trace: load the file in chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import TextIO


class Timeline:
    """Writes complete events ("ph": "X") of one process, a row for each operation's name.

    Args:
        path: of the file, overwritten.
        mark_cycles: also mark every decision of what runs next.
    """

    def __init__(self, path: str, mark_cycles: bool = False) -> None:
        self.mark_cycles = mark_cycles
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._start = time.perf_counter()
        self._file: TextIO | None = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
        began = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}  # to lay the traces of runs together
        self._file.write("[\n" + json.dumps({"name": "process_name", "ph": "M", "args": began, "pid": 0}))

    def now(self) -> float:
        """Seconds since the timeline was started."""
        return time.perf_counter() - self._start

    def span(self, row: str, name: str, begin: float, end: float, **arguments: object) -> None:
        """`name` took from `begin` to `end`, in seconds as `now` gives them."""
        self._event(row, {"name": name, "ph": "X", "ts": begin * 1e6, "dur": (end - begin) * 1e6, "args": arguments})

    def mark(self, name: str) -> None:
        """Something happened now."""
        if self.mark_cycles:
            self._event("cycles", {"name": name, "ph": "i", "s": "g", "ts": self.now() * 1e6})

    def close(self) -> None:
        """End the file, which is then valid JSON."""
        with self._lock:
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def _event(self, row: str, event: dict[str, object]) -> None:
        with self._lock:
            if self._file is None:
                return
            named: dict[str, object] = {"name": "thread_name", "ph": "M", "args": {"name": row}}
            new = row not in self._rows
            number = self._rows.setdefault(row, len(self._rows) + 1)
            for each in [named, event] if new else [event]:
                self._file.write(",\n" + json.dumps({**each, "pid": 0, "tid": number}))
            self._file.flush()
