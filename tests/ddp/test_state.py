"""CompressState: what it refuses, what it agrees on with other ranks, and what its checkpoints carry."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gradwire import QSGD, Codec, CompressState, Identity, OneBit, TernGrad, TopK, Tracking, compress_hook
from gradwire.compress.formats.wire import WIRE_VERSION
from gradwire.hooks.core import options as core_options
from gradwire.hooks.core.options import Options
from gradwire.hooks.ddp import model as owner
from ranks import Pool, Ranks, on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import convnet, digest, meeting_within, perceptron, residuals_of, told, train, wrap


def ddp_of(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **options)


# -- what one rank can see by itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "options", "error", "words"),
    [
        ("topk", {}, TypeError, ("'topk'", "TopK(density=0.01)")),
        (TopK, {}, TypeError, ("TopK is a class", "TopK()")),
        (lambda step: 0.01, {}, TypeError, ("step 0", "0.01")),
        (OneBit(), {"grad_scaler": True}, TypeError, ("grad_scaler=True", "GradScaler")),
        (OneBit(), {"exchange": "ring"}, ValueError, ("'ring'", "'two_pass'")),
        (TopK(), {"exchange": "two_pass"}, ValueError, ("TopK", "'gather'")),
        (OneBit(), {"error_feedback": "yes"}, ValueError, ("'yes'", "'auto'")),
        (OneBit(), {"warmup_steps": -1}, ValueError, ("-1",)),
        (OneBit(), {"fallback": torch.float16}, ValueError, ("float16", "torch.bfloat16")),
        (OneBit(), {"seed": 0.5}, TypeError, ("0.5",)),
    ],
    ids=range(10),
)
def test_bad_options_are_named_with_a_remedy(
    codec: Any, options: dict[str, Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    """Before there is a model, or a process group."""
    with pytest.raises(error) as raised:
        CompressState(codec=codec, **options)
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize(
    ("model", "words"),
    [(OneBit(), "model is a OneBit, .*: the model is the first"), (nn.Linear(1, 1), "model is a Linear, .*: wrap the")],
)
def test_a_model_is_what_ddp_has_wrapped(model: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        owner.ddp_of(model)
    with pytest.raises(RuntimeError, match="init_process_group"):
        CompressState(nn.Linear(2, 2), OneBit())


@on_ranks(2)
def test_what_does_not_fit_the_model_is_named_with_a_remedy(rank: int) -> None:
    ddp = ddp_of(perceptron())
    sharded: Any = fully_shard(perceptron(), mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    cases: list[tuple[Callable[[], Any], tuple[str, ...]]] = [
        (lambda: CompressState(sharded, OneBit()), ("TypeError", "FSDPSequential", "DistributedDataParallel")),
        (lambda: CompressState(ddp, OneBit(), exclude=["bias"]), ("ValueError", "'bias'", "'0.weight'", "'*.bias'")),
        (lambda: CompressState(ddp, OneBit(), exclude="*.bias"), ("TypeError", "'*.bias'", "['*.bias']")),
        (lambda: CompressState(ddp, OneBit(), exclude=5), ("TypeError", "exclude=5", "['*.bias']")),  # type: ignore[arg-type]
        (lambda: CompressState(ddp, OneBit(), exclude=lambda name, p: 1 / 0 > 1), ("ZeroDivisionError",)),
        (lambda: CompressState(ddp, OneBit(), topology=3), ("ValueError", "3 ranks a node", "2 ranks")),
        (lambda: CompressState(ddp, OneBit(), topology="rack"), ("TypeError", "'rack'", "DeviceMesh")),
        (
            lambda: CompressState(ddp_of(perceptron().double()), OneBit()),
            ("TypeError", "'0.weight'", "float64"),
        ),
        (
            lambda: CompressState(ddp_of(nn.Linear(4, 4, dtype=torch.complex64)), OneBit()),
            ("TypeError", "'weight'", "complex64"),
        ),
        (
            lambda: CompressState(ddp_of(nn.Embedding(10, 4, sparse=True)), OneBit(), error_feedback=Tracking()),
            ("ValueError", "Tracking", "'weight'", "sparse=False"),
        ),
    ]
    for make, words in cases:
        text = told(make)
        if text != "RuntimeError: Invalid scalar type":  # torch 2.6's Gloo, in DDP's constructor
            assert all(word in text for word in words), text


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
    with patch.object(core_options, "WIRE_VERSION", 1 + rank if case == "version" else WIRE_VERSION):
        text = told(lambda: CompressState(ddp, codecs[rank % 2], **options))
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
    first = told(lambda: train(rank, ddp, range(4, 5)))
    again = told(lambda: train(rank, ddp, range(5, 6)))
    residuals = residuals_of(state.state_dict())
    return first, [again, str(all(bool(t.isfinite().all()) for t in residuals.values()))]


@pytest.mark.parametrize(
    ("codec", "exchange"), [(TopK(0.5), "auto"), (Identity(), "auto"), (OneBit(block=256), "two_pass")], ids=str
)
def test_schedules_that_part_stop_every_rank_and_name_both_sides(ranks: Ranks, codec: Codec, exchange: str) -> None:
    for first, (again, finite) in ranks(2).run(diverging_schedule, codec, exchange):
        assert f"ranks disagree on codec: rank 0 has {codec}, rank 1 has OneBit" in first
        assert "stopped after an earlier error" in again
        assert finite == "True"


def die(rank: int, exchange: str) -> Any:
    """Rank 1 saves a checkpoint and dies in the next step; the others must hear of it."""
    model = convnet()
    ddp, state = wrap(model, OneBit(), exchange=exchange)
    train(rank, ddp, range(3))
    saved = state.state_dict()
    if rank == 1:
        os._exit(1)
    start = time.monotonic()
    text = told(lambda: train(rank, ddp, range(3, 6)))
    seconds = time.monotonic() - start
    state.load_state_dict(saved)
    intact = digest(residuals_of(state.state_dict()).values()) == digest(residuals_of(saved).values())
    return text, seconds, intact


@pytest.mark.parametrize("exchange", ["two_pass", "dense"])
def test_a_rank_that_dies_leaves_the_others_with_an_error(exchange: str) -> None:
    timeout = timedelta(seconds=15)
    with Pool(3, timeout) as pool:
        results = pool.run(die, exchange, may_die=(1,))
        for rank in (0, 2):
            text, seconds, intact = results[rank]
            assert "gradwire" in text or "Gloo" in text or "gloo" in text, text
            assert seconds < timeout.total_seconds() + 10
            assert intact


def alone_first(rank: int) -> list[str]:
    """Rank 0 constructs its state alone, and then with the other one."""
    ddp, found = ddp_of(perceptron()), []
    with meeting_within(1):
        if rank == 0:
            found.append(told(lambda: CompressState(ddp, OneBit(), exchange="gather")))
        dist.barrier()
    return [*found, told(lambda: CompressState(ddp, OneBit(), exchange="gather"))]


def test_ranks_meet_where_one_has_waited_in_vain_before(ranks: Ranks) -> None:
    (alone, *first), second = ranks(2).run(alone_first, within=60)
    assert "every rank must construct CompressState" in alone
    assert first == second == ["nothing"]


# -- checkpoints -------------------------------------------------------------------------------------------------------


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


@on_ranks(2)
def test_corrupted_bytes_are_skipped_and_counted(rank: int) -> tuple[int, str]:
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
    assert all(bool(p.grad.isfinite().all()) for p in ddp.parameters())
    assert state.statistics().skipped_entries > 0
    return state.statistics().skipped_entries, digests[-1]


# -- collectives that not every rank enters ----------------------------------------------------------------------------


class Scaled(nn.Module):
    """A wrapper with a parameter of the same name as one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.bias = nn.Linear(8, 8), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x) + self.bias


