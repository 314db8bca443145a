"""What a signal's handler raises on one rank while ranks exchange something: it reaches the caller, and nothing else
is as it would not have been."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fsdp_drawn import mesh_of
from gradwire import Identity, LocalUpdates, Rounds, TopK, compress_fsdp
from gradwire.hooks.comm.between_steps import Reentered
from gradwire.hooks.comm.pipeline import Pipeline
from gradwire.hooks.core.dense_path import DensePath, Sum
from gradwire.hooks.core.session import Announcement
from gradwire.optim import OneBitAdam
from lacking import needs_reduce_scatter
from ranks import Pool
from torch.distributed.fsdp import fully_shard
from training import batch, digest, perceptron, train, wrap

Ranks = Callable[[int], Pool]
STEPS, AT = 5, 2


class Stopped(BaseException):
    """What the handler raises."""


class Alarm(OSError):
    """The same, as an ordinary exception."""


@contextlib.contextmanager
def disturbed(owner: Any, name: str, raised: BaseException) -> Iterator[None]:
    """This way of waiting is left once, by what a handler raises; and that is what the block raises."""
    wait, left = getattr(owner, name), list[bool]()

    def leaves(*given: Any) -> Any:
        words = given[0] if isinstance(given[0], Announcement) else None
        if not left and (words is None or words.in_flight is not None):
            left.append(True)
            raise raised
        return wait(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, leaves)
        with pytest.raises(type(raised)):
            yield
    assert left


class Disturbed:
    """A sum under way, of which nobody waits for the end the first time."""

    def __init__(self, work: Any, raised: BaseException) -> None:
        self.work, self.raised = work, [raised]

    def wait(self) -> None:
        if self.raised:
            raise self.raised.pop()
        self.work.wait()


@contextlib.contextmanager
def disturbed_sum(raised: BaseException) -> Iterator[None]:
    """The same, of the first of the sums of a step in which all is dense."""
    begin, sums = DensePath.reduce, list[Sum]()

    def reduce(straight: DensePath, buffer: torch.Tensor) -> Any:
        future: Any = begin(straight, buffer)
        sums.append(future)
        if len(sums) == 1:
            future.work = Disturbed(future.work, raised)
        return future

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DensePath, "reduce", reduce)
        with pytest.raises(type(raised)):
            yield
    assert len(sums) > 1


def data_parallel(rank: int, way: str, raised: BaseException | None) -> list[str]:
    codec, exchange = (Identity(), "dense") if way == "straight" else (TopK(0.1), "gather")
    ddp, state = wrap(perceptron(), codec, exchange=exchange)
    digests = train(rank, ddp, range(AT))
    if raised is not None and rank == 0:
        ddp.zero_grad()
        with disturbed_sum(raised) if way == "straight" else disturbed(Pipeline, "wait", raised):
            ddp(batch(rank, AT, ddp.module)).square().mean().backward()
        digests.append(digest(p.grad for p in ddp.parameters()))
        with torch.no_grad():
            for p in ddp.parameters():
                p -= 0.01 * p.grad
    else:
        digests += train(rank, ddp, range(AT, AT + 1))
    digests += train(rank, ddp, range(AT + 1, STEPS))
    kept = state.consolidated_state_dict()["residuals"]["mean"]
    state.close()
    return [*digests, digest(kept[name] for name in sorted(kept))]


def sharded(rank: int, way: str, raised: BaseException | None) -> list[str]:
    mesh = mesh_of((2, 1))
    left: tuple[Any, str] = (Pipeline, "wait") if way == "means" else (Announcement, "equal")
    model: Any = perceptron()
    fully_shard(model[0], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    state = compress_fsdp(model, TopK(0.1), mesh=mesh["replicate"], exchange="gather", fallback=None)
    digests = []
    for step in range(STEPS):
        model.zero_grad()
        stops = raised is not None and rank == 0 and step == AT
        with disturbed(*left, raised) if raised and stops else contextlib.nullcontext():
            loss = model(batch(rank, step, model)).square().mean()
            loss.backward()
        grads: list[Any] = [p.grad for p in model.parameters()]
        digests.append(digest(grad.to_local() for grad in grads))
    [kept] = state.state_dict()["residuals"].values()
    state.close()
    return [*digests, digest(kept[name].to_local() for name in sorted(kept))]


def by_itself(rank: int, way: str, raised: BaseException | None) -> list[str]:
    model = perceptron()
    if way == "adam":
        made: Any = OneBitAdam(model.parameters(), lr=0.01, warmup_steps=1)
        step, optimizer = made.step, made
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        rounds = {"delay": Rounds(delay=1, keep_local=True), "fragments": Rounds(fragments=2)}.get(way, Rounds())
        made = LocalUpdates(model, optimizer, TopK(0.1), every=2, rounds=rounds)
        step = made.step
    for number in range(6):
        optimizer.zero_grad()
        model(batch(rank, number, model)).square().mean().backward()
        if way != "adam":
            optimizer.step()
        stops = raised is not None and rank == 0 and number == 3 + (way == "delay")
        with disturbed(Pipeline, "wait", raised) if raised and stops else contextlib.nullcontext():
            step()
    if way != "adam":
        made.synchronise()
    made.close()
    return [digest(model.parameters())]


PLAYS = {"threads": data_parallel, "straight": data_parallel, "means": sharded, "uses": sharded}


def both(rank: int, way: str, raised: BaseException) -> tuple[list[str], list[str]]:
    """The results of a training that is left alone, and of one that is not."""
    play = PLAYS.get(way, by_itself)
    return play(rank, way, None), play(rank, way, raised)


@pytest.mark.parametrize(
    ("way", "raised"),
    [
        *((way, raised) for way in ("threads", "straight") for raised in (Stopped(), Alarm(), Reentered())),
        *(
            pytest.param(way, raised, marks=needs_reduce_scatter)
            for way in ("means", "uses")
            for raised in (Stopped(), Reentered())
        ),
        *((way, Stopped()) for way in ("adam", "rounds", "fragments", "delay")),
    ],
    ids=repr,
)
def test_training_goes_on_as_if_nothing_had_been(ranks: Ranks, way: str, raised: BaseException) -> None:
    (alone, stopped), other = ranks(2).run(both, way, raised)
    assert alone == stopped
    assert other == (alone, stopped)
