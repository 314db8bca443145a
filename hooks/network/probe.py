"""A short probe of a group's messages and of the ranks' kernels, which calibrates the model in `cost`.

A group is probed once, with all ranks at work together as in a step. Every rank gets the same numbers, so that all
decide alike. Work counts as the slowest rank has it. Messages count by the ranks' mean: ranks begin up to one latency
apart, and a longer wait on one is a shorter wait on another.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch

from ...compress.backends import entries_for
from ...compress.codec import Codec, new_draw
from ...compress.formats.entries import index_bytes, value_bytes
from ..comm.entry_exchange import Entries, EntryExchanger
from ..comm.group import Group
from ..comm.ports import Collective, PersistentMessage, Port, drive
from .cost import UNLIMITED, Calibration, CodecSpeed, Latency, Line, Work

#: A probe's messages grow until one takes so many seconds, or all ranks' together have so many bytes.
PROBE_SECONDS, PROBE_BYTES = 0.15, 1 << 26
#: On slow networks, until one takes so many latencies, as the transfer is to be measured.
PROBE_LATENCIES = 4
#: Bytes of the shortest messages, their number, and seconds of pause before each: in steps, too, ranks have to wake up.
SHORT, SHORTS, PAUSE = 64, 9, 1e-3
#: Entries that the probe packs, and elements for each of them.
PROBE_ENTRIES, PROBE_SPACING = 1 << 15, 64
#: Elements that a codec's probe compresses. On a GPU two numbers, which tell its launches and its rate apart, as far as
#: a share of the free memory holds them.
PROBE_ELEMENTS, GPU_ELEMENTS = 1 << 19, (1 << 14, 1 << 25)
MEMORY_SHARE, ELEMENT_BYTES = 1 / 16, 16
#: Launches that are timed as one on a GPU: a single one is shorter than its launch takes the host.
LAUNCHES = 8
#: Wires decoded at once, to find the cost of each.
MANY = 3

#: By global ranks and type of device, as long as these numbers refer to the same processes.
_known: weakref.WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], str], Calibration]] = weakref.WeakKeyDictionary()


def known(group: Group, device: torch.device) -> bool:
    """True if this rank has a calibration of the group. Others may not, after a failed probe."""
    return (group.ranks, device.type) in _known.get(group.generation, {})


def calibration(group: Group, device: torch.device, everywhere: bool | None = None) -> Calibration:
    """The calibration of a group for tensors on `device`. A collective; it probes at the first call alone.

    Args:
        everywhere: True if every rank has one; None: ask.
    """
    if everywhere is None:
        everywhere = not any(agreed(group, device, [float(not known(group, device))]))
    key, found = (group.ranks, device.type), _known.setdefault(group.generation, {})
    if not everywhere:
        found[key] = calibrate(group, device)
    return found[key]


def calibrate(group: Group, device: torch.device) -> Calibration:
    """Probe a group: a collective. Takes a second or two, and longer on slow networks or few cores."""
    p = group.size

    gathers, swaps = group.channel("probe gather"), group.channel("probe swap")

    def gather(size: int) -> Port:
        rows = torch.zeros(p, size, dtype=torch.uint8, device=device)
        return gathers.persistent_gather(rows, rows[0].clone(), ahead=1)

    def swap(size: int) -> Port:
        rows = torch.zeros(p, size, dtype=torch.uint8, device=device)
        return swaps.persistent_swap(torch.empty_like(rows), rows, ahead=1)

    def all_reduce(size: int) -> Port:  # as many bytes received as in the others
        x = torch.zeros(max(1, size * p // 8), dtype=torch.float32, device=device)
        return Collective(lambda: group.all_reduce(x))

    streams = device.type == "cuda"
    first = _line(gather, group, device)
    # From rank to rank both are the same messages, and noise must not tell them apart.
    second = _line(swap, group, device) if streams else first
    third = _line(all_reduce, group, device)
    at_once = 1 if streams else UNLIMITED  # a GPU's stream orders them
    return Calibration(first, second, third, work(group, device), _latency(group, device), at_once)


def slowest(calibration: Calibration, group: Group, device: torch.device) -> Calibration:
    """The slowest of the calibrations that subgroups of `group` have measured, so that all its ranks decide alike."""
    lines = calibration.all_gather, calibration.all_to_all, calibration.all_reduce
    mine = [number for line in lines for number in (line.alpha, line.beta, line.each)]
    numbers = iter(agreed(group, device, mine))
    first, second, third = (Line(next(numbers), next(numbers), each=next(numbers)) for _ in lines)
    entries = Work(*agreed(group, device, list(astuple(calibration.work))))
    rounds = Latency(*agreed(group, device, list(astuple(calibration.latency))))
    return Calibration(first, second, third, entries, rounds, calibration.at_once)


def _line(make: Callable[[int], Port], group: Group, device: torch.device) -> Line:
    """α from the shortest messages; β from the better of the two longest, as some sizes suit a backend badly.

    Args:
        make: returns a message of so many bytes from each rank to each other.
    """
    others = max(1, group.size - 1)
    short = [make(SHORT) for _ in range(SHORTS)]
    for port in short[:3]:
        port.start().wait()  # opens connections
    for port in short:
        port.post_receives()
    agreed(group, device, [0.0])  # by now every announcement has arrived
    alpha = _typical(group, device, [_started(port, device, PAUSE) for port in short])
    each = _each(short, alpha, group, device)
    size, points = 1 << 14, [(0.0, alpha)]
    while points[-1][1] < max(PROBE_SECONDS, PROBE_LATENCIES * alpha) and size * group.size <= PROBE_BYTES:
        port, seconds = make(size), []
        for _ in range(1 + 3):
            port.post_receives()
            agreed(group, device, [0.0])
            seconds.append(_started(port, device))
        points.append((float(others * size), max(_typical(group, device, seconds[1:]), alpha)))  # the first opens
        size *= 4
    betas = [max(seconds - alpha, 1e-9) / received for received, seconds in points[-2:] if received]
    return Line(alpha, min(betas), tuple(points[1:-1]), each=each)


def _each(ports: list[Port], alpha: float, group: Group, device: torch.device) -> float:
    """Seconds of one more stage that is in flight with others; 0 for a backend's collectives, which count by
    `cost.GLOO_COLLECTIVES`."""
    if not all(isinstance(port, PersistentMessage) for port in ports):
        return 0.0

    def together(_: int) -> None:
        for work in [port.start() for port in ports]:
            work.wait()

    seconds = []
    for _ in range(3):
        for port in ports:
            port.post_receives()
        agreed(group, device, [0.0])
        seconds.append(timed(together, 0, device, PAUSE))
    return min(alpha, max(0.0, _typical(group, device, seconds) - alpha) / (len(ports) - 1))


def _latency(group: Group, device: torch.device) -> Latency:
    exchanger = EntryExchanger(1024, torch.float32, device, group)
    entries = Entries(
        torch.arange(8, dtype=torch.int32, device=device) * 128, torch.ones(8, dtype=torch.float32, device=device)
    )
    bounds = [1024 * owner // group.size for owner in range(group.size + 1)]
    runs: tuple[Callable[[int], object], ...] = (
        lambda _: drive(exchanger.gather(entries, 8)),
        lambda _: drive(exchanger.union(entries, 8)),
        lambda _: drive(exchanger.split(entries, bounds)),
    )
    seconds = []
    for run in runs:
        run(0)
        seconds.append(_median([timed(run, 0, device, PAUSE) for _ in range(7)]))
    return Latency(*agreed(group, device, seconds))


def work(group: Group, device: torch.device) -> Work:
    n, numel = PROBE_ENTRIES, PROBE_ENTRIES * PROBE_SPACING
    kernels = entries_for(device)
    indices = torch.arange(0, numel, PROBE_SPACING, dtype=torch.int32, device=device)
    values = torch.ones(n, dtype=torch.float32, device=device)
    index_wire = torch.empty(index_bytes(numel, n), dtype=torch.uint8, device=device)
    value_wire = torch.empty(value_bytes(n, torch.bfloat16), dtype=torch.uint8, device=device)
    out_indices, out_values = torch.empty_like(indices), torch.empty_like(values)
    vector = torch.empty(numel, dtype=torch.float32, device=device)

    def pack() -> None:
        kernels.pack_indices(indices, None, 0, numel, index_wire)
        kernels.pack_values(values, torch.bfloat16, value_wire)

    def unpack() -> None:
        kernels.unpack_indices(index_wire[None], 0, numel, None, out_indices[None])
        kernels.unpack_values(value_wire[None], torch.bfloat16, out_values[None])

    def merge() -> None:
        kernels.merge(indices, values, (0, n), 0, numel, out_indices, out_values)

    def scatter() -> None:
        vector[indices.long()] = values

    def sweep() -> None:  # no entries: the cost of the elements alone
        kernels.merge(indices[:0], values[:0], (0, 0), 0, numel, out_indices, out_values)

    def dense() -> None:
        vector.zero_()
        vector.mul_(0.5)
        vector.clone()

    seconds = []
    for run in (pack, unpack, merge, scatter, sweep, dense):
        run()
        agreed(group, device, [0.0])  # all ranks at once, as they will be
        seconds.append(_median([timed(lambda _, run=run: run(), 0, device) for _ in range(5)]))  # type: ignore[misc]
    packing, unpacking, merging, writing, sweeping, filling = agreed(group, device, seconds)
    merging = max(merging - sweeping, 0.0)
    return Work(packing / n, unpacking / n, merging / n, writing / n, sweeping / numel, filling / numel)


def codec_speed(codec: Codec, feedback: bool, numel: int, group: Group, device: torch.device) -> CodecSpeed:
    """The speed of a codec on gradients of at most `numel` elements, with all ranks at work. A collective."""
    if device.type != "cuda":
        n = min(numel, PROBE_ELEMENTS)
        return CodecSpeed(*(seconds / n for seconds in _codec_seconds(codec, feedback, n, group, device)))
    free, _ = torch.cuda.mem_get_info(device)
    (least,) = agreed(group, device, [-float(free)])
    n = max(1, min(numel, GPU_ELEMENTS[1], int(-least * MEMORY_SHARE / ELEMENT_BYTES)))
    few = min(n, GPU_ELEMENTS[0])
    short, long = (_codec_seconds(codec, feedback, size, group, device) for size in (few, n))
    rates = [max(b - a, 0.0) / (n - few) if n > few else b / n for a, b in zip(short, long, strict=True)]
    launches = [max(0.0, seconds - rate * few) for seconds, rate in zip(short, rates, strict=True)]
    return CodecSpeed(*rates, launch=(launches[0], launches[1], launches[2]))


def _codec_seconds(codec: Codec, feedback: bool, n: int, group: Group, device: torch.device) -> list[float]:
    """Seconds for `n` elements to encode, to decode one rank's wire, and to write the mean. A collective."""
    workspace = codec.workspace(n, device)
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(n, dtype=torch.float32, generator=generator, device="cpu").to(device)
    residual, out = torch.zeros_like(grad), torch.empty_like(grad)
    wire = torch.zeros(codec.wire_bytes(n), dtype=torch.uint8, device=device)
    one = [part[None] for part in wire.split(codec.part_bytes(n))]
    draw = new_draw(0, device=device)

    def encode(_: int) -> None:
        if feedback:
            codec.encode_feedback(grad, residual, wire, draw, workspace)
        else:
            codec.encode(grad, wire, draw, workspace)

    encode(0)
    several = [part.repeat(MANY, 1) for part in one]
    seconds = []
    for run in (
        encode,
        lambda _: codec.decode_mean(one, out, workspace),
        lambda _: codec.decode_mean(several, out, workspace),
    ):
        run(0)
        agreed(group, device, [0.0])
        seconds.append(_median([_launched(run, device) for _ in range(3)]))
    encoding, single, many = agreed(group, device, seconds)
    each = min(max(many - single, 0.0) / (MANY - 1), single)
    return [encoding, each, single - each]


