"""The pages say what the code does: tables are generated, every block of code runs or parses, error messages exist."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gradwire.benchmarks import cli
from gradwire.benchmarks.learning import demo
from gradwire.compress.backends import use_backend
from gradwire.hooks import Statistics
from gradwire.hooks.local_sgd.meeting.server import MeetingPoint, command
from page_tables import DOCS, TABLES, measured, with_table
from pages import BLOCKS, FOLDERS, PAGES, PROJECT, ROOT, assert_printed, blocks, expected, plain_environment
from ranks import TORCHS_OWN, Ranks
from torch import nn
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel
from trained import surroundings

SNIPPETS = [b for b in BLOCKS if b.language == "python" and not b.mark.startswith("run by")]
SNIPPETS_BY_PAGE = {page: [b for b in blocks(page) if b.language == "python" and not b.mark] for page in PAGES}
#: What the examples of a page print, on the first rank, where no block of text below them says so.
PRINTED = {
    "trainers.md": "train_runtime",
    "elastic.md": r"replica [01]: round 20 with \((0, 1|0,|1,)\), \d views",
}
#: How many blocks nobody runs, for want of a GPU.
NOT_RUN = 0
#: Commands of others, which are not installed where tests run.
UNCHECKED = {"git", "mpirun", "nsys"}
#: Scripts of the reader's.
SCRIPTS = {"train.py", "profile_steps.py"}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_what_codecs_and_results_say(name: str) -> None:
    text = TABLES[name][0].read_text("utf-8")
    assert with_table(name, text) == text, "run `python tests/support/page_tables.py`"
    wrong = text.replace(f"<!-- {name}:end", f"| one more |\n<!-- {name}:end")
    assert with_table(name, wrong) == text
    with pytest.raises(ValueError, match=f"{name}:begin.* 0 times"):
        with_table(name, text.replace(f"<!-- {name}:end -->", ""))


def test_the_readme_is_for_newcomers() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 200


# What is in Python.


def run_examples(rank: int, texts: dict[str, str], folder: str) -> str:
    """Run each by itself, with a DDP model by the name of `model`. Returns what they print."""
    printed = io.StringIO()
    there_already = mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(), use_backend("reference"), there_already:
        warnings.simplefilter("error")  # also what a user would be warned of
        for theirs in TORCHS_OWN:
            warnings.filterwarnings("ignore", message=theirs)
        with surroundings(rank, folder):
            for name, text in texts.items():
                model = DistributedDataParallel(nn.Linear(4, 3))
                names: dict[str, object] = {"__name__": "__main__", "model": model}
                exec(compile(text, name, "exec"), names)
                model(torch.ones(2, 4)).sum().backward()
                if hvd := names.get("hvd"):
                    hvd.shutdown()  # type: ignore[attr-defined]
                names.clear()
                gc.collect()
    return printed.getvalue()


@pytest.mark.parametrize("page", [page for page in PAGES if SNIPPETS_BY_PAGE[page]], ids=lambda page: page.name)
def test_examples_run_on_two_ranks(ranks: Ranks, page: Path, tmp_path: Path) -> None:
    with MeetingPoint(dead_after=2.0) as point:
        texts = {str(b): b.text.replace("localhost:29400", point.address) for b in SNIPPETS_BY_PAGE[page]}
        printed, _ = ranks(2).run(run_examples, texts, str(tmp_path))
    if page.name in PRINTED:
        assert re.search(PRINTED[page.name], printed), printed
    else:
        assert_printed(printed, expected(page))


def test_scripts_on_pages_need_nothing_else(tmp_path: Path) -> None:
    """Each that makes its own model runs in a process that has what torchrun gives one rank, and no more."""
    with MeetingPoint(dead_after=2.0) as point:
        scripts = {
            str(b): b.text.replace("localhost:29400", point.address)
            for b in SNIPPETS
            if not re.search(r"(?<!\.)\bmodel\b", b.text) or re.search(r"^model\b.* = ", b.text, re.MULTILINE)
        }
        assert len(scripts) > 15
        (tmp_path / "all.py").write_text(ALONE.format(scripts=scripts), "utf-8")
        given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        done = subprocess.run(
            [sys.executable, "all.py"],
            cwd=tmp_path,
            env=plain_environment() | given,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gradwire.recommend" not in done.stderr


ALONE = """
import os
import socket
import torch.distributed as dist
from gradwire.compress.backends import use_backend

for name, text in {scripts!r}.items():
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    print(name, flush=True)
    with use_backend("reference"):
        names = {{"__name__": "__main__"}}
        exec(compile(text, name, "exec"), names)
    if hvd := names.get("hvd"):
        hvd.shutdown()
    names.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
