"""Embeddings with sparse gradients, among gradients that are compressed: their mean is exact, whatever happens."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gradwire import QSGD, CompressState, Identity, OneBit, TopK, compress_hook
from gradwire.hooks.comm.group import Group
from gradwire.hooks.core.sparse_gradient import SparseGradient
from gradwire.hooks.network import probe
from gradwire.hooks.sparse.validation import ALGORITHMS
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks import Pool, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import digest, law, mean_residuals, pretend

Ranks = Callable[[int], Pool]


ONE_BIT = OneBit()


@dataclass(frozen=True)
class Run:
    """How a model is trained, and each of its steps: "step", "accumulate", "overflow" of the last rank's rows, "raise",
    "resume" and "close"."""

    codec: Any = ONE_BIT
    exchange: str = "gather"
    rows: int = 50
    width: int = 3
    dtype: torch.dtype = torch.float32
    bag: bool = False
    used: int = 8
    network: float = 1e-8
    scaler: bool = False
    options: tuple[str, ...] = ()
    events: tuple[str, ...] = ("step", "step", "step")


class Words(nn.Module):
    """Some rows of a table, and what follows; the table is the last bucket, the first one, or between."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        torch.manual_seed(3)
        table = nn.EmbeddingBag if run.bag else nn.Embedding
        self.first = nn.Linear(2, run.width)
        self.table = table(run.rows, run.width, sparse=True)
        self.last = nn.Linear(run.width, 2)
        self.to(run.dtype)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        indices, inputs = x
        rows = self.table(indices)
        mixed = rows if rows.dim() == 2 else rows.mean(1)  # of as many as there may be, a sum diverges
        result: Tensor = self.last(mixed + self.first(inputs)).float().square().sum()
        return result


def data(run: Run, rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * number + rank)
    # From a few rows only, and from fewer on some ranks: gradients meet, and rows come twice.
    among = max(1, min(run.rows, run.used * (1 + (rank + number) % 2)))
    indices = torch.randint(0, among, (4, run.used), generator=generator)
    return indices, torch.randn(4, 2, generator=generator).to(run.dtype)


