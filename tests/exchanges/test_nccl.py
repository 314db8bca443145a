"""The reducer over NCCL, on GPUs that are not there (`nccl_on_cpu`): no step waits for the device, whatever is
exchanged; and in whatever order streams run, the results are those of messages between CPUs, bit for bit.

Faults of each kind that this is to find are seeded, and found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradwire.compress import (
    CODECS,
    QSGD,
    Codec,
    Identity,
    Magnitudes,
    Momentum,
    OneBit,
    PowerSGD,
    Residual,
    SparseCodec,
    TopK,
    Tracking,
)  # fmt: skip
from gradwire.compress.feedback.base import RESIDUAL, Feedback
from gradwire.hooks.auto import planner as planner_module
from gradwire.hooks.auto.controller import Controller
from gradwire.hooks.comm.entry_exchange import Entries, EntryExchanger, fill
from gradwire.hooks.comm.group import Group
from gradwire.hooks.comm.pipeline import Pipeline
from gradwire.hooks.comm.topology import Topology
from gradwire.hooks.core.reducer import Reducer
from gradwire.hooks.exchanges import EXCHANGES, possible, serving
from gradwire.hooks.exchanges.non_zero_blocks import NonZeroBlocks
from gradwire.hooks.network import cost, probe
from gradwire.hooks.sparse.all_reduce import Call, pool_of, reduce
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nccl_on_cpu import DEVICE, GpuTensor, HostWaits, Schedule, World, on_gpu, read
from nccl_on_cpu import nccl as nccl_module
from nccl_on_cpu.machine import Machine
from nccl_on_cpu.training import CPU, Outcome, Recipe, differences, gradient, outcomes, same_bits
from often import by_time
from torch import Tensor

HIERARCHICAL = "hierarchical"
STRATEGIES: tuple[Feedback | None, ...] = (
    None, Residual(decay=0.9), Residual(dtype=torch.bfloat16), Residual(dtype=torch.int8), Tracking(clip=20.0),
    Momentum(clip=20.0), Magnitudes(),
)  # fmt: skip
#: Of a rank: what backward runs on, what is encoded on, what is decoded on, and NCCL's.
STREAMS = tuple(f"{rank} {name}" for rank in range(2) for name in ("default", "side 1", "side 2", "nccl"))
SCHEDULES = [Schedule(stream) for stream in STREAMS]
#: Quick, with everything in it: two stages, owners' residuals, a scaler that grows and skips.
SMALL = Recipe(OneBit(), "two_pass", scaler=True, exclude=frozenset({"a.bias"}), overflows=frozenset({2}), steps=5)
ABANDONING, DENSE = replace(SMALL, abandons=True), replace(SMALL, exchange="dense")
#: Once, a gradient into which a strategy's state had been drained, as one that keeps nothing in this step has it, was
#: given back and used for something else too early.
DRAINED = Recipe(TopK(0.05), "mask", Tracking(clip=20.0), feedback=False, steps=2)


def ways(codec: Codec) -> list[str]:
    """The exchanges that carry a codec's gradients without the host's help."""
    return [*(name for name in possible(codec) if not serving(name, inline=True).syncs_host), HIERARCHICAL]


def takes(codec: Codec, strategy: Feedback | None) -> bool:
    try:
        if strategy is not None:
            strategy.codec_for(codec)
    except ValueError:
        return False
    return True


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    codec = draw(st.sampled_from([*CODECS, TopK(0.05, values=torch.int8)]))
    exchange = draw(st.sampled_from(ways(codec)))
    return Recipe(
        codec,
        exchange,
        draw(st.sampled_from([s for s in STRATEGIES if takes(codec, s)])),
        feedback=draw(st.sampled_from([True, True, False])),
        scaler=draw(st.booleans()),
        exclude=draw(st.sampled_from([frozenset(), frozenset({"a.bias"}), frozenset({"b.weight"})])),
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        steps=draw(st.integers(2, 4)),
        nodes=2 if exchange == HIERARCHICAL else 0,
        overflows=frozenset(draw(st.lists(st.integers(0, 2), max_size=2))),
        abandons=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )


schedules = st.one_of(st.sampled_from(SCHEDULES), st.builds(Schedule, st.none(), st.integers(0, 10**6)))


def on_gpus(recipe: Recipe, schedule: Schedule, keeping: nccl_module.Keeping = "hold", **options: Any) -> list[Outcome]:
    return outcomes(recipe, World(4 if recipe.nodes else 2, schedule, keeping), **options)


def on_cpus(recipe: Recipe) -> list[Outcome]:
    return outcomes(recipe, World(4 if recipe.nodes else 2), CPU)


def law(recipe: Recipe, schedule: Schedule, keeping: nccl_module.Keeping) -> None:
    """No step waits for the device, and nothing depends on when streams run."""
    assert not differences(on_cpus(recipe), on_gpus(recipe, schedule, keeping))


@settings(max_examples=by_time(6, 150), deadline=None)
@example(DRAINED, Schedule(None, 0), "record")
@given(recipes(), schedules, st.sampled_from(["hold", "record"]))
def test_no_step_waits_and_no_order_of_streams_changes_anything(
    recipe: Recipe, schedule: Schedule, keeping: nccl_module.Keeping
) -> None:
    law(recipe, schedule, keeping)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_exchange_of_every_codec_runs_without_the_host(codec: Codec) -> None:
    for exchange in ways(codec):
        for scaler in (False, True):
            recipe = Recipe(codec, exchange, scaler=scaler, nodes=2 if exchange == HIERARCHICAL else 0, steps=3)
            law(recipe, Schedule(), "hold")


@pytest.fixture(scope="module")
def expected() -> dict[Recipe, list[Outcome]]:
    return {recipe: on_cpus(recipe) for recipe in (SMALL, ABANDONING, DENSE)}


@pytest.mark.parametrize("recipe", [ABANDONING, DENSE], ids=["two_pass", "dense"])
def test_any_stream_may_be_late(expected: dict[Recipe, list[Outcome]], recipe: Recipe) -> None:
    assert expected[recipe][0].statistics.nonfinite_steps == 1
    for schedule in SCHEDULES:
        assert not differences(expected[recipe], on_gpus(recipe, schedule)), schedule


def let_the_host_read(reducer: Reducer, rank: int) -> None:
    """As where collectives block."""
    reducer.session.planner.inline = False


def test_exchanges_say_whether_the_host_has_to_read() -> None:
    for name in EXCHANGES:
        for inline in (False, True):
            exchange = serving(name, inline)
            kinds = Identity if exchange is NonZeroBlocks else SparseCodec | OneBit | PowerSGD
            codec = next(c for c in CODECS if exchange.carries(c) and isinstance(c, kinds))
            try:
                alter = None if inline else let_the_host_read
                on_gpus(Recipe(codec, name, steps=1), Schedule(), alter=alter)
                cause = None
            except RuntimeError as error:
                cause = error.__cause__
            assert isinstance(cause, HostWaits) if exchange.syncs_host else cause is None, (name, inline)
            # Of blocks only the host can know how many there are.
            assert not (inline and exchange.syncs_host) or exchange is NonZeroBlocks


@pytest.mark.parametrize(
    ("codec", "exchange", "exclude", "most"),  # QSGD's draws are a launch for each bucket
    [
        (OneBit(), "gather", "", 17),
        (OneBit(), "two_pass", "", 23),
        (QSGD(), "gather", "", 20),
        (OneBit(), "gather", "a.bias", 21),
        (TopK(0.05), "union", "", 44),
        (TopK(0.05), "split", "", 53),
    ],
    ids=str,
)
def test_a_step_launches_nothing_but_what_it_needs(
    codec: Codec, exchange: str, exclude: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels, torch's operations and collectives of a rank's three buckets, and what the training here does itself."""
    launched, launch = list[int](), Machine.launch

    def counting(machine: Machine, run: Callable[[], object]) -> None:
        launched[-1] += machine.host.rank == 0
        launch(machine, run)

    monkeypatch.setattr(Machine, "launch", counting)
    for steps in (2, 3):
        launched.append(0)
        on_gpus(Recipe(codec, exchange, exclude=frozenset({exclude}), steps=steps), Schedule())
    assert launched[1] - launched[0] <= most


