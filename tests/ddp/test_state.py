"""CompressState: what it refuses, what it agrees on with other ranks, and what its checkpoints carry."""

from __future__ import annotations

import gc
import io
import os
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gradwire import QSGD, Codec, CompressState, Identity, OneBit, TernGrad, TopK, Tracking, compress_hook
from gradwire.compress.formats.wire import WIRE_VERSION
from gradwire.hooks.core.options import Options
from gradwire.hooks.ddp import model as owner
from ranks import Pool, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Ledger, batch, convnet, digest, meeting_within, perceptron, residuals_of, train, wrap

Ranks = Callable[[int], Pool]


def message(action: Callable[[], Any]) -> str:
    """What `action` raises, as text: type and message."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def ddp_of(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **options)


# -- what one rank can see by itself -----------------------------------------------------------------------------------


def test_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        CompressState(nn.Linear(2, 2), OneBit())


def refusals(rank: int) -> dict[str, str]:
    ddp = ddp_of(perceptron())

    return {
        "plain": message(lambda: CompressState(perceptron(), OneBit())),
        "fsdp": message(lambda: CompressState(_fsdp(), OneBit())),
        "codec": message(lambda: CompressState(ddp, "topk")),  # type: ignore[arg-type]
        "class": message(lambda: CompressState(ddp, TopK)),
        "scaler": message(lambda: CompressState(ddp, OneBit(), grad_scaler=True)),  # type: ignore[arg-type]
        "exclude": message(lambda: CompressState(ddp, OneBit(), exclude=["bias"])),
        "excludes": message(lambda: CompressState(ddp, OneBit(), exclude="*.bias")),
        "number": message(lambda: CompressState(ddp, OneBit(), exclude=5)),  # type: ignore[arg-type]
        "predicate": message(lambda: CompressState(ddp, OneBit(), exclude=lambda name, p: 1 / 0 > 1)),
        "schedule": message(lambda: CompressState(ddp, lambda step: 0.01)),  # type: ignore[arg-type, return-value]
        "exchange": message(lambda: CompressState(ddp, OneBit(), exchange="ring")),
        "two_pass": message(lambda: CompressState(ddp, TopK(), exchange="two_pass")),
        "feedback": message(lambda: CompressState(ddp, OneBit(), error_feedback="yes")),  # type: ignore[arg-type]
        "warmup": message(lambda: CompressState(ddp, OneBit(), warmup_steps=-1)),
        "fallback": message(lambda: CompressState(ddp, OneBit(), fallback=torch.float16)),
        "topology": message(lambda: CompressState(ddp, OneBit(), topology=3)),
        "nodes": message(lambda: CompressState(ddp, OneBit(), topology="rack")),
        "seed": message(lambda: CompressState(ddp, OneBit(), seed=0.5)),  # type: ignore[arg-type]
        "float64": message(lambda: CompressState(ddp_of(perceptron().double()), OneBit())),
        "complex": message(lambda: CompressState(ddp_of(nn.Linear(4, 4, dtype=torch.complex64)), OneBit())),
        "sparse": message(
            lambda: CompressState(ddp_of(nn.Embedding(10, 4, sparse=True)), OneBit(), error_feedback=Tracking())
        ),
    }


def _fsdp() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = perceptron()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def test_bad_arguments_are_named_with_a_remedy(ranks: Ranks) -> None:
    expected = {
        "plain": ("TypeError", "Sequential", "DistributedDataParallel"),
        "fsdp": ("TypeError", "FSDPSequential", "DistributedDataParallel"),
        "codec": ("TypeError", "'topk'", "TopK(density=0.01)"),
        "class": ("TypeError", "TopK is a class", "TopK()"),
        "scaler": ("TypeError", "grad_scaler=True", "GradScaler"),
        "exclude": ("ValueError", "'bias'", "'0.weight'", "'*.bias'"),
        "excludes": ("TypeError", "'*.bias'", "['*.bias']"),
        "number": ("TypeError", "exclude=5", "['*.bias']"),
        "predicate": ("ZeroDivisionError",),
        "schedule": ("TypeError", "step 0", "0.01"),
        "exchange": ("ValueError", "'ring'", "'two_pass'"),
        "two_pass": ("ValueError", "TopK", "'gather'"),
        "feedback": ("ValueError", "'yes'", "'auto'"),
        "warmup": ("ValueError", "-1"),
        "fallback": ("ValueError", "float16", "torch.bfloat16"),
        "topology": ("ValueError", "3 ranks a node", "2 ranks"),
        "nodes": ("TypeError", "'rack'", "DeviceMesh"),
        "seed": ("TypeError", "0.5"),
        "float64": ("TypeError", "'0.weight'", "float64"),
        "complex": ("TypeError", "'weight'", "complex64"),
        "sparse": ("ValueError", "Tracking", "'weight'", "sparse=False"),
    }
    for result in ranks(2).run(refusals):
        for case, words in expected.items():
            if result[case] == "RuntimeError: Invalid scalar type":  # torch 2.6's Gloo, in DDP's constructor
                continue
            for word in words:
                assert word in result[case], f"{case}: {result[case]}"


@on_ranks(2)
def test_wrong_use_of_the_hook(rank: int) -> None:
    found = {}
    ddp, state = wrap(perceptron(), OneBit())
    found["twice"] = message(lambda: ddp.register_comm_hook(state, compress_hook))
    other = ddp_of(perceptron())
    other.register_comm_hook(state, compress_hook)
    data = batch(rank, 0, other.module)
    found["other model"] = message(lambda: other(data).square().mean().backward())
    assert "can only be called once" in found["twice"]
    assert "made for another model" in found["other model"]


# -- what ranks have to agree on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("codec", ("codec", "OneBit(", "TopK(density=0.25")),
        ("option", ("codec", "density=0.25", "density=0.5")),
        ("exchange", ("exchange", "gather", "two_pass")),
        ("warmup", ("warmup_steps", "has 0", "has 1")),
        ("model", ("parameters", "0.weight", "0.0.weight")),
        ("version", ("wire format", "has 1", "has 2")),
        ("invalid", ("'ring'",)),
    ],
)
@on_ranks(2)
def test_ranks_that_disagree_all_say_so(rank: int, case: str, words: tuple[str, ...]) -> None:
    start = time.monotonic()
    ddp = ddp_of(perceptron())
    codecs: list[Codec] = [OneBit(), OneBit()]
    options: dict[str, Any] = {}
    if case == "codec":
        codecs = [OneBit(), TopK(0.25)]
    elif case == "option":
        codecs = [TopK(0.25), TopK(0.5)]
    elif case == "exchange":
        options = {"exchange": ["gather", "two_pass"][rank % 2]}
    elif case == "warmup":
        options = {"warmup_steps": rank}
    elif case == "model":
        # DDP itself refuses other shapes; other names it does not see.
        model = perceptron()
        ddp = ddp_of(nn.Sequential(model) if rank else model)
    elif case == "invalid":
        options = {"exchange": "ring"} if rank else {}
    elif case == "version":
        import gradwire.hooks.core.options as module

        module.WIRE_VERSION = 1 + rank
    try:
        text = message(lambda: CompressState(ddp, codecs[rank % 2], **options))
    finally:
        import gradwire.hooks.core.options as module

        module.WIRE_VERSION = WIRE_VERSION
    seconds = time.monotonic() - start
    assert text.startswith("ValueError"), text
    assert seconds < 15
    for word in words:
        assert word in text


def diverging_schedule(rank: int, codec: Codec, exchange: str) -> tuple[str, list[str]]:
    """The ranks' schedules part at step 4, where the wires have other sizes, or one rank's are dense."""
    ddp, state = wrap(perceptron(), lambda step: codec if step < 4 or rank == 0 else OneBit(), exchange=exchange)
    train(rank, ddp, range(4))
    # What has been replaced goes before what is sent to it arrives.
    next(ddp.parameters()).register_hook(lambda grad: [None, gc.collect()][0])
    first = message(lambda: train(rank, ddp, range(4, 5)))
    again = message(lambda: train(rank, ddp, range(5, 6)))
    residuals = residuals_of(state.state_dict())
    return first, [again, str(all(bool(t.isfinite().all()) for t in residuals.values()))]


@pytest.mark.parametrize(
    ("codec", "exchange"), [(TopK(0.5), "auto"), (Identity(), "auto"), (OneBit(block=256), "two_pass")], ids=str
)
def test_schedules_that_part_stop_every_rank_and_name_both_sides(codec: Codec, exchange: str) -> None:
    pool = Pool(2)
    try:
        for first, (again, finite) in pool.run(diverging_schedule, codec, exchange):
            assert f"ranks disagree on codec: rank 0 has {codec}, rank 1 has OneBit" in first
            assert "stopped after an earlier error" in again
            assert finite == "True"
    finally:
        pool.close()


def other_checkpoint(rank: int) -> str:
    """Rank 1 goes on from an older checkpoint than rank 0."""
    ddp, state = wrap(perceptron(), OneBit())
    train(rank, ddp, range(1))
    old = state.state_dict()
    train(rank, ddp, range(1, 3))
    new = state.state_dict()
    state.load_state_dict(old if rank else new)
    return message(lambda: train(rank, ddp, range(3, 4)))


def test_checkpoints_of_different_steps_are_noticed() -> None:
    pool = Pool(2)
    try:
        for text in pool.run(other_checkpoint):
            assert "ranks disagree on step: rank 0 has 3, rank 1 has 1" in text
    finally:
        pool.close()


def die(rank: int, exchange: str) -> Any:
    """Rank 1 saves a checkpoint and dies in the next step; the others must hear of it."""
    model = convnet()
    ddp, state = wrap(model, OneBit(), exchange=exchange)
    train(rank, ddp, range(3))
    saved = state.state_dict()
    if rank == 1:
        os._exit(1)
    start = time.monotonic()
    text = message(lambda: train(rank, ddp, range(3, 6)))
    seconds = time.monotonic() - start
    state.load_state_dict(saved)
    intact = digest(residuals_of(state.state_dict()).values()) == digest(residuals_of(saved).values())
    return text, seconds, intact


@pytest.mark.parametrize("exchange", ["two_pass", "dense"])
def test_a_rank_that_dies_leaves_the_others_with_an_error(exchange: str) -> None:
    timeout = timedelta(seconds=15)
    pool = Pool(3, timeout)
    try:
        results = pool.run(die, exchange, may_die=(1,))
        for rank in (0, 2):
            text, seconds, intact = results[rank]
            assert "gradwire" in text or "Gloo" in text or "gloo" in text, text
            assert seconds < timeout.total_seconds() + 10
            assert intact
    finally:
        pool.close()


def late(rank: int) -> str:
    ddp = ddp_of(perceptron())
    if rank == 1:
        return "RuntimeError: absent"
    with meeting_within(2):
        return message(lambda: CompressState(ddp, OneBit()))


def alone_first(rank: int) -> list[str]:
    """Rank 0 constructs its state alone, and then with the other one."""
    ddp, found = ddp_of(perceptron()), []
    with meeting_within(1):
        if rank == 0:
            found.append(message(lambda: CompressState(ddp, OneBit(), exchange="gather")))
        dist.barrier()
    return [*found, message(lambda: CompressState(ddp, OneBit(), exchange="gather"))]


def test_ranks_meet_where_one_has_waited_in_vain_before() -> None:
    pool = Pool(2)
    try:
        (alone, *first), second = pool.run(alone_first, within=60)
    finally:
        pool.close()
    assert "every rank must construct CompressState" in alone
    assert first == second == ["nothing was raised"]


def test_a_rank_that_never_constructs_its_state() -> None:
    pool = Pool(2)
    try:
        text = pool.run(late, within=30)[0]
        assert text.startswith("RuntimeError")
        assert "every rank must construct CompressState" in text
    finally:
        pool.close()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def single() -> nn.Module:
    """One parameter: its bucket looks the same before and after DDP rebuilds, so a restart changes no layout."""
    torch.manual_seed(7)
    return nn.Linear(40, 64, bias=False)


def resumed(rank: int, codec: Codec, exchange: str) -> tuple[list[str], list[str], list[str]]:
    model = single()
    ddp, state = wrap(model, codec, exchange=exchange)
    train(rank, ddp, range(4))
    file = io.BytesIO()
    torch.save((state.state_dict(), model.state_dict()), file)
    file.seek(0)
    on = train(rank, ddp, range(4, 8))
    saved, weights = torch.load(file, weights_only=True)
    runs = []
    for remember in (True, False):
        model = single()
        model.load_state_dict(weights)
        ddp, state = wrap(model, codec, exchange=exchange)
        if remember:
            state.load_state_dict(saved)
        runs.append(train(rank, ddp, range(4, 8)))
    return on, runs[0], runs[1]


@pytest.mark.parametrize("exchange", ["gather", "two_pass"])
@pytest.mark.parametrize("codec", [OneBit(block=256), QSGD(), TopK(0.1)], ids=str)
def test_resuming_equals_going_on(ranks: Ranks, codec: Codec, exchange: str) -> None:
    if codec.block_size is None:
        exchange = "gather"
    for on, again, forgetful in ranks(2).run(resumed, codec, exchange):
        assert again == on
        assert forgetful != on, "the checkpoint made no difference"


def grow(rank: int, phase: str, carried: Any) -> Any:
    """Two ranks save a consolidated state; four load it, and the first thing they send includes it."""
    model = perceptron()
    ddp, state = wrap(model, TopK(0.05))
    if phase == "save":
        train(rank, ddp, range(4))
        saved = state.consolidated_state_dict()
        local = state.state_dict()
        return (
            {k: v for k, v in saved.items() if k != "residuals"},
            {n: t.numpy() for n, t in residuals_of(saved).items()},
            local,
        )
    rest, residuals, other = carried
    saved = {**rest, "residuals": {"mean": {n: torch.from_numpy(t) for n, t in residuals.items()}}}
    state.load_state_dict(saved)
    ledger = Ledger(model)
    for name, t in residuals_of(saved).items():
        ledger.wanted[name] += t.double()
    train(rank, ddp, range(state.step, state.step + 3), ledger)
    refused = message(lambda: state.load_state_dict(other))
    return ledger.error(state), refused


def test_consolidated_state_loads_on_another_number_of_ranks(ranks: Ranks) -> None:
    saved = ranks(2).run(grow, "save", None)
    for error, refused in ranks(4).run(grow, "load", saved[0]):
        assert error < 1e-5
        assert "consolidated_state_dict()" in refused


@on_ranks(2)
def test_foreign_checkpoints_are_refused_and_change_nothing(rank: int) -> None:
    ddp, state = wrap(perceptron(), OneBit())
    train(rank, ddp, range(3))
    good = state.state_dict()
    before = digest(residuals_of(good).values())
    mine, shapes = f"rank {rank} of 2", {name: torch.zeros(3, 3) for name in residuals_of(good)}
    found = {
        "codec": message(lambda: state.load_state_dict({**good, "codec": "TopK(density=0.01)"})),
        "rank": message(lambda: state.load_state_dict({**good, "residuals": {"rank 7 of 8": residuals_of(good)}})),
        "format": message(lambda: state.load_state_dict({**good, "format": 99})),
        "name": message(lambda: state.load_state_dict({**good, "residuals": {mine: {"elsewhere": torch.zeros(1)}}})),
        "shape": message(lambda: state.load_state_dict({**good, "residuals": {mine: shapes}})),
        "nothing": message(lambda: state.load_state_dict({})),
    }
    found["intact"] = str(digest(residuals_of(state.state_dict()).values()) == before)
    assert "TopK(density=0.01)" in found["codec"]
    assert "OneBit" in found["codec"]
    assert "rank 7 of 8" in found["rank"]
    assert "strict=False" in found["rank"]
    assert "format 99" in found["format"]
    assert "'elsewhere'" in found["name"]
    assert "(3, 3)" in found["shape"]
    assert "not a checkpoint" in found["nothing"]
    assert found["intact"] == "True"


@on_ranks(2)
def test_a_checkpoint_is_tensors_numbers_and_strings(rank: int) -> None:
    ddp, state = wrap(perceptron(), QSGD(), error_feedback=True, warmup_steps=1)
    train(rank, ddp, range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = io.BytesIO()
        torch.save(state.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
    assert set(residuals_of(loaded)) == {name for name, _ in perceptron().named_parameters()}
    types = {type(value).__name__ for value in loaded.values()}
    assert types <= {"int", "str", "dict", "NoneType", "float"}


def test_feedback_is_on_for_codecs_that_contract() -> None:
    found = {
        f"{codec.name} {option}": Options(codec, error_feedback=option).choice(0).feedback
        for codec in (OneBit(), QSGD(), TernGrad(), TopK(), Identity())
        for option in ("auto", True, False)
    }
    assert Options(QSGD(), error_feedback=True).choice(0).codec == QSGD(rounding="nearest")
    assert found == {
        "onebit auto": True, "onebit True": True, "onebit False": False,
        "qsgd auto": False, "qsgd True": True, "qsgd False": False,
        "terngrad auto": False, "terngrad True": True, "terngrad False": False,
        "topk auto": True, "topk True": True, "topk False": False,
        "identity auto": False, "identity True": False, "identity False": False,
    }  # fmt: skip


def corrupted(rank: int) -> tuple[int, bool, str]:
    """Rank 1's indices are destroyed on the way; every rank counts and skips them, and replicas stay equal."""
    from gradwire.hooks.exchanges import Gather

    ddp, state = wrap(perceptron(), TopK(0.1), exchange="gather")
    train(rank, ddp, range(2))

    def damage(self: Any, *args: Any) -> Any:
        for work in reduce(self, *args):
            yield work
            self.received[0][1, 4:] = 0xFF

    reduce = Gather.reduce
    with patch.object(Gather, "reduce", damage):
        digests = train(rank, ddp, range(2, 4))
    finite = all(bool(p.grad.isfinite().all()) for p in ddp.parameters())
    return state.statistics().skipped_entries, finite, digests[-1]


