"""Checkpoints as people save them: by rank 0 alone, through torch.distributed.checkpoint, by an older release."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fronts import FRONTS, Front
from gradwire import (
    EDEN,
    QSGD,
    ChunkedTopK,
    Codec,
    CompressState,
    Identity,
    Magnitudes,
    Momentum,
    OneBit,
    PowerSGD,
    Residual,
    Ternary,
    TernGrad,
    TopK,
    Tracking,
)
from gradwire.compress.codecs.outliers import INSTEAD
from lacking import needs_hook, needs_reduce_scatter
from ranks import Ranks, on_ranks, without_address
from torch import Tensor, nn
from training import (
    Ledger,
    batch,
    digest,
    leaves,
    mean_over_ranks,
    perceptron,
    residuals_of,
    through_a_file,
    told,
    train,
    wrap,
)


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


def as_in_0_2(saved: Any, gone: str) -> Any:
    """A checkpoint of `INSTEAD`, as one of what was in its place."""
    if isinstance(saved, dict):
        return {key: as_in_0_2(value, gone) for key, value in saved.items()}
    return saved.replace(str(INSTEAD), gone) if isinstance(saved, str) else saved


GONE = "Outliers(inner=OneBit(block=1024, scale='sided'), density=0.01, values=torch.float32)"
#: Of two groups, which have the same codec now.
BOTH_GONE = f"Outliers(inner=QSGD(bits=4, rounding='nearest'), density=1e-05, values=torch.int8); {GONE}"


@pytest.mark.parametrize(
    ("name", "codec", "gone"),
    [
        *((name, INSTEAD, GONE) for name in ("ddp", "local", "adam", "horovod")),
        pytest.param("replicas", {"0.*": OneBit(), "*": INSTEAD}, GONE, marks=needs_hook),
        pytest.param("replicas", {"0.*": INSTEAD, "*": INSTEAD}, BOTH_GONE, marks=needs_hook),
        pytest.param("shards", INSTEAD, GONE, marks=needs_reduce_scatter),
    ],
    ids=str,
)
@on_ranks(2)
def test_a_codec_that_is_gone_hands_its_residuals_on(rank: int, name: str, codec: Any, gone: str) -> None:
    front = FRONTS[name](perceptron(), codec)
    for step in range(3):
        front.step(batch(rank, step, front.model))
    saved = front.state.state_dict()
    front.close()
    former, fresh = as_in_0_2(saved, gone), FRONTS[name](perceptron(), codec)
    assert "Outliers" in str(former)
    fresh.state.load_state_dict(former)
    was, now = (
        [getattr(x, "to_local", x.detach)() for x in leaves(each)] for each in (saved, fresh.state.state_dict())
    )
    assert digest(was) == digest(now)
    fresh.step(batch(rank, 3, fresh.model))
    fresh.close()


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


# -- going on ----------------------------------------------------------------------------------------------------------


def falling(step: int) -> Codec:
    return TopK(0.3) if step < 4 else OneBit()


MOVING = {"optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9)}
NARROW, STREAMING = Residual(dtype=torch.bfloat16), {"every": 4, "fragments": 2, "delay": 1}
UNSENT = STREAMING | {"keep_unsent": True}
LENGTHENED = {"keep_unsent": True, "lengthen_steps": True, "optimizer": partial(torch.optim.AdamW, lr=0.01)}
STEPPED = STREAMING | {"outer_lr": 0.7, "outer_momentum": 0.9}
#: A front, its codec and options, and after how many steps of ten it is saved, in the midst of a round for some.
RESUMED: list[tuple[str, Any, dict[str, Any], int]] = [
    ("ddp", OneBit(block=256), {"exchange": "gather"}, 4),
    ("ddp", OneBit(block=256), TWO_PASS, 4),
    ("ddp", QSGD(), {"exchange": "gather"}, 4),
    ("ddp", QSGD(), TWO_PASS, 4),
    ("ddp", TopK(0.1), {"exchange": "gather"}, 4),
    ("ddp", TopK(0.1), {"exchange": "gather", "error_feedback": Momentum()}, 4),
    ("ddp", TopK(0.1), {"exchange": "split", "error_feedback": Momentum(nesterov=True)}, 4),
    ("ddp", OneBit(), TWO_PASS | {"error_feedback": Momentum(nesterov=True)}, 4),
    ("ddp", EDEN(), TWO_PASS | {"error_feedback": Magnitudes()}, 4),
    ("local", OneBit(), TWO_PASS | {"every": 3}, 4),
    ("local", TopK(0.1), {"exchange": "split", "every": 3, "outer_momentum": 0.5, "bucket_cap_mb": 0.002}, 5),
    ("local", QSGD(bits=4), STEPPED | {"exchange": "gather"}, 6),
    ("local", PowerSGD(rank=1), {"exchange": "gather", "every": 3}, 5),
    ("local", TopK(0.1), STEPPED | {"exchange": "gather", "mixing": 0.5}, 7),
    ("local", TopK(0.1), STEPPED | {"exchange": "gather", "keep_local": True, "error_feedback": NARROW}, 7),
    ("local", OneBit(), TWO_PASS | {"every": 5, "delay": 3, "keep_local": True, "bucket_cap_mb": 0.002}, 6),
    ("local", Ternary(), {"exchange": "gather", "every": 2, "error_feedback": Tracking()}, 5),
    ("local", TopK(0.1), {"exchange": "union", "every": 2, "error_feedback": Momentum(nesterov=True)}, 5),
    ("local", QSGD(), {"exchange": "gather", "every": 2, "error_feedback": Magnitudes()}, 5),
    ("local", OneBit(), {"exchange": "gather", "every": 2, "error_feedback": NARROW}, 5),
    ("local", TopK(0.1), {"exchange": "union", "every": 2, "error_feedback": Residual(0.9, torch.int8)}, 5),
    ("local", TopK(0.1), UNSENT | {"exchange": "split"}, 6),
    ("local", TopK(0.1), UNSENT | LENGTHENED | {"exchange": "split"}, 6),
    ("local", ChunkedTopK(k=20, chunk=256), TWO_PASS | LENGTHENED | {"every": 1}, 6),
    ("adam", None, {"warmup_steps": 3}, 5),
    ("adam", None, {"warmup_steps": 6}, 5),
    ("adam", TopK(0.05), {"warmup_steps": 3, "error_feedback": Residual(0.9)}, 5),
    ("adam", falling, {"warmup_steps": 3}, 5),
    ("adam", QSGD(), {"warmup_steps": 3, "error_feedback": False, "seed": 4}, 5),
    ("lion", None, {}, 5),
    ("lion", None, {"vote": "mean"}, 5),
    ("horovod", OneBit(block=256), MOVING, 4),
    ("horovod", QSGD(bits=4), MOVING, 4),
    ("horovod", QSGD(bits=4), MOVING | {"error_feedback": True}, 4),
    ("horovod", TernGrad(), MOVING, 4),
    ("horovod", TopK(0.1), MOVING, 4),
    ("horovod", ChunkedTopK(k=16, chunk=256), MOVING, 4),
    ("horovod", TopK(0.1), MOVING | {"error_feedback": NARROW}, 4),
    ("horovod", OneBit(block=256), MOVING | {"error_feedback": Residual(dtype=torch.int8)}, 4),
    ("horovod", TopK(0.1), {"error_feedback": Momentum()}, 4),
    ("horovod", TopK(0.1), {"error_feedback": Tracking()}, 4),
    ("horovod", EDEN(), {"error_feedback": Magnitudes()}, 4),
]


@pytest.mark.parametrize("case", RESUMED, ids=without_address)
@on_ranks(2)
def test_going_on_from_a_checkpoint_changes_no_bit(rank: int, case: tuple[str, Any, dict[str, Any], int]) -> None:
    """A run that goes on; that again, after it went astray; and new ones, with the checkpoint and without."""
    name, codec, options, at = case

    def made() -> Front:
        model: nn.Module = perceptron()
        if name == "ddp":  # whose bucket of one parameter looks the same before and after it is rebuilt
            model = nn.Linear(40, 64, bias=False)
        return FRONTS[name](model, codec, **options)

    def go_on(front: Front, steps: Iterable[int]) -> str:
        for step in steps:
            front.step(batch(rank, step, front.model))
        if name == "local":
            front.state.synchronise()
        saved = front.state.state_dict()
        return digest([*front.parameters(), *leaves([saved[key] for key in ("residuals", "state") if key in saved])])

    def load(front: Front, remembers: bool = True) -> Front:
        model, optimizer, state = through_a_file(saved)
        front.model.load_state_dict(model)
        if not remembers:
            optimizer.pop("gradwire", None)
        front.optimizer.load_state_dict(optimizer)
        if remembers and front.state is not front.optimizer:
            front.state.load_state_dict(state)
        return front

    front = made()
    for step in range(at):
        front.step(batch(rank, step, front.model))
    saved = through_a_file([each.state_dict() for each in (front.model, front.optimizer, front.state)])
    runs = [go_on(front, range(at, 10))]
    go_on(front, range(90, 93))
    runs.append(go_on(load(front), range(at, 10)))
    if name == "local":
        front.close()
    for remembers in (True,) if name in ("adam", "lion") else (True, False):  # these take no checkpoint without it
        fresh = load(made(), remembers)
        runs.append(go_on(fresh, range(at, 10)))
        if name != "horovod":
            fresh.close()
    front.close()
    on, astray, again, *forgetful = runs
    assert on == astray == again
    assert on not in forgetful, "the checkpoint made no difference"


def saved_by_all(rank: int, name: str) -> tuple[bytes, bytes, str]:
    """One checkpoint for all ranks, with the means of what each has; this rank's own; and a digest of the first."""
    codec, options, file, own = *ANYWHERE[name], io.BytesIO(), io.BytesIO()
    front = FRONTS[name](perceptron(), codec, **options)
    for step in range(6):  # of `LocalUpdates` one fragment is under way
        front.step(batch(rank, step, front.model))
    saved = front.state.consolidated_state_dict()
    mine = front.state.state_dict()
    means, each = (leaves([part.get("state"), part.get("gradwire", part)["residuals"]]) for part in (saved, mine))
    for mean, x in zip(means, each, strict=True):
        torch.testing.assert_close(mean.double(), mean_over_ranks(x), atol=1e-7, rtol=0)
    inner = {} if front.optimizer is front.state else front.optimizer.state_dict()
    torch.save((front.model.state_dict(), inner, saved), file)
    torch.save(mine, own)
    front.close()
    return file.getvalue(), own.getvalue(), digest(leaves(saved))


