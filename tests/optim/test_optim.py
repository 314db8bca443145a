"""Optimizers that exchange something else than gradients: what was published, nothing lost, replicas equal."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import gradwire.hooks.horovod as hvd
import pytest
import torch
import torch.distributed as dist
from gradwire import (
    QSGD,
    ChunkedTopK,
    Codec,
    Identity,
    LocalUpdates,
    OneBit,
    Ternary,
    TopK,
    Tracking,
)
from gradwire.compress.backends import use_backend
from gradwire.compress.codecs.sign_vote import Votes
from gradwire.hooks.exchanges import possible
from gradwire.optim import DistributedLion, OneBitAdam, keep_gradients
from ranks import Ranks, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import batch, digest, mean_over_ranks, perceptron, residuals_of

BETAS, EPS, DECAY = (0.8, 0.95), 1e-6, 0.1
NEVER = 5  # the parameter that no rank ever has a gradient for
UNUSED = slice(3, 9)  # rows of the first one whose gradients are zero


def parameters() -> list[nn.Parameter]:
    """In channels_last, empty, in bfloat16, one that one rank alone uses, one that nobody does, a frozen one."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(40, 30), (4, 3, 5, 5), (0, 7), (70,), (33,), (21,), (300,), (8,)]
    made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    made[1].data = made[1].data.to(memory_format=torch.channels_last)
    made[3].data = made[3].data.bfloat16()
    made[7].requires_grad_(False)
    return made


def groups(made: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": made[:3], "weight_decay": DECAY}, {"params": made[3:], "lr": 0.02}]


def gradient(rank: int, step: int, index: int, p: Tensor) -> Tensor | None:
    """A rank's gradient, which depends on nothing else."""
    if index == NEVER or (index == 4 and rank != 1) or (index == 6 and step % 3 == rank):
        return None
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + index)
    found = torch.randn(p.shape, generator=generator).to(p.dtype)
    if index == 0:
        found[UNUSED] = 0.0
    return found.to(memory_format=torch.channels_last) if p.dim() == 4 else found


def walk(rank: int, made: list[nn.Parameter], steps: range) -> Iterator[int]:
    for step in steps:
        for index, p in enumerate(made):
            p.grad = gradient(rank, step, index, p) if p.requires_grad else None
        yield step


def adam(made: list[nn.Parameter], **options: Any) -> OneBitAdam:
    return OneBitAdam(
        groups(made), lr=0.01, betas=BETAS, eps=EPS, **{"bucket_cap_mb": 0.003, "warmup_steps": 3} | options
    )


def lion(made: list[nn.Parameter], **options: Any) -> DistributedLion:
    return DistributedLion(groups(made), lr=0.01, betas=BETAS, **{"bucket_cap_mb": 0.003} | options)


def scheduled(step: int) -> float:
    return 1.0 / (1 + step)


# -- as published, in float64 ------------------------------------------------------------------------------------------


