"""What communication costs a DDP step on a link of known speed.

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
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...compress import TopK
from ..common import report
from ..common.arms import ARMS, BASELINE, FLOOR, Floor, average, in_turns, slowest
from ..common.choices import add_arms
from ..common.counts import expect_at_least
from ..common.models import perceptron
from . import flags, links
from .proof import caption, sent_bytes

#: Untimed steps of a round on links with a distance.
OPENING = 3
DEFAULT_ARMS = (FLOOR, "fp32", BASELINE, "onebit", "topk")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", default="1gbit", help="of each rank's link, such as 100mbit; none: unshaped loopback")
    flags.add_distance(parser)
    parser.add_argument("--world", type=int, default=2, help="ranks (default: %(default)s)")
    add_arms(parser, {name: arm.title for name, arm in ARMS.items()}, DEFAULT_ARMS)
    parser.add_argument("--density", type=float, default=0.01, help="of the topk arm (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="timed in each round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="each runs every arm once (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=6, help="untimed steps of each arm first (default: %(default)s)")
    parser.add_argument("--width", type=int, default=2048, help="of each linear layer (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="linear layers (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="samples a rank (default: %(default)s)")
    parser.add_argument("--bucket-mb", type=float, help="DDP's bucket_cap_mb (default: DDP's own)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for all of it (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write arguments, environment and every timing there")


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench step`."""
    expect_at_least(options, world=2, steps=1, rounds=1, warmup=0, width=1, layers=1, batch=1)
    TopK(density=options.density)  # refuses what is none, before there are links
    rates, distance = flags.network_of(options)
    rate = rates[options.rate]
    arms = list(dict.fromkeys([FLOOR, *options.arms]))  # the tax needs the floor
    names = ("density", "steps", "rounds", "warmup", "width", "layers", "batch")
    arguments = {"arms": arms, **{name: getattr(options, name) for name in names}}
    if options.bucket_mb is not None:
        arguments["bucket_mb"] = options.bucket_mb
    network = {"rate": options.rate, "world": options.world, **flags.recorded(distance)}
    result = report.document("step", {**network, **arguments})
    result["environment"]["threads"] = 1
    with links.open_links(options.world, rate, distance) as connection:
        job = {**arguments, "distant": distance is not None}
        proof, ranks = connection.run_proven(measure, job, options.timeout)
    result |= {
        "shaped": rate is not None,
        "links": str(connection),
        "proof": proof,
        "model": {"parameters": ranks[0]["parameters"], "buckets": ranks[0]["buckets"]},
        "arms": summarize([rank["arms"] for rank in ranks], rate is not None, distance is not None),
    }
    report.deliver(result, tables(result), options)
    return 0


def measure(
    arms: Sequence[str],
    density: float,
    steps: int,
    rounds: int,
    warmup: int,
    width: int,
    layers: int,
    batch: int,
    bucket_mb: float | None = None,
    distant: bool = False,
) -> dict[str, Any]:
    """What every rank does: for each arm its step times in seconds, and what it sent and counted meanwhile.

    Args:
        bucket_mb: DDP's; None: its default.
        distant: whether links have a distance, so that steps follow each other without a barrier.
    """
    runners = {name: Runner(name, density, width, layers, batch, bucket_mb, distant) for name in arms}
    for runner in runners.values():
        for _ in range(warmup):
            runner.step()
        while runner.arm.deciding:
            runner.step()
    in_turns({name: partial(runner.round, steps) for name, runner in runners.items()}, rounds)
    floor = runners[FLOOR].arm
    return {
        "parameters": sum(p.numel() for p in floor.model.parameters()),
        "buckets": floor.state.buckets,
        "arms": {name: runner.result() for name, runner in runners.items()},
    }


class Runner:
    """An arm's model, and its steps."""

    def __init__(
        self,
        name: str,
        density: float,
        width: int,
        layers: int,
        batch: int,
        bucket_mb: float | None = None,
        distant: bool = False,
    ) -> None:
        self.distant, self.every = distant, ARMS[name].every or 1
        model, self.x, self.y = perceptron(width, layers, batch)
        self.arm = ARMS[name].at(density).install(model, bucket_mb)
        self.optimizer = self.arm.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
        self.times: list[list[float]] = []
        self.counts: list[dict[str, float]] = []
        self.sent = 0

    def step(self) -> float:
        """Seconds of one training step, started on all ranks together where they are near.

        Where parameters are exchanged every few steps: of so many, each one's share.
        """
        if not self.distant:
            dist.barrier()
        begin = time.perf_counter()
        for _ in range(self.every):
            if isinstance(self.arm.state, Floor):
                self.arm.state.buckets = 0
            self.optimizer.zero_grad()
            F.mse_loss(self.arm.model(self.x), self.y).backward()
            self.optimizer.step()
        return (time.perf_counter() - begin) / self.every

    def round(self, steps: int) -> None:
        # Its connections were idle while the others had their turn; far away, TCP's windows open again in some steps.
        for _ in range(OPENING if self.distant else 1):
            self.step()
        sent = sent_bytes()
        times = []
        for _ in range(steps):
            before = self.counted()
            times.append(self.step())
            self.counts.append({name: (count - before[name]) / self.every for name, count in self.counted().items()})
        self.times.append(times)
        self.sent += sent_bytes() - sent

    def counted(self) -> dict[str, float]:
        """What gradwire has counted so far; nothing for the other arms."""
        statistics = self.arm.statistics()
        if statistics is None:
            return {}
        seconds = {f"{phase}_s": spent for phase, spent in statistics.seconds.items()}
        return {"payload_bytes": statistics.bytes_sent, **seconds}

    def result(self) -> dict[str, Any]:
        counted = {name: report.median([count[name] for count in self.counts]) for name in self.counts[0]}
        return {"times": self.times, "sent_bytes": self.sent / len(self.counts) / self.every, "counted": counted}


def summarize(ranks: Sequence[Mapping[str, Any]], shaped: bool, distant: bool = False) -> list[dict[str, Any]]:
    """One row for each arm: medians over all steps (a step lasts until its slowest rank is done; on links with a
    distance, as long as it does on average), and what follows.

    Args:
        ranks: for each rank, for each arm: `times` [rounds][steps] in seconds, `sent_bytes` and `counted` a step.
        shaped: whether the interface's count is this rank's alone.
    """
    together = average if distant else slowest
    rounds = {name: together([rank[name]["times"] for rank in ranks]) for name in ranks[0]}
    rows: list[dict[str, Any]] = []
    for name, turns in rounds.items():
        times = [step for turn in turns for step in turn]
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
                "step_s": report.median(times),
                "step_quartiles_s": report.quartiles(times),
                "tax_s": taxes[0],
                "tax_ratio": ratio,
                "tax_ratio_by_round": ratios,
                **({} if paired is None else {"step_ratio": report.median(paired), "step_ratio_by_round": paired}),
                "sent_bytes": max(rank[name]["sent_bytes"] for rank in ranks) if shaped else None,
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
        low, high = row["step_quartiles_s"]
        rows.append(
            [
                ARMS[row["arm"]].at(arguments["density"]).title,
                f"{row['step_s'] * 1e3:.1f}",
                f"{low * 1e3:.1f} to {high * 1e3:.1f}",
                f"{row['tax_s'] * 1e3:.1f}",
                "" if ratio is None else f"{ratio:.3f}",
                "" if ratio is None else f"{min(spread):.3f} to {max(spread):.3f}",
                *paired_of(row),
                "" if row["sent_bytes"] is None else f"{row['sent_bytes'] / 1e6:.2f}",
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