def loaded_by_others(rank: int, name: str, data: bytes, own: bytes) -> str:
    codec, options = ANYWHERE[name]
    front = FRONTS[name](perceptron(), codec, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Horovod's goes on without
        assert "on every rank" in told(lambda: front.state.load_state_dict(torch.load(io.BytesIO(own))))
    model, optimizer, saved = torch.load(io.BytesIO(data), weights_only=True)
    front.model.load_state_dict(model)
    if optimizer:
        front.optimizer.load_state_dict(optimizer)
    front.state.load_state_dict(saved)
    torch.testing.assert_close(leaves(front.state.consolidated_state_dict()), leaves(saved), rtol=1e-6, atol=1e-8)
    for step in range(6, 8):
        front.step(batch(rank, step, front.model))
    if name == "local":
        front.state.synchronise()
    found = digest(front.parameters())
    front.close()
    return found


#: Codec and options of the fronts whose checkpoints may be of all ranks.
ANYWHERE: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddp": (OneBit(), TWO_PASS),
    "local": (TopK(0.05), STEPPED),
    "adam": (OneBit(), {"warmup_steps": 3}),
    "lion": (None, {}),
    "horovod": (OneBit(), MOVING),
}


@pytest.mark.parametrize("name", ANYWHERE)
def test_another_number_of_ranks_goes_on_with_all_of_it(ranks: Ranks, name: str) -> None:
    (saved, own, first), (_, _, second) = ranks(2).run(saved_by_all, name)
    assert first == second
    found = ranks(3).run(loaded_by_others, name, saved, own)
    assert found == found[:1] * 3


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


