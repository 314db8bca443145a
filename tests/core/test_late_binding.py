"""A state that is made before its model: what it does until it meets it, and that it is then as any other."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fronts import FRONTS, marked
from gradwire import (
    Cast,
    CompressState,
    Identity,
    OneBit,
    TopK,
    Tracking,
    compress_hook,
    schedules,
)
from gradwire.trainers import files, register_hook
from ranks import Ranks, on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from training import Ledger, batch, digest, mean_residuals, perceptron, residuals_of, through_a_file, told, train, wrap

OPTIONS: dict[str, Any] = {"fallback": None, "exchange": "gather"}


# -- without a model, or a process group -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (CompressState, "codec is missing"),
        (lambda: CompressState(nn.Linear(2, 2)), "codec is missing"),
        (lambda: CompressState(OneBit()).bind(nn.Linear(2, 2)), "init_process_group"),
        (lambda: CompressState(OneBit()).state_dict(), r"state\.bind\(ddp_model\)"),
        (lambda: CompressState(OneBit()).consolidated_state_dict(), r"state\.bind\(ddp_model\)"),
    ],
    ids=range(5),
)
def test_what_can_be_told_without_a_model_is(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
        make()


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))], ids=["copy", "pickle"]
)
def test_it_can_be_copied_and_handed_a_checkpoint(how: Callable[[Any], Any]) -> None:
    state = CompressState(codec=schedules.dgc(0.01, warmup_steps=10), warmup_steps=2, exclude=["*.bias"])
    assert not state.bound
    assert "no model yet" in repr(state)
    saved = {"format": 2, "anything": torch.ones(2)}
    state.load_state_dict(saved)
    state.grad_scaler = scaler = torch.amp.GradScaler("cpu")
    twin = how(state)
    assert not twin.bound
    assert twin.state_dict().keys() == saved.keys()
    assert twin.grad_scaler.get_scale() == scaler.get_scale()
    state.close()
    assert state.statistics().steps == state.step == 0


# -- the same as a state that was made with its model ------------------------------------------------------------------


def late(rank: int, how: str) -> Any:
    """Digests of every step, whichever way the state came to its model."""
    # DDP's account of who uses what must not be asked for from within its hook.
    of_ddp: dict[str, Any] = {"bucket_cap_mb": 0.02, "find_unused_parameters": how == "registered"}
    early, _ = wrap(perceptron(), TopK(0.05), exclude=["*.bias"], exchange="gather", ddp=of_ddp)
    expected = train(rank, early, range(4))
    state = CompressState(TopK(0.05), exclude=["*.bias"], **OPTIONS)
    ddp = DistributedDataParallel(perceptron(), **of_ddp)
    ledger = Ledger(ddp.module)
    if how == "bound":
        assert state.bind(ddp) is state
        assert state.bind(ddp) is state  # the other rank need not come
    if how == "inside":  # nobody but the bucket knows whose it is

        def hook(inside, bucket):  # type: ignore[no-untyped-def]  # DDP would not know annotations that are text
            return compress_hook(inside[0], bucket)

        ddp.register_comm_hook([state], hook)
    else:
        ddp.register_comm_hook(state, compress_hook)
    # A model with the same state by mistake, and one that is gone, are not mistaken for it.
    other = DistributedDataParallel(perceptron())
    other.register_comm_hook(state, compress_hook)
    found = train(rank, ddp, range(4), ledger)
    return found == expected, ledger.error(state), sorted(residuals_of(state.state_dict())), state.bound


@pytest.mark.parametrize("how", ["bound", "registered", "inside"])
def test_a_late_state_is_as_any_other(ranks: Ranks, how: str) -> None:
    for same, error, names, bound in ranks(2).run(late, how):
        assert same
        assert error < 1e-5
        assert names == ["0.weight", "2.weight", "4.weight"]
        assert bound


@on_ranks(2)
def test_a_checkpoint_may_come_before_the_model_and_the_model_again(rank: int) -> None:
    """Loaded before there is a model: as if it had been loaded afterwards."""
    ddp, state = wrap(perceptron(), OneBit(), exchange="gather")
    train(rank, ddp, range(3))
    both = through_a_file((state.state_dict(), ddp.module.state_dict()))
    runs = []
    for late in (False, True):
        saved, weights = copy.deepcopy(both)
        model = perceptron()
        model.load_state_dict(weights)
        state = CompressState(OneBit(), **OPTIONS)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
        if late:
            state.load_state_dict(saved)
        else:
            state.bind(ddp).load_state_dict(saved)
        ddp.register_comm_hook(state, compress_hook)
        runs.append((train(rank, ddp, range(3, 6)), state.step))
    # The same model, wrapped again: nothing of what is kept is lost. Then another one, which is refused.
    again = DistributedDataParallel(model, bucket_cap_mb=0.02)
    before = digest(residuals_of(state.state_dict()).values())
    kept = digest(residuals_of(state.bind(again).state_dict()).values()) == before
    again.register_comm_hook(state, compress_hook)
    train(rank, again, range(6, 8))
    assert kept
    for other in (perceptron(layers=2), perceptron(width=32)):
        with pytest.raises(ValueError, match="belongs to another model"):
            state.bind(DistributedDataParallel(other))
    train(rank, again, range(8, 9))
    assert runs[0] == runs[1]
    assert runs[0][1] == 6
    assert state.step == 9


def wrong(rank: int, case: str) -> str:
    """What is wrong on one rank, and seen only when it binds, is said on both."""
    state = CompressState(TopK(0.05) if case == "options" and rank else OneBit(), **OPTIONS)
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
    if case == "checkpoint":
        state.load_state_dict({"format": 7} if rank else {})
    if case == "nowhere":
        # A module that DDP does not find the way it is usually found: nobody has registered anything.
        state = CompressState(OneBit(), **OPTIONS)
        bucket = Bucket()
        return told(lambda: state.submit(bucket))  # type: ignore[arg-type]
    if case == "options":
        ddp.register_comm_hook(state, compress_hook)
    text = told(lambda: train(rank, ddp, range(1)) if case == "options" else state.bind(ddp))
    assert not state.bound
    return text


class Bucket:
    """A bucket of no model."""

    def buffer(self) -> torch.Tensor:
        return torch.zeros(4)

    def parameters(self) -> list[torch.Tensor]:
        return [torch.zeros(4)]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("options", "ranks disagree on codec"),
        ("checkpoint", "not a checkpoint of CompressState"),
        ("nowhere", r"state\.bind\(ddp_model\)"),
    ],
)
def test_what_is_wrong_is_said_on_every_rank(ranks: Ranks, case: str, words: str) -> None:
    for text in ranks(2).run(wrong, case):
        assert words.replace("\\", "") in text


# -- slots made for PyTorch's own states -------------------------------------------------------------------------------


@on_ranks(2)
def test_replicate(rank: int) -> str:
    """torch's `replicate`: DDP is made in the first forward pass, around a list of parameters."""
    from torch.distributed._composable.replicate import replicate

    model: Any = perceptron()
    ledger = Ledger(model)
    state = CompressState(TopK(0.05), exclude=["*.bias"], **OPTIONS)
    replicate(model, bucket_cap_mb=0.02)
    model.register_comm_hook(state, compress_hook)
    alone = perceptron()
    for step in range(3):
        data = batch(rank, step, model)
        gradients = torch.autograd.grad(alone(data).square().mean(), list(alone.parameters()))
        for name, gradient in zip(ledger.wanted, gradients, strict=True):
            dist.all_reduce(gradient)
            ledger.wanted[name] += gradient.double() / dist.get_world_size()
        model.zero_grad()
        model(data).square().mean().backward()
        ledger.receive()
    assert ledger.error(state) < 1e-5
    assert sorted(residuals_of(state.state_dict())) == ["0.weight", "2.weight", "4.weight"]
    return digest(p.grad for p in model.parameters())


