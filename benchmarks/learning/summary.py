"""The training benchmark's results: learning curves and step times joined, a table for each, and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from ..common import report
from ..common.arms import BASELINE, COMPRESSED, DENSE, FLOOR, HALF, TRAINED, WHOLE
from ..links import flags
from ..links.verification import caption
from .search import loss_of, origin

#: PyTorch's own ways that need no tuning; a codec pays where it beats the faster of them.
PLAIN = (DENSE, BASELINE)


def join(result: dict[str, Any]) -> None:
    """Add to each world what each arm learned, and when it reached the target at each rate; in place."""
    for world in result["worlds"]:
        runs = by_arm(world["runs"])
        margin = result["task"]["margin"]
        world["target_loss"] = [(1 + margin) * final(run) for run in runs[DENSE]]
        world["learning"] = {name: learned(runs[name], runs[DENSE], world["target_loss"]) for name in runs}
        world["joined"] = {
            text: {name: timed(name, timing["arms"], world["learning"]) for name in result["arguments"]["arms"]}
            for text, timing in world["timings"].items()
        }
        for rows in world["joined"].values():
            for row in rows.values():
                row["speedup"] = speedup(row, rows[BASELINE])
        world["crossover"] = {
            name: crossover(name, world) for name in result["arguments"]["arms"] if name not in (FLOOR, *PLAIN)
        }


def by_arm(runs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs of each arm, in the order of their seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        found.setdefault(run["arm"], []).append(run)
    return found


def final(run: Mapping[str, Any]) -> float:
    """The loss at the end."""
    return loss_of(run["curve"][-1])


def learned(
    runs: Sequence[dict[str, Any]], dense: Sequence[dict[str, Any]], targets: Sequence[float]
) -> dict[str, Any]:
    """One arm's final losses, their change against float32 with the same seed, and the steps until each target."""
    finals = [final(run) for run in runs]
    changes = [mine / final(other) - 1 for mine, other in zip(finals, dense, strict=True)]
    finite = all(math.isfinite(loss) for loss in finals)
    return {
        "final_loss": report.interval(finals) if finite else None,
        "change": report.interval(changes) if finite else None,
        "accuracy": [run["curve"][-1].get("accuracy") for run in runs],
        "bits_per_element": fmean(run["bits_per_element"] for run in runs),
        "steps_to_target": [steps_to(run["curve"], target) for run, target in zip(runs, targets, strict=True)],
    }


def steps_to(curve: Sequence[Mapping[str, Any]], target: float) -> float | None:
    """After how many steps a curve reaches `target`, straight between its readings; None if it never does."""
    for before, after in pairwise(curve):
        if after["loss"] is not None and after["loss"] <= target:
            high = loss_of(before)
            share = 1.0 if math.isinf(high) else (high - target) / (high - after["loss"])
            return float(before["step"] + share * (after["step"] - before["step"]))
    return None


def timed(name: str, timings: Mapping[str, Any], learning: Mapping[str, Any]) -> dict[str, Any]:
    """One arm at one rate: its step, and how long it took to the target with each seed."""
    step = report.median(timings[name]["times_s"])
    row = {
        "step_s": step,
        "step_quartiles_s": report.quartiles(timings[name]["times_s"]),
        "sends": timings[name]["sends"],
        "learns_as": None,
        "time_to_target_s": None,
    }
    if name != FLOOR:
        # `auto` learns as its codec does, unless it found that there is more to be gained without.
        row["learns_as"] = {WHOLE: DENSE, HALF: BASELINE}.get(row["sends"], TRAINED[name].learns_as or name)
        dense = report.median(timings[DENSE]["times_s"])
        begin = TRAINED[name].dense_steps
        row["time_to_target_s"] = [
            None if steps is None else min(steps, begin) * dense + max(0.0, steps - begin) * step
            for steps in learning[row["learns_as"]]["steps_to_target"]
        ]
    return row


def communication(name: str, timings: Mapping[str, Any]) -> float:
    """The share of a step that communication takes beside computing: of one without DDP where there are rounds."""
    alone = timings[name].get("alone_s", timings[FLOOR]["times_s"])
    return 1.0 - report.median(alone) / report.median(timings[name]["times_s"])


def speedup(row: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, float] | None:
    """The speedup over the baseline, paired by seed: geometric mean and interval; None if a seed misses the target."""
    mine, theirs = row["time_to_target_s"], baseline["time_to_target_s"]
    if mine is None or None in mine or None in theirs:
        return None
    logs = report.interval([math.log(other / own) for own, other in zip(mine, theirs, strict=True)])
    return {name: math.exp(value) for name, value in logs.items()}


