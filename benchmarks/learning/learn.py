"""Loss against bytes: what models learn through each way of compressing, every way at its own best learning rate.

Ranks share a process (`ranks`), so a network plays no part: bytes are what a rank receives by the exchange
that the arm names, compared with those of a float32 ring all-reduce. Every arm searches its learning rate with the
first seed, float32 too: half, once and twice a rate to begin with, then on as long as the best one lies at an end. The
other seeds train at that rate. Differences to float32 are paired by seed.

Runs are written one by one, and those that are there already are not made again: interrupt it, and go on later. On a
GPU (`--device cuda`) the ranks share it, and forward and backward passes are compiled.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn

from ...compress import QSGD, Tracking
from ...compress.formats.layout import Layout, Slot, end_to_end
from ...hooks.local_sgd.outer_sgd import layout_of as in_order
from ..common import report
from ..common.arguments import add_arms, add_output, expect_counts
from ..common.language_model import update
from ..common.progress import Progress
from .arms import FLOAT32, LEARNED, MOMENTUM, LearningArm
from .independent_replicas import IndependentReplicas
from .ranks import InProcessRanks
from .search import Runs, best_rate, finite, loss_of, origin, still_needed
from .stages import train_in_stages
from .tasks import TASKS, Batch, Task, Text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="RUNS.jsonl", help="where runs are written, and read from")
    parser.add_argument("--task", choices=TASKS, default="small", help="what to learn (default: %(default)s)")
    parser.add_argument("--world", type=int, default=4, help="ranks (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="samples of all ranks in a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--optimizer", choices=("adamw", "sgd", "muon"), default="adamw", help="default: %(default)s")
    add_arms(parser, {name: way.title for name, way in LEARNED.items()})
    parser.add_argument(
        "--learning-rates",
        type=float,
        nargs="+",
        metavar="RATE",
        help="try these and no others; by default each arm searches its own",
    )
    parser.add_argument("--begin", type=float, help="the rate that searches begin at (default: the task's own)")
    parser.add_argument("--seeds", type=int, default=3, help="train with seeds 0 to N-1 (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, on CPUs (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--text", metavar="FILE", help="what language models read, in the place of the task's own text")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="begin no run that would not end by then")
    add_output(parser, plot="loss against bytes")


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench learn`."""
    expect_counts(options)
    names = ("task", "optimizer", "batch", "steps", *(["text"] if options.text else []))
    job = {name: getattr(options, name) for name in names}
    task = task_of(**job)
    task.share(options.world)
    arms = list(dict.fromkeys([FLOAT32, *options.arms]))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; leave it out, and CPUs are taken")
    on = {"device": torch.cuda.get_device_name()} if options.device == "cuda" else {}
    common = {**job, "world": options.world, **on}
    rates = options.learning_rates
    known = Runs(options.file, common | {"source": task.source}, arms, options.seeds, rates)
    begin, began = options.begin or task.learning_rates[task.optimizer], time.monotonic()

    def spare(seconds: float) -> bool:
        return options.stop_after is None or time.monotonic() - began + seconds < options.stop_after

    with Progress("learn", 0) as progress:
        while missing := list(still_needed(known, arms, rates, begin, options.seeds)):
            progress.more(len(missing))
            made = len(known)
            for done in make([{**common, **one} for one in missing], 1 if on else options.jobs, spare):
                known.add(done)
                progress.advance(1, f"{done['arm']} at {done['learning_rate']:g}: {loss_of(done):.3f}")
            if made + len(missing) > len(known):
                print("More runs are needed: the same command goes on.", file=sys.stderr)
                return 1
    result = report.document(
        "learn", {**common, "arms": arms, "seeds": options.seeds, "learning_rates": rates, "begin": begin}
    )
    known.sort(key=lambda run: (arms.index(run["arm"]), run["learning_rate"], run["seed"]))
    result |= {"task": task.describe(), "runs_say_where": True, "runs": known}
    report.deliver(result, tables(result), options, plot)
    return 0


def make(jobs: Sequence[Mapping[str, Any]], at_once: int, spare: Callable[[float], bool]) -> Iterator[dict[str, Any]]:
    """Each run as it ends, until there is no time to spare for another as long as the longest.

    Args:
        jobs: arguments of `learn`.
        spare: whether so many more seconds are there.
    """
    waiting, longest = deque(jobs), 0.0
    running: dict[Future[dict[str, Any]], float] = {}
    with ProcessPoolExecutor(at_once, get_context("spawn")) as pool:
        while waiting or running:
            if not spare(longest):
                waiting.clear()
            while waiting and len(running) < at_once:  # none beforehand: it could not be called off
                running[pool.submit(learn, **waiting.popleft())] = time.monotonic()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                longest = max(longest, time.monotonic() - running.pop(future))
                yield future.result()


