"""The collectives that exchanges are made of, between processes over Gloo."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from random import Random
from types import FrameType
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gradwire.hooks.comm import group as group_module
from gradwire.hooks.comm import rendezvous
from gradwire.hooks.comm.group import NEVER_SENT, Group
from gradwire.hooks.comm.ports import Channels, Messages, PersistentMessage, drive
from gradwire.hooks.comm.rendezvous import meeting_timeout
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks, on_ranks
from training import told


def collectives(rank: int, size: int, dtype: torch.dtype) -> None:
    """Each gives what it says, and two may be under way together and waited for in the other order."""
    group, seen = Group(dist.group.WORLD), range(dist.get_world_size())
    rows = (torch.arange(group.size * size) % 251).view(group.size, size).to(dtype)
    first, second = torch.zeros_like(rows), torch.zeros_like(rows)
    works = [group.all_gather(first, rows[rank]), group.all_gather(second, rows[rank] + 1)]
    works[1].wait()
    works[0].wait()
    assert torch.equal(first, rows)
    assert torch.equal(second, rows + 1)

    mine, theirs = torch.arange(group.size * size).view(group.size, size) + 1000 * rank, torch.zeros_like(rows.long())
    group.all_to_all(theirs, mine).wait()
    assert torch.equal(
        theirs, torch.stack([torch.arange(rank * size, (rank + 1) * size) + 1000 * other for other in seen])
    )

    # Rank r sends r + s elements to rank s: rank 0 nothing to itself.
    lengths = [rank + other for other in seen]
    received, everything = torch.full((sum(lengths),), -1), torch.full((sum(seen),), -1)
    group.all_to_all_v(received, torch.full((sum(lengths),), rank), lengths, lengths).wait()
    assert received.tolist() == [other for other, length in enumerate(lengths) for _ in range(length)]
    group.all_gather_v(everything, torch.full((rank,), rank), list(seen)).wait()
    assert everything.tolist() == [other for other in seen for _ in range(other)]

    parts = [torch.randn(size, generator=torch.Generator().manual_seed(other)) for other in seen]
    expected, total = parts[0].clone(), parts[rank].clone()
    for part in parts[1:]:
        expected += part
    drive(group.sum(total, torch.empty(size + group.size)))
    assert torch.equal(total, expected), "sums are in rank order"


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 5, (1 << 20) + 4])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
def test_collectives(ranks: Ranks, world_size: int, size: int, dtype: torch.dtype) -> None:
    ranks(world_size).run(collectives, size, dtype)


def connected_at_last(rank: int, failing: int) -> tuple[int, list[int]]:
    """How often a rank tried to connect, of which the last one fails at first, and what the group then gathers."""
    attempts, real = [], rendezvous._connected

    def connect(place: dist.Store, index: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        attempts.append(place)
        made = real(place, index, size, timeout)
        if rank == dist.get_world_size() - 1 and len(attempts) <= failing:
            raise RuntimeError("Gloo connectFullMesh failed: connection closed by peer")
        return made

    with patch.object(rendezvous, "_connected", connect):
        group = Group.of_ranks(list(range(dist.get_world_size())))
    rows = torch.zeros(group.size, 1, dtype=torch.int64)
    group.all_gather(rows, torch.tensor([rank])).wait()
    return len(attempts), rows.view(-1).tolist()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_ranks_try_again_where_one_has_lost_a_connection(ranks: Ranks, failing: int) -> None:
    assert ranks(3).run(connected_at_last, failing) == [(failing + 1, [0, 1, 2])] * 3


def never_connected(rank: int) -> str:
    return told(lambda: connected_at_last(rank, 9))


def test_ranks_that_never_connect_say_so_alike(ranks: Ranks) -> None:
    for text in ranks(2).run(never_connected):
        assert "ranks [0, 1] could not connect in 3 attempts" in text
        assert "{1: 'Gloo connectFullMesh failed: connection closed by peer'}" in text
    assert ranks(2).run(connected_at_last, 0) == [(1, [0, 1])] * 2, "the next time all is well"


@pytest.mark.parametrize("seed", range(3))
@on_ranks(2, 3)
def test_channels_do_not_mix(rank: int, seed: int) -> None:
    """Used in an order of each rank's own, posted ahead or not, waited for in yet another; of the same name, too."""
    group, random = Group(dist.group.WORLD), Random(1000 * seed + rank)
    every, steps = range(5), 4
    rows = [torch.zeros(3 + number, dtype=torch.int64) for number in every]
    into = [torch.zeros(group.size, len(row), dtype=torch.int64) for row in rows]
    ports = [group.channel(f"{seed} {number % 2}").persistent_gather(into[number], rows[number]) for number in every]
    for step in range(steps):
        works = {}
        for number in random.sample(every, len(every)):
            rows[number].fill_(1000 * step + 10 * number + rank)
            if random.random() < 0.5:
                ports[number].post_receives()
            works[number] = ports[number].start()
        for number in random.sample(every, len(every)):
            works[number].wait()
            for other in range(group.size):
                assert bool((into[number][other] == 1000 * step + 10 * number + other).all())
            if random.random() < 0.5:
                ports[number].post_receives()


