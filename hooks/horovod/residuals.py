"""Tensors through a codec and back as their mean, with what the codec leaves out kept by name."""

from __future__ import annotations

import gc
import itertools
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ...compress.codec import Codec
from ...compress.feedback.base import RESIDUAL, RESIDUAL_DTYPES, Residual
from ...compress.feedback.store import Memory
from ...compress.formats.layout import Layout, Slot, layout_numel
from ..auto.planner import check_exchange, default_exchange
from ..comm.ports import drive
from ..core.bucket import Bucket
from ..exchanges import EXCHANGES, Dense
from .collectives import Channel


class Numbered(Protocol):
    """A process set."""

    @property
    def process_set_id(self) -> int | None: ...


@dataclass(frozen=True)
class CodecCompression:
    """A codec and how it is used.

    Args:
        codec: any of `gradwire.compress`.
        error_feedback: whether to keep what compression leaves out and add it to the next tensor of that name. "auto"
            does so for codecs that contract (the deterministic ones); True makes stochastic codecs round to nearest.
            `gradwire.Residual(decay=…, dtype=…)` also says how.
        exchange: "gather", "two_pass", "union", "split", "factors", "dense" or "auto": the one that receives the
            fewest bytes, or is made for the codec.
        seed: of stochastic rounding, equal on all ranks.
    """

    codec: Codec
    error_feedback: bool | str | Residual = "auto"
    exchange: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.codec, type) and issubclass(self.codec, Codec):
            raise TypeError(
                f"codec={self.codec.__name__} is a class: make a codec of it, such as {self.codec.__name__}()"
            )
        if not isinstance(self.codec, Codec):
            raise TypeError(f"codec={self.codec!r}: expected a codec, such as gradwire.TopK(density=0.01)")
        if not (isinstance(self.error_feedback, bool | Residual) or self.error_feedback == "auto"):
            raise ValueError(f"error_feedback={self.error_feedback!r}: expected True, False, 'auto' or Residual()")
        check_exchange(self.exchange, self.codec, besides=("auto",))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not -(1 << 63) <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed!r}: expected a whole number of 64 bits, equal on all ranks")

    @property
    def feedback(self) -> bool:
        wanted = self.codec.default_feedback if self.error_feedback == "auto" else bool(self.error_feedback)
        return wanted and not self.codec.lossless

    @property
    def keeps(self) -> bool:
        """Whether anything is left to be sent later."""
        return self.feedback and self.exchange != "dense"

    @property
    def strategy(self) -> Residual:
        """What is done with that."""
        return self.error_feedback if isinstance(self.error_feedback, Residual) else Residual()

    def goes_on_from(self, text: str) -> bool:
        """Whether a checkpoint of a compression of this text fits: one that keeps the same, in whatever bytes."""
        ways: list[bool | str | Residual] = [replace(self.strategy, dtype=dtype) for dtype in RESIDUAL_DTYPES]
        if self.strategy.decay == 1.0:
            ways += ["auto", True]
        if not isinstance(self.error_feedback, Residual):
            ways.append(self.error_feedback)
        others = (replace(self, error_feedback=way) for way in ways)
        return any(repr(other) == text and other.feedback == self.feedback for other in others)


