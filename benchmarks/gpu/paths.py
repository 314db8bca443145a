"""Every way through the kernels: each family of codecs with other blocks, bits and formats, and what sparse exchanges
launch. Run once for compute-sanitizer, and compared with the reference, byte for byte."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...compress import (
    EDEN,
    QSGD,
    Cast,
    ChunkedTopK,
    Codec,
    Identity,
    OneBit,
    PowerSGD,
    RandomK,
    Ternary,
    TernGrad,
    Threshold,
    TopK,
    new_draw,
)
from ...compress.backends import backend_for, entries_for, low_precision_vector, use_backend
from ...compress.backends.low_precision import DTYPES as LOW_PRECISION_DTYPES
from ...compress.backends.partition import Partition
from ...compress.backends.union import Listed
from ...compress.codec import DTYPES
from ...compress.codecs.topk import Largest
from ...compress.formats.entries import VALUE_DTYPES, index_layout, value_bytes
from ..common.arms import label

#: Kernels of sparse exchanges besides a codec's.
ENTRIES = "entries"
#: Elements beyond what 31 bits of bytes address, and up to the most that a gradient may have.
LONG = "2^31 - 1 elements"
#: A family that launches no kernels of its own besides those of TopK: torch's, hundreds of them.
IN_TORCH = ("Threshold",)
FAMILIES: dict[str, tuple[Codec, ...]] = {
    "OneBit": (OneBit(), OneBit(block=256), OneBit(scale="symmetric"), OneBit(block=4096)),
    "QSGD": (
        *(QSGD(bits=bits) for bits in range(2, 9)),
        QSGD(norm="l2"),
        QSGD(bits=3, block=256, norm="l2", rounding="nearest"),
    ),
    "TernGrad": (TernGrad(), TernGrad(clip=math.inf), TernGrad(block=2560, rounding="nearest")),
    "EDEN": tuple(EDEN(scale, levels) for levels in (3, 2) for scale in ("unbiased", "closest")),
    "Ternary": (Ternary(), Ternary(block=2560)),
    "TopK": (
        TopK(0.01),
        TopK(0.001),
        TopK(0.3),
        TopK(1.0),
        TopK(indices="plain"),
        TopK(values=torch.bfloat16),
        TopK(0.3, values=torch.int8),
        TopK(indices="plain", values=torch.int8),
    ),
    "Threshold": (Threshold(),),
    "RandomK": (RandomK(),),
    "PowerSGD": (PowerSGD(), PowerSGD(rank=1), PowerSGD(rank=9)),
    "ChunkedTopK": (
        ChunkedTopK(),
        ChunkedTopK(values=4),
        ChunkedTopK(k=37, chunk=512, values=torch.int8),
        ChunkedTopK(k=256, chunk=256, values=torch.float32),
        ChunkedTopK(k=1, chunk=768, values=torch.bfloat16),
    ),
    "Cast": (Cast(torch.float16), Cast(torch.bfloat16), Identity()),
}


def once(family: str, device: torch.device, numel: int) -> int:
    """Every kernel of a family, aligned and not, in every format. Returns the number of calls."""
    if family == ENTRIES:
        return once_sparse(device, numel)
    calls = 0
    for codec in FAMILIES[family]:
        for dtype in DTYPES:
            for shift in (0, 1):
                # Copied, not made there: compute-sanitizer takes long over every kernel of torch's that is loaded.
                x = torch.randn(numel + shift).to(dtype).to(device)[shift:]
                residual = torch.zeros(numel + shift).to(device)[shift:]
                wire = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8).to(device)
                workspace, draw = codec.workspace(numel, device), new_draw(1, device=device)
                for _ in range(2):  # top-k with a prediction, and without
                    codec.encode_feedback(x, residual, wire, draw, workspace)
                codec.encode(x, wire, draw, workspace)
                codec.decode_add(wire, residual, 1.0, workspace)
                parts = wire.cpu().split(codec.part_bytes(numel))
                codec.decode_mean([part.repeat(3, 1).to(device) for part in parts], x, workspace)
                calls += 5
        codec.kernels(device).prepare(codec, torch.float32, device)  # runs what exchanges alone do
    settle(device)
    return calls


def once_sparse(device: torch.device, numel: int) -> int:
    """The kernels of sparse exchanges, of residuals in fewer bytes, and of momenta."""
    values, out, rest = (part.to(device) for part in (torch.randn(numel), torch.zeros(numel), torch.zeros(numel)))
    entries, counted = entries_for(device), torch.zeros(2, dtype=torch.int64).to(device)
    union = entries.union(numel, numel, device)
    union([torch.arange(first, numel, 7, dtype=torch.int32).to(device) for first in (0, 3)])
    k = numel // 9
    count, indices = torch.tensor([k], dtype=torch.int32).to(device), torch.arange(0, 9 * k, 9, dtype=torch.int32)
    listed, total = (count, indices.to(device), values[:k]), torch.zeros(numel + 1).to(device)
    union.take(listed, rest, numel, values[:1], total, out)
    union.deliver(total, 2, out, values[:1].clone(), (count, k), counted)
    entries.add(rest, listed[1], values[:k])
    packed = torch.zeros(index_layout(numel, numel).nbytes, dtype=torch.uint8).to(device)
    entries.pack_indices(union.indices, union.size, 0, numel, packed)
    entries.unpack_indices(packed[None], 0, numel, union.size, union.indices[None])
    for dtype in VALUE_DTYPES:
        wire = torch.zeros(value_bytes(numel, dtype), dtype=torch.uint8).to(device)
        entries.pack_values(values, dtype, wire, union.indices, union.size, rest)
        entries.unpack_values(wire[None], dtype, values[None])
        once_dealt(listed, dtype, out, rest, counted)
    for dtype in LOW_PRECISION_DTYPES:
        vector = low_precision_vector(numel, dtype, device)
        vector.write(values)
        vector.read()
    passes = backend_for(device)
    for kind in DTYPES:
        passes.tracking.change(values.to(kind), values, 0.1, out)
        passes.momentum.enter(values.to(kind), values, 0.9, True, out)
    passes.tracking.follow(values, out)
    settle(device)
    return 6 + 5 * len(VALUE_DTYPES) + 2 * len(LOW_PRECISION_DTYPES) + 2 * len(DTYPES)


def once_dealt(listed: Listed, dtype: torch.dtype, out: Tensor, rest: Tensor, counted: Tensor, ranks: int = 2) -> None:
    """Entries as all ranks have them: each deals what it has, and owns."""
    device, k = out.device, len(listed[1])
    partition, turn = Partition(len(out), ranks, device), torch.zeros(1, dtype=torch.int64).to(device)[0]
    codec, back = Largest(k // ranks, dtype), Largest(k // ranks, dtype)
    there, sent = (rows_of(codec, partition) for _ in range(2))
    dealer = entries_for(device).dealer(partition, k, back.count, codec, sent)
    dealer.deal(listed, turn)
    mean = torch.zeros(partition.span).to(device)
    dealer.mean(sent, mean, out)
    dealer.deliver(listed, turn, there, mean, 0, out, rest, counted)


def rows_of(codec: Largest, partition: Partition) -> tuple[Tensor, Tensor]:
    sizes = list(codec.part_bytes(partition.span))
    indices, values = (
        torch.zeros(partition.ranks, sum(sizes), dtype=torch.uint8).to(partition.device).split(sizes, dim=1)
    )
    return indices, values


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def equal(family: str, device: torch.device, numels: Sequence[int]) -> int:
    """Compare a family's wires, residuals and means with the reference's. Returns how many were compared.

    Raises:
        ValueError: some bytes differ; the text has the codec, the length, the format, and which.
    """
    compared = 0
    for codec in FAMILIES[family]:
        for numel in numels:
            for dtype in DTYPES:
                ours = results(codec, numel, dtype, device)
                with use_backend("reference"):
                    theirs = results(codec, numel, dtype, torch.device("cpu"))
                for (what, a), (_, b) in zip(ours, theirs, strict=True):
                    differ = int((a.cpu().contiguous().view(torch.uint8) != b.view(torch.uint8)).sum())
                    if differ:
                        raise ValueError(f"{label(codec)}, {numel} of {dtype}: {differ} bytes of the {what} differ")
                    compared += 1
    return compared


def long(device: torch.device, numel: int) -> int:
    """The end of a long gradient is what it is by itself, of block codes. Returns how many were compared; zero where
    the memory is too small.

    Raises:
        ValueError: it is not.
    """
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 20 * numel:
        return 0
    tail = 7 * 5120 + numel % 5120  # a multiple of every block, and the odd end
    x, out = torch.empty(numel, device=device).normal_(), torch.empty(numel, device=device)
    codecs = (OneBit(), Ternary(), QSGD(rounding="nearest"), Cast(torch.float16))
    for codec in codecs:
        ends = []
        for part, into in ((x, out), (x[-tail:].clone(), torch.empty(tail, device=device))):
            wire = torch.zeros(codec.wire_bytes(len(part)), dtype=torch.uint8, device=device)
            workspace = codec.workspace(len(part), device)
            codec.encode(part, wire, None, workspace)
            codec.decode_mean([w.view(1, -1) for w in wire.split(codec.part_bytes(len(part)))], into, workspace)
            ends.append(into[-tail:].cpu())
        if not torch.equal(*ends):
            raise ValueError(f"{label(codec)}: the end of {numel} elements differs from the same by itself")
    return len(codecs)


def results(codec: Codec, numel: int, dtype: torch.dtype, device: torch.device) -> list[tuple[str, Tensor]]:
    """Two steps with feedback, and their mean; the gradients are the same on every device."""
    generator = torch.Generator().manual_seed(numel)
    gradients = [torch.randn(numel, generator=generator).to(dtype).to(device) for _ in range(2)]
    residual, workspace = torch.zeros(numel, device=device), codec.workspace(numel, device)
    wires, mean = [], torch.empty(numel, dtype=dtype, device=device)
    for step, gradient in enumerate(gradients):
        wires.append(torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8, device=device))
        codec.encode_feedback(gradient, residual, wires[-1], new_draw(1, step, device=device), workspace)
    parts = [wire.split(codec.part_bytes(numel)) for wire in wires]
    codec.decode_mean([torch.stack(ranks) for ranks in zip(*parts, strict=True)], mean, workspace)
    return [("first wire", wires[0]), ("second wire", wires[1]), ("residual", residual), ("mean", mean)]
