"""A signal's handler that calls back into the library, at any line of a step: training is as without it."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import gradwire
import gradwire.hooks.horovod as hvd
import pytest
import torch
from fronts import FRONTS, Front, marked
from gradwire import Identity, Momentum, OneBit, PowerSGD, Residual, TopK, Tracking
from gradwire.compress.feedback.base import RESIDUAL, Feedback
from gradwire.hooks.comm.between_steps import REMEDY, Reentered
from gradwire.hooks.horovod.runtime.context import engine
from gradwire.hooks.training.autograd_end import current_pass
from ranks import Ranks, on_ranks
from torch import Tensor, nn
from training import batch, digest, perceptron

Calls = Mapping[str, Callable[[], Any]]
STEPS = 4
HOOKS = str(Path(gradwire.__file__).parent / "hooks")
#: Lines of which a handler may be called: the library's, and those of waits.
TRACED = (HOOKS, str(Path(gradwire.__file__).parent / "optim"), "<frozen", threading.__file__)
#: Where passes begin.
TORCH = str(Path(torch.__file__).parent / "autograd")


class Interruption:
    """A handler that makes one of the calls, in turn, on the main thread after drawn numbers of lines.

    Attributes:
        counts: of calls that were made, and of those that were refused, by name.
        saved: digests of the checkpoints, except those from within a backward pass.
    """

    def __init__(self, calls: Calls, seed: int, most: int, anywhere: bool) -> None:
        self._calls, self._draw, self._most = list(calls.items()), Random(seed), most
        self._left, self._anywhere = self._draw.randint(1, most), anywhere
        self.counts: Counter[tuple[str, bool]] = Counter()
        self.saved = list[str]()

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            code = frame.f_code  # comprehensions have a line for each item
            return self.trace if code.co_filename.startswith(TRACED) and code.co_name[0] != "<" else None
        if event == "line":
            self._left -= 1
            if self._left <= 0 and (self._anywhere or in_exchange(frame)):
                self._handle()
                self._left = self._draw.randint(1, self._most)
        return self.trace

    def _handle(self) -> None:  # Python traces no tracer
        name, call = self._draw.choice(self._calls)
        refused = False
        try:
            found = call()
            if name == "state_dict" and current_pass() == -1:
                self.saved.append(text_of(found))
        except RuntimeError as error:
            if REMEDY not in str(error):
                raise
            refused = True
        self.counts[name, not refused] += 1

    def __enter__(self) -> Interruption:
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


def in_exchange(frame: FrameType | None) -> bool:
    """True within a backward pass, or an optimizer's or `LocalUpdates`' step."""
    names = list[str]()
    while frame is not None:
        names.append(frame.f_code.co_name if frame.f_code.co_filename.startswith((*TRACED, TORCH)) else "")
        frame = frame.f_back
    # Passes drop callbacks once they have ended.
    return "__del__" not in names and not {"step", "_engine_run_backward"}.isdisjoint(names)


#: What a handler may read of a front's state, and call.
READS = {
    "ddp": ("statistics", "step", "tuning", "state_dict"),
    "replicas": ("statistics", "step", "tuning"),
    "shards": ("statistics", "step"),
    "local": ("statistics", "rounds", "members", "state_dict"),
    "adam": ("statistics", "state_dict"),
    "horovod": ("state_dict",),
    "factors": ("statistics",),
} | {"overlap": ("statistics", "step", "tuning", "state_dict"), "lion": ("statistics", "state_dict")}


def calls_of(kind: str, front: Front) -> dict[str, Callable[[], Any]]:
    def read(name: str) -> Any:
        found = getattr(front.state, name)
        return found() if callable(found) else found

    calls: dict[str, Callable[[], Any]] = {"repr": partial(repr, front.state)}
    calls |= {name: partial(read, name) for name in READS[kind]}
    return calls | ({"finish": front.finish, "optimizer": front.optimizer.state_dict} if kind == "overlap" else {})


def refused_calls(kind: str, front: Front) -> dict[str, Callable[[], Any]]:
    """Those that need the end of a step: of FSDP and factors a checkpoint is a collective, or there is none."""
    if kind == "horovod":
        front.close = partial(front.state.load_state_dict, front.state.state_dict())
    save = "consolidated_state_dict" if kind in ("ddp", "overlap") else "state_dict"
    return {"close": front.close} | ({} if kind == "factors" else {"state_dict": getattr(front.state, save)})


TRAININGS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "gather": ("ddp", TopK(0.1), {"exchange": "gather"}),
    "factors": ("ddp", PowerSGD(2), {"exchange": "factors"}),
    "clip": ("ddp", OneBit(), {"exchange": "gather", "error_feedback": Tracking(clip=1.0)}),
    "dense": ("ddp", Identity(), {"exchange": "dense"}),
    "overlap": ("overlap", TopK(0.1), {"exchange": "gather"}),
    "replicas": ("replicas", TopK(0.1), {"exchange": "gather"}),
    "shards": ("shards", TopK(0.1), {}),
    "local": ("local", TopK(0.1), {"every": 2}),
    "local, delayed": ("local", TopK(0.1), {"every": 2, "delay": 1}),
    "local, kept": ("local", TopK(0.1), {"every": 2, "delay": 1, "keep_local": True}),
    "local, fragments": ("local", TopK(0.1), {"every": 2, "fragments": 2}),
    "adam": ("adam", OneBit(), {}),
    "lion": ("lion", None, {}),
    "horovod": ("horovod", TopK(0.1), {}),
    "sufficient factors": ("factors", None, {}),
}


def tensors_in(found: Any) -> Iterator[Any]:
    """Tensors and numbers in a checkpoint, in its order."""
    for value in found.values() if isinstance(found, dict) else found if isinstance(found, list | tuple) else [found]:
        yield from tensors_in(value) if isinstance(value, dict | list | tuple) else [value]


def text_of(saved: Any) -> str:
    return digest(x if isinstance(x, Tensor) else torch.tensor(float(hash(x) % 9973)) for x in tensors_in(saved))


def trained(rank: int, name: str, seed: int | None, most: int, refused: bool) -> tuple[list[str], list[str], Any]:
    """Digests of the parameters after each step, and of the state; and what a handler got. It calls the front's `calls`
    anywhere; or, within exchanges, what is `refused` there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, codec, options = TRAININGS[name]
        front = FRONTS[kind](perceptron(), codec, **options)
        calls = calls_of(kind, front)
        refusing = refused_calls(kind, front)

        def checkpoint() -> Any:
            return calls.get("state_dict", dict)()

        digests, states = [], [text_of(checkpoint())]
        interruption = Interruption(refusing if refused else calls, 7 * (seed or 0) + rank, most, not refused)
        anywhere, exchange = (
            interruption if seed and wanted else contextlib.nullcontext() for wanted in (not refused, refused)
        )
        for number in range(STEPS):
            with anywhere:
                front.step(batch(rank, number, front.model), exchange)
                checkpoint()
            states.append(text_of(checkpoint()))
            digests.append(digest(front.parameters()))
        front.close()
    return digests, states, (interruption.counts, interruption.saved)


