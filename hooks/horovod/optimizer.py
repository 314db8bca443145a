"""DistributedOptimizer: the user's optimizer, whose steps use the gradients of all ranks."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compress.feedback.base import RESIDUAL
from ..comm.untraced import untraced
from ..core.names import plain_names, renamed
from ..core.optimizer_checks import known_problem
from .compression import Compression, codec_of
from .functions import allgather_object
from .gradients.bucketing import GradientReducer, Options
from .gradients.residuals import check_residuals, vectors_of, without_vectors
from .process_sets import ProcessSet, global_process_set
from .runtime.arithmetic import number
from .runtime.context import world
from .runtime.handles import allreduce_operation, key_of, reduction
from .runtime.operations import Adasum, Average, ResidualMean

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
        sparse_as_dense: make sparse gradients dense; otherwise the ranks' rows are gathered.
        process_set: the ranks that take part; others step alone. It must be registered before training begins.

    Warns where optimizer and codec are known not to go together.

    Raises:
        ValueError: an argument cannot work; the message says which and why.
    """
    world()
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
    named = _names(optimizer, named_parameters)
    options = Options(
        compression, backward_passes_per_step, op, gradient_predivide_factor, _groups(groups, named), sparse_as_dense,
        process_set, isinstance(optimizer, torch.optim.SparseAdam),
    )  # fmt: skip
    if options.only_sparse and sparse_as_dense:
        raise ValueError("torch.optim.SparseAdam takes no dense gradients: leave sparse_as_dense=False")
    return _wrap(optimizer, [name for name, _ in named], options)


def _check_passes(passes: Any) -> None:
    if isinstance(passes, bool) or not isinstance(passes, int) or passes <= 0:
        raise ValueError(f"backward_passes_per_step={passes!r}: must be > 0")


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _names(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None) -> list[tuple[str, Tensor]]:
    """The optimizer's parameters in its order, with their names."""
    if named is None:
        groups = enumerate(optimizer.param_groups)
        return [(f"noname.{i}.{j}", p) for i, group in groups for j, p in enumerate(group["params"])]
    pairs = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    name_of = {p: name for name, p in pairs}
    parameters = _parameters(optimizer)
    missing = [tuple(p.shape) for p in parameters if p not in name_of]
    if missing:
        shapes = ", ".join(map(str, missing))
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: those of shape "
            f"{shapes}. Pass the names of all parameters of the optimizer"
        )
    plain = plain_names(names)
    return [(plain[name_of[p]], p) for p in parameters]


def _groups(groups: Any, named: list[tuple[str, Tensor]]) -> list[list[int]] | None:
    """Positions of each group's parameters."""
    problem = f"groups={groups!r}: " if isinstance(groups, int | str | float) else "groups: "
    problem += "groups should be a non-negative integer or a list of lists of the optimizer's parameters, each in one"
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise ValueError(problem)
        chosen = [i for i, (_, p) in enumerate(named) if p.requires_grad]
        share, more = divmod(len(chosen), groups) if groups else (0, 0)
        starts = [share * i + min(i, more) for i in range(groups + 1)]
        return [chosen[a:b] for a, b in itertools.pairwise(starts) if b > a] or None
    position = {p: i for i, (_, p) in enumerate(named)}
    if not isinstance(groups, list | tuple) or not all(isinstance(group, list | tuple) for group in groups):
        raise ValueError(problem)
    flat = [p for group in groups for p in group]
    if any(not isinstance(p, Tensor) or p not in position for p in flat) or len(set(flat)) < len(flat):
        raise ValueError(problem)
    return [[position[p] for p in group] for group in groups]


def _wrap(optimizer: torch.optim.Optimizer, names: list[str], options: Options) -> Any:
    base = type(optimizer)
    kind = type(base.__name__, (_Distributed, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    new: Any = object.__new__(kind)
    # Everything is shared but what a scheduler has put over the old one's step.
    new.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key not in ("step", *_SHARED)})
    new._wrapped = optimizer
    new._names = names
    new._should_synchronize, new._warned = True, False
    new._reducer = GradientReducer([] if _is_adasum(options) else _named(new), options)
    return new