@pytest.mark.parametrize("exchange", [name for name, exchange in EXCHANGES.items() if exchange.syncs_host])
def test_where_the_host_reads_no_order_of_streams_changes_anything_either(exchange: str) -> None:
    """In the same memory, since NCCL holds what it sends only until it is waited for, on whatever stream."""
    codec: Codec = Identity() if exchange == "blocks" else TopK(0.1, values=torch.int8)
    recipe = Recipe(codec, exchange, exclude=frozenset({"a.bias"}), steps=2, reads=True)

    def let_hosts_exchange(reducer: Reducer, rank: int) -> None:
        """As where Gloo carries the group of a model on a GPU."""
        session: Any = reducer.session
        session.planner.inline, session.planner.topology = False, Topology(session.host_group)

    alter = let_hosts_exchange if exchange == "split" else let_the_host_read  # split's entries go from host to host
    reference = outcomes(recipe, World(2), CPU, alter=let_the_host_read)
    for stream in ("0 side 1", "1 nccl"):
        found = on_gpus(recipe, Schedule(stream), alter=alter)
        assert not differences(reference, found), stream


def test_auto_takes_what_the_host_reads_nothing_of() -> None:
    """Where bytes are dear, and there are ranks enough."""
    recipe, line = Recipe(TopK(0.25), "auto", steps=2), cost.Line(0.0, 1.0)

    def alter(reducer: Reducer, rank: int) -> None:
        planner = reducer.session.planner
        planner._flat = cost.Calibration(line, line, line, cost.Work(*[0.0] * 6), cost.Latency(*[0.0] * 3), 1)
        planner._speeds[recipe.codec.speed_key, True] = cost.CodecSpeed(0.0, 0.0)

    reference = outcomes(recipe, World(3), CPU, alter=alter)
    assert not differences(reference, outcomes(recipe, World(3, Schedule("0 side 2")), alter=alter))
    for decision in reference[0].statistics.decisions.values():
        assert decision.startswith("mask of TopK")
        assert all(f"{name} " in decision for name in ("gather", "split", "union", "dense"))


