"""`sparse_all_reduce`: the sum of sparse gradients over the ranks, by the fastest of four algorithms.

| algorithm | how                                                                      | received per rank         |
| --------- | ------------------------------------------------------------------------ | ------------------------- |
| gather    | all-gather of indices, then values; merged on every rank                 | (P-1)·k·(i+v)             |
| union     | all-gather of indices; all-reduce of values at the union of them         | (P-1)·k·i + 8·u·(P-1)/P   |
| split     | entries to the owners of their ranges, who sum them and send them to all | (k+u)·(i+v)·(P-1)/P       |
| dense     | all-reduce of all elements                                               | 8·N·(P-1)/P               |

with k entries a rank, u in their union, N elements, P ranks, i ≈ log2(N/k) + 2 bits for an index and v bytes for a
value; if values are rows, an entry is a row. All but dense, and union over NCCL, sum in rank order; all give every rank
the same bits.

`split` is the split all-gather of SparCML (Renggli et al., SC 2019) with the balanced ranges of Ok-Topk (Li & Hoefler,
PPoPP 2022). Indices travel ahead of values as in Kylix (Zhao & Canny, ICPP 2014). `union` does for single elements
what OmniReduce (Fei et al., SIGCOMM 2021) does for blocks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.entry_exchange import BufferPool, Entries, EntryExchanger, bounds_of, fill, used
from ..comm.group import Group
from ..comm.ports import Stages, drive
from ..comm.untraced import untraced
from ..network import cost, probe
from .costs import choose
from .validation import Algorithm, Offer, Op, compare, estimate_union


@overload
def sparse_all_reduce(
    indices: Tensor,
    values: Tensor,
    numel: int,
    *,
    group: dist.ProcessGroup | None = None,
    op: Op = "mean",
    algorithm: Algorithm = "auto",
    out: None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def sparse_all_reduce(
    indices: Tensor,
    values: Tensor,
    numel: int,
    *,
    group: dist.ProcessGroup | None = None,
    op: Op = "mean",
    algorithm: Algorithm = "auto",
    out: Tensor,
) -> Tensor: ...


@overload
def sparse_all_reduce(
    indices: Tensor,
    values: Tensor,
    numel: int,
    *,
    group: dist.ProcessGroup | None = None,
    op: Op = "mean",
    algorithm: Algorithm = "auto",
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]: ...


@untraced
def sparse_all_reduce(
    indices: Tensor,
    values: Tensor,
    numel: int,
    *,
    group: dist.ProcessGroup | None = None,
    op: Op = "mean",
    algorithm: Algorithm = "auto",
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sum or average a sparse vector over the ranks of a group. A collective: every rank must call it.

    Not differentiable, like `torch.distributed`'s collectives.

    Args:
        indices: int64 or int32 [k], strictly ascending, in [0, numel). k may differ between ranks, and be 0.
        values: float32, float16 or bfloat16 [k], on the same device; or [k, n], a row for each index, as the gradient
            of an embedding has. NaN and infinities are passed on. Sums are made in float32; bfloat16 travels as such in
            "gather" and "split", all else as float32.
        numel: length N of the vector, or number of rows; below 2^31, the same on all ranks.
        group: the ranks; by default all.
        op: "mean" or "sum".
        algorithm: "gather", "union", "split", "dense", or "auto": the fastest by `hooks.network.cost`, which probes a
            group the first time it meets it (a second or two).
        out: float32, float16 or bfloat16 [N] or [N, n], of any strides by which no two elements lie at one address, on
            the device of `values`: filled with the result, zero where no rank has an entry.

    Returns:
        The union's indices, ascending, in the dtype of `indices`, and the sums or means there, in that of `values`;
        or `out`, if that was given. Equal bit for bit on all ranks.

    Raises:
        ValueError, TypeError: a rank's arguments are invalid, or ranks disagree. Raised on every rank with the same
            text, which names the rank; all may go on.
        RuntimeError: a rank did not take part within the group's timeout.

    Memory is kept for the next call on the same group and stream. The host waits for one small all-gather, which
    compares arguments, then for one count in "union" and "dense" (without `out`), two in "split".
    """
    with torch.no_grad():
        call = prepare(indices, values, numel, group, op, algorithm, out)
        with call.exchanger.group.failing_together():
            result = reduce(call)
        if out is not None:
            return out.copy_(result.add_(0.0)) if isinstance(result, Tensor) else fill(out, result)
        if isinstance(result, Tensor):
            result = used(result)
        # Copies: the next call works in the same memory.
        return (
            result.indices.to(indices.device, indices.dtype, copy=True),
            result.values.to(values.device, values.dtype, copy=True),
        )


