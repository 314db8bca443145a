"""What the exchanges of entries share: a codec that selects, and messages that say at their head what they hold."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ...compress.backends.sparse import Pieces
from ...compress.codec import Codec, SparseCodec
from ...compress.feedback.base import Kept
from ...compress.formats.entries import index_bytes, plain_entries, value_bytes
from ..comm.entry_exchange import Entries, EntryExchanger, fill
from ..comm.group import Group
from ..comm.pipeline import Stages
from ..comm.ports import Work
from ..network.cost import Shape, expected_union
from .base import BucketSpec, Exchange, ExchangeArgs, all_finite


class EntryExchange(Exchange):
    """The codec selects, and its entries travel one by one, not as a wire."""

    syncs_host = True

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        if not isinstance(codec, SparseCodec):
            raise TypeError(f"{codec} does not select entries, which {type(self).__name__} exchanges")
        self.select = codec.plain
        self.carrier = EntryExchanger(max(1, numel), codec.value_dtype, device, group)
        self.k = codec.k(numel) if numel else 0
        self.wire = self.bytes(self.select.wire_bytes(numel) if numel else 0)
        if numel:
            self.workspaces.append(self.select.workspace(numel, device))
        self.moved = (0, 0)
        self.counted = torch.zeros(2, dtype=torch.int64, device=device)
        #: Entries in the union of the ranks', in the last step; 0 before it is known.
        self.union_size = 0

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        return isinstance(codec, SparseCodec)

    @staticmethod
    def shape(what: BucketSpec) -> Shape:
        """What an estimate needs to know."""
        codec = what.codec
        assert isinstance(codec, SparseCodec)  # `carries` saw to it
        k = codec.k(what.numel)
        union = what.union or expected_union(what.numel, k, what.world_size)
        return Shape(what.numel, k, what.world_size, min(max(union, k), what.numel), codec.value_dtype)

    @property
    def bytes_sent(self) -> int:
        return self.carrier.sent - self.moved[0]

    @property
    def bytes_received(self) -> int:
        return self.carrier.received - self.moved[1]

    def reduce(self, x: ExchangeArgs) -> Stages:
        carrier = self.carrier
        self.moved = carrier.sent, carrier.received
        if self.numel:
            x.feedback.encode(self.select, x.grad, self.wire, x.draw, self.workspaces[1])
            entries = Entries(*plain_entries(self.wire, self.k))
            result = yield from self.bring_together(entries, x.extra, x.feedback)
            fill(x.out, result)
            self.counted[0] = carrier.skipped
            self.counted[1] += (~result.values.isfinite()).sum()
        elif self.extra:
            yield from carrier.all_reduce(x.extra)
        if self.extra:
            x.extra.mul_(1.0 / self.world_size)
            self.counted[1] += ~all_finite(x.extra)

    @abstractmethod
    def bring_together(self, entries: Entries, extra: Tensor, feedback: Kept) -> Stages:
        """Bring this rank's entries together with the others', to means, which the stages return; sum `extra`."""

    def union_of(self, out: Tensor) -> Tensor | None:
        return torch.tensor(self.union_size, device="cpu")

    def counts(self) -> list[Tensor]:
        return [self.counted]


class Letters:
    """One stage of messages, step after step: a head of int32 numbers, float32 numbers that go beside, and entries:
    their indices, then their values. No rank has to hear how much will come before it can make room for it.

    Args:
        name: of the memory for what is sent, where a carrier has several.
        carrier: of entries on the host.
        group: its ranks, by a channel for these messages alone.
        k: the most entries in a message.
        words: numbers in a head.
        beside: how many numbers come beside from each rank.
        ahead: as of a `PersistentMessage`.
    """

    def __init__(
        self,
        name: str,
        carrier: EntryExchanger,
        group: Group,
        k: int,
        words: int,
        beside: Sequence[int],
        ahead: int = 2,
    ) -> None:
        self._name, self._carrier, self._words, self._beside = name, carrier, words, beside
        #: Where entries begin in each rank's message.
        self._heads = [4 * (words + count) for count in beside]
        # A list of fewer indices, or below a lower number, may take a word more, as each of its parts ends with one.
        longest = index_bytes(carrier.numel, k) + 4 + value_bytes(k * carrier.width, carrier.dtype)
        self.port = group.variable_message(max(self._heads) + longest, ahead)

    def write(
        self, heads: Sequence[Sequence[int]], beside: Sequence[Tensor], entries: Entries, pieces: Pieces
    ) -> Sequence[Tensor]:
        """A message of each piece of the entries, until the next are written."""
        carrier, indices, values = self._carrier, pieces.index_sizes(), self._carrier.value_sizes(pieces)
        before = [4 * (self._words + numbers.numel()) for numbers in beside]
        sizes = [sum(size) for size in zip(before, indices, values, strict=True)]
        begins = list(accumulate(sizes, initial=0))
        memory = carrier.room(self._name, begins[-1])
        words = memory.numpy().view(np.int32)
        for begin, head, numbers in zip(begins, heads, beside, strict=False):
            end = begin // 4 + len(head)
            words[begin // 4 : end] = head
            if numbers.numel():
                words[end : end + numbers.numel()] = numbers.numpy().view(np.int32)
        begins = [sum(size) for size in zip(begins, before, strict=False)]
        carrier.kernels.pack_index_pieces(entries.indices, pieces, memory, begins)
        begins = [sum(size) for size in zip(begins, indices, strict=True)]
        carrier.pack_values(entries, pieces, memory, begins=begins)
        self._written = memory, begins
        return memory.split(sizes)

    def rounded(self, pieces: Pieces) -> Tensor:
        """The values that were written last, as they will arrive."""
        carrier = self._carrier
        told, (memory, begins) = carrier.room.entries("told", sum(pieces.counts), carrier.row), self._written
        carrier.unpack_values(memory, pieces, told, begins)
        return told.values

    def swap(self, letters: Sequence[Tensor]) -> Work:
        """Start: letter r goes to rank r."""
        own = letters[self._carrier.rank].numel()
        self._carrier.count(sum(letter.numel() for letter in letters) - own, 0)
        return self.port.send(letters)

    def share(self, letter: Tensor) -> Work:
        """Start: this rank's letter goes to all."""
        self._carrier.count(letter.numel(), 0)
        return self.port.send([letter] * self._carrier.world_size)

    def heads(self) -> list[list[int]]:
        """What has arrived from each rank."""
        heads = self.port.received.numpy()[:, : 4 * self._words].copy()
        numbers: list[list[int]] = heads.view(np.int32).tolist()
        return numbers

    def read(self, pieces: Pieces, into: str) -> tuple[Sequence[Tensor], Entries]:
        """What has arrived beside, from each rank, where it lies; and the entries, of which piece r is rank r's.

        Args:
            into: name of the memory for the entries.
        """
        carrier, rows = self._carrier, self.port.received
        indices, values = pieces.index_sizes(), carrier.value_sizes(pieces)
        sizes = [sum(size) for size in zip(self._heads, indices, values, strict=True)]
        carrier.count(0, sum(sizes) - sizes[carrier.rank])
        if max(sizes) > rows.shape[1]:
            raise RuntimeError(f"messages of {sizes} bytes cannot be right: at most {rows.shape[1]} were to come")
        entries, wire = carrier.room.entries(into, sum(pieces.counts), carrier.row), rows.view(-1)
        begins = [rank * rows.shape[1] + head for rank, head in enumerate(self._heads)]
        carrier.kernels.unpack_index_pieces(wire, pieces, entries.indices, begins)
        begins = [begin + size for begin, size in zip(begins, indices, strict=True)]
        carrier.unpack_values(wire, pieces, entries, begins)
        if not any(self._beside):
            return [torch.empty(0, device="cpu")] * len(rows), entries
        numbers = [row[4 * self._words : head].view(torch.float32) for row, head in zip(rows, self._heads, strict=True)]
        return numbers, entries
