"""DistributedOptimizer: whose gradients a step uses, with and without compression, and what survives a restart."""

from __future__ import annotations

import collections
import copy
import itertools
import random
import threading
import warnings
from functools import partial
from typing import Any
from unittest.mock import patch

import gradwire.hooks.horovod as hvd
import numpy
import pytest
import torch
from gradwire import QSGD, OneBit, Residual, TopK
from gradwire.hooks.horovod.runtime.channel import Channel
from ranks import Ranks
from test_horovod_operations import equal, horovod_ranks, raised
from torch import Tensor, nn


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3))


def parameter(numel: int, dtype: torch.dtype = torch.float32) -> Any:
    return nn.Parameter(torch.zeros(numel, dtype=dtype))


def grad_of(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def data_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = data_of(rank, step)
    return nn.functional.mse_loss(model(x), y)


def sgd(model: nn.Module, momentum: float = 0.9, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-6) -> None:
    assert (got - expected).abs().max() <= tolerance, f"off by {(got - expected).abs().max()}"


def identical(model: nn.Module) -> None:
    """The ranks' weights are equal, bit for bit."""
    rows = hvd.allgather(weights(model).unsqueeze(0))
    assert all(torch.equal(row, rows[0]) for row in rows)


# -- whose gradients ---------------------------------------------------------------------------------------------------


@horovod_ranks(2, 4)
def test_predivide_keeps_sums_small(rank: int) -> None:
    n = hvd.size()
    p = parameter(2)
    big = torch.finfo(torch.float16).max
    half = parameter(2, torch.float16)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, half], lr=1.0), gradient_predivide_factor=float(n))
    (p * (rank + 1.0)).sum().backward()
    (half * (big * 0.75)).sum().backward()
    optimizer.synchronize()
    equal(p.grad, torch.full((2,), (n + 1) / 2))
    assert half.grad.isfinite().all()  # the sum alone would overflow


@horovod_ranks(2)
def test_a_process_set_that_is_not_registered_is_refused(rank: int) -> None:
    even = hvd.ProcessSet([0])
    models = [model_of() for _ in range(2)]
    optimizers = [sgd(model, process_set=even, op=op) for model, op in zip(models, (hvd.Sum, hvd.Adasum), strict=True)]

    def refused() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            before = weights(model)
            assert "not registered" in raised(ValueError, partial(train, model, optimizer, rank, range(1)))
            assert "add_process_set" in raised(ValueError, optimizer.step)
            assert torch.equal(weights(model), before)

    refused()
    hvd.add_process_set(even)
    pair = copy.deepcopy((models[0], optimizers[0]))
    train(*pair, rank, range(2))
    train(models[0], optimizers[0], rank, range(2))
    assert torch.equal(weights(pair[0]), weights(models[0]))
    hvd.remove_process_set(even)
    refused()


@horovod_ranks(2)
def test_a_step_has_as_many_passes_as_it_was_told(rank: int) -> None:
    model = model_of()
    optimizer = sgd(model, backward_passes_per_step=2)

    def backward() -> None:
        loss_of(model, rank, 0).backward()

    backward()
    optimizer.step()  # reduces what there is
    identical(model)
    optimizer.zero_grad()
    for passes, next_time in ((2, 1), (1, 3)):  # the second change comes when gradients are on their way
        for _ in range(passes):
            backward()
        if next_time == 3:
            optimizer.set_backward_passes_per_step(3)
        assert "backward_passes_per_step" in raised(AssertionError, backward)
        optimizer.synchronize()  # of what that has left of the gradients
        optimizer.set_backward_passes_per_step(next_time)
        assert optimizer.backward_passes_per_step == next_time
        optimizer.zero_grad()