def task_of(task: str, optimizer: str, batch: int, steps: int, text: str | None = None) -> Task:
    """A task under an optimizer.

    Raises:
        ValueError: the task has no parameters for that, or reads no text.
    """
    found = TASKS[task]
    if optimizer not in found.learning_rates:
        raise ValueError(f"--optimizer {optimizer}: {task} has {' and '.join(found.learning_rates)} only")
    if text is not None:
        if not isinstance(found, Text):
            raise ValueError(f"--text {text}: {task} reads none")
        found = replace(found, text=text)
    return replace(found, optimizer=optimizer, batch=batch, steps=steps)


def optimizers_of(task: Task, model: nn.Module, way: LearningArm) -> list[torch.optim.Optimizer]:
    """The task's; without momentum of their own where what is handed out has it.

    Muon (Jordan et al. 2024) is for the matrices of the blocks, with steps of the size of AdamW's (Liu et al., "Muon is
    scalable for LLM training", 2025), so that both have one learning rate; AdamW for embedding and head.
    """
    momentum = 0.0 if way.has_momentum else way.momentum
    if task.optimizer == "sgd":
        return [torch.optim.SGD(model.parameters(), momentum=momentum)]
    named = dict(model.named_parameters())
    matrices = {name: p for name, p in named.items() if name.startswith("blocks.") and p.ndim == 2}
    rest = [p for name, p in named.items() if task.optimizer == "adamw" or name not in matrices]
    adamw = torch.optim.AdamW(
        rest, betas=(min(momentum, MOMENTUM), task.beta2), weight_decay=task.weight_decay, fused=True
    )
    if task.optimizer == "adamw":
        return [adamw]
    muon = torch.optim.Muon(
        matrices.values(),
        momentum=momentum,
        nesterov=momentum > 0.0,
        weight_decay=task.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, adamw]


