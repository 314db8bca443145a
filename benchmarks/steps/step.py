"""The cost of communication in a DDP step on a link of known speed, on CPUs and on GPUs.

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

    gradwire-bench step --device cuda --model gpt2 --rates 1gbit 10gbit 25gbit none --worlds 2 4 --stop-after 500
        --json steps.json --arms fp32 fp16 bf16-hook powersgd qsgd onebit ternary topk chunked auto

runs over NCCL, on one GPU that ranks share or on several. Each rate of each number of ranks is written as it ends;
`--resume` measures what is left. An arm that fails is left out, with its message, and the others begin again. One rank
alone sends nothing: it shows what compressing costs a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compress import TopK
from ..common import report
from ..common.arguments import add_arms, add_layers, add_output, add_turns
from ..common.arms import ARMS, BASELINE, DENSE, FLOOR
from ..common.launch import LinkError, ProcessError, device
from ..common.models import load, perceptron
from ..links import flags, turns, verification
from ..links.driver import document, measured
from ..links.links import NoRoot
from ..links.turns import between, medians, milliseconds, ratios
from ..links.verification import Proof, caption

#: Options that say what is measured.
OPTIONS = ("density", "steps", "rounds", "warmup", "width", "layers", "batch", "bucket_mb", "model")
DEFAULT_ARMS = (FLOOR, "fp32", BASELINE, "onebit", "topk")
PHASES = ("encode", "exchange", "decode")
#: Written by each rank before an arm's name.
BEGINS = "begins:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_links(parser, "1gbit", world=False)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2], help="ranks (default: 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the ranks (default: %(default)s)")
    parser.add_argument("--model", help="such as gpt2, gpt2-tiny or module:function, in the place of linear layers")
    add_arms(parser, {name: arm.title for name, arm in ARMS.items()}, DEFAULT_ARMS)
    parser.add_argument("--density", type=float, default=0.01, help="of the topk arm (default: %(default)s)")
    add_turns(parser, steps=6, rounds=5, warmup=6)
    add_layers(parser)
    parser.add_argument("--bucket-mb", type=float, help="DDP's bucket_cap_mb (default: DDP's own)")
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="SECONDS",
                        help="begin no round later than that, but each network's first")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="keep what the file of --json has already")
    add_output(parser, timeout=300, each="one rate")


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench step`."""
    end = time.time() + options.stop_after
    TopK(density=options.density)  # refuses what is none, before there are links
    arms = list(dict.fromkeys([FLOOR, *options.arms]))  # the tax needs the floor
    rates = flags.network_of(options)[0]
    if "bf16-hook" in arms and options.device == "cpu":
        raise ValueError("--arms bf16-hook: PyTorch takes it with --device cuda alone")
    if 1 in options.worlds and any(rates.values()):
        raise ValueError("--worlds 1: one rank has no link: --rates none")
    arguments = {"arms": arms, **{name: getattr(options, name) for name in OPTIONS}}
    result = document("step", options, "device", "limit", **arguments)
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("--device cuda: torch finds no CUDA device here")
        result["environment"] |= report.gpu()
    result["networks"] = kept = earlier(options.json, result) if options.resume else []
    done = {(one["world"], one["rate"]) for one in kept}
    left = [one for one in itertools.product(options.worlds, rates) if one not in done]
    refused: list[LinkError] = []
    for place, (world, rate) in enumerate(left):
        now = time.time()
        if now > end:
            print(f"{rate}, {world} ranks: not measured within --stop-after {options.stop_after:g}", flush=True)
            continue
        how = {**arguments, "distant": options.delay is not None, "until": now + (end - now) / (len(left) - place)}
        try:
            expect_within(rates[rate], [one["proof"] for one in kept if one["world"] == world])
            kept.append(without_failed(options, rate, world, how))
        except NoRoot:
            raise
        except LinkError as error:
            refused.append(error)
            print(f"{rate}, {world} ranks: {error}", flush=True)
        if options.json and kept:
            report.write_json(options.json, result)
    if not kept:
        raise refused[0] if refused else ValueError(f"--stop-after {options.stop_after:g}: nothing was measured")
    report.deliver(result, tables(result), options)
    return int(bool(refused) or any("failed" in row for one in kept for row in one["arms"]))


