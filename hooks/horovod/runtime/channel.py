"""The collectives of one process set, on connections that nothing else uses.

Sums of numbers go to the backend with their dtype; whatever is only moved travels as bytes, so that every dtype can.
CUDA tensors go over NCCL, or, where torch has none, through the host over Gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm.coded_message import NOT_CODED
from ...comm.group import Group
from ...timeouts import COLLECTIVE_TIMEOUT


class Channel:
    """One rank's end. Making it is a collective of `ranks`; use it from one thread.

    Args:
        store: where the ranks of this set, and no others, meet.
        ranks: global ranks of the set, ascending.
        rank: this process's global rank.
    """

    def __init__(self, store: dist.Store, ranks: Sequence[int], rank: int) -> None:
        self.ranks, self.rank, self.size = tuple(ranks), tuple(ranks).index(rank), len(ranks)
        self._store = store
        gloo = dist.PrefixStore("gloo", store)
        self._gloo: Any = dist.ProcessGroupGloo(gloo, self.rank, self.size, COLLECTIVE_TIMEOUT)
        self._nccl: Any = None
        self._groups: dict[tuple[str, bool], Group] = {}
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def group(self, device: torch.device, entropy_coding: bool = False) -> Group:
        """For the compressed exchanges.

        Raises:
            ValueError: the device's messages cannot be coded.
        """
        if entropy_coding and device.type != "cpu":
            raise ValueError(NOT_CODED.format(device=device))
        key = device.type, entropy_coding
        if key not in self._groups:
            self._groups[key] = Group(self._backend(device), self.ranks)
            self._groups[key].entropy_coding = entropy_coding
        return self._groups[key]

    def scratch(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Flat memory for one operation. It is reused, as fresh pages cost as much as filling them."""
        have = self._scratch.get((dtype, device))
        if have is None or have.numel() < numel:
            have = self._scratch[dtype, device] = torch.empty(numel, dtype=dtype, device=device)
        return have[:numel]

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """`tensor` = reduction over the ranks."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self._run(flat_memory(tensor), lambda backend, flat: backend.allreduce([flat], options))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """`tensor` = that of the member at index `root`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        if tensor.numel():
            self._run(as_bytes(tensor), lambda backend, flat: backend.broadcast([flat], options))

    def all_gather(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """The ranks' tensors, end to end along the first dimension, of which rank r has `rows[r]`."""
        result = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        mine, sizes = as_bytes(tensor.contiguous()), _bytes_of(rows, tensor)
        if result.numel():
            self._run(
                as_bytes(result), lambda _, flat: self.group(flat.device).all_gather_v(flat, mine.to(flat), sizes)
            )
        return result

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rank r gets the next `sent[r]` rows; from rank r come `received[r]`."""
        result = tensor.new_empty((sum(received), *tensor.shape[1:]))
        mine, into, out = as_bytes(tensor.contiguous()), _bytes_of(received, tensor), _bytes_of(sent, tensor)
        self._run(
            as_bytes(result), lambda _, flat: self.group(flat.device).all_to_all_v(flat, mine.to(flat), into, out)
        )
        return result

    def swap(self, sent: Tensor, received: Tensor, peer: int) -> None:
        """Swap CPU tensors with one member. Both call it at the same time."""
        give, take = ([sent.new_empty(0)] * self.size for _ in range(2))
        give[peer], take[peer] = sent, received
        self.group(sent.device).pairwise(take, give).wait()

    def barrier(self, seconds: float) -> None:
        """Wait for all ranks, at most so long. Raises RuntimeError if one does not come."""
        options = dist.BarrierOptions()
        options.timeout = timedelta(seconds=seconds)
        self._gloo.barrier(options).wait()

    def close(self, failed: bool = False) -> None:
        """Close the connections. Ranks that still wait for this one get an error.

        Args:
            failed: ranks may be gone: NCCL's collectives in flight are aborted then, and else waited for.
        """
        nccl, self._gloo, self._nccl = self._nccl, None, None
        if nccl is not None:
            end = nccl.abort if failed else getattr(nccl, "shutdown", None) or nccl._shutdown  # its name before 2.7
            end()
        self._groups.clear()
        self._scratch.clear()

    def _backend(self, device: torch.device) -> Any:
        if device.type != "cuda" or not dist.is_nccl_available():
            return self._gloo
        if self._nccl is None:
            store = dist.PrefixStore("nccl", self._store)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = COLLECTIVE_TIMEOUT
            self._nccl = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        return self._nccl

    def _run(self, flat: Tensor, start: Callable[[Any, Tensor], Any]) -> None:
        """Start a collective on `flat`, or on a copy on the host if the backend cannot reach it."""
        backend = self._backend(flat.device)
        if backend is None:
            raise RuntimeError("the connections to the other ranks are closed")
        if backend is self._gloo and flat.device.type != "cpu":
            host = flat.cpu()
            start(backend, host).wait()
            flat.copy_(host)
        else:
            start(backend, flat).wait()


def _bytes_of(rows: Sequence[int], like: Tensor) -> list[int]:
    row = like.new_empty((1, *like.shape[1:])).nbytes
    return [row * count for count in rows]


def is_plain(tensor: Tensor) -> bool:
    """True if the memory of a tensor is its elements, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flat_memory(tensor: Tensor) -> Tensor:
    """The memory of a plain tensor. A dimension of size 1 may have any stride, and `view` would keep it."""
    return tensor.as_strided((tensor.numel(),), (1,))


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a plain tensor, as bytes."""
    flat = flat_memory(tensor)
    return flat if tensor.dtype == torch.uint8 else flat.view(torch.uint8)
