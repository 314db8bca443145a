"""Who decides how a bucket travels: nodes, the cost model, and what happens in the wild when many are under way."""

from __future__ import annotations

import random
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gradwire import QSGD, Cast, Codec, CompressState, Identity, OneBit, TernGrad, TopK, compress_hook
from gradwire.hooks.auto.planner import Choice, Planner
from gradwire.hooks.comm.group import Group
from gradwire.hooks.comm.topology import Topology, node_size
from gradwire.hooks.core import reducer
from gradwire.hooks.exchanges import BucketSpec, Gather, TwoPass, dense
from gradwire.hooks.network import cost, probe
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import LATENCY, WORK, Ledger, convnet, digest, pretend, train, two_large_layers, wrap


def on_nodes(rank: int, codec: Codec, topology: Any, exchange: str) -> Any:
    """Eight steps, a checkpoint's folding in the middle included."""
    if topology == "mesh":
        topology = dist.init_device_mesh("cpu", (2, 2))
    model = convnet()
    ledger = Ledger(model)
    ddp, state = wrap(model, codec, exchange=exchange, topology=topology)
    digests = train(rank, ddp, range(4), ledger)
    state.state_dict()
    digests += train(rank, ddp, range(4, 8), ledger)
    error, done = ledger.error(state), state.statistics()
    state.close()
    return digests, error, list(done.decisions.values())


def test_nothing_is_lost_between_nodes_that_a_mesh_names(ranks: Ranks) -> None:
    """`tests/core/test_drawn.py` has other codecs, on nodes of two."""
    results = ranks(4).run(on_nodes, TopK(0.05), "mesh", "hierarchical")
    digests, error, decisions = results[0]
    assert all(result[0] == digests for result in results), "replicas differ"
    assert error < 1e-5
    assert all(text.startswith("hierarchical gather") for text in decisions)


@pytest.mark.parametrize("codec", [OneBit(), pytest.param(TopK(0.05), marks=pytest.mark.slow)], ids=str)
def test_four_nodes_between_which_two_passes_go(ranks: Ranks, codec: Codec) -> None:
    results = ranks(8).run(on_nodes, codec, 2, "hierarchical")
    assert all(result[0] == results[0][0] for result in results)
    assert results[0][1] < 1e-5
    inner = "two_pass" if codec.block_size else "gather"
    assert all(text.startswith(f"hierarchical {inner}") for text in results[0][2])


def test_many_buckets_share_the_wait_and_few_do_not() -> None:
    """Of sixteen ranks gather waits once and moves much, and two_pass twice and little."""
    line = cost.Line(0.025, 8e-9)
    network = cost.Calibration(line, line, line, WORK, cost.Latency(*[0.025] * 3))
    what = BucketSpec(OneBit(), cost.CodecSpeed(0.0, 0.0), 250_000, 16)
    candidates = [exchange.estimate(network, what) for exchange in (Gather, TwoPass)]
    assert [estimate.stages for estimate in candidates] == [1, 2]
    assert cost.decide(candidates).name == "gather"
    decision = cost.decide(candidates, buckets=40)
    assert decision.name == "two_pass"
    assert str(decision).startswith("of 40 buckets that wait together: two_pass")


def decide(rank: int, codec: Codec, beta: float, options: dict[str, Any], inside: float | None = None) -> Any:
    real = probe.calibration, probe.codec_speed
    probe.calibration = pretend(beta, inside)
    probe.codec_speed = lambda codec, *_: cost.CodecSpeed(*[1e-10 if isinstance(codec, Cast) else 1e-9] * 2)
    model, ddp = two_large_layers()
    ledger = Ledger(model)
    try:
        state = CompressState(ddp, codec, **options)
        ddp.register_comm_hook(state, compress_hook)
        digests = train(rank, ddp, range(4), ledger)
    finally:
        probe.calibration, probe.codec_speed = real
    error, done = ledger.error(state), state.statistics()
    state.close()
    return digests, error, done.decisions, done.bytes_sent / done.dense_bytes


SLOW, FAST = 1e-7, 1e-12


@pytest.mark.parametrize(
    ("codec", "beta", "options", "expected"),
    [
        (OneBit(), SLOW, {}, "two_pass of OneBit"),
        (OneBit(), FAST, {"fallback": torch.float32}, "dense of OneBit"),
        (OneBit(), FAST, {}, "two_pass of Cast(dtype=torch.bfloat16)"),
        (TernGrad(), FAST, {}, "dense of TernGrad"),
        (OneBit(), FAST, {"fallback": torch.bfloat16}, "two_pass of Cast(dtype=torch.bfloat16)"),
        (OneBit(), FAST, {"fallback": None}, "of OneBit"),
        (QSGD(), SLOW, {"error_feedback": True}, "two_pass of QSGD"),
        (TopK(0.001), SLOW, {}, "of TopK"),
        (TopK(0.5), SLOW, {"exchange": "union"}, "union of TopK"),
        (Identity(), SLOW, {}, "dense of Identity"),
    ],
    ids=str,
)
def test_auto_decides_by_cost_and_says_why(
    ranks: Ranks, codec: Codec, beta: float, options: dict[str, Any], expected: str
) -> None:
    results = ranks(4).run(decide, codec, beta, options)
    digests, error, decisions, share = results[0]
    assert all(result[0] == digests for result in results)
    assert all(result[2] == decisions for result in results), "ranks decide alike"
    assert error < 1e-5
    large = max(decisions.values(), key=len)
    assert any(expected in text for text in decisions.values()), decisions
    if "exchange" not in options:
        assert " ms (" in large
        assert "MB" in large
    if expected.startswith("dense"):
        assert share == pytest.approx(1)


