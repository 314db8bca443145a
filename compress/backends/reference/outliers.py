"""Outliers: the largest magnitudes beside another code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import Kernels, Workspace
from ..outliers import inner_kernels
from .arithmetic import F32
from .entries import Entries
from .topk import TopK


class Outliers(Kernels):
    """Args: the kernels of all codecs."""

    entries = Entries()

    def __init__(self, kernels: Mapping[str, Kernels]) -> None:
        self.codecs = kernels

    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        numel, k = x.numel(), codec.k(x.numel())
        indices, values, blocks = wire.split(codec.part_bytes(numel))
        row = torch.zeros(1 + k, dtype=torch.int32, device="cpu")
        found = torch.zeros(k, dtype=torch.float32, device="cpu")
        TopK().encode_raw(codec.selection, x, None, row, found, None, workspace)
        self.entries.pack_indices(row[1:], row[:1], 0, numel, indices)
        self.entries.pack_values(found, codec.values, values)
        rest, used = x.float().clone(), int(row[0])
        rest[row[1 : 1 + used][found[:used].isfinite()].long()] = 0.0
        inner_kernels(self.codecs, codec.inner, x.device).encode(codec.inner, rest, blocks, draw, workspace)

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        numel, k = out.numel(), codec.k(out.numel())
        indices, values, blocks = wire.split(codec.part_bytes(numel))
        row = torch.zeros(1 + k, dtype=torch.int32, device="cpu")
        found = torch.zeros(k, dtype=torch.float32, device="cpu")
        self.entries.unpack_indices(indices[None], 0, numel, row[None, 0], row[None, 1:])
        self.entries.unpack_values(values[None], codec.values, found[None])
        index, value = TopK.sound(codec, row, found, out, workspace)
        with np.errstate(all="ignore"):
            instead = out.numpy()[index] + F32(alpha) * value
        inner_kernels(self.codecs, codec.inner, out.device).decode_add(codec.inner, blocks, out, alpha, workspace)
        out.numpy()[index] = instead  # whatever the inner code says there
