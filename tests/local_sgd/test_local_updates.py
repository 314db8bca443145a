"""Periodic updates: nothing lost, replicas equal, and what DiLoCo and its like would compute."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import (
    QSGD,
    Aggregate,
    Cast,
    ChunkedTopK,
    Codec,
    Identity,
    Lead,
    LocalUpdates,
    Momentum,
    OneBit,
    OuterSGD,
    PowerSGD,
    Residual,
    Rounds,
    Ternary,
    TernGrad,
    TopK,
    Tracking,
)
from gradwire.compress.feedback.base import RESIDUAL, FeedbackState
from gradwire.compress.feedback.store import FeedbackStore
from gradwire.hooks.exchanges import possible
from gradwire.hooks.local_sgd import outer_sgd as outer
from gradwire.hooks.local_sgd.options import modern
from gradwire.hooks.local_sgd.outer_sgd import fragments_of
from gradwire.hooks.local_sgd.step_lengths import StepLengths
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from often import by_time
from ranks import Ranks, on_ranks
from rounded import counted as rounding
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import (
    all_ranks,
    batch,
    digest,
    in_groups,
    leaves,
    mean_over_ranks,
    perceptron,
    residuals_of,
    through_a_file,
)

KEEPING = [
    OneBit(), QSGD(rounding="nearest"), TernGrad(rounding="nearest"), TopK(0.05), Ternary(),
    ChunkedTopK(k=16, chunk=256), PowerSGD(rank=1), Cast(torch.bfloat16),
]  # fmt: skip


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


def plain(lr: float = 0.05, adaptive: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = perceptron(20, 24)
    return model, (torch.optim.AdamW if adaptive else torch.optim.SGD)(model.parameters(), lr=lr)


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


# -- what others compute ----------------------------------------------------------------------------------------------


def accounted(
    rank: int, codec: Codec, exchange: Any, options: dict[str, Any], steps: int, saved_after: int, feedback: Any
) -> tuple[str, float]:
    """How far off the law is that all of every local step has moved the global parameters, is still in this rank's own
    or in a residual, but for what residuals round off, relative to the parameters: after each step with nothing under
    way, and at the end. Training is saved on the way, and others go on with it; where a round is due, rank 1 has made a
    step that it has not counted."""
    model, optimizer = parts_and_groups()
    how = {"exchange": exchange, "error_feedback": feedback, "exclude": ["norm.*"], **options}
    updates = LocalUpdates(model, optimizer, codec, **in_groups(how))
    # Parameters in bfloat16 round the global ones off whenever they become these.
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad and "narrow" not in n}
    start, trained = globals_of(updates), {n: torch.zeros(p.shape, dtype=torch.float64) for n, p in parameters.items()}
    before: dict[str, Tensor] = {}

    def off() -> float:
        now, residuals = globals_of(updates), residuals_of(updates.state_dict())
        lost = size = torch.zeros(())
        for name, p in parameters.items():
            own = trained[name] + p.detach().double() - residuals.get(name, torch.zeros(())).double()
            lost = lost + (mean_over_ranks(own) - start[name].double()).square().sum()
            size = size + now[name].double().square().sum()
        rounded = mean_over_ranks(torch.tensor(sum(norms)))
        return float((lost.sqrt() - 1.01 * rounded) / size.sqrt())

    optimizer.register_step_pre_hook(lambda *_: before.update({n: p.detach().double() for n, p in parameters.items()}))
    worst, uneven = 0.0, options["sync_until"] == 0 and steps % (options["every"] // options["fragments"]) > 0
    with rounding() as norms:
        for step in train(rank, model, optimizer, range(steps + (uneven and rank == 1))):
            for name, p in parameters.items():
                trained[name] += before[name] - p.detach().double()
            if step == steps:
                continue
            updates.step()
            worst = max(worst, 0.0 if options["delay"] else off())
            if step == saved_after:
                saved = through_a_file([model.state_dict(), updates.state_dict()])
                updates.close()
                updates = LocalUpdates(model, optimizer, codec, **in_groups(how))
                model.load_state_dict(saved[0])
                updates.load_state_dict(saved[1])
        updates.synchronise()
        rounds = updates.rounds
        updates.synchronise()
    assert updates.rounds == rounds, "there was nothing to exchange"
    worst = max(worst, off())
    same = digest([*model.parameters(), *globals_of(updates).values()])
    assert all(torch.equal(globals_of(updates)[name], p) for name, p in parameters.items())
    updates.close()
    return same, worst


@st.composite
def schedules(draw: st.DrawFn) -> tuple[dict[str, Any], Any]:
    """Options that lose nothing, and feedback."""
    fragments, interval = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    unsent = draw(st.booleans())
    delay = 0 if unsent else draw(st.integers(0, interval - 1))
    options: dict[str, Any] = {
        "every": fragments * interval, "fragments": fragments, "delay": delay, "sync_until": draw(st.integers(0, 3)),
        "bucket_cap_mb": draw(st.sampled_from([0.002, 0.004, 25.0])), "keep_local": delay > 0, "keep_unsent": unsent,
    }  # fmt: skip
    narrow = Residual(dtype=torch.bfloat16), Residual(dtype=torch.int8)
    return options, "auto" if unsent else draw(st.sampled_from(["auto", *narrow]))


@pytest.mark.parametrize(
    ("codec", "exchange"),
    [
        (codec, exchange)
        for codec in (*KEEPING, TopK(0.05, values=torch.int8), Identity())
        for exchange in possible(codec)
    ],
    ids=str,
)
@settings(max_examples=by_time(2, 20), phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_nothing_is_lost_whatever_the_schedule(ranks: Ranks, codec: Codec, exchange: str, data: st.DataObject) -> None:
    """With unused and frozen parameters, parameter groups, bfloat16, excluded ones and an uneven last round."""
    options, feedback = data.draw(schedules())
    steps, size = data.draw(st.integers(1, 14)), data.draw(st.sampled_from([2, 3]))
    found = ranks(size).run(accounted, codec, exchange, options, steps, data.draw(st.integers(0, 20)), feedback)
    same, off = zip(*found, strict=True)
    assert same == same[:1] * size, "replicas differ"
    assert max(off) < 1e-6


def rank_mean(rows: Tensor) -> Tensor:
    """As gradwire sums: in the order of the ranks, then times 1/P."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total * (1.0 / len(rows))


