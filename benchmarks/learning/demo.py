"""Train one small language model on two processes with every way of exchanging gradients, and compare them.

    torchrun --standalone --nproc-per-node 2 -m gradwire.benchmarks.learning.demo --seeds 3

Every arm starts from the same weights and sees the same batches under the same recipe (`task_of`). What comes out: a
table, `demo.png` and `demo.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..common.arms import DEMONSTRATED as ARMS
from ..common.arms import Arm
from ..common.progress import Progress
from ..common.report import Table, document, label_ends, save, subplots, write_json
from .tasks import SMALL, Task, Text, require_equal_replicas, validate
from .train import prepared

STEPS, LEARNING_RATE = 300, 1e-3
#: Samples of each rank, and how often validation windows are read.
BATCH, EVALUATIONS = 4, 10
PHASES = ("encode", "exchange", "decode")


@dataclass(frozen=True)
class Point:
    """One reading of the validation loss. `sent_bytes`: handed to the network by rank 0 since the start."""

    step: int
    bits_per_byte: float
    sent_bytes: int


@dataclass(frozen=True)
class Run:
    """One arm trained with one seed. Times are rank 0's, in seconds; the phases' are sums over the run."""

    arm: str
    seed: int
    elements_per_step: int
    curve: tuple[Point, ...]
    step_seconds: float
    training_seconds: float
    phase_seconds: dict[str, float]

    @property
    def steps(self) -> int:
        return self.curve[-1].step

    def bits_per_element(self, *, last: bool = False) -> float:
        """Sent for each gradient element: over the run, or since the last but one reading."""
        before = self.curve[-2] if last and len(self.curve) > 1 else Point(0, 0.0, 0)
        sent, steps = self.curve[-1].sent_bytes - before.sent_bytes, self.steps - before.step
        return sent * 8 / steps / self.elements_per_step


def task_of(ranks: int, steps: int = STEPS, learning_rate: float = LEARNING_RATE) -> Text:
    """The demo's task, of so many ranks."""
    rates = {"adamw": learning_rate}
    task = dataclasses.replace(SMALL, name="demo", steps=steps, batch=BATCH * ranks, optimizer="adamw")
    return dataclasses.replace(task, learning_rates=rates, validation_windows=512)


