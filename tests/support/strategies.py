"""Inputs for the contract of a codec: codecs beyond `CODECS`, gradients that hurt, wires that lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from gradwire.compress import (
    CODECS,
    EDEN,
    QSGD,
    ChunkedTopK,
    Codec,
    OneBit,
    Ternary,
    TernGrad,
    TopK,
    new_draw,
)
from gradwire.compress.backends import Kernels, backend_names, use_backend
from gradwire.compress.codec import DTYPES
from gradwire.compress.formats.entries import index_layout
from hypothesis import strategies as st
from torch import Tensor

VARIANTS: tuple[Codec, ...] = (
    *CODECS,
    OneBit(block=256),
    OneBit(scale="symmetric"),
    *(QSGD(bits=bits) for bits in (2, 3, 5, 6, 7, 8)),
    QSGD(norm="l2"),
    QSGD(rounding="nearest"),
    QSGD(bits=3, block=256, norm="l2", rounding="nearest"),
    TernGrad(clip=math.inf),
    TernGrad(block=2560, rounding="nearest"),
    Ternary(block=2560),
    EDEN(scale="closest"),
    EDEN(scale="closest", levels=2),
    TopK(density=1.0),
    TopK(density=0.001),
    TopK(density=0.3),
    TopK(indices="plain"),
    TopK(values=torch.bfloat16),
    TopK(density=0.3, values=torch.int8),
    TopK(indices="plain", values=torch.int8),
    ChunkedTopK(values=4),
    ChunkedTopK(k=37, chunk=512, values=torch.int8),
    ChunkedTopK(k=256, chunk=256, values=torch.float32),
    ChunkedTopK(k=1, chunk=768, values=torch.bfloat16),
)

#: What arithmetic may trip over.
ODD = st.sampled_from([0.0, -0.0, 1e-45, -3e-39, 1.0, -2.5, 3e38, -3e38, math.inf, -math.inf, math.nan])

#: Where there is a GPU, "cuda" means it. Elsewhere the kernels run on the CPU: see `emulated` and `conftest`.
GPU = torch.cuda.is_available()

#: Every backend, and those that must equal the reference.
ALL_BACKENDS = [
    pytest.param(name, marks=[pytest.mark.cuda] if name == "cuda" and GPU else []) for name in backend_names()
]
OTHER_BACKENDS = [param for param in ALL_BACKENDS if param.values != ("reference",)]


def device_of(backend: str) -> torch.device:
    return torch.device("cuda" if backend == "cuda" and GPU else "cpu")


def kernels_of(backend: str, codec: Codec) -> Kernels:
    with use_backend(backend):
        return codec.kernels(device_of(backend))


def _scaled(factor: float) -> object:
    return lambda x, rng: x * np.float32(factor)


def _with_nonfinite(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    x[rng.integers(0, len(x), 3)] = [np.nan, np.inf, -np.inf]
    return x


def _wide(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.exp(np.float32(8) * x) * np.sign(x)


#: What a gradient may look like, made from normal numbers.
KINDS: dict[str, object] = {
    "normal": _scaled(1.0),
    "tiny": _scaled(1e-38),
    "subnormal": _scaled(1e-44),
    "huge": _scaled(3e38),
    "largest": lambda x, rng: np.copysign(np.float32(3.4028234e38), x),
    "spots": lambda x, rng: np.where(rng.random(len(x)) < 1e-3, x * np.float32(3e37), x),
    "wide": _wide,
    "ties": lambda x, rng: np.round(x),
    "leading": lambda x, rng: x * np.where(np.arange(len(x)) < len(x) / 3, 1, np.float32(1e-3)),
    "trailing": lambda x, rng: x * np.where(np.arange(len(x)) < 2 * len(x) / 3, np.float32(1e-3), 1),
    "zeros": lambda x, rng: np.copysign(np.float32(0), x),
    "constant": lambda x, rng: np.full_like(x, -1.5),
    "not finite": _with_nonfinite,
    "any bits": lambda x, rng: rng.integers(0, 1 << 32, len(x), dtype=np.uint32).view(np.float32).copy(),
}
FINITE = tuple(kind for kind in KINDS if kind not in ("huge", "largest", "spots", "not finite", "any bits"))

#: Lengths around every boundary there is: a vector, a row of partial sums, blocks, the tiles of the CPU kernels.
LENGTHS = (1, 2, 3, 63, 64, 65, 255, 256, 257, 511, 513, 1023, 1024, 1025, 1279, 1280, 1281, 2049, 4096, 4097, 6401)


def gradient(kind: str, numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        x = KINDS[kind](rng.standard_normal(numel).astype(np.float32), rng)  # type: ignore[operator]
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(dtype)


@dataclass(frozen=True)
class Case:
    """A gradient, a residual and a draw, made again at each use."""

    numel: int
    kind: str
    residual_kind: str
    dtype: torch.dtype
    seed: int
    stream: int
    offset: int

    def gradient(self) -> Tensor:
        """At an address that is `offset` elements off any alignment."""
        memory = torch.empty(self.numel + self.offset, dtype=self.dtype)
        memory[self.offset :] = gradient(self.kind, self.numel, self.seed % (1 << 32), self.dtype)
        return memory[self.offset :]

    def residual(self) -> Tensor:
        return gradient(self.residual_kind, self.numel, self.seed % (1 << 32) + 1)

    def draw(self) -> Tensor:
        return new_draw(self.seed, self.numel, self.stream)


def cases(kinds: tuple[str, ...] = tuple(KINDS)) -> st.SearchStrategy[Case]:
    words = st.integers(-(1 << 63), (1 << 63) - 1)
    return st.builds(
        Case,
        numel=st.one_of(st.sampled_from(LENGTHS), st.integers(1, 3000)),
        kind=st.sampled_from(kinds),
        residual_kind=st.one_of(st.just("normal"), st.sampled_from(kinds)),
        dtype=st.sampled_from(DTYPES),
        seed=words,
        stream=words,
        offset=st.integers(0, 3),
    )


#: Words at the border of some range.
BORDERS = (0, 1, 0x7F, 0x80, 0x7F800000, 0x7FC00000, 0x7FFFFFFF, 0x80000000, 0xFF800000, 0xFFFFFFFF)


def hostile_wires(codec: Codec, numel: int, ranks: int, seed: int) -> Tensor:
    """Wires, [ranks, bytes] with a pitch of their own: sound ones, damaged ones, noise, one byte, unsorted indices."""
    rng = np.random.default_rng(seed)
    size = codec.wire_bytes(numel)
    rows = torch.from_numpy(rng.integers(0, 256, (ranks, size + 4 * rng.integers(0, 3)), dtype=np.uint8))[:, :size]
    workspace = codec.workspace(numel)
    for rank, row in enumerate(rows):
        fate = rng.integers(0, 6)
        if fate in (0, 1, 4) or (fate == 2 and isinstance(codec, TopK)):
            wire = torch.empty(size, dtype=torch.uint8)
            codec.encode(gradient("normal", numel, seed + rank), wire, new_draw(seed, 0, rank), workspace)
            row.copy_(wire)
        if fate == 1:
            row[torch.from_numpy(rng.integers(0, size, 3))] = 255
        if fate == 4:
            words = row[: size // 4 * 4].numpy().view(np.uint32)
            words[rng.integers(0, len(words), 5)] = rng.choice([*BORDERS, numel - 1, numel, numel + 1])
        if fate == 5:
            row.fill_(int(rng.choice([0, 1, 0x7F, 0x80, 0xFF])))
        if fate == 2 and isinstance(codec, TopK):
            k = codec.k(numel)
            words = row[: codec.part_bytes(numel)[0]].numpy().view(np.uint32)
            if codec.indices == "plain":
                words[0] = rng.integers(0, 2 * k + 2)
                words[1:] = rng.integers(0, 2 * numel + 1, k)
                if rng.integers(0, 2):
                    words[1:].sort()
            else:
                low = words[index_layout(numel, k).upper_words :]
                low[:] = rng.integers(0, 1 << 32, len(low))
    return rows


def parts_of(codec: Codec, wires: Tensor, numel: int) -> tuple[Tensor, ...]:
    """Wires [ranks, bytes] as `decode_mean` takes them, one tensor a part."""
    return tuple(wires.split(codec.part_bytes(numel), dim=1))


def encode(codec: Codec, x: Tensor, draw: Tensor | None = None) -> Tensor:
    wire = torch.full((codec.wire_bytes(x.numel()),), 0xA5, dtype=torch.uint8, device=x.device)
    codec.encode(x, wire, new_draw(0, device=x.device) if draw is None else draw, codec.workspace(x.numel(), x.device))
    return wire


def decode(codec: Codec, wire: Tensor, numel: int) -> Tensor:
    out = torch.zeros(numel, device=wire.device)
    codec.decode_add(wire, out, 1.0, codec.workspace(numel, wire.device))
    return out


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, but that any NaN equals any other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    words = torch.int32 if a.dtype == torch.float32 else torch.int16
    return bool(((a.view(words) == b.view(words)) | (a.isnan() & b.isnan())).all())
