"""Messages through an entropy coder, zstandard: they are as long as what they say."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
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

#: zstandard's contexts, of a megabyte or so, which one thread at a time may use.
_contexts = threading.local()


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
        others = [row for rank, row in enumerate(sent) if rank != group.rank]
        #: Memory for messages, by the tensor that they are of.
        self._room = {id(row): torch.empty(HEAD_BYTES + len(row), dtype=torch.uint8, device="cpu") for row in others}
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
        coded: dict[int, Tensor] = {}
        for rank, row in enumerate(self._sent):
            if rank != mine and id(row) not in coded:
                coded[id(row)] = self._code(row, self._room[id(row)])
        rows = sum(len(self._room[key]) - HEAD_BYTES for key in coded)
        self._sent_less = rows - sum(map(len, coded.values()))
        self._plain = self._plain - 1 if self._plain else RETRY * (self._sent_less < (1 - WORTH) * rows)
        nothing = self._sent[mine][:0]
        messages = [nothing if rank == mine else coded[id(row)] for rank, row in enumerate(self._sent)]
        return _Decoded(self, self._message.send(messages))

    def _code(self, row: Tensor, room: Tensor) -> Tensor:
        """A row's message, in its memory; of an empty one an empty one."""
        if not len(row):
            return room[:0]
        code = b"" if self._plain else _zstandard().compress(row.numpy())
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
            elif not 0 < length < len(row) or not _decompress(message[HEAD_BYTES : HEAD_BYTES + length], row):
                raise RuntimeError(
                    f"rank {self._group.ranks[rank]} sent {length} bytes that are no code of {len(row)}: all ranks "
                    "need the same versions of gradwire and of zstandard"
                )
            self._received_less += len(row) - HEAD_BYTES - (length or len(row))


class _Decoded:
    """The messages of one start, decoded once they have arrived."""

    def __init__(self, port: CodedMessage, messages: Work) -> None:
        self._messages = messages
        self._port: CodedMessage | None = port

    def wait(self) -> None:
        self._messages.wait()
        if self._port is not None:
            self._port.decode()
            self._port = None


def _decompress(code: Tensor, out: Tensor) -> bool:
    """Fill a row with what a code says; False: it says something of another length, or nothing."""
    errors = importlib.import_module("zstandard").ZstdError
    target = out.numpy()
    try:
        with _zstandard(decodes=True).stream_reader(code.numpy()) as reader:
            return bool(reader.readinto(target) == len(target) and not reader.read(1))
    except errors:
        return False


def _zstandard(decodes: bool = False) -> Any:
    """This thread's context."""
    name = "decompressor" if decodes else "compressor"
    if not hasattr(_contexts, name):
        zstandard = importlib.import_module("zstandard")
        setattr(_contexts, name, zstandard.ZstdDecompressor() if decodes else zstandard.ZstdCompressor(level=LEVEL))
    return getattr(_contexts, name)
