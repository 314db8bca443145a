"""Entries that an encoder is to hide: it sees zero in their place, and leaves nothing of them in the residual."""

from __future__ import annotations

from typing import Any

import numpy as np

from .blocks import INF_BITS, ZERO, clear
from .simd import compiled, get_i64, inlined, mask_of, select, store
from .sparse import int_at, key_at

Hidden = tuple[int, int, int, int]  # where indices are, ascending, where values are, how many, and what index 0 is


@compiled
def first_from(hidden: Hidden, start: int) -> int:
    """The first entry that lies at `start` or behind it."""
    index, _, count, origin = hidden
    low: Any = 0
    high: Any = count
    while low < high:
        middle = (low + high) >> 1
        if origin + int_at(index + 4 * middle) < start:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def mark_until(hidden: Hidden, entry: int, start: int, end: int, marks: int) -> int:
    """Marks which of the elements from `start` to `end` are hidden, those of the entries from one on whose value is
    finite: a word for 64. Returns the first entry behind them."""
    index, value, count, origin = hidden
    clear(marks, (end - start + 63) >> 6 << 3)
    while entry < count:
        at = origin + int_at(index + 4 * entry)
        if at >= end:
            break
        word = marks + ((at - start) >> 6 << 3)
        store(word, get_i64(word) | np.int64(key_at(value + 4 * entry) < INF_BITS) << (at & 63))
        entry += 1
    return entry


@inlined
def unless_marked(v: Any, marks: int, i: int) -> Any:
    """64 elements, the first of them i, but zero where they are marked; `marks` is 0 if there is nothing to hide."""
    if marks:
        return select(mask_of(get_i64(marks + (i >> 3))), ZERO, v)
    return v


@compiled
def forget(hidden: Hidden, first: int, last: int, residual: int) -> None:
    """residual = 0 for entries whose value is finite, if there is one: they are sent as they are."""
    if not residual:
        return
    for i in range(4 * first, 4 * last, 4):
        if key_at(hidden[1] + i) < INF_BITS:
            store(residual + 4 * (hidden[3] + int_at(hidden[0] + i)), ZERO)
