"""A pipeline whose stages compress computes what one process computes that encodes and decodes at the same places."""

from __future__ import annotations

import inspect
import itertools
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import QSGD, Cast, ChunkedTopK, Codec, Identity, OneBit, PowerSGD, Ternary, compress_stage
from gradwire.benchmarks.learning.stages import Boundary, Crossing, StageCodes
from gradwire.compress import new_draw
from gradwire.hooks.pipelining.tensor_coder import TensorCoder, coders, hadamard
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH = 33  # no multiple of a block's length or of a rotation's
CODECS = [
    QSGD(bits=8, block=256),
    QSGD(bits=4, rounding="nearest"),
    Cast(torch.bfloat16),
    Ternary(),
    OneBit(block=256),
    ChunkedTopK(k=64, chunk=256),
]
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
if torch.__version__ < "2.11":  # its other schedules never end over Gloo, with or without compression
    SCHEDULES = {"gpipe": ScheduleGPipe}


@dataclass(frozen=True)
class Pipeline:
    """A way to train `stages` of a linear layer each."""

    schedule: str = "gpipe"
    codec: Codec = QSGD(bits=8)  # noqa: RUF009
    backward: Codec = QSGD(bits=8)  # noqa: RUF009
    rotate: bool = True
    error_feedback: bool = False
    dtype: torch.dtype = torch.float32
    chunks: int = 4
    rows: int = 5
    steps: int = 2

    def stages(self, world: int) -> int:
        return 2 * world if self.schedule == "interleaved" else world

    @property
    def codes(self) -> StageCodes:
        return StageCodes(0, self.codec, self.backward, self.rotate, self.error_feedback)

    def modules(self, world: int) -> list[nn.Module]:
        torch.manual_seed(3)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(self.stages(world))]
        return [layer.to(self.dtype) for layer in layers]

    def data(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(2, self.chunks * self.rows, WIDTH, generator=generator).to(self.dtype)
        return x, y

    def compress(self, stages: list[Any]) -> Any:
        how: dict[str, Any] = {"rotate": self.rotate, "error_feedback": self.error_feedback}
        return compress_stage(stages, self.codec, self.backward, smallest=0, **how)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


class Rank:
    """One rank's stages and schedule."""

    def __init__(self, how: Pipeline) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        modules = how.modules(world)
        self.how, self.last = how, len(modules) - 1
        self.mine = dict(itertools.islice(enumerate(modules), rank, None, world))
        self.stages = [PipelineStage(m, i, len(modules), torch.device("cpu")) for i, m in self.mine.items()]
        kind = SCHEDULES[how.schedule]
        unscaled = {"scale_grads": False} if "scale_grads" in inspect.signature(kind).parameters else {}
        several = self.stages if how.schedule == "interleaved" else self.stages[0]
        self.schedule = kind(several, how.chunks, loss_fn=loss_of, **unscaled)

    def step(self, x: Tensor, y: Tensor) -> dict[int, list[Tensor]]:
        """The gradients of a step, by stage."""
        for module in self.mine.values():
            module.zero_grad()
        self.schedule.step(*([x] if 0 in self.mine else []), **({"target": y} if self.last in self.mine else {}))
        return {i: [p.grad.clone() for p in m.parameters() if p.grad is not None] for i, m in self.mine.items()}


def composed(how: Pipeline, world: int) -> list[dict[int, list[Tensor]]]:
    """The gradients of all stages, computed by one process."""
    modules = how.modules(world)
    boundaries = [
        Boundary(how.codes.coders(stage, 0)[0], how.codes.coders(stage + 1, 0)[1]) for stage in range(len(modules) - 1)
    ]
    found = []
    for step in range(how.steps):
        for module in modules:
            module.zero_grad()
        for x, y in zip(*(one.chunk(how.chunks) for one in how.data(step)), strict=True):
            for module, boundary in zip(modules, [*boundaries, None], strict=True):
                x = module(x)
                if boundary is not None:
                    x = Crossing.apply(x, boundary)
            loss_of(x, y).backward()
        found.append({i: [p.grad.clone() for p in m.parameters() if p.grad is not None] for i, m in enumerate(modules)})
    return found


def play(rank: int, how: Pipeline) -> None:
    """A rank's part: its gradients are those of `composed`, bit for bit, and nothing is left of it after `close`."""
    mine = Rank(how)
    before = [set(vars(stage)) for stage in mine.stages]
    state = how.compress(mine.stages)
    for step, expected in enumerate(composed(how, dist.get_world_size())):
        for stage, gradients in mine.step(*how.data(step)).items():
            assert len(gradients) == len(expected[stage]) == 2
            for got, wanted in zip(gradients, expected[stage], strict=True):
                assert torch.equal(got, wanted), (stage, step, (got - wanted).abs().max())
    counts = state.statistics()
    ends = sum(stage.is_last for stage in mine.stages), sum(stage.is_first for stage in mine.stages)
    for one, end in zip(counts.values(), ends, strict=True):
        assert one.messages == how.steps * how.chunks * (len(mine.stages) - end)
        assert one.bytes_sent <= one.dense_bytes
        assert f"\nsent              {one.bytes_sent:,} bytes" in str(one)
        assert str(one) in str(state)
    state.close()
    assert [set(vars(stage)) for stage in mine.stages] == before


PIPELINES = st.builds(
    Pipeline,
    schedule=st.sampled_from(sorted(SCHEDULES)),
    codec=st.sampled_from(CODECS),
    backward=st.sampled_from(CODECS),
    rotate=st.booleans(),
    error_feedback=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    chunks=st.just(6),  # a multiple of any number of stages
    rows=st.integers(8, 40),
)


@pytest.mark.parametrize("world", [2, 3])
@settings(max_examples=12)
@given(how=PIPELINES)
def test_a_pipeline_computes_what_one_process_does(ranks: Any, world: int, how: Pipeline) -> None:
    ranks(world).run(play, how)


@given(
    codec=st.sampled_from([QSGD(bits=4), OneBit(block=256), Ternary(), ChunkedTopK(k=64, chunk=256)]),
    rotate=st.booleans(),
    numel=st.integers(1, 1500),
    seed=st.integers(0, 99),
)
def test_nothing_of_the_gradients_is_lost(codec: Codec, rotate: bool, numel: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    coder = TensorCoder(codec.with_feedback(), rotate, new_draw(seed), feedback=True)
    wire, total, arrived = (
        torch.empty(coder.wire_bytes(numel), dtype=torch.uint8),
        torch.zeros(numel),
        torch.zeros(numel),
    )
    for _ in range(4):
        gradient, out = torch.randn(numel, generator=generator), torch.empty(numel)
        coder.encode(gradient, wire, 0)
        coder.decode(wire, out)
        total += gradient
        arrived += out
    left = coder.residuals["0"]
    if rotate:
        left = coder.turned(left, torch.empty_like(left), torch.empty_like(left))
    assert torch.allclose(arrived + left[:numel], total, atol=1e-4)


def test_stages_and_directions_draw_apart_and_gradients_alone_are_fed_back() -> None:
    x, wires, fed = torch.randn(1000, generator=torch.Generator().manual_seed(0)), set(), []
    for stage, way in itertools.product(range(3), range(2)):
        coder = coders(stage, QSGD(bits=4), None, True, False, 0)[way]
        wire = torch.empty(coder.wire_bytes(1000), dtype=torch.uint8)
        coder.encode(x, wire, 0)
        wires.add(bytes(wire.tolist()))
        coder = coders(stage, QSGD(bits=4), None, True, True, 0)[way]
        coder.encode(x, wire, 0)
        fed.append((coder.codec, len(coder.residuals)))
    assert len(wires) == 6
    assert fed == 3 * [(QSGD(bits=4), 0), (QSGD(bits=4).with_feedback(), 1)]


@pytest.mark.parametrize("rotate", [False, True])
def test_codes_of_gradients_are_unbiased(rotate: bool) -> None:
    x, draws = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)), 4000
    coder = TensorCoder(QSGD(bits=3), rotate, new_draw(1))
    wire, mean, out = torch.empty(coder.wire_bytes(300), dtype=torch.uint8), torch.zeros_like(x), torch.empty_like(x)
    for _ in range(draws):
        coder.encode(x, wire, 0)
        coder.decode(wire, out)
        mean += out / draws
    step = 4.0 / 3  # of a level, at most
    assert (mean - x).abs().max() < 5 * step / 2 / draws**0.5


