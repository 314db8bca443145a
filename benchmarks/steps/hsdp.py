"""The time of a step of hybrid-sharded training where nodes are joined by links of a known speed.

Two nodes of two ranks each: the ranks of a node share its link and shard the model between them over its loopback, and
the nodes hold replicas. Mixed precision is as usual: bfloat16 to compute, float32 for the rest. FSDP's own
HSDP sums the shards' gradients over the replicas in that, or in bfloat16 in an arm of its own; gradwire's arms call
`compress_fsdp`, or put the backend "gradwire" beneath HSDP's sums. The model is `gradwire-bench step`'s: six linear
layers of 2048 × 2048, each an FSDP module that is gathered once a step (`reshard_after_forward=False`), at batch 8 and
one thread a rank. Arms take turns in rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from ... import compress_fsdp
from ...hooks import backend
from ..common import report
from ..common.arguments import add_arms, add_layers, add_output, add_turns
from ..common.arms import FLOOR, HSDP, REPLICATED, Arm
from ..common.models import Built, perceptron
from ..links import flags, turns
from ..links.driver import document, measured_arms
from ..links.turns import Trainee, medians, milliseconds, ratios
from ..links.verification import caption

#: Ranks on each node, which share its link.
NODES, PER_NODE = 2, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_links(parser, whose="node", world=False)
    titles = {name: arm.title for name, arm in REPLICATED.items()}
    add_arms(parser, titles, (FLOOR, HSDP, "hsdp-bf16", "onebit", "topk"))
    add_turns(parser, steps=4, rounds=3, warmup=2)
    add_layers(parser)
    add_output(parser, timeout=300)


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench hsdp`."""
    arms = list(dict.fromkeys([FLOOR, HSDP, *options.arms]))
    if newer := [name for name in arms if REPLICATED[name].backend and not backend.PYTHON]:
        raise ValueError(f"--arms {' '.join(newer)}: the backend gradwire {backend.NEEDS}: leave them out")
    names = ("steps", "rounds", "warmup", "width", "layers", "batch")
    arguments = {"arms": arms, **{name: getattr(options, name) for name in names}}
    result = document("hsdp", options, nodes=NODES, ranks_per_node=PER_NODE, **arguments)
    result["networks"] = measured_arms(options, measure, arguments, turns.joined, NODES * PER_NODE, PER_NODE)
    report.deliver(result, tables(result), options)
    return 0


def measure(arms: Sequence[str], steps: int, rounds: int, warmup: int, **size: int) -> dict[str, Any]:
    """Every rank's part: parameters, and `turns.results` with the bytes that the formula says."""
    models = {name: perceptron(**size) for name in arms}
    numels = [sum(p.numel() for p in layer.parameters()) for layer in models[FLOOR][0].children()]
    shards = [numel // PER_NODE for numel in numels if numel]
    trainees = {name: [sharded(name, models[name])] for name in arms}
    for (trainee,) in trainees.values():
        trainee.settle(warmup)
    found = turns.results(trainees, turns.take_turns(trainees, rounds, steps))
    for name in arms:
        found[name]["formula_bytes"] = formula(name, shards)
    return {"parameters": sum(numels), "arms": found}


def sharded(name: str, built: Built) -> Trainee:
    """An arm's training steps."""
    from torch.distributed import fsdp
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_module

    arm, (model, loss) = REPLICATED[name], built
    native = arm.backend or (arm.codec is None and name != FLOOR)
    # Its own names: to torch, meshes that differ in their backends alone are one, and DTensor confuses them.
    replicate, shard = axes = f"replicate {name}", f"shard {name}"
    inside: Any = {}
    if arm.backend:
        backend.register()  # as the entry point does, where the package is installed
        inside["backend_override"] = {replicate: ("gradwire", backend.BackendOptions(arm.codec))}
    mesh = init_device_mesh("cpu", (NODES, PER_NODE), mesh_dim_names=axes, **inside)
    where = mesh if native else mesh[shard]
    how: Any = {
        "mesh": where,
        "mp_policy": fsdp.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=dtype_of(arm), output_dtype=torch.float32),
        "reshard_after_forward": False,
    }
    if arm.whole_mesh:
        how["dp_mesh_dims"] = fsdp.DataParallelMeshDims(shard, replicate if native else None)
        sides: Any = {  # to torch's types these return nothing
            "input_fn": lambda _, inputs, on: DTensor.from_local(inputs[0], on, [Shard(0)] * on.ndim),
            "output_fn": lambda _, output, on: output.to_local(),
        }
        distribute_module(model, where, **sides)
    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer, **how)
    fully_shard(model, **how)
    if arm.codec is not None and not arm.backend:
        compress_fsdp(model, arm.codec, mesh=mesh[replicate], exchange="gather")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return Trainee(None, step)


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


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    return [table(result, network) for network in result["networks"]]


def table(result: Mapping[str, Any], network: Mapping[str, Any]) -> report.Table:
    """One row for each arm."""
    arguments, rows = result["arguments"], []
    own = next(row for row in network["arms"] if row["arm"] == HSDP)
    for row in network["arms"]:
        faster, *by_round = ratios(medians(own), medians(row))
        rows.append(
            [
                REPLICATED[row["arm"]].title,
                milliseconds(medians(row)[0], 0),
                turns.between([1e3 * second for second in turns.quartiles(row)], 0),
                f"{faster:.2f}",
                turns.between(by_round, 2),
                turns.megabytes(row["sent_bytes"]),
                turns.megabytes(row["formula_bytes"]),
            ]
        )
    columns = ("arm", "step ms", "quartiles", "HSDP's / its", "by round", "node sends MB", "by formula")
    size = f"{network['parameters'] / 1e6:.1f} M parameters, batch {arguments['batch']}"
    notes = [
        report.describe(result["environment"]),
        f"{arguments['rounds']} rounds of {arguments['steps']} steps, one thread a rank, {NODES * PER_NODE} ranks on "
        f"{result['environment']['cores']} cores; node sends: by a node to the other in a step, as the kernel counts, "
        "with headers",
        caption(network["proof"]),
    ]
    return report.Table(f"One HSDP step of {size}, {network['links']}", columns, rows, "\n".join(notes))
