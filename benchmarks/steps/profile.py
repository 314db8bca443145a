"""One bucket's way through a real training step, as torch.profiler records it.

The model is that of `gradwire-bench step`: six linear layers of 2048 × 2048, 25 million parameters, batch 8, one thread
a rank. The first rank's step of median length is drawn: what its main thread does, and on the
pipeline's threads what happens to each bucket. The sums of the recorded phases are set beside what
`state.statistics()` counted.
"""

# Annotations stay evaluated here: DDP compares those of a hook with its own.
import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

from ..common import report
from ..common.arguments import add_layers, add_output
from ..common.arms import ARMS
from ..common.models import perceptron
from ..links import flags
from ..links.driver import document, measured
from ..links.verification import caption

ARM = ARMS["onebit"]
PHASES = ("encode", "exchange", "decode")
STEP, READY, BACKWARD = "step", "ready bucket", "backward"
#: Ranges of the main thread besides its backward pass.
MAIN = ("forward", "optimizer")
#: Autograd's ranges, one inside the other; the wait for the buckets comes behind the last.
COMPUTING = "autograd::engine::evaluate_function"
#: Okabe and Ito's, which colour-blind people can tell apart.
COLOURS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "waits for the buckets": "#E0E0E0",
    "optimizer": "#999999",
    "encode": "#E69F00",
    "exchange": "#009E73",
    "decode": "#CC79A7",
}