@contextmanager
def outer_steps(updates: LocalUpdates, pieces: bool) -> Iterator[None]:
    """By pieces that are small, or at once, as on a GPU."""
    for shared in itertools.chain(*updates._fragments):
        assert shared.piecewise
        shared.piecewise = pieces
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outer, "IN_CACHE", 300)
        yield


def diloco(rank: int, options: dict[str, Any], nesterov: bool, pieces: bool) -> Any:
    """Against torch.optim.SGD on θ0 with the mean Δ as gradient, Adam inside."""
    lr, momentum = options.get("outer_lr", 1.0), options.get("outer_momentum", 0.0)
    models = [perceptron(20, 24), perceptron(20, 24)]
    inner = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    updates = LocalUpdates(
        models[0],
        inner[0],
        Identity(),
        every=4,
        exchange="gather",
        **in_groups({**options, "outer_nesterov": nesterov}),
    )
    theta0 = [p.detach().clone().requires_grad_() for p in models[1].parameters()]
    ours = torch.optim.SGD(theta0, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)
    walks = zip(*(train(rank, *both, range(12)) for both in zip(models, inner, strict=True)), strict=True)
    with outer_steps(updates, pieces):
        for step, _ in walks:
            updates.step()
            if step < options.get("sync_until", 0) or (step - options.get("sync_until", 0)) % 4 == 3:
                for shared, p in zip(theta0, models[1].parameters(), strict=True):
                    shared.grad = rank_mean(all_ranks(shared.detach() - p.detach()))
                ours.step()
                with torch.no_grad():
                    for shared, p in zip(theta0, models[1].parameters(), strict=True):
                        p.copy_(shared)
    updates.close()
    return digest(models[0].parameters()) == digest(models[1].parameters()), digest(models[0].parameters())


@pytest.mark.parametrize(
    ("options", "nesterov", "pieces"),
    [
        ({"outer_lr": 0.7, "outer_momentum": 0.9}, True, True),
        ({"outer_lr": 0.7, "outer_momentum": 0.9}, True, False),
        ({"outer_lr": 0.7, "outer_momentum": 0.9, "outer_device": "cpu", "bucket_cap_mb": 0.002}, False, True),
        ({"outer_lr": 0.5, "sync_until": 4}, True, False),
        ({}, True, True),
    ],
    ids=str,
)
def test_diloco_is_torch_sgd_on_the_global_parameters_bit_for_bit(
    ranks: Ranks, options: dict[str, Any], nesterov: bool, pieces: bool
) -> None:
    same, digests = zip(*ranks(2).run(diloco, options, nesterov, pieces), strict=True)
    assert all(same)
    assert digests[0] == digests[1]


