"""What moves replicas apart although their means are equal: loss scales and hyperparameters that differ."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import gradwire.hooks.horovod as hvd
import pytest
import torch
from gradwire import Identity, LocalUpdates, OneBit, Rounds
from gradwire.hooks.training.grad_scaler import BEFORE, LossScale, Scaling, check_equal
from gradwire.optim import DistributedLion, OneBitAdam
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ranks import Ranks, on_ranks
from torch import Tensor
from training import batch, digest, perceptron, wrap


def complaint(work: Callable[[], Any], model: torch.nn.Module) -> str:
    """Of a few steps, of which one is refused, which must leave the parameters alone."""
    for _ in range(4):
        before = digest(model.parameters())
        try:
            work()
        except (RuntimeError, ValueError) as error:
            assert digest(model.parameters()) == before
            return str(error)
    return "nothing"


def unequal_scales(rank: int, how: str) -> tuple[str, list[str]]:
    """Train with scalers that have been, or become, unequal; every step before that must be made."""
    model = perceptron()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scaler.scale(torch.zeros(()))  # only now it has a scale that can be changed
    ddp, _ = wrap(model, OneBit(), grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    digests = []

    def step(number: int) -> None:
        optimizer.zero_grad()
        scaler.scale(ddp(batch(rank, number, model)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        digests.append(digest(model.parameters()))

    with ddp.join() if how == "join" else nullcontext():
        for number in range(2 if rank and how == "join" else 3):
            step(number)
    if how == "resume" and rank == 1:
        scaler.update(2 * scaler.get_scale())
    if how == "equal":
        step(3)
        return "", digests
    del digests[:]
    return complaint(lambda: step(3), model), digests


@pytest.mark.parametrize("how", ["resume", "join", "equal"])
def test_unequal_loss_scales_are_refused_on_every_rank(ranks: Ranks, how: str) -> None:
    """A scaler that has been resumed without its state, and one that has seen fewer steps under join."""
    found = ranks(2).run(unequal_scales, how)
    for text, digests in found:
        assert digests == found[0][1]
        if how == "equal":
            continue
        scales = "rank 0 has 16.0, rank 1 has 32.0" if how == "resume" else "rank 0 has 32.0, rank 1 has 16.0"
        assert "ranks disagree on the loss scale" in text
        assert scales in text
        assert "state_dict() of one rank" in text


def test_on_a_gpu_the_scale_of_the_step_before_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    loss_scale, scales = LossScale(scaler), []
    monkeypatch.setattr(LossScale, "scale", property(lambda self: self.scaler._scale))  # where it lies on a GPU
    for new in (8.0, 16.0, 32.0):
        scaling = loss_scale.scaling()
        assert scaling is not None
        assert isinstance(scaling.scale, Tensor)
        assert Scaling.of(scaling.words()) is None  # a rank that has joined must not take it for this step's
        scales.append(scaling)
        scaler.update(new)
    assert [scaling.known for scaling in scales] == [None, 4.0, 8.0]
    words = [scaling.words() for scaling in scales]
    assert [kind for kind, _ in words] == [0, BEFORE, BEFORE]
    check_equal([words[0], words[1], words[1]])
    with pytest.raises(ValueError, match=r"rank 1 has 4\.0, rank 2 has 8\.0"):
        check_equal(words)


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        ("adam", "lr", "rank 0 has 0.0025, rank 1 has 0.00125"),
        ("adam", "eps", "rank 0 has 1e-08, rank 1 has 0.25"),
        ("lion", "lr", "rank 0 has 0.0025, rank 1 has 0.00125"),
        ("lion", "betas", r"rank 0 has (0.9, 0.99), rank 1 has (0.5, 0.6)"),
        ("lion", "weight_decay", "rank 0 has 0.0, rank 1 has 0.25"),
    ],
)
@on_ranks(2)
def test_unequal_hyperparameters_are_refused_on_every_rank(rank: int, kind: str, name: str, values: str) -> None:
    model = perceptron()
    options: dict[str, Any] = {"warmup_steps": 1} if kind == "adam" else {}
    optimizer = (OneBitAdam if kind == "adam" else DistributedLion)(model.parameters(), lr=0.01, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step() -> None:
        optimizer.zero_grad()
        model(batch(rank, 0, model)).square().mean().backward()
        optimizer.step()

    for _ in range(2):  # schedules that go alike are no difference
        step()
        schedule.step()
    if rank == 1 and name == "lr":
        schedule.step()
    elif rank == 1:
        optimizer.param_groups[0][name] = {"betas": (0.5, 0.6)}.get(name, 0.25)
    text = complaint(step, model)
    optimizer.close()
    assert f"ranks disagree on {name} of parameter group 0: {values}" in text


@on_ranks(2)
def test_unequal_fragments_are_refused_on_every_rank(rank: int) -> None:
    """Learning rates may differ; the fragment whose turn it is may not."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank))
    updates = LocalUpdates(model, optimizer, Identity(), every=4, rounds=Rounds(fragments=2))

    def step() -> None:
        optimizer.zero_grad()
        model(batch(rank, 0, model)).square().mean().backward()
        optimizer.step()
        updates.step()

    for _ in range(4):
        step()
    saved = updates.state_dict()
    saved["counted_steps"] += 2 * rank
    updates.load_state_dict(saved)
    step()
    with pytest.raises(RuntimeError, match="ranks disagree on pieces of the model"):
        step()


