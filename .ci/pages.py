"""A hook of MkDocs: where mkdocstrings finds the package.

The repository is the package's folder, and has much besides, such as .venv and links to itself, which mkdocstrings
would walk through without end. Here it gets a folder with links to what the package consists of.
"""

import shutil
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
PARTS = {"__init__.py", *(name.split(".")[1] for name in PACKAGES if "." in name)}

_folders: list[Path] = []


@event_priority(100)  # before mkdocstrings reads it
def on_config(config: Any) -> None:
    if "mkdocstrings" not in config.plugins:
        return
    folder = Path(tempfile.mkdtemp(prefix="gradwire-pages-"))
    _folders.append(folder)
    (folder / "gradwire").mkdir()
    for part in PARTS:
        (folder / "gradwire" / part).symlink_to(ROOT / part)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(folder)]


def on_shutdown() -> None:
    while _folders:
        shutil.rmtree(_folders.pop())
