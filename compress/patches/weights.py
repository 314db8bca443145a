"""A state dict as words: read and written a section at a time, and identified by a fingerprint that follows changes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .sections import SECTION, PatchError, Words

In = TypeVar("In")
Out = TypeVar("Out")
FLOATS = {torch.bfloat16: Words(16, 7), torch.float16: Words(16, 10), torch.float32: Words(32, 23)}
#: Those whose elements are whole bytes, by name, without half complex ones, for which torch lacks operators.
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not re.match(r"torch\.(q|bits|u?int[1-7]$|float4|b?complex32)", str(dtype))
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: A tensor's dtype and shape, as a header has them.
Form = tuple[str, list[int]]
INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


def words_of(dtype: torch.dtype) -> Words:
    return FLOATS.get(dtype) or Words(min(32, 8 * dtype.itemsize))


@dataclass(frozen=True)
class Piece:
    """`count` words of a tensor, from word `start` on, which begin at word `place` of a section."""

    name: str
    start: int
    count: int
    place: int


@dataclass(frozen=True)
class Section:
    """Words of one kind, of tensors that all are in the weights already, or all new to them."""

    kind: Words
    new: bool
    pieces: tuple[Piece, ...]

    @property
    def words(self) -> int:
        return sum(piece.count for piece in self.pieces)


def cut(tensors: Iterable[tuple[str, Words, bool, int]]) -> list[Section]:
    """Sections of tensors, in their order, each of a name, a kind, whether it is new, and a number of words."""
    spaces: dict[tuple[Words, bool], list[tuple[str, int]]] = {}
    for name, kind, new, count in tensors:
        spaces.setdefault((kind, new), []).append((name, count))
    found = []
    for (kind, new), members in spaces.items():
        pieces: list[Piece] = []
        place = 0
        for name, count in members:
            start = 0
            while start < count:
                length = min(count - start, SECTION - place)
                pieces.append(Piece(name, start, length, place))
                start, place = start + length, place + length
                if place == SECTION:
                    found.append(Section(kind, new, tuple(pieces)))
                    pieces, place = [], 0
        if pieces:
            found.append(Section(kind, new, tuple(pieces)))
    return found


@dataclass(frozen=True)
class Change:
    """Places of a section that change, or None for all; their new words; and what each piece's two sums grow by, uint64
    [pieces, 2]. Places ascend where a section has several pieces."""

    section: Section
    places: np.ndarray | None
    words: np.ndarray
    sums: np.ndarray

    def of(self, piece: Piece) -> slice:
        """Those entries of `words` that lie in a piece."""
        if len(self.section.pieces) == 1:
            return slice(0, len(self.words))
        bounds = piece.place, piece.place + piece.count
        return slice(*(bounds if self.places is None else np.searchsorted(self.places, bounds)))


def change_of(section: Section, places: np.ndarray | None, words: np.ndarray, old: np.ndarray | None) -> Change:
    """A change, with its sums. `old` are all words of the section before, or None where it is new."""
    from ..backends.cpu.words import add_words, replace_words

    if places is not None and len(section.pieces) > 1:
        order = np.argsort(places, kind="stable")  # a few runs that ascend, which it merges
        places, words = places[order], words[order]
    change = Change(section, places, words, np.zeros((len(section.pieces), 2), np.uint64))
    for piece, sums in zip(section.pieces, change.sums, strict=True):
        part = change.of(piece)
        if places is None:
            before = np.zeros(2, np.uint64)
            if old is not None:
                add_words(old[part], piece.start, before)
            add_words(words[part], piece.start, sums)
            sums -= before
        elif old is not None:
            replace_words(places[part], piece.start - piece.place, old[places[part]], words[part], sums)
    return change


def each(job: Callable[[In], Out], items: Sequence[In]) -> list[Out]:
    """job(item) of all, on as many threads as torch has."""
    from ..backends.cpu.runtime.threads import run

    pieces = max(1, min(torch.get_num_threads(), len(items)))
    done = run(lambda first, last, _: [job(item) for item in items[first:last]], len(items), pieces)
    return [result for part in done for result in part]


class Weights:
    """Tensors by name, and the two sums of each."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.sums: dict[str, np.ndarray] = {}

    def measure(self) -> None:
        """Compute all sums: a pass over the tensors."""
        sections = cut((name, *facts(tensor)) for name, tensor in self.tensors.items())
        self.sums = self.sums_after(each(lambda s: change_of(s, None, self.read(s), None), sections), self.tensors)

    def fingerprint(self, sums: Mapping[str, np.ndarray], layout: Iterable[tuple[str, str, list[int]]]) -> str:
        """64 hex digits of names, dtypes, shapes and sums: equal for equal weights."""
        digest = hashlib.blake2b(digest_size=32)
        for name, dtype, shape in sorted(layout):
            digest.update(json.dumps([name, dtype, shape]).encode() + sums[name].astype("<u8").tobytes())
        return digest.hexdigest()

    def own_fingerprint(self) -> str:
        if self.sums.keys() != self.tensors.keys():
            self.measure()
        return self.fingerprint(self.sums, layout_of(self.tensors))

    def sums_after(self, changes: Iterable[Change], names: Iterable[str]) -> dict[str, np.ndarray]:
        """The sums of each name's tensor once the changes are made; those of empty and new ones begin at 0."""
        found = {name: np.zeros(2, np.uint64) for name in names}
        for change in changes:
            for piece, sums in zip(change.section.pieces, change.sums, strict=True):
                found[piece.name] += sums
        return found

    def read(
        self, section: Section, before: np.ndarray | None = None, on_device: Mapping[str, Tensor] = MappingProxyType({})
    ) -> np.ndarray:
        """The section's words, on the host: the tensor's own memory where that is one piece of it.

        Args:
            before: the section's words before, on the host.
            on_device: tensors before, by name, which lie where those of today do: only differing words are copied.
        """
        parts = []
        for piece in section.pieces:
            bounds = slice(piece.start, piece.start + piece.count)
            flat = flat_words(self.tensors[piece.name], section.kind)[bounds]
            old = on_device.get(piece.name)
            if old is None or before is None:
                parts.append(flat.cpu().numpy().view(section.kind.dtype))
                continue
            places = (flat != flat_words(old, section.kind)[bounds]).nonzero().flatten()
            words = before[piece.place : piece.place + piece.count].copy()
            words[places.cpu().numpy()] = flat[places].cpu().numpy().view(section.kind.dtype)
            parts.append(words)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def write(self, change: Change) -> None:
        for piece in change.section.pieces:
            part, tensor = change.of(piece), self.tensors[piece.name]
            if part.start == part.stop:
                continue
            plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
            target = tensor if plain else tensor.resolve_conj().resolve_neg().contiguous()
            flat = flat_words(target, change.section.kind)
            words = torch.from_numpy(change.words[part].view(f"<i{flat.element_size()}")).view(flat.dtype)
            if change.places is None:
                flat[piece.start : piece.start + piece.count].copy_(words)
            else:
                at = torch.from_numpy(change.places[part].astype(np.int64) + (piece.start - piece.place))
                flat[at.to(flat.device)] = words.to(flat.device)
            if not plain:
                tensor.copy_(target)


