"""Entries of sparse gradients: packed near their entropy, unpacked whatever the bytes, merged; on every backend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from gradwire.compress.backends import entries_for, use_backend
from gradwire.compress.backends.cuda import entries as cuda_entries
from gradwire.compress.backends.sparse import EntryKernels, Pieces
from gradwire.compress.formats.entries import LARGEST_UNIT, VALUE_BLOCK, VALUE_DTYPES, index_layout, value_bytes
from guarded import Guarded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import ALL_BACKENDS, KINDS, device_of, gradient, same
from torch import Tensor

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
every_backend = pytest.mark.parametrize("backend", ALL_BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)

LARGEST = (1 << 31) - 1
#: Around a word, a unit, and what a block of threads takes at once.
COUNTS = (1, 2, 3, 4, 5, 31, 32, 33, 255, 256, 257, 513, 2049)
NO_INDEX, SENTINEL = 0xFFFFFFFF, 77


def entries_of(backend: str) -> tuple[EntryKernels, torch.device]:
    device = device_of(backend)
    with use_backend(backend):
        return entries_for(device), device


def bits(indices: np.ndarray) -> Tensor:
    """Unsigned indices as the int32 whose bits they are."""
    return torch.from_numpy(indices.astype(np.uint32).view(np.int32))


def guarded(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Guarded, Tensor]:
    """Memory, and what lies in it between guards."""
    memory = Guarded(device)
    return memory, memory.put(torch.full((size,), SENTINEL, dtype=dtype))


@dataclass(frozen=True)
class IndexSet:
    """`k` ascending indices below `numel`, relative to `base`."""

    numel: int
    k: int
    base: int
    form: str
    seed: int

    def indices(self) -> np.ndarray:
        """Absolute."""
        rng = np.random.default_rng(self.seed)
        n, k = self.numel, self.k
        if self.form == "first":
            chosen = np.arange(k)
        elif self.form == "last":
            chosen = np.arange(n - k, n)
        elif self.form == "both ends":
            chosen = np.concatenate([np.arange(k // 2), np.arange(n - (k - k // 2), n)])
        elif self.form == "clusters":
            starts = rng.integers(0, n, 3)
            near = np.unique((starts[:, None] + np.arange(k)).reshape(-1) % n)
            chosen = np.sort(rng.permutation(near)[:k])
        elif n < 4 * k:
            chosen = np.sort(rng.permutation(n)[:k])
        else:
            chosen = np.zeros(0, np.int64)
            while len(chosen) < k:
                chosen = np.unique(np.concatenate([chosen, rng.integers(0, n, k - len(chosen))]))
        return chosen.astype(np.int64) + self.base


@st.composite
def index_sets(draw: st.DrawFn) -> IndexSet:
    k = draw(st.one_of(st.sampled_from(COUNTS), st.integers(1, 600)))
    numel = draw(st.one_of(st.just(k), st.just(LARGEST), st.integers(k, 200 * k), st.integers(k, LARGEST)))
    base = draw(st.one_of(st.just(0), st.integers(0, (1 << 32) - 1 - numel)))
    form = draw(st.sampled_from(["random", "first", "last", "both ends", "clusters"]))
    return IndexSet(numel, k, base, form, draw(st.integers(0, 999)))


def packed(entries: EntryKernels, given: Tensor, count: int | None, base: int, numel: int) -> Tensor:
    memory, wire = guarded(index_layout(numel, len(given)).nbytes, torch.uint8, given.device)
    used = None if count is None else torch.tensor([count], dtype=torch.int32, device=given.device)
    entries.pack_indices(given, used, base, numel, wire)
    assert memory.untouched()
    return wire.cpu()


def unpacked(
    entries: EntryKernels, device: torch.device, rows: Tensor, base: int, numel: int, k: int
) -> tuple[Tensor, Tensor]:
    """Indices and counts; with the pitch of plain rows, as codecs have it."""
    memory, plain = guarded(len(rows) * (1 + k), torch.int32, device)
    room = plain.view(len(rows), 1 + k)
    given = memory.put(rows) if rows.is_contiguous() else rows.to(device)
    entries.unpack_indices(given, base, numel, room[:, 0], room[:, 1:])
    assert memory.untouched()
    alone = torch.zeros(len(rows), k, dtype=torch.int32, device=device)
    entries.unpack_indices(given, base, numel, None, alone)
    assert torch.equal(alone, room[:, 1:])
    return room[:, 1:].cpu(), room[:, 0].cpu()


@given(k=st.integers(1, 5000), sparsity=st.floats(1, 1e6))
@settings(max_examples=200, deadline=None)
def test_no_other_number_of_low_bits_is_shorter(k: int, sparsity: float) -> None:
    numel = min(int(k * sparsity), LARGEST)
    layout = index_layout(numel, k)
    shortest = min(k * low + k + ((numel - 1) >> low) for low in range(32))
    assert k * layout.low_bits + k + ((numel - 1) >> layout.low_bits) == shortest
    assert 0 <= 8 * layout.nbytes - shortest < 64


@every_backend
@quick
@given(chosen=index_sets(), used=st.one_of(st.none(), st.integers(0, 600)))
def test_packed_indices_come_back(backend: str, chosen: IndexSet, used: int | None) -> None:
    (entries, device), (reference, cpu) = entries_of(backend), entries_of("reference")
    count = chosen.k if used is None else min(used, chosen.k)
    given = bits(chosen.indices())
    given[count:] = 0  # as a codec leaves those that are not used
    told, where = None if used is None else count, (chosen.base, chosen.numel)
    wire = packed(entries, given.to(device), told, *where)
    assert torch.equal(wire, packed(reference, given.to(cpu), told, *where))
    indices, counts = unpacked(entries, device, wire[None], *where, chosen.k)
    assert counts.tolist() == [count]
    assert torch.equal(indices[0, :count], given[:count])
    assert (indices[0, count:] == -1).all()


@pytest.mark.parametrize("shares", [1, 2, 5, 32])
def test_shares_of_many_tiles_make_no_difference(shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_entries, "UNPACKING_SHARES", shares)
    (entries, device), (reference, _) = entries_of("cuda"), entries_of("reference")
    numel, k = 200_000, 40_000
    assert index_layout(numel, k).upper_words > 5 * cuda_entries.UNPACKING_THREADS
    forms = ("random", "first", "last", "clusters")
    sets = [bits(IndexSet(numel, k, 7, form, 1).indices()) for form in forms]
    rows = torch.stack([packed(reference, each, None, 7, numel) for each in sets])
    rows[3, :4000] = 0xFF  # more than k
    indices, counts = unpacked(entries, device, rows, 7, numel, k)
    expected, expected_counts = unpacked(reference, torch.device("cpu"), rows, 7, numel, k)
    assert torch.equal(indices, expected)
    assert torch.equal(counts, expected_counts)
    assert torch.equal(indices[:3], torch.stack(sets[:3]))
    assert int(counts[3]) > k


@every_backend
@quick
@given(
    shape=index_sets(),
    rows=st.integers(1, 4),
    apart=st.integers(0, 3),
    share=st.sampled_from([0.0, 0.02, 0.3, 0.5, 1.0]),
    seed=st.integers(0, 999),
)
def test_no_bytes_lead_out_of_range(
    backend: str, shape: IndexSet, rows: int, apart: int, share: float, seed: int
) -> None:
    """Too many entries, too few, indices beyond the end: alike on every backend."""
    (entries, device), (reference, cpu) = entries_of(backend), entries_of("reference")
    rng, layout = np.random.default_rng(seed), index_layout(shape.numel, shape.k)
    size = layout.nbytes
    noise = np.packbits(rng.random((rows, 8 * (size + 4 * apart))) < share, axis=1)
    wires = torch.from_numpy(noise)[:, :size]
    where = wires, shape.base, shape.numel, shape.k
    indices, counts = unpacked(entries, device, *where)
    expected, expected_counts = unpacked(reference, cpu, *where)
    assert torch.equal(indices, expected)
    assert torch.equal(counts, expected_counts)
    assert counts.tolist() == [int(np.unpackbits(row[: 4 * layout.upper_words]).sum()) for row in noise]
    at = indices.numpy().view(np.uint32).astype(np.int64)
    assert ((at == NO_INDEX) | ((at >= shape.base) & (at < shape.base + shape.numel))).all()


def decoded(entries: EntryKernels, device: torch.device, wire: Tensor, dtype: torch.dtype, k: int) -> Tensor:
    memory, values = guarded(k, torch.float32, device)
    entries.unpack_values(wire.to(device)[None], dtype, values[None])
    assert memory.untouched()
    return values.cpu()


@every_backend
@every_dtype
@quick
@given(
    kind=st.sampled_from(tuple(KINDS)),
    k=st.one_of(st.sampled_from(COUNTS), st.integers(1, 1500)),
    offset=st.integers(0, 3),
    used=st.one_of(st.none(), st.integers(0, 1500)),
    seed=st.integers(0, 999),
)
def test_values_and_what_is_left_of_them(
    backend: str, dtype: torch.dtype, kind: str, k: int, offset: int, used: int | None, seed: int
) -> None:
    values = gradient(kind, k, seed)
    values[:: max(1, k // 7)] *= -0.0  # zeros of either sign among them
    count = k if used is None else min(used, k)
    indices = torch.from_numpy(np.sort(np.random.default_rng(seed).permutation(3 * k)[:k]).astype(np.int32))
    sides = []
    for name in ("reference", backend):
        entries, device = entries_of(name)
        x = torch.empty(k + offset, device=device)[offset:].copy_(values)
        rest = torch.full((3 * k,), 5.0, device=device)
        memory, wire = guarded(value_bytes(k, dtype), torch.uint8, device)
        told = None if used is None else torch.tensor([count], dtype=torch.int32, device=device)
        entries.pack_values(x, dtype, wire, indices.to(device), told, rest)
        assert memory.untouched()
        bare = torch.full_like(wire, SENTINEL)
        entries.pack_values(x, dtype, bare)
        assert torch.equal(bare, wire)
        assert same(x.cpu(), values)
        sides.append((wire.cpu(), rest.cpu(), decoded(entries, device, wire, dtype, k)))
    wire, rest, back = sides[0]
    assert all(same(a, b) for a, b in zip(*sides, strict=True))
    assert torch.equal(back.isfinite()[values.isfinite()], torch.ones(int(values.isfinite().sum()), dtype=torch.bool))
    assert torch.equal(back.isnan() | back.isinf(), ~values.isfinite())
    meant = torch.full_like(rest, 5.0)
    finite = values[:count].isfinite()
    meant[indices[:count].long()[finite]] = (values - back)[:count][finite]
    assert same(rest, meant)
    if dtype == torch.float32:
        assert same(back, values)
    for block in range(0, k, VALUE_BLOCK):
        v, error = (t[block : block + VALUE_BLOCK].double() for t in (values, back))
        sound = v.isfinite()
        if dtype == torch.int8 and sound.any():
            unit = max(float(v[sound].abs().max()) / 127, 2.0**-149)
            at_end = 127 * max(0.0, unit - LARGEST_UNIT)
            assert float((error - v)[sound].abs().max()) <= unit * 0.51 + 2.0**-149 * 64 + at_end
        if dtype == torch.bfloat16 and sound.any():
            assert ((error - v).abs() <= v.abs() * 2.0**-8 + 2.0**-133)[sound].all()


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_no_entries_are_no_bytes(backend: str) -> None:
    entries, device = entries_of(backend)
    none, wire = torch.zeros(0, dtype=torch.int32, device=device), torch.zeros(0, dtype=torch.uint8, device=device)
    entries.pack_indices(none, None, 0, 100, wire)
    counts = torch.ones(2, dtype=torch.int32, device=device)
    entries.unpack_indices(wire.expand(2, 0), 0, 100, counts, none.expand(2, 0))
    assert counts.tolist() == [0, 0]
    for dtype in VALUE_DTYPES:
        assert value_bytes(0, dtype) == 0
        entries.pack_values(none.float(), dtype, wire)
        entries.unpack_values(wire[None], dtype, none.float()[None])


def lists_of(form: str, lists: int, start: int, stop: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Index lists, mostly between `start` and `stop`, and their values."""
    rng = np.random.default_rng(seed)
    span = stop - start
    shared = np.flatnonzero(rng.random(span) < 0.05)
    made = []
    for i in range(lists):
        if form == "identical":
            at = shared
        elif form == "disjoint":
            at = np.arange(i, span, 8 * lists)
        elif form == "empty" or (form == "some empty" and i % 2):
            at = np.zeros(0, np.int64)
        elif form == "hostile":
            at = rng.integers(-5 if start >= 5 else 0, span + 5, rng.integers(0, 300))
            at[rng.random(len(at)) < 0.05] = NO_INDEX - start
            if rng.integers(0, 2):
                at.sort()
        else:
            at = np.flatnonzero(rng.random(span) < rng.choice([0.001, 0.05, 0.5]))
        made.append((at.astype(np.int64) + start, rng.standard_normal(len(at)).astype(np.float32)))
    return made


