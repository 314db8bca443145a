"""Replicas that come and go on links of a known speed and length: goodput, loss and stalls.

Each arm trains for a while, in processes of one thread on links of their own. From the end of the first round on,
replicas are killed (SIGKILL) at moments drawn by the seed, the same for all arms, and started again at once. Steps take
a fixed time, as on machines that do nothing else.

Goodput is the share of the optimizer steps that the replicas could have made that rounds have counted. Stalls are times
inside `step`. Kills fall between exchanges or inside one, as it happens; `--kill-in exchange` aims each into the next
exchange. States after every round are compared between replicas. torchft's arms are there where torchft is installed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..common import report
from ..common.arguments import add_arms, add_output, expect_at_least
from ..common.progress import Progress
from ..links import flags, links
from ..links.verification import caption
from . import accounting, churn, with_torchft
from .kills import schedule
from .scene import ARMS, Scene

#: The arm beside which another one's loss stands.
CALM = {"gradwire": "gradwire-undisturbed", "torchft": "torchft-undisturbed"}
#: Seconds that the proof of the links may take, and for which a replica waits for others.
PROOF, PATIENCE = 120.0, 60.0
#: The settings of the model's other row: a round, and a kill in so many seconds.
LONG_ROUND, LONG_KILL = 60.0, 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_links(parser, whose="replica", world=False)
    flags.add_distance(parser)
    parser.add_argument("--replicas", type=int, default=4, help="that train (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="of training in an arm (default: %(default)s)")
    parser.add_argument("--every", type=int, default=30, help="steps from round to round (default: %(default)s)")
    parser.add_argument("--step", type=float, default=0.1, help="seconds of a step (default: %(default)s)")
    parser.add_argument("--kill-every", type=float, default=12, help="seconds, each with a kill (default: %(default)s)")
    parser.add_argument("--kill-in", choices=["exchange"], help="kill inside the exchange that comes next")
    parser.add_argument("--seed", type=int, nargs="+", default=[3], help="of kills, student and data; or several")
    here = [name for name in ARMS if not name.startswith("torchft") or with_torchft.version()]
    add_arms(parser, {name: arm.title for name, arm in ARMS.items()}, here)
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench elastic`."""
    rates, distance = flags.network_of(options)
    check(options)
    names = ("rate", "replicas", "seconds", "every", "step", "kill_every", "kill_in", "seed", "arms")
    arguments = {name: getattr(options, name) for name in names} | flags.recorded(distance)
    result = report.document("elastic", arguments)
    result["environment"] |= {"threads": 1, "torchft": with_torchft.version()}
    with links.open_links(options.replicas + 1, rates[options.rate], distance) as connection:
        proof, _ = connection.run_proven(None, {}, PROOF)
        result |= {"links": str(connection), "proof": proof, "runs": measure(options, connection)}
    report.deliver(result, tables(result), options)
    return 0


def check(options: argparse.Namespace) -> None:
    """Raises ValueError, naming the option, where one makes no sense."""
    expect_at_least(options, replicas=2, every=1)
    for name in ("seconds", "step", "kill_every"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name):g}: expected more than 0 seconds")
    if options.kill_every > options.seconds and any(ARMS[name].killed for name in options.arms):
        raise ValueError(
            f"--kill-every {options.kill_every:g}: nobody would be killed in --seconds {options.seconds:g}; raise it "
            "or leave out the arms with kills"
        )
    if with_torchft.version() is None and (asked := [name for name in options.arms if name.startswith("torchft")]):
        raise ValueError(f"--arms {asked[0]}: torchft is not installed; pip install torchft, or leave it out")


