"""FSDP2 and HSDP: gradients of `fully_shard` compressed on their way between replicas, or between shards.

Modules that import FSDP, which takes a second or two, are imported on the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

import torch.distributed as dist
from torch import nn

from ...compress.codec import Codec
from ...compress.feedback.base import Feedback
from ..auto.planner import Fallback
from ..core.options import Exclude
from .embeddings import reduce_rows
from .megatron import compressed_reduce_scatter
from .options import FSDPExchange, FSDPOptions, ScatterOptions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .front import Part
    from .groups import GroupedState
    from .replicate import FSDPState
    from .shard import ScatterState

__all__ = ["compress_fsdp", "compressed_reduce_scatter", "reduce_rows"]


T = TypeVar("T")
#: A value for all parameter groups, or one by the names of their parameters, in which "*" stands for anything.
ByName: TypeAlias = T | Mapping[str, T]


@overload
def compress_fsdp(
    model: nn.Module,
    codec: Codec | Callable[[int], Codec],
    *,
    mesh: DeviceMesh,
    exchange: FSDPExchange = "auto",
    error_feedback: bool | Literal["auto"] | Feedback = "auto",
    warmup_steps: int = 0,
    fallback: Fallback = "auto",
    exclude: Exclude | None = None,
    seed: int = 0,
    entropy_coding: bool = False,
) -> FSDPState: ...


@overload
def compress_fsdp(
    model: nn.Module,
    codec: Codec | Callable[[int], Codec],
    *,
    mesh: None = None,
    exchange: Literal["auto", "mask", "blocks"] = "auto",
    error_feedback: bool | Literal["auto"] | Feedback = "auto",
    warmup_steps: int = 0,
    exclude: Exclude | None = None,
    seed: int = 0,
    entropy_coding: bool = False,
) -> ScatterState: ...


@overload
def compress_fsdp(
    model: nn.Module,
    codec: ByName[Codec | Callable[[int], Codec]],
    *,
    mesh: ByName[DeviceMesh | None] = None,
    exchange: ByName[FSDPExchange] = "auto",
    error_feedback: ByName[bool | Literal["auto"] | Feedback] = "auto",
    warmup_steps: ByName[int] = 0,
    fallback: ByName[Fallback] = "auto",
    exclude: Exclude | None = None,
    seed: int = 0,
    entropy_coding: bool = False,
) -> FSDPState | ScatterState | GroupedState: ...


def compress_fsdp(
    model: nn.Module,
    codec: ByName[Codec | Callable[[int], Codec]],
    *,
    mesh: ByName[DeviceMesh | None] = None,
    exchange: ByName[FSDPExchange] = "auto",
    error_feedback: ByName[bool | Literal["auto"] | Feedback] = "auto",
    warmup_steps: ByName[int] = 0,
    fallback: ByName[Fallback] = "auto",
    exclude: Exclude | None = None,
    seed: int = 0,
    entropy_coding: bool = False,
) -> FSDPState | ScatterState | GroupedState:
    """Compress the gradients of a sharded model: between replicas (with `mesh`), or between shards (without).

    **With `mesh`**, after `fully_shard(model, mesh=mesh["shard"])`, with `mesh` of two dimensions: FSDP reduces
    gradients among the shards. Each rank's shard of them is then reduced, compressed, among the ranks that have the
    same shard, over `mesh["replicate"]`. Residuals are kept by parameter, for this rank's shards only. With a shard
    dimension of size 1 it is data parallelism. The result is that of FSDP's own HSDP, including mixed precision,
    divide factors and accumulation (`set_requires_gradient_sync`, `set_requires_all_reduce`).

    **Without**, after `fully_shard` over a mesh of one dimension: each rank sends its gradient compressed to the
    shards' owners, instead of FSDP's reduce-scatter (the first half of DoubleSqueeze, Tang et al., ICML 2019). It takes
    any codec. Stochastic ones, `QSGD()` and `EDEN()`, keep nothing; for others every rank keeps a residual as large
    as the unsharded model's gradients, four bytes an element. For slow links between all ranks; it needs torch 2.9.

    **Groups that differ**, as experts and dense layers do: FSDP's parameter groups may be sharded over different
    meshes, also those of one module (`shard_placement_fn`). For other replicas, other codecs or the other form, give
    an argument by the names of parameters: `mesh={"*.experts.*": None, "*": mesh["replicate"]}`. The first pattern that
    fits counts, and one must fit all parameters of a group.

    Args:
        model: the model, after `fully_shard` has been called on its parts and on itself.
        codec: a codec, or a function of the step (counted from 0) that returns one, equal on all ranks.
        mesh: a one-dimensional mesh of the ranks that have the same shards. None: no ranks have.
        exchange, error_feedback, warmup_steps, fallback, exclude, seed, entropy_coding: `CompressState`'s; without
            `mesh`, leave out `fallback`, `exchange` takes "mask", for a `TopK` whose elements all ranks share, or
            "blocks", for `Identity()` where most of a gradient is zero, and `error_feedback` residuals.

    Returns:
        The state, for statistics and checkpoints; the model holds it, too. Making it is a collective. Where groups
        differ, a `GroupedState` with the same methods.

    Raises:
        TypeError, ValueError: an argument or the model is invalid, here or on another rank, or the ranks disagree.
        RuntimeError: this torch is too old, torch.distributed is not initialised, or a rank did not arrive within 60 s.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("compress_fsdp needs torch.distributed: call torch.distributed.init_process_group() first")
    from .groups import GroupedState, divide

    arguments: dict[str, Any] = {"codec": codec, "mesh": mesh, "exchange": exchange, "error_feedback": error_feedback}
    arguments |= {"warmup_steps": warmup_steps, "fallback": fallback, "exclude": exclude, "topology": None}
    states: list[FSDPState | ScatterState] = []
    for part in divide(model, {**arguments, "seed": seed, "entropy_coding": entropy_coding}):
        try:
            states.append(_state(model, part))
        except BaseException:
            for state in states:
                state.close()
            raise
    return states[0] if len(states) == 1 else GroupedState(states)


def _state(model: nn.Module, part: Part) -> FSDPState | ScatterState:
    """A state for some of the model's parameter groups."""
    options = dict(part.arguments)
    mesh, exclude = options.pop("mesh"), options.pop("exclude")
    if mesh is None:
        from .shard import ScatterState

        return ScatterState(model, ScatterOptions(**options), exclude, part)
    from .replicate import FSDPState

    if not hasattr(mesh, "get_group"):
        raise TypeError(f'mesh is a {type(mesh).__name__}: expected a DeviceMesh, such as mesh["replicate"]')
    replicas = mesh.size() if mesh.ndim == 1 else 1
    return FSDPState(model, FSDPOptions(**options, replicas=replicas), mesh, exclude, part)
