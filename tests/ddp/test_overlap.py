"""Forward passes that begin while means are on their way train the same model, in every bit."""

from __future__ import annotations

import copy
import hashlib
import pickle
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gradwire import (
    QSGD,
    ChunkedTopK,
    Codec,
    CompressState,
    Identity,
    Momentum,
    OneBit,
    PowerSGD,
    TernGrad,
    TopK,
    Tracking,
    overlap_forward,
)
from gradwire.hooks.training.awaited_gradient import AwaitedGradient
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from ranks import Ranks, on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from training import Ledger, batch, convnet, law, perceptron, residuals_of, wrap


class Tangled(nn.Module):
    """Modules that read what others own: the weights of layers that are called later, or never, or only in another
    mode; an average that is updated within the forward pass; and a parameter that nothing reads by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(16, 16)
        self.attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.tied = nn.Linear(16, 16, bias=False)
        self.by_hand = nn.Linear(16, 16)
        self.recurrent = nn.GRU(16, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(16, 4))
        self.average: Tensor
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.5).add_(sum(p.sum() for p in self.parameters()), alpha=1e-3)
        h = F.linear(self.first(x), self.tied.weight)
        h = self.attention(h.view(-1, 2, 16)).reshape(-1, 16)
        h = F.linear(self.tied(h), self.by_hand.weight, self.by_hand.bias)
        h, _ = self.recurrent(h)
        return self.last(h * self.scale) + self.average.detach()


def ratio_of(module: Any, _: Any) -> None:
    module.weight = module.raw / module.raw.norm(dim=1, keepdim=True)


def ratio_of_child(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return (args[0] * module[1].bias.mean().exp(), *args[1:]), kwargs


class Computed(nn.Module):
    """Weights that hooks compute before a layer is called, of its own parameters or another's; parametrized weights;
    and passes that read other parameters than the first one, before and after their layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.passes = 0
        self.pruned = prune.l1_unstructured(nn.Linear(16, 16), "weight", amount=0.3)
        self.by_hook = nn.Linear(16, 16)
        self.by_hook.raw = nn.Parameter(self.by_hook.weight.detach().clone())
        del self.by_hook._parameters["weight"]
        self.by_hook.register_forward_pre_hook(ratio_of)
        self.parent = nn.Sequential(nn.Tanh(), nn.Linear(16, 16))
        self.parent.register_forward_pre_hook(ratio_of_child, with_kwargs=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.norm = nn.utils.weight_norm(nn.Linear(16, 16))
        self.spectral = nn.utils.spectral_norm(nn.Linear(16, 16))
        self.parametrized = nn.utils.parametrizations.orthogonal(nn.Linear(16, 16), orthogonal_map="cayley")
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        scale = self.last.bias.exp().mean() if self.passes % 3 == 2 else 1.0
        h = self.spectral(self.parent(self.norm(self.by_hook(self.pruned(x)))))
        if self.passes % 3:
            h = h @ self.parametrized.weight
        if self.passes % 2 == 0:
            h = h + 0.1 * F.linear(F.linear(h, self.last.weight), self.last.weight.T)
        return self.last(self.parametrized(h)) * scale


def tangled_batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


def data_of(rank: int, step: int, model: nn.Module) -> Tensor:
    data = tangled_batch(rank, step) if isinstance(model, Tangled | Computed) else batch(rank, step, model)
    return data.to(next(model.parameters()).dtype)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tangled": Tangled, "computed": Computed, "perceptron": perceptron,
    "convnet": convnet, "bfloat16": lambda: perceptron().bfloat16(),
}  # fmt: skip