def measure(options: argparse.Namespace, connection: links.Loopback) -> list[dict[str, Any]]:
    """Every arm with every seed, in turn."""
    runs, curves = [], dict[tuple[str, int], Any]()
    with Progress("elastic", len(options.seed) * len(options.arms)) as progress:
        for seed in options.seed:
            job = {name: getattr(options, name) for name in ("replicas", "every", "step")}
            kills = schedule(seed, options.seconds, options.kill_every, options.replicas)
            for name in options.arms:
                with Scene(connection, ARMS[name], job | {"seed": seed, "patience": PATIENCE}) as scene:
                    inside = options.kill_in is not None
                    record = scene.run(options.seconds, kills, inside, lambda note: progress.advance(0, note))
                figures = accounting.summary(record.lives, record.zero, record.end, options.replicas, options.step)
                curve = accounting.learned(record.lives, record.losses)
                curves[name, seed] = curve
                runs.append(
                    {
                        "arm": name,
                        "seed": seed,
                        **figures,
                        "sent_bytes": record.sent_bytes,
                        "failures": record.failures,
                        "learned": curve[-1]._asdict() if curve else None,
                        "modelled": modelled(figures, options) if ARMS[name].killed else None,
                    }
                )
                progress.advance(1, f"{name}: goodput {figures['goodput']:.3f}")
    for one in runs:
        one["undisturbed"] = beside_calm(one, curves)
    return runs


