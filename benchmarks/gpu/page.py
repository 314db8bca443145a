"""The report for people. Without a GPU every line says so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..common.report import EMULATED

#: Below the heads of a table.
RULE = "| --- |"


def markdown(document: Mapping[str, Any], brief: bool = False) -> str:
    """Args:
    brief: of sections without a table leave out the rows that are ok.
    """
    facts, arguments = document["environment"], document["arguments"]
    sections: dict[str, list[dict[str, Any]]] = {}
    for row in document["rows"]:
        sections.setdefault(row["section"], []).append(row)
    lines = [f"# gradwire on {facts['gpu']}", ""]
    lines += [f"Driver {facts['driver']}, CUDA {facts['cuda']}, torch {facts['torch']}, CuPy {facts['cupy']}, "]
    of = f"revision {facts['revision']}, sources {facts.get('sources')}"
    lines[-1] += f"gradwire {facts['gradwire']} ({of}), {facts['date']}. Made by `make gpu-report`."
    for what, error in facts["broken"].items():
        lines += ["", f"**{what} does not work here**: {error}"]
    for section, rows in sections.items():
        made = [row for row in rows if row["status"] == "ok"]
        lines += ["", f"## {section}: {len(made)} of {len(rows)} rows ok", ""]
        lines += TABLES[section](made, arguments) if section in TABLES and made else []
        rest = [row for row in rows if row["status"] != "ok" or not (brief or section in TABLES)]
        lines += ["", *listed(rest)] if section in TABLES and rest else listed(rest)
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
    return [f"- {row['name']}: {row['status']}, {row['seconds']:.0f} s. {row['reason']}".rstrip() for row in rows]


def kernels(rows: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[str]:
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


def step(rows: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[str]:
    """Beside each time its ratio to DDP's of the same model."""
    width = arguments["width"]
    text = f"8 layers of {width}² in float32, and a transformer of 24 layers of width {width // 4} in bfloat16 on 8 "
    text += "sequences: one rank over NCCL, so no network, compression alone."
    found = {row["name"]: row["result"] for row in rows}
    cells = []
    for name, result in found.items():
        ddp = found.get("transformer ddp" if name.startswith("transformer") else "ddp")
        ratio = f"{result['median_s'] / ddp['median_s']:.3f}" if ddp else ""
        cells.append([name, f"{1e3 * result['median_s']:.2f}", ratio, str(result["finite"])])
    return [text, "", *table(["arm", "ms", "times DDP", "finite"], cells)]


def compiled(rows: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[str]:
    results = [(row["name"], row["result"]) for row in rows]
    cells = [[n, f"sm_{r['architecture']}", f"{r['seconds']:.1f}", str(r["bytes"]), r["log"]] for n, r in results]
    return table(["file", "for", "seconds", "bytes", "NVRTC says"], cells)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", RULE + " --- |" * (len(heads) - 1)]
    return lines + ["| " + " | ".join(cells) + " |" for cells in rows]


TABLES = {"kernels": kernels, "step": step, "compile": compiled}
