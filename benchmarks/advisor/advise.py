"""Whether compression would make your training faster, and which codec: a prediction from measurements made here.

    gradwire-bench advise --model mymodule:build --world 16 --local 8 --bandwidth 10gbit --latency 50us

`build()` returns a tuple (model, loss): a module on the device it trains on, and a function that runs a module on an
example batch and returns the loss, a scalar:

    def build():
        model, x, y = Net(), torch.randn(32, 100), torch.randint(10, (32,))
        return model, lambda model: F.cross_entropy(model(x), y)

The folder you are in is searched for `mymodule`. `--model linear`, `small` and `language` come along.

What is measured here: forward, backward and the moments at which DDP's own buckets become ready, DDP's copying, a plain
SGD step; encoding and decoding by each codec, and PyTorch's casts, on buckets of that size; and what small messages and
many bytes cost the processor, between two processes. What is not: your network (flags say how fast it is; or start this
with torchrun and `--probe`, and it is), your optimizer, your data loader, and whether the model learns as well.

A simulation of one step then says what waits for what. On a CPU, codecs and the network stack share the rank's cores
with backward; on a GPU, codecs share the GPU with it.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from ..common import report
from ..links import flags
from . import advice, check
from .network import Network
from .prediction import Here, measure, measure_group, predictions

#: From node to node, one way, where nothing is said.
LATENCY = "50us"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="linear", help="module:function, or linear, small, language (%(default)s)")
    parser.add_argument("--bucket-mb", type=float, help="DDP's bucket_cap_mb (default: DDP's own)")
    parser.add_argument("--world", type=int, default=2, help="ranks in all (default: %(default)s)")
    parser.add_argument("--local", type=int, default=1, help="ranks on each node, which share its card (default: 1)")
    parser.add_argument("--bandwidth", default="1gbit", help="of each node's network card (default: %(default)s)")
    parser.add_argument(
        "--latency", "--delay", help="from node to node, one way, such as 25ms (default: 50us, and with --check none)"
    )
    parser.add_argument(
        "--local-bandwidth", help="of each rank inside a node (default: as loopback here; on GPUs 100gbit)"
    )
    parser.add_argument("--cores", type=float, help="of each rank (default: those here / ranks on a node, at least 1)")
    parser.add_argument(
        "--probe", action="store_true", help="under torchrun: probe the running group instead of --bandwidth and so on"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="predict for the rig of `step`, at --delay or near, and measure it",
    )
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"], help="of --check (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured and predicted there")
    parser.add_argument("--plot", metavar="FILE", help="draw step times against bandwidth there, a PNG")


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench advise`."""
    if options.check:
        return check.run(options)
    options.latency = options.latency or LATENCY
    if options.probe:
        return _run_in_group(options)
    check_ranks(options.world, options.local)
    cores = cores_of(options, options.local)
    rate, inside = flags.parse_rate(options.bandwidth), flags.parse_rate(options.local_bandwidth or "none")
    if rate is None:
        raise ValueError("--bandwidth none: expected a number and a unit such as 10gbit")
    latency = flags.parse_time(options.latency, "--latency")
    with advice.waiting(f"measuring {options.model} and the codecs"):
        here = measure(options.model, options.local, cores, options.bucket_mb)

    def network(at: float) -> Network:
        return here.network(options.world, options.local, at, latency, inside)

    result = advise(options, here, network(rate))
    if options.plot:
        curves = {at: predictions(here, network(at)) for at in advice.BANDWIDTHS}
        advice.plot(options.plot, curves, rate, advice.subtitle(result))
    return 0


def _run_in_group(options: argparse.Namespace) -> int:
    """On every rank that torchrun has started."""
    if "RANK" not in os.environ:
        raise ValueError(
            "--probe needs a running group: torchrun --nproc-per-node 2 -m gradwire.benchmarks.cli advise --probe"
        )
    if options.plot:
        raise ValueError("--plot draws predictions against --bandwidth, which --probe does not use: leave one out")
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_ranks(world, local)
    cores = cores_of(options, local)
    dist.init_process_group()  # Gloo, and NCCL beside it where there are GPUs
    try:
        here, network = measure_group(options.model, local, cores, options.bucket_mb)
        if dist.get_rank() == 0:
            advise(options, here, network)
    finally:
        gc.collect()  # models in reference cycles keep the group
        dist.destroy_process_group()
    return 0


def advise(options: argparse.Namespace, here: Here, network: Network) -> dict[str, Any]:
    """Predict, print, and write what `--json` asks for."""
    names = ("model", "world", "local", "bandwidth", "latency", "local_bandwidth", "cores", "probe")
    result = report.document("advise", {name: getattr(options, name) for name in names})
    result["environment"]["threads"] = here.processors.threads
    rows = predictions(here, network)
    result |= {"measured": asdict(here), "network": asdict(network), "arms": rows}
    result["recommendation"] = advice.recommend(rows)
    report.print_tables(tables(result))
    print(result["recommendation"])
    if options.json:
        report.write_json(options.json, result)
    return result


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """The prediction, or with `--check` one table for each rate."""
    if "checks" in result:
        return [check.table(checked, result["environment"]) for checked in result["checks"]]
    return [advice.table(result)]


def cores_of(options: argparse.Namespace, local: int) -> float:
    """Of each rank. Raises ValueError unless there are some."""
    cores: float = options.cores if options.cores is not None else max(1.0, (os.cpu_count() or 1) / local)
    if not cores > 0:
        raise ValueError(f"--cores {cores:g}: expected more than 0")
    return cores


def check_ranks(world: int, local: int) -> None:
    """Raises ValueError unless `world` ranks fill nodes of `local`."""
    if world < 2:
        raise ValueError(f"--world {world}: expected at least 2 ranks, as one exchanges nothing")
    if local < 1 or world % local:
        raise ValueError(f"--local {local}: expected a number of ranks that divides --world {world}")
