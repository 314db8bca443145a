"""Bytes and time of patches of weights, from one checkpoint of a model that is fine-tuned to the next.

The benchmarks' transformer learns at its usual rate, and then files that it has not seen, by AdamW at rates of
fine-tuning, its weights float32. Checkpoints are bfloat16 copies. Beside each patch stand the raw weights, an index and
a value (4 and 2 bytes) for each weight that changed, zlib of all bits that changed (XOR), and two entropies: of places
and differences for who ignores the weights before, and for who knows their exponents.

Time is that of `PatchWriter.write` and `PatchReader.apply`, on as many copies of the model as make a large one, beside
a copy of the weights in memory in the same turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...compress.patches import PatchReader, PatchWriter
from ...compress.patches.sections import Words
from ..common import report
from ..common.arguments import add_output, expect_at_least
from ..common.language_model import update, windows
from ..common.progress import Progress
from ..learning.tasks import TASKS, Text
from .speed import torch_threads

State = dict[str, Tensor]
TEXTS = {name: task for name, task in TASKS.items() if isinstance(task, Text) and not task.autocast}
BFLOAT16 = Words(16, 7)
#: Steps of fine-tuning before the first checkpoint, in which AdamW's averages settle.
SETTLE = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", nargs="+", choices=list(TEXTS), default=list(TEXTS), help="models (default: all)")
    parser.add_argument("--pretrain", type=int, default=300, help="steps at the usual rate (default: %(default)s)")
    parser.add_argument(
        "--learning-rates",
        type=float,
        nargs="+",
        metavar="RATE",
        default=[1e-6, 1e-5],
        help="of fine-tuning (1e-6 and 1e-5)",
    )
    parser.add_argument("--every", type=int, nargs="+", default=[1, 8], help="steps from patch to patch (1 and 8)")
    parser.add_argument("--patches", type=int, default=4, help="of each kind (default: %(default)s)")
    parser.add_argument("--numel", type=int, default=1 << 26, help="weights when timed (default: 2^26)")
    parser.add_argument("--repeats", type=int, default=7, help="timings (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="for torch and gradwire (default: %(default)s)")
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench patch`."""
    expect_at_least(options, pretrain=1, every=1, patches=1, numel=1, repeats=1, threads=1)
    arguments = {name: value for name, value in vars(options).items() if name not in ("command", "json")}
    with torch_threads(options.threads):
        result = report.document("patch", arguments) | {"rows": []}
        steps = options.pretrain + len(options.learning_rates) * (SETTLE + max(options.every) * options.patches)
        with Progress("patches", steps * len(options.tasks)) as progress:
            for task in options.tasks:
                result["rows"] += measure(TEXTS[task], options, progress)
    report.deliver(result, tables(result), options)
    return 0


