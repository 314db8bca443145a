"""The common part of both states of `compress_fsdp`: gradients between shards, and between replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..comm import handshake
from ..comm.between_steps import between_steps
from ..core.checkpoint import Vectors
from ..core.front import BackwardFront
from ..core.options import Exclude, excluded_names
from ..training.optimizer_checks import expect_optimizer
from .checkpoint import ShardedCheckpoint
from .torch_internals import ByHand, Shards


@dataclass(frozen=True)
class Part:
    """Parameter groups that one state reduces, and its arguments.

    Attributes:
        only: the ids of FSDP's groups; None: all.
        problem: why the model could not be divided, for the other ranks to hear.
    """

    arguments: Mapping[str, Any]
    only: frozenset[int] | None = None
    problem: Exception | None = None

    def groups(self) -> frozenset[int] | None:
        """`only`, or raise `problem`."""
        if self.problem is not None:  # for the other ranks to hear, where they meet
            raise self.problem
        return self.only


class ShardedFront(BackwardFront):
    """A state of a model whose parameters FSDP shards; a step may also be a pass that is finalized by hand."""

    _owner = "compress_fsdp"
    _by_hand: ByHand

    def __init__(self) -> None:
        self._shards: Sequence[Shards] = []
        self._parameters: dict[str, nn.Parameter] = {}
        self._excluded: frozenset[str] = frozenset()

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters whose gradients it reduces, by name."""
        return self._parameters

    @property
    def codec_text(self) -> str:
        """The codec, for people and checkpoints."""
        return self._options.codec_text

    @between_steps
    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Go on from a checkpoint. Every rank must load one of the same step; the next step compares them.

        Args:
            state_dict: this state's own, filled by `torch.distributed.checkpoint.load`; or one of the same mesh.
            strict: False accepts, with a warning, a checkpoint that lacks tensors of this state, or has more.

        Raises:
            ValueError: the checkpoint is of another format, codec or model. Nothing has changed then.
        """
        self.go_on(*self.read(state_dict, strict))

    def read(self, state_dict: dict[str, Any], strict: bool) -> tuple[Mapping[str, Any], Vectors]:
        """A checkpoint, for `go_on`; nothing changes."""
        return self._checkpoint.read(state_dict, strict)

    def go_on(self, saved: Mapping[str, Any], vectors: Vectors) -> None:
        """Go on from a checkpoint that has been read."""
        raise NotImplementedError

    def _found(self, shards: Sequence[Shards]) -> None:
        """Reduce these gradients."""
        self._shards, self._device = shards, shards[0].group.device
        self._parameters = {n: p.sharded_param for each in shards for n, p in each.parameters.items()}

    def _exclude(self, exclude: Exclude | None) -> None:
        """Send these parameters uncompressed, and those that must stay equal on ranks with other messages."""
        copied = (shards.copied for shards in self._shards)
        self._excluded = excluded_names(exclude, self._parameters).union(*copied)

    def _observe(self, model: nn.Module) -> None:
        """Follow passes that are finalized by hand, and optimizers."""
        self._by_hand = ByHand(model, self._finalized, self._given_up)
        expect_optimizer(self, self._parameters.values(), type(self)._check_optimizer)

    def _finalized(self) -> None:
        if self._open is not None:
            self._ended(self._open)

    def _given_up(self) -> None:
        if self._open is not None:
            self._discard(self._open)

    @property
    def _checkpoint(self) -> ShardedCheckpoint:
        idle = frozenset[str]() if self._options.keeps_all else self._excluded
        return ShardedCheckpoint(self._options, self._feedback, self._shards, self._step, idle)

    def _reductions(self) -> list[str]:
        """A line for each of FSDP's reductions, equal on all ranks."""
        return [f"{shards.module}: {shards.dtype}" for shards in self._shards]

    def _description(self) -> dict[str, Any]:
        return {
            **super()._description(),
            "the model's parameters": handshake.describe_model(self._parameters, self._excluded),
            "FSDP's reductions": self._reductions(),
        }
