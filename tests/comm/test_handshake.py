"""Ranks that meet: what they tell each other, in how many messages, and over whose connections."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gradwire import OneBit
from gradwire.hooks.comm import topology as nodes
from gradwire.hooks.comm.bruck_gather import Dissemination
from gradwire.hooks.comm.group import DIRECT_RANKS, Group
from gradwire.hooks.comm.handshake import compare
from ranks import Ranks, on_ranks
from torch import Tensor
from training import Ledger, batch, digest, perceptron, train, wrap

SOON = timedelta(seconds=20)


def in_threads(size: int, task: Callable[[int], Any]) -> list[Any]:
    """What `task(rank)` returns on ranks that are threads of this process, or the exception that it raises."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = task(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def gloo(store: dist.Store, rank: int, size: int) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, SOON)


# -- dissemination -----------------------------------------------------------------------------------------------------


class Mailbox:
    """Messages between threads, and how many each has sent."""

    def __init__(self, size: int) -> None:
        self.sent = [0] * size
        self._there: dict[tuple[int, int], Tensor] = {}
        self._changed = threading.Condition()

    def send(self, source: int, rows: Tensor, target: int) -> Any:
        with self._changed:
            self.sent[source] += 1
            self._there[source, target] = rows.clone()
            self._changed.notify_all()
        return SimpleNamespace(wait=lambda: None)

    def receive(self, target: int, into: Tensor, source: int) -> Any:
        def wait() -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: (source, target) in self._there, 5), "no message"
                into.copy_(self._there.pop((source, target)))

        return SimpleNamespace(wait=wait)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 17, 33])
def test_every_rank_gets_all_rows_in_few_messages(size: int) -> None:
    rows = torch.arange(3 * size).view(size, 3)
    mail, outputs = Mailbox(size), torch.full((size, size, 3), -1)

    def rank_main(rank: int) -> None:
        def send(part: Tensor, peer: int) -> Any:
            return mail.send(rank, part, peer)

        def receive(part: Tensor, peer: int) -> Any:
            return mail.receive(rank, part, peer)

        Dissemination(outputs[rank], rows[rank], rank, send, receive).wait()

    assert in_threads(size, rank_main) == [None] * size
    assert (outputs == rows).all()
    assert mail.sent == [math.ceil(math.log2(size))] * size


@pytest.mark.parametrize("size", [DIRECT_RANKS, DIRECT_RANKS + 1, 24])
def test_over_gloo_few_messages_are_sent_above_16_ranks(size: int) -> None:
    store = dist.HashStore()

    def rank_main(rank: int) -> Any:
        carrier = Counting(gloo(store, rank, size))
        group = Group(carrier, range(size))
        first, second = torch.zeros(size, 2), torch.zeros(size, 2)
        works = [group.small_all_gather(first, torch.tensor([rank, 0.5]))]
        works.append(group.small_all_gather(second, torch.tensor([0.25, rank])))
        for work in works:
            work.wait()
        sent = carrier.sent
        same = group.all_gather_object({"all": "say"})
        return first.tolist(), second.tolist(), sent / 2, carrier.sent - sent, same, group.all_gather_object(rank)

    messages = size - 1 if size <= DIRECT_RANKS else math.ceil(math.log2(size))
    for result in in_threads(size, rank_main):
        assert result == (
            [[rank, 0.5] for rank in range(size)],
            [[0.25, rank] for rank in range(size)],
            messages,
            messages,
            [{"all": "say"}] * size,
            list(range(size)),
        )


class Counting:
    """A process group that counts the messages and the bytes that it sends."""

    def __init__(self, carrier: Any) -> None:
        self._carrier, self.sent, self.nbytes = carrier, 0, 0

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self.sent, self.nbytes = self.sent + 1, self.nbytes + sum(t.nbytes for t in tensors)
        return self._carrier.send(tensors, peer, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carrier, name)


# -- digests -----------------------------------------------------------------------------------------------------------

