"""Parameters that required no gradient when DDP wrapped the model: replicas diverge if one is trained later on."""

from __future__ import annotations

from collections.abc import Container
from operator import attrgetter

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..training.names import names_of
from .model_lookup import module_of

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
