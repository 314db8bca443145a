"""Time to equal validation loss: what a gradient compressor is worth, learning and network together.

Learning does not depend on the network, and a step's time not on what was learned. So each arm trains once for each
seed, over loopback, with its validation loss read along the way; its steps are timed on links of each bandwidth, arms
in turns; and the two are joined: a reading after s steps was made after s times the median step. The target is a loss
within 1 % (digits: 10 %) of what float32 ends at with the same seed. All arms see the same data under one recipe, whose
learning rate was found for float32; with `--search` each arm, float32 too, has its own instead: half, once and twice
that one are tried with the first seed, and further ones as long as the best lies at an end.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..common import report
from ..common.arguments import add_arms, add_output, expect_counts
from ..common.arms import BASELINE, DENSE, FLOOR, TRAINED, Arm, Installed
from ..common.progress import Progress
from ..links import flags, links
from ..links.driver import document, measured
from ..links.turns import FAR_OPENING, OPENING, Trainee, average, means, slowest, take_turns
from . import summary
from .search import Runs, best_rate, finite, still_needed
from .summary import tables
from .tasks import TASKS, Task, require_equal_replicas, validate

#: Marks rank 0's lines about how far it is.
PROGRESS = "progress "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", choices=TASKS, default="small", help="what to learn (default: %(default)s)")
    parser.add_argument("--world", type=int, nargs="+", default=[2], help="ranks, one or several (default: 2)")
    flags.add_links(parser, "100mbit", "1gbit", "10gbit", "none", world=False)
    add_arms(parser, {name: arm.title for name, arm in TRAINED.items()})
    parser.add_argument("--seeds", type=int, default=3, help="train with seeds 0 to N-1 (default: %(default)s)")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd", help="default: %(default)s")
    parser.add_argument("--search", action="store_true", help="find every arm's own learning rate, with the first seed")
    parser.add_argument("--runs", metavar="FILE.jsonl", help="where learning curves are written, and read from")
    parser.add_argument("--steps", type=int, help="optimizer steps; by default the task's own")
    parser.add_argument("--readings", type=int, default=12, help="of the validation loss, in a run (%(default)s)")
    parser.add_argument("--timed", type=int, default=6, help="timed steps of each arm at each rate (%(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps of each arm first (%(default)s)")
    add_output(parser, timeout=3600, each="each part", plot="curves and times to equal loss")


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench train`."""
    steps = options.steps = TASKS[options.task].steps if options.steps is None else options.steps
    expect_counts(options)
    task = resolve(options.task, options.optimizer, steps)
    for world_size in options.world:
        task.share(world_size)
    rates, distance = flags.network_of(options)
    for rate in rates.values():  # before hours of learning; without links, --rates none is left
        with links.open_links(2, rate, distance, limit=options.limit):
            pass
    teachers = [arm.learns_as for arm in map(TRAINED.__getitem__, options.arms) if arm.learns_as is not None]
    arms = list(dict.fromkeys([FLOOR, DENSE, BASELINE, *teachers, *options.arms]))
    names = ("task", "seeds", "optimizer", "search", "steps", "readings", "timed", "warmup")
    result = document("train", options, *names, arms=arms)
    result |= {"task": task.describe(), "steps_per_epoch": task.steps_per_epoch, "runs_say_where": True, "worlds": []}
    for world_size in options.world:
        result["worlds"].append(measure_world(task, world_size, arms, options))
    summary.join(result)
    report.deliver(result, tables(result), options, summary.plot)
    return 0


