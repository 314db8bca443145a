"""What runs a codec: one table of kernels per backend, chosen by where the tensors are.

`reference` (NumPy) is the specification and the slowest; `cpu` (numba) serves CPU tensors, `cuda` those of GPUs. A
backend is imported when it is first needed, so importing gradwire neither compiles nor probes anything. All of them
write the same bytes.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

BACKENDS = ("reference", "cpu", "cuda")

_forced: str | None = None


@dataclass
class Workspace:
    """Memory that one codec reuses for one length on one device; it never changes the bytes of the wire.

    Attributes:
        status: int64[2] on the device, counted up by decoding: entries skipped because their index or code cannot
            occur in a sound wire, and records (sparse and cast codecs: positions) that are not finite.
        buffers: what the backend keeps between calls (scratch, a predicted threshold).
    """

    status: Tensor
    buffers: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def on(device: torch.device | str) -> Workspace:
        return Workspace(torch.zeros(2, dtype=torch.int64, device=device))


class Kernels(ABC):
    """The operations of one codec on one backend, on arguments that the codec has already checked.

    `encode` and `decode_add` say what the codec means. The two fused forms are composed from them here, and what a
    backend overrides must equal this composition bit for bit.
    """

    def workspace(self, codec: Any, numel: int, device: torch.device) -> Workspace:
        return Workspace.on(device)

    def prepare(self, codec: Any, dtype: torch.dtype, device: torch.device) -> None:  # noqa: B027 - may be nothing
        """Compile what `codec` needs for gradients of `dtype` on `device`, so that no later call has to."""

    @abstractmethod
    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None: ...

    @abstractmethod
    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None: ...

    def encode_feedback(
        self, codec: Any, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        total = grad.float() + residual
        self.encode(codec, total, wire, draw, workspace)
        decoded = torch.zeros_like(total)
        self.decode_add(codec, wire, decoded, 1.0, Workspace.on(total.device))
        # Where a value could not be sent as a finite number, the old residual stays: it must never become NaN.
        sent = decoded.isfinite() & total.isfinite()
        residual.copy_(torch.where(sent, total - decoded, residual))

    def decode_mean(self, codec: Any, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        for rank in range(wires[0].shape[0]):
            wire = wires[0][rank] if len(wires) == 1 else torch.cat([part[rank] for part in wires])
            self.decode_add(codec, wire, total, 1.0, workspace)
        divide(total, wires[0].shape[0], out)


def divide(total: Tensor, world_size: int, out: Tensor) -> None:
    """`out` = total · (1 / world_size), the reciprocal in float32, cast once."""
    out.copy_(total * (torch.tensor(1.0, dtype=torch.float32) / world_size).to(total.device))


def backend_for(device: torch.device) -> Any:
    """The module that serves tensors on `device`. Raises as `kernels_for` does."""
    return _backend(_forced or device.type)


def kernels_for(device: torch.device, codec_name: str) -> Kernels:
    """The kernels of a codec for tensors on `device`.

    Raises:
        ValueError: no backend serves that device.
    """
    kernels: Kernels = backend_for(device).KERNELS[codec_name]
    return kernels


def backend_kernels(name: str) -> dict[str, Kernels]:
    """The kernels of every codec on backend `name`, by codec name."""
    table: dict[str, Kernels] = _backend(name).KERNELS
    return table


@cache
def _backend(name: str) -> Any:
    if name not in BACKENDS:
        raise ValueError(f"gradwire has no kernels for device {name!r}: move the tensors to one of {BACKENDS[1:]}")
    return importlib.import_module(f".{name}", __name__)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every codec in this process on backend `name`, whatever the device: for comparing backends.

    Raises:
        ValueError: unknown backend.
    """
    global _forced  # noqa: PLW0603 - one process, one choice: lanes run on other threads
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}: expected one of {BACKENDS}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before