class Published:
    """Either method, in float64, of all ranks' gradients, by its definition: nothing of gradwire's."""

    def __init__(self, made: list[nn.Parameter], world: int, sign: float) -> None:
        self.world, self.sign = world, sign
        self.made = [p.detach().double().clone() for p in made]
        self.m = [torch.zeros_like(p) for p in self.made]
        self.own = [[torch.zeros_like(p) for p in self.made] for _ in range(world)]
        self.v = [torch.zeros_like(p) for p in self.made]
        self.still = [torch.ones_like(p, dtype=torch.bool) for p in self.made]

    def gradients(self, step: int, index: int) -> list[Tensor]:
        like = parameters()[index]
        found = [gradient(rank, step, index, like) for rank in range(self.world)]
        return [torch.zeros_like(self.made[index]) if g is None else self.sign * g.double() for g in found]

    def adam(self, step: int, index: int, lr: float, decay: float) -> None:
        p, m, v = self.made[index], self.m[index], self.v[index]
        mean = torch.stack(self.gradients(step, index)).mean(0)
        m.mul_(BETAS[0]).add_((1 - BETAS[0]) * mean)  # the mean of the ranks' momenta is the momentum of the mean
        if step < 3:
            v.mul_(BETAS[1]).add_((1 - BETAS[1]) * mean**2)
        self.move(index, torch.where(v > 0, lr * (m / (v.sqrt() + EPS) + decay * p), 0.0))

    def lion(self, step: int, index: int, lr: float, decay: float, rule: str, zeros: bool) -> None:
        p, votes, nobody = self.made[index], [], []
        for rank, (g, own) in enumerate(zip(self.gradients(step, index), self.own, strict=True)):
            turn = (-1.0) ** ((rank + step) % self.world + (step if self.world % 2 else 0))
            nobody.append(0.0 if zeros else turn)
            found = torch.sign(BETAS[0] * own[index] + (1 - BETAS[0]) * g)
            votes.append(torch.where(found == 0, nobody[-1], found))
            own[index].mul_(BETAS[1]).add_((1 - BETAS[1]) * g)
        total, none = torch.stack(votes).sum(0), sum(nobody)
        delta = total.sign() if rule == "majority" else total / self.world
        self.still[index] &= total == none if rule == "mean" else total.sign() == torch.tensor(none).sign()
        self.move(index, torch.where(self.still[index], 0.0, lr * (delta + decay * p)))

    def move(self, index: int, by: Tensor) -> None:
        self.made[index] -= by
        if index == 3:
            self.made[index] = self.made[index].bfloat16().double()


def steps_of(rank: int, make: str, options: dict[str, Any], rule: str, zeros: bool) -> float:
    """The largest error against the definition, relative to how far a parameter has moved."""
    made, world = parameters(), dist.get_world_size()
    sign = -1.0 if options.get("maximize") else 1.0
    published, start = Published(made, world, sign), [p.detach().clone() for p in made]
    if rank:
        with torch.no_grad():
            made[0].add_(1.0)  # the first rank's are what counts
    optimizer = adam(made, **options) if make == "adam" else lion(made, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scheduled)
    for step in walk(rank, made, range(8)):
        optimizer.step()
        scheduler.step()
        for index in range(7):
            lr, decay = (0.01, DECAY) if index < 3 else (0.02, 0.0)
            if make == "adam":
                published.adam(step, index, lr * scheduled(step), decay)
            else:
                published.lion(step, index, lr * scheduled(step), decay, rule, zeros)
    optimizer.close()
    worst = 0.0
    for index, (p, expected, before) in enumerate(zip(made, published.made, start, strict=True)):
        moved = float((expected - before.double()).abs().max()) if p.numel() else 0.0
        assert (moved > 0) == (index not in (2, NEVER, 7)), index
        error = float((p.detach().double() - expected).abs().max()) if p.numel() else 0.0
        if p.dtype == torch.bfloat16:
            assert error <= 2.0**-7 * float(p.detach().abs().max()), (
                "more than a rounding of bfloat16 that fell otherwise"
            )
        elif moved:
            worst = max(worst, error / moved)
    rows = made[0][UNUSED]
    assert torch.equal(rows, start[0][UNUSED]), "what has no gradient has moved"
    assert torch.equal(made[NEVER], start[NEVER])
    assert torch.equal(made[7], start[7])
    return worst


@pytest.mark.parametrize(("size", "exchange"), [(2, "dense"), (4, "dense"), (2, "gather"), (4, "two_pass")])
def test_adam_is_as_published(ranks: Ranks, size: int, exchange: str) -> None:
    options = {"codec": Identity(), "exchange": exchange, "maximize": exchange == "gather"}
    assert max(ranks(size).run(steps_of, "adam", options, "", True)) < 3e-5  # of what has moved: parameters round


