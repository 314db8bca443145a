"""A backend of `torch.distributed`, "gradwire", that encodes large reductions between any ranks: for sharded models,
DTensor, Megatron and compiled graphs, without a hook. `docs/backend.md` says what happens to each collective."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .options import VARIABLE, BackendOptions

__all__ = ["VARIABLE", "BackendOptions", "register", "statistics"]

#: The backends that are registered, and the one beneath each; "gradwire" takes that of the accelerator.
INNER = {"gradwire+gloo": "gloo", "gradwire+nccl": "nccl", "gradwire": "nccl" if torch.cuda.is_available() else "gloo"}
#: True if this torch takes backends that are written in Python, as of 2.15.
PYTHON = hasattr(dist.Backend, "_ensure_backend_registered")
NEEDS = f"needs PyTorch 2.15 or newer, in which backends can be written in Python; this is {torch.__version__}"
DEVICES = {"gloo": ["cpu", "cuda"], "nccl": ["cuda"]}


def statistics(group: Any = None, device: torch.device | str | None = None) -> dict[str, int]:
    """Counts of a group's backend "gradwire" on this rank: collectives that were `encoded` and that were not
    (`unchanged`: reductions and all-gathers only), and of the encoded ones `bytes_sent`, `bytes_received` to and from
    other ranks.

    Args:
        group: None: the default group.
        device: type of the tensors; None: the group's first.

    Raises:
        TypeError: the group has another backend.
    """
    found: Any = dist.group.WORLD if group is None else group
    backend = found._get_backend(found._device_types[0] if device is None else torch.device(device))
    backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    if not hasattr(backend, "counts"):
        raise TypeError(f"group={found}: its backend is {backend.name()!r}, not gradwire")
    return dict(backend.counts)


def _create(name: str, options: Any, backend_options: Any) -> Any:
    if not PYTHON:
        raise RuntimeError(f"backend={name!r} {NEEDS}: use backend={INNER[name]!r} with compress_hook or compress_fsdp")
    from .coded import create

    return create(INNER[name], options, backend_options)


def register() -> None:
    """Make the backends "gradwire", "gradwire+gloo" and "gradwire+nccl" known to `torch.distributed`, which calls this
    by itself from PyTorch 2.15 on, when one of them is asked for."""
    if "GRADWIRE" in dist.Backend._plugins:
        return
    for name, inner in INNER.items():
        # A group has one backend of each type, so those of two devices must differ in it, as the ones beneath do.
        kind = {"_backend_type": dist.Backend.backend_type_map[inner]} if "+" in name else {}
        if not PYTHON:
            kind = {}
        devices = DEVICES[inner] if "+" in name or inner == "nccl" else ["cpu"]
        dist.Backend.register_backend(name, _creator(name), extended_api=True, devices=devices, **kind)


def _creator(name: str) -> Any:
    return lambda options, backend_options: _create(name, options, backend_options)


if not PYTHON:
    register()  # for the sentence that says what is missing
