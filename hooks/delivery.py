"""Whether the means of a step reach the parameters. Only what was applied has been delivered; the rest goes back to the
residuals.

DDP throws away the mean of a parameter that no rank has used (`find_unused_parameters`, `static_graph`), and all means
of a backward pass that raises. When every rank adds such a mean to its residual, the mean of the residuals is what it
was before, with the gradients that had gone in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..compress.layout import Layout, Slot
from ..compress.memory import Memory
from .comm.pipeline import Pipeline
from .reducer import Step
from .straight import RAISED_TIMEOUT


class Delivery:
    """What becomes of one model's means.

    Args:
        parameters: by name, in the order in which DDP counts them.
        feedback: their residuals.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], feedback: Memory) -> None:
        self._parameters, self._feedback = parameters, feedback
        self._counts: Tensor | None = None  # DDP's: on how many ranks each parameter was used in the last step
        self._pending: Step | None = None
        self._looked = False

    def look(self, model: DistributedDataParallel) -> None:
        """Find where DDP counts who uses what. Not from within the hook, where the reducer's lock is held.

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
        """Whether `settle` has something to do."""
        return self._pending is not None

    def expect(self, step: Step) -> None:
        """The step's means are there, and DDP is about to take them; call `settle` when it has."""
        self._pending = step

    def settle(self, pipeline: Pipeline) -> None:
        """DDP has taken what it wants of the expected step: keep the means that it left."""
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

    def throw_away(self, step: Step, pipeline: Pipeline) -> None:
        """No mean of the step is applied: the backward pass raised, here or on the pipeline."""
        if step.settled:
            return
        step.settled = True
        if not pipeline.failed:
            pipeline.submit(partial(self.keep, step))
        # Before DDP's buckets change; but the other ranks may be in trouble too.
        if pipeline.idle(RAISED_TIMEOUT.total_seconds()) and pipeline.failed:
            self.keep(step)

    def keep(self, step: Step, names: Collection[str] | None = None) -> Tensor:
        """Nobody applies the means of these parameters, or of all: keep them. On the pipeline."""
        for layout, mean, _ in self._returned(step):
            returned = [(slot, None) for slot in layout if names is None or slot.name in names]
            self._feedback.give_back(layout, mean, returned)
        return torch.empty(0, device="cpu")

    def _keep_unused(self, step: Step, names: set[str]) -> Tensor:
        for layout, mean, buffer in self._returned(step):
            returned: list[tuple[Slot, Tensor | None]] = []
            for slot in layout:
                if slot.name in names:
                    grad = self._parameters[slot.name].grad if step.own else None
                    # In DDP's own bucket the mean has replaced the gradient that had gone in. Elsewhere both are there.
                    if grad is None or grad.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
                        returned.append((slot, grad if grad is None or step.factor is None else grad * step.factor))
            self._feedback.give_back(layout, mean, returned)
        return torch.empty(0, device="cpu")

    def _returned(self, step: Step) -> Iterator[tuple[Layout, Tensor, Tensor]]:
        """Each layout of which something is kept, the flat mean in it, and DDP's buffer. A step that is undone sent
        nothing."""
        if not step.undone:
            for unit, buffer in step.reduced:
                mean = buffer if unit.packed is None else unit.packed
                if unit.packed is None and step.share != 1.0:
                    mean = mean / step.share
                for layout, means in ((unit.layout, mean), (unit.beside, unit.extra)):
                    if self._feedback.holds(layout):
                        yield layout, means, buffer
