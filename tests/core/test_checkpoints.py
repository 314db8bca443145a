"""Checkpoints as people save them: by rank 0 alone, through torch.distributed.checkpoint, by an older release."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fronts import FRONTS
from gradwire import QSGD, Codec, CompressState, Identity, OneBit, Residual, TopK, Tracking
from lacking import needs_hook, needs_reduce_scatter
from ranks import Ranks, on_ranks
from torch import Tensor, nn
from training import Ledger, batch, digest, leaves, perceptron, residuals_of, told, train, wrap


def trained(rank: int, steps: int = 4, **options: Any) -> tuple[Any, CompressState]:
    ddp, state = wrap(perceptron(), TopK(0.05), **options)
    train(rank, ddp, range(steps))
    return ddp, state


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def through_dcp(rank: int, folder: str, how: str) -> Any:
    """Save by torch.distributed.checkpoint, and load into a fresh state."""
    _, state = trained(rank)
    _, fresh = wrap(perceptron(), TopK(0.05))
    if how == "state":
        saved = state.state_dict()
        dcp.save({"gradwire": state}, checkpoint_id=folder)
        dcp.load({"gradwire": fresh}, checkpoint_id=folder)
        return (
            same(residuals_of(saved), residuals_of(fresh.state_dict())),
            fresh.step,
            digest(residuals_of(saved).values()),
        )
    saved = state.consolidated_state_dict()
    dcp.save({"gradwire": saved}, checkpoint_id=folder)
    offered = fresh.consolidated_state_dict()
    dcp.load({"gradwire": offered}, checkpoint_id=folder)
    fresh.load_state_dict(offered)
    return same(residuals_of(saved), residuals_of(fresh.state_dict())), fresh.step, rank


@pytest.mark.parametrize("how", ["state", "consolidated"])
def test_distributed_checkpoints_fill_a_fresh_state(ranks: Ranks, tmp_path: Path, how: str) -> None:
    results = ranks(2).run(through_dcp, str(tmp_path), how)
    assert [result[:2] for result in results] == [(True, 4)] * 2
    assert results[0][2] != results[1][2], "each rank has residuals of its own"


@on_ranks(2)
def test_a_fresh_state_shows_what_may_be_filled(rank: int) -> None:
    """So many residuals."""
    found = []
    for codec, options in (
        (OneBit(), {}),
        (OneBit(), {"exclude": ["*.bias"]}),
        (QSGD(), {}),
        (QSGD(), {"fallback": torch.bfloat16}),
        (Identity(), {}),
        (OneBit(), {"warmup_steps": 3}),
    ):
        _, state = wrap(perceptron(), codec, **options)
        found.append(len(residuals_of(state.state_dict())))
    assert found == [6, 3, 0, 6, 0, 6]


def saved_by_rank_0_alone(rank: int, folder: str) -> Any:
    """As most scripts save and resume."""
    path = f"{folder}/checkpoint.pt"
    ddp, state = trained(rank)
    if rank == 0:
        torch.save({"gradwire": state.state_dict()}, path)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(rank, ddp, range(4, 7))
    dist.barrier()
    saved = torch.load(path, weights_only=True)["gradwire"]
    ddp, fresh = wrap(perceptron(), TopK(0.05))
    text = told(lambda: fresh.load_state_dict(saved))
    with warnings.catch_warnings(record=True) as dropped:
        warnings.simplefilter("always")
        fresh.load_state_dict(saved, strict=False)
    before = float(sum(t.abs().sum() for t in residuals_of(fresh.state_dict()).values()))
    digests = train(rank, ddp, range(fresh.step, 7))
    return [str(w.message) for w in seen], text, [str(w.message) for w in dropped], before, digests


def test_a_checkpoint_of_rank_0_alone_warns_and_can_be_resumed_from(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(saved_by_rank_0_alone, str(tmp_path))
    for seen, *_ in (first, second):
        assert len(seen) == 1
        assert "consolidated_state_dict()" in seen[0]
    assert (first[1], first[2]) == ("nothing", [])
    assert "has the residuals of rank 0 of 2, and this is rank 1 of 2" in second[1]
    assert "strict=False" in second[1]
    assert len(second[2]) == 1
    assert first[3] > 0 == second[3]
    assert first[4] == second[4]


@on_ranks(2)
def test_checkpoints_of_version_0_1_load(rank: int) -> None:
    """What version 0.1 wrote: one rank's residuals and everybody's mean, with "rank" and "world_size" beside them."""
    ddp, state = trained(rank)
    now, mean = state.state_dict(), state.consolidated_state_dict()
    for saved, of in ((now, rank), (mean, -1)):
        old = {**saved, "format": 1, "rank": of, "world_size": 2 if of >= 0 else -1, "residuals": residuals_of(saved)}
        ddp, fresh = wrap(perceptron(), TopK(0.05))
        fresh.load_state_dict(old)
        assert same(residuals_of(fresh.state_dict()), residuals_of(saved))
        assert fresh.step == 4
    ledger = Ledger(ddp.module)
    for name, residual in residuals_of(mean).items():
        ledger.wanted[name] += residual.double()
    train(rank, ddp, range(4, 7), ledger)
    with pytest.raises(ValueError, match="rank 5 of 8"):
        fresh.load_state_dict({**old, "rank": 5, "world_size": 8})
    assert ledger.error(fresh) < 1e-5


# -- saving ------------------------------------------------------------------------------------------------------------


def ends(rank: int, name: str, codec: Codec, options: dict[str, Any], saves: Collection[int]) -> str:
    """Of eight steps, which a checkpoint follows where `saves` says so."""
    betas = (0.9 if name == "horovod" else 0.0, 0.99)
    front = FRONTS[name](perceptron(), codec, partial(torch.optim.AdamW, lr=0.01, betas=betas), **options)
    for step in range(8):
        front.step(batch(rank, step, front.model))
        if step in saves:
            front.state.state_dict()
            if name in ("ddp", "horovod"):  # that of `LocalUpdates` ends a round
                front.state.consolidated_state_dict()
    if name == "local":
        front.state.synchronise()
    front.close()
    return digest(front.parameters())


TWO_PASS = {"exchange": "two_pass"}


@pytest.mark.parametrize(
    ("front", "codec", "options"),
    [
        ("ddp", OneBit(block=256), {**TWO_PASS, "error_feedback": Residual(0.9, torch.int8)}),
        ("ddp", OneBit(), {**TWO_PASS, "error_feedback": Tracking()}),
        pytest.param("replicas", OneBit(), TWO_PASS, marks=needs_hook),
        ("local", OneBit(), {**TWO_PASS, "every": 2}),
        ("horovod", OneBit(), {}),
        ("horovod", TopK(0.1), {}),
    ],
    ids=str,
)
def test_a_save_changes_no_bit(ranks: Ranks, front: str, codec: Codec, options: dict[str, Any]) -> None:
    never, twice = (ranks(2).run(ends, front, codec, options, saves) for saves in ((), (1, 4)))
    assert never == twice


@pytest.mark.parametrize("name", ["ddp", "local", "adam", "lion", "horovod"])
@on_ranks(2)
def test_later_steps_leave_a_consolidated_checkpoint_alone(rank: int, name: str) -> None:
    how = {} if name in ("adam", "lion") else {"optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9)}
    front = FRONTS[name](perceptron(), OneBit(), **how)
    front.step(batch(rank, 0, front.model))
    saved = front.state.consolidated_state_dict()
    before = copy.deepcopy(saved)
    front.step(batch(rank, 1, front.model))
    assert len(leaves(saved)) > 5
    assert digest(leaves(saved)) == digest(leaves(before))
    front.close()


# -- what does not fit any more ----------------------------------------------------------------------------------------


def frozen() -> nn.Module:
    made = perceptron()
    made.get_submodule("0").requires_grad_(False)
    return made


def smaller() -> nn.Module:
    return perceptron(layers=2)


BEGINS_ANEW = "strict=False) begins without saved residuals"
#: Options that there were, and model and options that there are now; words of the refusal, and of the warning;
#: parameters that keep their residuals, and that do not.
CHANGES: dict[str, tuple[Any, Any, str, str, set[str], set[str]]] = {
    "excluded": (
        {},
        (perceptron, {"exclude": ["2.weight"]}),
        "a residual of '2.weight', which is excluded now, and goes without one: undo that",
        "'2.weight', which is excluded now, and goes without one; it is dropped",
        {"0.weight"},
        {"2.weight"},
    ),
    "frozen": (
        {},
        (frozen, {}),
        "it has '0.bias' of shape (64,), this model no such parameter that requires gradients",
        "residuals of 2 such parameters are dropped",
        {"2.weight"},
        {"0.weight", "0.bias"},
    ),
    "gone": (
        {},
        (smaller, {}),
        "strict=False",
        "residuals of 2 such parameters are dropped",
        {"2.weight"},
        {"4.weight", "4.bias"},
    ),
    "keeps less": (
        {"error_feedback": Tracking()},
        (perceptron, {"error_feedback": Residual(dtype=torch.bfloat16)}),
        BEGINS_ANEW,
        "the checkpoint has estimate and momentum of parameters, and this state keeps residual alone",
        set(),
        {"0.weight", "2.weight"},
    ),
    "keeps more": (
        {"error_feedback": True},
        (perceptron, {"error_feedback": Tracking()}),
        BEGINS_ANEW,
        "the checkpoint has no estimate and no momentum of parameters",
        set(),
        {"0.weight", "2.weight"},
    ),
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("ddp", change) for change in CHANGES),
        *(pytest.param("replicas", change, marks=needs_hook) for change in CHANGES),
        ("local", "excluded"),
    ],
)
@on_ranks(2)
def test_what_does_not_fit_is_refused_or_dropped(rank: int, name: str, change: str) -> None:
    """And never dropped unsaid; the warning is of the line that calls."""
    before, (make, options), refusal, warning, keep, lack = CHANGES[change]
    front = FRONTS[name](perceptron(), TopK(0.05), exchange="gather", **before)
    for number in range(2):
        front.step(batch(rank, number, front.model))
    saved = front.state.state_dict()
    front.close()
    front = FRONTS[name](make(), TopK(0.05), exchange="gather", **options)
    fresh = front.state
    with pytest.raises(ValueError) as caught:
        fresh.load_state_dict(saved)
    assert refusal in str(caught.value)
    assert fresh.state_dict()["step"] == 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fresh.load_state_dict(saved, strict=False)
    assert {Path(one.filename).name for one in told} == {"test_checkpoints.py"}
    assert warning in str(told[0].message)
    kept = {name for name, x in residuals_of(fresh.state_dict()).items() if bool(x.any())}
    assert keep <= kept
    assert not lack & kept
    front.step(batch(rank, 2, front.model))
    assert fresh.state_dict()["step"] == 3
    fresh.close()


@needs_reduce_scatter
@pytest.mark.parametrize("scattered", [False, True])
@on_ranks(2)
def test_parameters_of_a_sharded_model_can_be_swapped(rank: int, scattered: bool) -> None:
    """`torch.utils.swap_tensors` refuses what has a weak reference."""
    front = FRONTS["shards" if scattered else "replicas"](perceptron(), OneBit())
    model = front.model
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    front.step(batch(rank, 0, model))
    front.close()