def measure(task: Text, options: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """One row for each rate and number of steps."""
    torch.manual_seed(0)
    task = dataclasses.replace(task, optimizer="adamw", steps=options.pretrain)
    model, text = task.model(), task.corpus.validation
    optimizer, batches = task.new_optimizer(model), task.batches(0, 0, 1)
    for step in range(options.pretrain):
        task.train_step(model, optimizer, step, next(batches))
        progress.advance(1)
    learned = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = []
    for rate in options.learning_rates:
        model.load_state_dict(learned)
        states = fine_tuned(task, model, text, rate, max(options.every) * options.patches, progress)
        for every in options.every:
            chosen = states[: every * options.patches + 1 : every]
            row = {"task": task.name, "title": task.title, "learning_rate": rate, "every": every}
            rows.append(row | sizes(chosen) | speeds(chosen[:2], options.numel, options.repeats))
    return rows


def fine_tuned(task: Text, model: nn.Module, text: Tensor, rate: float, steps: int, progress: Progress) -> list[State]:
    """Checkpoints after each step, and before the first."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    generator, found = torch.Generator().manual_seed(1), []
    for step in range(SETTLE + steps + 1):
        if step >= SETTLE:
            found.append({name: tensor.bfloat16() for name, tensor in model.state_dict().items()})
        starts = torch.randint(len(text) - task.context, (task.batch,), generator=generator)
        inputs, targets = windows(text, starts, task.context)
        task.loss(model(inputs), targets).backward()
        update([optimizer], rate, task.clip)
        progress.advance(1)
    return found


def sizes(states: Sequence[State]) -> dict[str, Any]:
    """Bytes of the patches between consecutive states, and of the alternatives, all together."""
    writer = PatchWriter()
    full = len(writer.write(states[0]))
    total: dict[str, float] = {}
    for before, after in itertools.pairwise(states):
        old, new = flat(before), flat(after)
        changed = int((old != new).sum())
        found = {
            "weights": len(old),
            "changed": changed,
            "patch_bytes": len(writer.write(after)),
            "raw_bytes": 2 * len(old),
            "index_value_bytes": 6 * changed,
            "xor_zlib_bytes": len(zlib.compress((old ^ new).tobytes(), 9)),
            **entropies(old, new),
        }
        total = {name: total.get(name, 0) + value for name, value in found.items()}
    return total | {"full_bytes": full, "patches": len(states) - 1}


def flat(state: State) -> np.ndarray:
    return torch.cat([tensor.view(torch.int16).flatten() for tensor in state.values()]).numpy().view(np.uint16)


def entropies(old: np.ndarray, new: np.ndarray) -> dict[str, float]:
    """Bytes of places and differences by their distribution in this patch: one for all weights, and one for each
    exponent of the weights before. What tells these distributions is not counted."""
    difference = (BFLOAT16.ordered(new) - BFLOAT16.ordered(old)).view(np.int16)
    exponents = old >> 7 & 0xFF

    def bits(chosen: np.ndarray) -> float:
        moved = chosen[chosen != 0]
        counts = [np.array([len(moved), len(chosen) - len(moved)]), np.unique(moved, return_counts=True)[1]]
        return sum(float(-(c[c > 0] * np.log2(c[c > 0] / c.sum())).sum()) for c in counts)

    known = sum(bits(difference[exponents == exponent]) for exponent in np.unique(exponents))
    return {"entropy_bytes": bits(difference) / 8, "entropy_by_exponent_bytes": known / 8}


def speeds(states: Sequence[State], numel: int, repeats: int) -> dict[str, Any]:
    """Seconds of writing and applying a patch between two states, there and back, of copying the weights, and of full
    snapshots."""
    copies = -(-numel // sum(tensor.numel() for tensor in states[0].values()))
    large = [
        {f"{name}.{i}": tensor.clone() for i in range(copies) for name, tensor in state.items()} for state in states
    ]
    raw = sum(tensor.nbytes for tensor in large[0].values())
    target = {name: tensor.clone() for name, tensor in large[0].items()}
    writer, reader = PatchWriter(large[0]), PatchReader({name: tensor.clone() for name, tensor in large[0].items()})
    patches: Iterator[State] = itertools.cycle(reversed(large))
    sent: list[bytes] = []
    work: dict[str, Callable[[], Any]] = {
        "copy": lambda: [target[name].copy_(tensor) for name, tensor in large[0].items()],
        "encode": lambda: sent.append(writer.write(next(patches))),
        "decode": lambda: reader.apply(sent[-1]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 2):  # two to warm up
        for name, call in work.items():
            taken = timed(call)
            if turn > 1:
                seconds[name].append(taken)
    snapshots = PatchWriter()
    seconds["full_encode"] = [timed(lambda: sent.append(snapshots.write(large[0])))]
    seconds["full_decode"] = [timed(lambda: reader.apply(sent[-1]))]
    return {"timed_bytes": raw, "copies": copies, "seconds": seconds}


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """Bytes, and time."""
    small, fast = [], []
    for row in result["rows"]:
        title = f"{row['title']}, {row['learning_rate']:g}, {row['every']}"
        per = 8 / row["changed"]
        names = ("patch", "entropy", "entropy_by_exponent", "index_value", "xor_zlib")
        small.append(
            [
                title,
                f"{row['changed'] / row['weights']:.2%}",
                f"{row['raw_bytes'] / row['patch_bytes']:.0f}",
                *(f"{row[f'{name}_bytes'] * per:.2f}" for name in names),
                f"{row['full_bytes'] * row['patches'] / row['raw_bytes']:.0%}",
            ]
        )
        speed = {name: row["timed_bytes"] / 1e9 / report.median(taken) for name, taken in row["seconds"].items()}
        fast.append(
            [title, *(f"{speed[name]:.2f}" for name in ("copy", "encode", "decode", "full_encode", "full_decode"))]
        )
    arguments, first = result["arguments"], result["rows"][0]
    machine = report.describe(result["environment"])
    notes = [
        machine,
        f"{arguments['pretrain']} steps of training first; {arguments['patches']} patches a row; model, rate of AdamW, "
        "steps from checkpoint to checkpoint",
        "bits for each weight that changed; entropy: of places and differences with one distribution for all weights, "
        "and with one for each exponent of the weights before; a full snapshot, in shares of the weights' bytes",
    ]
    columns: tuple[str, ...] = ("model, rate, steps", "changed", "times fewer bytes", "bits", "entropy", "by exponent")
    bytes_table = report.Table(
        "Patches of bfloat16 weights", (*columns, "index and value", "zlib of XOR", "full"), small, "\n".join(notes)
    )
    note = f"GB of weights a second, {first['timed_bytes'] / 1e6:.0f} MB or more: copies of the model; median of "
    note += f"{arguments['repeats']} turns; full snapshots once; {arguments['threads']} thread"
    columns = ("model, rate, steps", "copy", "write", "apply", "write full", "apply full")
    return [bytes_table, report.Table("Time of patches", columns, fast, f"{machine}\n{note}")]
