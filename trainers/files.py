"""A state beside the files of a checkpoint: each rank's part in a file of its own."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..hooks import CompressState


def save(state: CompressState, folder: str | Path, name: str = "gradwire") -> Path:
    """Write this rank's `state_dict()`. Every rank must, after the same step.

    Args:
        folder: the checkpoint's folder; made if it does not exist.
        name: begin of the file's name.

    Returns:
        The file.
    """
    path = _path(Path(folder), name)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    saved = state.state_dict()
    torch.save(saved, part)
    os.replace(part, path)  # a process may be killed at any time
    _remove_others(path.parent, name, saved["step"])
    return path


def load(state: CompressState, folder: str | Path, name: str = "gradwire", strict: bool = True) -> bool:
    """Go on from the files of `save`. On another number of ranks, each gets the mean of all residuals, so that nothing
    is lost.

    Args:
        strict: `CompressState.load_state_dict`'s.

    Returns:
        True if there were files; else this warns.

    Raises:
        ValueError: the files do not fit, or a rank's file is missing.
    """
    own = _path(Path(folder), name)
    files = [own] if own.exists() else _files(own.parent, name)
    if not files:
        warnings.warn(f"{folder} has no file of gradwire's: it goes on without residuals", stacklevel=2)
        return False
    whole = _together([torch.load(file, map_location="cpu", weights_only=True) for file in files])
    state.load_state_dict(whole, strict=strict)
    return True


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One checkpoint with the parts of several ranks.

    Raises:
        ValueError: the parts are of different steps.
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


def _remove_others(folder: Path, name: str, step: int) -> None:
    """Remove files of another number of ranks, which would be taken for this checkpoint's. The last rank to save does:
    until every rank has written its file of this step, the old files may be all that can be loaded."""
    mine = {_path(folder, name, rank) for rank in range(dist.get_world_size())}
    others = set(_files(folder, name)) - mine
    if others and all(file.exists() and _step(file) == step for file in mine):
        for old in others:
            old.unlink(missing_ok=True)


def _step(file: Path) -> int:
    step: int = torch.load(file, map_location="cpu", mmap=True, weights_only=True)["step"]
    return step


def _files(folder: Path, name: str) -> list[Path]:
    """The files of all ranks, of any number of ranks."""
    pattern = re.compile(re.escape(name) + r"_\d+_of_\d+\.pt")
    return sorted(file for file in folder.glob("*.pt") if pattern.fullmatch(file.name))


def _path(folder: Path, name: str, rank: int | None = None) -> Path:
    return folder / f"{name}_{dist.get_rank() if rank is None else rank}_of_{dist.get_world_size()}.pt"
