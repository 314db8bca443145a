"""An all-reduce of the blocks of a gradient that are not zero."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...compress.backends import all_finite
from ...compress.backends.kernels import divide
from ...compress.codec import Codec
from ...compress.codecs.cast import Identity
from ..comm.group import Group
from ..comm.ports import Stages, Work
from ..network.cost import Calibration, Estimate
from .base import BucketSpec, Exchange, ExchangeArgs
from .reduce_scatter import ReduceScatter

BLOCK = 256
#: Elements on the wire are the gradient's own, and the number of their dtype comes before them, as a rank that sends a
#: residual along has float32 where others have half precision.
DTYPES = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16}
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
INTEGERS = {2: torch.int16, 4: torch.int32}

Places = NDArray[np.int64]


class NonZeroBlocks(Exchange):
    """The exact mean, where most of a gradient is zero: embeddings, experts that nobody was routed to, parameters that
    are frozen (OmniReduce: Fei et al., SIGCOMM 2021). Ranks tell by a bitmap which blocks of 256 elements they have
    that are not zero, and then send those alone. All know the size of every message beforehand.

    Each rank gets all ranks' blocks, or, where that is less, owners of equal shares of the union sum theirs and share
    the means: (P-1)·n/2048 + min(Σ own, (own + 2·union)·(P-1)/P) bytes received, about, or no more than a dense
    all-reduce and the bitmaps. Sums are of float32 in rank order, from zero, and rounded once: a dense mean's bits.
    """

    name, needs = "blocks", "Identity()"
    syncs_host = True

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.blocks = -(-numel // BLOCK)
        self.bitmap = 4 * -(-self.blocks // 32)
        self.row = self.bytes(4 + self.bitmap + 4 * extra)
        self.rows = group.gather_output(self.world_size, len(self.row), device=device)
        self.to_all = self.persistent_gather(self.rows, self.row)
        self.parts, self.means = (Parcels(self, name, self.blocks) for name in ("parts", "means"))
        self.counted = torch.zeros(2, dtype=torch.int64, device=device)
        self._moved = (0, 0)

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        return isinstance(codec, Identity)

    @classmethod
    def estimate(cls, network: Calibration, what: BucketSpec) -> Estimate:
        ranks, union = what.world_size, what.union or what.numel
        half = 4 * union * (ranks - 1) / ranks
        moves = [
            (network.all_gather, (ranks - 1) * what.numel / (8 * BLOCK)),
            (network.all_to_all, half),
            (network.all_gather, half),
        ]
        return network.estimate(cls.name, moves, network.work.dense * what.numel, network.work.dense * what.numel)

    @property
    def bytes_sent(self) -> int:
        return (self.world_size > 1) * len(self.row) + self.parts.sent + self.means.sent - self._moved[0]

    @property
    def bytes_received(self) -> int:
        moved = self.parts.received + self.means.received - self._moved[1]
        return (self.world_size - 1) * len(self.row) + moved

    def reduce(self, x: ExchangeArgs) -> Stages:
        self._moved = self.parts.sent + self.means.sent, self.parts.received + self.means.received
        if self.extra:
            self.row[4 + self.bitmap :].view(torch.float32).copy_(x.extra)
        if self.numel:
            self.row[:4].view(torch.int32).fill_(NUMBERS[x.grad.dtype])
            pack_bits(present_blocks(x.grad), self.row[4 : 4 + self.bitmap])
        yield self.to_all.start()
        if self.numel:
            yield from self._reduce_blocks(x)
        if self.extra:
            self._decode_extra(self.rows[:, 4 + self.bitmap :], x.extra)

    def _reduce_blocks(self, x: ExchangeArgs) -> Stages:
        dtypes, has = read_bitmaps(self.rows[:, : 4 + self.bitmap], self.blocks, self.group)
        union = np.flatnonzero(has.any(0))
        if not len(union):
            x.out.zero_()
            return
        place = np.cumsum(has.any(0)) - 1
        # Of each rank's blocks, in order, the place in the union.
        places: list[Places] = [place[np.flatnonzero(row)] for row in has]
        mine = take_blocks(x.grad, np.flatnonzero(has[self.rank]))
        cuts = [rank * len(union) // self.world_size for rank in range(self.world_size + 1)]
        ends = [np.searchsorted(at, cuts) for at in places]
        if gather_is_less([len(at) for at in places], ends, cuts):
            sizes = [len(at) * BLOCK * dtype.itemsize for at, dtype in zip(places, dtypes, strict=True)]
            yield self.parts.share(mine, sizes)
            means = mean_of_blocks(self.parts.arrived(sizes), dtypes, places, len(union), x.out.dtype)
        else:
            rank = self.rank
            own = [at[end[rank] : end[rank + 1]] - cuts[rank] for at, end in zip(places, ends, strict=True)]
            sizes = [len(at) * BLOCK * dtype.itemsize for at, dtype in zip(own, dtypes, strict=True)]
            yield self.parts.swap([mine[a:b] for a, b in pairwise(ends[rank].tolist())], sizes)
            count = cuts[rank + 1] - cuts[rank]
            mean = mean_of_blocks(self.parts.arrived(sizes), dtypes, own, count, x.out.dtype)
            sizes = [(b - a) * BLOCK * x.out.element_size() for a, b in pairwise(cuts)]
            yield self.means.share(mean, sizes)
            means = torch.cat([part.view(x.out.dtype) for part in self.means.arrived(sizes)]).view(-1, BLOCK)
        put_blocks(x.out, union, means)
        self.counted[1] += ~all_finite(means)

    def counts(self) -> list[Tensor]:
        return [*super().counts(), self.counted]

    def union_of(self, out: Tensor) -> Tensor:
        return elements_of_blocks(out)


class Parcels:
    """One stage of messages of whole blocks, whose sizes all ranks know.

    Args:
        exchange: whose messages they are.
        name: of their channel.
        blocks: the most in a message.

    Attributes:
        sent, received: bytes sent to other ranks and received from them, so far.
    """

    def __init__(self, exchange: Exchange, name: str, blocks: int) -> None:
        self.group, self.port = exchange._own_group(name), None
        if exchange.device.type == "cpu" and blocks:
            self.port = self.group.variable_message(4 * BLOCK * blocks)
            exchange.ports.append(self.port)
        self.sent = self.received = 0
        self._arrived: Tensor | None = None

    def share(self, blocks: Tensor, sizes: Sequence[int]) -> Work:
        """Start: this rank's blocks go to all; rank r has `sizes[r]` bytes."""
        self._count(sizes, sizes[self.group.rank])
        message = blocks.view(-1).view(torch.uint8)
        if self.port is not None:
            return self.port.send([message] * self.group.size)
        self._arrived = message.new_empty(sum(sizes))
        return self.group.all_gather_v(self._arrived, message, sizes)

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Work:
        """Start: part r goes to rank r; `sizes[r]` bytes come from it."""
        messages = [part.reshape(-1).view(torch.uint8) for part in parts]
        sent = [message.numel() for message in messages]
        self._count(sizes, sum(sent) - sent[self.group.rank])
        if self.port is not None:
            return self.port.send(messages)
        self._arrived = messages[0].new_empty(sum(sizes))
        return self.group.all_to_all_v(self._arrived, torch.cat(messages), sizes, sent)

    def arrived(self, sizes: Sequence[int]) -> list[Tensor]:
        """The bytes from each rank, this one included."""
        if self.port is not None:
            received = zip(self.port.received, sizes, strict=True)
            return [row[:size] if size else row.new_empty(0) for row, size in received]
        assert self._arrived is not None
        return list(self._arrived.split(list(sizes)))

    def _count(self, sizes: Sequence[int], sent: int) -> None:
        self.received += sum(sizes) - sizes[self.group.rank]
        self.sent += sent if self.group.size > 1 else 0


