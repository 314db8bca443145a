"""TopK: a threshold predicted from a sample of the gradient, selection in one pass, and sums of entries.

The pass collects candidates, every element at or above a threshold, and an exact selection looks at those alone.
Threads share the tiles of a gradient: each collects from its own into a `Room` of its own, one finds the k-th largest
of all candidates, and each sends its own. `Room` is memory: the indices and values of `capacity` candidates, in
ascending order of index, a histogram of 2048 counts, and scratch for a tile. A *key* is a magnitude as an integer: the
bits of the float without its sign.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, float32, int32

from ... import MomentumInput, Workspace, kernel_cache
from ...memory import address, rows_at
from ...sparse import PlainSums, S
from ..block_codec import CpuKernels
from ..entries import ENTRY_COST, Entries
from ..runtime.blocks import (
    SPARE,
    SUMS,
    A,
    Rows,
    Span,
    clear,
    copy,
    end_sum,
    read_ahead,
    read_block,
    residual_block,
    scratch_bytes,
)
from ..runtime.dtypes import (
    BFLOAT16,
    F32,
    FLOAT32,
    INF_BITS,
    KINDS,
    LOW,
    MAGNITUDE,
    NAN_BITS,
    TILE,
    Source,
    finite,
    int_at,
    key_at,
)
from ..runtime.fused_inputs import PEEK, gradient_at, momentum_at
from ..runtime.simd import (
    as_i32,
    bits_of,
    compiled,
    count_ones,
    get_f32,
    get_i32,
    get_i64,
    inlined,
    load_f32,
    lowest_bit,
    select,
    store,
    word_of,
)
from ..runtime.threads import inverse, note, pieces_of, reserved, run, whole_lines

Room = tuple[int, int, int, int, int]  # index, value, capacity, histogram, scratch

Pointers = tuple[int, int]  # of indices, and of values

#: Tiles that are searched before what is found in them is listed. Listing takes branches that nobody can foresee, and
#: each that is guessed wrong also stops the fetching of what comes next.
BATCH = 16

MASKS = TILE // 64 * 8

#: How many elements ahead a pass asks for. Mostly in the same page, which the hardware fetches by itself, and faster:
#: what is farther ahead it would be asked for all the time.
AHEAD = 384


@inlined
def candidates(v: Any, threshold: int, masks: int, i: int) -> Any:
    """Which of 64 elements from `i` on are at or above the threshold, as a word among the tile's masks. Returns that
    word's own bit if there are any."""
    bits = bits_of((as_i32(v) & MAGNITUDE) >= threshold)
    store(masks + (i >> 3), bits)
    return np.int64(bits != 0) << (i >> 6)


@compiled
def enter(
    kind: int, x: int, residual: int, start: int, n: int, threshold: int, masks: int, scratch: int
) -> tuple[int, int, int]:
    """Let a tile of n elements from `start` on enter the residual e, and mark its candidates.

    a = x + e; e = a where that is finite; bit i of `masks` (64 bits a word) = |a_i| ≥ threshold.

    Args:
        kind, x: how the gradient is stored, and where; x = 0: the residual holds a already.
        residual: the address of e, float32; 0: there is none, a = x.
        masks: room for TILE / 64 words.
        scratch: `scratch_bytes(TILE)`.

    Returns:
        The addresses of a, float32 [TILE], and of the tile of e, or 0; and bit j set if word j of the masks is not 0.
    """
    a, old = scratch + A, residual + 4 * start
    words: Any = 0
    if x and residual and kind == FLOAT32 and n == TILE:
        source, kept = x + 4 * start, 0
        for i in range(0, TILE, 64):
            e = load_f32(old + 4 * i)
            v = load_f32(source + 4 * i) + e
            words |= candidates(v, threshold, masks, i)
            good = finite(v)
            if bits_of(good) == -1:
                store(old + 4 * i, v)
            else:  # a and the residual differ: a in scratch then, all of it
                store(old + 4 * i, select(good, v, e))
                store(a + 4 * i, v)
                kept |= 1 << (i >> 6)
            read_ahead(source + 4 * (i + AHEAD))
            read_ahead(old + 4 * (i + AHEAD))
        if not kept:
            return old, old, words
        for i in range(0, TILE, 64):
            if not (kept >> (i >> 6)) & 1:
                store(a + 4 * i, load_f32(old + 4 * i))
        return a, old, words
    if x:
        a = read_block(kind, x, residual, start, n, TILE, scratch)
    else:
        clear(a, 4 * TILE)
        copy(a, old, 4 * n)
    if not residual:
        for i in range(0, TILE, 64):
            words |= candidates(load_f32(a + 4 * i), threshold, masks, i)
        return a, 0, words
    e_block = residual_block(residual, start, n, TILE, scratch)
    sound: Any = -1
    for i in range(0, TILE, 64):
        v = load_f32(a + 4 * i)
        words |= candidates(v, threshold, masks, i)
        sound &= bits_of(finite(v))
        store(e_block + 4 * i, select(finite(v), v, load_f32(e_block + 4 * i)))
    return e_block if sound == -1 else a, e_block, words


