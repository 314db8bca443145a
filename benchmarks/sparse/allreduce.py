"""Sparse all-reduce: every algorithm by world size, density and overlap, on links of a known speed.

For each cell, `k = density * numel` entries a rank, of which `overlap` are the same on all ranks, are reduced by every
algorithm of `gradwire.sparse_all_reduce`, by "auto", and by "split-k" (the exchange of a model's gradients, where
owners keep the k largest sums). Shown are the median time of the slowest rank, the bytes that the interface of a rank
received, as the kernel counts them, which algorithm was fastest, and what "auto" took.

Links need root and iproute2; `--rate none` runs over loopback, where bytes cannot be told apart by rank.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress import TopK
from ...compress.feedback.residual import server_state
from ...hooks.comm.entry_exchange import Entries, fill
from ...hooks.comm.group import Group
from ...hooks.comm.ports import drive
from ...hooks.exchanges.split import Split
from ...hooks.sparse import all_reduce as sparse
from ..common import report
from ..common.arguments import add_output, expect_counts
from ..links import flags
from ..links.driver import document, measured
from ..links.turns import slowest
from ..links.verification import caption, received_bytes

ALGORITHMS = ("gather", "union", "split", "dense")
AUTO, KEPT = "auto", "split-k"
ARMS = (*ALGORITHMS, AUTO, KEPT)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4, 8], metavar="P", help="world sizes")
    densities, overlaps = [0.001, 0.01, 0.1, 0.5], [0.0, 0.5, 1.0]
    parser.add_argument("--density", type=float, nargs="+", default=densities, metavar="D", help="entries / elements")
    parser.add_argument("--overlap", type=float, nargs="+", default=overlaps, metavar="O", help="share in common")
    parser.add_argument("--numel", type=int, default=1 << 22, help="elements of the vector (%(default)s)")
    parser.add_argument("--values", choices=tuple(DTYPES), default="float32", help="how values travel")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    flags.add_links(parser, world=False)
    parser.add_argument("--repeats", type=int, default=5, help="calls of each arm a cell (%(default)s)")
    add_output(parser, timeout=1200, each="each world size", plot="time against density")


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench allreduce`."""
    expect_counts(options)
    for name, values in (("density", options.density), ("overlap", options.overlap)):
        if not all(0 <= value <= 1 for value in values) or (name == "density" and 0 in values):
            raise ValueError(f"--{name} {values}: expected numbers up to 1, and densities above 0")
    arguments = {name: getattr(options, name) for name in ("density", "overlap", "numel", "values", "arms", "repeats")}
    result = document("allreduce", options, **arguments)
    result["links"], result["cells"] = {}, []
    for world_size in options.world:
        found, ranks = measured(options, options.rate, measure, arguments, world_size)
        result["links"][str(world_size)] = found["proof"]
        result["cells"] += summarize(ranks, world_size, shaped=found["bits_per_s"] is not None)
    report.deliver(result, tables(result), options, plot)
    return 0


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    return [link_table(result)]


def measure(
    density: Sequence[float], overlap: Sequence[float], numel: int, values: str, arms: Sequence[str], repeats: int
) -> list[dict[str, Any]]:
    """Every rank's part: each arm in each cell."""
    cells = []
    for share in density:
        for common in overlap:
            indices = IndexSets(numel, share, common)(dist.get_rank())
            numbers = torch.randn(len(indices), generator=torch.Generator().manual_seed(dist.get_rank()))
            found = {}
            for arm in arms:
                runner = (
                    Kept(indices, numbers, numel, values) if arm == KEPT else Call(arm, indices, numbers, numel, values)
                )
                found[arm] = timed(runner, repeats)
            cells.append({"density": share, "overlap": common, "k": len(indices), "arms": found})
    return cells