FP16 = {"compression": hvd.Compression.fp16}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "options", [{}, {"groups": 1}, {"compression": TopK(1.0)}, FP16, {"sparse_as_dense": True}], ids=[*"-gtfd"]
)
@horovod_ranks(2)
def test_a_gradient_may_be_sparse_in_one_step_and_dense_or_missing_in_another(
    rank: int, options: dict[str, Any], kind: Any
) -> None:
    """On some ranks or all, from the first step on or later; as with the mean in one process."""
    for number in range(6):
        draw = random.Random(number)
        ours = [nn.Parameter(torch.zeros(6, 2)) for _ in range(3)]  # nobody uses the last
        plain = [nn.Parameter(p.detach().clone()) for p in ours]
        optimizer: Any = hvd.DistributedOptimizer(kind(ours, lr=0.5), **options)
        base = kind(plain, lr=0.5)
        for _ in range(4):
            optimizer.zero_grad()
            for which in range(2):
                sparse = draw.random() < 0.7 or kind is torch.optim.SparseAdam
                used = draw.choice([(), (0,), (1,), (0, 1)])
                mean = torch.zeros_like(plain[which])
                for other in used:
                    rows = torch.tensor(draw.choices(range(6), k=draw.choice([1, 2, 3])))
                    mean.index_add_(0, rows, torch.full((len(rows), mean.shape[1]), (other + 1) / 2))
                    if other == rank:
                        p = ours[which]
                        found = nn.functional.embedding(rows, p, sparse=True) if sparse else p[rows]
                        (found.sum() * (rank + 1)).backward()
                plain[which].grad = mean.to_sparse(1) if kind is torch.optim.SparseAdam else mean
            plain[2].grad = torch.zeros_like(plain[2]).to_sparse(1) if kind is torch.optim.SparseAdam else None
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            assert all("has become sparse after the first step" in str(each.message) for each in caught)
            base.step()
        for p, expected in zip(ours, plain, strict=True):
            close(p.detach(), expected.detach())


@horovod_ranks(2)
def test_a_gradient_that_was_dropped_on_its_way_is_named(rank: int) -> None:
    model = model_of()
    optimizer = sgd(model)
    loss_of(model, rank, 0).backward()
    model.zero_grad()
    with pytest.raises(AssertionError, match=r"0\.weight has lost its gradient .* as by model\.zero_grad"):
        optimizer.step()
    train(model, optimizer, rank, range(2))
    identical(model)


