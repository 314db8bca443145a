"""How the words of a section of weights become bytes, given the words before, and back.

A section is up to `SECTION` words of 8, 16 or 32 bits. It is written as the changes of some words (SPARSE) or as the
differences of all (DENSE), whichever is shorter.

Values are ordered integers: a float's sign and magnitude, so that the next larger number is 1 further; -0.0 and each
NaN have numbers of their own. Differences wrap around. DENSE has them in zig-zag, a plane of bytes after the other.

SPARSE goes by groups. Small weights change most, as an update of equal size is more units in the last place to them,
and the reader knows how large each was: so exponents of the old words divide a section into up to five groups, each of
its own density. Places count among a group's members, and in the last group, of the larger weights, in the section.
A dense group has a bit for each member, another the gaps between changed ones: their low bits, and the rest as bytes,
255 for "255, and more". A difference is a sign, and a magnitude less 1 in 2 bits, in a byte, or in a word.

Each stream of bytes is deflated by zlib, which codes bytes and runs of one byte, or kept where that is no shorter.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

SECTION = 1 << 22
SPARSE, DENSE = 0, 1
#: A group ends where fewer of the next exponent's words have changed than these shares.
SHARES = (0.5, 0.15, 0.04, 0.012)
#: Fewer changes are one group: each has tables of its own.
GROUPED = 512
#: A group of less than one change in so many words has gaps.
BITS_UP_TO = 12
MORE, DEFLATED = 255, 1 << 31
TWO_BITS = np.array([0, 2, 4, 6], np.uint8)


class PatchError(ValueError):
    """Bytes that are no patch, or no patch of these tensors. Nothing has been changed."""


@dataclass(frozen=True)
class Words:
    """A kind of words: their bits, and those of the mantissa below the exponent; None: integers, as they are."""

    bits: int
    mantissa: int | None = None

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def magnitude(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @property
    def flip(self) -> int:
        """The bits by which negative words differ from integers of the same order."""
        return 0 if self.mantissa is None else self.magnitude

    def ordered(self, words: np.ndarray) -> np.ndarray:
        """Words as unsigned integers in two's complement, in the order of their values; and back: its own inverse."""
        if self.mantissa is None:
            return words
        negative = words.view(f"<i{self.bits // 8}") >> (self.bits - 1)
        return words ^ (negative.view(self.dtype) & self.dtype.type(self.magnitude))


def kernels() -> Any:
    """The kernels: numba is imported when they are needed."""
    from ..backends.cpu import words

    return words


