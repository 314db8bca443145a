"""DDP models, as the hook sees them: parameters, options, and means that they do not apply."""

from __future__ import annotations

import gc
from collections.abc import Container, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms import join
from torch.nn.parallel import DistributedDataParallel

from ...compress.feedback.base import Feedback
from ...compress.feedback.store import FeedbackStore
from ...compress.formats.layout import Slot
from ..comm.between_steps import undivided, undivided_module
from ..comm.pipeline import Pipeline
from ..core.discarded import DiscardedMeans
from ..core.reducer import Step
from ..training.living import living
from ..training.names import names_of


def ddp_of(model: Any) -> DistributedDataParallel:
    """The DDP model itself, or the one inside a wrapper of `torch.compile` or Fabric.

    Raises:
        TypeError: there is none.
    """
    inner = model
    for attribute in ("_forward_module", "_orig_mod"):  # Fabric's; torch.compile's
        inner = getattr(inner, attribute, inner)
    if isinstance(inner, DistributedDataParallel):
        return inner
    if isinstance(model, nn.Module):
        remedy = (
            "wrap the model in it first "
            "(FSDP2 reduces its gradients by itself: for replicas of shards call gradwire.compress_fsdp)"
        )
    else:
        remedy = "the model is the first argument, as in CompressState(model, TopK(density=0.01))"
    raise TypeError(f"model is a {type(model).__name__}, expected DistributedDataParallel: {remedy}")


def find_owner(state: object, parameter: Tensor) -> DistributedDataParallel | None:
    """The DDP model that has this parameter and a hook; preferred is one whose hook has this state.

    A bucket does not know its model, and neither does a state that was made before the model, or was pickled. None if
    there is no such model, or more than one.
    """
    registered, hooked = [], []
    for found in living(DistributedDataParallel):
        if found.__dict__.get("_comm_hooks") and any(p is parameter for p in found.module.parameters()):
            hooked.append(found)
            if any(s is state for _, s in found._comm_hooks):
                registered.append(found)
    candidates = registered or hooked
    return candidates[0] if len(candidates) == 1 else None


def module_of(model: DistributedDataParallel) -> nn.Module:
    """The module that names the parameters: the one that DDP wraps. After torch's `replicate(module)`, DDP wraps a
    list of parameters, and this is `module`."""
    if type(model.module) is nn.ParameterList:
        for found in gc.get_objects():
            if type(found).__name__ == "_ReplicateState" and getattr(found, "_ddp", None) is model:
                module: nn.Module = found.module
                return module
    return model.module


def parameters_of(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that DDP reduces, by the names that their module gives them, in the order of DDP's counts."""
    ignored, names = model.parameters_to_ignore, names_of(module_of(model))
    named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]
    return {names.get(id(p), name): p for name, p in named}


def begins_anew(old: Mapping[str, nn.Parameter], new: Mapping[str, nn.Parameter]) -> bool:
    """True if a state of the parameters `old` meets another model of equal names and shapes; False if it meets its own,
    wrapped again, maybe with parameters that were frozen before.

    Raises:
        ValueError: it meets another model of other names or shapes, or one that shares some parameters only.
    """
    if all(new.get(name) is p for name, p in old.items()):
        return False
    equal = {name: p.shape for name, p in old.items()} == {name: p.shape for name, p in new.items()}
    if equal and set(map(id, old.values())).isdisjoint(map(id, new.values())):
        return True
    names = sorted(old.keys() ^ new.keys()) or [name for name in old if old[name] is not new[name]]
    raise ValueError(
        f"the state belongs to another model: they differ in {', '.join(map(repr, names[:4]))}; make a CompressState "
        "for each model"
    )


def check_options(model: DistributedDataParallel, strategy: Feedback | None) -> None:
    """Raise ValueError for options under which DDP's hook cannot reduce."""
    if getattr(model, "_use_python_reducer", False):
        raise ValueError(
            'torch._dynamo.config.optimize_ddp="python_reducer" calls hooks with other arguments: set it to '
            '"ddp_optimizer"'
        )
    if getattr(model, "_delay_all_reduce_params", ()):
        raise ValueError(
            "DistributedDataParallel reduces the parameters of delay_all_reduce_named_params by itself, after the "
            "communication hook, and they may differ between ranks: leave out delay_all_reduce_named_params and "
            "param_to_hook_all_reduce"
        )
    clips = strategy is not None and strategy.largest_norm is not None
    if clips and model.static_graph and getattr(model, "skip_all_reduce_unused_params", False):
        raise ValueError(
            f"error_feedback={strategy} waits for the norm of all gradients; with static_graph=True and "
            "skip_all_reduce_unused_params=True the end of the pass is not known: leave out one of the three"
        )


undivided_module(join)  # a rank that has joined takes steps outside of backward passes


def join_mode(model: nn.Module | None) -> tuple[bool, bool]:
    """A pair: True if the model is in `DDP.join`, and True if means are over the ranks that have not joined."""
    joins = getattr(getattr(model, "_join_config", None), "enable", False)
    return joins, joins and not getattr(model, "_divide_by_initial_world_size", True)


