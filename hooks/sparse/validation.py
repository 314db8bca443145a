"""Validation of `sparse_all_reduce`'s arguments, on this rank and against the other ranks'. An error on one rank is
raised on all of them, so that no rank waits for another, or takes its next call for this one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..comm.entry_exchange import range_samples
from ..comm.group import Group
from ..network import probe

Op = Literal["mean", "sum"]
Algorithm = Literal["auto", "gather", "union", "split", "dense"]

OPS: tuple[Op, ...] = get_args(Op)
CHOICES: tuple[Algorithm, ...] = get_args(Algorithm)
ALGORITHMS = CHOICES[1:]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int64, torch.int32)
#: Elements of the gradient in one window; the entries in windows tell how much the ranks' index sets overlap.
WINDOW = 32
#: Windows of all ranks together.
WINDOWS = 2048

CPU = torch.device("cpu")


@dataclass
class Offer:
    """This rank's arguments, valid or not, as every rank must hear of an error.

    Attributes:
        indices, values: contiguous, detached from autograd; empty if there is a problem.
        facts: numbers that must be equal on all ranks: see `FACTS`.
        problem: the error in the arguments.
        entry_device: of entries on their way to other ranks.
        control_device: of the messages that compare arguments. It depends on the group alone, so that ranks meet
            whatever their arguments are.
    """

    indices: Tensor
    values: Tensor
    facts: list[int]
    problem: Exception | None
    entry_device: torch.device
    control_device: torch.device

    @classmethod
    def of(cls, process_group: Any, indices: Any, values: Any, numel: Any, op: Any, algorithm: Any, out: Any) -> Offer:
        kinds = [device.type for device in process_group._device_types]
        control_device = CPU if "cpu" in kinds else torch.device(kinds[0])
        given = values.device if isinstance(values, Tensor) else CPU
        # Gloo moves host memory.
        entry_device = given if given.type in kinds and not Group.blocks(process_group, given) else CPU
        try:
            _check(indices, values, numel, op, algorithm, out)
            if entry_device.type not in kinds:
                raise ValueError(f"values are on {given}, and the group moves tensors on {' and '.join(kinds)} alone")
            at = _raw(indices)
            _check_order(at, numel)
            facts = [
                numel,
                OPS.index(op),
                CHOICES.index(algorithm),
                DTYPES.index(values.dtype),
                values.shape[1] if values.dim() > 1 else 0,
                DEVICES.index(entry_device.type),
            ]
            return cls(at, _raw(values), facts, None, entry_device, control_device)
        except Exception as problem:  # whatever it is, the others wait for this rank
            nothing = torch.zeros(0, dtype=torch.int32, device="cpu")
            return cls(nothing, nothing.float(), [0] * len(FACTS), problem, CPU, control_device)


DEVICES = ("cpu", "cuda")
#: Arguments that must be equal on all ranks, and the values that their numbers index; None: the number is the value.
FACTS: tuple[tuple[str, tuple[Any, ...] | None], ...] = (
    ("numel", None),
    ("op", OPS),
    ("algorithm", CHOICES),
    ("dtype of values", DTYPES),
    ("length of a row of values", None),
    ("the device of values", DEVICES),
)


def _raw(tensor: Tensor) -> Tensor:
    """The tensor's memory as kernels read it: detached and contiguous."""
    return tensor.detach().resolve_neg().contiguous()


def _check(indices: Any, values: Any, numel: Any, op: Any, algorithm: Any, out: Any) -> None:
    if not _is_plain(indices, INDEX_DTYPES, 1):
        raise TypeError(f"indices must be a 1-D int64 or int32 tensor, got {_describe(indices)}")
    if not _is_plain(values, DTYPES, 2) or values.shape[1:] == (0,):
        raise TypeError(
            "values must be a tensor of float32, float16 or bfloat16, 1-D, or 2-D with a row for each index, got "
            f"{_describe(values)}"
        )
    if len(indices) != len(values) or indices.device != values.device:
        raise ValueError(
            f"{len(indices)} indices on {indices.device} and {len(values)} values on {values.device}: "
            "there must be one for each, on one device"
        )
    if isinstance(numel, bool) or not isinstance(numel, int) or not 0 < numel < 1 << 31:
        raise ValueError(f"numel={numel!r}: expected how many numbers, or rows, there are, from 1 up to 2^31 - 1")
    for name, value, choices in (("op", op, OPS), ("algorithm", algorithm, CHOICES)):
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")
    if out is not None:
        _check_out(out, values, numel)


def _check_out(out: Any, values: Tensor, numel: int) -> None:
    shape = numel, *values.shape[1:]
    if not _is_plain(out, DTYPES, 2) or out.shape != shape or out.device != values.device:
        raise ValueError(f"out must be a tensor of shape {shape} on {values.device}, like values; got {_describe(out)}")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError("all elements of out lie at one address: give it memory of its own, as out.clone() has")
    if out.dim() == 2 and min(out.shape) > 1:
        # Where a step down meets steps across: at the least common multiple of both.
        both = math.gcd(*out.stride())
        if out.stride(1) // both < out.shape[0] and out.stride(0) // both < out.shape[1]:
            raise ValueError(
                f"rows of out overlap, by strides of {out.stride()}: give it memory of its own, as out.clone() has"
            )
    try:
        with torch.no_grad():
            out[:0].zero_()
    except RuntimeError as error:  # an inference tensor, for one
        raise ValueError(f"out cannot be written to: {error}") from error


