"""Training in one process as in a pipeline of stages: what would travel between them is encoded, and decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...compress import Codec
from ...hooks.pipelining.tensor_coder import TensorCoder, coders
from ..common.arms import label
from ..common.language_model import update
from .tasks import Batch, Task


@dataclass(frozen=True)
class StageCodes:
    """The codes between the stages of a pipeline, as of `compress_stage`.

    Attributes:
        stages: that share a model's blocks equally.
    """

    stages: int
    codec: Codec
    backward: Codec
    rotate: bool = True
    error_feedback: bool = False

    def coders(self, stage: int, seed: int) -> tuple[TensorCoder, TensorCoder]:
        """A stage's, of its activations, and of the gradients that it hands back."""
        return coders(stage, self.codec, self.backward, self.rotate, self.error_feedback, seed)

    def __str__(self) -> str:
        codes = label(self.codec)
        if self.backward != self.codec:
            codes += f", gradients {label(self.backward)}"
        if self.error_feedback:
            codes += " with feedback"
        return f"{self.stages} stages, {codes}{'' if self.rotate else ', not rotated'}"


@dataclass
class Boundary:
    """The way between two stages."""

    forward: TensorCoder
    backward: TensorCoder
    sent: int = 0
    wires: dict[int, Tensor] = field(default_factory=dict)

    def through(self, coder: TensorCoder, tensor: Tensor) -> Tensor:
        """A tensor as it arrives."""
        if not coder.takes(tensor, smallest=0):
            self.sent += tensor.nbytes
            return tensor
        nbytes = coder.wire_bytes(tensor.numel())
        wire = self.wires.setdefault(nbytes, torch.empty(nbytes, dtype=torch.uint8))
        coder.encode(tensor, wire, 0)
        self.sent += nbytes
        arrived = torch.empty_like(tensor)
        coder.decode(wire, arrived)
        return arrived


class Crossing(torch.autograd.Function):
    """An activation on its way, and its gradient on the way back."""

    @staticmethod
    def forward(context: Any, activation: Tensor, boundary: Boundary) -> Tensor:
        context.boundary = boundary
        return boundary.through(boundary.forward, activation)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        boundary: Boundary = context.boundary
        return boundary.through(boundary.backward, gradients[0]), None


def train_in_stages(
    codes: StageCodes,
    job: Task,
    model: nn.Module,
    updates: Sequence[torch.optim.Optimizer],
    data: Sequence[Iterator[Batch]],
    rates: Sequence[float],
    seed: int,
) -> float:
    """Train a model with `blocks`, a micro-batch of each of `data` in every step. Returns the share of float32's bytes
    that travelled."""
    blocks = list(model.blocks)  # type: ignore[arg-type]
    boundaries, handles, plain = [], [], 0
    for stage in range(1, codes.stages):
        boundary = Boundary(codes.coders(stage - 1, seed)[0], codes.coders(stage, seed)[1])
        boundaries.append(boundary)

        def cross(module: nn.Module, inputs: Any, output: Tensor, boundary: Boundary = boundary) -> Tensor:
            nonlocal plain
            plain += 2 * 4 * output.numel()
            return Crossing.apply(output, boundary)

        handles.append(blocks[stage * len(blocks) // codes.stages - 1].register_forward_hook(cross))
    for rate in rates:
        for batches in data:
            inputs, targets = next(batches)
            (job.loss(model(inputs), targets) / len(data)).backward()
        update(updates, rate, job.clip)
    for handle in handles:
        handle.remove()
    return sum(boundary.sent for boundary in boundaries) / plain
