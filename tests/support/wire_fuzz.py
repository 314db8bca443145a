"""Wires that nobody has encoded, through every decoder there is, in memory between guard pages.

Each case is made from a seed and its number alone, so any can be seen again:
`python tests/support/wire_fuzz.py SEED NUMBER`. A fault ends the process;
`test_wire_fuzz` runs this in processes of its own and says which case it was.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from emulated import emulated_gpu
from gradwire.compress import Codec, new_draw
from gradwire.compress.backends import Workspace, entries_for, use_backend
from gradwire.compress.backends.sparse import EntryKernels, Pieces
from gradwire.compress.codec import DTYPES
from gradwire.compress.formats.entries import VALUE_DTYPES
from guarded import Room
from strategies import LENGTHS, VARIANTS, kernels_of, same
from torch import Tensor

#: One case in this many goes through the emulated GPU too, which is some hundred times slower.
EMULATED_SHARE = 100
CPU = torch.device("cpu")
#: What sits at the border of some range, as a word.
WORDS = (0, 1, 0x7F, 0x80, 0xFF, 0x7F800000, 0x7FC00000, 0x7FFFFFFF, 0x80000000, 0xFF800000, 0xFFFFFFFF)


class Case:
    """One wire, or one for each rank, and who shall decode it."""

    def __init__(self, seed: int, number: int) -> None:
        self.rng = np.random.default_rng([seed, number])
        self.number = number

    def one_of(self, things: Any) -> Any:
        return things[self.rng.integers(len(things))]

    def numel(self) -> int:
        """Mostly few elements: every border there is comes soon."""
        fate = self.rng.random()
        if fate < 0.75:
            return int(self.rng.integers(1, 300))
        return int(self.one_of(LENGTHS)) if fate < 0.97 else int(self.rng.integers(1, 6500))

    def gradient(self, numel: int) -> Tensor:
        kind = self.rng.integers(3)
        if kind == 0:
            return torch.from_numpy(self.rng.integers(0, 1 << 32, numel, np.uint32).view(np.float32))
        x = self.rng.standard_normal(numel).astype(np.float32)
        return torch.from_numpy(x if kind == 1 else np.round(x))

    def damage(self, wire: np.ndarray, numel: int) -> str:
        """Make of sound bytes what might arrive; returns how."""
        rng, size = self.rng, len(wire)
        how: str = self.one_of(
            ("sound", "noise", "bytes", "bits", "splice", "one byte", "words", "sparse bits", "dense bits")
        )
        if size == 0 or how == "sound":
            return "sound"
        if how == "noise":
            wire[:] = rng.integers(0, 256, size, np.uint8)
        elif how == "bytes":
            wire[rng.integers(0, size, rng.integers(1, 9))] = rng.integers(0, 256)
        elif how == "bits":
            for at in rng.integers(0, size, rng.integers(1, 4)):
                wire[at] ^= 1 << rng.integers(8)
        elif how == "splice":
            length = int(rng.integers(1, size + 1))
            here, there = rng.integers(0, size - length + 1, 2)
            wire[there : there + length] = wire[here : here + length].copy()
        elif how == "one byte":
            wire[:] = self.one_of((0, 1, 0x7F, 0x80, 0xFF, rng.integers(256)))
        elif how == "words":
            words = wire[: size // 4 * 4].view(np.uint32)
            some = (*WORDS, numel - 1, numel, numel + 1, 2 * numel)
            for at in rng.integers(0, len(words), rng.integers(1, 6)):
                words[at] = self.one_of(some)
        else:
            share = 0.03 if how == "sparse bits" else 0.97
            wire[:] = np.packbits(rng.random(8 * size) < share)
        return how


class Fuzz:
    """Decoders and what they need, for any number of cases.

    Attributes:
        counts: cases by what was done to a wire, wires by backend, and what decoders counted as skipped and as not
            finite.
    """

    def __init__(self, seed: int, emulated_share: int = EMULATED_SHARE) -> None:
        self.seed, self.emulated_share = seed, emulated_share
        self.counts: Counter[str] = Counter()
        self.rooms = [Room(64) for _ in range(4)]
        self.workspaces: dict[tuple[str, Codec, int], Workspace] = {}
        self.entries: dict[str, EntryKernels] = {}
        for backend in ("reference", "cpu", "cuda"):
            with use_backend(backend):
                self.entries[backend] = entries_for(CPU)

    def close(self) -> None:
        for room in self.rooms:
            room.close()

    def run(self, number: int) -> None:
        """One case. AssertionError: a backend differs from the specification, or has written beside its output."""
        case = Case(self.seed, number)
        others = ["cpu"]
        if number % self.emulated_share == 0:
            others.append("cuda")
        fate = case.rng.random()
        if fate < 0.1:
            self._entries(case, others)
        elif fate < 0.75:
            self._decode_add(case, others)
        else:
            self._decode_mean(case, others)

    def _agree(
        self,
        case: Case,
        what: str,
        others: list[str],
        wires: int,
        decode: Callable[[str], tuple[list[Tensor], list[int]]],
    ) -> None:
        """`decode` gives the same on every backend, and touches nothing else."""
        expected, counted = decode("reference")
        for backend in others:
            found, counts = decode(backend)
            label = f"case {case.number} of seed {self.seed}: {what} on {backend}"
            assert counts == counted, f"{label} counts {counts}, the reference {counted}"
            assert all(same(a, b) for a, b in zip(found, expected, strict=True)), f"{label} differs from the reference"
            self.counts[f"wires through {backend}"] += wires
        self.counts["wires through reference"] += wires
        self.counts["wires"] += wires
        self.counts["skipped entries"] += counted[0]
        self.counts["not finite"] += counted[1]
        assert min(counted) >= 0

    def _workspace(self, backend: str, codec: Codec, numel: int) -> Workspace:
        key = backend, codec, numel
        if key not in self.workspaces:
            if len(self.workspaces) > 2000:
                self.workspaces.clear()
            self.workspaces[key] = kernels_of(backend, codec).workspace(codec, numel, CPU)
        workspace = self.workspaces[key]
        workspace.status.zero_()
        return workspace

    def _wire(self, case: Case, codec: Codec, numel: int) -> Tensor:
        wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8)
        draw = new_draw(case.number, 0, 0)
        workspace = self._workspace("cpu", codec, numel)
        kernels_of("cpu", codec).encode(codec, case.gradient(numel), wire, draw, workspace)
        parts = wire.split(codec.part_bytes(numel))
        for part in parts if case.rng.integers(2) else [case.one_of(parts)]:
            self.counts[case.damage(part.numpy(), numel)] += 1
        return wire

    def _decode_add(self, case: Case, others: list[str]) -> None:
        codec, numel = case.one_of(VARIANTS), case.numel()
        wire, start = self._wire(case, codec, numel), case.gradient(numel)
        alpha, ends = float(case.one_of((1.0, 0.1, -2.5))), [case.one_of(("front", "back")) for _ in range(2)]

        def decode(backend: str) -> tuple[list[Tensor], list[int]]:
            given, out = (r.put(t, end) for r, t, end in zip(self.rooms, (wire, start), ends, strict=False))
            workspace = self._workspace(backend, codec, numel)
            kernels_of(backend, codec).decode_add(codec, given, out, alpha, workspace)
            assert all(room.untouched() for room in self.rooms[:2]), f"{codec} on {backend} wrote beside its output"
            assert torch.equal(given, wire), f"{codec} on {backend} wrote into the wire"
            return [out.clone()], workspace.status.tolist()

        self._agree(case, f"decode_add of {codec}, {numel} elements", others, 1, decode)

    def _decode_mean(self, case: Case, others: list[str]) -> None:
        codec, ranks = case.one_of(VARIANTS), int(case.rng.integers(1, 4))
        numel, dtype = case.numel(), case.one_of(DTYPES)
        rows = torch.stack([self._wire(case, codec, numel) for _ in range(ranks)])
        parts = [part.contiguous() for part in rows.split(codec.part_bytes(numel), dim=1)]
        ends = [case.one_of(("front", "back")) for _ in range(len(parts) + 1)]
        start = torch.full((numel,), 3.0, dtype=dtype)

        def decode(backend: str) -> tuple[list[Tensor], list[int]]:
            out, *given = (r.put(t, end) for r, t, end in zip(self.rooms, (start, *parts), ends, strict=False))
            workspace = self._workspace(backend, codec, numel)
            kernels_of(backend, codec).decode_mean(codec, given, out, workspace)
            untouched = all(room.untouched() for room in self.rooms[: len(ends)])
            assert untouched, f"{codec} on {backend} wrote beside its output"
            assert all(torch.equal(a, b) for a, b in zip(given, parts, strict=True)), f"{codec} on {backend}: the wires"
            return [out.clone()], workspace.status.tolist()

        self._agree(case, f"decode_mean of {codec}, {ranks} ranks, {numel} elements to {dtype}", others, ranks, decode)

    def _entries(self, case: Case, others: list[str]) -> None:
        """What exchanges of entries take off the wire: pieces of indices and values, then the sum of the lists."""
        rng = case.rng
        ranges = [case.numel() for _ in range(rng.integers(1, 4))]
        counts = [int(rng.integers(0, n + 1)) if rng.integers(2) else min(n, int(rng.integers(0, 9))) for n in ranges]
        disjoint = bool(rng.integers(2))  # the owners' ranges, or everybody's entries of one range
        bases = np.cumsum([0, *ranges[:-1]]).tolist() if disjoint else [int(rng.integers(0, 1000))] * len(ranges)
        pieces, dtype = Pieces(counts, bases, ranges), case.one_of(VALUE_DTYPES)
        sound = np.concatenate(
            [np.sort(rng.choice(n, k, replace=False)) + b for n, k, b in zip(ranges, counts, bases, strict=True)]
        )
        indices = torch.from_numpy(sound.astype(np.int32))
        wires = [
            torch.zeros(sum(sizes), dtype=torch.uint8) for sizes in (pieces.index_sizes(), pieces.value_sizes(dtype))
        ]
        self.entries["cpu"].pack_index_pieces(indices, pieces, wires[0])
        self.entries["cpu"].pack_value_pieces(case.gradient(len(sound)), pieces, dtype, wires[1])
        for wire in wires:
            self.counts[case.damage(wire.numpy(), sum(ranges))] += 1
        ends = [case.one_of(("front", "back")) for _ in range(4)]
        offsets = np.cumsum([0, *counts]).tolist()
        span = (bases[0], bases[0] + max(ranges)) if rng.integers(2) else (0, int(rng.integers(1, 2000)))

        def decode(backend: str) -> tuple[list[Tensor], list[int]]:
            rooms, kernels = self.rooms, self.entries[backend]
            packed, numbers = (room.put(wire, end) for room, wire, end in zip(rooms, wires, ends, strict=False))
            found = rooms[2].put(torch.zeros(len(sound), dtype=torch.int32), ends[2])
            values = rooms[3].put(torch.zeros(len(sound)), ends[3])
            kernels.unpack_index_pieces(packed, pieces, found)
            kernels.unpack_value_pieces(numbers, pieces, dtype, values)
            assert all(room.untouched() for room in rooms), f"unpacking entries on {backend} wrote beside its output"
            lists = found.clone(), values.clone()
            mine, theirs = (room.put(part, end) for room, part, end in zip(rooms, lists, ends, strict=False))
            blank = torch.full((len(sound),), 7, dtype=torch.int32)
            union, sums = rooms[2].put(blank, ends[2]), rooms[3].put(blank.view(torch.float32), ends[3])
            size, skipped = kernels.merge(mine, theirs, offsets, *span, union, sums)
            assert all(room.untouched() for room in rooms), f"merging entries on {backend} wrote beside its output"
            return [*lists, union[:size].clone(), sums[:size].clone()], [skipped, 0]

        self._agree(case, f"entries {pieces} as {dtype}", others, len(ranges), decode)


def main(seed: int, first: int, count: int = 1, *, place: str | None = None) -> None:
    """Run `count` cases. The number of each is written to `place` before it is run."""
    faulthandler.enable()
    torch.set_num_threads(1)
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT) if place else None
    with emulated_gpu():
        fuzz = Fuzz(seed, EMULATED_SHARE if count > 1 else 1)
        for number in range(first, first + count):
            if descriptor is not None:
                os.pwrite(descriptor, f"case {number:10} of seed {seed}".encode(), 0)
            fuzz.run(number)
        fuzz.close()
    print(dict(fuzz.counts))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), place=sys.argv[4] if len(sys.argv) > 4 else None)
