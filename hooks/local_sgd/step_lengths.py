"""Steps of ranks' own optimizers, made as long as those of one optimizer on the ranks' mean gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...compress.formats.layout import Slot
from ..core.bucket import Bucket
from ..training.names import renamed
from ..training.recommend import is_adaptive
from ..training.weak_method import weakly
from .initial_sync import local

#: Elements of a tensor that ranks compare in a round.
SAMPLES = 16
#: Weight of a round in means over rounds.
WEIGHT = 0.05
#: Multiples of it, modulo 1, fill an interval evenly.
GOLDEN = (5.0**0.5 - 1.0) / 2.0


class StepLengths:
    """Lengthens the steps of P ranks' adaptive optimizers to those of one optimizer on their mean gradient ḡ.

    Adam and its kin divide by the root of E[g²], here of a rank's own gradient g. That has more noise than ḡ, so that
    P ranks move less than one optimizer that divides by √E[ḡ²]. The step of a tensor is multiplied by

        √(Σ E[g²] / Σ E[ḡ²])  in [1, √P]:  1 where all gradients are equal, √P where they are noise

    with sums over `SAMPLES` elements, other ones in each round, and E over the ranks and some 20 rounds. A round's
    message has the samples and Σ g² of each tensor, as float32.

    Args:
        optimizers: this rank's; the steps of those that are not adaptive stay as they are.
        parameters: by name; all have elements here.
        index: of the message's bucket.

    Raises:
        ValueError: no optimizer is adaptive.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter], index: int
    ) -> None:
        adaptive = [optimizer for optimizer in optimizers if is_adaptive(optimizer)]
        if not adaptive:
            raise ValueError(
                f"lengthen_steps=True with {' and '.join(type(one).__name__ for one in optimizers)}: only optimizers "
                "that divide by a second moment, such as AdamW, step shorter where gradients have noise: leave it out"
            )
        theirs = {id(p) for optimizer in adaptive for group in optimizer.param_groups for p in group["params"]}
        self.names = [name for name, p in parameters.items() if id(p) in theirs]
        self._places = {id(parameters[name]): place for place, name in enumerate(self.names)}
        count, device = len(self.names), local(next(iter(parameters.values()))).device
        self._samples = torch.zeros(count * SAMPLES + count, dtype=torch.float32, device=device)
        self._rows = self._samples[: count * SAMPLES].view(count, SAMPLES)
        self._buffer = torch.zeros_like(self._samples)
        slots = (Slot("samples of gradients", 0, (self._buffer.numel(),), (1,)),)
        self.bucket = Bucket(index, [self._buffer], slots, frozenset({slots[0].name}), self._buffer)
        self.bucket.of_gradients = False
        #: Rows of E[g²] and of E[ḡ²], summed over each tensor's samples; and those of a mean that is not in them yet.
        self._moments = torch.zeros(2, count, dtype=torch.float32, device=device)
        self._arrived: Tensor | None = None
        self._more: Sequence[Tensor] | None = None  # the factors less 1
        self.next_round = 0  # which elements are samples depends on it
        self._before: list[tuple[int, Tensor, Tensor]] = []
        self._optimizers, self._handles = adaptive, list[Any]()

    def watch(self) -> None:
        """Sample gradients and lengthen steps from now on, while this object lives."""
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(weakly(self._begins)))
            self._handles.append(optimizer.register_step_post_hook(weakly(self._ends)))

    def remove(self) -> None:
        """Leave steps as they are from now on."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._before.clear()
        rows, samples = list[Tensor](), list[Tensor]()
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            place = self._places.get(id(p))
            if place is None or p.grad.is_sparse:
                continue
            own, grad = local(p.detach()), local(p.grad).reshape(-1)
            apart = max(1, grad.numel() // SAMPLES)
            samples.append(grad[int(self.next_round * GOLDEN % 1.0 * apart) :: apart][:SAMPLES])
            rows.append(self._rows[place, : samples[-1].numel()])
            if self._more is not None:
                self._before.append((place, own, own.clone()))
        if rows:
            torch._foreach_copy_(rows, samples)

    @torch.no_grad()
    def _ends(self, *_: Any) -> None:
        if self._more is not None and self._before:
            places, owns, before = map(list, zip(*self._before, strict=True))
            moved = torch._foreach_sub(owns, before)
            torch._foreach_mul_(moved, [self._more[place] for place in places])
            torch._foreach_add_(owns, moved)
        self._before.clear()

    def message(self) -> Tensor:
        """Samples of this rank's last step, to be replaced by the ranks' mean; the same memory in every call."""
        self.next_round += 1
        self._samples[self._rows.numel() :].copy_(self._rows.square().sum(1))
        self._buffer.copy_(self._samples)
        self._samples.zero_()
        return self._buffer

    def arrived(self) -> None:
        """The message has become the ranks' mean."""
        rows = self._buffer[: self._rows.numel()].view_as(self._rows)
        self._arrived = torch.stack([self._buffer[self._rows.numel() :], rows.square().sum(1)])

    def take(self, ranks: int) -> None:
        """Go on with what has arrived, from so many ranks."""
        if self._arrived is not None:
            self._moments.lerp_(self._arrived.nan_to_num(0.0, 0.0, 0.0), WEIGHT)  # a scaler skips what is not finite
            self._arrived = None
            self._follow_moments(ranks)

    def _follow_moments(self, ranks: int) -> None:
        own, agreed = self._moments
        self._more = (own / agreed).nan_to_num(1.0).clamp(1.0, ranks).sqrt().sub(1.0).unbind()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Tensors by name, equal on all ranks."""
        found = {"moments": self._moments} | ({} if self._arrived is None else {"arrived": self._arrived})
        return {what: dict(zip(self.names, pairs.T.clone(), strict=True)) for what, pairs in found.items()}

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Tensor]], ranks: int, next_round: int) -> None:
        """Go on from there; parameters that it lacks begin anew. Nothing changes where it raises."""
        found = {what: renamed(pairs, self.names) for what, pairs in saved.items()}
        read = {what: torch.zeros_like(self._moments) for what in ("moments", *found)}
        for what, pairs in found.items():
            for column, name in zip(read[what].T, self.names, strict=True):
                if name in pairs:
                    column.copy_(pairs[name])
        self.next_round, self._moments, self._arrived = next_round, read["moments"], read.get("arrived")
        self._follow_moments(ranks)