def _check_order(indices: Tensor, numel: int) -> None:
    if len(indices) == 0:
        return
    ascending = indices[1:] > indices[:-1]
    first, last, sorted_ = torch.stack([indices[0], indices[-1], ascending.all().to(indices.dtype)]).tolist()
    if not sorted_:
        raise ValueError(
            f"indices are not strictly ascending at position {1 + int((~ascending).nonzero()[0])}: sort them, and add "
            "up duplicates (torch.sparse: coalesce())"
        )
    if first < 0 or last >= numel:
        raise ValueError(f"index {first if first < 0 else last} is out of range: numel is {numel}")


def _is_plain(value: Any, dtypes: tuple[torch.dtype, ...], most: int) -> bool:
    """True for a tensor of 1 to `most` dimensions with memory of its own, unlike fake, meta and distributed ones."""
    return (
        isinstance(value, Tensor)
        and type(value).__torch_dispatch__ == Tensor.__torch_dispatch__
        and value.layout == torch.strided
        and not value.is_meta
        and value.dtype in dtypes
        and 1 <= value.dim() <= most
    )


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    layout = "" if value.layout == torch.strided else f", {value.layout}"
    return f"a {type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}{layout}, on {value.device}"


@dataclass
class Sides:
    """The arguments of all ranks.

    Attributes:
        counts: entries of each rank.
        calibrated: all of them have the group's calibration.
        sketches: of their index sets, by `windows_of`, int64 [P, windows].
        samples: of their index lists, by `range_samples`.
        nbytes: of one rank's message.
    """

    counts: list[int]
    calibrated: bool
    sketches: Tensor
    samples: Tensor
    nbytes: int


def compare(offer: Offer, group: Group) -> Sides:
    """Compare arguments in one all-gather. Raises alike on every rank if some are invalid, or differ."""
    sound, indices, numel = offer.problem is None, offer.indices, max(1, offer.facts[0])
    sketch = windows_of(indices, numel, max(16, WINDOWS // group.size))
    samples = range_samples(indices, numel, group.rank, group.size)
    known = sound and probe.known(group, offer.entry_device)
    facts = torch.tensor([int(sound), int(known), len(indices), *offer.facts], device="cpu")
    # Words of 64 bits first, so that they lie at multiples of 8 bytes.
    row = torch.cat([x.view(torch.int32).to(offer.control_device) for x in (facts, sketch, samples)])
    rows = group.gather_output(group.size, len(row), dtype=torch.int32, device=offer.control_device)
    with group.failing_together():
        group.all_gather(rows, row).wait()
    everyone, sketches, samples = rows.split([2 * len(facts), 2 * len(sketch), len(samples)], dim=1)
    sides = _longs(everyone).tolist()
    if not all(side[0] for side in sides):
        _raise_problems(offer, group)
    for which, (name, meaning) in enumerate(FACTS):
        mine, *_ = theirs = [side[3 + which] for side in sides]
        for rank, other in enumerate(theirs):
            if other != mine:
                first, second = (mine, other) if meaning is None else (meaning[mine], meaning[other])
                raise ValueError(
                    f"sparse_all_reduce: ranks disagree on {name}: rank 0 has {first}, rank {rank} has {second}"
                )
    counts, calibrated = [side[2] for side in sides], all(side[1] for side in sides)
    return Sides(counts, calibrated, _longs(sketches), samples, row.nbytes)


def _raise_problems(offer: Offer, group: Group) -> None:
    """Raise all ranks' problems, alike on every rank. A collective."""
    problem = offer.problem
    with group.failing_together():
        everyone = group.all_gather_object(
            None if problem is None else [type(problem).__name__, str(problem)[:1000]], offer.control_device
        )
    problems = [(f"rank {rank}: {one[1]}", one[0]) for rank, one in enumerate(everyone) if one is not None]
    kind = {"TypeError": TypeError, "ValueError": ValueError}.get(problems[0][1], RuntimeError)
    raise kind("sparse_all_reduce cannot go on: " + "; ".join(text for text, _ in problems)) from problem


def _longs(words: Tensor) -> Tensor:
    """Rows of int32 as rows of int64."""
    return words.reshape(-1).view(torch.int64).view(len(words), -1)


def windows_of(indices: Tensor, numel: int, windows: int) -> Tensor:
    """The elements that have entries in each of some windows, the same on all ranks: an int64 of bits a window."""
    spread = torch.arange(windows, dtype=torch.int64, device=indices.device)
    # Multiples of the golden ratio lie evenly in [0, 1), and in step with nothing.
    starts = ((spread * 0x9E3779B9 & 0xFFFFFFFF) * max(numel - WINDOW, 0)) >> 32
    edges = torch.stack([starts, starts + WINDOW], dim=1).view(-1)
    places = torch.searchsorted(indices.long() if indices.dtype != torch.int64 else indices, edges).view(-1, 2)
    sizes = places[:, 1] - places[:, 0]
    which = torch.repeat_interleave(spread, sizes)
    first = torch.repeat_interleave(places[:, 0] - sizes.cumsum(0) + sizes, sizes)
    at = indices[first + torch.arange(len(which), device=indices.device)].long() - starts[which]
    return torch.zeros_like(starts).index_add_(0, which, 1 << at)


def estimate_union(sides: Sides, numel: int) -> int:
    """The size of the union, estimated from the windows of all ranks."""
    counts, bits = sides.counts, sides.sketches
    total = sum(counts)
    each = (bits.unsqueeze(-1) >> torch.arange(WINDOW, device=bits.device)) & 1
    entries, distinct = int(each.sum()), int(each.any(0).sum())
    if entries == 0:
        return min(total, numel)
    return max(*counts, min(numel, round(total * distinct / entries)))
