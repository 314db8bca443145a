"""The exchanges by themselves, between real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradwire.compress import CODECS, EDEN, QSGD, Cast, Codec, Identity, OneBit, TernGrad, TopK, new_draw
from gradwire.compress.feedback.residual import NOTHING, server_state
from gradwire.hooks.auto.planner import check_exchange, default_exchange
from gradwire.hooks.comm.group import Group
from gradwire.hooks.comm.ports import drive
from gradwire.hooks.exchanges import EXCHANGES, ExchangeArgs, possible
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import Ranks
from training import digest

_groups: dict[int, Group] = {}


def group_of(world_size: int) -> Group:
    """One group a process, made at its first use, which every rank reaches together."""
    if world_size not in _groups:
        _groups[world_size] = Group.of_ranks(list(range(world_size)))
    return _groups[world_size]


def reduce_once(rank: int, world_size: int, exchange: str, codec: Codec, numel: int, extra: int, seed: int) -> Any:
    """One exchange of random gradients; how far the law is off, of what went in, and digests of what came out."""
    group = group_of(world_size)
    generator = torch.Generator().manual_seed(seed + rank)
    grad, extras = torch.randn(numel, generator=generator), torch.randn(extra, generator=generator)
    residual = torch.randn(numel, generator=generator) if codec.default_feedback and exchange != "dense" else None
    before = grad.double() + (residual.double() if residual is not None else 0)
    runner = EXCHANGES[exchange](codec, numel, extra, torch.device("cpu"), group)
    owned: list[torch.Tensor] = []
    if residual is not None:
        for start, length, weight in runner.owned_slices:
            owned.append(torch.randn(length, generator=generator))
            before[start : start + length] += weight * owned[-1].double()
    total, size = torch.cat([before, extras.double()]), before.abs()
    group.all_reduce(total).wait()
    group.all_reduce(size).wait()
    out, extra_out = torch.full((numel,), torch.nan), extras.clone()
    draws = new_draw(seed, 3, rank), new_draw(seed, 3, 1 << 32 | rank)
    feedback = NOTHING if residual is None else server_state(residual)
    drive(
        runner.reduce(ExchangeArgs(grad, out, extra_out, feedback, [server_state(tensor) for tensor in owned], *draws))
    )
    after = torch.zeros(numel, dtype=torch.float64) if residual is None else residual.double()
    for (start, length, weight), tensor in zip(runner.owned_slices, owned, strict=bool(owned)):
        after[start : start + length] += weight * tensor.double()
    group.all_reduce(after).wait()
    wanted = total / world_size
    got = torch.cat([out.double() + after / world_size, extra_out.double()])
    off = float((wanted - got)[:numel].norm() / (size / world_size).norm()) if numel else 0.0
    extra_off = float((wanted - got)[numel:].abs().max()) if extra else 0.0
    return off, extra_off, digest([out, extra_out]), runner.bytes_sent, runner.bytes_received


CASES = [
    *((exchange, codec) for codec in CODECS for exchange in possible(codec)),
    *(
        (exchange, TopK(0.1, values=dtype))
        for exchange in ("gather", "mask", "split")
        for dtype in (torch.bfloat16, torch.int8)
    ),
    ("two_pass", QSGD(bits=8, rounding="nearest")),
    ("two_pass", TernGrad(rounding="nearest")),
    ("two_pass", EDEN("closest", levels=2)),  # whose owners' blocks are others
    ("gather", TopK(density=1.0)),
    ("gather", OneBit(block=256, scale="symmetric")),
]


@pytest.mark.parametrize("world_size", [1, 3])  # of 2 and 4 by chance, below
@pytest.mark.parametrize(("exchange", "codec"), CASES, ids=str)
def test_nothing_is_lost_and_replicas_agree(ranks: Ranks, world_size: int, exchange: str, codec: Codec) -> None:
    for numel, extra in ((1, 0), (12345, 17), (0, 5)):
        results = ranks(world_size).run(reduce_once, world_size, exchange, codec, numel, extra, numel)
        offs, extra_offs, digests, payloads, _ = zip(*results, strict=True)
        assert len(set(digests)) == 1, "replicas differ"
        assert len(set(payloads)) == 1 or exchange == "split"  # where what belongs to an owner varies
        assert max(extra_offs) <= 1e-6
        if codec.default_feedback or codec.lossless or exchange == "dense":
            assert max(offs) < 1e-6


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    case=st.sampled_from(CASES),
    numel=st.integers(1, 6000),
    extra=st.integers(0, 9),
    world_size=st.sampled_from([2, 2, 3, 4, 4]),
    seed=st.integers(0, 99),
)
def test_any_size(ranks: Ranks, case: tuple[str, Codec], numel: int, extra: int, world_size: int, seed: int) -> None:
    exchange, codec = case
    results = ranks(world_size).run(reduce_once, world_size, exchange, codec, numel, extra, seed)
    assert len({result[2] for result in results}) == 1
    if codec.default_feedback or codec.lossless or exchange == "dense":
        assert max(result[0] for result in results) < 1e-6


def mean_of_many(rank: int, world_size: int, exchange: str, codec: Codec, draws: int) -> float:
    """Relative distance of the average over many draws from the true mean: unbiased codes bring it to zero."""
    group = group_of(world_size)
    grad = torch.randn(2560, generator=torch.Generator().manual_seed(rank))
    wanted = grad.clone()
    group.all_reduce(wanted).wait()
    wanted /= world_size
    runner = EXCHANGES[exchange](codec, grad.numel(), 0, torch.device("cpu"), group.channel("test"))
    total, out, none = torch.zeros_like(grad), torch.zeros_like(grad), torch.zeros(0)
    for step in range(draws):
        own, owner = new_draw(1, step, rank), new_draw(1, step, 1 << 32 | rank)
        drive(runner.reduce(ExchangeArgs(grad, out, none, NOTHING, (), own, owner)))
        for port in runner.ports:
            port.post_receives()
        total += out
    return float((total / draws - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("exchange", ["gather", "two_pass"])
@pytest.mark.parametrize("codec", [QSGD(), TernGrad(clip=float("inf")), EDEN(levels=2)], ids=str)
def test_stochastic_codes_stay_unbiased_through_an_exchange(ranks: Ranks, exchange: str, codec: Codec) -> None:
    few, many = (max(ranks(2).run(mean_of_many, 2, exchange, codec, draws)) for draws in (4, 100))
    assert many < few / 3.5  # noise falls with the root of the draws, by 5; a bias would stay


def test_bytes_are_those_of_the_table(ranks: Ranks) -> None:
    numel, world_size = 1 << 16, 4
    wire = OneBit().wire_bytes(numel)
    expected = {"gather": 3 * wire, "two_pass": 2 * wire * 3 // 4, "dense": 2 * numel * 4 * 3 // 4}
    for exchange, transfer in expected.items():
        results = ranks(world_size).run(reduce_once, world_size, exchange, OneBit(), numel, 0, 0)
        assert {result[4] for result in results} == {transfer}


def test_without_a_model_the_fewest_bytes_win() -> None:
    assert default_exchange(OneBit(), 2) == "gather"
    assert default_exchange(OneBit(), 3) == "two_pass"
    assert default_exchange(TopK(), 8) == "gather"
    assert default_exchange(Identity(), 8) == "dense"
    assert default_exchange(Cast(), 8) == "two_pass"


def test_impossible_exchanges_are_named() -> None:
    with pytest.raises(ValueError, match="exchange='ring'"):
        check_exchange("ring", OneBit())
    with pytest.raises(ValueError, match="use one of 'gather', 'mask', 'union'"):
        check_exchange("two_pass", TopK())
    with pytest.raises(ValueError, match="needs a sparse codec"):
        check_exchange("split", OneBit())


def nonfinite(rank: int, world_size: int, exchange: str, codec: Codec) -> list[Any]:
    return [spoilt(rank, world_size, exchange, codec, value) for value in (torch.nan, torch.inf, -torch.inf)]


def spoilt(rank: int, world_size: int, exchange: str, codec: Codec, value: float) -> Any:
    """Rank 1 has one bad element, which every rank must see; nobody's residual may."""
    group = group_of(world_size)
    grad, residual = torch.ones(5000), torch.full((5000,), 0.25)
    if rank == 1:
        grad[3333] = value
    runner = EXCHANGES[exchange](codec, grad.numel(), 0, torch.device("cpu"), group)
    owned = [torch.zeros(length) for _, length, _ in runner.owned_slices]
    out = torch.zeros(5000)
    kept, *others = (server_state(tensor) for tensor in (residual, *owned))
    drive(runner.reduce(ExchangeArgs(grad, out, torch.zeros(0), kept, others, new_draw(0), new_draw(0))))
    finite = all(bool(kept.isfinite().all()) for kept in (residual, *owned))
    bad, good = out[3333], out[0]
    if exchange == "mask":  # all that is shared is spoilt, and 3333 need not be
        bad, good = out[0], residual[0]
    return (
        bool(bad.isfinite()),
        bool(good.isfinite()),
        finite,
        float(residual[3333]),
        sum(int(row[1]) for row in runner.counts()),
    )


@pytest.mark.parametrize(
    ("exchange", "codec"),
    [
        (exchange, codec)
        for codec in (OneBit(), QSGD(rounding="nearest"), TopK(), TopK(values=torch.int8), Cast(torch.bfloat16))
        for exchange in possible(codec)
        if exchange != "dense"
    ],
    ids=str,
)
def test_nonfinite_gradients_are_seen_everywhere(ranks: Ranks, codec: Codec, exchange: str) -> None:
    for rank, found in enumerate(ranks(3).run(nonfinite, 3, exchange, codec)):
        for bad, good, residual_finite, kept, counted in found:
            assert not bad
            assert good
            assert residual_finite
            assert counted > 0
            if rank == 1:
                assert kept == 0.25, "the residual under a bad element must stay what it was"
