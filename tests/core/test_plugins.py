"""What others add from outside of the package serves like what is in it: the laws hold for `toys` too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import test_allreduce
import test_codec
import test_feedback
import torch
from gradwire import CompressState, Momentum
from gradwire.compress import CODECS, QSGD, Codec, OneBit, SparseCodec, TopK, backends, new_draw
from gradwire.compress.backends import Backend, Kernels, register_backend, use_backend
from gradwire.compress.codec import DTYPES
from gradwire.compress.feedback.base import RESIDUAL, Feedback
from gradwire.compress.feedback.residual import Residual
from gradwire.compress.feedback.store import FeedbackStore
from gradwire.compress.formats.entries import split_raw
from gradwire.hooks.exchanges import EXCHANGES, possible
from gradwire.plugin import BucketSpec, Calibration, Estimate, register_exchange
from largest_of_chunk import LargestOfChunk
from pages import plain_environment
from ranks import Pool
from star import Star
from strategies import encode, gradient, hostile_wires, parts_of, same
from toys import AboveMean, Shapes, Smoothed, Stretch, Velocity, mirror
from training import Ledger, convnet, told, train, wrap

CPU = torch.device("cpu")
SPARSE: tuple[SparseCodec, ...] = (AboveMean(), AboveMean(2.0, 0.02), LargestOfChunk(), Stretch())


@pytest.fixture
def register() -> Iterator[Callable[[str, Callable[[], Backend]], None]]:
    """`register_backend`, undone in the end."""
    before = dict(backends._loaders)
    yield register_backend
    backends._loaders.clear()
    backends._loaders.update(before)
    backends._backend.cache_clear()


def contract(codec: Codec) -> None:
    """What `test_codec` holds every codec of the package to."""
    test_codec.test_size_is_a_function_of_numel_alone_and_whole_records(codec)
    test_codec.test_decoding_adds_alpha_times_and_a_mean_is_the_sum_in_rank_order(codec)
    test_codec.test_nothing_is_lost(codec=codec)
    for numel in (1, 255, 1281):
        for dtype in DTYPES:
            x = gradient("normal", numel, 1, dtype)
            wires = [torch.full((codec.wire_bytes(numel),), fill, dtype=torch.uint8) for fill in (0, 255)]
            for wire, given in zip(wires, (x, x.float()), strict=True):
                codec.encode(given, wire, new_draw(0), codec.workspace(numel))
            assert same(*wires)


# A codec.


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("codec", SPARSE, ids=str)
def test_a_sparse_codec_from_outside_keeps_the_contract(codec: SparseCodec, backend: str) -> None:
    with use_backend(backend):
        contract(codec)
        for bad in (torch.nan, torch.inf):
            if not isinstance(codec, Stretch):
                test_codec.test_nonfinite_is_seen_and_the_residual_keeps_its_value(codec, bad)
        codec.kernels(CPU).prepare(codec, torch.bfloat16, CPU)
    test_codec.test_residuals_stay_bounded(codec)


@pytest.mark.parametrize("codec", SPARSE, ids=str)
def test_its_bytes_and_means_are_the_same_on_every_backend(codec: SparseCodec) -> None:
    numel, ranks = 2500, 3
    x, wires, found = gradient("not finite", numel, 1), hostile_wires(codec, numel, ranks, 3), []
    for backend in ("reference", "cpu"):
        with use_backend(backend):
            workspace, out = codec.workspace(numel), torch.empty(numel)
            codec.decode_mean(parts_of(codec, wires, numel), out, workspace)
            found.append((encode(codec, x), encode(codec.raw_entries, x), out, workspace.status))
    assert all(same(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("codec", SPARSE, ids=str)
def test_it_selects_for_exchanges_what_it_sends(codec: SparseCodec) -> None:
    x = gradient("normal", 2500, 1)
    indices, values = split_raw(encode(codec.raw_entries, x), codec.k(2500))
    chosen = codec.select(x, new_draw(0))
    assert indices.tolist() == chosen.tolist()
    assert same(values, x[chosen])
    decoded = test_codec.decode(codec, encode(codec, x), 2500)
    assert set(decoded.nonzero().view(-1).tolist()) <= set(indices.tolist())
    assert torch.allclose(decoded[chosen], values, rtol=2**-8)


def test_what_is_not_finite_is_seen_in_drawn_values_too() -> None:
    x, codec = gradient("normal", 2500, 1), Stretch()
    x[7] = torch.nan
    decoded, residual = test_codec.feedback(codec, x, torch.zeros_like(x))
    assert decoded.isnan().any()
    assert residual.isfinite().all()
    indices, values = split_raw(encode(codec.raw_entries, x), codec.k(2500))
    assert bool(values[indices == 7].isnan())


def test_ranks_share_what_is_drawn() -> None:
    x, codec = gradient("normal", 2500, 1), Stretch()
    drawn = [codec.select(x, new_draw(0, 3, rank << 33 | 5)).tolist() for rank in range(3)]
    assert drawn[0] == drawn[1] == drawn[2]
    assert drawn[0] != codec.select(x, new_draw(0, 3, 6)).tolist()
    assert drawn[0] != codec.select(x, new_draw(0, 4, 5)).tolist()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("exchange", ["gather", "union", "split", "dense"])
@pytest.mark.parametrize("codec", SPARSE, ids=str)
def test_a_sparse_codec_from_outside_goes_through_every_exchange_of_entries(
    ranks: Callable[[int], Pool], codec: SparseCodec, exchange: str, world_size: int
) -> None:
    assert exchange in possible(codec)
    test_allreduce.test_nothing_is_lost_and_replicas_agree(ranks, world_size, exchange, codec)


class NeitherSelects(AboveMean):
    select = SparseCodec.select


@dataclass(frozen=True)
class SelectsWrongly(AboveMean):
    chosen: tuple[int, ...] = ()

    def select(self, x: torch.Tensor, draw: torch.Tensor | None) -> torch.Tensor:
        return torch.tensor(self.chosen)


@pytest.mark.parametrize("chosen", [(3, 2), (2, 2), (-1, 3), (3, 40)], ids=str)
def test_what_a_codec_from_outside_selects_is_looked_at(chosen: tuple[int, ...]) -> None:
    """Otherwise it would be lost, or read and written outside of the gradient."""
    codec = SelectsWrongly(most=0.1, chosen=chosen)
    with pytest.raises(ValueError, match=r"SelectsWrongly.* selected .* of 40 elements: expected ascending indices"):
        encode(codec, torch.randn(40))
    with pytest.raises(ValueError, match=r"selected torch.int64 \[2\] of 10 elements: .* no more than its k\(10\) = 1"):
        encode(codec, torch.randn(10))


def test_a_mask_is_not_indices() -> None:
    with pytest.raises(ValueError, match=r"selected torch.bool \[2\] of 40 elements: expected indices"):
        encode(SelectsWrongly(chosen=(True, False)), torch.randn(40))


def test_a_sparse_codec_that_selects_nothing_says_so() -> None:
    with pytest.raises(NotImplementedError, match="NeitherSelects has neither `select` nor kernels"):
        encode(NeitherSelects(), torch.ones(100))


def test_the_example_of_a_codec_runs() -> None:
    script = Path(__file__).parents[2] / "examples/plugins/largest_of_chunk.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(launcher, env=plain_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "85.2 times fewer bytes than float32" in done.stdout
    assert "bucket 0          gather of LargestOfChunk(chunk=64): as asked" in done.stdout


# A backend.


def test_a_backend_from_outside_serves_every_codec(register: Callable[[str, Callable[[], Backend]], None]) -> None:
    register("mirror", mirror)
    with use_backend("mirror"):
        for codec in (*CODECS, AboveMean()):
            contract(codec)
        calls = {codec.name: getattr(codec.kernels(CPU), "calls", None) for codec in CODECS}
    without = {codec.name for codec in CODECS if isinstance(codec, SparseCodec)}  # which select in torch
    assert {name for name, count in calls.items() if count is None} == without
    assert min(count for count in calls.values() if count is not None) > 0


def test_a_backend_serves_the_devices_of_its_name(register: Callable[[str, Callable[[], Backend]], None]) -> None:
    numel, codec, meta = 5000, CODECS[0], torch.device("meta")
    with pytest.raises(ValueError, match=r"no kernels for device 'meta': move .* one of cpu, cuda, or .*register"):
        codec.workspace(numel, meta)
    shapes = Shapes()
    register("meta", lambda: Backend({codec.name: shapes}, mirror().entries))
    x = torch.empty(numel, dtype=torch.bfloat16, device=meta)
    wire, workspace = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8, device=meta), codec.workspace(numel, meta)
    codec.encode(x, wire, None, workspace)
    codec.decode_mean((wire.expand(3, -1),), x, workspace)
    size = codec.wire_bytes(numel)
    assert shapes.seen == [("encode", numel, size), ("decode_mean", numel, 3 * size)]
    with pytest.raises(ValueError, match="backend 'meta' has no kernels for the codec 'qsgd', only for onebit"):
        CODECS[1].workspace(numel, meta)
    with pytest.raises(ValueError, match="cannot add up entries"):
        AboveMean().workspace(numel, meta)


def test_a_backend_is_loaded_once_and_its_name_is_its_own(
    register: Callable[[str, Callable[[], Backend]], None],
) -> None:
    loads: list[dict[str, Kernels]] = []

    def load() -> Backend:
        loads.append({})
        return mirror()

    register("late", load)
    assert loads == []
    for _ in range(2):
        with use_backend("late"):
            encode(CODECS[0], torch.ones(10))
    assert len(loads) == 1
    with pytest.raises(ValueError, match="there is a backend 'cpu' already"):
        register("cpu", mirror)


# A feedback strategy.


@pytest.mark.parametrize("codec", [OneBit(), TopK(0.1), AboveMean()], ids=str)
@pytest.mark.parametrize("strategy", [Velocity(), Smoothed()], ids=str)
def test_a_strategy_from_outside_keeps_its_law_whatever_happens(strategy: Feedback, codec: Codec) -> None:
    strategy.check(codec)
    test_feedback.hold(strategy, codec, unapplied=isinstance(strategy, Velocity))


@dataclass(frozen=True)
class KeepsNoResidual(Smoothed):
    state_names: ClassVar[tuple[str, ...]] = ("smooth",)


def test_a_strategy_keeps_a_residual() -> None:
    with pytest.raises(ValueError, match=r"KeepsNoResidual.* keeps smooth: its `state_names` must have 'residual' too"):
        CompressState(TopK(0.1), error_feedback=KeepsNoResidual())


def test_a_strategy_says_which_codecs_it_cannot_serve() -> None:
    with pytest.raises(ValueError, match="does not contract"):
        Velocity().check(QSGD())


def test_what_is_handed_out_may_be_the_strategys() -> None:
    layout = test_feedback.layout_of(["a", "b"])
    memory = FeedbackStore(Smoothed())
    for mean in (4.0, 8.0):
        out = torch.full((17,), mean)
        memory.of(layout).deliver(out)
    assert out.tolist() == [5.0] * 17
    out[3] = torch.nan
    memory.of(layout).deliver(out)
    assert bool(out[3].isnan())
    assert memory.by_name("smooth")["a"].view(-1)[3] == 5.0


def vectors_of(state: CompressState) -> dict[str, dict[str, torch.Tensor]]:
    """Of each parameter, the mean over the ranks of all that is kept. A collective. Owners' residuals become the ranks'
    own, which a strategy decays."""
    state._feedback.fold()
    saved = state.consolidated_state_dict()
    found = {RESIDUAL: saved["residuals"], **saved.get("vectors", {})}
    return {
        name: {vector: of_rank["mean"][name].double() for vector, of_rank in found.items()}
        for name in saved["residuals"]["mean"]
    }


def trained(rank: int, strategy: Feedback, codec: Codec, exchange: str) -> tuple[list[float], list[str], int, str]:
    """How far the strategy's law is off in each step, digests of the gradients, vectors in checkpoints, a complaint."""
    model = convnet()
    ddp, state = wrap(model, codec, exchange=exchange, error_feedback=strategy, warmup_steps=2)
    offs, digests, before = [], [], vectors_of(state)
    for step in range(6):
        ledger = Ledger(model)
        digests += train(rank, ddp, range(step, step + 1), ledger)
        after, off, size = vectors_of(state), 0.0, 0.0
        for name, there in before.items():
            law = strategy.invariant(ledger.wanted[name], there, ledger.received[name], after[name])
            off += float(law.square().sum())
            size += sum(float(x.square().sum()) for x in (ledger.wanted[name], *there.values()))
        offs.append((off / size) ** 0.5)
        before = after
        if step == 4:
            saved = state.state_dict()
            state._feedback.load({})
            state.load_state_dict(saved)
    plain = CompressState(ddp, codec, exchange=exchange)
    complaint = told(lambda: plain.load_state_dict(saved))
    lost = state._feedback.dropped_l1
    plain.close()
    state.close()
    return offs, digests, len(saved.get("vectors", {})) + (lost > 0), complaint


