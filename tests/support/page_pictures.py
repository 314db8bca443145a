"""The pictures of docs/architecture.md, from the library's imports. `python tests/support/page_pictures.py` redraws
them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from gradwire import Codec, OneBit, TopK

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("project", "core")]

from test_architecture import height, imports, library

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROOMS, WAY = DOCS / "architecture-rooms.svg", DOCS / "architecture-way.svg"

#: The buckets whose way is drawn: codec and exchange.
BUCKETS: dict[str, tuple[Codec, str]] = {
    "OneBit by two_pass": (OneBit(), "two_pass"),
    "TopK by split": (TopK(0.05), "split"),
}

#: The benchmarks import everything, and nothing imports them.
LEFT_OUT = ("benchmarks",)

STYLE = """<style>
    text { font-family: "Helvetica Neue", Helvetica, Arial, "DejaVu Sans", sans-serif; font-size: 14px; fill: #1f2933 }
    .small { font-size: 12px; fill: #52606d }
    .code { font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px }
    .middle { text-anchor: middle }
    .line { stroke: #7b8794; stroke-width: 1.3; fill: none }
    .box { fill: #ffffff; stroke: #52606d; stroke-width: 1.6 }
    .page { fill: #fcfdff; stroke: #cbd2d9 }
    .band { fill: #e4e7eb }
    .on { fill: #2b6cb0 }
  </style>
  <defs>
    <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">
      <path d="M0 0 8 4 0 8z" fill="#7b8794"/>
    </marker>
  </defs>"""

Graph = dict[str, set[str]]


def room(module: str, modules: Mapping[str, str]) -> str:
    """The folder of a module, two levels deep at most; the contract of codecs, with former names, counts as one,
    `compress/codec.py`, and the timeouts, which nearly all rooms of hooks/ import, as another."""
    parts = module.split(".")
    if module in ("", "meet", "plugin"):
        return "gradwire"
    if module in ("compress.codec", "compress.sparse_codec", "compress.deprecated"):
        return "compress/codec.py"
    if module == "hooks.timeouts":
        return "hooks/timeouts.py"
    inside = ".".join(parts[:2])
    deep = parts[0] in ("compress", "hooks") and any(name.startswith(f"{inside}.") for name in modules)
    return "/".join(parts[:2]) if deep else parts[0]


def imported(modules: Mapping[str, str]) -> Graph:
    """The modules that each module imports; csrc by what reads its files."""
    found: Graph = {}
    for module, source in modules.items():
        found[module] = {target for _, target, relative in imports(module, source, modules) if relative} - {module}
        if module.startswith("compress.backends") and '"csrc"' in source:
            found[module].add("csrc")
    return found


def reduced(graph: Graph) -> Graph:
    """The same order with the fewest edges: none that a longer path has.

    Raises:
        ValueError: the graph has a circle.
    """
    below: Graph = {}

    def reach(name: str, path: tuple[str, ...]) -> set[str]:
        if name in path:
            raise ValueError(f"{' → '.join([*path, name])}: imports run in a circle")
        if name not in below:
            below[name] = {far for target in graph[name] for far in {target} | reach(target, (*path, name))}
        return below[name]

    for name in graph:
        reach(name, ())
    return {name: {one for one in to if not any(one in below[other] for other in to)} for name, to in graph.items()}


def depths(graph: Graph) -> dict[str, int]:
    """The length of the longest path that leads down from each."""
    found: dict[str, int] = {}

    def depth(name: str) -> int:
        if name not in found:
            found[name] = max((depth(target) + 1 for target in graph[name]), default=0)
        return found[name]

    return {name: depth(name) for name in graph}


def rooms(modules: Mapping[str, str]) -> Graph:
    """The rooms, and those that each one imports, without what follows."""
    shown = {name: source for name, source in modules.items() if not name.startswith(LEFT_OUT)}
    graph: Graph = {room(name, shown): set() for name in shown}
    for module, targets in imported(shown).items():
        graph[room(module, shown)] |= {room(target, shown) for target in targets} - {room(module, shown)}
    return reduced(graph)


def picture(width: int, height: int, title: str, description: str, body: Iterable[str]) -> str:
    return (
        "\n  ".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                f'height="{height}" role="img" aria-labelledby="title desc">',
                f'<title id="title">{escape(title)}</title>',
                f'<desc id="desc">{escape(description)}</desc>',
                STYLE,
                f'<rect class="page" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="12"/>',
                *body,
            ]
        )
        + "\n</svg>\n"
    )


def room_width(name: str) -> int:
    """Of a room's box; of an arrow's place between boxes, whose name has spaces."""
    return 14 if " " in name else 8 * len(name) + 16


def rooms_picture(modules: Mapping[str, str]) -> str:
    """Boxes for rooms, from the public names at the top down to the kernels; an arrow for each import."""
    graph = rooms(modules)
    levels = depths(graph)
    rows = [sorted(name for name in graph if levels[name] == i) for i in reversed(range(max(levels.values()) + 1))]
    ways: dict[tuple[str, str], list[str]] = {}
    for name, targets in sorted(graph.items()):
        for target in sorted(targets):  # an arrow has a place of its own in the rows between, so no box lies on it
            between = range(levels[name] - 1, levels[target], -1)
            ways[name, target] = [name, *(f"{name} {target} {level}" for level in between), target]
            for level, place in zip(between, ways[name, target][1:], strict=False):
                rows[-1 - level].append(place)
    high, width = 66, 1240
    places: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        above: dict[str, list[float]] = {name: [] for name in row}
        for way in ways.values():
            for upper, lower in pairwise(way):
                if lower in above:
                    above[lower].append(places[upper][0])
        row.sort(key=lambda name: sum(above[name]) / len(above[name]) if above[name] else width / 2)
        spare = (width - sum(map(room_width, row))) / (len(row) + 1)
        left = spare
        for name in row:
            places[name] = (left + room_width(name) / 2, 44 + high * number)
            left += room_width(name) + spare
    lines, boxes = [], []
    for name in sorted(graph):
        (x, y), wide = places[name], room_width(name)
        boxes.append(f'<rect class="box" x="{x - wide / 2:.0f}" y="{y - 16}" width="{wide}" height="32" rx="6"/>')
        boxes.append(f'<text class="code middle" x="{x:.0f}" y="{y + 5}">{escape(name)}</text>')
    for (_, target), way in ways.items():
        path = f"M{places[way[0]][0]:.0f} {places[way[0]][1] + 16}"
        for upper, lower in pairwise(way):  # beside boxes straight down, between rows in a curve
            (x, y), (to_x, to_y) = places[upper], places[lower]
            begin, end = y + 16, to_y - (18 if lower == target else 16)
            bend = (end - begin) / 2
            path += f" L{x:.0f} {begin} C{x:.0f} {begin + bend:.0f} {to_x:.0f} {end - bend:.0f} {to_x:.0f} {end}"
        lines.append(f'<path class="line" d="{path}" marker-end="url(#tip)"/>')
    text = "Folders of gradwire; an arrow leads from one that imports to what it imports. " + "; ".join(
        f"{name} → {', '.join(sorted(targets))}" for name, targets in sorted(graph.items()) if targets
    )
    return picture(width, 44 + high * len(rows) - 16, "The rooms of gradwire", text, lines + boxes)


def way_picture(ways: Mapping[str, Iterable[str]], modules: Mapping[str, str]) -> str:
    """Files that buckets lead through, by room from the hook down to the kernels.

    Args:
        ways: by the name of a bucket, the files entered ("hooks/ddp/hook.py").
    """
    files = {file for way in ways.values() for file in way}
    names = {file: file.removesuffix(".py").replace("/", ".") for file in files}
    every = imported(modules)
    graph = reduced({file: {other for other in files if names[other] in every[names[file]]} for file in files})
    deep = depths(graph)
    order = sorted(files, key=lambda file: (-height(names[file]), -deep[file], file))
    body, y, before = [], 50.0, ""
    for number, title in enumerate(ways):
        body.append(f'<text class="small middle" x="{480 + 150 * number}" y="34">{escape(title)}</text>')
    for file in order:
        here = room(names[file], modules)
        y, before = y + 14 * (here != before), here
        body.append(f'<rect class="band" x="20" y="{y - 15:.0f}" width="690" height="22" rx="4"/>')
        body.append(f'<text class="code" x="30" y="{y:.0f}">{escape(file)}</text>')
        for number, way in enumerate(ways.values()):
            if file in way:
                body.append(f'<circle class="on" cx="{480 + 150 * number}" cy="{y - 4:.0f}" r="6"/>')
        y += 26
    counted = "; ".join(f"{title}: {', '.join(f for f in order if f in way)}" for title, way in ways.items())
    return picture(730, int(y + 4), "A bucket's way through the files of gradwire", counted, body)


def measured(pool: Any) -> dict[str, set[str]]:
    """The files that each of `BUCKETS` enters on the ranks of a `ranks.Pool`."""
    from test_call_depth import files_entered

    entered = {name: pool.run(files_entered, *bucket) for name, bucket in BUCKETS.items()}
    return {name: {file.lstrip("/") for files in ranks for file in files} for name, ranks in entered.items()}


def main() -> None:
    from ranks import Pool

    ROOMS.write_text(rooms_picture(library()), "utf-8")
    with Pool(2) as pool:
        WAY.write_text(way_picture(measured(pool), library()), "utf-8")


if __name__ == "__main__":
    main()