def expect_within(rate: int | None, proofs: Iterable[Proof | None]) -> None:
    """Raises LinkError for a rate that this machine does not reach without a limit, as one of the proofs has shown."""
    for proof in proofs:
        if rate and proof and not proof["expected_s"]:
            reached = proof["bytes_sent"] * 8 / proof["fastest_s"]
            if rate > verification.TOLERANCE * reached:
                raise LinkError(f"without a limit an all-reduce reached {reached / 1e9:.1f} Gbit/s: name a lower rate")


def earlier(file: str | None, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The networks that a file has of the same run. Raises ValueError if it is of another."""
    if file is None or not Path(file).exists():
        return []
    found = json.loads(Path(file).read_text("utf-8"))
    ours, theirs = identity(result), identity(found)
    for name in ours.keys() | theirs.keys():
        if ours.get(name) != theirs.get(name):
            what = f"{name} {theirs.get(name)}, not {ours.get(name)}"
            raise ValueError(f"--resume: {file} is of {what}: name another file by --json")
    networks: list[dict[str, Any]] = found["networks"]
    return networks


def identity(result: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments and the machine that a file must have in common with this run, as JSON has them."""
    arguments = {name: value for name, value in result["arguments"].items() if name not in ("rates", "worlds")}
    same = arguments | {name: result["environment"].get(name) for name in ("cpu", "gpu", "torch", "revision")}
    return dict(json.loads(json.dumps(same)))


def without_failed(options: argparse.Namespace, rate: str, world: int, how: Mapping[str, Any]) -> dict[str, Any]:
    """A network's arms, measured without each one that ends a rank or takes too long: its row has the message.

    Raises:
        LinkError: the links are at fault, or the step without communication.
    """
    failed: dict[str, str] = {}
    join = partial(turns.joined, together=turns.average if how["distant"] else turns.slowest)
    while True:
        given = {**how, "arms": [name for name in how["arms"] if name not in failed]}
        try:
            network, ranks = measured(options, rate, measure, given, world)
            break
        except ProcessError as error:
            begun = re.findall(rf"^{BEGINS} (\S+)$", error.log, re.MULTILINE)
            if not begun or begun[-1] == FLOOR:
                raise
            said = re.findall(r"^\w[\w.]*(?:Error|Exception)\b.*$", error.log, re.MULTILINE)
            failed[begun[-1]] = said[-1] if said else str(error).splitlines()[0]
            print(f"{rate}, {world} ranks: {begun[-1]} is left out: {failed[begun[-1]]}", flush=True)
    rows = join([rank["arms"] for rank in ranks], network["proof"] is not None)
    rows += [{"arm": name, "failed": message} for name, message in failed.items()]
    rows.sort(key=lambda row: how["arms"].index(row["arm"]))
    return network | ranks[0] | {"world": world, "arms": rows}


def measure(
    arms: Sequence[str],
    density: float,
    steps: int,
    rounds: int,
    warmup: int,
    bucket_mb: float | None,
    model: str | None,
    distant: bool,
    until: float,
    **size: int,
) -> dict[str, Any]:
    """Every rank's part: parameters, buckets, and `turns.results`, with GPU memory at its peak and whether replicas are
    equal.

    Args:
        bucket_mb: DDP's; None: its default.
        model: of `models.load`; None: `perceptron`.
        distant: whether links have a distance, so that steps follow each other without a barrier.
        until: as of `turns.take_turns`.
        size: of `perceptron`.
    """
    trainees, peaks, alone = dict[str, list[turns.Trainee]](), dict[str, int | None](), dist.get_world_size() == 1
    on_gpu = device().type == "cuda"

    def free(name: str) -> None:
        """Let the gradients of a GPU go, so that more arms fit into its memory."""
        if on_gpu:
            trainees[name][0].installed.module.zero_grad()

    for name in arms:
        print(BEGINS, name, flush=True)
        before = torch.cuda.memory_allocated() if on_gpu else 0
        with device():
            made, loss = perceptron(**size) if model is None else load(model)
        built, exchange = (made.to(device()), loss), "gather" if alone else "auto"
        trainee = turns.on_one_batch(ARMS[name].at(density), built, bucket_mb, lr=1e-3, exchange=exchange)
        trainee.prepare = partial(print, BEGINS, name, flush=True)
        trainee.settle(warmup)
        trainees[name], peaks[name] = [trainee], torch.cuda.max_memory_allocated() - before if on_gpu else None
        free(name)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()

    begin, opening = ("apart", turns.FAR_OPENING) if distant else ("step", turns.OPENING)
    found = turns.take_turns(trainees, rounds, steps, begin, opening, free, until)
    floor = trainees[FLOOR][0].installed
    equal = {name: replicas_equal(trainees[name][0].installed.module) for name in arms}
    parameters = sum(p.numel() for p in floor.model.parameters())
    rows = turns.results(trainees, found)
    rows = {name: row | {"peak_bytes": peaks[name], "equal": equal[name]} for name, row in rows.items()}
    return {"parameters": parameters, "buckets": floor.state.buckets, "arms": rows}


@torch.no_grad()
def replicas_equal(model: nn.Module) -> bool:
    """True if all ranks have the same bits in every parameter, by two sums of them. A collective."""
    lowest = torch.stack([sums(parameter) for parameter in model.parameters()])
    highest = lowest.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    return torch.equal(highest, lowest)


def sums(parameter: Tensor) -> Tensor:
    """Two of its elements' bits, int64 [2]."""
    bits = parameter.double().view(torch.int64)
    return torch.stack([(bits % 2**31).sum(), (bits * bits).sum()])


def taxes(row: Mapping[str, Any], floor: Mapping[str, Any]) -> list[float]:
    """Median step less the floor's: of all rounds, then of each."""
    return [mine - other for mine, other in zip(medians(row), medians(floor), strict=True)]


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """For each number of ranks one: of all rates, or of the only one."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for network in result["networks"]:
        found.setdefault(network.get("world", 0), []).append(network)
    return [by_rate(result, some) if len(some) > 1 else table(result, *some) for some in found.values()]


def title_of(name: str, result: Mapping[str, Any]) -> str:
    """An arm's. No line of a GPU that is not there can be taken for a GPU's; over NCCL PowerSGD has several buckets."""
    title = ARMS[name].at(result["arguments"]["density"]).title
    if "gpu" not in result["environment"]:
        return title
    emulated = f"{report.EMULATED}: " * (report.EMULATED in result["environment"]["gpu"])
    return emulated + title.removesuffix(", one bucket")


def subject(result: Mapping[str, Any], network: Mapping[str, Any]) -> str:
    """The step that is timed."""
    arguments, facts = result["arguments"], result["environment"]
    name, size = arguments.get("model"), f"{network['parameters'] / 1e6:.1f} M parameters"
    what = f"{name}, {size}" if name else f"{size}, batch {arguments['batch']}"
    return f"One DDP step of {what}" + (f", on {facts['gpu']}" if "gpu" in facts else "")


def notes_of(*networks: Mapping[str, Any]) -> list[str]:
    """On arms that failed, replicas, memory and links."""
    found, all_rows = [], [row for network in networks for row in network["arms"]]
    rows = [row for row in all_rows if row["arm"] != FLOOR and "equal" in row]
    for one in networks:
        failed = (row for row in one["arms"] if "failed" in row)
        found += [f"FAILED at {one['rate']}: {row['arm']}: {row['failed']}" for row in failed]
    if rows:
        differ = sorted({row["arm"] for row in rows if not row["equal"]})
        found.append(f"REPLICAS DIFFER: {', '.join(differ)}" if differ else "all replicas equal, bit for bit")
    if any(memory(row, networks[0]) for row in rows):
        found.append("memory: of tensors at their peak, first steps included, beyond DDP's in float32, in GB")
    if all(one.get("world") == 1 for one in networks):
        return [*found, "one rank: nothing is sent"]
    several = len(networks) > 1
    return found + [(f"{one['rate']}: " if several else "") + caption(one["proof"]) for one in networks]


def memory(row: Mapping[str, Any], network: Mapping[str, Any]) -> str:
    """A cell; empty without a GPU."""
    dense = next((one.get("peak_bytes") for one in network["arms"] if one["arm"] == DENSE), None)
    return "" if dense is None or "peak_bytes" not in row else f"{(row['peak_bytes'] - dense) / 1e9:.2f}"


def by_rate(result: Mapping[str, Any], networks: Sequence[Mapping[str, Any]]) -> report.Table:
    """Milliseconds of each arm's steps, with quartiles, by the links' rate."""
    rows, gpu = [], "gpu" in result["environment"]
    for some in zip(*(network["arms"] for network in networks), strict=True):
        cells = []
        for row in some:
            times = [milliseconds(value) for value in (medians(row)[0], *turns.quartiles(row))] if worked(row) else []
            cells.append("{} [{}, {}]".format(*times) if times else "failed")
        sent = [row["sent_bytes"] for row in some if row.get("sent_bytes")]
        alike = sent[:1] if sent and max(sent) < 1.05 * min(sent) else sent
        ended = "/".join(str(len(row.get("times_s", ()))) for row in some)
        room = next(filter(None, map(memory, some, networks)), "")
        cells += ["/".join(map(turns.megabytes, alike)), *([room] * gpu), ended]
        rows.append([title_of(some[0]["arm"], result), *cells])
    rates = (f"{network['rate']}, ms" for network in networks)
    columns = ("arm", *rates, "sent MB", *(["memory"] * gpu), "rounds")
    steps, counter = result["arguments"]["steps"], networks[-1].get("counter", "the kernel")
    chosen = [
        f"{one['rate']}: {', '.join(row['sends'])}"
        for one in networks
        for row in one["arms"]
        if row["arm"] == "auto" and worked(row)
    ]
    notes = [
        report.describe(result["environment"]),
        f"medians of rounds of {steps} steps, quartiles in brackets; sent: by one rank a step, as {counter} counts",
        *([f"auto sends: {'; '.join(chosen)}"] if chosen else []),
        *notes_of(*networks),
    ]
    title = f"{subject(result, networks[0])}, {networks[0]['world']} ranks, by the rate of each rank's link"
    return report.Table(title, columns, rows, "\n".join(notes))


def worked(row: Mapping[str, Any]) -> bool:
    """True unless the arm failed."""
    return "failed" not in row


def table(result: Mapping[str, Any], network: Mapping[str, Any]) -> report.Table:
    """One row for each arm; with a distance also its steps beside the baseline's, round by round."""
    arguments, arms = result["arguments"], {row["arm"]: row for row in filter(worked, network["arms"])}
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
                title_of(name, result),
                milliseconds(medians(row)[0]),
                between([1e3 * second for second in turns.quartiles(row)], 1),
                *cells,
                turns.megabytes(row["sent_bytes"]),
                *(milliseconds(row["counted"].get(f"{phase}_s")) for phase in PHASES),
                *([memory(row, network)] if memory(row, network) else []),
            ]
        )
    paired = ("step / fp16's", "by round") if beside else ()
    columns = ("arm", "step ms", "quartiles", "tax ms", "tax / fp16's", "by round", *paired, "sent MB", *PHASES)
    columns = (*columns, *(["memory"] if memory(floor, network) else []))
    failed = [title_of(row["arm"], result) for row in network["arms"] if not worked(row)]
    rows += [[title, "failed", *[""] * (len(columns) - 2)] for title in failed]
    notes = [
        report.describe(result["environment"]),
        f"{arguments['rounds']} rounds of {arguments['steps']} steps, {network['buckets']} buckets, one thread a rank; "
        f"tax: step less the step without communication; sent: by one rank, as {network.get('counter', 'the kernel')} "
        "counts; encode, exchange, decode: ms a step beside the backward pass",
        *notes_of(network),
    ]
    return report.Table(f"{subject(result, network)}, {network['links']}", columns, rows, "\n".join(notes))