"""


def test_blocks_that_are_not_run_here_say_who_runs_them() -> None:
    marks = [(block, block.mark) for block in BLOCKS if block.mark]
    for block, mark in marks:
        if test := re.fullmatch(r"run by (tests/\w+/test_\w+\.py)", mark):
            assert block.page.name in (ROOT / test[1]).read_text("utf-8"), f"{test[1]} knows nothing of {block.page}"
        else:
            assert re.fullmatch(r"not run: .*\bGPUs?\b.*", mark), f"{block}: {mark}"
    assert sum(mark.startswith("not run") for _, mark in marks) == NOT_RUN
    assert {block.language for block in BLOCKS} <= {"python", "sh", "diff", "text"}
    for page in PAGES:  # none escapes the pattern
        fences = re.findall(r"^\s*```", page.read_text("utf-8"), re.MULTILINE)
        assert len(fences) == 2 * len(blocks(page)), page


# What is for a shell.


def inline_commands() -> list[tuple[str, str]]:
    """Commands in the text that name all of their arguments."""
    found = []
    for page in PAGES:
        text = re.sub(r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        spans = re.findall(r"`((?:make|gradwire-bench|gradwire-meet|pip install|torchrun) [^`]+)`", text)
        found += [(page.name, " ".join(span.split())) for span in spans]
    return [(page, line) for page, line in found if "…" not in line]


@pytest.mark.parametrize("where", PAGES, ids=lambda page: page.name)
def test_commands_exist_and_take_these_options(where: Path) -> None:
    lines = [line for block in blocks(where) if block.language == "sh" and not block.mark for line in block.lines]
    lines += [line for page, line in inline_commands() if page == where.name]
    for line in lines:
        for words in commands(line):
            check_command(words)


def commands(line: str) -> list[list[str]]:
    """The words of each, between `&&`, without comments."""
    found: list[list[str]] = [[]]
    for word in shlex.split(line, comments=True):
        if word == "&&":
            found.append([])
        else:
            found[-1].append(word)
    return [words for words in found if words]


def check_command(words: list[str]) -> None:
    name, arguments = Path(words[0]).name, words[1:]
    if name == "gradwire-bench":
        assert arguments[0] in cli.COMMANDS, words
        if arguments[1:] != ["--help"]:
            parser = argparse.ArgumentParser()
            cli.module(arguments[0]).add_arguments(parser)
            parse(parser.parse_args, arguments[1:])
        if "--" in arguments:
            check_command(arguments[arguments.index("--") + 1 :])
    elif name == "make":
        makefile = (ROOT / "Makefile").read_text("utf-8")
        for setting in (word for word in arguments if "=" in word):
            assert re.search(rf"^{setting.split('=')[0]} \?=", makefile, re.MULTILINE), setting
        done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    elif name == "gradwire-meet":
        parse(command().parse_args, arguments)
    elif name == "torchrun":
        options = parse(get_args_parser().parse_args, arguments)
        if options.module and options.training_script == cli.__name__:
            check_command(["gradwire-bench", *options.training_script_args])
        elif options.module:
            assert options.training_script == demo.__name__
            parse(demo.parse, options.training_script_args)
        else:
            check_script(options.training_script)
    elif name == "pip":
        extras = PROJECT["project"]["optional-dependencies"]
        parser = argparse.ArgumentParser()
        parser.add_argument("install", choices=["install"])
        forms = ["", *(f"[{extra}]" for extra in extras)]
        parser.add_argument(
            "what", choices=["torch", *(f"{what}{form}" for what in (".", "gradwire") for form in forms)]
        )
        parser.add_argument("--index-url")
        parser.add_argument("--extra-index-url")
        parse(parser.parse_args, arguments)
    elif name == "python":
        if arguments[0] == "-m":
            assert importlib.util.find_spec(arguments[1]), words
        else:
            check_script(arguments[0])
    elif name == "export":
        assert all(re.fullmatch(r"(PIP|GLOO|NCCL|GRADWIRE)_[A-Z_]+=\S+", setting) for setting in arguments), words
    elif name == "ruff":
        assert arguments[0] in ("check", "format"), words
        assert shutil.which("ruff", path=f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}")
    else:
        assert name in UNCHECKED, words


def check_script(name: str) -> None:
    assert name in SCRIPTS or (ROOT / name).is_file(), name


def parse(parser: Callable[[list[str]], argparse.Namespace], arguments: list[str]) -> argparse.Namespace:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser(arguments)
    except SystemExit:
        raise AssertionError(f"{arguments}: {said.getvalue()}") from None


# What is said in words.

#: The messages in the troubleshooting table, PyTorch's last.
ERRORS = re.findall(r"^\| `(.*?)` \|", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)


def as_pattern(error: str) -> str:
    return ".*".join(re.escape(part.strip()) for part in error.split("…"))


def messages() -> list[str]:
    """Every text in the library, with … for what is filled in."""
    found = []
    for folder in set(FOLDERS) - {"benchmarks"}:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
    return found


def test_error_messages_exist() -> None:
    texts = messages()
    for error in ERRORS[:-1]:
        assert any(re.search(as_pattern(error), text, re.DOTALL) for text in texts), error


def register_twice(rank: int) -> str:
    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise NotImplementedError

    model = DistributedDataParallel(nn.Linear(4, 3))
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    model.register_comm_hook(None, hook)
    try:
        model.register_comm_hook(None, hook)
    except RuntimeError as error:
        return str(error)
    return ""


def test_the_one_message_of_pytorch_s(ranks: Ranks) -> None:
    assert re.search(as_pattern(ERRORS[-1]), ranks(2).run(register_twice)[0])


def test_statistics_exist() -> None:
    text = (DOCS / "ddp.md").read_text("utf-8")
    (line,) = re.findall(r"^`state\.statistics\(\)` counts(.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    names = re.findall(r"`(\w+)`", line)
    assert len(names) > 3
    known = {field.name for field in dataclasses.fields(Statistics)}
    assert set(names) <= known


def test_what_is_to_be_changed_is_where_contributing_says() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## Where would I change")[2].partition("\n## ")[0]
    found = re.findall(r"`([\w/]+/(?:\w+\.py)?)`(?:, `(\w+)`)?", text)
    assert len(found) > 10
    for path, name in found:
        place = ROOT / path
        assert place.exists(), path
        assert (
            not name or place.is_dir() or re.search(rf"^\s*(?:def |class )?{name}\b", place.read_text("utf-8"), re.M)
        ), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """For readers of the repository; `test_site.py` follows those of the site, anchors too."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        assert (page.parent / target).is_file(), target


