"""Bytes a parameter that compression takes beyond plain DDP, at the peak of a process's resident memory.

`python tests/support/memory.py 2 4` writes the table of `docs/guarantees.md`, for so many ranks.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gradwire import CompressState, compress_hook
from gradwire.compress import QSGD, Codec, Feedback, Identity, OneBit, PowerSGD, Residual, TopK
from ranks import Pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

#: A codec, an exchange and a strategy.
Case = tuple[Codec, str, Feedback | None]
INT8 = Residual(dtype=torch.int8)
#: The rows of the table.
CASES: tuple[Case, ...] = (
    (OneBit(), "gather", None), (OneBit(), "two_pass", None), (OneBit(), "two_pass", INT8),
    (QSGD(bits=4), "two_pass", None), (TopK(0.01), "gather", None), (TopK(0.01), "gather", INT8),
    (TopK(0.01), "split", None), (TopK(0.01), "union", None), (TopK(0.01), "mask", None),
    (PowerSGD(rank=4), "factors", None), (Identity(), "blocks", None),
    (OneBit(), "hierarchical", None),
)  # fmt: skip
#: Of a layer, and ranks on a node. With layers of less, what a process takes whatever its model weighs more.
WIDTH, NODE = 512, 2
#: glibc's mallopt: memory from this size on goes back to the system as soon as it is freed.
MMAP_THRESHOLD, SMALL, LARGE = -3, 32 << 10, 32 << 20


def resident(what: str) -> int:
    """Bytes, by a line of the process's status."""
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(found.split()[1]) << 10


def peaks(steps: Callable[[], Callable[[], None]]) -> tuple[int, int]:
    """The most bytes resident, beyond those before, from the first step on, and in steps like all later ones.

    Args:
        steps: makes a model, and returns its training step.
    """
    libc = ctypes.CDLL(None)
    gc.collect()
    libc.malloc_trim(0)
    before, found, step = resident("VmRSS"), list[int](), steps()
    for count in (4, 1):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
        for _ in range(count):
            step()
        found.append(resident("VmHWM") - before)
        gc.collect()
        libc.malloc_trim(0)
    return found[0], found[1]


def training(case: Case | None, layers: int, states: list[CompressState]) -> Callable[[], None]:
    """A training step of linear layers, of two to a bucket; without a case of plain DDP."""
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    bucket, x = 8 * WIDTH * WIDTH / 2**20, torch.randn(1, WIDTH)
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket, gradient_as_bucket_view=True)
    if case is not None:
        codec, exchange, strategy = case
        nodes = NODE if exchange == "hierarchical" else None
        where: dict[str, Any] = {"exchange": exchange, "topology": nodes, "fallback": None}
        states.append(CompressState(ddp, codec, error_feedback=strategy or "auto", **where))
        ddp.register_comm_hook(states[-1], compress_hook)
    return lambda: ddp(x).sum().backward()


def beyond_ddp(rank: int, cases: list[Case], layers: int) -> list[tuple[float, float]]:
    """For each case, bytes a parameter beyond plain DDP's peak: from the first step on, and in later steps."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, SMALL)
    warnings.simplefilter("ignore")
    found, states = list[tuple[int, int]](), list[CompressState]()
    try:
        for case in (None, *cases):
            for count in (5, layers):  # of the first, nothing counts: it loads kernels, and starts threads
                found.append(peaks(lambda: training(case, count, states)))  # noqa: B023
                for state in states:
                    state.close()
                states.clear()
    finally:
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE)
    first, *others = found[1::2]
    numel = layers * WIDTH * WIDTH
    return [((a - first[0]) / numel, (b - first[1]) / numel) for a, b in others]


def main(sizes: list[int]) -> None:
    columns = list[dict[Case, float]]()
    for size in sizes:
        cases = [case for case in CASES if case[1] != "hierarchical" or size > NODE]
        with Pool(size) as pool:
            ranks = zip(*pool.run(beyond_ddp, cases, 32, within=1800.0), strict=True)
        columns.append({case: max(later for _, later in peaks) for case, peaks in zip(cases, ranks, strict=True)})
    print("| codec | exchange |", " | ".join(f"{size} ranks" for size in sizes), "|")
    print("| --- | --- |", " | ".join("--:" for _ in sizes), "|")
    for case in CASES:
        codec, exchange, strategy = case
        kept, row = "" if strategy is None else f", `{strategy}`", [column.get(case) for column in columns]
        cells = " | ".join("" if peak is None else f"{peak:.1f}" for peak in row)
        print(f'| `{codec}`{kept} | `"{exchange}"` |', cells, "|")


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]])
