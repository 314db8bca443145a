"""`make gpu-report` from end to end, on a GPU that is not there, and whatever may go wrong in one of its rows."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_on_cpu import KERNEL
from emulated import CSRC, EmulatedDevice, emulated_gpu
from gradwire.benchmarks import cli
from gradwire.benchmarks.common import report
from gradwire.benchmarks.gpu import gpu, page, paths, sections
from gradwire.benchmarks.gpu.processes import Ended, Processes
from gradwire.compress.backends import use_backend
from gradwire.compress.backends.cuda.runtime import compiler
from preloaded import PLAIN_PYTHON
from strategies import GPU

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests" / "support" / "fake_gpu"
REPORTS = sorted((ROOT / "benchmarks" / "results").glob("nvidia-*.json"))
MINIATURE = ["--numel", "20001", "--ranks", "2", "--repeats", "2", "--model", "gpt2-tiny"]


def rehearse(output: Path, *given: str, program: tuple[str, ...] = (str(FAKE / "forked.py"),)) -> dict[str, Any]:
    """The report, made on the GPU that is not there; everything in it is fine."""
    done = emulated([PLAIN_PYTHON, *program, "gpu", *MINIATURE, "--output", str(output), *given])
    document: dict[str, Any] = json.loads(output.with_suffix(".json").read_text("utf-8"))
    failed = [row for row in document["rows"] if row["status"] == "failed"]
    assert done.returncode == 0, done.stdout + done.stderr + json.dumps(failed, indent=1)
    assert not failed
    check_that_nobody_takes_it_for_a_gpu(
        output.with_suffix(".json").read_text("utf-8"), output.with_suffix(".md").read_text("utf-8")
    )
    return document


def emulated(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A command that finds the GPU that is not there."""
    path = [str(FAKE), *(entry for entry in sys.path if Path(entry, "gradwire").exists())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{FAKE / 'bin'}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        command, env=environment, capture_output=True, encoding="utf-8", cwd=ROOT, timeout=1500, check=False
    )


@pytest.mark.slow
def test_steps_of_ranks_on_a_gpu(tmp_path: Path) -> None:
    """One that fails says so in its row, and the others have theirs."""
    line = f"step --device cuda --limit bucket --model gpt2-tiny --rates none --rounds 2 --steps 1 --warmup 3 \
        --arms fp32 bf16-hook factors powersgd onebit auto --json {tmp_path / 'steps.json'}"
    done = emulated([PLAIN_PYTHON, "-m", "gradwire.benchmarks.cli", *line.split()])
    assert done.returncode == 1, done.stdout + done.stderr
    (network,) = json.loads((tmp_path / "steps.json").read_text("utf-8"))["networks"]
    rows = {row["arm"]: row for row in network["arms"]}
    assert "head" in rows.pop("factors")["failed"]
    assert all(len(row["times_s"]) == 2 for row in rows.values())
    assert all(row["equal"] and row["sent_bytes"] > 0 for name, row in rows.items() if name != "none")


def check_that_nobody_takes_it_for_a_gpu(data: str, text: str) -> None:
    for line in (data + text).splitlines():
        assert not line or "emulated" in line or re.fullmatch(r"\|( --- \|)+", line), line


def test_every_section_makes_its_rows_in_miniature(tmp_path: Path) -> None:
    made = ("compile", "bytes", "kernels", "tests", "sanitizer")
    only = r"^Cast|entries\.cu|memcheck Cast|momentum$"
    document = rehearse(tmp_path / "report", "--sections", *made, "--only", only)
    rows = {row["section"]: row for row in document["rows"]}
    assert rows.keys() == set(made)
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert rows["compile"]["result"]["bytes"] > 1000
    assert rows["bytes"]["result"]["compared"] == 3 * 3 * 2 * 4  # codecs, formats, lengths, things
    kernels = rows["kernels"]["result"]
    assert kernels["bytes_per_element"]["encode_feedback"] == 12 + kernels["wire_bytes_per_element"]
    assert kernels["ratio_to_add"]["add"] == kernels["share_of_copy"]["copy"] == 1
    assert "passed" in rows["tests"]["reason"]
    assert "emulated: nothing was checked" in rows["sanitizer"]["reason"]


@pytest.mark.slow
def test_the_whole_report(tmp_path: Path) -> None:
    """Every row, in a process of its own, in two calls of which the second goes on from the first."""
    module = ("-m", "gradwire.benchmarks.cli")
    first, both = tmp_path / "first", tmp_path / "both"
    given = ["--jobs", "2", "--seconds", "1400", "--sections"]
    rehearse(first, *given, "compile", "first", program=module)
    document = rehearse(both, *given, "second", "--join", f"{first}.json", program=module)
    every = [task for section in gpu.SECTIONS for task in sections.tasks(section, {})]
    made = {(row["section"], row["name"]) for row in document["rows"]}
    assert {(task.section, task.name) for task in every if not task.by_test} <= made
    assert {row["section"] for row in document["rows"]} == set(gpu.SECTIONS)
    by_test = [row for row in document["rows"] if row["section"] in {task.section for task in every if task.by_test}]
    assert len(by_test) > 100
    skipped = {row["reason"].partition(":")[0] for row in document["rows"] if row["status"] == "skipped"}
    assert skipped <= {"Skipped", "not on PATH"}


