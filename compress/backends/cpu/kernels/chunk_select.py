"""The numba kernels that select the k largest elements of a chunk which lies in cache.

The threshold is searched from where the last chunk had it. Counting what is above a key takes a few hundred cycles; one
count is mostly enough to find a key from which on there are a few more than k, and the k are found among those.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtime.blocks import clear, read_ahead
from ..runtime.dtypes import MAGNITUDE, int_at, key_at
from ..runtime.simd import as_i32, bits_of, compiled, count_ones, get_f32, load_f32, lowest_bit, store

#: How far from the last chunk's threshold to look first, in keys: a sixteenth of a binade.
OUTLOOK = 1 << 19


@compiled
def most_candidates(k: int) -> int:
    """So many are listed before the k largest are found among them."""
    return k + max(k >> 1, 64)


@compiled
def room_for(k: int) -> int:
    """Entries that a list has room for: whole rows of partial sums, and what is written past the end."""
    return ((most_candidates(k) + 255) & ~255) + 64


@compiled
def candidates_wanted(key: int, low: int, count: int, k: int) -> int:
    """Where to begin with the next chunk, if in this one `count` elements were found from `low` on and `key` is the
    k-th: a quarter to three quarters of the spare room shall be used."""
    distance: Any = max(key - low, 1 << 12)
    spare = most_candidates(k) - k
    if count - k < spare >> 2:
        distance += distance >> 1
    elif count - k > spare - (spare >> 2):
        distance -= distance >> 2
    return key - distance


@compiled
def count_from(a: int, n: int, key: int, ahead: int) -> int:
    """How many keys are `key` or above; fetches as much memory from `ahead` on, unless that is 0."""
    limit, count = np.int32(key), 0
    for i in range(0, 4 * n, 256):
        count += count_ones(bits_of((as_i32(load_f32(a + i)) & MAGNITUDE) >= limit))
        if ahead:
            read_ahead(ahead + i)
    return count


@compiled
def candidates_from(a: int, chunk: int, k: int, largest: int, guess: int, ahead: int) -> tuple[int, int, int]:
    """A threshold t with k ≤ |{i : |a_i| ≥ t}| ≤ most_candidates(k), by bisection from a guess.

    If there is none, because of ties, t is the k-th largest key; it is 0 if fewer than k are above 0.

    Args:
        a: the address of the chunk's elements, float32 [chunk].
        largest: the largest key of the chunk.
        guess: where to begin: the key that served the chunk before.
        ahead: an address to fetch meanwhile, or 0.

    Returns:
        t, how many keys are t or above, and how many are above the least key that was found to be too high.
    """
    low: Any = 0  # at least k keys from here on
    high: Any = largest + 1  # fewer than k
    found: Any = chunk  # so many from `low` on
    above: Any = 0  # and from `high` on
    most = most_candidates(k)
    probe: Any = guess if 0 < guess < high else high >> 1
    width: Any = OUTLOOK
    while high - low > 1:
        count = count_from(a, chunk, probe, ahead)
        ahead = 0
        if count >= k:
            low, found = probe, count
            if count <= most:
                break
            probe += width
        else:
            high, above = probe, count
            probe -= width
        width *= 4
        if (low > 0 and high <= largest) or not low < probe < high:
            probe = (low + high) >> 1
    return low, found, above


@compiled
def list_from(a: int, chunk: int, key: int, index: int, value: int, ahead: int) -> int:
    """Lists every element whose key is `key` or above; returns how many."""
    entry: Any = 0
    limit = np.int32(key)
    for i in range(0, chunk, 64):
        bits: Any = bits_of((as_i32(load_f32(a + 4 * i)) & MAGNITUDE) >= limit)
        count = count_ones(bits)
        if ahead:
            read_ahead(ahead + 4 * i)
        # Four are written, however many there are: what the branch predictor cannot know costs more than that.
        for j in range(4):
            at = i + lowest_bit(bits | (-1 << 63))
            store(index + 4 * (entry + j), np.int32(at))
            store(value + 4 * (entry + j), get_f32(a + 4 * at))
            bits &= bits - 1
        entry += 4
        while bits:
            at = i + lowest_bit(bits)
            store(index + 4 * entry, np.int32(at))
            store(value + 4 * entry, get_f32(a + 4 * at))
            bits &= bits - 1
            entry += 1
        entry += min(count - 4, 0)
    return entry


@compiled
def kth_key(value: int, count: int, k: int, low: int, largest: int) -> tuple[int, int]:
    """Of more than k values, zeros behind them, the k-th largest key, at `low` or above, and how many of those equal to
    it are among the k."""
    high: Any = largest + 1
    above: Any = 0
    while high - low > 1:
        probe = (low + high) >> 1
        found = count_from(value, (count + 63) & ~63, probe, 0)
        if found >= k:
            low = probe
            if found == k:
                return low - 1, 0
        else:
            high, above = probe, found
    return low, k - above


@compiled
def keep(index: int, value: int, count: int, key: int, ties: int) -> int:
    """Of what is listed, what is above a key, and the first `ties` that are equal to it; returns how many."""
    kept: Any = 0
    for i in range(0, 4 * count, 4):
        at, v = int_at(index + i), get_f32(value + i)
        is_tie = int(key_at(value + i) == key)
        taken = int(key_at(value + i) > key) | (is_tie & int(ties > 0))
        ties -= is_tie
        store(index + 4 * kept, np.int32(at))
        store(value + 4 * kept, v)
        kept += taken
    return kept


@compiled
def list_ties(a: int, chunk: int, key: int, ties: int, index: int, value: int) -> int:
    """As `keep`, of the chunk itself."""
    entry: Any = 0
    for i in range(0, chunk, 64):
        keys = as_i32(load_f32(a + 4 * i)) & MAGNITUDE
        bits: Any = bits_of(keys > np.int32(key))
        if ties > 0:
            equal: Any = bits_of(keys == np.int32(key))
            while equal and ties > 0:
                bits |= equal & -equal
                equal &= equal - 1
                ties -= 1
        while bits:
            j = i + lowest_bit(bits)
            bits &= bits - 1
            store(index + 4 * entry, np.int32(j))
            store(value + 4 * entry, get_f32(a + 4 * j))
            entry += 1
    return entry


@compiled
def choose(
    a: int, chunk: int, k: int, largest: int, guess: int, index: int, value: int, ahead: tuple[int, int]
) -> tuple[int, int]:
    """Lists what is selected, zeros behind it; returns how many, and where to look first in the next chunk."""
    low, found, above = candidates_from(a, chunk, k, largest, guess, ahead[0])
    most = most_candidates(k)
    if low > 0 and found > most:
        count = list_ties(a, chunk, low, k - above, index, value)
        following: Any = low
    else:
        following = max(low, 1)
        count = list_from(a, chunk, following, index, value, ahead[1])
        if count > k:
            clear(value + 4 * count, 256)
            key, ties = kth_key(value, count, k, low, largest)
            following = candidates_wanted(key, low, count, k)
            count = keep(index, value, count, key, ties)
    clear(value + 4 * count, 4 * (room_for(k) - count))
    return count, following
