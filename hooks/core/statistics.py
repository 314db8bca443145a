"""Counts and times of a rank's steps, and the text by which a user reads them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Self

from ...compress.deprecated import former_property

#: Columns of a terminal.
WIDTH = 80


@dataclass
class Statistics:
    """Counts of a rank since its state was made. `print` shows them as a table.

    Attributes:
        steps: synchronised backward passes.
        elements: gradient elements reduced.
        dense_bytes: their size as float32.
        bytes_sent: bytes this rank handed to collectives for other ranks, without the few by which ranks compare steps.
        bytes_received: bytes this rank received from other ranks, by the traffic of the collectives; of a hierarchical
            exchange, from other nodes.
        skipped_entries: indices or codes that no sound wire has, and that were left out.
        nonfinite_steps: steps whose mean had a NaN or an infinity; of all-dense steps every 64th is checked.
        decisions: each bucket's exchange and the reason for it, by the bucket's index.
        seconds: wall time up to a bucket's first messages ("encode"), waiting for messages ("exchange"; buckets
            wait beside each other), and computing after them ("decode"); all of it overlaps with backward.
            Profilers show the same times as ranges (`core.bucket.RANGE`).
        told: kinds and ratio of the last line said (`core.report`).
    """

    steps: int = 0
    elements: int = 0
    dense_bytes: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    skipped_entries: int = 0
    nonfinite_steps: int = 0
    decisions: dict[int, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "exchange": 0.0, "decode": 0.0})
    told: tuple[frozenset[str], float] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        """A table of at most 80 columns. It waits for nothing, so that a signal handler may print it in a step."""
        seconds, decisions = dict(self.seconds), dict(self.decisions)  # as other threads add to them
        rows = {
            "steps": f"{self.steps:,}",
            "as float32": f"{self.dense_bytes:,} bytes",
            "sent": f"{self.bytes_sent:,} bytes{fewer(self.dense_bytes, self.bytes_sent)}",
            "received": f"{self.bytes_received:,} bytes",
            "seconds": ", ".join(f"{phase} {time:.3g}" for phase, time in seconds.items()),
        }
        for name in ("skipped_entries", "nonfinite_steps"):
            if count := getattr(self, name):
                rows[name.replace("_", " ")] = f"{count:,}"
        lines = [row(name, value) for name, value in rows.items()]
        alike: dict[str, list[int]] = {}
        for bucket, decision in sorted(decisions.items()):
            alike.setdefault(decision.partition(": ")[0], []).append(bucket)
        for what, buckets in alike.items():
            text = "float32" if what.partition(" of ")[0] == "dense" else what
            reasons = dict.fromkeys(decisions[bucket].partition(": ")[2] for bucket in buckets)
            if reason := next(iter(reasons)):
                text += f": {reason}" if len(reasons) == 1 else f"; bucket {buckets[0]}: {reason}"
            name = f"bucket{'s' if len(buckets) > 1 else ''} {_ranges(buckets)}"
            lines.append(row(name, text))
        return "\n".join(lines)

    def copied(self) -> Self:
        """A copy, also while another thread counts."""
        return replace(self, decisions=dict(self.decisions), seconds=dict(self.seconds))

    payload_bytes = former_property("payload_bytes", "bytes_sent")
    transfer_bytes = former_property("transfer_bytes", "bytes_received")


def fewer(dense_bytes: int, bytes_sent: int, dense: str = "float32") -> str:
    """The bytes sent beside those of `dense`, for people; empty if they are the same."""
    if not bytes_sent or not dense_bytes or abs(dense_bytes / bytes_sent - 1) < 0.005:
        return ""
    if bytes_sent > dense_bytes:
        return f", {bytes_sent / dense_bytes:.3g} times the bytes of {dense}"
    return f", {dense_bytes / bytes_sent:.3g} times fewer bytes than {dense}"


def row(name: str, value: str) -> str:
    """A line of a table of `WIDTH` columns, or several."""
    return textwrap.fill(f"{name:<16}  {value}", WIDTH, subsequent_indent=" " * 18, break_on_hyphens=False)


def _ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers, with runs as first–last."""
    numbers = list(numbers)
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)]
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]]
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in zip(starts, ends, strict=True))