def check(ranks: Ranks, name: str, seed: int, ways: Sequence[tuple[int, bool]]) -> None:
    """Training that is left alone, and training that is not: by a handler's calls, or by those that are refused."""
    alone = ranks(2).run(trained, name, None, 1, False)
    if name not in ("replicas", "shards") and "local" not in name:  # there ranks' own parameters differ
        assert alone[0][0] == alone[1][0]
    for most, refused in ways:
        total: Counter[tuple[str, bool]] = Counter()
        disturbed = ranks(2).run(trained, name, seed, most, refused)
        for (digests, states, _), (same, found, (counts, saved)) in zip(alone, disturbed, strict=True):
            assert digests == same
            assert states == found
            # Of the step before, or of the one that is over, whatever the handler has interrupted.
            assert set(saved) <= set(states)
            total += counts
        assert sum(total.values()) > 4, total
        if refused:
            assert {made for _, made in total} == {False}, total
        else:
            assert {call for call, made in total if not made} <= {"state_dict", "finish", "optimizer"}, total


@pytest.mark.parametrize("name", marked(TRAININGS))
def test_a_handler_changes_nothing_and_is_refused_what_needs_the_end_of_a_step(ranks: Ranks, name: str) -> None:
    check(ranks, name, 1, [(3, False), (50, False), (5, True)])


class SaveAt:
    """A handler that saves once on the main thread, at the first line where it can after a number of lines of a
    backward pass, which are the same on all ranks; None: never.

    Attributes:
        lines: so far.
    """

    def __init__(self, save: Callable[[], Any], after: float | None) -> None:
        self._save, self._after, self.lines = save, after, 0
        self.saved: dict[str, Any] = {}

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not self.saved and in_exchange(frame):
            self.lines += 1
            if self._after is not None and self.lines > self._after:
                with contextlib.suppress(Reentered):
                    self.saved = self._save()
        return self.trace if frame.f_code.co_filename.startswith(HOOKS) and not self.saved else None


SAVES: dict[str, dict[str, Any]] = {
    "gather": {"codec": TopK(0.1), "exchange": "gather"},
    "two_pass": {"codec": OneBit(), "exchange": "two_pass"},
    "split": {"codec": TopK(0.1), "exchange": "split"},
    "mask": {"codec": TopK(0.1), "exchange": "mask"},
    "factors": {"codec": PowerSGD(2), "exchange": "factors"},
    "union, excluded": {"codec": TopK(0.1), "exchange": "union", "exclude": ["*.bias"]},
    "tracking": {"codec": OneBit(), "exchange": "gather", "error_feedback": Tracking(clip=1e3), "exclude": ["*.bias"]},
    "momentum": {"codec": TopK(0.1), "exchange": "gather", "error_feedback": Momentum(0.5, masking=False)},
    "bfloat16": {"codec": TopK(0.1), "exchange": "gather", "error_feedback": Residual(dtype=torch.bfloat16)},
    "scaler": {"codec": TopK(0.1), "exchange": "gather", "grad_scaler": 8.0},
    "unused": {"codec": TopK(0.1), "exchange": "gather", "ddp": {"find_unused_parameters": True}},
    "views": {"codec": TopK(0.1), "exchange": "gather", "ddp": {"gradient_as_bucket_view": True}},
    "overlap": {"codec": TopK(0.1), "exchange": "gather", "front": "overlap"},
    "dense": {"codec": Identity(), "exchange": "dense"},
}  # fmt: skip


