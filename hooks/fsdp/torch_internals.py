"""FSDP2's *parameter groups*, each reduced as one: the layout of their shards, and FSDP's treatment of them.

FSDP casts, divides and accumulates right after the hook returns; `Shards` can do the same later. All code that depends
on FSDP's private attributes is in this file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...compress.codec import DTYPES
from ...compress.feedback.base import Feedback
from ...compress.formats.layout import Layout, Slot
from ..comm.untraced import untraced
from ..core.bucket import Bucket
from ..core.options import check_dtypes
from ..core.sparse_gradient import sparse_names
from ..training.names import names_of, unwrapped

#: The first version of torch that has each hook.
NEEDS = {"set_all_reduce_hook": "2.7", "set_custom_reduce_scatter": "2.9"}


def fsdp_modules(model: nn.Module, hook: str) -> list[tuple[str, Any]]:
    """The model's FSDP modules with their names, one for each of FSDP's states.

    Args:
        hook: the method by which the hook is set.

    Raises:
        RuntimeError: this torch has no such hook.
        TypeError: the model has no FSDP module.
    """
    if not hasattr(FSDPModule, hook):
        raise RuntimeError(
            f"compress_fsdp needs FSDPModule.{hook}, which torch has from {NEEDS[hook]} on; this is {torch.__version__}"
        )
    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            found.setdefault(id(module._get_fsdp_state()), (name, module))
    if not found:
        raise TypeError(
            f"model is a {type(model).__name__} without an FSDP module: call "
            "torch.distributed.fsdp.fully_shard(model, mesh=…) first"
        )
    return list(found.values())


def parameter_groups(module: Any) -> list[Any]:
    """FSDP's parameter groups of a module; none if other modules have all of its parameters."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.12
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def check_group(name: str, groups: list[Any]) -> None:
    """Raise ValueError for a module whose gradients the hooks do not see, or see too late."""
    where = f"module {name!r}" if name else "the model"
    for group in groups:
        mesh = group.mesh_info
        if not hasattr(mesh, "shard_mesh_size"):
            raise ValueError(f"{where} is not sharded: for replicas alone call fully_shard on a mesh of size 1")
        if hasattr(mesh, "replicate_mesh_size"):
            raise ValueError(
                f"{where} was sharded on a mesh of two dimensions, so that FSDP sums over the replicas by itself, "
                'before the hook: call fully_shard(…, mesh=mesh["shard"]) and compress_fsdp(…, mesh=mesh["replicate"])'
            )


def every_shards(model: nn.Module, hook: str, replicas: int = 1) -> list[Shards]:
    """All of the model's parameter groups, for a hook that is set by this method.

    Raises:
        TypeError, ValueError, RuntimeError: the model cannot be compressed.
    """
    names, every, index = names_of(model), list[Shards](), 0
    for module_name, module in fsdp_modules(model, hook):
        groups = parameter_groups(module)
        check_group(module_name, groups)
        for group in groups:
            every.append(Shards(index, unwrapped(module_name), group, names, replicas))
            index += bool(every[-1].parameters)
    if not index:
        raise ValueError("none of the model's FSDP modules has a parameter that requires gradients")
    return every


def find_shards(
    model: nn.Module, hook: str, replicas: int, only: Container[int] | None
) -> tuple[list[Shards], list[Shards]]:
    """The model's parameter groups with gradients, for a hook that is set by this method, and its frozen ones.

    Args:
        only: the ids of FSDP's groups to take; None: all.

    Raises:
        TypeError, ValueError, RuntimeError: the model cannot be compressed.
    """
    every = every_shards(model, hook, replicas)
    mine = [shards for shards in every if only is None or id(shards.group) in only]
    found, frozen = ([s for s in mine if bool(s.parameters) == trained] for trained in (True, False))
    known = {id(p.sharded_param) for shards in every for p in shards.parameters.values()}
    named = dict(model.named_parameters())
    by_rows = sparse_names(model, named)  # left to `reduce_rows`
    others = [n for n, p in named.items() if p.requires_grad and id(p) not in known and n not in by_rows]
    if others:
        warnings.warn(
            f"parameter {others[0]!r} is in no FSDP module: neither FSDP nor gradwire reduces its gradient: "
            "call fully_shard on the whole model too",
            stacklevel=7,
        )
    check_dtypes({name: p.sharded_param for shards in found for name, p in shards.parameters.items()})
    for shards in found:
        if shards.dtype not in DTYPES:
            raise TypeError(f"module {shards.module!r} reduces {shards.dtype}: use float32, float16 or bfloat16")
    return found, frozen


