"""The state that replicas have in common, and its way to those that lack it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..comm.group import Group
from ..comm.pieces import as_bytes
from ..comm.ports import Work
from .initial_sync import local
from .outer_sgd import GlobalParameters
from .verdict import Verdict

#: Elements of a state that its digest covers, spread evenly: a difference of means is everywhere.
DIGEST_NUMEL = 1 << 24
#: A round sends a fragment; all; or all without compression.
Call = Literal["step", "synchronise", "consolidate"]
CALLS: tuple[Call, ...] = get_args(Call)


@dataclass
class Progress:
    """How far a replica is: its steps so far, and those since its schedule has begun again."""

    steps: int
    count: int


@dataclass
class DueRound:
    """A round that is due: how far replicas are that begin it, and the call that they are in."""

    progress: Progress
    call: Call

    def to_numbers(self) -> list[int]:
        return [self.progress.steps, self.progress.count, CALLS.index(self.call)]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> DueRound:
        steps, count, call = numbers
        return cls(Progress(steps, count), CALLS[call])


@dataclass
class Healed:
    """A state on the host, as received: nothing of it is in use yet."""

    moving: list[Tensor]
    frozen: list[Tensor]
    buffers: list[Tensor]
    #: The means of the round that has made it, by bucket; empty, where they are not needed.
    means: list[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.moving, *self.frozen, *self.buffers, *self.means))


class CommonState:
    """The tensors that a newcomer needs: θ0 and its momentum, which rounds move; parameters that are not trained; and
    buffers, which are each replica's own, of one donor.

    Args:
        model: this replica's.
        every: its global parameters.
    """

    def __init__(self, model: nn.Module, every: Sequence[GlobalParameters]) -> None:
        self._every = every
        trained = {p.data_ptr() for shared in every for p in shared.bucket.parameters}
        parameters = [local(p).detach() for p in model.parameters()]
        self._frozen = [p for p in parameters if p.data_ptr() not in trained]
        self._model = model
        self._frozen_digest = _digest(self._frozen)

    @property
    def _moving(self) -> list[Tensor]:
        return [flat for shared in self._every for flat in (shared.values, shared.momentum) if flat is not None]

    @property
    def has_means(self) -> bool:
        """True if the mean of the last round is at hand, and anybody may need it."""
        return any(shared.kept is not None for shared in self._every)

    def digests(self) -> tuple[int, int]:
        """Of what rounds move, and of the parameters that are not trained."""
        return _digest(self._moving), self._frozen_digest

    def start(self, group: Group, verdict: Verdict) -> tuple[list[Work], Healed | None]:
        """Start to send and receive what the verdict asks for, over a channel of this alone. Of moving and frozen
        tensors each donor sends a slice. A donor must keep its state until the next round, which the others only join
        once they have all."""
        channel, needs = group.channel("healing"), group.rank in verdict.needy
        moving, frozen, buffers = self._moving, self._frozen, list(self._model.buffers())
        works = list[Work]()

        def move(tensors: Sequence[Tensor], to: Sequence[int], donors: Sequence[int]) -> list[Tensor]:
            mine, nothing = group.rank in to, torch.empty(0, dtype=torch.uint8, device="cpu")
            aside = [torch.empty(t.nbytes, dtype=torch.uint8, device="cpu") for t in tensors] if mine else []
            for number, tensor in enumerate(tensors if to else ()):
                sent, received = [nothing] * group.size, [nothing] * group.size
                if group.rank in donors:
                    part = as_bytes(tensor).tensor_split(len(donors))[donors.index(group.rank)].cpu()
                    sent = [part if rank in to else nothing for rank in range(group.size)]
                if mine:
                    for donor, part in zip(donors, aside[number].tensor_split(len(donors)), strict=True):
                        received[donor] = part
                works.append(channel.pairwise(received, sent))
            return [part.view(t.dtype).view(t.shape) for part, t in zip(aside, tensors, strict=mine)]

        counted = [
            rank for rank, ending in enumerate(verdict.endings) if ending == "counted" and verdict.mean is not None
        ]
        found = [
            move(moving, verdict.needy, verdict.donors),
            move(frozen, verdict.frozen, verdict.donors),
            move(buffers, verdict.needy, verdict.donors[:1]),
            move(
                [shared.empty() if shared.kept is None else shared.kept for shared in self._every],
                counted,
                [verdict.mean or 0],
            ),
        ]
        return works, Healed(*found) if needs else None

    @torch.no_grad()
    def take(self, healed: Healed) -> None:
        """Replace all of it by what was received, and set the replica's parameters to θ0."""
        targets = (*self._moving, *(self._frozen if healed.frozen else ()), *self._model.buffers())
        for target, source in zip(targets, (*healed.moving, *healed.frozen, *healed.buffers), strict=True):
            target.copy_(source)
        if healed.frozen:
            self._frozen_digest = _digest(self._frozen)
        for shared in self._every:
            shared.kept = healed.means[shared.bucket.index] if healed.means else None
            shared.hand_out()


def _digest(tensors: Iterable[Tensor]) -> int:
    """A checksum of tensors' bits, of every n-th element where there are many."""
    found = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        flat = flat[:: 1 + flat.numel() // DIGEST_NUMEL]
        found = zlib.crc32(as_bytes(flat).cpu().numpy().data, found)
    return found