def saved_in_backward(rank: int, name: str, seed: int, lines: Sequence[int] = ()) -> Any:
    """Digests of the parameters; for each step the state before, gradients, and the state saved within backward, where
    passes have so many `lines`; and these."""
    options, draw = dict(SAVES[name]), Random(seed)
    scale, module = options.pop("grad_scaler", None), perceptron()
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    if name == "unused":
        module[-1].register_parameter("idle", nn.Parameter(torch.ones(3)))
    front = FRONTS[options.pop("front", "ddp")](module, grad_scaler=scaler, **options)
    digests, seen = list[str](), list[Any]()
    named, places, counted = dict(module.named_parameters()), draw.sample(range(6), 6), list[int]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(6):
            before = front.state.state_dict()
            front.optimizer.zero_grad()
            loss = front.run(batch(rank, number, module)).square().mean()
            loss = loss if scaler is None else scaler.scale(loss)
            found = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
            gradients = {
                n: torch.zeros(p.shape) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)
            }
            place = (places[number] + draw.random()) / 6
            at = SaveAt(front.state.state_dict, place * lines[number] if lines else None)
            sys.settrace(at.trace)
            loss.backward()
            sys.settrace(None)
            seen.append((before, gradients, at.saved))
            counted.append(at.lines)
            if scaler is None:
                front.optimizer.step()
            else:
                scaler.step(front.optimizer)
                scaler.update()
            digests.append(digest(front.parameters()))
        for _, _, saved in seen:
            front.state.load_state_dict(saved or before)
        front.close()
    return digests, seen, counted


def means_of(saved: list[dict[str, Any]], name: str) -> dict[str, Tensor]:
    """The mean over the ranks of each vector that they have saved of a parameter; nothing of one that has none."""
    vectors: list[dict[str, Any]] = [{RESIDUAL: each["residuals"], **each.get("vectors", {})} for each in saved]
    ranks_own = [{vector: next(iter(found.values())) for vector, found in each.items()} for each in vectors]
    return {
        vector: torch.stack([each[vector][name].double() for each in ranks_own]).mean(0)
        for vector in ranks_own[0]
        if name in ranks_own[0][vector]
    }


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 22))])
@pytest.mark.parametrize("name", SAVES)
def test_a_save_within_backward_is_that_of_a_step_given_up(ranks: Ranks, name: str, seed: int) -> None:
    alone = ranks(2).run(saved_in_backward, name, seed)
    saving = ranks(2).run(saved_in_backward, name, seed, alone[0][2])
    for (digests, *_), (same, *_) in zip(alone, saving, strict=True):
        assert digests == same
    given = SAVES[name].get("error_feedback")
    strategy = given if isinstance(given, Feedback) else Residual()
    kinds = Counter[str]()
    for number, of_ranks in enumerate(zip(*(seen for _, seen, _ in saving), strict=True)):
        before, gradients, saved = ([each[place] for each in of_ranks] for place in range(3))
        if not all(saved):
            continue  # the pass had fewer lines
        assert {each["step"] for each in (*before, *saved)} == {number}
        for parameter in gradients[0]:
            gradient = torch.stack([each[parameter].double() for each in gradients]).mean(0)
            there, then = means_of(before, parameter), means_of(saved, parameter)
            if all(torch.equal(there[vector], then[vector]) for vector in there):
                kinds["as before"] += 1
            else:
                off = strategy.invariant(gradient, there, torch.zeros(()), then)
                scale = max(float(x.abs().max()) for x in (gradient, *there.values()))
                assert off.abs().max() < (1e-2 if name == "bfloat16" else 1e-5) * scale, (number, parameter)
                kinds["given up"] += 1
    assert kinds["as before"] > 1, kinds
    if name == "dense":
        assert not kinds["given up"], kinds
    else:
        assert kinds["given up"] > 1, kinds


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
@pytest.mark.parametrize("name", marked(TRAININGS))
def test_no_handler_changes_anything(ranks: Ranks, name: str, seed: int) -> None:
    check(ranks, name, seed, [(1 + 3 * seed, False), (seed, True)])


@on_ranks(2)
def test_an_operation_that_a_handler_cannot_submit_counts_for_nothing(rank: int) -> list[float]:
    hvd.init()
    if rank == 0:
        with engine().submitting, pytest.raises(RuntimeError, match=REMEDY):  # as interrupted in a submission
            hvd.allreduce_async(torch.ones(3))
    result: list[float] = hvd.allreduce(torch.full((3,), float(rank))).tolist()
    return result