def with_skipped_steps(rank: int, every: int, overflows: set[tuple[int, int]], late: bool) -> list[tuple[int, str]]:
    """Steps of which a scaler skips those that overflow on this rank; rounds and parameters after each."""
    model = perceptron(width=8)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    updates = LocalUpdates(model, optimizer, Identity(), every=every)
    with updates:
        if late:  # nor need there be one before
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(batch(rank, step, model)).square().mean()
            scaler.scale(loss * float("inf") if (rank, step) in overflows else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if (step + 1) % every == 0:
                found.append((updates.rounds, digest(model.parameters())))
    scaler.scale(model(batch(rank, 0, model)).square().mean()).backward()
    scaler.step(optimizer)  # is nobody's any more
    assert updates.rounds == 6 // every
    updates.synchronise()
    updates.close()
    return found


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    every=st.sampled_from([1, 2, 3]),
    overflows=st.sets(st.tuples(st.integers(0, 1), st.integers(0, 5)), max_size=4),
    late=st.booleans(),
)
@example(every=3, overflows={(1, 1)}, late=False)
@example(every=3, overflows={(0, 2), (1, 5)}, late=False)
def test_steps_that_a_scaler_skips_are_counted(
    ranks: Ranks, every: int, overflows: set[tuple[int, int]], late: bool
) -> None:
    first, second = ranks(2).run(with_skipped_steps, every, overflows, late)
    assert first == second
    assert [rounds for rounds, _ in first] == [*range(1, 6 // every + 1)]


@pytest.mark.parametrize("codec", [False, True])
@on_ranks(2)
def test_unequal_loss_scales_of_horovod_are_refused_on_every_rank(rank: int, codec: bool) -> None:
    hvd.init()
    texts = []
    for large in (False, True):  # small gradients travel with their announcement
        model = perceptron(width=64 if large else 5)
        compression: Any = hvd.Compression.onebit() if codec else hvd.Compression.none
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), compression=compression)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer.use_grad_scaler(scaler)

        def step() -> None:
            optimizer.zero_grad()  # noqa: B023
            scaler.scale(model(batch(rank, 0, model)).square().mean()).backward()  # noqa: B023
            scaler.step(optimizer)  # noqa: B023
            scaler.update()  # noqa: B023

        step()
        if rank == 1:
            scaler.update(16.0)
        texts.append(complaint(step, model))
    for text in texts:
        assert "ranks disagree on the loss scale: rank 0 has 8.0, rank 1 has 16.0" in text
        assert "state_dict() of one rank" in text