@pytest.mark.parametrize(
    ("rule", "options", "zeros", "size"),
    [
        ("majority", {"codec": Identity()}, True, 2),
        ("majority", {"codec": Ternary(), "maximize": True}, True, 3),
        *(("majority", {"exchange": way}, False, size) for way in ("gather", "two_pass") for size in (2, 3, 4)),
        ("mean", {}, False, 3),
        ("mean", {}, False, 4),
        ("mean", {"codec": Ternary(block=2560)}, True, 2),
    ],
    ids=str,
)
def test_lion_is_as_published(ranks: Ranks, rule: Any, options: dict[str, Any], zeros: bool, size: int) -> None:
    assert (
        max(ranks(size).run(steps_of, "lion", {"vote": rule, **options}, rule, zeros)) < 3e-5
    )  # of what has moved: parameters round


# -- what compression keeps --------------------------------------------------------------------------------------------


def momentum_and_residual(optimizer: Any, made: list[nn.Parameter], index: int) -> tuple[Tensor, Tensor]:
    """The means over the ranks."""
    residual = residuals_of(optimizer.state_dict()["gradwire"]).get(str(index), torch.zeros(()))
    return mean_over_ranks(optimizer.state[made[index]]["exp_avg"]), mean_over_ranks(residual)


def momenta(rank: int, codec: Any, exchange: Any) -> Any:
    """Digests of what ranks have, and the most of the momentum that is missing after any step."""
    made = parameters()
    optimizer = adam(made, codec=codec, exchange=exchange)
    trained, digests, worst = (0, 1, 3, 4, 6), [], 0.0
    for _ in walk(rank, made, range(9)):
        before = {index: momentum_and_residual(optimizer, made, index) for index in trained}
        optimizer.step()
        for index, (momentum, residual) in before.items():
            grad = made[index].grad
            mean = mean_over_ranks(torch.zeros(made[index].shape) if grad is None else grad.float())
            expected = BETAS[0] * momentum + (1 - BETAS[0]) * mean + residual
            found = sum(momentum_and_residual(optimizer, made, index))
            worst = max(worst, float((found - expected).norm() / expected.norm()))
        digests.append(digest([*made, *(state[name] for state in optimizer.state.values() for name in state)]))
    kept = bool(optimizer._feedback)
    optimizer.close()
    return digests, worst, kept


KEEPING = [OneBit(), QSGD(), Ternary(), TopK(0.05), ChunkedTopK(k=16, chunk=256)]


@pytest.mark.parametrize(
    ("codec", "exchange", "size"),
    [
        # Half of the ways in `make test`.
        pytest.param(codec, exchange, 2 + m % 2, marks=() if (n + m) % 2 else pytest.mark.slow)
        for n, codec in enumerate(KEEPING)
        for m, exchange in enumerate(possible(codec))
    ],
    ids=str,
)
def test_nothing_of_the_momentum_is_lost(ranks: Ranks, codec: Codec, exchange: str, size: int) -> None:
    digests, errors, kept = zip(*ranks(size).run(momenta, codec, exchange), strict=True)
    assert all(found == digests[0] for found in digests), "replicas differ"
    assert max(errors) < 2e-6
    assert all(kept) == (exchange != "dense")


@on_ranks(2)
def test_one_that_is_closed_and_a_copy_make_no_step(rank: int) -> None:
    optimizer = lion(parameters())
    optimizer.close()
    for gone in (optimizer, copy.deepcopy(optimizer)):
        with pytest.raises(RuntimeError, match="closed, or a copy"):
            gone.step()


# -- models ------------------------------------------------------------------------------------------------------------


def train(rank: int, model: Any, optimizer: Any, steps: int, closure: bool = False) -> str:
    for step in range(steps):

        def loss(step: int = step) -> Tensor:
            optimizer.zero_grad()
            found: Tensor = model(batch(rank, step, model)).square().mean()
            found.backward()
            return found

        if closure:
            assert optimizer.step(loss) > 0
        else:
            loss()
            optimizer.step()
    return digest(model.parameters())


