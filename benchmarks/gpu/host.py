"""Host time of a bucket where its gradients are on a GPU: the Python between backward and the kernels.

No GPU is needed, and nothing is computed: codecs run the CUDA backend on CPU tensors, and a launch ends where CuPy
would be called. One rank trains under DDP, with the pipeline as it is over NCCL; its messages go nowhere. So what is
left out is what CuPy, the driver, streams, events and NCCL take: some microseconds for each launch. Counted are
launches of csrc/'s kernels, and torch's operations that would be a launch each on a GPU.

Each figure is the median of many calls on buffers so short that reading them takes no time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ...compress import QSGD, Cast, ChunkedTopK, Codec, OneBit, TernGrad, TopK, new_draw
from ...compress.backends import use_backend
from ...compress.backends.cuda.runtime.device import DEVICES, THREADS, Argument, Device, Function, passed
from ...hooks.comm.group import Group
from ...hooks.comm.ports import Collective
from ...hooks.ddp.hook import CompressState, compress_hook
from ..common import report
from ..common.arguments import expect_at_least

CPU = torch.device("cpu")
CODECS: tuple[Codec, ...] = (
    OneBit(),
    QSGD(bits=4),
    TernGrad(),
    ChunkedTopK(k=16, chunk=256),
    Cast(torch.float16),
    TopK(),
)
#: Exchanges besides `gather`, and the parameters that stay uncompressed.
WAYS: tuple[tuple[Codec, str, tuple[str, ...]], ...] = (
    *((codec, "gather", ()) for codec in CODECS),
    (OneBit(), "two_pass", ()),
    (OneBit(), "gather", ("*.bias",)),
)
#: Elements of a bucket, as few as show every path; and buckets of the model.
NUMEL, BUCKETS = 64 * 64, 8
WARM = 30


class NoLaunch(Device):
    """Takes a kernel's arguments as a GPU's launcher does, and counts.

    Attributes:
        launches: how many there were.
    """

    sm_count = 132

    def __init__(self) -> None:
        self.launches = 0

    def function(self, file: str, name: str) -> Function:
        return self._launch

    def wave(self, file: str, name: str, threads: int = THREADS) -> int:
        return 8 * self.sm_count

    def _launch(self, grid: int, block: int, args: Sequence[Argument]) -> None:
        passed(args)
        self.launches += 1


class Operations(TorchDispatchMode):
    """Counts what is computed in torch, and so would be launched: views and memory are not."""

    NONE = ("empty", "empty_like", "new_empty", "empty_strided", "lift_fresh", "detach", "alias", "_to_copy")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func.overloadpacket.__name__ in self.NONE)
        return func(*args, **(kwargs or {}))


@contextmanager
def no_gpu() -> Iterator[NoLaunch]:
    """Within the block the CUDA backend serves CPU tensors, and launches nothing."""
    device = NoLaunch()
    with patch.dict(DEVICES, {CPU: device}), use_backend("cuda"):
        yield device


def seconds(call: Callable[[], object], calls: int) -> float:
    """The median of one call."""
    spent = []
    for _ in range(WARM + calls):
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return report.median(spent[WARM:])


@torch.no_grad()
def codec_row(codec: Codec, calls: int) -> dict[str, Any]:
    """A codec's calls by themselves, on memory that stays the same."""
    with no_gpu() as device:
        codec = codec.with_feedback()
        grad, residual, out = torch.randn(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL)
        wire = torch.zeros(codec.wire_bytes(NUMEL), dtype=torch.uint8)
        rows = [part.repeat(2, 1) for part in wire.split(codec.part_bytes(NUMEL))]
        workspace, draw = codec.workspace(NUMEL), new_draw(0)

        def encode() -> None:
            codec.encode_feedback(grad, residual, wire, draw, workspace)

        def decode() -> None:
            codec.decode_mean(rows, out, workspace)

        encode()
        launches = device.launches
        return {"encode_launches": launches, "encode_s": seconds(encode, calls), "decode_s": seconds(decode, calls)}


