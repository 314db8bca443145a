"""What a state counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Statistics:
    """What a rank has done since its state was made.

    Attributes:
        steps: synchronised backward passes.
        elements: gradient elements reduced.
        dense_bytes: what they would be as float32.
        payload_bytes: bytes this rank handed to collectives for other ranks, but for the few that compare steps.
        transfer_bytes: bytes this rank received from others, by what the collectives move; of a hierarchical exchange,
            from other nodes.
        skipped_entries: indices or codes that cannot occur in a sound wire and were left out.
        nonfinite_steps: steps whose mean had a NaN or an infinity; of steps in which all is dense every 64th is looked
            at.
        decisions: for each bucket, by index, which exchange serves it, and why.
        seconds: wall time up to a bucket's first messages ("encode"), waiting for messages ("exchange"; buckets
            wait beside each other), and computing after them ("decode"); all of it overlaps with backward.
            Profilers show the same times as ranges (`comm.pipeline.RANGE`).
    """

    steps: int = 0
    elements: int = 0
    dense_bytes: int = 0
    payload_bytes: int = 0
    transfer_bytes: int = 0
    skipped_entries: int = 0
    nonfinite_steps: int = 0
    decisions: dict[int, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "exchange": 0.0, "decode": 0.0})
