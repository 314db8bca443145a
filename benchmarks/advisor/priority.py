"""How much a step would gain if the next forward pass began before the last gradient is in: P3 (Jayarajan et al.,
2019) and ByteScheduler (Peng et al., 2019), simulated on the trace of a real step.

*Now*: DDP's buckets of 25 MB leave as backward makes them ready, and the next forward pass begins when all means are in
and the optimizer has stepped. *By priority*: each layer's gradient leaves by itself, in slices, those of the first
layers before all that still wait; the optimizer steps layer by layer, and each layer's forward pass waits for its own.
*By layers*: the same, but slices that wait for the link take turns. *By buckets*: DDP's take turns, and each layer's
forward pass waits for the bucket that it is in. Gains are ceilings: messages have no latency, slices cost nothing, and
codecs have a processor of their own.

Nothing may need all gradients at once, as clipping by the global norm does, and a gradient scaler's check.

The trace is of this machine, on one thread: seconds of forward by layer, and from one layer's gradient to the next. A
computation that is 10 times as fast, on links of 10 times the rate, is the same in a tenth of the time.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ... import recommend
from ...compress import QSGD, Codec
from ..codec import inputs
from ..codec.speed import Condition, measure, timed, torch_threads
from ..common import report
from ..common.arguments import add_output, expect_at_least
from ..common.arms import label
from ..common.language_model import VOCABULARY, LanguageModel
from ..common.models import Built, ResidualNetwork
from .step_simulation import Task
from .step_simulation import run as simulate

BUCKET, FIRST_BUCKET = 25 << 20, 1 << 20
#: Steps of a simulation, and how many at its end count.
STEPS, COUNTED = 6, 2
#: Slices of all gradients together: preemption waits for one of them at most.
SLICES = 100
WORTH = 0.10
RATES = {"0.1": 1e8, "1": 1e9, "10": 1e10}
SPEEDS = (1, 10, 100)
#: Rates of the search for windows, bits a second, ten to a decade.
SWEEP = [10 ** (5 + i / 10) for i in range(55)]
NOW, BUCKETS, LAYERS, PRIORITY = WAYS_TO_STEP = ("now", "buckets", "layers", "priority")
CODEC_NUMEL = 1 << 21


def residual() -> Built:
    """ResNet-50 on 8 images of 224 x 224."""
    x, y = torch.randn(8, 3, 224, 224), torch.randint(1000, (8,))
    return ResidualNetwork(), lambda model: F.cross_entropy(model(x), y)


def transformer() -> Built:
    """25 million parameters on 8 texts of 128 bytes."""
    text = torch.randint(VOCABULARY, (8, 129))
    model = LanguageModel(width=512, layers=8, heads=8, context=128)
    return model, lambda model: F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


MODELS = {"ResNet-50, batch 8": residual, "transformer of 25 M, batch 8 x 128": transformer}


@dataclass(frozen=True)
class Trace:
    """One step without communication, by layers: modules with parameters, in the order of forward. Seconds.

    Attributes:
        numels: parameters of each layer.
        forward: from the start of each layer to the next one's; with the first is what comes before it.
        ready: layers in the order in which their gradients are complete.
        backward: from the one before, for each of `ready`; with the last is what comes after it.
        optimizer: the optimizer's step.
    """

    numels: tuple[int, ...]
    forward: tuple[float, ...]
    ready: tuple[int, ...]
    backward: tuple[float, ...]
    optimizer: float


@dataclass(frozen=True)
class Way:
    """An arm: its name, bits of the wire and seconds to encode and to decode, each an element."""

    name: str
    bits: float
    encode: float
    decode: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=8, help="of which medians are taken (default: %(default)s)")
    parser.add_argument("--world", type=int, default=4, help="ranks: each moves 2(P-1)/P wires (default: %(default)s)")
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench priority`."""
    expect_at_least(options, steps=1, world=2)
    with torch_threads(1):
        result = report.document("priority", {"steps": options.steps, "world": options.world})
        ways = measured_ways(options.world)
        traces = {name: measured_trace(make, options.steps) for name, make in MODELS.items()}
    result["ways"] = [asdict(way) for way in ways]
    result["models"] = [
        {"model": name, "trace": listed(trace), "arms": [sweep(trace, way, options.world) for way in ways]}
        for name, trace in traces.items()
    ]
    report.deliver(result, tables(result), options)
    return 0