TEXT = "a long text " * 1000


def sent_for(values: list[Any]) -> list[tuple[Any, int]]:
    """What ranks that pass these values get, and how many bytes each has sent."""
    store, size = dist.HashStore(), len(values)

    def rank_main(rank: int) -> Any:
        carrier = Counting(gloo(store, rank, size))
        return Group(carrier, range(size)).all_gather_object(values[rank]), carrier.nbytes

    return in_threads(size, rank_main)


def test_texts_are_sent_where_they_differ_alone() -> None:
    for got, sent in sent_for([TEXT, TEXT, TEXT]):
        assert got == [TEXT] * 3
        assert sent == 2 * 24
    found = sent_for([TEXT, TEXT, {"error": "no"}, TEXT])
    assert [got for got, _ in found] == [[TEXT, TEXT, {"error": "no"}, TEXT]] * 4
    long, short = 3 * (len(TEXT) + 2), 3 * len('{"error": "no"}')
    assert [sent - 3 * 24 for _, sent in found] == [long, 0, short, 0]
    sides = [{"codec": TEXT}, {"codec": TEXT}, {"codec": TEXT[:-1] + "."}]  # one letter is enough
    for got, _ in sent_for(sides):
        assert got == sides
        with pytest.raises(ValueError, match=r"ranks disagree on codec: rank 0 has .*, rank 2 has .* Remedy"):
            compare(got, "Remedy")


# -- several states ----------------------------------------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def two_models(rank: int, given: bool) -> Any:
    """Two models trained by turns; the descriptors that the first and the second state take, and what is left."""
    own = {"process_group": dist.new_group([0, 1])} if given else {}
    gc.collect()
    counts, digests, pairs = [descriptors()], [], []
    for _ in range(2):
        pairs.append(wrap(perceptron(), OneBit(), exchange="gather", **own))
        counts.append(descriptors())
    for step in range(3):
        digests += [train(rank, ddp, range(step, step + 1)) for ddp, _ in pairs]
    for _, state in pairs:
        state.close()
    gc.collect()
    return digests, counts[1] - counts[0], counts[2] - counts[1], descriptors() - counts[0]


@pytest.mark.parametrize("given", [True, False], ids=["given", "default"])
def test_states_give_their_connections_back(ranks: Ranks, given: bool) -> None:
    results = ranks(2).run(two_models, given)
    digests = results[0][0]
    for mine, first, second, left in results:
        assert mine == digests
        assert first > 0
        assert second == first
        assert left <= 0


@pytest.mark.parametrize("scales", [False, True], ids=["straight", "scaled"])
@on_ranks(2)
def test_states_that_share_a_group_begin_no_collectives_beside_each_other(rank: int, scales: bool) -> None:
    """Two models in one backward pass, in a group that their states share. Of each state: whether it knows that the
    group is shared, whether it has steps of nothing but collectives, and whether it measures the network again when a
    rank says that it has changed."""
    group, mean = dist.new_group([0, 1]), Group.mean
    options: dict[str, Any] = {"exchange": "dense", "process_group": group}
    if scales:
        options["grad_scaler"] = torch.amp.GradScaler("cpu", init_scale=1.0)
    pairs = [wrap(perceptron(), OneBit(), **options) for _ in range(2)]
    connections = [state._reducer.session for _, state in pairs if state._reducer is not None]

    def alone(group: Group, tensor: Tensor) -> Any:
        assert not group.shared, "a collective beside the other state's"
        return mean(group, tensor)

    with patch.object(Group, "mean", alone):
        for step in range(4):
            losses = [(1 + n) * ddp(batch(rank, step, ddp.module)).square().mean() for n, (ddp, _) in enumerate(pairs)]
            parameters = [p for ddp, _ in pairs for p in ddp.parameters()]
            wanted = torch.autograd.grad(losses[0] + losses[1], parameters, retain_graph=True)
            (losses[0] + losses[1]).backward()
            for parameter, grad in zip(parameters, wanted, strict=True):
                dist.all_reduce(grad)
                assert parameter.grad is not None
                assert float((parameter.grad - grad / 2).norm() / grad.norm()) < 1e-5
                parameter.grad = None
    known = []
    for (_, state), connection in zip(pairs, connections, strict=True):
        choice = state._options.choice(4)
        past = connection.history()
        connection.announce(4, choice, past, drift=rank == 0)
        connection.compare(choice, past)
        known.append((connection.group.shared, connection.dense_group is not None, connection.drifted))
        state.close()
    assert known == [(False, not scales, True), (True, False, False)]


