"""DistributedOptimizer: the user's optimizer, whose steps use the gradients of all ranks."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..comm.between_steps import between_steps
from ..comm.untraced import untraced
from ..training.autograd_end import in_backward
from ..training.loaded_values import parameters_of
from ..training.optimizer_checks import known_problem
from .compression import Compression, codec_of
from .gradients import checkpoint
from .gradients.arguments import Options, group_positions, name_parameters
from .gradients.bucketing import GradientReducer
from .gradients.residuals import CompressionState
from .process_sets import ProcessSet, global_process_set
from .runtime.arithmetic import number
from .runtime.context import engine
from .runtime.handles import allreduce_operation, key_of, reduction
from .runtime.operations import Adasum, Average

#: Key of the residuals in a state_dict.
ENTRY = "gradwire"
#: Attributes that stay the wrapped optimizer's, which may replace them, as loading does.
_SHARED = ("state", "param_groups")


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none, backward_passes_per_step: int = 1, op: int = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None, sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """An optimizer like `optimizer`, over the same parameters and state, that steps with the average gradient.

    It is an instance of the optimizer's class. Gradients are reduced as backward makes them; `step` waits for them,
    and those of parameters that had none on this rank count as zeros. Parameters that require a gradient only later on
    need a new one, of the same optimizer: `step` says so.

    Args:
        optimizer: any but LBFGS. Its state and its `param_groups` are shared, so that schedulers made for it go on.
        named_parameters: typically `model.named_parameters()`: by these names ranks match gradients, and residuals are
            kept. Without, parameters are numbered.
        compression: `Compression.none`, `.fp16`, `.bf16`, a codec, such as `Compression.topk(density=0.01)`, or your
            own compressor. What a codec leaves out goes into a later step, and is in `state_dict()`.
        backward_passes_per_step: so many gradients are summed on each rank before the sum is averaged.
        op: `Average`, `Sum`, `Min`, `Max`, `Product`; with `Adasum` each rank makes its own step, and the steps, not
            the gradients, are combined.
        gradient_predivide_factor: f: gradients are divided by f before they are added up, and by size/f after.
        num_groups: deprecated: `groups`.
        groups: lists of parameters whose gradients travel together; or into how many lists to divide them.
        sparse_as_dense: make sparse gradients dense; otherwise the ranks' rows are gathered, and so are those for
            SparseAdam, which takes nothing else.
        process_set: the ranks that take part; others step alone. It must be registered before training begins.

    Warns where optimizer and codec are known not to go together.

    Raises:
        ValueError: an argument cannot work; the message says which and why.
    """
    engine()
    if isinstance(optimizer, _Distributed):
        raise ValueError("this is a DistributedOptimizer already: pass the optimizer it was made from")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "torch.optim.LBFGS evaluates its closure several times in a step, on gradients of one rank: use another "
            "optimizer"
        )
    if not hasattr(optimizer, "param_groups"):  # what wraps an optimizer has them too
        raise ValueError(f"DistributedOptimizer takes a torch.optim.Optimizer, not a {type(optimizer).__name__}")
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set={process_set!r}: expected what add_process_set() returns")
    op = reduction(op, None)
    gradient_predivide_factor = number("gradient_predivide_factor", gradient_predivide_factor)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average: leave it at 1.0")
    if not gradient_predivide_factor > 0:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor!r}: expected a positive number")
    if op == Adasum and codec_of(compression) is not None:
        raise ValueError(f"op=Adasum cannot be combined with {compression}: use Compression.fp16, .bf16 or none")
    _check_passes(backward_passes_per_step)
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    codec = codec_of(compression)
    problem = None
    if codec is not None:
        codec.strategy.check_optimizer(optimizer)
        problem = known_problem(optimizer, codec.codec, codec.feedback and codec.strategy.only_residual)
    if problem is not None:
        warnings.warn(problem, stacklevel=2)
    named = name_parameters(optimizer, named_parameters)
    only_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    options = Options(
        compression, backward_passes_per_step, op, gradient_predivide_factor, group_positions(groups, named),
        sparse_as_dense and not only_sparse, process_set, only_sparse,
    )  # fmt: skip
    return _wrap(optimizer, [name for name, _ in named], options)


def _check_passes(passes: Any) -> None:
    if isinstance(passes, bool) or not isinstance(passes, int) or passes <= 0:
        raise ValueError(f"backward_passes_per_step={passes!r}: must be > 0")


def _wrap(optimizer: torch.optim.Optimizer, names: list[str], options: Options) -> Any:
    base = type(optimizer)
    kind = type(base.__name__, (_Distributed, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    new: Any = object.__new__(kind)
    # Everything is shared but what a scheduler has put over the old one's step.
    new.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key not in ("step", *_SHARED)})
    new._wrapped = optimizer
    new._names = names
    new._should_synchronize, new._warned = True, False
    new._reducer = GradientReducer([] if options.op == Adasum else _named(new), options)
    return new


def _named(optimizer: Any) -> list[tuple[str, Tensor]]:
    optimizer._take_in()
    return list(zip(optimizer._names, parameters_of(optimizer), strict=True))


def _restore(base: type, state: dict[str, Any], names: list[str], options: Options, residuals: Any) -> Any:
    """Unpickle: `__reduce_ex__` in reverse."""
    optimizer: Any = object.__new__(base)
    optimizer.__setstate__(state)
    new = _wrap(optimizer, names, options)
    if residuals is not None:
        new._reducer.state.load_state_dict(residuals)
        new._reducer.state.consolidated = False
    return new


class _Distributed(torch.optim.Optimizer):
    """The class that `DistributedOptimizer` puts before the user's."""

    _wrapped: torch.optim.Optimizer
    _names: list[str]
    _reducer: GradientReducer
    _in_step = in_backward
    _should_synchronize: bool
    _warned: bool

    @property
    def state(self) -> Any:
        """The wrapped optimizer's."""
        return self._wrapped.state

    @state.setter
    def state(self, state: Any) -> None:
        self._wrapped.state = state

    @property
    def param_groups(self) -> Any:
        """The wrapped optimizer's. A GradScaler reads them to unscale gradients, which are reduced before."""
        if "_reducer" in self.__dict__:  # not while this one is made
            self._reducer.reduce_before_unscaling(self)
        return self._wrapped.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: Any) -> None:
        self._wrapped.param_groups = param_groups

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if `step` unscales gradients itself. A GradScaler's step asks this first. With Adasum each rank has an
        overflow of its own, and all must make the step."""
        if "_reducer" in self.__dict__:
            self._reducer.unscaling.look(self)
            self._reducer.reduce_before_unscaling(self)
        return self._reducer.options.op == Adasum or self._unscales

    @property
    def _unscales(self) -> bool:
        """True if the user's class does, as fused optimizers do."""
        return bool(getattr(self._wrapped, "_step_supports_amp_scaling", False))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take state that was loaded."""
        for name in _SHARED:
            if name in state:
                setattr(self, name, state[name])
        super().__setstate__(state)
        for name in _SHARED:
            self.__dict__.pop(name, None)

    @property
    def backward_passes_per_step(self) -> int:
        """Number of gradients that are summed before a reduction."""
        return self._reducer.options.backward_passes_per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum so many gradients before a reduction, from the next step on: not in one that backward has begun."""
        _check_passes(passes)
        self._reducer.set_passes(passes)

    def use_grad_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Reduce the gradients before this scaler unscales them, in its `step` or `unscale_`, so that neither
        `synchronize` nor `skip_synchronize` is needed. A scaler that was made before the first backward pass is found
        without this.

        With a codec that keeps residuals, these follow the scaler's scale, and those of steps that it skips because of
        an overflow are put back, also where it was synchronized several times. Not for a copy of this optimizer, which
        has to be told of its own scaler.

        Raises:
            TypeError: it is no GradScaler.
        """
        self._reducer.use_scaler(scaler)

    @untraced
    def synchronize(self) -> None:
        """Wait until all gradients are reduced, for clipping or unscaling; then step inside `skip_synchronize()`. A
        collective: each call reduces what the gradients are then."""
        self._take_in()
        self._reducer.synchronize()
        self._reducer.by_hand = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` takes the gradients as they are, after `synchronize()`.

        Raises:
            AssertionError: with op=Adasum, which combines the steps.
        """
        if self._reducer.options.op == Adasum:
            raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    @untraced
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's step with the reduced gradients. With a closure, those that it makes are reduced."""
        self._take_in()
        reducer = self._reducer
        # A scheduler that was made for the wrapped optimizer asks it whether it has stepped.
        self._wrapped._opt_called = True  # type: ignore[attr-defined]
        positional = args if closure is None else (closure, *args)
        if reducer.options.op == Adasum:
            return self._adasum_step(lambda: self._unscaled_step(*positional, **kwargs))
        if self._should_synchronize and not reducer.is_unscaled(self):
            if reducer.synchronized and not reducer.started and not self._warned:
                self._warned = True
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): put it inside that context.",
                    stacklevel=4,
                )
            if closure is None:
                reducer.synchronize_once()
            else:
                positional = (self._with_reduction(closure), *args)
        result = super().step(*positional, **kwargs)
        reducer.applied()
        return result

    # The hooks that users register on steps run in the user's class; torch must not wrap this one too.
    step.hooked = True  # type: ignore[attr-defined]

    def _unscaled_step(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's own step; none if a scaler says that its gradients have overflowed."""
        told = self.__dict__
        if "found_inf" not in told or self._unscales:
            return super().step(*args, **kwargs)
        scale, overflow = told["grad_scale"], told["found_inf"]
        if float(overflow):
            return None
        grads = [p.grad for p in parameters_of(self) if p.grad is not None and scale is not None]
        for grad in grads:
            grad.div_(scale.to(grad.device))
        told["grad_scale"] = told["found_inf"] = None  # which other optimizers refuse
        try:
            return super().step(*args, **kwargs)
        finally:
            told["grad_scale"], told["found_inf"] = scale, overflow

    def _with_reduction(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            loss = closure()
            self._reducer.synchronize()
            return loss

        return reduced

    def _adasum_step(self, step: Callable[[], Any]) -> Any:
        options = self._reducer.options
        if not self._reducer.takes_part():
            return step()
        # By name: the ranks' optimizers may have them in another order.
        named = sorted(((name, p) for name, p in _named(self) if p.requires_grad), key=lambda pair: pair[0])
        before = [p.detach().clone() for _, p in named]
        result = step()
        with torch.no_grad():
            pairs = [options.compression.compress(p - old) for (_, p), old in zip(named, before, strict=True)]
            key = key_of("gradient.adasum", named[0][0], options.process_set)
            sent = [tensor for tensor, _ in pairs]
            operation = allreduce_operation(key, sent, Adasum, in_place=True, contiguous=False)
            deltas = engine().submit(operation).wait()
            for (_, p), old, delta, (_, context) in zip(named, before, deltas, pairs, strict=True):
                p.copy_(old + options.compression.decompress(delta, context))
        return result

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's.

        Raises:
            AssertionError: gradients are under way, which this would drop on one rank.
        """
        if self._reducer.started:
            self._reducer.check_unchanged()
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)

    @between_steps
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's; the new gradients are reduced one by one, with Adasum too."""
        super().add_param_group(param_group)
        self._take_in()

    def _take_in(self) -> None:
        """Reduce the gradients of groups that were added here, or to the wrapped optimizer."""
        if sum(len(group["params"]) for group in self.param_groups) > len(self._names):
            new = name_parameters(self, None)[len(self._names) :]
            self._names = [*self._names, *(name for name, _ in new)]
            if self._reducer.options.op != Adasum:
                self._reducer.add(new)

    # -- what survives -----------------------------------------------------------------------------------------------

    @between_steps
    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's; with a codec, also what this rank's compression has left out. An optimizer that knows
        nothing of that can load it. To go on exactly, save one for each rank; `PowerSGD` by "factors" goes on with
        nothing lost, but with other bits. Saving changes nothing."""
        state = super().state_dict()
        if self._reducer.state is not None:
            here = engine()
            self._reducer.wait()
            state[ENTRY] = self._reducer.state.state_dict(here.rank, here.size)
        return state

    @between_steps
    def consolidated_state_dict(self) -> dict[str, Any]:
        """As `state_dict`, with the mean over the ranks of what compression has left out: it loads on any number of
        ranks, and nothing is lost. A collective of the process set; other ranks have left nothing out."""
        state = self.state_dict()
        state["state"] = copy.deepcopy(state["state"])  # torch's shows the tensors that the next step changes
        if self._reducer.state is None:
            return state
        own = state[ENTRY]
        own.pop("owned", None)
        if self._reducer.takes_part():
            self._take_in()
            self._reducer.average_state(own)
        own["rank"] = own["world_size"] = -1
        return state

    @between_steps
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, of this class or of the plain optimizer. What was under way is forgotten.

        Residuals of another rank are left out, with a warning, and all of them where this optimizer does not compress;
        consolidated ones load everywhere.

        Raises:
            ValueError: it has residuals of another compression, or of other parameters. Nothing has changed then.
        """
        own = checkpoint.checked(self._reducer.state, state_dict.get(ENTRY), dict(_named(self)))
        self._reducer.reset()
        super().load_state_dict({key: value for key, value in state_dict.items() if key != ENTRY})
        if self._reducer.state is not None:
            self._reducer.state.load_state_dict(own or checkpoint.EMPTY)

    @property
    def _compression_state(self) -> CompressionState | None:
        return self._reducer.state

    @between_steps
    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self._take_in()
        reducer = self._reducer
        residuals = None
        if reducer.state is not None:
            reducer.wait()
            residuals = reducer.state.state_dict(-1, -1)
        arguments = (type(self._wrapped), self._wrapped.__getstate__(), self._names, reducer.options, residuals)
        return _restore, arguments
