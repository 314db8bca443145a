"""Whoever has its means may leave, in whatever way, and the others still get theirs."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import endings
import pytest
import torch
from gradwire import CompressState, OneBit, compress_hook
from gradwire.benchmarks.links import flags, links
from gradwire.hooks.comm import group as group_module
from gradwire.hooks.comm.group import Group
from gradwire.hooks.comm.linger import linger, unacknowledged
from gradwire.hooks.comm.ports import Messages, PersistentMessage
from gradwire.hooks.core.options import ExchangeName
from ranks import Ranks, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

NO_DISTANCE = links.missing(flags.Distance(delay=0.002))
SECONDS = float(os.environ.get("GRADWIRE_DRAWN_SECONDS", "60"))


class Step:
    """Something that may be collected."""


class Alone:
    """As much of a process group as a group asks for when it is made."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@pytest.fixture
def unread() -> Iterator[socket.socket]:
    """The end of a connection that has sent more than the other one's buffers hold; nobody reads."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            sender.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.send(bytes(1 << 20))
            yield receiver


def test_what_has_not_arrived_is_waited_for(unread: socket.socket) -> None:
    assert unacknowledged() > 0
    began = time.monotonic()
    linger(0.1)
    assert time.monotonic() - began >= 0.1
    reader = threading.Thread(target=lambda: [None for _ in iter(partial(unread.recv, 1 << 20), b"")], daemon=True)
    reader.start()
    linger(30.0)
    assert unacknowledged() == 0
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("unfinished", [False, True])
def test_connections_outlive_an_owner_that_goes_within_a_step(
    monkeypatch: pytest.MonkeyPatch, unfinished: bool
) -> None:
    held = list[object]()
    monkeypatch.setattr(group_module, "linger_with", held.append)
    group, owner = Group(Alone()), Step()
    group.hold_unfinished(owner)
    group.traffic.begin(owner)
    if not unfinished:
        group.traffic.end(owner)
    del owner
    gc.collect()
    assert len(held) == unfinished


@pytest.mark.parametrize("exchange", ["gather", "two_pass"])
@on_ranks(2)
def test_what_a_rank_announces_comes_after_all_that_it_waits_for(rank: int, exchange: ExchangeName) -> None:
    """How often a port was announced while messages of the step had still to arrive."""
    waiting, early = set[int](), 0
    init, wait, post = Messages.__init__, Messages.wait, PersistentMessage.post_receives

    def noted_init(self: Messages, *arguments: Any) -> None:
        init(self, *arguments)
        waiting.add(id(self))

    def noted_wait(self: Messages) -> None:
        wait(self)
        waiting.discard(id(self))

    def noted_post(self: PersistentMessage) -> None:
        nonlocal early
        before = len(self._posted)
        others = len(waiting)
        post(self)
        early += others > 0 and len(self._posted) > before

    net = endings.Net()
    model = DistributedDataParallel(net, bucket_cap_mb=1)
    state = CompressState(model, OneBit(), exchange=exchange, fallback=None)
    model.register_comm_hook(state, compress_hook)

    def late(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(lambda grad: time.sleep(0.01 * rank))  # the other rank waits for these buckets

    for layer in net.layers:
        layer.register_forward_hook(late)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Messages, "__init__", noted_init)
        patch.setattr(Messages, "wait", noted_wait)
        patch.setattr(PersistentMessage, "post_receives", noted_post)
        for _ in range(3):
            model(torch.randn(2, endings.WIDTH)).sum().backward()
    state.close()
    assert early == 0


def held() -> dict[str, int]:
    """What a training holds: weights, threads, descriptors."""
    gc.collect()
    return {
        "weights": sum(issubclass(type(found), nn.Parameter) for found in gc.get_objects()),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def more_than(before: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What there is more of than before, when the last messages may still have been on their way."""
    return {name: (before[name], count) for name, count in held().items() if count > before[name]}


@pytest.mark.parametrize("front", endings.NAMES)
@on_ranks(2)
def test_a_training_that_is_dropped_leaves_nothing(rank: int, front: str) -> None:
    training = endings.Training(front, "topk", "gather", 2, "collected", 0, 0, (0, 0, 0.0), False)
    endings.train(training, rank, [])  # what stays until the process ends
    before = held()
    endings.train(training, rank, [])
    endings.train(training, rank, [])
    deadline = time.monotonic() + 10
    while (more := more_than(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not more


def several(rank: int, seed: int) -> list[tuple[str, str]]:
    return endings.many(seed, seconds=60, runs=5)


def test_trainings_end_in_every_way(ranks: Ranks) -> None:
    first, *others = ranks(2).run(several, 7)
    assert all(other == first for other in others)


@pytest.mark.slow
@pytest.mark.skipif(NO_DISTANCE is not None, reason=str(NO_DISTANCE))
def test_trainings_end_in_every_way_at_a_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """GRADWIRE_DRAWN_SECONDS=3600 looks for an hour."""
    paths = [str(Path(__file__).parents[1] / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    end, rng = time.monotonic() + SECONDS, random.Random(os.environ.get("GRADWIRE_SOAK_SEED"))
    while time.monotonic() < end:
        size, rate, delay = rng.choice((2, 2, 3)), rng.choice((10**7, 10**8, 10**9)), rng.choice((2, 10, 25, 100))
        job = {"seed": rng.randrange(1 << 30), "seconds": 20}
        print(size, rate, delay, job, flush=True)
        distance = flags.Distance(delay=delay / 1e3, mtu=rng.choice((1500, 65000)))
        with links.DistantLinks(size, rate, distance) as joined:
            first, *others = joined.run(endings.many, job, timeout=240)
        assert first
        assert all(other == first for other in others)
        assert all("heard" not in came for _, came in first)