Tile = tuple[int, int]  # where a lies, and the residual to change, or 0


@inlined
def append(index: int, value: int, count: int, tile: Tile, start: int, j: int, likely: int) -> None:
    a, e = tile
    word = word_of(get_f32(a + 4 * j))
    key = np.int64(word) & MAGNITUDE
    store(index + 4 * count, np.int32(start + j))
    store(value + 4 * count, NAN_BITS if key > INF_BITS else word)
    if e:
        store(e + 4 * j, np.int32(0) if likely <= key < INF_BITS else get_i32(e + 4 * j))


@compiled
def gather(index: int, value: int, count: int, tile: Tile, start: int, likely: int, masks: int, words: int) -> int:
    """Append a tile's candidates. The residual becomes 0 where the key is `likely` or more, which most likely is sent:
    to mend the others later, one by one and far apart, is less work.

    A word has one or two candidates as a rule: those take no branch, which would be mispredicted, but an entry that is
    none is written over by the next."""
    rest: Any = words
    while rest:
        i = lowest_bit(rest) << 6
        rest &= rest - 1
        bits = get_i64(masks + (i >> 3))
        for _ in range(2):
            append(index, value, count, tile, start, i + lowest_bit(bits | (-1 << 63)), likely)
            count += bits != 0
            bits &= bits - 1
        while bits:
            append(index, value, count, tile, start, i + lowest_bit(bits), likely)
            count += 1
            bits &= bits - 1
    return count


