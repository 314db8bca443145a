"""A comparison of several arms' steps, to a percent: the cost of a hook beside PyTorch's own, say.

All arms live in the same processes, each with models of its own that begin alike, and take turns every few steps, in an
order that is drawn again in each round, as is which of the models: where one lies in memory makes a percent. What the
machine does meanwhile hits a round's arms alike, so each round gives a ratio to the reference; of these the median
counts, with the 95 % interval of order statistics, which assumes nothing of how they are distributed. The reference
takes part twice, and its own two turns are compared with each other: those rows say how far equal arms are apart here.
Steps of a turn follow each other without a barrier, as in training.

    gradwire-bench paired                                              # linear layers, what hooks cost
    gradwire-bench paired --task digits --rates 100mbit 1gbit --reference fp32 fp16 --arms auto

compares with the faster of several references, by its median step at that rate.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..common import report
from ..common.arguments import add_arms, add_layers, add_output, add_turns
from ..common.arms import ARMS, TRAINED, Arm
from ..common.models import Classifier, Experts, Tables, perceptron, residual, transformer
from ..learning import tasks, train
from ..links import flags, turns
from ..links.driver import document, measured_arms
from ..links.turns import AGAIN, KINDS, Trainee, milliseconds, on_one_batch
from ..links.verification import caption

LINEAR, TABLES, EXPERTS, HEAD = "linear", "tables", "experts", "head"
#: Models whose gradients say little: mostly zero, or of a low rank.
DRAWN: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    TABLES: ("ten tables of 100,000 embeddings of 64, one of each a sample", Tables),
    EXPERTS: ("16 experts of 0.5 M parameters, one a sample", Experts),
    HEAD: ("a head of 50,000 classes and width 1024 on a small body", Classifier),
}
#: Models that compute for long, with their batches.
LARGE = {
    "residual": ("ResNet-50, batch 8", residual),
    "transformer": ("transformer of 25 M, batch 8 x 128", transformer),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--task", choices=(LINEAR, *DRAWN, *LARGE, *tasks.TASKS), default=LINEAR, help="model (default: %(default)s)"
    )
    flags.add_links(parser, "none")
    add_arms(parser, {name: arm.title for name, arm in ARMS.items()}, ["python", "dense"])
    parser.add_argument(
        "--reference", nargs="+", choices=ARMS, default=["builtin"], help="with it, or the fastest of several"
    )
    add_turns(parser, steps=4, rounds=200, warmup=6)
    parser.add_argument("--models", type=int, default=3, help="of each arm (default: %(default)s)")
    add_layers(parser, width=448, layers=7, batch=16)
    parser.add_argument("--bucket-mb", type=float, help="DDP's bucket_cap_mb (default: DDP's own, or the task's)")
    add_output(parser, timeout=600)


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench paired`."""
    names = ("task", "rounds", "models", "steps", "warmup", "width", "layers", "batch", "bucket_mb")
    arguments = {name: getattr(options, name) for name in names}
    arguments["arms"] = list(dict.fromkeys([*options.reference, *options.arms]))
    arguments["references"] = options.reference
    result = document("paired", options, **arguments)
    result["networks"] = measured_arms(
        options, measure, arguments, lambda ranks, shaped: turns.compared(ranks, options.reference)
    )
    report.deliver(result, tables(result), options)
    return 0


def known(task: str) -> dict[str, Arm]:
    """The arms of a task."""
    return ARMS | TRAINED if task in tasks.TASKS else ARMS


