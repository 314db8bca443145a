"""The next forward pass begins while means are on their way (P3, Jayarajan et al. 2019; ByteScheduler, Peng et al.
2019)."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..comm.between_steps import (
    REMEDY,
    Reentered,
    between_steps,
    interrupts_undivided,
    part_of_step,
    undivided,
)
from ..comm.untraced import untraced
from ..core.bucket import Bucket
from ..core.reducer import Step
from ..training.autograd_end import waited
from ..training.awaited_gradient import AwaitedGradient
from ..training.awaited_parameter import AwaitedParameter, awaited_class, release
from ..training.optimizer_part import OptimizerStep
from .hook import CompressState, compress_hook, futures_observed
from .model import ddp_of, finalized_by_hand, frees_buckets, join_mode, parameters_of


@dataclass(eq=False)
class _Late:
    """A bucket whose mean is on its way, and the steps that wait for it, in their order, each with its parameters by
    number of their group."""

    step: Step
    bucket: Bucket
    buffer: Tensor
    future: torch.futures.Future[Tensor]
    steps: list[tuple[OptimizerStep, dict[int, list[Tensor]]]] = field(default_factory=list)
    #: Parameters of these steps, and how often each had been written.
    versions: dict[Tensor, int] = field(default_factory=dict)


def overlap_forward(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> OverlapForward:
    """Let the next forward pass begin before the last gradient is in. A collective; the training loop stays as it is.

    `backward()` then ends while means are on their way. `step()` notes the optimizer's settings, and each bucket's part
    of the step is taken in the next forward pass, before anything reads its parameters. Messages of the first layers
    leave before those of the last ones (P3, Jayarajan et al. 2019). Every parameter gets the same values as without, in
    every bit. With `DistributedDataParallel(bucket_cap_mb=1)` little waits for what it does not need.

    Every function of PyTorch that reads or writes a parameter waits for its part of the step: in layers, in hooks, in
    averages or clamps of weights. So do `state_dict()` and `load_state_dict()` of the optimizer; a pass in evaluation
    mode or without gradients waits for all at its begin. These do not wait, and need `finish()` before them: tensors
    and arrays that share a parameter's memory and were made before `step()`, the optimizer's `state`, DLPack,
    TorchScript's functions outside of a layer, and `torch.func.grad` by a parameter.

    Args:
        model: `DistributedDataParallel` on CPUs, with `compress_hook` registered; as `CompressState`'s.
        optimizer: the optimizer, or all of them; each parameter's step must depend on its own gradient alone, and not
            on the norm of all. It may count steps, in its groups, attributes, or `state`.

    Returns:
        The overlap: close it, or use it in a `with` statement, before the parameters are read at the end.

    Raises:
        TypeError, ValueError: an argument does not fit, or the ranks disagree.
        RuntimeError: a rank did not come within 60 s. In training: something uses a gradient before the optimizer's
            step, as clipping and a GradScaler do; an optimizer cannot step a part of its parameters; or a parameter was
            written past the functions that wait.
    """
    ddp = ddp_of(model)
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    state = _state_of(ddp)
    trained = state.bind(ddp).prepare_overlap(_problem(model, ddp, state, optimizers))
    overlap = state.overlap = OverlapForward(ddp.module, trained.values(), state)
    if ddp.gradient_as_bucket_view:
        overlap.follow_buckets(ddp)
    for one in optimizers:
        overlap.follow(one)
    return overlap


def _state_of(model: DistributedDataParallel) -> CompressState:
    for hook, state in getattr(model, "_comm_hooks", ()):
        if hook is compress_hook and isinstance(state, CompressState):
            return state
    raise ValueError(
        "the model has no hook of gradwire's: call model.register_comm_hook(CompressState(model, codec), "
        "compress_hook) before overlap_forward, on every rank"
    )


def _problem(
    model: nn.Module, ddp: DistributedDataParallel, state: CompressState, optimizers: Sequence[Any]
) -> str | None:
    """The reason why forward passes cannot overlap, if any."""
    for option in ("find_unused_parameters", "static_graph", "skip_all_reduce_unused_params"):
        if getattr(ddp, option, False):
            return f"{option}=True lets DDP use the means when backward ends: leave it out"
    if frees_buckets(ddp):
        return "lazy_bucket_allocation=True frees the means when backward ends: leave it out"
    if futures_observed(ddp):
        return "another hook of the model waits for the means within backward: register compress_hook alone"
    compiled = any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in ddp.modules())
    if compiled or model is not ddp:
        return "a compiled or wrapped model does not call hooks of its modules: pass the DistributedDataParallel model"
    if not optimizers:
        return "there is no optimizer: pass those of the model's parameters"
    stepped = set[Tensor]()
    for optimizer in optimizers:
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            return f"the optimizer is a {type(optimizer).__name__}, expected torch.optim.Optimizer: pass the one inside"
        if getattr(optimizer, "process_group", None) is not None:
            return f"{type(optimizer).__name__} has messages of its own in each step: take an optimizer without"
        stepped.update(parameter for group in optimizer.param_groups for parameter in group["params"])
    for name, parameter in parameters_of(ddp).items():
        if parameter not in stepped:
            return f"parameter {name!r} is in none of the optimizers: pass all of them, or freeze it before DDP"
    return "it is on already: call it once" if state.overlap is not None else None


class OverlapForward:
    """Forward passes that begin while means are on their way, as `overlap_forward` makes them.

    Args:
        root: the module that DDP wraps.
        trained: the parameters that DDP reduces.
        state: of the model; None: no model has such hooks any more.
    """

    def __init__(self, root: nn.Module, trained: Iterable[Tensor], state: CompressState | None) -> None:
        self._state = None if state is None else weakref.ref(state)
        self._stand_ins = {parameter: AwaitedGradient(parameter) for parameter in trained}
        #: The bucket of each parameter in the last backward pass.
        self._late_of: dict[Tensor, _Late] = {}
        #: Buckets that an optimizer's step waits for.
        self._due: dict[_Late, None] = {}
        #: Means may be on their way to DDP's buckets.
        self._in_flight = False
        #: Parameters whose gradients an optimizer's step must not see.
        self._hidden: list[Tensor] = []
        #: Steps that optimizers take now: a class may call its base's.
        self._depth = 0
        #: What they leave to their buckets.
        self._pending: list[tuple[_Late, OptimizerStep, dict[int, list[Tensor]]]] = []
        self._versions: dict[Tensor, int] = {}
        #: Classes of parameters whose updates are due, by their own.
        self._classes: dict[type[Tensor], type[Tensor]] = {}
        #: Parameters that no function of PyTorch has read in the first forward pass; None: there was none.
        self._unread: list[Tensor] | None = None
        self._watching = False
        #: Parameters whose gradients DDP must not see.
        self._aside: list[Tensor] = []
        self._handles: list[Any] = [root.register_forward_hook(self._after)]
        for module in root.modules():
            before = self._before_root if module is root else self._before
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @part_of_step
    def finish(self) -> None:
        """Wait for all means, and take the steps that wait for them: parameters are then as without overlap."""
        _expect_whole("finish() was called")
        for late in list(self._due):
            self._take_steps(late)

    @between_steps
    def close(self) -> None:
        """`finish`; from now on backward ends when all means are in. Each rank for itself."""
        try:
            self._settle()
        finally:
            for parameter in self._stand_ins:
                release(parameter)
            while self._handles:
                self._handles.pop().remove()
            if (state := self._of()) is not None and state.overlap is self:
                state.overlap = None

    def _of(self) -> CompressState | None:
        return None if self._state is None else self._state()

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Take this optimizer's steps when means are in."""
        self._handles += [
            optimizer.register_step_pre_hook(self._stepping),
            optimizer.register_step_post_hook(self._stepped),
            optimizer.register_state_dict_pre_hook(self._before_access),
            optimizer.register_load_state_dict_pre_hook(self._before_access),
        ]

    def follow_buckets(self, ddp: DistributedDataParallel) -> None:
        """Keep these gradients from DDP while it replaces its buckets, to which it would copy them."""
        self._handles.append(ddp.register_forward_pre_hook(self._before_ddp))

    # -- seen from DDP's hook ----------------------------------------------------------------------------------------

    def begin(self, model: nn.Module | None) -> None:
        """A synchronised backward pass begins, and DDP's buckets change."""
        if join_mode(model)[0] or finalized_by_hand(model):
            raise RuntimeError(
                "gradwire: overlap_forward ends backward before means are in, which neither DDP.join nor "
                "require_manual_backward_finalization allows: leave one of them out"
            )
        if self._in_flight:
            raise RuntimeError(
                "gradwire: a backward pass began while means of the last one were on their way, to buckets that both "
                "use: under overlap_forward call the model between two backward passes"
            )
        self.drop()

    def drop(self) -> None:
        """Forget means that no optimizer's step has asked for."""
        self._in_flight, self._depth = False, 0
        for late in self._due:
            for parameter in late.versions:
                release(parameter)
        self._due.clear()
        self._late_of.clear()
        self._hidden.clear()
        self._aside.clear()
        self._pending.clear()
        self._versions.clear()

    def take(
        self, step: Step, bucket: Bucket, buffer: Tensor, future: torch.futures.Future[Tensor]
    ) -> torch.futures.Future[Tensor]:
        """A bucket is under way; returns what DDP waits for."""
        self._late_of |= dict.fromkeys(bucket.parameters, _Late(step, bucket, buffer, future))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    @undivided
    def backward_ended(self) -> None:
        """DDP has made gradients of what its buckets hold, which are no means yet."""
        self._in_flight = True
        for parameter, late in self._late_of.items():
            parameter.grad, late.step.settled = self._stand_ins[parameter], True

    # -- the optimizers ----------------------------------------------------------------------------------------------

    @untraced
    @undivided
    def _stepping(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a step of an optimizer, which then finds none of these gradients."""
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise ValueError("step(closure) needs the gradients at once: call backward before step(), without closure")
        self._depth += 1
        updates: dict[_Late, dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad is self._stand_ins.get(parameter):
                    parameter.grad = None
                    self._hidden.append(parameter)
                    self._versions[parameter] = parameter._version
                    updates[self._late_of[parameter]][number].append(parameter)
        if updates:
            step = OptimizerStep(optimizer)
            self._pending += [(late, step, of_groups) for late, of_groups in updates.items()]

    @untraced
    @undivided
    def _stepped(self, *_: Any) -> None:
        """After a step: gradients stay until `zero_grad()`."""
        self._depth -= 1
        if self._depth:
            return
        for parameter in self._hidden:
            parameter.grad = self._stand_ins[parameter]
        self._hidden.clear()
        (pending, self._pending), (versions, self._versions) = (self._pending, []), (self._versions, {})
        for step in {step: None for _, step, _ in pending}:
            step.ended()
        for late, step, of_groups in pending:
            late.steps.append((step, of_groups))
            self._due[late] = None
            for parameter in (parameter for parameters in of_groups.values() for parameter in parameters):
                late.versions.setdefault(parameter, versions[parameter])
                self._mark(parameter)
        if not self._in_flight:
            self.finish()

    @part_of_step
    def _take_steps(self, late: _Late) -> None:
        """Wait for this mean, and take the steps that wait for it."""
        self._await(late)
        self._take_steps_by(late)

    @undivided
    def _take_steps_by(self, late: _Late) -> None:
        if late not in self._due:  # a signal's handler has used a parameter during the wait
            return
        for slot, parameter in zip(late.bucket.slots, late.bucket.parameters, strict=True):
            version = late.versions.get(parameter)
            if version is not None and (not isinstance(parameter, AwaitedParameter) or parameter._version != version):
                raise RuntimeError(
                    f"gradwire: parameter {slot.name!r} was written between the optimizer's step() and its update, "
                    "through a tensor that shares its memory, or by a step in which it has no gradient: call finish() "
                    "of what overlap_forward returned before that, or train without overlap_forward"
                )
        for parameter in late.versions:
            release(parameter)
        late.versions.clear()
        means = {
            parameter: slot.view(late.buffer)
            for parameter, slot in zip(late.bucket.parameters, late.bucket.slots, strict=True)
        }
        del self._due[late]
        self._depth += 1
        try:
            while late.steps:
                step, parameters = late.steps.pop(0)
                step.take(parameters, means)
        finally:
            self._depth -= 1

    def _mark(self, parameter: Tensor) -> None:
        """Let whatever uses a parameter's elements call `_use`."""
        base = type(parameter)
        if not issubclass(base, AwaitedParameter):
            if base not in self._classes:
                self._classes[base] = awaited_class(base, partial(_use, weakref.ref(self)))
            parameter.__class__ = self._classes[base]

    def _use(self, parameters: Iterable[Tensor]) -> None:
        """Take the updates of these parameters, before something uses them."""
        for parameter in parameters:
            if (late := self._late_of.get(parameter)) in self._due and parameter in late.versions:
                self._take_steps(late)
            release(parameter)

    @part_of_step
    def _settle(self) -> None:
        """`finish`, and wait for means that no optimizer has asked for."""
        self.finish()
        for late in set(self._late_of.values()):
            self._await(late)
        self._in_flight = False

    def _await(self, late: _Late) -> None:
        state = self._of()
        try:
            interruption = waited(late.future.wait, lambda _: state is None or state.failed)
        except Exception:
            self._give_up(late)
            raise
        if interruption is not None:
            raise interruption

    @undivided
    def _give_up(self, late: _Late) -> None:
        names = {name for other in self._due for name in other.bucket.names}
        self.drop()
        if (state := self._of()) is not None:
            state.give_up(late.step, names)

    # -- the modules -------------------------------------------------------------------------------------------------

    @undivided
    def _before_ddp(self, ddp: Any, _: Any) -> None:
        if not getattr(ddp, "_has_rebuilt_buckets", False):
            self._aside += [p for p, stand_in in self._stand_ins.items() if p.grad is stand_in]
            for parameter in self._aside:
                parameter.grad = None

    @part_of_step
    def _before_root(self, root: nn.Module, _: Any) -> None:
        while self._aside:
            parameter = self._aside.pop()
            parameter.grad = self._stand_ins[parameter]
        self._watching = self._unread is None and trains(root)
        if self._watching:
            self.finish()
            for parameter in self._stand_ins:
                self._mark(parameter)
        self._use(self._unread or ())
        self._before(root, _)

    def _before(self, module: nn.Module, _: Any) -> None:
        """Before a module's forward pass."""
        if not self._due and not self._watching:
            return
        # Outside of training, fused kernels of `torch.nn` step aside for tensors of classes that they do not know.
        training = trains(module)
        read = module._parameters.values() if training else module.parameters()
        awaited: list[Any] = [parameter for parameter in read if isinstance(parameter, AwaitedParameter)]
        if awaited and not training:
            self.finish()
        self._use(awaited)

    def _after(self, *_: Any) -> None:
        """After the root's forward pass."""
        if self._watching:
            self._watching = False
            self._unread = [p for p in self._stand_ins if isinstance(p, AwaitedParameter)]
            self._use(self._unread)
        self._settle()

    def _before_access(self, *_: Any) -> None:
        self.finish()

    def __reduce__(self) -> tuple[Any, ...]:
        # Hooks of a copied or pickled model do nothing.
        return OverlapForward, (nn.Module(), (), None)


def trains(module: nn.Module) -> bool:
    """True if a module is called for training."""
    return module.training and torch.is_grad_enabled()


def _expect_whole(event: str) -> None:
    if interrupts_undivided():
        raise Reentered(f"gradwire: {event} within a step that parameters still wait for: {REMEDY}")


def _use(overlap: weakref.ref[OverlapForward], parameters: list[Tensor]) -> None:
    """Take the updates of these parameters, or all if there is none."""
    if (owner := overlap()) is not None:
        _expect_whole("a parameter was used")
        owner._use(parameters or owner._stand_ins)
    for parameter in parameters:
        release(parameter)