class Shards:
    """One parameter group: this rank's shards of its gradients, flat as FSDP passes them.

    Args:
        index: identifies the group among those with gradients, alike on all ranks.
        module: the name of FSDP's module.
        group: FSDP's parameter group.
        names: the parameters' names by their id.
        replicas: number of ranks that have the same shards.

    Attributes:
        names: the names of all of its parameters, of frozen ones too.
        slots: the places of all parameters' shards, each padded to the rows of the longest.
        dtype: the widest dtype that FSDP passes.
        used: names of the parameters that FSDP reduces now.
    """

    def __init__(self, index: int, module: str, group: Any, names: dict[int, str], replicas: int) -> None:
        self.index, self.module, self.group, self._replicas = index, module, group, replicas
        self.rank, self.size = group.mesh_info.shard_mesh_rank, group.mesh_info.shard_mesh_size
        self.parameters: dict[str, Any] = {}
        self.names = [names[id(parameter.sharded_param)] for parameter in group.fsdp_params]
        slots, start = [], 0
        for parameter in reduce_order(group):
            if parameter.sharded_param.requires_grad:
                name = names[id(parameter.sharded_param)]
                shape = tuple(parameter.padded_sharded_param_size)
                slot = Slot(name, start, shape, torch.empty(shape, device="meta").stride())
                slots.append(slot)
                self.parameters[name] = parameter
                start += slot.numel
        self.slots: Layout = tuple(slots)
        self.numel = start
        self.dtype = reduce_dtype(group, list(self.parameters.values())) if self.parameters else torch.float32
        self.used: frozenset[str] = frozenset()
        self._bucket: Bucket | None = None
        self._buffer: Tensor | None = None
        #: Names of the parameters whose gradients are in the buffer, to be sent later.
        self.held: frozenset[str] = frozenset()
        self._undo: list[Callable[[], None]] = []
        self._ordered: list[int] | None = None  # FSDP's order of parameters, once it has been seen

    @property
    def process_group(self) -> Any:
        """The group of the ranks that have the other shards."""
        return self.group.mesh_info.shard_process_group

    @property
    def place(self) -> str:
        """This rank's place in each dimension over which the parameters are shared out, by FSDP or before it, as
        experts are. Replicas have it in common."""
        every = map(_shares, self.parameters.values())
        return "; ".join(dict.fromkeys(", ".join(f"{r} of {n}" for r, n, whole in each if not whole) for each in every))

    @property
    def copied(self) -> frozenset[str]:
        """Names of the parameters that other ranks of their own mesh have too, as those of tensor parallelism have its
        norms: their gradients are equal there, and must stay so to the bit."""
        alike = {name: any(whole and n > 1 for _, n, whole in _shares(p)) for name, p in self.parameters.items()}
        return frozenset(name for name in alike if alike[name])

    @property
    def hooked(self) -> bool:
        """True if a post-accumulate hook gets a gradient as soon as it is there."""
        parameters = self.parameters.values()
        return any(getattr(p.sharded_param, "_post_accumulate_grad_hooks", None) for p in parameters)

    @property
    def bucket_dtype(self) -> torch.dtype:
        """The compressed bucket's dtype. It is not float16, which FSDP scales: residuals are in the optimizer's
        units."""
        return torch.float32 if self.dtype == torch.float16 else self.dtype

    def attach(self, hook: Callable[[Shards, Tensor], None]) -> None:
        """Have FSDP call a hook instead of an all-reduce."""
        self.watch(hook)

        def reduce(output: Tensor) -> None:
            hook(self, output)

        self.group._all_reduce_hook = untraced(reduce)

    def replace_reduce_scatter(self, comm: Any) -> None:
        """Have FSDP call `comm` instead of its own reduce-scatter, until `detach`."""
        self.watch()
        group, before = self.group, self.group._reduce_scatter_comm
        group._reduce_scatter_comm = comm
        self._undo.append(lambda: setattr(group, "_reduce_scatter_comm", before))

    def watch(self, hook: Callable[[Shards, Tensor], None] | None = None) -> None:
        """Note the parameters whose gradients FSDP is about to reduce. FSDP leaves out those without one.

        Args:
            hook: also called in a pass that has no gradient of the group, if held gradients wait to be sent: as in
                HSDP since torch 2.15.
        """
        if self._undo:
            return
        group, known = self.group, {id(parameter): name for name, parameter in self.parameters.items()}
        post_backward, reset = group.post_backward, getattr(group, "_reset_iter_state", None)

        late, ordered = hook if hasattr(group, "_get_partial_reduce_grad") else None, list(self.parameters.values())

        def noted(*unused: Any) -> None:
            if group.reduce_grads:
                self._check_order(ordered)
                having = [parameter for parameter in group.fsdp_params if _has_gradient(group, parameter)]
                fresh = [unwrapped(p._param_fqn) for p in having if id(p) not in known]
                if fresh:
                    raise RuntimeError(
                        f"gradwire: parameter {fresh[0]!r} did not require gradients when compress_fsdp was called, "
                        "and does now: call compress_fsdp again, on every rank, when that changes"
                    )
                self.used = frozenset(known[id(parameter)] for parameter in having)
            post_backward(*unused)
            if late is not None and self.held and group.reduce_grads and group.all_reduce_grads and not self.used:
                late(self, torch.empty(0, dtype=self.dtype, device=group.device))

        @untraced
        def discarded() -> None:
            self.held = frozenset()
            assert reset is not None
            reset()

        group.post_backward = untraced(noted)
        self._undo = [lambda: delattr(group, "post_backward")]
        if reset is not None:
            group._reset_iter_state = discarded
            self._undo.append(lambda: delattr(group, "_reset_iter_state"))

    def _check_order(self, expected: list[Any]) -> None:
        """Raise RuntimeError if FSDP's order of parameters is another one."""
        indices = getattr(self.group, "_reduce_scatter_param_indices", None)  # made before the first forward pass
        if indices is not self._ordered:
            known, every = set(map(id, expected)), self.group.fsdp_params
            if [id(every[i]) for i in indices or () if id(every[i]) in known] != list(map(id, expected)):
                raise RuntimeError(
                    f"gradwire: FSDP reduces the gradients of module {self.module!r} in another order than it would "
                    "have when compress_fsdp was called, as their grad_dtype has changed: set grad_dtype before"
                )
            self._ordered = indices

    def detach(self, hook: Callable[[Tensor], None] | None) -> None:
        """Remove all of it, and set another hook, or none."""
        while self._undo:
            self._undo.pop()()
        self.group._all_reduce_hook = hook

    # -- what goes in ------------------------------------------------------------------------------------------------

    def hold(self, output: Tensor) -> None:
        """Add FSDP's gradients to the buffer, to be sent later."""
        buffer, complete = self._own(), self.used == self.parameters.keys()
        scale = self._scale(output.dtype)
        if not self.held and not complete:
            buffer.zero_()
        if complete and scale == 1.0 and output.dtype == buffer.dtype:
            (buffer.add_ if self.held else buffer.copy_)(output)
        else:
            for part, slot in self._parts(output):
                into = slot.flat(buffer)
                part = part.to(buffer.dtype)
                if self.held:
                    into.add_(part, alpha=scale)
                else:
                    torch.mul(part, scale, out=into)
        self.held |= self.used

    def submit(self, output: Tensor, in_place: bool) -> Tensor:
        """The gradients to be reduced, flat in `slots`, in the optimizer's units: `output` itself if possible, else the
        buffer. Sets `held` to the names of the parameters in them.

        Args:
            in_place: the mean may be written to `output` after FSDP has gone on.
        """
        direct = self.used == self.parameters.keys() and not self.held and output.dtype == self.bucket_dtype
        if direct and in_place and post_divide(self.group, output.dtype) == 1.0:
            self.held = self.used
            if (scale := self._scale(output.dtype)) != 1.0:
                output.mul_(scale)
            return output
        self.hold(output)
        return self._own()

    @property
    def can_wait(self) -> bool:
        """True if FSDP uses its output as it lies, so that it may be written later: it accumulates and moves nothing,
        and casts nothing, as it may copy the rest then."""
        return all(
            parameter.sharded_param.grad is None
            and not parameter.offload_to_cpu
            and grad_dtype(parameter) in (None, self.dtype)
            for parameter in self.parameters.values()
        )

    def check_hooks(self) -> None:
        """Raise RuntimeError if a hook gets gradients before the mean is there."""
        for name, parameter in self.parameters.items():
            if getattr(parameter.sharded_param, "_post_accumulate_grad_hooks", None):
                raise RuntimeError(
                    f"parameter {name!r} has a post-accumulate-grad hook, which over Gloo would see its gradient "
                    "before the mean has arrived, at the end of backward: let the optimizer step after backward"
                )

    def bucket(self, like: Tensor, excluded: frozenset[str], strategy: Feedback) -> Bucket:
        """The bucket of these gradients, made once."""
        parameters = [parameter.sharded_param for parameter in self.parameters.values()]
        bucket = self._bucket
        if bucket is None or bucket.dtype != like.dtype or bucket.device != like.device:
            bucket = self._bucket = Bucket(self.index, parameters, self.slots, excluded, like, strategy)
        return bucket

    @property
    def made_bucket(self) -> Bucket | None:
        """The bucket, if it has been made."""
        return self._bucket

    # -- what comes out ----------------------------------------------------------------------------------------------

    def put_back(self, output: Tensor) -> None:
        """Copy the mean from the buffer to FSDP's output, which FSDP will divide."""
        buffer, divide = self._own(), post_divide(self.group, output.dtype)
        for part, slot in self._parts(output):
            torch.mul(slot.flat(buffer), divide, out=part) if divide != 1.0 else part.copy_(slot.flat(buffer))
        self.held = frozenset()

    def deliver(self, names: frozenset[str]) -> None:
        """Add the mean from the buffer to the gradients, where FSDP has left zeros."""
        buffer = self._own()
        for slot in self.slots:
            if slot.name in names:
                parameter = self.parameters[slot.name]
                mean = self.local(slot.name, slot.view(buffer))
                grad = parameter.sharded_param.grad
                if grad is None:  # cleared since
                    mean = mean.to(grad_dtype(parameter) or mean.dtype, copy=True)
                    parameter.sharded_param.grad = parameter.to_sharded_dtensor(mean)
                else:
                    local = grad._local_tensor if isinstance(grad, DTensor) else grad
                    local.add_(mean.to(local.device, local.dtype))

    def local(self, name: str, padded: Tensor) -> Tensor:
        """A shard without its padding."""
        shape = self.parameters[name].sharded_size
        return padded if padded.shape == shape else padded.narrow(0, 0, shape[0])

    def padded(self, name: str, local: Tensor) -> Tensor:
        """A shard with its padding, zeros."""
        shape = self.parameters[name].padded_sharded_param_size
        if local.shape == shape:
            return local
        result = local.new_zeros(shape)
        result.narrow(0, 0, local.shape[0]).copy_(local)
        return result

    def _own(self) -> Tensor:
        if self._buffer is None or self._buffer.dtype != self.bucket_dtype:
            self._buffer = torch.zeros(self.numel, dtype=self.bucket_dtype, device=self.group.device)
        return self._buffer

    def _parts(self, output: Tensor) -> Iterator[tuple[Tensor, Slot]]:
        """FSDP's gradients, parameter by parameter."""
        start = 0
        for slot in self.slots:
            if slot.name in self.used:
                yield output[start : start + slot.numel], slot
                start += slot.numel
        if start != output.numel():
            raise RuntimeError(
                f"gradwire: FSDP has reduced {output.numel()} elements of module {self.module!r}, and its parameters "
                f"with a gradient have {start}: this version of torch, {torch.__version__}, is not known"
            )

    def _scale(self, dtype: torch.dtype) -> float:
        """The factor from FSDP's gradients in this dtype to the optimizer's, before the mean over the replicas. With a
        divide factor of the user's, the optimizer gets the sum over the replicas."""
        replicas = 1.0 if self.group.gradient_divide_factor is None else self._replicas
        return replicas / post_divide(self.group, dtype)


