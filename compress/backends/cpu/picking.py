"""The numba kernels of Outliers: record = entries as of ChunkedTopK, then the inner code's records.

What encoding and decoding take is as in `dense.py`. Where the kernel of the inner code hides entries, a chunk is coded
as soon as its own are picked, while it lies in cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .blocks import (
    F32,
    FLOAT32,
    INF_BITS,
    NAN,
    SPARE,
    SUMS,
    ZERO,
    A,
    clear,
    copy,
    largest_bits,
    read_block,
    widen,
    width,
)
from .chunked import OTHER_SCALE, Form, fit, record_bytes, values_of, write_entries
from .dense import Source, Span, onebit_encode
from .packing import unpack_indices
from .selecting import choose, room_for
from .simd import compiled, get_f32, get_i64, inlined, store
from .sparse import int_at, key_at
from .ternary import ternary_encode

Lists = tuple[int, int, int]  # where 64-bit indices are, where values are, and where the numbers of each chunk's are


@compiled
def pick(
    x: Source, residual: int, numel: int, b: int, form: Form, guess: int, before: int, scratch: int
) -> tuple[int, int, int]:
    """Lists what is selected of a chunk, in scratch; zeros follow the values. Returns how many, and where to look first
    in the next chunk: a key, and the largest of this one."""
    kind, source = x
    chunk, k, _, _ = form
    start = b * chunk
    index = scratch + A + 4 * chunk
    value = index + 4 * room_for(k)
    a = read_block(kind, source, residual, start, min(chunk, numel - start), chunk, scratch)
    largest = largest_bits(a, chunk)
    if largest >= INF_BITS:
        clear(value, 4 * room_for(k))
        return 0, guess, before
    if guess > 1 and abs(largest - before) > OTHER_SCALE:
        guess += largest - before
    following = start + chunk
    ahead = source + width(kind) * following, residual + 4 * following if residual else 0
    count, guess = choose(a, chunk, k, largest, guess, index, value, ahead)
    return count, guess, largest


@compiled
def pack(form: Form, count: int, record: int, e: int, scratch: int) -> None:
    """What `pick` has listed, to the record; what rounding leaves of the values, to its residual `e`, if not 0."""
    chunk, k, bits, _ = form
    index = scratch + A + 4 * chunk
    low = high = ZERO
    if bits < 16:
        low, high = fit(index + 4 * room_for(k), (k + 255) & ~255, count, bits, scratch + SUMS)
    write_entries(form, record, index, count, low, high, e)


@compiled
def around_onebit(
    x: Source, residual: int, wire: int, span: Span, form: Form, block: int, sided: int, scratch: int, inner: int
) -> None:
    numel, first, last = span
    chunk, own, each = form[0], record_bytes(form), 8 + (block >> 3)
    index = scratch + A + 4 * chunk
    value = index + 4 * room_for(form[1])
    guess: Any = 0
    before: Any = 0
    for b in range(first, last):
        count, guess, before = pick(x, residual, numel, b, form, guess, before, scratch)
        begin = b * (chunk // block)
        end = min(begin + chunk // block, (numel + block - 1) // block)
        rest = wire + b * (own + chunk // block * each) + own
        hidden = index, value, count, b * chunk
        onebit_encode(x, residual, rest - begin * each, (numel, begin, end), block, sided, hidden, inner)
        clear(rest + (end - begin) * each, (begin + chunk // block - end) * each)
        e = residual + 4 * b * chunk if residual else 0
        pack(form, count, rest - own, e, scratch)


@compiled
def around_ternary(
    x: Source, residual: int, wire: int, span: Span, form: Form, block: int, scratch: int, inner: int
) -> None:
    numel, first, last = span
    chunk, own, each = form[0], record_bytes(form), 4 + block // 5
    index = scratch + A + 4 * chunk
    value = index + 4 * room_for(form[1])
    guess: Any = 0
    before: Any = 0
    for b in range(first, last):
        count, guess, before = pick(x, residual, numel, b, form, guess, before, scratch)
        begin = b * (chunk // block)
        end = min(begin + chunk // block, (numel + block - 1) // block)
        rest = wire + b * (own + chunk // block * each) + own
        hidden = index, value, count, b * chunk
        ternary_encode(x, residual, rest - begin * each, (numel, begin, end), block, hidden, inner)
        clear(rest + (end - begin) * each, (begin + chunk // block - end) * each)
        e = residual + 4 * b * chunk if residual else 0
        pack(form, count, rest - own, e, scratch)


@inlined
def element(kind: int, address: int, scratch: int) -> Any:
    """One element as float32."""
    if kind == FLOAT32:
        return get_f32(address)
    widen(kind, address, scratch + A, 1, scratch + SPARE)
    return get_f32(scratch + A)


@compiled
def pick_all(x: Source, residual: int, target: int, span: Span, form: Form, lists: Lists, scratch: int) -> None:
    """Each chunk's entries to its place in the lists; target[index] = -x[index] where that is the residual, or 0."""
    kind, source = x
    numel, first, last = span
    chunk, k, _, _ = form
    index, value, counts = lists
    found = scratch + A + 4 * chunk
    guess: Any = 0
    before: Any = 0
    for b in range(first, last):
        count, guess, before = pick(x, residual, numel, b, form, guess, before, scratch)
        store(counts + 4 * b, np.int32(count))
        copy(value + 4 * b * k, found + 4 * room_for(k), 4 * count)
        for i in range(0, 4 * count, 4):
            at = b * chunk + int_at(found + i)
            store(index + 8 * b * k + 2 * i, np.int64(at))
            left = ZERO
            if residual:
                left = ZERO - element(kind, source + at * width(kind), scratch)
            store(target + 4 * at, left)