@on_ranks(2)
def test_a_piece_is_under_way_while_the_next_one_is_taken(rank: int) -> None:
    """Before each difference but the first is taken: whether the code of the first is being made."""
    begun, seen, take, encode = threading.Event(), list[bool](), outer.GlobalParameters.difference, FeedbackState.encode

    def difference(shared: outer.GlobalParameters, restart: bool = False) -> Tensor:
        if shared.bucket.index > 0:
            seen.append(begun.wait(10 if all(seen) else 0))
        return take(shared, restart)

    def encoding(kept: FeedbackState, *arguments: Any) -> None:
        begun.set()
        encode(kept, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outer.GlobalParameters, "difference", difference)
        patch.setattr(FeedbackState, "encode", encoding)
        updates = LocalUpdates(*plain(), OneBit(), every=1, rounds=Rounds(bucket_cap_mb=1e-6))
        updates.step()
        updates.close()
    assert len(seen) > 1
    assert all(seen)


def streaming(rank: int, fragments: int, delay: int, mixing: float, keep_local: bool, pieces: bool) -> Any:
    """Fragments in turn, applied `delay` steps after they were sent, and blended into what training has made since."""
    models = [perceptron(20, 24), perceptron(20, 24)]
    inner = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    options: dict[str, Any] = {
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "fragments": fragments,
        "delay": delay,
        "mixing": mixing,
        "keep_local": keep_local,
    }
    updates = LocalUpdates(models[0], inner[0], Identity(), every=6, exchange="gather", **in_groups(options))
    names = dict(models[1].named_parameters())
    parts = [list(units[0]) for units in fragments_of(names, fragments, 25)]
    theta0 = {name: p.detach().clone() for name, p in names.items()}
    local, arriving = {name: p.detach() for name, p in names.items()}, dict[int, list[int]]()
    outers, steps = (
        [torch.optim.SGD([values[n] for n in part], lr=0.7, momentum=0.9, nesterov=True) for part in parts]
        for values in (theta0, local)
    )
    same = []
    with outer_steps(updates, pieces):
        for step, _ in zip(*(train(rank, *both, range(20)) for both in zip(models, inner, strict=True)), strict=True):
            updates.step()
            count, interval = step + 1, 6 // fragments
            if count % interval == 0:
                turn = (count // interval - 1) % fragments
                for name in parts[turn]:
                    theta0[name].grad = local[name].grad = rank_mean(all_ranks(theta0[name] - local[name]))
                    if keep_local:
                        local[name].copy_(theta0[name])
                arriving.setdefault(count + delay, []).append(turn)
            for turn in arriving.pop(count, []):
                outers[turn].step()
                if keep_local:  # what has been trained since stays
                    steps[turn].step()
                for name in () if keep_local else parts[turn]:
                    local[name].copy_(torch.lerp(theta0[name], local[name], mixing))
            same.append(digest(models[0].parameters()) == digest(models[1].parameters()))
    apart = digest(models[0].parameters())
    updates.synchronise()
    together = digest([*models[0].parameters(), *globals_of(updates).values()])
    for name, values in globals_of(updates).items():
        assert torch.equal(values, models[0].get_parameter(name))
    updates.close()
    return all(same), apart, together


@pytest.mark.parametrize(
    ("fragments", "delay", "mixing", "keep_local", "pieces"),
    [
        (3, 0, 0.0, False, True),
        (3, 1, 0.0, False, False),
        (2, 2, 0.25, False, True),
        (1, 4, 0.5, False, False),
        (2, 2, 0.0, True, True),
        (1, 5, 0.0, True, False),
    ],
)
def test_streaming_diloco(
    ranks: Ranks, fragments: int, delay: int, mixing: float, keep_local: bool, pieces: bool
) -> None:
    same, apart, together = zip(*ranks(2).run(streaming, fragments, delay, mixing, keep_local, pieces), strict=True)
    assert all(same)
    assert apart[0] != apart[1]
    assert together[0] == together[1]


class Together:
    """Optimizers that make a step together."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.zero_grad = lambda: [one.zero_grad() for one in optimizers]
        self.step = lambda: [one.step() for one in optimizers]


@pytest.mark.parametrize("several", [False, True])
@on_ranks(2)
def test_inside_with_the_optimizers_steps_are_counted(rank: int, several: bool) -> None:
    digests = []
    for by_hand in (True, False):
        model, optimizer = plain()
        given: Any = optimizer
        if several:
            matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.05)
            given = [matrices, torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2])]
            optimizer = Together(*given)  # type: ignore[assignment]
        updates = LocalUpdates(model, given, TopK(0.1), every=2)
        if by_hand:
            for _ in train(rank, model, optimizer, range(5)):
                updates.step()
        else:
            with updates:
                for _ in train(rank, model, optimizer, range(5)):
                    with pytest.raises(RuntimeError, match="leave out step"):
                        updates.step()
        digests.append(digest(model.parameters()))
        assert updates.rounds == 2
        optimizer.step()
        assert updates.rounds == 2
        updates.close()
        with pytest.raises(RuntimeError, match="is closed: make another"):
            updates.step()
    assert digests[0] == digests[1]


# -- what is not finite -----------------------------------------------------------------------------------------------


def one_is_not_finite(rank: int, codec: Codec, exchange: Any, bad: float, strategy: Any) -> Any:
    model, optimizer = plain()
    outer = 0.0 if isinstance(strategy, Momentum | Tracking) else 0.5  # which have one already
    updates = LocalUpdates(
        model, optimizer, codec, every=2, exchange=exchange, error_feedback=strategy, outer=OuterSGD(momentum=outer)
    )
    for _ in train(rank, model, optimizer, range(2)):
        updates.step()
    before = updates.state_dict()
    messages = []
    for step in train(rank, model, optimizer, range(2, 4)):
        if step == 3 and rank == 1:
            with torch.no_grad():
                model.get_parameter("2.weight")[3, 4] = bad
        own = digest(model.parameters())
        try:
            updates.step()
        except RuntimeError as error:
            messages.append(str(error))
    assert own == digest(model.parameters()), "local progress is changed"
    after = updates.state_dict()
    for what in ("global", "momentum", "residuals", *({"vectors"} & before.keys())):
        assert digest(leaves(after[what])) == digest(leaves(before[what])), what
    counted = updates.statistics().nonfinite_steps
    updates.rewind()
    for _ in train(rank, model, optimizer, range(4, 6)):
        updates.step()
    end = digest([*model.parameters(), *globals_of(updates).values()])
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    updates.close()
    return messages, counted, end


@pytest.mark.parametrize(
    ("codec", "exchange", "bad", "strategy", "size"),
    [
        (OneBit(), "two_pass", float("nan"), "auto", 3),
        (TopK(0.05), "gather", float("inf"), "auto", 2),
        (TopK(0.05), "split", float("nan"), "auto", 2),
        (TopK(0.05), "union", float("nan"), Residual(decay=0.9), 2),
        (Ternary(), "gather", float("nan"), Tracking(), 2),
        (TopK(0.05), "split", float("nan"), Momentum(), 2),
        (OneBit(), "dense", float("-inf"), "auto", 2),
    ],
    ids=str,
)
def test_what_is_not_finite_on_one_rank_is_refused_on_all(
    ranks: Ranks, codec: Codec, exchange: str, bad: float, strategy: Any, size: int
) -> None:
    """And leaves global parameters, momentum and residuals as they were, from where training can go on."""
    results = ranks(size).run(one_is_not_finite, codec, exchange, bad, strategy)
    for messages, counted_rounds, end in results:
        assert len(messages) == 1
        assert "round 1 is not finite: rank 1 has NaN or infinity in '2.weight'" in messages[0]
        assert "rank 0 has" not in messages[0]
        assert counted_rounds == 1
        assert end == results[0][2]


@on_ranks(2, within=25)
def test_what_is_not_finite_is_refused_where_one_rank_synchronises_earlier(rank: int) -> None:
    """What is sent after the third step is applied in rank 0's fifth, and in rank 1's synchronise()."""
    model, optimizer = plain()
    updates = LocalUpdates(model, optimizer, OneBit(), every=3, rounds=Rounds(delay=2))

    def steps() -> None:
        for step in train(rank, model, optimizer, range(5 - rank)):
            if step == 2 and rank == 1:
                model.get_parameter("2.weight").data.fill_(float("nan"))
            updates.step()
        updates.synchronise()

    with pytest.raises(RuntimeError, match="round 0 is not finite: rank 1 has NaN or infinity in"):
        steps()
    updates.close()


# -- lengths of steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "factor"), [(0.0, 1.0), (0.5, 1.26), (1.0, 2.0)])
def test_steps_are_as_long_as_those_of_one_optimizer(noise: float, factor: float) -> None:
    """Four ranks with equal gradients step as they are; those whose gradients are noise move √4 times as far. Zeros,
    and what SGD steps, stay as they are."""
    shapes = {"large": (50, 40), "small": (3,), "zero": (7,), "other": (5, 5)}
    generator, ratios = torch.Generator().manual_seed(0), []
    ranks = []
    for _ in range(5):  # the last is the first's twin, whose steps stay as they are
        parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        adaptive = [parameters[name] for name in ("large", "small", "zero")]
        ranks.append((parameters, [torch.optim.AdamW(adaptive), torch.optim.SGD([parameters["other"]])]))
    every = [StepLengths(optimizers, parameters, 0) for parameters, optimizers in ranks[:4]]
    for lengths in every:
        lengths.watch()
    for number in range(81):
        if number == 80:
            del every[0]  # nobody has it any more, as of `LocalUpdates` that were not closed
        signal = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for rank, (parameters, optimizers) in enumerate(ranks):
            for name, p in parameters.items():
                own = noise * torch.randn(p.shape, generator=generator) + (1.0 - noise) * signal[name]
                p.data.zero_()
                p.grad = ranks[0][0][name].grad if rank == 4 else own * (name != "zero")
            for optimizer in optimizers:
                optimizer.step()
        norms = [{name: float(p.detach().norm()) for name, p in ranks[which][0].items()} for which in (0, 4)]
        assert (norms[0]["zero"], norms[0]["other"]) == (0.0, norms[1]["other"])
        ratios.append(norms[0]["large"] / norms[1]["large"])
        if number == 80:
            break
        messages = [lengths.message() for lengths in every]
        mean = torch.stack(messages).mean(0) + (torch.inf if number == 20 else 0.0)  # as of a step that a scaler skips
        for lengths, message in zip(every, messages, strict=True):
            message.copy_(mean)
            lengths.arrived()
            lengths.take(4)
    assert ratios[0] == ratios.pop() == 1.0
    assert sum(ratios[40:]) / 40 == pytest.approx(factor, rel=0.05)
    first, again = (float(every[0].message().norm()) for _ in range(2))
    assert first > again == 0.0, "samples of a step are sent once"


@on_ranks(2)
def test_ranks_lengthen_steps_where_their_gradients_have_noise(rank: int) -> None:
    """By √2 where gradients of two ranks have nothing in common, whatever one of them sends that is not finite."""
    model = nn.Module()
    model.same, model.noise = (nn.Parameter(torch.zeros(3000)) for _ in range(2))
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1 + rank)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.0, 0.9), weight_decay=0.0)
    rounds = Rounds(keep_unsent=True, lengthen_steps=True)
    with pytest.raises(ValueError, match="every=0"):
        LocalUpdates(model, optimizer, TopK(0.1), every=1 - rank, rounds=rounds)
    assert len(optimizer._optimizer_step_pre_hooks) == 0, "what is refused leaves nothing"
    updates = LocalUpdates(model, optimizer, TopK(0.1), every=1, rounds=rounds)
    lengths = []
    for number in range(60):
        before = [p.detach().clone() for p in model.parameters()]
        for p, generator in zip(model.parameters(), generators, strict=True):
            p.grad = torch.randn(3000, generator=generator) + (torch.nan if (number, rank) == (30, 1) else 0.0)
        optimizer.step()
        if number != 30:
            moved = [(p.detach() - old).norm() for p, old in zip(model.parameters(), before, strict=True)]
            lengths.append(torch.stack(moved))
            updates.step()
            continue
        with pytest.raises(RuntimeError, match="round 30 is not finite: rank 1 has NaN or infinity in 'same'"):
            updates.step()
        updates.rewind()
        optimizer.state.clear()
    same, noise = torch.stack(lengths[-20:]).mean(0).tolist()
    assert noise / same == pytest.approx(2.0**0.5, rel=0.05)
    done = updates.statistics()
    assert (done.elements, done.dense_bytes) == (60 * 6000, 4 * 60 * 6000)
    updates.close()
    assert (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == (0, 0)


# -- checkpoints ------------------------------------------------------------------------------------------------------

STREAMING: dict[str, Any] = {"every": 4, "fragments": 2, "delay": 1, "outer_lr": 0.7, "outer_momentum": 0.9}


@pytest.mark.parametrize(
    ("codec", "exchange", "options"),
    [
        (TopK(0.05), "gather", {"every": 1}),
        (ChunkedTopK(k=20, chunk=256), "two_pass", {"every": 2, "outer_momentum": 0.5}),
        (TopK(0.05), "split", {"every": 4, "fragments": 2}),
        (OneBit(), "two_pass", {"every": 1}),
    ],
    ids=str,
)
@on_ranks(2)
def test_what_is_not_sent_stays_in_the_parameters_until_it_is(
    rank: int, codec: Codec, exchange: Any, options: dict[str, Any]
) -> str:
    """All that ranks train moves the global parameters, stays in their own, or lies in a residual: with a momentum
    outside, ū of every round."""
    model, optimizer = plain()
    updates = LocalUpdates(
        model, optimizer, codec, exclude=["0.bias"], exchange=exchange,
        **in_groups({"keep_unsent": True, "bucket_cap_mb": 0.004, **options}),
    )  # fmt: skip
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    start = globals_of(updates)
    trained = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in parameters.items()}
    before: dict[str, Tensor] = {}

    def law() -> float:
        """How far off it is, relative to what ranks have trained; returns the share that their parameters keep."""
        now, residuals = globals_of(updates), residuals_of(updates.state_dict())
        off = total = kept = 0.0
        for name, p in parameters.items():
            in_parameters = mean_over_ranks(now[name].double() - p.detach().double())
            in_residual = mean_over_ranks(residuals.get(name, torch.zeros(())).double())
            wanted = mean_over_ranks(trained[name].clone())
            off += float((wanted - (start[name].double() - now[name].double()) - in_parameters - in_residual).norm())
            total, kept = total + float(wanted.norm()), kept + float(in_parameters.norm())
        assert "outer_momentum" in options or off < 1e-4 * total
        return kept / total

    shares = []
    optimizer.register_step_pre_hook(lambda *_: before.update({n: p.detach().double() for n, p in parameters.items()}))
    for _ in train(rank, model, optimizer, range(9)):
        for name, p in parameters.items():
            trained[name] += before[name] - p.detach().double()
        updates.step()
        shares.append(law())
    assert max(shares) > 0.05
    updates.synchronise()
    assert law() == 0.0, "synchronise() ends at the global parameters"
    same = digest([*model.parameters(), *globals_of(updates).values()])
    updates.close()
    return same


def test_what_does_not_fit_the_parameters_dtype_stays_in_the_residual() -> None:
    own = {"weight": torch.randn(40).bfloat16()}
    shared = outer.GlobalParameters(0, own, frozenset(), Residual(), OuterSGD())
    feedback = FeedbackStore(Residual())
    unsent = torch.randn(40) / 100
    feedback.of(shared.bucket.layout)[RESIDUAL].copy_(unsent)
    shared.take_unsent(feedback)
    left = feedback.of(shared.bucket.layout)[RESIDUAL]
    assert 0 < left.abs().max() < 2.0**-8 * own["weight"].abs().max()
    torch.testing.assert_close(shared.values - own["weight"].float() + left, unsent, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("keep_local", [False, True])
@on_ranks(2)
def test_what_is_under_way_in_a_checkpoint_arrives_under_any_schedule(rank: int, keep_local: bool) -> None:
    """The global parameters after a checkpoint with means under way has gone on under several schedules."""
    ends, saved = [], None
    for schedule in ({"every": 4, "delay": 3}, {"every": 2, "delay": 1}, {"every": 2}, {"every": 4, "sync_until": 9}):
        model, optimizer = plain()
        more: dict[str, Any] = {"keep_local": keep_local and "delay" in schedule} | schedule
        updates = LocalUpdates(model, optimizer, Identity(), **in_groups(more))
        if saved is None:
            for _ in train(rank, model, optimizer, range(5)):
                updates.step()
            saved = through_a_file([model.state_dict(), updates.state_dict()])
        model.load_state_dict(saved[0])
        updates.load_state_dict(saved[1])
        for _ in range(4):
            updates.step()
        updates.synchronise()
        ends.append(nn.utils.parameters_to_vector(globals_of(updates).values()))
        updates.close()
    for other in ends[1:]:
        torch.testing.assert_close(other, ends[0], atol=1e-7, rtol=0)


# -- wrong use --------------------------------------------------------------------------------------------------------


def inferred() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3, 3)


BUFFERS: dict[str, Callable[[], Tensor]] = {
    "sound": lambda: torch.ones(3, 3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "expanded": lambda: torch.ones(1, 3).expand(3, 3),
    "inferred": inferred,
}


def refused(rank: int, options: dict[str, Any], culprit: int | None) -> str:
    """What is raised where a rank, or all of them, pass these."""
    mine = options if culprit in (None, rank) else {}
    inner, optimizer = plain()
    model: nn.Module = DistributedDataParallel(inner) if mine.get("model") == "ddp" else inner
    given: Any = mine.get("optimizer", optimizer)
    if given == "another's":
        given = torch.optim.SGD([*model.parameters(), torch.zeros(7, requires_grad=True)], lr=0.1)
    if mine.get("parameters") == "frozen":
        model.requires_grad_(False)
    if mine.get("parameters") == "double":
        model.get_submodule("2").double()
    if mine.get("parameters") == "other":
        model.register_buffer("more", torch.zeros(3 + rank))
    if options.get("buffer"):
        model.register_buffer("adjacent", BUFFERS[mine.get("buffer", "sound")]())
    rest = {key: value for key, value in mine.items() if key not in ("model", "optimizer", "parameters", "buffer")}
    with pytest.raises((ValueError, TypeError)) as raised:
        LocalUpdates(model, given, rest.pop("codec", TopK(0.1)), **in_groups({"every": 4, **rest}))
    return str(raised.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 0}, "every=0: expected a whole number of 1 or more"),
        ({"every": 2.5}, "every=2.5"),
        ({"sync_until": -1}, "sync_until=-1: expected a whole number of 0 or more"),
        ({"fragments": 3}, "every=4 is no multiple of fragments=3"),
        ({"every": 12, "fragments": 12}, "fragments=12 of 6 trainable parameters"),
        ({"fragments": 2, "delay": 2}, "fewer than every / fragments = 2"),
        ({"keep_local": 1}, "keep_local=1: expected True or False"),
        ({"keep_local": True}, "keep_local=True with delay=0"),
        ({"keep_local": True, "delay": 1, "mixing": 0.5}, "leaves nothing to mix"),
        ({"mixing": 1.0}, "mixing=1.0: expected a number in [0, 1)"),
        ({"keep_unsent": None}, "keep_unsent=None: expected True or False"),
        ({"lengthen_steps": 2.0}, "lengthen_steps=2.0: expected True or False"),
        ({"lengthen_steps": True}, "lengthen_steps=True with SGD: only optimizers that divide by a second moment"),
        ({"keep_unsent": True, "mixing": 0.5}, "keep_unsent=True with keep_local=False, mixing=0.5"),
        ({"keep_unsent": True, "error_feedback": False}, "keep_unsent=True with error_feedback=False"),
        ({"keep_unsent": True, "error_feedback": Residual(0.9)}, "keep_unsent=True with error_feedback=Residual(decay"),
        ({"keep_unsent": True, "error_feedback": Tracking()}, "keep_unsent=True with error_feedback=Tracking("),
        ({"outer_lr": 0}, "OuterSGD(lr=0): expected a number above 0"),
        ({"outer_momentum": 1.0}, "OuterSGD(momentum=1.0): expected a number in [0, 1)"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0: expected a number of MiB above 0"),
        ({"outer": 0.7}, "outer=0.7: expected OuterSGD("),
        ({"outer_momentum": 0.5, "error_feedback": Lead()}, "OuterSGD(momentum=0.5): error_feedback=Lead("),
        ({"outer_momentum": 0.9, "error_feedback": Momentum()}, "OuterSGD(momentum=0.9"),
        ({"outer_momentum": 0.9, "error_feedback": Tracking()}, "OuterSGD(momentum=0.9"),
        ({"rounds": 2}, "rounds=2: expected Rounds("),
        ({"exchange": "hierarchical"}, "exchange='hierarchical': expected one of 'auto'"),
        ({"codec": OneBit(), "exchange": "union"}, "needs a sparse codec"),
        ({"codec": OneBit}, "codec=OneBit is a class"),
        ({"model": "ddp"}, "hand LocalUpdates the module inside, model.module"),
        ({"optimizer": "another's"}, "1 parameters that are not the model's, the first of shape (7,)"),
        ({"optimizer": []}, "optimizer is empty, expected a torch.optim.Optimizer of the model's, or several"),
        ({"optimizer": 3}, "optimizer is a int, expected a torch.optim.Optimizer"),
        ({"parameters": "frozen"}, "no parameters that require gradients"),
        ({"parameters": "double"}, "is torch.float64: gradwire compresses"),
        ({"buffer": "sparse"}, "'adjacent' has the layout torch.sparse_coo, so it cannot be given the first rank's"),
        ({"buffer": "expanded"}, "'adjacent' has elements that lie at one address"),
        ({"buffer": "inferred"}, "'adjacent' was made in inference mode"),
    ],
    ids=str,
)
def test_wrong_use_is_refused(ranks: Ranks, options: dict[str, Any], text: str) -> None:
    for message in ranks(2).run(refused, options, None):
        assert text in message


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 0}, "rank 1: ValueError: every=0"),
        ({"outer_lr": 0.7}, "ranks disagree on outer optimizer: rank 0 has OuterSGD(lr=1.0"),
        ({"every": 8}, "ranks disagree on schedule: rank 0 has Schedule(every=4"),
        ({"parameters": "other"}, "ranks disagree on the model's tensors"),
        ({"codec": OneBit()}, "ranks disagree on codec"),
        ({"optimizer": [3]}, "rank 1: TypeError: optimizer is a int"),
        ({"buffer": "inferred"}, "rank 1: ValueError: 'adjacent' was made in inference mode"),
    ],
    ids=str,
)
def test_what_is_wrong_on_one_rank_is_refused_on_all(ranks: Ranks, options: dict[str, Any], text: str) -> None:
    first, second = ranks(2).run(refused, options, 1)
    assert text in first
    assert text.rpartition("Error: ")[2] in second


def unfrozen(rank: int, culprits: list[int], by_step: bool) -> Any:
    """What is raised where these ranks train a parameter that they did not, and what else they trained before and
    after."""
    model, optimizer = plain()
    late = model.get_parameter("2.weight").requires_grad_(False)
    others = [p for p in model.parameters() if p is not late]
    updates = LocalUpdates(model, optimizer, Identity(), every=2)
    late.requires_grad_(rank in culprits)
    message = before = ""
    try:
        for step in train(rank, model, optimizer, range(2)):
            before = digest(others)
            if step == 0 or by_step:
                updates.step()
        updates.synchronise()
    except (ValueError, RuntimeError) as error:
        message = f"{type(error).__name__}: {error}"
    after = digest(others)
    late.requires_grad_(False)
    if len(culprits) == 2:
        updates.synchronise()
    updates.close()
    return message, before == after, digest(others)


@pytest.mark.parametrize("by_step", [True, False])
@pytest.mark.parametrize("culprits", [[0, 1], [1]])
def test_a_parameter_that_is_unfrozen_later_is_refused(ranks: Ranks, culprits: list[int], by_step: bool) -> None:
    """On every rank, before anything is exchanged; without it training can go on."""
    found = ranks(2).run(unfrozen, culprits, by_step, within=25)
    for rank, (message, same, _) in enumerate(found):
        assert "parameter '2.weight' requires gradients, and is none of those" in message
        assert rank not in culprits or message.startswith("ValueError: gradwire")
        assert same
    assert culprits == [1] or found[0][2] == found[1][2]


def different_starts(rank: int) -> Any:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2).requires_grad_(False))
    model.get_buffer("1.running_mean").add_(rank)
    wanted = digest(model.state_dict().values())
    updates = LocalUpdates(model, torch.optim.SGD(model.parameters(), lr=0.1), Identity(), every=2)
    updates.close()
    return wanted, digest(model.state_dict().values())


def test_all_start_from_the_first_ranks_parameters_and_buffers(ranks: Ranks) -> None:
    results = ranks(3).run(different_starts)
    assert len({before for before, _ in results}) == 3
    assert {after for _, after in results} == {results[0][0]}


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    model, optimizer = plain()
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) first"):
        LocalUpdates(model, optimizer, Identity(), every=1)


@pytest.mark.parametrize("fragments", [1, 2, 3, 5, 8])
def test_fragments_are_of_about_equal_size(fragments: int) -> None:
    sizes = [5, 300, 1, 1, 90, 400, 20, 7]
    parameters = {str(number): nn.Parameter(torch.zeros(size)) for number, size in enumerate(sizes)}
    found = fragments_of(parameters, fragments, 25)
    names = [name for fragment in found for unit in fragment for name in unit]
    assert names == list(parameters)
    assert len(found) == fragments
    counts = [sum(p.numel() for unit in fragment for p in unit.values()) for fragment in found]
    assert min(counts) > 0
    assert max(counts) <= sum(sizes) / fragments + max(sizes)


def test_arguments_of_former_versions_mean_the_same_for_a_release() -> None:
    now = {"rounds": Rounds(), "outer": OuterSGD(), "exchange": "auto"}
    then = {"after": 3, "fragments": 2, "delay": 1, "blend": 0.5, "carry": True, "bucket_cap_mb": 1.0}
    outer = {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": False, "device": "cpu"}
    with pytest.warns(DeprecationWarning, match=r"LocalUpdates\(\w+=…\) becomes \w+=\w+\(\w+=…\)") as warned:
        found = modern({**then, **outer, "mean": "senders", "clip": "median"}, **now)
    assert len(warned) == 12
    assert found == {
        "rounds": Rounds(2, 1, 0.5, True, 3, 1.0),
        "outer": OuterSGD(0.7, 0.9, False, "cpu"),
        "exchange": Aggregate("senders", "median"),
    }
    with pytest.raises(TypeError, match="unexpected keyword argument 'afterwards'"):
        modern({"afterwards": 3}, **now)
