"""Ranks that share one GPU, over NCCL wherever it lets them; without a GPU, over Gloo on the CPU, as a rehearsal.

NCCL refuses two ranks of a communicator that have the same hash of the host and the same GPU ("Duplicate GPU
detected"). `NCCL_HOSTID` is what it hashes if it is set: ranks with different ones are hosts to NCCL, and talk over its
sockets.
Without MPS processes take turns on the GPU, some milliseconds each: laws can be checked, times say nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gradwire.benchmarks.common.launch import NCCL
from ranks import Pool, RankError
from strategies import GPU

DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
#: Whether there is one in earnest, where a check that takes a minute hangs.
REAL = GPU and "emulated" not in torch.cuda.get_device_name()
#: Collectives of one tensor, as torch 2.13 calls them and as it did.
RENAMED = (("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor"))
#: Of the process group; the first collective makes the communicator.
TIMEOUT = timedelta(seconds=40)


@dataclass(frozen=True)
class Way:
    """How ranks come to talk: the backend, and whether one server of MPS runs what they launch, at the same time."""

    name: str
    backend: str
    mps: bool = False
    alone: bool = False


#: The first that works is taken.
WAYS = (
    Way("NCCL, a host id for each rank", "nccl"),
    Way("NCCL, a host id for each rank, under MPS", "nccl", mps=True),
    Way("Gloo on tensors of the GPU", "gloo"),
    Way("NCCL, one rank", "nccl", alone=True),
)
ON_CPUS = (Way("Gloo on the CPU", "gloo"),)


class Shared:
    """`run(function, …)` runs `function(rank, …)` on every rank; ranks that failed or hung are started again.

    Attributes:
        way: the way that works here; None: none does, and `refused` says why, way by way.
    """

    def __init__(self, world_size: int, ways: tuple[Way, ...] = WAYS if GPU else ON_CPUS) -> None:
        self.way: Way | None = None
        self.refused: dict[str, str] = {}
        self.size = world_size
        self._pool: Pool | None = None
        self._stack = contextlib.ExitStack()
        for way in ways:
            self.size, stack = 1 if way.alone else world_size, contextlib.ExitStack()
            try:
                self._environment = stack.enter_context(served()) if way.mps else {}
                self.way = way
                self.said = self.run(collectives)[0]
                self._stack = stack
                return
            except (RankError, OSError, subprocess.SubprocessError) as error:
                self.refused[way.name] = str(error).strip().splitlines()[-1]
                self.close()
                stack.close()
        self.way = None

    def run(self, function: Callable[..., Any], *args: Any, within: float = 60.0 if REAL else 240.0) -> list[Any]:
        assert self.way is not None, self.refused
        if self._pool is None or self._pool.broken:
            each = [NCCL | self._environment | {"NCCL_HOSTID": f"gradwire-{rank}"} for rank in range(self.size)]
            self._pool = Pool(self.size, TIMEOUT, self.way.backend, each)
        results: list[Any] = self._pool.run(function, *args, within=within, after_failure=5.0)
        return results

    def close(self) -> None:
        if self._pool is not None and not self._pool.broken:
            self._pool.close()
        self._stack.close()


@contextlib.contextmanager
def served() -> Iterator[dict[str, str]]:
    """A server of MPS of our own, and the environment that leads to it.

    Raises:
        OSError, SubprocessError: there is none here, or it does not start.
    """
    control = "nvidia-cuda-mps-control"
    if shutil.which(control) is None:
        raise FileNotFoundError(f"{control} is not on PATH")
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        where = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        given: Any = {"env": os.environ | where, "timeout": 20, "capture_output": True, "text": True}
        subprocess.run([control, "-d"], check=True, **given)
        try:
            yield where
        finally:
            subprocess.run([control], input="quit\n", check=False, **given)


def collectives(rank: int) -> str:
    """What gradwire asks of a backend, by itself: where that fails, the fault is none of gradwire's."""
    size = dist.get_world_size()
    like: Any = {"device": DEVICE}
    ones = torch.ones(1 << 18, **like)
    dist.all_reduce(ones)
    assert bool((ones == size).all()), f"an all-reduce of ones is {ones[0].item()}"
    rows = torch.empty(size * 1000, dtype=torch.uint8, **like)
    found: list[Any] = [getattr(dist, new, getattr(dist, old, None)) for new, old in RENAMED]
    gather, scatter = found
    gather(rows, torch.full((1000,), rank, dtype=torch.uint8, **like))
    assert rows.view(size, -1)[:, 0].tolist() == list(range(size)), "an all-gather into one tensor"
    sent = torch.arange(size, dtype=torch.int32, **like).repeat_interleave(5) + 10 * rank
    dist.all_to_all_single(got := torch.empty_like(sent), sent)
    assert got.view(size, -1)[:, 0].tolist() == [rank + 10 * r for r in range(size)], "all_to_all_single"
    uneven, lengths = torch.ones((rank + 1) * size, **like), [r + 1 for r in range(size)]
    dist.all_to_all_single(torch.empty(sum(lengths), **like), uneven, lengths, [rank + 1] * size)
    if dist.get_backend() == "nccl":
        part = torch.empty(4, **like)
        scatter(part, torch.ones(4 * size, **like), dist.ReduceOp.AVG)
        assert float(part[0]) == 1.0, "a reduce-scatter of means"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.get_backend() == "nccl" and GPU else "none"
    return f"{size} ranks on {DEVICE.type}, torch {torch.__version__}, NCCL {nccl}"
