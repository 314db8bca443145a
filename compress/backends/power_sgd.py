"""What kernels of `PowerSGD` have in common: where matrices lie, and the order of the passes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .codec_types import PowerSGDLike
from .kernels import Kernels, Workspace, divide
from .philox import philox, words_of

#: Elements that travel as they are, of which a kernel takes so many at a time; and columns.
RUN = 256
#: Rows that Mᵀ·P adds up before it adds that to the rest.
ROWS = 64
#: A column of which so little is left is none.
LEAST = 2.0**-13


@dataclass(frozen=True)
class Matrices:
    """Where the pieces of a gradient lie, and their factors.

    Attributes:
        rank: columns of a factor.
        rows: of each piece its start, rows and columns, as of `PowerSGD.pieces`; where its P begins, or, without
            columns, the elements themselves; where its Q begins; how many lines there are before it, which are rows, or
            runs of 256 elements; how many strips, of 256 columns; and how many tiles, of 64 rows and 256 columns.
        table: the same, int64 [pieces + 1, 8] on the device; the last row has the totals.
        whole, left, right: elements of each field of the wire.
        lines, strips, tiles: totals.
        memory: what a backend works in.
    """

    rank: int
    rows: list[list[int]]
    table: Tensor
    whole: int
    left: int
    right: int
    lines: int
    strips: int
    tiles: int
    memory: Workspace

    @staticmethod
    def of(codec: PowerSGDLike, numel: int, device: torch.device) -> Matrices:
        pieces, rank = codec.pieces(numel), codec.rank

        def places(lengths: list[int]) -> list[int]:
            return list(accumulate(lengths, initial=0))

        wholes = places([0 if p.columns else p.rows for p in pieces])
        lefts = places([rank * p.rows if p.columns else 0 for p in pieces])
        rights = places([rank * p.columns for p in pieces])
        lines = places([p.rows if p.columns else -(-p.rows // RUN) for p in pieces])
        strips = places([-(-p.columns // RUN) for p in pieces])
        tiles = places([-(-p.columns // RUN) * -(-p.rows // ROWS) for p in pieces])
        rows = [
            [*piece, left if piece.columns else whole, *places]
            for piece, left, whole, *places in zip(pieces, lefts, wholes, rights, lines, strips, tiles, strict=False)
        ]
        last = [numel, 0, 0, lefts[-1], rights[-1], lines[-1], strips[-1], tiles[-1]]
        # From pinned memory the host does not wait for the copy.
        host = torch.tensor([*rows, last], dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")
        table = torch.empty(host.shape, dtype=torch.int64, device=device).copy_(host, non_blocking=True)
        fields = wholes[-1], lefts[-1], rights[-1]
        return Matrices(rank, rows, table, *fields, lines[-1], strips[-1], tiles[-1], Workspace.on(device))

    def split(self, wire: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The fields of a wire."""
        whole, left, right = wire.view(torch.float32).split([self.whole, self.left, self.right])
        return whole, left, right


