"""Operations that go through a codec, and the part of ranks that have joined in any operation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..consensus.negotiation import Request
from ..gradients.residuals import CompressionState, States, layout_of
from .arithmetic import scale
from .channel import Channel
from .operations import OP_NAMES, AllGather, AllReduce, Average, Operation, Scaled, Sum, one_buffer, pairs_of


class Stateful(Scaled):
    """A reduction of what a compression sends or keeps.

    Attributes:
        state: what this rank keeps.
        label: of the state, the same on all ranks (`States`).
    """

    state: CompressionState
    label: int | None = None

    def must_match(self) -> dict[str, Any]:
        return {**super().must_match(), "compression": repr(self.state.compression)}

    def per_rank(self) -> dict[str, Any]:
        """Facts by which a rank that has joined finds its part of a state, and follows which steps were applied."""
        return {"label": self.label, "scale": self.state.scale, "applied_counts": list(self.state.applied_counts)}


class CompressedReduce(Stateful):
    """Average or sum through a codec; the tensors of one operation are compressed together.

    Args:
        names: of the tensors, by which their residuals are kept.
        state: those residuals.
        keep: tensors of these names will come again.
    """

    kind = "exchange"

    def __init__(
        self, *args: Any, names: Sequence[str], state: CompressionState, keep: bool = True, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.names, self.state, self.keep = list(names), state, keep

    def per_rank(self) -> dict[str, Any]:
        facts = {"names": self.names, "keep": self.keep, "restart": self.state.is_new(self.names[0])}
        return {**super().per_rank(), **facts}

    def run(self, channel: Channel, info: dict[str, Any]) -> list[Tensor]:
        results = self.results()
        layout = layout_of(self.names, [t.shape for t in self.tensors])
        if info["restart"]:
            self.state.restart(self.names[0])
        pairs = pairs_of([self], [results])
        if pairs:
            new = partial(channel.scratch, dtype=self.tensors[0].dtype, device=self.device)
            with one_buffer(pairs, new) as buffer:
                scale(buffer, self.prescale)
                self.state.reduce(layout, buffer, channel, self.keep)
                scale(buffer, self.postscale * (channel.size if self.op == Sum else 1))
        return results


class ResidualMean(Stateful, AllReduce):
    """The mean over the ranks of one tensor's residual, or of another vector, with that of ranks that have joined.

    Args:
        residual: this rank's, float32.
        state: which keeps it.
        name: of the tensor.
        vector: of the feedback strategy.
    """

    kind = "residual"

    def __init__(
        self, key: str, set_id: int, residual: Tensor, state: CompressionState, name: str, vector: str
    ) -> None:
        super().__init__(key, set_id, [residual], Average, 1.0, 1.0)
        self.state, self.name, self.vector = state, name, vector

    def per_rank(self) -> dict[str, Any]:
        return {**super().per_rank(), "name": self.name, "vector": self.vector}

    def fuse(self) -> str | None:
        return (text := super().fuse()) and f"residual {text}"


class Join(Operation):
    """All ranks join. The last one tells the others which of its steps were applied."""

    kind = "join"

    def __init__(self, states: States) -> None:
        super().__init__("join", 0)
        self.states = states

    def per_rank(self) -> dict[str, Any]:
        return {"applied_counts": self.states.applied_counts()}

    def run(self, channel: Channel, info: dict[str, Any]) -> int:
        self.states.follow_applied_counts(info["applied_counts"])
        return int(info["last"])


def zero_input(reference: Request, states: States, device: torch.device) -> Operation:
    """The operation of a rank that takes part without a tensor of its own: zeros, or no rows.

    This rank's residuals are still sent, and it keeps those of the slices that it owns for all.

    Args:
        reference: the request of the other ranks.
        states: of the compressions that this rank knows.
        device: of this rank's part, of the type that the others announced.
    """
    kind, common = reference["kind"], reference["must_match"]
    tensors = [torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for dtype, shape in reference["tensors"]]
    place = (reference["key"], reference["set"])
    if kind == "allgather":
        empty = [t.new_empty((0, *t.shape[1:])) for t in tensors]
        return AllGather(*place, empty, common.get("sparse shape"), common.get("average", False))
    scales = (OP_NAMES.index(common["op"]), common["prescale factor"], common["postscale factor"])
    if kind in ("exchange", "residual"):
        theirs = reference["per_rank"]
        state = states.find(common["compression"], reference["set"], theirs["label"])
        state.follow_applied_counts(theirs["applied_counts"])
        state.follow_scale(theirs["scale"])
        if kind == "residual":
            name, vector = theirs["name"], theirs["vector"]
            residual = state.feedback.by_name(vector).get(name)
            return ResidualMean(*place, tensors[0] if residual is None else residual, state, name, vector)
        return CompressedReduce(*place, tensors, *scales, state=state, names=theirs["names"], keep=theirs["keep"])
    return AllReduce(*place, tensors, *scales)
