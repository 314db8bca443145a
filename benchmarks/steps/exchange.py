"""The exchange of one whole gradient, from the ranks' gradients to their mean, on links of several speeds.

Every arm runs as it does in training: a DDP model of N parameters in DDP's usual buckets, its hook, and a backward pass
that computes nothing but one multiplication an element. Timed is `backward()` alone, until the slowest rank has the
mean in its `.grad`. The floor is the same without communication: autograd, and DDP's copies into the buckets and out.
Shown are the times as they are and less the floor; ratios are to PyTorch's fp16 hook in the same run. Gradients have
more in common between ranks and steps than they differ, as in training, and gradwire's arms keep their residuals.

There is no computation to hide behind, and none to compete with: what a training step gains is `gradwire-bench step`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compress import TopK
from ..common import report
from ..common.arguments import add_arms, add_output, add_turns, expect_at_least
from ..common.arms import ARMS, BASELINE, FLOOR, Floor, Installed
from ..links import flags
from ..links.driver import Runner, document, measured, megabytes, span, take_turns, timed
from ..links.verification import caption

CHOICES = tuple(arm.name for arm in ARMS.values() if not arm.horovod and not arm.rank)  # PowerSGD needs matrices
OPTIONS = ("numel", "density", "rounds", "steps", "warmup")
DEFAULT_ARMS = [FLOOR, "fp32", BASELINE, "onebit", "topk", "qsgd", "terngrad", "auto"]
#: PyTorch's arms need one step for DDP to build its buckets; codecs some more to fill their residuals.
PLAIN, PLAIN_WARMUP = (FLOOR, "fp32", BASELINE), 1
#: The parameter is cut into this many, so that DDP can make buckets.
PIECES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_links(parser, "100mbit", "1gbit", "10gbit", "none")
    parser.add_argument("--numel", type=int, default=25_600_000, help="of the gradient (default: %(default)s)")
    add_arms(parser, {name: ARMS[name].title for name in CHOICES}, DEFAULT_ARMS)
    parser.add_argument("--density", type=float, default=0.001, help="of the topk arm (default: %(default)s)")
    add_turns(parser, steps=2, rounds=2, warmup=5)
    add_output(parser, timeout=300, each="each rate", plot="time against the links' rate")


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench exchange`."""
    expect_at_least(options, numel=PIECES)
    TopK(density=options.density)  # refuses what is none, before there are links
    # The tax needs the floor, and ratios their base.
    arms = list(dict.fromkeys([FLOOR, BASELINE, *options.arms]))
    arguments = {"arms": arms, **{name: getattr(options, name) for name in OPTIONS}}
    result = document("exchange", options, **arguments)
    rates, _ = flags.network_of(options)
    if options.plot and not any(rates.values()):
        raise ValueError(f"--plot {options.plot}: it draws times against the links' rates, and --rates none has none")
    result["rates"] = []
    for text, rate in rates.items():
        short = rate is None or rate >= 10**9  # so are steps: more of them are timed
        steps = 2 * options.steps if short else options.steps
        found, ranks = measured(options, text, measure, {**arguments, "steps": steps})
        rows = summarize([rank["arms"] for rank in ranks], shaped=rate is not None)
        result["rates"].append({**found, "buckets": ranks[0]["buckets"], "arms": rows})
        rate_table(result, result["rates"][-1]).print()
    report.deliver(result, [], options, plot)  # the tables are printed
    return 0


class Pieces(nn.Module):
    """Parameters of `numel` elements together, whose gradient is whatever `forward` is given."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(torch.zeros(len(part)) for part in torch.empty(numel).tensor_split(PIECES))

    def forward(self, gradient: Tensor) -> Tensor:
        parts = gradient.tensor_split(PIECES)
        return torch.stack([(p * part).sum() for p, part in zip(self.pieces, parts, strict=True)]).sum()


def backward(arm: Installed, gradients: Sequence[Tensor]) -> Callable[[], float]:
    """A function that runs one backward pass, and returns the seconds from its start, on all ranks together, until this
    rank has the mean."""
    every = cycle(gradients)

    def step() -> float:
        if isinstance(arm.state, Floor):
            arm.state.buckets = 0
        arm.model.zero_grad()
        loss = arm.model(next(every))
        dist.barrier()
        begin = time.perf_counter()
        loss.backward()
        return time.perf_counter() - begin

    return step


def measure(arms: Sequence[str], numel: int, density: float, rounds: int, steps: int, warmup: int) -> dict[str, Any]:
    """Every rank's part."""
    base = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    gradients = [base + 0.3 * torch.randn(numel, generator=generator) for _ in range(3)]
    installed = {name: ARMS[name].at(density).install(Pieces(numel)) for name in arms}
    runners = {name: Runner(backward(arm, gradients), arm) for name, arm in installed.items()}
    for name, runner in runners.items():
        runner.settle(PLAIN_WARMUP if name in PLAIN else max(PLAIN_WARMUP, warmup))
    found = take_turns(runners, rounds, steps)
    for name, arm in installed.items():
        statistics = arm.statistics()
        found[name]["phases_s"] = {
            phase.removesuffix("_s"): spent for phase, spent in found[name].pop("counted").items() if phase[-2:] == "_s"
        }
        found[name]["decisions"] = {} if statistics is None else statistics.decisions
    return {"buckets": installed[FLOOR].state.buckets, "arms": found}


