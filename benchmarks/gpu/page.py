"""The report for people. Without a GPU every line says so."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..common.report import EMULATED
from ..steps import step

#: Sections that check something, and what.
CHECKED = {
    "compile": "NVRTC compiles `csrc/` for this GPU",
    "bytes": "wires, residuals and means equal the specification's",
    "hooks": "ranks over Gloo, captured graphs, calls that neither allocate nor wait",
    "ranks": "the laws on two ranks over NCCL, which share the GPU",
    "four-ranks": "the same on four",
    "tests": "`pytest -m cuda`, by files",
    "sanitizer": "memcheck, racecheck and synccheck over every kernel",
    "kernels": "times of codecs",
    "step": "steps of one rank",
    "slow-link": "steps of two ranks on limited links",
}
#: Rows that are ok and say more than that.
SAID = re.compile(r"test_ranks_meet|test_no_step_waits|(one|two) ranks?$")
#: Below the heads of a table.
RULE = "| --- |"


def markdown(document: Mapping[str, Any]) -> str:
    """One page: what the GPU is, steps, kernels, checks, and whatever is not as it should be."""
    facts, rows = document["environment"], document["rows"]
    lines = [f"# gradwire on {facts['gpu']}", ""]
    lines += [f"Driver {facts['driver']}, CUDA {facts['cuda']}, torch {facts['torch']}, CuPy {facts['cupy']}, "]
    of = f"revision {facts['revision']}, sources {facts.get('sources')}"
    lines[-1] += f"gradwire {facts['gradwire']} ({of}), {facts['date']}. Made by `make gpu-report`."
    for what, error in facts["broken"].items():
        lines += ["", f"**{what} does not work here**: {error}"]
    for title, made in (("Steps", steps(rows)), ("Kernels", kernels(document)), ("Checks", checks(rows))):
        lines += ["", f"## {title}", "", *made] if made else []
    lines += ["", *listed(rows)]
    if EMULATED in facts["gpu"]:
        lines = [emulated(line) for line in lines]
    return "\n".join(lines) + "\n"


def by_rows(document: Mapping[str, Any]) -> str:
    """The document in JSON, with a line for each row; every line names the GPU."""
    head = {"gpu": document["environment"]["gpu"]} | {k: v for k, v in document.items() if k != "rows"}
    rows = ",\n".join(json.dumps(row) for row in document["rows"])
    return f'{json.dumps(head)[:-1]}, "rows": [\n{rows}\n], "of": {json.dumps(head["gpu"])}}}\n'


def emulated(line: str) -> str:
    """A line, or a row of a table, that nobody can take for a GPU's."""
    if not line or EMULATED in line or line.startswith(RULE):
        return line
    if line.startswith("#"):
        return f"{line} ({EMULATED})"
    for mark in ("| ", "- "):
        if line.startswith(mark):
            return f"{mark}{EMULATED}: {line[2:]}"
    return f"{EMULATED}: {line}"


def listed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows that are not ok, and what some say that are; each reason once."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["reason"] and (row["status"] != "ok" or SAID.match(row["name"])):
            found.setdefault((row["section"], row["status"], row["reason"]), []).append(row["name"])
    return [f"- {of}, {status}: {', '.join(names)}: {why}" for (of, status, why), names in found.items()]


def checks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many rows of each section are ok."""
    each = {section: [row["status"] for row in rows if row["section"] == section] for section in CHECKED}
    counts = ("ok", "failed", "skipped")
    cells = [
        [section, what, *(str(each[section].count(status)) for status in counts)]
        for section, what in CHECKED.items()
        if each[section]
    ]
    return table(["section", "content", *counts], cells) if cells else []


def steps(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tables of `gradwire-bench step`."""
    made = [row["result"] for row in rows if "networks" in (row["result"] or ())]
    lines = []
    for one in (one for result in made for one in step.tables(result)):
        notes = (f"- {note}" for note in one.caption.splitlines())
        lines += [f"**{one.title}**", "", *table(one.columns, one.rows), "", *notes, ""]
    return lines[:-1]


def kernels(document: Mapping[str, Any]) -> list[str]:
    """Times of encoding and decoding beside the roofline."""
    arguments, rows = document["arguments"], [row for row in document["rows"] if row["section"] == "kernels"]
    rows = [row for row in rows if row["status"] == "ok"]
    if not rows:
        return []
    copied = rows[0]["result"]["copy_bytes_per_s"] / 1e12
    lines = [f"{arguments['numel']:,} float32. A copy moves {copied:.2f} TB/s. Times are medians of "]
    lines[-1] += f"{arguments['repeats']} as multiples of `torch.add(out=)`, quartiles in brackets, and shares of the "
    lines[-1] += "copy's bandwidth."
    heads = ["codec", "encode with feedback", "encode", f"decode the mean of {arguments['ranks']}", "torch operations"]
    return [*lines, "", *table([*heads, "as DeepSpeed", "host, µs"], [kernel_cells(row["result"]) for row in rows])]


def kernel_cells(result: Mapping[str, Any]) -> list[str]:
    def cell(name: str) -> str:
        if name not in result["ratio_to_add"]:
            return ""
        low, high = (value / result["median_s"]["add"] for value in result["quartiles_s"][name])
        share = f", {result['share_of_copy'][name]:.0%}" if name in result["share_of_copy"] else ""
        return f"{result['ratio_to_add'][name]:.2f} [{low:.2f}, {high:.2f}]{share}"

    cells = [cell(name) for name in ("encode_feedback", "encode", "decode_mean", "torch", "deepspeed")]
    return [f"`{result['label']}`", *cells, f"{1e6 * result['host_s']:.0f}"]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", RULE + " --- |" * (len(heads) - 1)]
    return lines + ["| " + " | ".join(cells) + " |" for cells in rows]
