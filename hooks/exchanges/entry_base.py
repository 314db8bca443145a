"""The base of exchanges that move entries one by one, and their messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ...compress.backends import all_finite
from ...compress.backends.sparse import Pieces
from ...compress.codec import Codec
from ...compress.feedback.base import FeedbackState
from ...compress.formats.entries import index_bytes, split_raw, value_bytes
from ...compress.sparse_codec import SparseCodec
from ..comm.entry_exchange import Entries, EntryExchanger, fill
from ..comm.group import Group
from ..comm.ports import Stages, Work
from ..network.cost import Calibration, Estimate, Shape, expected_union
from .base import BucketSpec, Exchange, ExchangeArgs


def entries_of(what: BucketSpec) -> Shape:
    """The entries of a sparse codec's bucket, for estimates."""
    codec = what.codec
    assert isinstance(codec, SparseCodec)  # `carries` saw to it
    k = codec.k(what.numel)
    union = what.union or expected_union(what.numel, k, what.world_size)
    return Shape(what.numel, k, what.world_size, min(max(union, k), what.numel), codec.value_dtype)


def with_selection(entries: Estimate, network: Calibration, what: BucketSpec) -> Estimate:
    """The cost of moving entries, and of the codec's selection before and the vector that they are written to after."""
    encode, decode = entries.encode + what.speed.encode * what.numel, entries.decode + network.work.dense * what.numel
    return replace(entries, encode=encode, decode=decode)


class SelectingExchange(Exchange):
    """The codec selects at most `k` entries, which travel otherwise than as its wire.

    Attributes:
        wire: the selection, as `split_raw` reads it.
        counted: entries skipped, and means that were not finite.
    """

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        if not isinstance(codec, SparseCodec):
            raise TypeError(f"{codec} does not select entries, which {type(self).__name__} exchanges")
        self.select, self.dtype = codec.raw_entries, codec.value_dtype
        self.k = codec.k(numel) if numel else 0
        self.wire = self.bytes(self.select.wire_bytes(numel) if numel else 0)
        if numel:
            self.workspaces.append(self.workspace(self.select, numel))
        self.counted = torch.zeros(2, dtype=torch.int64, device=device)

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        return isinstance(codec, SparseCodec)

    def counts(self) -> list[Tensor]:
        return [self.counted]


class EntryExchange(SelectingExchange):
    """Entries travel one by one, in messages as long as they are."""

    syncs_host = True

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.exchanger = EntryExchanger(max(1, numel), self.dtype, device, group)
        self.moved = (0, 0)
        #: Entries in the union of the ranks', in the last step; 0 before it is known.
        self.union_size = 0

    @property
    def bytes_sent(self) -> int:
        return self.exchanger.sent - self.moved[0]

    @property
    def bytes_received(self) -> int:
        return self.exchanger.received - self.moved[1]

    def reduce(self, x: ExchangeArgs) -> Stages:
        exchanger = self.exchanger
        self.moved = exchanger.sent, exchanger.received
        if self.numel:
            x.feedback.encode(self.select, x.grad, self.wire, x.draw, self.workspaces[1])
            entries = Entries(*split_raw(self.wire, self.k))
            result = yield from self.combine(entries, x.extra, x.feedback)
            fill(x.out, result)
            self.counted[0] = exchanger.skipped
            self.counted[1] += (~result.values.isfinite()).sum()
        elif self.extra:
            yield from exchanger.all_reduce(x.extra)
        if self.extra:
            x.extra.mul_(1.0 / self.world_size)
            self.counted[1] += ~all_finite(x.extra)

    @abstractmethod
    def combine(self, entries: Entries, extra: Tensor, feedback: FeedbackState) -> Stages:
        """Stages: the means of all ranks' entries, which they return; `extra` becomes its sum."""

    def union_of(self, out: Tensor) -> Tensor | None:
        return torch.tensor(self.union_size, device="cpu")


