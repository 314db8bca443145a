"""The effect of a codec on a gradient: error, direction, bias, and its bits beside the entropy of its codes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...compress import (
    QSGD,
    ChunkedTopK,
    Codec,
    OneBit,
    Outliers,
    PowerSGD,
    RandomK,
    SparseCodec,
    Ternary,
    TernGrad,
    new_draw,
)

#: Relative error that rounding to float32 may add to a decoded value.
ROUNDING = 2.0**-23


@torch.no_grad()
def quality(codec: Codec, x: Tensor, seeds: int) -> dict[str, Any]:
    """Measures of `codec`, encoding without a residual, on the float32 gradient `x`.

    `bias` is the mean signed error over the mean magnitude. A stochastic codec is drawn `seeds` times for
    `bias_in_standard_errors`, which is about 1 where it is unbiased: see `standard_errors`.
    """
    numel, workspace = x.numel(), codec.workspace(x.numel())
    wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8)

    def decoded(seed: int) -> Tensor:
        codec.encode(x, wire, new_draw(seed), workspace)
        out = torch.zeros(numel)
        codec.decode_add(wire, out, 1.0, workspace)
        return out.double()

    exact, once = x.double(), decoded(0)
    result: dict[str, Any] = {
        "name": codec.name,
        "codec": repr(codec),
        "relative_error": share(float((once - exact).norm()), float(exact.norm())),
        "cosine": share(float(torch.dot(once, exact)), float(once.norm() * exact.norm())),
        "bits_per_element": 8 * len(wire) / numel,
        "entropy_bits_per_element": entropy(codec, wire.numpy(), numel),
        "bias_in_standard_errors": None,
        "bias_of_clipped_in_standard_errors": None,
    }
    mean = once
    if codec.unbiased:
        total, squares = torch.zeros_like(exact), torch.zeros_like(exact)
        for seed in range(seeds):
            deviation = decoded(seed) - exact
            total += deviation
            squares += deviation.square()
        mean = exact + total / seeds
        variance = (squares - total.square() / seeds).clamp(min=0) / (seeds - 1)
        result["bias_in_standard_errors"] = standard_errors(mean - exact, exact, variance / seeds)
        if isinstance(codec, TernGrad):
            clipped = within_scale(codec, exact, wire)
            result["bias_of_clipped_in_standard_errors"] = standard_errors(mean - clipped, exact, variance / seeds)
    result["bias"] = share(float((mean - exact).mean()), float(exact.abs().mean()))
    return result


def share(part: float, whole: float) -> float:
    """part / whole, and 0 of nothing: a gradient may be all zeros."""
    return part / whole if whole else 0.0


def standard_errors(deviation: Tensor, exact: Tensor, variance: Tensor) -> float:
    """The norm of a mean's deviation in units of what its variance lets one expect, rounding to float32 included."""
    expected = (variance + (ROUNDING * exact).square()).sum()
    return float((deviation.square().sum() / expected).sqrt()) if expected > 0 else 0.0


def within_scale(codec: TernGrad, exact: Tensor, wire: Tensor) -> Tensor:
    """The gradient that TernGrad sends without bias: elements clipped at the scale of their block in the wire."""
    numel = exact.numel()
    (part,) = codec.parts(numel)
    scale = torch.from_numpy(part.view(wire.numpy())["scale"].astype(np.float64)[:, 0])
    limit = scale.repeat_interleave(codec.block)[:numel]
    return torch.minimum(torch.maximum(exact, -limit), limit)


def entropy(codec: Codec, wire: np.ndarray, numel: int) -> float:
    """Bits an element that an ideal coder would need for this wire, knowing how often each code occurs.

    Codes count with their empirical entropy, each on its own; units, levels and scales as they are sent. Sparse codecs:
    the number of ways to place the entries, log2 of n over k, and values as they are sent, by chunk where they are
    selected so. What has no codes, as casts: the entropy of each byte of an element by itself. Outliers:
    of both their codes. RandomK has no indices, and PowerSGD no codes: as they are.
    """
    parts = codec.parts(numel)
    if isinstance(codec, Outliers):
        exact = sum(codec.selection.part_bytes(numel))
        return entropy(codec.selection, wire[:exact], numel) + entropy(codec.inner, wire[exact:], numel)
    if isinstance(codec, RandomK | PowerSGD):
        return 8 * len(wire) / numel
    if isinstance(codec, SparseCodec):
        used = entries(codec, wire[: parts[0].nbytes], numel)
        return (log2_ways(numel, used) + 8 * parts[1].nbytes) / numel
    (part,) = parts
    records = part.view(wire)
    if isinstance(codec, ChunkedTopK):
        lengths = [min(codec.chunk, numel - start) for start in range(0, numel, codec.chunk)]
        used_in = np.unpackbits(records["upper"].view(np.uint8), axis=1).sum(axis=1)
        ways = sum(log2_ways(n, int(used)) for n, used in zip(lengths, used_in, strict=True))
        return (ways + 8 * part.records * (part.record.itemsize - codec.index_bytes)) / numel
    found = codes(codec, records)
    if found is None:
        planes = wire.reshape(-1, part.nbytes // numel)[:numel]  # a cast of odd length is padded
        return sum(symbol_entropy(planes[:, byte]) for byte in range(planes.shape[1]))
    aside = sum(8 * np.dtype(f.dtype).itemsize * f.count for f in part.fields if f.dtype == "<f4")
    return symbol_entropy(found.reshape(-1)[:numel]) + aside * part.records / numel


def codes(codec: Codec, records: np.ndarray) -> np.ndarray | None:
    """The codes of each record's elements, [records, codes]. None: there are none."""
    if isinstance(codec, OneBit):
        return np.unpackbits(records["signs"].reshape(len(records), -1), axis=1, bitorder="little")
    if isinstance(codec, QSGD):
        width = codec.bits
        bits = np.unpackbits(records["codes"].reshape(len(records), -1), axis=1, bitorder="little")
        whole = bits[:, : bits.shape[1] // width * width].reshape(len(records), -1, width)
        numbers: np.ndarray = whole @ (1 << np.arange(width))
        return numbers
    if isinstance(codec, TernGrad | Ternary):
        digits = records["trits"].reshape(len(records), -1, 1, 256) // np.array([1, 3, 9, 27, 81])[:, None] % 3
        return digits.reshape(len(records), -1)
    return None


def log2_ways(n: int, k: int) -> float:
    """log2 of the number of ways to choose k of n."""
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def entries(codec: SparseCodec, indices: np.ndarray, numel: int) -> int:
    """The number of entries in a wire."""
    record = codec.parts(numel)[0].view(indices)
    if not codec.packs_indices:
        return int(record["count"][0, 0])
    return int(np.unpackbits(record["upper"].view(np.uint8)).sum())


def symbol_entropy(codes: np.ndarray) -> float:
    """The empirical entropy of the codes, in bits each."""
    _, counts = np.unique(codes, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum()) + 0.0