@pytest.mark.parametrize("codec", [OneBit(), TopK(0.01)], ids=str)
def test_a_launch_is_no_rate(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches here last as long whatever they have to do, so that elements cost nothing."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    monkeypatch.setattr(probe, "GPU_ELEMENTS", (1 << 8, 1 << 12))

    def measured(world: World, rank: int) -> cost.CodecSpeed:
        return probe.codec_speed(codec, True, 1 << 20, Group(world.communicator((0, 1)).member(rank), (0, 1)), DEVICE)

    a, b = World(2, Schedule()).run(measured)
    assert a == b
    assert a.encode == 0.0 < a.launch[0]
    assert a.at(1000).encode == a.launch[0] / 1000


@pytest.mark.parametrize(
    "schedule", [pytest.param(Schedule("1 side 2"), marks=pytest.mark.slow), Schedule(None, 3)], ids=str
)
def test_a_trial_of_auto_waits_for_no_gpu_and_loses_nothing(schedule: Schedule) -> None:
    """Ranks whose streams are behind, one more than the other, decide alike; means and residuals are the gradients."""
    recipe, line = Recipe(OneBit(), "auto", steps=40), cost.Line(0.0, 1e-9)

    def alter(reducer: Reducer, rank: int) -> None:
        planner = reducer.session.planner
        planner._flat = cost.Calibration(line, line, line, cost.Work(*[0.0] * 6), cost.Latency(*[0.0] * 3), 1)
        planner._speeds[recipe.codec.speed_key, True] = cost.CodecSpeed(0.0, 0.0)
        controllers.append(reducer.controller)

    controllers = list[Controller]()
    a, b = on_gpus(recipe, schedule, alter=alter)
    assert all(controller.timed.keys() == {"compressed", "float32"} for controller in controllers)
    assert a.statistics.decisions == b.statistics.decisions
    for x, y in zip(a.applied, b.applied, strict=True):
        assert same_bits(x, y)
    name, numel = "b.weight", a.applied[1].numel()
    total = sum(gradient(recipe, rank, step, 1, numel).double() for rank in range(2) for step in range(recipe.steps))
    kept = sum(each.kept[RESIDUAL][name].flatten().double() for each in (a, b))
    torch.testing.assert_close(2 * a.applied[1].double() + kept, total, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["mask", "split", "union"])
def test_between_nodes_too(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_module, "default_exchange", lambda codec, size: exchange)
    recipe = Recipe(TopK(0.2, values=torch.bfloat16), HIERARCHICAL, nodes=2, steps=2)
    reference = on_cpus(recipe)
    assert not differences(reference, on_gpus(recipe, Schedule("1 side 2")))
    assert all(text.startswith(f"hierarchical {exchange}") for text in reference[0].statistics.decisions.values())


def summed_on_two_streams(world: World, rank: int) -> list[list[float]]:
    """Sums of `sparse_all_reduce` on two streams that nothing orders."""
    group, results = Group(world.communicator((0, 1)).member(rank), (0, 1)), []
    for number in range(2):
        with torch.cuda.stream(torch.cuda.Stream()):
            entries = Entries(on_gpu(torch.arange(4, dtype=torch.int32)), on_gpu(torch.full((4,), 1.0 + number)))
            total = on_gpu(torch.zeros(4))
            exchanger = EntryExchanger(4, torch.float32, DEVICE, group, pool_of(group, DEVICE))
            call = Call(exchanger, entries, 4, [], cost.Decision("gather", ()), 1.0, 0)
            results.append((torch.cuda.current_stream(), fill(total, reduce(call))))  # type: ignore[arg-type]
    found = []
    for stream, out in results:
        with torch.cuda.stream(stream):
            found.append(read(out).tolist())
    return found


@pytest.mark.parametrize("stream", ["side 1", "side 2"])
def test_sparse_sums_on_two_streams_have_memory_of_their_own(stream: str) -> None:
    assert World(2, Schedule(f"0 {stream}")).run(summed_on_two_streams) == [[[2.0] * 4, [4.0] * 4]] * 2


# -- faults that are found ---------------------------------------------------------------------------------------------


def no_wait_for_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pipeline, "_ready", lambda self: None)


