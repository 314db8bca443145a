"""Collectives of many tensors, such as a model's: packed into pieces that overlap, so that they take a few latencies
instead of one each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .group import Group
from .ports import Work

#: Bytes: a piece has at least so many, unless it is the last. Another piece starts while at most so many are in flight.
#: Sending them takes longer than most latencies, and Gloo runs two collectives at a time.
PIECE_BYTES = 16 << 20
#: A piece in flight: its bytes, its work, and a function to call when it has arrived.
Started = tuple[int, Work, Callable[[], object]]


def overlap(started: Iterable[Started]) -> None:
    """Wait for pieces in the order in which an iterator starts them, while the next ones are in flight."""
    in_flight, size = deque[Started](), 0
    for each in started:
        in_flight.append(each)
        size += each[0]
        while size > PIECE_BYTES and len(in_flight) > 1:
            size -= _finish(in_flight.popleft())
    while in_flight:
        _finish(in_flight.popleft())


def all_reduce(group: Group, device: torch.device, tensors: Iterable[Tensor]) -> None:
    """Let each tensor be the ranks' sum, in the backend's order. A collective, of tensors alike on all ranks.

    Args:
        device: of the tensors that the group's collectives take.
        tensors: float32.
    """
    _exchange(group, device, tensors, lambda flat: group.all_reduce(flat.view(torch.float32)))


def broadcast(group: Group, device: torch.device, tensors: Iterable[Tensor]) -> None:
    """Let each tensor, of any dtype and on any device, be the first rank's, bit for bit. As `all_reduce`."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    _exchange(group, device, tensors, lambda flat: group._group.broadcast([flat], options))


@torch.no_grad()
def _exchange(group: Group, device: torch.device, tensors: Iterable[Tensor], start: Callable[[Tensor], Work]) -> None:
    def begin(piece: list[Tensor]) -> Started:
        flat = torch.cat([as_bytes(tensor).to(device) for tensor in piece])
        return flat.nbytes, start(flat), partial(_unpack, piece, flat)

    if group.size > 1:
        overlap(map(begin, _pieces(tensors)))


def _finish(started: Started) -> int:
    size, work, then = started
    work.wait()
    then()
    return size


def _pieces(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    piece, size = list[Tensor](), 0
    for tensor in tensors:
        if tensor.numel():
            piece.append(tensor)
            size += tensor.nbytes
        if size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _unpack(piece: list[Tensor], flat: Tensor) -> None:
    for tensor, part in zip(piece, flat.split([tensor.nbytes for tensor in piece]), strict=True):
        # A copy, whose address is aligned for any dtype.
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes, flat: the same memory where it is contiguous."""
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
