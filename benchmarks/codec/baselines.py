"""Baselines of the codecs: the chain of torch operations a user would write, and PyTorch's own hooks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

from ...compress import QSGD, Codec, OneBit, TernGrad, TopK

Operation = Callable[[Tensor], object]


def torch_chain(codec: Codec, residual: Tensor) -> Operation | None:
    """`encode_feedback` as one would write it in torch: error feedback, compression, packing; None where there is no
    such thing to write. Blocks that a tail does not fill are left out, where a user would pad."""
    if isinstance(codec, TopK):
        return top_k_chain(codec, residual)
    block = codec.block_size
    if block is None or residual.numel() < block:
        return None
    blocks = residual[: residual.numel() // block * block].view(-1, block)
    if isinstance(codec, OneBit):
        return one_bit_chain(blocks)
    if isinstance(codec, QSGD) and 8 % codec.bits == 0 and codec.norm == "max":
        return qsgd_chain(codec, blocks)
    if isinstance(codec, TernGrad):
        return terngrad_chain(codec, blocks)
    return None


def top_k_chain(codec: TopK, residual: Tensor) -> Operation:
    k = codec.k(residual.numel())

    def top_k(grad: Tensor) -> tuple[Tensor, Tensor]:
        residual.add_(grad)
        _, indices = torch.topk(residual.abs(), k, sorted=False)
        values = residual[indices]
        residual[indices] = 0
        return indices.to(torch.int32), values

    return top_k


def one_bit_chain(blocks: Tensor) -> Operation:
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=blocks.device)
    numel, block = blocks.numel(), blocks.shape[1]

    def one_bit(grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        blocks.add_(grad[:numel].view_as(blocks))
        below = blocks < 0
        count = below.sum(dim=1, keepdim=True)
        negative = blocks.clamp(max=0).sum(dim=1, keepdim=True) / count.clamp(min=1)
        positive = blocks.clamp(min=0).sum(dim=1, keepdim=True) / (block - count).clamp(min=1)
        blocks.sub_(torch.where(below, negative, positive))
        signs = (below.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)
        return negative, positive, signs

    return one_bit


def qsgd_chain(codec: QSGD, blocks: Tensor) -> Operation:
    """Rounds to nearest, as the codec does when a residual is kept."""
    numel, tiny = blocks.numel(), torch.finfo(torch.float32).tiny
    shifts = torch.arange(0, 8, codec.bits, dtype=torch.uint8, device=blocks.device)

    def qsgd(grad: Tensor) -> tuple[Tensor, Tensor]:
        blocks.add_(grad[:numel].view_as(blocks))
        unit = blocks.abs().amax(dim=1, keepdim=True) / codec.levels
        level = (blocks.abs() / unit.clamp(min=tiny) + 0.5).floor_().clamp_(max=codec.levels)
        negative = (blocks < 0) & (level > 0)
        codes = level.to(torch.uint8) | negative.to(torch.uint8) << (codec.bits - 1)
        blocks.sub_(torch.where(negative, -level, level) * unit)
        return unit, (codes.view(-1, len(shifts)) << shifts).sum(dim=1, dtype=torch.uint8)

    return qsgd


def terngrad_chain(codec: TernGrad, blocks: Tensor) -> Operation:
    """Rounds to nearest, as the codec does when a residual is kept."""
    numel = blocks.numel()
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=blocks.device)[:, None]

    def terngrad(grad: Tensor) -> tuple[Tensor, Tensor]:
        blocks.add_(grad[:numel].view_as(blocks))
        sigma = blocks.square().mean(dim=1, keepdim=True).sqrt_()
        scale = torch.minimum(codec.clip * sigma, blocks.abs().amax(dim=1, keepdim=True))
        some = (blocks.abs() >= scale / 2) & (blocks != 0)
        negative = some & (blocks < 0)
        blocks.sub_(torch.where(negative, -scale, scale) * some)
        trits = some.to(torch.uint8) + negative.to(torch.uint8)
        return scale, (trits.view(-1, 5, 256) * powers).sum(dim=1, dtype=torch.uint8)

    return terngrad


@dataclass(frozen=True)
class Baseline:
    """One of PyTorch's own compressions: a round trip, what the hook computes on a bucket, without communication."""

    name: str
    label: str
    wire_bytes_per_element: float
    operation: Operation


def pytorch_baselines(like: Tensor, ranks: int) -> list[Baseline]:
    """PyTorch's own hooks' work on a bucket as long as `like`, float32; the operations take the gradient."""
    casts = [
        Baseline(f"torch-{name}", f"PyTorch {name}_compress_hook", 2.0, cast_round_trip(like, dtype, ranks))
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))
    ]
    rank = 2
    rows, columns = square(like.numel())
    sent = 4 * rank * (rows + columns) / like.numel()
    power = Baseline("torch-powersgd", "PyTorch PowerSGD, rank 2", sent, power_sgd(like, rank))
    return [*casts, power] if rows > 1 else casts


def cast_round_trip(like: Tensor, dtype: torch.dtype, ranks: int) -> Operation:
    """`fp16_compress_hook` around its all-reduce: cast, divide, and copy back into the bucket."""
    bucket = torch.empty_like(like)

    def round_trip(grad: Tensor) -> Tensor:
        return bucket.copy_(grad.to(dtype).div_(ranks))

    return round_trip


def square(numel: int) -> tuple[int, int]:
    """The most nearly square matrix that a gradient fills without a rest to speak of: rows and columns."""
    rows = math.isqrt(numel)
    return rows, numel // rows


def power_sgd(like: Tensor, rank: int) -> Operation:
    """`powerSGD_hook`'s work on a bucket that is one nearly square matrix, without its two all-reduces.

    It covers, in the hook's order: adding the residual, the copy that the residual is computed from, P = M Q,
    orthogonalization of P, Q = Mᵀ P, the output P Qᵀ written into the bucket, and residual = M - P Qᵀ. Q starts from
    the last call's (warm start). It does not cover the hook's bookkeeping by parameter, nor tensors too small to
    compress, which the hook sends as they are. A real bucket has several smaller matrices; one large one is the kinder
    case.
    """
    rows, columns = square(like.numel())
    residual, bucket = torch.zeros_like(like), torch.empty_like(like)
    p = torch.empty(1, rows, rank)  # the hook works on batches of equal matrices
    q = torch.randn(1, columns, rank, generator=torch.Generator().manual_seed(0))
    _orthogonalize(q)

    def round_trip(grad: Tensor) -> Tensor:
        torch.add(grad, residual, out=bucket)  # the hook adds in place, to a gradient that is not needed again
        residual.copy_(bucket)
        matrix = bucket[: rows * columns].view(1, rows, columns)
        _orthogonalize(q)
        torch.bmm(matrix, q, out=p)
        _orthogonalize(p)
        torch.bmm(matrix.transpose(1, 2), p, out=q)
        torch.bmm(p, q.transpose(1, 2), out=matrix)
        return residual.sub_(bucket)

    return round_trip
