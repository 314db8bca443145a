"""Predictions beside measurements: `gradwire-bench advise --check`; `--model small --delay 25ms` for a distance.

For each rate, the rig of `gradwire-bench step` measures every arm on shaped links between two ranks of one core each.
The prediction knows the rate, and what was measured on processes without those links, before the rig and again after
it: a machine that others share is not equally fast for two minutes together, so the mean of both predictions counts.
Both are told to keep memory that was freed: whether a process returns a step's gradients to the system, and pays for
fresh pages at the next one, depends on how many models share it, and the rig's arms do.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from statistics import fmean
from typing import Any

from ..common import report
from ..common.arms import ARMS, FLOOR, PREDICTED
from ..links import flags, links
from ..links.verification import caption
from ..steps import step
from . import advice
from .prediction import Here, measure, predictions

WORLD = 2
#: Options of `step` for each model that it knows.
RIGS: dict[str, dict[str, Any]] = {
    "linear": {"width": 2048, "layers": 6, "batch": 8},
    "small": {"width": 512, "layers": 8, "batch": 8},
}
#: Of "small": eight buckets.
SMALL_BUCKETS = 1.0
#: The arms that are predicted and measured.
CHECKED = tuple(arm.name for arm in PREDICTED if arm.name != "topk-0.1")
ROUNDS = 2
#: Untimed steps: DDP rebuilds its buckets after the first.
WARM_UP = 2
#: Seconds that the timed steps of one round should take, and how many steps there are at least and at most.
ROUND_SECONDS, FEWEST_STEPS, MOST_STEPS = 15.0, 3, 6
#: A prediction should be as close.
TARGET = 0.2
#: glibc's: never return memory, and take all of it from the heap.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}


def run(options: argparse.Namespace) -> int:
    """Measure and predict at each of `options.rates`."""
    rates = {text: flags.parse_rate(text) for text in options.rates}
    if None in rates.values():
        raise ValueError("--rates none: a prediction needs the speed of the links")
    if options.model not in RIGS:
        raise ValueError(f"--model {options.model}: what is checked is one of {', '.join(RIGS)}")
    distance = None if options.latency is None else flags.Distance(flags.parse_time(options.latency, "--latency"))
    bucket_mb = SMALL_BUCKETS if options.bucket_mb is None and options.model == "small" else options.bucket_mb
    arguments = {"rates": options.rates, "world": WORLD, "model": options.model, **flags.recorded(distance)}
    result = report.document("advise --check", arguments)
    result["environment"]["threads"] = 1
    result["checks"] = []
    with keeping_memory():
        for text, rate in rates.items():
            assert rate is not None
            with advice.waiting(f"measuring here, the rig at {text}, and here again"):
                checked = {"rate": text, **check(options.model, rate, distance, bucket_mb)}
            result["checks"].append(checked)
            table(checked, result["environment"]).print()
    if options.json:
        report.write_json(options.json, result)
    return 0


@contextmanager
def keeping_memory() -> Iterator[None]:
    """Processes that start meanwhile keep what they free."""
    before = {name: os.environ.get(name) for name in KEEP_MEMORY}
    os.environ.update(KEEP_MEMORY)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def check(model: str, rate: int, distance: flags.Distance | None, bucket_mb: float | None) -> dict[str, Any]:
    """Predict and measure every arm at one rate."""
    delay = 0.0 if distance is None else distance.delay
    before = measure(model, WORLD, 1.0, bucket_mb)
    longest = sum(row["step_s"] for row in predicted(before, rate, delay).values())
    steps = max(FEWEST_STEPS, min(MOST_STEPS, round(ROUND_SECONDS / longest)))
    arguments = {"arms": [FLOOR, *CHECKED], "density": 0.01, "steps": steps, "rounds": ROUNDS}
    arguments |= {"warmup": WARM_UP, **RIGS[model], "bucket_mb": bucket_mb, "distant": distance is not None}
    with links.open_links(WORLD, rate, distance) as connection:
        proof, ranks = connection.run_proven(step.measure, arguments, timeout=900, strict=True)
    rows = step.summarize([rank["arms"] for rank in ranks], shaped=True, distant=distance is not None)
    after = measure(model, WORLD, 1.0, bucket_mb)
    return {
        "measured_here": [asdict(before), asdict(after)],
        "proof": proof,
        "rig": arguments,
        "arms": compare(rows, [predicted(here, rate, delay) for here in (before, after)]),
    }


def predicted(here: Here, rate: int, delay: float = 0.0) -> dict[str, dict[str, Any]]:
    """By the name of an arm, its prediction at `rate` and `delay`; the step without communication is the profile's."""
    rows = predictions(here, here.network(WORLD, 1, rate, delay, None))
    floor = {"arm": FLOOR, "step_s": here.profile.floor}
    return {row["arm"]: row for row in (floor, *rows) if row["arm"] in (FLOOR, *CHECKED)}


def compare(
    measured: Sequence[Mapping[str, Any]], predictions: Sequence[Mapping[str, Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """For each arm of the rig, the mean of what was predicted for it, and that / measured.

    Args:
        measured: `step.summarize`'s rows.
        predictions: of each measuring here, by the name of an arm.
    """
    rows = []
    for row in measured:
        of_arm = [dict(by_arm[row["arm"]]) for by_arm in predictions]
        expected = fmean(prediction["step_s"] for prediction in of_arm)
        rows.append(
            {
                "arm": row["arm"],
                "measured_s": row["step_s"],
                "measured_quartiles_s": row["step_quartiles_s"],
                "predicted_s": expected,
                "ratio": expected / row["step_s"],
                "predictions": of_arm,
                "measurement": {
                    key: row[key] for key in ("sent_bytes", "encode_s", "exchange_s", "decode_s", "times_s")
                },
            }
        )
    return rows


def table(checked: Mapping[str, Any], environment: Mapping[str, Any]) -> report.Table:
    """Prediction and measurement at one rate."""
    rows = [
        [
            ARMS[row["arm"]].title,
            f"{row['predicted_s'] * 1e3:.1f}",
            " and ".join(f"{prediction['step_s'] * 1e3:.1f}" for prediction in row["predictions"]),
            f"{row['measured_s'] * 1e3:.1f}",
            " to ".join(f"{quartile * 1e3:.1f}" for quartile in row["measured_quartiles_s"]),
            f"{row['ratio']:.2f}",
        ]
        for row in checked["arms"]
    ]
    columns = ("arm", "predicted ms", "before and after", "measured ms", "quartiles", "predicted / measured")
    far = [ARMS[row["arm"]].title for row in checked["arms"] if abs(row["ratio"] - 1) > TARGET]
    rig, proof = checked["rig"], checked["proof"]
    shown = f"links proven: what needs {proof['expected_s'] * 1e3:.1f} ms took {proof['median_s'] * 1e3:.1f}"
    if "delay_s" in proof:
        shown = caption(proof)
    notes = [
        report.describe(environment),
        f"{WORLD} ranks of one core each, {rig['rounds']} rounds of {rig['steps']} steps; {shown}",
        f"further off than {TARGET:.0%}: {', '.join(far)}" if far else f"all within {TARGET:.0%}",
    ]
    far_away = f" and {proof['delay_s'] * 1e3:g} ms one way" if "delay_s" in proof else ""
    return report.Table(f"Prediction and measurement at {checked['rate']}{far_away}", columns, rows, "\n".join(notes))