@on_ranks(2)
def test_ddp_has_to_leave_gradients_alone(rank: int) -> str:
    """By itself, in DDP with the hook and under no_sync: the same. By DDP's own way: refused, on every rank."""
    digests = set()
    for way in ("alone", "closure", "hook", "no_sync"):
        model: Any = perceptron()
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02) if way in ("hook", "no_sync") else model
        optimizer = OneBitAdam(model.parameters(), warmup_steps=2)
        if way == "hook":
            wrapped.register_comm_hook(None, keep_gradients)
        if way == "no_sync":
            with wrapped.no_sync():
                digests.add(train(rank, wrapped, optimizer, 5))
        else:
            digests.add(train(rank, wrapped, optimizer, 5, way == "closure"))
        optimizer.close()
    model = DistributedDataParallel(perceptron())
    optimizer = OneBitAdam(model.parameters(), warmup_steps=2)
    before = digest(model.parameters())
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel averages .*keep_gradients"):
        train(rank, model, optimizer, 1)
    assert digest(model.parameters()) == before
    optimizer.close()
    assert len(digests) == 1
    return digests.pop()


@on_ranks(2)
def test_a_scaler_is_refused_on_every_rank(rank: int) -> None:
    model, other = perceptron(), perceptron()
    optimizer = DistributedLion(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(rank, 0, model)).mean()).backward()
    if rank:
        next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="DistributedLion takes no GradScaler"):
        scaler.step(optimizer)
    assert digest(model.parameters()) == digest(other.parameters())
    optimizer.zero_grad()
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    optimizer.close()


@pytest.mark.parametrize(
    ("which", "complaint"),
    [
        ("sparse", "sparse=False"),
        ("unfrozen", r"parameter 2 of group 0, of shape \(2,\), has a gradient, and required none when"),
    ],
)
@on_ranks(2)
def test_what_one_rank_cannot_send_is_refused_on_all(rank: int, which: str, complaint: str) -> None:
    """What only the second rank has."""
    table, rest = nn.Embedding(10, 4, sparse=which == "sparse" and rank == 1), nn.Linear(4, 2)
    rest.bias.requires_grad_(False)
    optimizer = OneBitAdam([*table.parameters(), *rest.parameters()], warmup_steps=1)
    if which == "unfrozen" and rank == 1:
        rest.bias.requires_grad_(True)
    rest(table(torch.tensor([1, 2]))).sum().backward()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        optimizer.step()
    optimizer.close()
    text = str(caught.value)
    assert re.search(complaint, text)
    assert "rank 1" in text or "gradwire: parameter" in text


@on_ranks(2)
def test_what_is_first_used_after_the_warm_up_stays_and_is_warned_of(rank: int) -> None:
    """A parameter that is first used after the warm-up."""
    made = parameters()
    optimizer = OneBitAdam(made, warmup_steps=2, weight_decay=0.1)
    for step in walk(rank, made, range(5)):
        if step == 3:
            made[NEVER].grad = torch.ones(21)
            before = digest([made[NEVER]])
            with pytest.warns(UserWarning, match=r"1 parameters, the first of shape \(21,\), have a gradient"):
                optimizer.step()
        else:
            optimizer.step()
    assert digest([made[NEVER]]) == before
    optimizer.close()


@pytest.mark.parametrize("make", ["adam", "lion"])
@on_ranks(2)
def test_groups_can_be_added(rank: int, make: str) -> str:
    made = parameters()
    build: Any = {"adam": lambda p: OneBitAdam(p, warmup_steps=3), "lion": DistributedLion}[make]
    optimizer: Any = build(made[:1])
    for step in walk(rank, made, range(6)):
        for p in made[3:]:
            p.grad = None if step < 2 else p.grad
        if step == 2:
            if rank:
                made[4].data.add_(1.0)
            optimizer.add_param_group({"params": made[3:], "lr": 0.02})
        optimizer.step()
    if make == "adam":
        with pytest.raises(ValueError, match=r"added at step 6, after the 3 of the warm-up"):
            optimizer.add_param_group({"params": made[1:2]})
    assert len(optimizer.param_groups) == 2
    for _ in walk(rank, made, range(6, 8)):
        optimizer.step()
    assert not torch.equal(made[4], parameters()[4])
    optimizer.close()
    return digest(made)