@pytest.mark.parametrize(
    ("codec", "exchange"), [(OneBit(), "gather"), (OneBit(), "two_pass"), (TopK(0.1), "union"), (TopK(0.1), "split")]
)
@pytest.mark.parametrize("strategy", [Residual(decay=0.9), Momentum(), Velocity(), Smoothed()], ids=str)
def test_a_model_is_trained_with_a_strategy(
    ranks: Callable[[int], Pool], strategy: Feedback, codec: Codec, exchange: str
) -> None:
    offs, digests, kept, complaints = zip(*ranks(2).run(trained, strategy, codec, exchange), strict=True)
    assert max(map(max, offs)) < 1e-5
    assert digests[0] == digests[1], "replicas differ"
    assert set(kept) == {max(1, len(strategy.state_names) - 1)}, "further vectors, or something lost"
    refused = "" if isinstance(strategy, Residual) and not isinstance(strategy, Smoothed) else "keeps residual"
    assert all((refused in complaint) and (complaint != "nothing") == bool(refused) for complaint in complaints)


# An exchange.


class Free(Star):
    """It says that it takes no time at all, so that "auto" takes it."""

    @classmethod
    def estimate(cls, network: Calibration, what: BucketSpec) -> Estimate:
        return Estimate(cls.name, 4.0 * what.numel, 0.0, 0.0, 0.0, 0.0)


def starred(rank: int, exchange: Any) -> Any:
    """With an excluded parameter beside, and a channel of its own for each bucket."""
    EXCHANGES.setdefault("star", Free)
    try:
        model = convnet()
        ledger = Ledger(model)
        ddp, state = wrap(model, OneBit(), exchange=exchange, exclude=["*bias"])
        digests = train(rank, ddp, range(6), ledger)
        found = digests, ledger.error(state), set(state.statistics().decisions.values())
        state.close()
    finally:
        del EXCHANGES["star"]
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("exchange", ["star", "auto"])
def test_an_exchange_from_outside_serves_buckets(ranks: Callable[[int], Pool], exchange: str, world_size: int) -> None:
    results = ranks(world_size).run(starred, exchange)
    for digests, error, decisions in results:
        assert digests == results[0][0]
        assert error < 1e-5
        assert all(decision.startswith("star of OneBit") for decision in decisions)


def test_an_exchange_is_registered_once() -> None:
    try:
        assert register_exchange(Star) is register_exchange(Star)
        with pytest.raises(ValueError, match="'star' already"):
            register_exchange(type("Other", (Star,), {}))
        assert "star" in possible(OneBit())
        assert "star" not in possible(TopK())
    finally:
        del EXCHANGES["star"]
