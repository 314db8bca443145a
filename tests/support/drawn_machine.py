"""Plays a drawn script on one rank, and keeps account of it.

The gradients are known beforehand, so that what the ranks wanted to apply and what their optimizers applied can be told
apart parameter by parameter.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import itertools
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from drawn import (
    Close,
    Configuration,
    Copy,
    Event,
    Join,
    Overflow,
    Parameter,
    Player,
    Raise,
    Resize,
    Resume,
    Step,
    with_scale,
)
from drawn_model import Drawn, Linear, Recorder, factor_of, fail, infinite, wide
from gradwire import CompressState, Lead, compress_hook
from gradwire.compress.feedback.base import RESIDUAL
from gradwire.compress.feedback.lead import PAST
from gradwire.compress.feedback.momentum import MOMENTUM
from gradwire.compress.feedback.tracking import ESTIMATE
from gradwire.hooks.network import cost, probe
from rounded import counted
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from training import digest, law, mean_residuals, pretend, through_a_file

#: Of a process: the groups of its first ranks, by their number. None is the default one, of all ranks.
GROUPS: dict[int, Any] = {}


class Machine(Player):
    """Plays a script on one rank, and keeps account of it. All sums are of this rank until ranks are compared."""

    def __init__(self, rank: int, configuration: Configuration, rounded_off: list[float]) -> None:
        super().__init__(rank, configuration)
        #: What residuals round off here, as it happens; and what ranks that are gone have.
        self.rounded_off, self.rounded_before = rounded_off, 0.0
        self.digests: dict[str, str] = {}
        self.statistics: dict[str, Any] = {}
        shapes = {f"p{i}": p.shape for i, p in enumerate(configuration.parameters) if p.use != "frozen"}
        zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        self.wanted, self.received = zeros, _copy(zeros)
        self.settled = _copy(zeros)  # means of what earlier numbers of ranks wanted
        # For each backward pass that raised, what may be kept of it and of those before it: one of these, or nothing.
        self.abandoned: list[list[dict[str, Tensor]]] = []
        self.came_back = False  # whether means have gone in again, with another pass's gradients
        self.window = _copy(zeros)  # since the optimizer's last step
        self.allowance = dict.fromkeys(zeros, 0.0)
        self.largest = {name: zero.numel() ** 0.5 for name, zero in zeros.items()}
        self._set_ranks(configuration.world_size)
        if self.active:
            self._begin(Linear(configuration.parameters))

    # -- building ------------------------------------------------------------------------------------------------------

    def _set_ranks(self, world_size: int) -> None:
        """A collective of all ranks of the pool."""
        self.size, self.active = world_size, self.rank < world_size
        if world_size not in GROUPS:
            whole = world_size == dist.get_world_size()
            GROUPS[world_size] = None if whole else dist.new_group(list(range(world_size)))
        self.group = GROUPS[world_size]

    def _begin(self, model: Linear) -> None:
        c = self.configuration
        self.model = model
        newer: dict[str, Any] = {"skip_all_reduce_unused_params": True} if c.skip_all_reduce_unused_params else {}
        self.ddp: Any = DistributedDataParallel(
            model,
            process_group=self.group,
            bucket_cap_mb=c.cap / 2**20,
            find_unused_parameters=c.find_unused_parameters,
            static_graph=c.static_graph,
            gradient_as_bucket_view=c.gradient_as_bucket_view,
            **newer,
        )
        self.state: Any = None
        if c.codec is not None:
            self.state = CompressState(
                self.ddp,
                c.codec,
                exchange=c.exchange,
                error_feedback=c.error_feedback,
                warmup_steps=c.warmup_steps,
                fallback=c.fallback,
                topology=c.topology,
                exclude=c.excludes,
                grad_scaler=self.scaler,
                entropy_coding=c.entropy_coding,
            )
            self.ddp.register_comm_hook(self.state, compress_hook)
        self._follow()

    def _follow(self) -> None:
        """The optimizer of the model as it now is."""
        self.begun = False
        trained = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self.parameters = {n.removeprefix("tables."): p for n, p in trained}
        lead = self.configuration.lead
        self.optimizer = Recorder(self.parameters, self.received, 0.0 if lead is None else lead.momentum)

    def _end(self) -> None:
        if self.state is not None:
            counted = self.state.statistics()
            self.statistics[self.at] = {
                **{key: getattr(counted, key) for key in ("steps", "elements", "nonfinite_steps")},
                "decisions": sorted(counted.decisions.items()),
            }
            self._close()

    def _close(self) -> None:
        reducer = self.state._reducer
        self.state.close()
        if reducer is not None:  # those of states that earlier tests have dropped may begin and end meanwhile
            pipeline = reducer.session.pipeline
            threads = [pipeline._thread, *itertools.chain(*pipeline._scheduler.waiting)]
            if left := [thread.name for thread in threads if thread is not None and thread.is_alive()]:
                self.violations.append(f"threads left after close: {', '.join(left)}")

    # -- events --------------------------------------------------------------------------------------------------------

    def takes(self, event: Any) -> bool:
        return self.active or isinstance(event, Resize)

    def step(self, event: Step) -> None:
        if self.configuration.static_graph and not self.begun:  # DDP cannot begin in another way
            event = replace(event, backwards=1, no_sync=0)
        self.begun = True
        self.came_back |= event.backwards > 1
        bad, passes = False, range(event.backwards * (event.no_sync + 1))
        self._zero()
        for index in passes:
            synchronised = index % (event.no_sync + 1) == event.no_sync
            bad |= self._backward(synchronised, event.overflow if self._hits(event.overflow, index) else None)
        self._apply(bad, event.unscale)

    def _hits(self, overflow: Overflow | None, index: int) -> bool:
        if (
            overflow is None
            or index != overflow.backward
            or not (self.configuration.scales and overflow.rank < self.size)
        ):
            return False
        return self._drawn(overflow.parameter).used(overflow.rank, self.number)

    def _drawn(self, parameter: int) -> Parameter:
        return self.configuration.parameters[parameter]

    def _zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.configuration.set_to_none)
        self.window = {name: torch.zeros_like(w) for name, w in self.window.items()}
        self.rounded = dict.fromkeys(self.window, 0.0)

    def _backward(
        self, synchronised: bool = True, overflow: Overflow | None = None, fails_at: int | None = None
    ) -> bool:
        """Returns whether there was an overflow, on any rank."""
        data = self._data(self.number)
        self.number += 1
        handles = []
        if overflow is not None and overflow.rank == self.rank:
            handles.append(self.parameters[f"p{overflow.parameter}"].register_hook(infinite))
        if fails_at is not None:
            handles.append(self.parameters[f"p{fails_at}"].register_hook(fail))
        before = self._norms()
        with contextlib.nullcontext() if synchronised else self.ddp.no_sync():
            loss = self.ddp(data)
            if self.scaler is not None:
                loss = self.scaler.scale(loss)
            try:
                loss.backward()
            finally:
                for handle in handles:
                    handle.remove()
                for name, factors in zip(self.window, self._of_trained(data), strict=True):
                    if factors:
                        gradient = wide(sum(factors[1:], start=factors[0]))
                        self.window[name] += gradient
                        before[name] += float(gradient.norm())
        # What bfloat16 rounds away: where gradients accumulate, and where the mean is written. Where no rank has used
        # the parameter nobody sees that mean; it is no larger than what else there is.
        level = max(largest / max(1, self.window[name].numel()) ** 0.5 for name, largest in self.largest.items())
        for name, norm in self._norms().items():
            if self.parameters[name].dtype == torch.bfloat16:
                unseen = level * self.window[name].numel() ** 0.5 if before[name] == 0.0 else 0.0
                self.rounded[name] += 2**-9 * (before[name] + norm + unseen)
        return overflow is not None

    def _norms(self) -> dict[str, float]:
        return {name: float(self._gradient(name).norm()) for name in self.parameters}

    @property
    def scale(self) -> float:
        """That of the loss."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def _gradient(self, name: str) -> Tensor:
        """A parameter's, in units of a loss that is not scaled."""
        found = self.parameters[name].grad
        return torch.zeros_like(self.window[name]) if found is None else wide(found) / self.scale

    def _data(self, number: int) -> list[list[Tensor]]:
        generator = torch.Generator().manual_seed(64 * number + self.rank + 1)
        result = []
        for drawn in self.configuration.parameters:
            places = (1 + (drawn.use == "tied")) if drawn.used(self.rank, number) else 0
            result.append([factor_of(drawn, number, generator) for _ in range(places)])
        return result

    def _of_trained(self, data: list[list[Tensor]]) -> Iterator[list[Tensor]]:
        return (factors for factors, p in zip(data, self.configuration.parameters, strict=True) if p.use != "frozen")

    def _apply(self, bad: bool, unscale: bool = False) -> None:
        self.digests[f"{self.at}, gradients before {self.number}"] = digest(
            None if p.grad is None else wide(p.grad) for p in self.parameters.values()
        )
        before = self.optimizer.steps
        if self.scaler is None:
            self.optimizer.step()
        else:
            if unscale:
                self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        applied = self.optimizer.steps > before
        self.judge(applied, bad)
        if applied:
            for name, w in self.window.items():
                self.wanted[name] += w
                self.allowance[name] += self.rounded[name]
                norms = (w.norm(), self.wanted[name].norm(), self.received[name].norm())
                self.largest[name] = max(self.largest[name], *map(float, norms))

    def _same_everywhere(self, number: int) -> bool:
        return all(
            p.used(rank, number) == p.used(0, number)
            for p in self.configuration.parameters
            for rank in range(self.size)
        )

    def raise_(self, event: Raise) -> None:
        last = self.number + event.backwards
        if not self._same_everywhere(last) or not self._drawn(event.parameter).used(0, last):
            return  # DDP by itself would mix up its collectives, or nothing would be raised
        self._zero()
        self.came_back |= event.backwards > 0
        for _ in range(event.backwards):
            self._backward()
        # The means of those before may have been given for good; then it is the user who throws them away.
        before, rounded = _copy(self.window), self.rounded.copy()
        given = {name: window - self._gradient(name) for name, window in before.items()}
        try:
            self._backward(fails_at=event.parameter)
        except Drawn:
            raised = {name: w + given[name] - before[name] for name, w in self.window.items()}
            self.abandoned.append([given, raised, self.window])
            for name, window in self.window.items():
                if self.parameters[name].dtype == torch.bfloat16:  # nobody has seen the mean that was thrown away
                    rounded[name] += 2**-9 * (float((window - before[name]).norm()) + self.largest[name])
                self.allowance[name] += rounded[name]
            self.begun = False
            self.ddp.reducer._reset_state()
            self._zero()

    def join(self, event: Join) -> None:
        if not self.begun:
            return  # DDP's joined ranks follow what they have done before
        steps = event.steps[: self.size]
        longest = max(rank for rank in range(self.size) if steps[rank] == max(steps))
        first, joined = self.number, min(*steps, max(steps) - 1)
        with self.ddp.join():
            for index in range(steps[self.rank]):
                overflow = event.overflow and replace(event.overflow, rank=longest, backward=0)
                self.step(Step(overflow=overflow if index == joined else None))
        self.number = first + max(steps)
        # A rank that had less to do knows less of what was applied. DDP has given it the parameters.
        news = [self.received, self.scaler and self.scaler.state_dict()]
        dist.broadcast_object_list(news, src=longest, group=self.group)
        for name, received in news[0].items():
            self.received[name].copy_(received)
        if self.scaler is not None:
            self.scaler.load_state_dict(news[1])

    def close(self, event: Close) -> None:
        if self.state is not None:
            self._close()

    def resume(self, event: Resume) -> None:
        saved = self._saved(event.consolidated)
        if event.fresh:
            self._restart(saved)
        elif self.state is not None:
            self.state.load_state_dict(saved["state"])

    def _saved(self, consolidated: bool) -> dict[str, Any]:
        checkpoint: dict[str, Any] = {"model": self.model.state_dict()}
        if self.state is not None:
            checkpoint["state"] = self.state.consolidated_state_dict() if consolidated else self.state.state_dict()
        if self.scaler is not None:
            checkpoint["scaler"] = self.scaler.state_dict()
        loaded: dict[str, Any] = through_a_file(checkpoint)
        return loaded

    def _restart(self, saved: dict[str, Any]) -> None:
        self.scaler = self.new_scaler()
        if self.scaler is not None:
            self.scaler.load_state_dict(saved["scaler"])
        model = Linear(self.configuration.parameters)
        model.load_state_dict(saved["model"])
        if self.state is not None:
            self._end()
        self._begin(model)
        if self.state is not None:
            self.state.load_state_dict(saved["state"])

    def resize(self, event: Resize) -> None:
        news: list[Any] = [None]
        if self.active:
            saved = self._saved(consolidated=True)
            self.settled, self.abandoned = self._accounts()
            rounded = self._rounded_off()
            account = self.settled, self.abandoned, self.received, self.largest, self.number, self.came_back, rounded
            news = [(saved, *account)]
            if self.state is not None:
                self._end()
        self.wanted = {name: torch.zeros_like(w) for name, w in self.wanted.items()}
        dist.broadcast_object_list(news, src=0)
        saved, *account = news[0]
        *account, self.rounded_before = account
        self.settled, self.abandoned, self.received, self.largest, self.number, self.came_back = account
        self.rounded_off.clear()
        self.allowance = dict(self.allowance) if self.active else dict.fromkeys(self.allowance, 0.0)
        self._set_ranks(event.world_size)
        if self.active:
            self.state = None
            self._restart(saved)

    def copy(self, event: Copy) -> None:
        if self.group is not None or self.configuration.static_graph:
            return  # DDP's copies are of the default group, and do not know that their graph is static
        both = self.ddp, self.scaler
        twin, scaler = copy.deepcopy(both) if event.how == "deepcopy" else pickle.loads(pickle.dumps(both))
        self._end()
        self.ddp, self.model = twin, twin.module
        if event.together:
            self.scaler = scaler and with_scale(scaler)
        if self.state is not None:
            _, self.state = twin._comm_hooks[-1]
            self.state.grad_scaler = self.scaler
            twin.register_comm_hook(self.state, compress_hook)
        self._follow()

    # -- the account ---------------------------------------------------------------------------------------------------

    def _mean(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not tensors:
            return {}
        flat = torch.cat([t.flatten() for t in tensors.values()])
        dist.all_reduce(flat, group=self.group)
        parts = (flat / self.size).split([t.numel() for t in tensors.values()])
        return {name: part.view(t.shape) for (name, t), part in zip(tensors.items(), parts, strict=True)}

    def _rounded_off(self) -> float:
        """What residuals have rounded off, of all ranks together, at most: the norm of a sum is no more than the sum of
        the norms. A collective."""
        total = torch.tensor(sum(self.rounded_off), dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return self.rounded_before + float(total)

    def _accounts(self) -> tuple[dict[str, Tensor], list[list[dict[str, Tensor]]]]:
        """What all ranks together wanted so far, and what may be kept of raised backward passes. A collective."""
        wanted = {name: mean + self.settled[name] for name, mean in self._mean(self.wanted).items()}
        return wanted, [[self._mean(choice) for choice in choices] for choices in self.abandoned]

    def check(self) -> None:
        """What must hold at the end. A collective."""
        self.at = "the end"
        wanted, abandoned = self._accounts()
        received, residuals = self.received, {} if self.state is None else mean_residuals(self.state)
        momentum = self.configuration.momentum
        if momentum is not None:
            received, residuals = self._in_gradients(momentum.beta, residuals)
        lead = self.configuration.lead
        if lead is not None:
            received = self._arrived(lead)
        allowance = torch.tensor(list(self.allowance.values()), dtype=torch.float64)
        dist.all_reduce(allowance, dist.ReduceOp.MAX, group=self.group)
        allowed = dict(zip(self.allowance, allowance.tolist(), strict=True))
        rounded_off = self._rounded_off()
        # Masking forgets momentum, and by how much a rank's gradient is clipped is not known here.
        conserved = momentum is not None and not momentum.masking and momentum.clip is None and not self.came_back
        if conserved or (self.configuration.nothing_is_lost and not (lead and self.came_back)):
            for name, off in law(wanted, received, residuals, abandoned).items():
                size = max(self.largest[name], float(residuals.get(name, torch.zeros(())).norm()))
                # What is computed from what was handed out has its roundings as many times.
                worth = 1.0 if lead is None else (1.0 - lead.acts_as) / (1.0 - lead.momentum)
                bound = worth * (1e-5 * size + 1.01 * (allowed[name] + rounded_off))
                if not off <= bound:
                    self.violations.append(
                        f"{name}: {off / max(size, 1e-30):.3g} of the largest norm is lost, allowed are "
                        f"{bound / max(size, 1e-30):.3g}"
                    )
        elif self.configuration.tracks:
            self._check_balance()
        elif self.configuration.nothing_is_kept:
            kept = [name for name, residual in residuals.items() if residual.count_nonzero()]
            if kept:
                self.violations.append(f"residuals of {', '.join(kept)}, though none should be kept")
        self.digests["parameters at the end"] = digest(self.parameters.values())
        self._end()

    def _in_gradients(self, beta: float, residuals: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """With `Momentum`, of every parameter: what was applied and what waits in units of the gradients, each of which
        moves 1 / (1 - β) times itself in the course of time; what is in the momentum has so much still to do. A
        collective."""
        saved = self.state.consolidated_state_dict()
        scale = 1.0 if saved["scale"] is None else saved["scale"]
        received = {name: (1.0 - beta) * total for name, total in self.received.items()}
        waits = {
            name: (1.0 - beta) * residuals[name] + beta * there.double() / scale
            for name, there in saved["vectors"][MOMENTUM]["mean"].items()
        }
        for name, kept in waits.items():
            if not bool(kept.isfinite().all()):
                self.violations.append(f"{name}: what is kept is not finite")
        return received, waits

    def _arrived(self, lead: Lead) -> dict[str, Tensor]:
        """With `Lead`, of every parameter: the sum of the means u that have arrived, from that of what was handed out
        and its momentum h, as x = u - (β - β')·h. A collective."""
        saved = self.state.consolidated_state_dict()
        scale = 1.0 if saved["scale"] is None else saved["scale"]
        share = (lead.momentum - lead.acts_as) / (1.0 - lead.momentum)
        return {
            name: self.received[name] + share * (self.received[name] - past.double() / scale)
            for name, past in saved["vectors"][PAST]["mean"].items()
        }

    def _check_balance(self) -> None:
        """With `Tracking`, of every parameter: estimate + mean residual = mean momentum. A collective."""
        saved = self.state.consolidated_state_dict()
        kept = {RESIDUAL: saved["residuals"], **saved["vectors"]}
        for name in self.parameters:
            estimate, residual, momentum = (kept[v]["mean"][name].double() for v in (ESTIMATE, RESIDUAL, MOMENTUM))
            off, size = (float(x.norm()) for x in (estimate + residual - momentum, momentum.abs() + estimate.abs()))
            if not off <= 1e-5 * size:
                self.violations.append(f"{name}: estimate and residual are {off / size:.3g} away from the momentum")


# `raise` is a word of the language.
setattr(Machine, "raise", Machine.raise_)


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


#: Seconds after which a rank says where it is: the process group's timeout has long passed by then.
HANGS = 100.0
SPEED = cost.CodecSpeed(1e-9, 1e-9)


def play(rank: int, configuration: Configuration, events: Sequence[Event]) -> dict[str, Any]:
    """Run a script; what this rank saw."""
    faulthandler.dump_traceback_later(HANGS)
    machines: list[Machine] = []
    with (
        patch.object(probe, "calibration", pretend(configuration.network)),
        patch.object(probe, "codec_speed", lambda *_: SPEED),
        counted(lambda: machines[0].scale if machines else 1.0) as rounded_off,
    ):
        machine = Machine(rank, configuration, rounded_off)
        machines.append(machine)
        machine.play(events)
        if machine.active:
            machine.check()
    faulthandler.cancel_dump_traceback_later()
    return {
        "violations": machine.violations,
        "digests": machine.digests,
        "statistics": machine.statistics,
    }