class Scaling:
    """A compressor of one's own, linear as it must be."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor * 4, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return (tensor / 4).to(ctx)


@horovod_ranks(2)
def test_ones_own_compressor(rank: int) -> None:
    models = model_of(), model_of()
    for model, compression in zip(models, (Scaling, hvd.Compression.none), strict=True):
        train(model, sgd(model, compression=compression, groups=2), rank, range(3))
    close(weights(models[0]), weights(models[1]), 1e-5)


@horovod_ranks(2, 4)
def test_adasum_combines_steps(rank: int) -> None:
    n = hvd.size()
    p = nn.Parameter(torch.ones(n))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.5), op=hvd.Adasum)
    (p * torch.eye(n)[rank]).sum().backward()
    optimizer.step()
    equal(p, torch.full((n,), 0.5))  # orthogonal steps add up
    optimizer.zero_grad()
    p.sum().backward()
    optimizer.step()
    equal(p, torch.zeros(n))  # equal ones count once

    def skip() -> None:
        with optimizer.skip_synchronize():
            pass

    assert "Adasum" in raised(AssertionError, skip)


# -- the optimizer it stands for ---------------------------------------------------------------------------------------


class Demanding(torch.optim.SGD):
    """Needs an argument that no wrapper knows of."""

    def __init__(self, params: Any, *, required: float, **options: Any) -> None:
        super().__init__(params, **options)
        self.required = required

    def step(self, closure: Any = None) -> Any:
        assert self.required == 7.0
        return super().step(closure)


@horovod_ranks(2)
def test_it_is_the_users_optimizer(rank: int) -> None:
    model = model_of()
    base = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(base, 1, gamma=0.5)
    loss_of(model, 0, 0).backward()
    base.step()
    steps = []
    base.register_step_post_hook(lambda *args: steps.append(1))
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert type(optimizer).__name__ == "AdamW"
    assert optimizer.param_groups is base.param_groups
    assert optimizer.state is base.state
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert len(optimizer.state) == 6
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.005
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler.step()  # still, though loading replaces the groups
    assert optimizer.param_groups[0]["lr"] == 0.0025
    later = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    train(model, optimizer, rank, range(1))
    later.step()
    assert len(steps) == 1
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.00025)
    identical(model)

    demanding = Demanding(model.parameters(), required=7.0, lr=0.1)
    train(model, hvd.DistributedOptimizer(demanding, model.named_parameters()), rank, range(1))
    identical(model)


@horovod_ranks(2)
def test_groups_that_are_added_later_are_reduced(rank: int) -> None:
    """The optimizer or its original may be told of them."""
    for options in ({}, {"compression": hvd.Compression.fp16}, {"op": hvd.Adasum}):
        p, q, r = (parameter(2) for _ in range(3))
        base = torch.optim.SGD([p], lr=1.0)
        optimizer = hvd.DistributedOptimizer(base, **options)
        base.add_param_group({"params": [q], "lr": 2.0})
        optimizer.add_param_group({"params": [r]})
        for _ in range(2):
            ((p.sum() + q.sum() + r.sum()) * (rank + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        for tensor, rate in ((p, 1.0), (q, 2.0), (r, 1.0)):
            equal(tensor, torch.full((2,), -rate * (hvd.size() + 1.0)))
        saved = base.state_dict()
        saved["param_groups"][0]["lr"] = 0.25
        base.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.25


@horovod_ranks(2)
def test_a_parameter_that_is_unfrozen_later_is_refused(rank: int) -> None:
    p, q = (parameter(2) for _ in range(2))
    plain = torch.optim.SGD([p.requires_grad_(False)], lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, [("p", p)])
    optimizer.add_param_group({"params": [q.requires_grad_(False)]})
    for each in (p, q):
        optimizer.step()
        (each.requires_grad_(True).sum() * rank).backward()
        assert "required none" in raised(ValueError, optimizer.step)
        optimizer.zero_grad()
    equal(torch.cat([p, q]), [0.0] * 4)
    again = hvd.DistributedOptimizer(plain)
    ((p.sum() + q.sum()) * rank).backward()
    again.step()
    equal(torch.cat([p, q]), [-(hvd.size() - 1) / 2] * 4)


@horovod_ranks(2)
def test_a_frozen_parameter_may_have_a_gradient_left(rank: int) -> None:
    """A layer is frozen after some steps; zeros of its gradient are left."""
    model = model_of()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    for frozen in (False, True):
        first = next(model.parameters()).requires_grad_(not frozen)
        optimizer = hvd.DistributedOptimizer(base, model.named_parameters())
        before = first.detach().clone()
        for step in range(2):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, rank, step).backward()
            optimizer.step()
        assert torch.equal(before, first) == frozen


@horovod_ranks(2, 4)
def test_a_step_reduces_once(rank: int) -> None:
    model = model_of()
    optimizer = sgd(model, op=hvd.Sum)

    def backward() -> None:
        loss_of(model, rank, 0).backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            backward()
            optimizer.synchronize()
            grads = [grad_of(p).clone() for p in model.parameters()]
            optimizer.step()
            assert all(torch.equal(a, grad_of(p)) for a, p in zip(grads, model.parameters(), strict=True))
    assert ["skip_synchronize" in str(each.message) for each in caught] == [True]
    # A rank that has nothing to add after synchronizing takes part all the same.
    optimizer.zero_grad()
    backward()
    optimizer.synchronize()
    if rank == 0:
        backward()
    optimizer.step()
    identical(model)

    backward()
    assert "zero_grad" in raised(AssertionError, optimizer.zero_grad)
    optimizer.load_state_dict(optimizer.state_dict())  # forgets it
    optimizer.zero_grad()

    def closure() -> Tensor:
        optimizer.zero_grad()
        backward()
        return loss_of(model, rank, 0)

    assert optimizer.step(closure) > 0
    identical(model)


@horovod_ranks(2)
def test_wrong_arguments(rank: int) -> None:
    model = model_of()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())

    def refused(*args: Any, **options: Any) -> str:
        return raised(ValueError, lambda: hvd.DistributedOptimizer(*args, **options))

    assert "0.weight" in refused(plain, [*named, named[0]])
    assert "(3,)" in refused(plain, named[:-1])
    assert "tuples" in refused(plain, list(model.parameters()))
    assert "process_set=[0]: expected" in refused(plain, named, process_set=[0])
    for passes in (0, -1, 1.5):
        assert f"={passes}" in refused(plain, named, backward_passes_per_step=passes)
    assert "predivide" in refused(plain, named, op=hvd.Sum, gradient_predivide_factor=2.0)
    for groups in (-1, "two", [named[0][1]], [[torch.ones(1)]], [[named[0][1]], [named[0][1]]], [["a"]]):
        assert "groups" in refused(plain, named, groups=groups)
    assert "LBFGS" in refused(torch.optim.LBFGS(model.parameters()))
    for factor in ("2", None, [2.0], 0.0, float("nan")):
        assert f"divide_factor={factor!r}: expected" in refused(plain, named, gradient_predivide_factor=factor)
    assert "not a Sequential" in refused(model)
    assert "already" in refused(hvd.DistributedOptimizer(plain, named))
    assert "fp32" in refused(plain, named, compression="fp32")
    assert "Adasum" in refused(plain, named, compression=OneBit(), op=hvd.Adasum)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, hvd.DistributedOptimizer(plain, named, num_groups=2), rank, range(1))
    assert [w.category for w in caught] == [DeprecationWarning]
    assert "LBFGS" in raised(
        ValueError, lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)
    )


# -- compression -------------------------------------------------------------------------------------------------------


@horovod_ranks(2)
def test_a_checkpoint_loads_into_residuals_of_another_dtype(rank: int) -> None:
    ways: list[Any] = ["auto", True, Residual(), Residual(dtype=torch.bfloat16), Residual(dtype=torch.int8)]
    for before, after in itertools.permutations(ways, 2):
        model = model_of()
        optimizer = sgd(model, compression=hvd.Compression.codec(TopK(0.1), error_feedback=before))
        train(model, optimizer, rank, range(2))
        saved = optimizer.state_dict()
        other = sgd(model, compression=hvd.Compression.codec(TopK(0.1), error_feedback=after))
        other.load_state_dict(saved)
        for name, residual in other.state_dict()["gradwire"]["residuals"].items():
            close(residual, saved["gradwire"]["residuals"][name], 2e-2)
        forgets: list[Any] = [False, Residual(decay=0.5)]
        for way in forgets:
            wrong = sgd(model_of(), compression=hvd.Compression.codec(TopK(0.1), error_feedback=way))
            assert "compressed by" in raised(ValueError, partial(wrong.load_state_dict, saved))


@horovod_ranks(2)
def test_a_checkpoint_of_another_compression_says_what_to_do(rank: int) -> None:
    model = model_of()
    optimizer = sgd(model, compression=hvd.Compression.topk(0.1))
    train(model, optimizer, rank, range(2))
    saved = optimizer.state_dict()
    torch.optim.SGD(model_of().parameters(), lr=1.0).load_state_dict(saved)  # a plain one can
    other = sgd(model_of(), compression=hvd.Compression.onebit())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sgd(model_of()).load_state_dict(saved)
        sgd(model_of()).load_state_dict(sgd(model_of()).state_dict())
    refused = raised(ValueError, lambda: other.load_state_dict(saved))
    assert "not by CodecCompression(codec=OneBit" in refused
    assert "pass compression= as it was when" in refused
    (dropped,) = (str(warning.message) for warning in caught)
    assert dropped.startswith("what CodecCompression(codec=TopK(")
    assert "is dropped, as this optimizer does not compress" in dropped


@horovod_ranks(2)
def test_the_residuals_of_another_rank_stay_out(rank: int) -> None:
    model = model_of()
    optimizer = sgd(model, compression=TopK(0.05))
    train(model, optimizer, rank, range(3))
    theirs = hvd.broadcast_object(optimizer.state_dict(), root_rank=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(theirs)
    assert len(caught) == (rank != 1)
    assert bool(optimizer.state_dict()["gradwire"]["residuals"]) == (rank == 1)


def loaded_by_the_root(rank: int) -> list[str]:
    """As Horovod's examples do: one rank's own checkpoint, handed to all."""
    hvd.init()
    model = model_of()
    optimizer = sgd(model, compression=TopK(0.05))
    train(model, optimizer, rank, range(3))
    other = sgd(model, compression=TopK(0.05))
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.broadcast_optimizer_state(other, root_rank=0)  # nobody has trained it
        assert not caught
        if rank == 0:
            other.load_state_dict(optimizer.state_dict())
        for _ in range(2):  # the second time these ranks have made a step since
            hvd.broadcast_optimizer_state(other, root_rank=0)
            said.append(str(caught.pop().message) if caught else "")
            train(model, other, rank, range(1))
    return said


def test_what_a_roots_own_checkpoint_lacks_is_told_to_the_others(ranks: Ranks) -> None:
    root, *others = ranks(3).run(loaded_by_the_root)
    assert root == ["", ""]
    for rank, (first, second) in enumerate(others, 1):
        assert f"left out on rank {rank}" in first
        assert not second


@horovod_ranks(2, within=20.0)
def test_residuals_that_not_all_ranks_have_or_that_fit_no_parameter(rank: int) -> None:
    model = model_of()
    optimizer = sgd(model, compression=TopK(0.05))
    train(model, optimizer, rank, range(3))
    saved = optimizer.state_dict()
    mean = {name: residual / hvd.size() for name, residual in saved["gradwire"]["residuals"].items()}
    other = sgd(model, compression=TopK(0.05))
    if rank == 0:
        other.load_state_dict(saved)
    for name, residual in sorted(other.consolidated_state_dict()["gradwire"]["residuals"].items()):
        equal(residual, hvd.broadcast(mean[name], 0, name=f"mean.{name}"))
    # What belongs to other parameters would never arrive, or end in the engine.
    named = [(f"net.{name}", p) for name, p in model.named_parameters()]
    renamed = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named, TopK(0.05))
    saved["param_groups"][0]["lr"] = 7.0
    assert "net.0.weight" in raised(ValueError, lambda: renamed.load_state_dict(saved))
    assert (renamed.param_groups[0]["lr"], len(renamed.state)) == (0.1, 0)  # nothing has changed
    saved["gradwire"]["residuals"]["0.bias"] = torch.zeros(7)
    assert "0.bias, of shape [7], and here it has [40]" in raised(ValueError, lambda: other.load_state_dict(saved))


def collectives(rank: int) -> tuple[int, int, list[bool]]:
    """How many collectives, each a latency or two, 60 parameters take to be given to all, and their residuals' mean."""
    hvd.init()
    torch.manual_seed(rank)
    shapes = [(40, 40), (1,), (3, 700), (0,)] * 15
    kinds = (torch.float32, torch.bfloat16, torch.float32, torch.int64)
    tensors = [torch.randn(shape).to(kind) for shape, kind in zip(shapes, kinds * 15, strict=True)]
    wanted = [hvd.broadcast(tensor, 1, name=f"wanted.{n}") for n, tensor in enumerate(tensors)]
    tensors[8], wanted[8] = tensors[8].t(), wanted[8].t()
    parameters = [nn.Parameter(torch.randn(1100)) for _ in range(60)]
    named = [(f"p{n}", p) for n, p in enumerate(parameters)]
    plain = torch.optim.SGD(parameters, lr=0.1)
    optimizer: Any = hvd.DistributedOptimizer(plain, named_parameters=named, compression=hvd.Compression.onebit())
    torch.stack(list[Tensor](parameters)).square().sum().backward()
    optimizer.step()
    mine = optimizer.state_dict()["gradwire"]["residuals"]
    means = {name: hvd.allreduce(residual, name=f"mean.{name}") for name, residual in mine.items()}
    broadcast, all_reduce = (
        patch.object(Channel, name, autospec=True, side_effect=getattr(Channel, name))
        for name in ("broadcast", "all_reduce")
    )
    with broadcast as broadcasts, all_reduce as sums:
        hvd.broadcast_parameters(tensors, root_rank=1)
        saved = optimizer.consolidated_state_dict()["gradwire"]["residuals"]
        hvd.barrier()
    right = [torch.equal(tensor, there) for tensor, there in zip(tensors, wanted, strict=True)]
    right += [torch.allclose(saved[name], mean, atol=1e-5) for name, mean in means.items()]
    return broadcasts.call_count, sums.call_count, right


