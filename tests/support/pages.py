"""The pages, README.md, CONTRIBUTING.md and docs/*.md, and the code on them."""

from __future__ import annotations

import re
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


BLOCKS = [block for page in PAGES for block in blocks(page)]
