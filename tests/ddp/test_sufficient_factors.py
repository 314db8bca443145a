"""Gradients of linear layers that travel as their factors: the mean is DDP's, and the ranks' bits agree."""

from __future__ import annotations

import contextlib
import copy
import pickle
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gradwire import CompressState, SufficientFactors, TopK, compress_hook
from gradwire.hooks.comm.group import Group
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from lacking import needs_ignored_parameters
from ranks import Ranks, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import digest

#: The relative rounding of a product, and of the activations before it.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}
WIDE = 6


@dataclass(frozen=True)
class Pass:
    """One backward pass: samples of each rank in turn, None where it does not use the layers; whether it is inside of
    `no_sync`; the gradients before it: "none", "zero" or "kept"; and where it raises: "", "first" or "last"."""

    rows: tuple[int | None, ...] = (2,)
    synchronised: bool = True
    before: str = "none"
    raises: str = ""


@dataclass(frozen=True)
class Run:
    passes: tuple[Pass, ...] = (Pass(),)
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    bias: bool = True
    calls: int = 1
    frozen: bool = False
    ddp: bool = True
    inline: bool = False
    codec: Any = None


class Network(nn.Module):
    """A body, a square layer, whose factors seldom pay, and a head of more classes, both called several times."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.calls = run.calls
        self.body, self.square = nn.Linear(3, WIDE), nn.Linear(WIDE, WIDE, bias=run.bias)
        self.head = nn.Linear(WIDE, 50, bias=run.bias)
        self.to(run.dtype)

    def forward(self, x: Tensor, uses: bool) -> dict[str, Tensor]:
        x = self.body(x)
        if not uses:
            return {"loss": x.float().square().sum()}
        for _ in range(self.calls):
            x = self.square(x).tanh()
        logits = [self.head(x * (1 + number)) for number in range(self.calls)]
        return {"loss": torch.stack(logits).sin().square().sum()}


class Trainer:
    """A model whose layers' factors travel, beside the gradients that DDP would leave, in float64."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.rank, self.number, self.world_size = run, rank, 0, dist.get_world_size()
        torch.manual_seed(rank)  # the weights of the first rank must become everybody's
        self.model = Network(run)
        self.model.body.requires_grad_(not run.frozen)
        with patch.object(Group, "blocks", staticmethod(lambda *_: not run.inline)):
            self.factors = SufficientFactors(self.model, ["square", "h*d"])
        if not run.ddp:
            for p in self.model.parameters():
                dist.broadcast(p.detach(), 0)
        unused = any(None in found.rows for found in run.passes)
        self.trained: Any = self.model
        if run.ddp:
            self.trained = DistributedDataParallel(self.model, find_unused_parameters=unused)
        self.state = None
        if run.codec is not None:
            self.state = CompressState(self.trained, run.codec, exchange="gather", fallback=None)
            self.trained.register_comm_hook(self.state, compress_hook)
        self.weights = {"square": self.model.square.weight, "head": self.model.head.weight}
        self.forget("none")

    def forget(self, before: str) -> None:
        """What `zero_grad` does, here and in the expectation."""
        if before != "kept":
            self.model.zero_grad(set_to_none=before == "none")
            wanted = {} if before == "none" else {n: torch.zeros_like(w) for n, w in self.wanted.items()}
            self.wanted: dict[str, Tensor] = wanted
            self.size = dict.fromkeys(self.weights, 0.0)

    def batch(self, rows: int | None) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.number + self.rank)
        return torch.randn(2 if rows is None else rows, 3, generator=generator).to(self.run.dtype)

    def expect(self, found: Pass, rows: int | None) -> None:
        """Do what DDP does: add this rank's gradient, and replace the sum by the ranks' mean if some rank has one."""
        twin = copy.deepcopy(self.model).double()  # a copy, whose factors nobody takes
        twin.zero_grad()
        twin(self.batch(rows).double(), rows is not None)["loss"].backward()
        for name, weight in self.weights.items():
            own: Any = twin.get_submodule(name).weight.grad
            if own is not None:
                self.wanted[name] = self.wanted.get(name, 0.0) + own
            told = torch.tensor([float(own is not None), 0.0 if own is None else float(own.abs().max())])
            dist.all_reduce(told)
            self.size[name] += float(told[1])
            if found.synchronised and told[0]:
                total = self.wanted.get(name, torch.zeros_like(weight, dtype=torch.float64)).clone()
                dist.all_reduce(total)
                self.wanted[name] = total / self.world_size

    def play(self, found: Pass) -> None:
        rows = found.rows[self.rank % len(found.rows)]
        self.forget(found.before)
        if not found.raises:
            self.expect(found, rows)
        holder = self.trained if self.run.ddp else self.factors
        with contextlib.nullcontext() if found.synchronised else holder.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.run.autocast):
                loss = self.trained(self.batch(rows), rows is not None)["loss"]
            self.number += 1
            if found.raises:
                self.raising(loss, found.raises)
            else:
                loss.backward()
        for name, weight in self.weights.items():
            self.check(name, weight, found)

    def raising(self, loss: Tensor, where: str) -> None:
        handle = (loss if where == "first" else self.model.body.weight).register_hook(lambda _: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            loss.backward()
        handle.remove()
        if self.run.ddp:
            self.trained.reducer._reset_state()
        self.forget("none")

    def check(self, name: str, weight: Tensor, found: Pass) -> None:
        wanted, dtype = self.wanted.get(name), torch.bfloat16 if self.run.autocast else self.run.dtype
        assert (weight.grad is None) == (wanted is None), name
        if weight.grad is None or wanted is None:
            return
        assert weight.grad.dtype == weight.dtype
        off = float((weight.grad.double() - wanted).abs().max())
        assert off <= ROUNDING[dtype] * self.size[name], (name, off, self.size[name], self.factors.statistics())
        if found.synchronised:
            said: list[Any] = [None] * self.world_size
            dist.all_gather_object(said, digest([weight.grad]))
            assert len(set(said)) == 1, f"the ranks' bits differ: {name}"

    def close(self) -> None:
        self.factors.close()
        if self.state is not None:
            self.state.close()


def play(rank: int, run: Run) -> dict[int, str]:
    trainer = Trainer(run, rank)
    for found in run.passes:
        trainer.play(found)
    decided = trainer.factors.statistics().decisions
    trainer.close()
    return decided


def sound(run: Run) -> Run:
    """Without a rank that has no graph at all, and with something left for DDP and for a hook that raises. DDP itself
    fails now and then where a pass has raised and another uses not all parameters."""
    passes = run.passes
    if run.frozen:
        passes = tuple(replace(p, raises="") for p in passes)
    if run.frozen or (run.ddp and any(p.raises for p in passes)):
        passes = tuple(replace(p, rows=tuple(n or 0 for n in p.rows)) for p in passes)
    passes = tuple(replace(p, raises=p.raises if p.synchronised else "") for p in passes)
    ddp = run.ddp and (run.bias or not run.frozen)
    low = run.dtype == torch.float64 or run.dtype in (torch.bfloat16, torch.float16)
    codec = None if not ddp or run.dtype == torch.float64 else run.codec
    return replace(run, passes=passes, ddp=ddp, codec=codec, autocast=run.autocast and not low)


passes = st.builds(
    Pass,
    rows=st.lists(st.sampled_from([0, 1, 2, 5, 60, None]), min_size=1, max_size=4).map(tuple),
    synchronised=st.sampled_from([True, True, False]),
    before=st.sampled_from(["none", "none", "zero", "kept"]),
    raises=st.sampled_from(["", "", "", "", "first", "last"]),
)
runs = st.builds(
    Run,
    passes=st.lists(passes, min_size=1, max_size=6).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    autocast=st.booleans(),
    bias=st.booleans(),
    calls=st.sampled_from([1, 1, 2, 3]),
    frozen=st.sampled_from([False, False, True]),
    ddp=st.booleans(),
    inline=st.booleans(),
    codec=st.sampled_from([None, None, TopK(0.5)]),
).map(sound)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)
@given(run=runs, world_size=st.sampled_from([2, 3, 4]))
@example(run=Run(passes=(Pass(), Pass(before="kept"), Pass(before="kept", rows=(60, 0)), Pass())), world_size=2)
@example(run=Run(passes=(Pass(synchronised=False), Pass(before="kept"), Pass(before="zero")), ddp=False), world_size=3)
def test_the_mean_is_ddps_and_equal_on_all_ranks(ranks: Ranks, run: Run, world_size: int) -> None:
    found = ranks(world_size).run(play, run)
    assert all(decided == found[0] for decided in found)


