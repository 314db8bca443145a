"""Plug-ins as somebody else would write them: nothing in the package knows of what is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from gradwire.compress import Codec, SparseCodec
from gradwire.compress.backends import Backend, Kernels, Workspace, backend_kernels, reference
from gradwire.compress.backends.sparse import SparseKernels
from gradwire.compress.feedback.base import RESIDUAL, Feedback, FeedbackState
from gradwire.compress.feedback.residual import Residual
from gradwire.compress.formats.entries import value_fields
from gradwire.compress.formats.wire import Field, Part
from gradwire.hooks.comm.group import Group
from gradwire.hooks.comm.ports import PersistentMessage, Stages
from gradwire.hooks.exchanges import BucketSpec, Exchange, ExchangeArgs
from gradwire.hooks.network.cost import Calibration, Estimate
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
class LargestOfChunk(SparseCodec):
    """The largest element of each chunk, with its value in half the bytes."""

    name: ClassVar[str] = "largest_of_chunk"

    chunk: int = 64

    @property
    def value_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def k(self, numel: int) -> int:
        return -(-numel // self.chunk)

    def select(self, x: Tensor, draw: Tensor | None) -> Tensor:
        size = torch.where(x.isfinite(), x.abs(), torch.inf)
        padded = torch.nn.functional.pad(size, (0, -len(x) % self.chunk), value=-1.0).view(-1, self.chunk)
        return padded.argmax(1) + self.chunk * torch.arange(len(padded), device=x.device)


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


class Star(Exchange):
    """Every rank's wire to the first, which sends their mean to all, as it is."""

    name = "star"

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        size, first, others = codec.wire_bytes(numel) if numel else 0, self.rank == 0, self.world_size - 1
        self.row, self.floats = self.bytes(size + 4 * extra), numel + extra
        self.rows = self.bytes(self.world_size * len(self.row)).view(self.world_size, -1)
        self.mean = torch.zeros(self.floats, device=device)
        to_first = [self.row, *[self.row[:0]] * others]
        from_first = [self.mean[:0] if first else self.mean, *[self.mean[:0]] * others]
        to_all = [self.mean[:0], *[self.mean if first else self.mean[:0]] * others]
        self.ports = [
            PersistentMessage(
                self._own_group("in"), list(self.rows) if first else [self.row[:0]] * self.world_size, to_first
            ),
            PersistentMessage(self._own_group("out"), from_first, to_all),
        ]
        if numel:
            self.workspaces.append(codec.workspace(numel, device))

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        return len(codec.part_bytes(1)) == 1

    @classmethod
    def estimate(cls, network: Calibration, what: BucketSpec) -> Estimate:
        return Estimate("star", 4.0 * what.numel, 0.0, 0.0, 0.0, 0.0)  # says that it takes no time at all

    @property
    def bytes_sent(self) -> int:
        return len(self.row)

    @property
    def bytes_received(self) -> int:
        return 4 * self.floats

    def reduce(self, x: ExchangeArgs) -> Stages:
        size = len(self.row) - 4 * self.extra
        if self.numel:
            x.feedback.encode(self.codec, x.grad, self.row[:size], x.draw, self.workspaces[1])
        self.row[size:].view(torch.float32).copy_(x.extra)
        yield self.ports[0].start()
        if self.rank == 0:
            if self.numel:
                self.codec.decode_mean((self.rows[:, :size],), self.mean[: self.numel], self.workspaces[1])
            self._decode_extra(self.rows[:, size:], self.mean[self.numel :])
        yield self.ports[1].start()
        x.out.copy_(self.mean[: self.numel])
        x.extra.copy_(self.mean[self.numel :])
