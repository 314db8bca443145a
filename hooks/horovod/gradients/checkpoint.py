"""Compression in an optimizer's checkpoints and broadcasts: which rank may go on from which feedback."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ....compress.feedback.base import RESIDUAL
from ...training.names import renamed
from ..runtime.context import engine
from .residuals import CompressionState

#: A `state_dict` of before the first step.
EMPTY: dict[str, Any] = {"rank": 0, "steps": {}, "scale": 1.0, "residuals": {}}


def vectors_of(state: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """The vectors of a `state_dict`, by parameter. 0.2 has residuals alone."""
    return {RESIDUAL: state["residuals"], **state.get("vectors", {})}


def without_vectors(state: Mapping[str, Any]) -> dict[str, Any]:
    """A `state_dict` with counters alone."""
    return {**{key: value for key, value in state.items() if key not in ("vectors", "owned")}, "residuals": {}}


def check_residuals(residuals: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError if loaded vectors are not of parameters with these names and shapes."""
    for name, residual in residuals.items():
        shape = tuple(residual.shape)
        if shapes.get(name) != shape:
            known = f"it has {list(shapes[name])}" if name in shapes else f"are {', '.join(sorted(shapes))}"
            raise ValueError(
                f"the checkpoint has what compression left out of {name}, of shape {list(shape)}, and here {known}: "
                "pass the named_parameters with which it was saved, or leave out its entry 'gradwire' to go on without"
            )


def checked(
    state: CompressionState | None, own: dict[str, Any] | None, parameters: Mapping[str, Tensor]
) -> dict[str, Any] | None:
    """The part of a checkpoint from which this rank's compression can go on.

    Args:
        state: of the optimizer that loads; None if it does not compress.
        own: the checkpoint's entry, if it has one.
        parameters: of the optimizer, by name.

    Raises:
        ValueError: it is of another compression, or of other parameters; or it is another rank's, and the strategy
            cannot go on without.
    """
    here = engine()
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
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    vectors = {vector: renamed(found, shapes) for vector, found in vectors_of(own).items()}
    for found in vectors.values():
        check_residuals(found, shapes)
    return {**own, "residuals": vectors.pop(RESIDUAL), **({"vectors": vectors} if vectors else {})}


def shared(state: CompressionState) -> dict[str, Any]:
    """The part of this rank's compression that `broadcast_optimizer_state` hands to the other ranks: counters.

    Feedback only if it is consolidated, and so everybody's, and no step has been made with it.
    """
    here = engine()
    own = state.state_dict(here.rank, here.size)
    own.pop("owned", None)
    return own if state.consolidated else {**without_vectors(own), "residuals": None}


def keeps_feedback(own: dict[str, Any] | None) -> bool:
    """True if the root compresses, and keeps its feedback to itself: `own`, its `shared`, has none."""
    return own is not None and own["residuals"] is None


def check_broadcast(state: CompressionState, kept: bool, fresh: Sequence[bool | None]) -> None:
    """Raises ValueError, on every rank, if some ranks have feedback that the root cannot give to the others.

    Args:
        kept: `keeps_feedback` of the root.
        fresh: of each rank, true if its compression has kept nothing yet; None if it takes no part.
    """
    strategy = state.compression.strategy
    if not kept or strategy.only_residual:
        return
    if len({each for each in fresh if each is not None}) > 1:
        raise ValueError(
            f"{strategy} has trained on some ranks and not on others, whose estimates would differ: save "
            "optimizer.consolidated_state_dict(), made on every rank, for one to load; or optimizer.state_dict() on "
            "every rank"
        )


def follow_broadcast(state: CompressionState, own: dict[str, Any] | None) -> None:
    """Take over `shared` of the root. This rank's feedback stays if the root shares none."""
    if own is None:
        return
    if keeps_feedback(own):
        if own["steps"] and state.compression.keeps and not state.feedback and state.included:
            warnings.warn(
                f"rank {own['rank']} has trained before, and has nothing of what compression had left out on rank "
                f"{engine().rank}, which goes on without: save optimizer.consolidated_state_dict(), made on every "
                "rank, for one to load; or optimizer.state_dict() on every rank",
                stacklevel=3,
            )
        state.follow_scale(own["scale"] or 1.0)
        vectors = state.feedback.everything()
        own |= {"residuals": vectors.pop(RESIDUAL, {}), "vectors": vectors}
    state.load_state_dict(own)
