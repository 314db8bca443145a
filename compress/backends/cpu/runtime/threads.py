"""Threads of our own for kernels, and memory that a workspace keeps for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch

from ... import Workspace
from .dtypes import TILE

#: Fewer elements than this are not worth another thread: to wake one takes some 0.1 ms.
ELEMENTS_PER_THREAD = 1 << 20


@cache
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="gradwire")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.cache_clear)  # a fork keeps the pool, but not its threads


def run(job: Callable[[int, int, int], Any], count: int, pieces: int) -> list[Any]:
    """job(first, last, piece) over `count` blocks, by this thread and by others."""
    if pieces == 1:
        return [job(0, count, 0)]
    bounds = [count * i // pieces for i in range(pieces + 1)]
    others = [pool().submit(job, bounds[i], bounds[i + 1], i) for i in range(1, pieces)]
    results = [job(bounds[0], bounds[1], 0)]
    return results + [other.result() for other in others]


def pieces_of(elements: int, count: int) -> int:
    return max(1, min(torch.get_num_threads(), elements // ELEMENTS_PER_THREAD, count))


def reserved(workspace: Workspace, name: str, size: int) -> int:
    """The address of at least `size` bytes that the workspace keeps under `name`, at a multiple of 64."""
    memory, address = workspace.buffers.get(name, (b"", 0))
    if len(memory) < size + 63:
        memory = np.empty(size + 63, np.uint8)
        address = -(-memory.ctypes.data // 64) * 64
        workspace.buffers[name] = memory, address
    return address


def whole_lines(size: int) -> int:
    """So many bytes, up to the end of a cache line."""
    return -(-size // 64) * 64


def note(workspace: Workspace, results: list[tuple[int, int]]) -> None:
    status = workspace.status.numpy()
    for skipped, unsound in results:
        status[0] += skipped
        status[1] += unsound


def inverse(world_size: int) -> float:
    return float(np.float32(1) / np.float32(world_size))


def over_tiles(numel: int, job: Callable[[int, int], Any]) -> list[Any]:
    """Tiles, so that threads begin at whole ones."""
    tiles = -(-numel // TILE)
    return run(lambda first, last, _: job(first * TILE, min(last * TILE, numel)), tiles, pieces_of(numel, tiles))
