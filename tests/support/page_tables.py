"""Tables of pages, of codecs and of a GPU's results. `python tests/support/page_tables.py` regenerates them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gradwire import CODECS, Codec, PowerSGD
from gradwire.benchmarks.gpu.page import checks, kernels
from gradwire.compress import SparseCodec
from gradwire.compress.formats.entries import index_layout
from gradwire.compress.formats.wire import Field, Part

DOCS = Path(__file__).resolve().parents[2] / "docs"
NUMEL = 1 << 20


def table(header: list[str], rows: list[list[str]], rule: str = "---") -> str:
    lines = [header, ["---"] + [rule] * (len(header) - 1), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def codec_table() -> str:
    """What each codec costs and does by default."""
    rows = []
    for codec in CODECS:
        bits = codec.bits_per_element(NUMEL)
        feedback = "not needed" if codec.lossless else "on" if codec.default_feedback else "off"
        rows.append([f"`{codec}`", f"{bits:.3g}", f"{32 / bits:.3g}", feedback, codec.source])
    return table(["codec", "bits per element", "times smaller than float32", "error feedback", "source"], rows)


def wire_table() -> str:
    """Every field of every record, once for each class of codecs and names of fields."""
    rows: list[list[str]] = []
    found: dict[tuple[str, ...], Codec] = {}
    for codec in CODECS:
        found.setdefault((type(codec).__name__, *(f.name for part in codec.parts(NUMEL) for f in part.fields)), codec)
    for codec in found.values():
        name = type(codec).__name__
        name = name if [f"`{name}`"] not in [row[:1] for row in rows] else str(codec)
        for part, larger in zip(codec.parts(NUMEL), codec.parts(2 * NUMEL), strict=True):
            start = [f"`{name}`", part.name, unit(codec, part)]
            for field, other in zip(part.fields, larger.fields, strict=True):
                kind = f"{np.dtype(field.dtype).name}[{count(codec, field, other)}]"
                first, second = (p.record.fields[field.name][1] for p in (part, larger))  # type: ignore[index]
                offset = str(first) if first == second else "then"
                rows.append([*start, offset, f"`{field.name}`", kind, field.meaning])
                start = ["", "", ""]
    return table(["codec", "part", "a record for each", "byte", "field", "type", "meaning"], rows)


def unit(codec: Codec, part: Part) -> str:
    """What a part has one record for."""
    if part.records == 1:
        return "gradient"
    if codec.block_size is None or part.records != math.ceil(NUMEL / codec.block_size):
        raise ValueError(f"{codec}: the page has no word for the {part.records} records of {part.name!r}")
    return "element" if codec.block_size == 1 else f"{codec.block_size} elements"


def count(codec: Codec, field: Field, larger: Field) -> str:
    """How many numbers a field has: a constant, or what it is of `k` and `n` where it grows with the gradient."""
    if field.count == larger.count:
        return str(field.count)
    lengths = (field.count, larger.count)
    if isinstance(codec, SparseCodec):
        ks = codec.k(NUMEL), codec.k(2 * NUMEL)
        layouts = index_layout(NUMEL, ks[0]), index_layout(2 * NUMEL, ks[1])
        if lengths == ks:
            return "k"
        if lengths == tuple(layout.upper_words for layout in layouts):
            return "⌈(k + ⌊(n - 1) / 2^l⌋) / 32⌉"
        if lengths == tuple(layout.low_words for layout in layouts):
            return "⌈k·l / 32⌉"
    if isinstance(codec, PowerSGD):
        return {"whole": "those", "left": "r·n of each", "right": "r·m of each"}[field.name]
    raise ValueError(f"{codec}: the page has no word for the length of field {field.name!r}")


def measured(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS.parent / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))
    return found


#: The rows of gpu_steps that newcomers see.
FEW = re.compile(r"DDP, float32|PyTorch's fp16 hook|PyTorch's PowerSGD|`(QSGD|OneBit|ChunkedTopK)\b.*(two_pass|gather)")


def gpu_kernels() -> str:
    return "\n".join(kernels(measured("nvidia-h100-80gb-hbm3"))) + "\n"


def gpu_checks() -> str:
    return "\n".join(checks(measured("nvidia-h100-80gb-hbm3")["rows"])) + "\n"


def gpu_steps() -> str:
    """Milliseconds of a step by the links' speed."""
    rows = [
        [one["arm"], *(f"{one['ms'][rate]:.0f}" for rate in ("1gbit", "10gbit", "none")), f"{one['peak_GB']:.2f}"]
        for one in measured("gpu-steps")["arms"]
    ]
    return table(["", "1 Gbit/s", "10 Gbit/s", "not limited", "peak memory, GB"], rows, "--:")


def gpu_steps_in_short() -> str:
    rows = [
        [one["arm"], *(f"{one['ms'][rate]:.0f}" for rate in ("1gbit", "10gbit"))]
        for one in measured("gpu-steps")["arms"]
        if FEW.match(one["arm"])
    ]
    return table(["ms a step", "1 Gbit/s", "10 Gbit/s"], rows, "--:")


def gpu_learn() -> str:
    """How far above float32 a model of 116 M parameters has ended."""
    dense, *others = measured("gpu-learn")["runs"]
    rows = [["float32", "1", f"{dense['loss_bits_per_byte']:.3f}", ""]]
    for one in others:
        off = one["loss_bits_per_byte"] / dense["loss_bits_per_byte"] - 1
        figures = f"{one['times_fewer_bytes']:.0f}", f"{one['loss_bits_per_byte']:.3f}", f"{100 * off:+.1f} %"
        rows.append([one["arm"], *figures])
    return table(["", "times fewer bytes", "bits per byte", "against float32"], rows, "--:")


#: By name: the page it is on, and what makes it.
TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "codecs": (DOCS / "choose.md", codec_table),
    "wire": (DOCS / "codecs.md", wire_table),
    "gpu-steps": (DOCS / "gpu.md", gpu_steps),
    "gpu-kernels": (DOCS / "gpu.md", gpu_kernels),
    "gpu-checks": (DOCS / "gpu.md", gpu_checks),
    "gpu-steps-in-short": (DOCS / "choose.md", gpu_steps_in_short),
    "gpu-steps-for-newcomers": (DOCS.parent / "README.md", gpu_steps_in_short),
    "gpu-learn": (DOCS / "choose.md", gpu_learn),
}


def with_table(name: str, text: str) -> str:
    """`text` with what stands between the markers of the table replaced by the table.

    Raises:
        ValueError: its markers are missing.
    """
    page, make = TABLES[name]
    body = make().replace("\\", r"\\")
    begin, end = rf"(<!-- {name}:begin[^\n]*-->\n)", f"(<!-- {name}:end -->)"
    text, found = re.subn(f"{begin}.*?{end}", rf"\g<1>{body}\g<2>", text, flags=re.DOTALL)
    if found != 1:
        raise ValueError(
            f"{page.name} needs <!-- {name}:begin --> and <!-- {name}:end --> once, has them {found} times"
        )
    return text


if __name__ == "__main__":
    for name, (page, _) in TABLES.items():
        page.write_text(with_table(name, page.read_text("utf-8")), "utf-8")