@on_ranks(2)
def test_pytorchs_wrapper(rank: int) -> None:
    """PyTorch's own wrapper around the hook, which hands it buckets of 16 bits."""
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
    ddp.register_comm_hook(CompressState(Identity(), **OPTIONS), default_hooks.fp16_compress_wrapper(compress_hook))
    plain = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
    for model in (ddp, plain):
        model(batch(rank, 0, model.module)).square().mean().backward()
    pairs = [(a.grad, b.grad) for a, b in zip(ddp.parameters(), plain.parameters(), strict=True)]
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs if a is not None and b is not None)
    assert 0 < error < 2e-3


@on_ranks(2)
def test_python_reducer_is_refused(rank: int) -> None:
    import torch._dynamo

    state = CompressState(Cast(torch.float16))
    usual = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        ddp = DistributedDataParallel(perceptron())
    finally:
        torch._dynamo.config.optimize_ddp = usual
    with pytest.raises(ValueError, match='set it to "ddp_optimizer"'):
        state.bind(ddp)
    parameter = next(ddp.parameters())
    with pytest.raises(TypeError, match=r"got a tuple.*ddp_optimizer"):
        compress_hook(state, (parameter, parameter))  # type: ignore[arg-type]


# -- files of a rank each, as the trainers have them -------------------------------------------------------------------


