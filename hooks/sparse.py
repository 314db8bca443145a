"""`sparse_all_reduce`: the sum of sparse gradients over the ranks, by whatever moves least.

| algorithm | how                                                                      | received per rank         |
| --------- | ------------------------------------------------------------------------ | ------------------------- |
| gather    | all-gather of indices, then values; merged on every rank                 | (P-1)·k·(i+v)             |
| union     | all-gather of indices; all-reduce of values at the union of them         | (P-1)·k·i + 8·u·(P-1)/P   |
| split     | entries to the owners of their ranges, who sum them and send them to all | (k+u)·(i+v)·(P-1)/P       |
| dense     | all-reduce of all elements                                               | 8·N·(P-1)/P               |

with k entries a rank, u in their union, N elements, P ranks, i ≈ log2(N/k) + 2 bits for an index and v bytes for a
value. gather and split sum in rank order, union and dense as the backend does; all give every rank the same bits.

`split` is the split all-gather of SparCML (Renggli et al., SC 2019) with the balanced ranges of Ok-Topk (Li & Hoefler,
PPoPP 2022); that indices travel ahead of values is from Kylix (Zhao & Canny, ICPP 2014); `union` is to a whole gradient
what OmniReduce (Fei et al., SIGCOMM 2021) is to its blocks.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import cost, probe
from .entries import Carrier, Entries, Room, bounds_of, range_samples
from .group import Group

OPS = ("mean", "sum")
ALGORITHMS = ("gather", "union", "split", "dense")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int64, torch.int32)
#: Elements of the gradient in one window, whose entries tell ranks how much their index sets overlap.
WINDOW = 32
#: Windows of all ranks together.
WINDOWS = 2048


def sparse_all_reduce(
    indices: Tensor,
    values: Tensor,
    numel: int,
    *,
    group: dist.ProcessGroup | None = None,
    op: str = "mean",
    algorithm: str = "auto",
    out: Tensor | None = None,
) -> Any:
    """Sum or average a sparse vector over the ranks of a group. A collective: every rank must call it.

    Args:
        indices: int64 or int32 [k], strictly ascending, in [0, numel). k may differ between ranks, and be 0.
        values: float32, float16 or bfloat16 [k], on the same device. NaN and infinities are passed on. Sums are made in
            float32; bfloat16 travels as such in "gather" and "split", all else as float32.
        numel: length N of the vector, below 2^31, the same on all ranks.
        group: the ranks; by default all.
        op: "mean" or "sum".
        algorithm: "gather", "union", "split", "dense", or "auto": the fastest by `hooks.cost`, which probes a group the
            first time it meets it (a second or two).
        out: float32, float16 or bfloat16 [N]: filled with the result, zero where no rank has an entry.

    Returns:
        The union's indices, ascending, in the dtype of `indices`, and the sums or means there, in that of `values`;
        or `out`, if that was given. "dense" leaves out indices whose sum is zero. Equal bit for bit on all ranks.

    Raises:
        ValueError, TypeError: on every rank, if any was given what cannot be reduced or ranks disagree; names who.
        RuntimeError: a rank did not take part within the group's timeout.

    Memory is kept for the next call on the same group. The host waits for one small all-gather, which compares
    arguments, then for one count in "union" and "dense" (without `out`), two in "split".
    """
    call = prepare(indices, values, numel, group, op, algorithm, out)
    result = reduce(call)
    if out is not None:
        return fill(out, result)
    if isinstance(result, Tensor):
        place = result.nonzero().view(-1)
        result = Entries(place.int(), result[place])
    # Copies: the next call works in the same memory.
    return (
        result.indices.to(indices.device, indices.dtype, copy=True),
        result.values.to(values.device, values.dtype, copy=True),
    )


#: Memory of the calls on a group, which goes with the group.
_rooms: weakref.WeakKeyDictionary[Any, dict[torch.device, Room]] = weakref.WeakKeyDictionary()


@dataclass
class Call:
    """What all ranks have agreed on.

    Attributes:
        entries: this rank's, where the group can move them.
        k: the most entries that any rank has.
        bounds: of the owners' ranges, for "split".
        scale: what sums are multiplied by.
        agreed_bytes: what it took to agree, received from other ranks.
    """

    carrier: Carrier
    entries: Entries
    k: int
    bounds: list[int]
    decision: cost.Decision
    scale: float
    agreed_bytes: int


def prepare(
    indices: Tensor,
    values: Tensor,
    numel: int,
    group: dist.ProcessGroup | None = None,
    op: str = "mean",
    algorithm: str = "auto",
    out: Tensor | None = None,
) -> Call:
    """The first half of `sparse_all_reduce`: compare arguments, and choose. A collective; raises as that does."""
    process_group: Any = dist.group.WORLD if group is None else group
    if process_group is None:
        raise RuntimeError("sparse_all_reduce needs torch.distributed: call init_process_group() first")
    problem = _problem(indices, values, numel, op, algorithm, out)
    device = values.device if isinstance(values, Tensor) else torch.device("cpu")
    # Gloo moves what lies in host memory.
    here = torch.device("cpu") if Group.blocks(process_group, device) else device
    ranks = Group(process_group)
    sides = _compare(indices, values, numel, op, algorithm, problem, ranks, here)
    travel = torch.bfloat16 if values.dtype == torch.bfloat16 else torch.float32
    decision = cost.Decision(algorithm, ())
    if algorithm == "auto":
        shape = cost.Shape(numel, max(sides.counts), ranks.size, _estimate_union(sides, numel), travel)
        decision = choose(probe.calibration(ranks, here, sides.calibrated), shape)
    entries = Entries(indices.to(here, torch.int32), values.to(here, torch.float32))
    bounds = bounds_of(sides.samples, numel) if decision.name == "split" else []
    scale = 1.0 / ranks.size if op == "mean" else 1.0
    agreed = (ranks.size - 1) * sides.nbytes
    room = _rooms.setdefault(process_group, {}).setdefault(here, Room(here))
    carrier = Carrier(numel, travel, here, ranks, room)
    return Call(carrier, entries, max(sides.counts), bounds, decision, scale, agreed)


def choose(calibration: cost.Calibration, shape: cost.Shape) -> cost.Decision:
    """Which algorithm is fastest."""
    return cost.decide(getattr(calibration, algorithm)(shape) for algorithm in ALGORITHMS)


def reduce(call: Call) -> Entries | Tensor:
    """The second half: the result as entries, or by "dense" as float32 [numel]. A collective."""
    carrier, entries, k, scale = call.carrier, call.entries, call.k, call.scale
    if carrier.world_size == 1:
        return Entries(entries.indices, entries.values * scale)
    if k == 0:
        return entries
    if call.decision.name == "gather":
        result = carrier.gather(entries, k)
        result.values.mul_(scale)
    elif call.decision.name == "union":
        result = carrier.union(entries, k)
        result.values.mul_(scale)
    elif call.decision.name == "split":
        result = carrier.split(entries, call.bounds, scale)
    else:
        dense = carrier.room("dense", carrier.numel, torch.float32)
        dense.zero_()
        dense[entries.indices.long()] = entries.values
        carrier.all_reduce(dense)
        return dense.mul_(scale)
    return result


def fill(out: Tensor, result: Entries | Tensor) -> Tensor:
    """Write a result to a dense vector."""
    if isinstance(result, Tensor):
        return out.copy_(result)
    out.zero_()
    out[result.indices.to(out.device).long()] = result.values.to(out.device, out.dtype)
    return out


# -- do all ranks mean the same, and can it be done? -----------------------------------------------------------------


@dataclass
class Sides:
    """What the ranks say of themselves.

    Attributes:
        counts: entries of each.
        calibrated: whether all of them know the group's calibration.
        sketches: of their index sets, by `_windows`, int64 [P, windows].
        samples: of their lists, by `entries.range_samples`.
        nbytes: of one rank's message.
    """

    counts: list[int]
    calibrated: bool
    sketches: Tensor
    samples: Tensor
    nbytes: int


#: What can be wrong with entries; the number that goes with it is filled in.
FAULTS = (
    "",
    "its arguments are of the wrong type, shape or value",
    "index {} is out of range",
    "indices are not strictly ascending at position {}: sort them, and add up duplicates (torch.sparse: coalesce())",
)


def _problem(
    indices: Any, values: Any, numel: Any, op: Any, algorithm: Any, out: Any
) -> tuple[int, int, Exception | None]:
    """What is wrong with this rank's arguments: a fault, the number that goes with it, and the exception."""
    try:
        _check(indices, values, numel, op, algorithm, out)
    except (TypeError, ValueError) as error:
        return 1, 0, error
    if len(indices) == 0:
        return 0, 0, None
    ascending = indices[1:] > indices[:-1]
    first, last, sorted_ = torch.stack([indices[0], indices[-1], ascending.all().to(indices.dtype)]).tolist()
    if not sorted_:
        return 3, 1 + int((~ascending).nonzero()[0]), None
    if first < 0 or last >= numel:
        return 2, first if first < 0 else last, None
    return 0, 0, None


