"""Lossless patches of weights, from a trainer to its readers.

A patch leads from one state of the weights, its base, to another, its result:

    "GWPATCH", the format's version (1 byte), bytes of the header (u32) and of the body (u64)
    header     JSON, deflated: fingerprints of base and result, the result's tensors, bytes of each section
    body       the sections, one after the other (`sections`)
    BLAKE2b    256 bits, of all bytes before

A rank of a sharded model writes a part, version 2: a patch of boxes (`shards`), whose header has in addition "part",
the rank's index and how many ranks write; "version", what names the result on all ranks; "whole", dtype and shape of
each tensor that has boxes here, in part 0 of all; "model", a hash of all of them; and "gone", names of tensors that the
base had. Its base is that of the boxes that are "kept".

Sections follow from the tensors: words of one kind, of tensors that the base has with this dtype and shape, or of new
ones, by name, cut after `SECTION` words.

A fingerprint is the BLAKE2b of names, dtypes, shapes and two 64-bit sums over each tensor's words and their places
(`backends.cpu.words`), which change with few words at little cost. It finds accidents, such as another base; whoever
can forge patches can forge it. Sign the bytes, or send them through a channel that proves who sent them.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import shards
from .sections import PatchError, decode, encode
from .weights import (
    DTYPES,
    NAMES,
    Change,
    Form,
    Section,
    Weights,
    change_of,
    check,
    cut,
    each,
    form,
    is_shape,
    layout_of,
    require_flags,
    words_of,
)

MAGIC, VERSION, PART_VERSION = b"GWPATCH", 1, 2
PREFIX = struct.Struct("<7sBIQ")
DIGEST_BYTES = 32
#: How far zlib deflates at most, and bytes that a header may have.
INFLATION, HEADER_LIMIT = 1032, 1 << 24
#: Bytes of a stream that are read at once.
CHUNK = 1 << 20

#: A tensor of the header: name, dtype, shape, and "kept", "new", or the name of an earlier one that is equal.
Record = tuple[str, str, list[int], str]


class PatchWriter:
    """Turns states of the weights into patches, each from the one before: lossless, bit for bit.

    After an optimizer step at a low learning rate most bfloat16 weights are what they were; a patch has the places of
    those that changed and their differences in units in the last place, entropy-coded with regard to the weights' old
    exponents.

    Args:
        state: weights that all readers have already; the first patch leads from them. None: it is a full snapshot.
        full_every: every so many patches, one is a full snapshot, from which readers can begin, or begin again.
        part: this rank and how many ranks write, each a part of every patch: its shards of DTensors, or nothing where
            another replica writes the same; rank 0 also all plain tensors. All call `write` equally often, with all
            names of the model. None: one process writes everything.

    The writer keeps a copy of the weights, or of its shards, in host memory. Of tensors on a GPU it keeps another one
    there, so that only changes are copied to the host.
    """

    def __init__(
        self,
        state: Mapping[str, Tensor] | None = None,
        *,
        full_every: int | None = None,
        part: tuple[int, int] | None = None,
    ) -> None:
        if full_every is not None and full_every < 1:
            raise ValueError(f"full_every is {full_every}: give 1 or more, or None for no full snapshots")
        if part is not None and not 0 <= part[0] < part[1]:
            raise ValueError(f"part is {part}: give (rank, number of ranks), such as (0, 4)")
        self._weights: Weights | None = None
        self._on_device: dict[str, Tensor] = {}
        self._full_every, self._since, self._part, self._written = full_every, 0, part, 0
        self._whole: dict[str, Form] = {}
        if state is not None:
            mine = self._own(state)
            self._weights = Weights({name: contiguous(tensor, "cpu") for name, tensor in mine.items()})
            self._whole = {name: form(tensor) for name, tensor in state.items()} if part else {}
            self._keep_on_device(mine)

    @property
    def fingerprint(self) -> str | None:
        """Of the weights written last, 64 hex digits; of a sharded model, of this rank's boxes."""
        return None if self._weights is None else self._weights.own_fingerprint()

    def write(self, state: Mapping[str, Tensor], *, full: bool = False, version: str | None = None) -> bytes:
        """The patch from the state before to this one, or this rank's part of it. The same states give the same bytes.

        Args:
            state: names and tensors, of any dtype whose elements are whole bytes. Tensors that are new, or have another
                shape or dtype, are in the patch as a whole; one that shares another's memory is not in it twice.
            full: a full snapshot, which needs no base.
            version: what names this state on all ranks that write a part, such as "run 7, step 100": parts of different
                versions are not applied together. Default: how many patches this writer has written.

        Raises:
            TypeError, ValueError: something in it is no tensor with memory of its own; the message names it.
        """
        if version is not None and self._part is None:
            raise ValueError(f"version {version!r} is that of a part: give PatchWriter part=(rank, number of ranks)")
        after = Weights(self._own({name: state[name] for name in sorted(state)}))
        due = self._full_every is not None and self._since >= self._full_every
        before = Weights({}) if self._weights is None or full or due else self._weights
        base = None if before is not self._weights else before.own_fingerprint()
        records = records_of(after.tensors, before.tensors)
        sections = sections_of(records)

        def job(section: Section) -> tuple[bytes, Change]:
            old = None if section.new else before.read(section)
            new = after.read(section, old, self._on_device)
            data, places = encode(old, new, section.kind)
            return data, change_of(section, places, new if places is None else new[places], old)

        done = each(job, sections)
        changes = [change for _, change in done]
        sums = result_sums(before, changes, records)
        result = before.fingerprint(sums, layout_of(after.tensors))
        header: dict[str, Any] = {
            "base": base,
            "result": result,
            "tensors": records,
            "sections": [len(data) for data, _ in done],
        }
        whole = {name: form(tensor) for name, tensor in state.items()} if self._part else {}
        if self._part is not None:
            mine = whole if not self._part[0] else {name.rpartition("@")[0] for name in after.tensors}
            header |= {
                "base": base and kept_fingerprint(before, records),
                "part": self._part,
                "version": str(self._written) if version is None else version,
                "whole": {name: whole[name] for name in sorted(mine)},
                "model": hashlib.blake2b(json.dumps(sorted(whole.items())).encode(), digest_size=8).hexdigest(),
                "gone": sorted(self._whole.keys() - whole.keys()),
            }
        packed = zlib.compress(json.dumps(header, separators=(",", ":")).encode(), 9)
        number = VERSION if self._part is None else PART_VERSION
        parts = [PREFIX.pack(MAGIC, number, len(packed), sum(header["sections"])), packed, *(data for data, _ in done)]
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for part in parts:
            digest.update(part)
        self._weights = settle(before, changes, records, sums, {})
        self._keep_on_device({name: after.tensors[name] for name, _, _, how in records if how in ("kept", "new")})
        self._whole, self._written = whole, self._written + 1
        self._since = 1 if base is None else self._since + 1
        return b"".join((*parts, digest.digest()))

    def _own(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that this process writes: all, or its boxes.

        Raises:
            TypeError, ValueError: there is something else among them.
        """
        if self._part is None:
            check(state, written=False)
            return dict(state)
        mine = {name: shards.local(name, tensor) for name, tensor in state.items()}
        check(mine, written=False)
        return dict(
            box for name in state for box in shards.boxes(name, state[name], mine[name], first=not self._part[0])
        )

    def _keep_on_device(self, state: Mapping[str, Tensor]) -> None:
        """Keep copies of what lies on a device, in the memory of former ones."""
        before, self._on_device = self._on_device, {}
        for name, tensor in state.items():
            if not on_host(tensor):
                old = before.get(name)
                if old is None or (old.dtype, old.shape, old.device) != (tensor.dtype, tensor.shape, tensor.device):
                    self._on_device[name] = contiguous(tensor, tensor.device)
                else:
                    self._on_device[name] = old.copy_(tensor.detach())


class PatchReader:
    """Applies patches to weights, in place.

    Args:
        state: the reader's weights by name, such as `model.state_dict()`, whose tensors share the model's memory. They
            may lie on any device. None: begin with a full snapshot.

    Attributes:
        state: the weights after the last patch. Tensors that the state had with the same shape and dtype are written in
            place, new ones are put into this dict, and those that the result has no longer are taken out.
    """

    def __init__(self, state: dict[str, Tensor] | None = None) -> None:
        self.state: dict[str, Tensor] = {} if state is None else state
        self._weights, self._boxes = Weights(self.state), Weights({})

    @property
    def fingerprint(self) -> str:
        """Of the weights, 64 hex digits: computed in a pass over them at first, then kept."""
        return self._weights.own_fingerprint()

    def verify(self) -> None:
        """Compute the fingerprint anew.

        Raises:
            PatchError: somebody else has written to the weights.
        """
        weights = self._boxes if self._boxes.tensors else self._weights
        known = weights.own_fingerprint()
        weights.measure()
        if weights.own_fingerprint() != known:
            raise PatchError(f"the weights are {weights.own_fingerprint()} and were {known}: ask for a full snapshot")

    def apply(self, source: bytes | bytearray | memoryview | BinaryIO | Sequence[bytes]) -> bool:
        """Apply one patch, or all parts of one: either whole, or not at all. Any bytes are safe; until all of them have
        been verified, the result's fingerprint included, nothing is written. Meanwhile the changes are in memory: some
        6 bytes for each word that changes, and of a full snapshot a copy of the weights.

        Args:
            source: a patch's bytes; the parts that all ranks have written of one, in any order; or a stream with
                `read`, from which one patch is taken, or all its parts.

        Returns:
            False: the stream has ended, before another patch.

        Raises:
            PatchError: the bytes are no patch, it does not lead from these weights, or parts are missing.
            TypeError, ValueError: a tensor of the reader's cannot be written; the message names it.
        """
        sources = patches_of(source)
        if sources is None:
            return False
        opened = [
            parse(data, f"number {i} of the parts" if sources[1:] else "the patch") for i, data in enumerate(sources)
        ]
        check(self.state, written=True)
        if len(opened) != 1 or "part" in opened[0][0]:
            self._apply_parts(opened)
            return True
        header, body = opened[0]
        if header["base"] is not None:
            require_base(header, self.fingerprint)
        change = verified(header, body, self._weights)
        require_ties(change.records, self.state, change.sums)
        after = settle(*change, self.state)
        self._become(after.tensors)
        self._weights.sums = change.sums
        return True

    def _become(self, tensors: dict[str, Tensor]) -> None:
        """These are the weights now."""
        self.state.clear()
        self.state.update(tensors)
        self._weights, self._boxes = Weights(self.state), Weights({})

    def _apply_parts(self, opened: list[tuple[dict[str, Any], memoryview]]) -> None:
        parts = shards.Parts([header for header, _ in opened])
        boxes = Weights(parts.views(self.state))
        if not parts.full:
            parts.require_same(self.state)
            if boxes.tensors.keys() <= self._boxes.sums.keys():
                boxes.sums = {name: self._boxes.sums[name] for name in boxes.tensors}
            else:
                boxes.measure()
        changes = [verified(header, body, boxes) for header, body in opened]
        tensors = {}
        for name, (dtype, shape) in parts.whole.items():
            fits = name in self.state and form(self.state[name]) == (dtype, shape)
            tensors[name] = self.state[name] if fits else torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
        parts.require_ties(self.state)
        after = Weights(parts.views(tensors))
        after.sums = {name: found for change in changes for name, found in change.sums.items()}
        require_ties([record for change in changes for record in change.records], after.tensors, after.sums)
        for change in changes:
            settle(*change, after.tensors)
        self._become(tensors)
        self._boxes = after


# ---- both sides


def on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def contiguous(tensor: Tensor, device: Any) -> Tensor:
    """A copy, on a device."""
    return tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)


def records_of(tensors: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> list[Record]:
    """A patch's record of each tensor."""
    found: list[Record] = []
    seen: dict[Any, str] = {}
    for name, dtype, shape in layout_of(tensors):
        tensor, old = tensors[name], before.get(name)
        place = tensor.data_ptr(), tensor.device, dtype, tuple(shape), tensor.stride()
        how = "kept" if old is not None and (old.dtype, old.shape) == (tensor.dtype, tensor.shape) else "new"
        if tensor.numel() and seen.setdefault(place, name) != name:
            how = f"={seen[place]}"
        found.append((name, dtype, shape, how))
    return found


def sections_of(records: list[Record]) -> list[Section]:
    coded = [(name, DTYPES[dtype], shape, how) for name, dtype, shape, how in records if how in ("kept", "new")]
    return cut((name, words_of(d), how == "new", math.prod(shape) * words_in(d)) for name, d, shape, how in coded)


def words_in(dtype: torch.dtype) -> int:
    """Words of an element."""
    return dtype.itemsize * 8 // words_of(dtype).bits


def result_sums(before: Weights, changes: list[Change], records: list[Record]) -> dict[str, np.ndarray]:
    sums = before.sums_after(changes, (name for name, *_ in records))
    for name, _, _, how in records:
        if how == "kept":
            sums[name] += before.sums[name]
        elif how != "new":
            sums[name] = sums[how[1:]].copy()
    return sums


def kept_fingerprint(before: Weights, records: Iterable[Record]) -> str:
    """Of what a part leads from: the boxes that it keeps."""
    return before.fingerprint(before.sums, [record[:3] for record in records if record[3] == "kept"])


def settle(
    before: Weights, changes: list[Change], records: list[Record], sums: dict[str, np.ndarray], mine: dict[str, Tensor]
) -> Weights:
    """The weights after verified changes: in the tensors of `before`, in those of `mine` that fit, or in new ones."""
    after = Weights({})
    after.sums = sums
    for name, dtype, shape, how in records:
        old = before.tensors.get(name) if how == "kept" else mine.get(name)
        if old is None or old.dtype != DTYPES[dtype] or list(old.shape) != shape:
            old = torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
        after.tensors[name] = old
    inference = any(tensor.is_inference() for tensor in after.tensors.values())
    with torch.no_grad(), torch.inference_mode(inference):
        for change in changes:
            after.write(change)
        for name, _, _, how in records:
            if how not in ("kept", "new"):
                tensor, equal = after.tensors[name], after.tensors[how[1:]]
                if tensor.data_ptr() != equal.data_ptr():
                    tensor.copy_(equal)
    return after


def require_ties(records: list[Record], mine: Mapping[str, Tensor], sums: Mapping[str, np.ndarray]) -> None:
    """Raises PatchError if tensors that share memory here would have to differ."""
    first: dict[tuple[int, int], str] = {}
    for name, dtype, shape, _ in records:
        tensor = mine.get(name)
        if tensor is None or not tensor.numel() or (NAMES[tensor.dtype], list(tensor.shape)) != (dtype, shape):
            continue
        other = first.setdefault((tensor.data_ptr(), tensor.nbytes), name)
        if (sums[name] != sums[other]).any():
            raise PatchError(f"{name} and {other} share memory here, and differ in the patch: copy one of them")


# ---- bytes that may be anything


class Verified(NamedTuple):
    """A patch's changes of `before`, and the sums of its result."""

    before: Weights
    changes: list[Change]
    records: list[Record]
    sums: dict[str, np.ndarray]


def verified(header: dict[str, Any], body: memoryview, weights: Weights) -> Verified:
    """The changes that a patch, or a part, makes to these weights, which are left alone.

    Raises:
        PatchError: it is none of them.
    """
    before = weights if header["base"] is not None else Weights({})
    records = checked(header["tensors"], before.tensors, len(body))
    sections = sections_of(records)
    parts = split(body, header["sections"], len(sections))
    dtypes = {name: dtype for name, dtype, _, _ in records}
    if "part" in header and header["base"] is not None:
        require_base(header, kept_fingerprint(before, records))

    def job(item: tuple[Section, memoryview]) -> Change:
        section, part = item
        old = None if section.new else before.read(section)
        change = change_of(section, *decode(part, old, section.words, section.kind), old)
        require_flags(change, dtypes)
        return change

    changes = each(job, list(zip(sections, parts, strict=True)))
    sums = result_sums(before, changes, records)
    result = before.fingerprint(sums, ((name, dtype, shape) for name, dtype, shape, _ in records))
    if result != header["result"]:
        raise PatchError(
            f"{titled(header)} would make the weights {result}, and the writer's are {header['result']}: somebody else "
            "has written to the reader's, or the patch is wrong. Ask for a full snapshot"
        )
    return Verified(before, changes, records, sums)


def titled(header: Mapping[str, Any]) -> str:
    return f"part {header['part'][0]} of version {header['version']}" if "part" in header else "this patch"


def require_base(header: Mapping[str, Any], mine: str) -> None:
    """Raises PatchError if a patch does not lead from these weights."""
    if header["base"] != mine:
        raise PatchError(
            f"{titled(header)} leads from the weights {header['base']} to {header['result']}, and the reader has "
            f"{mine}: apply the patches in between, or ask for a full snapshot"
        )


def patches_of(source: bytes | bytearray | memoryview | BinaryIO | Sequence[bytes]) -> list[bytes] | None:
    """A patch, or the parts of one; None if the stream has ended."""
    if isinstance(source, bytes | bytearray | memoryview):
        return [bytes(source)]
    if isinstance(source, Sequence):
        return [bytes(data) for data in source]
    if (data := read_patch(source)) is None:
        return None
    found = [data]
    if data[len(MAGIC)] == PART_VERSION:
        _, count, _ = shards.described(parse(data)[0])
        while len(found) < count and (data := read_patch(source)) is not None:
            found.append(data)
    return found


def read_patch(stream: BinaryIO) -> bytes | None:
    """The next patch of a stream, not yet verified; None if the stream has ended.

    Raises:
        PatchError: it ends within a patch, or has something else.
    """
    data = bytearray()
    read_up_to(stream, data, PREFIX.size)
    if not data:
        return None
    read_up_to(stream, data, patch_bytes(data))
    return bytes(data)


def read_up_to(stream: BinaryIO, data: bytearray, size: int) -> None:
    """Read until `data` has so many bytes, or the stream ends. What has not come takes no memory."""
    while len(data) < size and (chunk := stream.read(min(CHUNK, size - len(data)))):
        data += chunk


def patch_bytes(data: bytes | bytearray) -> int:
    """How long the patch is that begins like this."""
    if len(data) < PREFIX.size or data[: len(MAGIC)] != MAGIC:
        raise PatchError(f"{bytes(data[:16])!r} is not how a patch begins: pass what PatchWriter.write returned")
    _, version, header, body = PREFIX.unpack(data[: PREFIX.size])
    if version not in (VERSION, PART_VERSION):
        raise PatchError(f"the patch has format {version}, and this gradwire reads 1 and 2: use one version")
    return PREFIX.size + int(header) + int(body) + DIGEST_BYTES


def parse(data: bytes, title: str = "the patch") -> tuple[dict[str, Any], memoryview]:
    """Header and body of a patch whose bytes are as they were written.

    Raises:
        PatchError: they are not.
    """
    size = patch_bytes(data)
    if len(data) != size:
        raise PatchError(f"{title} has {len(data)} bytes and should have {size}: ask for it again")
    if hashlib.blake2b(memoryview(data)[:-DIGEST_BYTES], digest_size=DIGEST_BYTES).digest() != data[-DIGEST_BYTES:]:
        raise PatchError(f"{title} has another BLAKE2b than when it was written: ask for it again")
    length = PREFIX.unpack(data[: PREFIX.size])[2]
    body = memoryview(data)[PREFIX.size + length : -DIGEST_BYTES]
    try:
        inflate = zlib.decompressobj()
        header = json.loads(inflate.decompress(data[PREFIX.size : PREFIX.size + length], HEADER_LIMIT))
        shape = inflate.eof and [type(header[name]) for name in ("result", "tensors", "sections")]
        if shape != [str, list, list] or not isinstance(header["base"], str | None):
            raise TypeError("fields are missing")
        if ("part" in header) != (data[len(MAGIC)] == PART_VERSION):
            raise TypeError("it is that of a part, or a part's is missing")
    except (zlib.error, ValueError, TypeError, KeyError, RecursionError) as error:
        raise PatchError(f"{title}'s header cannot be read ({error}): ask for a full snapshot") from None
    return header, body


def checked(records: list[Any], mine: Mapping[str, Tensor], body: int) -> list[Record]:
    """A header's tensors, once it is certain that they are tensors, that `mine` has those that are kept, and that no
    more memory is asked for than the body can fill.

    Raises:
        PatchError: they are not.
    """
    found: dict[str, Record] = {}
    asked, most = 0, 2 * INFLATION * body + sum(tensor.nbytes for tensor in mine.values())
    for record in records:
        try:
            name, dtype, shape, how = record
            sound = isinstance(name, str) and isinstance(how, str) and dtype in DTYPES
            sound = sound and is_shape(shape) and name not in found
        except (TypeError, ValueError):
            sound = False
        if not sound:
            raise PatchError(f"{str(record)[:200]} is no tensor of a patch: ask for a full snapshot")
        if how == "kept":
            tensor = mine.get(name)
            sound = tensor is not None and form(tensor) == (dtype, shape)
        elif how != "new":
            first = found.get(how[1:])
            sound = how[:1] == "=" and first is not None and first[1:3] == (dtype, shape) and first[3][:1] != "="
        if how != "kept":
            asked += math.prod(shape) * DTYPES[dtype].itemsize
        if not sound or asked > most:
            raise PatchError(
                f"{name}, {dtype} {shape}, {how!r}, is not in these weights, or not in {body} bytes: ask for a full "
                "snapshot"
            )
        found[name] = name, dtype, shape, how
    return list(found.values())


def split(body: memoryview, sizes: list[Any], count: int) -> list[memoryview]:
    """The bytes of each of `count` sections."""
    if len(sizes) != count or any(type(size) is not int or size < 0 for size in sizes) or sum(sizes) != len(body):
        raise PatchError(
            f"the patch has {len(body)} bytes for {count} sections, divided as {str(sizes)[:50]}: ask again"
        )
    bounds = np.cumsum([0, *sizes]).tolist()
    return [body[a:b] for a, b in pairwise(bounds)]
