"""Messages through an entropy coder, zstandard: they are as long as what they say."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .ports import PointToPoint, VariableMessage, Work

#: In front of a message: the bytes of its code, int64; 0: it comes as it is.
HEAD_BYTES = 8
#: A code of more than this share of the bytes does not pay, at 100 Mbit/s and with a core that codes 500 MB/s. Messages
#: then go as they are, and are coded again after so many.
WORTH, RETRY = 0.96, 64
#: The lowest level that codes literals by Huffman. Higher ones look for repetitions, of which there are none.
LEVEL = 1

#: Of a device.
NOT_CODED = "entropy_coding=True: gradients are on {device}, where the lengths of messages are fixed: leave it out"


class _Contexts(threading.local):
    """zstandard's contexts, of a megabyte or so, of each thread that uses them."""

    def __init__(self) -> None:
        zstandard: Any = importlib.import_module("zstandard")
        self.compressor, self.decompressor = zstandard.ZstdCompressor(level=LEVEL), zstandard.ZstdDecompressor()
        self.error = zstandard.ZstdError


#: Made when it is first called: most processes do without the package.
_contexts = cache(_Contexts)


def check_available() -> None:
    """Raise RuntimeError if the package is not there."""
    try:
        importlib.import_module("zstandard")
    except ImportError as error:
        raise RuntimeError(
            "entropy_coding=True needs the package zstandard: pip install 'gradwire[zstd]', on every rank"
        ) from error


class CodedMessage:
    """A `PersistentMessage` between hosts whose rows are coded where that makes them shorter.

    Each rank decides by itself which of its messages are, from the last one that it has coded.

    Args:
        group, received, sent: `PersistentMessage`'s. One tensor may go to several ranks: it is coded once.
    """

    def __init__(self, group: PointToPoint, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        self._group, self._received, self._sent = group, received, sent
        longest = HEAD_BYTES + max(part.numel() for part in (*received, *sent))
        self._message = VariableMessage(group, longest)
        #: What goes to others, and memory for its messages.
        self._rows = {id(row): row for rank, row in enumerate(sent) if rank != group.rank}
        self._room = {
            key: torch.empty(HEAD_BYTES + len(row), dtype=torch.uint8, device="cpu") for key, row in self._rows.items()
        }
        #: Messages that will not be coded.
        self._plain = 0
        self._sent_less = self._received_less = 0

    @property
    def saved(self) -> tuple[int, int]:
        """Bytes by which the last messages were shorter than rows: those sent, each row once, and those received."""
        return self._sent_less, self._received_less

    def post_receives(self) -> None:
        """As a `PersistentMessage`'s."""
        self._message.post_receives()

    def start(self) -> Work:
        """As a `PersistentMessage`'s."""
        mine = self._group.rank
        self._received[mine].copy_(self._sent[mine])
        coded = {key: self._code(row, self._room[key]) for key, row in self._rows.items()}
        rows = sum(map(len, self._rows.values()))
        self._sent_less = rows - sum(map(len, coded.values()))
        self._plain = self._plain - 1 if self._plain else RETRY * (self._sent_less < (1 - WORTH) * rows)
        nothing = self._sent[mine][:0]
        messages = [nothing if rank == mine else coded[id(row)] for rank, row in enumerate(self._sent)]
        return _Decoded(self, self._message.send(messages))

    def _code(self, row: Tensor, room: Tensor) -> Tensor:
        """A row's message, in its memory; of an empty one an empty one."""
        if not len(row):
            return room[:0]
        code = b"" if self._plain else _contexts().compressor.compress(row.numpy())
        shorter = 0 < len(code) < len(row)
        room[:HEAD_BYTES].view(torch.int64).fill_(len(code) if shorter else 0)
        if not shorter:
            room[HEAD_BYTES:].copy_(row)
            return room
        end = HEAD_BYTES + len(code)
        room.numpy()[HEAD_BYTES:end] = np.frombuffer(code, np.uint8)
        return room[:end]

    def decode(self) -> None:
        """Write what has arrived to the memory of the rows."""
        self._received_less = 0
        for rank, (message, row) in enumerate(zip(self._message.received, self._received, strict=True)):
            if rank == self._group.rank or not len(row):
                continue
            length = int.from_bytes(message[:HEAD_BYTES].numpy(), sys.byteorder, signed=True)  # at any address
            if length == 0:
                row.copy_(message[HEAD_BYTES : HEAD_BYTES + len(row)])
            elif not _decompress(message[HEAD_BYTES : HEAD_BYTES + length], row):
                raise RuntimeError(
                    f"rank {self._group.ranks[rank]} sent {length} bytes that are no code of {len(row)}: all ranks "
                    "need the same versions of gradwire and of zstandard"
                )
            self._received_less += len(row) - HEAD_BYTES - (length or len(row))


class _Decoded:
    """The messages of one start, decoded once they have arrived."""

    def __init__(self, port: CodedMessage, messages: Work) -> None:
        self._port, self._messages = port, messages

    def wait(self) -> None:
        """May be called again."""
        self._messages.wait()
        self._port.decode()


def _decompress(code: Tensor, out: Tensor) -> bool:
    """Fill a row with what a code says; False: it says something of another length, or nothing."""
    target = out.numpy()
    try:
        with _contexts().decompressor.stream_reader(code.numpy()) as reader:
            return bool(reader.readinto(target) == len(target) and not reader.read(1))
    except _contexts().error:
        return False