def listed(trace: Trace) -> dict[str, Any]:
    """A trace as JSON has it."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(trace).items()}


# -- measuring ---------------------------------------------------------------------------------------------------------


def measured_trace(make: Callable[[], Built], steps: int) -> Trace:
    """Medians over steps of a model on this machine, by hooks of its modules and parameters."""
    torch.manual_seed(0)
    model, loss = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    layers = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    began: dict[nn.Module, float] = {}
    ready: dict[nn.Module, float] = {}
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, _: began.__setitem__(module, time.perf_counter()))
        for parameter in layer.parameters(recurse=False):
            parameter.register_post_accumulate_grad_hook(
                lambda _, module=layer: ready.__setitem__(module, time.perf_counter())
            )
    rows: list[tuple[list[float], list[float], float]] = []
    order: list[nn.Module] = []
    for step in range(steps + 2):
        optimizer.zero_grad()
        began.clear()
        ready.clear()
        start = time.perf_counter()
        value = loss(model)
        middle = time.perf_counter()
        value.backward()
        end = time.perf_counter()
        optimizer.step()
        done = time.perf_counter()
        if step < 2:  # memory is found, and the optimizer's made
            order = sorted(began, key=began.__getitem__)
            backwards = sorted(ready, key=ready.__getitem__)
            continue
        starts = [start, *(began[layer] for layer in order[1:]), middle]
        ends = [middle, *(ready[layer] for layer in backwards[:-1]), end]
        rows.append((differences(starts), differences(ends), done - end))
    forward, backward, optimizing = zip(*rows, strict=True)
    place = {layer: i for i, layer in enumerate(order)}
    return Trace(
        tuple(sum(p.numel() for p in layer.parameters(recurse=False)) for layer in order),
        tuple(map(report.median, zip(*forward, strict=True))),
        tuple(place[layer] for layer in backwards),
        tuple(max(0.0, report.median(column)) for column in zip(*backward, strict=True)),
        report.median(optimizing),
    )


def differences(moments: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(moments)]


def measured_ways(ranks: int) -> list[Way]:
    """float32, PyTorch's fp16 hook, 4 bits, and what `recommend` names for 20, 100 and 200 times fewer bytes."""
    gradients = inputs.sequence("gaussian", CODEC_NUMEL, 4)
    half = gradients[0].half()
    casts = timed({"there": lambda x: x.half(), "back": lambda x: x.copy_(half)}, gradients, 9, 1)
    there, back = (report.median(casts[name]) / CODEC_NUMEL for name in ("there", "back"))
    ways = [Way("float32", 32.0, 0.0, 0.0), Way("float16", 16.0, there, back)]
    codecs: list[Codec] = [QSGD(), *(recommend("adamw", ratio=ratio).codec for ratio in (20, 100, 200))]
    for codec in codecs:
        found = measure(codec, gradients, Condition("cpu", torch.float32, CODEC_NUMEL, "gaussian", 1), ranks, 9, 20)
        seconds = found["median_s"]
        encode = seconds["encode_feedback" if codec.default_feedback else "encode"] / CODEC_NUMEL
        bits = 8 * found["wire_bytes_per_element"]
        ways.append(Way(label(codec), bits, encode, seconds["decode_mean"] / CODEC_NUMEL))
    return ways


# -- simulating --------------------------------------------------------------------------------------------------------


