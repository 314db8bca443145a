"""The README says what the code does: its tables are generated, its examples run, and its error messages exist."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gradwire.hooks import Statistics
from readme_tables import README, TABLES, with_tables

ROOT = README.parent
TEXT = README.read_text("utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
NUMBERED = pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))

#: Runs every example with a new DDP model, in a process that is the only rank.
RUNNER = """
import sys
import torch.distributed as dist
from torch import nn, ones
from torch.nn.parallel import DistributedDataParallel
from gradwire.compress.backends import use_backend

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.init_process_group = dist.destroy_process_group = lambda *args: None  # a complete script calls them itself
with use_backend("reference"):
    for path in sys.argv[1:]:
        model = DistributedDataParallel(nn.Linear(4, 3))
        names = {"model": model}
        with open(path, encoding="utf-8") as file:
            exec(compile(file.read(), path, "exec"), names)
        model(ones(2, 4)).sum().backward()
try:
    model = DistributedDataParallel(nn.Linear(4, 3))
    model.register_comm_hook(None, names["hook"])
    model.register_comm_hook(None, names["hook"])
except RuntimeError as error:
    print(error)
"""


def test_tables_are_what_the_codecs_say() -> None:
    assert with_tables(TEXT) == TEXT, "run `python tests/readme_tables.py`"


def test_a_wrong_table_is_found() -> None:
    wrong = TEXT.replace("| `OneBit(block", "| `TwoBit(block").replace("| `OneBit` |", "| `TwoBit` |")
    assert wrong != TEXT
    assert with_tables(wrong) == TEXT
    for name in TABLES:
        with pytest.raises(ValueError, match=f"{name}:begin.* 0 times"):
            with_tables(TEXT.replace(f"<!-- {name}:end -->", ""))


@NUMBERED
def test_names_that_examples_import_exist(snippet: str) -> None:
    for node in ast.walk(ast.parse(snippet)):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)


@NUMBERED
def test_arguments_that_examples_pass_exist(snippet: str) -> None:
    names: dict[str, object] = {}
    for node in ast.walk(ast.parse(snippet)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gradwire"):
            module = importlib.import_module(node.module or "")
            names.update({alias.name: getattr(module, alias.name) for alias in node.names})
    for node in ast.walk(ast.parse(snippet)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            function = names[node.func.id]
            assert callable(function)
            keywords = {str(keyword.arg): None for keyword in node.keywords}
            inspect.signature(function).bind(*node.args, **keywords)


def test_examples_run(tmp_path: Path) -> None:
    hook = "import torch.distributed as dist\ndef hook(state: object, bucket: dist.GradBucket): pass\n"
    paths = []
    for number, snippet in enumerate([*SNIPPETS, hook]):
        paths.append(tmp_path / f"example_{number}.py")
        paths[-1].write_text(snippet, "utf-8")
    command = [sys.executable, "-c", RUNNER, *map(str, paths)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "20 steps, " in done.stdout
    # The one message in the table that is PyTorch's.
    assert re.search(as_pattern(ERRORS[-1]), done.stdout)
    # All that may be said: that kernels are compiled.
    assert [line for line in done.stderr.splitlines() if not line.startswith("gradwire: compiling kernels")] == []


#: The messages in the troubleshooting table, PyTorch's last.
ERRORS = re.findall(r"^\| `(.*?)` \|", TEXT[TEXT.index("| message | remedy |") :], re.MULTILINE)


def as_pattern(error: str) -> str:
    return ".*".join(re.escape(part.strip()) for part in error.split("…"))


def messages() -> list[str]:
    """Every text in the library, with … for what is filled in."""
    found = []
    for folder in ("compress", "hooks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
    return found


@pytest.mark.parametrize("error", ERRORS[:-1])
def test_error_messages_exist(error: str) -> None:
    assert any(re.search(as_pattern(error), message, re.DOTALL) for message in messages())


def test_statistics_exist() -> None:
    (line,) = re.findall(r"^`state\.statistics\(\)` counts(.*?)\n\n", TEXT, re.DOTALL | re.MULTILINE)
    names = re.findall(r"`(\w+)`", line)
    assert len(names) > 3
    known = {field.name for field in dataclasses.fields(Statistics)}
    assert set(names) <= known


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).is_file(), target
