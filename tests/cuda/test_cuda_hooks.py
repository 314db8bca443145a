"""The hook on a GPU: ranks that share one over Gloo, and one rank over NCCL. Needs a GPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import QSGD, ChunkedTopK, Codec, CompressState, OneBit, PowerSGD, TernGrad, TopK, compress_hook
from gradwire.compress import new_draw
from gradwire.hooks.auto import planner
from gradwire.hooks.exchanges import possible, serving
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.cuda
CODECS = (OneBit(), QSGD(), TernGrad(), TopK(0.05), ChunkedTopK(chunk=1024), PowerSGD(rank=2))
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
#: Named, as "auto" would send these small gradients dense, and no kernel would run.
every_way = pytest.mark.parametrize(
    ("codec", "exchange"),
    [(codec, exchange) for codec in CODECS for exchange in possible(codec) if exchange != "dense"],
    ids=lambda given: given if isinstance(given, str) else given.name,
)


class Fixed(nn.Module):
    """The gradient of its parameters is what it is fed, on any device to the last bit."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in (3001, 257, (40, 125), 12)])

    def forward(self, fed: list[Tensor]) -> Tensor:
        return torch.stack([(w * f).sum() for w, f in zip(self.weights, fed, strict=True)]).sum()


def gradients_of(
    rank: int,
    codec: Codec,
    exchange: Any,
    device: str,
    backend: str | None = None,
    busy: bool = False,
    steps: int = 6,
    inline: bool = False,
) -> list[Tensor]:
    """Every parameter's gradient after the hook, over some steps. `inline`: by the exchanges for which the
    host does not wait, as over NCCL, whatever carries them."""
    if inline:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planner, "serving", lambda name, _: serving(name, True))
            return gradients_of(rank, codec, exchange, device, backend, busy, steps)
    group = None if backend is None else dist.new_group(backend=backend)
    ddp = DistributedDataParallel(Fixed().to(device), bucket_cap_mb=0.01, process_group=group)
    state = CompressState(ddp, codec, exchange=exchange, fallback=None)
    ddp.register_comm_hook(state, compress_hook)
    generator, seen = torch.Generator().manual_seed(rank), []
    for _ in range(steps):
        fed = [torch.randn(w.shape, generator=generator).to(device) for w in ddp.module.weights]
        if busy:  # the gradients are not there yet when the hook is called, nor when the next kernel is launched
            torch.cuda._sleep(20_000_000)
            used_again()
        ddp(fed).backward()
        seen += [w.grad.clone() for w in ddp.module.weights]
        ddp.zero_grad()
        if busy:
            used_again()
    result = [gradient.cpu() for gradient in seen]
    statistics = state.statistics()
    assert statistics.steps == steps
    assert statistics.skipped_entries == 0
    assert statistics.decisions
    assert all(decision.startswith(f"{exchange} of {codec}") for decision in statistics.decisions.values())
    state.close()
    return result


def used_again() -> None:
    """Take memory as large as buckets and wires, fill it with NaN, and give it back: who still reads there sees it."""
    for numel in (64, 400, 3000, 5000, 8000, 60_000):
        torch.full((numel,), torch.nan, device="cuda")


@every_way
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_ranks_that_share_a_gpu_get_what_ranks_on_cpus_get(
    ranks: Ranks, codec: Codec, exchange: str, busy: bool
) -> None:
    expected = ranks(2).run(gradients_of, codec, exchange, "cpu")
    for theirs in ranks(2).run(gradients_of, codec, exchange, "cuda", None, busy):
        assert all(torch.equal(a, b) for a, b in zip(expected[0], theirs, strict=True))


@every_codec
def test_over_nccl_streams_agree(ranks: Ranks, codec: Codec) -> None:
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    (expected,) = ranks(1).run(gradients_of, codec, "gather", "cpu")
    (theirs,) = ranks(1).run(gradients_of, codec, "gather", "cuda", "nccl", True)
    assert all(torch.equal(a, b) for a, b in zip(expected, theirs, strict=True))


@every_codec
def test_a_captured_graph_draws_again(codec: Codec) -> None:
    """A step that a graph has baked in would give every replay the same noise."""
    numel = 50_000
    x = torch.randn(numel, device="cuda")
    wire, draw = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8, device="cuda"), new_draw(1, device="cuda")
    workspace = codec.workspace(numel, "cuda")
    codec.encode(x, wire, draw, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codec.encode(x, wire, draw, workspace)
        draw[1] += 1
    wires = []
    draw[1] = 10
    for step in range(3):
        graph.replay()
        wires.append(wire.clone())
        expected = torch.zeros_like(wire)
        codec.encode(x, expected, new_draw(1, 10 + step, device="cuda"), codec.workspace(numel, "cuda"))
        assert torch.equal(wire, expected)
    assert torch.equal(wires[0], wires[1]) == (not codec.stochastic)


@every_codec
def test_a_call_neither_allocates_nor_waits(codec: Codec) -> None:
    numel = 1_000_003
    x, residual = torch.randn(numel, device="cuda"), torch.zeros(numel, device="cuda")
    wire = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8, device="cuda")
    rows, out = [part.repeat(4, 1) for part in wire.split(codec.part_bytes(numel))], torch.empty(numel, device="cuda")
    workspace, sent = codec.workspace(numel, "cuda"), codec.with_feedback()
    draw = new_draw(0, device="cuda") if sent.stochastic else None

    def call() -> None:
        sent.encode_feedback(x, residual, wire, draw, workspace)
        codec.decode_mean(rows, out, workspace)

    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Ss]ynchronization debug mode")  # a prototype, says torch
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