def frees_buckets(model: nn.Module | None) -> bool:
    """True if DDP frees its buckets' memory after each backward pass."""
    return getattr(model, "lazy_bucket_allocation", False)


def finalized_by_hand(model: nn.Module | None) -> bool:
    """True if the user decides when DDP applies the means, within the backward pass or after it.

    Raises:
        RuntimeError: DDP then counts parameters' uses too late.
    """
    if not getattr(model, "require_manual_backward_finalization", False):
        return False
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(model, option):
            raise RuntimeError(
                f"gradwire keeps what DDP({option}=True) throws away, and must know of it when backward ends: "
                "leave out require_manual_backward_finalization, or that"
            )
    return True


def strides_in_bucket(parameter: Tensor, buffer: Tensor) -> tuple[int, ...]:
    """Strides of a gradient in DDP's bucket: as of when DDP made the bucket, which only a gradient that is a view of it
    tells. Else the parameter's if they leave no gap, or contiguous ones."""
    grad = parameter.grad
    if grad is not None and grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
        return grad.stride()
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return torch.empty(parameter.shape, device="meta").stride()
            expected *= size
    return parameter.stride()


_requires_gradients = attrgetter("requires_grad")


class Untrained:
    """The untrained parameters of a DDP model.

    Args:
        model: the model; parameters that the user has let it ignore are left out.
        reduced: ids of the parameters that it reduces.
    """

    def __init__(self, model: DistributedDataParallel, reduced: Container[int]) -> None:
        ignored = model.parameters_to_ignore
        named = model.module.named_parameters() if ignored else (("", p) for p in model.module.parameters())
        self._parameters: list[nn.Parameter] = [p for name, p in named if id(p) not in reduced and name not in ignored]

    def problem(self, model: DistributedDataParallel) -> str | None:
        """The error message if one of them requires gradients by now, else None."""
        if not any(map(_requires_gradients, self._parameters)):
            return None
        p, names = next(p for p in self._parameters if p.requires_grad), names_of(module_of(model))
        return (
            f"parameter {names.get(id(p), '')!r} requires gradients, and did not when DistributedDataParallel wrapped "
            "the model, so that nobody reduces them: let it require them then, with find_unused_parameters=True, and "
            "freeze it after the first step; or wrap the model again when that changes, with another CompressState"
        )


class UnusedMeans(DiscardedMeans):
    """Finds the means that DDP does not apply.

    Args:
        parameters: the parameters by name, in the order of DDP's counts.
        feedback: their residuals.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], feedback: FeedbackStore) -> None:
        super().__init__(feedback)
        self._parameters = parameters
        self._counts: Tensor | None = None  # DDP's: on how many ranks each parameter was used in the last step
        self._pending: Step | None = None
        self._looked = False

    def look(self, model: DistributedDataParallel) -> None:
        """Find DDP's counts of parameters' uses. Not from within the hook, where the reducer's lock is held.

        Raises:
            ValueError: other parameters require gradients than did when DDP wrapped the model.
        """
        if self._looked:
            return
        reduced = model._get_ddp_logging_data().get("num_parameter_tensors", len(self._parameters))
        if reduced != len(self._parameters):
            raise ValueError(
                f"{len(self._parameters)} of the model's parameters require gradients, and {reduced} did when DDP "
                "wrapped it: wrap it again"
            )
        self._looked = True
        if model.find_unused_parameters or model.static_graph:
            self._counts = model.reducer._get_local_used_map()

    @property
    def pending(self) -> bool:
        """True if `reclaim_unused` has something to do."""
        return self._pending is not None

    def expect(self, step: Step) -> None:
        """Note that DDP is about to apply the step's means; call `reclaim_unused` once it has."""
        self._pending = step

    @undivided
    def reclaim_unused(self, pipeline: Pipeline) -> None:
        """Return to the residuals the means of the expected step that DDP has not applied."""
        step, self._pending = self._pending, None
        if step is None or step.settled:
            return
        step.settled = True
        if self._counts is not None:
            counts = self._counts.tolist()  # by now summed over the ranks
            unused = {name for name, count in zip(self._parameters, counts, strict=True) if count == 0}
            if unused:
                # Before anything changes the gradients, or DDP's buckets.
                pipeline.submit(partial(self._keep_unused, step, unused))
                pipeline.wait()
        if not step.ended:  # where no backward pass has waited for its means, as in `DDP.join`
            pipeline.idle()
        step.reduced.clear()  # else DDP's buckets would live until the next step, beside those of its rebuild

    def _keep_unused(self, step: Step, names: set[str]) -> Tensor:
        for layout, mean, buffer in self._returned(step):
            returned: list[tuple[Slot, Tensor | None]] = []
            for slot in layout:
                if slot.name in names:
                    grad = self._parameters[slot.name].grad if step.own else None
                    # In DDP's own bucket the mean has replaced this rank's gradient; elsewhere both exist.
                    if grad is None or grad.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
                        returned.append((slot, grad if grad is None or step.factor is None else grad * step.factor))
            self._feedback.restore(layout, mean, returned)
        return torch.empty(0, device="cpu")
