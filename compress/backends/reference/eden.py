"""EDEN: trits or bits of rotated elements."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from .. import Kernels, Workspace
from ..codec_types import EDENLike
from .arithmetic import F32, LANES, add, block_sums, in_blocks, numbers, philox, power_of_two_scale
from .terngrad import packed, unpacked

#: σ's, below which the nearest level is 0: half of the level 1.224 σ.
THRESHOLD = F32(0.612)
#: Of a bfloat16.
NAN = np.uint16(0x7FC0)


def signs(seeds: np.ndarray, rows: int = 5) -> np.ndarray:
    """±1 for each element, float32 [records, rows, 256]: bit 31 - c of record and lane's hash is row c's sign."""
    h = seeds.astype(np.uint32)[:, None] << np.uint32(8) | np.arange(LANES, dtype=np.uint32)
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x85EBCA6B)  # MurmurHash3's last steps
    h = (h ^ h >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    h = h ^ h >> np.uint32(16)
    bits = h[:, None] >> np.arange(31, 31 - rows, -1, dtype=np.uint32)[:, None] & np.uint32(1)
    return F32(1) - F32(2) * bits.astype(F32)


def hadamard(rows: np.ndarray) -> np.ndarray:
    """Each row of [..., 256] times Sylvester's Hadamard matrix: sums and differences of pairs 1, 2, 4, … 128 apart."""
    shape, distance = rows.shape, 1
    while distance < LANES:
        pairs = rows.reshape(-1, 2, distance)
        rows = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        distance *= 2
    return rows.reshape(shape)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    return (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)).astype(np.uint16)


class EDEN(Kernels):
    def encode(self, codec: EDENLike, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        block = codec.block_size
        rows = in_blocks(numbers(x), block).reshape(-1, block // LANES, LANES)
        seeds = np.zeros(len(rows), np.uint16)
        if codec.stochastic:
            assert draw is not None
            seed, step, stream = (int(v) for v in draw)
            seeds = philox(seed, step, stream, np.arange(len(rows)) * (block // 8))[:, 0].astype(np.uint16)
        largest = np.abs(rows).view(np.uint32).max(axis=2).view(F32)
        p, inverse_p = (v.reshape(largest.shape) for v in power_of_two_scale(largest.reshape(-1)))
        with np.errstate(all="ignore"):
            rotated = hadamard(rows * p[..., None] * signs(seeds, block // LANES))  # 16 times as long
            magnitudes = np.abs(rotated)
            energy = sums(magnitudes * magnitudes)
            some = magnitudes > (np.sqrt(energy * F32(1 / LANES)) * THRESHOLD)[..., None]
            if codec.levels == 2:
                some[:] = True
            kept = sums(np.where(some, magnitudes, F32(0)))
            level = energy / kept if codec.stochastic else kept / some.sum(axis=2).astype(F32)
            scale = np.where(kept > 0, level, F32(0)) * F32(1 / LANES) * inverse_p
            scales = to_bfloat16(scale)
            sound = (np.isfinite(largest) & np.isfinite(decoded(scales) * F32(LANES))).all(axis=1)
        minus = rotated < 0
        if codec.levels == 2:
            name, codes = "bits", np.packbits(minus, axis=1, bitorder="little")[:, 0]
        else:
            name, codes = "trits", packed(some.astype(np.uint8) + (some & minus))
        record = codec.parts(x.numel())[0].view(wire.numpy())
        record["scales"] = np.where(sound[:, None], scales, NAN)
        record["seed"] = 0
        record["seed"][:, 0] = seeds
        record[name] = np.where(sound[:, None], codes, 0)

    def decode_add(self, codec: EDENLike, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        record = codec.parts(out.numel())[0].view(wire.numpy())
        scale = decoded(record["scales"])
        if codec.levels == 2:
            digits = 1 - 2 * np.unpackbits(record["bits"][:, None], axis=1, bitorder="little").astype(F32)
        else:
            digits = unpacked(record["trits"], workspace).reshape(*scale.shape, LANES)
        with np.errstate(all="ignore"):
            workspace.status[1] += int((~np.isfinite(scale * F32(LANES))).any(axis=1).sum())
            add(out, alpha, hadamard(digits) * signs(record["seed"][:, 0], scale.shape[1]) * scale[..., None])


def sums(rows: np.ndarray) -> np.ndarray:
    """The canonical sum of each row of [records, rows, 256]."""
    return block_sums(rows.reshape(-1, LANES)).reshape(rows.shape[:2])


def decoded(scales: np.ndarray) -> np.ndarray:
    """Of bfloat16s, as float32."""
    return (scales.astype(np.uint32) << np.uint32(16)).view(F32)