@compiled
def collect(x: Source, residual: int, span: Span, k: int, threshold: int, likely: int, room: Room) -> tuple[int, int]:
    """One pass: every element whose key is `threshold` or more becomes a candidate. Returns how many there are, and
    from which key on they are 0 in the residual, if there is one.

    When the candidates no longer fit, all but the k largest go, and from then on only what is above them is collected:
    among equals the earlier stay. So the k largest are always found, if there are k at or above the first threshold.
    """
    kind, source = x
    numel, first, last = span
    index, value, capacity, histogram, scratch = room
    masks, found = scratch + SUMS, scratch + A + 8 * TILE
    tile: Any = first
    count: Any = 0
    while tile < last:
        if count + TILE > capacity:
            store(scratch, np.int64(value))
            store(scratch + 8, np.int64(count))
            key, ties = kth_largest(scratch, 1, k, histogram)
            count = keep(index, value, count, key, ties, likely, residual, (index, value))
            threshold, likely = key + 1, 0  # those kept are 0 in the residual, whatever their key
        end, at = min(tile + BATCH, tile + (capacity - count) // TILE, last), tile
        while at < end:
            start, mask = at * TILE, masks + (at - tile) * MASKS
            n = min(TILE, numel - start)
            a, e, words = enter(kind, source, residual, start, n, threshold, mask, scratch)
            row = found + 24 * (at - tile)
            store(row, a)
            store(row + 8, e)
            store(row + 16, words)
            at += 1
            if a == scratch + A:
                end = at  # before the next one is there
        for t in range(tile, end):
            row, mask = found + 24 * (t - tile), masks + (t - tile) * MASKS
            where = get_i64(row), get_i64(row + 8)
            count = gather(index, value, count, where, t * TILE, max(threshold, likely), mask, get_i64(row + 16))
        if residual and end * TILE > numel:
            start = (end - 1) * TILE
            copy(residual + 4 * start, get_i64(found + 24 * (end - 1 - tile) + 8), 4 * (numel - start))
        tile = end
    return count, likely


@compiled
def collect_again(
    x: Source, residual: int, span: Span, k: int, lowest: int, count: int, spare: Pointers, room: Room
) -> tuple[int, int]:
    """Once more, from `lowest` on, after a threshold that was too high; `spare` has room for `count` entries."""
    index, value = room[0], room[1]
    kept_index, kept_value = spare
    kept = 0
    if residual:
        # With every candidate put back, the residual holds a.
        kept = put_back(residual, index, value, count, kept_index, kept_value)
        x = (FLOAT32, 0)
    result = collect(x, residual, span, k, lowest, lowest, room)
    for i in range(0, 4 * kept, 4):
        store(residual + 4 * int_at(kept_index + i), get_i32(kept_value + i))
    return result


@compiled
def count_digits(value: int, count: int, prefix: int, shift: int, bits: int, histogram: int) -> None:
    """Add how often each value of a digit of the keys occurs, among the keys that begin with `prefix`."""
    for i in range(0, 4 * count, 4):
        key = key_at(value + i)
        if key >> (shift + bits) == prefix:
            slot = histogram + 4 * ((key >> shift) & ((1 << bits) - 1))
            store(slot, np.int32(get_i32(slot) + 1))


@compiled
def kth_largest(lists: int, pieces: int, k: int, histogram: int) -> tuple[int, int]:
    """The k-th largest of at least k keys, digit by digit, and how many of those equal to it are among the k.

    `lists` holds, for each piece, where its values are, and how many.
    """
    key, left = 0, k
    for digit in range(3):
        bits, shift = 11 if digit == 0 else 10, 20 - 10 * digit
        clear(histogram, 4 << bits)
        for row in range(lists, lists + 16 * pieces, 16):
            count_digits(get_i64(row), get_i64(row + 8), key, shift, bits, histogram)
        d = (1 << bits) - 1
        while d > 0 and int_at(histogram + 4 * d) < left:
            left -= int_at(histogram + 4 * d)
            d -= 1
        key = key << bits | d
    return key, left


@compiled
def tally(value: int, count: int, key: int) -> tuple[int, int]:
    """How many keys are above `key`, and how many equal to it. May read 63 values beyond the last."""
    above = equal = 0
    for i in range(0, count, 64):
        inside = used_of(count, i)
        keys = as_i32(load_f32(value + 4 * i)) & MAGNITUDE
        above += count_ones(bits_of(keys > key) & inside)
        equal += count_ones(bits_of(keys == key) & inside)
    return above, equal


@inlined
def used_of(count: int, i: int) -> Any:
    """Which of 64 candidates from `i` on there are."""
    return -1 if count - i >= 64 else (1 << (count - i)) - 1


@compiled
def near(value: int, count: int, high: int, target: int, capacity: int) -> tuple[int, int]:
    """How many keys are `high` or more, and how many are not, which go to `target`; if there is no room for all of
    those, (0, `count`). May read 63 values beyond the last."""
    inside = 0
    for i in range(0, count, 64):
        bits = bits_of((as_i32(load_f32(value + 4 * i)) & MAGNITUDE) < high) & used_of(count, i)
        while bits and inside < capacity:
            store(target + 4 * inside, get_i32(value + 4 * (i + lowest_bit(bits))))
            inside += 1
            bits &= bits - 1
        if bits:
            return 0, count
    return count - inside, inside


@compiled
def first_of(bits: int, n: int) -> int:
    """The lowest n of the bits that are set, or all."""
    rest: Any = bits
    for _ in range(n):
        rest &= rest - 1
        if not rest:
            break
    return bits ^ rest


@compiled
def keep(index: int, value: int, count: int, key: int, ties: int, likely: int, residual: int, target: Pointers) -> int:
    """Copy the candidates above `key`, and the first `ties` equal to it, to `target`, which may be where they are. In
    the residual, which has 0 for those from `likely` on, what is dropped comes back, and what stays becomes 0."""
    kept: Any = 0
    left: Any = ties
    for i in range(0, count, 64):
        keys, inside = as_i32(load_f32(value + 4 * i)) & MAGNITUDE, used_of(count, i)
        good, equal = bits_of(keys > key) & inside, bits_of(keys == key) & inside
        if equal:
            equal = first_of(equal, left)
            left -= count_ones(equal)
            good |= equal
        if residual:
            mend = (good ^ bits_of(keys >= likely)) & bits_of(keys < INF_BITS) & inside
            while mend:
                j = lowest_bit(mend)
                at = 4 * (i + j)
                word = np.int32(0) if (good >> j) & 1 else get_i32(value + at)
                store(residual + 4 * int_at(index + at), word)
                mend &= mend - 1
        while good:
            at = 4 * (i + lowest_bit(good))
            store(target[0] + kept, get_i32(index + at))
            store(target[1] + kept, get_i32(value + at))
            kept += 4
            good &= good - 1
    return kept >> 2


@compiled
def put_back(residual: int, index: int, value: int, count: int, kept_index: int, kept_value: int) -> int:
    """Put every candidate into the residual. What was there is kept if it must come back, because the candidate is not
    finite; returns how often."""
    kept = 0
    for i in range(0, 4 * count, 4):
        place = residual + 4 * int_at(index + i)
        if key_at(value + i) >= INF_BITS:
            store(kept_index + kept, get_i32(index + i))
            store(kept_value + kept, get_i32(place))
            kept += 4
        store(place, get_i32(value + i))
    return kept >> 2


#: How many sampled runs ahead to ask for what they hold, which lies too far apart for the hardware to foresee.
RUNS_AHEAD = 8


@inlined
def sampled_run(stratum: int, stride: int) -> Any:
    """The first element of the run of 64 that stands for a stratum: any of its `stride` runs, since always the same
    one would be the same columns of many a matrix. Multiplicative hashing (Knuth, The Art of Computer Programming,
    volume 3, section 6.4)."""
    mixed = ((stratum * 0x9E3779B1) & LOW) >> 8
    return 64 * (stratum * stride + mixed % stride)


@compiled
def sample(x: Source, residual: int, strata: tuple[int, int], threshold: int, keys: int, scratch: int) -> int:
    """Sample the keys of a = x + residual: {min(|a_i|, inf) : |a_i| ≥ threshold, i in one run of each stratum}.

    Args:
        x: kind and address of the gradient; with `PEEK`, so that no momentum moves.
        residual: the address of float32 [n], only read; 0: none.
        strata: how many strata, and runs of 64 elements in each.
        threshold: a key.
        keys: the address of int32, room for 64 keys of each stratum; written.
        scratch: `scratch_bytes(64)`.

    Returns:
        How many keys were written.
    """
    kind, source = x
    strata_count, stride = strata
    count = 0
    for stratum in range(strata_count):
        later = sampled_run(stratum + RUNS_AHEAD, stride)
        read_ahead(gradient_at(kind, source, later))
        if kind > BFLOAT16:
            read_ahead(momentum_at(kind, source, later))
        if residual:
            read_ahead(residual + 4 * later)
        a = read_block(kind, source, residual, sampled_run(stratum, stride), 64, 64, scratch)
        bits = bits_of((as_i32(load_f32(a)) & MAGNITUDE) >= threshold)
        while bits:
            store(keys + 4 * count, np.int32(min(key_at(a + 4 * lowest_bit(bits)), INF_BITS)))
            count += 1
            bits &= bits - 1
    return count


@compiled
def topk_add(indices: int, values: int, out: int, numel: int, k: int, alpha: float) -> tuple[int, int]:
    """out += alpha · values. An entry counts if its index is in range and above every index in range before it."""
    claimed = int_at(indices)
    count, before, unsound, times = min(claimed, k), -1, 0, F32(alpha)
    skipped = claimed - count
    for i in range(0, 4 * count, 4):
        at = int_at(indices + 4 + i)
        if before < at < numel:
            v = get_f32(values + i)
            unsound += not np.isfinite(v)
            store(out + 4 * at, get_f32(out + 4 * at) + times * v)
            before = at
        else:
            skipped += 1
    return skipped, unsound


@compiled
def topk_mean(
    out: Source,
    indices: Rows,
    values: Rows,
    ranks: int,
    span: Span,
    k: int,
    scale: float,
    cursors: int,
    scratch: int,
) -> tuple[int, int]:
    """Tile by tile, so that sums stay in cache. `cursors` holds, for each rank, the next entry and the largest index
    so far. A span that does not start at the first tile reads what lies before it, and leaves counting it to others.
    """
    kind, target = out
    numel, first, last = span
    skipped = unsound = 0
    clear(cursors, 16 * ranks)
    for r in range(ranks):
        store(cursors + 16 * r + 8, np.int64(-1))
        if first == 0:
            skipped += max(int_at(indices[0] + r * indices[1]) - k, 0)
    total = scratch + A
    for t in range(first, last):
        start = t * TILE
        n = min(TILE, numel - start)
        clear(total, 4 * TILE)
        for r in range(ranks):
            row, numbers = indices[0] + r * indices[1], values[0] + r * values[1]
            count = min(int_at(row), k)
            i, before = get_i64(cursors + 16 * r), get_i64(cursors + 16 * r + 8)
            while i < count:
                at = int_at(row + 4 + 4 * i)
                if before < at < numel:
                    if at >= start + n:
                        break
                    before = at
                    if at >= start:
                        v = get_f32(numbers + 4 * i)
                        unsound += not np.isfinite(v)
                        place = total + 4 * (at - start)
                        store(place, get_f32(place) + v)
                elif before >= start or t == 0:
                    skipped += 1
                i += 1
            store(cursors + 16 * r, i)
            store(cursors + 16 * r + 8, before)
        end_sum(kind, total, target, start, n, TILE, 0, scale, scratch + SPARE)
    return skipped, unsound


#: Of one piece.
SCRATCH = whole_lines(scratch_bytes(TILE))


@dataclass(frozen=True)
class Estimate:
    """Keys predicted from a sample: every element from `threshold` on is a candidate, the k-th largest is about
    `likely`, and hardly above `high`. The first two are the lowest that may be selected if there is no telling."""

    threshold: int
    likely: int
    high: int = 1 << 31


class TopK(PlainSums[S], CpuKernels[S]):
    """Exact selection among the candidates of one pass, whose threshold is predicted from a sample of the gradient."""

    entries = Entries()

    def prepare(self, codec: S, dtype: torch.dtype, device: torch.device) -> None:
        with kernel_cache.task(type(codec).__name__):
            super().prepare(codec, dtype, device)
            self.entries.prepare(device)  # exchanges pack and merge entries even where the codec does not
            # A second pass is rare.
            (x, residual), workspace = torch.ones(2, 1, dtype=float32, device="cpu"), Workspace.on(device)
            source, spare = (KINDS[x.dtype], address(x)), torch.zeros(2, dtype=float32, device="cpu")
            places = address(spare), address(spare) + 4
            (room,) = self._rooms(1, 1, workspace)
            collect_again(source, address(residual, float32), (1, 0, 1), 1, 1, 0, places, room)

    #: One run of 64 elements in 8 is sampled at most, and one in 128 at least. In between, some 64 of the k are seen.
    strides = 8, 128
    #: Standard deviations (of a count of so many, if they fell anywhere) to allow for. Elements that lie together are
    #: alike, so there may be more: the allowance widens when it was too narrow, and comes back slowly.
    allowance = 3.5
    widen, narrow = 1.5, 0.99
    #: How far below the last threshold to look in a sample, in keys: an eighth of a binade, as residuals crowd just
    #: below, and then a binade.
    outlooks = 1 << 20, 1 << 23

    def workspace(self, codec: S, numel: int, device: torch.device) -> Workspace:
        workspace = Workspace.on(device)
        self._rooms(codec.k(numel), numel, workspace)
        return workspace

    def _rooms(self, k: int, numel: int, workspace: Workspace) -> list[tuple[int, int, int, int, int]]:
        """For each piece, memory to select in: it may come to hold all that is sent."""
        tiles = -(-numel // TILE)
        pieces = pieces_of(numel, tiles)
        capacity = min(k + 3 * k // pieces, -(-tiles // pieces) * TILE) + BATCH * TILE
        # Past the last entry, 64 are read and one is written before it is known that it was the last.
        list_size, histogram_size = 4 * (capacity + 64), 4 << 11
        size = 2 * list_size + histogram_size + SCRATCH
        memory = reserved(workspace, "rooms", pieces * size)
        rooms = []
        for index in range(memory, memory + pieces * size, size):
            value, histogram = index + list_size, index + 2 * list_size
            rooms.append((index, value, capacity, histogram, histogram + histogram_size))
        if len(workspace.buffers.get("lists", ())) < pieces:
            workspace.buffers["lists"] = np.empty((pieces, 2), np.int64)
        sampled = max(1, numel // self._stride(k))
        if len(workspace.buffers.get("sample", ())) < sampled:
            workspace.buffers["sample"] = np.empty(sampled, np.int32)
        return rooms

    def encode_momentum(
        self,
        codec: S,
        x: MomentumInput,
        residual: Tensor,
        wire: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        """In the same pass, as `Blocks` does."""
        if x.source is None:
            super().encode_momentum(codec, x, residual, wire, draw, workspace)
        else:
            self.encode_from(codec, x, residual, wire, draw, workspace)

    def encode_raw(
        self,
        codec: S,
        x: Tensor | MomentumInput,
        residual: Tensor | None,
        row: Tensor,
        values: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        k, lowest = len(values), self.lowest(codec)
        source = x.source if isinstance(x, MomentumInput) else (KINDS[x.dtype], address(x))
        assert source is not None
        numel = x.numel()
        rooms = self._rooms(k, numel, workspace)
        pieces, tiles = len(rooms), -(-numel // TILE)
        kept = 0 if residual is None else address(residual, float32)
        indices, numbers = address(row[1:], int32), address(values, float32)
        guess = self._estimate(source, kept, numel, k, lowest, rooms[0][4], workspace)

        def once(first: int, last: int, piece: int) -> Any:
            span = numel, first, last
            return collect(source, kept, span, k, guess.threshold, guess.likely, rooms[piece])

        found = run(once, tiles, pieces)
        counts = [count for count, _ in found]
        failed = sum(counts) < k and guess.threshold > lowest
        if failed:
            # The target, not written yet, has room for what this has to set aside.
            before = list(accumulate(counts, initial=0))

            def again(first: int, last: int, piece: int) -> Any:
                spare = indices + 4 * before[piece], numbers + 4 * before[piece]
                what = source, kept, (numel, first, last), k, lowest
                return collect_again(*what, counts[piece], spare, rooms[piece])

            found = run(again, tiles, pieces)
            counts = [count for count, _ in found]
        spread = workspace.buffers.get("spread", self.allowance)
        workspace.buffers["spread"] = spread * self.widen if failed else max(spread * self.narrow, self.allowance)
        key, shares = self._select(rooms, counts, k, guess.high, numbers, workspace)
        places = list(accumulate((sent for _, sent in shares), initial=0))

        def send(first: int, last: int, piece: int) -> None:
            for i in range(first, last):
                (index, value, *_), (count, likely), place = rooms[i], found[i], 4 * places[i]
                there = indices + place, numbers + place
                keep(index, value, count, key, shares[i][0], likely, kept, there)

        run(send, pieces, pieces_of(ENTRY_COST * k, pieces))
        row[0] = places[-1]
        row[1 + places[-1] :].zero_()
        values[places[-1] :].zero_()

    def lowest(self, codec: S) -> int:
        """The lowest key that may be selected: not that of zero."""
        return 1

    def _stride(self, k: int) -> int:
        least, most = self.strides
        return max(least, min(k // 64, most))

    def _estimate(
        self,
        source: tuple[int, int],
        residual: int,
        numel: int,
        k: int,
        lowest: int,
        scratch: int,
        workspace: Workspace,
    ) -> Estimate:
        """Where the k-th largest key lies, from `lowest` on, by what is found among a sample's: so many as are expected
        of k, plus and minus what chance may add and take."""
        memory, stride = workspace.buffers, self._stride(k)
        if source[0] > BFLOAT16:
            source = source[0] | PEEK, source[1]
        strata = numel // (64 * stride)
        expected = k * 64 * strata / numel
        spread = memory.get("spread", self.allowance) * math.sqrt(expected) + 2
        wanted = round(expected + spread)
        keys: np.ndarray = memory["sample"]
        last = memory.get("threshold", lowest)
        # First a little below the last threshold; where too few are found, farther down.
        for begin in dict.fromkeys((*(max(lowest, last - outlook) for outlook in self.outlooks), lowest)):
            count = sample(source, residual, (strata, stride), begin, keys.ctypes.data, scratch)
            if count >= wanted:
                ranks = wanted, max(1, round(expected)), max(1, round(expected - spread))
                places = [count - rank for rank in ranks]
                keys[:count].partition(places)
                threshold, likely, high = keys[places].tolist()
                memory["threshold"] = threshold
                return Estimate(threshold, likely, high)
        memory["threshold"] = lowest
        return Estimate(lowest, lowest)

    @staticmethod
    def _select(
        rooms: Sequence[tuple[int, int, int, int, int]],
        counts: Sequence[int],
        k: int,
        high: int,
        spare: int,
        workspace: Workspace,
    ) -> tuple[int, list[tuple[int, int]]]:
        """The k-th largest key, 0 if there are fewer, and for each piece how many ties and how many in all it sends.

        Among equal keys the lower index goes first, and so does the earlier piece. `spare` is room for k keys.
        """
        if sum(counts) < k:
            return 0, [(0, count) for count in counts]
        above = inside = 0
        for place, count in zip(rooms, counts, strict=True):
            more, fewer = near(place[1], count, high, spare + 4 * inside, k - inside)
            above, inside = above + more, inside + fewer
            if inside > k:
                break
        lists: np.ndarray = workspace.buffers["lists"]
        if above < k <= above + inside and inside <= k:
            lists[0] = spare, inside
            key, left = kth_largest(lists.ctypes.data, 1, k - above, rooms[0][3])
        else:
            for row, place, count in zip(lists, rooms, counts, strict=False):
                row[:] = place[1], count
            key, left = kth_largest(lists.ctypes.data, len(rooms), k, rooms[0][3])
        shares = []
        for place, count in zip(rooms, counts, strict=True):
            above, equal = tally(place[1], count, key)
            ties = min(equal, left)
            left -= ties
            shares.append((ties, above + ties))
        return int(key), shares

    def add_raw(self, codec: S, row: Tensor, values: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        k, numel = len(values), out.numel()
        where = address(row, int32), address(values, float32), address(out, float32)
        note(workspace, [topk_add(*where, numel, k, float(alpha))])

    def mean_raw(self, codec: S, rows: Tensor, values: Tensor, out: Tensor, workspace: Workspace) -> None:
        numel, ranks = out.numel(), len(rows)
        count = -(-numel // TILE)
        pieces = pieces_of(numel, count)
        scratch = reserved(workspace, "scratch", pieces * SCRATCH)
        cursors = reserved(workspace, "cursors", pieces * ranks * 16)
        target = KINDS[out.dtype], address(out)
        lists = rows_at(rows, int32), rows_at(values, float32)
        k, scale = values.shape[1], inverse(ranks)

        def job(first: int, last: int, piece: int) -> tuple[int, int]:
            memory = cursors + piece * ranks * 16, scratch + piece * SCRATCH
            result: tuple[int, int] = topk_mean(target, *lists, ranks, (numel, first, last), k, scale, *memory)
            return result

        note(workspace, run(job, count, pieces))
