"""Codes of the tensors that follow each other between two stages, a micro-batch each."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from ...compress import Codec, new_draw
from ...compress.backends import Workspace
from ...compress.codec import DTYPES

#: Elements that a rotation mixes: a row and a column of 16, so that a multiplication by a 16 x 16 matrix serves both.
SIDE = 16
ROTATED = SIDE * SIDE


@cache
@torch.inference_mode(False)
def hadamard(device: torch.device) -> Tensor:
    """The symmetric Hadamard matrix of Sylvester's construction, [16, 16], scaled to be its own inverse."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while len(matrix) < SIDE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / SIDE**0.5


@cache
@torch.inference_mode(False)
def largest_ratio(codec: Codec) -> float:
    """The norm of a residual by that of the next tensor above which they have no scale in common.

    A code that leaves out the share q of a tensor's norm keeps a residual of at most q / (1 - q) times the largest
    norm; gradients of successive micro-batches have norms within a factor of eight.
    """
    x = torch.randn(4096, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    left, wire = torch.zeros_like(x), torch.empty(codec.wire_bytes(len(x)), dtype=torch.uint8, device="cpu")
    codec.encode_feedback(x, left, wire, new_draw(0), codec.workspace(len(x), x.device))
    return 8 / (1 - min(0.999, float(left.norm() / x.norm())))


@dataclass
class Scratch:
    """Memory for tensors of one length."""

    values: Tensor
    rotated: Tensor
    workspace: Workspace


@dataclass
class TensorCoder:
    """Encodes tensors, or decodes them.

    Args:
        codec: of flat tensors.
        rotate: multiply each 256 elements by a Hadamard matrix first, which spreads an outlier over all of them: what a
            block's norm is for (He et al., "TAH-Quant", arXiv 2506.01352, 2025).
        draw: for stochastic codes; each code takes its next step.
        feedback: what a code leaves out of a tensor is added to the next one of the same index, the next micro-batch's.

    Attributes:
        dropped: the number of residuals that were of another scale, int64 [] on their device.
    """

    codec: Codec
    rotate: bool
    draw: Tensor
    feedback: bool = False
    residuals: dict[str, Tensor] = field(default_factory=dict)
    scratch: dict[tuple[int, torch.device], Scratch] = field(default_factory=dict)
    dropped: Tensor | int = 0

    def length(self, numel: int) -> int:
        """Elements that are encoded: a rotation takes zeros where its last 256 are not full."""
        return -(-numel // ROTATED) * ROTATED if self.rotate else numel

    def wire_bytes(self, numel: int) -> int:
        return self.codec.wire_bytes(self.length(numel))

    def takes(self, tensor: Tensor, smallest: int) -> bool:
        """True if a tensor travels encoded: floating-point numbers, and fewer bytes of them."""
        numel = tensor.numel()
        large = tensor.dtype in DTYPES and tensor.layout == torch.strided and numel >= max(1, smallest)
        return large and self.wire_bytes(numel) < tensor.nbytes

    @torch.inference_mode(False)
    def scratch_of(self, tensor: Tensor) -> Scratch:
        n, device = self.length(tensor.numel()), tensor.device
        if (n, device) not in self.scratch:
            values, rotated = (torch.zeros(n, dtype=torch.float32, device=device) for _ in range(2))
            self.scratch[n, device] = Scratch(values, rotated, self.codec.workspace(n, device))
        return self.scratch[n, device]

    def turned(self, values: Tensor, out: Tensor, between: Tensor) -> Tensor:
        """`out` = H·X·H of each 16 x 16 elements X of `values`, which undoes itself; all flat float32, `out` may be
        `values`."""
        matrix = hadamard(values.device)
        torch.mm(values.view(-1, SIDE), matrix, out=between.view(-1, SIDE))  # with out=, autocast leaves it alone
        torch.matmul(matrix, between.view(-1, SIDE, SIDE), out=out.view(-1, SIDE, SIDE))
        return out

    def _whole(self, tensor: Tensor) -> bool:
        """True if a tensor's own memory can be rotated: no copy comes before or after."""
        return tensor.is_contiguous() and tensor.dtype == torch.float32 and tensor.numel() % ROTATED == 0

    @torch.no_grad()
    def encode(self, tensor: Tensor, wire: Tensor, index: int) -> None:
        """Write a tensor's code to a wire of `wire_bytes(numel)`.

        Args:
            index: of the tensor among those that a stage hands on.
        """
        scratch, numel = self.scratch_of(tensor), tensor.numel()
        if tensor.is_contiguous() and (not self.rotate or self._whole(tensor)):
            flat = tensor.view(-1)
        else:
            flat = scratch.values
            flat[:numel].view(tensor.shape).copy_(tensor)
            flat[numel:].zero_()
        if self.rotate:
            flat = self.turned(flat, scratch.values, scratch.rotated)
        if self.codec.stochastic:
            self.draw[1] += 1
        if self.feedback:
            residual = self.residuals.get(str(index))
            if residual is None or residual.shape != flat.shape:
                with torch.inference_mode(False):
                    residual = torch.zeros(len(flat), dtype=torch.float32, device=flat.device)
                self.residuals[str(index)] = residual
            self.codec.encode_feedback(flat, residual, wire, self.draw, scratch.workspace)
        else:
            self.codec.encode(flat, wire, self.draw, scratch.workspace)

    @torch.no_grad()
    def drop_if_foreign(self, tensor: Tensor, index: int) -> None:
        """Drop a residual beside which the tensor is nearly nothing: it is of a gradient with another loss scale."""
        residual = self.residuals.get(str(index))
        if residual is not None:
            norm = torch.linalg.vector_norm(tensor, dtype=torch.float32)
            foreign = torch.linalg.vector_norm(residual) > norm * largest_ratio(self.codec)
            residual.mul_(~foreign)
            self.dropped = self.dropped + foreign

    @torch.no_grad()
    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Write a wire's tensor to `out`."""
        scratch = self.scratch_of(out)
        parts = [part.view(1, -1) for part in wire.split(self.codec.part_bytes(len(scratch.values)))]
        if not self.rotate and out.is_contiguous():
            self.codec.decode_mean(parts, out.view(-1), scratch.workspace)
            return
        values = scratch.values
        self.codec.decode_mean(parts, values, scratch.workspace)
        if self.rotate and self._whole(out):
            self.turned(values, out.view(-1), scratch.rotated)
            return
        if self.rotate:
            self.turned(values, values, scratch.rotated)
        out.copy_(values[: out.numel()].view(out.shape))


def coders(
    stage: int,
    codec: Codec,
    backward: Codec | None,
    rotate: bool,
    error_feedback: bool,
    seed: int,
    device: torch.device | str = "cpu",
) -> tuple[TensorCoder, TensorCoder]:
    """A stage's, of activations and of their gradients; other arguments as of `compress_stage`."""
    gradients = codec if backward is None else backward
    if error_feedback:
        gradients = gradients.with_feedback()
    forward, back = (new_draw(seed, 0, 2 * stage + way, device) for way in range(2))
    return TensorCoder(codec, rotate, forward), TensorCoder(gradients, rotate, back, error_feedback)
