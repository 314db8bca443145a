"""Tensors through a codec and back as their mean, with the state of a feedback strategy by name."""

from __future__ import annotations

import gc
import itertools
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....compress.feedback.base import RESIDUAL
from ....compress.feedback.store import FeedbackStore
from ....compress.formats.layout import Layout, Slot, end_to_end, layout_numel
from ...auto.planner import Choice, Plan, default_exchange
from ...comm.ports import drive
from ...core.bucket import Bucket
from ...core.report import report, tell
from ...core.statistics import Statistics
from ...exchanges import Dense, serving
from ..compression import CodecCompression
from ..runtime.channel import Channel

#: The states that optimizers have made, in their order: one that has not been used yet may be another rank's first.
_of_optimizers: weakref.WeakValueDictionary[int, CompressionState] = weakref.WeakValueDictionary()
_made = itertools.count()


class CompressionState:
    """One rank's feedback and counters for one compression.

    One thread at a time may call `reduce`; the other methods are for when no reduction is in flight.

    It shares buckets, exchanges, strategies and the store with `core.Reducer`, and cannot be one: Horovod negotiates
    which tensors go and in which order, also with ranks that have joined, and a Reducer's steps are alike on all ranks.

    Args:
        compression: codec, strategy and exchange.
        process_set: of the optimizer that it is made for, if it is.

    Attributes:
        scale: the loss scale in whose units gradients come; 1 without one.
        applied_counts: how often sent gradients were applied, and how often discarded, since this engine began.
        consolidated: the feedback is the mean over all ranks, just loaded.
    """

    def __init__(self, compression: CodecCompression, process_set: Any = None) -> None:
        self.compression, self.process_set = compression, process_set
        self.feedback = FeedbackStore(compression.strategy)
        self._buckets: dict[str, tuple[Channel, Bucket]] = {}
        self._steps: dict[str, int] = {}
        self.scale = 1.0
        self._statistics = Statistics()  # which remembers the line that says what is sent
        self._keeps_previous = False
        self.applied_counts = [0, 0]
        self.consolidated = False
        if process_set is not None:
            _of_optimizers[next(_made)] = self

    @property
    def included(self) -> bool:
        """True if this rank is in the process set of the optimizer that made it."""
        return self.process_set is not None and bool(self.process_set.included())

    def check_shapes(self, name: str, shapes: Sequence[Sequence[int]]) -> None:
        """Raises ValueError if tensors whose first is called `name` had other shapes, in which feedback is kept."""
        known, now = self._buckets.get(name), [tuple(shape) for shape in shapes]
        before = [slot.shape for slot in known[1].layout] if known else now
        if self.compression.keeps and before != now:
            raise ValueError(
                f"{name} had shapes {before} before, not {now}, and what {self.compression.codec} has left out of it "
                "is still to be sent: pass another name"
            )

    def reduce(self, layout: Layout, flat: Tensor, channel: Channel, keep: bool = True) -> None:
        """Replace `flat` by its mean over the ranks; without `keep` nothing but the step counter stays."""
        self.consolidated = False
        bucket, key = self._bucket(layout, flat, channel), layout[0].name
        step = self._steps.get(key, max(self._steps.values(), default=1) - 1)
        keeps = self.compression.encodes_feedback and bucket.exchange.name != Dense.name
        drive(bucket.reduce(flat, self.feedback, keeps, step))
        self._steps[key] = step + 1
        if self._statistics.told is None and bucket.exchange.rank == 0:
            self._tell(bucket)
        if not keep:
            del self._buckets[key]

    def _tell(self, bucket: Bucket) -> None:
        """Say what is sent, once."""
        made, codec = bucket.exchange, self.compression.codec
        if made.world_size == 1:
            tell(self._statistics, "one rank: nothing is sent")
            return
        size = 4 * bucket.numel, made.bytes_sent
        report(self._statistics, Choice(codec, made.name, False), [Plan(codec, made.name, False)], size)

    def is_new(self, name: str) -> bool:
        """True if there is no exchange yet for tensors whose first is called `name`.

        Exchanges remember earlier steps, which must be equal on all ranks.
        """
        return name not in self._buckets

    def restart(self, name: str) -> None:
        """Discard the exchange of tensors whose first is called `name`."""
        self._buckets.pop(name, None)

    def keep_previous(self) -> None:
        """Keep a snapshot of the feedback before each step from now on, for `rollback`."""
        if self._keeps_previous:
            return
        self._keeps_previous = True
        before = self.feedback.everything()
        self.feedback = FeedbackStore(self.compression.strategy, keep_previous=True)
        self.feedback.load(before)

    def follow_scale(self, scale: float) -> None:
        """Gradients come in units of this loss scale from now on."""
        if self.scale != scale:
            self.feedback.rescale(scale / self.scale)
        self.scale = scale

    def settle(self, applied: bool) -> None:
        """Take gradients sent since the last call as applied; or as discarded, and restore the feedback."""
        self.applied_counts[not applied] += 1
        if applied:
            self.feedback.commit()
        else:
            self.feedback.rollback()

    def follow_applied_counts(self, applied_counts: Sequence[int]) -> None:
        """On a rank that has joined: follow whether the others applied the steps in which it took part."""
        if applied_counts[1] != self.applied_counts[1]:
            self.feedback.rollback()
        if list(applied_counts) != self.applied_counts:
            self.feedback.commit()
        self.applied_counts = list(applied_counts)

    def state_dict(self, rank: int, size: int) -> dict[str, Any]:
        """Everything that this rank needs to go on: tensors, numbers and strings only. What owners of slices
        keep is folded into residuals, and there apart, too."""
        vectors = self.feedback.everything()
        return {
            "rank": rank,
            "world_size": size,
            "compression": repr(self.compression),
            "steps": dict(self._steps),
            "scale": self.scale,
            "residuals": vectors.pop(RESIDUAL, {}),
            **({"vectors": vectors} if vectors else {}),
            **({"owned": owned} if (owned := self.feedback.owned()) else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        vectors = {RESIDUAL: state["residuals"], **state.get("vectors", {})}
        self.feedback.load(vectors, state.get("owned", {}))
        self._steps = dict(state["steps"])
        self.scale = state["scale"] or 1.0
        # Exchanges stay: one rank may load alone, and join before it could say that its own are new.
        self.consolidated = state["rank"] == -1

    def disconnect(self) -> None:
        """Release the connections and every buffer, but keep the feedback."""
        self._buckets.clear()

    def _bucket(self, layout: Layout, flat: Tensor, channel: Channel) -> Bucket:
        """The bucket of tensors of this layout, on this channel."""
        known, bucket = self._buckets.get(layout[0].name, (None, None))
        if bucket is None or known is not channel or bucket.layout != layout or not bucket.serves([], flat):
            codec = self.compression.codec
            codec = self.compression.strategy.codec_for(codec) if self.compression.feedback else codec
            name = self.compression.exchange
            if name == "auto":
                name = default_exchange(codec, channel.size)
            group = channel.group(flat.device, self.compression.entropy_coding)
            # Numbered by its name, so that neither the order of operations nor a restart changes the draws.
            index = zlib.crc32(layout[0].name.encode())
            bucket = Bucket(index, [], layout, frozenset(), flat, self.compression.strategy)
            exchange = serving(name, group.launches(flat.device))
            made = exchange(codec.for_layout(layout), layout_numel(layout), 0, flat.device, group)
            bucket.use(made, self.compression.seed, group.rank)
            self._buckets[layout[0].name] = channel, bucket
        return bucket


def _made_by_optimizers(key: str, set_id: int) -> list[CompressionState]:
    """Living states of the compression whose text is `key` and of this process set, in order of their making."""
    made = (state for _, state in sorted(_of_optimizers.items()))
    return [s for s in made if repr(s.compression) == key and s.process_set.process_set_id == set_id]


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
        #: By text, process set and number.
        self._used: weakref.WeakValueDictionary[tuple[str, int, int], CompressionState] = weakref.WeakValueDictionary()
        #: Process set and number.
        self._labels: weakref.WeakKeyDictionary[CompressionState, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._recent: deque[CompressionState] = deque(maxlen=self.KEPT)

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
        """The state to which other ranks of a process set give this label, of the compression whose text is `key`.

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
        for state in [*self._by_name.values(), *self._used.values()]:
            state.disconnect()
        self._recent.clear()

    def applied_counts(self) -> list[tuple[str, int, int, list[int]]]:
        """`applied_counts` of the optimizers' states, by their labels."""
        return [(*label, list(state.applied_counts)) for label, state in self._used.items()]

    def follow_applied_counts(self, told: Iterable[tuple[str, int, int, list[int]]]) -> None:
        """As `applied_counts` was on the rank that has made the most steps."""
        for key, set_id, number, applied_counts in told:
            state = self._used.get((key, set_id, number))
            if state is not None:
                state.follow_applied_counts(applied_counts)

    def _use(self, key: str, set_id: int, number: int, state: CompressionState) -> None:
        self._used[key, set_id, number] = state
        self._labels[state] = set_id, number
        state.applied_counts = [0, 0]
        self._counts[key, set_id] = max(self._counts[key, set_id], number + 1)


def layout_of(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Layout:
    """Contiguous slots of these names and shapes, end to end."""
    shaped = zip(names, map(tuple, shapes), strict=True)
    return end_to_end(Slot(name, 0, shape, torch.empty(shape, device="meta").stride()) for name, shape in shaped)