class IndexSets:
    """k ascending indices for each rank, of which a share is common to all and the rest is the rank's own choice."""

    def __init__(self, numel: int, density: float, overlap: float) -> None:
        k = max(1, math.ceil(density * numel))
        common = round(overlap * k)
        order = torch.randperm(numel, generator=torch.Generator().manual_seed(0))
        self.common, self.rest, self.own = order[:common], order[common:], k - common

    def __call__(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1 + rank)
        if 4 * self.own > len(self.rest):
            mine = self.rest[torch.randperm(len(self.rest), generator=generator)[: self.own]]
        else:  # as many as are needed, without a permutation of all
            drawn = torch.randint(len(self.rest), (2 * self.own + 64,), generator=generator)
            values, inverse = drawn.unique(return_inverse=True)
            first = torch.full((len(values),), len(drawn)).scatter_reduce_(0, inverse, torch.arange(len(drawn)), "amin")
            mine = self.rest[values[first.argsort()[: self.own]]]
        return torch.cat([self.common, mine]).sort().values


class Call:
    """One of the algorithms of `sparse_all_reduce`, into a dense vector."""

    def __init__(self, algorithm: str, indices: Tensor, values: Tensor, numel: int, dtype: str) -> None:
        self.algorithm, self.numel = algorithm, numel
        self.indices, self.values = indices, values.to(DTYPES[dtype])
        self.out = torch.zeros(numel, dtype=self.values.dtype)
        self.chosen, self.moved = algorithm, 0

    def __call__(self) -> None:
        call = sparse.prepare(self.indices, self.values, self.numel, algorithm=self.algorithm, out=self.out)
        result = sparse.reduce(call)
        self.out.copy_(result) if isinstance(result, torch.Tensor) else fill(self.out, result)
        self.chosen, self.moved = call.decision.name, call.agreed_bytes + call.exchanger.received
        self.why = str(call.decision)


class Kept:
    """The exchange of a model's gradients in which owners keep the k largest sums, after the selection."""

    def __init__(self, indices: Tensor, values: Tensor, numel: int, dtype: str) -> None:
        codec = TopK(density=len(indices) / numel, values=DTYPES[dtype])
        self.exchange = Split(codec, numel, 0, torch.device("cpu"), Group(dist.group.WORLD))
        self.entries = Entries(indices.int(), values)
        self.feedback = server_state(torch.zeros(numel))
        self.out, self.none = torch.zeros(numel), torch.zeros(0)
        self.chosen, self.moved = "split", 0

    def __call__(self) -> None:
        before = self.exchange.exchanger.received
        fill(self.out, drive(self.exchange.combine(self.entries, self.none, self.feedback)))
        self.moved = self.exchange.exchanger.received - before


def timed(runner: Call | Kept, repeats: int) -> dict[str, Any]:
    """Seconds of each call, bytes received by the interface and by what the collectives move, a call."""
    runner()  # opens connections, probes the group, compiles
    runner()
    times, received = [], []
    for _ in range(repeats):
        dist.barrier()
        time.sleep(0.01)  # lets the barrier's own packets arrive
        before = received_bytes()
        begin = time.perf_counter()
        runner()
        times.append(time.perf_counter() - begin)
        dist.barrier()
        received.append(received_bytes() - before)
    return {
        "times_s": times,
        "received_bytes": report.median(received),
        "formula_bytes": runner.moved,
        "chosen": runner.chosen,
        "why": getattr(runner, "why", ""),
    }


def summarize(ranks: Sequence[Sequence[Mapping[str, Any]]], world_size: int, shaped: bool) -> list[dict[str, Any]]:
    """One cell of the table for each density and overlap: a call lasts until its slowest rank is done."""
    cells = []
    for sides in zip(*ranks, strict=True):
        arms = {}
        for name, arm in sides[0]["arms"].items():
            (turns,) = slowest([[side["arms"][name]["times_s"]] for side in sides])
            arms[name] = {
                "seconds": report.median(turns),
                "quartiles_s": report.quartiles(turns),
                "received_bytes": max(side["arms"][name]["received_bytes"] for side in sides) if shaped else None,
                "formula_bytes": max(side["arms"][name]["formula_bytes"] for side in sides),
                "chosen": arm["chosen"],
                "why": arm["why"],
            }
        contest = {name: arms[name]["seconds"] for name in ALGORITHMS if name in arms}
        winner = min(contest, key=lambda name: contest[name]) if contest else None
        cell = {key: sides[0][key] for key in ("density", "overlap", "k")}
        cells.append({"world_size": world_size, **cell, "arms": arms, "winner": winner})
    return cells