def _shares(parameter: Any) -> list[tuple[int, int, bool]]:
    """Of each dimension of a parameter's mesh: this rank's place, its size, and True if all there have the same."""
    mesh, placements = parameter.sharded_param.device_mesh, parameter.sharded_param.placements
    wholes = (placement.is_replicate() for placement in placements)
    return list(zip(mesh.get_coordinate(), mesh.shape, wholes, strict=True))


def _has_gradient(group: Any, parameter: Any) -> bool:
    """True if FSDP's `post_backward` is about to reduce the parameter's gradient."""
    if not hasattr(parameter, "_unsharded_param"):
        return False
    return (
        parameter.unsharded_accumulated_grad is not None
        or parameter.unsharded_param.grad is not None
        or (getattr(group, "reduce_scatter_unused_params", False) and parameter.unsharded_param.requires_grad)
    )


# -- FSDP's arithmetic around a reduction: dtypes, divisors, and the order of the parameters ---------------------------


def post_divide(group: Any, dtype: torch.dtype) -> float:
    """FSDP's divisor of gradients after the hook. For dtypes with less range than float32, FSDP divides before and
    after the reduction, by powers of two near the square root of the whole divisor."""
    overflows = dtype not in (torch.float32, torch.bfloat16)
    if not only_sums(group, dtype):
        return 1.0
    factor, before = divide_factor(group), 1.0
    while overflows and factor % before == 0 and factor / before > before:
        before *= 2
    return factor / before


