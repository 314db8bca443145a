"""The global parameters, and the outer optimizer that moves them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...compress.backends import all_finite, backend_for
from ...compress.feedback.base import Feedback
from ...compress.feedback.lead import Lead
from ...compress.feedback.store import FeedbackStore
from ...compress.formats.layout import Layout, Slot, end_to_end
from ..core.bucket import Bucket
from ..core.reducer import Step

P = TypeVar("P", bound=Tensor)

#: Keys of a checkpoint's tensors that are the same on all ranks; "arrived": means that are not yet applied.
REPLICATED_KEYS = ("global", "momentum", "arrived")
#: A checkpoint's key: True if ranks have gone on from the global parameters while a round is in flight.
CARRIED = "carried"
#: Elements of a piece of several tensors that fits a cache.
IN_CACHE = 1 << 16


@dataclass(frozen=True)
class OuterSGD:
    """SGD on the global parameters, with the ranks' mean difference as the gradient: bit for bit
    `torch.optim.SGD(lr=lr, momentum=momentum, nesterov=nesterov)`.

    Args:
        lr: above 0.
        momentum: in [0, 1); 0 keeps nothing. Leave it at 0 if `error_feedback` has a momentum (`Momentum`,
            `Tracking`); `Lead` needs the same.
        nesterov: the kind of momentum.
        device: device of θ0 and of the momentum; "cpu" saves memory of the GPU. By default that of the parameters.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True
    device: torch.device | str | None = field(default=None, repr=False)

    def check(self, strategy: Feedback | None = None) -> None:
        """Raise ValueError for invalid numbers, and for a momentum beside that of a strategy."""
        if not _is_number(self.lr) or not 0.0 < self.lr < float("inf"):
            raise ValueError(f"OuterSGD(lr={self.lr!r}): expected a number above 0, such as 1.0 or DiLoCo's 0.7")
        if not _is_number(self.momentum) or not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"OuterSGD(momentum={self.momentum!r}): expected a number in [0, 1), such as DiLoCo's 0.9")
        if self.momentum and strategy is not None and strategy.has_momentum:
            raise ValueError(
                f"OuterSGD(momentum={self.momentum!r}): error_feedback={strategy} hands out a momentum already: leave "
                "it at 0, or take Residual()"
            )
        if isinstance(strategy, Lead) and strategy.momentum != self.momentum:
            raise ValueError(
                f"OuterSGD(momentum={self.momentum!r}): error_feedback={strategy} goes with {strategy.momentum!r}: "
                f"pass Lead(momentum={self.momentum!r}, acts_as=…), or take Residual()"
            )

    @property
    def takes_mean(self) -> bool:
        """True if the update is the mean difference itself."""
        return self.lr == 1.0 and not self.momentum

    def update(self, momentum: Tensor | None, mean: Tensor) -> Tensor:
        """The update, to be subtracted `lr` times from the parameters. Changes the momentum in place."""
        if momentum is None:
            return mean
        momentum.mul_(self.momentum).add_(mean)
        return mean.add(momentum, alpha=self.momentum) if self.nesterov else momentum