def saved(rank: int, folder: str) -> dict[str, Any]:
    ddp, state = wrap(perceptron(), TopK(0.05), exchange="gather")
    train(rank, ddp, range(3))
    files.save(state, folder)
    return {name: mean.numpy() for name, mean in mean_residuals(state).items()}


def loaded(rank: int, folder: str) -> tuple[dict[str, Any], int, list[str]]:
    state = CompressState(TopK(0.05), **OPTIONS)
    assert files.load(state, folder)
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
    register_hook(ddp, state)
    means = {name: mean.numpy() for name, mean in mean_residuals(state).items()}
    dist.barrier()
    files.save(state, folder)
    dist.barrier()
    return means, state.step, sorted(path.name for path in Path(folder).iterdir())


def test_another_number_of_ranks_gets_the_mean(ranks: Ranks, tmp_path: Path) -> None:
    expected = ranks(2).run(saved, str(tmp_path))[0]
    for found, step, names in ranks(3).run(loaded, str(tmp_path)):
        assert step == 3
        assert found.keys() == expected.keys()
        assert all(abs(found[name] - expected[name]).max() <= 1e-6 * abs(expected[name]).max() for name in expected)
        assert names == [f"gradwire_{rank}_of_3.pt" for rank in range(3)], "files of other ranks are left behind"


def damaged(rank: int, folder: str, case: str) -> str:
    """A rank's file is missing, or is another checkpoint's; or there is none at all."""
    state = CompressState(TopK(0.05), **OPTIONS)
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            found = files.load(state, folder)
            state.bind(ddp)
        except ValueError as error:
            return str(error)
    assert not found
    return str(seen[0].message)


def test_a_checkpoint_that_is_not_whole_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    assert all("no file of gradwire's" in text for text in ranks(2).run(damaged, str(tmp_path), "none"))
    ranks(2).run(saved, str(tmp_path))
    (tmp_path / "gradwire_1_of_2.pt").unlink()
    for text in ranks(2).run(damaged, str(tmp_path), "missing"):
        assert "has the residuals of rank 0 of 2, and this is rank 1 of 2" in text