def learn(
    task: str,
    optimizer: str,
    world: int,
    batch: int,
    steps: int,
    arm: str,
    learning_rate: float,
    seed: int,
    text: str | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """One run: its arguments, the validation loss at the end, accuracy where the task has one, and bytes that a rank
    received for each parameter in a step, of float32's.

    Args:
        device: name of the GPU that it takes; None: none.
    """
    made = dict(locals())
    torch.set_num_threads(1)
    job, way = task_of(task, optimizer, batch, steps, text), LEARNED[arm]
    torch.manual_seed(seed)
    model = job.model().to("cpu" if device is None else "cuda")
    data = [job.batches(seed, rank, world) for rank in range(world)]
    rates = [learning_rate / job.learning_rates[optimizer] * job.rate(step) for step in range(steps)]
    if way.between is not None:
        share = train_in_stages(way.between, job, model, optimizers_of(job, model, way), data, rates, seed)
    else:
        train = train_together if way.rounds is None else train_apart
        model, received = train(way, job, model, data, rates, seed)
        ring = 2 * (world - 1) / world * 4 * sum(p.numel() for p in model.parameters())
        share = received / steps / ring
    sums = job.validation(model, 0, 1)
    return {
        **{name: value for name, value in made.items() if value is not None},
        "loss": finite(sums["loss"] / sums["count"]),
        **({"accuracy": sums["right"] / sums["count"]} if "right" in sums else {}),
        "share_of_bytes": share,
    }


def backward_of(job: Task, model: nn.Module) -> Callable[[nn.Module, Batch], None]:
    """Adds the gradients of a batch to those of a model like this one; compiled on a GPU."""
    device = next(model.parameters()).device
    loss_of = torch.compile(job.loss_of) if device.type == "cuda" else job.loss_of

    def backward(model: nn.Module, batch: Batch) -> None:
        inputs, targets = (x.to(device, non_blocking=True) for x in batch)
        loss_of(model, inputs, targets).backward()

    return backward


def train_apart(
    way: LearningArm, job: Task, model: nn.Module, data: Sequence[Iterator[Batch]], rates: Sequence[float], seed: int
) -> tuple[nn.Module, int]:
    """Every rank a model of its own, and rounds. Returns the model that they agree on, and the bytes received."""
    assert way.rounds is not None
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device
    ranks = InProcessRanks(len(data), in_order(parameters), way.codec, way.exchange, way.strategy, seed, device=device)
    backward = backward_of(job, model)
    apart = IndependentReplicas(way.rounds, ranks, model, lambda one: optimizers_of(job, one, way), backward, job.clip)
    received = sum(apart.step(data, rate) for rate in rates) + apart.synchronise()
    return apart.models[0], received


def train_together(
    way: LearningArm, job: Task, model: nn.Module, data: Sequence[Iterator[Batch]], rates: Sequence[float], seed: int
) -> tuple[nn.Module, int]:
    """One model for all ranks, whose gradients are exchanged. Returns it, and the bytes that a rank received."""
    world = len(data)
    parameters = list(model.parameters())
    layout, device = layout_of(model), parameters[0].device
    strategy, clip = way.clipped(job.clip, world)
    ranks = InProcessRanks(world, layout, way.codec, way.exchange, strategy, seed, device=device)
    if way.begins:
        ranks.use(QSGD(bits=8), "two_pass")
    updates, backward = optimizers_of(job, model, way), backward_of(job, model)
    flats = [torch.zeros(sum(p.numel() for p in parameters), device=device) for _ in range(world)]
    arriving: deque[Tensor] = deque(maxlen=way.late + 1)  # too late at the beginning: the first one until then
    received = 0
    for step, rate in enumerate(rates):
        if step == way.begins > 0:
            ranks.use(way.codec, way.exchange)
        for flat, batches in zip(flats, data, strict=True):
            backward(model, next(batches))
            move(parameters, flat, layout)
        arriving.append(ranks.reduce(flats).clone())
        put(parameters, arriving[0], layout)
        received += ranks.bytes_received
        if isinstance(way.strategy, Tracking):
            rate /= 1.0 - way.strategy.beta if job.optimizer == "sgd" else 1.0  # torch's momentum is a sum, not a mean
        update(updates, rate, clip)
    return model, received


def layout_of(model: nn.Module) -> Layout:
    """The parameters in the order in which gradients become ready, as in a bucket of DDP's."""
    slots = [Slot(name, 0, tuple(p.shape), p.stride()) for name, p in model.named_parameters()]
    return end_to_end(reversed(slots))


def move(parameters: Sequence[nn.Parameter], flat: Tensor, layout: Layout) -> None:
    """Gradients into a flat one, and away from the parameters."""
    for parameter, slot in zip(reversed(parameters), layout, strict=True):
        assert parameter.grad is not None
        slot.view(flat).copy_(parameter.grad)
        parameter.grad = None


def put(parameters: Sequence[nn.Parameter], flat: Tensor, layout: Layout) -> None:
    """A flat gradient back to the parameters."""
    for parameter, slot in zip(reversed(parameters), layout, strict=True):
        parameter.grad = slot.view(flat).clone()


# -- what came out -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Best:
    """An arm at its best learning rate: losses by seed, and how many times fewer bytes than float32 it takes."""

    arm: str
    learning_rate: float
    losses: tuple[float, ...]
    times_fewer: float
    accuracies: tuple[float, ...] = ()

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)


def best(runs: Sequence[Mapping[str, Any]]) -> list[Best]:
    """Every arm at the rate that is best with the first seed, in the order in which they come."""
    found = []
    seeds = {run["seed"] for run in runs}
    for arm in dict.fromkeys(run["arm"] for run in runs):
        rate = best_rate(runs, arm)
        mine = sorted((r for r in runs if (r["arm"], r["learning_rate"]) == (arm, rate)), key=lambda r: r["seed"])
        assert {run["seed"] for run in mine} == seeds, f"{arm}: not every seed was trained at {rate}"
        fewer = 1.0 / statistics.fmean(run["share_of_bytes"] for run in mine)
        right = tuple(run["accuracy"] for run in mine if "accuracy" in run)
        found.append(Best(arm, rate, tuple(map(loss_of, mine)), fewer, right))
    return found


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """`table`, and the losses at all rates, if several were tried."""
    searched = len({run["learning_rate"] for run in result["runs"]}) > 1
    return [table(result), *([search(result)] if searched else [])]


