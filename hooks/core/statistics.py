"""Counts and times of a rank's steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...compress.deprecated import former_property


@dataclass
class Statistics:
    """Counts of a rank since its state was made.

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

    payload_bytes = former_property("payload_bytes", "bytes_sent")
    transfer_bytes = former_property("transfer_bytes", "bytes_received")