def link_table(result: Mapping[str, Any]) -> report.Table:
    arms = result["arguments"]["arms"]
    shown = [arm for arm in arms if arm != AUTO]
    rows = []
    for cell in result["cells"]:
        row = [f"{cell['world_size']}", f"{cell['density']:.3g}", f"{cell['overlap']:.2g}"]
        for arm in shown:
            found = cell["arms"][arm]
            bytes_ = found["received_bytes"] or found["formula_bytes"]
            row.append(f"{found['seconds'] * 1e3:.1f} / {bytes_ / 1e6:.3g}")
        row.append(cell["winner"] or "")
        if AUTO in arms:
            auto, best = cell["arms"][AUTO], cell["arms"].get(cell["winner"])
            row += [auto["chosen"], "" if best is None else f"{auto['seconds'] / best['seconds']:.2f}"]
        rows.append(row)
    columns = ["P", "density", "overlap", *shown, "fastest", *(["auto took", "auto / fastest"] if AUTO in arms else [])]
    rate, arguments = result["arguments"]["rate"], result["arguments"]
    title = f"Sparse all-reduce of {arguments['numel']} elements, values as {arguments['values']}, links of {rate}"
    notes = [
        report.describe(result["environment"]),
        f"ms / MB received by one rank; median of {arguments['repeats']} calls, slowest rank; one thread a rank; "
        "split-k gives the k largest sums alone and is no contestant",
    ]
    notes += [f"P = {world_size}: {caption(proof)}" for world_size, proof in result["links"].items()]
    notes.append(
        "bytes are those of the formula"
        if rate == "none"
        else "bytes as the kernel counts them, headers included: " + overhead(result["cells"])
    )
    return report.Table(title, columns, rows, "\n".join(notes))


def overhead(cells: Sequence[Mapping[str, Any]]) -> str:
    """The overhead of protocols: the kernel's count of bytes above that of the collectives."""
    large = [
        arm["received_bytes"] / arm["formula_bytes"] - 1
        for cell in cells
        for arm in cell["arms"].values()
        if arm["received_bytes"] and arm["formula_bytes"] > 1e6
    ]
    if not large:
        return "no message was large enough to tell the protocol's share"
    return f"{min(large):+.1%} to {max(large):+.1%} against the formula, of messages above 1 MB"


#: Lines of the picture.
DRAWN = ("gather", "union", "split", "dense", AUTO)


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Time against density, of the most ranks and a middle overlap; rings mark the choices of "auto"."""
    world_size = max(cell["world_size"] for cell in result["cells"])
    overlaps = sorted({cell["overlap"] for cell in result["cells"]})
    overlap = overlaps[len(overlaps) // 2]
    cells = [c for c in result["cells"] if (c["world_size"], c["overlap"]) == (world_size, overlap)]
    figure, axes = report.subplots(figsize=(8.5, 5))
    lines = []
    for arm, style in zip(DRAWN, ("C0-o", "C1-o", "C2-o", "C7-o", "ko"), strict=True):
        there = [cell for cell in cells if arm in cell["arms"]]
        at, times = [cell["density"] for cell in there], [cell["arms"][arm]["seconds"] * 1e3 for cell in there]
        if there:
            how = {"fillstyle": "none", "markersize": 13} if arm == AUTO else {"markersize": 4}
            lines.append((axes.plot(at, times, style, **how)[0], f"{arm}" + " (rings)" * (arm == AUTO)))
    axes.set(xscale="log", yscale="log", xlabel="elements that each rank sends", ylabel="ms a call")
    axes.set_xticks(at := sorted({cell["density"] for cell in cells}), [f"{density * 100:g} %" for density in at])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    arguments = result["arguments"]
    title = f"Sparse all-reduce of {arguments['numel'] / 1e6:.3g} M elements on links of {arguments['rate']}, "
    axes.set_title(title + f"{world_size} ranks with {overlap:.0%} of their indices in common", fontsize=10)
    report.label_ends(axes, lines)
    report.save(figure, path, dpi=120)
