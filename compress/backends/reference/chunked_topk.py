"""ChunkedTopK: the largest magnitudes of each chunk."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .. import Kernels, Workspace
from ..codec_types import ChunkedTopKLike
from .arithmetic import F32, LANES, NAN, block_sums, in_blocks, numbers
from .entries import Entries

#: How often the two levels are refined.
CHUNK_STEPS = 4


class ChunkedTopK(Kernels):
    """A record is levels, if values have any, then indices, then values."""

    entries = Entries()

    def encode(
        self, codec: ChunkedTopKLike, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        wire.zero_()
        for chunk, record in zip(in_blocks(numbers(x), codec.chunk), self.records(codec, wire), strict=True):
            key = chunk.view(np.uint32) & np.uint32(0x7FFFFFFF)
            largest_first = np.argsort(~key, kind="stable")  # stable: ties go to the lower index
            chosen = np.sort(largest_first[: min(codec.k, np.count_nonzero(key))])
            levels, packed, rest = self.split(codec, record)
            values = torch.zeros(codec.k, dtype=torch.float32, device="cpu")
            values[: len(chosen)] = torch.from_numpy(chunk[chosen])
            fitted = self.levels(codec, np.abs(chunk[chosen]))
            if not (np.isfinite(chunk).all() and np.isfinite(fitted).all()):
                fitted[:] = NAN
                values.zero_()[0] = torch.nan
            elif len(chosen):
                indices = torch.zeros(codec.k, dtype=torch.int32, device="cpu")
                count = torch.tensor([len(chosen)], device="cpu")
                indices[: len(chosen)] = torch.from_numpy(chosen)
                self.entries.pack_indices(indices, count, 0, codec.chunk, packed)
            if isinstance(codec.values, torch.dtype) and not codec.level_bytes:
                self.entries.pack_values(values, codec.values, rest)
                continue
            levels.numpy().view(F32)[:] = fitted
            v = np.nan_to_num(values.numpy())
            code = self.nearest(codec, np.abs(v), fitted) | (v < 0).astype(np.uint8) << (codec.bits - 1)
            code[v == 0] = 0
            bits = np.unpackbits(code[:, None], axis=1, count=codec.bits, bitorder="little")
            packed_codes = np.packbits(bits, bitorder="little")
            rest.numpy()[: len(packed_codes)] = packed_codes

    @staticmethod
    def records(codec: ChunkedTopKLike, wire: Tensor) -> Tensor:
        return wire.view(-1, codec.wire_bytes(codec.chunk))

    @staticmethod
    def split(codec: ChunkedTopKLike, record: Tensor) -> tuple[Tensor, ...]:
        """The bytes of levels, indices and values."""
        aside = codec.level_bytes, codec.index_bytes
        return record.split([*aside, len(record) - sum(aside)])

    @staticmethod
    def levels(codec: ChunkedTopKLike, magnitude: np.ndarray) -> np.ndarray:
        """The smallest and the largest level, zeros if there are none; not finite where a sum of magnitudes is not."""
        if not codec.level_bytes or not len(magnitude):
            return np.zeros(2, F32)
        levels = np.array([magnitude.min(), magnitude.max()])
        for _ in range(CHUNK_STEPS if codec.bits == 2 else 0):
            with np.errstate(all="ignore"):
                upper = magnitude > levels[0] * F32(0.5) + levels[1] * F32(0.5)
                for level, nearest in enumerate((~upper, upper)):
                    if nearest.any():
                        kept = np.where(nearest, magnitude, F32(0))
                        total = block_sums(in_blocks(kept, -(-len(kept) // LANES) * LANES))[0]
                        levels[level] = total / F32(nearest.sum())
        return levels

    @staticmethod
    def step(codec: ChunkedTopKLike, levels: np.ndarray) -> F32:
        """From one level to the next."""
        with np.errstate(all="ignore"):
            return F32((levels[1] - levels[0]) / F32((1 << codec.bits - 1) - 1))

    def nearest(self, codec: ChunkedTopKLike, magnitude: np.ndarray, levels: np.ndarray) -> np.ndarray:
        """min(max(⌊(|v| - smallest) / step + 1/2⌋, 0), top): the level of each; 0 where the step is zero."""
        step = self.step(codec, levels)
        if not step > 0:
            return np.zeros(len(magnitude), np.uint8)
        with np.errstate(all="ignore"):
            y = (magnitude - levels[0]) / step + F32(0.5)
        return np.clip(y, 0, F32((1 << codec.bits - 1) - 1)).astype(np.uint8)

    def decode_add(self, codec: ChunkedTopKLike, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        target = out.numpy()
        for first, record in zip(range(0, len(target), codec.chunk), self.records(codec, wire), strict=True):
            chunk = target[first : first + codec.chunk]
            levels, packed, rest = self.split(codec, record)
            value = self.values(codec, levels, rest)
            if value is None:
                workspace.status[1] += 1
                chunk[:] = NAN
                continue
            count = torch.zeros(1, dtype=torch.int32, device="cpu")
            indices = torch.zeros(1, codec.k, dtype=torch.int32, device="cpu")
            self.entries.unpack_indices(packed[None], 0, codec.chunk, count, indices)
            index = indices[0, : min(int(count), codec.k)].numpy().astype(np.int64) & 0xFFFFFFFF
            in_range = index < len(chunk)
            before = np.maximum.accumulate(np.concatenate([[-1], np.where(in_range, index, -1)]))[:-1]
            sound = in_range & (index > before)
            workspace.status[0] += int(count) - int(sound.sum())
            with np.errstate(all="ignore"):
                chunk[index[sound]] += F32(alpha) * value[: len(index)][sound]

    def values(self, codec: ChunkedTopKLike, levels: Tensor, rest: Tensor) -> np.ndarray | None:
        """The k values of a record; None if it says that its chunk is not finite."""
        if isinstance(codec.values, torch.dtype) and not codec.level_bytes:
            values = torch.zeros(1, codec.k, dtype=torch.float32, device="cpu")
            self.entries.unpack_values(rest[None], codec.values, values)
            return values[0].numpy() if bool(values.isfinite().all()) else None
        pair, top = levels.numpy().view(F32), (1 << codec.bits - 1) - 1
        if not np.isfinite(pair).all():
            return None
        bits = np.unpackbits(rest.numpy(), count=codec.k * codec.bits, bitorder="little")
        code = np.packbits(bits.reshape(codec.k, codec.bits), axis=1, bitorder="little")[:, 0]
        with np.errstate(all="ignore"):
            value = pair[0] + (code & top).astype(F32) * self.step(codec, pair)
        value = np.where(value > pair[1], pair[1], value)  # minimum() may give either of two zeros
        found: np.ndarray = np.where(code > top, -value, value)
        return found