# -- arguments ---------------------------------------------------------------------------------------------------------


def refused(rank: int, kind: str, options: dict[str, Any]) -> str:
    """The error that these options raise; a learning rate is of the second rank alone."""
    build: Any = {"adam": partial(OneBitAdam, warmup_steps=1), "lion": DistributedLion}[kind]
    given = {"params": [nn.Parameter(torch.ones(3))], **(options if rank == 1 or "lr" not in options else {})}
    with pytest.raises((ValueError, TypeError)) as caught:
        build(given.pop("params"), **given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "options", "complaint"),
    [
        ("adam", {"lr": -1.0}, r"lr=-1.0: expected a number in \[0, inf\)"),
        ("adam", {"betas": (0.9, 1.0)}, r"betas\[1\]=1.0: expected a number in \[0, 1.0\)"),
        ("adam", {"betas": 0.9}, "betas=0.9: expected two numbers"),
        ("adam", {"eps": "small"}, "eps='small'"),
        ("adam", {"weight_decay": float("nan")}, "weight_decay=nan"),
        ("adam", {"maximize": 1}, "maximize=1: expected True or False"),
        ("adam", {"warmup_steps": -3}, "warmup_steps=-3"),
        ("adam", {"warmup_steps": 0}, "warmup_steps=0: expected 1 or more"),
        ("adam", {"exchange": "hierarchical"}, "exchange='hierarchical': expected one of 'auto', 'gather'"),
        ("adam", {"codec": OneBit}, "codec=OneBit is a class"),
        ("adam", {"codec": TopK(0.1), "exchange": "two_pass"}, "exchange='two_pass' needs a block codec"),
        ("adam", {"error_feedback": Tracking()}, "a momentum already; use Residual"),
        ("adam", {"bucket_cap_mb": 0}, "bucket_cap_mb=0"),
        ("lion", {"vote": "median"}, "vote='median': expected one of 'majority', 'mean'"),
        ("lion", {"codec": OneBit()}, r"codec=OneBit\(.* Votes\(\), Ternary\(\) and Identity"),
        ("lion", {"exchange": "split"}, "exchange='split': expected one of 'auto', 'gather', 'two_pass'"),
        ("lion", {"exchange": "two_pass", "vote": "mean"}, "use 'gather'"),
        ("lion", {"exchange": "two_pass", "codec": Ternary()}, "use 'gather'"),
        ("lion", {"betas": (0.9, -0.1)}, r"betas\[1\]=-0.1"),
        ("adam", {"params": []}, "empty parameter list"),
        (
            "adam",
            {"params": [nn.Parameter(torch.ones(2), requires_grad=False)]},
            "no parameters that require gradients",
        ),
        ("adam", {"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]}, "float64"),
        ("adam", {"params": torch.ones(2)}, "params argument given to the optimizer should be an iterable"),
    ],
    ids=str,
)
def test_bad_arguments_are_named_on_every_rank(
    ranks: Ranks, kind: str, options: dict[str, Any], complaint: str
) -> None:
    texts = ranks(2).run(refused, kind, options)
    assert all(re.search(complaint, text) for text in texts), texts


@on_ranks(2)
def test_ranks_that_mean_something_else_are_told(rank: int) -> None:
    with pytest.raises(ValueError) as caught:
        OneBitAdam([nn.Parameter(torch.ones(3))], lr=0.1 * (1 + rank), warmup_steps=1)
    text = str(caught.value)
    assert "ranks disagree on parameter groups" in text
    assert "'lr': 0.2" in text


# -- votes -------------------------------------------------------------------------------------------------------------


def votes_bytes(rank: int, exchange: Any) -> tuple[int, int]:
    optimizer = DistributedLion([nn.Parameter(torch.ones(1 << 18))], exchange=exchange)
    optimizer.step()
    done = optimizer.statistics()
    optimizer.close()
    return 8 * done.bytes_sent, 8 * done.bytes_received


def test_a_vote_is_a_bit(ranks: Ranks) -> None:
    numel, wire = 1 << 18, 1 + 64 / 4096
    for sent, received in ranks(4).run(votes_bytes, "gather"):
        assert (sent, received) == (wire * numel, 3 * wire * numel)
    for sent, received in ranks(4).run(votes_bytes, "auto"):
        back = (2 + 32 / 4096) * numel / 4
        assert (sent, received) == (wire * numel * 3 / 4 + back, 3 * (wire * numel / 4 + back))


@pytest.mark.parametrize("backend", ["reference", "cpu", "cuda"])
@pytest.mark.parametrize("numel", [1, 4096, 9000])
def test_votes_travel_exactly(backend: str, numel: int) -> None:
    votes = torch.randn(3, numel, generator=torch.Generator().manual_seed(numel)).sign()
    with use_backend(backend):
        for rule in ("majority", "mean"):
            codec, out = Votes(rule=rule), torch.zeros(numel)
            workspace = codec.workspace(numel)
            rows = torch.zeros(3, codec.wire_bytes(numel), dtype=torch.uint8)
            for row, mine in zip(rows, votes, strict=True):
                codec.encode(mine, row, None, workspace)
            codec.decode_mean([rows], out, workspace)
            total = votes.sum(0)
            assert torch.equal(out, total.sign() if rule == "majority" else total * (torch.tensor(1.0) / 3))
            rows[1, :4].view(torch.float32).fill_(float("nan"))
            codec.decode_mean([rows], out, workspace)
            assert bool(out[(votes[1] < 0).nonzero().view(-1)[:1]].isnan().all())


@pytest.mark.parametrize("make", ["adam", "lion"])
@on_ranks(3)
def test_what_is_not_finite_stays_visible(rank: int, make: str) -> str:
    made = parameters()
    optimizer: Any = {"adam": adam, "lion": lion}[make](made)
    for step in walk(rank, made, range(6)):
        if step == 4 and rank == 1:
            made[6].grad = torch.full((300,), float("nan") if make == "adam" else float("inf"))
        optimizer.step()
    optimizer.close()
    assert bool(made[6].isnan().any())
    return digest(made)


# -- the page ----------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "optimizers.md").read_text("utf-8")


def read(rank: int, block: str) -> str:
    names: dict[str, Any] = {}
    with mock.patch.object(dist, "init_process_group"):
        exec(block, names)
    names["optimizer"].close()
    return digest(names["model"].parameters())


def test_what_the_page_says_runs(ranks: Ranks) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    for block in blocks:
        assert len(set(ranks(2).run(read, block))) == 1


@on_ranks(2)
def test_a_group_is_added_on_all_ranks_or_on_none(rank: int) -> None:
    """A group that one rank cannot take is on no rank, and may be added again when that is mended."""
    model, more = perceptron(), nn.Linear(3, 3)
    optimizer = DistributedLion(model.parameters(), lr=1e-3)
    with pytest.raises(ValueError, match=r"lr=-1\.0"):
        optimizer.add_param_group({"params": list(more.parameters()), "lr": -1.0 if rank else 0.1})
    before = len(optimizer.param_groups)
    with pytest.raises(ValueError, match="ranks disagree on parameter groups"):
        optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.1 + rank})
    optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.1})
    model(batch(rank, 0, model)).sum().backward()
    optimizer.step()
    assert (before, len(optimizer.param_groups), all(p in optimizer.state for p in more.parameters())) == (1, 2, True)


