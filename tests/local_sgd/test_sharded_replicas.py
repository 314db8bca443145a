"""Replicas of several ranks, each with a shard of the model: rank f exchanges with the f-th ranks of the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import ChunkedTopK, LocalUpdates, Meeting, OneBit, Residual, Rounds, TopK
from gradwire.hooks.comm.group import Group
from gradwire.hooks.local_sgd.meeting.server import MeetingPoint
from lacking import needs_reduce_scatter
from ranks import Ranks
from replica_ledger import Entry, Ledger, check
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

pytestmark = needs_reduce_scatter


def sharded(mesh: DeviceMesh, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 5))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Trained:
    """A rank's part of a replica, until it leaves."""

    def __init__(self, mesh: DeviceMesh, seed: int, **options: Any) -> None:
        self.model = sharded(mesh, seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        how: dict[str, Any] = {"error_feedback": Residual(), "rounds": Rounds(lengthen_steps=True)}
        self.updates = LocalUpdates(self.model, self.optimizer, every=3, **how, **options)
        self.ledger = Ledger(self.updates) if "meeting" in options else None
        self.data = torch.Generator().manual_seed(self.updates.member)

    def step(self) -> None:
        loss = self.model(torch.randn(8, 12, generator=self.data)).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.updates.step()


def fail_once(trained: Trained, number: int) -> None:
    """Let this rank's connections break in a round, before its largest message to the other replica."""
    plain, left = Group.with_peer_context, [1]

    def breaking(group: Any, peer: int, call: Callable[..., Any], *arguments: Any) -> Any:
        sends = call.__name__ == "send" and arguments[0][0].numel() > 6
        if left and sends and trained.updates.rounds == number:
            left.pop()
            raise RuntimeError("a cable is cut")
        return plain(group, peer, call, *arguments)

    setattr(Group, "with_peer_context", breaking)  # noqa: B010 - of this rank alone


def churn(rank: int, address: str, codec: Any, exchange: str) -> tuple[list[Entry], list[str], int]:
    """Replica 0 (ranks 0 and 1) stays. A round fails on one rank of replica 1, and is to fail on the other, too; later
    replica 1 leaves, and comes back."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
    options = {"codec": codec, "exchange": exchange, "meeting": Meeting(address, wait_for=2, patience=30.0)}
    trained = Trained(mesh, rank // 2, **options)
    ledgers = [trained.ledger]
    if rank == 3:
        fail_once(trained, 3)
    while trained.updates.rounds < 6:
        trained.step()
    repeated = trained.updates.statistics().repeated_rounds  # type: ignore[attr-defined]
    dist.barrier()  # who leaves before the others have read its last messages has them repeat the round
    if rank >= 2:
        trained.updates.close()
        first = trained.updates.member
        trained = Trained(mesh, rank, **options)
        ledgers.append(trained.ledger)
        assert trained.updates.rounds >= 6
        assert trained.updates.member > first
    else:
        while len(trained.updates.members) == 2:
            trained.step()
        while len(trained.updates.members) == 1:
            trained.step()
            time.sleep(0.01)
    last = trained.updates.rounds + 4
    while trained.updates.rounds < last and len(trained.updates.members) == 2:
        trained.step()
    trained.updates.close()
    assert None not in ledgers
    return (
        [entry for ledger in ledgers if ledger is not None for entry in ledger.entries],
        [text for ledger in ledgers if ledger is not None for text in ledger.problems],
        repeated,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "exchange"),
    [(ChunkedTopK(k=16, chunk=256, values=2), "gather"), (OneBit(), "two_pass"), (TopK(0.1), "split")],
)
def test_a_replica_of_two_ranks_leaves_and_comes_back(ranks: Ranks, codec: Any, exchange: str) -> None:
    with MeetingPoint(dead_after=2.5) as point:
        point._membership._recovering = 0.0
        found = ranks(4).run(churn, point.address, codec, exchange)
    for shard in (0, 1):
        both = [found[shard][0], found[2 + shard][0]]
        assert not found[shard][1]
        assert not found[2 + shard][1]
        last = max(entry.name for entries in both for entry in entries)
        assert check(both, last) >= 3
    assert [entry.name for entry in found[0][0]] == [entry.name for entry in found[1][0]]
    assert [repeated for _, _, repeated in found] == [1] * 4


def with_a_mesh(rank: int) -> list[float]:
    """Without meeting: two replicas of two ranks in one process group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match=r"share the model.*replicate"):
        LocalUpdates(model := sharded(mesh["shard"], 1), torch.optim.SGD(model.parameters(), lr=0.1), OneBit(), every=2)
    trained = Trained(mesh["shard"], rank // 2, codec=OneBit(), process_group=mesh["replicate"].get_group())
    for _ in range(6):
        trained.step()
    trained.updates.close()
    full = [p.full_tensor().detach() for p in trained.model.parameters() if isinstance(p, DTensor)]
    dist.barrier()
    return [float(x.double().sum()) for x in full]


def test_shards_are_exchanged_in_a_process_group(ranks: Ranks) -> None:
    found = ranks(4).run(with_a_mesh)
    assert all(sums == found[0] for sums in found)