def test_many_parameters_take_few_collectives(ranks: Ranks) -> None:
    """Two begin at once; what has come together meanwhile shares a buffer."""
    for broadcasts, sums, right in ranks(2).run(collectives):
        assert broadcasts <= 20
        assert sums <= 20
        assert all(right)
        assert len(right) == 120


# -- broadcasts of state -----------------------------------------------------------------------------------------------


@horovod_ranks(2, 4)
def test_broadcasts_of_models_and_objects(rank: int) -> None:
    root = hvd.size() - 1
    model = model_of(seed=rank)
    model.register_buffer("counter", torch.tensor(rank))
    channels: Any = nn.Conv2d(3, 4, 3)
    channels = channels.to(memory_format=torch.channels_last)
    with torch.no_grad():
        channels.weight.fill_(rank)
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    hvd.broadcast_parameters(list(channels.named_parameters()), root_rank=root)
    equal(channels.weight, torch.full((4, 3, 3, 3), float(root)))
    assert torch.equal(weights(model), weights(model_of(seed=root)))
    assert model.state_dict()["counter"].item() == root
    loose = [torch.full((2,), float(rank)), torch.tensor(rank)]
    hvd.broadcast_parameters(loose, root_rank=1)
    equal(loose[0], [1.0, 1.0])
    sent = {"epoch": 7, "list": [1, "two", torch.ones(2)], "rank": root}
    got = hvd.broadcast_object(sent if rank == root else None, root_rank=root, name="state")
    assert (got["epoch"], got["rank"]) == (7, root)
    equal(got["list"][2], [1.0, 1.0])
    every = hvd.allgather_object({"rank": rank, "text": "x" * 100 * rank})
    assert every == [{"rank": r, "text": "x" * 100 * r} for r in range(hvd.size())]