@on_ranks(2)
def test_a_child_may_be_called_module(rank: int) -> str:
    torch.manual_seed(0)
    ddp, state = wrap(Scaled(), OneBit(), exchange="gather")
    for step in range(2):
        ddp(torch.full((4, 8), 1.0 + rank + step)).square().mean().backward()
    assert sorted(residuals_of(state.state_dict())) == ["bias", "module.bias", "module.weight"]
    state.close()
    return digest([p.grad for p in ddp.parameters()])


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
        text = told(lambda: CompressState(ddp, OneBit(), exclude=lambda name, p: rank > 0 or 1 / 0 > 1))
    elif case == "group":
        groups = [dist.new_group([0]), dist.new_group([0, 1])]
        text = told(lambda: CompressState(ddp, OneBit(), process_group=groups[rank]))
    elif case == "hook":
        state = CompressState(ddp, OneBit(), fallback=None)
        if rank == 0:
            ddp.register_comm_hook(state, compress_hook)
        text = told(lambda: train(rank, ddp, range(1)))
    else:
        ddp, state = wrap(model, OneBit())
        train(rank, ddp, range(2))
        if case == "loaded" and rank == 0:
            state.load_state_dict({**state.state_dict(), "step": 1})
        if case.startswith("loaded again"):
            saved = state.state_dict()
            if rank == 0 or "seed" in case:
                state.load_state_dict({**saved, "seed": rank})
            text = told(lambda: train(rank, ddp, range(2, 3)))
        elif case == "step" and rank:
            text = told(lambda: train(rank, ddp, range(2, 3)))
        elif case == "absent" and rank:
            text = "absent"
        else:
            text = told(state.consolidated_state_dict)
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
def test_what_one_rank_does_alone_is_told_to_all(ranks: Ranks, case: str, words: tuple[str, ...]) -> None:
    pool = ranks(2)
    results = pool.run(only_here, case, within=30)
    if case == "hook":
        pool.close()  # one rank's DDP still waits for the other's
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


@pytest.mark.parametrize("state", [None, OneBit(), nn.Linear(1, 1)], ids=lambda state: type(state).__name__)
def test_a_hook_is_registered_with_a_compress_state(state: object) -> None:
    text = rf"a state that is a {type(state).__name__}, expected a CompressState: .*register_comm_hook\(CompressState\("
    with pytest.raises(TypeError, match=text):
        compress_hook(state, None)  # type: ignore[arg-type]
