"""Backends: one table of kernels each, chosen by the device of the tensors.

`reference` (NumPy) is the specification and the slowest; `cpu` (numba) serves CPU tensors, `cuda` those of GPUs. A
backend is loaded when it is first needed, so importing gradwire neither compiles nor probes anything. All of them
write the same bytes. `register_backend` adds one for another type of device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor

from .kernels import Kernels, MomentumInput, MomentumKernels, TrackingKernels, VectorKernels, Workspace
from .low_precision import LowPrecisionKernels, LowPrecisionVector
from .memory import ScratchPool
from .sparse import EntryKernels, GenericSparseKernels, SparseKernels

__all__ = [
    "Backend",
    "GenericSparseKernels",
    "Kernels",
    "LowPrecisionKernels",
    "LowPrecisionVector",
    "MomentumInput",
    "MomentumKernels",
    "ScratchPool",
    "SparseKernels",
    "TrackingKernels",
    "VectorKernels",
    "Workspace",
    "all_finite",
    "backend_for",
    "backend_kernels",
    "backend_names",
    "entries_for",
    "generic_sparse",
    "kernels_for",
    "low_precision_vector",
    "register_backend",
    "use_backend",
]


@dataclass(frozen=True, eq=False)
class Backend:
    """The kernels for tensors on one type of device.

    Attributes:
        kernels: of each codec, by its name. One that is not there has to bring kernels of its own.
        entries: what packs and merges the entries of sparse gradients.
        tracking, momentum: the passes of `compress.feedback.tracking` and `compress.feedback.momentum`.
        low_precision: those of `backends.low_precision`.
        vectors: those that periodic updates make, and the search for what is not finite.
    """

    kernels: Mapping[str, Kernels]
    entries: EntryKernels
    tracking: TrackingKernels = field(default_factory=TrackingKernels)
    momentum: MomentumKernels = field(default_factory=MomentumKernels)
    low_precision: LowPrecisionKernels = field(default_factory=LowPrecisionKernels)
    vectors: VectorKernels = field(default_factory=VectorKernels)


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
    """The backend for tensors on `device`.

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


@cache
def generic_sparse(backend: Backend) -> GenericSparseKernels:
    """The kernels of sparse codecs that a backend does not know by name.

    Raises:
        ValueError: it has no kernels for top-k, whose sums serve all.
    """
    sums = backend.kernels.get("topk")
    if not isinstance(sums, SparseKernels):
        raise ValueError("this backend cannot add up entries: give it kernels for 'topk', whose sums serve all")
    return GenericSparseKernels(backend.entries, sums)


def entries_for(device: torch.device) -> EntryKernels:
    """The kernels that pack and merge entries on `device`. Raises as `backend_for` does."""
    return backend_for(device).entries


def all_finite(x: Tensor) -> Tensor:
    """True if every element is finite: bool []."""
    if x.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=x.device)
    return backend_for(x.device).vectors.all_finite(x)


def low_precision_vector(
    numel: int, dtype: torch.dtype, device: torch.device, rooms: ScratchPool | None = None
) -> LowPrecisionVector:
    """Zeros that are kept as `dtype`, torch.bfloat16 or torch.int8. Raises as `backend_for` does."""
    return LowPrecisionVector(backend_for(device).low_precision, numel, dtype, device, rooms)


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
    """Run every codec in this process on backend `name`, whatever the device: for comparing backends. Workspaces made
    before, and what has some, keep theirs.

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