def mean_time(row: Mapping[str, Any]) -> float | None:
    """Mean time to the target, None unless every seed reached it."""
    times = row["time_to_target_s"]
    return None if times is None or None in times else fmean(times)


def crossover(name: str, world: Mapping[str, Any]) -> dict[str, Any]:
    """Up to which bandwidth an arm reaches the target before float32 and fp16 do: bits a second, and in words.

    Between two measured rates, where the logarithm of the ratio, straight over the logarithm of the rate, is zero.
    """
    ratios = []
    for text, rows in world["joined"].items():
        mine, plain = mean_time(rows[name]), [mean_time(rows[other]) for other in PLAIN]
        if mine is None or None in plain:
            return {"rate": None, "words": "target not reached"}
        rate = world["timings"][text]["rate"]
        ratios.append((math.inf if rate is None else rate, mine / min(p for p in plain if p is not None), text))
    ratios.sort()
    if ratios[0][1] >= 1:
        return {"rate": None, "words": f"below {spoken(ratios[0][2])}, if at all"}
    for (low, below, first), (high, above, second) in pairwise(ratios):
        if above < 1:
            continue
        if math.isinf(high):
            return {"rate": None, "words": f"between {spoken(first)} and {spoken(second)}"}
        share = math.log(below) / (math.log(below) - math.log(above))
        rate = low * (high / low) ** share
        return {"rate": rate, "words": f"{rate / 1e9:.2g} Gbit/s"}
    return {"rate": None, "words": "every rate tried"}


def spoken(rate: str) -> str:
    """A rate as people write it."""
    bits = flags.parse_rate(rate)
    if bits is None:
        return "unshaped"
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """Two for each number of ranks."""
    return [table for world in result["worlds"] for table in (learning_table(result, world), time_table(result, world))]


def learning_table(result: Mapping[str, Any], world: Mapping[str, Any]) -> report.Table:
    """Table of what each arm learned."""
    task, seeds = result["task"], result["arguments"]["seeds"]
    accurate = any(learned["accuracy"][0] is not None for learned in world["learning"].values())
    columns = ["arm", "bits an element", "times fewer", f"final loss, {task['loss_unit']}", "against float32, paired"]
    columns += ["accuracy"] * accurate + ["steps to target"]
    searched = result["arguments"].get("search", False)
    runs = by_arm(world["runs"])
    columns[1:1] = ["rate"] * searched
    rows = []
    for name, row in world["learning"].items():
        loss, change, steps = row["final_loss"], row["change"], row["steps_to_target"]
        rows.append(
            [
                TRAINED[name].title,
                *([f"{world['learning_rates'][name]:g}"] if searched else []),
                f"{row['bits_per_element']:.3g}",
                times_fewer(runs[name], world["world"]),
                "not finite" if loss is None else f"{loss['mean']:.3f}",
                "" if change is None or name == DENSE else percent(change, seeds),
                *([f"{fmean(row['accuracy']):.1%}"] if accurate else []),
                "not reached" if None in steps else f"{fmean(steps):.0f}",
            ]
        )
    run = f"{task['optimizer']}, {task['steps']} steps, {seeds} seed(s)"
    title = f"Learning: {task['title']}, {world['world']} ranks, {run}"
    notes = [
        origin(result, world["runs"]),
        f"target: within {task['margin']:.0%} of where float32 ends with the same seed; in brackets: 95 % interval of "
        "the mean over seeds (Student's t)",
        f"{task['steps'] / result['steps_per_epoch']:.2g} epochs; one recipe for all arms, "
        + (
            "each at its own best learning rate by the first seed"
            if searched
            else "its learning rate found for float32"
        ),
    ]
    if world["world"] > 2:
        notes.append("bits: sent once; times fewer: bytes that a rank receives, against a float32 ring")
    return report.Table(title, columns, rows, "\n".join(notes))


def times_fewer(runs: Sequence[Mapping[str, Any]], world: int) -> str:
    """The ratio of a float32 ring's bytes to those a rank receives; nothing if they were not counted."""
    # Between two ranks as many as it sends, which is all that older runs say.
    shares = [run.get("share_of_bytes", run["bits_per_element"] / 32 if world == 2 else None) for run in runs]
    return "" if None in shares else f"{1 / fmean(shares):.1f}"


def percent(interval: Mapping[str, float], seeds: int) -> str:
    mean = f"{interval['mean']:+.1%}"
    return mean if seeds == 1 else f"{mean} [{interval['low']:+.1%}, {interval['high']:+.1%}]"