def _check(indices: Any, values: Any, numel: Any, op: Any, algorithm: Any, out: Any) -> None:
    if not isinstance(indices, Tensor) or indices.dtype not in INDEX_DTYPES or indices.dim() != 1:
        raise TypeError(f"indices must be a 1-D int64 or int32 tensor, got {_what(indices)}")
    if not isinstance(values, Tensor) or values.dtype not in DTYPES or values.dim() != 1:
        raise TypeError(f"values must be a 1-D tensor of float32, float16 or bfloat16, got {_what(values)}")
    if len(indices) != len(values) or indices.device != values.device:
        raise ValueError(
            f"{len(indices)} indices on {indices.device} and {len(values)} values on {values.device}: "
            "there must be one for each, on one device"
        )
    if isinstance(numel, bool) or not isinstance(numel, int) or not 0 < numel < 1 << 31:
        raise ValueError(f"numel={numel!r}: expected the length of the vector, from 1 up to 2^31 - 1")
    for name, value, choices in (("op", op, OPS), ("algorithm", algorithm, ("auto", *ALGORITHMS))):
        if value not in choices:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, choices))}")
    if out is not None and (
        not isinstance(out, Tensor) or out.dtype not in DTYPES or out.shape != (numel,) or out.device != values.device
    ):
        raise ValueError(f"out must be a tensor of shape ({numel},) on {values.device}, like values; got {_what(out)}")


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"one of shape {tuple(value.shape)}, {value.dtype}, on {value.device}"
    return f"a {type(value).__name__}"


