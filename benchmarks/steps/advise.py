"""Whether compression makes your training's steps faster: real steps of your model, measured, and what they say.

Where you train, on the network that you have, with NCCL on GPUs and Gloo on CPUs; the most honest answer:

    torchrun ... -m gradwire.benchmarks.cli advise --model mymodule:build

Or on this machine alone, between ranks of one core each on links of a known speed (Linux, CPUs):

    gradwire-bench advise --model mymodule:build --bandwidth 1gbit

`build()` returns a tuple (model, loss): a module on the device it trains on, and a function that runs a module on an
example batch and returns the loss, a scalar:

    def build():
        model, x, y = Net(), torch.randn(32, 100), torch.randint(10, (32,))
        return model, lambda model: F.cross_entropy(model(x), y)

The folder you are in is searched for `mymodule`. `--model linear`, `small` and `language` come along.

Every way to exchange gradients has a copy of the model and takes its turn in every round, so what else the machine
does hits all alike. A round gives each way's ratio to the faster of PyTorch's own two. Everything is built and measured
three times; an interval reaches from the lowest to the highest end of the three 95 % intervals. The answer is
"Compress" only where all of an interval lies above 1.05, and "Cannot tell" where it says neither. It is about time
alone, under plain SGD, for the ranks that took part; more ranks are measured by starting more.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ... import compress
from ...compress import Codec
from ..common import report
from ..common.arguments import expect_at_least
from ..common.arms import ARMS, BASELINE, DENSE, FLOOR, Arm, recommended
from ..common.launch import LinkError
from ..common.models import load
from ..links import flags, links
from ..links.turns import Trainee, on_one_batch, told
from ..links.verification import Proof, as_long, caption

#: PyTorch's own ways; the faster one is what a codec has to beat.
OWN = (DENSE, BASELINE)
#: A codec that gains less is not worth what it leaves out.
WORTH = 1.05
#: An interval that reaches further from its median says no number.
EXACT = 0.1
#: How often everything is built and measured anew: where memory and threads lie changes a step's time too.
LAUNCHES = 3
#: A turn has as many steps as take so long, after an untimed one where that is short beside the turn.
TURN_SECONDS, LONG_STEP = 0.05, 0.5
#: Untimed steps: DDP rebuilds its buckets after the first.
WARM_UP = 3
FEWEST_ROUNDS = 3
#: Latencies below this are the machine's own between two processes.
SHORTEST = 100e-6
TIMEOUT = 900.0
COMPRESS, LEAVE, UNKNOWN = "compress", "do not compress", "cannot tell"
TORCHRUN = "start it by torchrun on the machines that train (see --help)"
GONE = ("--local", "--local-bandwidth", "--cores", "--probe", "--check", "--rates", "--plot")


class _Gone(argparse.Action):
    """An option of the former `advise`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(
            f"{'/'.join(self.option_strings)} is gone: advise predicts nothing any more, it measures the ranks that it "
            f"has. To measure more ranks, several on a node, or a network of yours, {TORCHRUN}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="linear", help="module:function, or linear, small, language (%(default)s)")
    parser.add_argument("--optimizer", default="adamw", help="whose codecs gradwire.recommend names (%(default)s)")
    parser.add_argument(
        "--ratio", type=float, nargs="*", default=[7, 19, 100], help="times fewer bytes, of these codecs (7 19 100)"
    )
    parser.add_argument("--codec", nargs="+", default=[], metavar="CODEC", help="others, such as 'TopK(density=0.01)'")
    parser.add_argument("--bucket-mb", type=float, help="DDP's bucket_cap_mb (default: DDP's own)")
    parser.add_argument("--bandwidth", help="of each rank's link here (default: 1gbit); not under torchrun")
    parser.add_argument(
        "--latency",
        "--delay",
        help="one way, such as 25ms (default: this machine's own, some 50us); not under torchrun",
    )
    parser.add_argument("--world", type=int, help="ranks here, at most one a core (default: 2); not under torchrun")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each of three measurements (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there")
    parser.add_argument(*GONE, action=_Gone, nargs="*", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench advise`."""
    arms = arms_of(options.optimizer, options.ratio, options.codec)
    result = report.document("advise", {name: value for name, value in vars(options).items() if name not in GONE})
    how = {name: getattr(options, name) for name in ("model", "optimizer", "ratio", "codec", "bucket_mb", "seconds")}
    if "RANK" in os.environ:
        result |= in_group(options, how)
        if int(os.environ["RANK"]):
            return 0
    else:
        result |= on_links(options, how)
    result["arms"] = summarize(result.pop("launches"), arms)
    result |= verdict(result["arms"], result["emulated"])
    report.deliver(result, tables(result), options)
    print(result["says"])
    return 0


def arms_of(optimizer: str, ratios: Sequence[float], codecs: Sequence[str]) -> dict[str, Arm]:
    """No communication, PyTorch's own ways, the codecs recommended under an optimizer, and others, by name.

    Raises:
        ValueError: a ratio or a codec makes no sense, or there is none.
    """
    arms = {name: ARMS[name] for name in (FLOOR, *OWN)}
    arms |= {arm.name: arm for arm in (recommended(optimizer, ratio) for ratio in ratios)}
    for text in codecs:
        try:
            codec = eval(text, {"torch": torch, **vars(compress)})  # of the user's own command line
            codec = codec() if isinstance(codec, type) else codec
        except Exception as error:
            raise ValueError(f"--codec {text}: {type(error).__name__}: {error}") from error
        if not isinstance(codec, Codec):
            raise ValueError(f"--codec {text}: expected a codec such as 'TopK(density=0.01)' or QSGD")
        arms[text] = Arm(text, codec=codec)
    if len(arms) == 1 + len(OWN):
        raise ValueError("--ratio without a number, and no --codec: there is nothing to compare")
    return arms


def on_links(options: argparse.Namespace, how: Mapping[str, Any]) -> dict[str, Any]:
    """Measure ranks that are started here.

    Raises:
        ValueError: an option makes no sense, or such ranks would say nothing of what it asks.
        LinkError: this machine can emulate no links, or a rank failed.
    """
    world = 2 if options.world is None else options.world
    expect_at_least(argparse.Namespace(world=world, seconds=options.seconds), world=2, seconds=1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if world > cores:
        raise ValueError(f"--world {world}: cannot tell on {cores} cores, as each rank needs one; {TORCHRUN}")
    rate = flags.parse_rate(options.bandwidth or "1gbit")
    if rate is None:
        raise ValueError(
            f"--bandwidth none: expected a number and a unit such as 10gbit; for a network of yours, {TORCHRUN}"
        )
    latency = flags.parse_time(options.latency or "0s", "--latency")
    distance = flags.Distance(latency) if latency > SHORTEST else None
    device = next(load(options.model)[0].parameters()).device
    if device.type != "cpu":
        raise ValueError(f"--model {options.model} is on {device}: ranks here would share it; {TORCHRUN}")
    launches: list[Any] = []
    proofs: list[Proof] = []
    try:
        with links.open_links(world, rate, distance) as connection:
            for launch in range(LAUNCHES):
                print(f"measuring {options.model} on {connection}: {launch + 1} of {LAUNCHES}", file=sys.stderr)
                proof, ranks = connection.run_proven(measure, how, TIMEOUT)
                proofs += [proof] if proof else []  # there is one, as there is a rate
                launches.append(ranks)
    except links.NoRoot:
        raise
    except LinkError as error:
        raise LinkError(f"advise cannot measure here: {error}; {TORCHRUN}") from error
    worst = max(proofs, key=lambda proof: (not as_long(proof), proof["median_s"]))
    kept = {"rate": all(proof["reached"] for proof in proofs), "delay": all(map(as_long, proofs))}
    return {
        "launches": launches,
        "network": str(connection),
        "note": caption(worst),
        "proofs": proofs,
        "emulated": kept,
    }


def in_group(options: argparse.Namespace, how: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the ranks that torchrun has started; on every one of them."""
    given = [f"--{name}" for name in ("bandwidth", "latency", "world") if getattr(options, name) is not None]
    if given:
        raise ValueError(f"{', '.join(given)}: torchrun's ranks have a network already, leave it out")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group()  # Gloo, and NCCL beside it where there are GPUs
    try:
        world, launches = dist.get_world_size(), []
        for launch in range(LAUNCHES):
            if dist.get_rank() == 0:
                print(f"measuring {options.model} on {world} ranks: {launch + 1} of {LAUNCHES}", file=sys.stderr)
            ranks: list[Any] = [None] * world
            dist.all_gather_object(ranks, measure(**how))
            launches.append(ranks)
            gc.collect()  # models in reference cycles keep memory, and the group
        nodes = -(-world // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        network = f"{world} ranks on {nodes} machine{'s' * (nodes > 1)}"
        return {"launches": launches, "network": network, "note": "the network as it is", "emulated": None}
    finally:
        dist.destroy_process_group()


def measure(
    model: str, optimizer: str, ratio: Sequence[float], codec: Sequence[str], bucket_mb: float | None, seconds: float
) -> dict[str, Any]:
    """Every rank's part of one launch: each arm's seconds of a step, by rounds; and what its buckets send."""
    arms = arms_of(optimizer, ratio, codec)
    trainees = {name: on_one_batch(arm, load(model), bucket_mb, lr=1e-6) for name, arm in arms.items()}
    device = next(trainees[DENSE].installed.module.parameters()).device
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    steps, opening = {}, {}
    for name, trainee in trainees.items():
        trainee.settle(WARM_UP)
        every = arms[name].every or 1
        first = told(_turn(trainee, every, 0, wait))
        steps[name] = every * max(1, round(TURN_SECONDS / first / every))
        opening[name] = every * (first < LONG_STEP)
    rounds: dict[str, list[float]] = {name: [] for name in arms}
    order, drawn, begin, enough = list(arms), random.Random(0), time.monotonic(), False
    while not enough:
        drawn.shuffle(order)
        for name in order:
            rounds[name].append(_turn(trainees[name], steps[name], opening[name], wait))
        done = time.monotonic() - begin > seconds and len(rounds[DENSE]) >= FEWEST_ROUNDS
        enough = told(done)
    parameters = sum(p.numel() for p in trainees[DENSE].installed.module.parameters())
    result = {
        name: {
            "seconds": rounds[name],
            "sends": trainee.installed.sends(),
            "bits": trainee.installed.bits_per_element(),
        }
        for name, trainee in trainees.items()
    }
    for trainee in trainees.values():
        trainee.installed.close()
    return {"parameters": parameters, "device": str(device), "arms": result}


def _turn(trainee: Trainee, steps: int, opening: int, wait: Callable[[], None]) -> float:
    """Seconds of a step, all ranks beginning together."""
    for _ in range(opening):
        trainee.step()
    wait()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        trainee.step()
    wait()
    return (time.perf_counter() - begin) / steps


def summarize(launches: Sequence[Sequence[Mapping[str, Any]]], arms: Mapping[str, Arm]) -> list[dict[str, Any]]:
    """One row for each arm: its median step, and how many times as fast it is as the faster of PyTorch's own.

    Args:
        launches: for each, for each rank, what `measure` returned.
    """
    seconds = {
        name: [
            [max(turn) for turn in zip(*(rank["arms"][name]["seconds"] for rank in ranks), strict=True)]
            for ranks in launches
        ]
        for name in arms
    }
    step = {name: report.median([turn for turns in by_launch for turn in turns]) for name, by_launch in seconds.items()}
    best = min(OWN, key=step.__getitem__)
    rows = []
    for name, arm in arms.items():
        ratios = [
            [b / a for a, b in zip(*pair, strict=True)] for pair in zip(seconds[name], seconds[best], strict=True)
        ]
        limits = [report.median_interval(launch) for launch in ratios]
        rows.append(
            {
                "arm": name,
                "title": arm.title,
                "codec": None if arm.codec is None else repr(arm.codec),
                "every": arm.every,
                "call": arm.call or f"CompressState(model, {arm.codec})",
                "best": best,
                "step_s": step[name],
                "gain": report.median([ratio for launch in ratios for ratio in launch]),
                "low": min(limit["low"] for limit in limits),
                "high": max(limit["high"] for limit in limits),
                "sends": sorted({ranks[0]["arms"][name]["sends"] for ranks in launches}),
                "bits": launches[0][0]["arms"][name]["bits"],
                "seconds": seconds[name],
            }
        )
    return rows


def verdict(rows: Sequence[Mapping[str, Any]], emulated: Mapping[str, bool] | None = None) -> dict[str, Any]:
    """The answer, and the sentence that says it.

    Args:
        rows: `summarize`'s.
        emulated: whether emulated links kept their "rate" and their "delay"; None: the network is real.
    """
    own = {row["arm"]: row for row in rows if row["arm"] in OWN}
    codecs = [row for row in rows if row["codec"] is not None]
    best, fastest = own[rows[0]["best"]], max(codecs, key=lambda row: row["gain"])
    range_ = f"[{fastest['low']:.2f}, {fastest['high']:.2f}]"
    number = f"{fastest['gain']:.2f} {range_}"
    if max(fastest["high"] / fastest["gain"] - 1, 1 - fastest["low"] / fastest["gain"]) > EXACT:
        number = f"between {fastest['low']:.2f} and {fastest['high']:.2f} (cannot tell closer, as measurements differ)"
    saw = f"with {fastest['title']} a step is {number} times as fast as with {best['title']}"
    kept = emulated or {"rate": True, "delay": True}
    compresses, leaves = fastest["low"] > WORTH, all(row["high"] < WORTH for row in codecs)
    if not kept["delay"]:
        return {"answer": UNKNOWN, "says": f"Cannot tell: this machine is too busy to keep that latency; {TORCHRUN}."}
    if leaves:
        text = f"Do not compress with gradwire: {saw}."
        plain, half = own[DENSE], own[BASELINE]
        if best is half and 1 / plain["high"] > WORTH:
            text += f" {half['title']} is {1 / plain['gain']:.2f} times as fast as {plain['title']}: "
            text += "model.register_comm_hook(None, default_hooks.fp16_compress_hook)"
        return {"answer": LEAVE, "says": text}
    if not kept["rate"]:
        why = "this machine's processors, not the link, were the limit, so a link of that rate may gain less"
        return {"answer": UNKNOWN, "says": f"Cannot tell: here {saw}, but {why}; {TORCHRUN}."}
    if not compresses:
        return {"answer": UNKNOWN, "says": f"Cannot tell: {saw}; stop what else runs here, or give it more --seconds."}
    text = f"Compress: {saw} ({fastest['step_s'] * 1e3:.3g} ms instead of {best['step_s'] * 1e3:.3g}). That is about "
    text += "time alone: see first whether your model learns as well; gradwire.recommend names codecs that have."
    call = fastest["call"] if fastest["every"] else f"model.register_comm_hook({fastest['call']}, compress_hook)"
    return {"answer": COMPRESS, "says": f"{text}\n    {call}"}


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """The steps of all arms."""
    rows = [
        [
            row["title"]
            + (f" (sends {', '.join(row['sends'])})" if row["codec"] and row["sends"] != ["compressed"] else ""),
            f"{row['step_s'] * 1e3:.2f}",
            f"{row['gain']:.2f} [{row['low']:.2f}, {row['high']:.2f}]",
        ]
        for row in result["arms"]
    ]
    counts = ", ".join(str(len(turns)) for turns in result["arms"][0]["seconds"])
    best = next(row["title"] for row in result["arms"] if row["arm"] == row["best"])
    notes = [
        report.describe(result["environment"]),
        result["note"],
        f"rounds of three launches: {counts}; times as fast as {best}: median, and interval of all launches",
    ]
    title = f"Steps of {result['arguments']['model']}, {result['network']}"
    return [report.Table(title, ("arm", "step ms", "times as fast"), rows, "\n".join(notes))]