def reporter(broken: dict[str, str] | None = None, *given: str) -> gpu.Report:
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    made = gpu.Report(parser.parse_args(given))
    made.facts.update(gpu="emulated GPU", broken=broken or {})
    return made


@pytest.mark.parametrize("file", REPORTS, ids=lambda file: file.stem)
def test_a_report_is_one_page(file: Path) -> None:
    """With each reason once, and no row that is not ok left out."""
    document = json.loads(file.read_text("utf-8"))
    shown = page.markdown(document).splitlines()
    assert len(shown) < 60
    assert page.EMULATED not in file.read_text("utf-8")
    for row in document["rows"]:
        assert row["status"] == "ok" or any(row["name"] in line and row["reason"] in line for line in shown)


def test_steps_are_tables_of_the_page_and_of_rows_what_failed() -> None:
    rows: list[dict[str, Any]] = [{"arm": name, "times_s": [[1.0]], "sent_bytes": None, "counted": {}, "equal": True,
                                   "peak_bytes": 0, "sends": []} for name in ("none", "fp32")]  # fmt: skip
    facts = report.environment() | {"gpu": "emulated GPU", "gpus": 1, "driver": "", "nccl": "", "threads": 1}
    network = {"parameters": 1, "buckets": 1, "links": "links", "rate": "none", "proof": None, "world": 1, "arms": rows}
    given = {"density": 0.01, "batch": 1, "rounds": 1, "steps": 1}
    result = {"arguments": given, "environment": facts, "networks": [network]}
    task = next(sections.tasks("step", {}))
    assert gpu.outcome(task, Ended(0, "", 1), result) == {"status": "ok", "reason": ""}
    rows.append({"arm": "onebit", "failed": "OutOfMemoryError: none is left"})
    ended = Ended(1, "none, 1 ranks: onebit is left out: OutOfMemoryError: none is left\nOne DDP step", 1)
    row = gpu.outcome(task, ended, result)
    assert (row["status"], row["reason"]) == ("failed", ended.output.splitlines()[0])
    shown = page.steps([{"result": result}, {"result": None}, {"result": {"median_s": 1.0}}])
    assert [line for line in shown if line.startswith("| emulated: PyTorch DDP | 1000.0 |")]
    assert [line for line in shown if "OutOfMemoryError" in line]


def test_what_is_broken_is_skipped_with_the_reason() -> None:
    every = [task for section in gpu.SECTIONS for task in sections.tasks(section, {})]
    assert not [task for task in every if task.why_not and task.section != "sanitizer"]
    launching = {t.name: t for s in gpu.SECTIONS for t in sections.tasks(s, {"launching": "no CuPy"})}
    assert {name for name, task in launching.items() if not task.why_not} == {f.name for f in CSRC.glob("*.cu")}
    assert all("no CuPy" in task.why_not for task in launching.values() if task.why_not)
    for missing, wanted in (("pytest", set()), ("hypothesis", set()), ("numba", {"cuda_hooks"})):
        tests = [task for s in ("tests", "hooks") for task in sections.tasks(s, {missing: "is broken"})]
        skipped = {task.name for task in tests if "is broken" in task.why_not}
        assert skipped == (wanted or {task.name for task in tests})
        [row] = reporter({missing: "is broken"}).made(next(task for task in tests if task.why_not))
        assert (row["status"], row["seconds"]) == ("skipped", 0.0)
        assert "is broken" in row["reason"]


def test_tests_are_rows_as_far_as_they_came(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path])}
    command = (sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-c", "/dev/null", str(tmp_path))
    rows = reporter().made(gpu.Task("hooks", "some", command=command, environment=path, by_test=True))
    assert {row["name"]: (row["status"], row["reason"]) for row in rows[:-1]} == {
        "test_says": ("ok", "1 of 2"),
        "test_fails": ("failed", "assert 1 == 2"),
        "test_skips": ("skipped", "Skipped: no"),
    }
    assert (rows[-1]["name"], rows[-1]["status"]) == ("some", "failed")


#: Of every outcome one.
TESTS = """
import os
import pytest

def test_says(record_property):
    record_property("says", "1 of 2")

def test_fails():
    assert 1 == 2

def test_skips():
    pytest.skip("no")

def test_ends_the_process():
    os._exit(7)
"""


def test_what_was_precompiled_is_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"has no \*\.cubin: make them by --precompile"):
        gpu.use_cubins(tmp_path)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "low_precision.cu").touch()
    compiled = []

    def compile_file(file: str, architecture: int) -> compiler.Compiled:
        compiled.append(file)
        return compiler.Compiled(b"1", "", "")

    monkeypatch.setattr(compiler, "compile_file", compile_file)
    assert cli.main(["gpu", "--precompile", "90", "--cubins", str(tmp_path / "made")]) == 0
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path / "elsewhere"))
    assert gpu.use_cubins(tmp_path / "made") == 1
    assert compiler.cached_cubin("low_precision.cu", 90).read_bytes() == b"1"
    assert compiled == ["low_precision.cu"]