#: A range with its start and end in seconds; bucket -1: of no bucket.
Span = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_links(parser)
    parser.add_argument("--steps", type=int, default=9, help="recorded (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=6, help="steps before (default: %(default)s)")
    add_layers(parser)
    add_output(parser, timeout=120, plot="the step")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the first rank's trace, for Perfetto or Chrome"
    )


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench profile`."""
    arguments = {name: getattr(options, name) for name in ("steps", "warmup", "width", "layers", "batch")}
    result = document("profile", options, **arguments)
    trace = None if options.trace is None else str(options.trace.absolute())
    found, ranks = measured(options, options.rate, measure, {**arguments, "trace": trace})
    steps = sorted(ranks[0]["steps"], key=lambda step: float(step["seconds"]))
    result |= {"proof": found["proof"], "links": found["links"], "ranks": ranks, "drawn": steps[len(steps) // 2]}
    report.deliver(result, tables(result), options, plot)
    return 0


def marked(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """`compress_hook`, with a mark in the trace where a bucket's gradients are complete."""
    from ... import compress_hook

    with record_function(f"{READY} {bucket.index()}"):
        return compress_hook(state, bucket)


def measure(steps: int, warmup: int, trace: str | None, **size: int) -> dict[str, Any]:
    """Every rank's part: each step's spans, and each phase's seconds by the trace and by the statistics."""
    model, loss_of = perceptron(**size)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    state = ARM.hook(ddp).state
    ddp.register_comm_hook(state, marked)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)

    def train(count: int) -> None:
        for _ in range(count):
            dist.barrier()
            with record_function(STEP):
                optimizer.zero_grad()
                with record_function(MAIN[0]):
                    loss = loss_of(ddp)
                with record_function(BACKWARD):
                    loss.backward()
                with record_function(MAIN[1]):
                    optimizer.step()

    train(warmup)
    before = state.statistics().seconds
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as profiler:
        train(steps)
        after = state.statistics().seconds
    if trace is not None and dist.get_rank() == 0:
        Path(trace).parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(trace)
    found = spans_of((e.name, e.time_range.start * 1e-6, e.time_range.end * 1e-6) for e in profiler.events())
    return {
        "steps": split(found),
        "trace_s": {phase: sum(s["end"] - s["start"] for s in found if s["what"] == phase) for phase in PHASES},
        "counted_s": {phase: after[phase] - before[phase] for phase in PHASES},
    }


def spans_of(events: Iterable[tuple[str, float, float]]) -> list[Span]:
    """The ranges that are drawn, in order, of a profiler's events as (name, start, end)."""
    spans: list[Span] = []
    for name, start, end in events:
        if found := re.fullmatch(r"gradwire:(\w+) bucket (\d+)", name):
            spans.append({"what": found[1], "bucket": int(found[2]), "start": start, "end": end})
        elif found := re.fullmatch(rf"{READY} (\d+)", name):
            spans.append({"what": READY, "bucket": int(found[1]), "start": start, "end": end})
        elif name in (STEP, BACKWARD, *MAIN) or name.startswith(COMPUTING):
            what = COMPUTING if name.startswith(COMPUTING) else name
            spans.append({"what": what, "bucket": -1, "start": start, "end": end})
    return sorted(spans, key=lambda span: float(span["start"]))


def split(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """The steps: what lies in each, counted from its start, and the backward pass in its two halves."""
    steps = []
    for step in (span for span in spans if span["what"] == STEP):
        start, end = step["start"], step["end"]
        inside = [
            {**span, "start": span["start"] - start, "end": span["end"] - start}
            for span in spans
            if start <= span["start"] < end and span["what"] != STEP
        ]
        (backward,) = (span for span in inside if span["what"] == BACKWARD)
        computed = max(span["end"] for span in inside if span["what"] == COMPUTING)
        waits = {**backward, "what": "waits for the buckets", "start": computed}
        kept = [span for span in inside if span["what"] not in (COMPUTING, BACKWARD)]
        spans_ = sorted([*kept, {**backward, "end": computed}, waits], key=lambda span: float(span["start"]))
        steps.append({"seconds": end - start, "spans": spans_})
    return steps


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """The drawn step, bucket by bucket."""
    rows = []
    drawn = result["drawn"]["spans"]
    for bucket in sorted({span["bucket"] for span in drawn if span["bucket"] >= 0}):
        mine = [span for span in drawn if span["bucket"] == bucket]
        ready, *rest = mine
        lengths = [sum(s["end"] - s["start"] for s in rest if s["what"] == phase) for phase in PHASES]
        times = [ready["start"], rest[0]["start"] - ready["start"], *lengths, rest[-1]["end"]]
        rows.append([f"bucket {bucket}", *(f"{time * 1e3:.2f}" for time in times)])
    notes = [report.describe(result["environment"]), caption(result["proof"])]
    for rank, side in enumerate(result["ranks"]):
        sums = ", ".join(f"{p} {side['trace_s'][p] * 1e3:.1f} / {side['counted_s'][p] * 1e3:.1f}" for p in PHASES)
        notes.append(
            f"rank {rank}, all {result['arguments']['steps']} steps, ms by the trace / by statistics(): {sums}"
        )
    title = f"{ARM.title}: a step of {result['drawn']['seconds'] * 1e3:.1f} ms, {result['links']}"
    columns = ("ms", "complete at", "queued", *PHASES, "decoded at")
    return [report.Table(title, columns, rows, "\n".join(notes))]


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Above, the whole step; below, the way of the bucket that takes longest, larger."""
    spans = [{**s, "start": s["start"] * 1e3, "end": s["end"] * 1e3} for s in result["drawn"]["spans"]]
    time_of: dict[int, float] = {}
    for span in spans:
        if span["what"] in PHASES:
            time_of[span["bucket"]] = time_of.get(span["bucket"], 0.0) + span["end"] - span["start"]
    chosen = max(time_of, key=lambda bucket: time_of[bucket])
    figure, (whole, part) = report.subplots(2, 1, figsize=(11.5, 5.6), height_ratios=(5, 3.5))
    draw_step(whole, spans, chosen)
    draw_bucket(part, [span for span in spans if span["bucket"] == chosen], chosen)
    took = f"{result['drawn']['seconds'] * 1e3:.0f} ms"
    figure.suptitle(f"One training step of {took}: {ARM.title}, {result['links']}", fontsize=12)
    report.save(figure, path, dpi=140)


def draw_step(axes: Any, spans: Sequence[Span], chosen: int) -> None:
    """The main thread above those of the pipeline, and where each bucket is complete."""
    phases = [span for span in spans if span["what"] in PHASES]
    last = max(span["end"] for span in spans)
    for span in spans:
        mine = span["bucket"] == chosen
        weight = "bold" if mine else "normal"
        if span["what"] == READY:
            axes.plot([span["start"]], [2.46], "v", color="black" if mine else "#777777", markersize=7)
            axes.text(span["start"], 2.62, f"{span['bucket']}", ha="center", weight=weight)
        elif span not in phases:
            bar(axes, 2, span, edgecolor="white", linewidth=0.6)
        else:
            row = 0 if span["what"] == "exchange" else 1
            bar(axes, row, span, edgecolor="black" if mine else "white", linewidth=1.8 if mine else 0.6)
            if span["end"] - span["start"] > 0.012 * last:
                middle = (span["start"] + span["end"]) / 2
                axes.text(middle, row - 0.32, f"{span['bucket']}", ha="center", va="top", fontsize=9, weight=weight)
    first = next(span["start"] for span in phases if span["bucket"] == chosen)
    (ready,) = (span["start"] for span in spans if span["what"] == READY and span["bucket"] == chosen)
    arrow = {"arrowstyle": "-|>", "linestyle": "--", "color": "black", "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (first, 1.3), (ready, 2.4), arrowprops=arrow)
    for what in COLOURS:
        bar(axes, 0, {"what": what, "start": 0, "end": 0}, edgecolor="white", linewidth=0.0, label=what)
    axes.plot([], [], "v", color="#777777", label="a bucket's gradients are complete", linestyle="none")
    axes.legend(loc="lower center", bbox_to_anchor=(0.47, 1.0), ncols=8, frameon=False, fontsize=9, handlelength=1.2)
    labels = ["main thread", "codecs", "messages"]
    axes.set(yticks=[2, 1, 0], yticklabels=labels, ylim=(-0.75, 2.9), xlim=(0, 1.005 * last))
    finish(axes)


def draw_bucket(axes: Any, spans: Sequence[Span], bucket: int) -> None:
    """The bucket's way alone, with the time that each of its longer parts takes."""
    ready, *phases = spans
    queued = {"what": "queued", "start": ready["start"], "end": phases[0]["start"]}
    begin, end = queued["start"], phases[-1]["end"]
    for span in (queued, *phases):
        bar(axes, 0, span, edgecolor="black", linewidth=0.8)
        length, middle = span["end"] - span["start"], (span["start"] + span["end"]) / 2
        if length > 0.07 * (end - begin):
            axes.text(middle, 0, f"{span['what']}\n{length:.1f} ms", ha="center", va="center", fontsize=10)
    axes.set(yticks=[0], yticklabels=[f"bucket {bucket}"], ylim=(-0.4, 0.4))
    axes.set_xlim(begin - 0.04 * (end - begin), end + 0.01 * (end - begin))
    axes.set_xlabel("ms since the step began")
    finish(axes)


def bar(axes: Any, row: int, span: Span, **style: Any) -> None:
    what = span["what"]
    hatch = "///" if what.startswith("waits") else None
    colour = COLOURS.get(what, "white")
    axes.barh(row, span["end"] - span["start"], left=span["start"], height=0.6, color=colour, hatch=hatch, **style)


def finish(axes: Any) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
