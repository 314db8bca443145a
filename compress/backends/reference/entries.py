"""The indices and the values of sparse gradients, packed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...formats.entries import LARGEST_UNIT, VALUE_BLOCK, index_layout
from ..sparse import EntryKernels
from .arithmetic import F32, NAN, TINY, canonical_nan, in_blocks


class Entries(EntryKernels):
    def pack_indices(self, indices: Tensor, count: Tensor | None, base: int, numel: int, wire: Tensor) -> None:
        k = len(indices)
        layout = index_layout(numel, k)
        used = k if count is None else int(count)
        at = (indices[:used].numpy().astype(np.int64) & 0xFFFFFFFF) - base
        upper = np.zeros(32 * layout.upper_words, np.uint8)
        upper[(at >> layout.low_bits) + np.arange(used)] = 1
        low = np.zeros(32 * layout.low_words, np.uint8)
        low[: used * layout.low_bits] = ((at[:, None] >> np.arange(layout.low_bits)) & 1).reshape(-1)
        wire.numpy()[:] = np.packbits(np.concatenate([upper, low]), bitorder="little")

    def unpack_indices(self, wires: Tensor, base: int, numel: int, counts: Tensor | None, indices: Tensor) -> None:
        k = indices.shape[1]
        layout = index_layout(numel, k)
        for row, wire in enumerate(wires.numpy()):
            upper, low = np.split(np.unpackbits(wire, bitorder="little"), [32 * layout.upper_words])
            place = np.flatnonzero(upper)
            if counts is not None:
                counts[row] = len(place)
            entry = np.arange(min(k, len(place)))
            bits = low[: k * layout.low_bits].reshape(k, layout.low_bits)[: len(entry)].astype(np.int64)
            at = (place[: len(entry)] - entry << layout.low_bits) + (bits << np.arange(layout.low_bits)).sum(axis=1)
            found = np.full(k, -1, np.int64)
            found[: len(entry)] = np.where(at < numel, at + base, -1)
            indices[row] = torch.from_numpy(found.astype(np.uint32).view(np.int32))

    def pack_values(
        self,
        values: Tensor,
        dtype: torch.dtype,
        wire: Tensor,
        indices: Tensor | None = None,
        count: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:
        v, k = canonical_nan(values.numpy()), len(values)
        bytes_ = wire.numpy()
        bytes_[:] = 0
        if dtype == torch.float32:
            bytes_[:] = v.view(np.uint8)
        elif dtype == torch.bfloat16:
            half = values.to(torch.bfloat16).view(torch.uint16).numpy().copy()
            half[np.isnan(v)] = 0x7FC0
            beyond = np.isfinite(v) & ((half & 0x7FFF) == 0x7F80)
            half[beyond] -= 1
            bytes_[: 2 * k] = half.view(np.uint8)
        else:
            blocks = in_blocks(v, VALUE_BLOCK)
            finite = np.isfinite(blocks)
            largest = np.where(finite, np.abs(blocks), F32(0)).max(axis=1)
            unit = np.minimum(largest / F32(127), F32(LARGEST_UNIT))
            unit = np.where((largest > 0) & (unit == 0), TINY, unit)
            with np.errstate(all="ignore"):
                code = np.where(unit[:, None] > 0, np.rint(blocks / unit[:, None]), F32(0))
                code = np.where(finite, np.clip(code, -127, 127), F32(-128))
            codes = code.astype(np.int8).reshape(-1)[:k]
            bytes_[: 4 * len(unit)] = unit.view(np.uint8)
            bytes_[4 * len(unit) :][:k] = codes.view(np.uint8)
        if residual is not None:
            assert indices is not None
            used = k if count is None else int(count)
            decoded = torch.zeros(1, k, dtype=torch.float32, device="cpu")
            self.unpack_values(wire[None], dtype, decoded)
            finite = np.isfinite(v[:used])
            at = indices[:used].numpy().view(np.uint32)[finite]
            residual.numpy()[at] = v[:used][finite] - decoded[0].numpy()[:used][finite]

    def unpack_values(self, wires: Tensor, dtype: torch.dtype, values: Tensor) -> None:
        k = values.shape[1]
        for row, wire in enumerate(wires.numpy()):
            if dtype == torch.float32:
                v = wire.view(F32)
            elif dtype == torch.bfloat16:
                v = (wire.view(np.uint16)[:k].astype(np.uint32) << 16).view(F32)
            else:
                units = -(-k // VALUE_BLOCK)
                unit, code = wire[: 4 * units].view(F32), wire[4 * units :][:k].view(np.int8)
                with np.errstate(all="ignore"):
                    v = np.where(code == -128, NAN, code.astype(F32) * np.repeat(unit, VALUE_BLOCK)[:k])
            values[row] = torch.from_numpy(v.copy())
