"""The cost of communication in a DDP step on a link of known speed.

The communication tax of an arm is its step less the step without communication: what is left after overlap. The model
is six linear layers of 2048 × 2048 with ReLU between them, 25 million parameters, at batch 8 and one thread a rank,
so there is little work to hide behind. Every arm has its own model, and the arms take turns in rounds, so that what
the machine does meanwhile hits them alike.

    gradwire-bench step --rate 1gbit --delay 25ms --width 512 --layers 8 --bucket-mb 1
        --arms fp32 fp16 onebit-gather onebit-two_pass topk-gather auto

is a model that waits for the network alone, on links with a distance: eight buckets of 1 MB. `--width 229 --layers 40
--bucket-mb 0.2` are as many parameters in 40. There ranks do not wait for each other before a step: a barrier leaves
them up to one way apart, for which the next step would then pay. A step's time is the mean of the ranks', so that what
one of them is late adds to none.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...compress import TopK
from ..common import report
from ..common.arguments import add_arms, add_layers, add_output, add_turns
from ..common.arms import ARMS, BASELINE, FLOOR
from ..common.models import perceptron
from ..links import flags, turns
from ..links.driver import document, measured_arms
from ..links.turns import between, medians, milliseconds, ratios
from ..links.verification import caption

#: Options that say what is measured.
OPTIONS = ("density", "steps", "rounds", "warmup", "width", "layers", "batch", "bucket_mb")
DEFAULT_ARMS = (FLOOR, "fp32", BASELINE, "onebit", "topk")
PHASES = ("encode", "exchange", "decode")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_links(parser)
    add_arms(parser, {name: arm.title for name, arm in ARMS.items()}, DEFAULT_ARMS)
    parser.add_argument("--density", type=float, default=0.01, help="of the topk arm (default: %(default)s)")
    add_turns(parser, steps=6, rounds=5, warmup=6)
    add_layers(parser)
    parser.add_argument("--bucket-mb", type=float, help="DDP's bucket_cap_mb (default: DDP's own)")
    add_output(parser, timeout=300)


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench step`."""
    TopK(density=options.density)  # refuses what is none, before there are links
    arms = list(dict.fromkeys([FLOOR, *options.arms]))  # the tax needs the floor
    arguments = {"arms": arms, **{name: getattr(options, name) for name in OPTIONS}}
    result = document("step", options, **arguments)
    distant = options.delay is not None
    join = partial(turns.joined, together=turns.average if distant else turns.slowest)
    result["networks"] = measured_arms(options, measure, {**arguments, "distant": distant}, join)
    report.deliver(result, tables(result), options)
    return 0


def measure(
    arms: Sequence[str],
    density: float,
    steps: int,
    rounds: int,
    warmup: int,
    bucket_mb: float | None,
    distant: bool,
    **size: int,
) -> dict[str, Any]:
    """Every rank's part: parameters, buckets, and `turns.results`.

    Args:
        bucket_mb: DDP's; None: its default.
        distant: whether links have a distance, so that steps follow each other without a barrier.
        size: of `perceptron`.
    """
    trainees = {
        name: [turns.on_one_batch(ARMS[name].at(density), perceptron(**size), bucket_mb, lr=1e-3)] for name in arms
    }
    for (trainee,) in trainees.values():
        trainee.settle(warmup)
    begin, opening = ("apart", turns.FAR_OPENING) if distant else ("step", turns.OPENING)
    found = turns.take_turns(trainees, rounds, steps, begin, opening)
    floor = trainees[FLOOR][0].installed
    parameters = sum(p.numel() for p in floor.model.parameters())
    return {"parameters": parameters, "buckets": floor.state.buckets, "arms": turns.results(trainees, found)}


def taxes(row: Mapping[str, Any], floor: Mapping[str, Any]) -> list[float]:
    """Median step less the floor's: of all rounds, then of each."""
    return [mine - other for mine, other in zip(medians(row), medians(floor), strict=True)]


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    return [table(result, network) for network in result["networks"]]


def table(result: Mapping[str, Any], network: Mapping[str, Any]) -> report.Table:
    """One row for each arm; with a distance also its steps beside the baseline's, round by round."""
    arguments, arms = result["arguments"], {row["arm"]: row for row in network["arms"]}
    floor, baseline = arms[FLOOR], arms.get(BASELINE)
    beside = "distance" in arguments and baseline is not None
    rows = []
    for name, row in arms.items():
        tax, to = taxes(row, floor), [] if baseline is None or name == FLOOR else taxes(baseline, floor)
        cells = [milliseconds(tax[0]), "", ""]
        if to:
            ratio, *by_round = ratios(tax, to)
            cells[1:] = f"{ratio:.3f}", between(by_round)
        if beside and baseline is not None:
            steps = ratios(medians(row)[1:], medians(baseline)[1:])
            cells += [f"{report.median(steps):.3f}", between(steps)]
        rows.append(
            [
                ARMS[name].at(arguments["density"]).title,
                milliseconds(medians(row)[0]),
                between([1e3 * second for second in turns.quartiles(row)], 1),
                *cells,
                turns.megabytes(row["sent_bytes"]),
                *(milliseconds(row["counted"].get(f"{phase}_s")) for phase in PHASES),
            ]
        )
    paired = ("step / fp16's", "by round") if beside else ()
    columns = ("arm", "step ms", "quartiles", "tax ms", "tax / fp16's", "by round", *paired, "sent MB", *PHASES)
    size = f"{network['parameters'] / 1e6:.1f} M parameters, batch {arguments['batch']}"
    notes = [
        report.describe(result["environment"]),
        f"{arguments['rounds']} rounds of {arguments['steps']} steps, {network['buckets']} buckets, one thread a rank; "
        "tax: step less the step without communication; sent: by one rank, as the kernel counts; "
        "encode, exchange, decode: ms a step beside the backward pass",
        caption(network["proof"]),
    ]
    return report.Table(f"One DDP step of {size}, {network['links']}", columns, rows, "\n".join(notes))