def no_wait_for_collectives(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nccl_module.Collecting, "wait", lambda self, timeout=None: True)


def nothing_recorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GpuTensor, "record_stream", lambda self, stream: None)


@pytest.mark.parametrize(
    ("fault", "recipe"),
    [(no_wait_for_gradients, SMALL), (no_wait_for_collectives, SMALL), (nothing_recorded, ABANDONING)],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_a_fault_is_found(
    fault: Any, recipe: Recipe, expected: dict[Recipe, list[Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one of the schedules, as other results or an error."""
    fault(monkeypatch)
    for schedule in reversed(SCHEDULES):
        try:
            if differences(expected[recipe], on_gpus(recipe, schedule)):
                return
        except Exception:
            return
    pytest.fail("no schedule shows it")


# -- the machine itself ------------------------------------------------------------------------------------------------

#: Each asks the device for something, or gives it something, and whether the host waits for that.
CALLS: dict[Callable[[Tensor], Any], bool] = {
    lambda x: x[0].item(): True,
    lambda x: x.nonzero(): True,
    lambda x: x[x > 1]: True,
    lambda x: torch.zeros(8).copy_(x, non_blocking=True): True,
    lambda x: x.copy_(torch.zeros(8)): True,
    lambda x: torch.cuda.current_stream().record_event().synchronize(): True,
    lambda x: torch.where(x > 1, x, 0.0): False,
    lambda x: x[x.argsort()]: False,
    lambda x: torch.zeros(8, pin_memory=True).copy_(x, non_blocking=True): False,
    lambda x: x.copy_(torch.zeros(8, pin_memory=True), non_blocking=True): False,
}


def test_what_waits_for_the_device_is_refused_in_a_step() -> None:
    def run(world: World, rank: int) -> list[bool]:
        x, refused = on_gpu(torch.arange(8.0)), []
        for call in CALLS:
            with world.machine.never_waiting():
                try:
                    call(x)
                    refused.append(False)
                except HostWaits:
                    refused.append(True)
        x[0].item()  # between steps it may
        return refused

    assert World(1).run(run) == [list(CALLS.values())]
