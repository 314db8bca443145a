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
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compress import TopK
from ..common import report
from ..common.arguments import add_arms, add_output, add_turns, expect_at_least
from ..common.arms import ARMS, BASELINE, FLOOR, Arm
from ..links import flags, turns
from ..links.driver import document, measured_arms
from ..links.turns import Trainee, medians, milliseconds
from ..links.verification import caption

#: Not those that need an optimizer, or matrices.
CHOICES = tuple(
    name for name, arm in ARMS.items() if not (arm.horovod or arm.every or arm.overlaps or arm.rank or arm.factors)
)
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
    add_turns(parser, steps=3, rounds=2, warmup=5)
    add_output(parser, timeout=300, each="each rate", plot="time against the links' rate")


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench exchange`."""
    expect_at_least(options, numel=PIECES)
    TopK(density=options.density)  # refuses what is none, before there are links
    # The tax needs the floor, and ratios their base.
    arms = list(dict.fromkeys([FLOOR, BASELINE, *options.arms]))
    arguments = {"arms": arms, **{name: getattr(options, name) for name in OPTIONS}}
    result = document("exchange", options, **arguments)
    if options.plot and not any(flags.network_of(options)[0].values()):
        raise ValueError(f"--plot {options.plot}: it draws times against the links' rates, and --rates none has none")
    result["networks"] = measured_arms(options, measure, arguments, turns.joined)
    report.deliver(result, tables(result), options, plot)
    return 0


class Pieces(nn.Module):
    """Parameters of `numel` elements together, whose gradient is whatever `forward` is given."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(torch.zeros(len(part)) for part in torch.empty(numel).tensor_split(PIECES))

    def forward(self, gradient: Tensor) -> Tensor:
        parts = gradient.tensor_split(PIECES)
        return torch.stack([(p * part).sum() for p, part in zip(self.pieces, parts, strict=True)]).sum()


def trainee_of(arm: Arm, gradients: Sequence[Tensor]) -> Trainee:
    """Backward passes, without what goes before them."""
    installed, every, loss = arm.install(Pieces(len(gradients[0]))), cycle(gradients), torch.empty(0)

    def forward() -> None:
        nonlocal loss
        installed.model.zero_grad()
        loss = installed.model(next(every))

    def backward() -> None:
        loss.backward()

    return Trainee(installed, backward, forward)


def measure(arms: Sequence[str], numel: int, density: float, rounds: int, steps: int, warmup: int) -> dict[str, Any]:
    """Every rank's part."""
    base = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    gradients = [base + 0.3 * torch.randn(numel, generator=generator) for _ in range(3)]
    trainees = {name: [trainee_of(ARMS[name].at(density), gradients)] for name in arms}
    for name, (trainee,) in trainees.items():
        trainee.settle(PLAIN_WARMUP if name in PLAIN else warmup)
    found = turns.results(trainees, turns.take_turns(trainees, rounds, steps))
    return {"buckets": trainees[FLOOR][0].installed.state.buckets, "arms": found}


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """One for each rate."""
    return [table(result, network) for network in result["networks"]]


def above(row: Mapping[str, Any], floor: Mapping[str, Any]) -> float:
    """Median seconds less the floor's."""
    return medians(row)[0] - medians(floor)[0]


def faster(row: Mapping[str, Any], arms: Mapping[str, Mapping[str, Any]]) -> float | None:
    """How often faster than the baseline, both less the floor; None for what is no slower than that."""
    mine = above(row, arms[FLOOR])
    return above(arms[BASELINE], arms[FLOOR]) / mine if mine > 0 else None


def table(result: Mapping[str, Any], network: Mapping[str, Any]) -> report.Table:
    arguments, arms = result["arguments"], {row["arm"]: row for row in network["arms"]}
    rows = []
    for name, row in arms.items():
        seconds, ratio = medians(row)[0], faster(row, arms)
        cells = [milliseconds(above(row, arms[FLOOR])), f"{medians(arms[BASELINE])[0] / seconds:.1f}"]
        cells.append("" if ratio is None else f"{ratio:.1f}")
        rows.append(
            [
                ARMS[name].at(arguments["density"]).title,
                milliseconds(seconds),
                turns.between([1e3 * second for second in turns.quartiles(row)], 1),
                *(cells if name != FLOOR else ["", "", ""]),
                turns.megabytes(row["sent_bytes"]),
                ", ".join(milliseconds(spent, 0) for what, spent in row["counted"].items() if what.endswith("_s")),
            ]
        )
    columns = ("arm", "ms", "quartiles", "ms less floor", "times fp16", "times, less floor", "sent MB")
    title = f"Exchange of one gradient of {arguments['numel'] / 1e6:g} M float32, {network['links']}"
    times = arms[FLOOR]["times_s"]
    notes = [
        report.describe(result["environment"]),
        f"{len(times)} rounds of {len(times[0])}, {network['buckets']} buckets, one thread a rank; "
        "times fp16: how often faster than PyTorch's fp16 hook; sent: by one rank, as the kernel counts",
        caption(network["proof"]),
    ]
    return report.Table(title, (*columns, "enc, exch, dec ms"), rows, "\n".join(notes))


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Time above the floor against the links' rate, of the first five arms. Needs matplotlib."""
    figure, axes = report.subplots(figsize=(9, 5))
    shaped = sorted((f for f in result["networks"] if f["bits_per_s"]), key=lambda found: float(found["bits_per_s"]))
    rates = [found["bits_per_s"] / 1e6 for found in shaped]
    lines = []
    for name in [name for name in result["arguments"]["arms"] if name != FLOOR][:5]:
        arm, times = ARMS[name].at(result["arguments"]["density"]), []
        for found in shaped:
            rows = {row["arm"]: row for row in found["arms"]}
            times.append(max(above(rows[name], rows[FLOOR]) * 1e3, 1))  # what lies in the noise: at a millisecond
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
