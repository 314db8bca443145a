"""The 2-bit code of MuLoCo (2025), as published, to compare with; in torch, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...compress.backends import Kernels, Workspace
from ...compress.codec import BlockCodec
from ...compress.formats.wire import Field

BLOCK, LEVELS = 4096, 4


class _StatisticalKernels(Kernels):
    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        blocks, numel = -(-len(x) // BLOCK), len(x)
        rows = torch.zeros(blocks, BLOCK, dtype=torch.float32, device="cpu")
        rows.view(-1)[:numel] = x
        counts = torch.full((blocks, 1), float(BLOCK), device="cpu")
        counts[-1] -= blocks * BLOCK - numel
        mean = rows.sum(1, keepdim=True) / counts
        away = rows - mean
        away.view(-1)[numel:] = 0.0
        spread = (away.square().sum(1, keepdim=True) / counts).sqrt()
        # Not finite where a block is not, and then all that it decodes to is NaN.
        codes = (away / spread.clamp(min=1e-38) / 1.5 + 2.0).nan_to_num(0.0).floor().clamp(0, 3).long()
        inside = torch.ones_like(rows)
        inside.view(-1)[numel:] = 0.0
        sums, used = torch.zeros(2, blocks, LEVELS, dtype=torch.float32, device="cpu")
        levels = sums.scatter_add_(1, codes, rows) / used.scatter_add_(1, codes, inside).clamp(min=1.0)
        quads = codes.to(torch.uint8).view(blocks, BLOCK // 4, 4)
        packed = quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6
        wire.view(blocks, -1).copy_(torch.cat([(levels + 0.0 * spread).view(torch.uint8), packed], 1))

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        rows = wire.view(-1, 4 * LEVELS + BLOCK // 4)
        levels = rows[:, : 4 * LEVELS].contiguous().view(torch.float32)
        quads = rows[:, 4 * LEVELS :, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device="cpu") & 3
        out += alpha * levels.gather(1, quads.reshape(len(rows), BLOCK).long()).view(-1)[: len(out)]


_KERNELS = _StatisticalKernels()


@dataclass(frozen=True)
class StatisticalLevels(BlockCodec):
    """Four equal parts of six standard deviations around the mean, each sent as the mean of the elements that are in it
    (statistical levels, as in SparseLoCo and INTELLECT-1): 2.03 bits an element in blocks of 4096."""

    name: ClassVar[str] = "statistical_levels"
    source: ClassVar[str] = "Therien et al. 2025"

    bits: int = 2

    @property
    def block_size(self) -> int:
        return BLOCK

    @property
    def default_feedback(self) -> bool:
        return True

    def fields(self) -> tuple[Field, ...]:
        return (
            Field("levels", "<f4", LEVELS, "the mean of each part"),
            Field("codes", "u1", BLOCK // 4, "levels of four elements in a byte, the first in the lowest bits"),
        )

    def kernels(self, device: torch.device) -> Kernels:
        return _KERNELS