class Disturbed:
    """One message; what a signal's handler raises comes out of waiting for it, when it has arrived."""

    def __init__(self, raised: BaseException | None) -> None:
        self.raised, self.waited = raised, 0

    def is_completed(self) -> bool:
        return self.waited > 0

    def is_success(self) -> bool:
        return True

    def wait(self) -> None:
        self.waited += 1
        if self.raised is not None:
            raise self.raised


def test_messages_are_waited_for_once_though_a_signal_comes_between() -> None:
    works = [Disturbed(None), Disturbed(KeyboardInterrupt()), Disturbed(None)]
    waiting = Messages([(peer, cast(dist.Work, work)) for peer, work in enumerate(works)], Group(Silent()), None)
    with pytest.raises(KeyboardInterrupt):
        waiting.wait()
    waiting.wait()
    waiting.wait()
    assert [work.waited for work in works] == [1, 1, 1]


class Silent:
    """A process group that nobody has a message for."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def test_each_process_group_is_cut_once_whatever_its_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cut waits, and a process that ends may have a channel for every bucket; the group itself may be gone."""
    monkeypatch.setattr(group_module, "_groups", weakref.WeakSet())
    carriers, cuts = [Silent(), Silent()], []
    kept = [Group(carriers[0]).channel(str(number)) for number in range(5)]
    kept += [Group(carriers[1])]
    monkeypatch.setattr(Group, "cut", lambda self: cuts.append(self._group))
    group_module.abort_all()
    assert sorted(map(id, cuts)) == sorted(map(id, carriers))
    assert len(kept) == 6


def lines_of(call: Callable[[], object]) -> int:
    """How many lines of Python a call runs."""
    lines, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def test_a_channel_takes_no_longer_for_those_that_have_been() -> None:
    """A schedule that alternates between two codecs makes one of a name for every change."""
    group = Group(Silent())
    first = lines_of(lambda: group.channel("bucket 0 TopK"))
    kept = [group.channel("bucket 0 TopK") for _ in range(2000)]
    assert lines_of(lambda: group.channel("bucket 0 TopK")) <= first + 10
    assert len({channel._tag for channel in kept}) == len(kept)


@given(orders=st.lists(st.permutations(["a", "a", "a", "b", "b", "c"]), min_size=2, max_size=2))
def test_a_channel_s_tag_follows_from_its_name_and_how_many_there_have_been(orders: list[list[str]]) -> None:
    tags = []
    for order in orders:
        group, made = Group(Silent()), dict[str, list[int]]()
        for name in order:
            made.setdefault(name, []).append(group.channel(name).channel("inside")._tag)
        tags.append(made)
    assert tags[0] == tags[1]


@given(names=st.lists(st.integers(0, 9).map(str), max_size=30))
def test_names_of_one_tag_are_told_apart_alike_on_every_rank(names: list[str]) -> None:
    """Of so few tags most are taken when they are first tried."""
    tags, again = ([channels.tag(name) for name in names] for channels in (Channels(32), Channels(32)))
    assert tags == again
    assert len({tag for tag in tags if 0 < tag < 32}) == len(names)


class Noted(Silent):
    """Notes the tags of what is sent."""

    def __init__(self) -> None:
        self.tags: list[int] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Noted:
        self.tags.append(tag)
        return self

    recv = send


