"""Activations and their gradients, encoded on the way between the stages of a pipeline.

A stage of `torch.distributed.pipelining` lists its messages of a micro-batch before a schedule launches them
(`get_fwd_send_ops` and three others), and turns to what it received when it needs it (`_retrieve_recv_activations`,
`_retrieve_recv_grads`). These six methods are wrapped, and nothing else of torch is touched: the lists name wires in
place of tensors, and what was received is decoded into the tensors that a stage has for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import __version__
from ...compress import Codec
from ...compress.codec import check_flag
from ..comm.between_steps import between_steps, undivided_module
from ..comm.group import Group
from ..comm.handshake import compare, side
from ..core.statistics import fewer, row
from .residual_scale import ResidualScale
from .tensor_coder import TensorCoder, coders

METHODS = (
    "get_fwd_send_ops",
    "get_fwd_recv_ops",
    "get_bwd_send_ops",
    "get_bwd_recv_ops",
    "_retrieve_recv_activations",
    "_retrieve_recv_grads",
)
#: Keys of statistics and states.
KINDS = ("activations", "gradients")
REMEDY = "Call compress_stage with the same arguments on every rank of the stages' group."


@dataclass
class StageStatistics:
    """Counts of the messages that a rank's stages have sent to other ranks. `print` shows them as a table.

    Attributes:
        messages: sent so far.
        dense_bytes: of the tensors in them.
        bytes_sent: of their codes, which travelled.
        residuals_dropped: those of `error_feedback` that were of another loss scale.
    """

    messages: int = 0
    dense_bytes: int = 0
    bytes_sent: int = 0
    residuals_dropped: int = 0

    def __str__(self) -> str:
        rows = {
            "messages": f"{self.messages:,}",
            "as tensors": f"{self.dense_bytes:,} bytes",
            "sent": f"{self.bytes_sent:,} bytes{fewer(self.dense_bytes, self.bytes_sent, 'the tensors')}",
        }
        if self.residuals_dropped:
            rows["residuals dropped"] = f"{self.residuals_dropped:,}"
        return "\n".join(map(row, rows, rows.values()))


@dataclass
class Direction:
    """One way through a stage: that of activations, or that of their gradients."""

    what: str
    coder: TensorCoder
    smallest: int
    scale: ResidualScale
    statistics: StageStatistics = field(default_factory=StageStatistics)
    #: By micro-batch and place in its list of messages; the next step takes the same again.
    sent: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    received: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    #: By micro-batch: wires under way, and the tensors that they are for.
    expected: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    shapes: dict[int, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    #: The micro-batches of this step that are sent.
    chunks: set[int] = field(default_factory=set)

    @torch.inference_mode(False)
    def wire(self, wires: dict[tuple[int, int], Tensor], chunk: int, index: int, tensor: Tensor) -> Tensor:
        nbytes = self.coder.wire_bytes(tensor.numel())
        known = wires.get((chunk, index))
        if known is None or known.numel() != nbytes or known.device != tensor.device:
            known = wires[chunk, index] = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
        return known

    def send(self, original: Callable[[int], list[Any]], chunk: int) -> list[Any]:
        """The messages of a micro-batch, encoded."""
        messages = original(chunk)
        begins = not self.chunks or chunk in self.chunks
        self.chunks = {chunk} if begins else self.chunks | {chunk}
        if self.coder.feedback:
            self.scale.follow()
        for index, message in enumerate(messages):
            tensor = message.tensor
            self._check_shape(index, chunk, tensor)
            self.statistics.messages += 1
            self.statistics.dense_bytes += tensor.nbytes
            if self.coder.takes(tensor, self.smallest):
                message.tensor = self.wire(self.sent, chunk, index, tensor)
                if begins:
                    self.coder.drop_if_foreign(tensor, index)
                self.coder.encode(tensor, message.tensor, index)
            self.statistics.bytes_sent += message.tensor.nbytes
        return messages

    def receive(self, original: Callable[[int], list[Any]], chunk: int) -> list[Any]:
        """The messages that a micro-batch waits for, into wires."""
        messages = original(chunk)
        expected = self.expected[chunk] = []
        for index, message in enumerate(messages):
            tensor = message.tensor
            if self.coder.takes(tensor, self.smallest):
                message.tensor = self.wire(self.received, chunk, index, tensor)
                expected.append((message.tensor, tensor))
        return messages

    def retrieve(self, original: Callable[[int], Any], chunk: int) -> Any:
        """The tensors that a micro-batch waited for, decoded."""
        for wire, tensor in self.expected.pop(chunk, ()):
            self.coder.decode(wire, tensor)
        return original(chunk)

    def _check_shape(self, index: int, chunk: int, tensor: Tensor) -> None:
        """Raises ValueError where a tensor is not like its predecessors: the next stage waits for one that is."""
        mine = tensor.shape, tensor.dtype
        first = self.shapes.setdefault(index, mine)
        if mine != first:
            raise ValueError(
                f"{self.what} {index} of micro-batch {chunk} has shape {tuple(mine[0])} and {mine[1]}, but the first "
                f"one had {tuple(first[0])} and {first[1]}, which the next stage waits for: make all micro-batches "
                "alike, for instance with DataLoader(drop_last=True)"
            )


class StageCompression:
    """The codes between stages, once they are installed: their statistics, their state, and the way back."""

    def __init__(
        self, stages: Sequence[Any], directions: Sequence[tuple[Direction, Direction]], scale: ResidualScale
    ) -> None:
        self._stages, self._directions, self._scale = tuple(stages), tuple(directions), scale
        for stage, (forward, backward) in zip(stages, directions, strict=True):
            wraps = (
                forward.send,
                forward.receive,
                backward.send,
                backward.receive,
                forward.retrieve,
                backward.retrieve,
            )
            for name, wrap in zip(METHODS, wraps, strict=True):
                setattr(stage, name, partial(wrap, getattr(stage, name)))

    def __str__(self) -> str:
        """This rank's stages and their counts so far."""
        head = f"<StageCompression of stage {', '.join(str(stage.stage_index) for stage in self._stages)}>"
        return "\n".join([head, *(f"{kind}:\n{counts}" for kind, counts in self.statistics().items())])

    def statistics(self) -> dict[str, StageStatistics]:
        """This rank's counts so far, of "activations" and of "gradients"."""
        found = {kind: StageStatistics() for kind in KINDS}
        for _, pair in self._pairs():
            for total, one in zip(found.values(), pair, strict=True):
                total.messages += one.statistics.messages
                total.dense_bytes += one.statistics.dense_bytes
                total.bytes_sent += one.statistics.bytes_sent
                total.residuals_dropped += int(one.coder.dropped)
        return found

    @between_steps
    def state_dict(self) -> dict[str, Any]:
        """Draws and residuals of this rank's stages, by stage; residuals without the loss scale."""
        self._scale.follow()
        return {str(stage.stage_index): self._state_of(pair) for stage, pair in self._pairs()}

    @between_steps
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            KeyError: one of this rank's stages is not in there; nothing is loaded.
        """
        missing = [str(stage.stage_index) for stage in self._stages if str(stage.stage_index) not in state]
        if missing:
            raise KeyError(f"no state of stage {', '.join(missing)}: it has {', '.join(state) or 'no stage'}")
        for stage, pair in self._pairs():
            for key, one in zip(KINDS, pair, strict=True):
                mine = state[str(stage.stage_index)][key]
                one.coder.draw.copy_(mine["draw"])
                one.coder.residuals = {k: r.to(stage.device, copy=True) for k, r in mine["residuals"].items()}
        self._scale.begin()

    def _pairs(self) -> Iterator[tuple[Any, tuple[Direction, Direction]]]:
        return zip(self._stages, self._directions, strict=True)

    def _state_of(self, pair: tuple[Direction, Direction]) -> dict[str, Any]:
        return {
            key: {
                "draw": one.coder.draw.clone(),
                "residuals": {index: residual / self._scale.scale for index, residual in one.coder.residuals.items()},
            }
            for key, one in zip(KINDS, pair, strict=True)
        }

    @between_steps
    def close(self) -> None:
        """Leave the stages as they were. Call it between steps, on every rank."""
        for stage in self._stages:
            for name in METHODS:
                vars(stage).pop(name, None)


def compress_stage(
    stages: Any,
    codec: Codec,
    backward: Codec | None = None,
    *,
    rotate: bool = True,
    error_feedback: bool = False,
    grad_scaler: torch.amp.GradScaler | Callable[[], float] | None = None,
    smallest: int = 1024,
    seed: int = 0,
) -> StageCompression:
    """Encode what travels between the stages of a pipeline.

    >>> stage = PipelineStage(module, stage_index, num_stages, device)
    >>> compress_stage(stage, QSGD(bits=4), backward=QSGD(bits=8))
    >>> schedule = Schedule1F1B(stage, n_microbatches, loss_fn)

    Every schedule of `torch.distributed.pipelining` serves, whether a rank has one stage or several; what two stages of
    one rank hand each other is not encoded. Tensors of other types than float32, float16 and bfloat16 travel as they
    are. A collective: every rank of the stages' group calls it, once, with all of its stages, before the first step.

    A non-finite number makes its block, rotated at least 256 elements, non-finite at the next stage too.

    Args:
        stages: this rank's stage, or a sequence of them, from `PipelineStage` or `pipeline(…).build_stage`.
        codec: of activations.
        backward: of their gradients; None: `codec` too, `Identity()`: they travel as they are.
        rotate: multiply each 256 elements by a Hadamard matrix before they are encoded: activations have outliers,
            which cost others of their block their precision (He et al., "TAH-Quant", arXiv 2506.01352, 2025).
        error_feedback: add what a gradient's code left out to the next micro-batch's gradient ("lazy error
            propagation": Song et al., "Optimus-CC", ASPLOS 2023). Codes are those with which a residual stays bounded.
        grad_scaler: the GradScaler that scales the loss, or a function that returns the loss scale of the present step.
            Residuals follow the scale, and a step that the GradScaler skips leaves them as they were before it.
            Without it, a residual that is far larger than a step's first gradient is dropped, and counted.
        smallest: tensors of fewer elements travel as they are.
        seed: of stochastic codes.

    Returns:
        Their statistics and state, and `close`, which takes the codes out again.

    Raises:
        ValueError, TypeError: on every rank: an argument is not possible, or ranks differ in theirs. Later, on the rank
            whose tensor it is: a micro-batch is not like the first one. Its neighbours then wait for as long as their
            group's timeout, as they do where torch itself finds that.
    """
    given = tuple(stages) if isinstance(stages, Sequence) else (stages,)
    problem: Exception | None = None
    described: dict[str, Any] = {}
    try:
        described = _description(given, codec, backward, rotate, error_feedback, smallest, seed)
        described["grad_scaler"] = "given" if grad_scaler is not None else "None"
        scale = ResidualScale(grad_scaler)
    except (TypeError, ValueError) as error:
        problem = error
    group = next((getattr(stage, "group", None) for stage in given), None) or dist.group.WORLD
    if group is None:
        raise problem or RuntimeError("compress_stage needs a process group: call init_process_group first")
    device = "cpu" if "cpu" in (kind.type for kind in group._device_types) else given[0].device
    everyone = Group(group).all_gather_object(side(described, problem), device)
    if problem is not None:
        raise problem
    compare(everyone, REMEDY)
    undivided_module(import_module("torch.distributed.pipelining.schedules"))
    pairs = []
    for stage in given:
        made = coders(stage.stage_index, codec, backward, rotate, error_feedback, seed, stage.device)
        names = (f"stage {stage.stage_index}: {what}" for what in ("activation", "gradient"))
        forward, back = (Direction(name, coder, smallest, scale) for name, coder in zip(names, made, strict=True))
        pairs.append((forward, back))
        scale.coders.append(back.coder)
    return StageCompression(given, pairs, scale)


def _description(
    stages: Sequence[Any],
    codec: Codec,
    backward: Codec | None,
    rotate: bool,
    error_feedback: bool,
    smallest: int,
    seed: int,
) -> dict[str, Any]:
    """Values that must be equal on all ranks.

    Raises:
        TypeError, ValueError: an argument is not possible.
    """
    if not stages:
        raise ValueError("stages is empty: pass this rank's PipelineStage")
    for stage in stages:
        if not all(hasattr(stage, name) for name in (*METHODS, "stage_index", "device")):
            raise TypeError(f"expected a stage of torch.distributed.pipelining, got {type(stage).__name__}")
        if any(name in vars(stage) for name in METHODS):
            raise ValueError(f"stage {stage.stage_index} is compressed already: close() that first")
    for name, one in (("codec", codec), ("backward", backward)):
        if not isinstance(one, Codec) and (name == "codec" or one is not None):
            raise TypeError(f"{name}={one!r}: expected a codec such as QSGD(bits=4)")
        if one is not None and one.exchange:
            raise ValueError(f"{name}={one}: goes through the exchange {one.exchange!r} among ranks: take a QSGD")
    check_flag("rotate", rotate)
    check_flag("error_feedback", error_feedback)
    if isinstance(smallest, bool) or not isinstance(smallest, int) or smallest < 0:
        raise ValueError(f"smallest={smallest!r}: expected a number of elements")
    return {
        "gradwire's version": __version__,
        "codec": str(codec),
        "backward": str(backward),
        "rotate": rotate,
        "error_feedback": error_feedback,
        "smallest": smallest,
        "seed": seed,
    }
