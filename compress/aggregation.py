"""Aggregation of the ranks' wires by another rule than the mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .backends import Kernels, Workspace
from .backends.kernels import divide
from .codec import Codec, check_choice
from .formats.wire import Field, Part

MEANS, CLIPS = ("ranks", "senders"), (None, "median")
MOST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Aggregation(Codec):
    """Another codec, of whose wires `decode_mean` makes something else than the mean (SparseLoCo: Sarfi et al., 2025).

    D_r is what rank r's wire decodes to, P the number of ranks, and

        f_r = min(1, median of all |D_r| / |D_r|) with clip="median", else 1       (|D| is the Euclidean norm)
        out = Σ f_r·D_r / P with mean="ranks"
        out = Σ f_r·D_r / n with mean="senders": of each element, n of the ranks have a D_r there that is not zero

    Neither is the mean, so something is lost, or handed out that nobody has sent: with n senders an element moves P/n
    times as far as its mean would have it, and what is clipped is in no residual. A norm that is not finite is neither
    clipped nor part of the median. Norms are the senders' own, float32 on the wire: replicas stay equal whatever
    machines they are on. Every rank's wire is decoded by itself, at some P passes over the gradient.

    Its wire cannot be sliced, so it goes through "gather", and of what other exchanges compute nothing would be right.

    Args:
        inner: what compresses.
        mean: "ranks" or "senders".
        clip: "median", or None.

    Raises:
        TypeError: `inner` is no codec.
        ValueError: another argument is none of these.
    """

    name: ClassVar[str] = "aggregation"
    source: ClassVar[str] = "Sarfi et al. 2025"

    inner: Codec
    mean: Literal["ranks", "senders"] = "ranks"
    clip: Literal["median"] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Codec):
            raise TypeError(f"inner={self.inner!r}: expected a codec, such as ChunkedTopK()")
        check_choice("mean", self.mean, MEANS)
        check_choice("clip", self.clip, CLIPS)

    @property
    def stochastic(self) -> bool:
        return self.inner.stochastic

    @property
    def lossless(self) -> bool:
        return self.inner.lossless

    def with_feedback(self) -> Aggregation:
        return Aggregation(self.inner.with_feedback(), self.mean, self.clip)

    def parts(self, numel: int) -> tuple[Part, ...]:
        norm = Part("norm", (Field("norm", "<f4", 1, "of what the other parts decode to"),), 1)
        return (*self.inner.parts(numel), *((norm,) if self.clip else ()))

    def kernels(self, device: torch.device) -> Kernels:
        return KERNELS


class AggregationKernels(Kernels[Aggregation]):
    """In torch, around the inner codec. The host does not wait."""

    def workspace(self, codec: Aggregation, numel: int, device: torch.device) -> Workspace:
        inner = codec.inner.workspace(numel, device)
        return Workspace(inner.status, {"inner": inner})

    def prepare(self, codec: Aggregation, dtype: torch.dtype, device: torch.device) -> None:
        codec.inner.kernels(device).prepare(codec.inner, dtype, device)

    def encode(self, codec: Aggregation, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        inner = self._inner(codec, wire, x.numel())
        codec.inner.encode(x, inner, draw, self._workspace(workspace))
        self._measure(codec, wire, inner, x.numel())

    def encode_feedback(
        self,
        codec: Aggregation,
        grad: Tensor,
        residual: Tensor,
        wire: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        inner = self._inner(codec, wire, grad.numel())
        codec.inner.encode_feedback(grad, residual, inner, draw, self._workspace(workspace))
        self._measure(codec, wire, inner, grad.numel())

    def decode_add(self, codec: Aggregation, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        codec.inner.decode_add(self._inner(codec, wire, out.numel()), out, alpha, self._workspace(workspace))

    def decode_mean(self, codec: Aggregation, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        ranks, inner = len(wires[0]), self._workspace(workspace)
        if codec.mean == "ranks" and codec.clip is None:
            codec.inner.decode_mean(wires, out, inner)
            return
        total, senders, part = torch.zeros(3, out.numel(), dtype=torch.float32, device=out.device)
        parts, factors = (wires[:-1], clipping(wires[-1])) if codec.clip else (wires, total.new_ones(ranks))
        for rank in range(ranks):
            wire = torch.cat([rows[rank] for rows in parts]) if len(parts) > 1 else parts[0][rank]
            codec.inner.decode_add(wire, part.zero_(), 1.0, inner)
            senders += (part != 0).float()  # a sum of different dtypes takes seven times as long
            total += part.mul_(factors[rank])
        if codec.mean == "ranks":
            divide(total, ranks, out)
        else:
            out.copy_(total.div_(senders.clamp_(min=1)))

    @staticmethod
    def _inner(codec: Aggregation, wire: Tensor, numel: int) -> Tensor:
        return wire[: codec.inner.wire_bytes(numel)]

    @staticmethod
    def _workspace(workspace: Workspace) -> Workspace:
        found: Workspace = workspace.buffers.get("inner", workspace)
        return found

    @staticmethod
    def _measure(codec: Aggregation, wire: Tensor, inner: Tensor, numel: int) -> None:
        """Write the norm of what `inner` decodes to behind it."""
        if codec.clip:
            sent = torch.zeros(numel, dtype=torch.float32, device=wire.device)
            codec.inner.decode_add(inner, sent, 1.0, Workspace.on(wire.device))
            norm = torch.linalg.vector_norm(sent, dtype=torch.float64).clamp(max=MOST)  # what is not a number stays so
            wire[len(inner) :].copy_(norm.float().reshape(1).view(torch.uint8))


KERNELS = AggregationKernels()


def clipping(norms: Tensor) -> Tensor:
    """f_r = min(1, median / norm_r), float32 [P], of float32 norms as bytes [P, 4]; 1 where a norm cannot be."""
    norm = norms.contiguous().view(torch.float32)[:, 0].double()
    sound = norm.isfinite() & (norm >= 0)
    ascending, count = norm.masked_fill(~sound, math.inf).sort().values, sound.sum()
    median = ascending[torch.stack([(count - 1).clamp(min=0) // 2, count // 2])].mean()
    return torch.where(sound & (norm > 0), (median / norm).clamp(max=1.0), 1.0).float()
