"""A signal's handler that calls back into the library, at any line of a step: training is as without it."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import gradwire
import gradwire.hooks.horovod as hvd
import pytest
import torch
from fsdp_drawn import mesh_of
from gradwire import (
    Identity,
    LocalUpdates,
    Momentum,
    OneBit,
    PowerSGD,
    Residual,
    Rounds,
    SufficientFactors,
    TopK,
    Tracking,
    compress_fsdp,
    overlap_forward,
)
from gradwire.compress.feedback.base import RESIDUAL, Feedback
from gradwire.hooks.comm.between_steps import REMEDY, Reentered
from gradwire.hooks.horovod.runtime.context import engine
from gradwire.hooks.training.autograd_end import current_pass
from gradwire.optim import DistributedLion, OneBitAdam
from lacking import needs_reduce_scatter
from ranks import Pool, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import batch, digest, perceptron, wrap

Ranks = Callable[[int], Pool]
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


class Front:
    """A model in training: `step` makes a step, `calls` is what a handler may call, `finish` ends it."""

    model: Any
    calls: Calls
    close: Callable[[], None]
    saves = True

    def loss(self, rank: int, number: int) -> Tensor:
        result: Tensor = self.model(batch(rank, number, self.model)).square().mean()
        return result

    def step(self, rank: int, number: int, exchange: AbstractContextManager[Any]) -> None:
        """Make a step; `exchange` is around the part of it in which ranks exchange something."""
        self.model.zero_grad()
        loss = self.loss(rank, number)
        with exchange:
            loss.backward()
        self.optimizer.step()

    def parameters(self) -> list[Tensor]:
        return [p.to_local() if hasattr(p, "to_local") else p for p in self.model.parameters()]

    def checkpoint(self) -> dict[str, Any]:
        """What a save after each step is compared with."""
        return self.calls["state_dict"]() if self.saves else {}

    optimizer: Any


def calls_of(state: Any, *names: str) -> dict[str, Callable[[], Any]]:
    def read(name: str) -> Any:
        found = getattr(state, name)
        return found() if callable(found) else found

    return {"repr": partial(repr, state), **{name: partial(read, name) for name in names}}


class DataParallel(Front):
    def __init__(self, codec: Any, overlapped: bool = False, model: Any = None, **options: Any) -> None:
        self.model, self.state = wrap(model or perceptron(), codec, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.overlap = overlap_forward(self.model, self.optimizer) if overlapped else None
        self.calls = calls_of(self.state, "statistics", "step", "tuning", "state_dict")
        if self.overlap is not None:
            self.calls = {**self.calls, "finish": self.overlap.finish, "optimizer": self.optimizer.state_dict}
        self.close = self.state.close

    def loss(self, rank: int, number: int) -> Tensor:
        result: Tensor = self.model(batch(rank, number, self.model.module)).square().mean()
        return result

    def parameters(self) -> list[Tensor]:
        if self.overlap is not None:
            self.overlap.finish()
        return list(self.model.parameters())


class Sharded(Front):
    """FSDP2; `state_dict` is a collective there, which a handler of one rank alone must not call."""

    saves = False

    def __init__(self, replicated: bool) -> None:
        mesh = mesh_of((2, 1) if replicated else (1, 2))
        self.model = perceptron()
        fully_shard(self.model[0], mesh=mesh["shard"])
        fully_shard(self.model, mesh=mesh["shard"])
        options: dict[str, Any] = {"mesh": mesh["replicate"], "fallback": None, "exchange": "gather"}
        self.state = compress_fsdp(self.model, TopK(0.1), **(options if replicated else {}))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.calls = calls_of(self.state, "statistics", "step", *(["tuning"] if replicated else []))
        self.close = self.state.close


class Local(Front):
    def __init__(self, **rounds: Any) -> None:
        self.model = perceptron()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.updates = LocalUpdates(self.model, self.optimizer, TopK(0.1), every=2, rounds=Rounds(**rounds))
        self.calls = calls_of(self.updates, "statistics", "rounds", "members", "state_dict")
        self.close = self.updates.close

    def step(self, rank: int, number: int, exchange: AbstractContextManager[Any]) -> None:
        super().step(rank, number, contextlib.nullcontext())
        with exchange:
            self.updates.step()


class Optimizer(Front):
    def __init__(self, kind: Callable[..., Any], **options: Any) -> None:
        self.model = perceptron()
        self.optimizer = kind(self.model.parameters(), lr=0.01, **options)
        self.calls = calls_of(self.optimizer, "statistics", "state_dict")
        self.close = self.optimizer.close

    def step(self, rank: int, number: int, exchange: AbstractContextManager[Any]) -> None:
        self.model.zero_grad()
        self.loss(rank, number).backward()
        with exchange:
            self.optimizer.step()


class Horovod(Front):
    def __init__(self) -> None:
        hvd.init()
        self.model = perceptron()
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.05), self.model.named_parameters(),
            compression=hvd.Compression.topk(density=0.1),
        )  # fmt: skip
        self.calls = calls_of(self.optimizer, "state_dict")
        self.close = partial(self.optimizer.load_state_dict, self.optimizer.state_dict())


class Factors(Front):
    saves = False

    def __init__(self) -> None:
        self.model = perceptron()
        self.state = SufficientFactors(self.model, ["0", "2"])
        self.wrapped = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.calls = calls_of(self.state, "statistics")
        self.close = self.state.close

    def loss(self, rank: int, number: int) -> Tensor:
        result: Tensor = self.wrapped(batch(rank, number, self.model)).square().mean()
        return result


FRONTS: dict[str, Callable[[], Front]] = {
    "gather": partial(DataParallel, TopK(0.1), exchange="gather"),
    "factors": partial(DataParallel, PowerSGD(2), exchange="factors"),
    "clip": partial(DataParallel, OneBit(), exchange="gather", error_feedback=Tracking(clip=1.0)),
    "dense": partial(DataParallel, Identity(), exchange="dense"),
    "overlap": partial(DataParallel, TopK(0.1), exchange="gather", overlapped=True),
    "FSDP replicas": partial(Sharded, True),
    "FSDP shards": partial(Sharded, False),
    "local": Local,
    "local, delayed": partial(Local, delay=1),
    "local, kept": partial(Local, delay=1, keep_local=True),
    "local, fragments": partial(Local, fragments=2),
    "adam": partial(Optimizer, OneBitAdam, warmup_steps=1),
    "lion": partial(Optimizer, DistributedLion),
    "horovod": Horovod,
    "sufficient factors": Factors,
}  # fmt: skip


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
        front = FRONTS[name]()
        digests, states = [], [text_of(front.checkpoint())]
        refusing = {"close": front.close, **{k: call for k, call in front.calls.items() if k == "state_dict"}}
        if isinstance(front, DataParallel):
            refusing["state_dict"] = front.state.consolidated_state_dict
        if isinstance(front, Sharded):
            refusing["state_dict"] = front.state.state_dict
        interruption = Interruption(refusing if refused else front.calls, 7 * (seed or 0) + rank, most, not refused)
        anywhere, exchange = (
            interruption if seed and wanted else contextlib.nullcontext() for wanted in (not refused, refused)
        )
        for number in range(STEPS):
            with anywhere:
                front.step(rank, number, exchange)
                front.checkpoint()
            states.append(text_of(front.checkpoint()))
            digests.append(digest(front.parameters()))
        front.close()
    return digests, states, (interruption.counts, interruption.saved)


def both(rank: int, name: str, seed: int, most: int, refused: bool) -> Any:
    """Of training that is left alone, and of training that is not."""
    return trained(rank, name, None, most, refused), trained(rank, name, seed, most, refused)


def check(ranks: Ranks, name: str, seed: int, most: int, refused: bool = False) -> None:
    total: Counter[tuple[str, bool]] = Counter()
    results = ranks(2).run(both, name, seed, most, refused)
    for (digests, states, _), (disturbed, same, (counts, saved)) in results:
        assert digests == disturbed
        assert states == same
        # Of the step before, or of the one that is over, whatever the handler has interrupted.
        assert set(saved) <= set(states)
        total += counts
    if "FSDP" not in name and "local" not in name:  # there ranks' own parameters differ
        assert results[0][0][0] == results[1][0][0]
    assert sum(total.values()) > 4, total
    if refused:
        assert {made for _, made in total} == {False}, total
    else:
        assert {call for call, made in total if not made} <= {"state_dict", "finish", "optimizer"}, total


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=needs_reduce_scatter) if "FSDP" in name else name for name in names]


@pytest.mark.parametrize("most", [3, 50])
@pytest.mark.parametrize("name", marked(FRONTS))
def test_a_handler_changes_nothing(ranks: Ranks, name: str, most: int) -> None:
    check(ranks, name, 1, most)


@pytest.mark.parametrize("name", marked(FRONTS))
def test_what_needs_the_end_of_a_step_is_refused_within_it(ranks: Ranks, name: str) -> None:
    check(ranks, name, 1, 5, refused=True)


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
    "overlap": {"codec": TopK(0.1), "exchange": "gather", "overlapped": True},
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
    front, digests, seen = DataParallel(model=module, grad_scaler=scaler, **options), list[str](), list[Any]()
    named, places, counted = dict(module.named_parameters()), draw.sample(range(6), 6), list[int]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(6):
            before = front.state.state_dict()
            front.optimizer.zero_grad()
            loss = front.loss(rank, number)
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
@pytest.mark.parametrize("name", marked(FRONTS))
def test_no_handler_changes_anything(ranks: Ranks, name: str, seed: int) -> None:
    check(ranks, name, seed, 1 + 3 * seed)
    check(ranks, name, seed, seed, refused=True)


@on_ranks(2)
def test_an_operation_that_a_handler_cannot_submit_counts_for_nothing(rank: int) -> list[float]:
    hvd.init()
    if rank == 0:
        with engine().submitting, pytest.raises(RuntimeError, match=REMEDY):  # as interrupted in a submission
            hvd.allreduce_async(torch.ones(3))
    result: list[float] = hvd.allreduce(torch.full((3,), float(rank))).tolist()
    return result