def sweep(trace: Trace, way: Way, ranks: int) -> dict[str, Any]:
    """Seconds of a step now and by priority, at the rates of the tables and of the search."""
    rates = sorted({*SWEEP, *(rate / speed for rate in RATES.values() for speed in SPEEDS)})
    found = {how: [step_seconds(trace, way, rate, ranks, how) for rate in rates] for how in WAYS_TO_STEP}
    return {"arm": way.name, "rates": rates, **found}


def step_seconds(trace: Trace, way: Way, rate: float, ranks: int, how: str) -> float:
    """Seconds of a step once each is like the one before.

    Args:
        rate: of each rank's link, in bits a second, each direction.
        ranks: each sends and receives 2(P-1)/P wires.
        how: one of `WAYS_TO_STEP`.
    """
    transfer = 2 * (ranks - 1) / ranks * way.bits / rate
    tasks: list[Task] = []
    if how == NOW:
        marks = barred(trace, way, transfer, tasks)
    else:
        groups = buckets(trace) if how == BUCKETS else [[layer] for layer in trace.ready]
        marks = overlapped(trace, groups, way, transfer, tasks, ordered=how == PRIORITY)
    ends = simulate(tasks, 2.0)
    return (ends[marks[-1]] - ends[marks[-1 - COUNTED]]) / COUNTED


def add(tasks: list[Task], seconds: float, *after: int, uses: str = "", priority: int = 0) -> int:
    """A task for a core or the link; returns its number."""
    tasks.append(Task(seconds, 0.0 if uses == "link" else 1.0, after, uses=uses, priority=priority))
    return len(tasks) - 1


def barred(trace: Trace, way: Way, transfer: float, tasks: list[Task]) -> list[int]:
    """The tasks of all steps as they are now; returns the last of each step's backward. `transfer`: of an element."""
    main, means, marks = add(tasks, 0.0), list[int](), []
    seconds = dict(zip(trace.ready, trace.backward, strict=True))
    for _ in range(STEPS):
        main = add(tasks, trace.optimizer, main, *means)
        main = add(tasks, sum(trace.forward), main)
        means = []
        for bucket in buckets(trace):
            numel = sum(trace.numels[layer] for layer in bucket)
            main = add(tasks, sum(seconds[layer] for layer in bucket), main)
            sent = add(tasks, numel * way.encode, main, uses="thread")
            arrived = add(tasks, numel * transfer, sent, uses="link")
            means.append(add(tasks, numel * way.decode, arrived, uses="thread"))
        marks.append(main)
    return marks


def buckets(trace: Trace) -> list[list[int]]:
    """The layers of each of DDP's buckets, as backward makes them ready. The first holds a megabyte."""
    found, numel = [list[int]()], 0
    for layer in trace.ready:
        if found[-1] and 4 * (numel + trace.numels[layer]) > (BUCKET if len(found) > 1 else FIRST_BUCKET):
            found.append([])
            numel = 0
        found[-1].append(layer)
        numel += trace.numels[layer]
    return found


