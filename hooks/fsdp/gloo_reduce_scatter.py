"""An exact reduce-scatter over Gloo, whose own makes an all-reduce."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.entry_exchange import BufferPool
from ..comm.group import Group
from ..comm.ports import drive
from ..comm.untraced import untraced
from .torch_internals import Shards

#: A channel and receive memory for each process group. One call is in flight at a time.
_places: weakref.WeakKeyDictionary[Any, tuple[Group, BufferPool]] = weakref.WeakKeyDictionary()


def install(parts: Sequence[Shards]) -> None:
    """Send gradients directly to the shards' owners, where FSDP would have Gloo sum all of them on all ranks. Nothing
    changes over NCCL, with a reduce-scatter of the user's, and in torch before 2.9."""
    for shards in parts:
        plain = getattr(shards.group, "_reduce_scatter_comm", None)
        group, device = shards.process_group, shards.group.device
        if type(plain).__name__ == "DefaultReduceScatter" and device.type == "cpu" and group.size() > 1:
            shards.replace_reduce_scatter(_Direct(plain, group))


class _Direct:
    """The reduce-scatter that FSDP calls. It has the methods of FSDP's `ReduceScatter`, a private class."""

    def __init__(self, plain: Any, process_group: Any) -> None:
        self._plain = plain
        if process_group not in _places:
            _places[process_group] = Group(process_group).channel("reduce_scatter"), BufferPool(torch.device("cpu"))
        self._group, self._room = _places[process_group]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        result: Tensor = self._plain.allocate(size, dtype=dtype, device=device)
        return result

    @untraced
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        op = op if isinstance(op, dist.ReduceOp) else dist.ReduceOp(op)
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return self._plain(output_tensor, input_tensor, group, op, async_op)
        pieces = self._room(str(input_tensor.dtype), input_tensor.numel(), input_tensor.dtype)
        drive(self._group.reduce_scatter(output_tensor, input_tensor.chunk(self._group.size), pieces))
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(self._group.size)
        return None
