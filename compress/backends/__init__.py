"""What runs a codec: one table of kernels per backend, chosen by where the tensors are.

`reference` (NumPy) is the specification and the slowest; `cpu` (numba) serves CPU tensors, `cuda` those of GPUs. A
backend is loaded when it is first needed, so importing gradwire neither compiles nor probes anything. All of them
write the same bytes. `register_backend` adds one for another type of device.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .entry_kernels import EntryKernels


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

    def prepare(self, codec: Any, dtype: torch.dtype, device: torch.device) -> None:
        """Compile what `codec` needs for gradients of `dtype` on `device`, so that no later call has to: by default it
        is run once, on one element."""
        workspace = self.workspace(codec, 1, device)
        x = torch.ones(1, dtype=dtype, device=device)
        residual = torch.zeros(1, dtype=torch.float32, device=device)
        wire = torch.zeros(codec.wire_bytes(1), dtype=torch.uint8, device=device)
        draw = torch.zeros(3, dtype=torch.int64, device=device)
        self.encode(codec, x, wire, draw, workspace)
        self.encode_feedback(codec, x, residual, wire, draw, workspace)
        self.decode_add(codec, wire, residual, 1.0, workspace)
        self.decode_mean(codec, [part[None] for part in wire.split(codec.part_bytes(1))], x, workspace)

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


@dataclass(frozen=True, eq=False)
class Backend:
    """What serves the tensors of one type of device.

    Attributes:
        kernels: of each codec, by its name. One that is not there has to bring kernels of its own.
        entries: what packs and merges the entries of sparse gradients.
    """

    kernels: Mapping[str, Kernels]
    entries: EntryKernels


def _built_in(name: str) -> Backend:
    backend: Backend = importlib.import_module(f".{name}", __name__).BACKEND
    return backend


_loaders: dict[str, Callable[[], Backend]] = {name: partial(_built_in, name) for name in ("reference", "cpu", "cuda")}
_forced: str | None = None


def register_backend(name: str, load: Callable[[], Backend]) -> None:
    """Let codecs run on tensors of another type of device.

    Args:
        name: the device's type, as in `torch.device(...).type`; under any other name only `use_backend` reaches it.
        load: makes the backend; called once, when it is first needed. Its kernels must write the bytes of "reference".

    Raises:
        ValueError: the name is taken.
    """
    if name in _loaders:
        raise ValueError(f"there is a backend {name!r} already: register yours under another name")
    _loaders[name] = load


def backend_names() -> tuple[str, ...]:
    """Every backend, the reference first."""
    return tuple(_loaders)


def backend_for(device: torch.device) -> Backend:
    """What serves tensors on `device`.

    Raises:
        ValueError: no backend does.
    """
    return _backend(_forced or device.type)


def kernels_for(device: torch.device, codec_name: str) -> Kernels:
    """The kernels of a codec for tensors on `device`.

    Raises:
        ValueError: no backend serves that device, or the one that does has no such codec.
    """
    kernels = backend_for(device).kernels
    if codec_name not in kernels:
        raise ValueError(
            f"the backend {_forced or device.type!r} has no kernels for the codec {codec_name!r}, only for "
            f"{', '.join(kernels)}: return kernels of your own from the codec's `kernels`"
        )
    return kernels[codec_name]


def entries_for(device: torch.device) -> EntryKernels:
    """What packs and merges entries on `device`. Raises as `backend_for` does."""
    return backend_for(device).entries


def backend_kernels(name: str) -> Mapping[str, Kernels]:
    """The kernels of every codec on backend `name`, by codec name."""
    return _backend(name).kernels


@cache
def _backend(name: str) -> Backend:
    if name not in _loaders:
        places = ", ".join(other for other in _loaders if other != "reference")
        raise ValueError(
            f"gradwire has no kernels for device {name!r}: move the tensors to one of {places}, or add a backend with "
            "gradwire.compress.backends.register_backend"
        )
    return _loaders[name]()


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every codec in this process on backend `name`, whatever the device: for comparing backends.

    Raises:
        ValueError: unknown backend.
    """
    global _forced  # noqa: PLW0603 - one process, one choice: lanes run on other threads
    if name not in _loaders:
        raise ValueError(f"unknown backend {name!r}: expected one of {', '.join(_loaders)}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before