class Derived(torch.optim.AdamW):
    """Calls its base's step, which has hooks of its own once an `AdamW` has been made."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute, in its groups, and where it keeps states of parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.5)
        self.steps, self.counts = 0, {"tensor": torch.zeros(()), "list": [0]}

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        self.counts["tensor"] += 1  # type: ignore[operator]
        self.counts["list"][0] += 1  # type: ignore[index]
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index, call-overload]
        self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
        numbers = self.steps, *self.counts["list"], self.state["steps"], self.param_groups[0]["steps"]  # type: ignore
        for group in self.param_groups:
            group["weight_decay"] = sum(numbers) / 100 + float(self.counts["tensor"]) / 100  # type: ignore[arg-type]
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "derived": lambda p: Derived(p, lr=0.01),
    "looped": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "counting": lambda p: Counting(({"params": p[::2]}, {"params": p[1::2]})),
    "groups": lambda p: torch.optim.Adam(({"params": p[::2], "lr": 0.02}, {"params": p[1::2], "betas": (0.5, 0.9)})),
}
CODECS: tuple[tuple[Codec, dict[str, Any]], ...] = (
    (QSGD(bits=4), {"exchange": "gather"}),
    (QSGD(bits=8), {"exchange": "two_pass"}),
    (TernGrad(), {"exchange": "two_pass", "error_feedback": True}),
    (OneBit(), {"exchange": "two_pass", "error_feedback": Momentum(clip=0.5)}),
    (OneBit(), {"exchange": "gather", "exclude": ["*.bias"]}),
    (TopK(density=0.1), {"exchange": "split"}),
    (TopK(density=0.1), {"exchange": "union", "error_feedback": Tracking()}),
    (TopK(density=0.1), {"exchange": "mask"}),
    (ChunkedTopK(k=16, chunk=256), {"exchange": "gather", "warmup_steps": 2}),
    (PowerSGD(rank=1), {"exchange": "factors"}),
    (Identity(), {"exchange": "dense"}),
    (Identity(), {"exchange": "blocks"}),
    (QSGD(bits=4), {"exchange": "gather", "entropy_coding": True}),
    (QSGD(bits=4), {"exchange": "hierarchical", "topology": 2}),
)
EVENTS = (
    "validate",
    "inference",
    "save",
    "accumulate",
    "skip",
    "twice",
    "raise",
    "part",
    "late",
    "close",
    "autocast",
    "delayed",
    "reconnect",
    "resume",
    "global",
    "remove",
)


def average(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.copy_(torch.lerp(parameter, torch.ones(()).to(parameter), 0.1))


def replace_data(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data = parameter.data * 0.9


#: What a script does to weights between `step()` and the next forward pass.
WRITES: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "clamp": lambda p: [parameter.clamp_(-0.1, 0.1) for parameter in p[1::2]],
    "data": lambda p: p[-1].data.mul_(0.9),
    "detached": lambda p: p[0].detach().add_(0.1),
    "average": average,
    "foreach": lambda p: torch._foreach_mul_(list[Tensor](p), 0.9),
    "vector": lambda p: nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(p[-1:]) * 0.9, p[-1:]),
    "replace": replace_data,
    "broadcast": lambda p: dist.broadcast(p[0], 1),
    "numpy": lambda p: p[1].detach().double().numpy().sum(),
}


@dataclass(frozen=True)
class Plan:
    """A training to draw: its model, codec and optimizer, and what happens before each of its steps, to one rank or to
    all."""

    model: str
    codec: int
    optimizer: str
    bucket_mb: float
    views: bool
    two: bool
    zero: str
    events: tuple[tuple[str, int], ...]


def sound(plan: Plan) -> Plan:
    """Strategies that hand out a momentum refuse another. Where one of DDP's first passes has raised, or one whose
    gradients come in another order (autocast, a global hook) beside one that has raised, it names a bucket's parameters
    in another order than their gradients."""
    options = CODECS[plan.codec][1]
    if isinstance(options.get("error_feedback"), Momentum | Tracking):
        plan = replace(plan, optimizer="sgd")
    events = [
        ("", who) if event == "raise" and place < 2 else (event, who) for place, (event, who) in enumerate(plan.events)
    ]
    if any(event == "raise" for event, _ in events):
        events = [("" if event in ("autocast", "global") else event, who) for event, who in events]
    if any(event in ("accumulate", "raise", "resume") for event, _ in events):
        plan = replace(plan, zero="after")  # else these add to what `zero_grad` has not taken away
    return replace(plan, events=tuple(events))


def plans() -> st.SearchStrategy[Plan]:
    event = st.tuples(st.sampled_from(("", *EVENTS, *WRITES)), st.integers(0, 3))
    return st.builds(
        Plan,
        st.sampled_from(sorted(MODELS)), st.integers(0, len(CODECS) - 1), st.sampled_from(sorted(OPTIMIZERS)),
        st.sampled_from((0.001, 0.01, 1.0)), st.booleans(), st.booleans(),
        st.sampled_from(("after", "after", "before", "between", "hand", "zeros", "zeros between")),
        st.lists(event, min_size=3, max_size=8).map(tuple),
    ).map(sound)  # fmt: skip


def digest(*found: Any) -> str:
    """Of tensors and numbers, in lists and dictionaries of any depth."""
    made = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            made.update(value.detach().double().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                made.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            made.update(repr(value).encode())

    add(found)
    return made.hexdigest()[:16]


def scaled_input(module: nn.Module, args: Any) -> Any:
    weights = [parameter for parameter in module.parameters(recurse=False) if parameter.is_floating_point()]
    return tuple(arg * (1 + weights[-1].mean()) for arg in args) if weights and len(args) == 1 else None


def zero(optimizers: list[Any], parameters: list[nn.Parameter], how: str, when: str) -> None:
    """Take gradients away, if this is when the plan does so."""
    if how == "hand" and when == "before":
        for parameter in parameters:
            parameter.grad = None
    elif when == (how if how in ("before", "between") else "between" if how == "zeros between" else "after"):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none="zeros" not in how)


def train(rank: int, plan: Plan, overlaps: bool) -> list[str]:
    """Digests of a training: of its parameters, optimizers' states and residuals at the end, and of the outputs and
    checkpoints on the way."""
    torch.manual_seed(3)
    model = MODELS[plan.model]()
    codec, options = CODECS[plan.codec]
    ddp, state = wrap(
        model, copy.deepcopy(codec), ddp={"bucket_cap_mb": plan.bucket_mb, "gradient_as_bucket_view": plan.views},
        **options,
    )  # fmt: skip
    parameters = list(model.parameters())
    make = OPTIMIZERS[plan.optimizer]
    optimizers = [make(parameters[:3]), make(parameters[3:])] if plan.two else [make(parameters)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    overlap = overlap_forward(ddp, optimizers) if overlaps else None
    seen, handles = [], list[Any]()
    for step, (event, who) in enumerate((*plan.events, ("", 0))):
        data = data_of(rank, step, model)
        if event in ("validate", "inference"):
            model.eval()
            with torch.inference_mode() if event == "inference" else torch.no_grad():
                seen.append(digest(ddp(data)))
            model.train()
        elif event == "save":
            seen.append(digest(ddp.state_dict(), [optimizer.state_dict() for optimizer in optimizers]))
        elif event == "accumulate":
            with ddp.no_sync():
                ddp(data).square().mean().backward()
        elif event == "raise":
            handle = parameters[who].register_hook(lambda _: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                ddp(data).square().mean().backward()
            handle.remove()
            ddp.reducer._reset_state()  # which DDP leaves to us
            for optimizer in optimizers:
                optimizer.zero_grad()
        elif event == "late" and who == rank:
            time.sleep(0.02)
        elif event == "reconnect":
            state.close()
        elif event == "resume":
            parts = [ddp, *optimizers, state][:: -1 if who % 2 else 1]
            kept = copy.deepcopy([part.state_dict() for part in parts])
            ddp(data).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            for part, saved in zip(parts, kept, strict=True):
                part.load_state_dict(saved)
            for optimizer in optimizers:
                optimizer.zero_grad()
        elif event == "close" and overlap is not None:
            overlap.close()
            overlap = overlap_forward(ddp, optimizers)
        elif event == "remove" and isinstance(model, Computed) and prune.is_pruned(model.pruned):
            prune.remove(model.pruned, "weight")
        elif event == "global":
            handles.append(register_module_forward_pre_hook(scaled_input))
        with torch.autocast("cpu", enabled=event == "autocast"):
            zero(optimizers, parameters, plan.zero, "before")
            loss = ddp(data).square().mean()
        while handles:
            handles.pop().remove()
        zero(optimizers, parameters, plan.zero, "between")
        loss.backward()
        for number, (optimizer, schedule) in enumerate(zip(optimizers, schedules, strict=True)):
            for again in range(0 if event == "skip" or (event == "part" and number) else 2 if event == "twice" else 1):
                if event == "delayed" or (again and who % 2):
                    with torch.no_grad():
                        ddp(data)
                optimizer.step()
                schedule.step()
        if event in WRITES:
            with torch.no_grad():
                seen.append(digest(WRITES[event](parameters[who:])))
        zero(optimizers, parameters, plan.zero, "after")
    if overlap is not None:
        with overlap:
            pass
    moments: list[Any] = [[optimizer.state[p] for p in parameters if p in optimizer.state] for optimizer in optimizers]
    moments += [(vars(one).get("steps"), vars(one).get("counts"), one.state.get("steps")) for one in optimizers]  # type: ignore[call-overload]
    seen += [digest(parameters), digest(moments), digest(list(model.buffers())), digest(state.state_dict())]
    state.close()
    return seen


def both(rank: int, plan: Plan) -> tuple[list[str], list[str]]:
    return train(rank, plan, True), train(rank, plan, False)


@settings(max_examples=24, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate))
@given(plan=plans(), world=st.sampled_from([2, 2, 4]))
@example(plan=Plan("perceptron", 0, "looped", 0.01, False, False, "after", (("", 0),) * 3), world=2)
@example(plan=Plan("perceptron", 0, "derived", 0.01, False, False, "after", (("twice", 0),) * 3), world=2)
@example(plan=Plan("perceptron", 0, "adamw", 0.001, True, False, "between", (("", 0),) * 3), world=2)
@example(plan=Plan("perceptron", 0, "adamw", 0.001, True, False, "zeros between", (("", 0),) * 3), world=2)
def test_the_model_is_that_of_ordinary_training(ranks: Ranks, plan: Plan, world: int) -> None:
    for overlapped, ordinary in ranks(world).run(both, plan):
        assert overlapped == ordinary


def overlapped(model: nn.Module, optimizer: Any = None, **options: Any) -> tuple[Any, CompressState, Any, Any]:
    ddp, state = wrap(model, QSGD(bits=8), exchange="gather", **options)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return ddp, state, optimizer, overlap_forward(ddp, optimizer)


class Watched(nn.Linear):
    """Notes what another layer's weights are when it is called."""

    other: Any  # NumPy's, which nobody sees it read
    seen: Any

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.other.sum()
        return super().forward(x)


