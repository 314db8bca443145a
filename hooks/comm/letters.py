"""Entries in one message from each rank to each, however many: what a message holds stands at its head.

So no rank has to hear how much will come before it can make room for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ...compress.backends.sparse import Pieces
from ...compress.entries import index_bytes, value_bytes
from .entries import Carrier, Entries
from .group import Group, Work


class Letters:
    """One stage of messages, step after step: a head of int32 numbers, float32 numbers that go beside, and entries:
    their indices, then their values.

    Args:
        name: of the memory for what is sent, where a carrier has several.
        carrier: of entries on the host.
        group: its ranks, by a channel for these messages alone.
        k: the most entries in a message.
        words: numbers in a head.
        beside: how many numbers come beside from each rank.
        ahead: as of a `Port`.
    """

    def __init__(
        self,
        name: str,
        carrier: Carrier,
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
        self.port = group.letter_port(max(self._heads) + longest, ahead)

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
