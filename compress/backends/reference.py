"""The specification, in NumPy: what every byte means, written to be read.

Each class gives `encode` and `decode_add` of one codec; the fused forms are the compositions in `Kernels`. Nothing
here is fast. Whoever writes another backend compares its bytes with these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..formats.entries import LARGEST_UNIT, VALUE_BLOCK, index_layout
from ..formats.wire import Part
from . import Backend, Kernels, Selecting, Workspace
from .low_precision import BLOCK, LEAST_STEP, MOST_BITS, SHARE, STEP_BITS, NarrowKernels
from .outliers import inner_kernels
from .power_sgd import LEAST, ROWS, LowRankKernels, Matrices
from .random_k import DRAWN
from .sparse import EntryKernels, SparseKernels

F32 = np.float32
#: The one NaN that is ever written.
NAN_BITS = np.uint32(0x7FC00000)
NAN = NAN_BITS.view(F32)
TINY = F32(2.0**-149)
LANES = 256
#: How often `Ternary` refines its level, and `ChunkedTopK` its two.
LLOYD_STEPS, CHUNK_STEPS = 2, 4


def numbers(x: Tensor) -> np.ndarray:
    """The elements as float32 (exact for the half precisions)."""
    array: np.ndarray = x.float().numpy()
    return array


def philox(seed: int, step: int, stream: int, groups: np.ndarray) -> np.ndarray:
    """Philox4x32-10: for each counter (group, stream, step, stream >> 32) its four words, uint32[len(groups), 4]."""
    low32 = np.uint64(0xFFFFFFFF)
    c = [
        groups.astype(np.uint64),
        np.full(len(groups), stream & 0xFFFFFFFF, np.uint64),
        np.full(len(groups), step & 0xFFFFFFFF, np.uint64),
        np.full(len(groups), stream >> 32 & 0xFFFFFFFF, np.uint64),
    ]
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        first = c[0] * np.uint64(0xD2511F53)
        second = c[2] * np.uint64(0xCD9E8D57)
        c = [
            second >> np.uint64(32) ^ c[1] ^ np.uint64(key[0]),
            second & low32,
            first >> np.uint64(32) ^ c[3] ^ np.uint64(key[1]),
            first & low32,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(c, axis=1).astype(np.uint32)


def uniform(draw: Tensor | None, numel: int) -> np.ndarray:
    """What rounding adds before it truncates: draws of 16 bits over 2^16, or one half for rounding to nearest."""
    if draw is None:
        return np.full(numel, 0.5, F32)
    seed, step, stream = (int(v) for v in draw)
    words = philox(seed, step, stream, np.arange(-(-numel // 8)))
    return words.astype("<u4").view("<u2").reshape(-1)[:numel].astype(F32) * F32(2.0**-16)


def block_sums(rows: np.ndarray) -> np.ndarray:
    """Sums over each row of [blocks, block], in the one order that is canonical: 256 partial sums, then halves."""
    acc = np.zeros((len(rows), LANES), rows.dtype)
    for start in range(0, rows.shape[1], LANES):
        acc = acc + rows[:, start : start + LANES]
    half = LANES // 2
    while half:
        acc = acc[:, :half] + acc[:, half : 2 * half]
        half //= 2
    total: np.ndarray = acc[:, 0]
    return total


def in_blocks(x: np.ndarray, block: int) -> np.ndarray:
    """The elements as [blocks, block], padded with zeros: a zero changes no sum, no maximum and no code."""
    padded = np.zeros(-(-len(x) // block) * block, x.dtype)
    padded[: len(x)] = x
    return padded.reshape(-1, block)


def block_lengths(numel: int, block: int) -> np.ndarray:
    """How many elements each block really has, float32."""
    lengths = np.full(-(-numel // block), block)
    lengths[-1] = numel - (len(lengths) - 1) * block
    return lengths.astype(F32)


def power_of_two_scale(largest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(p, 1/p), powers of two such that largest·p lies in [1, 2), or below 1 when it is subnormal."""
    exponent = np.clip((largest.view(np.uint32) >> 23).astype(np.int32), 1, 254)
    return np.ldexp(F32(1), 127 - exponent).astype(F32), np.ldexp(F32(1), exponent - 127).astype(F32)