@on_ranks(2)
def test_each_layer_is_stepped_when_it_is_called(rank: int) -> None:
    torch.manual_seed(0)
    last = nn.Linear(64, 64)
    first = Watched(64, 64)
    first.other = last.weight.detach().numpy()
    ddp, state, optimizer, overlap = overlapped(nn.Sequential(first, nn.ReLU(), last), ddp={"bucket_cap_mb": 0.001})
    for step in range(4):  # DDP's buckets are final from the second on, and the first records what layers read
        before = [first.weight.detach().clone(), first.other.sum()]
        mine = first.weight.detach().numpy()  # which does not wait
        ddp(torch.randn(4, 64)).square().mean().backward()
        assert isinstance(first.weight.grad, AwaitedGradient)
        optimizer.step()
        assert isinstance(first.weight.grad, AwaitedGradient)
        optimizer.zero_grad()
        if step > 1:
            assert (mine == before[0].numpy()).all()
            ddp(torch.randn(4, 64))
            assert first.seen == before[1]
        overlap.finish()
        assert not torch.equal(first.weight, before[0])
        assert first.other.sum() != before[1]
    state.close()


@on_ranks(2)
def test_what_needs_all_gradients_says_so(rank: int) -> list[str]:
    model = perceptron()
    ddp, state, optimizer, overlap = overlapped(model)
    scaler = torch.amp.GradScaler("cpu")
    gradient = next(model.parameters())
    uses: list[Callable[[], Any]] = [
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: scaler.step(optimizer),
        lambda: torch.linalg.vector_norm(gradient.grad),
        lambda: ddp(batch(rank, 0, model)).square().mean().backward(),
    ]
    found = []
    scaler.scale(torch.ones(()))
    for use in uses:
        optimizer.zero_grad()
        ddp(batch(rank, 0, model)).square().mean().backward()
        with pytest.raises(RuntimeError, match="still on its way") as error:
            use()
        found.append(str(error.value))
        ddp.reducer._reset_state()
    with pytest.raises(ValueError, match="without closure"):
        optimizer.step(lambda: 0.0)
    overlap.close()
    optimizer.zero_grad()
    ddp(batch(rank, 0, model)).square().mean().backward()
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) > 0
    state.close()
    return found