@on_ranks(2, within=40)
def test_the_models_own_group_may_be_given(rank: int) -> str:
    """DDP counts in its group who uses what while means of gradients are under way, which takes a while on rank 1."""
    model = perceptron()
    options: dict[str, Any] = {"grad_scaler": torch.amp.GradScaler("cpu", init_scale=1.0), "exchange": "dense"}
    ddp, state = wrap(model, OneBit(), **options, process_group=dist.group.WORLD, ddp={"find_unused_parameters": True})
    mean = Group.mean

    def late(group: Group, tensor: Tensor) -> Any:
        time.sleep(0.02 * rank)
        return mean(group, tensor)

    with patch.object(Group, "mean", late):
        for step in range(4):
            loss = ddp(batch(rank, step, model)).square().mean()
            wanted = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            ddp.zero_grad()
            loss.backward()
            for parameter, grad in zip(model.parameters(), wanted, strict=True):
                dist.all_reduce(grad)
                torch.testing.assert_close(parameter.grad, grad / 2)
    state.close()
    return digest(p.grad for p in model.parameters())


@on_ranks(2)
def test_a_group_that_one_rank_alone_was_given(rank: int) -> None:
    own = {"process_group": [dist.new_group([0, 1]), None][rank]}
    text = "ranks disagree on process_group: rank 0 has one of its own, rank 1 has none"
    with pytest.raises(ValueError, match=text):
        wrap(perceptron(), OneBit(), exchange="gather", **own)


# -- nodes, over a backend that is not Gloo ----------------------------------------------------------------------------


def pretended_nccl(rank: int, options: dict[str, Any]) -> Any:
    """Gloo stands in for NCCL: nothing is made by `Group.of_ranks`, and jobs run where they are submitted."""
    made: list[list[int]] = []
    real = dist.distributed_c10d.new_group

    def new_group(ranks: list[int], **others: Any) -> Any:
        made.append(ranks)
        assert not others.get("use_local_synchronization")
        return real(ranks, **others)

    gloo = Group.of_ranks

    def control_group(ranks: list[int], timeout: timedelta) -> Group:
        assert len(ranks) == dist.get_world_size(), "Gloo carries gradients"
        return gloo(ranks, timeout)

    with (
        patch.object(Group, "blocks", staticmethod(lambda *_: False)),
        patch.object(Group, "of_ranks", control_group),
        patch.object(dist.distributed_c10d, "new_group", new_group),
        patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}),
    ):
        results = []
        nodes._made.clear()  # other tests' of the same processes
        for _ in range(2):
            model = perceptron()
            ledger = Ledger(model)
            ddp, state = wrap(model, OneBit(), **options)
            digests = train(rank, ddp, range(3), ledger)
            results.append((digests, ledger.error(state), set(state.statistics().decisions.values())))
            topology = state._reducer.session.planner.topology  # type: ignore[union-attr]
            sides = [None if part is None else part.ranks for part in (topology.inside, topology.between)]
            state.close()
    return results, made, sides


