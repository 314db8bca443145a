"""Means of elements that all ranks send, so that indices travel once, and values are summed as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...compress.backends import Kernels, Workspace, all_finite, backend_for, entries_for
from ...compress.backends.kernels import divide
from ...compress.backends.places import sound_places, write_at
from ...compress.codec import Codec
from ...compress.codecs.topk import TopK
from ...compress.feedback.base import FeedbackState
from ...compress.formats.entries import index_bytes, value_bytes
from ...compress.formats.wire import Field, Part
from ..comm.group import Group
from ..comm.ports import Port, Stages
from ..network.cost import Calibration, Estimate
from .base import BucketSpec, Exchange, ExchangeArgs
from .reduce_scatter import ReduceScatter


class _KeepAllKernels(Kernels[Codec]):
    """In torch, and by the passes of `backend.vectors`."""

    def encode(self, codec: Codec, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        wire.view(torch.int32).copy_(all_finite(x))

    def encode_feedback(
        self, codec: Codec, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        wire.view(torch.int32).copy_(backend_for(grad.device).vectors.accumulate(grad, residual))

    def decode_add(self, codec: Codec, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        """It is nothing."""


_KEEP_ALL_KERNELS = _KeepAllKernels()


@dataclass(frozen=True)
class KeepAll(Codec):
    """Sends nothing: a residual takes all in, and what is sent is taken out of it (`FeedbackState.take_at`)."""

    name: ClassVar[str] = "keep_all"

    def parts(self, numel: int) -> tuple[Part, ...]:
        return (Part("finite", (Field("finite", "<u4", 1, "1 if all of the gradient is finite"),), 1),)

    def kernels(self, device: torch.device) -> Kernels:
        return _KEEP_ALL_KERNELS


class SharedMask:
    """The elements that every rank sends in a step. In each of P slices one rank chooses those that are largest in its
    own gradient and residual, and the slices go round: in step t rank r chooses in slice (r + t) mod P.

    An entry that a message does not have, or cannot have, is unused: its value is NaN, and it goes nowhere.

    Args:
        codec: how many elements of a slice, and how values travel.
        numel: elements of all slices.
        span: elements of a slice; the last ones may have fewer.
        group: the ranks.

    Attributes:
        places: the elements, int32 [P, k], ascending; anywhere where unused.
        used: bool [P, k].
        row, rows: this rank's choice, and those of all ranks.
    """

    def __init__(self, codec: TopK, numel: int, span: int, device: torch.device, group: Group) -> None:
        self.numel, self.span, self.rank, self.ranks = numel, span, group.rank, group.size
        self.dtype, self.k, self.kernels = codec.values, codec.k(span), entries_for(device)
        starts = torch.arange(self.ranks, device=device)[:, None] * span
        self.starts, self.lengths = starts.int(), (numel - starts).clamp_(0, span)
        self.spare = (torch.arange(self.ranks * self.k, device=device) % numel).int().view(self.ranks, self.k)
        self.row = torch.zeros(index_bytes(span, self.k), dtype=torch.uint8, device=device)
        self.rows = group.gather_output(self.ranks, len(self.row), device=device)
        self.indices = torch.zeros(self.ranks, self.k, dtype=torch.int32, device=device)
        self.chosen = torch.zeros_like(self.indices[0])
        self.counts = torch.zeros(self.ranks, dtype=torch.int32, device=device)
        #: This rank's values, and those that have arrived.
        self.values, self.numbers = torch.zeros(2, self.ranks, self.k, dtype=torch.float32, device=device)
        self.places, self.used = self.spare, self.indices > 0
        #: Entries that cannot be right, and means that are not finite.
        self.status = torch.zeros(2, dtype=torch.int64, device=device)
        self.keep_all = KeepAll()
        self.finite = torch.zeros(4, dtype=torch.uint8, device=device)
        self.keeping = self.keep_all.workspace(numel, device)
        self.select = codec.raw_entries
        #: By the length of a slice, of which there are two at most.
        self.selecting: dict[int, tuple[Tensor, Workspace]] = {}

    def choose(self, x: ExchangeArgs) -> None:
        """Write this rank's choice to `row`. Changes no state."""
        start = (self.rank + x.step) % self.ranks * self.span
        length = max(0, min(self.span, self.numel - start))
        if not length:
            self.row.zero_()
            return
        if length not in self.selecting:
            wire = torch.zeros(self.select.wire_bytes(length), dtype=torch.uint8, device=self.row.device)
            self.selecting[length] = wire, self.select.workspace(length, wire.device)
        wire, workspace = self.selecting[length]
        end = start + length
        with x.feedback.open():
            copies = {name: vector[start:end].clone() for name, vector in x.feedback.vectors.items()}
        slice_ = FeedbackState(x.feedback.strategy, copies)
        slice_.encode(self.select, x.grad[start:end], wire, x.draw, workspace)
        words, k = wire.view(torch.int32), self.select.k(length)
        # At least one, by which a gradient that is not finite elsewhere is seen.
        self.chosen[:k] = words[1 : 1 + k]
        self.kernels.pack_indices(self.chosen, words[:1].clamp(min=1), 0, self.span, self.row)

    def read(self, step: int) -> None:
        """Read all ranks' choices from `rows`."""
        self.kernels.unpack_indices(self.rows.roll(step, 0), 0, self.span, self.counts, self.indices)
        indices = self.indices
        inside = (indices >= 0) & (indices < self.lengths)
        self.used = sound_places(indices, inside, 0, self.span)
        self.places = torch.where(self.used, indices + self.starts, self.spare)
        self.status[0] += self.counts.clamp(max=self.k).sum() - self.used.sum()

    def keep(self, x: ExchangeArgs) -> None:
        """Let the gradient enter what is kept."""
        x.feedback.encode(self.keep_all, x.grad, self.finite, x.draw, self.keeping)

    def take(self, x: ExchangeArgs, rows: list[Tensor]) -> None:
        """Write this rank's values to rows, one for each slice, and let them leave the residual, but for what rounding
        takes. Where anything of the gradient is not finite, all of them are NaN."""
        sent = self.used & (self.finite.view(torch.int32) == 1)
        values, places = self.values.zero_().masked_fill_(~sent, torch.nan).view(-1), self.places.view(-1)
        if x.feedback.keeps:
            x.feedback.take_at(places, values)
        else:
            values += x.grad[places.long()]
        with x.feedback.open() as residual:
            if self.dtype == torch.float32:
                residual = None  # nothing is rounded
            for row, numbers, at in zip(rows, self.values, self.places, strict=True):
                self.kernels.pack_values(numbers, self.dtype, row, at, None, residual)

    def mean(self, arrived: Tensor) -> Tensor:
        """The mean of all ranks' rows of values, float32 [k], valid until the next call."""
        self.kernels.unpack_values(arrived, self.dtype, self.numbers)
        total = self.numbers[0]
        for row in self.numbers[1:]:
            total += row
        divide(total, self.ranks, total)
        return total

    def write(self, out: Tensor, means: Tensor) -> None:
        """Write the means of all slices from their owners' rows, and zero elsewhere."""
        self.kernels.unpack_values(means, self.dtype, self.numbers)
        out.zero_()
        self.status[1] += write_at(out, self.places.view(-1), self.numbers.view(-1), self.used.view(-1))

    def write_own(self, out: Tensor, arrived: Tensor) -> None:
        """Write the mean of this rank's slice from all ranks' rows, and zero elsewhere."""
        out.zero_()
        places, used = (self.places[self.rank] - self.rank * self.span).clamp_(0, len(out) - 1), self.used[self.rank]
        self.status[1] += write_at(out, places, self.mean(arrived), used)


