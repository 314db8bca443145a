"""Places of a rank's shards in whole tensors, and the check that the parts of all ranks make up a model.

A rank writes its shards as boxes: parts of a tensor that are a range of places in each dimension. A box is a tensor of
a patch, by the name "NAME@start,start". A shard is one box, or several where `_StridedShard` is by itself. The
reader's boxes are views of its whole tensors, so a part is read and written like a patch.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .sections import PatchError
from .weights import DTYPES, Form, form, is_shape

#: Ranges of places in a dimension, one after the other: (start, end).
Ranges = list[tuple[int, int]]


def chunk(ranges: Ranges, count: int, index: int) -> Ranges:
    """The places of one of `count` chunks, by the rule of torch.chunk: the last ones may be smaller, or empty."""
    size = -(-sum(end - start for start, end in ranges) // count)
    first, last, at, found = size * index, size * (index + 1), 0, []
    for start, end in ranges:
        a, b = max(first, at), min(last, at + end - start)
        if a < b:
            found.append((start + a - at, start + b - at))
        at += end - start
    return found


def places(shape: Sequence[int], placements: Sequence[Any], sizes: Sequence[int], at: Sequence[int]) -> list[Ranges]:
    """The places of a rank's shard in each dimension of a tensor.

    Args:
        placements, sizes, at: for each dimension of the mesh, its size, and the rank's coordinate.
    """
    now: list[tuple[int, int, int, int]] = []
    late: list[tuple[int, int, int, int]] = []
    for k, (p, size, index) in enumerate(zip(placements, sizes, at, strict=True)):
        if hasattr(p, "dim"):
            others = [q for q in placements[k + 1 :] if getattr(q, "dim", None) == p.dim and strides(q) == 1]
            if strides(p) > 1 and others:
                # FSDP cuts what tensor parallelism, a later dimension of the mesh, has cut before.
                late.insert(0, (p.dim, 1, size, index))
            else:
                now.append((p.dim, strides(p), size, index))
    found: list[Ranges] = [[(0, size)] for size in shape]
    for dim, factor, size, index in now + late:
        pieces = [chunk(found[dim], factor, piece) for piece in range(factor)]
        found[dim] = [span for piece in pieces for span in chunk(piece, size, index)]
    return found


def strides(placement: Any) -> int:
    """The number of pieces in which `_StridedShard` finds a dimension; 1 for others."""
    return getattr(placement, "split_factor", 1)


def local(name: str, tensor: Any) -> Any:
    """A DTensor's shard; anything else as it is."""
    if not hasattr(tensor, "placements"):
        return tensor
    if not all(hasattr(p, "dim") or p.is_replicate() for p in tensor.placements):
        raise ValueError(f"{name} is placed as {tensor.placements}: redistribute it to Shard and Replicate")
    with torch.no_grad():
        return tensor.to_local()


def boxes(name: str, tensor: Any, mine: Tensor, first: bool) -> Iterator[tuple[str, Tensor]]:
    """The boxes of a tensor that this rank writes: those of its shard, unless another replica has them, too.

    Args:
        mine: `local` of it.
        first: True on the rank that writes tensors which are no DTensors.
    """
    where: list[Ranges] = [[(0, size)] for size in mine.shape]
    if hasattr(tensor, "placements"):
        placements, mesh = tensor.placements, tensor.device_mesh
        at = mesh.get_coordinate()
        first = at is not None and not any(i for p, i in zip(placements, at, strict=True) if not hasattr(p, "dim"))
        first = first and is_first(mesh)
        if first:
            where = places(tensor.shape, placements, mesh.shape, at)
        if first and [sum(end - start for start, end in ranges) for ranges in where] != list(mine.shape):
            raise ValueError(
                f"{name} has a shard of shape {tuple(mine.shape)}, which is not that of {tuple(tensor.shape)} "
                f"placed as {placements} on {mesh} at {at}: pass its full_tensor()"
            )
    if first and mine.numel():
        for box in itertools.product(*where):
            starts = [start for start, _ in box]
            inside = [sum(b - a for a, b in ranges if a < start) for ranges, start in zip(where, starts, strict=True)]
            yield f"{name}@{','.join(map(str, starts))}", view(mine, inside, [end - start for start, end in box])


def is_first(mesh: Any) -> bool:
    """True if this rank's mesh is the first of its kind: a slice of a larger one at 0 in all other dimensions."""
    if hasattr(mesh, "_get_root_mesh"):
        root = mesh._get_root_mesh()
    else:  # torch 2.6
        root = sys.modules[type(mesh).__module__]._mesh_resources.get_root_mesh(mesh)
    members = torch.isin(root.mesh, mesh.mesh).nonzero()
    others = (members == members[0]).all(0)
    return not members[0][others].any()


