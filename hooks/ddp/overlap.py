"""The next forward pass begins while means are on their way (P3, Jayarajan et al. 2019; ByteScheduler, Peng et al.
2019)."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..comm.between_steps import between_steps, undivided
from ..comm.untraced import untraced
from ..core.bucket import Bucket
from ..core.step import Step
from ..training.awaited_gradient import AwaitedGradient
from ..training.parameter_reads import Reads, ReadsRecorder, trains
from .ddp_options import finalized_by_hand, frees_buckets, join_mode
from .hook import CompressState, compress_hook, futures_observed
from .model_lookup import ddp_of, parameters_of

#: Parameters of an optimizer's group, and the group's settings when the optimizer stepped.
Update = tuple[dict[str, Any], list[Tensor]]


@dataclass(eq=False)
class _Late:
    """A bucket whose mean is on its way, and the steps that wait for it, in their order."""

    step: Step
    bucket: Bucket
    buffer: Tensor
    future: torch.futures.Future[Tensor]
    steps: list[tuple[torch.optim.Optimizer, list[Update]]] = field(default_factory=list)


def overlap_forward(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> OverlapForward:
    """Let the next forward pass begin before the last gradient is in. A collective; the training loop stays as it is.

    `backward()` then ends while means are on their way. `step()` notes the optimizer's settings, and each bucket's part
    of the step is taken in the next forward pass, before a module reads its parameters. Messages of the first layers
    leave before those of the last ones (P3, Jayarajan et al. 2019). Every parameter gets the same values as without, in
    every bit. With `DistributedDataParallel(bucket_cap_mb=1)` little waits for what it does not need.

    Modules wait for parameters by hooks; which ones they read is recorded in the first forward pass, and a pass in
    evaluation mode or without gradients waits for all at its begin. So do `state_dict()` and `load_state_dict()` of the
    model and of the optimizer. What else reads parameters, as averages of weights do, needs `finish()` before it.

    Args:
        model: `DistributedDataParallel` on CPUs, with `compress_hook` registered; as `CompressState`'s.
        optimizer: the optimizer, or all of them; each parameter's step must depend on its own gradient alone.

    Returns:
        The overlap: close it, or use it in a `with` statement, before the parameters are read at the end.

    Raises:
        TypeError, ValueError: an argument does not fit, or the ranks disagree.
        RuntimeError: a rank did not come within 60 s. In training: something uses a gradient before the optimizer's
            step, as clipping and a GradScaler do; or an optimizer cannot step a part of its parameters.
    """
    ddp = ddp_of(model)
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    state = _state_of(ddp)
    trained = state.bind(ddp).prepare_overlap(_problem(model, ddp, state, optimizers))
    overlap = state.overlap = OverlapForward(ddp.module, trained.values(), state)
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
        self._recorder: ReadsRecorder | None = None
        self._reads: Reads | None = None
        self._handles: list[Any] = [
            root.register_forward_hook(self._after),
            root.register_forward_hook(self._always_after, always_call=True),
        ]
        for module in root.modules():
            self._handles += [
                module.register_forward_pre_hook(self._before_root if module is root else self._before),
                module.register_state_dict_pre_hook(self._before_access),
                module.register_load_state_dict_pre_hook(self._before_access),
            ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @between_steps
    def finish(self) -> None:
        """Wait for all means, and take the steps that wait for them: parameters are then as without overlap."""
        for late in list(self._due):
            self._take_steps(late)

    @between_steps
    def close(self) -> None:
        """`finish`; from now on backward ends when all means are in. Each rank for itself."""
        try:
            self._settle()
        finally:
            self._end_recording()
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
        self._due.clear()
        self._late_of.clear()
        self._hidden.clear()

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
        for parameter in self._late_of:
            parameter.grad = self._stand_ins[parameter]

    # -- the optimizers ----------------------------------------------------------------------------------------------

    @untraced
    @undivided
    def _stepping(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a step of an optimizer, which then finds none of these gradients."""
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise ValueError("step(closure) needs the gradients at once: call backward before step(), without closure")
        self._depth += 1
        updates: dict[_Late, list[Update]] = defaultdict(list)
        for group in optimizer.param_groups:
            mine: dict[_Late, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad is self._stand_ins.get(parameter):
                    parameter.grad = None
                    self._hidden.append(parameter)
                    mine[self._late_of[parameter]].append(parameter)
            # A schedule may change the settings before the step is taken.
            settings = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
            for late, parameters in mine.items():
                updates[late].append((settings, parameters))
        for late, of_groups in updates.items():
            late.steps.append((optimizer, of_groups))
            self._due[late] = None

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
        if not self._in_flight:
            self.finish()

    @undivided
    def _take_steps(self, late: _Late) -> None:
        """Wait for this mean, and take the steps that wait for it."""
        self._await(late)
        means = {
            parameter: slot.view(late.buffer)
            for parameter, slot in zip(late.bucket.parameters, late.bucket.slots, strict=True)
        }
        del self._due[late]
        self._depth += 1
        try:
            while late.steps:
                step_part(*late.steps.pop(0), means)
        finally:
            self._depth -= 1

    @undivided
    def _settle(self) -> None:
        """`finish`, and wait for means that no optimizer has asked for."""
        self.finish()
        for late in set(self._late_of.values()):
            self._await(late)
        self._in_flight = False

    def _await(self, late: _Late) -> None:
        try:
            late.future.wait()
        except Exception:
            names = {name for other in self._due for name in other.bucket.names}
            self.drop()
            if (state := self._of()) is not None:
                state.give_up(late.step, names)
            raise

    # -- the modules -------------------------------------------------------------------------------------------------

    @undivided
    def _before_root(self, root: nn.Module, _: Any) -> None:
        if self._reads is None and trains(root):
            self.finish()
            self._end_recording()  # of a pass that a signal's handler has left
            self._recorder = ReadsRecorder(root, self._stand_ins)
            self._recorder.begin()
        self._before(root, _)

    def _before(self, module: nn.Module, _: Any) -> None:
        """Before a module's forward pass."""
        if not self._due:
            return
        reads = None if self._reads is None else self._reads.of(module)
        if reads is None:
            self.finish()
            return
        for parameter in reads:
            if (late := self._late_of.get(parameter)) in self._due:
                self._take_steps(late)

    def _after(self, *_: Any) -> None:
        """After the root's forward pass."""
        self._reads = self._end_recording() or self._reads
        self._settle()

    def _end_recording(self) -> Reads | None:
        """The record, if one was made."""
        recorder, self._recorder = self._recorder, None
        return None if recorder is None else recorder.end()

    def _always_after(self, *_: Any) -> None:
        """After the root's forward pass, also one that has raised."""
        self._end_recording()

    def _before_access(self, *_: Any) -> None:
        self.finish()

    def __reduce__(self) -> tuple[Any, ...]:
        # Hooks of a copied or pickled model do nothing.
        return OverlapForward, (nn.Module(), (), None)


def step_part(optimizer: torch.optim.Optimizer, updates: Sequence[Update], means: dict[Tensor, Tensor]) -> None:
    """An optimizer's step of some of its parameters, by these gradients, and without its hooks."""
    groups, parameters = [], []
    for settings, mine in updates:
        groups.append({**settings, "params": mine})
        parameters += mine
    step, all_groups = type(optimizer).step, optimizer.param_groups
    plain: Callable[..., Any] = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    found = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = means[parameter]
    optimizer.param_groups = groups
    try:  # as outside of the forward pass
        with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
            plain(optimizer)
    finally:
        optimizer.param_groups = all_groups
        for parameter, grad in zip(parameters, found, strict=True):
            parameter.grad = grad
    for group, (settings, _) in zip(groups, updates, strict=True):
        if group.keys() != settings.keys() or any(
            group[key] is not value for key, value in settings.items() if key != "params"
        ):
            raise RuntimeError(
                f"gradwire: {type(optimizer).__name__} changes its param_groups in a step, which a step of a part of "
                "its parameters must not: train without overlap_forward"
            )
