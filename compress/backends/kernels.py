"""Kernels: the operations of one codec on one backend, and the memory in which they work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ..formats.wire import Part
from .low_precision import LowPrecisionVector
from .memory import ScratchPool
from .places import add_at


class CodecLike(Protocol):
    """A codec, as far as kernels know it: see `compress.codec`, which a backend does not import."""

    @property
    def stochastic(self) -> bool: ...

    def parts(self, numel: int) -> tuple[Part, ...]: ...

    def wire_bytes(self, numel: int) -> int: ...

    def part_bytes(self, numel: int) -> tuple[int, ...]: ...


class BlockLike(CodecLike, Protocol):
    """A codec of one record a block."""

    @property
    def block_size(self) -> int: ...


#: The codec that a class of kernels serves.
C = TypeVar("C", bound=CodecLike)
B = TypeVar("B", bound=BlockLike)


@dataclass
class Workspace:
    """Memory that one codec reuses for one length on one device; it never changes the bytes of the wire.

    Attributes:
        status: int64[2] on the device, counted up by decoding: entries skipped because their index or code cannot
            occur in a sound wire, and records (sparse and cast codecs: positions) that are not finite.
        buffers: what the backend keeps between calls (scratch, a predicted threshold, what it has prepared).
        codec, kernels: whose it is, and what runs that; None in one that a backend has made by itself.
        scratch: vectors for the length of a call, which workspaces of other lengths may share.
    """

    status: Tensor
    buffers: dict[Hashable, Any] = field(default_factory=dict)
    codec: CodecLike | None = None
    kernels: Kernels | None = None
    scratch: ScratchPool = field(default_factory=ScratchPool)

    @staticmethod
    def on(device: torch.device | str) -> Workspace:
        return Workspace(torch.zeros(2, dtype=torch.int64, device=device))


@dataclass(frozen=True)
class MomentumInput:
    """A gradient that enters a momentum while a codec reads it: float32, computed once.

    Attributes:
        elements: how many it has.
        into: lets the gradient enter, and writes what comes out to a tensor.
        source: what kernels of the CPU can read in its place: a kind and an address (`fused_inputs`). None: there is
            only the whole.
        memory: what must not be freed before.
    """

    elements: int
    into: Callable[[Tensor], None]
    source: tuple[int, int] | None = None
    memory: Any = None

    def numel(self) -> int:
        return self.elements


class Kernels(ABC, Generic[C]):
    """The operations of one codec on one backend, on arguments that the codec has already checked.

    `encode` and `decode_add` say what the codec means. The two fused forms are composed from them here, and what a
    backend overrides must equal this composition bit for bit.
    """

    def workspace(self, codec: C, numel: int, device: torch.device) -> Workspace:
        return Workspace.on(device)

    def prepare(self, codec: C, dtype: torch.dtype, device: torch.device) -> None:
        """Compile what `codec` needs for gradients of `dtype` on `device`, so that no later call has to: by default it
        is run once, on few elements."""
        numel = self.prepare_numel(codec)
        workspace = self.workspace(codec, numel, device)
        x = torch.ones(numel, dtype=dtype, device=device)
        residual = torch.zeros(numel, dtype=torch.float32, device=device)
        wire = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8, device=device)
        draw = torch.zeros(3, dtype=torch.int64, device=device)
        self.encode(codec, x, wire, draw, workspace)
        self.encode_feedback(codec, x, residual, wire, draw, workspace)
        self.decode_add(codec, wire, residual, 1.0, workspace)
        self.decode_mean(codec, [part[None] for part in wire.split(codec.part_bytes(numel))], x, workspace)

    def prepare_numel(self, codec: C) -> int:
        """Of how many elements a gradient runs everything."""
        return 1

    @abstractmethod
    def encode(self, codec: C, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None: ...

    @abstractmethod
    def decode_add(self, codec: C, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None: ...

    def encode_feedback(
        self, codec: C, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        total = grad.float() + residual
        self.encode(codec, total, wire, draw, workspace)
        decoded = torch.zeros_like(total)
        self.decode_add(codec, wire, decoded, 1.0, Workspace.on(total.device))
        # Where a value could not be sent as a finite number, the old residual stays: it must never become NaN.
        sent = decoded.isfinite() & total.isfinite()
        residual.copy_(torch.where(sent, total - decoded, residual))

    def encode_low_precision(
        self,
        codec: C,
        grad: Tensor,
        residual: LowPrecisionVector,
        wire: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        """`encode_feedback` with a residual that is kept in fewer bytes."""
        with residual.open() as wide:
            self.encode_feedback(codec, grad, wide, wire, draw, workspace)

    def encode_momentum(
        self,
        codec: C,
        x: MomentumInput,
        residual: Tensor,
        wire: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        """`encode_feedback` of what comes out of a momentum that a gradient enters."""
        with workspace.scratch.open(x.numel(), residual.device) as out:
            x.into(out)
            self.encode_feedback(codec, out, residual, wire, draw, workspace)

    def entries_of(self, codec: C, wire: Tensor, numel: int, workspace: Workspace) -> tuple[Tensor, Tensor, Tensor]:
        """The entries on a sound wire of a sparse codec that this rank has encoded, without a pass over all elements
        where the wire has their indices: int32 indices [k], float32 values [k], and how many are used, int32 [1].

        All may be memory of the workspace, which the next call overwrites.
        """
        decoded = torch.zeros(numel, dtype=torch.float32, device=wire.device)
        self.decode_add(codec, wire, decoded, 1.0, Workspace.on(wire.device))
        indices = decoded.nonzero().view(-1)
        return indices.int(), decoded[indices], torch.full((1,), len(indices), dtype=torch.int32, device=wire.device)

    def decode_mean(self, codec: C, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        for rank in range(wires[0].shape[0]):
            wire = wires[0][rank] if len(wires) == 1 else torch.cat([part[rank] for part in wires])
            self.decode_add(codec, wire, total, 1.0, workspace)
        divide(total, wires[0].shape[0], out)


def parts_of(codec: CodecLike, wire: Tensor, numel: int) -> list[Tensor]:
    """The parts of one rank's wire, as those of all ranks come: [1, bytes] each."""
    return [part[None] for part in wire.split(codec.part_bytes(numel))]


