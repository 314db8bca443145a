"""Timings of a codec's operations, in turns with the roofline's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from ...compress import Codec, Tracking, new_draw
from ...compress.feedback.base import FeedbackState
from ..common import report
from ..common.arms import label
from .baselines import Baseline, Operation, torch_chain

#: Seconds between two timings on several threads. OpenMP's threads, which serve torch's operations, wait for more work
#: for some milliseconds, each keeping a core busy: what is timed next would have to share it. This thread's own core
#: stays awake meanwhile.
PAUSE = 0.01
#: A chain of torch operations takes 50 times as long as what it is compared with: fewer timings will do.
CHAIN_REPEATS = 3


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def measure(
    codec: Codec, gradients: Sequence[Tensor], threads: int, ranks: int, repeats: int, warmup: int
) -> dict[str, Any]:
    """Time one codec's operations. Times in seconds, medians and all."""
    with torch_threads(threads):
        return _measure(codec, gradients, threads, ranks, repeats, warmup)


def _measure(
    codec: Codec, gradients: Sequence[Tensor], threads: int, ranks: int, repeats: int, warmup: int
) -> dict[str, Any]:
    # Stochastic codecs are timed as they keep a residual: rounding to nearest. Their encode draws.
    feedback, numel = codec.with_feedback(), gradients[0].numel()
    following, draw, sizes = cycle(gradients), new_draw(0), codec.part_bytes(numel)
    workspace, plain = feedback.workspace(numel), codec.workspace(numel)
    wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8)
    residual, accumulated, out = torch.zeros(numel), torch.zeros(numel), torch.empty_like(gradients[0])
    wires = [torch.empty(ranks, size, dtype=torch.uint8) for size in sizes]
    for rank in range(ranks):
        draw[2] = rank << 33  # as in training: ranks share the lower half, by which `RandomK` draws
        codec.encode(gradients[rank % len(gradients)], wire, draw, plain)
        for rows, part in zip(wires, wire.split(sizes), strict=True):
            rows[rank] = part
    tracking = feedback.workspace(numel)
    tracked = FeedbackState(Tracking(), {name: torch.zeros(numel) for name in Tracking.state_names})
    decoded = torch.zeros(numel)
    codec.decode_add(wire, decoded, 1.0, plain)
    sent = gradients[(ranks - 1) % len(gradients)]
    for _ in range(warmup):
        feedback.encode_feedback(next(following), residual, wire, draw, workspace)
    operations: dict[str, Operation] = {
        "add": lambda grad: torch.add(grad, accumulated, out=accumulated),
        "encode_feedback": lambda grad: feedback.encode_feedback(grad, residual, wire, draw, workspace),
        "encode_tracking": lambda grad: tracked.encode(feedback, grad, wire, draw, tracking),
        "copy": out.copy_,
        "encode": lambda grad: codec.encode(grad, wire, draw, plain),
        "decode_mean": lambda grad: codec.decode_mean(wires, out, plain),
    }
    chain = torch_chain(feedback, residual.clone())
    times = timed(operations, gradients, repeats, threads, draw)
    if chain is not None:
        times |= timed({"torch": chain}, gradients, min(repeats, CHAIN_REPEATS), threads, draw)
    per_element = len(wire) / numel
    moved = {
        "add": 12.0,
        "copy": 8.0,
        "encode_feedback": 12 + per_element,
        "encode_tracking": 20 + per_element,
        "encode": 4 + per_element,
        "decode_mean": ranks * per_element + 4,
    }
    return {
        "name": codec.name,
        "codec": repr(codec),
        "label": label(codec),
        "numel": numel,
        "threads": threads,
        "wire_bytes_per_element": per_element,
        "relative_error": float((decoded - sent).norm() / sent.norm()),
        **ratios(times, numel),
        **traffic(times, moved, numel),
        "times_s": times,
    }


@torch.no_grad()
def measure_baselines(
    baselines: Sequence[Baseline], gradients: Sequence[Tensor], threads: int, repeats: int
) -> list[dict[str, Any]]:
    """Time PyTorch's own compressions, each in turns with the roofline."""
    rows, numel = [], gradients[0].numel()
    accumulated = torch.zeros(numel)
    with torch_threads(threads):
        for baseline in baselines:
            operations: dict[str, Operation] = {
                "add": lambda grad: torch.add(grad, accumulated, out=accumulated),
                "round_trip": baseline.operation,
            }
            times = timed(operations, gradients, repeats, threads)
            facts = {"name": baseline.name, "label": baseline.label, "numel": numel, "threads": threads}
            spent = {"wire_bytes_per_element": baseline.wire_bytes_per_element}
            rows.append({**facts, **spent, **ratios(times, numel), "times_s": times})
    return rows


def timed(
    operations: Mapping[str, Operation],
    gradients: Sequence[Tensor],
    repeats: int,
    threads: int,
    draw: Tensor | None = None,
) -> dict[str, list[float]]:
    """Seconds of every operation, `repeats` times, in turns."""
    clock = time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in operations}
    for turn in range(repeats + 1):
        if draw is not None:
            draw[1] = turn
        for place, (name, operation) in enumerate(operations.items()):
            grad = gradients[(turn + place) % len(gradients)]  # never what the operation before left in the cache
            begin = clock()
            while threads > 1 and clock() - begin < PAUSE:
                pass
            begin = clock()
            operation(grad)
            spent = clock() - begin
            if turn:  # the first turn touches everything once
                times[name].append(spent)
    return times


def ratios(times: Mapping[str, Sequence[float]], numel: int) -> dict[str, dict[str, float]]:
    """For each operation: its median in seconds, 10^9 elements a second, and the median in units of the roofline's."""
    medians = {name: report.median(values) for name, values in times.items()}
    return {
        "median_s": medians,
        "gelem_per_s": {name: numel / median / 1e9 for name, median in medians.items()},
        "ratio_to_add": {name: median / medians["add"] for name, median in medians.items()},
    }


def traffic(
    times: Mapping[str, Sequence[float]], moved: Mapping[str, float], numel: int
) -> dict[str, dict[str, float]]:
    """For each operation: the bytes an element that it must read and write at least, the 10^9 bytes a second that
    makes, and those as a share of the roofline's."""
    rates = {name: moved[name] * numel / report.median(times[name]) / 1e9 for name in moved}
    return {
        "bytes_per_element": dict(moved),
        "gbyte_per_s": rates,
        "share_of_add": {name: rate / rates["add"] for name, rate in rates.items()},
    }