def head(classes: int = 50, width: int = WIDE, **options: Any) -> Any:
    """Two linear layers in a sequence."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, width), nn.Linear(width, classes, **options))


def samples(rank: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(rank))


@on_ranks(4)
def test_factors_are_few_bytes_and_follow_what_they_cost(rank: int) -> list[int]:
    model = head(500, 64)
    factors = SufficientFactors(model, rows=4)  # pays for the head alone
    ddp = DistributedDataParallel(model)
    found = []
    for rows in (2, 50):
        before = factors.statistics().bytes_received
        ddp(samples(rank, rows)).square().sum().backward()
        found.append(factors.statistics().bytes_received - before)
    dense = 4 * 2 * 3 * 500 * 64 // 4
    assert found == [4 * 3 * 2 * (500 + 64), dense]
    assert dense < 4 * 3 * 50 * (500 + 64)
    factors.close()
    return found


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_overflow_of_one_rank_is_seen_by_all(rank: int, dtype: torch.dtype) -> bool:
    model = head()
    factors = SufficientFactors(model, ["1"])
    ddp = DistributedDataParallel(model)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(model.parameters(), 0.1)
    before = digest(model.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float16):
        loss = ddp(samples(rank)).float().square().sum()
    scaler.scale(loss * (float("inf") if rank == 1 else 1.0)).backward()
    grad = model[1].weight.grad
    assert grad is not None
    assert not grad.isfinite().all()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert digest(model.parameters()) == before
    factors.close()
    return True


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.head.weight = self.table.weight


class Own(nn.Linear):
    pass


def frozen() -> nn.Module:
    model = head()
    model[1].weight.requires_grad_(False)
    return model


def watched() -> nn.Module:
    model = head()
    model[1].weight.register_hook(lambda grad: None)
    return model


@on_ranks(2)
def test_what_cannot_be_taken_is_refused_with_a_sentence(rank: int) -> list[str]:
    said, taken = [], head()
    kept = SufficientFactors(taken, ["1"])
    for model, arguments, wrong in (
        (head(), {"modules": ["2"]}, "'2' matches none; among the linear layers are ['0', '1']"),
        (head(), {"modules": "1"}, "expected names of modules"),
        (head(), {}, "needs either modules"),
        (head(), {"modules": ["1"], "rows": 1}, "needs either modules"),
        (head(), {"rows": 0}, "rows=0: expected"),
        (head(), {"rows": 1000}, "no linear layer"),
        (Tied(), {"modules": ["head"]}, "'head' shares its weight"),
        (nn.Sequential(Own(2, 2)), {"modules": ["0"]}, "'0' is a Own"),
        (frozen(), {"modules": ["1"]}, "requires no gradient"),
        (watched(), {"modules": ["1"]}, "has hooks on its weight"),
        (head(dtype=torch.complex64), {"modules": ["1"]}, "weight of torch.complex64"),
        (DistributedDataParallel(head()), {"modules": ["1"]}, "expected the module that"),
        ("head", {"modules": ["1"]}, "model is a str"),
        (taken, {"modules": ["0"]}, "has <SufficientFactors of 1.weight, step 0> already"),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            SufficientFactors(model, **arguments)  # type: ignore[arg-type]
        assert wrong in str(caught.value)
        said.append(wrong)
    with pytest.raises(ValueError, match="ranks disagree on layers") as differ:
        SufficientFactors(head(), ["0"] if rank else ["1"])
    said.append(str(differ.value))
    with pytest.raises(ValueError, match="matches none") as other:  # of one rank, and the other hears of it
        SufficientFactors(head(), ["1"] if rank else ["2"])
    kept.close()
    return [*said, str(other.value)[-30:]]


def trouble(model: Any, factors: SufficientFactors, ddp: Any, what: str, rank: int) -> None:
    """A step in which something is wrong, on the second rank if it can be of one alone."""
    mine, x = rank == 1, samples(rank)
    if what == "other bits":
        factors._layers[0]._digest += mine
    if what == "replaced":
        model[1].weight = nn.Parameter(torch.zeros(50, WIDE))
    casts = torch.autocast("cpu", dtype=torch.bfloat16, enabled=mine and what == "autocast")
    with casts, ddp.join() if what == "joined" else contextlib.nullcontext():
        loss = ddp(x).float().square().sum()
    if what == "a penalty":
        loss += model[1].weight.square().sum()
    loss.backward()


@on_ranks(2)
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("a penalty", "gradient from elsewhere"),
        ("autocast", "ranks disagree on the dtype of the factors of '1.weight': rank 0 has torch.float32, rank 1 has"),
        ("other bits", "Equal products need equal processors"),
        ("joined", "leave out DDP.join"),
        ("replaced", "another tensor than"),
    ],
)
def test_trouble_is_an_error_on_all_ranks(rank: int, what: str, expected: str) -> str:
    model = head()
    factors = SufficientFactors(model, ["1"])
    ddp = DistributedDataParallel(model)
    ddp(samples(rank)).sum().backward()
    model.zero_grad()
    with pytest.raises((RuntimeError, ValueError), match=expected):
        trouble(model, factors, ddp, what, rank)
    return what


@on_ranks(2)
def test_a_pass_that_raises_on_one_rank_ends_on_all(rank: int) -> bool:
    model = head()
    factors = SufficientFactors(model, ["1"])
    out = model(samples(rank))
    if rank == 1:
        out.register_hook(lambda _: 1 / 0)
    with pytest.raises((ZeroDivisionError, RuntimeError), match="by zero" if rank else "pass of rank 1 raised"):
        out.sum().backward()
    assert model[1].weight.grad is None
    model(samples(rank)).sum().backward()  # all are in the same step
    assert model[1].weight.grad is not None
    factors.close()
    return True


@on_ranks(2)
def test_a_part_of_a_gradient_that_comes_too_late_is_refused(rank: int) -> bool:
    """In the second pass through a graph nobody knows how many calls there are."""
    model = head(WIDE)
    factors = SufficientFactors(model, ["1"])
    loss = model[1](model(samples(rank))).sum()
    loss.backward(retain_graph=True)
    assert factors.statistics().decisions[0].endswith(": 8 rows")
    with pytest.raises(RuntimeError, match="backward once for each forward pass"):
        loss.backward()
    return True


@on_ranks(2)
def test_gradients_that_are_asked_for_stay_this_ranks(rank: int) -> bool:
    """`torch.autograd.grad`, and passes that add to other gradients only: nothing is exchanged."""
    model = head()
    factors = SufficientFactors(model, ["1"])
    plain = copy.deepcopy(model)
    x = samples(rank).requires_grad_()
    for made in (model, plain):
        made.found = torch.autograd.grad(made(x).square().sum(), [made[1].weight])
        made(x).square().sum().backward(inputs=[made[0].weight])
    assert torch.equal(model.found[0], plain.found[0])
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)
    assert model[1].weight.grad is None
    factors.close()
    return True


@on_ranks(2)
def test_copies_are_plain_and_a_closed_one_leaves_the_model_as_it_was(rank: int) -> bool:
    model = head()
    factors = SufficientFactors(model, ["1"])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(samples(rank)).sum().backward()  # of one rank's own
    if rank == 0:
        twin(samples(rank)).sum().backward()
    factors.close()
    assert [type(m) for m in model] == [nn.Linear] * 2
    ddp = DistributedDataParallel(model)
    ddp(samples(rank)).square().sum().backward()
    said: list[Any] = [None, None]
    dist.all_gather_object(said, digest([model[1].weight.grad]))
    assert said[0] == said[1]
    return True


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_under_activation_checkpointing(rank: int, reentrant: bool) -> bool:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = head()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.inner, x, use_reentrant=reentrant)
            return result

    grads = []
    for takes in (True, False):
        model = Checkpointed()
        factors = SufficientFactors(model, ["inner.1"]) if takes else None
        ddp = DistributedDataParallel(model)
        ddp(samples(rank).requires_grad_()).square().sum().backward()
        grads.append(model.inner[1].weight.grad)
        if factors is not None:
            assert factors.statistics().decisions == {0: "factors: 4 rows"}
            factors.close()
    assert torch.allclose(grads[0], grads[1], rtol=1e-5)
    return True


@needs_ignored_parameters
@on_ranks(2)
def test_beside_shards(rank: int) -> bool:
    """FSDP2 shards what it is not told to ignore; the head's factors travel by themselves."""
    plain, model = head(), head()
    factors = SufficientFactors(model, ["1"])
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params={model[1].weight})
    for every in range(2):
        x = samples(rank + 2 * every)
        with contextlib.nullcontext() if every else factors.no_sync():
            model(x).square().sum().backward()
        plain(x).square().sum().backward()
    mean = plain[1].weight.grad
    assert mean is not None
    dist.all_reduce(mean)
    assert torch.allclose(model[1].weight.grad, mean / 2, rtol=1e-4)
    assert factors.statistics().decisions == {0: "factors: 8 rows"}
    factors.close()
    return True


@on_ranks(2)
def test_in_a_compiled_model(rank: int) -> bool:
    model = head()
    factors = SufficientFactors(model, ["1"])
    ddp: Any = torch.compile(DistributedDataParallel(model), backend="eager")
    for _ in range(2):
        ddp(samples(rank)).square().sum().backward()
    assert factors.statistics().steps == 2
    assert factors.statistics().decisions == {0: "factors: 4 rows"}
    factors.close()
    return True
