"""What a state counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.profiler import record_function

#: How profilers show a bucket's phase.
RANGE = "gradwire:{phase} bucket {bucket}"


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
        seconds: wall time up to a bucket's first messages ("encode"), waiting for messages ("exchange", of all buckets
            that are under way for the longest), and computing after them ("decode"); all of it overlaps with backward.
            Profilers show the same times as ranges named `RANGE`.
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

    def clock(self, bucket: int, device: torch.device) -> Callable[[str], AbstractContextManager[None]]:
        """What times the phases of a bucket: a context manager for each, which also names the time spent inside for
        whoever profiles.

        Args:
            bucket: its index.
            device: where its gradients are.
        """
        return partial(_Phase, self.seconds, bucket, device.type == "cuda")


class _Phase:
    """Adds the time spent inside to `seconds`. While nobody profiles it opens no range: on small models to enter one
    takes as long as the phase."""

    __slots__ = ("_bucket", "_nvtx", "_phase", "_ranges", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], bucket: int, nvtx: bool, phase: str) -> None:
        self._seconds, self._bucket, self._nvtx, self._phase = seconds, bucket, nvtx, phase
        self._ranges: ExitStack | None = None

    def __enter__(self) -> None:
        if self._nvtx or getattr(torch.autograd.profiler, "_is_profiler_enabled", True):
            name, self._ranges = RANGE.format(phase=self._phase, bucket=self._bucket), ExitStack()
            self._ranges.enter_context(record_function(name))
            if self._nvtx:  # torch.profiler's range becomes one of NVTX only under `emit_nvtx`
                self._ranges.enter_context(torch.cuda.nvtx.range(name))
        self._start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._seconds[self._phase] += time.perf_counter() - self._start
        if self._ranges is not None:
            self._ranges.close()