@every_backend
@quick
@given(
    form=st.sampled_from(["random", "identical", "disjoint", "empty", "some empty", "hostile"]),
    lists=st.integers(1, 9),
    start=st.sampled_from([0, 1, 4095, 1 << 20, LARGEST - 10_000]),
    length=st.sampled_from([1, 31, 4096, 4097, 9000]),
    seed=st.integers(0, 999),
)
def test_merge_is_the_sum_in_order_at_the_union(
    backend: str, form: str, lists: int, start: int, length: int, seed: int
) -> None:
    stop = start + length
    made = lists_of(form, lists, start, stop, seed)
    sums: dict[int, np.float32] = {}
    precise: dict[int, float] = {}
    skipped = 0
    for at, numbers in made:
        highest = -1
        for index, value in zip(at.tolist(), numbers, strict=True):
            if start <= index < stop and index > highest:
                highest = index
                sums[index] = np.float32(sums.get(index, np.float32(0)) + value)
                precise[index] = precise.get(index, 0.0) + float(value)
            else:
                skipped += 1
    entries, device = entries_of(backend)
    offsets = [0, *np.cumsum([len(at) for at, _ in made]).tolist()]
    indices = bits(np.concatenate([at for at, _ in made])).to(device)
    values = torch.from_numpy(np.concatenate([v for _, v in made])).to(device)
    index_memory, out_indices = guarded(offsets[-1], torch.int32, device)
    value_memory, out_values = guarded(offsets[-1], torch.float32, device)
    found, left_out = entries.merge(indices, values, offsets, start, stop, out_indices, out_values)
    assert (found, left_out) == (len(sums), skipped)
    assert index_memory.untouched()
    assert value_memory.untouched()
    expected = sorted(sums)
    assert out_indices[:found].tolist() == expected
    assert out_values[:found].tolist() == [float(sums[index]) for index in expected]
    assert np.allclose(out_values[:found].cpu(), [precise[index] for index in expected], rtol=1e-5, atol=1e-5)
    assert all(first < second for first, second in pairwise(expected))


