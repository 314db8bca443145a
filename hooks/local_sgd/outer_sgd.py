"""Periodic updates: the parameters that all ranks agree on, and the outer optimizer that moves them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...compress.backends import backend_for
from ...compress.feedback.base import Feedback
from ...compress.formats.layout import Layout, Slot, end_to_end
from ..core.bucket import Bucket
from ..core.step import Step
from ..exchanges import all_finite

#: What a checkpoint has by parameter that is the same on all ranks; "arrived": means that are not yet applied.
REPLICATED_KEYS = ("global", "momentum", "arrived")
#: Elements of several tensors that are worked on at a time.
IN_CACHE = 1 << 16


@dataclass(frozen=True)
class OuterSGD:
    """SGD on the global parameters, with ranks' mean difference in the place of a gradient: to the same bits as
    `torch.optim.SGD(lr=lr, momentum=momentum, nesterov=nesterov)`.

    Args:
        lr: above 0.
        momentum: 0 or more, below 1; with 0 there is none, and nothing is kept. Leave it at 0 where `error_feedback`
            has a momentum, as `Momentum` and `Tracking` have.
        nesterov: the kind of momentum.
        device: where θ0 and the momentum live; "cpu" saves memory of the GPU. By default with the parameters.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True
    device: torch.device | str | None = field(default=None, repr=False)

    def check(self, strategy: Feedback | None = None) -> None:
        """Raises ValueError for numbers that cannot be meant, with what a strategy hands out."""
        if not _is_number(self.lr) or not 0.0 < self.lr < float("inf"):
            raise ValueError(f"OuterSGD(lr={self.lr!r}): expected a number above 0, such as 1.0 or DiLoCo's 0.7")
        if not _is_number(self.momentum) or not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"OuterSGD(momentum={self.momentum!r}): expected a number in [0, 1), such as DiLoCo's 0.9")
        if self.momentum and strategy is not None and strategy.has_momentum:
            raise ValueError(
                f"OuterSGD(momentum={self.momentum!r}): error_feedback={strategy} hands out a momentum already: leave "
                "it at 0, or take Residual()"
            )

    @property
    def plain(self) -> bool:
        """Whether the mean difference is what is taken from the parameters."""
        return self.lr == 1.0 and not self.momentum

    def update(self, momentum: Tensor | None, mean: Tensor) -> Tensor:
        """What is to be taken from the parameters, `lr` times. Changes the momentum, where there is one: in place."""
        if momentum is None:
            return mean
        momentum.mul_(self.momentum).add_(mean)
        return mean.add(momentum, alpha=self.momentum) if self.nesterov else momentum


