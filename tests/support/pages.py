"""The pages, README.md, CONTRIBUTING.md and docs/*.md, and the code on them."""

from __future__ import annotations

import itertools
import os
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
#: The package's, at the top of the repository.
FOLDERS = sorted({name.split(".")[1] for name in PROJECT["tool"]["setuptools"]["packages"] if "." in name})

#: A block, and the comment right before it that says who runs it, or why nobody does:
#:
#:     <!-- run by tests/core/test_profiling.py -->
#:     <!-- not run: needs a GPU -->
BLOCK = re.compile(
    r"(?:^[ ]*<!-- (?P<mark>(?:run by|not run:) [^\n]*?) -->\n)?^(?P<indent>[ ]*)```(?P<language>\w*)[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        mark: what the comment before it says; "" without one.
        number: its place among the page's blocks.
    """

    page: Path
    number: int
    language: str
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page.name}-{self.number}"

    @property
    def lines(self) -> list[str]:
        """A shell block's commands."""
        return [line for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]


def blocks(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text("utf-8"))
    return [
        Block(page, number, match["language"], match["text"], match["mark"] or "") for number, match in enumerate(found)
    ]


def expected(page: Path) -> str:
    """What the examples of a page print: the blocks of text right below them, without what is for stderr."""
    pairs = itertools.pairwise(blocks(page))
    lines = [b.text.splitlines(keepends=True) for a, b in pairs if (a.language, b.language) == ("python", "text")]
    return "".join(line for line in itertools.chain(*lines) if not line.startswith("gradwire: "))


def assert_printed(printed: str, text: str) -> None:
    """Check what was printed against a block of text: numbers may differ, and … stands for anything."""
    pattern = "".join(
        {"…": ".*", "#": r"[\d,.e-]*\d"}.get(part, re.escape(part))
        for part in re.split("(…|#)", re.sub(r"\d(?:[\d,.]*\d)?", "#", text))
    )
    assert re.fullmatch(pattern.rstrip("\\\n") + r"\s*", printed, re.DOTALL), f"{printed}\nis not\n{text}"


def plain_environment() -> dict[str, str]:
    """What a newcomer's shell has, and where Python finds this package."""
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "GRADWIRE_CACHE") if name in os.environ}
    path = os.pathsep.join(path for path in sys.path if Path(path, "gradwire").is_dir())
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


BLOCKS = [block for page in PAGES for block in blocks(page)]