def pieces_of(counts: list[int], sizes: list[int]) -> tuple[Pieces, Tensor, Tensor]:
    """Random pieces of a list, one after the other."""
    rng = np.random.default_rng(sum(sizes))
    bases = np.cumsum([0, *sizes[:-1]]).tolist()
    counts = [min(n, size) for n, size in zip(counts, sizes, strict=True)]
    parts = [base + np.sort(rng.permutation(size)[:n]) for base, size, n in zip(bases, sizes, counts, strict=True)]
    indices = torch.from_numpy(np.concatenate(parts).astype(np.int32))
    return Pieces(counts, bases, sizes), indices, gradient("wide", max(1, len(indices)), 1)[: len(indices)]


@quick
@given(
    pieces=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 3000)), min_size=1, max_size=6),
    dtype=st.sampled_from(VALUE_DTYPES),
    share=st.sampled_from([None, None, 0.02, 0.5, 1.0]),
)
def test_pieces_are_packed_as_each_would_be(
    pieces: list[tuple[int, int]], dtype: torch.dtype, share: float | None
) -> None:
    """And noise, of which a `share` of the bits is set, is unpacked alike."""
    table, indices, values = pieces_of([n for n, _ in pieces], [size for _, size in pieces])
    results = []
    for backend in ("reference", "cpu"):
        (kernels, device), rng = entries_of(backend), np.random.default_rng(len(values))
        memory, sizes = Guarded(device), (sum(table.index_sizes()), sum(table.value_sizes(dtype)))
        wires = [memory.put(torch.zeros(size, dtype=torch.uint8)) for size in sizes]
        kernels.pack_index_pieces(indices, table, wires[0])
        kernels.pack_value_pieces(values, table, dtype, wires[1])
        packed = [wire.clone() for wire in wires]
        if share is not None:
            for wire in wires:
                wire.copy_(torch.from_numpy(np.packbits(rng.random(8 * len(wire)) < share)))
        found = [memory.put(torch.zeros_like(x)) for x in (indices, values)]
        kernels.unpack_index_pieces(wires[0], table, found[0])
        kernels.unpack_value_pieces(wires[1], table, dtype, found[1])
        assert memory.untouched()
        assert share is not None or torch.equal(found[0], indices)
        results.append([*packed, *(x.clone() for x in found)])
    for specified, got in zip(*results, strict=True):
        assert same(specified, got)


