"""TopK: the largest magnitudes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .. import Kernels, Workspace
from ..sparse import PlainSums, SparseLike
from .arithmetic import F32, canonical_nan, numbers
from .entries import Entries


class TopK(PlainSums):
    entries = Entries()

    def encode_raw(
        self,
        codec: SparseLike,
        x: Tensor,
        residual: Tensor | None,
        row: Tensor,
        values: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        a = canonical_nan(numbers(x))
        key = a.view(np.uint32) & np.uint32(0x7FFFFFFF)  # orders magnitudes, every NaN above infinity
        largest_first = np.argsort(~key, kind="stable")  # stable: ties go to the lower index
        chosen = np.sort(largest_first[: min(codec.k(len(a)), np.count_nonzero(key))])
        row.zero_()
        values.zero_()
        row[0] = len(chosen)
        row[1 : 1 + len(chosen)] = torch.from_numpy(chosen)
        values[: len(chosen)] = torch.from_numpy(a[chosen])

    def encode_feedback(
        self, codec: SparseLike, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        Kernels.encode_feedback(self, codec, grad, residual, wire, draw, workspace)  # composed: this is its meaning

    def add_raw(
        self, codec: SparseLike, row: Tensor, values: Tensor, out: Tensor, alpha: float, workspace: Workspace
    ) -> None:
        index, value = self.sound(codec, row, values, out, workspace)
        target = out.numpy()
        with np.errstate(all="ignore"):
            target[index] += F32(alpha) * value

    @staticmethod
    def sound(
        codec: SparseLike, row: Tensor, values: Tensor, out: Tensor, workspace: Workspace
    ) -> tuple[np.ndarray, np.ndarray]:
        """The entries that count: those whose index is in range and above every index in range before it."""
        k = codec.k(out.numel())
        claimed = int(row[0]) & 0xFFFFFFFF
        count = min(claimed, k)
        index = row[1 : 1 + count].numpy().astype(np.int64) & 0xFFFFFFFF
        value = values[:count].numpy()
        in_range = index < out.numel()
        before = np.maximum.accumulate(np.concatenate([[-1], np.where(in_range, index, -1)]))[:-1]
        sound = in_range & (index > before)
        workspace.status[0] += max(claimed - k, 0) + int((~sound).sum())
        workspace.status[1] += int((~np.isfinite(value[sound])).sum())
        return index[sound], value[sound]