class CompressionState:
    """One rank's residuals and counters for one way of compressing. `reduce` is for one thread at a time; the other
    methods are for when no reduction is under way.

    Args:
        compression: how to compress.
    """

    def __init__(self, compression: CodecCompression) -> None:
        self.compression = compression
        self.feedback = Memory(compression.strategy)
        self._units: dict[str, tuple[Channel, Bucket]] = {}
        self._shapes: dict[str, list[tuple[int, ...]]] = {}
        self._steps: dict[str, int] = {}
        self._scale = 1.0
        self._keeps_previous = False
        #: How often what was sent has been applied, and how often it was thrown away, since this engine began.
        self.outcomes = [0, 0]
        #: Whether the residuals are the mean over all ranks, just loaded.
        self.consolidated = False
        #: The process set of the optimizer that made it.
        self.process_set: Numbered | None = None

    def check_shapes(self, name: str, shapes: Sequence[Sequence[int]]) -> None:
        """Raises ValueError if tensors whose first is called `name` have had other shapes, in which residuals are."""
        before, now = self._shapes.get(name), [tuple(shape) for shape in shapes]
        if self.compression.keeps and before is not None and before != now:
            raise ValueError(
                f"{name} had shapes {before} before, not {now}, and what {self.compression.codec} has left out of it "
                "is still to be sent: pass another name"
            )

    def reduce(self, layout: Layout, flat: Tensor, channel: Channel, keep: bool = True) -> None:
        """Replace `flat` by its mean over the ranks; without `keep` nothing but the step counter stays."""
        if not layout_numel(layout):
            return
        self.consolidated = False
        self._shapes[layout[0].name] = [slot.shape for slot in layout]
        unit, key = self._unit(layout, flat, channel), layout[0].name
        step = self._steps.get(key, max(self._steps.values(), default=1) - 1)
        keeps = self.compression.keeps and unit.exchange.name != Dense.name
        drive(unit.reduce(flat, self.feedback, keeps, step))
        self._steps[key] = step + 1
        if not keep:
            del self._units[key], self._shapes[key]

    def is_new(self, name: str) -> bool:
        """Whether nothing is kept of the exchanges of tensors whose first is called `name`: what an exchange remembers
        of earlier steps must be equal on all ranks."""
        return name not in self._units

    def restart(self, name: str) -> None:
        """Let that be so."""
        self._units.pop(name, None)

    def keep_previous(self) -> None:
        """From now on keep the residuals as they were before each step, for `undo`."""
        if self._keeps_previous:
            return
        self._keeps_previous = True
        before = self.feedback.everything()
        self.feedback = Memory(self.compression.strategy, keep_previous=True)
        self.feedback.load(before)

    @property
    def scale(self) -> float:
        """The loss scale in whose units gradients come; 1 without one."""
        return self._scale

    def have_scale(self, scale: float) -> None:
        """All gradients so far have come in units of this loss scale."""
        self._scale = scale

    def follow_scale(self, scale: float) -> None:
        """Gradients come in units of this loss scale from now on."""
        if self._scale != scale:
            self.feedback.rescale(scale / self._scale)
        self._scale = scale

    def settle(self, applied: bool) -> None:
        """What was sent since the last call has been applied; or it was thrown away, so put it back."""
        self.outcomes[not applied] += 1
        if applied:
            self.feedback.commit()
        else:
            self.feedback.undo()

    def follow_outcomes(self, outcomes: Sequence[int]) -> None:
        """On a rank that has joined: what has become of its part in the others' steps."""
        if outcomes[1] != self.outcomes[1]:
            self.feedback.undo()
        if list(outcomes) != self.outcomes:
            self.feedback.commit()
        self.outcomes = list(outcomes)

    def state_dict(self, rank: int, size: int) -> dict[str, Any]:
        """What this rank needs to go on: tensors, numbers and strings only. Folds second residuals into the first."""
        self.feedback.fold()
        return {
            "rank": rank,
            "world_size": size,
            "compression": repr(self.compression),
            "steps": dict(self._steps),
            "scale": self._scale,
            "residuals": self.feedback.by_name(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.feedback.load({RESIDUAL: state["residuals"]})
        self._steps = dict(state["steps"])
        self._scale = state["scale"] or 1.0
        self.consolidated = state["rank"] == -1
        self._units.clear()

    def disconnect(self) -> None:
        """Let go of the connections, and of every buffer, but keep the residuals."""
        self._units.clear()

    def reset(self) -> None:
        """Forget everything."""
        self.feedback.load({})
        self._steps.clear()
        self._scale = 1.0
        self._units.clear()

    def _unit(self, layout: Layout, flat: Tensor, channel: Channel) -> Bucket:
        """What serves tensors of this layout, on this channel."""
        known, unit = self._units.get(layout[0].name, (None, None))
        if unit is None or known is not channel or unit.layout != layout or not unit.serves([], flat):
            codec = self.compression.codec
            codec = codec.with_feedback() if self.compression.feedback else codec
            name = self.compression.exchange
            if name == "auto":
                name = default_exchange(codec, channel.size)
            group = channel.group(flat.device)
            # Numbered by its name, so that neither the order of operations nor a restart changes the draws.
            unit = Bucket(zlib.crc32(layout[0].name.encode()), [], layout, frozenset(), flat)
            exchange = EXCHANGES[name](codec.of_layout(layout), layout_numel(layout), 0, flat.device, group)
            unit.use(exchange, self.compression.seed, group.rank)
            self._units[layout[0].name] = channel, unit
        return unit


#: The states that optimizers have made, in their order: one that has not been used yet may be another rank's first.
_of_optimizers: weakref.WeakValueDictionary[int, CompressionState] = weakref.WeakValueDictionary()
_made = itertools.count()


def state_of_optimizer(compression: CodecCompression, process_set: Numbered) -> CompressionState:
    """A new state for an optimizer."""
    state = _of_optimizers[next(_made)] = CompressionState(compression)
    state.process_set = process_set
    return state


def _made_by_optimizers(key: str, set_id: int) -> list[CompressionState]:
    """Those alive of the compression whose text is `key` and of this process set, in their order."""
    return [
        state
        for _, state in sorted(_of_optimizers.items())
        if repr(state.compression) == key
        and state.process_set is not None
        and state.process_set.process_set_id == set_id
    ]


class States:
    """The states of one engine, under labels that are equal on all ranks: that of the operations that are compressed by
    name, and those of optimizers, numbered in each process set in the order of their first use. A rank that has joined
    finds by them what stands in for the gradients that it has no more: zeros, and its residuals, which others may
    depend on.
    """

    #: Optimizers whose state is kept although nobody else does: until it joins, a script may have dropped them.
    KEPT = 2

    def __init__(self) -> None:
        self._compressions: dict[str, CodecCompression] = {}
        self._by_name: dict[str, CompressionState] = {}
        # By text, process set and number.
        self._used: weakref.WeakValueDictionary[tuple[str, int, int], CompressionState] = weakref.WeakValueDictionary()
        #: Process set and number.
        self._labels: weakref.WeakKeyDictionary[CompressionState, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._recent: deque[CompressionState] = deque(maxlen=self.KEPT)

    def __iter__(self) -> Iterator[CompressionState]:
        return iter([*self._by_name.values(), *self._used.values()])

    def by_name(self, compression: CodecCompression) -> CompressionState:
        """Of the operations that are compressed by name."""
        key = repr(compression)
        self._compressions[key] = compression
        return self._by_name.setdefault(key, CompressionState(compression))

    def label(self, state: CompressionState, set_id: int) -> int | None:
        """The optimizer's number in this process set; None: it is used by name."""
        key = repr(state.compression)
        if self._by_name.get(key) is state:
            return None
        self._compressions[key] = state.compression
        known, number = self._labels.get(state, (None, 0))
        if known != set_id:
            number = self._counts[key, set_id]
            self._use(key, set_id, number, state)
        if state not in self._recent:
            self._recent.append(state)
        return number

    def find(self, key: str, set_id: int, label: int | None) -> CompressionState:
        """What other ranks of a process set call by this label, of the compression whose text is `key`.

        Raises:
            RuntimeError: this rank knows of no such compression.
        """
        compression = self._compressions.get(key) or next(
            (s.compression for s in _made_by_optimizers(key, set_id)), None
        )
        if compression is None:
            raise RuntimeError(
                f"other ranks go on with {key}, which this rank did not know before it joined: make the "
                "DistributedOptimizer, or call the operation once, on every rank first"
            )
        if label is None:
            return self.by_name(compression)
        state = self._used.get((key, set_id, label))
        if state is None:
            # The state of an optimizer that is gone must not be taken for the one that the others have used first: its
            # residuals would be sent. Many are in a cycle of references, with a scheduler for instance, until this.
            gc.collect()
            unused = [s for s in _made_by_optimizers(key, set_id) if s not in self._labels]
            state = unused[0] if unused else CompressionState(compression)
            self._use(key, set_id, label, state)
            self._recent.append(state)
        return state

    def disconnect(self) -> None:
        """Let go of the connections and buffers of all; and of those that nobody else keeps, for nobody joins here any
        more."""
        for state in self:
            state.disconnect()
        self._recent.clear()

    def outcomes(self) -> list[tuple[str, int, int, list[int]]]:
        """What has become of the optimizers' steps, by their labels."""
        return [(*label, list(state.outcomes)) for label, state in sorted(self._used.items(), key=lambda item: item[0])]

    def follow_outcomes(self, told: Iterable[tuple[str, int, int, list[int]]]) -> None:
        """As `outcomes` was on the rank that has made the most steps."""
        for key, set_id, number, outcomes in told:
            state = self._used.get((key, set_id, number))
            if state is not None:
                state.follow_outcomes(outcomes)

    def _use(self, key: str, set_id: int, number: int, state: CompressionState) -> None:
        self._used[key, set_id, number] = state
        self._labels[state] = set_id, number
        state.outcomes = [0, 0]
        self._counts[key, set_id] = max(self._counts[key, set_id], number + 1)


def check_residuals(residuals: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError if loaded residuals are not of parameters with these names and shapes."""
    for name, residual in residuals.items():
        shape = tuple(residual.shape)
        if shapes.get(name) != shape:
            known = f"it has {list(shapes[name])}" if name in shapes else f"are {', '.join(sorted(shapes))}"
            raise ValueError(
                f"the checkpoint has what compression left out of {name}, of shape {list(shape)}, and here {known}: "
                "pass the named_parameters with which it was saved, or leave out its entry 'gradwire' to go on without"
            )


def layout_of(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Layout:
    """Contiguous slots of these names and shapes, end to end."""
    slots, start = [], 0
    for name, shape in zip(names, shapes, strict=True):
        slot = Slot(name, start, tuple(shape), torch.empty(tuple(shape), device="meta").stride())
        slots.append(slot)
        start += slot.numel
    return tuple(slots)
