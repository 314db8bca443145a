"""Time of the CUDA kernels on this GPU.

Every timing is of CUDA events, in turns with the roofline, `torch.add(grad, residual, out=residual)`, on the same
stream. Bytes are what an operation cannot avoid to move; the share is of what a copy on the device reaches. Beside each
codec runs what a user would otherwise write: plain torch operations, and for 1-bit what DeepSpeed's optimizers do.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compress import EDEN, QSGD, Cast, ChunkedTopK, Codec, OneBit, Ternary, TernGrad, TopK, new_draw
from ..codec.baselines import torch_chain
from ..common import report
from ..common.arms import label

CODECS: tuple[Codec, ...] = (
    OneBit(),
    QSGD(bits=4),
    TernGrad(),
    Ternary(),
    EDEN(),
    TopK(0.01),
    TopK(0.001),
    ChunkedTopK(),
    ChunkedTopK(k=1024),
    Cast(torch.float16),
)
#: A bucket of DDP's default size, in float32 elements: what the host's time is measured on.
BUCKET = 25 * 1024 * 1024 // 4


def timed(device: torch.device, operation: Callable[[], object]) -> Callable[[], float]:
    """Starts an operation now; the result gives its seconds once it has ended. Events on a GPU, wall time elsewhere."""
    if device.type != "cuda":
        start = time.perf_counter()
        operation()
        spent = time.perf_counter() - start
        return lambda: spent
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    operation()
    end.record()

    def seconds() -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return seconds


@torch.no_grad()
def kernels(codec: Codec, device: torch.device, numel: int, ranks: int, repeats: int) -> dict[str, Any]:
    """A codec's operations beside the roofline, on float32."""
    torch.manual_seed(0)
    gradients = [torch.randn(numel, device=device) for _ in range(2)]
    feedback = codec.with_feedback()
    workspace, plain, draw = (
        feedback.workspace(numel, device),
        codec.workspace(numel, device),
        new_draw(0, device=device),
    )
    residual, out = torch.zeros(numel, device=device), torch.empty(numel, device=device)
    wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8, device=device)
    codec.encode(gradients[0], wire, draw, plain)
    rows = [part.repeat(ranks, 1) for part in wire.split(codec.part_bytes(numel))]
    accumulated = torch.zeros(numel, device=device)
    operations: dict[str, Callable[[Tensor], object]] = {
        "add": lambda grad: torch.add(grad, accumulated, out=accumulated),
        "copy": out.copy_,
        "encode_feedback": lambda grad: feedback.encode_feedback(grad, residual, wire, draw, workspace),
        "encode": lambda grad: codec.encode(grad, wire, draw, plain),
        "decode_mean": lambda grad: codec.decode_mean(rows, out, plain),
    }
    chains = {"torch": torch_chain(codec, residual.clone()), "deepspeed": deepspeed_chain(codec, residual)}
    operations |= {name: chain for name, chain in chains.items() if chain is not None}
    # The least that each must read and write.
    wire_bytes = len(wire) / numel
    moved = {"add": 12.0, "copy": 8.0, "encode_feedback": 12 + wire_bytes, "encode": 4 + wire_bytes}
    moved["decode_mean"] = 4 + ranks * wire_bytes
    times: dict[str, list[float]] = {name: [] for name in operations}
    settling = min(20, repeats)  # top-k's residual, and the clocks
    for turn in range(settling + repeats):
        # Random anew, as those of batches are: two in turns would add up in the residual without end.
        grad = gradients[turn % 2].normal_()
        pending = {name: timed(device, partial(operation, grad)) for name, operation in operations.items()}
        accumulated.zero_()
        if turn >= settling:
            for name, seconds in pending.items():
                times[name].append(seconds())
    medians = {name: report.median(values) for name, values in times.items()}
    copied = 8 / medians["copy"]
    return {
        "codec": repr(codec),
        "label": label(codec),
        "wire_bytes_per_element": wire_bytes,
        "median_s": medians,
        "quartiles_s": {name: report.quartiles(values) for name, values in times.items()},
        "ratio_to_add": {name: median / medians["add"] for name, median in medians.items()},
        "bytes_per_element": moved,
        "share_of_copy": {name: moved[name] / medians[name] / copied for name in moved},
        "copy_bytes_per_s": copied * numel,
        "host_s": host_time(feedback, device, min(numel, BUCKET), 5 * repeats),
    }


def host_time(codec: Codec, device: torch.device, numel: int, calls: int) -> float:
    """Seconds that one encode of a bucket keeps the host."""
    grad, residual = torch.randn(numel, device=device), torch.zeros(numel, device=device)
    wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8, device=device)
    workspace, draw = codec.workspace(numel, device), new_draw(0, device=device)
    spent = []
    for _ in range(calls):
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # an empty queue: a full one would keep the host too
        start = time.perf_counter()
        codec.encode_feedback(grad, residual, wire, draw, workspace)
        spent.append(time.perf_counter() - start)
    return report.median(spent)


def deepspeed_chain(codec: Codec, like: Tensor) -> Callable[[Tensor], object] | None:
    """1-bit compression in the order of operations of DeepSpeed's 1-bit optimizers: one scale for the whole tensor, and
    signs packed by CuPy."""
    if not isinstance(codec, OneBit) or importlib.util.find_spec("cupy") is None:
        return None
    import cupy

    error = torch.zeros_like(like)

    def chain(grad: Tensor) -> tuple[Tensor, Any]:
        compensated = grad + error
        scale = torch.linalg.vector_norm(compensated) / compensated.numel() ** 0.5
        error.set_(compensated - scale * compensated.sign().add_(1).bool().float().add_(-0.5).mul_(2.0))
        return scale, cupy.packbits(cupy.from_dlpack(compensated.sign_().add_(1).bool().to(torch.uint8)))

    return chain
