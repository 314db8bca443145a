"""What a signal's handler raises on one rank while ranks exchange something: it reaches the caller, and nothing else
is as it would not have been."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fronts import FRONTS
from gradwire import Identity, TopK
from gradwire.hooks.comm.between_steps import Reentered
from gradwire.hooks.comm.pipeline import Pipeline
from gradwire.hooks.core.dense_path import DensePath, Sum
from gradwire.hooks.core.session import Announcement
from lacking import needs_reduce_scatter
from ranks import Ranks
from training import batch, digest, perceptron, train, wrap

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


#: A front and its options; what is left once, and in which step.
WAYS: dict[str, tuple[str, dict[str, Any], tuple[Any, str], int]] = {
    "means": ("replicas", {"exchange": "gather"}, (Pipeline, "wait"), AT),
    "uses": ("replicas", {"exchange": "gather"}, (Announcement, "equal"), AT),
    "adam": ("adam", {}, (Pipeline, "wait"), 3),
    "rounds": ("local", {"every": 2}, (Pipeline, "wait"), 3),
    "fragments": ("local", {"every": 2, "fragments": 2}, (Pipeline, "wait"), 3),
    "delay": ("local", {"every": 2, "delay": 1, "keep_local": True}, (Pipeline, "wait"), 4),
}


def by_front(rank: int, way: str, raised: BaseException | None) -> list[str]:
    name, options, left, at = WAYS[way]
    front, digests = FRONTS[name](perceptron(), TopK(0.1), **options), []
    for number in range(6):
        stops = raised is not None and rank == 0 and number == at
        front.step(
            batch(rank, number, front.model), disturbed(*left, raised) if raised and stops else contextlib.nullcontext()
        )
        digests.append(digest(front.parameters()))
    if name == "local":
        front.state.synchronise()
        digests = [digest(front.parameters())]
    if name == "replicas":
        [kept] = front.state.state_dict()["residuals"].values()
        digests.append(digest(kept[name].to_local() for name in sorted(kept)))
    front.close()
    return digests


def both(rank: int, way: str, raised: BaseException) -> tuple[list[str], list[str]]:
    """The results of a training that is left alone, and of one that is not."""
    play = by_front if way in WAYS else data_parallel
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
