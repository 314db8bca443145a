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
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...compress import TopK
from ..common import report
from ..common.arguments import add_arms, add_layers, add_output, add_turns
from ..common.arms import ARMS, BASELINE, FLOOR, Floor, Installed
from ..common.models import perceptron
from ..links import flags
from ..links.driver import Runner, average, document, measured, megabytes, slowest, span, take_turns, timed
from ..links.verification import caption

#: Untimed steps of a round on links with a distance.
OPENING = 3
#: Options that say what is measured.
OPTIONS = ("density", "steps", "rounds", "warmup", "width", "layers", "batch")
DEFAULT_ARMS = (FLOOR, "fp32", BASELINE, "onebit", "topk")


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
    if options.bucket_mb is not None:
        arguments["bucket_mb"] = options.bucket_mb
    result = document("step", options, **arguments)
    distant = options.delay is not None
    found, ranks = measured(options, options.rate, measure, {**arguments, "distant": distant})
    shaped = found["bits_per_s"] is not None
    result |= {
        "shaped": shaped,
        "links": found["links"],
        "proof": found["proof"],
        "model": {"parameters": ranks[0]["parameters"], "buckets": ranks[0]["buckets"]},
        "arms": summarize([rank["arms"] for rank in ranks], shaped, distant),
    }
    report.deliver(result, tables(result), options)
    return 0


def measure(
    arms: Sequence[str],
    density: float,
    steps: int,
    rounds: int,
    warmup: int,
    bucket_mb: float | None = None,
    distant: bool = False,
    **size: int,
) -> dict[str, Any]:
    """Every rank's part: for each arm its step times in seconds, and what it sent and counted meanwhile.

    Args:
        bucket_mb: DDP's; None: its default.
        distant: whether links have a distance, so that steps follow each other without a barrier.
        size: of `perceptron`.
    """
    opening = OPENING if distant else 1  # far away, TCP's windows open again in some steps
    runners = {}
    for name in arms:
        model, x, y = perceptron(**size)
        arm = ARMS[name].at(density).install(model, bucket_mb)
        runners[name] = Runner(stepper(arm, x, y, distant), arm, opening, share=1 / (arm.arm.every or 1))
    for runner in runners.values():
        runner.settle(warmup)
    found, floor = take_turns(runners, rounds, steps), runners[FLOOR].arm
    assert floor is not None
    return {
        "parameters": sum(p.numel() for p in floor.model.parameters()),
        "buckets": floor.state.buckets,
        "arms": found,
    }


def stepper(arm: Installed, x: Tensor, y: Tensor, distant: bool) -> Callable[[], float]:
    """A function that takes one training step, and returns its seconds.

    Ranks start together where they are near. Where parameters are exchanged every few steps it takes as many, and
    returns each one's share.
    """
    optimizer = arm.optimizer(torch.optim.SGD(arm.module.parameters(), lr=1e-3))
    every = arm.arm.every or 1

    def step() -> float:
        if not distant:
            dist.barrier()
        begin = time.perf_counter()
        for _ in range(every):
            if isinstance(arm.state, Floor):
                arm.state.buckets = 0
            optimizer.zero_grad()
            F.mse_loss(arm.model(x), y).backward()
            optimizer.step()
        return (time.perf_counter() - begin) / every

    return step


def summarize(ranks: Sequence[Mapping[str, Any]], shaped: bool, distant: bool = False) -> list[dict[str, Any]]:
    """One row for each arm: medians over all steps (a step lasts until its slowest rank is done; on links with a
    distance, as long as it does on average), and what follows.

    Args:
        ranks: for each rank, for each arm: `times` [rounds][steps] in seconds, `sent_bytes` and `counted` a step.
        shaped: whether the interface's count is this rank's alone.
    """
    arms = timed(ranks, shaped, average if distant else slowest)
    rounds = {name: arm.turns for name, arm in arms.items()}
    rows: list[dict[str, Any]] = []
    for name, turns in rounds.items():
        taxes = taxes_of(turns, rounds[FLOOR])
        baseline = taxes_of(rounds[BASELINE], rounds[FLOOR]) if BASELINE in rounds else None
        ratio = ratios = None
        if baseline is not None and name != FLOOR:
            ratio, *ratios = (tax / other for tax, other in zip(taxes, baseline, strict=True))
        counted = ranks[0][name]["counted"]
        paired = None
        if distant and BASELINE in rounds:
            paired = [report.median(a) / report.median(b) for a, b in zip(turns, rounds[BASELINE], strict=True)]
        rows.append(
            {
                "arm": name,
                "step_s": arms[name].seconds,
                "step_quartiles_s": arms[name].quartiles,
                "tax_s": taxes[0],
                "tax_ratio": ratio,
                "tax_ratio_by_round": ratios,
                **({} if paired is None else {"step_ratio": report.median(paired), "step_ratio_by_round": paired}),
                "sent_bytes": arms[name].sent_bytes,
                **{key: counted.get(key) for key in ("payload_bytes", "encode_s", "exchange_s", "decode_s")},
                "times_s": turns,
            }
        )
    return rows


def taxes_of(arm: Sequence[Sequence[float]], floor: Sequence[Sequence[float]]) -> list[float]:
    """Median step less the floor's: over all rounds first, then of each round by itself."""
    everything = report.median([t for turn in arm for t in turn]) - report.median([t for turn in floor for t in turn])
    return [everything, *(report.median(a) - report.median(b) for a, b in zip(arm, floor, strict=True))]


def paired_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of an arm's step beside the baseline's, round by round; none without a distance."""
    if "step_ratio" not in row:
        return ()
    by_round = row["step_ratio_by_round"]
    return f"{row['step_ratio']:.3f}", f"{min(by_round):.3f} to {max(by_round):.3f}"


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """One row for each arm."""
    model, arguments = result["model"], result["arguments"]
    phases = ("encode_s", "exchange_s", "decode_s")
    rows = []
    for row in result["arms"]:
        ratio, spread = row["tax_ratio"], row["tax_ratio_by_round"]
        rows.append(
            [
                ARMS[row["arm"]].at(arguments["density"]).title,
                f"{row['step_s'] * 1e3:.1f}",
                span(row["step_quartiles_s"]),
                f"{row['tax_s'] * 1e3:.1f}",
                "" if ratio is None else f"{ratio:.3f}",
                "" if ratio is None else f"{min(spread):.3f} to {max(spread):.3f}",
                *paired_of(row),
                megabytes(row["sent_bytes"]),
                *("" if row[phase] is None else f"{row[phase] * 1e3:.1f}" for phase in phases),
            ]
        )
    paired = ("step / fp16's", "by round") if paired_of(result["arms"][0]) else ()
    columns = ("arm", "step ms", "quartiles", "tax ms", "tax / fp16's", "by round", *paired, "sent MB")
    size = f"{model['parameters'] / 1e6:.1f} M parameters, batch {arguments['batch']}"
    title = f"One DDP step of {size}, {result['links']}"
    notes = [
        report.describe(result["environment"]),
        f"{arguments['rounds']} rounds of {arguments['steps']} steps, {model['buckets']} buckets, one thread a rank; "
        "tax: step less the step without communication; sent: by one rank, as the kernel counts; "
        "encode, exchange, decode: ms a step beside the backward pass",
        caption(result["proof"]),
    ]
    return [report.Table(title, (*columns, "encode", "exchange", "decode"), rows, "\n".join(notes))]
