"""The time of a step of hybrid-sharded training where nodes are joined by links of a known speed.

Two nodes of two ranks each: the ranks of a node share its link and shard the model between them over its loopback, and
the nodes hold replicas. Mixed precision is as usual: bfloat16 to compute, float32 for the rest. FSDP's own
HSDP sums the shards' gradients over the replicas in that, or in bfloat16 in an arm of its own; gradwire's arms call
`compress_fsdp`. The model is `gradwire-bench step`'s: six linear layers of 2048 × 2048, each an FSDP module that is
gathered once a step (`reshard_after_forward=False`), at batch 8 and one thread a rank. Arms take turns in rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ... import compress_fsdp
from ..common import report
from ..common.arguments import add_arms, add_layers, add_output, add_turns
from ..common.arms import FLOOR, HSDP, REPLICATED, Arm
from ..common.models import perceptron
from ..links import flags
from ..links.driver import Runner, document, measured, megabytes, span, take_turns, timed
from ..links.verification import caption

#: Ranks on each node, which share its link.
NODES, PER_NODE = 2, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_links(parser, whose="node", world=False)
    add_arms(parser, {name: arm.title for name, arm in REPLICATED.items()})
    add_turns(parser, steps=4, rounds=3, warmup=2)
    add_layers(parser)
    add_output(parser, timeout=300)


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench hsdp`."""
    arms = list(dict.fromkeys([FLOOR, HSDP, *options.arms]))
    names = ("steps", "rounds", "warmup", "width", "layers", "batch")
    arguments = {"arms": arms, **{name: getattr(options, name) for name in names}}
    result = document("hsdp", options, nodes=NODES, ranks_per_node=PER_NODE, **arguments)
    found, ranks = measured(options, options.rate, measure, arguments, NODES * PER_NODE, PER_NODE)
    result |= {
        "links": found["links"],
        "proof": found["proof"],
        "parameters": ranks[0]["parameters"],
        "arms": summarize([rank["arms"] for rank in ranks], found["bits_per_s"] is not None),
    }
    report.deliver(result, tables(result), options)
    return 0


def measure(arms: Sequence[str], steps: int, rounds: int, warmup: int, **size: int) -> dict[str, Any]:
    """Every rank's part: for each arm its step times in seconds, what its node sent, and what the formula says."""
    mesh = init_device_mesh("cpu", (NODES, PER_NODE), mesh_dim_names=("replicate", "shard"))
    models = {name: perceptron(**size) for name in arms}
    numels = [sum(p.numel() for p in layer.parameters()) for layer in models[FLOOR][0].children()]
    shards = [numel // PER_NODE for numel in numels if numel]
    runners = {name: Runner(stepper(name, mesh, *models[name])) for name in arms}
    for runner in runners.values():
        runner.settle(warmup)
    found = take_turns(runners, rounds, steps)
    for name in arms:
        found[name]["formula_bytes"] = formula(name, shards)
    return {"parameters": sum(numels), "arms": found}


def stepper(name: str, mesh: DeviceMesh, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], float]:
    """A function that takes one training step of an arm, started on all ranks together, and returns its seconds."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    arm = REPLICATED[name]
    how: Any = {
        "mesh": mesh if arm.codec is None and name != FLOOR else mesh["shard"],
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=dtype_of(arm), output_dtype=torch.float32),
        "reshard_after_forward": False,
    }
    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer, **how)
    fully_shard(model, **how)
    if arm.codec is not None:
        compress_fsdp(model, arm.codec, mesh=mesh["replicate"], exchange="gather")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        return time.perf_counter() - begin

    return step


def dtype_of(arm: Arm) -> torch.dtype:
    """Of FSDP's own reductions."""
    return torch.bfloat16 if arm.bits == 16 else torch.float32


def formula(name: str, shards: Sequence[int]) -> int:
    """Bytes that a node sends to the other in a step: what its ranks do, who have a shard each of these elements.

    A ring all-reduce sends 2·(R-1)/R of a shard, an all-gather R-1 wires of it; R are the nodes.
    """
    arm = REPLICATED[name]
    if name == FLOOR:
        return 0
    if arm.codec is not None:
        return PER_NODE * (NODES - 1) * sum(arm.codec.wire_bytes(numel) for numel in shards)
    return PER_NODE * 2 * (NODES - 1) * dtype_of(arm).itemsize * sum(shards) // NODES


def summarize(ranks: Sequence[Mapping[str, Any]], shaped: bool) -> list[dict[str, Any]]:
    """One row for each arm: medians over all steps, each as long as its slowest rank's.

    Args:
        ranks: for each rank, for each arm, `Runner.result` and `formula_bytes`.
        shaped: whether the interface's count is the node's alone.
    """
    arms = timed(ranks, shaped)
    own = arms[HSDP]
    rows = []
    for name, arm in arms.items():
        by_round = [report.median(a) / report.median(b) for a, b in zip(own.turns, arm.turns, strict=True)]
        rows.append(
            {
                "arm": name,
                "step_s": arm.seconds,
                "step_quartiles_s": arm.quartiles,
                "times_faster": own.seconds / arm.seconds,
                "times_faster_by_round": by_round,
                "sent_bytes": arm.sent_bytes,
                "formula_bytes": ranks[0][name]["formula_bytes"],
                "times_s": arm.turns,
            }
        )
    return rows


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """One row for each arm."""
    arguments, rows = result["arguments"], []
    for row in result["arms"]:
        spread = row["times_faster_by_round"]
        rows.append(
            [
                REPLICATED[row["arm"]].title,
                f"{row['step_s'] * 1e3:.0f}",
                span(row["step_quartiles_s"], digits=0),
                f"{row['times_faster']:.2f}",
                f"{min(spread):.2f} to {max(spread):.2f}",
                megabytes(row["sent_bytes"]),
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
