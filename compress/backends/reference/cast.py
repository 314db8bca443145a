"""Cast and Identity: the elements themselves."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import Kernels, Workspace
from ..codec_types import CastLike
from .arithmetic import add, canonical_nan, numbers


class Cast(Kernels):
    canonical: ClassVar[dict[torch.dtype, int]] = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}

    def encode(self, codec: CastLike, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        half = x.float().to(codec.dtype)
        bits = half.view(torch.uint16).numpy().copy()
        bits[half.isnan().numpy()] = self.canonical[codec.dtype]
        target = wire.numpy().view("<u2")
        target[len(bits) :] = 0
        target[: len(bits)] = bits

    def decode_add(self, codec: CastLike, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        values = wire.view(codec.dtype)[: out.numel()].float().numpy()
        workspace.status[1] += int((~np.isfinite(values)).sum())
        add(out, alpha, values)


class Identity(Kernels):
    def encode(self, codec: CastLike, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        wire.numpy().view("<f4")[:] = canonical_nan(numbers(x))

    def decode_add(self, codec: CastLike, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        values = wire.numpy().view("<f4")
        workspace.status[1] += int((~np.isfinite(values)).sum())
        add(out, alpha, values)