def modelled(figures: Mapping[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Goodputs by `churn` of this arm's costs: as it was run, which is the model's check, and with long rounds."""
    costs = churn.costs(figures)
    return {
        "same": churn.goodput(costs, options.replicas, options.every * options.step, options.kill_every),
        "long": churn.goodput(costs, options.replicas, LONG_ROUND, LONG_KILL),
    }


def beside_calm(one: Mapping[str, Any], curves: Mapping[tuple[str, int], Any]) -> dict[str, float | None] | None:
    """The losses of an arm's undisturbed one after as many replica-steps and rounds; None if there is no such arm. A
    loss is None if it has not come so far."""
    calm = curves.get((CALM.get(one["arm"], ""), one["seed"]))
    if not calm or one["learned"] is None:
        return None
    return {
        "steps": accounting.loss_at(calm, "steps", one["learned"]["steps"]),
        "round": accounting.loss_at(calm, "round", one["learned"]["round"]),
    }


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """What rounds counted, what stalled, and what was learned, of each arm."""
    arguments, runs = result["arguments"], dict[str, list[Mapping[str, Any]]]()
    for one in result["runs"]:
        runs.setdefault(one["arm"], []).append(one)
    rows = {name: [ARMS[name].title, *main_cells(of)] for name, of in runs.items()}
    learned = {name: [ARMS[name].title, *learned_cells(of)] for name, of in runs.items()}
    speed, _, length = result["links"].partition(f" between {arguments['replicas'] + 1} ranks")
    where = f"{arguments['replicas']} replicas, {speed}{length}"
    steps = f"rounds of {arguments['every']} steps of {arguments['step']:g} s"
    aim = ", aimed into the exchange" if arguments["kill_in"] else ""
    seeds = arguments["seed"]
    notes = [
        report.describe(result["environment"]) + version_of_torchft(result),
        f"{arguments['seconds']:g} s an arm, one killed every {arguments['kill_every']:g} s{aim} and started again at "
        f"once, in arms with kills; seeds {', '.join(map(str, seeds))}: means of goodputs, medians of medians, the "
        "largest maximum",
        "goodput: steps that rounds counted, of those that replicas could have made; a round: ms inside step, median, "
        "ninth decile and maximum; death, join, both at once: the longest call of step after one, above the median, "
        "median and maximum; restart: from a process's start to its first step and to its first counted round",
        compared(result["runs"]),
        caption(result["proof"]),
        *(
            f"{len(one['failures'])} REPLICAS ENDED BY THEMSELVES ({one['arm']}), the first with: {one['failures'][0]}"
            for one in result["runs"]
            if one["failures"]
        ),
    ]
    columns = (
        "arm", "goodput", "rounds", "a round ms", "death between s", "death inside s", "join s", "both s", "restart s",
    )  # fmt: skip
    main = report.Table(f"{where}, {steps}", columns, list(rows.values()), "\n".join(notes))
    to_learn = ("arm", "replica-steps", "held-out loss", "against as many steps", "against as many rounds", "sent MB")
    notes = [
        "held-out loss: after the last round; against: its change from the same arm without kills, where that had made "
        "as many replica-steps, or rounds, on a line between rounds; of several seeds the mean, least and most",
        "sent: by all replicas, as the kernel counts, with headers",
    ]
    found = [main, report.Table("The same arms: learned", to_learn, list(learned.values()), "\n".join(notes))]
    simulated = [[ARMS[name].title, *modelled_cells(of)] for name, of in runs.items() if of[0]["modelled"]]
    if simulated:
        long = f"rounds of {LONG_ROUND:g} s, a kill every {LONG_KILL:g} s"
        found.append(
            report.Table(
                "Simulated: goodput by a model fed with the medians above",
                ("arm", "as above, measured", "as above, by the model", long),
                simulated,
                "not measured: events alone, with the cost of a round, a death, a join and a restart",
            )
        )
    return found


def version_of_torchft(result: Mapping[str, Any]) -> str:
    version = result["environment"]["torchft"]
    return f", torchft {version}" if version else ""


def compared(runs: Sequence[Mapping[str, Any]]) -> str:
    """The line on digests."""
    rounds, apart = (sum(one[name] for one in runs) for name in ("rounds_compared", "rounds_differing"))
    if not apart:
        return f"after each of {rounds} rounds the replicas that made it had the same bits"
    whose = ", ".join(f"{one['arm']} {one['rounds_differing']}" for one in runs if one["rounds_differing"])
    return f"STATES DIFFERED between replicas after {apart} of {rounds} rounds: {whose}"


def main_cells(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    goodputs = [one["goodput"] for one in runs]
    return [
        f"{statistics.fmean(goodputs):.3f}",
        " ".join(str(one["rounds"]) for one in runs),
        over(runs, "round_s", ("median", "p90", "max"), lambda seconds: f"{seconds * 1e3:.0f}"),
        over(runs, "death_between_s", ("median", "max"), "{:.2f}".format),
        over(runs, "death_inside_s", ("median", "max"), "{:.2f}".format),
        over(runs, "join_s", ("median", "max"), "{:.2f}".format),
        over(runs, "both_s", ("median", "max"), "{:.2f}".format),
        ", ".join(
            cell
            for cell in (
                over(runs, name, ("median",), "{:.1f}".format) for name in ("restart_step_s", "restart_round_s")
            )
            if cell
        ),
    ]


def over(runs: Sequence[Mapping[str, Any]], name: str, which: Sequence[str], shown: Callable[[float], str]) -> str:
    """Some of a spread's values over all seeds, in a cell."""
    found = [one[name] for one in runs if one[name]]
    values = [[spread[kind] for spread in found] for kind in which if found]
    together = [max(of) if kind == "max" else statistics.median(of) for kind, of in zip(which, values, strict=False)]
    return ", ".join(map(shown, together))


def learned_cells(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    ended = [one["learned"] for one in runs if one["learned"]]
    sent = [one["sent_bytes"] for one in runs if one["sent_bytes"] is not None]
    return [
        mean([end["steps"] for end in ended], "{:.0f}"),
        mean([end["loss"] for end in ended], "{:.3f}"),
        *(change(runs, what) for what in ("steps", "round")),
        mean([number / 1e6 for number in sent], "{:.1f}"),
    ]


def mean(values: Sequence[float], shown: str) -> str:
    return shown.format(statistics.fmean(values)) if values else ""


def change(runs: Sequence[Mapping[str, Any]], what: str) -> str:
    """From the undisturbed arm's losses to these: the mean, and of several seeds least and most."""
    pairs = [(one["learned"]["loss"], one["undisturbed"][what]) for one in runs if one["undisturbed"]]
    changes = [100 * (mine / calm - 1) for mine, calm in pairs if calm is not None]
    several = f" ({min(changes):+.1f} to {max(changes):+.1f})" if len(changes) > 1 else ""
    return mean(changes, "{:+.1f} %") + several


def modelled_cells(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{statistics.fmean(one['goodput'] for one in runs):.3f}",
        *(f"{statistics.fmean(one['modelled'][which] for one in runs):.3f}" for which in ("same", "long")),
    ]