@on_ranks(2)
def test_sharded_parameters_are_refused(rank: int) -> list[str]:
    """Shards lie in no flat tensor of ours: they used to end the process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    texts = []
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"the ranks \[0, 1\] share the model.*process_group"):
        LocalUpdates(model, sgd, OneBit(), every=1)
    for make in (
        lambda: OneBitAdam(model.parameters(), warmup_steps=2),
        lambda: DistributedLion(model.parameters()),
    ):
        with pytest.raises(TypeError, match=r"is a DTensor: \w+ takes plain tensors") as caught:
            make()
        texts.append(str(caught.value))
    return texts


# -- state that scripts, trainers and broadcasts replace ---------------------------------------------------------------

#: Of each parameter, by the name of a state.
Values = list[dict[str, Tensor]]


def alike() -> list[nn.Parameter]:
    """Two of one shape, one in bfloat16, one in channels_last."""
    generator = torch.Generator().manual_seed(5)
    made = [nn.Parameter(torch.randn(s, generator=generator)) for s in [(5, 7), (5, 7), (300,), (4, 3, 5, 5)]]
    made[2].data = made[2].data.bfloat16()
    made[3].data = made[3].data.to(memory_format=torch.channels_last)
    return made


def drawn(optimizer: Any, seed: int) -> Values:
    """Other values for all of a state, equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    every = [torch.rand((4, *p.shape), generator=generator) for p in optimizer.param_groups[0]["params"]]
    return [{name: x[n].to(dtype) for n, (name, dtype) in enumerate(optimizer.kept.items())} for x in every]