@horovod_ranks(2)
def test_what_cannot_be_broadcast_is_refused(rank: int) -> None:
    module: Any = nn.Linear(2, 2)
    wrong: Any
    assert "float" in raised(ValueError, lambda: hvd.broadcast_parameters(1.0, 0))
    for wrong in (module, nn.Sequential(module)):
        for broadcast in (hvd.broadcast_parameters, hvd.broadcast_optimizer_state):
            assert type(wrong).__name__ in raised(ValueError, partial(broadcast, wrong, 0))
    assert "root_rank=99" in raised(ValueError, lambda: hvd.broadcast_parameters([torch.ones(1)], 99))
    few = torch.optim.SGD([*module.parameters()][: 2 if rank else 1], lr=0.1)
    assert "alike" in raised(ValueError, lambda: hvd.broadcast_optimizer_state(few, root_rank=0))
    few.param_groups[0]["lock"] = threading.Lock()
    assert "rank 1: TypeError: cannot pickle" in raised(ValueError, lambda: hvd.broadcast_optimizer_state(few, 1))


Pair = collections.namedtuple("Pair", "a b")


def nested(p: nn.Parameter, seed: int) -> dict[str, Any]:
    """A state as published optimizers have them, and more: containers of tensors, bytes, shapes, shared memory."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(12, generator=generator)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn)
    every = [whole.mul(50).abs().to(dtype) for dtype in dtypes]
    return {
        "step": seed + 0.5,
        "by dimension": dict(enumerate(every)),
        "ordered": collections.OrderedDict(b=every[0], a=[every[1], None]),
        "deque": collections.deque([Pair(every[2], f"rank {seed}")], maxlen=3),
        "plain": (p.shape, p.dtype, bytes([seed]), range(seed, 9), {seed}, numpy.float16(seed), numpy.arange(seed + 1)),
        "views": (whole[2:8].view(2, 3).t(), whole.view(torch.complex64), whole[:1].expand(4), whole[:0]),
        "sparse": torch.eye(3).mul(seed).to_sparse(),
        "parameter": (p, p.detach()),
    }


def outline(value: Any, seen: dict[int, int]) -> Any:
    """A value's types and bits; tensors that share memory have equal numbers."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return value.shape, outline(value._indices(), {}), outline(value._values(), {})
        memory = value.untyped_storage()
        number = seen.setdefault(memory._cdata, len(seen))
        place = value.stride(), value.storage_offset(), str(value.device)
        return type(value), value.dtype, value.shape, place, number, bytes(memory.tolist())
    if isinstance(value, dict):
        return type(value), [(key, outline(item, seen)) for key, item in value.items()]
    if isinstance(value, list | tuple | collections.deque):
        return type(value), getattr(value, "maxlen", None), [outline(item, seen) for item in value]
    return type(value), repr(value)