class Trainer:
    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.rank, self.number, self.model = run, rank, 0, Words(run)
        names = [name for name, _ in self.model.named_parameters()]
        self.wanted = {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in self.model.named_parameters()}
        self.received = {name: torch.zeros_like(self.wanted[name]) for name in names}
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1 << 20) if run.scaler else None
        self.wrap()

    def wrap(self) -> None:
        self.begun = False
        options: dict[str, Any] = dict.fromkeys(self.run.options, True)
        self.ddp: Any = DistributedDataParallel(self.model, bucket_cap_mb=1e-6, **options)
        self.state = CompressState(
            self.ddp, self.run.codec, exchange=self.run.exchange, fallback=None, grad_scaler=self.scaler,
        )  # fmt: skip
        self.ddp.register_comm_hook(self.state, compress_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def gradients(self) -> dict[str, Tensor]:
        """Of this rank alone, in units of a loss that is not scaled."""
        twin = copy.deepcopy(self.model)
        for p in twin.parameters():
            p.grad = None
        twin(data(self.run, self.rank, self.number)).backward()
        table = twin.table.weight.grad
        assert table is not None
        self.magnitude += float(table._values().double().abs().sum())
        return {name: p.grad.double().to_dense() for name, p in twin.named_parameters() if p.grad is not None}

    def backward(self, fail: bool = False) -> dict[str, Tensor]:
        own = self.gradients()
        loss = self.ddp(data(self.run, self.rank, self.number))
        self.number += 1
        if fail:
            handle = self.model.first.weight.register_hook(lambda _: 1 / 0)
        try:
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        finally:
            if fail:
                handle.remove()
        return own

    def step(self, accumulate: bool = False, overflow: bool = False) -> None:
        self.optimizer.zero_grad()
        window = {name: torch.zeros_like(w) for name, w in self.wanted.items()}
        self.magnitude = 0.0  # of what is added up, on this rank
        if accumulate and (self.begun or "static_graph" not in self.run.options):  # else DDP cannot begin so
            with self.ddp.no_sync():
                window = self.backward()
        handle = None
        if overflow and self.rank == dist.get_world_size() - 1:
            handle = self.model.table.weight.register_hook(lambda g: g * float("inf"))
        window = {name: window[name] + own for name, own in self.backward().items()}
        self.begun = True
        if handle is not None:
            handle.remove()
        grads = {name: p.grad.double().to_dense() for name, p in self.model.named_parameters() if p.grad is not None}
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        before = self.model.table.weight.detach().clone()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            assert overflow == (self.scaler.get_scale() < scale)
        if overflow:
            assert torch.equal(before, self.model.table.weight)
            return
        mean, magnitude = window["table.weight"].clone(), torch.tensor(self.magnitude)
        dist.all_reduce(mean)
        dist.all_reduce(magnitude)
        mean /= dist.get_world_size()
        found, bound = grads["table.weight"] / scale, (8 + 4 * self.run.used) * 2**-24  # of so many terms
        bound += 2**-7 if self.run.dtype == torch.bfloat16 else 0.0
        assert float((found - mean).abs().max()) <= bound * float(magnitude)
        for name, own in window.items():
            self.wanted[name] += own
            self.received[name] += grads[name] / scale

    def resume(self) -> None:
        saved = self.state.consolidated_state_dict()
        assert "table.weight" not in next(iter(saved["residuals"].values()), {})
        self.state.close()
        self.wrap()
        self.state.load_state_dict(saved)

    def play(self) -> str:
        for event in self.run.events:
            if event in ("step", "accumulate", "overflow"):
                self.step(event == "accumulate", event == "overflow")
            elif event == "raise":
                self.optimizer.zero_grad()
                with contextlib.suppress(ZeroDivisionError):
                    self.backward(fail=True)
                self.ddp.reducer._reset_state()
                self.begun = False
            else:
                getattr(self.state if event == "close" else self, event)()
        if self.run.dtype == torch.float32 and "raise" not in self.run.events:
            wanted, size = {}, {}
            for name, own in self.wanted.items():
                norm = own.norm()
                dist.all_reduce(norm)  # ranks' gradients may cancel out, and what rounding takes from them does not
                dist.all_reduce(own)
                wanted[name], size[name] = own / dist.get_world_size(), float(norm)
            kept = self.run.codec.lossless or self.run.codec.default_feedback
            for name, off in law(wanted, self.received, mean_residuals(self.state), []).items():
                assert off <= 1e-5 * max(1.0, size[name]) or not kept, (name, off)
        self.state.close()
        return digest(self.model.parameters())


def play(rank: int, run: Run) -> str:
    with patch.object(probe, "calibration", pretend(run.network)):
        return Trainer(run, rank).play()


runs = st.builds(
    Run,
    codec=st.sampled_from([Identity(), OneBit(), TopK(0.2), QSGD()]),
    exchange=st.sampled_from(["gather", "auto", "dense"]),
    rows=st.sampled_from([1, 9, 50, 3000]),
    width=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
    bag=st.booleans(),
    used=st.sampled_from([1, 8, 200]),
    network=st.sampled_from([1e-11, 1e-8, 1e-6]),
    options=st.lists(st.sampled_from(["gradient_as_bucket_view", "static_graph"]), unique=True).map(tuple),
    events=st.lists(
        st.sampled_from(["step", "step", "accumulate", "overflow", "raise", "resume", "close"]), max_size=6
    ).map(lambda events: ("step", *events)),
).map(
    lambda run: replace(
        run,
        scaler="overflow" in run.events,
        options=tuple(o for o in run.options if o != "static_graph" or "raise" not in run.events),  # DDP forgets it
    )
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)
@given(run=runs, world_size=st.sampled_from([2, 4]))
def test_rows_are_exact_among_compressed_gradients(ranks: Ranks, run: Run, world_size: int) -> None:
    assert len(set(ranks(world_size).run(play, run))) == 1, "replicas differ"


def by_sparse_adam(rank: int, algorithm: str | None, exclude: bool, inline: bool) -> tuple[list[list[int]], Tensor]:
    """The rows of each step's gradient, and where they have moved to; None: DDP without a hook."""
    torch.manual_seed(2)
    table = nn.Embedding(9, 3, sparse=True)
    ddp: Any = DistributedDataParallel(nn.Sequential(table, nn.Linear(3, 2)))
    if algorithm is not None:
        with patch.object(Group, "blocks", staticmethod(lambda *_: not inline)):
            state = CompressState(ddp, OneBit(), exchange="gather", exclude=["0.weight"] if exclude else None)
        ddp.register_comm_hook(state, compress_hook)
    optimizer, found = torch.optim.SparseAdam([table.weight], lr=0.1), []
    with patch.object(SparseGradient, "_choose", lambda *_: algorithm):
        for step in range(3):
            optimizer.zero_grad()
            used = torch.tensor([step, 6 + rank % 2, 8])
            sign = torch.tensor([1.0, -2.0, 1.0 - 2 * (rank % 2)])  # on two ranks the last one's cancel out
            (ddp(used).sum(1) * sign).sum().backward()
            assert table.weight.grad is not None
            found.append(table.weight.grad.coalesce().indices()[0].tolist())
            optimizer.step()
    return found, table.weight.detach()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("inline", [False, True])
def test_rows_are_those_that_some_rank_has_used(ranks: Ranks, algorithm: str, inline: bool) -> None:
    [(rows, weights), *_] = ranks(2).run(by_sparse_adam, None, False, False)
    assert rows == [[step, 6, 7, 8] for step in range(3)]
    for found, moved in ranks(2).run(by_sparse_adam, algorithm, inline, inline):
        assert found == rows
        assert torch.allclose(moved, weights, atol=1e-6)


@on_ranks(2)
def test_ranks_compare_which_gradients_are_sparse(rank: int) -> list[str]:
    """A table that is sparse on one rank only."""
    ddp = DistributedDataParallel(nn.Embedding(10, 4, sparse=rank == 0))
    with pytest.raises(ValueError, match="sparse") as caught:
        CompressState(ddp, OneBit())
    return [str(caught.value)]


def bytes_of(rank: int, used: int) -> tuple[int, int]:
    run = Run(rows=10_000, width=16, used=used, exchange="gather", codec=Identity())
    trainer = Trainer(run, rank)
    trainer.step()
    done = trainer.state.statistics()
    trainer.state.close()
    return done.bytes_received, done.dense_bytes


def test_few_rows_are_few_bytes(ranks: Ranks) -> None:
    for received, whole in ranks(2).run(bytes_of, 10):
        assert received < whole / 50
    for received, _ in ranks(2).run(bytes_of, 10_000):  # more than half of the rows on each rank: as one vector
        assert received < 1.01 * 4 * 10_000 * 16


@on_ranks(2)
def test_rows_are_finite_if_what_is_handed_out_is(rank: int) -> None:
    """A mean that float32 holds, and the float16 of the table does not."""
    model = nn.Embedding(10, 4, sparse=True, dtype=torch.float16)
    ddp = DistributedDataParallel(model)
    state = CompressState(ddp, Identity(), exchange="gather")
    ddp.register_comm_hook(state, compress_hook)
    ddp(torch.tensor([1] * 4)).mul(60_000.0).sum().backward()
    assert model.weight.grad is not None
    finite, steps = bool(model.weight.grad.to_dense().isfinite().all()), state.statistics().nonfinite_steps
    state.close()
    assert (finite, steps) == (False, 1)


@on_ranks(2)
def test_a_residual_that_nothing_would_send_is_refused(rank: int) -> None:
    """A checkpoint from before the table's gradients were sparse: what they are still owed cannot go with any step."""

    def made(sparse: bool) -> CompressState:
        torch.manual_seed(1)
        ddp = DistributedDataParallel(nn.Embedding(10, 4, sparse=sparse))
        state = CompressState(ddp, OneBit(), exchange="gather", fallback=None)
        ddp.register_comm_hook(state, compress_hook)
        ddp(torch.arange(5)).square().sum().backward()
        return state

    saved = made(sparse=False).state_dict()
    state = made(sparse=True)
    with pytest.raises(ValueError, match="sparse now") as caught:
        state.load_state_dict(saved)
    with pytest.warns(UserWarning, match="sparse now"):
        state.load_state_dict(saved, strict=False)
    [kept] = state.state_dict()["residuals"].values()
    assert "'weight'" in str(caught.value)
    assert not kept


def joined(rank: int, compressed: bool) -> str:
    """Ranks with unequal amounts of data, and tables among their gradients."""
    model = Words(Run())
    ddp: Any = DistributedDataParallel(model, bucket_cap_mb=1e-6)
    if compressed:
        state = CompressState(ddp, Identity(), exchange="gather", fallback=None)
        ddp.register_comm_hook(state, compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddp.join():
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            ddp(data(Run(), rank, step)).backward()
            optimizer.step()
    return digest(model.parameters())


def test_a_rank_that_has_joined_sends_no_rows(ranks: Ranks) -> None:
    """On two ranks sums have one order."""
    assert len({*ranks(2).run(joined, True), *ranks(2).run(joined, False)}) == 1
