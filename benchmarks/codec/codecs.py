"""Speed of each codec on one machine, without a network.

Beside each codec, in turns with it, runs the roofline, `torch.add(grad, residual, out=residual)`. With float32
it moves 12 bytes an element, and an encode with error feedback cannot move less. Codecs also meet what one would write
in torch, and the work of PyTorch's own hooks. Gradients change a little from call to call, as they do in training, and
a codec has run for a while before it is timed: TopK's residual takes some 1/density calls to fill.

By default: all codecs, float32, 2^24 elements, one thread and all. Lists given to several options are crossed. GPUs
have a command of their own, `gradwire-bench gpu`.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...compress import CODECS, Codec, TopK
from ..common import report
from ..common.arguments import expect_at_least
from ..common.arms import label
from ..common.progress import Progress
from .baselines import pytorch_baselines
from .speed import measure, measure_baselines, torch_threads

OPERATIONS = {
    "add": "torch.add(grad, residual, out=residual): the roofline",
    "copy": "out.copy_(grad)",
    "encode_feedback": "codec.encode_feedback",
    "encode_tracking": "the same by Tracking(), whose momentum is read and written too",
    "encode": "codec.encode",
    "decode_mean": "codec.decode_mean",
    "torch": "the same as encode_feedback, in torch operations",
    "round_trip": "the work of one of PyTorch's hooks on a bucket, without communication",
}
#: In the table.
SHOWN = ("encode_feedback", "encode", "decode_mean", "encode_tracking")
#: Okabe and Ito's colours, which tell apart whatever one's eyes: for each operation in the picture.
COLOURS = {"encode_feedback": "#0072B2", "decode_mean": "#E69F00"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = tuple(dict.fromkeys(codec.name for codec in CODECS))
    threads = sorted({1, os.cpu_count() or 1})
    parser.add_argument("--codecs", nargs="+", choices=names, default=list(names), help="default: all")
    parser.add_argument("--density", type=float, nargs="+", default=[0.01], help="of TopK, one or several")
    parser.add_argument("--json", metavar="FILE", help="write arguments, environment and every timing there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw times beside the roofline")
    parser.add_argument("--numel", type=int, nargs="+", default=[1 << 24], help="elements (default: 2^24)")
    parser.add_argument("--threads", type=int, nargs="+", default=threads, help="for torch and gradwire (1 and all)")
    parser.add_argument("--ranks", type=int, default=4, help="wires that decode_mean reads (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timings of each operation (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=20, help="untimed encodes first (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench codecs`."""
    expect_at_least(options, ranks=1, repeats=1, warmup=0, numel=1, threads=1)
    arguments = {name: value for name, value in vars(options).items() if name not in ("command", "json", "plot")}
    with torch_threads(max(options.threads)):
        result = report.document("codecs", arguments)
    result |= {"operations": OPERATIONS, "codecs": [], "rivals": []}
    codecs = selected(options.codecs, options.density)
    crossed = list(itertools.product(options.numel, options.threads))
    with Progress("codecs", len(crossed) * (len(codecs) + 1)) as progress:
        for numel, threads in crossed:
            add_speed(result, numel, threads, codecs, options, progress)
    report.deliver(result, tables(result), options, plot)
    return 0


def selected(names: Sequence[str], densities: Sequence[float]) -> list[Codec]:
    """The codecs of those names, TopK once for each density."""
    codecs: list[Codec] = []
    for codec in CODECS:
        if codec.name in names:
            codecs += [TopK(density=d) for d in densities] if isinstance(codec, TopK) else [codec]
    return codecs


def add_speed(
    result: dict[str, Any],
    numel: int,
    threads: int,
    codecs: Sequence[Codec],
    options: argparse.Namespace,
    progress: Progress,
) -> None:
    """Time every codec, and PyTorch's own compressions."""
    base = noise(numel, 0)
    gradients = [base + 0.3 * noise(numel, 1 + i) for i in range(4)]  # they change a little, as in training
    for codec in codecs:
        progress.advance(1, f"{label(codec)}, {threads} thread(s)")
        result["codecs"].append(measure(codec, gradients, threads, options.ranks, options.repeats, options.warmup))
    progress.advance(1, f"PyTorch's own, {threads} thread(s)")
    baselines = pytorch_baselines(gradients[0], options.ranks)
    result["rivals"] += measure_baselines(baselines, gradients, threads, options.repeats)


def noise(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """Times under each condition."""
    arguments = result["arguments"]
    rows = [*result["codecs"], *result["rivals"]]
    where = report.describe(result["environment"])
    found = []
    for numel, threads in dict.fromkeys((row["numel"], row["threads"]) for row in rows):
        group = [row for row in rows if (row["numel"], row["threads"]) == (numel, threads)]
        add = report.median([row["gelem_per_s"]["add"] for row in group])
        notes = (
            f"{where}\nmedians of {arguments['repeats']} in turns, in units of torch.add(grad, residual, out=residual) "
            f"in the same run: {add:.2f}·10⁹ elements a second\nbits: of an element; EF: encode with error feedback; "
            f"decode: the mean of {arguments['ranks']} wires; Tracking: EF with a momentum, 5/3 of the traffic; in "
            "torch: EF as a chain of torch's operations, and PyTorch's hooks there and back"
        )
        title = f"Codecs on {numel:,} float32, gaussian, backend cpu, {threads} thread(s)"
        columns = ["codec", "bits", "EF", "encode", "decode", "Tracking", "in torch"]
        found.append(report.Table(title, columns, [speed_row(row) for row in group], notes))
    return found


def speed_row(row: Mapping[str, Any]) -> list[str]:
    ratio = row["ratio_to_add"]
    chain = ratio.get("torch", ratio.get("round_trip"))
    cells = [f"{ratio[name]:.2f}" if name in ratio else "" for name in SHOWN]
    return [row["label"], f"{8 * row['wire_bytes_per_element']:.2g}", *cells, "" if chain is None else f"{chain:.1f}"]


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Bars for each codec under the first condition: encode_feedback and decode_mean beside the roofline."""
    facts = ("numel", "threads")
    rows = [row for row in result["codecs"] if all(row[name] == result["codecs"][0][name] for name in facts)]
    figure, axes = report.subplots(figsize=(8.5, 1.4 + 0.5 * len(rows)))
    for place, (name, colour) in enumerate(COLOURS.items()):
        values = [row["ratio_to_add"][name] for row in rows]
        places = [i + 0.38 * (place - 0.5) for i in range(len(rows))]
        bars = axes.barh(places, values, height=0.36, color=colour, label=bar_label(name, result))
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8, bbox={"facecolor": "white", "edgecolor": "none"})
    axes.axvline(1, color="black", linewidth=1.2, linestyle="--", label="torch.add: the roofline")
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(row["ratio_to_add"][name] for row in rows for name in COLOURS))
    axes.set_xlabel("time, in units of torch.add(grad, residual, out=residual)", fontsize=9)
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    numel, threads = (rows[0][name] for name in facts)
    where = f"{numel / 1e6:.3g} M float32, gaussian, backend cpu, {threads} thread{'s' * (threads > 1)}"
    figure.suptitle(f"Time of codecs beside one pass over memory\n{where}", fontsize=10)
    report.save(figure, path, dpi=110)


def bar_label(operation: str, result: Mapping[str, Any]) -> str:
    return f"decode_mean, {result['arguments']['ranks']} ranks" if operation == "decode_mean" else operation