def time_table(result: Mapping[str, Any], world: Mapping[str, Any]) -> report.Table:
    """Table of the time to the target of each arm."""
    rates, seeds = list(world["joined"]), result["arguments"]["seeds"]
    columns = ["arm", *(f"{spoken(rate)}:\nstep ms, to target s" for rate in rates)]
    columns += [f"communication,\n% of a step, {spoken(rates[0])}", f"times sooner than\nfp16, {spoken(rates[0])}"]
    columns += ["faster than float32\nand fp16 up to"]
    rows = []
    for name in result["arguments"]["arms"]:
        cells = []
        for rate in rates:
            row = world["joined"][rate][name]
            time = mean_time(row)
            late = "" if name == FLOOR else "-" if time is None else f"{time:.1f}"
            cells.append(f"{row['step_s'] * 1e3:.0f}  {late}" + f" ({row['sends']})" * (row["sends"] != COMPRESSED))
        gain = world["joined"][rates[0]][name]["speedup"]
        rows.append(
            [
                TRAINED[name].title,
                *cells,
                "" if name == FLOOR else f"{100 * communication(name, world['timings'][rates[0]]['arms']):.1f}",
                "" if gain is None or name == BASELINE else times(gain, seeds),
                world["crossover"].get(name, {}).get("words", ""),
            ]
        )
    title = f"Time to equal loss: {result['task']['title']}, {result['task']['optimizer']}, {world['world']} ranks"
    notes = [
        report.describe(result["environment"]),
        "learning curves by seed, joined with the median step at each rate; -: target not reached by every seed",
        *(f"{spoken(rate)}: {caption(timing['proof'])}" for rate, timing in world["timings"].items()),
    ]
    cores = result["environment"]["cores"]
    if world["world"] > cores:
        notes.append(
            f"OVERSUBSCRIBED: {world['world']} ranks share {cores} cores, so computing takes longer than it would"
        )
    return report.Table(title, columns, rows, "\n".join(notes))


def times(interval: Mapping[str, float], seeds: int) -> str:
    mean = f"{interval['mean']:.2f}"
    return mean if seeds == 1 else f"{mean} [{interval['low']:.2f}, {interval['high']:.2f}]"


#: Lines of a picture.
LINES = 5


def plot(result: Mapping[str, Any], path: str) -> None:
    """Time to the target loss against bandwidth, on the first number of ranks. Needs matplotlib."""
    figure, axes = report.subplots(figsize=(8.5, 5))
    seeds = result["arguments"]["seeds"]
    task = f"{result['task']['title']}, {result['task']['optimizer']}, mean of {seeds} seed{'s' * (seeds > 1)}"
    figure.suptitle(f"Seconds until the loss is float32's\n{task}", fontsize=11)
    draw_rates(axes, result["worlds"][0])
    report.save(figure, path, dpi=110)


def drawn(world: Mapping[str, Any]) -> list[str]:
    """The arms in the picture: float32 and fp16, and of those that reach the target with every seed at every rate the
    fastest ones, by the geometric mean over rates."""

    def speed(name: str) -> float:
        times = [mean_time(rows[name]) for rows in world["joined"].values()]
        return math.inf if None in times else math.prod(time for time in times if time is not None)

    others = [name for name in next(iter(world["joined"].values())) if name not in (FLOOR, *PLAIN)]
    fastest = sorted((name for name in others if speed(name) < math.inf), key=speed)
    return [*PLAIN, *fastest[: LINES - len(PLAIN)]]


def draw_rates(panel: Any, world: Mapping[str, Any]) -> None:
    from matplotlib.ticker import LogLocator

    rates = list(world["joined"])
    shaped = [flags.parse_rate(rate) for rate in rates]
    fastest = max((rate for rate in shaped if rate is not None), default=10**9)
    places = [fastest * 4 if rate is None else rate for rate in shaped]  # loopback has no rate: beyond the others
    lines = []
    for name in drawn(world):
        arm, found = TRAINED[name], [mean_time(world["joined"][rate][name]) for rate in rates]
        if None not in found:
            (line,) = panel.plot(places, found, color=arm.colour, marker="o", markersize=4, linewidth=1.8)
            lines.append((line, arm.title.removeprefix("gradwire, ").replace(", parameters", ",\nparameters")))
    panel.set(xscale="log", yscale="log", xlabel="bandwidth of a rank's link", title=f"{world['world']} ranks")
    panel.set_xticks(places, [spoken(rate) for rate in rates])
    panel.minorticks_off()
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g} s")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    report.label_ends(panel, lines)
