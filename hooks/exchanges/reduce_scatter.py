"""All-to-all of encoded rows to their owners, who sum them: the first half of `TwoPass`."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress.codec import Codec
from ...compress.feedback.base import FeedbackState
from ...compress.feedback.residual import NOTHING
from ..comm.group import Group
from ..comm.ports import Stages
from .base import Exchange, ExchangeArgs

#: A digest in front of each row, by which ranks compare what they send: two words of 32 bits.
HEAD_BYTES = 8


class ReduceScatter(Exchange):
    """A reduce-scatter of P encoded rows, for sharded training: each rank gets the mean of its own row. w·(P-1) bytes
    received, with rows of w bytes.

    Every row is a wire of its own, so any codec serves; that takes P calls to encode. The mean stays with its owner, so
    it is not encoded again.

    `ExchangeArgs` has P rows of `numel` in `grad` and in `feedback`, and one in `out`, of any dtype that codecs take;
    `extra` has P rows of `extra`, of which the first becomes the mean of this rank's. `owned` is empty.

    Args:
        numel, extra: of one row.
    """

    name = "reduce_scatter"
    #: The argument `exchange` that asks for it: the exchange that it is half of.
    half_of: ClassVar[str] = "auto"

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        ranks = self.world_size
        sizes = self._sizes(codec)
        self.row_bytes = HEAD_BYTES + sum(sizes) + 4 * extra
        sent, arrived = (self.bytes(ranks * self.row_bytes).view(ranks, self.row_bytes) for _ in range(2))
        self.port = self.persistent_swap(arrived, sent)
        self.heads, self.heard = sent[:, :HEAD_BYTES].view(torch.int32), arrived[:, :HEAD_BYTES].view(torch.int32)
        *parts, tail = arrived[:, HEAD_BYTES:].split((*sizes, 4 * extra), 1)
        self.wires, self.tails = tuple(parts), tail
        self.rows = [row[HEAD_BYTES : HEAD_BYTES + sum(sizes)] for row in sent]
        self.extras = sent[:, self.row_bytes - 4 * extra :].view(torch.float32) if extra else None
        if numel:
            self.workspaces.append(self.workspace(codec, numel))
        # Each row has a draw of its own, or elements at the same place of two rows would share their noise.
        self.draws = torch.zeros(ranks, 3, dtype=torch.int64, device=device)
        self.streams = torch.zeros_like(self.draws)
        self.streams[:, 2] = torch.arange(ranks, device="cpu")
        self._kept, self._kept_rows = NOTHING, [NOTHING] * ranks
        self._said = ""

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        return True

    def _sizes(self, codec: Codec) -> tuple[int, ...]:
        """Bytes of each part of a row's wire."""
        return codec.part_bytes(self.numel) if self.numel else ()

    @property
    def bytes_sent(self) -> int:
        return (self.world_size - 1) * self.row_bytes

    @property
    def bytes_received(self) -> int:
        return (self.world_size - 1) * self.row_bytes

    def say(self, what: str) -> None:
        """Set the text whose digest travels in front of the rows, for `unequal` to compare."""
        if what != self._said:
            digest = hashlib.blake2b(what.encode(), digest_size=HEAD_BYTES).digest()
            self.heads.copy_(torch.frombuffer(bytearray(digest), dtype=torch.int32), non_blocking=True)
            self._said = what

    def unequal(self) -> Tensor:
        """True if another rank's text differed in the last step: bool []."""
        return (self.heard != self.heads).any()

    def reduce(self, x: ExchangeArgs) -> Stages:
        if self.numel:
            yield from self._encode(x)
        if self.extras is not None:
            self.extras.copy_(x.extra.view(self.world_size, self.extra))
        yield self.port.start()
        yield from self._after(x)
        self.decode(x.out)
        if self.extra:
            self._decode_extra(self.tails, x.extra[: self.extra])

    def _encode(self, x: ExchangeArgs) -> Stages:
        """Write the wires of all rows."""
        if self.codec.stochastic:
            torch.add(self.streams, x.draw, out=self.draws)
        grads = x.grad.view(self.world_size, self.numel)
        with x.feedback.open():
            for kept, grad, wire, draw in zip(self._rows_of(x.feedback), grads, self.rows, self.draws, strict=True):
                kept.encode(self.codec, grad, wire, draw, self.workspaces[-1])
        yield from ()

    def _after(self, x: ExchangeArgs) -> Stages:
        """Stages once the rows have arrived."""
        yield from ()

    def decode(self, out: Tensor) -> None:
        """Write the mean of this rank's row, as it arrived last, to `out`."""
        if self.numel:
            self.codec.decode_mean(self.wires, out, self.workspaces[-1])

    def _rows_of(self, kept: FeedbackState) -> list[FeedbackState]:
        if (
            kept is not self._kept or kept.low_precision
        ):  # vectors in low precision are opened at another address each time
            self._kept = kept
            self._kept_rows = [
                FeedbackState(
                    kept.strategy, {name: flat.view(self.world_size, -1)[row] for name, flat in kept.vectors.items()}
                )
                for row in range(self.world_size)
            ]
        return self._kept_rows


def times_mean(op: Any, ranks: int, factor: float | None = None) -> float:
    """The factor from the mean to the result of a reduction.

    Args:
        factor: PREMUL_SUM's, where torch is too old to tell.

    Raises:
        ValueError: `op` is neither a sum nor a mean.
    """
    op = op if isinstance(op, dist.ReduceOp) else dist.ReduceOp(op)
    if op == dist.ReduceOp.AVG:
        return 1.0
    if op == dist.ReduceOp.SUM:
        return float(ranks)
    factor = getattr(op, "factor", factor)
    if op == dist.ReduceOp.PREMUL_SUM and isinstance(factor, float):
        return ranks * factor
    raise ValueError(f"op={op}: a compressed reduce-scatter takes SUM, AVG, and PREMUL_SUM by a number")
