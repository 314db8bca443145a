"""Return of means that DDP does not apply: those of parameters that no rank has used (`find_unused_parameters`,
`static_graph`), and all means of a backward pass that raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...compress.feedback.store import FeedbackStore
from ...compress.formats.layout import Slot
from ..comm.between_steps import undivided
from ..comm.pipeline import Pipeline
from ..core.discarded import DiscardedMeans
from ..core.reducer import Step


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
        if self._counts is None:
            return
        counts = self._counts.tolist()  # by now summed over the ranks
        unused = {name for name, count in zip(self._parameters, counts, strict=True) if count == 0}
        if unused:
            # Before anything changes the gradients, or DDP's buckets.
            pipeline.submit(partial(self._keep_unused, step, unused))
            pipeline.wait()

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