class MaskedMean(Exchange):
    """Ranks agree on elements first (`SharedMask`), after SCAPE (2026), whose masks come from the optimizer's first
    moments and are a step old: these are of the same step's gradients and residuals, as models learn clearly worse
    from a mask that is one step late. All-gather of indices, all-to-all of values to the owners of slices, all-gather
    of their means: (P-1)·(k/P)·(i+2v) bytes received, i for an index, v for a value, whatever P is.

    Each rank selects among n/P elements alone. What rounding takes from a mean returns to the residual of its owner.
    """

    name, needs, least_ranks = "mask", "TopK", 3

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        values = 0
        if numel:
            assert isinstance(codec, TopK)  # `carries` saw to it
            self.mask = mask = SharedMask(codec, numel, -(-numel // self.world_size), device, group)
            self.to_choosers = self.persistent_gather(mask.rows, mask.row)
            values = value_bytes(mask.k, mask.dtype)
            sent, self.arrived = (self.bytes(self.world_size * values).view(self.world_size, -1) for _ in range(2))
            self.rows = list(sent)
            self.to_owners = self.persistent_swap(self.arrived, sent.view(-1))
        self.row = self.bytes(values + 4 * extra)
        self.received = group.gather_output(self.world_size, len(self.row), device=device)
        self.encoded, self.tail = self.row.split([values, 4 * extra])
        self.means, self.tails = self.received.split([values, 4 * extra], 1)
        self.to_all = self.persistent_gather(self.received, self.row)

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        return isinstance(codec, TopK)

    @classmethod
    def estimate(cls, network: Calibration, what: BucketSpec) -> Estimate:
        numel, ranks, speed, work = what.numel, what.world_size, what.speed, network.work
        assert isinstance(what.codec, TopK)  # `carries` saw to it
        span = -(-numel // ranks)
        k = what.codec.k(span)
        values = (ranks - 1) * value_bytes(k, what.codec.values)
        moves = [
            (network.all_gather, (ranks - 1) * index_bytes(span, k)),
            (network.all_to_all, values),
            (network.all_gather, values),
        ]
        encode = speed.encode * span + work.dense * numel + (work.pack + work.unpack + work.scatter) * ranks * k
        decode = (work.dense + work.unpack) * ranks * k + work.dense * numel + work.scatter * ranks * k
        return network.estimate(cls.name, moves, encode, decode)

    @property
    def bytes_sent(self) -> int:
        if self.world_size == 1:
            return 0
        before = len(self.mask.row) + (self.world_size - 1) * len(self.encoded) if self.numel else 0
        return before + len(self.row)

    @property
    def bytes_received(self) -> int:
        before = len(self.mask.row) + len(self.encoded) if self.numel else 0
        return (self.world_size - 1) * (before + len(self.row))

    def reduce(self, x: ExchangeArgs) -> Stages:
        if self.extra:
            self.tail.view(torch.float32).copy_(x.extra)
        if self.numel:
            mask = self.mask
            yield from masked(mask, self.to_choosers, x, self.rows)
            yield self.to_owners.start()
            mean = mask.mean(self.arrived)
            mask.kernels.pack_values(mean, mask.dtype, self.encoded)
            if mask.dtype != torch.float32:
                told = torch.empty_like(mean)
                mask.kernels.unpack_values(self.encoded[None], mask.dtype, told[None])
                rest = self.world_size * (mean - told)
                unsent = torch.where(mask.used[self.rank], rest, -0.0)
                x.feedback.restore(mask.places[self.rank], unsent)
        yield self.to_all.start()
        if self.numel:
            mask.write(x.out, self.means)
        if self.extra:
            self._decode_extra(self.tails, x.extra)

    def counts(self) -> list[Tensor]:
        return [*super().counts(), self.mask.status] if self.numel else super().counts()


def masked(mask: SharedMask, port: Port, x: ExchangeArgs, rows: list[Tensor]) -> Stages:
    """Agree on a mask by a gather of its rows, and write this rank's values there to rows, one for each slice."""
    mask.choose(x)
    choices = port.start()
    mask.keep(x)
    yield choices
    mask.read(x.step)
    mask.take(x, rows)


class MaskedReduceScatter(ReduceScatter):
    """`MaskedMean` for sharded training: slices are rows, and means stay with their owners.
    (P-1)·k·(i+v) bytes received, of k entries in a row."""

    name, half_of = "masked reduce_scatter", MaskedMean.name

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        if numel:
            assert isinstance(codec, TopK)  # `carries` saw to it
            ranks = self.world_size
            self.mask = SharedMask(codec, ranks * numel, numel, device, group)
            self.to_choosers = self.persistent_gather(self.mask.rows, self.mask.row)

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        return isinstance(codec, TopK)

    def _sizes(self, codec: Codec) -> tuple[int, ...]:
        assert isinstance(codec, TopK)  # `carries` saw to it
        return (value_bytes(codec.k(self.numel), codec.values),) if self.numel else ()

    @property
    def bytes_sent(self) -> int:
        return super().bytes_sent + (len(self.mask.row) if self.numel and self.world_size > 1 else 0)

    @property
    def bytes_received(self) -> int:
        return super().bytes_received + (self.world_size - 1) * (len(self.mask.row) if self.numel else 0)

    def _encode(self, x: ExchangeArgs) -> Stages:
        yield from masked(self.mask, self.to_choosers, x, self.rows)

    def decode(self, out: Tensor) -> None:
        if self.numel:
            self.mask.write_own(out, self.wires[0])

    def counts(self) -> list[Tensor]:
        return [*super().counts(), self.mask.status] if self.numel else super().counts()
