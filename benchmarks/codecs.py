"""How fast each codec is on one machine, without a network.

Beside each codec, in turns with it, runs the roofline, `torch.add(grad, residual, out=residual)`: it moves 12 bytes an
element, and an encode with error feedback cannot move less. TopK and OneBit also meet what one would write in torch.
Gradients change a little from call to call, as they do in training, and a codec has run for a while before it is
timed: TopK foresees its threshold from the last call, and its residual takes some 1/density calls to fill.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from ..compress import CODECS, Codec, OneBit, TopK, new_draw
from . import report

OPERATIONS = {
    "add": "torch.add(grad, residual, out=residual): the roofline",
    "copy": "out.copy_(grad)",
    "encode_feedback": "codec.encode_feedback",
    "encode": "codec.encode",
    "decode_mean": "codec.decode_mean",
    "torch": "the same as encode_feedback, in torch operations",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = tuple(dict.fromkeys(codec.name for codec in CODECS))
    parser.add_argument("--numel", type=int, default=1 << 24, help="elements of the gradient (default: %(default)s)")
    parser.add_argument("--codecs", nargs="+", choices=names, default=list(names), help="default: all")
    parser.add_argument("--ranks", type=int, default=4, help="wires that decode_mean reads (default: %(default)s)")
    parser.add_argument("--density", type=float, nargs="+", default=[0.01], help="of TopK, one or several")
    parser.add_argument("--threads", type=int, default=1, help="for torch and gradwire (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timings of each operation (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=100, help="untimed encodes first (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write arguments, environment and every timing there")


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench codecs`."""
    for name in ("numel", "ranks", "threads", "repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: expected at least 1")
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        names = ("numel", "codecs", "ranks", "density", "threads", "repeats", "warmup")
        result = report.document("codecs", {name: getattr(options, name) for name in names})
        codecs = selected(options.codecs, options.density)
        result["operations"] = OPERATIONS
        result["codecs"] = [
            measure(codec, options.numel, options.ranks, options.repeats, options.warmup) for codec in codecs
        ]
    finally:
        torch.set_num_threads(before)
    print_result(result)
    if options.json:
        report.write_json(options.json, result)
    return 0


def selected(names: Sequence[str], densities: Sequence[float]) -> list[Codec]:
    """The codecs of those names, TopK once for each density."""
    codecs: list[Codec] = []
    for codec in CODECS:
        if codec.name in names:
            codecs += [TopK(density=d) for d in densities] if isinstance(codec, TopK) else [codec]
    return codecs


def label(codec: Codec) -> str:
    """A codec with its first option, which is the one that matters most."""
    options = [f"{f.name}={getattr(codec, f.name)}" for f in dataclasses.fields(codec)[:1]]
    return f"{type(codec).__name__}({', '.join(options)})"


@torch.no_grad()
def measure(codec: Codec, numel: int, ranks: int, repeats: int, warmup: int) -> dict[str, Any]:
    """Time one codec's operations in turns with the roofline's. Times in seconds, medians and all."""
    generator = torch.Generator().manual_seed(0)
    # Stochastic codecs are timed as they keep a residual: rounding to nearest. Their encode draws.
    feedback = codec.with_feedback()
    base = torch.randn(numel, generator=generator)
    gradients = [base + 0.3 * torch.randn(numel, generator=generator) for _ in range(4)]
    following = cycle(gradients)
    draw = new_draw(0)
    sizes = codec.part_bytes(numel)
    workspace, plain = feedback.workspace(numel), codec.workspace(numel)
    wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8)
    residual, out = torch.zeros(numel), torch.empty(numel)

    wires = [torch.empty(ranks, size, dtype=torch.uint8) for size in sizes]
    for rank in range(ranks):
        draw[2] = rank
        codec.encode(gradients[rank % len(gradients)], wire, draw, plain)
        for rows, part in zip(wires, wire.split(sizes), strict=True):
            rows[rank] = part
    out.zero_()
    codec.decode_add(wire, out, 1.0, plain)
    sent = gradients[(ranks - 1) % len(gradients)]
    error = float((out - sent).norm() / sent.norm())

    for _ in range(warmup):
        feedback.encode_feedback(next(following), residual, wire, draw, workspace)
    accumulated = torch.zeros(numel)
    operations: dict[str, Callable[[Tensor], object]] = {
        "add": lambda grad: torch.add(grad, accumulated, out=accumulated),
        "encode_feedback": lambda grad: feedback.encode_feedback(grad, residual, wire, draw, workspace),
        "copy": out.copy_,
        "encode": lambda grad: codec.encode(grad, wire, draw, plain),
        "decode_mean": lambda grad: codec.decode_mean(wires, out, plain),
    }
    chain = torch_chain(codec, residual.clone())
    if chain is not None:
        operations["torch"] = chain
    times: dict[str, list[float]] = {name: [] for name in operations}
    for turn in range(repeats + 1):
        draw[1] = turn
        for place, (name, operation) in enumerate(operations.items()):
            grad = gradients[(turn + place) % len(gradients)]  # never what the operation before left in the cache
            begin = time.perf_counter()
            operation(grad)
            spent = time.perf_counter() - begin
            if turn:  # the first turn touches everything once
                times[name].append(spent)
    return {
        "name": codec.name,
        "codec": repr(codec),
        "label": label(codec),
        "wire_bytes_per_element": codec.wire_bytes(numel) / numel,
        "relative_error": error,
        **ratios(times, numel),
        "times_s": times,
    }