@quick
@given(numel=st.integers(1, 400), share=st.floats(0, 1), kept_share=st.floats(0, 1), seed=st.integers(0, 99))
def test_what_was_not_kept_goes_back(numel: int, share: float, kept_share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    indices = torch.from_numpy(np.flatnonzero(rng.random(numel) < share).astype(np.int32))
    kept = torch.from_numpy(np.flatnonzero(rng.random(numel) < kept_share).astype(np.int32))
    values = gradient("not finite", max(1, len(indices)), seed)[: len(indices)]
    expected = torch.full((numel,), 5.0)
    for index, value in zip(indices.tolist(), values, strict=True):
        if index not in kept.tolist() and math.isfinite(value):
            expected[index] = value
    for backend in ("reference", "cpu"):
        with use_backend(backend):
            kernels = entries_for(torch.device("cpu"))
        residual = torch.full((numel,), 5.0)
        kernels.put_back((indices, values), kept, residual)
        assert torch.equal(residual, expected), backend


@pytest.mark.parametrize("count", [-1, -(1 << 31)])
def test_a_negative_count_of_indices_is_refused(count: int) -> None:
    """Exchanges lay out as many as other ranks say they have sent."""
    with pytest.raises(ValueError, match=f"{count} indices have no layout"):
        index_layout(1000, count)


@every_backend
@quick
@given(k=st.integers(1, 3000), seed=st.integers(0, 1 << 30), kind=st.sampled_from(list(KINDS)))
def test_entries_are_added_to_the_last_bit(backend: str, k: int, seed: int, kind: str) -> None:
    """Subnormal numbers too, for which atomics of a GPU take zeros; places that come again with -0.0 change nothing."""
    entries, device = entries_of(backend)
    generator = torch.Generator().manual_seed(seed)
    numel = 2 * k + 1
    places = torch.randperm(numel, generator=generator)[:k]
    values, out = gradient(kind, k, seed), gradient(kind, numel, seed + 1)
    expected = out.clone()
    expected[places] += torch.where(values.isfinite(), values, -0.0)
    again = torch.randint(numel, (k,), generator=generator)
    found, places = out.to(device), torch.cat([places, again])
    values = torch.cat([values, torch.full((k,), -0.0)])
    shuffled = torch.randperm(2 * k, generator=generator)
    entries.add(found, places[shuffled].to(device), values[shuffled].to(device))
    assert same(found.cpu(), expected)