def levels_of(magnitudes: np.ndarray, p: np.ndarray, unit: np.ndarray, top: int, r: np.ndarray) -> np.ndarray:
    """min(⌊(|x|·p) · (1/unit) + r⌋, top) for each element of [blocks, block]; nothing where unit is zero."""
    with np.errstate(divide="ignore"):
        inverse = np.where(unit > 0, F32(1) / unit, F32(0))
    y = magnitudes * p[:, None] * inverse[:, None] + r
    return np.minimum(y, F32(top)).astype(np.uint8)


class OneBit(Kernels):
    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        a = numbers(x)
        rows, lengths = in_blocks(a, codec.block), block_lengths(len(a), codec.block)
        below = rows < 0
        zero = F32(0)
        with np.errstate(all="ignore"):
            if codec.scale == "sided":
                count = below.sum(axis=1).astype(F32)
                negative = block_sums(np.where(below, rows, zero)) / np.maximum(count, F32(1))
                positive = block_sums(np.where(below, zero, rows)) / np.maximum(lengths - count, F32(1))
            else:
                positive = block_sums(np.abs(rows)) / lengths
                negative = zero - positive
        sound = np.isfinite(negative) & np.isfinite(positive)
        (part,) = codec.parts(len(a))
        record = part.view(wire.numpy())
        record["negative"][:, 0] = np.where(sound, negative + zero, NAN)  # + 0 turns -0 into 0
        record["positive"][:, 0] = np.where(sound, positive + zero, NAN)
        record["signs"] = np.packbits(below & sound[:, None], axis=1, bitorder="little")

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        (part,) = codec.parts(out.numel())
        record = part.view(wire.numpy())
        signs = np.unpackbits(record["signs"], axis=1, bitorder="little")
        add(out, alpha, np.where(signs, record["negative"], record["positive"]))
        sound = np.isfinite(record["negative"]) & np.isfinite(record["positive"])
        workspace.status[1] += int((~sound).sum())


class QSGD(Kernels):
    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        a = numbers(x)
        rows, s = in_blocks(a, codec.block), F32(codec.levels)
        magnitudes = np.abs(rows)
        largest = (magnitudes.view(np.uint32).max(axis=1)).view(F32)  # as integers, so that NaN is the largest
        p, inverse_p = power_of_two_scale(largest)
        with np.errstate(all="ignore"):
            if codec.norm == "max":
                norm = largest * p
            else:
                scaled = magnitudes * p[:, None]
                norm = np.sqrt(block_sums(scaled * scaled))
            unit = norm / s * inverse_p
            unit = np.where((largest > 0) & (unit == 0), TINY, unit)
            sound = np.isfinite(largest) & np.isfinite(unit)
            r = in_blocks(uniform(draw if codec.stochastic else None, len(a)), codec.block)
            level = levels_of(np.where(sound[:, None], magnitudes, F32(0)), p, unit * p, codec.levels, r)
        sign = (rows < 0) & (level > 0)
        code = level | sign.astype(np.uint8) << (codec.bits - 1)
        bits = np.unpackbits(code[:, :, None], axis=2, count=codec.bits, bitorder="little")
        (part,) = codec.parts(len(a))
        record = part.view(wire.numpy())
        record["unit"][:, 0] = np.where(sound, unit, NAN)
        record["codes"] = np.packbits(bits.reshape(len(rows), -1), axis=1, bitorder="little")

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        (part,) = codec.parts(out.numel())
        record = part.view(wire.numpy())
        bits = np.unpackbits(record["codes"], axis=1, bitorder="little").reshape(part.records, codec.block, codec.bits)
        code = np.packbits(bits, axis=2, bitorder="little")[:, :, 0].reshape(-1)[: out.numel()]
        level = (code & codec.levels).astype(np.int32)
        minus = (code >> (codec.bits - 1)).astype(bool)
        workspace.status[0] += int((minus & (level == 0)).sum())
        workspace.status[1] += int((~np.isfinite(record["unit"])).sum())
        signed = np.where(minus, -level, level).astype(F32)
        with np.errstate(all="ignore"):
            add(out, alpha, signed * np.repeat(record["unit"][:, 0], codec.block)[: out.numel()])


