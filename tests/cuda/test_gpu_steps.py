"""Steps of DDP on ranks that share a GPU: in none the host waits for the device, and encoding runs beside backward.
Without a GPU, a rehearsal."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import pytest
import torch
from gpu_ranks import DEVICE, REAL, Shared
from gradwire import QSGD, Codec, CompressState, OneBit, TopK, compress_hook
from strategies import GPU
from test_gpu_ranks import Say, named, say, shared  # noqa: F401
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.cuda if GPU else pytest.mark.slow
WIDTH, LAYERS = (2048, 8) if REAL else (96, 3)
#: Names of kernels in csrc/ begin so.
OURS = re.compile(r"(onebit|qsgd|tern|topk|chunked|cast_|entries|low_rank|union|momentum|narrow)")
#: Calls of CUDA by which the host waits, or that wait for it.
WAITS = {
    "waits for a stream": r"^cu(da)?StreamSynchronize",
    "waits for an event": r"^cu(da)?EventSynchronize",
    "takes or gives back memory": r"^cuda(Malloc|HostAlloc|Free)",
    "reads a number": r"^aten::_local_scalar_dense",
    "reads into pageable memory": r"Memcpy DtoH.*Pageable",
}


class Arm:
    """A model, DDP and the hook, if there is a codec; `step` makes one."""

    def __init__(self, rank: int, codec: Codec | None, exchange: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(DEVICE)
        self.ddp, self.state = DistributedDataParallel(model, bucket_cap_mb=16 if GPU else 0.05), None
        if codec is not None:
            self.state = CompressState(self.ddp, codec, exchange=exchange, fallback=None)
            self.ddp.register_comm_hook(self.state, compress_hook)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-4)
        self.inputs = torch.randn(256, WIDTH, device=DEVICE)

    def step(self) -> None:
        self.ddp(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


def settle() -> None:
    if GPU:
        torch.cuda.synchronize()


def profiled(rank: int, codec: Codec | None, exchange: str, steps: int = 4) -> dict[str, float]:
    """Calls a step by which the host waits, our kernels, their microseconds, and their share beside torch's."""
    arm = Arm(rank, codec, exchange)
    for _ in range(4):
        arm.step()
    settle()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if REAL else [])]) as trace:
        for _ in range(steps):
            arm.step()
        began = time.perf_counter()
        settle()
    arm.close()
    events = trace.events()
    found = {what: sum(bool(re.search(name, e.name)) for e in events) / steps for what, name in WAITS.items()}
    on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [e for e in on_device if not e.name.startswith(("Memcpy", "Memset", "gradwire"))]
    spans = [
        (e.time_range.start, e.time_range.end, bool(OURS.match(e.name)), "nccl" in e.name.lower()) for e in kernels
    ]
    ours = [(a, b) for a, b, mine, _ in spans if mine]
    others = [(a, b) for a, b, mine, nccl in spans if not mine and not nccl]
    spent = sum(b - a for a, b in ours)
    found |= {"kernels": len(ours) / steps, "us": spent / steps, "beside": overlap(ours, others) / max(spent, 1e-9)}
    return found | {"host ahead ms": 1e3 * (time.perf_counter() - began)}


def overlap(some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """How long one of the first runs while one of the others does."""
    merged: list[list[float]] = []
    for begin, end in sorted(others):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in some for c, d in merged)


@pytest.mark.parametrize(
    ("codec", "exchange"),
    [(None, ""), (OneBit(), "two_pass"), (TopK(0.01), "split"), (QSGD(bits=4), "gather")],
    ids=named,
)
def test_no_step_waits_for_the_device(shared: Shared, say: Say, codec: Codec | None, exchange: str) -> None:  # noqa: F811
    found = shared.run(profiled, codec, exchange)[0]
    say(", ".join(f"{what} {value:.3g}" for what, value in found.items() if value))
    if REAL:
        assert found["waits for a stream"] == found["reads into pageable memory"] == 0, found
        assert (found["kernels"] > 0) == (codec is not None), "kernels of ours in the trace"