def only_sums(group: Any, dtype: torch.dtype) -> bool:
    """True if FSDP reduces by sums, and divides by itself."""
    forced = getattr(group, "force_sum_reduction_for_comms", False) or group.device.type == "mtia"
    return forced or dtype not in (torch.float32, torch.bfloat16)


def divide_factor(group: Any) -> float:
    """FSDP's whole divisor of the sum over the shards, before and after the reduction together."""
    factor = group.gradient_divide_factor
    return float(group.mesh_info.shard_mesh_size if factor is None else factor)


def grad_dtype(parameter: Any) -> torch.dtype | None:
    """The dtype of a parameter's sharded gradients, as the optimizer sees them. Before torch 2.15 it is the
    parameter's own; since then `Tensor.grad_dtype`, if the user has set it. None: as autograd makes them."""
    sharded = parameter.sharded_param
    if not hasattr(parameter, "sharded_grad_dtype"):
        found: torch.dtype | None = sharded.dtype
    elif sharded._has_grad_dtype_override:
        found = sharded.grad_dtype
    else:
        found = parameter.sharded_grad_dtype if parameter._has_sharded_grad_dtype_override else sharded.dtype
    return found


def reduce_order(group: Any) -> list[Any]:
    """A group's parameters in the order of FSDP's reduction. Since torch 2.15 gradients of one dtype lie together."""
    if not hasattr(group, "_reduce_scatter_param_indices"):
        return list(group.fsdp_params)
    by_dtype: dict[torch.dtype | None, list[Any]] = {}
    for parameter in group.fsdp_params:
        by_dtype.setdefault(grad_dtype(parameter), []).append(parameter)
    return [parameter for alike in by_dtype.values() for parameter in alike]


