"""A comparison of several arms' steps, to a percent: the cost of a hook beside PyTorch's own, say.

All arms live in the same processes, each with models of its own that begin alike, and take turns every few steps, in an
order that is drawn again in each round, as is which of the models: where one lies in memory makes a percent. What the
machine does meanwhile hits a round's arms alike, so each round gives a ratio to the reference; of these the median
counts, with the 95 % interval of order statistics, which assumes nothing of how they are distributed. The reference
takes part twice, and a round's turn is compared with each of the two, not with their mean: turns are late now and then
and never early, so a mean of two is late more often than one, and every other arm would look faster than it is. Its own
two turns are compared with each other: those rows say how far equal arms are apart here. Steps of a turn follow each
other without a barrier, as in training.

    gradwire-bench paired                                              # linear layers, what hooks cost
    gradwire-bench paired --task digits --rates 100mbit 1gbit --reference fp32 fp16 --arms auto

compares with the faster of several references, by its median step at that rate.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..common import report
from ..common.arguments import add_arms, add_layers, add_output, add_turns
from ..common.arms import ARMS, TRAINED, Arm, Installed
from ..common.models import Built, Classifier, Experts, Tables, perceptron, residual, transformer
from ..learning import tasks, train
from ..links import flags
from ..links.driver import average, document, measured
from ..links.verification import caption

LINEAR, TABLES, EXPERTS, HEAD = "linear", "tables", "experts", "head"
#: Models whose gradients say little: mostly zero, or of a low rank.
DRAWN = {
    TABLES: "ten tables of 100,000 embeddings of 64, one of each a sample",
    EXPERTS: "16 experts of 0.5 M parameters, one a sample",
    HEAD: "a head of 50,000 classes and width 1024 on a small body",
}
#: Models that compute for long, with their batches.
LARGE = {
    "residual": ("ResNet-50, batch 8", residual),
    "transformer": ("transformer of 25 M, batch 8 x 128", transformer),
}
#: The reference's second model.
AGAIN = "again"
#: Untimed steps of a turn: memory, and the processors' caches, were others' before.
OPENING = 1
SECONDS = ("wall", "cpu")


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
    result["networks"] = []
    for rate in options.rates:
        found, ranks = measured(options, rate, measure, arguments)
        result["networks"].append(
            {
                "links": found["links"],
                "proof": found["proof"],
                "parameters": ranks[0]["parameters"],
                "arms": summarize([rank["arms"] for rank in ranks], options.reference),
            }
        )
    report.deliver(result, tables(result), options)
    return 0


class Trainee:
    """A model in an arm's hands, and its steps."""

    def __init__(self, installed: Installed, step: Callable[[], None]) -> None:
        self.installed, self.step = installed, step

    def settle(self, steps: int) -> None:
        """Untimed steps, until nothing is tried any more."""
        for _ in range(steps):
            self.step()
        while self.installed.deciding:
            self.step()


def turn(step: Callable[[], None], steps: int) -> tuple[float, float]:
    """Seconds of a step: wall time, and the process's on all processors."""
    for _ in range(OPENING):
        step()
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    spent = time.process_time() - cpu
    return (time.perf_counter() - wall) / steps, spent / steps


def on_one_batch(arm: Arm, built: Built, bucket_mb: float | None, lr: float, momentum: float = 0.0) -> Trainee:
    """Steps under SGD, always with the same batch."""
    model, loss = built
    installed = arm.install(model, bucket_mb)
    optimizer = installed.optimizer(torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum))

    def step() -> None:
        optimizer.zero_grad()
        loss(installed.model).backward()
        optimizer.step()

    return Trainee(installed, step)


def linear(arm: Arm, width: int, layers: int, batch: int, bucket_mb: float | None) -> Trainee:
    """Steps of `perceptron`."""
    model, x, y = perceptron(width, layers, batch)
    return on_one_batch(arm, (model, lambda model: F.mse_loss(model(x), y)), bucket_mb, lr=1e-3)


def large(arm: Arm, kind: str, bucket_mb: float | None) -> Trainee:
    """Steps of one of `LARGE`."""
    torch.manual_seed(0)
    return on_one_batch(arm, LARGE[kind][1](), bucket_mb, lr=1e-4, momentum=0.9)


def drawn_batches(arm: Arm, kind: str, batch: int, bucket_mb: float | None) -> Trainee:
    """Steps of one of `DRAWN` under plain SGD, each with a batch of its own."""
    torch.manual_seed(0)
    model = {TABLES: Tables, EXPERTS: Experts, HEAD: Classifier}[kind]()
    installed = arm.install(model, bucket_mb)
    optimizer = installed.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        optimizer.zero_grad()
        if kind == TABLES:
            x = torch.randint(100_000, (batch, 10), generator=generator)
        else:
            x = torch.randn(batch, 256, generator=generator)
        out = installed.model(x)
        if kind == HEAD:
            F.cross_entropy(out, torch.randint(out.shape[1], (batch,), generator=generator)).backward()
        else:
            out.square().mean().backward()
        optimizer.step()

    return Trainee(installed, step)


