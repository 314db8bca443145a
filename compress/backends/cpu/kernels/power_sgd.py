"""PowerSGD on the CPU: the passes over matrices, each of which reads a matrix once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, float32, int64

from ...memory import address
from ...power_sgd import LEAST, ROWS, RUN, Matrices, PowerSGDKernels
from ..block_codec import CpuKernels
from ..runtime.blocks import all_finite, clear, fold_lanes
from ..runtime.dtypes import F32, NAN, ZERO, finite
from ..runtime.simd import compiled, get_f32, get_f64, get_i64, inlined, load_f32, select, splat_f32, store
from ..runtime.threads import pieces_of, reserved, run

#: Where a row of `Matrices.table` is, and how many there are; and the first and last line, or strip, that are done.
Table = tuple[int, int]

Span = tuple[int, int]

F64 = np.float64

ENTRY = 8 * 8

# Scratch: 256 partial sums, the end of a row, of each column of a factor something, and a tile of 64 times 64 elements.
SUMS, END, FACTORS = 0, 8 * 256, 8 * 256 + 256


def scratch_bytes(rank: int) -> int:
    return FACTORS + 256 * rank + 256 * ROWS


@compiled
def copy_numbers(target: int, source: int, count: int) -> None:
    for i in range(0, 4 * count, 4):
        store(target + i, get_f32(source + i))


@compiled
def fill(target: int, count: int, value: Any) -> None:
    for i in range(0, 4 * count, 4):
        store(target + i, value)


@compiled
def power_sgd_take(table: Table, x: int, whole: int) -> None:
    for entry in range(table[0], table[0] + ENTRY * table[1], ENTRY):
        if get_i64(entry + 16) == 0:
            source, target = x + 4 * get_i64(entry), whole + 4 * get_i64(entry + 24)
            for i in range(0, 4 * get_i64(entry + 8), 4):
                one = get_f32(source + i)
                store(target + i, NAN if np.isnan(one) else one)


@compiled
def power_sgd_left(table: Table, rank: int, x: int, start: int, out: int, span: Span, scratch: int) -> None:
    """out = M·S, of the lines of a span."""
    sums, end, ends = scratch + SUMS, scratch + END, scratch + FACTORS
    for entry in range(table[0], table[0] + ENTRY * table[1], ENTRY):
        rows, columns, line = get_i64(entry + 8), get_i64(entry + 16), get_i64(entry + 40)
        first, last = max(span[0] - line, 0), min(span[1] - line, rows)
        if columns == 0 or first >= last:
            continue
        whole, s = columns & ~63, start + 4 * get_i64(entry + 32)
        if whole < columns:
            clear(end, 256)
            clear(ends, 256 * rank)
            for k in range(rank):
                copy_numbers(ends + 256 * k, s + 4 * (k * columns + whole), columns - whole)
        for i in range(first, last):
            row = x + 4 * (get_i64(entry) + i * columns)
            if whole < columns:
                copy_numbers(end, row + 4 * whole, columns - whole)
            for k in range(rank):
                column = s + 4 * k * columns
                for lane in range(0, 1024, 256):
                    total = splat_f32(ZERO)
                    for j in range(lane, 4 * whole, 1024):
                        total = total + load_f32(row + j) * load_f32(column + j)
                    if whole < columns and (4 * whole) % 1024 == lane:
                        total = total + load_f32(end) * load_f32(ends + 256 * k)
                    store(sums + lane, total)
                store(out + 4 * (get_i64(entry + 24) + k * rows + i), fold_lanes(sums))


@compiled
def dot(a: int, b: int, count: int, sums: int) -> Any:
    """In float64, by 256 partial sums."""
    clear(sums, 8 * 256)
    for i in range(count):
        lane = sums + 8 * (i & 255)
        store(lane, get_f64(lane) + F64(get_f32(a + 4 * i)) * F64(get_f32(b + 4 * i)))
    half = 128
    while half:
        for i in range(sums, sums + 8 * half, 8):
            store(i, get_f64(i) + get_f64(i + 8 * half))
        half >>= 1
    return get_f64(sums)


@compiled
def power_sgd_orthonormalise(table: Table, rank: int, left: int, scratch: int) -> None:
    sums = scratch + SUMS
    for entry in range(table[0], table[0] + ENTRY * table[1], ENTRY):
        rows, p = get_i64(entry + 8), left + 4 * get_i64(entry + 24)
        if get_i64(entry + 16) == 0:
            continue
        if not all_finite(p, rank * rows):
            fill(p, rank * rows, NAN)
            continue
        for k in range(rank):
            column = p + 4 * k * rows
            before = np.sqrt(dot(column, column, rows, sums))
            for other in range(p, column, 4 * rows):
                share = dot(other, column, rows, sums)
                for i in range(0, 4 * rows, 4):
                    store(column + i, F32(F64(get_f32(column + i)) - share * F64(get_f32(other + i))))
            after = np.sqrt(dot(column, column, rows, sums))
            if after > before * LEAST:
                for i in range(0, 4 * rows, 4):
                    store(column + i, F32(F64(get_f32(column + i)) / after))
            else:
                fill(column, rows, ZERO)


@compiled
def power_sgd_right(table: Table, rank: int, x: int, left: int, out: int, span: Span, scratch: int) -> None:
    """out = Mᵀ·P, of the strips of a span: by 64 columns, and 64 rows at a time."""
    totals, tile = scratch + FACTORS, scratch + FACTORS + 256 * rank
    for entry in range(table[0], table[0] + ENTRY * table[1], ENTRY):
        rows, columns, strip = get_i64(entry + 8), get_i64(entry + 16), get_i64(entry + 48)
        first, last = max(span[0] - strip, 0) * RUN, min((span[1] - strip) * RUN, columns)
        m, p, q = x + 4 * get_i64(entry), left + 4 * get_i64(entry + 24), out + 4 * get_i64(entry + 32)
        for begin in range(first, last, 64):
            width = min(64, columns - begin)
            clear(totals, 256 * rank)
            if width < 64:
                clear(tile, 256 * ROWS)
            for top in range(0, rows, ROWS):
                count, source, pitch = min(ROWS, rows - top), m + 4 * (top * columns + begin), 4 * columns
                if width < 64:
                    for i in range(count):
                        copy_numbers(tile + 256 * i, source + i * pitch, width)
                    source, pitch = tile, 256
                for k in range(rank):
                    part, column = splat_f32(ZERO), p + 4 * (k * rows + top)
                    for i in range(count):
                        part = part + load_f32(source + i * pitch) * get_f32(column + 4 * i)
                    store(totals + 256 * k, load_f32(totals + 256 * k) + part)
            for k in range(rank):
                copy_numbers(q + 4 * (k * columns + begin), totals + 256 * k, width)


@compiled
def power_sgd_settle(table: Table, rank: int, left: int, right: int) -> None:
    for entry in range(table[0], table[0] + ENTRY * table[1], ENTRY):
        rows, columns = get_i64(entry + 8), get_i64(entry + 16)
        q = right + 4 * get_i64(entry + 32)
        if columns and not all_finite(q, rank * columns):
            fill(left + 4 * get_i64(entry + 24), rank * rows, NAN)
            fill(q, rank * columns, NAN)


@compiled
def power_sgd_follow(table: Table, rank: int, right: int, start: int, scratch: int) -> None:
    for entry in range(table[0], table[0] + ENTRY * table[1], ENTRY):
        columns = get_i64(entry + 16)
        for k in range(rank if columns else 0):
            at = 4 * (get_i64(entry + 32) + k * columns)
            length = np.sqrt(dot(right + at, right + at, columns, scratch + SUMS))
            if np.isfinite(length) and length > 0:
                for i in range(at, at + 4 * columns, 4):
                    store(start + i, F32(F64(get_f32(right + i)) / length))


@inlined
def product(p: int, q: int, rank: int, rows: int, columns: int) -> Any:
    """64 numbers of P·Qᵀ, of the row and from the column on that `p` and `q` point to."""
    value = load_f32(q) * get_f32(p)
    for k in range(1, rank):
        value = value + load_f32(q + 4 * k * columns) * get_f32(p + 4 * k * rows)
    return value


@inlined
def product_at(p: int, q: int, rank: int, rows: int, columns: int) -> Any:
    """One of them."""
    value = get_f32(q) * get_f32(p)
    for k in range(1, rank):
        value = value + get_f32(q + 4 * k * columns) * get_f32(p + 4 * k * rows)
    return value


@compiled
def power_sgd_add(
    table: Table, rank: int, numbers: tuple[int, int, int], out: int, alpha: float, fresh: int, span: Span
) -> None:
    """out += alpha times what the numbers stand for, of the lines of a span."""
    whole, left, right = numbers
    factor = F32(alpha)
    for entry in range(table[0], table[0] + ENTRY * table[1], ENTRY):
        rows, columns, line = get_i64(entry + 8), get_i64(entry + 16), get_i64(entry + 40)
        target, at = out + 4 * get_i64(entry), 4 * get_i64(entry + 24)
        if columns == 0:
            first, last = max(span[0] - line, 0) * RUN, min((span[1] - line) * RUN, rows)
            for i in range(4 * first, 4 * last, 4):
                before = ZERO if fresh else get_f32(target + i)
                store(target + i, before + get_f32(whole + at + i) * factor)
            continue
        q = right + 4 * get_i64(entry + 32)
        for i in range(max(span[0] - line, 0), min(span[1] - line, rows)):
            p, row = left + at + 4 * i, target + 4 * i * columns
            for j in range(0, 4 * (columns & ~63), 256):
                before = splat_f32(ZERO) if fresh else load_f32(row + j)
                store(row + j, before + product(p, q + j, rank, rows, columns) * factor)
            for j in range(4 * (columns & ~63), 4 * columns, 4):
                one = product_at(p, q + j, rank, rows, columns)
                store(row + j, (ZERO if fresh else get_f32(row + j)) + one * factor)


@compiled
def power_sgd_odd(table: Table, rank: int, numbers: tuple[int, int, int]) -> int:
    """How many matrices, and elements that are in none, are not finite."""
    whole, left, right = numbers
    odd = 0
    for entry in range(table[0], table[0] + ENTRY * table[1], ENTRY):
        rows, columns, at = get_i64(entry + 8), get_i64(entry + 16), 4 * get_i64(entry + 24)
        if columns:
            q = right + 4 * get_i64(entry + 32)
            odd += not (all_finite(left + at, rank * rows) and all_finite(q, rank * columns))
        else:
            for i in range(whole + at, whole + at + 4 * rows, 4):
                odd += not all_finite(i, 1)
    return odd


@compiled
def power_sgd_leave(table: Table, rank: int, left: int, right: int, total: int, residual: int, span: Span) -> None:
    """residual = total less what is sent of it, where that is finite, of the lines of a span."""
    for entry in range(table[0], table[0] + ENTRY * table[1], ENTRY):
        rows, columns, line = get_i64(entry + 8), get_i64(entry + 16), get_i64(entry + 40)
        if columns == 0:
            first, last = max(span[0] - line, 0) * RUN, min((span[1] - line) * RUN, rows)
            for i in range(4 * (get_i64(entry) + first), 4 * (get_i64(entry) + last), 4):
                sent = get_f32(total + i)
                if np.isfinite(sent):  # zero is left, with the sign that subtracting gives
                    store(residual + i, sent - (sent + ZERO))
            continue
        q = right + 4 * get_i64(entry + 32)
        for i in range(max(span[0] - line, 0), min(span[1] - line, rows)):
            p, row = left + 4 * (get_i64(entry + 24) + i), 4 * (get_i64(entry) + i * columns)
            for j in range(0, 4 * (columns & ~63), 256):
                rest = load_f32(total + row + j) - (product(p, q + j, rank, rows, columns) + ZERO)
                store(residual + row + j, select(finite(rest), rest, load_f32(residual + row + j)))
            for j in range(4 * (columns & ~63), 4 * columns, 4):
                one = product_at(p, q + j, rank, rows, columns)
                left_over = get_f32(total + row + j) - (one + ZERO)
                if np.isfinite(left_over):
                    store(residual + row + j, left_over)


class PowerSGD(PowerSGDKernels, CpuKernels):
    """Threads share lines, which are rows, or strips of columns."""

    def take(self, matrices: Matrices, x: Tensor, whole: Tensor) -> None:
        power_sgd_take(_table(matrices), address(x, float32), address(whole, float32))

    def left(self, matrices: Matrices, x: Tensor, start: Tensor, out: Tensor) -> None:
        where = address(x, float32), address(start, float32), address(out, float32)
        table, rank = _table(matrices), matrices.rank
        _shared(matrices, x, matrices.lines, lambda span, scratch: power_sgd_left(table, rank, *where, span, scratch))

    def orthonormalise(self, matrices: Matrices, left: Tensor) -> None:
        scratch = reserved(matrices.memory, "scratch", scratch_bytes(matrices.rank))
        power_sgd_orthonormalise(_table(matrices), matrices.rank, address(left, float32), scratch)

    def right(self, matrices: Matrices, x: Tensor, left: Tensor, out: Tensor) -> None:
        where = address(x, float32), address(left, float32), address(out, float32)
        table, rank = _table(matrices), matrices.rank
        _shared(matrices, x, matrices.strips, lambda span, scratch: power_sgd_right(table, rank, *where, span, scratch))

    def settle(self, matrices: Matrices, left: Tensor, right: Tensor) -> None:
        power_sgd_settle(_table(matrices), matrices.rank, address(left, float32), address(right, float32))

    def follow(self, matrices: Matrices, right: Tensor, start: Tensor) -> None:
        scratch = reserved(matrices.memory, "scratch", scratch_bytes(matrices.rank))
        power_sgd_follow(_table(matrices), matrices.rank, address(right, float32), address(start, float32), scratch)

    def add(self, matrices: Matrices, numbers: Tensor, out: Tensor, alpha: float, fresh: bool, status: Tensor) -> None:
        whole = address(numbers, float32)
        parts = whole, whole + 4 * matrices.whole, whole + 4 * (matrices.whole + matrices.left)
        table, rank, target = _table(matrices), matrices.rank, address(out, float32)
        status.numpy()[1] += power_sgd_odd(table, rank, parts)

        def job(span: Span, scratch: int) -> None:
            power_sgd_add(table, rank, parts, target, float(alpha), int(fresh), span)

        _shared(matrices, out, matrices.lines, job)

    def leave(self, matrices: Matrices, left: Tensor, right: Tensor, total: Tensor, residual: Tensor) -> None:
        where = address(left, float32), address(right, float32), address(total, float32), address(residual, float32)
        table, rank = _table(matrices), matrices.rank
        _shared(matrices, total, matrices.lines, lambda span, scratch: power_sgd_leave(table, rank, *where, span))


def _table(matrices: Matrices) -> Table:
    return address(matrices.table, int64), len(matrices.rows)


def _shared(matrices: Matrices, x: Tensor, count: int, job: Callable[[Span, int], None]) -> None:
    """A job over so many lines or strips, by this thread and others, each with scratch of its own."""
    pieces, size = pieces_of(x.numel(), count), scratch_bytes(matrices.rank)
    scratch = reserved(matrices.memory, "scratch", pieces * size)
    run(lambda first, last, piece: job((first, last), scratch + piece * size), count, pieces)
