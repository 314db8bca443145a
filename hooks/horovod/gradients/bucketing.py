"""Gradients to their average: submitted as backward makes them, in units, and waited for before the step.

A unit goes into one operation. Without a codec it is one gradient, or a group that the user asked for; the engine fuses
units as they come. A codec compresses buckets: about 25 MB of parameters, in the reverse of their order. A bucket must
hold the same gradients on all ranks and in every run, for the codec's choice and residuals depend on them.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm.between_steps import undivided
from ...comm.untraced import untraced
from ...timeouts import UNCLAIMED_SECONDS
from ...training.grad_scaler import LossScale
from ..compression import codec_of
from ..functions import allgather_object
from ..runtime.compressed import ResidualMean
from ..runtime.context import engine
from ..runtime.handles import allreduce_operation, key_of, overlaps, sparse_operation
from ..runtime.operations import Average, Operation
from . import checkpoint
from .arguments import Options
from .residuals import CompressionState
from .units import Unit, buckets_of, check_alike, empty_rows
from .unscaling import REMEDY, Unscaling, are_finite, version

#: The reducer of a parameter's gradient, by its id: of the optimizer made last, should there be several.
_owners: weakref.WeakValueDictionary[int, GradientReducer] = weakref.WeakValueDictionary()


class GradientReducer:
    """Reduces the gradients of some parameters.

    Args:
        named: names and parameters, those of the optimizer in its order, equal on all ranks.
        options: how.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], options: Options) -> None:
        self.options = options
        self.names = {p: name for name, p in named}
        codec = codec_of(options.compression)
        self.state = None if codec is None else CompressionState(codec, options.process_set)
        #: Parameters with sparse gradients, and how many dimensions of these are sparse.
        self._sparse: dict[Tensor, int] = {}
        self._warned: set[Tensor] = set()
        self.unscaling = Unscaling()
        self._loss_scale: float | None = None  # of the gradients of this step
        #: The start of Horovod, and how often ranks had joined: since then all have made the same steps.
        self._place: tuple[object, int] | None = None
        #: Backward has been here since the last synchronization; or not since one.
        self.started = self.synchronized = False
        #: The script has called `synchronize` since the last step.
        self.by_hand = False
        self._delay: dict[Tensor, int] = {}
        self._unit_of: dict[Tensor, Unit] = {}
        self._units: list[Unit] = []
        grouped: set[Tensor] = set()
        for group in [] if options.only_sparse else options.groups or []:
            chosen = [named[i][1] for i in group if named[i][1].requires_grad]
            grouped.update(chosen)
            self._add_units(chosen, joined=True)
        rest = [p for _, p in named if p.requires_grad and p not in grouped]
        self._add_units(rest, joined=codec is not None and not options.only_sparse)
        #: Parameters that required no gradient: nobody hears of one that comes all the same.
        self._frozen = [p for _, p in named if not p.requires_grad]
        #: Names that are reduced together, before any is known to be sparse: a rank that has joined may not hear of
        #: that before the others.
        self._together = [[self.names[p] for p in unit.parameters] for unit in self._units if len(unit.parameters) > 1]
        self._settled_at: object = None

    def add(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Add parameters, whose gradients are reduced one by one."""
        self.names.update({p: name for name, p in named})
        for _, p in named:
            if p.requires_grad:
                self._add_unit([p])
            else:
                self._frozen.append(p)

    @property
    def talk(self) -> str | None:
        """A name for messages among ranks about these parameters; None in the main thread.

        There numbers tell such operations apart, even if ranks name parameters otherwise. Several threads would mix
        these numbers up.
        """
        main = threading.current_thread() is threading.main_thread()
        return None if main else f"optimizer of {min(self.names.values(), default='')}"

    @property
    def loss_scale(self) -> LossScale:
        """The scaler's loss scale, where it is known."""
        return self.unscaling.loss_scale

    def takes_part(self) -> bool:
        """True if this rank is in the optimizer's process set.

        Raises:
            ValueError: the set is not registered, and nobody knows.
        """
        members = self.options.process_set
        if (included := members.included()) is None:
            raise ValueError(
                f"{members} of this DistributedOptimizer is not registered, or not any more: pass it to "
                "add_process_set() on every rank, or make the optimizer again, with one that is"
            )
        return included

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes before a reduction, from the next step on."""
        self.options.backward_passes_per_step = passes
        if not self.started:
            self._delay = dict.fromkeys(self._delay, passes)

    @undivided
    def reset(self) -> None:
        """Forget reductions in flight."""
        self.wait()
        for unit in self._units:
            unit.pending = None
            unit.arrived.clear()
        self.started = self.synchronized = False
        self.set_passes(self.options.backward_passes_per_step)

    def wait(self) -> None:
        """Until nothing changes gradients and residuals any more; within limits, as other ranks may have stopped."""
        for unit in self._units:
            if unit.pending is not None:
                unit.pending.settle(UNCLAIMED_SECONDS)

    @undivided
    def synchronize(self) -> None:
        """Wait until every gradient is reduced. Parameters without one get zeros, which take part. A collective.

        Raises:
            ValueError: a parameter has a gradient, and required none before.
        """
        if self.takes_part():
            try:
                self.check_unchanged()  # before anything that other ranks have to come to
                self._begin()
                self._settle_sparse()
                self._clip()
                for unit in self._units:
                    if unit.pending is None:
                        self._launch(unit)
                for unit in self._units:
                    self._finish(unit)
            finally:
                self.reset()
            self._settle_overflow()
            self._check_frozen()  # now that no rank waits for this one
        self.synchronized = True
        self.unscaling.reduced()

    @undivided
    def synchronize_once(self) -> None:
        """As `synchronize`, unless no rank has been through backward since: a second reduction would multiply a sum."""
        members = self.options.process_set
        # This rank may have had none of these parameters in its graph, where others wait for it.
        if not (self.by_hand and self.takes_part()) or any(allgather_object(self.started, self.talk, members)):
            self.synchronize()

    @undivided
    def reduce_before_unscaling(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce the optimizer's gradients if a scaler is about to unscale them, and they have not been reduced. A
        collective of the ranks whose scalers do."""
        known, state = self.loss_scale, self.state
        try:
            begins = self.unscaling.begins(optimizer, self.started)
        except RuntimeError:
            self.reset()
            raise
        is_new = self.loss_scale is not known
        if is_new and state is not None:
            state.scale = self.loss_scale.read() or 1.0
        if begins:
            self.synchronize()
        elif is_new:  # what was reduced before it came has overflowed for it, too
            self._settle_overflow()
        if is_new and state is not None:
            state.keep_previous()

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if the gradients were reduced for the scaler that is at this optimizer, and none has come since."""
        return not self.started and self.unscaling.has_begun(optimizer)

    def check_unchanged(self, besides: Tensor | None = None) -> None:
        """Raise RuntimeError if anything but the reduction has changed a gradient since backward made it.

        Ranks may have reduced a part of the change. Reductions in flight are forgotten then.
        """
        for p, (grad, before) in [pair for unit in self._units for pair in unit.arrived.items()]:
            changed = p.grad is not grad or version(grad) != before
            if changed and p.grad is not None and p is not besides:
                self.reset()
                raise RuntimeError(
                    f"the gradient of {self.names[p]} was changed between loss.backward() and optimizer.step() or "
                    f"optimizer.synchronize(), while ranks reduce it: {REMEDY}"
                )

    def average_state(self, own: dict[str, Any]) -> None:
        """Replace the vectors of this rank's `CompressionState.state_dict` by their mean. A collective."""
        assert self.state is not None
        process_set, vectors = self.options.process_set, checkpoint.vectors_of(own)
        # Not every rank need have some: a checkpoint may have been loaded on some ranks only.
        shapes = {(v, name): tuple(x.shape) for v, found in vectors.items() for name, x in found.items()}
        told = allgather_object(shapes, self.talk, process_set)
        every = {place: shape for found in told for place, shape in found.items()}
        devices = {name: p.device for p, name in self.names.items()}
        pending = []  # all in flight before the first is waited for
        for (vector, name), shape in sorted(every.items()):
            mine = vectors[vector].get(name)
            if mine is None:
                mine = torch.zeros(shape, dtype=torch.float32, device=devices.get(name))
            key = key_of(vector, name, process_set)
            mean = engine().submit(ResidualMean(*key, mine, self.state, name, vector))
            pending.append((vectors[vector], name, mean))
        for found, name, mean in pending:
            found[name] = mean.wait()[0]

    def use_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Let residuals follow what this scaler does, and gradients be reduced before it unscales them."""
        self.unscaling.use(scaler)
        if self.state is not None and self.loss_scale.skips:
            self.state.keep_previous()

    @undivided
    def applied(self) -> None:
        """The optimizer has stepped."""
        self.synchronized = self.by_hand = False
        if self.state is not None and self.loss_scale.skips:
            self.state.settle(applied=True)

    # -- as backward goes on -----------------------------------------------------------------------------------------

    @undivided
    def _hook(self, p: Tensor) -> None:
        if not self.takes_part():
            return
        if self._delay[p] <= 0:
            self.check_unchanged(besides=p)
            self._unit_of[p].arrived.pop(p, None)  # whose change is told now
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._begin()
        self._delay[p] -= 1
        if self._delay[p] == 0:
            unit = self._unit_of[p]
            unit.arrived[p] = p.grad, version(p.grad)
            if len(unit.arrived) == len(unit.parameters) and self._settled and self._largest_norm is None:
                self._launch(unit)

    def _begin(self) -> None:
        if not self.started:
            self.started, self.synchronized = True, False
            if self.unscaling.look() and self.state is not None:
                self.state.keep_previous()  # a scaler may come, and skip this step already
            if self.state is not None:
                self.unscaling.expect(self.state.scale)
            place = engine().meeting, engine().joins
            if place != self._place:
                self._place = place
                self.loss_scale.forget()
            self._loss_scale = self.loss_scale.known()
            if self.state is not None:
                if self.loss_scale.skips and self.loss_scale.updated():
                    self.state.settle(applied=True)  # or put back already
                self.state.follow_scale(self.loss_scale.read() or 1.0)

    @property
    def _largest_norm(self) -> float | None:
        """The largest norm of this rank's own gradients that the feedback strategy allows."""
        return None if self.state is None else self.state.compression.strategy.largest_norm

    def _clip(self) -> None:
        """Scale this rank's dense gradients, before any goes, to the norm that the strategy allows."""
        if self.state is None or self._largest_norm is None:
            return
        for p in self.names if self.options.sparse_as_dense else ():
            p.grad = None if p.grad is None else p.grad.to_dense()
        grads = [p.grad for unit in self._units for p in unit.parameters if p.grad is not None and not p.grad.is_sparse]
        if not grads:
            return
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
        norm = torch.stack([each.to(norms[0].device) for each in norms]).double().norm()
        factor = (self._largest_norm * self.state.scale / norm).clamp(max=1.0)
        if norm.isfinite() and factor < 1.0:  # one that is not finite must not spread
            for grad in grads:
                grad.mul_(factor.to(grad.device))

    def _check_frozen(self) -> None:
        for p in self._frozen:
            if p.grad is not None and p.requires_grad:  # one of before it was frozen may be left
                raise ValueError(
                    f"{self.names[p]} has a gradient, which no other rank has heard of, and required none when "
                    "DistributedOptimizer was made: let it require one before, or make DistributedOptimizer again, of "
                    "the optimizer that it was made of"
                )

    def _settle_overflow(self) -> None:
        """Restore the feedback if the scaler will skip the step, with all that was synchronized since the last one."""
        if (
            self.state is not None
            and self.loss_scale.skips
            and not are_finite(p.grad.detach() for p in self.names if p.grad is not None)
        ):
            self.state.settle(applied=False)

    def _add_units(self, parameters: list[Tensor], joined: bool) -> None:
        """Add one unit of all parameters, or one of each, or buckets for a codec."""
        if not joined:
            for p in parameters:
                self._add_unit([p])
        elif self.state is None:
            self._add_unit(parameters)
        else:
            for bucket in buckets_of(parameters):
                self._add_unit(bucket)

    def _add_unit(self, parameters: list[Tensor]) -> None:
        if not parameters:
            return
        unit = Unit(parameters)
        self._units.append(unit)
        for p in parameters:
            if self.options.only_sparse:
                self._sparse[p] = 1  # as an embedding makes them; until there is one that says otherwise
            if p not in self._delay:
                p.register_post_accumulate_grad_hook(_weak(self))
                _owners[id(p)] = self
            self._unit_of[p], self._delay[p] = unit, self.options.backward_passes_per_step

    @property
    def _settled(self) -> bool:
        """True if all ranks know which gradients are sparse: units of several must not hold any."""
        return not self._together or self._settled_at is engine().meeting

    def _settle_sparse(self) -> None:
        """Give gradients that are sparse on any rank units of their own. A collective.

        Called before the first reduction of units of several, and again if a rank may have missed it.

        Raises:
            ValueError: the ranks' units are not of the same parameters in the same order.
        """
        if self._settled:
            return
        mine = {self.names[p]: dimensions for p, dimensions in self._sparse.items()}
        mine |= {self.names[p]: grad.sparse_dim() for p in self._delay if (grad := self._sparse_grad(p)) is not None}
        every = allgather_object((engine().rank, mine, self._together), self.talk, self.options.process_set)
        check_alike([(rank, theirs) for rank, _, theirs in every])
        found: dict[str, int] = {}
        for _, names, _ in every:
            found.update(names)
        self._settled_at = engine().meeting
        self._sparse.update({p: found[self.names[p]] for p in self._delay if self.names[p] in found})
        for unit in list(self._units):
            alone = {p for p in unit.parameters if self.names[p] in found}
            if alone and len(unit.parameters) > 1:
                self._units.remove(unit)
                delays = {p: self._delay[p] for p in unit.parameters}
                self._add_unit([p for p in unit.parameters if p not in alone])
                for p in unit.parameters:
                    self._add_unit([p] if p in alone else [])
                self._delay.update(delays)

    def _sparse_grad(self, p: Tensor) -> Tensor | None:
        return p.grad if p.grad is not None and p.grad.is_sparse and not self.options.sparse_as_dense else None

    def _launch(self, unit: Unit) -> None:
        """Submit a unit's gradients; zeros where there is none."""
        no_gradient = all(p.grad is None for p in unit.parameters)
        for p in unit.parameters:
            made = p.grad
            if p.grad is None:
                p.grad = empty_rows(p, self._sparse[p]) if p in self._sparse else torch.zeros_like(p)
            elif p.grad.is_sparse and (self.options.sparse_as_dense or len(unit.parameters) > 1):
                self._warn_of_late_rows(p)
                p.grad = p.grad.to_dense()
            elif not p.grad.is_sparse and overlaps(p.grad):  # an expanded one that the script has put there
                p.grad = p.grad.contiguous()
            if p.grad is not made and p in unit.arrived and unit.arrived[p][0] is made:
                unit.arrived[p] = p.grad, version(p.grad)
        # `data` has a version of its own, so that what the reduction writes is told from what others do.
        grads: list[Any] = [None if p.grad is None else p.grad.data for p in unit.parameters]
        try:
            operation = self._operation(unit, grads)
            operation.no_gradient, operation.loss_scale = no_gradient, self._loss_scale
            unit.pending = engine().submit(operation)
        except ValueError:  # the others are refused it too: nobody comes to wait for what is under way
            self.reset()
            raise

    def _operation(self, unit: Unit, grads: list[Tensor]) -> Operation:
        options, state = self.options, self.state
        names = [self.names[p] for p in unit.parameters]
        key = key_of("gradient", names[0], options.process_set)
        unit.contexts = [None] * len(grads)
        if any(grad.is_sparse for grad in grads):
            self._sparse[unit.parameters[0]] = grads[0].sparse_dim()
            return sparse_operation(key, grads[0], options.op)
        if state is not None:
            # Not divided before: what is left out is kept in the gradient's own units, and sums are float32 anyway.
            return allreduce_operation(
                key, grads, options.op, in_place=True, contiguous=False, codec=state.compression, state=state,
                names=names,
            )  # fmt: skip
        predivide = options.predivide if options.op == Average else 1.0
        pairs = [options.compression.compress(grad) for grad in grads]
        unit.contexts = [context for _, context in pairs]
        scales, sent = (1.0 / predivide, predivide), [tensor for tensor, _ in pairs]
        return allreduce_operation(key, sent, options.op, *scales, in_place=True, contiguous=False)

    def _warn_of_late_rows(self, p: Tensor) -> None:
        """Warn: the other ranks reduce it densely with others already."""
        if not self.options.sparse_as_dense and p not in self._warned:
            self._warned.add(p)
            warnings.warn(
                f"the gradient of {self.names[p]} has become sparse after the first step, in which no rank had one: it "
                "is made dense; leave it out of the groups, let the first step have it on some rank, or pass "
                "sparse_as_dense=True",
                stacklevel=2,
            )

    def _finish(self, unit: Unit) -> None:
        """Wait for a unit, and put what comes back into its gradients."""
        assert unit.pending is not None
        results = unit.pending.wait()
        for p, result, context in zip(unit.parameters, results, unit.contexts, strict=True):
            if result.is_sparse:
                self._sparse[p] = result.sparse_dim()
                p.grad = result
                continue
            if p.grad is None:
                raise AssertionError(
                    f"{self.names[p]} has lost its gradient between loss.backward() and optimizer.step() or "
                    "optimizer.synchronize(), as by model.zero_grad(): other ranks go on with their mean. Drop "
                    "gradients after the step"
                )
            dense = result
            if self.state is None:
                if p.grad.is_sparse:  # nothing was here, and the others' is dense: what is theirs
                    context = self.options.compression.compress(torch.zeros_like(p))[1]
                dense = self.options.compression.decompress(result, context)
            if p.grad.is_sparse:
                p.grad = dense
            elif dense.data_ptr() != p.grad.data_ptr() or dense.dtype != p.grad.dtype:
                p.grad.detach().copy_(dense)


def _weak(reducer: GradientReducer) -> Callable[[Tensor], None]:
    """A hook that does not keep the reducer, and with it the whole optimizer, alive as long as the parameter."""
    reference = weakref.ref(reducer)

    @untraced
    def hook(p: Tensor) -> None:
        found = reference()
        if found is not None and _owners.get(id(p)) is found:
            found._hook(p)

    return hook
