"""Models in DistributedDataParallel, which must leave each rank its own gradients."""

# Annotations stay evaluated here: DDP compares those of a hook with its own.
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..hooks.comm.untraced import untraced
from ..hooks.training.living import living


@untraced
def keep_gradients(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP hook that leaves every rank its own gradients, for an optimizer that makes the exchange:

        model.register_comm_hook(None, gradwire.optim.keep_gradients)

    Args:
        state: unused.
        bucket: DDP's.

    Returns:
        A future of the bucket's buffer, unchanged.
    """
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Replicas:
    """The DDP models that hold some parameters: found once, and checked in every step."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        own, models = {id(parameter) for parameter in parameters}, living(DistributedDataParallel)
        self._models = [weakref.ref(m) for m in models if any(id(p) in own for p in m.parameters())]

    def problem(self, owner: str) -> str | None:
        """The error message if DDP has averaged gradients in the last backward pass, else None."""
        for reference in self._models:
            model = reference()
            # The last forward pass with gradients has set it: True if the backward pass after it synchronises.
            if model is None or not model.require_forward_param_sync:
                continue
            if not any(hook is keep_gradients for hook, _ in getattr(model, "_comm_hooks", ())):
                return (
                    f"DistributedDataParallel averages the gradients that {owner} exchanges in a way of its own: call "
                    "model.register_comm_hook(None, gradwire.optim.keep_gradients) on every rank, run forward and "
                    "backward under model.no_sync(), or leave the model unwrapped"
                )
        return None