@on_ranks(2)
def test_a_trainers_scaler_is_followed(rank: int) -> None:
    """Fits of several trainers: the scaler that each has is followed, whatever was followed before."""
    theirs, own, next_one = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 16.0, 1024.0))
    found: list[Any] = []
    state = CompressState(OneBit(), **OPTIONS)
    model = perceptron()
    before = 0.0
    for scaler in (theirs, theirs, next_one):
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
        register_hook(ddp, state, scaler)
        scaler.scale(ddp(batch(rank, 0, model)).square().mean()).backward()
        saved = state.state_dict()
        size = sum(float(x.abs().sum()) for x in residuals_of(saved).values()) / saved["scale"]
        found += [state.grad_scaler is scaler, saved["scale"] == scaler.get_scale(), size < 4 * (before or size)]
        before = before or size
    text = told(lambda: register_hook(DistributedDataParallel(model), state, None))
    # Before it has trained: the trainer's, or its own where the trainer has none.
    state = CompressState(OneBit(), grad_scaler=own, **OPTIONS)
    ddp = DistributedDataParallel(perceptron())
    register_hook(ddp, state, None)
    found.append(state.grad_scaler is own)
    register_hook(ddp, state, theirs)
    register_hook(ddp, state)
    found = [*found, state.grad_scaler is theirs]
    assert all(found), found
    assert "cannot begin or cease to follow a GradScaler" in text


# -- what reviews have found -------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_bind_that_fails_leaves_nothing_behind(rank: int) -> None:
    """`bind` fails on the other rank: what was loaded here does not stay, so that ranks do not differ afterwards."""
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
    saved = CompressState(OneBit(), **OPTIONS).bind(ddp).state_dict()
    state = CompressState(OneBit(), **OPTIONS)
    state.load_state_dict({**saved, "seed": 9, "step": 5} if rank == 0 else {})
    with pytest.raises(ValueError, match="not a checkpoint of CompressState"):
        state.bind(ddp)
    assert (state._options.seed, state.step, state.bound) == (0, 0, False)


@on_ranks(2)
def test_the_hook_is_expected_at_the_model_of_now(rank: int) -> None:
    """Made for a model, and registered only when that is wrapped again; the former wrapper lives on."""
    former = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
    state = CompressState(former, OneBit(), **OPTIONS)
    again = DistributedDataParallel(former.module, bucket_cap_mb=0.02)
    register_hook(again, state)
    train(rank, again, range(2))
    assert former.module is again.module
    assert (state.step, len(former._comm_hooks)) == (2, 0)


# -- another model of the same shapes ----------------------------------------------------------------------------------


def begin(state: CompressState, seed: int, how: str) -> Any:
    """A fresh model of equal shapes, with this state."""
    model = perceptron()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    if how == "registered":
        register_hook(ddp, state)
    else:
        state.bind(ddp)
        ddp.register_comm_hook(state, compress_hook)
    return ddp


@pytest.mark.parametrize("how", ["registered", "bound"])
@pytest.mark.parametrize("options", [{}, {"warmup_steps": 2}, {"schedule": True}, {"error_feedback": Tracking()}])
@on_ranks(2)
def test_a_fresh_model_of_equal_shapes_begins_anew(rank: int, how: str, options: dict[str, Any]) -> None:
    calls = []

    def make() -> CompressState:
        given = dict(options)
        codec = (lambda step: Identity() if step < 2 else TopK(0.05)) if given.pop("schedule", 0) else TopK(0.05)

        def exclude(name: str, parameter: Any) -> bool:
            calls.append(parameter)
            return name.endswith("bias")

        return CompressState(codec, exclude=exclude, **{**OPTIONS, "exchange": "gather", **given})

    state = make()
    first = begin(state, 1, how)
    train(rank, first, range(3))
    if rank:
        del first  # whether the former wrapper lives does not matter
    second = begin(state, 2, how)
    assert state.step == state.statistics().steps == 0
    assert any(calls[-1] is p for p in second.parameters())
    assert train(rank, second, range(3)) == train(rank, begin(make(), 2, how), range(3))
    assert state.step == 3