def test_auto_takes_nodes_where_the_inside_is_fast(ranks: Ranks) -> None:
    results = ranks(4).run(decide, OneBit(), SLOW, {"topology": 2}, FAST)
    assert all(result[0] == results[0][0] for result in results)
    assert results[0][1] < 1e-5
    assert any(text.startswith("hierarchical") for text in results[0][2].values()), results[0][2]


def test_a_small_bucket_is_not_worth_it_where_a_large_one_is() -> None:
    """One network: latency decides for the small one, bytes for the large."""
    planner = Planner(Topology(_Ranks()), torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    gather, exchange, reduce = cost.Line(2e-3, 0.0), cost.Line(4e-3, 8e-9), cost.Line(1e-3, 8e-9)
    planner._flat = cost.Calibration(gather, exchange, reduce, WORK, LATENCY)
    choice = Choice(OneBit(), "auto", True)
    planner._speeds[planner._key(choice)] = cost.CodecSpeed(1e-9, 1e-9)
    assert planner.plan(choice, 1000, 0)[0].exchange == "dense"
    assert planner.plan(choice, 10_000_000, 0)[0].exchange in ("gather", "two_pass")


class _Ranks:
    rank, size = 0, 4


def test_ranks_on_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert node_size("auto", 8) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert node_size("auto", 8) == 4
    assert node_size("auto", 4) == 1  # one node
    assert node_size("auto", 6) == 1  # uneven nodes
    assert node_size(2, 8) == 2
    assert node_size(8, 8) == 1
    assert node_size(None, 8) == 1
    for bad in (3, 0, -2):
        with pytest.raises(ValueError, match="ranks a node"):
            node_size(bad, 8)
    with pytest.raises(TypeError, match="DeviceMesh"):
        node_size(2.0, 8)


def hurried(rank: int, exchange: str, steps: int) -> Any:
    """Twenty buckets, every rank late at other times before every collective."""
    delays = random.Random(rank)
    names = ("all_gather", "all_to_all", "all_to_all_v", "all_reduce")
    real = {name: getattr(Group, name) for name in names}

    def late(name: str) -> Any:
        def run(self: Group, *args: Any) -> Any:
            if delays.random() < 0.02:
                time.sleep(delays.random() * 0.003)
            return real[name](self, *args)

        return run

    for name in names:
        setattr(Group, name, late(name))
    try:
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(20)))
        ledger = Ledger(model)
        ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
        state = CompressState(ddp, TopK(0.1), exchange=exchange)
        ddp.register_comm_hook(state, compress_hook)
        digests = train(rank, ddp, range(10), ledger)
        buckets = len(state._buckets)
        data = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
        for _ in range(steps):
            model.zero_grad()
            ddp(data).square().mean().backward()
        digests += train(rank, ddp, range(10, 12))
        done = state.statistics().steps
        state.close()
    finally:
        for name in names:
            setattr(Group, name, real[name])
    return digests, buckets, done


@pytest.mark.parametrize("exchange", [pytest.param("gather", marks=pytest.mark.slow), "split"])
def test_twenty_buckets_under_way_and_everybody_late(ranks: Ranks, exchange: str) -> None:
    steps = 188 if exchange == "gather" else 8
    results = ranks(4).run(hurried, exchange, steps, within=300)
    assert all(result[0] == results[0][0] for result in results), "replicas differ"
    assert [result[1:] for result in results] == [(20, steps + 12)] * 4


def mostly_zero_for_a_while(rank: int, beta: float, inline: bool = False, factor: float = 1.0) -> tuple[list[str], str]:
    """The exchange of an embedding's bucket at every fourth step, eight of which use few rows and the others all, and
    its weights. `inline`: exchanges are launched, as over NCCL; `factor`: of the first eight gradients."""
    blocking = Group.blocks
    with (
        patch.object(Group, "blocks", staticmethod(lambda *how: not inline and blocking(*how))),
        patch.object(reducer, "DENSE_CHECK_INTERVAL", 4),
        patch.object(probe, "calibration", pretend(beta)),
        patch.object(probe, "codec_speed", lambda *_: cost.CodecSpeed(1e-9, 1e-9)),
    ):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.EmbeddingBag(5000, 16))
        state = CompressState(ddp, Identity())
        ddp.register_comm_hook(state, compress_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        found = []
        for step in range(17):
            rows = torch.randint(5000, (8,)) if step < 8 else torch.arange(5000)
            (ddp(rows.view(1, -1)).sum() * (factor if step < 8 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 4 == 0:
                found.append(state.statistics().decisions[0].partition(" ")[0])
    return found, digest(ddp.parameters())


def test_lossless_gradients_that_are_mostly_zero_go_by_blocks(ranks: Ranks) -> None:
    """As long as they are, on a network for which that is faster."""
    slow, other = ranks(2).run(mostly_zero_for_a_while, 1e-7)
    assert slow == other
    assert slow[0] == ["dense", "blocks", "blocks", "dense", "dense"]
    nothing, _ = ranks(2).run(mostly_zero_for_a_while, 1e-7, False, 0.0)
    assert nothing[0] == slow[0]
    fast, _ = ranks(2).run(mostly_zero_for_a_while, 1e-12)
    assert fast[0] == ["dense"] * 5


def counted_over_nccl(rank: int) -> int:
    """How often the blocks of a mean are counted where the host would have to wait for them."""
    with patch.object(dense, "elements_of_blocks", wraps=dense.elements_of_blocks) as count:
        found, _ = mostly_zero_for_a_while(rank, 1e-7, inline=True)
    assert found == ["dense"] * 5
    return count.call_count


def test_over_nccl_no_blocks_are_counted(ranks: Ranks) -> None:
    assert ranks(2).run(counted_over_nccl) == [0, 0]