def no_bits(count: int) -> np.ndarray:
    return np.zeros(-(-count // 64), np.int64)


def places_of(bits: np.ndarray) -> np.ndarray:
    """Ascending places, int32, of set bits."""
    places = np.empty(kernels().count_bits(bits), np.int32)
    kernels().list_bits(bits, places)
    return places


# ---- writing


def encode(old: np.ndarray | None, new: np.ndarray, kind: Words) -> tuple[bytes, np.ndarray | None]:
    """The bytes of a section, and the places that change, or None for all. `old` is None for tensors that are new."""
    if old is None:
        return encode_dense(np.zeros_like(new), new, kind), None
    changed = no_bits(len(new))
    kernels().mark_changes(kind.dtype.itemsize, old.ctypes.data, new.ctypes.data, len(new), changed)
    places = places_of(changed)
    sparse = encode_sparse(old, new, changed, places, kind)
    dense = encode_dense(old, new, kind) if 4 * len(places) > len(new) else None
    return (sparse, places) if dense is None or len(sparse) <= len(dense) else (dense, None)


def encode_dense(old: np.ndarray, new: np.ndarray, kind: Words) -> bytes:
    difference = (kind.ordered(new) - kind.ordered(old)).view(f"<i{kind.bits // 8}")
    zigzag = (difference << 1) ^ (difference >> (kind.bits - 1))
    planes = zigzag.view(np.uint8).reshape(len(new), -1).T
    return b"".join((bytes([DENSE]), *(pack(np.ascontiguousarray(plane)) for plane in planes)))


def encode_sparse(old: np.ndarray, new: np.ndarray, changed: np.ndarray, places: np.ndarray, kind: Words) -> bytes:
    limits = group_limits(old, places, kind)
    out, order = [bytes([SPARSE, len(limits), *limits])], []
    for members, count in groups(old, limits, kind):
        chosen = changed & members
        order.append(places_of(chosen))
        bits = no_bits(count)
        kernels().gather_bits(chosen, members, bits)
        out.append(encode_places(bits, len(order[-1]), count))
        changed = changed ^ chosen
    order.append(places_of(changed))
    out.append(encode_places(changed, len(order[-1]), len(old)))
    everywhere = np.concatenate(order)
    magnitudes, negative = np.empty(len(everywhere), kind.dtype), np.empty(len(everywhere), bool)
    kernels().subtract(old, new, everywhere, kind.flip, magnitudes, negative)
    out.append(np.packbits(negative, bitorder="little").tobytes())
    bounds = np.cumsum([0, *map(len, order)])
    out.extend(pack(pairs_of_bits(magnitudes[a:b])) for a, b in pairwise(bounds))
    large = magnitudes[magnitudes >= 3] - 3
    out.append(pack(np.minimum(large, MORE).astype(np.uint8)))
    out.append(pack(large[large >= MORE].view(np.uint8)))
    return b"".join(out)


def group_limits(old: np.ndarray, places: np.ndarray, kind: Words) -> list[int]:
    """The exponents before which the groups of small weights end, ascending."""
    if kind.mantissa is None or len(places) < GROUPED:
        return []
    samples = old[:: max(1, len(old) >> 16)], old[places[:: max(1, len(places) >> 16)]]
    everywhere, changed = (
        np.bincount((words & kind.magnitude) >> kind.mantissa, minlength=256) * (size / len(words))
        for words, size in zip(samples, (len(old), len(places)), strict=True)
    )
    shares = changed / np.maximum(everywhere, len(old) / len(samples[0]))
    found = {min(255, int(np.flatnonzero(shares >= share)[-1]) + 1) for share in SHARES if (shares >= share).any()}
    return sorted(found)


def encode_places(bits: np.ndarray, count: int, members: int) -> bytes:
    """The places of `count` set bits below `members`."""
    begin = struct.pack("<I", count)
    if BITS_UP_TO * count > members:
        return begin + b"\0" + pack(bits.view(np.uint8)[: -(-members // 8)])
    gaps = np.diff(places_of(bits), prepend=-1) - 1
    width = low_bits(count, members)
    high = gaps >> width
    more = high // MORE
    stream = np.full(len(gaps) + int(more.sum()), MORE, np.uint8)
    stream[np.cumsum(more + 1) - 1] = high % MORE
    low = pack((gaps & ((1 << width) - 1)).astype(np.uint8)) if width else b""
    return begin + b"\1" + struct.pack("<I", len(stream)) + pack(stream) + low


def pairs_of_bits(magnitude: np.ndarray) -> np.ndarray:
    """Magnitudes up to 2, and 3 for all above, four in a byte."""
    low = np.zeros(-(-len(magnitude) // 4) * 4, np.uint8)
    low[: len(magnitude)] = np.minimum(magnitude, 3)
    a, b, c, d = low.reshape(-1, 4).T
    return a | b << 2 | c << 4 | d << 6


def pack(data: np.ndarray) -> bytes:
    """A stream of bytes, deflated if that is shorter."""
    raw = data.tobytes()
    counts = np.bincount(data, minlength=256)
    shares = counts[counts > 0] / max(1, len(data))
    if len(data) < 4096 or -(shares * np.log2(shares)).sum() < 7.9:
        strategy = zlib.Z_RLE if shares.max(initial=0) > 0.5 else zlib.Z_HUFFMAN_ONLY
        deflate = zlib.compressobj(9, zlib.DEFLATED, -15, 9, strategy)
        deflated = deflate.compress(raw) + deflate.flush()
        if len(deflated) < len(raw):
            return struct.pack("<I", len(deflated) | DEFLATED) + deflated
    return struct.pack("<I", len(raw)) + raw


# ---- both


def groups(old: np.ndarray, limits: Sequence[int], kind: Words) -> Iterator[tuple[np.ndarray, int]]:
    """Bits of each group's members, and how many they are, without the last group's."""
    before = no_bits(len(old))
    for limit in limits:
        members = no_bits(len(old))
        kernels().mark_below(kind.dtype.itemsize, old, kind.magnitude, limit << (kind.mantissa or 0), members)
        yield members ^ before, kernels().count_bits(members ^ before)
        before = members


def low_bits(count: int, members: int) -> int:
    """The bits of a gap that hardly depend on its size."""
    return min(8, max(0, (members // max(1, count)).bit_length() - 8))


# ---- reading


class Reader:
    """Takes bytes from a section that may be anything.

    Raises:
        PatchError: there are fewer, or they are not what is wanted.
    """

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise PatchError(f"a section ends {count - len(self.data) + self.at} bytes early: ask for the patch again")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, most: int, size: str = "<I") -> int:
        """The next number, which is at most `most`."""
        found: int = struct.unpack(size, self.take(struct.calcsize(size)))[0]
        if found > most:
            raise PatchError(f"a section says {found} where at most {most} is possible: ask for the patch again")
        return found

    def unpack(self, length: int) -> np.ndarray:
        """The next stream, `length` bytes."""
        size = self.number((1 << 32) - 1)
        data = self.take(size & ~DEFLATED)
        if size & DEFLATED:
            inflate = zlib.decompressobj(-15)
            try:
                data = memoryview(inflate.decompress(data, max(1, length)))
                whole = inflate.eof or not inflate.decompress(inflate.unconsumed_tail, 1)
            except zlib.error as error:
                raise PatchError(f"a stream cannot be inflated ({error}): ask for the patch again") from None
            if not whole or not inflate.eof or inflate.unused_data:
                data = memoryview(b"")
        if len(data) != length:
            raise PatchError(f"a stream has not the {length} bytes that it must have: ask for the patch again")
        return np.frombuffer(data, np.uint8)

    def end(self) -> None:
        if self.at != len(self.data):
            raise PatchError(f"a section has {len(self.data) - self.at} bytes too many: ask for the patch again")


def decode(data: memoryview, old: np.ndarray | None, words: int, kind: Words) -> tuple[np.ndarray | None, np.ndarray]:
    """The places that change, ascending, or None for all, and their new words.

    Args:
        data: any bytes.
        old: the words before, or None for tensors that are new; `words` of them.

    Raises:
        PatchError: these bytes are no section of so many words.
    """
    source = Reader(data)
    if source.number(DENSE, "B") == DENSE:
        planes = np.stack([source.unpack(words) for _ in range(kind.bits // 8)], axis=1)
        source.end()
        zigzag = planes.reshape(-1).view(kind.dtype)
        difference = (zigzag >> 1) ^ (0 - (zigzag & 1))
        before = np.zeros(words, kind.dtype) if old is None else old
        return None, kind.ordered(kind.ordered(before) + difference)
    if old is None:
        raise PatchError("a new tensor is given by changes of one that is not there: ask for a full snapshot")
    places, words_now = decode_sparse(source, old, kind)
    source.end()
    return places, words_now


def decode_sparse(source: Reader, old: np.ndarray, kind: Words) -> tuple[np.ndarray, np.ndarray]:
    """Places, group by group, and their new words."""
    limits = list(source.take(source.number(len(SHARES), "B")))
    if limits and (kind.mantissa is None or limits != sorted(set(limits))):
        raise PatchError(f"a section divides its words at exponents {limits}: ask for the patch again")
    order, small = [], no_bits(len(old))
    for members, count in groups(old, limits, kind):
        bits = no_bits(len(old))
        kernels().scatter_bits(decode_places(source, count), members, bits)
        order.append(places_of(bits))
        small |= members
    rest = decode_places(source, len(old))
    if (rest & small).any():
        raise PatchError("a section changes a word twice: ask for the patch again")
    order.append(places_of(rest))
    places = np.concatenate(order)
    packed = np.frombuffer(source.take(-(-len(places) // 8)), np.uint8)
    negative = np.unpackbits(packed, bitorder="little")[: len(places)].astype(bool)
    magnitudes = np.concatenate(
        [(source.unpack(-(-len(group) // 4))[:, None] >> TWO_BITS & 3).reshape(-1)[: len(group)] for group in order]
    ).astype(kind.dtype)
    large = np.flatnonzero(magnitudes == 3)
    more = source.unpack(len(large)).astype(kind.dtype)
    huge = np.flatnonzero(more == MORE)
    more[huge] = source.unpack(len(huge) * kind.dtype.itemsize).view(kind.dtype)
    magnitudes[large] += more
    words = np.empty(len(places), kind.dtype)
    kernels().add(old, places, kind.flip, magnitudes, negative, words)
    return places, words


def decode_places(source: Reader, members: int) -> np.ndarray:
    """Bits below `members`."""
    bits, count = no_bits(members), source.number(members)
    if source.number(1, "B") == 0:
        flags = bits.view(np.uint8)
        flags[: -(-members // 8)] = source.unpack(-(-members // 8))
        if kernels().count_bits(bits) != count or (members % 8 and flags[members // 8] >> members % 8):
            raise PatchError(f"a section has other places than those of {count} changes: ask for the patch again")
        return bits
    stream = source.unpack(source.number(count + members // MORE))
    width = low_bits(count, members)
    ends = np.flatnonzero(stream != MORE)
    if len(ends) != count or (len(stream) and (not count or ends[-1] != len(stream) - 1)):
        raise PatchError(f"a section has {len(ends)} gaps for {count} changes: ask for the patch again")
    gaps = np.diff(np.cumsum(stream, dtype=np.int64)[ends], prepend=0) << width
    if width:
        gaps |= source.unpack(count)
    places = np.cumsum(gaps + 1) - 1
    if count and places[-1] >= members:
        raise PatchError(f"a change lies {int(places[-1]) - members + 1} words too far: ask for the patch again")
    kernels().set_bits(places, bits)
    return bits