def states(optimizer: Any) -> list[dict[str, Any]]:
    return [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]


def by_item(optimizer: Any, values: Values) -> None:
    for state, of in zip(states(optimizer), values, strict=True):
        for name, value in of.items():
            state[name] = value.clone()


def by_dict(optimizer: Any, values: Values) -> None:
    """As trainers do that move a state to a device."""
    for p, of in zip(optimizer.param_groups[0]["params"], values, strict=True):
        optimizer.state[p] = {name: value.clone() for name, value in of.items()}


def by_exchange(optimizer: Any, values: Values) -> None:
    """Two parameters get the views of one another."""
    in_place(optimizer, [values[1], values[0], *values[2:]])
    first, second, *_ = optimizer.param_groups[0]["params"]
    optimizer.state[first], optimizer.state[second] = optimizer.state[second], optimizer.state[first]


def in_place(optimizer: Any, values: Values) -> None:
    for state, of in zip(states(optimizer), values, strict=True):
        for name, value in of.items():
            state[name].copy_(value)


def by_data(optimizer: Any, values: Values) -> None:
    for state, of in zip(states(optimizer), values, strict=True):
        for name, value in of.items():
            state[name].data = value.clone()


def by_load(optimizer: Any, values: Values) -> None:
    optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(enumerate(values))})


def by_pre_hook(optimizer: Any, values: Values) -> None:
    handle = optimizer.register_load_state_dict_pre_hook(lambda _, saved: {**saved, "state": dict(enumerate(values))})
    optimizer.load_state_dict(optimizer.state_dict())
    handle.remove()


def by_broadcast(optimizer: Any, values: Values) -> None:
    hvd.init()
    by_item(optimizer, values if hvd.rank() == 0 else drawn(optimizer, 8))
    hvd.broadcast_optimizer_state(optimizer, 0)


def by_elastic_state(optimizer: Any, values: Values) -> None:
    hvd.init()
    by_item(optimizer, values if hvd.rank() == 0 else drawn(optimizer, 8))
    state: Any = hvd.elastic.TorchState(optimizer=optimizer)
    state.sync()
    by_item(optimizer, drawn(optimizer, 9))
    state.restore()


WAYS = [by_load, by_item, by_dict, by_exchange, in_place, by_data, by_pre_hook, by_broadcast, by_elastic_state]