@compiled
def pack_all(wire: int, size: int, residual: int, span: Span, form: Form, lists: Lists, scratch: int) -> None:
    """What `pick_all` has listed, to the records, which are `size` bytes long, as `pack` does."""
    _, first, last = span
    chunk, k, _, _ = form
    index, value, counts = lists
    found = scratch + A + 4 * chunk
    for b in range(first, last):
        count = int_at(counts + 4 * b)
        for i in range(count):
            store(found + 4 * i, np.int32(get_i64(index + 8 * (b * k + i)) - b * chunk))
        clear(found + 4 * room_for(k), 4 * room_for(k))
        copy(found + 4 * room_for(k), value + 4 * b * k, 4 * count)
        pack(form, count, wire + b * size, residual + 4 * b * chunk if residual else 0, scratch)


@compiled
def list_all(
    wire: int, size: int, numel: int, form: Form, index: int, value: int, scratch: int
) -> tuple[int, int, int]:
    """The entries of a wire that count, one after the other. Returns how many they are, how many others, and how many
    of them are not finite."""
    chunk, k, bits, layout = form
    head, found = 8 if bits < 16 else 0, scratch + A + 4 * chunk
    number = found + 4 * room_for(k)
    count: Any = 0
    skipped: Any = 0
    unsound: Any = 0
    for b in range((numel + chunk - 1) // chunk):
        record, end = wire + b * size, min((b + 1) * chunk, numel)
        if not values_of(record + head + 4 * (layout[1] + layout[2]), form, record, number) and bits < 16:
            for i in range(0, 4 * k, 4):
                store(number + i, NAN)
        claimed = unpack_indices(record + head, 0, chunk, layout, k, found)
        before: Any = b * chunk - 1
        skipped += claimed
        for i in range(0, 4 * min(claimed, k), 4):
            at = b * chunk + int_at(found + i)
            if before < at < end:
                before = at
                skipped -= 1
                unsound += key_at(number + i) >= INF_BITS
                store(index + 8 * count, np.int64(at))
                store(value + 4 * count, get_f32(number + i))
                count += 1
    return count, skipped, unsound


@compiled
def add_to_values(lists: tuple[int, int], count: int, base: int, out: int, alpha: float) -> None:
    """value = out[index - base] + alpha · value."""
    index, value = lists
    times = F32(alpha)
    for i in range(0, 4 * count, 4):
        store(value + i, get_f32(out + 4 * (get_i64(index + 2 * i) - base)) + times * get_f32(value + i))


@compiled
def put(lists: tuple[int, int], count: int, base: int, out: int) -> None:
    """out[index - base] = value."""
    index, value = lists
    for i in range(0, 4 * count, 4):
        store(out + 4 * (get_i64(index + 2 * i) - base), get_f32(value + i))