def foreign(name: str, good: dict[str, Any], rank: int) -> dict[str, Any]:
    """Checkpoints that are not this front's, by what is said of each."""
    if name == "adam":
        state, own = good["state"], good["gradwire"]
        return {
            "lacks 'gradwire'": torch.optim.Adam(perceptron().parameters()).state_dict(),
            "the checkpoint has codec TopK": {**good, "gradwire": {**own, "codec": "TopK"}},
            "nothing as exp_avg of parameter 4": {**good, "state": {**state, 4: {}}},
            r"\(64, 64\) as exp_avg of parameter 0": {**good, "state": {**state, 0: state[2]}},
            "parameter groups": {**good, "param_groups": []},
        }
    residuals, mine = residuals_of(good), f"rank {rank} of 2"
    found = {
        "not a checkpoint": {},
        "it lacks ": {"format": 2},
        r"has codec TopK\(density=0.01\).* OneBit.*make this one with the checkpoint's codec": {
            **good, "codec": "TopK(density=0.01)",
        },
        "rank 7 of 8.*strict=False": {**good, "residuals": {"rank 7 of 8": residuals}},
        "format 99": {**good, "format": 99},
    }  # fmt: skip
    if name == "ddp":
        shapes = {each: torch.zeros(3, 3) for each in residuals}
        return found | {
            "'elsewhere'": {**good, "residuals": {mine: {"elsewhere": torch.zeros(1)}}},
            r"\(3, 3\)": {**good, "residuals": {mine: shapes}},
        }
    first = next(iter(good["global"]))
    return found | {
        "has no momentum tensors of": {**good, "momentum": {}},
        "of another model": {**good, "global": {**good["global"], first: torch.zeros(3)}},
        "save after synchronise": {**good, "arrived": {first: good["global"][first]}},
    }


@pytest.mark.parametrize(("name", "options"), [("ddp", {}), ("local", {"outer_momentum": 0.9}), ("adam", {})])
@on_ranks(2)
def test_foreign_checkpoints_are_refused_and_change_nothing(rank: int, name: str, options: dict[str, Any]) -> None:
    front = FRONTS[name](perceptron(), OneBit(), **options)
    for step in range(3):
        front.step(batch(rank, step, front.model))
    good = front.state.state_dict()
    before = digest(leaves(good))
    for text, saved in foreign(name, good, rank).items():
        with pytest.raises(ValueError, match=text):
            front.state.load_state_dict(saved)
    assert digest(leaves(front.state.state_dict())) == before
    front.close()


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