def test_pages_and_results_agree_on_versions_and_gpus() -> None:
    texts = {page.name: " ".join(page.read_text("utf-8").split()) for page in PAGES}
    install, readme, gpu = texts["install.md"], texts["README.md"], texts["gpu.md"]
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert pinned
    assert f"`make test` takes {pinned[1]}. " in install
    tried = re.search(r"tests have also been run with ([\d., and]+),", install)
    assert tried
    makefile = (ROOT / "Makefile").read_text("utf-8")
    offered = {version for text in (makefile, *texts.values()) for version in re.findall(r"TORCH=(\d[\d.]*\d)", text)}
    assert offered
    assert offered <= set(re.findall(r"[\d.]+\d", tried[1]))
    (lowest,) = (re.fullmatch(r"torch>=(.*)", one) for one in PROJECT["project"]["dependencies"] if "torch" in one)
    assert lowest
    needs = f"Python ≥ {PROJECT['project']['requires-python'].removeprefix('>=')}, PyTorch ≥ {lowest[1]}"
    assert needs in install
    assert needs in readme

    report = measured("nvidia-h100-80gb-hbm3")
    facts, rows = report["environment"], report["rows"]
    assert f"torch {facts['torch']} with CUDA {facts['cuda']}, NVRTC {facts['nvrtc']}" in gpu
    assert f"revision {facts['revision']}, on {facts['date'][:10]}" in gpu
    for section, holds in {"ranks": "on two and four ranks", "four-ranks": "on two and four ranks"}.items():
        assert all(row["status"] == "ok" for row in rows if row["section"] == section)
        assert holds in readme
    encode = [
        row["result"]["ratio_to_add"]["encode_feedback"]
        for row in rows
        if row["section"] == "kernels" and row["status"] == "ok"
    ]
    low, high = min(encode), sorted(encode)[3]  # OneBit, QSGD, TernGrad and Ternary come first
    assert f"encode in {low:.2f} to {high:.2f} times `torch.add`, others in up to {max(encode):.1f}" in readme
    step = {one["arm"]: one["ms"] for one in measured("gpu-steps")["arms"]}
    times = (
        step["PyTorch's fp16 hook"][rate] / step['`ChunkedTopK(k=64)`, `"gather"`'][rate] for rate in ("10gbit", "none")
    )
    assert "`ChunkedTopK` is {:.1f} times as fast as the fp16 hook at 10 Gbit/s and {:.1f} times".format(*times) in gpu
    for name, text in texts.items():
        assert not re.search(r"no figures (yet|for GPUs)|never run on a GPU|four ranks were not tried", text, re.I), (
            name
        )
