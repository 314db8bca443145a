"""An rANS coder of bytes (Duda 2013; Giesen, "Interleaved entropy coders", 2014), as fast as numba makes one on a core.

Streams of a segment are interleaved: `LANES` states take turns, so that no step waits for the one before, and share one
sequence of 16-bit words. A state lies in [2^15, 2^31); frequencies add up to 2^12. A segment is coded by a table of its
own, which counts as its 256 frequencies of 12 bits. Made to be measured: the form is no wire, and is trusted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

LANES, BITS = 32, 12
TOTAL, LOW = 1 << BITS, 1 << 15
#: Bytes of a segment's table and of its states; a length of words besides.
ASIDE = 256 * BITS // 8 + 4 * LANES + 4


class Segment(NamedTuple):
    """Coded bytes.

    Attributes:
        length: bytes before coding.
        frequencies: uint32 [256], of `TOTAL`.
        states: uint32 [LANES], with which decoding begins.
        words: uint16, in the order in which decoding takes them.
    """

    length: int
    frequencies: np.ndarray
    states: np.ndarray
    words: np.ndarray

    @property
    def nbytes(self) -> int:
        return ASIDE + self.words.nbytes


def encode(symbols: np.ndarray, segment: int) -> list[Segment]:
    """Code uint8 [n] by segments of so many bytes."""
    return [_encode_segment(symbols[start : start + segment]) for start in range(0, len(symbols), segment)]


def decode(segments: list[Segment], out: np.ndarray) -> None:
    """Write what `encode` was given into uint8 [n]."""
    start = 0
    for one in segments:
        _decode(one.words, one.states.copy(), slots(one.frequencies), out[start : start + one.length])
        start += one.length


def _encode_segment(symbols: np.ndarray) -> Segment:
    frequencies = normalized(counted(symbols))
    words, states = np.empty(len(symbols) + 1, np.uint16), np.full(LANES, LOW, np.uint32)
    begin = _encode(symbols, steps(frequencies), states, words)
    return Segment(len(symbols), frequencies, states, words[begin:].copy())


@njit(nogil=True)
def counted(symbols: np.ndarray) -> np.ndarray:
    """How often each byte occurs. Four counters each, so that equal neighbours do not wait for each other."""
    counts = np.zeros((4, 256), np.uint32)
    whole = len(symbols) & ~3
    for i in range(0, whole, 4):
        for j in range(4):
            counts[j, symbols[i + j]] += np.uint32(1)
    for i in range(whole, len(symbols)):
        counts[0, symbols[i]] += np.uint32(1)
    return counts.sum(axis=0).astype(np.int64)


@njit(nogil=True)
def normalized(counts: np.ndarray) -> np.ndarray:
    """Frequencies that add up to `TOTAL`, at least 1 for each byte that occurs. The most frequent pay for rounding."""
    total = max(counts.sum(), 1)
    frequencies = np.zeros(256, np.int64)
    for s in range(256):
        if counts[s]:
            frequencies[s] = max(1, (counts[s] * TOTAL + total // 2) // total)
    left = TOTAL - frequencies.sum()
    while left != 0:
        top = np.argmax(frequencies)
        change = left if left > 0 else max(left, -(frequencies[top] // 2))
        frequencies[top] += change
        left -= change
    return frequencies.astype(np.uint32)


@njit(nogil=True)
def steps(frequencies: np.ndarray) -> np.ndarray:
    """Constants to encode a byte s, uint64 [256, 4]: a limit, a reciprocal and its shift, `start`, and `TOTAL - f`.

    With f its frequency, x becomes start + x // f · TOTAL + x % f = x + start + x // f · (TOTAL - f).
    The quotient is a product: exact for x < 2^31 (Alverson 1991).
    """
    table, start = np.zeros((256, 4), np.uint64), 0
    for s in range(256):
        f = int(frequencies[s])
        if f == 1:  # ⌈2^32 / 1⌉ has 33 bits: x - 1 instead of x, put right by what is added
            values = (LOW // TOTAL << 16, 0xFFFFFFFF, 32, (start + TOTAL - 1) << 16 | (TOTAL - 1))
        elif f:
            shift = 0
            while f > 1 << shift:
                shift += 1
            reciprocal = ((1 << (shift + 31)) + f - 1) // f
            values = ((LOW // TOTAL << 16) * f, reciprocal, shift + 31, start << 16 | (TOTAL - f))
        else:
            values = (0, 0, 0, 0)
        for i in range(4):
            table[s, i] = values[i]
        start += f
    return table


@njit(nogil=True)
def _encode(symbols: np.ndarray, table: np.ndarray, states: np.ndarray, words: np.ndarray) -> int:
    """Fill `words` from their end; returns where they begin. Runs backwards: decoding gives back the last first."""
    at = len(words)
    whole = len(symbols) // LANES * LANES
    for i in range(len(symbols) - 1, whole - 1, -1):
        at = _put(symbols[i], table, states, i - whole, words, at)
    for begin in range(whole - LANES, -1, -LANES):
        for lane in range(LANES - 1, -1, -1):
            at = _put(symbols[begin + lane], table, states, lane, words, at)
    return at


@njit(inline="always")
def _put(symbol: int, table: np.ndarray, states: np.ndarray, lane: int, words: np.ndarray, at: int) -> int:
    x = np.uint64(states[lane])
    words[at - 1] = np.uint16(x)  # stays only if `at` moves: no branch
    full = np.uint64(x >= table[symbol, 0])
    at -= int(full)
    x >>= full << np.uint64(4)
    quotient = (x * table[symbol, 1]) >> table[symbol, 2]
    both = table[symbol, 3]
    states[lane] = np.uint32(x + (both >> np.uint64(16)) + quotient * (both & np.uint64(0xFFFF)))
    return at


@njit(nogil=True)
def slots(frequencies: np.ndarray) -> np.ndarray:
    """For each number below `TOTAL`: its byte, that one's frequency less 1, and its place there; 8, 12 and 12 bits."""
    table, start = np.empty(TOTAL, np.uint32), 0
    for s in range(256):
        f = int(frequencies[s])
        for i in range(f):
            table[start + i] = s << 24 | (f - 1) << 12 | i
        start += f
    return table