def outlined(optimizer: Any) -> Any:
    seen: dict[int, int] = {}
    groups = [{name: v for name, v in group.items() if name != "params"} for group in optimizer.param_groups]
    states = [optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"]]
    return outline([groups, states, optimizer.state.get("all")], seen)


@horovod_ranks(2)
def test_any_state_arrives_with_its_types_bits_and_shared_memory(rank: int) -> None:
    for dtype, fresh, distributed in itertools.product((torch.float32, torch.bfloat16), (False, True), (False, True)):
        parameters = [nn.Parameter(torch.ones(3, 4, dtype=dtype)), nn.Parameter(torch.ones(2, dtype=dtype))]
        optimizer: Any = torch.optim.Adam(parameters, lr=torch.tensor(0.1 * (rank + 1)), capturable=False)
        if rank == 1 or not fresh:
            for p in parameters:
                optimizer.state[p] = nested(p, rank + 1)
            optimizer.state[parameters[1]]["shared"] = optimizer.state[parameters[0]]["by dimension"]
            optimizer.state["all"] = [torch.ones(2).mul(rank), "text"]
            optimizer.param_groups[0] |= {"initial_lr": [torch.ones(1), rank], "name": f"group {rank}"}
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, zip("ab", parameters, strict=True), compression=TopK(0.1))
        called: list[Any] = []
        optimizer.register_load_state_dict_post_hook(called.append)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        here, root = hvd.allgather_object(outlined(optimizer))
        assert here == root
        assert len(called) == (rank != 1)
        assert optimizer.state[parameters[0]]["parameter"][0] is parameters[0]
        assert optimizer.param_groups[0]["params"][1] is parameters[1]
    parameters = [nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    optimizer.state[parameters[0]]["function"] = lambda: None
    assert "rank 0" in raised(ValueError, partial(hvd.broadcast_optimizer_state, optimizer, root_rank=0))


@horovod_ranks(2)
def test_parameters_in_another_order_are_not_mixed_up(rank: int) -> None:
    codec = hvd.Compression.codec(QSGD(bits=8), error_feedback=False)
    for options in ({}, {"op": hvd.Adasum}, {"compression": codec}, {"groups": 1}):
        parameters = {name: nn.Parameter(torch.zeros(2)) for name in "abcd"}
        named = [(name, parameters[name]) for name in ("acbd" if rank else "abcd")]
        base = torch.optim.SGD([p for _, p in named], lr=1.0)
        optimizer: Any = hvd.DistributedOptimizer(base, named, **options)
        for gradient, p in enumerate(parameters.values(), 1):
            p.grad = torch.full((2,), float(gradient))
        if len(options) and "op" not in options:
            message = raised(ValueError, optimizer.step)
            assert "ranks 0 and 1" in message
            assert ("c and b have one place" if "compression" in options else "b and c have one place") in message
        else:
            optimizer.step()
            for gradient, p in enumerate(parameters.values(), 1):
                equal(p, torch.full((2,), -float(gradient)))


@horovod_ranks(2)
def test_a_refused_gradient_leaves_nothing_under_way(rank: int) -> None:

    def step(dtype: torch.dtype) -> None:
        p, q = parameter(4, dtype), parameter(4)
        named = [("p", p), ("q", q)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=0.1), named_parameters=named)
        (p.abs().square().sum() + (q + 1.0).square().sum()).backward()
        optimizer.step()

    step(torch.float32)
    with pytest.raises(ValueError, match="complex64"):
        step(torch.complex64)
    step(torch.float32)