def timed(run: Callable[[int], object], size: int, device: torch.device, pause: float = 0.0) -> float:
    time.sleep(pause)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run(size)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _launched(run: Callable[[int], object], device: torch.device) -> float:
    """Seconds of a run; on a GPU those of the GPU alone, without what the host takes to launch it."""
    if device.type != "cuda":
        return timed(run, 0, device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(LAUNCHES):
        run(0)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / LAUNCHES


def _started(port: Port, device: torch.device, pause: float = 0.0) -> float:
    return timed(lambda _: port.start().wait(), 0, device, pause)


def _typical(group: Group, device: torch.device, seconds: list[float]) -> float:
    """The mean of the ranks' medians. A collective."""
    (mean,) = averaged(group, device, [_median(seconds)])
    return mean


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def averaged(group: Group, device: torch.device, numbers: list[float]) -> list[float]:
    """The ranks' mean of each number, on every rank."""
    means: list[float] = _everyone(group, device, numbers).mean(0).tolist()
    return means


def agreed(group: Group, device: torch.device, seconds: list[float]) -> list[float]:
    """The slowest rank's seconds, on every rank."""
    slowest: list[float] = _everyone(group, device, seconds).amax(0).tolist()
    return slowest


def _everyone(group: Group, device: torch.device, seconds: list[float]) -> torch.Tensor:
    """The numbers of all ranks, on every rank: float64 [P, …]."""
    mine = torch.tensor(seconds, dtype=torch.float64, device="cpu").to(device)
    rows = torch.zeros(group.size, len(seconds), dtype=torch.float64, device=device)
    group.all_gather(rows, mine).wait()
    return rows
