"""Masks by which the kernel of a code leaves out entries that `Outliers` sends, and puts them in while it decodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from .blocks import clear
from .dtypes import F32, INF_BITS, ZERO, int_at, key_at
from .simd import compiled, get_f32, get_i64, inlined, load_f32, mask_of, select, store

Hidden = tuple[int, int, int]  # where indices are, ascending, where values are, and how many


@compiled
def first_from(hidden: Hidden, start: int) -> int:
    """The first entry that lies at `start` or behind it."""
    low: Any = 0
    high: Any = hidden[2]
    while low < high:
        middle = (low + high) >> 1
        if int_at(hidden[0] + 4 * middle) < start:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def mark_until(hidden: Hidden, entry: int, start: int, end: int, marks: int) -> int:
    """Marks which of the elements from `start` to `end` are hidden, those of the entries from one on whose value is
    finite: a word for 64. Returns the first entry behind them."""
    index, value, count = hidden
    clear(marks, (end - start + 63) >> 6 << 3)
    while entry < count:
        at = int_at(index + 4 * entry)
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
    """residual = 0, if there is one, for entries whose value is finite: they are sent as they are."""
    for i in range(4 * first, 4 * last if residual else 0, 4):
        if key_at(hidden[1] + i) < INF_BITS:
            store(residual + 4 * int_at(hidden[0] + i), ZERO)


Shown = tuple[int, int]  # where lists are, a `Hidden` for each rank, or 0 if there are none, and room for a block's


@compiled
def shown_bytes(block: int) -> int:
    """What a rank takes of the room: which entry is next, marks, and values."""
    return 8 + (block >> 3) + 4 * block


@inlined
def shown_by(shown: Shown, r: int, block: int) -> Any:
    """Where a rank's marks are, and its values behind them; 0 if nothing is shown."""
    return shown[1] + r * shown_bytes(block) + 8 if shown[0] else 0


@compiled
def list_of(shown: Shown, r: int) -> Hidden:
    row = shown[0] + 24 * r
    return get_i64(row), get_i64(row + 8), get_i64(row + 16)


@compiled
def begin_showing(shown: Shown, ranks: int, start: int, block: int) -> None:
    """From the entries on that lie at `start` or behind it."""
    for r in range(ranks if shown[0] else 0):
        store(shown_by(shown, r, block) - 8, np.int64(first_from(list_of(shown, r), start)))


@compiled
def show(shown: Shown, ranks: int, start: int, block: int, alpha: float) -> None:
    """To the room: for each rank which elements of a block are listed, and alpha · value there."""
    for r in range(ranks if shown[0] else 0):
        marks, (index, value, count) = shown_by(shown, r, block), list_of(shown, r)
        clear(marks, block >> 3)
        entry: Any = get_i64(marks - 8)
        while entry < count:
            at = int_at(index + 4 * entry) - start
            if at >= block:
                break
            word = marks + (at >> 6 << 3)
            store(word, get_i64(word) | np.int64(1) << (at & 63))
            store(marks + (block >> 3) + 4 * at, F32(alpha) * get_f32(value + 4 * entry))
            entry += 1
        store(marks - 8, np.int64(entry))


@inlined
def or_shown(v: Any, marks: int, block: int, i: int) -> Any:
    """64 elements of a block, the first of them i, but what is listed where that is marked."""
    if marks:
        return select(mask_of(get_i64(marks + (i >> 3))), load_f32(marks + (block >> 3) + 4 * i), v)
    return v
