"""From measurements to predictions: every way to exchange gradients, on a model that was measured and a network."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...hooks.auto.planner import calibrated, compressed
from ...hooks.comm.group import Group
from ...hooks.comm.topology import make_topology
from ...hooks.exchanges import BucketSpec
from ...hooks.exchanges.dense import all_reduce_estimate
from ...hooks.network import cost
from ..common.arms import BASELINE, PREDICTED, Arm, label
from ..links import links
from . import measurement
from .network import Network, from_flags
from .step_simulation import Job, Prediction, Processors, Profile, predict

#: Seconds for one measuring run.
TIMEOUT = 600.0


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Here:
    """Measurements of this machine.

    Attributes:
        parameters, device, element_bytes: of the model's gradients.
        profile: a step without communication.
        speeds: by the name of a codec's arm.
        casts: seconds an element, to float16 and back.
        work: on entries and elements.
        messages: `measurement.measure_network`'s, as `network.from_flags` wants them.
        processors: what each rank computes with.
    """

    parameters: int
    device: str
    element_bytes: int
    profile: Profile
    speeds: dict[str, cost.CodecSpeed]
    casts: tuple[float, float]
    work: cost.Work
    messages: dict[str, Any]
    processors: Processors

    def network(self, world_size: int, local_size: int, rate: float, latency: float, inside: float | None) -> Network:
        """One whose speed is given; `inside` None: as fast as loopback was, and on GPUs 100 Gbit/s."""
        if inside is None:
            inside = 100e9 if self.device.startswith("cuda") else 8 / self.messages["lines"]["all_reduce"]["beta"]
        return from_flags(self.messages, self.work, world_size, local_size, rate, latency, inside)


def measure(model: str, local: int, cores: float, bucket_mb: float | None = None) -> Here:
    """Measure in processes of our own, as many at once as a node will have, or as this machine has cores for.

    Args:
        model, bucket_mb: as `measurement.measure_model` takes them.
        local: ranks on each node.
        cores: of each rank.

    Raises:
        ValueError: `model` is none.
    """
    threads = max(1, int(cores))
    processes = 1 if torch.cuda.is_available() else max(1, min(local, (os.cpu_count() or 1) // threads))
    job = {"model": model, "threads": threads, "bucket_mb": bucket_mb}
    found = links.Loopback(processes).run(measurement.measure_model, job, TIMEOUT)[0]
    if "error" in found:
        raise ValueError(found["error"])
    messages = links.Loopback(2).run(measurement.measure_network, {"threads": threads}, TIMEOUT)[0]
    return read(found, messages, cores, threads)


def measure_group(model: str, local: int, cores: float, bucket_mb: float | None = None) -> tuple[Here, Network]:
    """Measure in the running group, and probe its network. A collective.

    Raises:
        ValueError: `model` is none.
    """
    threads = max(1, int(cores))
    found = measurement.measure_model(model, threads, bucket_mb)
    if "error" in found:
        raise ValueError(found["error"])
    here = read(found, measurement.measure_network(threads), cores, threads)
    device, everyone = torch.device(here.device), Group(dist.group.WORLD)
    world, blocking = everyone.size, Group.blocks(dist.group.WORLD, torch.device(here.device))
    nodes: Any = local
    if not blocking and 1 < local < world:
        nodes = dist.init_device_mesh("cuda", (world // local, local))
    topology = make_topology(nodes, list(range(world)), everyone, dist.group.WORLD, blocking)
    flat, on_nodes = calibrated(topology, device)
    return here, Network(world, local, flat, on_nodes, here.messages["processor"])


def read(found: Mapping[str, Any], messages: Mapping[str, Any], cores: float, threads: int) -> Here:
    """The results of `measurement`'s functions. On a GPU, a network's software counts nothing: NCCL's is in the latency
    that flags give."""
    profile = found["profile"]
    processors = Processors(cores, threads, messages["waking"])
    messages = {**messages, "gloo": not found["device"].startswith("cuda")}
    if not messages["gloo"]:
        processors = Processors()
        messages["lines"] = {name: {**line, "alpha": 0.0} for name, line in messages["lines"].items()}
        messages["latency"] = dict.fromkeys(messages["latency"], 0.0)
        messages["processor"] = dict.fromkeys(messages["processor"], 0.0)
    return Here(
        found["parameters"],
        found["device"],
        found["element_bytes"],
        Profile(
            tuple(profile["numels"]),
            profile["forward"],
            tuple(profile["ready"]),
            tuple(profile["copy_back"]),
            profile["optimizer"],
        ),
        {name: cost.CodecSpeed(**speed) for name, speed in found["codecs"].items()},
        (found["casts"][0], found["casts"][1]),
        cost.Work(**found["work"]),
        messages,
        processors,
    )


# -- predicting --------------------------------------------------------------------------------------------------------


def predictions(here: Here, network: Network) -> list[dict[str, Any]]:
    """One row for each arm."""
    rows = []
    for arm in PREDICTED:
        jobs, exchanges, received = jobs_of(arm, here, network)
        at_once = network.flat.at_once if arm.codec is not None else min(network.flat.at_once, cost.GLOO_COLLECTIVES)
        prediction = predict(here.profile, jobs, here.processors, at_once)
        rows.append(row_of(arm, prediction, exchanges, received) | {"jobs": [asdict(job) for job in jobs]})
    return rows


def row_of(arm: Arm, prediction: Prediction, exchanges: Sequence[str], received: float) -> dict[str, Any]:
    return {
        "arm": arm.name,
        "what": arm.title,
        "codec": None if arm.codec is None else label(arm.codec),
        "exchange": " and ".join(dict.fromkeys(exchanges)),
        "received_bytes": received,
        "step_s": prediction.step,
        "floor_s": prediction.floor,
        "tax_s": prediction.tax,
        "communication_s": prediction.communication,
        "hidden": prediction.hidden,
        "bottleneck": prediction.bottleneck,
    }


def jobs_of(arm: Arm, here: Here, network: Network) -> tuple[list[Job], list[str], float]:
    """A job for each bucket, the exchanges that serve them, and the bytes that a rank receives in a step.

    A codec's exchange is the one that `CompressState` would choose by these numbers, with `fallback=None`.
    """
    jobs, names, received = [], [], 0.0
    for numel in here.profile.numels:
        if arm.codec is None:
            half = arm.name == BASELINE
            words = -(-numel * (2 if half else here.element_bytes) // 4)
            estimate = all_reduce_estimate(network.flat, words, network.world_size)
            there, back = (cast * numel if half else 0.0 for cast in here.casts)
            stack = network.processor["float16" if half else "float32"] * estimate.received
            jobs.append(Job(there, 0.0, estimate.latency, estimate.transfer, stack, back))
            names.append("all-reduce")
        else:
            speed, size = here.speeds[arm.name], network.world_size
            candidates = compressed(BucketSpec(arm.codec, speed, numel, size), network.flat, network.nodes)
            like = max(1, round(sum(here.profile.numels) / numel))
            estimate = min(candidates, key=lambda candidate: candidate.among(like))
            stack = network.processor["exchange"] * (estimate.received + estimate.inside)
            moving = estimate.latency, estimate.transfer, stack
            jobs.append(Job(0.0, estimate.encode, *moving, estimate.decode, estimate.stages))
            names.append(estimate.name)
        received += estimate.received
    return jobs, names, received