def view(tensor: Tensor, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A box of a tensor, in its memory."""
    tensor = tensor.detach()
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


# ---- reading


class Parts:
    """The parts of one patch, in any order, once they are known to make up whole tensors.

    Args:
        headers: of each part; they may say anything.

    Attributes:
        whole: dtype and shape of each of the result's tensors.
        boxes: by their keys, the name, starts and sizes of each.
        kept: keys of those that lead from the reader's.
        gone: names of tensors that the base has and the result has not.
        full: True if the parts are a snapshot.

    Raises:
        PatchError: parts are missing, or do not belong together; the message says which.
    """

    def __init__(self, headers: Sequence[Mapping[str, Any]]) -> None:
        self.whole: dict[str, Form] = {}
        self.boxes: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {}
        self.kept: list[str] = []
        self.gone: set[str] = set()
        there: dict[int, tuple[str, ...]] = {}
        if not headers:
            raise PatchError("there are no parts: pass those of all ranks")
        for header in headers:
            index, count, version = described(header)
            self.full = header["base"] is None
            kind = "a full snapshot" if self.full else "an incremental patch"
            said = f"{count} parts", f"version {version!r}", kind, f"model {header['model']}"
            first, known = next(iter(there.items()), (index, said))
            if said != known:
                raise PatchError(
                    f"part {index} is of {', '.join(said)}, part {first} of {', '.join(known)}: pass those of one"
                )
            if index in there:
                raise PatchError(f"part {index} of version {version!r} is there twice: pass each part once")
            there[index] = said
            self._add(header)
        if missing := list(itertools.islice((index for index in range(count) if index not in there), 20)):
            raise PatchError(
                f"{count - len(there)} of the {count} parts of version {version!r} are missing, of ranks "
                f"{str(missing)[1:-1]}: wait for them, and pass all at once, or ask for a full snapshot"
            )
        self._require_whole()

    def _add(self, header: Mapping[str, Any]) -> None:
        """Another part's tensors and boxes."""
        for name, (dtype, shape) in header["whole"].items():
            if self.whole.setdefault(name, (dtype, shape)) != (dtype, shape):
                raise PatchError(f"{name} is {dtype} {shape} in a part, {self.whole[name]} in another: write one model")
        for record in header["tensors"]:
            try:
                box, dtype, sizes, how = record
                name, _, text = box.rpartition("@")
                starts = tuple(map(int, text.split(","))) if text else ()
                sound = header["whole"][name][0] == dtype and len(starts) == len(sizes) and is_shape(sizes)
                sound = sound and text == ",".join(map(str, starts)) and box not in self.boxes
            except (TypeError, ValueError, AttributeError, KeyError):
                sound = False
            if not sound:
                raise PatchError(f"{str(record)[:200]} is no box of a part: ask for a full snapshot")
            self.boxes[box] = name, starts, tuple(sizes)
            if how == "kept":
                self.kept.append(box)
        self.gone.update(map(str, header["gone"]))

    def _require_whole(self) -> None:
        """Raises PatchError unless the boxes of each tensor are a grid that fills it."""
        grids: dict[str, list[tuple[Any, ...]]] = {name: [] for name in self.whole}
        for name, starts, sizes in self.boxes.values():
            grids[name].append(tuple(zip(starts, sizes, strict=True)))
        for name, grid in grids.items():
            shape = self.whole[name][1]
            sound = all(len(box) == len(shape) for box in grid)
            spans = [sorted({box[dim] for box in grid}) for dim in range(len(shape))] if sound else []
            sound = sound and len(set(grid)) == len(grid) == math.prod(map(len, spans))
            for size, cut in zip(shape, spans, strict=False):
                ends = itertools.accumulate((length for _, length in cut), initial=0)
                sound = sound and [*(start for start, _ in cut), size] == list(ends)
            if not sound and (0 not in shape or grid):
                raise PatchError(
                    f"the parts do not fill {name}, {shape}: all ranks of its mesh must write parts of one state"
                )

    def require_same(self, state: Mapping[str, Tensor]) -> None:
        """Raises PatchError unless a reader has the tensors of an incremental patch's base, and no others."""
        for name in state:
            if name not in self.whole and name not in self.gone:
                raise PatchError(f"{name} is not in the writer's model: pass a state of the same model")
        for name in {self.boxes[box][0] for box in self.kept}:
            mine = form(state[name]) if name in state else "not there"
            if mine != self.whole[name]:
                raise PatchError(
                    f"{name} is {self.whole[name]} in the patch, and {mine} in the reader: pass a state of the same "
                    "model, or ask for a full snapshot"
                )

    def require_ties(self, state: Mapping[str, Tensor]) -> None:
        """Raises PatchError if tensors that share memory here are divided in different ways."""
        cuts: dict[str, set[Any]] = {name: set() for name in self.whole}
        for name, *cut in self.boxes.values():
            cuts[name].add(tuple(cut))
        first: dict[Any, str] = {}
        for name, tensor in state.items():
            if tensor.numel() and self.whole.get(name) == form(tensor):
                other = first.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape), name)
                if cuts[name] != cuts[other]:
                    raise PatchError(f"{name} and {other} share memory here, and have other shards: copy one of them")

    def views(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The boxes of those tensors that are as in the result."""
        fit = {name for name, tensor in tensors.items() if self.whole.get(name) == form(tensor)}
        return {box: view(tensors[name], *place) for box, (name, *place) in self.boxes.items() if name in fit}


def described(header: Mapping[str, Any]) -> tuple[int, int, str]:
    """A part's index, the number of parts, and their version, once the header has what parts need.

    Raises:
        PatchError: it has not.
    """
    try:
        (index, count), version, whole = header["part"], header["version"], header["whole"]
        sound = type(index) is type(count) is int and 0 <= index < count and isinstance(version, str)
        sound = sound and isinstance(header["gone"], list) and isinstance(header["model"], str)
        sound = sound and all(dtype in DTYPES and is_shape(shape) for dtype, shape in whole.values())
    except (KeyError, TypeError, ValueError, AttributeError):
        sound = False
    if not sound:
        raise PatchError(f"{str(header.get('part', 'a patch'))[:50]} is no part of a patch: ask for the part again")
    return index, count, version
