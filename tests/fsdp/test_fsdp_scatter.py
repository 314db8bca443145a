"""FSDP2's reduce-scatter, compressed: as its own, or that later; the function for Megatron; embeddings beside FSDP."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsdp_drawn
import pytest
import torch
import torch.distributed as dist
from fsdp_drawn import Ranks, Sharded, loads_on, mesh_of, one_pass, play_drawn, says, sharded, verdict
from gradwire import (
    EDEN,
    QSGD,
    Cast,
    Codec,
    Identity,
    Lead,
    Momentum,
    OneBit,
    Residual,
    Ternary,
    TernGrad,
    TopK,
    compress_fsdp,
)
from gradwire.hooks.comm.group import Group
from gradwire.hooks.fsdp import compressed_reduce_scatter, reduce_rows
from hypothesis import strategies as st
from lacking import GIVES_ZEROS, needs_ignored_parameters, needs_premul_sum, needs_reduce_scatter
from often import by_time
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from training import told

EVENTS = ("step", "each", "local", "raise", "save")


def between_shards(size: int, codec: Any, **options: Any) -> Sharded:
    return Sharded((1, size), codec, scatter=True, **options)


@needs_reduce_scatter
@pytest.mark.parametrize("size", [1, 2, 4])
def test_identity_is_fsdps_own_reduce_scatter(ranks: Ranks, size: int) -> None:
    for exchange in ("auto", "blocks"):
        setup = between_shards(size, Identity(), exchange=exchange)
        assert not verdict(ranks, setup, ("step", "each", "local", "step"))


@needs_reduce_scatter
def test_what_nobody_uses_and_what_raises_is_owed(ranks: Ranks) -> None:
    events = ("step", "raise", "step", "save", "raise", "step", "step")
    assert not verdict(ranks, between_shards(4, OneBit()), events)
    divided = between_shards(2, Ternary(), exclude=True, divide="forced")
    assert not verdict(ranks, divided, (*events, "divide", "step", "save", "step"))


NARROW = Residual(dtype=torch.bfloat16), Residual(dtype=torch.int8)


@st.composite
def setups(draw: st.DrawFn) -> Sharded:
    masked: list[tuple[Codec, str]] = [
        (TopK(0.1, values=dtype), "mask") for dtype in (torch.float32, torch.bfloat16, torch.int8)
    ]
    masked.append((Identity(), "blocks"))
    others = [OneBit(), TopK(0.1), QSGD(rounding="nearest"), Ternary(), TernGrad(), EDEN()]
    codec, exchange = draw(st.sampled_from([*masked, *((codec, "auto") for codec in others)]))
    unbiased = not codec.default_feedback
    return between_shards(
        draw(st.sampled_from([2, 4])),
        codec,
        exchange=exchange,
        feedback="auto" if unbiased else draw(st.sampled_from([True, True, Residual(), Residual(0.9), *NARROW])),
        reduce=draw(st.sampled_from([None, None, torch.bfloat16, torch.float16])),
        divide=draw(st.sampled_from(["no", "no", "shards", "forced"])),
        exclude=draw(st.booleans()),
        zeros=GIVES_ZEROS and draw(st.booleans()),
        offload=draw(st.booleans()),
        entropy_coding=draw(st.booleans()),
        warmup=draw(st.sampled_from([0, 0, 2])),
    )


@needs_reduce_scatter
def test_drawn_configurations_and_events(ranks: Ranks) -> None:
    play_drawn(ranks, setups(), EVENTS, by_time(4, 120))


@needs_reduce_scatter
@needs_reduce_scatter
@on_ranks(2)
def test_factors_that_gloo_does_not_know(rank: int) -> None:
    """FSDP then asks for PREMUL_SUM, which Gloo has not."""
    native, ours = (small(mesh_of((1, 2))["shard"]) for _ in range(2))
    for module in (ours, ours[0]):
        module.set_gradient_divide_factor(3.0)
    state = compress_fsdp(ours, Identity())
    for model in (native, ours):
        model(torch.full((2, 8), rank + 1.0)).sum().backward()
    for p, q in zip(native.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad.to_local(), p.grad.to_local() * 2 / 3)
    state.close()


# -- checkpoints -------------------------------------------------------------------------------------------------------


@needs_reduce_scatter
def test_a_checkpoint_loads_on_other_numbers_of_ranks_and_between_replicas(ranks: Ranks, tmp_path: Path) -> None:
    """On a mesh of replicas, by the state between these."""
    loads_on((1, 4), [(1, 2), (2, 2)], ranks, tmp_path, scatter=True)


class Noted:
    """A message whose end is noted."""

    def __init__(self, work: Any, events: list[str]) -> None:
        self._work, self._events = work, events

    def wait(self) -> None:
        self._events.append("wait")
        self._work.wait()


@needs_reduce_scatter
@on_ranks(2)
def test_what_a_checkpoint_collects_is_all_under_way(rank: int) -> None:
    """What a checkpoint starts and waits for, in order, after the ranks have agreed to make one."""
    setup, events = Sharded((1, 2), OneBit(), scatter=True), list[str]()
    model = sharded(setup)
    state = fsdp_drawn.compressed(setup, model)
    one_pass(rank, model, 0, "step")
    plain = Group.all_to_all

    def noted(self: Group, *arguments: Any) -> Any:
        events.append("start")
        return Noted(plain(self, *arguments), events)

    with patch.object(Group, "all_to_all", noted):
        state.state_dict()
    state.close()
    number = len(events) // 2
    assert number > 3
    assert events == ["start"] * number + ["wait"] * number


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def small(mesh: Any, **how: Any) -> Any:
    torch.manual_seed(2)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    fully_shard(model[0], mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


@needs_reduce_scatter
@on_ranks(2)
def test_mistakes_are_named_on_every_rank(rank: int) -> None:
    flat = mesh_of((1, 2))["shard"]
    model = small(flat)

    def refused(words: str, model: Any = model, codec: Any = OneBit(), **how: Any) -> None:  # noqa: B008
        says(words, lambda: compress_fsdp(model, codec, **how))

    def fails(words: str) -> None:
        says(words, lambda: model(x).sum().backward())

    refused(r"back its own shard alone.*take Residual\(\)", codec=TopK(0.1), error_feedback=Momentum(clip=None))
    refused(r"error_feedback=Lead.*own shard alone.*take Residual\(\)", codec=TopK(0.1), error_feedback=Lead())
    refused("exchange='gather'.*leave both out", exchange="gather")
    refused("ranks disagree on seed", seed=rank)
    refused("Linear without an FSDP module", nn.Linear(2, 2))
    refused("of two dimensions", small(mesh_of((2, 1))))
    state = compress_fsdp(model, OneBit())
    refused(r"the reduce-scatter _ReduceScatter already.*close\(\)")
    refused(r"has a compressed reduce-scatter: close\(\)", mesh=mesh_of((1, 2))["replicate"])
    x = torch.ones(2, 8)
    model(x).sum().backward()
    saved = state.state_dict()
    says("the checkpoint has codec TopK", lambda: state.load_state_dict({**saved, "codec": "TopK()"}))
    fresh = small(flat)
    excluding = compress_fsdp(fresh, OneBit(), exclude=["*.weight"])
    says("has a residual of '0.weight', which is excluded now", lambda: excluding.load_state_dict(saved))
    other = compress_fsdp(small(flat), OneBit())  # several models, one after the other, and a closed one
    state.close()
    model(x).sum().backward()
    assert state.step == 1
    assert other.step == 0

    model = small(flat)
    state = compress_fsdp(model, OneBit())
    if rank:
        state.load_state_dict({**saved, "step": 0})
    fails("ranks disagree on loaded checkpoints: rank 0 has none, rank 1 has 1")
    model = small(flat)
    state = compress_fsdp(model, lambda step: TopK(0.5 - 0.25 * rank * step))
    model(x).sum().backward()
    fails(r"ranks disagree on codec: rank 0 has TopK\(density=0.5.* rank 1 has TopK\(density=0.25")

    model = small(flat)
    state = compress_fsdp(model, OneBit())
    if rank:  # as if this rank had another parameter without gradient
        part = state._parts[0].shards
        part.group.post_backward = lambda *unused, go=part.group.post_backward: _without_bias(part, go, unused)
    fails("the ranks reduced gradients of different parameters")


def _without_bias(part: Any, post_backward: Callable[..., None], unused: Any) -> None:
    for parameter in part.group.fsdp_params:
        if parameter._param_fqn.endswith("bias") and hasattr(parameter, "_unsharded_param"):
            parameter.unsharded_param.grad = None
    post_backward(*unused)


#: Renamed in torch 2.13.
plain: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def torchs_own(output: torch.Tensor, given: torch.Tensor, op: Any) -> None:
    """By a sum, which older Gloo takes a mean for."""
    plain(output, given.clone())
    if op == dist.ReduceOp.AVG:
        output.div_(dist.get_world_size())


# -- a function of torch's signature -----------------------------------------------------------------------------------


def beside_torchs_own(rank: int) -> None:
    own = compressed_reduce_scatter(Identity())
    op = dist.ReduceOp
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        torch.manual_seed(10 * number + rank)
        grads = torch.randn(4 * 37).to(dtype)
        want, got = (torch.empty(37, dtype=dtype) for _ in range(2))
        for kind in (op.SUM, op.AVG):
            torchs_own(want, grads, kind)
            assert own(got, grads, op=kind) is None
            tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        own(want, grads, op=op.PREMUL_SUM(0.5))
        torch.testing.assert_close(want, got * 2, rtol=2e-2, atol=2e-2)
    group = dist.new_group(range(4))
    several = [torch.randn(4 * 50) for _ in range(3)]
    wants, gots = ([torch.empty(50) for _ in several] for _ in range(2))
    for _ in range(2):  # several under way at once
        handles: list[Any] = [own(got, x, group=group, async_op=True) for got, x in zip(gots, several, strict=True)]
        for want, x in zip(wants, several, strict=True):
            plain(want, x.clone())
        for number in (2, 0, 1):
            handles[number].wait()
            handles[number].wait()
            torch.testing.assert_close(gots[number], wants[number], rtol=1e-5, atol=1e-5)
    for bad, words in (
        (lambda: own(torch.empty(3), torch.empty(13)), "4 times as many"),
        (lambda: own(torch.empty(3), torch.empty(12), op=op.MAX), "takes SUM, AVG"),
        (lambda: own(torch.empty(3), torch.empty(24)[::2]), "contiguous"),
    ):
        assert words in told(bad), words


@needs_premul_sum
def test_the_function_is_torchs_reduce_scatter(ranks: Ranks) -> None:
    ranks(4).run(beside_torchs_own)
    with pytest.raises(ValueError, match=r"OneBit.*take QSGD\(\) or EDEN\(\)"):
        compressed_reduce_scatter(OneBit())
    compressed_reduce_scatter(Cast(torch.bfloat16), error_feedback=False)


class Late:
    """A message whose first wait ends by an error, as at a timeout; Gloo calls it completed then."""

    waited = False

    def wait(self) -> None:
        first, self.waited = not self.waited, True
        if first:
            raise RuntimeError("timed out")


@on_ranks(2)
def test_a_second_wait_never_returns_what_is_not_there(rank: int) -> None:
    """What has failed fails again, and what was interrupted while it was decoded is decoded then."""
    own, grads, right = compressed_reduce_scatter(Identity()), torch.arange(8.0), []
    output = torch.zeros(4)
    failed: Any = own(output, grads, async_op=True)
    arriving, failed._work = failed._work, Late()
    right += ["timed out" in told(failed.wait) for _ in range(3)]
    arriving.wait()
    interrupted: Any = own(output, grads, async_op=True)
    exchange = interrupted._lane.exchange
    with patch.object(exchange, "decode", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        interrupted.wait()
    for _ in range(2):
        interrupted.wait()
        right.append(torch.equal(output, 2 * grads.chunk(2)[rank]))
    assert right == [True] * 5


def averaged(rank: int, codec: Any, times: int) -> float:
    """How far the average of many compressed means is from the mean, in units of its standard error."""
    own = compressed_reduce_scatter(codec)
    torch.manual_seed(rank)
    grads = torch.randn(4 * 300)
    want, got, total, squares = torch.empty(300), torch.empty(300), torch.zeros(300), torch.zeros(300)
    torchs_own(want, grads, dist.ReduceOp.AVG)
    for _ in range(times):
        own(got, grads, op=dist.ReduceOp.AVG)
        total += got - want
        squares += (got - want) ** 2
    errors = (squares / times).sqrt() / times**0.5
    return float((total / times / errors.clamp(min=1e-7)).square().mean())


@pytest.mark.parametrize("codec", [QSGD(), TernGrad(clip=math.inf)], ids=str)
def test_unbiased_codes_average_out(ranks: Ranks, codec: Any) -> None:
    for found in ranks(4).run(averaged, codec, 150):  # χ² of 300 elements, each over 1: 1 ± 0.08
        assert found < 1.5


# -- embeddings beside FSDP --------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(40, 6, sparse=sparse)
        self.bag = nn.EmbeddingBag(30, 6, sparse=sparse)
        self.unused = nn.Embedding(5, 6, sparse=sparse)
        self.last = nn.Linear(6, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.bag(words % 30)
        return self.last(found if len(words) == 1 else found + self.table(words).mean(1))


@needs_ignored_parameters
@on_ranks(4)
def test_sparse_embeddings_beside_fsdp(rank: int) -> None:
    mesh = mesh_of((2, 2))
    model: Any = Words(sparse=True)
    tables = {model.table.weight, model.bag.weight, model.unused.weight}
    fully_shard(model, mesh=mesh["shard"], ignored_params=tables)
    state = compress_fsdp(model, Identity(), mesh=mesh["replicate"])
    whole = Words(sparse=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        for accumulated in range(2):
            torch.manual_seed(100 * step + 10 * accumulated + rank)
            words = torch.randint(40, (1 if rank == 3 and step == 1 else 4, 5))  # one rank does not use the table
            for each in (model, whole):
                each(words).square().sum().backward()
        reduce_rows(model)
        for p in whole.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.div_(4)
            dist.all_reduce(p.grad)
        assert model.unused.weight.grad is None
        for name in ("table", "bag"):
            grad = getattr(model, name).weight.grad
            assert grad.is_sparse
            torch.testing.assert_close(grad.to_dense(), getattr(whole, name).weight.grad, rtol=1e-5, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in whole.parameters():
                assert p.grad is not None
                p.sub_(p.grad, alpha=0.5)
                p.grad = None
        torch.testing.assert_close(model.last.weight.full_tensor(), whole.last.weight, rtol=1e-4, atol=1e-5)
    state.close()
    model.table.weight.grad = torch.zeros(40, 6)
    assert "not one of rows" in told(lambda: reduce_rows(model))