class GlobalParameters:
    """The global parameters of one bucket, float32, as of the last outer step, beside this rank's own parameters.

    Args:
        index: identifies the bucket, alike on all ranks.
        parameters: this rank's, by name, which training changes.
        excluded: names of the parameters that are not compressed.
        strategy: the feedback strategy.
        outer: the outer optimizer.

    Attributes:
        piecewise: the outer step runs over pieces that fit a cache; else in few launches.
    """

    def __init__(
        self,
        index: int,
        parameters: Mapping[str, Tensor],
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
        #: The last round's mean, where it is kept.
        self.kept: Tensor | None = None
        self.piecewise = like.device == self.values.device == torch.device("cpu")

    @property
    def names(self) -> frozenset[str]:
        return self.bucket.names

    @torch.no_grad()
    def difference(self, restart: bool = False) -> Tensor:
        """Global minus local parameters, which ranks exchange: flat, float32, on the local ones' device. The memory is
        the same in every call.

        Args:
            restart: also set this rank's parameters to the global ones.
        """
        vectors = backend_for(self.bucket.device).vectors
        for own, agreed, moved in self._whole(self.values.to(self.bucket.device), self._moved):
            vectors.difference(agreed, own, moved, restart)
        return self._moved

    def keep(self, mean: Tensor) -> None:
        """Keep the mean of the last round for ranks that lack it, if their residuals depend on it."""
        if not self.bucket.exchange.concludes:
            self.kept = None
        elif self.kept is None:
            self.kept = mean.clone()
        else:
            self.kept.copy_(mean)

    def difference_again(self, former: Tensor) -> Tensor:
        """A `difference` of before, in the memory of all of them."""
        return self._moved.copy_(former)

    @torch.no_grad()
    def move(self, mean: Tensor, mixing: float = 0.0, keep_local: bool = False) -> None:
        """Make the outer step, by the mean of the ranks' differences. This rank's parameters become
        global + mixing·(local - global); with `keep_local` they make the same step instead."""
        if self.piecewise and self.outer.takes_mean and not mixing:
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
        """Set this rank's parameters to global + mixing·(local - global)."""
        for own, agreed in self._pieces(self.values.to(self.bucket.device)):
            own.copy_(torch.lerp(agreed, own.float(), mixing) if mixing else agreed)

    @torch.no_grad()
    def take_unsent(self, feedback: FeedbackStore) -> None:
        """Move this rank's residual out of its parameters: θ = θ0 - e. What does not fit their dtype stays in e."""
        if not feedback.has_any(self.bucket.layout):
            return
        places = {slot.name: (own.detach(), slot) for slot, own in self.pairs}
        agreed = self.values.to(self.bucket.device)
        with feedback.of(self.bucket.layout, self.bucket.device).open() as residual:
            assert residual is not None
            for slot in self.bucket.layout:
                (own, place), left = places[slot.name], slot.view(residual)
                target = place.view(agreed)
                own.copy_(target - left)
                left.sub_(target - own.float())

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Copies of a flat tensor's parts, by parameter and in its shape."""
        return {slot.name: slot.view(flat).clone() for slot in self.slots}

    def fill(self, flat: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `by_name`: copy `parts` into `flat`, and return it."""
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
        """Copy this rank's parameters into `flat`, and return it."""
        return self.fill(flat, {slot.name: parameter.detach() for slot, parameter in self.pairs})

    def _whole(self, *flats: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Each of this rank's parameters, and its part of flat tensors beside them."""
        for slot, parameter in self.pairs:
            yield parameter.detach(), *(slot.view(flat) for flat in flats)

    def _pieces(self, *flats: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """`_whole`, in pieces that fit a cache if `piecewise`."""
        for own, *parts in self._whole(*flats):
            if self.piecewise and own.is_contiguous():
                yield from zip(*(part.reshape(-1).split(IN_CACHE) for part in (own, *parts)), strict=True)
            else:
                yield own, *parts


@dataclass
class InFlightRound:
    """Differences in flight, or their means."""

    globals: list[GlobalParameters]
    buffers: list[Tensor]
    futures: list[torch.futures.Future[Tensor]]
    due: int  # the number of counted steps at which they are applied
    keep_local: bool  # keep the local progress made meanwhile
    step: Step | None  # None: from a checkpoint
    uncompressed: bool = False
    copies: list[Tensor] | None = None  # of differences that cannot be taken again
    steps: int = 0  # this rank's, which the differences include


def replicated(every: Iterable[GlobalParameters], arrived: InFlightRound | None) -> dict[str, Any]:
    """A checkpoint's part that is the same on all ranks: tensors by `REPLICATED_KEYS` and name, and `CARRIED`.

    Args:
        arrived: a round whose means have not been applied.
    """
    found: dict[str, Any] = {what: {} for what in REPLICATED_KEYS}
    for shared in every:
        found["global"] |= shared.by_name(shared.values)
        found["momentum"] |= {} if shared.momentum is None else shared.by_name(shared.momentum)
    if arrived is not None:
        for shared, mean in zip(arrived.globals, arrived.buffers, strict=True):
            found["arrived"] |= shared.by_name(mean)
        found[CARRIED] = arrived.keep_local
    return found


def restore(every: Sequence[GlobalParameters], saved: Mapping[str, Any]) -> InFlightRound | None:
    """The inverse of `replicated`: set the global parameters, and return the round that was in flight."""
    for shared in every:
        shared.fill(shared.values, saved["global"])
        if shared.momentum is not None:
            shared.fill(shared.momentum, saved["momentum"])
    parts = [shared for shared in every if shared.names <= saved["arrived"].keys()]
    means = [shared.fill(shared.empty(), saved["arrived"]) for shared in parts]
    for shared, mean in zip(parts, means, strict=True):
        shared.bucket.overflow = ~all_finite(mean)
    return InFlightRound(parts, means, [], saved["due"], bool(saved.get(CARRIED, False)), None) if parts else None


def check_saved(saved: Mapping[str, Any], parameters: Mapping[str, Tensor], every: Sequence[GlobalParameters]) -> None:
    """Raise ValueError if tensors of `replicated` do not fit this model."""
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


def fragments_of(parameters: Mapping[str, P], fragments: int, bucket_cap_mb: float) -> list[list[dict[str, P]]]:
    """Split parameters into `fragments` groups of about equal size, and each group into buckets of at most
    `bucket_cap_mb` MiB of float32, or of one larger parameter; in the order of the model.

    Raises:
        ValueError: there are fewer parameters than fragments, or `bucket_cap_mb` is no size.
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
        # A parameter across a boundary goes to the side with its larger part; no later group may be left empty.
        while len(names) - end >= left and size + sizes[end] / 2 <= share:
            size, end = size + sizes[end], end + 1
        end = len(names) if left == 1 else end
        groups.append(_buckets({name: parameters[name] for name in names[start:end]}, most))
        start = end
    return groups


def _buckets(parameters: Mapping[str, P], most: int) -> list[dict[str, P]]:
    buckets: list[dict[str, P]] = []
    size = 0
    for name, parameter in parameters.items():
        if not buckets or size + parameter.numel() > most:
            buckets.append({})
            size = 0
        buckets[-1][name] = parameter
        size += parameter.numel()
    return buckets


def layout_of(parameters: Mapping[str, Tensor]) -> Layout:
    """Each in its shape, contiguous, one after the other: the same on all ranks, whatever the strides there."""
    strides = {name: torch.empty(p.shape, device="meta").stride() for name, p in parameters.items()}
    return end_to_end(Slot(name, 0, tuple(p.shape), strides[name]) for name, p in parameters.items())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