def reduce_dtype(group: Any, parameters: list[Any]) -> torch.dtype:
    """The widest dtype in which FSDP reduces gradients of these parameters of a group. Since torch 2.15 it depends on
    each of them; float32 stands for a dtype that only autograd knows."""
    policy = getattr(group, "mp_policy", None)
    if policy is not None:  # one for the group, before torch 2.15
        dtypes = {policy.reduce_dtype or policy.param_dtype or parameters[0].sharded_param.dtype}
    else:
        dtypes = {p.mp_policy.reduce_dtype or grad_dtype(p) or torch.float32 for p in parameters}
    return reduce(torch.promote_types, dtypes)


class ByHand:
    """Observer of the ends of passes that the caller finalizes outside of autograd, by torch 2.15's
    `FSDPModule.set_manual_backward_finalization`: FSDP then reduces the remaining gradients in `finalize_backward`, and
    waits for them there, or in the handle's `wait`.

    Args:
        model: a model with FSDP modules.
        ended: called when FSDP has waited for the gradients of such a pass.
        discarded: called when a pass is given up, by `reset_iter_state`.
    """

    def __init__(self, model: nn.Module, ended: Callable[[], None], discarded: Callable[[], None]) -> None:
        states: dict[Any, None] = {m._get_fsdp_state(): None for m in model.modules() if isinstance(m, FSDPModule)}
        self._states = [state for state in states if hasattr(state, "wait_for_gradient_reduction")]
        self.ended, self.discarded = ended, discarded
        for state in self._states:  # the root is not known before the first forward pass
            if not hasattr(state, _OBSERVERS):
                _observe(state)
            getattr(state, _OBSERVERS).append(self)

    @property
    def active(self) -> bool:
        """True if such a pass runs now, or is finalized."""
        return any(state._state_ctx.manual_backward_finalization_active for state in self._states)

    def detach(self) -> None:
        """Stop observing."""
        for state in self._states:
            getattr(state, _OBSERVERS).remove(self)
            if not getattr(state, _OBSERVERS):
                del state.wait_for_gradient_reduction, state._reset_iter_state, state.__dict__[_OBSERVERS]
        self._states = []


#: The attribute of an FSDP state with its `ByHand`s: a model has one for each of its states.
_OBSERVERS = "_gradwire_observers"


def _observe(state: Any) -> None:
    wait, reset, observers = state.wait_for_gradient_reduction, state._reset_iter_state, list[ByHand]()

    def waited(*arguments: Any) -> None:
        by_hand = [each for each in observers if each.active]
        wait(*arguments)
        for each in by_hand:
            each.ended()

    def discarded() -> None:
        for each in observers:
            each.discarded()
        reset()

    state.wait_for_gradient_reduction, state._reset_iter_state = untraced(waited), untraced(discarded)
    setattr(state, _OBSERVERS, observers)