class TernGrad(Kernels):
    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        a = numbers(x)
        rows, lengths = in_blocks(a, codec.block), block_lengths(len(a), codec.block)
        magnitudes = np.abs(rows)
        largest = (magnitudes.view(np.uint32).max(axis=1)).view(F32)
        p, inverse_p = power_of_two_scale(largest)
        with np.errstate(all="ignore"):
            scaled = magnitudes * p[:, None]
            sigma = np.sqrt(block_sums(scaled * scaled) / lengths)
            scaled_scale = np.fmin(largest * p, F32(codec.clip) * sigma)
            scale = scaled_scale * inverse_p
            scale = np.where((largest > 0) & (scale == 0), TINY, scale)
            sound = np.isfinite(largest)
            r = in_blocks(uniform(draw if codec.stochastic else None, len(a)), codec.block)
            level = levels_of(np.where(sound[:, None], magnitudes, F32(0)), p, scaled_scale, 1, r)
        self.write(codec.parts(len(a))[0], wire, np.where(sound, scale, NAN), level + (level & (rows < 0)))

    @staticmethod
    def write(part: Part, wire: Tensor, scale: np.ndarray, trit: np.ndarray) -> None:
        """The records of scales [blocks] and trits [blocks, block]."""
        planes = trit.reshape(len(trit), -1, 5, LANES)
        record = part.view(wire.numpy())
        record["scale"][:, 0] = scale
        powers = np.array([1, 3, 9, 27, 81], np.uint8)
        record["trits"] = (planes * powers[:, None]).sum(axis=2, dtype=np.uint8).reshape(len(trit), -1)

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        (part,) = codec.parts(out.numel())
        record = part.view(wire.numpy())
        packed = record["trits"].reshape(part.records, -1, 1, LANES)
        sound = packed < 243
        trit = np.where(sound, packed // np.array([1, 3, 9, 27, 81], np.uint8)[:, None] % 3, 0)
        workspace.status[0] += int((~sound).sum())
        workspace.status[1] += int((~np.isfinite(record["scale"])).sum())
        signed = np.array([0, 1, -1], F32)[trit].reshape(part.records, -1)
        with np.errstate(all="ignore"):
            add(out, alpha, signed * record["scale"])


class Ternary(TernGrad):
    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        a = numbers(x)
        rows, lengths = in_blocks(a, codec.block), block_lengths(len(a), codec.block)
        magnitudes = np.abs(rows)
        zero = F32(0)

        def mean_above(threshold: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """The sum of the magnitudes above a threshold, and their mean; 0 where there are none."""
            above = magnitudes > threshold[:, None]
            total = block_sums(np.where(above, magnitudes, zero))
            return total, total / np.maximum(above.sum(axis=1), 1).astype(F32)

        with np.errstate(all="ignore"):
            total, largest = block_sums(magnitudes), magnitudes.max(axis=1)
            sound = np.isfinite(total)  # then every element is finite
            p, _ = power_of_two_scale(np.where(sound, largest, zero))
            level, best = np.zeros_like(total), np.zeros_like(total)
            threshold = total / lengths * F32(0.5)
            while (sound & (threshold < largest)).any():
                kept, mean = mean_above(threshold)
                gain = (kept * p) * (mean * p)  # as if the largest magnitude were about 1: never beyond float32
                level, best = np.where(gain > best, mean, level), np.maximum(gain, best)
                threshold = np.maximum(threshold + threshold, TINY)
            for _ in range(LLOYD_STEPS):
                _, level = mean_above(level * F32(0.5))
        some = (magnitudes > (level * F32(0.5))[:, None]) & sound[:, None]
        trit = some.astype(np.uint8) + (some & (rows < 0))
        self.write(codec.parts(len(a))[0], wire, np.where(sound, level, NAN), trit)


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


class TopK(SparseKernels):
    entries = Entries()

    def encode_plain(
        self,
        codec: Any,
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
        self, codec: Any, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        Kernels.encode_feedback(self, codec, grad, residual, wire, draw, workspace)  # composed: this is its meaning

    def add_plain(
        self, codec: Any, row: Tensor, values: Tensor, out: Tensor, alpha: float, workspace: Workspace
    ) -> None:
        index, value = self.sound(codec, row, values, out, workspace)
        target = out.numpy()
        with np.errstate(all="ignore"):
            target[index] += F32(alpha) * value

    @staticmethod
    def sound(
        codec: Any, row: Tensor, values: Tensor, out: Tensor, workspace: Workspace
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


class ChunkedTopK(Kernels):
    """A record is levels, if values have any, then indices, then values."""

    entries = Entries()

    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
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
            if not codec.level_bytes:
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
    def records(codec: Any, wire: Tensor) -> Tensor:
        return wire.view(-1, codec.wire_bytes(codec.chunk))

    @staticmethod
    def split(codec: Any, record: Tensor) -> tuple[Tensor, ...]:
        """The bytes of levels, indices and values."""
        aside = codec.level_bytes, codec.index_bytes
        return record.split([*aside, len(record) - sum(aside)])

    @staticmethod
    def levels(codec: Any, magnitude: np.ndarray) -> np.ndarray:
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
    def step(codec: Any, levels: np.ndarray) -> F32:
        """From one level to the next."""
        with np.errstate(all="ignore"):
            return F32((levels[1] - levels[0]) / F32((1 << codec.bits - 1) - 1))

    def nearest(self, codec: Any, magnitude: np.ndarray, levels: np.ndarray) -> np.ndarray:
        """min(max(⌊(|v| - smallest) / step + 1/2⌋, 0), top): the level of each; 0 where the step is zero."""
        step = self.step(codec, levels)
        if not step > 0:
            return np.zeros(len(magnitude), np.uint8)
        with np.errstate(all="ignore"):
            y = (magnitude - levels[0]) / step + F32(0.5)
        return np.clip(y, 0, F32((1 << codec.bits - 1) - 1)).astype(np.uint8)

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
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

    def values(self, codec: Any, levels: Tensor, rest: Tensor) -> np.ndarray | None:
        """What a record's k values stand for; None where it says that its chunk is not finite."""
        if not codec.level_bytes:
            values = torch.zeros(1, codec.k, dtype=torch.float32, device="cpu")
            self.entries.unpack_values(rest[None], codec.values, values)
            return values[0].numpy() if bool(values.isfinite().all()) else None
        pair, top = levels.numpy().view(F32), (1 << codec.bits - 1) - 1
        if not np.isfinite(pair).all():
            return None
        bits = np.unpackbits(rest.numpy(), count=codec.k * codec.bits, bitorder="little")
        code = np.packbits(bits.reshape(codec.k, codec.bits), axis=1, bitorder="little")[:, 0]
        with np.errstate(all="ignore"):
            value = np.minimum(pair[0] + (code & top).astype(F32) * self.step(codec, pair), pair[1])
        found: np.ndarray = np.where(code > top, -value, value)
        return found


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
        TopK().encode_plain(codec.selection, x, None, row, found, None, workspace)
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


class PowerSGD(LowRankKernels):
    def take(self, matrices: Matrices, x: Tensor, whole: Tensor) -> None:
        for begin, length, columns, at, *_ in matrices.rows:
            if not columns:
                whole.numpy()[at : at + length] = canonical_nan(x.numpy()[begin : begin + length])

    def left(self, matrices: Matrices, x: Tensor, start: Tensor, out: Tensor) -> None:
        for begin, rows, columns, left, right in self.each(matrices):
            m = x.numpy()[begin : begin + rows * columns].reshape(rows, columns)
            for k in range(matrices.rank):
                s = start.numpy()[right + k * columns :][:columns]
                with np.errstate(all="ignore"):
                    products = np.stack([in_blocks(row * s, LANES).reshape(-1) for row in m])
                    out.numpy()[left + k * rows :][:rows] = block_sums(products)

    def orthonormalise(self, matrices: Matrices, left: Tensor) -> None:
        for _, rows, _, at, _ in self.each(matrices):
            p = left.numpy()[at : at + matrices.rank * rows].reshape(matrices.rank, rows)
            if not np.isfinite(p).all():
                p[:] = NAN
                continue
            for k in range(matrices.rank):
                before = np.sqrt(self.dot(p[k], p[k]))
                for j in range(k):
                    p[k] = p[k] - self.dot(p[j], p[k]) * p[j].astype(np.float64)
                after = np.sqrt(self.dot(p[k], p[k]))
                p[k] = p[k].astype(np.float64) / after if after > before * LEAST else 0.0

    def right(self, matrices: Matrices, x: Tensor, left: Tensor, out: Tensor) -> None:
        for begin, rows, columns, at, right in self.each(matrices):
            m = x.numpy()[begin : begin + rows * columns].reshape(rows, columns)
            for k in range(matrices.rank):
                p, total = left.numpy()[at + k * rows :][:rows, None], np.zeros(columns, F32)
                with np.errstate(all="ignore"):
                    for first in range(0, rows, ROWS):
                        part = np.zeros(columns, F32)
                        for product in m[first : first + ROWS] * p[first : first + ROWS]:
                            part = part + product
                        total = total + part
                out.numpy()[right + k * columns :][:columns] = total

    def settle(self, matrices: Matrices, left: Tensor, right: Tensor) -> None:
        for _, rows, columns, at, to in self.each(matrices):
            p, q = left.numpy()[at : at + matrices.rank * rows], right.numpy()[to : to + matrices.rank * columns]
            if not np.isfinite(q).all():
                p[:] = q[:] = NAN

    def follow(self, matrices: Matrices, right: Tensor, start: Tensor) -> None:
        for _, _, columns, _, to in self.each(matrices):
            for first in range(to, to + matrices.rank * columns, columns):
                q = right.numpy()[first : first + columns]
                length = np.sqrt(self.dot(q, q))
                if np.isfinite(length) and length > 0:
                    start.numpy()[first : first + columns] = q.astype(np.float64) / length

    def add(self, matrices: Matrices, numbers: Tensor, out: Tensor, alpha: float, fresh: bool, status: Tensor) -> None:
        whole, left, right = (part.numpy() for part in matrices.split(numbers))
        target = out.numpy()
        if fresh:
            target[:] = 0
        with np.errstate(all="ignore"):
            for begin, rows, columns, at, to, *_ in matrices.rows:
                if columns:
                    ends = at + matrices.rank * rows, to + matrices.rank * columns
                    p, q = left[at : ends[0]], right[to : ends[1]]
                    status[1] += int(not (np.isfinite(p).all() and np.isfinite(q).all()))
                    values = self.product(matrices.rank, p, q)
                else:
                    values = whole[at : at + rows]
                    status[1] += int((~np.isfinite(values)).sum())
                target[begin : begin + values.size] += F32(alpha) * values

    def leave(self, matrices: Matrices, left: Tensor, right: Tensor, total: Tensor, residual: Tensor) -> None:
        for begin, rows, columns, at, to, *_ in matrices.rows:
            p, q = left.numpy()[at : at + matrices.rank * rows], right.numpy()[to : to + matrices.rank * columns]
            here = slice(begin, begin + rows * max(1, columns))
            with np.errstate(all="ignore"):
                sent = self.product(matrices.rank, p, q) if columns else total.numpy()[here]
                rest = total.numpy()[here] - (sent + F32(0))
            residual.numpy()[here] = np.where(np.isfinite(rest), rest, residual.numpy()[here])

    @staticmethod
    def each(matrices: Matrices) -> list[list[int]]:
        """Start, rows, columns, and where P and Q begin, of each matrix."""
        return [row[:5] for row in matrices.rows if row[2]]

    @staticmethod
    def dot(a: np.ndarray, b: np.ndarray) -> np.float64:
        """In float64, by 256 partial sums."""
        result: np.float64 = block_sums(in_blocks(a.astype(np.float64) * b, LANES).reshape(1, -1))[0]
        return result

    @staticmethod
    def product(rank: int, p: np.ndarray, q: np.ndarray) -> np.ndarray:
        """P·Qᵀ, flat."""
        left, right = p.reshape(rank, -1, 1), q.reshape(rank, 1, -1)
        total = left[0] * right[0]
        for k in range(1, rank):
            total = total + left[k] * right[k]
        return total.reshape(-1)


class Cast(Kernels):
    canonical: ClassVar[dict[torch.dtype, int]] = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}

    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        half = x.float().to(codec.dtype)
        bits = half.view(torch.uint16).numpy().copy()
        bits[half.isnan().numpy()] = self.canonical[codec.dtype]
        target = wire.numpy().view("<u2")
        target[len(bits) :] = 0
        target[: len(bits)] = bits

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        values = wire.view(codec.dtype)[: out.numel()].float().numpy()
        workspace.status[1] += int((~np.isfinite(values)).sum())
        add(out, alpha, values)


class Identity(Kernels):
    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        wire.numpy().view("<f4")[:] = canonical_nan(numbers(x))

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        values = wire.numpy().view("<f4")
        workspace.status[1] += int((~np.isfinite(values)).sum())
        add(out, alpha, values)


class Narrow(NarrowKernels):
    def to_bfloat16(self, x: Tensor, out: Tensor) -> None:
        words = sound(numbers(x)).view(np.uint32)
        nearest = words + (0x7FFF + (words >> 16 & 1))
        out.view(torch.int16).copy_(torch.from_numpy((nearest >> 16).astype(np.uint16).view(np.int16)))

    def to_int8(self, x: Tensor, codes: Tensor, steps: Tensor) -> None:
        rows = in_blocks(sound(numbers(x)), BLOCK)
        share = np.abs(rows).max(axis=1) * F32(SHARE)
        up = (share.view(np.uint32) + np.uint32(STEP_BITS) & ~np.uint32(STEP_BITS)).view(F32)
        found = np.maximum(up, F32(LEAST_STEP))
        steps.numpy()[:] = found
        codes.numpy()[:] = np.rint(rows * (F32(1) / found)[:, None]).reshape(-1)[: len(x)]

    def from_bfloat16(self, x: Tensor, out: Tensor) -> None:
        out.numpy().view(np.uint32)[:] = x.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << 16

    def from_int8(self, codes: Tensor, steps: Tensor, out: Tensor) -> None:
        out.numpy()[:] = codes.numpy().astype(F32) * np.repeat(steps.numpy(), BLOCK)[: len(codes)]


def sound(values: np.ndarray) -> np.ndarray:
    """What is not finite as zero, and nothing beyond the largest bfloat16."""
    most = np.uint32(MOST_BITS).view(F32)
    return np.clip(np.where(np.isfinite(values), values, F32(0)), -most, most)


def canonical_nan(values: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(values), NAN, values)


def add(out: Tensor, alpha: float, values: np.ndarray) -> None:
    """out += alpha · values, the padding of the last block left out."""
    target = out.numpy()
    with np.errstate(all="ignore"):
        target += F32(alpha) * values.reshape(-1)[: len(target)]


KERNELS: dict[str, Kernels] = {
    "onebit": OneBit(),
    "qsgd": QSGD(),
    "terngrad": TernGrad(),
    "ternary": Ternary(),
    "topk": (TOPK := TopK()),
    "random_k": DRAWN,
    "power_sgd": PowerSGD(),
    "chunked_topk": ChunkedTopK(),
    "cast": Cast(),
    "identity": Identity(),
}
KERNELS["threshold"] = Selecting(Entries(), TOPK)
KERNELS["outliers"] = Outliers(KERNELS)
BACKEND = Backend(KERNELS, Entries(), narrow=Narrow())
