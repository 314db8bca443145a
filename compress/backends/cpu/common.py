"""What the CPU's codecs share: threads of our own, the workspace's memory, and compiling ahead."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch

from .. import Kernels, Workspace, kept
from .blocks import BFLOAT16, FLOAT16, FLOAT32

KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
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


def note(workspace: Workspace, results: list[tuple[int, int]]) -> None:
    status = workspace.status.numpy()
    for skipped, unsound in results:
        status[0] += skipped
        status[1] += unsound


def inverse(world_size: int) -> float:
    return float(np.float32(1) / np.float32(world_size))


class CpuKernels(Kernels):
    """Kernels that numba compiles."""

    def prepare(self, codec: Any, dtype: torch.dtype, device: torch.device) -> None:
        """Compile, or load from the cache, everything that this codec runs."""
        with kept.task(type(codec).__name__):
            super().prepare(codec, dtype, device)