def ratios(times: dict[str, list[float]], numel: int) -> dict[str, dict[str, float]]:
    """For each operation: its median in seconds, 10^9 elements a second, and the median in units of the roofline's."""
    medians = {name: report.median(values) for name, values in times.items()}
    return {
        "median_s": medians,
        "gelem_per_s": {name: numel / median / 1e9 for name, median in medians.items()},
        "ratio_to_add": {name: median / medians["add"] for name, median in medians.items()},
    }


def torch_chain(codec: Codec, residual: Tensor) -> Callable[[Tensor], object] | None:
    """Error feedback and compression as one would write them in torch, for TopK and OneBit."""
    if isinstance(codec, TopK):
        k = codec.k(residual.numel())

        def top_k(grad: Tensor) -> tuple[Tensor, Tensor]:
            residual.add_(grad)
            _, indices = torch.topk(residual.abs(), k, sorted=False)
            values = residual[indices]
            residual[indices] = 0
            return indices.to(torch.int32), values

        return top_k
    if isinstance(codec, OneBit) and residual.numel() >= codec.block:
        whole = residual[: residual.numel() // codec.block * codec.block]  # a user would pad
        weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=residual.device)

        def one_bit(grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            blocks = whole.add_(grad[: whole.numel()]).view(-1, codec.block)
            below = blocks < 0
            count = below.sum(dim=1, keepdim=True)
            negative = blocks.clamp(max=0).sum(dim=1, keepdim=True) / count.clamp(min=1)
            positive = blocks.clamp(min=0).sum(dim=1, keepdim=True) / (codec.block - count).clamp(min=1)
            blocks.sub_(torch.where(below, negative, positive))
            signs = (below.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)
            return negative, positive, signs

        return one_bit
    return None


def print_result(result: dict[str, Any]) -> None:
    arguments = result["arguments"]
    rows = []
    for row in result["codecs"]:
        ratio, speed = row["ratio_to_add"], row["gelem_per_s"]
        rows.append(
            [
                row["label"],
                f"{row['wire_bytes_per_element']:.4f}",
                f"{row['relative_error']:.3g}",
                f"{speed['add']:.2f}",
                f"{ratio['copy']:.2f}",
                *(f"{ratio[name]:.2f}  ({speed[name]:.2f})" for name in ("encode_feedback", "encode", "decode_mean")),
                f"{ratio['torch']:.1f}  ({speed['torch']:.3f})" if "torch" in ratio else "",
            ]
        )
    columns = (
        "codec",
        "bytes/elem",
        "rel. error",
        "add Gelem/s",
        "copy",
        "encode_feedback",
        "encode",
        f"decode_mean P={arguments['ranks']}",
        "torch chain",
    )
    notes = [
        report.describe(result["environment"]),
        f"time / time of torch.add(grad, residual, out=residual) in the same run, medians of {arguments['repeats']} in "
        "turns; (10⁹ elements a second)",
    ]
    title = f"Codecs on {arguments['numel']:,} float32, {arguments['threads']} thread(s)"
    report.print_table(title, columns, rows, "\n".join(notes))