def measure_world(task: Task, world_size: int, arms: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Learning curves, then step times at each rate, for one number of ranks. Curves that `--runs` has are not made
    again: they do not depend on the network."""
    learners = [name for name in arms if name != FLOOR and TRAINED[name].learns_as is None]
    common = {"task": task.name, "optimizer": task.optimizer, "steps": task.steps}
    begin = task.learning_rates[task.optimizer]
    rates_tried = None if options.search else [begin]
    how = {**common, "world": world_size, "readings": options.readings, "source": task.source}
    runs = Runs(options.runs, how, learners, options.seeds, rates_tried)
    with Progress(f"{task.name}, {world_size} ranks", 0) as progress:
        while jobs := list(still_needed(runs, learners, rates_tried, begin, options.seeds)):
            progress.more(len(jobs) * task.steps)
            for job in jobs:
                one = {**common, **job, "readings": options.readings}
                learned = links.Loopback(world_size).run(learn, one, options.timeout, follow=follower(progress))
                runs.add(learned[0])
    found = {arm: best_rate(runs, arm) for arm in learners}
    chosen = [run for run in runs if run["learning_rate"] == found[run["arm"]]]
    timings = {}
    distant = options.delay is not None
    job = {**common, "arms": list(arms), "timed": options.timed, "warmup": options.warmup, "distant": distant}
    for text in options.rates:
        steps = options.timed * len(arms)
        with Progress(f"{task.name}, {world_size} ranks, {text}", steps) as progress:
            on, timed = measured(options, text, time_steps, job, world_size, follow=follower(progress))
        steps_of_all = together(timed, average if distant else slowest)
        timings[text] = {"rate": on["bits_per_s"], "proof": on["proof"], "arms": steps_of_all}
    return {
        "world": world_size,
        "runs": chosen,
        "others": [run for run in runs if run not in chosen],
        "learning_rates": found,
        "timings": timings,
    }


def follower(progress: Progress) -> Callable[[str], None]:
    """Shows what rank 0 says of how far it is."""

    def follow(line: str) -> None:
        if line.startswith(PROGRESS):
            progress.advance(*json.loads(line.removeprefix(PROGRESS)))

    return follow


def say(steps: int, note: str) -> None:
    """Tell `follower` that `steps` more are done."""
    if dist.get_rank() == 0:
        print(PROGRESS + json.dumps([steps, note]), flush=True)


def resolve(task: str, optimizer: str, steps: int, learning_rate: float | None = None) -> Task:
    found = dataclasses.replace(TASKS[task], optimizer=optimizer, steps=steps)
    if learning_rate is not None:
        found = dataclasses.replace(found, learning_rates={optimizer: learning_rate})
    return found


def learn(
    task: str, optimizer: str, steps: int, arm: str, learning_rate: float, seed: int, readings: int
) -> dict[str, Any]:
    """Every rank's part: train an arm. Returns its curve."""
    return train(resolve(task, optimizer, steps, learning_rate), TRAINED[arm], seed, readings)


def train(task: Task, arm: Arm, seed: int, readings: int) -> dict[str, Any]:
    """Train one arm. A collective.

    Raises:
        RuntimeError: the ranks' models differ at the end.
    """
    start = time.monotonic()
    installed, optimizer, data = prepared(task, arm, seed)
    model = installed.module
    # Where ranks train models of their own, they are read when all agree, if they ever do before the end.
    every = arm.every or 1
    due = {min(-(-task.steps * i // (readings * every)) * every, task.steps) for i in range(1, readings + 1)}
    curve: list[dict[str, Any]] = [{"step": 0, **validate(task, model)}]
    for step in range(task.steps):
        task.train_step(installed.model, optimizer, step, next(data))
        if step + 1 in due:
            if step + 1 == task.steps and arm.every:
                installed.state.synchronise()
            reading = validate(task, model)
            curve.append({"step": step + 1, **{name: finite(value) for name, value in reading.items()}})
            say(step + 1 - curve[-2]["step"], f"{arm.title}, seed {seed}: {reading['loss']:.3f} {task.loss_unit}")
    require_equal_replicas(model)
    installed.close()
    return {
        "arm": arm.name,
        "learning_rate": task.learning_rates[task.optimizer],
        "seed": seed,
        "loss": finite(reading["loss"]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "bits_per_element": installed.bits_per_element(),
        "share_of_bytes": installed.share_of_bytes(),
        "seconds": time.monotonic() - start,
        "curve": curve,
    }


def prepared(task: Task, arm: Arm, seed: int) -> tuple[Installed, torch.optim.Optimizer, Any]:
    """A model in its arm's hands, its optimizer, and its batches. A collective.

    "gather", so that what learns is what is timed: "auto" decides by measurements, which differ between runs.
    """
    torch.manual_seed(seed)
    gc.collect()  # DDP lives in reference cycles, with gradients of the arm before
    installed = arm.install(task.model(), task.bucket_mb, seed, exchange="gather")
    optimizer = installed.optimizer(task.new_optimizer(installed.model))
    return installed, optimizer, task.batches(seed, dist.get_rank(), dist.get_world_size())


def trainee(task: Task, arm: Arm, step: int) -> Trainee:
    """An arm's steps, at the learning rate of one of them."""
    installed, optimizer, data = prepared(task, arm, seed=0)
    return Trainee(installed, lambda: task.train_step(installed.model, optimizer, step, next(data)))


def time_steps(
    task: str, optimizer: str, steps: int, arms: Sequence[str], timed: int, warmup: int, distant: bool
) -> dict[str, dict[str, Any]]:
    """Every rank's part on links: time steps of every arm, in turns. Returns seconds and what the arm decided.

    Where parameters are exchanged every few steps, a turn is as many, which share its time; the last one has the round,
    and the others tell what a step takes without. With a delay, what arrives in a turn is under way when it begins, and
    the first ones do not tell.

    Args:
        distant: whether links have a distance, where a barrier would leave ranks up to one way apart.
    """
    job = resolve(task, optimizer, steps)
    trainees = {name: [trainee(job, TRAINED[name], 0)] for name in arms}
    for (one,) in trainees.values():
        one.settle(warmup)
    begin, opening = ("apart", FAR_OPENING) if distant else ("step", OPENING)
    turns = take_turns(trainees, timed, 1, begin, opening, after=lambda name: say(1, TRAINED[name].title))
    result: dict[str, dict[str, Any]] = {}
    for name, (one,) in trainees.items():
        times, delay = [turn.wall for turn in turns[name]], TRAINED[name].rounds.delay
        result[name] = {"times_s": [means(turn, one.every)[0] for turn in times], "sends": one.installed.sends()}
        if one.every > 1 + delay:
            result[name]["alone_s"] = [means(turn[delay:-1], one.every)[0] for turn in times]
        one.installed.close()
    return result


def together(
    ranks: Sequence[Mapping[str, Mapping[str, Any]]],
    join: Callable[[Sequence[Sequence[Sequence[float]]]], list[list[float]]],
) -> dict[str, dict[str, Any]]:
    """For each arm its steps, of whose times on the ranks `join` makes one, and whether any bucket is compressed."""

    def joined(name: str, key: str) -> list[float]:
        return join([[rank[name][key]] for rank in ranks])[0]

    return {
        name: {**mine, **{key: joined(name, key) for key in ("times_s", "alone_s") if key in mine}}
        for name, mine in ranks[0].items()
    }