class Inside:
    """What happens inside some calls: seconds, how many there were, and within `counting` operations of torch."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0
        self.operations: Operations | None = None

    def watch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            self.calls += 1
            with self.operations or nullcontext():
                start = time.perf_counter()
                try:
                    return function(*args)
                finally:
                    self.seconds += time.perf_counter() - start

        return watched


class Done:
    """A collective that has ended."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


@contextmanager
def no_network() -> Iterator[None]:
    """Within the block wires go nowhere, as if over NCCL; what hosts tell each other arrives."""
    real = Group.persistent_gather

    def persistent_gather(self: Group, output: Tensor, *how: Any, **more: Any) -> Any:
        return Collective(Done) if output.dtype == torch.uint8 else real(self, output, *how, **more)

    with (
        patch.object(Group, "blocks", staticmethod(lambda *_: False)),
        patch.object(Group, "persistent_gather", persistent_gather),
        patch.object(Group, "persistent_swap", lambda *_, **__: Collective(Done)),
    ):
        yield


@contextmanager
def one_rank() -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()


def hook_row(codec: Codec, exchange: str, steps: int, exclude: Sequence[str] = ()) -> dict[str, Any]:
    """The whole hook, by bucket: in steps of `BUCKETS` of them, what happens at a step's end included."""
    with no_gpu() as device, one_rank(), no_network():
        width = int(NUMEL**0.5)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(BUCKETS)))
        each = 4 * (width * width + width)
        ddp = DistributedDataParallel(model, bucket_cap_mb=each / 2**20)
        state = CompressState(ddp, codec, exchange=exchange, exclude=list(exclude) or None)
        ddp.register_comm_hook(state, compress_hook)
        buckets, ends = Inside(), Inside()
        state.submit = buckets.watch(state.submit)  # type: ignore[method-assign]
        state._deliver = ends.watch(state._deliver)  # type: ignore[method-assign]
        spent, inputs = list[float](), torch.randn(1, width)

        def step() -> None:
            buckets.seconds, ends.seconds, buckets.calls = 0.0, 0.0, 0
            ddp(inputs).sum().backward()
            spent.append((buckets.seconds + ends.seconds) / buckets.calls)

        for _ in range(WARM + steps):
            step()
        found = report.median(spent[WARM:])
        operations = buckets.operations = ends.operations = Operations()
        before = device.launches
        step()
        state.close()
    counts = {"kernels": device.launches - before, "operations": operations.count}
    return {"hook_s": found, **{name: count / buckets.calls for name, count in counts.items()}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calls", type=int, default=1000, help="timed calls of a codec, and steps (default: 1000)")
    parser.add_argument("--json", metavar="FILE", help="write everything to a JSON file")


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench host`."""
    expect_at_least(options, calls=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = report.document("host", {"calls": options.calls})
        result["codecs"] = [{"codec": repr(codec), **codec_row(codec, options.calls)} for codec in CODECS]
        result["buckets"] = [
            {"codec": repr(codec), "exchange": way, "exclude": list(out), **hook_row(codec, way, options.calls, out)}
            for codec, way, out in WAYS
        ]
    finally:
        torch.set_num_threads(threads)
    options.plot = None
    report.deliver(result, tables(result), options)
    return 0


def tables(result: Mapping[str, Any]) -> Iterator[report.Table]:
    note = f"No GPU: launches and messages are left out. {report.describe(result['environment'])}"
    rows = [
        [row["codec"], str(row["encode_launches"]), f"{row['encode_s'] * 1e6:.1f}", f"{row['decode_s'] * 1e6:.1f}"]
        for row in result["codecs"]
    ]
    columns = ["codec", "launches", "encode, µs", "decode, µs"]
    yield report.Table("The host's time for a codec's calls on CUDA tensors", columns, rows, note)
    columns = ["codec", "exchange", "excluded", "hook, µs a bucket", "kernels", "torch's"]
    rows = [
        [
            *(row["codec"], row["exchange"], ", ".join(row["exclude"])),
            *(f"{row['hook_s'] * 1e6:.1f}", f"{row['kernels']:g}", f"{row['operations']:g}"),
        ]
        for row in result["buckets"]
    ]
    yield report.Table(f"The host's time for a bucket, in steps of {BUCKETS}", columns, rows, note)
