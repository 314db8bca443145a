"""Checks of the optimizer in use: known problems, and calls before its first step."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...compress import EDEN, QSGD, Cast, ChunkedTopK, Codec, OneBit, Ternary, TernGrad, TopK
from ...compress.feedback.base import betas_of
from ..comm.untraced import untraced
from .recommend import LESS_MOMENTUM, MOST_MOMENTUM, is_adaptive, orthogonalises, ratio_of, recommend, written

T = TypeVar("T")
SOURCE = "(gradwire.recommend)"


def known_problem(optimizer: torch.optim.Optimizer, codec: Codec, feedback: bool) -> str | None:
    """The known problem of an optimizer with a codec, and a plain residual if `feedback`; None: there is none.

    See docs/tables-learning.md.
    """
    name = type(optimizer).__name__
    if feedback and orthogonalises(optimizer) and not isinstance(codec, Cast | QSGD):
        return (
            f"{codec} with {name}: it gives every direction of a gradient the same size, and errors of compression "
            f"too, so that the model ends worse: take {_recommended(optimizer, codec)}"
        )
    if feedback and isinstance(codec, TopK | ChunkedTopK):
        return _too_much_momentum(optimizer, codec)
    if not feedback or not isinstance(codec, OneBit | Ternary | TernGrad | EDEN):
        return None
    if is_adaptive(optimizer):
        return (
            f"{codec} with {name}: every element gets an error of its block's size, which swells the second moment "
            f"where gradients are small, and the model ends worse. {_instead(optimizer, codec)}"
        )
    if isinstance(codec, OneBit):
        return (
            f"{codec} with {name}: at a learning rate found for float32 it may diverge, as outliers are cut and arrive "
            f"late. {_instead(optimizer, codec)}"
        )
    return None


def _too_much_momentum(optimizer: torch.optim.Optimizer, codec: Codec) -> str | None:
    """The known problem of a large β1 beside a residual that keeps most of a gradient back."""
    pairs = [betas for group in optimizer.param_groups if len(betas := betas_of(group)) == 2]
    first, second = max(pairs, default=(0.0, 0.0))
    if not is_adaptive(optimizer) or first <= MOST_MOMENTUM:
        return None
    return (
        f"{codec} with {type(optimizer).__name__}: its residual sends gradients late, which acts as a momentum, and "
        f"beside a β1 of {first:g} the model ends worse: take {_recommended(optimizer, codec)}, or give the optimizer "
        f"betas=({LESS_MOMENTUM:g}, {second:g}), or let it be and pass error_feedback=Lead(momentum={first:g}, "
        f"acts_as={LESS_MOMENTUM:g}), with about twice the learning rate"
    )


def _instead(optimizer: torch.optim.Optimizer, codec: Codec) -> str:
    """Better arguments, for `CompressState`, `compress_fsdp` or Horovod's `Compression.codec`."""
    other = recommend(optimizer, ratio=ratio_of(codec))
    if other.rounds is None:
        return f"For as few bytes take {written(other.codec)}, error_feedback={written(other.feedback)} {SOURCE}"
    return f"For as few bytes take {other.call} {SOURCE}, or EDEN(), error_feedback=False here, of 19 times fewer bytes"


def _recommended(optimizer: torch.optim.Optimizer, codec: Codec) -> str:
    """The recommended call for about as few bytes, and who names it."""
    return f"{recommend(optimizer, ratio=min(max(ratio_of(codec), 3.0), 2000.0)).call} {SOURCE}"


#: By owner: ids of its parameters whose optimizers have not stepped yet, and the check of these. The owner keeps its
#: parameters alive; a weak reference to one would forbid `torch.utils.swap_tensors`.
_waiting: weakref.WeakKeyDictionary[Any, tuple[set[int], Callable[[Any, torch.optim.Optimizer], None]]] = (
    weakref.WeakKeyDictionary()
)


def expect_optimizer(
    owner: T, parameters: Iterable[nn.Parameter], check_optimizer: Callable[[T, torch.optim.Optimizer], None]
) -> None:
    """Call `check_optimizer(owner, …)` before the first step of each optimizer of these parameters, which the owner
    holds; and before later steps, as long as it raises. Replaces an earlier call for this owner."""
    _listen()
    _waiting[owner] = {id(parameter) for parameter in parameters}, check_optimizer


@functools.cache
def _listen() -> None:
    """Register once in a process: a hook must not remove itself, as others may be called after it."""
    register_optimizer_step_pre_hook(_look)


@untraced
def _look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not _waiting:
        return
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for owner, (ids, check_optimizer) in list(_waiting.items()):
        if not ids.isdisjoint(mine):
            check_optimizer(owner, optimizer)
            ids -= mine
            if not ids:
                del _waiting[owner]