def summarize(ranks: Sequence[Mapping[str, Any]], shaped: bool) -> list[dict[str, Any]]:
    """One row for each arm: medians over all steps, which last until the slowest rank is done, and what follows."""
    arms = timed(ranks, shaped)
    floor, baseline = arms[FLOOR].seconds, arms[BASELINE].seconds
    rows = []
    for name, arm in arms.items():
        seconds = arm.seconds
        above = seconds - floor
        rows.append(
            {
                "arm": name,
                "seconds": seconds,
                "quartiles_s": arm.quartiles,
                "above_floor_s": above,
                "times_faster": baseline / seconds,
                "times_faster_above_floor": (baseline - floor) / above if above > 0 else None,
                "sent_bytes": arm.sent_bytes,
                "phases_s": ranks[0][name]["phases_s"],
                "decisions": ranks[0][name]["decisions"],
                "times_s": arm.turns,
            }
        )
    return rows


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """One for each rate."""
    return [rate_table(result, found) for found in result["rates"]]


def rate_table(result: Mapping[str, Any], found: Mapping[str, Any]) -> report.Table:
    arguments = result["arguments"]
    rows = []
    for row in found["arms"]:
        ratio = row["times_faster_above_floor"]
        compared = row["arm"] != FLOOR
        rows.append(
            [
                ARMS[row["arm"]].at(arguments["density"]).title,
                f"{row['seconds'] * 1e3:.1f}",
                span(row["quartiles_s"]),
                f"{row['above_floor_s'] * 1e3:.1f}" if compared else "",
                f"{row['times_faster']:.1f}" if compared else "",
                f"{ratio:.1f}" if compared and ratio is not None else "",
                megabytes(row["sent_bytes"]),
                ", ".join(f"{seconds * 1e3:.0f}" for seconds in row["phases_s"].values()),
            ]
        )
    columns = (
        "arm",
        "ms",
        "quartiles",
        "ms less floor",
        "times fp16",
        "times, less floor",
        "sent MB",
        "enc, exch, dec ms",
    )
    title = f"Exchange of one gradient of {arguments['numel'] / 1e6:g} M float32, {found['links']}"
    turns = found["arms"][0]["times_s"]
    notes = [
        report.describe(result["environment"]),
        f"{len(turns)} rounds of {len(turns[0])}, {found['buckets']} buckets, one thread a rank; "
        "times fp16: how often faster than PyTorch's fp16 hook; sent: by one rank, as the kernel counts",
        caption(found["proof"]),
    ]
    return report.Table(title, columns, rows, "\n".join(notes))


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Time above the floor against the links' rate, of the first five arms. Needs matplotlib."""
    figure, axes = report.subplots(figsize=(9, 5))
    shaped = sorted((f for f in result["rates"] if f["bits_per_s"]), key=lambda found: float(found["bits_per_s"]))
    rates = [found["bits_per_s"] / 1e6 for found in shaped]
    lines = []
    for name in [name for name in result["arguments"]["arms"] if name != FLOOR][:5]:
        arm = ARMS[name].at(result["arguments"]["density"])
        rows = [next(row for row in found["arms"] if row["arm"] == name) for found in shaped]
        # What lies in the noise of the floor is drawn at a millisecond.
        times = [max(row["above_floor_s"] * 1e3, 1) for row in rows]
        (line,) = axes.plot(rates, times, "o-", color=arm.colour, markersize=5, linewidth=1.8)
        lines.append((line, arm.title.removeprefix("gradwire, ")))
    axes.set(xscale="log", yscale="log", xlabel="each rank's link, Mbit/s")
    axes.set_ylabel("ms, less those of a step without communication")
    slow = [found["rate"] for found in shaped if not found["proof"]["reached"]]
    axes.set_xticks(
        rates, [f"{rate:g}" + "\n(not reached)" * (f["rate"] in slow) for rate, f in zip(rates, shaped, strict=True)]
    )
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.08, y=0.12)
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    what = f"{result['arguments']['numel'] / 1e6:g} M float32 between {result['arguments']['world']} ranks"
    axes.set_title(f"What the exchange of one gradient adds to a step: {what}", fontsize=11)
    report.label_ends(axes, lines)
    report.save(figure, path, dpi=140)
