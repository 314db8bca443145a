"""Places in vectors and lists, without a wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def used_places(indices: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Of a list whose first `count` (int32 [1]) indices are used: where to read and to add in a vector that is no
    shorter, int64, and which are used, bool. What is not used points anywhere, far apart: atomics do not collide."""
    slots = torch.arange(len(indices), device=indices.device)
    used = slots < count
    return torch.where(used, indices, slots), used


def is_among(indices: Tensor, ascending: Tensor) -> Tensor:
    """Which of the indices are in a list, bool."""
    if len(ascending) == 0:
        return torch.zeros_like(indices, dtype=torch.bool)
    return ascending[torch.searchsorted(ascending, indices).clamp_(max=len(ascending) - 1)] == indices


def add_at(residual: Tensor | None, places: Tensor, values: Tensor) -> None:
    """residual[places] += values, where those are finite. Where a place comes twice, all values but one are -0.0. On a
    GPU `EntryKernels.add`, as atomics there take subnormal numbers for zeros."""
    if residual is not None and len(values):
        residual.index_add_(0, places.long(), torch.where(values.isfinite(), values, -0.0))


def write_at(out: Tensor, places: Tensor, values: Tensor, used: Tensor) -> Tensor:
    """Write entries to a vector of zeros. What is not used may have any value, at any place in it. Returns how many of
    the others are not finite, int64 []."""
    out.index_add_(0, places, torch.where(used, values, 0.0).to(out.dtype))
    return (used & ~values.isfinite()).sum()


def sound_places(places: Tensor, used: Tensor, start: int, stop: int) -> Tensor:
    """Which entries of lists count, bool: those used, int64 [..., k], that lie from `start` to `stop` and above every
    other of their list that does so before."""
    inside = used & (places >= start) & (places < stop)
    highest = torch.where(inside, places, start - 1).cummax(-1).values
    before = torch.cat([torch.full_like(highest[..., :1], start - 1), highest[..., :-1]], -1)
    return inside & (places > before)