def table(result: Mapping[str, Any]) -> report.Table:
    """Every arm, the fewest bytes last."""
    found = best(result["runs"])
    dense = next(one for one in found if one.arm == FLOAT32)
    accurate = all("accuracy" in run for run in result["runs"])
    rows = []
    for one in sorted(found, key=lambda one: one.times_fewer):
        off = report.interval([100 * (a / b - 1) for a, b in zip(one.losses, dense.losses, strict=True)])
        right = [f"{100 * a:.1f}" for a in sorted(one.accuracies)]
        spread = f" [{off['low']:+.1f}, {off['high']:+.1f}]" if len(one.losses) > 1 else ""
        rows.append(
            [
                LEARNED[one.arm].title,
                f"{one.times_fewer:.3g}",
                f"{one.learning_rate:g}",
                f"{one.loss:.3f}",
                f"{min(one.losses):.3f}-{max(one.losses):.3f}",
                f"{off['mean']:+.1f}{spread}",
                *([f"{100 * statistics.fmean(one.accuracies):.1f}", f"{right[0]}-{right[-1]}"] if accurate else []),
            ]
        )
    arguments = result["arguments"]
    unit = result["task"]["loss_unit"]
    columns = ["", "fewer bytes", "rate", unit, "least-most", "% of float32's"]
    if accurate:
        columns += ["right, %", "least-most"]
    title = (
        f"{result['task']['title']}, {arguments['optimizer']}, {arguments['world']} ranks, {arguments['steps']} steps"
    )
    seeds = arguments["seeds"]
    caption = "validation loss"
    if seeds > 1:
        caption += f", mean of {seeds} seeds; the last column is paired by seed, with 95 % intervals"
    if any(LEARNED[one.arm].rounds for one in found):
        caption += "; where parameters are exchanged, each rank clips its own gradient"
    if any(LEARNED[one.arm].has_momentum for one in found):
        caption += "; with Tracking and Momentum there is no momentum in the optimizer"
    caption += "\n" + origin(result, result["runs"])
    return report.Table(title, columns, rows, caption)


def search(result: Mapping[str, Any]) -> report.Table:
    """Losses of the first seed at each rate."""
    first = {(run["arm"], run["learning_rate"]): loss_of(run) for run in result["runs"] if run["seed"] == 0}
    rates = sorted({rate for _, rate in first})
    rows = [
        [LEARNED[arm].title, *(f"{first[arm, rate]:.3f}" if (arm, rate) in first else "" for rate in rates)]
        for arm in dict.fromkeys(arm for arm, _ in first)
    ]
    columns = ["", *(f"{rate:g}" for rate in rates)]
    caption = "validation loss; other seeds train at the best"
    arms, ends = list(dict.fromkeys(arm for arm, _ in first)), []
    for arm in arms:
        tried = {rate: loss for (other, rate), loss in first.items() if other == arm}
        if len(tried) > 1 and min(tried, key=tried.__getitem__) in (min(tried), max(tried)):
            ends.append(LEARNED[arm].title)
    if ends:
        caption += f"\nbest at an end of what was tried here: {'all' if len(ends) == len(arms) else '; '.join(ends)}"
    return report.Table("By learning rate, first seed", columns, rows, caption)


def plot(result: Mapping[str, Any], path: str) -> None:
    """Loss against bytes. Arms that no other beats in both have names, the others are grey."""
    figure, axes = report.subplots(figsize=(8, 5))
    found = sorted(best(result["runs"]), key=lambda one: one.times_fewer)
    front = [
        one for one in found if all(other.loss >= one.loss or other.times_fewer < one.times_fewer for other in found)
    ]
    axes.plot([one.times_fewer for one in front], [one.loss for one in front], color="#EECCB8", zorder=0)
    for one in found:
        errors = [[one.loss - min(one.losses)], [max(one.losses) - one.loss]]
        colour = "#D55E00" if one in front else "#AAAAAA"
        axes.errorbar(one.times_fewer, one.loss, yerr=errors, fmt="o", color=colour, zorder=2 if one in front else 1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("times fewer bytes than float32")
    axes.set_ylabel(f"validation loss, {result['task']['loss_unit']}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12, y=0.15)
    axes.set_title("Orange: no other method has both a lower loss and fewer bytes", fontsize=10)
    for number, one in enumerate(
        front
    ):  # below the points, where nothing is better; the last one's line comes from there
        name, last = LEARNED[one.arm].short.replace(", ", ",\n"), number == len(front) - 1
        place, offset = ((one.times_fewer, max(one.losses)), 6) if last else ((one.times_fewer, min(one.losses)), -6)
        sides = {"ha": "right" if last else "center" if number else "left", "va": "bottom" if last else "top"}
        axes.annotate(name, place, (0, offset), textcoords="offset points", fontsize=8, **sides)
    report.save(figure, path, dpi=150)