def test_after_its_seconds_rows_are_skipped_and_the_report_says_so() -> None:
    made = reporter(None, "--seconds", "0")
    [row] = made.made(next(sections.tasks("kernels", {})))
    assert row["status"] == "skipped"
    assert "its share of the 0 seconds of --seconds was used up" in row["reason"]
    assert not gpu.passed([row])


@pytest.mark.parametrize(
    ("section", "ended", "result", "status", "reason"),
    [
        ("kernels", Ended(0, "noise\n", 1), {}, "failed", "noise"),
        ("kernels", Ended(0, "", 1), {"a": 1}, "ok", ""),
        ("kernels", Ended(1, "Traceback\nRuntimeError: no", 1), None, "failed", r"RuntimeError: no \(exit status 1\)"),
        ("step", Ended(-11, "", 1), None, "failed", r"printed nothing \(exit status -11\)"),
        ("step", Ended(None, "so far", 7), None, "failed", "not finished after 7 s"),
        ("tests", Ended(0, "=== 3 passed in 1s ===", 1), None, "ok", "^3 passed in 1s$"),
        ("tests", Ended(1, "1 failed, 3 passed", 1), None, "failed", "1 failed, 3 passed"),
        ("tests", Ended(5, "4 deselected", 1), None, "skipped", "4 deselected"),
        ("tests", Ended(-6, "CUDA error", 1), None, "failed", "CUDA error"),
        ("sanitizer", Ended(0, "===== ERROR SUMMARY: 0 errors\n", 1), {"calls": 1}, "ok", "^ERROR SUMMARY: 0 errors$"),
        ("sanitizer", Ended(9, "== ERROR SUMMARY: 2 errors\n", 1), {"calls": 1}, "failed", "2 errors"),
        ("sanitizer", Ended(1, "Device not supported\n", 1), None, "failed", "Device not supported"),
    ],
)  # fmt: skip
def test_whatever_becomes_of_a_process_is_a_row(
    section: str, ended: Ended, result: Any, status: str, reason: str
) -> None:
    row = gpu.outcome(gpu.Task(section, "x"), ended, result)
    assert row["status"] == status
    assert re.search(reason, row["reason"])
    assert ("output" in row) == (status == "failed")


def test_a_process_that_does_not_end_is_stopped_with_what_it_has_started(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    command = ["/bin/sh", "-c", f"sleep 60 & echo $! > {pids}; echo begun; wait"]
    ended = Processes().run(command, tmp_path, os.environ, seconds=0.5)
    assert ended.status is None
    assert ended.output == "begun\n"
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            os.kill(int(pids.read_text("utf-8")), 0)
            state = Path("/proc", pids.read_text("utf-8").strip(), "stat").read_text("utf-8").split()[2]
            if state == "Z":
                break
        except (ProcessLookupError, FileNotFoundError):
            break
        time.sleep(0.02)
    else:
        pytest.fail("its child still runs")
    assert Processes().run(["/bin/sh", "-c", "kill -SEGV $$"], tmp_path, os.environ, 5).status == -signal.SIGSEGV
    assert Processes().run([str(tmp_path / "no such")], tmp_path, os.environ, 5).status == 127


def test_reports_are_joined_only_where_they_are_of_the_same(tmp_path: Path) -> None:
    made = reporter(None, "--sections", "step")
    made.facts["sources"] = "abc"
    rows = [{"section": section, "name": "x", "status": "ok"} for section in ("step", "bytes")]
    file = tmp_path / "earlier.json"
    file.write_text(json.dumps({"environment": made.facts, "rows": rows}))
    made.join([str(file)])
    assert made.document["rows"] == rows[1:]  # the step is to be made again
    file.write_text(json.dumps({"environment": made.facts | {"sources": "def"}, "rows": rows}))
    with pytest.raises(ValueError, match="its sources: def, and here abc"):
        made.join([str(file)])


def test_copies_without_git_are_told_apart_by_what_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "benchmarks" / "common" / "report.py"
    file.parent.mkdir(parents=True)
    file.write_text("")
    (tmp_path / "build").mkdir()
    monkeypatch.setattr(report, "__file__", str(file))
    before = report.sources()
    (tmp_path / "build" / "left.py").write_text("a build's")
    (tmp_path / "notes.md").write_text("not run")
    assert report.sources() == before
    (tmp_path / "kernel.cu").write_text("")
    assert report.sources() != before
    assert report.revision() is None


def test_without_a_gpu_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    if not GPU:
        assert cli.main(["gpu"]) == 2
        assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.slow
def test_every_kernel_is_run_once_for_the_sanitizer() -> None:
    with emulated_gpu(EmulatedDevice(check=False)) as device, use_backend("cuda"):
        for family in (*paths.FAMILIES, paths.ENTRIES):
            paths.once(family, torch.device("cpu"), numel=5001)
    sources = [path.read_text("utf-8") for path in CSRC.glob("*.cu")]
    assert set(device.launches) == {name for text in sources for name in re.findall(KERNEL, text)}
