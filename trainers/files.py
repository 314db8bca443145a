"""A state beside the files of a checkpoint: what each rank keeps, in a file of its own."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..hooks import CompressState


def save(state: CompressState, folder: str | Path, name: str = "gradwire") -> Path:
    """Write this rank's `state_dict()`. Every rank must, after the same step.

    Args:
        folder: of the checkpoint; made where it is not there.
        name: what the file's name begins with.

    Returns:
        The file.
    """
    path = _path(Path(folder), name)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save(state.state_dict(), part)
    os.replace(part, path)  # a process may be killed at any time
    if dist.get_rank() == 0:
        for old in set(path.parent.glob(f"{name}_*_of_*.pt")) - set(path.parent.glob(f"{name}_*_of_{_size()}.pt")):
            old.unlink()  # of another number of ranks, which would be taken for this checkpoint's
    return path


def load(state: CompressState, folder: str | Path, name: str = "gradwire", strict: bool = True) -> bool:
    """Go on from what `save` wrote. On another number of ranks, each gets the mean of what all kept, so that nothing is
    lost.

    Args:
        strict: `CompressState.load_state_dict`'s.

    Returns:
        Whether there was anything; else this warns.

    Raises:
        ValueError: it does not fit, or a rank's file is missing.
    """
    own = _path(Path(folder), name)
    files = [own] if own.exists() else sorted(own.parent.glob(f"{name}_*_of_*.pt"))
    if not files:
        warnings.warn(
            f"{folder} has no file of gradwire's: it goes on without what compression had left out", stacklevel=2
        )
        return False
    whole = _together([torch.load(file, map_location="cpu", weights_only=True) for file in files])
    state.load_state_dict(whole, strict=strict)
    return True


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One checkpoint of what several ranks have saved.

    Raises:
        ValueError: they are of different steps.
    """
    steps = sorted({part["step"] for part in parts})
    if len(steps) > 1:
        raise ValueError(f"the ranks' files are of different steps, {steps}: they are not of one checkpoint")
    whole = dict(parts[0])
    whole["residuals"] = {key: found for part in parts for key, found in part["residuals"].items()}
    if "vectors" in whole:
        whole["vectors"] = {
            vector: {key: found for part in parts for key, found in part["vectors"][vector].items()}
            for vector in whole["vectors"]
        }
    return whole


def _size() -> int:
    return dist.get_world_size()


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}_{dist.get_rank()}_of_{_size()}.pt"