def _compare(
    indices: Tensor,
    values: Tensor,
    numel: int,
    op: str,
    algorithm: str,
    problem: tuple[int, int, Exception | None],
    group: Group,
    device: torch.device,
) -> Sides:
    """One all-gather: raises on every rank alike if one cannot go on, or two want different things."""
    fault, number, error = problem
    facts = [fault, number, int(probe.known(group, device)), *[0] * 5]
    sketch = torch.zeros(max(16, WINDOWS // group.size), dtype=torch.int64, device=device)
    samples = torch.zeros(0, dtype=torch.int32, device=device)
    if not fault:
        kinds = OPS.index(op), ("auto", *ALGORITHMS).index(algorithm), DTYPES.index(values.dtype)
        facts[3:] = len(indices), numel, *kinds
        here = indices.to(device)
        sketch, samples = _windows(here, numel, len(sketch)), range_samples(here, numel, group.rank, group.size)
    else:
        samples = torch.zeros_like(range_samples(samples, 1, 0, group.size))
    words = torch.tensor(facts, dtype=torch.int64).to(device), sketch
    row = torch.cat([*(word.view(torch.int32) for word in words), samples])
    rows = group.gathered(group.size, len(row), dtype=torch.int32, device=device)
    group.all_gather(rows, row).wait()
    split = 2 * len(facts), 2 * len(sketch), len(samples)
    told, sketches, samples = rows.split(split, dim=1)
    sides = _longs(told).tolist()
    if error is not None:
        raise error
    faulty = [f"rank {rank}: {FAULTS[side[0]].format(side[1])}" for rank, side in enumerate(sides) if side[0]]
    if faulty:
        raise ValueError("sparse_all_reduce cannot go on: " + "; ".join(faulty))
    names = ("numel", "op", "algorithm", "dtype of values")
    meanings: tuple[Any, ...] = (None, OPS, ("auto", *ALGORITHMS), DTYPES)
    for rank, side in enumerate(sides):
        for name, meaning, mine, theirs in zip(names, meanings, sides[0][4:], side[4:], strict=True):
            if mine != theirs:
                first, other = (mine, theirs) if meaning is None else (meaning[mine], meaning[theirs])
                raise ValueError(
                    f"sparse_all_reduce: ranks disagree on {name}: rank 0 has {first}, rank {rank} has {other}"
                )
    counts, calibrated = [side[3] for side in sides], all(side[2] for side in sides)
    return Sides(counts, calibrated, _longs(sketches), samples, row.nbytes)


def _longs(words: Tensor) -> Tensor:
    """Rows of int32 as rows of int64."""
    return words.reshape(-1).view(torch.int64).view(len(words), -1)


def _windows(indices: Tensor, numel: int, windows: int) -> Tensor:
    """Which elements of some windows, the same on all ranks, have entries: one int64 of bits for each."""
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


def _estimate_union(sides: Sides, numel: int) -> int:
    """How many indices the union has, from the windows of all ranks."""
    counts, bits = sides.counts, sides.sketches
    total = sum(counts)
    each = (bits.unsqueeze(-1) >> torch.arange(WINDOW, device=bits.device)) & 1
    entries, distinct = int(each.sum()), int(each.any(0).sum())
    if entries == 0:
        return min(total, numel)
    return max(*counts, min(numel, round(total * distinct / entries)))
