"""What a step of hybrid-sharded training takes where nodes are joined by links of a known speed.

Two nodes of two ranks each: the ranks of a node share its link and shard the model between them over its loopback, and
the nodes hold replicas. Mixed precision is as usual: bfloat16 to compute, float32 for the rest. FSDP's own
HSDP sums the shards' gradients over the replicas in that, or in bfloat16 in an arm of its own; gradwire's arms call
`compress_fsdp`. The model is `gradwire-bench step`'s: six linear layers of 2048 × 2048, each an FSDP module that is
gathered once a step (`reshard_after_forward=False`), at batch 8 and one thread a rank. Arms take turns in rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ... import Codec, OneBit, TopK, compress_fsdp
from ..common import report
from ..common.arguments import add_arms, expect_at_least
from ..common.arms import in_turns, label, slowest
from ..common.models import perceptron
from ..links import flags, links
from ..links.verification import caption, sent_bytes

FLOOR, HSDP = "none", "hsdp"
#: Ranks on each node, which share its link.
NODES, PER_NODE = 2, 2


@dataclass(frozen=True)
class Arm:
    """One way to reduce gradients over replicas.

    Attributes:
        title: for people.
        codec: gradwire's; None: FSDP's own.
        dtype: of FSDP's reductions.
    """

    title: str
    codec: Codec | None = None
    dtype: torch.dtype = torch.float32


ARMS = {
    FLOOR: Arm("no replicas: sharding alone"),
    HSDP: Arm("FSDP2's own HSDP"),
    "hsdp-bf16": Arm("FSDP2's own HSDP, reduce_dtype=bfloat16", dtype=torch.bfloat16),
    "onebit": Arm("", OneBit()),
    "topk": Arm("", TopK(density=0.01)),
}


def title(name: str) -> str:
    """An arm's, for people."""
    codec = ARMS[name].codec
    return ARMS[name].title if codec is None else f"gradwire, {label(codec)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", default="1gbit", help="of each node's link, such as 100mbit; none: unshaped loopback")
    add_arms(parser, {name: title(name) for name in ARMS})
    parser.add_argument("--steps", type=int, default=4, help="timed in each round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="each runs every arm once (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps of each arm first (default: %(default)s)")
    parser.add_argument("--width", type=int, default=2048, help="of each linear layer (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="linear layers (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="samples a rank (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for all of it (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write arguments, environment and every timing there")


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench hsdp`."""
    expect_at_least(options, steps=1, rounds=1, warmup=0, width=1, layers=1, batch=1)
    rate = flags.parse_rate(options.rate)
    arms = list(dict.fromkeys([FLOOR, HSDP, *options.arms]))
    names = ("steps", "rounds", "warmup", "width", "layers", "batch")
    arguments = {"arms": arms, **{name: getattr(options, name) for name in names}}
    world = NODES * PER_NODE
    result = report.document("hsdp", {"rate": options.rate, "nodes": NODES, "ranks_per_node": PER_NODE, **arguments})
    result["environment"]["threads"] = 1
    shaped = rate is not None
    with links.Loopback(world) if rate is None else links.ShapedLinks(world, rate, per_node=PER_NODE) as connection:
        proof, ranks = connection.run_proven(measure, arguments, options.timeout)
    result |= {
        "links": str(connection),
        "proof": proof,
        "parameters": ranks[0]["parameters"],
        "arms": summarize([rank["arms"] for rank in ranks], shaped),
    }
    report.deliver(result, tables(result), options)
    return 0


def measure(
    arms: Sequence[str], steps: int, rounds: int, warmup: int, width: int, layers: int, batch: int
) -> dict[str, Any]:
    """What every rank does: for each arm its step times in seconds, what its node sent, and what the formula says."""
    mesh = init_device_mesh("cpu", (NODES, PER_NODE), mesh_dim_names=("replicate", "shard"))
    runners = {name: Runner(name, mesh, width, layers, batch) for name in arms}
    for runner in runners.values():
        for _ in range(warmup):
            runner.step()
    in_turns({name: partial(runner.round, steps) for name, runner in runners.items()}, rounds)
    return {
        "parameters": runners[FLOOR].numel,
        "arms": {name: runner.result() for name, runner in runners.items()},
    }


class Runner:
    """An arm's model, and its steps."""

    def __init__(self, name: str, mesh: DeviceMesh, width: int, layers: int, batch: int) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        arm = ARMS[name]
        model, self.x, self.y = perceptron(width, layers, batch)
        self.numel = sum(p.numel() for p in model.parameters())
        layers_of = [layer for layer in model.children() if list(layer.parameters())]
        shards = [sum(p.numel() for p in layer.parameters()) // PER_NODE for layer in layers_of]
        how: Any = {
            "mesh": mesh if arm.codec is None and name != FLOOR else mesh["shard"],
            "mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=arm.dtype, output_dtype=torch.float32),
            "reshard_after_forward": False,
        }
        for layer in layers_of:
            fully_shard(layer, **how)
        fully_shard(model, **how)
        if arm.codec is not None:
            compress_fsdp(model, arm.codec, mesh=mesh["replicate"], exchange="gather")
        self.formula = formula(name, shards)
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=1e-3)
        self.times: list[list[float]] = []
        self.sent = 0

    def step(self) -> float:
        """Seconds of one training step, started on all ranks together."""
        dist.barrier()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        F.mse_loss(self.model(self.x), self.y).backward()
        self.optimizer.step()
        return time.perf_counter() - begin

    def round(self, steps: int) -> None:
        self.step()  # its connections were idle while the others had their turn
        sent = sent_bytes()
        self.times.append([self.step() for _ in range(steps)])
        self.sent += sent_bytes() - sent

    def result(self) -> dict[str, Any]:
        steps = sum(len(turn) for turn in self.times)
        return {"times": self.times, "sent_bytes": self.sent / steps, "formula_bytes": self.formula}


def formula(name: str, shards: Sequence[int]) -> int:
    """Bytes that a node sends to the other in a step: what its ranks do, who have a shard each of these elements.

    A ring all-reduce sends 2·(R-1)/R of a shard, an all-gather R-1 wires of it; R are the nodes.
    """
    arm = ARMS[name]
    if name == FLOOR:
        return 0
    if arm.codec is not None:
        return PER_NODE * (NODES - 1) * sum(arm.codec.wire_bytes(numel) for numel in shards)
    return PER_NODE * 2 * (NODES - 1) * arm.dtype.itemsize * sum(shards) // NODES


def summarize(ranks: Sequence[Mapping[str, Any]], shaped: bool) -> list[dict[str, Any]]:
    """One row for each arm: medians over all steps, each as long as its slowest rank's.

    Args:
        ranks: for each rank, for each arm, `Runner.result`.
        shaped: whether the interface's count is the node's alone.
    """
    rounds = {name: slowest([rank[name]["times"] for rank in ranks]) for name in ranks[0]}
    own = rounds[HSDP]
    rows = []
    for name, turns in rounds.items():
        times = [step for turn in turns for step in turn]
        by_round = [report.median(a) / report.median(b) for a, b in zip(own, turns, strict=True)]
        rows.append(
            {
                "arm": name,
                "step_s": report.median(times),
                "step_quartiles_s": report.quartiles(times),
                "times_faster": report.median([step for turn in own for step in turn]) / report.median(times),
                "times_faster_by_round": by_round,
                "sent_bytes": max(rank[name]["sent_bytes"] for rank in ranks) if shaped else None,
                "formula_bytes": ranks[0][name]["formula_bytes"],
                "times_s": turns,
            }
        )
    return rows


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """One row for each arm."""
    arguments, rows = result["arguments"], []
    for row in result["arms"]:
        low, high = row["step_quartiles_s"]
        spread, sent = row["times_faster_by_round"], row["sent_bytes"]
        rows.append(
            [
                title(row["arm"]),
                f"{row['step_s'] * 1e3:.0f}",
                f"{low * 1e3:.0f} to {high * 1e3:.0f}",
                f"{row['times_faster']:.2f}",
                f"{min(spread):.2f} to {max(spread):.2f}",
                "" if sent is None else f"{sent / 1e6:.2f}",
                f"{row['formula_bytes'] / 1e6:.2f}",
            ]
        )
    columns = ("arm", "step ms", "quartiles", "HSDP's / its", "by round", "node sends MB", "by formula")
    size = f"{result['parameters'] / 1e6:.1f} M parameters, batch {arguments['batch']}"
    notes = [
        report.describe(result["environment"]),
        f"{arguments['rounds']} rounds of {arguments['steps']} steps, one thread a rank, {NODES * PER_NODE} ranks on "
        f"{result['environment']['cores']} cores; node sends: by a node to the other in a step, as the kernel counts, "
        "with headers",
        caption(result["proof"]),
    ]
    return [report.Table(f"One HSDP step of {size}, {result['links']}", columns, rows, "\n".join(notes))]
