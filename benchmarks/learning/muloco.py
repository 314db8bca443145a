"""The 2-bit code of MuLoCo (2025), as published, to compare with; in torch, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...compress.backends import Kernels, Workspace
from ...compress.codec import BlockCodec
from ...compress.formats.wire import Field

BLOCK = 4096
#: Levels of a block, in standard deviations from its mean: the middles of four equal parts of six.
LEVELS = (-2.25, -0.75, 0.75, 2.25)


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
        codes = (away / spread.clamp(min=1e-38) / 1.5 + 2.0).nan_to_num(0.0).floor().clamp(0, 3).to(torch.uint8)
        quads = codes.view(blocks, BLOCK // 4, 4)
        packed = quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6
        moments = torch.cat([mean, spread], 1).contiguous().view(torch.uint8)
        wire.view(blocks, -1).copy_(torch.cat([moments, packed], 1))

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        rows = wire.view(-1, 8 + BLOCK // 4)
        mean, spread = rows[:, :8].contiguous().view(torch.float32).split(1, 1)
        quads = rows[:, 8:, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device="cpu") & 3
        levels = torch.tensor(LEVELS, dtype=torch.float32, device="cpu")
        values = mean + spread * levels[quads.reshape(len(rows), BLOCK).long()]
        out += alpha * values.view(-1)[: len(out)]


_KERNELS = _StatisticalKernels()


@dataclass(frozen=True)
class StatisticalLevels(BlockCodec):
    """Four levels over six standard deviations of each block of 4096 elements: 2.02 bits an element."""

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
            Field("moments", "<f4", 2, "mean and standard deviation"),
            Field("codes", "u1", BLOCK // 4, "levels of four elements in a byte, the first in the lowest bits"),
        )

    def kernels(self, device: torch.device) -> Kernels:
        return _KERNELS
