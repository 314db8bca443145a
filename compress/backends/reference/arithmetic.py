"""Numbers as every codec of the specification treats them: sums, scales, draws and NaN in their one canonical form."""

from __future__ import annotations

import numpy as np
from torch import Tensor

F32 = np.float32
#: The one NaN that is ever written.
NAN_BITS = np.uint32(0x7FC00000)
NAN = NAN_BITS.view(F32)
TINY = F32(2.0**-149)
LANES = 256


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
    """The numbers that rounding adds before it truncates: draws of 16 bits over 2^16, or 1/2 to round to nearest."""
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


def canonical_nan(values: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(values), NAN, values)


def add(out: Tensor, alpha: float, values: np.ndarray) -> None:
    """out += alpha · values, the padding of the last block left out."""
    target = out.numpy()
    with np.errstate(all="ignore"):
        target += F32(alpha) * values.reshape(-1)[: len(target)]