def divide(total: Tensor, world_size: int, out: Tensor) -> None:
    """`out` = total · (1 / world_size), the reciprocal in float32, cast once. `total` may be `out`, and is used up."""
    share = float(torch.tensor(1.0, dtype=torch.float32, device="cpu") / world_size)
    if out.dtype == total.dtype:
        torch.mul(total, share, out=out)
    else:
        out.copy_(total.mul_(share))


class VectorKernels:
    """Passes over flat tensors, in torch, for devices without anything better."""

    def prepare(self, device: torch.device) -> None:
        """Compile all of this for tensors on `device`, so that no later call has to."""
        one, two, three = torch.zeros(3, 1, dtype=torch.float32, device=device)
        self.all_finite(one)
        self.difference(one, two, three, False)
        self.descend(one, two, three, False)
        self.accumulate(one, two)

    def all_finite(self, x: Tensor) -> Tensor:
        """True if every element of a tensor is finite, bool []; the tensor has at least one. One pass, no memory."""
        least, largest = torch.aminmax(x)  # either is NaN or infinite where any element is
        return (least - least) + (largest - largest) == 0  # `isfinite` would take four launches for each

    def accumulate(self, x: Tensor, total: Tensor) -> Tensor:
        """total += x, float32 += any dtype, where the sum is finite. Returns whether all of it is: bool []."""
        new = total + x.float()
        finite = new.isfinite()
        total.copy_(torch.where(finite, new, total))
        return finite.all()

    def difference(self, agreed: Tensor, own: Tensor, out: Tensor, restart: bool) -> None:
        """out = agreed - own, float32 both but for `own`; with `restart` own = agreed then."""
        torch.sub(agreed, own, out=out)
        if restart:
            own.copy_(agreed)

    def descend(self, agreed: Tensor, step: Tensor, own: Tensor, carry: bool) -> None:
        """agreed -= step, float32 both; then own = agreed, or with `carry` own -= step."""
        agreed.sub_(step)
        if carry:
            own.sub_(step)
        else:
            own.copy_(agreed)


