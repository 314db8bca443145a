"""The numba kernels of patches: which words differ and how far, and the sums that identify an array of words.

A word's part of the sums is a mixture of its place and its bits, so they follow a change without a look at the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .runtime.simd import (
    LANES,
    as_i32,
    bits_of,
    compiled,
    count_ones,
    get_u8,
    inlined,
    load_f32,
    load_u8,
    load_u16,
    lowest_bit,
)

GOLDEN, FIRST, SECOND, THIRD = (
    np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0xD6E8FEB86659FD93)
)
SHIFT, HALF = np.uint64(33), np.uint64(29)


@inlined
def mixed(place: Any, word: Any) -> Any:
    """64 bits of a place and its word, by MurmurHash3's finalizer."""
    x = np.uint64(place) * GOLDEN + np.uint64(word)
    x = (x ^ (x >> SHIFT)) * FIRST
    x = (x ^ (x >> SHIFT)) * SECOND
    return x ^ (x >> SHIFT)


@inlined
def mixed_again(x: Any) -> Any:
    return (x ^ (x >> HALF)) * THIRD


@compiled
def add_words(words: Any, start: int, sums: Any) -> None:
    """Add an array of unsigned words, whose first lies at place `start`, to its two sums (uint64)."""
    a, b = np.uint64(0), np.uint64(0)
    for i in range(len(words)):
        x = mixed(start + i, words[i])
        a += x
        b += mixed_again(x)
    sums[0] += a
    sums[1] += b


@compiled
def replace_words(places: Any, start: int, old: Any, new: Any, sums: Any) -> None:
    """Take old words at `start` + places out of the two sums, and put the new ones in."""
    a, b = np.uint64(0), np.uint64(0)
    for i in range(len(places)):
        x, y = mixed(start + places[i], old[i]), mixed(start + places[i], new[i])
        a += y - x
        b += mixed_again(y) - mixed_again(x)
    sums[0] += a
    sums[1] += b


@compiled
def mark_changes(width: int, old: int, new: int, count: int, bits: Any) -> None:
    """Set the bits (int64 [count / 64], zeros) of words of `width` bytes at two addresses that differ."""
    whole = count // LANES
    for i in range(whole):
        a, b = old + i * LANES * width, new + i * LANES * width
        if width == 1:
            bits[i] = ~bits_of(load_u8(a) == load_u8(b))
        elif width == 2:
            bits[i] = ~bits_of(load_u16(a) == load_u16(b))
        else:
            bits[i] = ~bits_of(as_i32(load_f32(a)) == as_i32(load_f32(b)))
    for byte in range(whole * LANES * width, count * width):
        if get_u8(old + byte) != get_u8(new + byte):
            bits[whole] |= 1 << (byte // width % LANES)


@compiled
def mark_below(width: int, words: Any, mask: int, limit: int, bits: Any) -> None:
    """Set the bits of those of an array of words of 2 or 4 bytes whose bits in `mask` are less than `limit`."""
    whole, address = len(words) // LANES, words.ctypes.data
    for i in range(whole):
        if width == 2:
            bits[i] = bits_of((load_u16(address + i * LANES * 2) & mask) < limit)
        else:
            bits[i] = bits_of((as_i32(load_f32(address + i * LANES * 4)) & mask) < limit)
    for i in range(whole * LANES, len(words)):
        if (np.int64(words[i]) & mask) < limit:
            bits[whole] |= 1 << (i % LANES)


@compiled
def list_bits(bits: Any, places: Any) -> None:
    """Ascending places (int32) of set bits."""
    count = 0
    for i in range(len(bits)):
        left: Any = bits[i]
        while left:
            places[count] = LANES * i + lowest_bit(left)
            count += 1
            left &= left - 1


@compiled
def count_bits(bits: Any) -> int:
    """How many are set."""
    count = 0
    for i in range(len(bits)):
        count += count_ones(bits[i])
    return count


@compiled
def set_bits(places: Any, bits: Any) -> None:
    """The inverse of `list_bits`, into zeros."""
    for i in range(len(places)):
        bits[places[i] >> 6] |= 1 << (places[i] & 63)


@compiled
def gather_bits(bits: Any, members: Any, gathered: Any) -> None:
    """Bits, which `members` has too, at their ranks among the members', into zeros."""
    at: Any = 0
    for i in range(len(members)):
        left: Any = bits[i]
        while left:
            lowest = left & -left
            rank = at + count_ones(members[i] & (lowest - 1))
            gathered[rank >> 6] |= 1 << (rank & 63)
            left ^= lowest
        at += count_ones(members[i])


@inlined
def place_of(rank: Any, word: Any) -> Any:
    """The place of a set bit by its rank, among more."""
    place: Any = 0
    width: Any = 32
    while width:
        ones = count_ones((word >> place) & ((1 << width) - 1))
        if rank >= ones:
            rank -= ones
            place += width
        width >>= 1
    return place


@compiled
def scatter_bits(gathered: Any, members: Any, bits: Any) -> None:
    """The inverse: bits at the places of the members of their ranks."""
    at: Any = 0
    for i in range(len(members)):
        count = count_ones(members[i])
        found: Any = 0
        if count:
            # The ranks of this word's members may begin in one word and end in the next.
            shift = at & 63
            left: Any = (gathered[at >> 6] >> shift) & ((1 << (64 - shift)) - 1 if shift else -1)
            if shift + count > 64:
                left |= gathered[(at >> 6) + 1] << (64 - shift)
            if count < 64:
                left &= (1 << count) - 1
            while left:
                found |= 1 << place_of(lowest_bit(left), members[i])
                left &= left - 1
        bits[i] = found
        at += count


@compiled
def subtract(old: Any, new: Any, places: Any, flip: Any, magnitudes: Any, negative: Any) -> None:
    """d_i = f(new[places_i]) - f(old[places_i]), where f turns a word of b bits into an integer ordered as its number.

    Args:
        old, new: integers of b bits [n], which differ at each place.
        places: int [k].
        flip: f(w) = w ^ flip for negative w: the bits below the sign; 0 for words that are integers.
        magnitudes: [k]; becomes |d_i| - 1.
        negative: [k]; becomes 1 where d_i < 0, else 0.
    """
    top = 8 * old.itemsize - 1
    for i in range(len(places)):
        a, b = np.int64(old[places[i]]), np.int64(new[places[i]])
        difference = ((b ^ (flip * (b >> top))) - (a ^ (flip * (a >> top)))) << (63 - top) >> (63 - top)
        sign = difference >> 63  # without a branch, which would go either way half of the time
        negative[i] = sign & 1
        magnitudes[i] = (difference ^ sign) - 1 - sign


@compiled
def add(old: Any, places: Any, flip: Any, magnitudes: Any, negative: Any, words: Any) -> None:
    """The inverse of `subtract`: words_i = f⁻¹(f(old[places_i]) + d_i), modulo 2^b, so that any numbers make a word."""
    top = 8 * old.itemsize - 1
    for i in range(len(places)):
        a = np.int64(old[places[i]])
        sign = -np.int64(negative[i])
        difference = (np.int64(magnitudes[i]) + 1 + sign) ^ sign
        b = ((a ^ (flip * (a >> top))) + difference) & ((1 << (top + 1)) - 1)
        words[i] = b ^ (flip * (b >> top))
