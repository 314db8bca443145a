"""Public names and their parameters are those of `public_names.txt`; `golden/` has the bytes of the wires.

A change of the file is a change of the interface, and belongs under Upgrading in the changelog:
`python tests/project/test_public_names.py > tests/project/public_names.txt`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "gradwire",
    "gradwire.plugin",
    "gradwire.optim",
    "gradwire.trainers",
    "gradwire.hooks.backend",
    "gradwire.hooks.horovod",
)
LISTED = Path(__file__).with_name("public_names.txt")


def names() -> Iterator[str]:
    for module in map(importlib.import_module, MODULES):
        for name in sorted(module.__all__):
            found = getattr(module, name)
            own = callable(found) and getattr(found, "__module__", "").startswith("gradwire")
            yield f"{module.__name__}.{name}{parameters(found) if own else ''}"


def parameters(found: object) -> str:
    """Their names, in the order of a call, without types and defaults."""
    try:
        given = inspect.signature(found).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    return f"({', '.join(str(p.replace(annotation=p.empty, default=p.empty)) for p in given)})"


def test_public_names_are_those_that_are_listed() -> None:
    assert list(names()) == LISTED.read_text("utf-8").splitlines()


if __name__ == "__main__":
    print("\n".join(names()))
