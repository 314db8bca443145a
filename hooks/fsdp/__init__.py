"""FSDP2 and HSDP: gradients of `fully_shard` compressed on their way between replicas, or between shards.

What imports FSDP, which takes a second or two, is imported by those who call it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

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

    from .replicate import FSDPState
    from .shard import ScatterState

__all__ = ["compress_fsdp", "compressed_reduce_scatter", "reduce_rows"]


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
) -> FSDPState: ...


@overload
def compress_fsdp(
    model: nn.Module,
    codec: Codec | Callable[[int], Codec],
    *,
    mesh: None = None,
    error_feedback: bool | Literal["auto"] | Feedback = "auto",
    warmup_steps: int = 0,
    exclude: Exclude | None = None,
    seed: int = 0,
) -> ScatterState: ...


def compress_fsdp(
    model: nn.Module,
    codec: Codec | Callable[[int], Codec],
    *,
    mesh: DeviceMesh | None = None,
    exchange: FSDPExchange = "auto",
    error_feedback: bool | Literal["auto"] | Feedback = "auto",
    warmup_steps: int = 0,
    fallback: Fallback = "auto",
    exclude: Exclude | None = None,
    seed: int = 0,
) -> FSDPState | ScatterState:
    """Sharded training whose gradients are compressed: between replicas (with `mesh`), or between shards (without).

    **With `mesh`**, after `fully_shard(model, mesh=mesh["shard"])`, with `mesh` of two dimensions: FSDP reduces
    gradients among the shards, and every rank's shard of them is then reduced among the ranks that have the same one,
    over `mesh["replicate"]`, compressed. What compression leaves out is kept by parameter, for this rank's shards only.
    With a shard dimension of size 1 it is data parallelism. The result is as FSDP's own HSDP would have it:
    mixed precision, divide factors and accumulation (`set_requires_gradient_sync`, `set_requires_all_reduce`) included.

    **Without**, after `fully_shard` over a mesh of one dimension: each rank's gradient goes to the shards' owners
    compressed, in the place of FSDP's reduce-scatter (the first half of DoubleSqueeze, Tang et al., ICML 2019). Any
    codec serves. Stochastic ones, `QSGD()` and `TernGrad()`, keep nothing; for others every rank keeps a residual that
    is as large as the unsharded model's gradients, four bytes an element. For slow links between all ranks; it needs
    torch 2.9.

    Args:
        model: after `fully_shard` has been called on its parts and on itself.
        codec: a codec, or a function of the step (counted from 0) that returns one, equal on all ranks.
        mesh: of one dimension: the ranks that have the same shards. None: there are no such.
        exchange, error_feedback, warmup_steps, fallback, exclude, seed: as `CompressState` has them; without `mesh`,
            `exchange` and `fallback` are left out, and `error_feedback` may keep residuals alone.

    Returns:
        The state, for statistics and checkpoints; the model holds it too. Making it is a collective.

    Raises:
        TypeError, ValueError: an argument or the model cannot work, here or on another rank, or the ranks disagree.
        RuntimeError: this torch is too old, torch.distributed is not initialised, or a rank did not arrive within 60 s.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("compress_fsdp needs torch.distributed: call torch.distributed.init_process_group() first")
    if mesh is None:
        from .shard import ScatterState

        scatter = ScatterOptions(codec, exchange, error_feedback, warmup_steps, fallback, topology=None, seed=seed)
        return ScatterState(model, scatter, exclude)
    from .replicate import FSDPState

    if not hasattr(mesh, "get_group"):
        raise TypeError(f'mesh is a {type(mesh).__name__}: expected a DeviceMesh, such as mesh["replicate"]')
    how: dict[str, Any] = {"topology": None, "seed": seed, "replicas": mesh.size() if mesh.ndim == 1 else 1}
    return FSDPState(model, FSDPOptions(codec, exchange, error_feedback, warmup_steps, fallback, **how), mesh, exclude)