class GlobalParameters:
    """Those of one unit: as all ranks had them after the last outer step, float32, and beside them this rank's own.

    Args:
        index: tells the unit from the others, alike on all ranks.
        parameters: this rank's, by name, which training changes.
        excluded: names of those that are not compressed.
        strategy: what is kept between rounds.
        outer: what moves them.

    Attributes:
        piecewise: whether the outer step is made some elements at a time, which lie in cache; else by few launches.
    """

    def __init__(
        self,
        index: int,
        parameters: Mapping[str, nn.Parameter],
        excluded: frozenset[str],
        strategy: Feedback,
        outer: OuterSGD,
    ) -> None:
        own = list(parameters.values())
        like = torch.empty(sum(p.numel() for p in own), dtype=torch.float32, device=own[0].device)
        self.slots, self.outer = layout_of(parameters), outer
        self.bucket = Bucket(index, list[Tensor](own), self.slots, excluded, like, strategy)
        self._moved = self._read(torch.empty_like(like))
        self.values = self._moved.to(like.device if outer.device is None else outer.device, copy=True)
        self.momentum = torch.zeros_like(self.values) if outer.momentum else None
        self.piecewise = like.device == self.values.device == torch.device("cpu")

    @property
    def names(self) -> frozenset[str]:
        return self.bucket.names

    @torch.no_grad()
    def difference(self, restart: bool = False) -> Tensor:
        """Global less local parameters, flat and float32, beside the local ones: what ranks exchange. It is the same
        memory every time.

        Args:
            restart: let this rank's parameters be the global ones at once.
        """
        vectors = backend_for(self.bucket.device).vectors
        for own, agreed, moved in self._whole(self.values.to(self.bucket.device), self._moved):
            vectors.difference(agreed, own, moved, restart)
        return self._moved

    @torch.no_grad()
    def move(self, mean: Tensor, mixing: float = 0.0, keep_local: bool = False) -> None:
        """The outer step, by the mean of the ranks' differences. This rank's parameters become the global ones, or lie
        between both, global + mixing·(local - global); with `keep_local` they make the same step."""
        if self.piecewise and self.outer.plain and not mixing:
            vectors = backend_for(mean.device).vectors
            for own, agreed, step in self._whole(self.values, mean):
                vectors.descend(agreed, step, own, keep_local)
            return
        if not self.piecewise:
            update = self.outer.update(self.momentum, mean.to(self.values.device))
            self.values.add_(update, alpha=-self.outer.lr)
            if not keep_local:
                self.hand_out(mixing)
                return
            for own, step in self._whole(update.to(mean.device)):
                own.add_(step, alpha=-self.outer.lr)
            return
        held = (self.values, mean) if self.momentum is None else (self.values, mean, self.momentum)
        for own, agreed, part, *momentum in self._pieces(*held):
            update = self.outer.update(momentum[0] if momentum else None, part)
            agreed.add_(update, alpha=-self.outer.lr)
            if keep_local:
                own.add_(update, alpha=-self.outer.lr)
            else:
                own.copy_(torch.lerp(agreed, own.float(), mixing) if mixing else agreed)

    @torch.no_grad()
    def hand_out(self, mixing: float = 0.0) -> None:
        """Let this rank's parameters be the global ones, or lie between both."""
        for own, agreed in self._pieces(self.values.to(self.bucket.device)):
            own.copy_(torch.lerp(agreed, own.float(), mixing) if mixing else agreed)

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Copies of the parts of a flat tensor in this layout, in the parameters' shapes."""
        return {slot.name: slot.view(flat).clone() for slot in self.slots}

    def fill(self, flat: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """What `by_name` gave, back into a flat tensor, which is returned."""
        for slot in self.slots:
            slot.view(flat).copy_(parts[slot.name])
        return flat

    def not_finite(self) -> Iterator[str]:
        """The names of this rank's parameters that have a NaN or an infinity. Waits for the device."""
        return (slot.name for slot, parameter in self.pairs if not bool(all_finite(parameter.detach())))

    @property
    def pairs(self) -> Iterable[tuple[Slot, Tensor]]:
        """Each parameter of this rank, and its slot."""
        return zip(self.slots, self.bucket.parameters, strict=True)

    def empty(self) -> Tensor:
        """A flat tensor beside this rank's parameters."""
        return torch.empty(self.bucket.numel, dtype=torch.float32, device=self.bucket.device)

    def _read(self, flat: Tensor) -> Tensor:
        """This rank's own parameters, into a flat tensor, which is returned."""
        return self.fill(flat, {slot.name: parameter.detach() for slot, parameter in self.pairs})

    def _whole(self, *flats: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Each of this rank's parameters, and its part of flat tensors beside them."""
        for slot, parameter in self.pairs:
            yield parameter.detach(), *(slot.view(flat) for flat in flats)

    def _pieces(self, *flats: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The same, or fewer elements at a time."""
        for own, *parts in self._whole(*flats):
            if self.piecewise and own.is_contiguous():
                yield from zip(*(part.reshape(-1).split(IN_CACHE) for part in (own, *parts)), strict=True)
            else:
                yield own, *parts


@dataclass
class InFlightRound:
    """Differences that are being exchanged, or their means."""

    globals: list[GlobalParameters]
    buffers: list[Tensor]
    futures: list[torch.futures.Future[Tensor]]
    due: int  # after so many counted steps they are applied
    keep_local: bool  # whether what ranks train meanwhile is kept
    step: Step | None  # None: from a checkpoint


def together(
    every: Iterable[GlobalParameters], arrived: Iterable[tuple[GlobalParameters, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """For a checkpoint: what is the same on all ranks, by `REPLICATED_KEYS` and name.

    Args:
        arrived: means that have not been applied.
    """
    found: dict[str, dict[str, Tensor]] = {what: {} for what in REPLICATED_KEYS}
    for shared in every:
        found["global"] |= shared.by_name(shared.values)
        found["momentum"] |= {} if shared.momentum is None else shared.by_name(shared.momentum)
    for shared, mean in arrived:
        found["arrived"] |= shared.by_name(mean)
    return found


def check_saved(
    saved: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter],
    every: Sequence[GlobalParameters],
) -> None:
    """Raises ValueError where what `together` gave does not fit."""
    needed: dict[str, Iterable[str]] = {
        "global": parameters,
        "momentum": parameters if every[0].momentum is not None else (),
        "arrived": (),
    }
    for what, names in needed.items():
        found = saved[what]
        missing = sorted(set(names) - found.keys())
        if missing:
            raise ValueError(f"the checkpoint has no {what} tensors of {', '.join(map(repr, missing))}")
        for name, values in found.items():
            own = parameters.get(name)
            if own is None or own.shape != values.shape:
                mine = "no such parameter" if own is None else f"shape {tuple(own.shape)}"
                raise ValueError(
                    f"the checkpoint is of another model: it has {name!r} of shape {tuple(values.shape)}, this "
                    f"model {mine}"
                )
    arrived = saved["arrived"].keys()
    if arrived != {name for shared in every if shared.names <= arrived for name in shared.names}:
        raise ValueError(
            "the checkpoint was saved while messages were under way, with other fragments or another "
            "bucket_cap_mb: load it with the same, or save after synchronise()"
        )


def fragments_of(
    parameters: Mapping[str, nn.Parameter], fragments: int, bucket_cap_mb: float
) -> list[list[dict[str, nn.Parameter]]]:
    """Parameters in so many groups of about equal size, each one or several units of at most so many MiB of float32, or
    of one parameter; in the order of the model.

    Raises:
        ValueError: there are not as many parameters, or `bucket_cap_mb` is no size.
    """
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, int | float) or not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r}: expected a number of MiB above 0")
    most = int(bucket_cap_mb * (1 << 18))
    names = list(parameters)
    if fragments > len(names):
        raise ValueError(f"fragments={fragments} of {len(names)} trainable parameters: expected no more than these")
    groups, start = [], 0
    sizes = [parameters[name].numel() for name in names]
    for left in range(fragments, 0, -1):
        share, size, end = sum(sizes[start:]) / left, sizes[start], start + 1
        # The one that crosses the boundary goes where more of it lies; and none of the others may be left empty.
        while len(names) - end >= left and size + sizes[end] / 2 <= share:
            size, end = size + sizes[end], end + 1
        end = len(names) if left == 1 else end
        groups.append(_buckets({name: parameters[name] for name in names[start:end]}, most))
        start = end
    return groups


def _buckets(parameters: Mapping[str, nn.Parameter], most: int) -> list[dict[str, nn.Parameter]]:
    buckets: list[dict[str, nn.Parameter]] = []
    size = 0
    for name, parameter in parameters.items():
        if not buckets or size + parameter.numel() > most:
            buckets.append({})
            size = 0
        buckets[-1][name] = parameter
        size += parameter.numel()
    return buckets


def layout_of(parameters: Mapping[str, nn.Parameter]) -> Layout:
    """Each in its shape, contiguous, one after the other: the same on all ranks, whatever the strides there."""
    strides = {name: torch.empty(p.shape, device="meta").stride() for name, p in parameters.items()}
    return end_to_end(Slot(name, 0, tuple(p.shape), strides[name]) for name, p in parameters.items())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