class EntryMessages:
    """One stage of messages, step after step. A message has a head of int32 numbers, extra float32 numbers, and
    entries: indices, then values. Receivers need not know its length beforehand.

    Args:
        name: of the exchanger's buffer for messages to send.
        exchanger: of entries on the host.
        group: its ranks, by a channel for these messages alone.
        k: the most entries in a message.
        words: numbers in a head.
        extras: the extra numbers in the message from each rank.
    """

    def __init__(
        self, name: str, exchanger: EntryExchanger, group: Group, k: int, words: int, extras: Sequence[int]
    ) -> None:
        self._name, self._exchanger, self._words, self._extras, self._most = name, exchanger, words, extras, k
        #: Bytes before the entries in each rank's message.
        self._heads = [4 * (words + count) for count in extras]
        # Fewer indices, or a smaller range, may take one word more, as each part is padded to whole words.
        longest = index_bytes(exchanger.numel, k) + 4 + value_bytes(k * exchanger.width, exchanger.dtype)
        self.port = group.variable_message(max(self._heads) + longest)

    def write(
        self, heads: Sequence[Sequence[int]], extras: Sequence[Tensor], entries: Entries, pieces: Pieces
    ) -> Sequence[Tensor]:
        """A message with each piece of the entries; valid until the next are written."""
        exchanger, indices, values = self._exchanger, pieces.index_sizes(), self._exchanger.value_sizes(pieces)
        before = [4 * (self._words + numbers.numel()) for numbers in extras]
        sizes = [sum(size) for size in zip(before, indices, values, strict=True)]
        begins = list(accumulate(sizes, initial=0))
        memory = exchanger.pool(self._name, begins[-1])
        words = memory.numpy().view(np.int32)
        for begin, head, numbers in zip(begins, heads, extras, strict=False):
            end = begin // 4 + len(head)
            words[begin // 4 : end] = head
            if numbers.numel():
                words[end : end + numbers.numel()] = numbers.numpy().view(np.int32)
        begins = [sum(size) for size in zip(begins, before, strict=False)]
        exchanger.kernels.pack_index_pieces(entries.indices, pieces, memory, begins)
        begins = [sum(size) for size in zip(begins, indices, strict=True)]
        exchanger.pack_values(entries, pieces, memory, begins=begins)
        self._written = memory, begins
        return memory.split(sizes)

    def rounded(self, pieces: Pieces) -> Tensor:
        """The values written last, rounded as they will arrive."""
        exchanger = self._exchanger
        rounded, (memory, begins) = exchanger.pool.entries("rounded", sum(pieces.counts), exchanger.row), self._written
        exchanger.unpack_values(memory, pieces, rounded, begins)
        return rounded.values

    def swap(self, messages: Sequence[Tensor]) -> Work:
        """Start: message r goes to rank r."""
        own = messages[self._exchanger.rank].numel()
        self._exchanger.count(sum(message.numel() for message in messages) - own, 0)
        return self.port.send(messages)

    def share(self, message: Tensor) -> Work:
        """Start: the message goes to all ranks."""
        self._exchanger.count(message.numel(), 0)
        return self.port.send([message] * self._exchanger.world_size)

    def heads(self) -> list[list[int]]:
        """The head of each rank's message."""
        heads = self.port.received.numpy()[:, : 4 * self._words].copy()
        numbers: list[list[int]] = heads.view(np.int32).tolist()
        return numbers

    def read(self, pieces: Pieces, into: str) -> tuple[Sequence[Tensor], Entries]:
        """The extra numbers from each rank, where they arrived; and the entries, piece r from rank r.

        Args:
            into: name of the buffer for the entries.
        """
        exchanger, rows = self._exchanger, self.port.received
        # They come from other ranks: a negative one would have no layout, and a large one no room.
        if not all(0 <= count <= self._most for count in pieces.counts):
            raise RuntimeError(
                f"messages of {list(pieces.counts)} entries cannot be right: each rank sends {self._most} at most. "
                "All ranks need the same version of gradwire"
            )
        indices, values = pieces.index_sizes(), exchanger.value_sizes(pieces)
        sizes = [sum(size) for size in zip(self._heads, indices, values, strict=True)]
        exchanger.count(0, sum(sizes) - sizes[exchanger.rank])
        entries, wire = exchanger.pool.entries(into, sum(pieces.counts), exchanger.row), rows.view(-1)
        begins = [rank * rows.shape[1] + head for rank, head in enumerate(self._heads)]
        exchanger.kernels.unpack_index_pieces(wire, pieces, entries.indices, begins)
        begins = [begin + size for begin, size in zip(begins, indices, strict=True)]
        exchanger.unpack_values(wire, pieces, entries, begins)
        if not any(self._extras):
            return [torch.empty(0, device="cpu")] * len(rows), entries
        numbers = [row[4 * self._words : head].view(torch.float32) for row, head in zip(rows, self._heads, strict=True)]
        return numbers, entries
