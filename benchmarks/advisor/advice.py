"""Output of `gradwire-bench advise`: a table, a sentence, a picture."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..common import report
from ..common.arms import ARMS

#: A codec that gains less over the best of PyTorch's own ways is not worth what it leaves out.
WORTHWHILE = 0.05
#: Of codecs whose steps differ by less, the one that sends the most is recommended: it leaves out least.
ALIKE = 0.15
#: Of the picture, in bits a second.
BANDWIDTHS = [10 ** (8 + exponent / 8) for exponent in range(25)]


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say what takes seconds: a spinner on a terminal, a line elsewhere."""
    from rich.console import Console

    console = Console(file=sys.stderr)
    if console.is_terminal:
        with console.status(f"{what} ..."):
            yield
    else:
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield


def recommend(rows: Sequence[Mapping[str, Any]]) -> str:
    """The recommendation, in plain words.

    Args:
        rows: with `codec` (None for PyTorch's own, plain DDP first), `what`, `step_s`, `received_bytes`.
    """
    own = [row for row in rows if row["codec"] is None]
    plain, best = own[0], min(own, key=_step)
    codecs = [row for row in rows if row["codec"] is not None]
    fastest = min(map(_step, codecs))
    codec = max((row for row in codecs if _step(row) <= fastest * (1 + ALIKE)), key=lambda row: row["received_bytes"])
    if best["step_s"] < (1 + WORTHWHILE) * codec["step_s"]:
        codec = min(codecs, key=_step)
    gain = best["step_s"] / codec["step_s"]
    if gain < 1 + WORTHWHILE:
        why = f"the best codec, {codec['what']}, makes a step {gain:.2f} times as fast as {best['what']}"
        text = f"Do not compress with gradwire: {why}."
        if best is not plain and plain["step_s"] / best["step_s"] >= 1 + WORTHWHILE:
            text += (
                f" {best['what']} is {plain['step_s'] / best['step_s']:.2f} times as fast as plain DDP: "
                "model.register_comm_hook(None, default_hooks.fp16_compress_hook)"
            )
        return text
    return (
        f"Compress: with {codec['what']} a step takes {codec['step_s'] * 1e3:.3g} ms instead of "
        f"{best['step_s'] * 1e3:.3g} with {best['what']}, {gain:.2f} times as fast. That is about time "
        "alone: see first whether your model learns as well, and ask gradwire.recommend for codecs with which "
        "models have ended best under your optimizer."
        f"\n    model.register_comm_hook(CompressState(model, {codec['codec']}), compress_hook)"
    )


def _step(row: Mapping[str, Any]) -> float:
    step: float = row["step_s"]
    return step


def table(result: Mapping[str, Any]) -> report.Table:
    """The table of predictions and their basis."""
    best = min(row["step_s"] for row in result["arms"] if row["codec"] is None)
    rows = [
        [
            row["what"],
            row["exchange"],
            f"{row['received_bytes'] / 1e6:.3g}",
            f"{row['step_s'] * 1e3:.1f}",
            f"{row['tax_s'] * 1e3:.1f}",
            f"{row['hidden']:.0%}",
            row["bottleneck"],
            f"{best / row['step_s']:.2f}",
        ]
        for row in result["arms"]
    ]
    columns = ("arm", "exchange", "MB received", "step ms", "tax ms", "hidden", "bottleneck", "speed-up")
    measured = result["measured"]
    profile, processors = measured["profile"], measured["processors"]
    backward = profile["ready"][-1] + sum(profile["copy_back"])
    notes = [
        report.describe(result["environment"]),
        f"a step without communication takes {result['arms'][0]['floor_s'] * 1e3:.1f} ms: forward "
        f"{profile['forward'] * 1e3:.1f}, backward {backward * 1e3:.1f} ({len(profile['numels'])} buckets), plain SGD "
        f"{profile['optimizer'] * 1e3:.1f}; on {measured['device']}, {processors['cores']:g} core(s) and "
        f"{processors['threads']} thread(s) a rank",
        "MB received: by a rank in a step, from other nodes; tax: step less that; hidden: the share of communication, "
        "codec included, behind the model's own work; speed-up: over the faster of PyTorch's two; "
        "all but the model's own step is predicted",
    ]
    return report.Table(f"Predicted step, {subtitle(result)}", columns, rows, "\n".join(notes))


def subtitle(result: Mapping[str, Any]) -> str:
    arguments, measured = result["arguments"], result["measured"]
    network = result["network"]
    size = f"{measured['parameters'] / 1e6:.3g} M parameters ({arguments['model']})"
    nodes = network["world_size"] // network["local_size"]
    ranks = f"{network['world_size']} ranks on {nodes} node{'s' * (nodes > 1)}"
    if arguments.get("probe"):
        return f"{size}, {ranks}, the network as probed"
    return f"{size}, {ranks}, {arguments['bandwidth']} and {arguments['latency']} between nodes"


def plot(path: str, curves: Mapping[float, Sequence[Mapping[str, Any]]], rate: float, title: str) -> None:
    """Predicted step time of each arm against bandwidth, with a line at `rate`.

    Args:
        curves: for each bandwidth in bits a second, rows with `arm`, `what`, `step_s` and `floor_s`.
    """
    figure, axes = report.subplots(figsize=(9, 5.5))
    first = next(iter(curves.values()))
    for place, arm in enumerate(first):
        steps = [rows[place]["step_s"] * 1e3 for rows in curves.values()]
        style = "--" if arm["codec"] is None else "-"
        axes.plot(list(curves), steps, style, color=ARMS[arm["arm"]].colour, linewidth=1.8, label=arm["what"])
    axes.axhline(first[0]["floor_s"] * 1e3, color="#555555", linewidth=1, linestyle=":", label="no communication")
    axes.axvline(rate, color="#555555", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="bandwidth of each node's network card", title=title)
    axes.set_ylabel("predicted step, ms")
    axes.set_xticks([1e8, 1e9, 1e10, 1e11], ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s"])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.annotate(
        "yours", (rate, 1), xycoords=("data", "axes fraction"), xytext=(4, -12), textcoords="offset points", fontsize=9
    )
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    report.save(figure, path, dpi=150)