def trainee_of(task: str, arm: Arm, width: int, layers: int, batch: int, bucket_mb: float | None) -> Trainee:
    """A task's model in an arm's hands; of one of `gradwire-bench train` at the learning rate of its middle."""
    if task in tasks.TASKS:
        return train.trainee(tasks.TASKS[task], arm, tasks.TASKS[task].steps // 2)
    if task == LINEAR:
        return on_one_batch(arm, perceptron(width, layers, batch), bucket_mb, lr=1e-3)
    torch.manual_seed(0)
    if task in LARGE:
        return on_one_batch(arm, LARGE[task][1](), bucket_mb, lr=1e-4, momentum=0.9)
    return on_one_batch(arm, (DRAWN[task][1](), drawn_loss(task, batch)), bucket_mb, lr=1e-3)


def drawn_loss(kind: str, batch: int) -> Callable[[nn.Module], Tensor]:
    """The loss of one of `DRAWN`, each time on another batch."""
    generator = torch.Generator().manual_seed(dist.get_rank())

    def loss(model: nn.Module) -> Tensor:
        if kind == TABLES:
            out = model(torch.randint(100_000, (batch, 10), generator=generator))
        else:
            out = model(torch.randn(batch, 256, generator=generator))
        if kind == HEAD:
            return F.cross_entropy(out, torch.randint(out.shape[1], (batch,), generator=generator))
        return out.square().mean()

    return loss


def measure(
    task: str,
    arms: Sequence[str],
    references: Sequence[str],
    rounds: int,
    models: int,
    steps: int,
    warmup: int,
    **how: Any,
) -> dict[str, Any]:
    """Every rank's part: parameters, and `turns.results` of several models of each arm."""
    names = {name: name for name in arms} | {f"{name} {AGAIN}": name for name in references}
    trainees = {name: [trainee_of(task, known(task)[arm], **how) for _ in range(models)] for name, arm in names.items()}
    for several in trainees.values():
        for trainee in several:
            trainee.settle(warmup)
    found = turns.take_turns(trainees, rounds, steps, "turn")
    parameters = sum(p.numel() for p in trainees[arms[0]][0].installed.module.parameters())
    return {"parameters": parameters, "arms": turns.results(trainees, found)}


def title(name: str, task: str) -> str:
    """An arm's, for people."""
    first, _, again = name.partition(" ")
    return f"{known(task)[first].title}{', once more' if again else ''}"


def what(arguments: Mapping[str, Any], parameters: int) -> str:
    """The model, for people."""
    task, millions = arguments["task"], f"{parameters / 1e6:.1f} M parameters"
    if task == LINEAR:
        return f"linear layers, {millions}, batch {arguments['batch']}"
    if task in DRAWN:
        return f"{DRAWN[task][0]}, {millions}, batch {arguments['batch']} a rank"
    if task in LARGE:
        size = "" if arguments["bucket_mb"] is None else f", buckets of {arguments['bucket_mb']:g} MB"
        return f"{LARGE[task][0]}, {millions}{size}"
    return tasks.TASKS[task].title


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """For each rate one row for each arm."""
    arguments, found = result["arguments"], []
    for network in result["networks"]:
        rows = []
        for row in network["arms"]:
            decided = f" ({describe(row['sends'])})" if row["arm"] == "auto" else ""
            cells = [[milliseconds(row[f"{kind}_s"], 2), turns.limits(row[f"{kind}_ratio"])] for kind in KINDS]
            rows.append([f"{title(row['arm'], arguments['task'])}{decided}", *cells[0], *cells[1]])
        to = title(network["arms"][0]["reference"], arguments["task"])
        notes = [
            report.describe(result["environment"]),
            f"{arguments['rounds']} rounds of {arguments['steps']} steps, {arguments['models']} models an arm, one "
            "thread a rank; ratio: the median of the rounds', in brackets its 95 % interval; processor: "
            "time of the whole process; each the mean of the ranks",
            caption(network["proof"]),
        ]
        columns = ("arm", "step ms", "ratio", "processor ms", "ratio of these")
        head = f"Steps beside {to}: {what(arguments, network['parameters'])}, {network['links']}"
        found.append(report.Table(head, columns, rows, "\n".join(notes)))
    return found


def describe(sends: Sequence[str]) -> str:
    """The decisions of the models of "auto"."""
    counted = Counter(sends)
    return ", ".join(f"{n} of {len(sends)} {what}" if len(counted) > 1 else what for what, n in counted.most_common())