@pytest.mark.parametrize("topology", ["auto", 2], ids=str)
def test_groups_of_nodes_are_made_once(ranks: Ranks, topology: Any) -> None:
    found = ranks(4).run(pretended_nccl, {"exchange": "hierarchical", "topology": topology})
    for rank, (results, made, sides) in enumerate(found):
        assert made == [[0, 1], [2, 3], [0, 2], [1, 3]], "once, and in the same order on every rank"
        assert sides == [((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]]
        for (digests, error, decisions), (expected, _, _) in zip(results, found[0][0], strict=True):
            assert digests == expected
            assert error < 1e-5
            assert all(text.startswith("hierarchical gather") for text in decisions)


def test_no_groups_are_made_for_an_exchange_without_nodes(ranks: Ranks) -> None:
    for _, made, sides in ranks(4).run(pretended_nccl, {"exchange": "gather"}):
        assert (made, sides) == ([], [None, None])


def on_some(rank: int) -> Any:
    """A model on four of eight processes, two on each node: on one of each, or on both of two nodes."""
    found: list[Any] = []
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        for ranks in ([0, 2, 4, 6], [0, 1, 4, 5]):
            everyone = Four(ranks)
            for topology in ("auto", 2):
                try:
                    made = nodes.make_topology(topology, ranks, everyone, None, blocking=False)  # type: ignore[arg-type]
                    found.append(made.inside)
                except ValueError as error:
                    found.append(str(error))
    return found


class Four:
    rank, size = 0, 4

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks


def test_a_model_on_some_of_the_processes(ranks: Ranks) -> None:
    found = ranks(1).run(on_some)[0]
    assert found[0] is found[2] is None
    assert all("must be a DeviceMesh" in text for text in (found[1], found[3]))


def split_by_members(rank: int) -> Any:
    """A model on four of six processes, over a backend that splits: processes 1 and 4 take no part."""
    members, made = [0, 2, 3, 5], list[Any]()
    carrier = dist.new_group(members)

    def split_group(parent: Any, rows: list[list[int]]) -> Any:
        assert parent is carrier
        made.append(rows)
        (mine,) = (row for row in rows if members.index(rank) in row)
        return Group.of_ranks([members[place] for place in mine])._group

    with patch.object(nodes, "_splits", lambda carrier: True), patch.object(dist, "split_group", split_group):
        if rank not in members:
            return None
        topologies = [nodes.make_topology(2, members, Group(carrier), carrier, blocking=False) for _ in range(2)]
    sides, again = ((each.inside, each.between) for each in topologies)
    assert sides == again, "the same groups"
    sums = []
    for group in sides:
        assert group is not None
        total = torch.full((1,), float(rank))
        group.all_reduce(total).wait()
        sums.append((group.ranks, total.item()))
    return made, sums


def test_groups_of_nodes_are_split_off_by_their_members_alone(ranks: Ranks) -> None:
    found = ranks(6).run(split_by_members)
    inside, between = {0: (0, 2), 2: (0, 2), 3: (3, 5), 5: (3, 5)}, {0: (0, 3), 3: (0, 3), 2: (2, 5), 5: (2, 5)}
    for rank, told in enumerate(found):
        if rank in inside:
            made, sums = told
            assert made == [[[0, 1], [2, 3]], [[0, 2], [1, 3]]], "places in the model's group, once"
            assert sums == [(side[rank], sum(side[rank])) for side in (inside, between)]


@pytest.mark.parametrize("able", [{"cuda": True}, {"cuda": False}, {"cpu": False, "cuda": True}], ids=str)
@pytest.mark.parametrize("bound", [None, torch.device("cuda", 0)], ids=str)
def test_a_group_is_split_where_torch_can(
    bound: torch.device | None, able: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the processes have said which GPU is theirs, and no backend of the group stands against it."""
    backends = {torch.device(name): SimpleNamespace(supports_splitting=each) for name, each in able.items()}
    carrier = SimpleNamespace(_get_backend=backends.__getitem__, _device_types=list(backends))
    default = SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=bound))
    monkeypatch.setattr(nodes, "dist", SimpleNamespace(group=default, split_group=dist.split_group))
    assert nodes._splits(carrier) is (bound is not None and all(able.values()))