@njit(nogil=True)
def _decode(words: np.ndarray, states: np.ndarray, table: np.ndarray, out: np.ndarray) -> None:
    at, whole = 0, len(out) // LANES * LANES
    for begin in range(0, whole, LANES):
        if at + LANES <= len(words):
            for lane in range(LANES):
                at = _take(words, at, states, lane, table, out, begin + lane)
        else:
            at = _take_last(words, at, states, table, out, begin, LANES)
    _take_last(words, at, states, table, out, whole, len(out) - whole)


@njit(inline="always")
def _take(
    words: np.ndarray, at: int, states: np.ndarray, lane: int, table: np.ndarray, out: np.ndarray, to: int
) -> int:
    x = states[lane]
    entry = table[x & np.uint32(TOTAL - 1)]
    out[to] = np.uint8(entry >> np.uint32(24))
    frequency = (entry >> np.uint32(12) & np.uint32(0xFFF)) + np.uint32(1)
    x = np.uint32(frequency * (x >> np.uint32(BITS)) + (entry & np.uint32(0xFFF)))
    more = np.uint32(x << np.uint32(16) | np.uint32(words[at]))
    empty = x < np.uint32(LOW)
    states[lane] = more if empty else x
    return at + int(empty)


@njit(nogil=True)
def _take_last(
    words: np.ndarray, at: int, states: np.ndarray, table: np.ndarray, out: np.ndarray, begin: int, count: int
) -> int:
    """Where words may end: they are read only if needed."""
    spare = np.zeros(LANES + 1, np.uint16)
    left = min(LANES, len(words) - at)
    spare[:left] = words[at : at + left]
    used = 0
    for lane in range(count):
        used = _take(spare, used, states, lane, table, out, begin + lane)
    return at + used