#: Memory of the calls on a group, which goes with the group; by stream, as calls on two streams may run at once.
_pools: weakref.WeakKeyDictionary[Any, dict[Any, BufferPool]] = weakref.WeakKeyDictionary()


def pool_of(group: Any, device: torch.device) -> BufferPool:
    """The memory of calls on this group and the current stream."""
    place = torch.cuda.current_stream(device) if device.type == "cuda" else device
    return _pools.setdefault(group, {}).setdefault(place, BufferPool(device))


@dataclass
class Call:
    """A call on whose arguments all ranks have agreed.

    Attributes:
        entries: this rank's, on a device whose tensors the group can move.
        k: the most entries that any rank has.
        bounds: of the owners' ranges, for "split".
        scale: factor of the sums.
        agreed_bytes: bytes received from other ranks to agree.
    """

    exchanger: EntryExchanger
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
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"group={group!r}: expected a process group that this rank is in; new_group() gives the ranks outside "
            "something else, and they must not call"
        )
    ranks, offer = Group(process_group), Offer.of(process_group, indices, values, numel, op, algorithm, out)
    sides = compare(offer, ranks)
    travel, here = torch.bfloat16 if values.dtype == torch.bfloat16 else torch.float32, offer.entry_device
    decision = cost.Decision(algorithm, ())
    if algorithm == "auto":
        width = math.prod(values.shape[1:])
        sizes = (width * numel, width * max(sides.counts), ranks.size, width * estimate_union(sides, numel))
        shape = cost.Shape(*sizes, travel)
        with ranks.failing_together():
            calibration = probe.calibration(ranks, here, sides.calibrated)
        decision = choose(calibration, shape)
    entries = Entries(offer.indices.to(here, torch.int32), offer.values.to(here, torch.float32))
    bounds = bounds_of(sides.samples, numel) if decision.name == "split" else []
    scale = 1.0 / ranks.size if op == "mean" else 1.0
    agreed = (ranks.size - 1) * sides.nbytes
    exchanger = EntryExchanger(numel, travel, here, ranks, pool_of(process_group, here), tuple(values.shape[1:]))
    return Call(exchanger, entries, max(sides.counts), bounds, decision, scale, agreed)


def reduce(call: Call) -> Entries | Tensor:
    """The second half: the result as entries, or by "dense" as float32 [numel, …]. A collective."""
    result: Entries | Tensor = drive(
        total(call.exchanger, call.decision.name, call.entries, call.k, call.bounds, call.scale)
    )
    return result


def total(
    exchanger: EntryExchanger, algorithm: str, entries: Entries, k: int, bounds: Sequence[int], scale: float
) -> Stages:
    """Stages: the sum over the ranks times `scale`, as Entries, or by "dense" as float32 [numel, …].

    Args:
        k: the most entries that any rank has.
        bounds: of the owners' ranges, for "split".
    """
    if exchanger.world_size == 1:
        return Entries(entries.indices, entries.values * scale)
    if k == 0:
        return entries
    if algorithm == "split":
        return (yield from exchanger.split(entries, bounds, scale))
    if algorithm == "dense":
        return (yield from exchanger.dense(entries)).mul_(scale)
    result: Entries = yield from (exchanger.gather if algorithm == "gather" else exchanger.union)(entries, k)
    result.values.mul_(scale)
    return result