def overlapped(
    trace: Trace, groups: Sequence[Sequence[int]], way: Way, transfer: float, tasks: list[Task], ordered: bool
) -> list[int]:
    """The same, if each layer's forward pass waits for its own group of layers: as backward makes them ready, those of
    the first layers before others if `ordered`."""
    main, marks, means = add(tasks, 0.0), [], dict[int, int]()
    total, seconds = sum(trace.numels), dict(zip(trace.ready, trace.backward, strict=True))
    for _ in range(STEPS):
        for layer, (numel, forward) in enumerate(zip(trace.numels, trace.forward, strict=True)):
            waits = [means[layer]] if means else []
            main = add(tasks, trace.optimizer * numel / total + forward, main, *waits)
        for group in groups:
            main = add(tasks, sum(seconds[layer] for layer in group), main)
            numel = sum(trace.numels[layer] for layer in group)
            priority, count = min(group) if ordered else 0, -(-numel * SLICES // total)
            last = add(tasks, numel * way.encode, main, uses="thread", priority=priority)
            for _ in range(count):
                last = add(tasks, numel * transfer / count, last, uses="link", priority=priority)
            last = add(tasks, numel * way.decode, last, uses="thread", priority=priority)
            means |= dict.fromkeys(group, last)
        marks.append(main)
    return marks


# -- showing -----------------------------------------------------------------------------------------------------------


def gain(now: float, other: float) -> float:
    """The share of a step that is saved."""
    return 1 - other / now


def window(arm: Mapping[str, Any]) -> tuple[float, float] | None:
    """The lowest and the highest rate at which priority saves `WORTH`; None: nowhere."""
    rows = zip(arm["rates"], arm[NOW], arm[PRIORITY], strict=True)
    worth = [rate for rate, now, other in rows if gain(now, other) >= WORTH]
    return (min(worth), max(worth)) if worth else None


def most(arm: Mapping[str, Any], how: str) -> str:
    """The largest gain at any rate."""
    return f"{100 * max(map(gain, arm[NOW], arm[how])):.0f} %"


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """For each model: the step now and what is saved at given rates, also with the fastest arm; then windows."""
    notes, found = report.describe(result["environment"]), []
    for model in result["models"]:
        trace = model["trace"]
        facts = (
            f"{sum(trace['numels']) / 1e6:.1f} M parameters in {len(trace['numels'])} layers; on this core forward "
            f"takes {sum(trace['forward']):.2f} s, backward {sum(trace['backward']):.2f}, the optimizer "
            f"{trace['optimizer']:.3f}; {result['arguments']['world']} ranks"
        )
        cells = [(speed, rate) for speed in SPEEDS for rate in RATES]
        columns = ["arm", *(f"{speed} x, {rate} Gbit/s" for speed, rate in cells)]
        rows = [[arm["arm"], *(cell(*at(arm, speed, rate)) for speed, rate in cells)] for arm in model["arms"]]
        best = [[min(at(arm, speed, rate)[way] for arm in model["arms"]) for way in range(2)] for speed, rate in cells]
        rows.append(["the fastest of these", *(cell(*pair) for pair in best)])
        caption = f"{notes}\n{facts}\ncompute so many times as fast as this core, links; ms now, and what is saved"
        found.append(report.Table(f"Steps of {model['model']}, saved by priority", columns, rows, caption))
    rows = []
    for model in result["models"]:
        for arm in model["arms"]:
            seen = window(arm)
            spans = ["never"] * len(SPEEDS)
            if seen is not None:
                spans = [f"{spoken(seen[0] * speed)} to {spoken(seen[1] * speed)}" for speed in SPEEDS]
            title = f"{model['model']}: {arm['arm']}"
            rows.append([title, *(most(arm, how) for how in WAYS_TO_STEP[1:]), *spans])
    columns = ["model and arm", "saved by buckets", "by layers", "by priority"]
    columns += [f"10 % saved, compute {speed} x" for speed in SPEEDS]
    caption = (
        f"{notes}\nsaved at most, over all rates; then rates of links at which priority saves a tenth, searched from "
    )
    caption += f"{spoken(SWEEP[0])} to {spoken(SWEEP[-1])} for 1 x"
    return [*found, report.Table("Links on which priority would pay", columns, rows, caption)]


def at(arm: Mapping[str, Any], speed: int, rate: str) -> tuple[float, float]:
    """Seconds now and by priority, with compute so many times as fast, at one of `RATES`."""
    place = arm["rates"].index(RATES[rate] / speed)
    return arm[NOW][place] / speed, arm[PRIORITY][place] / speed


def cell(now: float, other: float) -> str:
    return f"{now * 1e3:.0f}, {round(100 * gain(now, other))} %"


def spoken(rate: float) -> str:
    """Of a link, with two digits."""
    digits = float(f"{rate:.2g}")
    return f"{digits / 1e9:g} Gbit/s" if digits >= 1e9 else f"{digits / 1e6:g} Mbit/s"