def _named(optimizer: Any) -> list[tuple[str, Tensor]]:
    optimizer._take_in()
    return list(zip(optimizer._names, _parameters(optimizer), strict=True))


def _is_adasum(options: Options) -> bool:
    return options.op == Adasum


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
        """The wrapped optimizer's. A GradScaler finds here what it unscales, which has to be reduced before."""
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
        return _is_adasum(self._reducer.options) or self._unscales

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
        if _is_adasum(self._reducer.options):
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
        if _is_adasum(reducer.options):
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
        """This rank's own step, which is none where a scaler says that its gradients have overflowed."""
        told = self.__dict__
        if "found_inf" not in told or self._unscales:
            return super().step(*args, **kwargs)
        scale, overflow = told["grad_scale"], told["found_inf"]
        if float(overflow):
            return None
        grads = [p.grad for p in _parameters(self) if p.grad is not None and scale is not None]
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
            deltas = (
                world().engine.submit(allreduce_operation(key, sent, Adasum, 1.0, 1.0, sent, contiguous=False)).wait()
            )
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's; the new gradients are reduced one by one, with Adasum too."""
        super().add_param_group(param_group)
        self._take_in()

    def _take_in(self) -> None:
        """Reduce the gradients of groups that were added here, or to the wrapped optimizer."""
        if sum(len(group["params"]) for group in self.param_groups) > len(self._names):
            new = _names(self, None)[len(self._names) :]
            self._names = [*self._names, *(name for name, _ in new)]
            if not _is_adasum(self._reducer.options):
                self._reducer.add(new)

    # -- what survives -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's; with a codec, also what this rank's compression has left out. An optimizer that knows
        nothing of that can load it. To go on exactly, save one for each rank; `PowerSGD` by "factors" goes on with
        nothing lost, but with other bits."""
        state = super().state_dict()
        if self._reducer.state is not None:
            here = world()
            self._reducer.wait()
            state[ENTRY] = self._reducer.state.state_dict(here.rank, here.size)
        return state

    def consolidated_state_dict(self) -> dict[str, Any]:
        """As `state_dict`, with the mean over the ranks of what compression has left out: it loads on any number of
        ranks, and nothing is lost. A collective of the process set; other ranks have left nothing out."""
        state, compression = self.state_dict(), self._reducer.state
        state["state"] = copy.deepcopy(state["state"])  # torch's shows the tensors that the next step changes
        if compression is None:
            return state
        own = state[ENTRY]
        if self._reducer.takes_part():
            process_set = self._reducer.options.process_set
            vectors = vectors_of(own)
            # Not every rank need have some: a checkpoint may have been loaded on some ranks only.
            shapes = {(v, name): tuple(x.shape) for v, found in vectors.items() for name, x in found.items()}
            told = allgather_object(shapes, self._reducer.talk, process_set)
            every = {place: shape for found in told for place, shape in found.items()}
            devices = {name: p.device for name, p in _named(self)}
            pending = []  # all in flight before the first is waited for
            for (vector, name), shape in sorted(every.items()):
                mine = vectors[vector].get(name)
                if mine is None:
                    mine = torch.zeros(shape, dtype=torch.float32, device=devices.get(name))
                key = key_of(vector, name, process_set)
                mean = world().engine.submit(ResidualMean(*key, mine, compression, name, vector))
                pending.append((vectors[vector], name, mean))
            for found, name, mean in pending:
                found[name] = mean.wait()[0]
        own["rank"] = own["world_size"] = -1
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, of this class or of the plain optimizer. What was under way is forgotten.

        Residuals of another rank are left out, with a warning, and all of them where this optimizer does not compress;
        consolidated ones load everywhere.

        Raises:
            ValueError: it has residuals of another compression, or of other parameters. Nothing has changed then.
        """
        own = self._checked(state_dict.get(ENTRY))
        self._reducer.reset()
        super().load_state_dict({key: value for key, value in state_dict.items() if key != ENTRY})
        if self._reducer.state is not None:
            self._load_residuals(own)

    def _checked(self, own: dict[str, Any] | None) -> dict[str, Any] | None:
        """The part of a checkpoint from which this rank's compression can go on."""
        state, here = self._reducer.state, world()
        if state is None and own is not None and any(vectors_of(own).values()):
            warnings.warn(
                f"what {own['compression']} had left out is in the checkpoint and is dropped, as this optimizer does "
                "not compress: pass compression= as it was to go on with it",
                stacklevel=3,
            )
        if state is None or own is None:
            return None
        if not state.compression.goes_on_from(own["compression"]):
            raise ValueError(
                f"the checkpoint was compressed by {own['compression']}, not by {state.compression}: pass compression= "
                "as it was when the checkpoint was saved"
            )
        if own["rank"] not in (-1, here.rank) or own["world_size"] not in (-1, here.size):
            problem = (
                f"what compression had left out on rank {own['rank']} of {own['world_size']} does not belong to rank "
                f"{here.rank} of {here.size}"
            )
            remedy = "save optimizer.state_dict() on every rank, or optimizer.consolidated_state_dict()"
            if not state.compression.strategy.only_residual:  # the ranks' estimates would differ for ever
                raise ValueError(f"{problem}, and {state.compression.strategy} cannot go on without: {remedy}")
            warnings.warn(f"{problem} and is dropped: {remedy}", stacklevel=3)
            return without_vectors(own)
        shapes = {name: tuple(p.shape) for name, p in _named(self)}
        vectors = {vector: renamed(found, shapes) for vector, found in vectors_of(own).items()}
        for found in vectors.values():
            check_residuals(found, shapes)
        return {**own, "residuals": vectors.pop(RESIDUAL), **({"vectors": vectors} if vectors else {})}

    def _load_residuals(self, own: dict[str, Any] | None) -> None:
        state = self._reducer.state
        assert state is not None
        if own is None:
            state.reset()
        else:
            state.load_state_dict(own)

    def _shared_compression(self) -> dict[str, Any] | None:
        """The part of this rank's compression that `broadcast_optimizer_state` hands to the other ranks: counters.

        Residuals only if they are consolidated, and so everybody's, and no step has been made with them.
        """
        state = self._reducer.state
        if state is None:
            return None
        here = world()
        own = state.state_dict(here.rank, here.size)
        if not state.consolidated:
            own = {**without_vectors(own), "residuals": None}
        return own

    def _check_broadcast(self, own: dict[str, Any] | None, fresh: Sequence[bool | None]) -> None:
        """Raises ValueError, on every rank, if some ranks have feedback that the root cannot give to the others.

        Args:
            own: the root's `_shared_compression`.
            fresh: `_is_fresh` of each rank.
        """
        state = self._reducer.state
        if state is None or own is None or state.compression.strategy.only_residual:
            return
        if own["residuals"] is None and len({each for each in fresh if each is not None}) > 1:
            raise ValueError(
                f"{state.compression.strategy} has trained on some ranks and not on others, whose estimates would "
                "differ: save optimizer.consolidated_state_dict(), made on every rank, for one to load; or "
                "optimizer.state_dict() on every rank"
            )

    @property
    def _is_fresh(self) -> bool | None:
        """True if this rank's compression has kept nothing yet; None if it does not compress."""
        state = self._reducer.state
        return None if state is None or not self._reducer.takes_part() else not state.feedback

    def _follow_broadcast(self, own: dict[str, Any] | None) -> None:
        state = self._reducer.state
        if state is None or own is None:
            return
        if own["residuals"] is None:
            is_fresh = state.compression.keeps and not state.feedback
            if own["steps"] and is_fresh and self._reducer.options.process_set.included():
                warnings.warn(
                    f"rank {own['rank']} has trained before, and has nothing of what compression had left out on rank "
                    f"{world().rank}, which goes on without: save optimizer.consolidated_state_dict(), made on every "
                    "rank, for one to load; or optimizer.state_dict() on every rank",
                    stacklevel=3,
                )
            state.follow_scale(own["scale"] or 1.0)
            vectors = state.feedback.everything()
            own |= {"residuals": vectors.pop(RESIDUAL, {}), "vectors": vectors}
        state.load_state_dict(own)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self._take_in()
        reducer = self._reducer
        residuals = None
        if reducer.state is not None:
            reducer.wait()
            residuals = reducer.state.state_dict(-1, -1)
        arguments = (type(self._wrapped), self._wrapped.__getstate__(), self._names, reducer.options, residuals)
        return _restore, arguments