@pytest.mark.parametrize("kind", ["adam", "lion"])
@on_ranks(2)
def test_state_that_is_replaced_is_the_state_that_is_used(rank: int, kind: str) -> list[str]:
    """However it is replaced, what the optimizer shows is what it uses: bits are those after `load_state_dict`."""
    found = []
    for way in WAYS:
        made = alike()
        optimizer: Any = OneBitAdam(made, lr=0.01, warmup_steps=2) if kind == "adam" else DistributedLion(made, lr=0.01)
        for _ in walk(rank, made, range(3)):
            optimizer.step()
        values = drawn(optimizer, 7)
        way(optimizer, values)
        optimizer.state[made[0]]["note"] = "kept"
        for show in (states, lambda shown: shown.state_dict()["state"], states):
            shown = show(optimizer)
            assert all(torch.equal(shown[i][n], x) for i, of in enumerate(values) for n, x in of.items()), way
        for _ in walk(rank, made, range(3, 6)):
            optimizer.step()
        saved = optimizer.consolidated_state_dict()
        assert saved["state"][0].pop("note") == optimizer.state[made[0]].pop("note") == "kept"
        found.append(digest([*made, *(x for of in saved["state"].values() for x in of.values())]))
        optimizer.state[made[1]]["exp_avg"] = torch.ones(3)
        with pytest.raises(RuntimeError, match=r"state\[parameter 1\]\['exp_avg'\] has been replaced by a tensor of"):
            optimizer.step()
        optimizer.close()
    assert [way.__name__ for way, bits in zip(WAYS, found, strict=True) if bits != found[0]] == []
    return found


@pytest.mark.parametrize("kind", ["adam", "lion"])
@on_ranks(2)
def test_a_broadcast_brings_the_step_and_the_mean_residuals(rank: int, kind: str) -> str:
    """One rank loads a consolidated checkpoint, and the others get it from there."""
    hvd.init()
    bits = []
    for loads in ({0, 1}, {0}):
        made = alike()
        first: Any = OneBitAdam(made, lr=0.01, warmup_steps=2) if kind == "adam" else DistributedLion(made, lr=0.01)
        for _ in walk(rank, made, range(4)):
            first.step()
        saved = first.consolidated_state_dict()
        optimizer = OneBitAdam(made, warmup_steps=2, seed=4) if kind == "adam" else DistributedLion(made, seed=4)
        if rank in loads:
            optimizer.load_state_dict(saved)
        hvd.broadcast_optimizer_state(optimizer, 0)
        for _ in walk(rank, made, range(4, 7)):
            optimizer.step()
        bits.append(digest(made))
        first.close()
        optimizer.close()
    assert bits[0] == bits[1]
    return bits[0]


@on_ranks(2)
def test_a_fresh_optimizer_shows_what_may_be_filled(rank: int) -> None:
    """`torch.distributed.checkpoint` fills only what it is shown."""
    optimizer: Any = OneBitAdam(alike(), warmup_steps=2)
    assert len(residuals_of(optimizer.state_dict()["gradwire"])) == 4
    optimizer.close()


@on_ranks(2)
def test_a_frozen_variance_follows_eps_and_what_is_written(rank: int) -> str:
    """After the warm-up, too; and a state that is cleared is a fresh one."""
    bits = []
    for late in (True, False):
        made = alike()
        optimizer: Any = OneBitAdam(made, lr=0.01, warmup_steps=2)
        for step in walk(rank, made, range(5)):
            if step == (3 if late else 2):
                optimizer.param_groups[0]["eps"] = 0.5
                for state in states(optimizer):
                    state["exp_avg_sq"].fill_(4.0)
                    state["exp_avg"].zero_()
            if step != 2 or not late:
                optimizer.step()
            else:
                before = [p.detach().clone() for p in made]
                optimizer.step()
                optimizer._feedback.load({})
                for p, value in zip(made, before, strict=True):
                    p.data.copy_(value)
        bits.append(digest(made))
        optimizer.state.clear()
        optimizer.step()
        with pytest.warns(UserWarning, match="4 parameters"):
            optimizer.step()
        assert bits[-1] == digest(made)
        optimizer.close()
    return bits[0]
