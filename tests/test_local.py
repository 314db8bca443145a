"""Periodic updates: nothing lost, replicas equal, and what DiLoCo and its like would compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import (
    QSGD,
    Codec,
    Identity,
    LocalUpdates,
    OneBit,
    Outliers,
    Ternary,
    TernGrad,
    TopK,
)
from gradwire.hooks.exchanges import possible
from ranks import Pool
from torch import Tensor, nn
from training import batch, digest, perceptron, residuals_of

Ranks = Callable[[int], Pool]

KEEPING = [OneBit(), QSGD(rounding="nearest"), TernGrad(rounding="nearest"), TopK(0.05), Outliers(Ternary(), 0.05)]


class Parts(nn.Module):
    """A part in bfloat16, one that is frozen, one that only some ranks use, one that none does, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.frozen = nn.Linear(20, 24), nn.Linear(24, 24).requires_grad_(False)
        self.narrow = nn.Linear(24, 24).bfloat16()
        self.norm = nn.BatchNorm1d(24)
        self.some, self.never = nn.Linear(24, 24), nn.Linear(24, 24)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.frozen(torch.tanh(self.first(x)))
        x = self.norm(self.narrow(x.bfloat16()).float())
        return self.some(x) if dist.get_rank() == self.calls % 2 else x


def parts_and_groups() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Parts()
    others = [p for name, p in model.named_parameters() if p.requires_grad and not name.startswith("first")]
    groups = [{"params": model.first.parameters(), "lr": 0.05}, {"params": others, "weight_decay": 0.01}]
    return model, torch.optim.SGD(groups, lr=0.02, momentum=0.5)


def plain(lr: float = 0.05) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = perceptron(20, 24)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> Any:
    """Local steps; yields before each is counted."""
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step, model)).square().mean().backward()
        optimizer.step()
        yield step


def globals_of(updates: LocalUpdates) -> dict[str, Tensor]:
    """What all ranks have agreed on."""
    found: dict[str, Tensor] = updates.state_dict()["global"]
    return found


def mean_over_ranks(x: Tensor) -> Tensor:
    """In float64, by torch alone."""
    total = x.detach().double().contiguous()
    dist.all_reduce(total)
    return total / dist.get_world_size()


class Ledger:
    """Sums the mean Δ of every round, by parameter, as seen from outside."""

    def __init__(self, model: nn.Module, updates: LocalUpdates) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.updates, self.start = updates, globals_of(updates)
        self.wanted = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self.parameters.items()}

    def expect(self) -> None:
        """A round follows."""
        now = globals_of(self.updates)
        for name, p in self.parameters.items():
            self.wanted[name] += mean_over_ranks(now[name] - p.detach().float())

    def error(self) -> float:
        """How far off the law is, relative to all that the ranks have moved. A collective."""
        now, state = globals_of(self.updates), self.updates.state_dict()
        residuals = residuals_of(state)
        off = total = 0.0
        for name, wanted in self.wanted.items():
            kept = mean_over_ranks(residuals[name]) if name in residuals else mean_over_ranks(torch.zeros(()))
            moved = self.start[name].double() - now[name].double()
            off += float((wanted - moved - kept).square().sum())
            total += float(wanted.square().sum())
        assert total > 0
        return (off / total) ** 0.5


def rounds_with_a_ledger(rank: int, codec: Codec, exchange: Any, forget: bool = False) -> Any:
    model, optimizer = parts_and_groups()
    options: dict[str, Any] = {"exchange": exchange, "exclude": ["norm.*"], "bucket_cap_mb": 0.004}
    updates = LocalUpdates(model, optimizer, codec, every=3, **options)
    ledger, same = Ledger(model, updates), []
    for step in train(rank, model, optimizer, range(11 + (rank == 1))):
        if step % 3 == 2 and step < 9:
            ledger.expect()
        if step < 11:
            updates.step()
        if step % 3 == 2 and step < 9:
            same.append(digest(model.parameters()))
        if forget and step == 5:
            updates._feedback.load({})
    ledger.expect()  # of two steps, and three on a rank that has not counted its last
    updates.synchronise()
    same.append(digest([*model.parameters(), *globals_of(updates).values()]))
    rounds = updates.rounds
    updates.synchronise()
    assert (updates.rounds, len(updates.statistics().decisions)) == (rounds, 4)
    error = ledger.error()
    updates.close()
    return same, error


@pytest.mark.parametrize(
    ("codec", "exchange", "size"),
    [
        *((codec, exchange, 2 + number % 2) for number, codec in enumerate(KEEPING) for exchange in possible(codec)),
        (TopK(0.05), "split", 2),
        (TopK(0.05), "union", 3),
        (OneBit(), "two_pass", 3),
        (TopK(0.05, values=torch.int8), "split", 3),
        (Identity(), "dense", 3),
        (Identity(), "gather", 2),
    ],
    ids=str,
)
def test_nothing_is_lost(ranks: Ranks, codec: Codec, exchange: str, size: int) -> None:
    """With unused and frozen parameters, parameter groups, bfloat16, excluded ones and an uneven last round."""
    same, errors = zip(*ranks(size).run(rounds_with_a_ledger, codec, exchange), strict=True)
    assert all(found == same[0] for found in same), "replicas differ"
    assert max(errors) < 2e-6


def test_the_law_notices_a_lost_residual(ranks: Ranks) -> None:
    assert min(error for _, error in ranks(2).run(rounds_with_a_ledger, OneBit(), "gather", True)) > 1e-2