def flat_words(tensor: Tensor, kind: Words) -> Tensor:
    """A tensor's words in one dimension: its memory, if that has no gaps, else a copy."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if len(flat) < 2:
        flat = flat.as_strided(flat.shape, (1,))  # one element may have any stride
    flat = torch.view_as_real(flat.contiguous()).reshape(-1) if flat.is_complex() else flat.contiguous()
    return flat.view(INTEGERS[kind.bits])


def facts(tensor: Tensor) -> tuple[Words, bool, int]:
    """Kind, that it is new, and the number of words, as `cut` takes them."""
    kind = words_of(tensor.dtype)
    return kind, True, tensor.numel() * tensor.element_size() * 8 // kind.bits


def form(tensor: Tensor) -> Form:
    return NAMES[tensor.dtype], list(tensor.shape)


def is_shape(shape: Any) -> bool:
    """True if something of a header, which may be anything, is the shape of a tensor."""
    return isinstance(shape, list) and all(type(size) is int and 0 <= size < 1 << 48 for size in shape)


def layout_of(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, list[int]]]:
    return ((name, *form(tensor)) for name, tensor in tensors.items())


def check(tensors: Any, written: bool) -> None:
    """Raises TypeError or ValueError, with its name, if one is no tensor that can be read, and written."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(f"a patch takes tensors by name, got {type(tensor).__name__} under {name!r}: leave it out")
        if is_traceable_wrapper_subclass(tensor):
            remedy = "PatchWriter(part=(rank, number of ranks)) takes shards; or pass its full_tensor()"
            raise TypeError(f"{name} is a {type(tensor).__name__}, no plain tensor: {remedy}")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in NAMES:
            raise ValueError(
                f"{name} has layout {tensor.layout}, {tensor.dtype} on {tensor.device}: a patch takes dense tensors "
                "with memory, whose elements are whole bytes"
            )
        if written and any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(f"{name} is expanded: its elements share memory. Pass {name}.contiguous()")


def require_flags(change: Change, dtypes: Mapping[str, str]) -> None:
    """Raises PatchError if a boolean would be neither 0 nor 1."""
    for piece in change.section.pieces:
        if dtypes[piece.name] == "bool" and (change.words[change.of(piece)] > 1).any():
            raise PatchError(f"{piece.name} would have booleans that are neither 0 nor 1: ask for a full snapshot")
