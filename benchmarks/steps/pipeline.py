"""A step of a pipeline, with what travels between its stages encoded, beside the same without.

The model is the byte-level transformer of `gradwire-bench learn` at any size, its blocks shared equally among the
ranks, one stage each, under 1F1B. All arms live in the same processes, each with stages of its own that begin alike,
and take turns every few steps, in an order that is drawn again in each round; each round gives a ratio to the
reference, as in `gradwire-bench paired`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...compress import QSGD, Cast, Codec
from ...hooks.pipelining.stage import compress_stage
from ..common import report
from ..common.arguments import add_arms, add_output, add_turns
from ..common.arms import label
from ..common.language_model import VOCABULARY, LanguageModel, norm
from ..links import flags, turns
from ..links.driver import document, measured_arms
from ..links.turns import AGAIN, Trainee, milliseconds
from ..links.verification import caption


@dataclass(frozen=True)
class PipelineArm:
    """Codes of activations and their gradients; none: they travel as they are."""

    codec: Codec | None = None
    backward: Codec | None = None
    rotate: bool = True

    @property
    def title(self) -> str:
        if self.codec is None:
            return "torch alone"
        gradients = "" if self.backward is None else f", gradients {label(self.backward)}"
        return label(self.codec) + gradients


REFERENCE = "float32"
ARMS = {
    REFERENCE: PipelineArm(),
    "float16": PipelineArm(Cast(torch.float16), rotate=False),
    "q8": PipelineArm(QSGD(bits=8)),
    "q8-q4": PipelineArm(QSGD(bits=8), QSGD(bits=4)),
    "q6-q4": PipelineArm(QSGD(bits=6), QSGD(bits=4)),
    "q4": PipelineArm(QSGD(bits=4)),
}
#: Options of the model and its batch.
SIZES = ("width", "layers", "context", "rows", "chunks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_links(parser, "100mbit", "1gbit")
    add_arms(parser, {name: arm.title for name, arm in ARMS.items()}, list(ARMS))
    add_turns(parser, steps=2, rounds=30, warmup=2)
    parser.add_argument("--width", type=int, default=128, help="of the transformer (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="blocks of all stages together (default: %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="bytes of a sample (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="samples of a micro-batch (default: %(default)s)")
    parser.add_argument("--chunks", type=int, default=8, help="micro-batches of a step (default: %(default)s)")
    add_output(parser, timeout=600)


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench pipeline`."""
    arguments = {name: getattr(options, name) for name in ("rounds", "steps", "warmup", *SIZES)}
    arguments["arms"] = list(dict.fromkeys([REFERENCE, *options.arms]))
    if options.layers % options.world or options.chunks < options.world:
        raise ValueError(
            f"--layers {options.layers} --chunks {options.chunks}: expected a multiple of --world {options.world}, and "
            "at least as many micro-batches"
        )
    result = document("pipeline", options, **arguments)
    result["networks"] = measured_arms(
        options, measure, arguments, lambda ranks, shaped: turns.compared(ranks, [REFERENCE])
    )
    report.deliver(result, tables(result), options)
    return 0


class Part(nn.Module):
    """A stage's share of a language model."""

    def __init__(self, model: LanguageModel, stage: int, stages: int) -> None:
        super().__init__()
        share = len(model.blocks) // stages
        self.blocks = model.blocks[stage * share : (stage + 1) * share]
        self.embedding = model.embedding if stage == 0 else None
        self.head = model.head if stage == stages - 1 else None
        self.register_buffer("angles", model.angles, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = norm(self.embedding(x))
        for block in self.blocks:
            x = block(x, self.angles)
        return x if self.head is None else self.head(norm(x))


def trainee_of(arm: PipelineArm, width: int, layers: int, context: int, rows: int, chunks: int) -> tuple[Trainee, Any]:
    """Steps of this rank's stage in an arm's hands, and what counts its bytes; None where nothing is encoded."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    part = Part(LanguageModel(width, layers, max(1, width // 32), context), rank, world)
    stage, state = PipelineStage(part, rank, world, torch.device("cpu")), None
    if arm.codec is not None:
        state = compress_stage(stage, arm.codec, arm.backward, rotate=arm.rotate)
    schedule, optimizer = Schedule1F1B(stage, chunks, loss_fn=loss_of), torch.optim.SGD(part.parameters(), lr=1e-3)
    tokens = torch.randint(VOCABULARY, (chunks * rows, context))
    inputs = (tokens,) if rank == 0 else ()
    targets: dict[str, Any] = {"target": tokens} if rank == world - 1 else {}

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*inputs, **targets)
        optimizer.step()

    return Trainee(None, step), state


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def measure(arms: Sequence[str], rounds: int, steps: int, warmup: int, **sizes: int) -> dict[str, Any]:
    """Every rank's part: `turns.results`, and the bytes of activations that a step sends."""
    made = {name: trainee_of(ARMS[name.partition(" ")[0]], **sizes) for name in (*arms, f"{REFERENCE} {AGAIN}")}
    trainees = {name: [trainee] for name, (trainee, _) in made.items()}
    for trainee, _ in made.values():
        trainee.settle(warmup)
    found = turns.results(trainees, turns.take_turns(trainees, rounds, steps, "turn"))
    taken = max(warmup, 1) + rounds * (turns.OPENING + steps)
    plain = sizes["chunks"] * sizes["rows"] * sizes["context"] * sizes["width"] * 4
    sent = {name: state.statistics()["activations"].bytes_sent / taken for name, (_, state) in made.items() if state}
    return {"bytes": {name: sent.get(name, plain) for name in made}, "arms": found}


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """For each rate one row for each arm."""
    arguments, found = result["arguments"], []
    size = f"width {arguments['width']}, {arguments['layers']} blocks, {arguments['chunks']} micro-batches of "
    size += f"{arguments['rows']} times {arguments['context']} bytes"
    for network in result["networks"]:
        rows = []
        for row in network["arms"]:
            name, _, again = row["arm"].partition(" ")
            rows.append(
                [
                    ARMS[name].title + (", once more" if again else ""),
                    f"{network['bytes'][row['arm']] / 1e3:.0f}",
                    milliseconds(row["wall_s"], 0),
                    turns.limits(row["wall_ratio"]),
                    milliseconds(row["cpu_s"], 0),
                ]
            )
        notes = [
            report.describe(result["environment"]),
            f"{arguments['rounds']} rounds of {arguments['steps']} steps, one thread a rank; ratio: the median of the "
            "rounds', in brackets its 95 % interval; processor: time of the whole process; each the mean of the ranks",
            caption(network["proof"]),
        ]
        columns = ("between stages", "KB of activations", "step ms", "ratio", "processor ms")
        title = f"A pipeline's step: {arguments['world']} stages, {size}, {network['links']}"
        found.append(report.Table(title, columns, rows, "\n".join(notes)))
    return found