def by_closure() -> type[torch.optim.SGD]:
    count = [0]

    class Counts(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            count[0] += 1
            return super().step(closure)

    return Counts


class OfClass(torch.optim.SGD):
    steps = 0

    def step(self, closure: Any = None) -> Any:
        type(self).steps += 1
        return super().step(closure)


class InObject(torch.optim.SGD):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.counter = SimpleNamespace(steps=0)

    def step(self, closure: Any = None) -> Any:
        self.counter.steps += 1
        return super().step(closure)


class ByGradients(torch.optim.SGD):
    """Keeps an estimate that depends on all gradients, as D-Adaptation and Prodigy do."""

    def step(self, closure: Any = None) -> Any:
        grads = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        self.param_groups[0]["d"] = float(sum(grad.norm() for grad in grads if grad is not None))
        return super().step(closure)


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad += torch.randn_like(parameter)
        return super().step(closure)


class DecaysAll(torch.optim.SGD):
    """Writes parameters without gradient, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 0.9)
        return super().step(closure)


#: Optimizers that cannot step a part of their parameters, and what is said.
INDIVISIBLE: dict[str, tuple[Callable[[], type[torch.optim.SGD]], str]] = {
    "closure": (by_closure, r"Counts changes its function or value 'Counts\.step'"),
    "class": (lambda: OfClass, r"OfClass changes its function or value 'OfClass\.steps'"),
    "object": (lambda: InObject, "InObject changes its attribute 'counter'"),
    "gradients": (lambda: ByGradients, "ByGradients changes its param_groups by the gradients"),
    "random": (lambda: Noisy, "Noisy draws random numbers"),
    "decay": (lambda: DecaysAll, "or by a step in which it has no gradient"),
}


@pytest.mark.parametrize("kind", INDIVISIBLE)
@on_ranks(2)
def test_an_optimizer_whose_step_cannot_be_divided(rank: int, kind: str) -> None:
    made, said = INDIVISIBLE[kind]
    model = perceptron()
    ddp, state, optimizer, overlap = overlapped(model, made()(model.parameters(), lr=0.1))
    before = digest(list(model.parameters()))
    ddp(batch(rank, 0, model)).square().mean().backward()
    if kind in ("closure", "class", "object"):  # found before anything is applied
        with pytest.raises(RuntimeError, match=said):
            optimizer.step()
        assert digest(list(model.parameters())) == before
    else:
        optimizer.step()
        with pytest.raises(RuntimeError, match=said):
            overlap.finish()
    state.close()


@on_ranks(2)
def test_a_write_through_memory_that_is_shared(rank: int) -> None:
    """Is found before anything is applied, and again, until `close`."""
    model = perceptron()
    ddp, state, optimizer, overlap = overlapped(model)
    named = dict(model.named_parameters())
    alias = named["0.weight"].detach()
    ddp(batch(rank, 0, model)).square().mean().backward()
    optimizer.step()
    alias.clamp_(-0.01, 0.01)
    written = alias.clone()
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"'0\.weight' was written between the optimizer's step\(\) and its update"
        ):
            named["0.weight"].sum()
        with pytest.raises(RuntimeError, match=r"call finish\(\)"):
            ddp(batch(rank, 0, model))
    assert torch.equal(alias, written)
    with pytest.raises(RuntimeError, match="was written"):
        overlap.close()
    assert torch.equal(named["0.weight"], written)
    assert type(named["0.weight"]) is nn.Parameter
    state.close()


class Communicating(torch.optim.SGD):
    """Has messages of its own in each step, as `ZeroRedundancyOptimizer`."""

    process_group = object()


PROBLEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "unused": ("find_unused_parameters=True", {"ddp": {"find_unused_parameters": True}}),
    "static": ("static_graph=True", {"ddp": {"static_graph": True}}),
    "scaler": ("a GradScaler decides", {"grad_scaler": True}),
    "optimizers": ("is in none of the optimizers", {}),
    "none": ("there is no optimizer", {}),
    "wrapper": ("expected torch.optim.Optimizer", {}),
    "compiled": ("a compiled or wrapped model", {}),
    "twice": ("it is on already", {}),
    "sparse": ("is sparse", {}),
    "hook": ("another hook of the model", {}),
    "missing": ("the optimizer is a NoneType", {}),
    "zero": ("Communicating has messages of its own", {}),
}


@pytest.mark.parametrize("everywhere", [True, False], ids=["everywhere", "on one rank"])
@pytest.mark.parametrize("problem", sorted(PROBLEMS))
@on_ranks(2)
def test_a_problem_is_said_on_every_rank(rank: int, problem: str, everywhere: bool) -> str:
    said, options = PROBLEMS[problem]
    if not everywhere and problem not in ("optimizers", "none", "wrapper", "missing", "compiled"):
        return ""  # the ranks' models, or states, must be alike anyway
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)) if problem == "sparse" else perceptron()
    options = {**options, "grad_scaler": torch.amp.GradScaler("cpu")} if problem == "scaler" else options
    ddp, state = wrap(model, QSGD(), exchange="gather", **options)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    given, whole = optimizer, ddp
    if everywhere or rank == 1:
        given = {
            "none": [],
            "wrapper": [object()],
            "missing": None,
            "optimizers": torch.optim.SGD([*model.parameters()][1:]),
        }.get(problem, optimizer)
        whole = torch.compile(ddp, backend="eager") if problem == "compiled" else ddp
    if problem == "hook":
        ddp._comm_hooks.append((fp16_compress_hook, None))  # as a wrapper around ours has it
    if problem == "zero":
        given = Communicating(model.parameters(), lr=0.1)
    if problem == "twice":
        overlap_forward(ddp, optimizer)
    with pytest.raises(ValueError, match=said) as error:
        overlap_forward(whole, given)
    state.close()
    return str(error.value)


@on_ranks(2)
def test_a_model_without_the_hook_is_refused(rank: int) -> None:
    model = perceptron()
    with pytest.raises(ValueError, match="no hook of gradwire's"):
        overlap_forward(DistributedDataParallel(model), torch.optim.SGD(model.parameters()))
    with pytest.raises(TypeError, match="expected DistributedDataParallel"):
        overlap_forward(model, torch.optim.SGD(model.parameters()))


@on_ranks(2)
def test_a_rank_that_does_not_call(rank: int) -> None:
    model = perceptron()
    ddp, state = wrap(model, QSGD(), exchange="gather")
    if rank == 0:
        with pytest.raises(ValueError, match=r"overlap_forward\(\)"):
            overlap_forward(ddp, torch.optim.SGD(model.parameters()))
    else:
        with pytest.raises(ValueError, match=r"overlap_forward\(\)"):
            state.consolidated_state_dict()
    state.close()


@on_ranks(2)
def test_copies_train_by_themselves(rank: int) -> None:
    model = perceptron()
    ddp, state, optimizer, overlap = overlapped(model)
    ddp(batch(rank, 0, model)).square().mean().backward()
    optimizer.step()
    overlap.finish()
    optimizer.zero_grad()
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.optim.swa_utils.AveragedModel(model).module]
    for twin in twins:
        mine = torch.optim.SGD(twin.parameters(), lr=0.1)
        before = twin.state_dict()[next(iter(twin.state_dict()))].clone()
        twin(batch(rank, 1, model)).square().mean().backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        mine.step()
        assert not torch.equal(twin.state_dict()[next(iter(twin.state_dict()))], before)
    state.close()


@on_ranks(2)
def test_join_is_refused(rank: int) -> None:
    model = perceptron()
    ddp, state, _, _ = overlapped(model)
    with pytest.raises(RuntimeError, match=r"neither DDP\.join"), ddp.join():
        ddp(batch(rank, 0, model)).square().mean().backward()
    state.close()


@on_ranks(2)
def test_nothing_is_lost_by_an_exchange_that_fails(rank: int) -> None:
    """Forward raises; means of the failed step that no optimizer has taken are in the residuals."""
    model = perceptron()
    ddp, state = wrap(model, TopK(density=0.3), exchange="gather", ddp={"bucket_cap_mb": 0.001})
    optimizer, ledger = torch.optim.SGD(model.parameters(), lr=1.0), Ledger(model)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    overlap = overlap_forward(ddp, optimizer)
    left = [None, None]
    for step in range(3):
        data = batch(rank, step, model)
        ledger.expect(lambda data=data: model(data).square().mean())  # type: ignore[misc]
        loss = ddp(data).square().mean()
        if step == 2:
            assert state._reducer is not None
            state._reducer._count = lambda bucket: left.pop()  # type: ignore[method-assign]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"pop from empty list \[step 2"):
        overlap.finish()
    with pytest.raises(RuntimeError, match="stopped after an earlier error"):
        ddp(batch(rank, 3, model)).square().mean().backward()
    applied = {name: (start[name] - p.detach()).double() for name, p in model.named_parameters()}
    residuals = {name: r.double() for name, r in residuals_of(state.state_dict()).items()}
    # On each rank the last bucket to arrive fails, which need not be the same one.
    for part in (*applied.values(), *residuals.values()):
        dist.all_reduce(part)
        part /= 2
    off = law(ledger.wanted, applied, residuals)
    assert max(off.values()) < 1e-5


@on_ranks(2)
def test_two_backward_passes_need_a_forward_pass_between(rank: int) -> str:
    """As both use DDP's buckets."""
    model = perceptron()
    ddp, state, optimizer, _ = overlapped(model)
    loss = ddp(batch(rank, 0, model)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    ddp.reducer.prepare_for_backward([])  # as DDP does in forward
    with pytest.raises(RuntimeError, match="call the model between two backward passes") as error:
        loss.backward()
    state.close()
    return str(error.value)


@pytest.mark.parametrize("exchange", ["gather", "two_pass"])
@on_ranks(2)
def test_first_messages_wait_in_the_order_of_layers(rank: int, exchange: str) -> int:
    """Once their receives are posted ahead; others leave at once."""
    model = perceptron()
    ddp, state = wrap(model, QSGD(bits=8), exchange=exchange, ddp={"bucket_cap_mb": 0.001})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    overlap = overlap_forward(ddp, optimizer)
    found: list[int] = []
    assert state._reducer is not None
    queue = state._reducer.session.sends
    inner = queue.send

    def send(sends: Any) -> Any:
        if queue._turn.priority is not None:
            found.append(queue._turn.priority)
        return inner(sends)

    queue.send = send  # type: ignore[method-assign]
    for step in range(5):
        found.clear()
        ddp(batch(rank, step, model)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        overlap.finish()
    assert found == list(range(len(found)))  # as backward makes them
    assert len(found) == 3
    assert state._reducer.session.pipeline._scheduler.waiting[1]  # threads for messages that may overtake others
    state.close()
    ddp(batch(rank, 5, model)).square().mean().backward()
    assert state._reducer.session.sends.ordered  # a new connection's, too
    optimizer.step()
    optimizer.zero_grad()
    overlap.finish()
    state.close()
    return len(found)


@on_ranks(4)
def test_replicas_are_equal_whatever_auto_decides(rank: int) -> str:
    model = Tangled()
    ddp, state = wrap(model, TopK(density=0.1), exchange="auto", fallback="auto")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with overlap_forward(ddp, optimizer):
        for step in range(70):
            ddp(tangled_batch(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    state.close()
    return digest(list(model.parameters()))