def test_corrupted_bytes_are_skipped_and_counted(ranks: Ranks) -> None:
    results = ranks(2).run(corrupted)
    assert results[0] == results[1]
    assert results[0][0] > 0
    assert results[0][1]


# -- collectives that not every rank enters ----------------------------------------------------------------------------


class Scaled(nn.Module):
    """A wrapper with a parameter of the same name as one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.bias = nn.Linear(8, 8), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x) + self.bias


def of_one_name(rank: int) -> tuple[list[str], list[str]]:
    torch.manual_seed(0)
    ddp, state = wrap(Scaled(), OneBit(), exchange="gather")
    for step in range(2):
        ddp(torch.full((4, 8), 1.0 + rank + step)).square().mean().backward()
    names = sorted(residuals_of(state.state_dict()))
    state.close()
    return names, [digest([p.grad for p in ddp.parameters()])]


def test_a_child_may_be_called_module(ranks: Ranks) -> None:
    first, second = ranks(2).run(of_one_name)
    assert first == second
    assert first[0] == ["bias", "module.bias", "module.weight"]


def late_within_a_step(rank: int) -> tuple[list[str], Any]:
    """Rank 1 takes longer between two buckets than ranks wait for each other when they meet."""
    with meeting_within(1):
        ddp, state = wrap(perceptron(), OneBit(), exchange="gather")
    digests = train(rank, ddp, range(2))
    handle = next(ddp.module.parameters()).register_hook(lambda grad: time.sleep(2 * rank))
    digests += train(rank, ddp, range(2, 3))
    handle.remove()
    assert state._reducer is not None
    patience = state._reducer.session.group.timeout
    state.close()
    return digests, patience


def test_a_rank_may_be_late_within_a_step_for_as_long_as_the_model_s_group_allows(ranks: Ranks) -> None:
    (first, patience), (second, _) = ranks(2).run(late_within_a_step)
    assert first == second
    assert patience > timedelta(seconds=2)


def only_here(rank: int, case: str) -> tuple[str, float]:
    """Rank 0 alone is wrong, or alone in a collective."""
    with meeting_within(5):
        return alone(rank, case)


def alone(rank: int, case: str) -> tuple[str, float]:
    start = time.monotonic()
    model = perceptron()
    ddp = ddp_of(model)
    if case == "predicate":
        text = message(lambda: CompressState(ddp, OneBit(), exclude=lambda name, p: rank > 0 or 1 / 0 > 1))
    elif case == "group":
        groups = [dist.new_group([0]), dist.new_group([0, 1])]
        text = message(lambda: CompressState(ddp, OneBit(), process_group=groups[rank]))
    elif case == "hook":
        state = CompressState(ddp, OneBit(), fallback=None)
        if rank == 0:
            ddp.register_comm_hook(state, compress_hook)
        text = message(lambda: train(rank, ddp, range(1)))
    else:
        ddp, state = wrap(model, OneBit())
        train(rank, ddp, range(2))
        if case == "loaded" and rank == 0:
            state.load_state_dict({**state.state_dict(), "step": 1})
        if case.startswith("loaded again"):
            saved = state.state_dict()
            if rank == 0 or "seed" in case:
                state.load_state_dict({**saved, "seed": rank})
            text = message(lambda: train(rank, ddp, range(2, 3)))
        elif case == "step" and rank:
            text = message(lambda: train(rank, ddp, range(2, 3)))
        elif case == "absent" and rank:
            text = "absent"
        else:
            text = message(state.consolidated_state_dict)
    return text, time.monotonic() - start


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("predicate", ("ZeroDivisionError",)),
        ("group", ("process_group has the ranks [0], not those of the model's group, [0, 1]",)),
        ("hook", ("rank 1", "register_comm_hook(state, compress_hook) on every rank")),
        ("loaded", ("ranks disagree on step: rank 0 has 1, rank 1 has 2",)),
        (
            "loaded again",
            ("ranks disagree on loaded checkpoints: rank 0 has 1", "rank 1 has none"),
        ),
        ("loaded again, another seed", ("rank 0 has 1, the last one of seed 0, rank 1 has 1, the last one of seed 1",)),
        ("step", ("rank 0 has consolidated_state_dict(), rank 1 has a training step",)),
        ("absent", ("not every rank called consolidated_state_dict()",)),
    ],
)
def test_what_one_rank_does_alone_is_told_to_all(case: str, words: tuple[str, ...]) -> None:
    pool = Pool(2)
    try:
        results = pool.run(only_here, case, within=30)
    finally:
        pool.close()
    for text, seconds in results[: 1 if case == "absent" else 2]:
        assert seconds < 15
        for word in words:
            assert word in text or (word == "rank 1" and "backward ran without" in text), text


@on_ranks(2)
def test_errors_arrive_as_they_are_with_their_cause(rank: int) -> None:
    """What `backward` raises where an exchange fails, and where its hook is called in other ways."""
    from gradwire.hooks.exchanges import Gather

    found = []
    ddp, state = wrap(perceptron(), OneBit(), exchange="gather")
    train(rank, ddp, range(2))

    def fail(self: Any, *args: Any) -> Any:
        yield next(reduce(self, *args))
        raise MemoryError("no room for this")

    reduce = Gather.reduce
    with patch.object(Gather, "reduce", fail):
        for _ in range(2):
            try:
                train(rank, ddp, range(2, 3))
            except Exception as error:
                found.append((type(error).__name__, str(error), type(error.__cause__).__name__))
    state.close()
    train(rank, ddp, range(3, 4))  # all is well again
    first, second = found
    assert first[0] == second[0] == "RuntimeError"
    assert first[1].startswith("gradwire: no room for this [step 2, bucket 0")
    assert first[2] == "MemoryError"
    assert second[1].startswith("gradwire stopped after an earlier error: gradwire: no room for this")
    assert second[2] == "RuntimeError"


def test_other_callers_than_ddps_reducer_are_refused() -> None:
    with pytest.raises(TypeError, match="got a tuple, expected DDP's GradBucket"):
        compress_hook(CompressState(OneBit()), (torch.zeros(1), nn.Parameter(torch.zeros(1))))  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [None, OneBit(), nn.Linear(1, 1)], ids=lambda state: type(state).__name__)
def test_a_hook_is_registered_with_a_compress_state(state: object) -> None:
    text = rf"a state that is a {type(state).__name__}, expected a CompressState: .*register_comm_hook\(CompressState\("
    with pytest.raises(TypeError, match=text):
        compress_hook(state, None)  # type: ignore[arg-type]


def test_the_model_comes_first() -> None:
    with pytest.raises(
        TypeError, match=r"model is a OneBit, .*: the model is the first argument, as in CompressState\("
    ):
        owner.ddp_of(OneBit())
    with pytest.raises(TypeError, match=r"model is a Linear, .*: wrap the model in it first"):
        owner.ddp_of(nn.Linear(1, 1))


def described(rank: int) -> str:
    ddp, state = wrap(perceptron(), OneBit())
    train(rank, ddp, range(2))
    return repr(state)


def test_a_state_says_what_it_is(ranks: Ranks) -> None:
    for rank, text in enumerate(ranks(2).run(described)):
        for word in ("CompressState", "6 parameters", "OneBit(", "'auto'", "step 2", f"rank {rank} of 2"):
            assert word in text
