"""The numba kernels that take entries out of a vector, and put them in the place of what a code says there; and what
kernels of a code need to do either themselves."""

from __future__ import annotations

from typing import Any

import numpy as np

from .blocks import SPARE, A, clear, widen
from .formats import F32, FLOAT32, INF_BITS, ZERO, int_at, key_at, width
from .simd import compiled, get_f32, get_i64, get_u32, inlined, load_f32, mask_of, select, store
from .sparse import Entries, Source


@inlined
def element(kind: int, address: int, scratch: int) -> Any:
    """One element as float32."""
    if kind == FLOAT32:
        return get_f32(address)
    widen(kind, address, scratch + A, 1, scratch + SPARE)
    return get_f32(scratch + A)


@compiled
def take_out(entries: Entries, count: int, x: Source, target: int, scratch: int) -> None:
    """target[index] = -x[index], or zero if x is 0, for entries whose value is finite."""
    index, value = entries
    kind, source = x
    for i in range(0, 4 * count, 4):
        if key_at(value + i) < INF_BITS:
            at = int_at(index + i)
            left = ZERO
            if source:
                left = ZERO - element(kind, source + at * width(kind), scratch)
            store(target + 4 * at, left)


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


@compiled
def keep_sound(row: int, value: int, k: int, numel: int) -> tuple[int, int, int]:
    """Of the entries behind their number, those move up whose index is in range and above every index in range before
    it. Returns how many they are, how many others, and how many of them are not finite."""
    claimed = int_at(row)
    index, kept, before, unsound = row + 4, 0, -1, 0
    for i in range(0, 4 * min(claimed, k), 4):
        at = int_at(index + i)
        if before < at < numel:
            before = at
            unsound += key_at(value + i) >= INF_BITS
            store(index + kept, get_u32(index + i))
            store(value + kept, get_u32(value + i))
            kept += 4
    return kept >> 2, claimed - (kept >> 2), unsound


@compiled
def add_to_values(entries: Entries, count: int, out: int, alpha: float) -> None:
    """value = out[index] + alpha · value."""
    index, value = entries
    times = F32(alpha)
    for i in range(0, 4 * count, 4):
        store(value + i, get_f32(out + 4 * int_at(index + i)) + times * get_f32(value + i))


@compiled
def put(entries: Entries, count: int, out: int) -> None:
    """out[index] = value."""
    index, value = entries
    for i in range(0, 4 * count, 4):
        store(out + 4 * int_at(index + i), get_f32(value + i))
