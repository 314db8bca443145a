"""Aggregation of the ranks' wires by another rule than the mean."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .backends import Kernels, Workspace
from .backends.kernels import divide
from .codec import Codec, check_choice
from .formats.wire import Field, Part

MEANS, CLIPS = ("ranks", "senders"), (None, "median")
MOST = torch.finfo(torch.float32).max
#: Elements that are put together at a time where a code has blocks: of some ranks they lie in a CPU's cache.
AT_ONCE = 1 << 17


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
    machines they are on. Every rank's wire is decoded by itself, at about P passes over the gradient;
    on a CPU over some blocks at a time.

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


class AggregationKernels(Kernels):
    """In torch, around the inner codec's kernels."""

    def workspace(self, codec: Any, numel: int, device: torch.device) -> Workspace:
        inner = codec.inner.workspace(numel, device)
        return Workspace(inner.status, {"inner": inner})

    def prepare(self, codec: Any, dtype: torch.dtype, device: torch.device) -> None:
        codec.inner.kernels(device).prepare(codec.inner, dtype, device)

    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        inner = self._inner(codec, wire, x.numel())
        codec.inner.encode(x, inner, draw, self._workspace(workspace))
        self._measure(codec, wire, inner, x.numel())

    def encode_feedback(
        self, codec: Any, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        inner = self._inner(codec, wire, grad.numel())
        codec.inner.encode_feedback(grad, residual, inner, draw, self._workspace(workspace))
        self._measure(codec, wire, inner, grad.numel())

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        codec.inner.decode_add(self._inner(codec, wire, out.numel()), out, alpha, self._workspace(workspace))

    def decode_mean(self, codec: Any, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        block, ranks = codec.inner.block_size, range(wires[0].shape[0])
        parts, factors = (wires[:-1], _factors(wires[-1])) if codec.clip else (wires, [1.0] * len(ranks))
        if block is None or out.device.type != "cpu":
            whole = [parts[0][rank] if len(parts) == 1 else torch.cat([rows[rank] for rows in parts]) for rank in ranks]
            self._join(codec, whole, factors, out, workspace)
            return
        at_once, record = max(1, AT_ONCE // block), codec.inner.wire_bytes(block)
        for first in range(0, -(-out.numel() // block), at_once):
            last = first + at_once
            rows = parts[0][:, first * record : last * record]
            self._join(codec, list(rows), factors, out[first * block : last * block], workspace)

    def _join(
        self, codec: Any, wires: Sequence[Tensor], factors: Sequence[float], out: Tensor, workspace: Workspace
    ) -> None:
        """Decode the inner codec's wires, one a rank, as `decode_mean` does."""
        rooms: Tensor | None = workspace.buffers.get("join")
        if rooms is None or rooms.shape[1] < out.numel():
            rooms = torch.empty(4, out.numel(), dtype=torch.float32, device=out.device)
            workspace.buffers["join"] = rooms
        total, senders, part, sends = rooms[:, : out.numel()]
        total.zero_()
        senders.zero_()
        for wire, factor in zip(wires, factors, strict=True):
            if codec.mean == "ranks":
                codec.inner.decode_add(wire, total, factor, self._workspace(workspace))
                continue
            codec.inner.decode_add(wire, part.zero_(), 1.0, self._workspace(workspace))
            senders += torch.ne(part, 0, out=sends)  # as float32: a sum of different dtypes takes seven times as long
            total += part if factor == 1.0 else part.mul_(factor)
        if codec.mean == "ranks":
            divide(total, len(wires), out)
        else:
            out.copy_(total.div_(senders.clamp_(min=1)))

    @staticmethod
    def _inner(codec: Any, wire: Tensor, numel: int) -> Tensor:
        return wire[: codec.inner.wire_bytes(numel)]

    @staticmethod
    def _workspace(workspace: Workspace) -> Workspace:
        found: Workspace = workspace.buffers.get("inner", workspace)
        return found

    @staticmethod
    def _measure(codec: Any, wire: Tensor, inner: Tensor, numel: int) -> None:
        """Write the norm of what `inner` decodes to behind it."""
        if codec.clip:
            sent = torch.zeros(numel, dtype=torch.float32, device=wire.device)
            codec.inner.decode_add(inner, sent, 1.0, Workspace.on(wire.device))
            norm = torch.linalg.vector_norm(sent, dtype=torch.float64).clamp(max=MOST)  # what is not a number stays so
            wire[len(inner) :].copy_(norm.float().reshape(1).view(torch.uint8))


KERNELS = AggregationKernels()


def _factors(norms: Tensor) -> list[float]:
    """The factor of each rank's part, from float32 norms as bytes [P, 4]. Waits for the device."""
    found = norms.contiguous().view(torch.float32)[:, 0].tolist()
    sound = [norm for norm in found if math.isfinite(norm) and norm >= 0]
    most = statistics.median(sound) if sound else 0.0
    return [min(1.0, most / norm) if math.isfinite(norm) and norm > 0 else 1.0 for norm in found]