class PowerSGDKernels(Kernels):
    """A backend says how a product is made; tensors are flat, float32, and where `Matrices` says."""

    def draw(self, matrices: Matrices, draw: Tensor, start: Tensor) -> None:
        """`start` = S, as Q lies: by a draw that ranks share."""
        words = philox(words_of(draw), -(-matrices.right // 8))
        bits = torch.stack([words & 0xFFFF, words >> 16], dim=2).view(-1)[: matrices.right]
        start.copy_((bits.float() + 0.5) * 2.0**-15 - 1.0)

    @abstractmethod
    def take(self, matrices: Matrices, x: Tensor, whole: Tensor) -> None:
        """`whole` = the elements that are in no matrix, any NaN as the one that is written."""

    @abstractmethod
    def left(self, matrices: Matrices, x: Tensor, start: Tensor, out: Tensor) -> None:
        """`out` = M·S."""

    @abstractmethod
    def orthonormalise(self, matrices: Matrices, left: Tensor) -> None:
        """The columns of each P, in place; NaN where one has a number that is not finite."""

    @abstractmethod
    def right(self, matrices: Matrices, x: Tensor, left: Tensor, out: Tensor) -> None:
        """`out` = Mᵀ·P."""

    @abstractmethod
    def settle(self, matrices: Matrices, left: Tensor, right: Tensor) -> None:
        """NaN in all of P and Q of matrices whose Q is not finite."""

    @abstractmethod
    def follow(self, matrices: Matrices, right: Tensor, start: Tensor) -> None:
        """S = Q, each column of length 1; what has none that is finite stays."""

    @abstractmethod
    def add(self, matrices: Matrices, numbers: Tensor, out: Tensor, alpha: float, fresh: bool, status: Tensor) -> None:
        """`out` += alpha times what the numbers of a wire stand for, or with `fresh` as if `out` were zero; status[1]
        counts what is not finite: matrices, and elements that are in none."""

    @abstractmethod
    def leave(self, matrices: Matrices, left: Tensor, right: Tensor, total: Tensor, residual: Tensor) -> None:
        """`residual` = `total` less what is sent of it, P·Qᵀ or the element itself, where that is finite."""

    def prepare_numel(self, codec: PowerSGDLike) -> int:
        return (2 * int(codec.rank) + 1) ** 2  # as one matrix

    def prepare(self, codec: PowerSGDLike, dtype: torch.dtype, device: torch.device) -> None:
        super().prepare(codec, dtype, device)
        matrices = Matrices.of(codec, self.prepare_numel(codec), device)
        self.follow(matrices, *torch.ones(2, matrices.right, dtype=torch.float32, device=device))

    def workspace(self, codec: PowerSGDLike, numel: int, device: torch.device) -> Workspace:
        workspace = Workspace.on(device)
        self.matrices(codec, numel, device, workspace)
        return workspace

    def matrices(self, codec: PowerSGDLike, numel: int, device: torch.device, workspace: Workspace) -> Matrices:
        found: tuple[Any, int, Matrices] | None = workspace.buffers.get("matrices")
        if found is None or found[:2] != (codec, numel):
            found = codec, numel, Matrices.of(codec, numel, device)
            workspace.buffers["matrices"] = found
        return found[2]

    def encode(self, codec: PowerSGDLike, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        if x.dtype == torch.float32:
            self._encode(codec, x, wire, draw, workspace)
            return
        with workspace.scratch.open(x.numel(), x.device) as total:
            self._encode(codec, total.copy_(x), wire, draw, workspace)

    def encode_feedback(
        self,
        codec: PowerSGDLike,
        grad: Tensor,
        residual: Tensor,
        wire: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        with workspace.scratch.open(grad.numel(), grad.device) as total:
            torch.add(grad, residual, out=total)
            matrices = self._encode(codec, total, wire, draw, workspace)
            _, left, right = matrices.split(wire)
            self.leave(matrices, left, right, total, residual)

    def decode_add(self, codec: PowerSGDLike, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        matrices = self.matrices(codec, out.numel(), out.device, workspace)
        self.add(matrices, wire.view(torch.float32), out, alpha, False, workspace.status)

    def decode_mean(self, codec: PowerSGDLike, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        matrices = self.matrices(codec, out.numel(), out.device, workspace)
        wide = nullcontext(out) if out.dtype == torch.float32 else workspace.scratch.open(out.numel(), out.device)
        with wide as total:
            for rank, wire in enumerate(wires[0]):
                self.add(matrices, wire.view(torch.float32), total, 1.0, rank == 0, workspace.status)
            divide(total, len(wires[0]), out)

    def _encode(
        self, codec: PowerSGDLike, total: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> Matrices:
        assert draw is not None
        matrices = self.matrices(codec, total.numel(), total.device, workspace)
        whole, left, right = matrices.split(wire)
        self.take(matrices, total, whole)
        if matrices.left:
            with workspace.scratch.open(matrices.right, total.device) as start:
                self.draw(matrices, draw, start)
                self.left(matrices, total, start, left)
            self.orthonormalise(matrices, left)
            self.right(matrices, total, left, right)
            self.settle(matrices, left, right)
        return matrices