def test_a_rotation_spreads_outliers() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    x[::256] = 100.0
    errors = {}
    for rotate in (False, True):
        coder = TensorCoder(QSGD(bits=4, rounding="nearest"), rotate, new_draw(0))
        wire, out = torch.empty(coder.wire_bytes(4096), dtype=torch.uint8), torch.empty(4096)
        coder.encode(x, wire, 0)
        coder.decode(wire, out)
        errors[rotate] = float((out - x)[x != 100.0].square().mean())
    assert errors[True] < 0.5 * errors[False]


def test_a_non_finite_number_stays_visible() -> None:
    coder = TensorCoder(QSGD(), True, new_draw(0))
    x, out = torch.ones(4, 512), torch.empty(4, 512)
    x[2, 7] = torch.nan
    wire = torch.empty(coder.wire_bytes(2048), dtype=torch.uint8)
    coder.encode(x, wire, 0)
    coder.decode(wire, out)
    assert not out[2].isfinite().any()
    assert out[[0, 1, 3]].isfinite().all()


class Allocations(TorchDispatchMode):
    """Counts the tensors that are made anew."""

    made = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += any(word in str(function) for word in ("empty", "zeros", "ones", "clone", "full", "_to_copy"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("numel", [1000, 1024])
def test_no_memory_is_taken_after_the_first_tensor(numel: int) -> None:
    coder, x, out = TensorCoder(QSGD(), True, new_draw(0), feedback=True), torch.ones(numel), torch.empty(numel)
    wire, found = torch.empty(coder.wire_bytes(numel), dtype=torch.uint8), []
    for _ in range(2):
        with Allocations() as allocations:
            coder.encode(x, wire, 0)
            coder.decode(wire, out)
        found.append(allocations.made)
    assert found[0] > 0 == found[1]


def test_codes_do_not_depend_on_autocast_or_inference_mode() -> None:
    x, wires = torch.randn(300, generator=torch.Generator().manual_seed(0)), []
    for mode in (nullcontext(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode()):
        hadamard.cache_clear()
        coder = TensorCoder(QSGD(rounding="nearest"), True, new_draw(0), feedback=True)
        with mode:
            wire, out = torch.empty(coder.wire_bytes(300), dtype=torch.uint8), torch.empty(300)
            coder.encode(x, wire, 0)
            coder.decode(wire, out)
        wires.append(wire.clone())
        coder.encode(x, torch.empty(coder.wire_bytes(300), dtype=torch.uint8), 0)
    assert all(torch.equal(wire, wires[0]) for wire in wires)


@on_ranks(2)
def test_what_is_lossless_or_small_travels_as_it_is(rank: int) -> None:
    for how in ({"codec": Identity()}, {"codec": QSGD(), "smallest": 10**6}):
        mine = Rank(Pipeline())
        plain = mine.step(*Pipeline().data(0))
        state = compress_stage(mine.stages[0], **how)
        again = mine.step(*Pipeline().data(0))
        assert all(torch.equal(a, b) for i in plain for a, b in zip(plain[i], again[i], strict=True))
        sent = state.statistics()["activations" if rank == 0 else "gradients"]
        assert sent.bytes_sent == sent.dense_bytes > 0
        state.close()


@on_ranks(2)
def test_a_state_goes_on_where_it_was(rank: int) -> None:
    how = Pipeline(codec=QSGD(bits=4), backward=QSGD(bits=4), error_feedback=True)
    mine = Rank(how)
    state = how.compress(mine.stages)
    mine.step(*how.data(0))
    kept = state.state_dict()
    expected = mine.step(*how.data(1))
    state.close()
    state = how.compress(mine.stages)
    state.load_state_dict(kept)
    again = mine.step(*how.data(1))
    assert all(torch.equal(a, b) for i in expected for a, b in zip(expected[i], again[i], strict=True))
    with pytest.raises(KeyError, match=f"no state of stage {rank}: it has 7"):
        state.load_state_dict({"7": {}})
    state.close()


class Scaled:
    """A pipeline with error feedback, whose loss is scaled."""

    def __init__(self, schedule: str, codec: Codec = QSGD(bits=4, rounding="nearest"), **how: Any) -> None:  # noqa: B008
        self.pipeline = Pipeline(schedule, backward=codec)
        self.mine, self.scale = Rank(self.pipeline), 1.0
        self.mine.schedule._loss_fn = lambda output, target: loss_of(output, target) * self.scale
        if "grad_scaler" in how:
            how["grad_scaler"] = how["grad_scaler"](self)
        self.compression = compress_stage(
            self.mine.stages, QSGD(bits=8, rounding="nearest"), codec, smallest=0, error_feedback=True, **how
        )

    def step(self, step: int, factor: float = 1.0) -> list[Tensor]:
        """The gradients, in units of the loss."""
        x, y = self.pipeline.data(step)
        found = [g / self.scale for grads in self.mine.step(x * factor, y).values() for g in grads]
        return found

    def residuals(self) -> list[Tensor]:
        state = self.compression.state_dict()
        return [t for key in sorted(state) for _, t in sorted(state[key]["gradients"]["residuals"].items())]


def same(these: list[Tensor], those: list[Tensor]) -> None:
    assert len(these) == len(those)
    assert all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


@on_ranks(2)
def test_residuals_follow_the_loss_scale(rank: int) -> None:
    for schedule in SCHEDULES:
        plain = Scaled(schedule)
        by_hand = Scaled(schedule, grad_scaler=lambda run: lambda: run.scale)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_factor=4.0, growth_interval=1)
        scaled = Scaled(schedule, grad_scaler=lambda _, scaler=scaler: scaler)
        optimizer = torch.optim.SGD([p for m in scaled.mine.mine.values() for p in m.parameters()], lr=0.0)
        scaler.scale(torch.ones(()))  # a stage but the last scales no loss
        for step, factor in enumerate((1.0, 1.0, math.inf, 1.0, 1e30, 1.0)):
            by_hand.scale, scaled.scale = (1.0, 2.0**16, math.inf, 2.0**90, 1.0, 2.0**-9)[step], scaler.get_scale()
            found = scaled.step(step, factor)
            finite = all(bool(g.isfinite().all()) for g in found)
            assert finite == math.isfinite(factor) or factor == 1e30
            for p in optimizer.param_groups[0]["params"]:
                p.grad = torch.full_like(p, math.nan) if factor > 1.0 else p.grad  # every stage must hear of it
            scaler.step(optimizer)
            scaler.update()
            if factor == 1.0:
                expected = plain.step(step)
                same(found, expected)
                same(by_hand.step(step), expected)
            else:
                by_hand.scale = math.inf
                by_hand.step(step)
            same(scaled.residuals(), plain.residuals())  # also where the scaler has skipped the step
        kept = scaled.compression.state_dict()
        expected = scaled.step(6)
        scaled.compression.load_state_dict(kept)
        same(scaled.step(6), expected)


@on_ranks(2)
def test_residuals_of_an_unknown_loss_scale_are_dropped(rank: int) -> None:
    for schedule, codec in zip(itertools.cycle(SCHEDULES), CODECS[1::2], strict=False):
        plain, run = Scaled(schedule, codec), Scaled(schedule, codec)
        for step, scale in enumerate((1.0, 1.0, 65536.0, 1.0, 1e30, 1.0, math.nan, 1.0)):
            expected, run.scale = plain.step(step), scale
            found = run.step(step)
            if step % 2:
                for a, b in zip(found, expected, strict=True):
                    assert (a - b).abs().max() <= 2 * b.abs().max()
            assert all(bool(t.isfinite().all()) for t in run.residuals())
        one, other = (each.compression.statistics()["gradients"] for each in (plain, run))
        assert one.residuals_dropped == 0
        assert (other.residuals_dropped > 0) == (other.bytes_sent < other.dense_bytes)


@on_ranks(2)
def test_mistakes_are_named_on_every_rank(rank: int) -> None:
    stage = Rank(Pipeline()).stages[0]
    with pytest.raises(
        ValueError, match=r"disagree on codec: rank 0 has QSGD\(bits=4.*Call compress_stage with the same"
    ):
        compress_stage(stage, QSGD(bits=4 if rank == 0 else 8))
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"codec": "int8"}, "codec='int8': expected a codec"),
        ({"codec": PowerSGD(rank=2)}, "goes through the exchange 'factors'"),
        ({"codec": QSGD(), "backward": 4}, "backward=4: expected a codec"),
        ({"codec": QSGD(), "rotate": 1}, "rotate=1: expected True or False"),
        ({"codec": QSGD(), "grad_scaler": 2.0}, "grad_scaler=2.0: expected the torch.amp.GradScaler"),
        ({"codec": QSGD(), "smallest": -1}, "smallest=-1: expected a number of elements"),
    ]
    for arguments, message in mistakes:
        given = arguments if rank == 0 else {"codec": QSGD()}
        with pytest.raises((TypeError, ValueError), match=message.replace("(", r"\(")):
            compress_stage(stage, **given)
    state = compress_stage(stage, QSGD())
    with pytest.raises(ValueError, match="compressed already"):
        compress_stage(stage, QSGD())
    state.close()


@on_ranks(2)
def test_a_micro_batch_of_another_shape_is_refused(rank: int) -> None:
    mine = Rank(Pipeline())
    compress_stage(mine.stages[0], QSGD(), smallest=0)
    mine.step(*Pipeline().data(0))
    if rank == 0:
        x, _ = Pipeline(rows=3).data(0)
        with pytest.raises((ValueError, RuntimeError), match=r"shape|Shape"):
            mine.step(x, x)


def test_without_a_process_group_there_is_a_sentence() -> None:
    with pytest.raises(TypeError, match=r"expected a stage of torch\.distributed.pipelining, got Linear"):
        compress_stage(nn.Linear(2, 2), QSGD())