@on_ranks(2)
def test_what_is_the_same_model(rank: int) -> None:
    """Its own parameters, wherever they are: moved, wrapped again, thawed, copied or loaded with the state."""
    state = CompressState(OneBit(), **OPTIONS)
    model: Any = perceptron()
    model[0].requires_grad_(False)

    def wrapped(state: CompressState, model: Any) -> tuple[int, bool]:
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
        before = {} if not state.bound else residuals_of(state.state_dict())
        register_hook(ddp, state)
        kept = residuals_of(state.state_dict())
        found = state.step, all(torch.equal(kept[name], before[name]) for name in before)
        train(rank, ddp, range(1))
        return found

    assert wrapped(state, model) == (0, True)
    model.requires_grad_(True)
    assert wrapped(state, model.double().float()) == (1, True)
    twin, its_state = copy.deepcopy((model, state))
    assert wrapped(its_state, twin) == (2, True)
    saved = state.state_dict()
    assert wrapped(pickle.loads(pickle.dumps(state)), perceptron()) == (2, True)  # as a checkpoint: by name
    assert wrapped(state, perceptron())[0] == 0
    state.load_state_dict(saved)
    assert wrapped(state, perceptron()) == (2, True)
    other: Any = perceptron()
    other[0] = model[0]
    state = CompressState(OneBit(), **OPTIONS)
    wrapped(state, model)
    with pytest.raises(ValueError, match=r"belongs to another model: they differ in '2\.weight'"):
        state.bind(DistributedDataParallel(other))


@pytest.mark.parametrize("exchange", ["gather", "dense"])
@on_ranks(2)
def test_another_model_is_refused_within_a_step(rank: int, exchange: str) -> None:
    """Its hook has the state of another: refused in every step, and the own model trains on."""
    state = CompressState(OneBit(), **{**OPTIONS, "exchange": exchange})
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
    ddp.register_comm_hook(state, compress_hook)
    other = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
    other.register_comm_hook(state, compress_hook)
    train(rank, ddp, range(2))
    for _ in range(2):
        with pytest.raises(ValueError, match="was made for another model"):
            train(rank, other, range(1))
    train(rank, ddp, range(2))
    assert state.step == 4


@on_ranks(2)
def test_ranks_with_different_models_all_say_so(rank: int) -> None:
    state = CompressState(OneBit(), **OPTIONS)
    model = perceptron()
    for fresh in (False, rank == 1):
        ddp = DistributedDataParallel(perceptron() if fresh else model, bucket_cap_mb=0.02)
        if state.bound:
            with pytest.raises(ValueError, match="ranks disagree on step"):
                register_hook(ddp, state)
            assert state.step == 2
        else:
            register_hook(ddp, state)
            train(rank, ddp, range(2))


@on_ranks(2)
def test_a_step_follows_a_wrong_state_and_a_missing_hook(rank: int) -> None:
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
    ddp.register_comm_hook(None, compress_hook)
    for _ in range(2):
        with pytest.raises(TypeError, match="is a NoneType"):
            train(rank, ddp, range(1))
    bare = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
    state = CompressState(bare, OneBit(), **OPTIONS)
    with pytest.raises(RuntimeError, match="without the hook"):
        train(rank, bare, range(1))
    state.close()
    train(rank, bare, range(2))


@contextlib.contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    """torch makes tensors of this dtype, as scripts say that train in it."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", marked(name for name in FRONTS if name not in ("overlap", "horovod")))
@on_ranks(2)
def test_fronts_may_be_made_saved_and_loaded_in_any_mode(rank: int, name: str) -> None:
    """In inference mode; and with another default dtype, steps too."""
    digests, data = [], [batch(rank, step, perceptron()) for step in range(4)]
    wide, narrow = partial(default, torch.float64), partial(default, torch.bfloat16)
    for mode in (torch.inference_mode, torch.enable_grad, wide, narrow):
        options: dict[str, Any] = {"error_feedback": Tracking()} if name == "ddp" else {}
        front = FRONTS[name](perceptron(), OneBit(), within=mode(), **options)
        if name in ("adam", "lion"):
            more = nn.Parameter(torch.zeros(3))
            with mode():
                front.optimizer.add_param_group({"params": [more]})
        for step in range(4):
            with torch.enable_grad() if mode is torch.inference_mode else mode():
                front.step(data[step])
            if step == 2 and name in ("ddp", "local", "adam", "lion"):
                with mode():
                    front.state.consolidated_state_dict()
                    front.state.load_state_dict(front.state.state_dict())
        digests.append(digest(front.parameters()))
        front.close()
    assert digests == digests[:1] * 4
