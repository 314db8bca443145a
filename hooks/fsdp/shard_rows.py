"""The unsharded gradient of one of FSDP's parameter groups: one row for each rank's shard.

FSDP passes, row by row, the parameters that have a gradient. Messages have all parameters in every step, so that
residuals keep their place, and messages their size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...compress.codec import new_draw
from ...compress.feedback.base import RESIDUAL, FeedbackState
from ...compress.feedback.residual import NOTHING
from ...compress.feedback.store import FeedbackStore
from ...compress.formats.layout import Layout, Slot, end_to_end, layout_numel
from ..auto.planner import Choice
from ..comm.group import Group
from ..comm.ports import Stages, Work
from ..comm.tasks import Clock
from ..exchanges import SCATTERS, ExchangeArgs, ReduceScatter
from .torch_internals import Shards, divide_factor, only_sums, post_divide


class Unsharded:
    """One parameter group: its layout in rows, its residuals, and its current exchange.

    Args:
        shards: FSDP's side of it.
        excluded: names of the parameters that travel uncompressed, inside the same messages.
        group: the ranks.
        feedback: the residuals by parameter, each [P, *shard].

    Attributes:
        contribution: factor from one rank's gradient, as FSDP passes it, to its part of the optimizer's gradient.
            Residuals are in FSDP's units.
        status: int64[2], an exchange's counts.
    """

    def __init__(self, shards: Shards, excluded: frozenset[str], group: Group, feedback: FeedbackStore) -> None:
        self.shards, self.group, self._feedback = shards, group, feedback
        self.ranks, self.rank = shards.size, shards.rank
        kept = end_to_end(slot for slot in shards.slots if slot.name not in excluded)
        rest = end_to_end(slot for slot in shards.slots if slot.name in excluded)
        self.columns, self.uncompressed = ({slot.name: slot for slot in slots} for slots in (kept, rest))
        self.numel, self.uncompressed_numel = layout_numel(kept), layout_numel(rest)
        self.layout: Layout = tuple(
            Slot(slot.name, slot.start, (self.ranks, *slot.shape), (self.numel, *slot.stride)) for slot in kept
        )
        self.contribution = self.usual_contribution()
        self.clock: Clock | None = None
        self._exchange: ReduceScatter | None = None
        self._choice: Choice | None = None
        self._packed: Tensor | None = None
        self._mean: Tensor | None = None
        device = shards.group.device
        self._uncompressed_rows = torch.zeros(self.ranks * self.uncompressed_numel, dtype=torch.float32, device=device)
        self._earlier = torch.zeros(2, dtype=torch.int64, device=device)
        #: True if the last step can be put back: the received codes are still in memory.
        self._kept_last = False
        #: Means of this pass before the last one, added up, of a module that is used more than once in it.
        self.means_before: Tensor | None = None

    def usual_contribution(self) -> float:
        """`contribution` by FSDP's settings as they are now."""
        group, dtype = self.shards.group, self.shards.dtype
        return 1.0 / (post_divide(group, dtype) if only_sums(group, dtype) else divide_factor(group))

    @property
    def status(self) -> Tensor:
        counts = [] if self._exchange is None else self._exchange.counts()
        return torch.stack([self._earlier, *counts]).sum(0)

    @property
    def exchange(self) -> ReduceScatter:
        """The current exchange."""
        assert self._exchange is not None
        return self._exchange

    def follow(self, choice: Choice, seed: int) -> ReduceScatter:
        """Reduce by this choice from now on."""
        if self._choice != choice:
            self._earlier, device = self.status, self.shards.group.device
            kind = next(kind for kind in SCATTERS.values() if kind.name == choice.exchange)
            name = f"{self.shards.index} {self.numel} {self.uncompressed_numel} {kind.name} {choice.codec}"
            channel = self.group.channel(name)
            self._exchange = kind(choice.codec, self.numel, self.uncompressed_numel, device, channel)
            stream = 2 * self.rank << 32 | self.shards.index * self.ranks
            draw = new_draw(seed, 0, stream, device)
            self._operands = ExchangeArgs(
                self._uncompressed_rows, self._uncompressed_rows, self._uncompressed_rows, NOTHING, (), draw, draw
            )
            self._choice = choice
        return self.exchange

    def forget(self) -> None:
        """Begin draws again."""
        self._choice = None

    def use_contribution(self, contribution: float) -> None:
        """Change FSDP's units, and rescale residuals."""
        if contribution != self.contribution:
            kept = self._kept()
            if kept is not None:
                kept.rescale(self.contribution / contribution)
            self.contribution = contribution

    # -- one step ----------------------------------------------------------------------------------------------------

    def reduce(self, output: Tensor, grads: Tensor, times_mean: float, step: int) -> Stages:
        """Stages: write the ranks' mean of this rank's row of the gradients, multiplied, to `output`."""
        assert self._choice is not None
        operands, keeps, whole = self._operands, self._choice.feedback, not self._moves
        operands.step = step
        if self.exchange.codec.stochastic:
            operands.draw[1] = step
        rows = grads if whole else self._pack(grads)
        if keeps:
            operands.grad, operands.feedback = rows, self._feedback.of(self.layout, rows.device)
        else:
            operands.grad, operands.feedback = self._feedback.drain(self.layout, rows), NOTHING
        operands.out = output if whole else self._own_mean()
        yield from self.exchange.reduce(operands)
        self._kept_last = keeps
        if not whole:
            self._unpack(operands.out, output)
            if self._feedback.holds(self.layout):  # parameters without a gradient were sent their residual
                self._give_back(operands.out, self.columns.keys() - self.shards.used)
        if operands.grad.is_cuda:
            operands.read_on_this_stream()
        operands.grad = operands.out = self._uncompressed_rows  # holds nothing between steps
        if times_mean != 1.0:
            output.mul_(times_mean)
        for port in self.exchange.ports:
            port.post_receives()

    def flush(self, grads: Tensor) -> None:
        """Add residuals to gradients that are about to be reduced uncompressed; what rounding cuts off stays."""
        kept = self._kept()
        if kept is None or not kept.keeps:
            return
        self._kept_last = False
        with kept.open():
            residual = kept[RESIDUAL].view(self.ranks, self.numel)
            for part, column in self._parts(grads.view(self.ranks, -1)):
                if column.name in self.columns:
                    rest = _columns(residual, column)
                    total = part.float() + rest
                    part.copy_(total)
                    rest.copy_(torch.where(total.isfinite(), total.sub_(part), rest))

    def reduced_again(self) -> None:
        """The module is used once more in this pass: note the last mean, which `put_back` must return, too."""
        if self._kept_last:
            self.exchange.decode(self._own_mean())
            self.means_before = (
                self._own_mean().clone() if self.means_before is None else self.means_before.add_(self._own_mean())
            )

    def put_back(self) -> None:
        """Return the means of this pass to this rank's residual: they are not applied."""
        if self._kept_last:
            self._kept_last = False
            self.exchange.decode(self._own_mean())
            for mean in (self._own_mean(), self.means_before):
                if mean is not None:
                    self._give_back(mean, self.columns.keys() & self.shards.used)
        self.means_before = None

    def collect(self, name: str, kept: Tensor | None) -> tuple[Tensor, Work]:
        """Start to collect this rank's shard of all ranks' residuals of a parameter, for `outstanding`. A collective.

        Args:
            kept: this rank's residual, [P, *shard]; None: zero.
        """
        device, shape = self.shards.group.device, tuple(self.shards.parameters[name].padded_sharded_param_size)
        rows = torch.zeros(self.ranks, *shape, dtype=torch.float32, device=device) if kept is None else kept.to(device)
        arrived = torch.zeros_like(rows)
        return arrived, self.group.all_to_all(arrived, rows)

    def outstanding(self, name: str, arrived: Tensor) -> Tensor:
        """This rank's shard of the sum of all ranks' residuals of a parameter, in the optimizer's units."""
        return self.shards.local(name, arrived.sum(0).mul_(self.contribution)).contiguous()

    def from_outstanding(self, shard: Tensor) -> Tensor:
        """The inverse of `outstanding`: this rank's residual of a parameter, [P, *shard], from its shard of the sum."""
        rows = shard.new_zeros(self.ranks, *shard.shape)
        torch.div(shard, self.contribution, out=rows[self.rank])
        return rows

    # -- where things lie --------------------------------------------------------------------------------------------

    @property
    def _moves(self) -> bool:
        return self.uncompressed_numel > 0 or len(self.shards.used) < len(self.columns)

    def _kept(self) -> FeedbackState | None:
        """The residual; None where nothing is kept."""
        return self._feedback.of(self.layout, self.shards.group.device) if self._feedback else None

    def _parts(self, rows: Tensor) -> Iterator[tuple[Tensor, Slot]]:
        """FSDP's columns, parameter by parameter, each with its column in the exchange."""
        start = 0
        for slot in self.shards.slots:
            if slot.name in self.shards.used:
                yield rows[..., start : start + slot.numel], self.columns.get(slot.name) or self.uncompressed[slot.name]
                start += slot.numel
        if start != rows.shape[-1]:
            raise RuntimeError(
                f"gradwire: FSDP reduces rows of {rows.shape[-1]} elements of module {self.shards.module!r}, and its "
                f"parameters with a gradient have {start}: this version of torch, {torch.__version__}, is not known"
            )

    def _pack(self, grads: Tensor) -> Tensor:
        """All parameters' rows, zeros where there is no gradient; fills the uncompressed rows, too."""
        if self._packed is None or self._packed.dtype != grads.dtype:
            self._packed = grads.new_zeros(self.ranks * self.numel)
        if len(self.shards.used) < len(self.columns) + len(self.uncompressed):
            self._packed.zero_()
            self._uncompressed_rows.zero_()
        rows, extras = (
            self._packed.view(self.ranks, self.numel),
            self._uncompressed_rows.view(self.ranks, self.uncompressed_numel),
        )
        for part, column in self._parts(grads.view(self.ranks, -1)):
            _columns(rows if column.name in self.columns else extras, column).copy_(part)
        return self._packed

    def _unpack(self, mean: Tensor, output: Tensor) -> None:
        for part, column in self._parts(output):
            part.copy_(column.flat(mean if column.name in self.columns else self._uncompressed_rows))

    def _give_back(self, mean: Tensor, names: set[str]) -> None:
        """Add the mean of some parameters' shards to this rank's residual, in the place of all ranks."""
        if not names:
            return
        with self._feedback.of(self.layout, mean.device).open() as residual:
            if residual is not None:
                own = residual.view(self.ranks, self.numel)[self.rank]
                for name in names:
                    part = self.columns[name].flat(mean)
                    self.columns[name].flat(own).add_(torch.where(part.isfinite(), part, 0.0), alpha=self.ranks)

    def _own_mean(self) -> Tensor:
        if self._mean is None:
            self._mean = torch.zeros(self.numel, dtype=torch.float32, device=self.shards.group.device)
        return self._mean


def _columns(rows: Tensor, slot: Slot) -> Tensor:
    return rows[:, slot.start : slot.start + slot.numel]
