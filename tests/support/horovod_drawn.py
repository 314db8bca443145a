"""Training with Horovod's interface that is drawn: a configuration, what happens while it trains, and the machine that
plays it on one rank.

The gradients are known beforehand, so that what the ranks wanted to apply and what their optimizers applied can be told
apart parameter by parameter: what was applied and the mean residual must add up to what the ranks wanted.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import gradwire.hooks.horovod as hvd
import torch
from drawn import TENTH, Copy, Overflow, Parameter, Player, Rescale, Short
from gradwire import Codec, Residual
from rounded import counted
from torch import Tensor, nn
from training import digest, through_a_file

#: What may be missing, of the largest sum seen.
TOLERANCE = 1e-5
#: What may differ between two optimizers of one script, which have equal names.
STREAMS = 1 << 20


@dataclass(frozen=True, repr=False)
class Configuration(Short):
    """How a model is trained.

    Attributes:
        passes: backward passes before a step.
        groups: of gradients that travel together; 0: none.
        scaler: "none", "unused" (of something else), "enabled", "found" (enabled, but the optimizer is not told of it),
            "another" (it is told of one that never comes) or "disabled".
        optimizers: 1, or 2 with parameters of the same names.
    """

    world_size: int = 2
    codec: Codec | None = TENTH
    exchange: str = "gather"
    error_feedback: bool | str | Residual = "auto"
    op: str = "Average"
    predivide: float = 1.0
    passes: int = 1
    groups: int = 0
    scaler: str = "none"
    sparse_as_dense: bool = False
    named: bool = True
    optimizers: int = 1
    entropy_coding: bool = False
    parameters: tuple[Parameter, ...] = (Parameter((300,)), Parameter((40, 20)))

    @property
    def scales(self) -> bool:
        return self.scaler in ("enabled", "found", "another")

    @property
    def nothing_is_lost(self) -> bool:
        if self.codec is None or self.codec.lossless or self.exchange == "dense":
            return True
        return self.codec.default_feedback if self.error_feedback == "auto" else bool(self.error_feedback)

    def wrap(self, parameters: Sequence[nn.Parameter]) -> Any:
        compression: Any = hvd.Compression.none
        if self.codec is not None:
            compression = hvd.Compression.codec(
                self.codec, self.error_feedback, self.exchange, entropy_coding=self.entropy_coding
            )
        plain = torch.optim.SGD(parameters, lr=2.0**-6)
        named = [(f"p{i}", p) for i, p in enumerate(parameters)] if self.named else None
        return hvd.DistributedOptimizer(
            plain,
            named,
            compression,
            backward_passes_per_step=self.passes,
            op=getattr(hvd, self.op),
            gradient_predivide_factor=self.predivide,
            groups=self.groups or None,
            sparse_as_dense=self.sparse_as_dense,
        )


# -- what happens ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Step(Short):
    """A step of the optimizers, after gradients were synchronized `rounds` times; 0: by the step itself.

    Attributes:
        shuffled: whether each rank makes its gradients in an order of its own.
    """

    rounds: int = 0
    overflow: Overflow | None = None
    unscale: bool = False
    shuffled: bool = False


@dataclass(frozen=True, repr=False)
class Join(Short):
    """`steps` on each rank, the last of the longest with an overflow or not; then all join.

    Attributes:
        late: whether the overflow is in the step before that.
        saved: a checkpoint for all ranks follows each step, also while some have joined.
    """

    steps: tuple[int, ...]
    overflow: Overflow | None = None
    late: bool = False
    saved: bool = False


@dataclass(frozen=True, repr=False)
class Resume(Short):
    """A checkpoint, "local", "alone" (of rank 0, whose running optimizer loads it), "consolidated" or "broadcast" (by
    rank 0, which alone loads a consolidated one), loaded by fresh optimizers or the running ones."""

    kind: str = "local"
    fresh: bool = True


@dataclass(frozen=True, repr=False)
class Restart(Short):
    """All ranks leave and meet again."""


@dataclass(frozen=True, repr=False)
class Accumulate(Short):
    """Another number of backward passes before a step."""

    passes: int = 2


Event = Step | Join | Resume | Copy | Rescale | Restart | Accumulate


# -- playing it --------------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """The parameters of one optimizer, and the account of them: float64 sums by parameter."""

    stream: int
    parameters: list[nn.Parameter]
    optimizer: Any
    wanted: list[Tensor]
    received: list[Tensor]
    largest: list[float]
    window: list[Tensor] = field(default_factory=list)  # since the last step


class Machine(Player):
    """Plays a script on one rank, and checks the laws after each event."""

    def __init__(self, rank: int, configuration: Configuration) -> None:
        self.other = torch.amp.GradScaler("cpu")  # which scales nothing
        super().__init__(rank, configuration)
        self.passes, self.made = configuration.passes, self.scaler
        if configuration.scaler == "unused":
            self.scaler = None
        #: What residuals round off here, as it happens.
        self.rounded_off: list[float] = []
        self.models = [self._model(index) for index in range(configuration.optimizers)]

    def _model(self, index: int) -> Model:
        generator = torch.Generator().manual_seed(index)
        shapes = [p.shape for p in self.configuration.parameters]
        parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        zeros = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
        sizes = [max(1.0, zero.numel() ** 0.5) for zero in zeros]
        model = Model(index, parameters, None, zeros, [z.clone() for z in zeros], sizes)
        self._wrap(model)
        return model

    def _wrap(self, model: Model) -> None:
        model.optimizer = self.configuration.wrap(model.parameters)
        if self.passes != self.configuration.passes:
            model.optimizer.set_backward_passes_per_step(self.passes)
        self._follow(model)

    def _follow(self, model: Model) -> None:
        if self.scaler is not None and self.configuration.scaler != "found":
            told = self.made if self.configuration.scaler != "another" else self.other
            model.optimizer.use_grad_scaler(told)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _factor(self, model: Model, index: int, rank: int, number: int) -> tuple[Tensor | None, Tensor] | None:
        """What a rank multiplies a parameter with in a backward pass: rows, of a sparse one, and values."""
        drawn = self.configuration.parameters[index]
        if not drawn.used(rank, number):
            return None
        seed = STREAMS * (index + 10 * model.stream) + 64 * number + rank
        generator = torch.Generator().manual_seed(seed)
        if not drawn.sparse:
            return None, torch.randn(drawn.shape, generator=generator)
        rows = torch.randint(drawn.shape[0], (1 + seed % 3,), generator=generator)
        return rows, torch.randn(len(rows), *drawn.shape[1:], generator=generator)

    def _backward(self, model: Model, number: int, overflow: Overflow | None, shuffled: bool) -> None:
        order = list(range(len(model.parameters)))
        if shuffled:
            order = order[self.rank :] + order[: self.rank]
        for index in order:
            found = self._factor(model, index, self.rank, number)
            if found is None:
                continue
            rows, values = found
            if overflow is not None and (overflow.rank, overflow.parameter) == (self.rank, index):
                values.view(-1)[:1] = torch.inf
            p = model.parameters[index]
            loss = ((p if rows is None else nn.functional.embedding(rows, p, sparse=True)) * values).sum()
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _want(self, model: Model, number: int, present: Sequence[int]) -> None:
        n = hvd.size()
        for index, window in enumerate(model.window):
            for rank in present:
                found = self._factor(model, index, rank, number)
                if found is not None:
                    rows, values = found
                    values = values.double() / n
                    window.add_(values) if rows is None else window.index_add_(0, rows, values)

    # -- events --------------------------------------------------------------------------------------------------------

    def step(self, event: Step) -> None:
        self._step(event, range(hvd.size()))

    def _step(self, event: Step, present: Sequence[int]) -> None:
        rounds = max(event.rounds, 1 if self.configuration.scaler == "disabled" else 0)
        total = max(1, rounds) * self.passes
        first, self.number = self.number, self.number + total
        overflow, hit, bad = event.overflow, -1, False
        if overflow is not None and self.configuration.scales and overflow.rank in present:
            hit = overflow.backward % total
            bad = self.configuration.parameters[overflow.parameter].used(overflow.rank, first + hit)
        for model in self.models:
            model.optimizer.zero_grad()
            model.window = [torch.zeros_like(w) for w in model.wanted]
            for number in range(total):
                self._backward(model, first + number, overflow if number == hit else None, event.shuffled)
                self._want(model, first + number, present)
                if rounds and (number + 1) % self.passes == 0:
                    model.optimizer.synchronize()
            self._apply(model, bool(rounds), event.unscale, bad)
        if self.scaler is not None:
            self.scaler.update()

    def _apply(self, model: Model, synchronized: bool, unscale: bool, bad: bool) -> None:
        steps: list[int] = []
        handle = model.optimizer.register_step_pre_hook(lambda *_: steps.append(self._receive(model)))
        with model.optimizer.skip_synchronize() if synchronized else contextlib.nullcontext():
            if self.scaler is None:
                model.optimizer.step()
            else:
                if unscale:
                    self.scaler.unscale_(model.optimizer)
                    dense = [p for p in model.parameters if p.grad is not None and not p.grad.is_sparse]
                    nn.utils.clip_grad_norm_(dense, 1e30)  # which changes nothing but their versions
                self.scaler.step(model.optimizer)
        handle.remove()
        self.judge(bool(steps), bad)
        if steps:
            for sums, window in zip(model.wanted, model.window, strict=True):
                sums.add_(window)

    def _receive(self, model: Model) -> int:
        for sums, p in zip(model.received, model.parameters, strict=True):
            assert p.grad is not None
            grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
            sums.add_(grad.double() / (hvd.size() if self.configuration.op == "Sum" else 1))
        return 1

    def join(self, event: Join) -> None:
        steps = event.steps[: hvd.size()]
        first = self.number
        for index in range(steps[self.rank]):
            overflow = event.overflow if index == max(steps) - 1 - event.late else None
            self._step(Step(overflow=overflow), [rank for rank, count in enumerate(steps) if count > index])
            for model in self.models if event.saved and self.configuration.codec is not None else ():
                saved = model.optimizer.consolidated_state_dict()["gradwire"]
                parts = zip(model.optimizer._names, model.wanted, strict=True)
                left = [saved["residuals"].get(name, torch.zeros_like(wanted)) for name, wanted in parts]
                self._check_law(model, [part.double() / saved["scale"] for part in left], 0.0)
        last = hvd.join()
        if steps[last] != max(steps):
            last = steps.index(max(steps))
        self.number = hvd.broadcast_object(self.number, last)
        assert self.number == first + max(steps) * self.passes
        for model in self.models:  # a rank with fewer steps takes the results of the others'
            hvd.broadcast_parameters([p.data for p in model.parameters], last)
            hvd.broadcast_parameters(model.wanted + model.received, last)
        if self.scaler is not None:
            self.scaler.load_state_dict(hvd.broadcast_object(self.scaler.state_dict(), last))

    def resume(self, event: Resume) -> None:
        for model in self.models:
            old = model.optimizer
            if event.fresh and event.kind != "alone":
                model.parameters = [nn.Parameter(p.detach().clone()) for p in model.parameters]
                self._wrap(model)
            saved = through_a_file(
                old.state_dict() if event.kind in ("local", "alone") else old.consolidated_state_dict()
            )
            if event.kind in ("local", "consolidated") or self.rank == 0:
                model.optimizer.load_state_dict(saved)
            if event.kind == "broadcast":
                hvd.broadcast_optimizer_state(model.optimizer, 0)

    def copy(self, event: Copy) -> None:
        for model in self.models:
            pair = model.parameters, model.optimizer
            model.parameters, model.optimizer = (
                copy.deepcopy(pair) if event.how == "deepcopy" else pickle.loads(pickle.dumps(pair))
            )
            self._follow(model)

    def restart(self, event: Restart) -> None:
        hvd.shutdown()
        torch.distributed.barrier()
        hvd.init()

    def accumulate(self, event: Accumulate) -> None:
        self.passes = event.passes
        for model in self.models:
            model.optimizer.set_backward_passes_per_step(event.passes)

    # -- laws ----------------------------------------------------------------------------------------------------------

    def check_event(self) -> None:
        for model in self.models:
            if len(set(hvd.allgather_object(digest(model.parameters)))) > 1:
                self.violations.append(f"{self.at}, optimizer {model.stream}: weights differ between ranks")
            left = self._mean_residuals(model)
            rounded = torch.tensor(sum(self.rounded_off), dtype=torch.float64)
            self._check_law(model, left, 1.01 * float(hvd.allreduce(rounded, op=hvd.Sum)))

    def _check_law(self, model: Model, left: Sequence[Tensor], allowed: float) -> None:
        """The wanted gradients were received, or are `left` in the mean, up to an `allowed` difference."""
        sums = zip(model.wanted, model.received, left, strict=True)
        for index, (wanted, received, rest) in enumerate(sums if self.configuration.nothing_is_lost else ()):
            model.largest[index] = max(model.largest[index], float(wanted.norm()), float(received.norm()))
            missing = float((received + rest - wanted).norm()) / model.largest[index]
            if not missing < TOLERANCE + allowed / model.largest[index]:
                where = f"{self.at}, optimizer {model.stream}, p{index}"
                self.violations.append(f"{where}: {missing:.1e} of the gradient is missing")

    def _mean_residuals(self, model: Model) -> list[Tensor]:
        """In units of a loss that is not scaled."""
        state = model.optimizer._reducer.state
        own = {} if state is None else state.feedback.by_name()
        flat = [
            own[name].double().view(-1) / state.scale if name in own else wanted.new_zeros(wanted.numel())
            for name, wanted in zip(model.optimizer._names, model.wanted, strict=True)
        ]
        mean = hvd.allreduce(torch.cat(flat)).split([wanted.numel() for wanted in model.wanted])
        return [part.view(wanted.shape) for part, wanted in zip(mean, model.wanted, strict=True)]


def play(rank: int, configuration: Configuration, events: Sequence[Event]) -> list[str]:
    """What is wrong with a script, as far as this rank can see."""
    hvd.init()
    machine: Machine | None = None

    def scale() -> float:
        return 1.0 if machine is None or machine.scaler is None else float(machine.scaler.get_scale())

    try:
        with warnings.catch_warnings(), counted(scale) as rounded_off:
            warnings.filterwarnings("ignore", message=".*has become sparse.*")
            machine = Machine(rank, configuration)
            machine.rounded_off = rounded_off
            machine.play(events)
        return machine.violations
    except Exception:
        hvd.shutdown()  # the others must not wait for this rank
        return [f"{machine.at if machine else 'the begin'}: {traceback.format_exc()}"]