def learner(task: tasks.Task, arm: Arm) -> Trainee:
    """Steps of a task of `gradwire-bench train`, at the learning rate of its middle."""
    installed, optimizer, batches = train.prepared(task, arm, seed=0)
    return Trainee(installed, lambda: task.train_step(installed.model, optimizer, task.steps // 2, next(batches)))


def measure(
    task: str,
    arms: Sequence[str],
    references: Sequence[str],
    rounds: int,
    models: int,
    steps: int,
    warmup: int,
    width: int,
    layers: int,
    batch: int,
    bucket_mb: float | None,
) -> dict[str, Any]:
    """Every rank's part: for each arm, seconds of a step in each round, and whether its models compress."""
    make: Callable[[Arm], Trainee]
    if task == LINEAR:
        known, make = ARMS, partial(linear, width=width, layers=layers, batch=batch, bucket_mb=bucket_mb)
    elif task in DRAWN:
        known, make = ARMS, partial(drawn_batches, kind=task, batch=batch, bucket_mb=bucket_mb)
    elif task in LARGE:
        known, make = ARMS, partial(large, kind=task, bucket_mb=bucket_mb)
    else:
        known, make = ARMS | TRAINED, partial(learner, tasks.TASKS[task])
    trainees = {name: [make(known[name]) for _ in range(models)] for name in arms}
    trainees |= {f"{name} {AGAIN}": [make(known[name]) for _ in range(models)] for name in references}
    everyone = [trainee for several in trainees.values() for trainee in several]
    for trainee in everyone:
        trainee.settle(warmup)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in trainees}
    order, drawn = list(trainees), random.Random(0)
    for _ in range(rounds):
        drawn.shuffle(order)
        for name in order:
            seconds[name].append(turn(drawn.choice(trainees[name]).step, steps))
    result = {
        name: {
            **dict(zip(SECONDS, zip(*seconds[name], strict=True), strict=True)),
            "sends": [trainee.installed.sends() for trainee in several],
        }
        for name, several in trainees.items()
    }
    parameters = sum(p.numel() for p in everyone[0].installed.module.parameters())
    for trainee in everyone:
        trainee.installed.close()
    return {"parameters": parameters, "arms": result}


def summarize(ranks: Sequence[Mapping[str, Any]], references: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each arm, in the order in which they are given: its median seconds, and its ratios, by round, to one
    turn of the reference and then to the other. The reference's own turns have one each, to the other.

    Args:
        ranks: for each rank, for each arm: `wall` and `cpu` seconds of a step in each round, and what each of its
            models `sends`.
    """
    seconds = {
        name: {kind: average([[rank[name][kind]] for rank in ranks])[0] for kind in SECONDS} for name in ranks[0]
    }
    reference = min(references, key=lambda name: report.median(seconds[name]["wall"]))
    twice = (reference, f"{reference} {AGAIN}")
    rows: list[dict[str, Any]] = []
    for name, mine in seconds.items():
        row: dict[str, Any] = {"arm": name, "reference": reference, "sends": ranks[0][name]["sends"]}
        for kind in SECONDS:
            others = [seconds[other][kind] for other in twice if other != name]
            ratios = [a / b for other in others for a, b in zip(mine[kind], other, strict=True)]
            row[f"{kind}_s"] = report.median(mine[kind])
            row[f"{kind}_ratio"] = report.median_interval(ratios, independent=len(mine[kind]))
            row[f"{kind}_ratios"] = ratios
        rows.append(row)
    return rows


def title(name: str, task: str) -> str:
    """An arm's, for people."""
    first, _, again = name.partition(" ")
    known = ARMS | TRAINED if task in tasks.TASKS else ARMS
    return f"{known[first].title}{', once more' if again else ''}"


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """For each rate one row for each arm."""
    arguments, found = result["arguments"], []
    for network in result["networks"]:
        rows = []
        for row in network["arms"]:
            decided = f" ({describe(row['sends'])})" if row["arm"] == "auto" else ""
            cells = [f"{title(row['arm'], arguments['task'])}{decided}"]
            for kind in SECONDS:
                cells.append(f"{row[f'{kind}_s'] * 1e3:.2f}")
                cells.append(shown(row[f"{kind}_ratio"]))
            rows.append(cells)
        to = title(network["arms"][0]["reference"], arguments["task"])
        if arguments["task"] == LINEAR:
            what = f"linear layers, {network['parameters'] / 1e6:.1f} M parameters, batch {arguments['batch']}"
        elif arguments["task"] in DRAWN:
            what = f"{DRAWN[arguments['task']]}, {network['parameters'] / 1e6:.1f} M parameters, "
            what += f"batch {arguments['batch']} a rank"
        elif arguments["task"] in LARGE:
            size = "" if arguments["bucket_mb"] is None else f", buckets of {arguments['bucket_mb']:g} MB"
            what = f"{LARGE[arguments['task']][0]}, {network['parameters'] / 1e6:.1f} M parameters{size}"
        else:
            what = tasks.TASKS[arguments["task"]].title
        notes = [
            report.describe(result["environment"]),
            f"{arguments['rounds']} rounds of {arguments['steps']} steps, {arguments['models']} models an arm, one "
            "thread a rank; ratio: the median of the rounds', in brackets its 95 % interval; processor: "
            "time of the whole process; each the mean of the ranks",
            caption(network["proof"]),
        ]
        columns = ("arm", "step ms", "ratio", "processor ms", "ratio of these")
        found.append(report.Table(f"Steps beside {to}: {what}, {network['links']}", columns, rows, "\n".join(notes)))
    return found


def describe(sends: Sequence[str]) -> str:
    """The decisions of the models of "auto"."""
    counted = Counter(sends)
    return ", ".join(f"{n} of {len(sends)} {what}" if len(counted) > 1 else what for what, n in counted.most_common())


def shown(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