def test_channels_have_tags_of_their_own() -> None:
    gloo = Noted()
    words, rows = Group(gloo), torch.zeros(2, 1)
    for name in range(10_000):
        words.channel(str(name)).all_gather(rows, rows[0])
    words.all_gather(rows, rows[0])
    assert gloo.tags[::2] == gloo.tags[1::2]  # one is received, and one sent
    assert len(set(gloo.tags)) == 10_001
    assert max(gloo.tags) < NEVER_SENT


@on_ranks(2)
def test_messages_are_announced_twice_ahead(rank: int) -> None:
    """A step shorter than a latency would wait for the announcement of its own messages. Rank 1 hurries ahead: what
    rank 0 has received must stay until it asks for more."""
    gc.collect()  # what others have left within a step keeps announcements back
    group = Group(dist.group.WORLD).channel("announced twice")
    rows, row = torch.zeros(2, 3), torch.zeros(3)
    port = group.persistent_gather(rows, row)
    assert isinstance(port, PersistentMessage)
    waiting = []
    for step in range(6):
        port.post_receives()
        waiting.append(len(port._posted))
        row.fill_(10 * step + rank)
        work = port.start()
        work.wait()
        work.wait()  # once more changes nothing
        time.sleep(0.1 * (1 - rank))  # meanwhile rank 1 sends the next
        assert rows[:, 0].tolist() == [10 * step, 10 * step + 1]
    dist.barrier()
    assert waiting == [2] * 6  # receives


@on_ranks(2)
def test_a_second_wait_fails_like_the_first(rank: int) -> None:
    group = Group.of_ranks([0, 1])
    group.timeout = timedelta(milliseconds=200)
    if rank == 0:
        never = group.channel("never")
        messages = Messages(never.receive([torch.zeros(0), torch.zeros(1)]), never, group.timeout)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="rank 1"):
                messages.wait()
    dist.barrier()


class Backend(Silent):
    """A process group over a backend of some name, which tells that it can launch several collectives at once, or not,
    or nothing."""

    def __init__(self, name: str, launches: bool | None) -> None:
        self.name = lambda: name
        if launches is not None:
            self.supports_coalescing = launches

    def _get_backend(self, device: torch.device) -> Backend:
        return self


def test_streams_order_the_collectives_of_backends_that_say_so() -> None:
    """Whatever their names, and in an older torch NCCL's; for others the host waits."""
    cuda = torch.device("cuda", 0)
    for name in ("nccl", "nccl2", "nccl-lazy", "ncclx", "one that is not written yet"):
        backend = Backend(name, launches=True)
        assert not Group.blocks(backend, cuda)
        assert Group.blocks(backend, torch.device("cpu"))
        assert Group(backend, (0, 1)).launches(cuda)
    assert not Group.blocks(Backend("nccl", launches=None), cuda)
    assert Group.blocks(Backend("gloo", launches=False), cuda)
    for launches in (False, None):
        with pytest.warns(UserWarning, match=r"the backend 'ucc' does not tell.*streams order.*backend=\"nccl\""):
            assert Group.blocks(Backend("ucc", launches), cuda)


def backend_tells(rank: int) -> Any:
    return getattr(dist.group.WORLD._get_backend(torch.device("cpu")), "supports_coalescing", None)  # type: ignore[union-attr]


def test_torch_tells_it_of_its_own_backends(ranks: Ranks) -> None:
    assert ranks(1).run(backend_tells)[0] in (False, None)
    kinds = [getattr(dist, f"ProcessGroup{kind}", None) for kind in ("NCCL", "NCCL2", "NCCLLazy")]
    tells = hasattr(torch._C._distributed_c10d.Backend, "supports_coalescing")
    assert all(hasattr(kind, "supports_coalescing") == tells for kind in kinds if kind is not None)


@on_ranks(2)
def test_ranks_meet_for_as_long_as_a_group_that_allows_more(rank: int) -> None:
    """With a short timeout, with a long one, and with PyTorch's own."""
    timeouts = timedelta(seconds=9), timedelta(seconds=300), dist.constants.default_pg_timeout
    seconds = [meeting_timeout(dist.new_group(timeout=timeout)).total_seconds() for timeout in timeouts]
    assert seconds == [60.0, 300.0, 60.0]
