"""Plug-ins as somebody else would write them, beside those of `examples/plugins`: nothing in the package knows of what
is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from gradwire import Residual
from gradwire.compress.backends import backend_kernels, reference
from gradwire.compress.backends.sparse import SparseKernels
from gradwire.compress.formats.entries import value_fields
from gradwire.plugin import (
    RESIDUAL,
    Backend,
    Codec,
    Feedback,
    FeedbackState,
    Field,
    Kernels,
    Part,
    SparseCodec,
    Workspace,
)
from torch import Tensor


@dataclass(frozen=True)
class AboveMean(SparseCodec):
    """What is larger than so many times the mean magnitude, up to a share of the elements."""

    name: ClassVar[str] = "above_mean"

    times: float = 1.2
    most: float = 0.1

    def k(self, numel: int) -> int:
        return max(1, int(self.most * numel))

    def select(self, x: Tensor, draw: Tensor | None) -> Tensor:
        size = torch.where(x.isfinite(), x.abs(), torch.inf)
        mean = torch.where(x.isfinite(), x.abs(), 0.0).double().mean()
        found = (size > self.times * mean).nonzero().view(-1)
        if len(found) > self.k(len(x)):
            found = found[size[found].topk(self.k(len(x))).indices].sort().values
        return found


@dataclass(frozen=True)
class Stretch(SparseCodec):
    """Stretches of eight neighbours that a draw picks, which ranks share: the draw's few words travel in the place of
    indices. If anything is not finite, nothing that is sent is."""

    name: ClassVar[str] = "stretch"

    density: float = 0.1

    @property
    def stochastic(self) -> bool:
        return True

    @property
    def default_feedback(self) -> bool:
        return True  # it contracts, on average over the draws

    def k(self, numel: int) -> int:
        return max(1, int(self.density * numel))

    def parts(self, numel: int) -> tuple[Part, ...]:
        words = Field("words", "<u4", 4, "seed (8 bytes), step, bucket")
        return Part("draw", (words,), 1), Part("values", value_fields(self.k(numel), torch.float32), 1)

    def pick(self, words: Tensor, numel: int) -> Tensor:
        """The elements that int32[4] stands for."""
        seed, step_and_bucket = words.cpu().contiguous().view(torch.int64).tolist()
        mixed = (seed * 0x9E3779B97F4A7C15 + step_and_bucket) % 4294967291  # torch looks at 32 bits
        stretches = torch.randperm(-(-numel // 8), generator=torch.Generator().manual_seed(mixed))
        chosen = (8 * stretches[:, None] + torch.arange(8)).view(-1)
        return chosen[chosen < numel][: self.k(numel)].sort().values

    def select(self, x: Tensor, draw: Tensor | None) -> Tensor:
        assert draw is not None
        chosen = self.pick(self.words(draw), len(x)).to(x.device)
        odd = (~x.isfinite()).nonzero().view(-1)[: len(chosen)]
        if len(odd):
            chosen = torch.cat([odd, chosen[~torch.isin(chosen, odd)]])[: len(chosen)].sort().values
        return chosen

    @staticmethod
    def words(draw: Tensor) -> Tensor:
        """What ranks share of a draw."""
        return torch.stack([draw[0], (draw[1] & 0xFFFFFFFF) | (draw[2] << 32)]).view(torch.int32)

    def kernels(self, device: torch.device) -> Kernels:
        return DrawnValues()


class DrawnValues(Kernels):
    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        assert draw is not None
        words, values = wire.view(torch.int32).split([4, codec.k(len(x))])
        words.copy_(codec.words(draw))
        chosen = x.float()[codec.pick(words, len(x)).to(x.device)]
        values.view(torch.float32).copy_(chosen.where(x.isfinite().all(), torch.nan))

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        words, values = wire.view(torch.int32).split([4, codec.k(len(out))])
        found = values.view(torch.float32)
        workspace.status[1] += (~found.isfinite()).sum()
        out[codec.pick(words, len(out)).to(out.device)] += alpha * found


class Counted(Kernels):
    """Another's kernels, and how often they ran."""

    def __init__(self, inner: Kernels) -> None:
        self.inner, self.calls = inner, 0

    def workspace(self, codec: Any, numel: int, device: torch.device) -> Workspace:
        return self.inner.workspace(codec, numel, device)

    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        self.calls += 1
        self.inner.encode(codec, x, wire, draw, workspace)

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        self.calls += 1
        self.inner.decode_add(codec, wire, out, alpha, workspace)


def mirror() -> Backend:
    """The reference by another name. Sums of entries serve codecs that it does not know."""
    kernels = {
        name: inner if isinstance(inner, SparseKernels) else Counted(inner)
        for name, inner in backend_kernels("reference").items()
    }
    return Backend(kernels, reference.Entries())


class Shapes(Kernels):
    """Kernels for tensors without memory, which remember what they were asked for."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        self.seen.append(("encode", x.numel(), wire.numel()))

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        self.seen.append(("decode_add", out.numel(), wire.numel()))

    def decode_mean(self, codec: Any, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        self.seen.append(("decode_mean", out.numel(), sum(part.numel() for part in wires)))


@dataclass(frozen=True)
class Velocity(Feedback):
    """Momentum before compression: m = μm + g goes in instead of g."""

    state_names: ClassVar[tuple[str, ...]] = (RESIDUAL, "momentum")

    mu: float = 0.5

    def check(self, codec: Codec) -> None:
        if codec.stochastic:
            raise ValueError(f"{codec} does not contract")

    def encode(
        self, kept: FeedbackState, codec: Codec, grad: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        codec.encode_feedback(self.advance(kept, grad), kept[RESIDUAL], wire, draw, workspace)

    def flush(self, kept: FeedbackState, grad: Tensor) -> Tensor:
        return super().flush(kept, self.advance(kept, grad))

    def advance(self, kept: FeedbackState, grad: Tensor) -> Tensor:
        momentum, grad = kept["momentum"], grad.float()
        momentum.copy_(torch.where(grad.isfinite(), self.mu * momentum + grad, momentum))
        return torch.where(grad.isfinite(), momentum, grad)

    def invariant(
        self, gradient: Tensor, before: Mapping[str, Tensor], applied: Tensor, after: Mapping[str, Tensor]
    ) -> Tensor:
        momentum = self.mu * before["momentum"] + gradient
        return torch.stack(
            [after["momentum"] - momentum, before[RESIDUAL] + momentum - applied - after[RESIDUAL]],
        )


@dataclass(frozen=True)
class Smoothed(Residual):
    """What is handed out is the mean of the means so far, the older the less."""

    state_names: ClassVar[tuple[str, ...]] = (RESIDUAL, "smooth")

    def deliver(self, kept: FeedbackState, mean: Tensor) -> None:
        smooth = kept["smooth"]
        smooth.copy_(torch.where(mean.isfinite(), (smooth + mean) / 2, smooth))
        mean.copy_(torch.where(mean.isfinite(), smooth, mean))

    def invariant(
        self, gradient: Tensor, before: Mapping[str, Tensor], applied: Tensor, after: Mapping[str, Tensor]
    ) -> Tensor:
        mean = gradient + before[RESIDUAL] - after[RESIDUAL]
        return torch.stack([applied - (before["smooth"] + mean) / 2, applied - after["smooth"]])