class BlocksReduceScatter(ReduceScatter):
    """`NonZeroBlocks` for sharded training: rows are the owners', and means stay with them. Bitmaps go in front."""

    name, half_of = "blocks reduce_scatter", NonZeroBlocks.name

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.blocks = -(-numel // BLOCK)
        self.parcels = Parcels(self, "blocks", self.blocks)
        self.counted = torch.zeros(2, dtype=torch.int64, device=device)
        self._moved = (0, 0)
        self._present: list[Tensor] = []
        #: Of what has arrived: bytes, dtypes and places in the row, by rank.
        self._last: tuple[list[int], list[torch.dtype], list[Places]] | None = None

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        return isinstance(codec, Identity)

    def _sizes(self, codec: Codec) -> tuple[int, ...]:
        return (4 + 4 * -(-self.numel // (32 * BLOCK)),) if self.numel else ()

    @property
    def bytes_sent(self) -> int:
        return super().bytes_sent + self.parcels.sent - self._moved[0]

    @property
    def bytes_received(self) -> int:
        return super().bytes_received + self.parcels.received - self._moved[1]

    def _encode(self, x: ExchangeArgs) -> Stages:
        self._moved = self.parcels.sent, self.parcels.received
        self._present = list(map(present_blocks, x.grad.view(self.world_size, self.numel)))
        for present, row in zip(self._present, self.rows, strict=True):
            row[:4].view(torch.int32).fill_(NUMBERS[x.grad.dtype])
            pack_bits(present, row[4:])
        yield from ()

    def _after(self, x: ExchangeArgs) -> Stages:
        if not self.numel:
            return
        dtypes, has = read_bitmaps(self.wires[0], self.blocks, self.group)
        places: list[Places] = [np.flatnonzero(row) for row in has]
        sizes = [len(at) * BLOCK * dtype.itemsize for at, dtype in zip(places, dtypes, strict=True)]
        rows = zip(x.grad.view(self.world_size, self.numel), torch.stack(self._present).cpu().numpy(), strict=True)
        yield self.parcels.swap([take_blocks(row, np.flatnonzero(present)) for row, present in rows], sizes)
        self._last = sizes, dtypes, places

    def decode(self, out: Tensor) -> None:
        if self.numel and self._last is not None:
            sizes, dtypes, places = self._last
            union = np.unique(np.concatenate(places))
            own = [np.searchsorted(union, at) for at in places]
            means = mean_of_blocks(self.parcels.arrived(sizes), dtypes, own, len(union), out.dtype)
            put_blocks(out, union, means)
            if len(union):
                self.counted[1] += ~all_finite(means)

    def counts(self) -> list[Tensor]:
        return [*super().counts(), self.counted]


def read_bitmaps(rows: Tensor, blocks: int, group: Group) -> tuple[list[torch.dtype], NDArray[np.bool_]]:
    """The dtype of each rank's elements, and which blocks it has, [P, blocks], from the rows that tell. Waits for the
    device."""
    told = rows.cpu().numpy()
    numbers = np.ascontiguousarray(told[:, :4]).view(np.int32)[:, 0].tolist()
    for rank, number in enumerate(numbers):
        if number not in DTYPES:
            raise RuntimeError(
                f"rank {group.ranks[rank]} tells of a dtype by the number {number}, which stands for none: all ranks "
                "need the same version of gradwire"
            )
    has = np.unpackbits(told[:, 4:], axis=1, count=blocks, bitorder="little").astype(np.bool_)
    return [DTYPES[number] for number in numbers], has


def mean_of_blocks(
    parts: Sequence[Tensor], dtypes: Sequence[torch.dtype], places: Sequence[Places], count: int, to: torch.dtype
) -> Tensor:
    """The mean of ranks' blocks, at places below `count`: [count, BLOCK] of a dtype."""
    total = torch.zeros(count, BLOCK, dtype=torch.float32, device=parts[0].device)
    for part, dtype, at in zip(parts, dtypes, places, strict=True):
        blocks = part.view(dtype).view(-1, BLOCK)
        if len(at) == count:
            total += blocks
        else:  # within a part no place comes twice
            total[torch.from_numpy(at).to(total.device)] += blocks
    mean = total if to == torch.float32 else torch.empty(count, BLOCK, dtype=to, device=total.device)
    divide(total, len(parts), mean)
    return mean


def gather_is_less(counts: Sequence[int], ends: Sequence[Places], cuts: Sequence[int]) -> bool:
    """True if getting all ranks' blocks takes no more bytes than owners' sums, of the rank that gets most."""
    ranks = range(len(counts))
    whole = max(sum(counts) - counts[rank] for rank in ranks)
    parts = [
        sum(int(ends[other][rank + 1] - ends[other][rank]) for other in ranks if other != rank)
        + (cuts[-1] - (cuts[rank + 1] - cuts[rank]))
        for rank in ranks
    ]
    return whole <= max(parts)


def present_blocks(x: Tensor) -> Tensor:
    """Which blocks have a bit that is set: bool [blocks]."""
    bits, whole = x.view(INTEGERS[x.element_size()]), len(x) // BLOCK
    rows = bits[: whole * BLOCK].view(whole, BLOCK)
    # Two passes at memory's speed; `any` takes three times as long.
    found = (rows.amax(1) != 0) | (rows.amin(1) != 0) if whole else rows.new_zeros(0, dtype=torch.bool)
    return found if whole * BLOCK == len(x) else torch.cat([found, bits[whole * BLOCK :].any()[None]])


def elements_of_blocks(x: Tensor) -> Tensor:
    """Elements of blocks that are not zero, at least one block's: int64 []."""
    return BLOCK * present_blocks(x).sum().clamp(min=1)


def pack_bits(flags: Tensor, out: Tensor) -> None:
    """Write flags to bytes, the first to the lowest bit."""
    padded = torch.zeros(8 * len(out), dtype=torch.uint8, device=out.device)
    padded[: len(flags)] = flags
    out.copy_((padded.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=out.device)).sum(1, dtype=torch.uint8))


def take_blocks(x: Tensor, at: Places) -> Tensor:
    """Some blocks of a vector, in ascending order: [len(at), BLOCK], zero behind its end."""
    whole = len(x) // BLOCK
    indices = torch.from_numpy(at).to(x.device)
    rows = x[: whole * BLOCK].view(whole, BLOCK)
    if not len(at) or at[-1] < whole:
        return rows[indices]
    found = x.new_zeros(len(at), BLOCK)
    found[:-1] = rows[indices[:-1]]
    found[-1, : len(x) - whole * BLOCK] = x[whole * BLOCK :]
    return found


def put_blocks(x: Tensor, at: Places, blocks: Tensor) -> None:
    """Let a vector be these blocks, in ascending order, and zero elsewhere."""
    whole = len(x) // BLOCK
    x.zero_()
    tail = bool(len(at)) and int(at[-1]) == whole
    indices = torch.from_numpy(at[:-1] if tail else at).to(x.device)
    x[: whole * BLOCK].view(whole, BLOCK)[indices] = blocks[: len(indices)]
    if tail:
        x[whole * BLOCK :] = blocks[-1, : len(x) - whole * BLOCK]