def train(arm: Arm, task: Task, seed: int, progress: Progress) -> Run:
    """Train one arm. A collective; rank 0's figures are the ones to keep.

    Raises:
        RuntimeError: the ranks' models differ at the end.
    """
    installed, optimizer, data = prepared(task, arm, seed)
    elements = sum(p.numel() for p in installed.module.parameters())
    readings = {-(-task.steps * i // EVALUATIONS) for i in range(1, EVALUATIONS + 1)}
    curve, times, note = [], [], ""
    for step in range(task.steps):
        batch = next(data)
        start = time.perf_counter()
        task.train_step(installed.model, optimizer, step, batch)
        times.append(time.perf_counter() - start)
        if step + 1 == task.steps and arm.every:
            installed.state.synchronise()
        if step + 1 in readings:  # before the end, ranks that train models of their own differ a little
            loss, done = validate(task, installed.module)["loss"], installed.statistics()
            sent = done.bytes_sent if done else round(arm.bits / 8) * elements * (step + 1)
            curve.append(Point(step + 1, loss, sent))
            note = f"{loss:.3f} bits per byte"
        progress.advance(1, f"{arm.title}, seed {seed}, step {step + 1}: {note}")
    done = installed.statistics()
    installed.close()
    require_equal_replicas(installed.module)
    if dist.get_rank() == 0:
        print(f"{arm.title}, seed {seed}: {note} after {task.steps} steps, {sum(times):.0f} s", flush=True)
    phases = dict(done.seconds) if done else {}
    return Run(arm.name, seed, elements, tuple(curve), statistics.median(times), sum(times), phases)


def summarize(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One summary for each arm, in the order in which they ran; relative figures are None without an fp32 arm.

    `spread` is the standard deviation over seeds, None for one seed; `change` compares equal seeds.
    """
    by_arm: dict[str, list[Run]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append(run)
    dense = {run.seed: run for run in by_arm.get("fp32", [])}
    summaries = []
    for name, group in by_arm.items():
        finals = [run.curve[-1].bits_per_byte for run in group]
        changes = [
            run.curve[-1].bits_per_byte / dense[run.seed].curve[-1].bits_per_byte - 1
            for run in group
            if run.seed in dense
        ]
        bits = statistics.mean(run.bits_per_element() for run in group)
        step = statistics.median(run.step_seconds for run in group)
        summaries.append(
            {
                "arm": name,
                "bits_per_byte": statistics.mean(finals),
                "spread": statistics.stdev(finals) if len(finals) > 1 else None,
                "change": statistics.mean(changes) if changes else None,
                "change_spread": statistics.stdev(changes) if len(changes) > 1 else None,
                "sent_bytes_per_step": statistics.mean(run.curve[-1].sent_bytes / run.steps for run in group),
                "bits_per_element": bits,
                "bits_per_element_at_the_end": statistics.mean(run.bits_per_element(last=True) for run in group),
                "times_fewer_than_fp32": 32 / bits,
                "step_seconds": step,
                "share_of_step": {
                    phase: statistics.mean(run.phase_seconds[phase] / run.training_seconds for run in group)
                    for phase in PHASES
                    if all(phase in run.phase_seconds for run in group)
                },
            }
        )
    return summaries


def table(summaries: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows for people."""
    columns = ["arm", "validation,\nbits per byte", "against\nfp32", "KB sent\na step"]
    columns += ["times fewer\nbytes", "step,\nms"]
    rows = [
        [
            ARMS[s["arm"]].title,
            f"{s['bits_per_byte']:.3f}" + (f" ± {s['spread']:.3f}" if s["spread"] is not None else ""),
            "" if s["change"] is None else f"{s['change']:+.1%}",
            f"{s['sent_bytes_per_step'] / 1e3:,.0f}" + "*" * (not s["share_of_step"]),
            f"{s['times_fewer_than_fp32']:.1f}",
            f"{s['step_seconds'] * 1e3:.0f}",
        ]
        for s in summaries
    ]
    return columns, rows


def limits(seeds: int, ranks: int, cores: int | None) -> list[str]:
    """The limits of what this machine shows, one sentence a line."""
    learning = "one seed: differences of a few per cent are chance; --seeds 3 shows how large chance is"
    if seeds > 1:
        learning = f"mean ± standard deviation over {seeds} seeds"
    return [
        f"Learning is what this demo shows: same weights, batches and recipe in every arm; {learning}.",
        "Bytes are counted where a rank hands them to the network, all but a few bytes of bookkeeping; "
        "* by formula, 4 or 2 bytes an element.",
        f"Step times show what compression costs, not what it gains: {ranks} ranks share {cores} cores and talk over "
        "loopback, which is no slow network. For gains: gradwire-bench step, on links of a set speed.",
        "The JSON file has bits an element and the shares of encode, exchange and decode in a step.",
    ]


def plot(runs: Sequence[Run], path: Path, caption: str) -> None:
    """Validation loss against steps, and beside each line the bytes it took. With several seeds, mean and range."""
    figure, axes = subplots(figsize=(9, 5))
    lines = []
    for arm in ARMS.values():
        curves = [run.curve for run in runs if run.arm == arm.name]
        if not curves:
            continue
        readings = list(zip(*curves, strict=True))
        losses = [[point.bits_per_byte for point in reading] for reading in readings]
        steps = [reading[0].step for reading in readings]
        (line,) = axes.plot(steps, list(map(statistics.mean, losses)), "o-", color=arm.colour, markersize=3)
        axes.fill_between(steps, list(map(min, losses)), list(map(max, losses)), color=arm.colour, alpha=0.15, lw=0)
        sent = statistics.mean(point.sent_bytes for point in readings[-1]) / 1e6
        lines.append((line, f"{arm.title.removeprefix('gradwire, ')}: {float(f'{sent:.3g}'):,g} MB"))
    axes.set(xlabel="steps", ylabel="validation loss, bits per byte")
    axes.set_title("The same steps, and the bytes that each rank sent in them", fontsize=11)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(caption, fontsize=8, color="#555555")
    label_ends(axes, lines)
    save(figure, path, dpi=150)


def report(runs: Sequence[Run], content: dict[str, Any], output: str) -> None:
    """Print the table and what it means; write `output`.png and `output`.json."""
    summaries = summarize(runs)
    seeds, ranks = len({run.seed for run in runs}), content["ranks"]
    model = f"{content['parameters'] / 1e6:.2f} M parameters, {content['task']['steps']} steps, {ranks} ranks"
    notes = limits(seeds, ranks, os.cpu_count())
    title = f"A byte-level language model, {model}"
    Table(title, *table(summaries), caption="\n".join(f"- {note}" for note in notes)).print()
    plot(runs, Path(f"{output}.png"), f"{model}, {'one seed' if seeds == 1 else f'{seeds} seeds (band: their range)'}")
    content |= {"summaries": summaries, "runs": [dataclasses.asdict(run) for run in runs], "limits": notes}
    write_json(f"{output}.json", content)
    print(f"Wrote {output}.png and {output}.json.", flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gradwire.benchmarks.learning.demo", description=__doc__ and __doc__.splitlines()[0]
    )
    parser.add_argument("--seeds", type=positive, default=1, help="train every arm with seeds 0 to N-1 (1)")
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"optimizer steps ({STEPS})")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="after the warm-up")
    parser.add_argument("--arms", type=arms, default=tuple(ARMS.values()), help=f"of {','.join(ARMS)}; all by default")
    parser.add_argument("--output", default="demo", help="write OUTPUT.png and OUTPUT.json (demo)")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)


def arms(text: str) -> tuple[Arm, ...]:
    unknown = [name for name in text.split(",") if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: expected some of {','.join(ARMS)}")
    return tuple(ARMS[name] for name in text.split(","))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if "RANK" not in os.environ:
        how = "torchrun --standalone --nproc-per-node 2 -m gradwire.benchmarks.learning.demo"
        print(f"The demo needs several processes: {how}", file=sys.stderr)
        return 2
    dist.init_process_group("gloo")
    rank, start = dist.get_rank(), time.monotonic()
    task = task_of(dist.get_world_size(), options.steps, options.learning_rate)
    names = [arm.name for arm in options.arms]
    asked = {"seeds": options.seeds, "steps": options.steps, "learning_rate": options.learning_rate, "arms": names}
    content = document("demo", asked)
    content |= {"ranks": dist.get_world_size(), "task": task.describe(), "source": task.source}
    runs: list[Run] = []
    try:
        total = len(names) * options.seeds * task.steps
        with Progress("demo", total, silent=rank != 0) as progress:
            for seed, arm in itertools.product(range(options.seeds), options.arms):
                runs.append(train(arm, task, seed, progress))
        if rank == 0:
            content["seconds"] = time.monotonic() - start
            content["parameters"] = runs[0].elements_per_step
            report(runs, content, options.output)
    finally:
        # Models in reference cycles keep the group, and with it Gloo's threads: one that lets go of its last tensor
        # while the interpreter ends aborts the process.
        gc.collect()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