class TrackingKernels:
    """The passes of `compress.feedback.tracking` over flat tensors, in torch, for devices without anything better."""

    def change(self, grad: Tensor, momentum: Tensor, share: float, out: Tensor) -> None:
        """Let a gradient of any dtype enter the momentum, float32: `out`, float32, = its change by share · (grad -
        momentum). Where the momentum would not be finite, it stays, and `out` is not finite."""
        new = momentum + (grad.float() - momentum) * share
        torch.sub(new, momentum, out=out)
        momentum.copy_(torch.where(new.isfinite(), new, momentum))

    def changing(self, grad: Tensor, momentum: Tensor, share: float) -> MomentumInput:
        """`change`, for a codec that reads what it writes."""
        return MomentumInput(grad.numel(), partial(self.change, grad, momentum, share))

    def follow(self, estimate: Tensor, mean: Tensor) -> bool:
        """Add a mean, float32, to the estimate, and put that in its place; where the sum is not finite the estimate
        stays, and NaN is in its place. Returns whether all is finite, as far as is known without waiting."""
        total = estimate + mean
        finite = total.isfinite()
        estimate.copy_(torch.where(finite, total, estimate))
        mean.copy_(total.masked_fill_(~finite, torch.nan))
        return not finite.is_cuda and bool(finite.all())

    def lead(self, past: Tensor, mean: Tensor, beta: float, share: float) -> None:
        """`mean` -= share·past, and past = beta·past + that; where this is not finite `past` stays, and NaN is in the
        place of the mean. All float32."""
        mean.sub_(past * share)
        new = past * beta + mean
        finite = new.isfinite()
        past.copy_(torch.where(finite, new, past))
        mean.masked_fill_(~finite, torch.nan)

    def divide(self, grad: Tensor, magnitudes: Tensor, out: Tensor) -> None:
        """`out` = a gradient of any dtype, divided by its scales (`_scales_of`); float32 but for the gradient."""
        torch.div(grad.float(), _scales_of(magnitudes), out=out)

    def multiply(self, mean: Tensor, magnitudes: Tensor, beta: float) -> None:
        """The mean u is multiplied by its scales (`_scales_of`), and magnitudes M = √(βM² + (1-β)u²) then, except where
        that is not finite. All float32."""
        mean.mul_(_scales_of(magnitudes))
        new = magnitudes * magnitudes * beta + mean * mean * (1.0 - beta)
        new = new.double().sqrt_().float()  # torch's roots of float32 are rounded otherwise on some CPUs
        magnitudes.copy_(torch.where(new.isfinite(), new, magnitudes))


def _scales_of(magnitudes: Tensor) -> Tensor:
    """1 + 10 M/ρ, where ρ is the root mean square of a row of 256, with zeros behind the last; 1 where it is 0."""
    rows = torch.nn.functional.pad(magnitudes, (0, -len(magnitudes) % 256)).view(-1, 256)
    squares, half = rows * rows, 128
    while half:
        squares, half = squares[:, :half] + squares[:, half:], half // 2
    factor = torch.full_like(squares, 10.0, dtype=torch.float64).div_((squares.double() / 256).sqrt_()).float()
    return (rows * factor.masked_fill_(squares == 0, 0.0) + 1.0).view(-1)[: len(magnitudes)]


class MomentumKernels:
    """The passes of `compress.feedback.momentum` over flat tensors, in torch, for devices without anything better."""

    def enter(self, grad: Tensor, momentum: Tensor, beta: float, nesterov: bool, out: Tensor) -> None:
        """Let a gradient g of any dtype enter the momentum u, float32: u = βu + g, and `out`, float32, = u; with
        `nesterov` u = β(u + g), and `out` = u + g. Where `out` is not finite the momentum stays."""
        g = grad.float()
        new = (momentum + g) * beta if nesterov else momentum * beta + g
        torch.add(new, g, out=out) if nesterov else out.copy_(new)
        momentum.copy_(torch.where(out.isfinite(), new, momentum))

    def momentum_input(self, grad: Tensor, momentum: Tensor, beta: float, nesterov: bool) -> MomentumInput:
        """`enter`, for a codec that reads what it writes."""
        return MomentumInput(grad.numel(), partial(self.enter, grad, momentum, beta, nesterov))

    def mask(self, momentum: Tensor, indices: Tensor, values: Tensor, count: Tensor | None = None) -> Tensor:
        """Let the momentum be zero where an entry has a finite value.

        Args:
            indices, values: int32, none of them twice, and float32.
            count: how many are used, int32 [1] on the device; None: all.

        Returns:
            What the momentum was there, float32; anything where an entry is not used.
        """
        at, stays = indices.long(), ~values.isfinite()
        if count is not None:
            unused = torch.arange(len(indices), device=indices.device) >= count
            at, stays = at.masked_fill(unused, 0), stays | unused
        before = momentum[at]
        # Added, so that what is not used changes nothing, wherever it points: not even the sign of a zero.
        self.add(momentum, at, (-before).masked_fill_(stays, -0.0))
        return before

    def add(self, momentum: Tensor, places: Tensor, values: Tensor) -> None:
        """`EntryKernels.add`."""
        add_at(momentum, places, values)
