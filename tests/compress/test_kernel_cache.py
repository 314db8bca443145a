"""Compiled kernels: kept in a folder of the user's own, compiled by one process of a machine, and never in silence."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire.benchmarks import cli
from gradwire.compress import CODECS
from gradwire.compress.backends import kernel_cache
from gradwire.compress.backends.cpu.runtime import numba_cache
from gradwire.compress.backends.cpu.runtime.simd import compiled
from gradwire.compress.codec import DTYPES

#: A process that knows nothing but `kernel_cache`: it says so, and waits, when it is its turn.
HOLDER = """
import importlib.util, pathlib, sys, time
spec = importlib.util.spec_from_file_location("kernel_cache", sys.argv[1])
kernel_cache = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel_cache)
with kernel_cache.compile_lock(pathlib.Path(sys.argv[2]), lambda: False):
    print("mine", flush=True)
    time.sleep(60)
"""
#: Two kernels, one within the other, and how many of them the process had to compile, and to load.
KERNELS = """
import sys, time, types
# The packages without what they import: torch takes seconds.
name = ""
for part, folder in zip(("gradwire", ".compress", ".backends", ".cpu", ".runtime"), sys.argv[1:]):
    name += part
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from gradwire.compress.backends.cpu.runtime import numba_cache
from gradwire.compress.backends.cpu.runtime.simd import compiled

@compiled
def inner(x: int) -> int:
    return 3 * x

@compiled
def outer(x: int) -> int:
    return inner(x) + 1

save = numba_cache.Cache.save_overload
# Compiling takes so long that the other process surely comes meanwhile.
numba_cache.Cache.save_overload = lambda *args: (time.sleep(0.5), save(*args))

print("ready", flush=True)
sys.stdin.readline()
assert outer(4) == 13
print(numba_cache.Cache.compiled, numba_cache.Cache.loaded)
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and a place of our own for temporary files."""
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "_alone", False)
    return tmp_path / "cache"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("cpu-*/*.bin"))


def kernel(factor: int) -> Any:
    """A kernel that nobody has compiled yet in this process."""

    @compiled
    def times(x: int) -> int:
        return factor * x

    return times


# ---- the folder


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("GRADWIRE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert kernel_cache.cache_folder() == tmp_path / ".cache" / "gradwire"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert kernel_cache.cache_folder() == tmp_path / ".cache" / "gradwire"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # without a home
    assert kernel_cache.cache_folder() == Path(tempfile.gettempdir(), f"gradwire-{os.geteuid()}")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert kernel_cache.cache_folder() == Path("/somewhere/gradwire")
    monkeypatch.setenv("GRADWIRE_CACHE", "/elsewhere")
    assert kernel_cache.cache_folder() == Path("/elsewhere")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_it_is_the_users_alone(folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert kernel(2)(3) == 6
    finally:
        os.umask(before)
    (kernels,) = folder.glob("cpu-*")
    assert [mode(folder), mode(kernels)] == [0o700, 0o700]
    assert all(not mode(file) & 0o077 for file in kernels.iterdir())
    assert len(files(folder)) == 1


@pytest.mark.parametrize("unsafe", [0o777, 0o1777, 0o775])
def test_a_folder_that_others_may_write_to_is_not_used_and_left_as_it_is(
    folder: Path, unsafe: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel_cache, "REPORT_AFTER", 0.0)
    folder.mkdir()
    folder.chmod(unsafe)
    spare = tmp_path / f"gradwire-{os.geteuid()}"
    with kernel_cache.task("TopK"):
        assert kernel(2)(3) == 6
    assert (len(files(folder)), len(files(spare)), mode(folder)) == (0, 1, unsafe)
    remedy = f"as {folder} must be a folder that you, and you alone, can write to\n"
    assert re.fullmatch(f"gradwire: compiling .*{re.escape(str(spare))}.*{re.escape(remedy)}", capfd.readouterr().err)
    folder.chmod(0o755)  # others may look
    assert kernel_cache.folders() == [folder]
    assert mode(folder) == 0o755


def test_a_folder_of_someone_else_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder.mkdir()
    spare = tmp_path / f"gradwire-{os.geteuid()}"
    stranger = os.geteuid() + 1
    real = Path.stat

    def of_a_stranger(path: Path, **options: Any) -> os.stat_result:
        facts = list(real(path, **options))
        return os.stat_result([*facts[:4], stranger, *facts[5:]]) if path == folder else real(path, **options)

    monkeypatch.setattr(Path, "stat", of_a_stranger)
    assert kernel_cache.folders() == [spare]
    assert mode(spare) == 0o700
    stranger = 0  # what root has put there, others cannot have
    folder.chmod(0o755)
    monkeypatch.setattr(os, "access", lambda path, how: path != folder)
    assert kernel_cache.folders() == [folder, spare]


def test_a_link_of_someone_else_is_not_followed(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its owner could let it lead to other kernels once it has been looked at. One's own may lead to another disk."""
    (tmp_path / "disk").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "disk")
    assert kernel_cache.folders() == [folder]
    real = Path.lstat

    def of_a_stranger(path: Path) -> os.stat_result:
        facts = list(real(path))
        return os.stat_result([*facts[:4], os.geteuid() + 1, *facts[5:]]) if path == folder else real(path)

    monkeypatch.setattr(Path, "lstat", of_a_stranger)
    assert kernel_cache.folders() == [tmp_path / f"gradwire-{os.geteuid()}"]


def test_what_may_only_be_read_is_read_and_the_rest_goes_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert kernel(2)(3) == 6
    monkeypatch.setattr(os, "access", lambda path, how: path != folder)
    loaded, count = numba_cache.Cache.loaded, numba_cache.Cache.compiled
    assert kernel(2)(3) == 6
    assert (numba_cache.Cache.loaded, numba_cache.Cache.compiled) == (loaded + 1, count)
    assert kernel(2)(3.0) == 6.0
    spare = tmp_path / f"gradwire-{os.geteuid()}"
    assert (len(files(folder)), len(files(spare))) == (1, 1)


@pytest.mark.parametrize("where", ["a file", "an impossible path"])
def test_without_any_folder_kernels_are_compiled_all_the_same(
    folder: Path, where: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def nowhere() -> Path:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(kernel_cache, "REPORT_AFTER", 0.0)
    monkeypatch.setattr(kernel_cache, "_spare_folder", nowhere)
    if where == "a file":
        folder.write_text("not a folder")
    else:
        monkeypatch.setenv("GRADWIRE_CACHE", "/proc/nothing/here")
    assert kernel_cache.folders() == []
    with kernel_cache.task("TopK"):
        assert kernel(2)(3) == 6
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("gradwire: compiling kernels for TopK, which cannot be kept: ")
    assert str(kernel_cache.cache_folder()) in line


def test_a_full_disk_costs_nothing_but_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kernel_cache, "write", full)
    assert kernel(2)(3) == 6
    assert files(folder) == []
    assert kernel_cache._alone  # and no process waits for another any longer


@pytest.mark.parametrize("damage", [b"", b"\0" * 5000, None])
def test_a_damaged_file_is_compiled_again(folder: Path, damage: bytes | None) -> None:
    assert kernel(2)(3) == 6
    (file,) = files(folder)
    file.write_bytes(file.read_bytes()[:-1] if damage is None else damage)
    for new in (1, 0):
        before = numba_cache.Cache.compiled, numba_cache.Cache.loaded
        assert kernel(2)(3) == 6
        assert (numba_cache.Cache.compiled, numba_cache.Cache.loaded) == (before[0] + new, before[1] + 1 - new)
    assert files(folder) == [file]


def test_what_a_kernel_depends_on_is_in_its_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = set()
    for module, name, value in (
        ("sys", "implementation", None),
        ("numba", "__version__", "99"),
        ("llvmlite", "__version__", "99"),
        ("numpy", "__version__", "99"),
        ("gradwire.compress.backends.cpu.runtime.numba_cache", "SOURCES", ("runtime/simd.py",)),
    ):
        with monkeypatch.context() as change:
            if value is not None:
                change.setattr(sys.modules[module], name, value)
            numba_cache.folder_name.cache_clear()
            paths.add(numba_cache.folder_name())
    numba_cache.folder_name.cache_clear()
    assert len(paths) == 5
    times = kernel(2)
    assert (times(1), times(1.0)) == (2, 2.0)
    assert len(files(folder)) == 2


def test_folders_that_nobody_has_used_for_long_go(folder: Path) -> None:
    for name, age in (("cpu-old", numba_cache.OLD + 100), ("cpu-young", 100), ("else", numba_cache.OLD + 100)):
        (folder / name).mkdir(parents=True)
        (folder / name / "x.bin").write_bytes(b"")
        times = (folder / name).stat().st_mtime - age
        os.utime(folder / name, (times, times))
    assert kernel(2)(3) == 6
    assert {path.name for path in folder.iterdir()} == {"cpu-young", "else", numba_cache.folder_name()}


# ---- whose turn it is


@pytest.fixture
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that compiles, and does not get done."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", HOLDER, str(kernel_cache.__file__), str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "mine\n"
    with process:
        yield process
        process.kill()


def waiting(folder: Path, *lock: str) -> tuple[threading.Thread, threading.Event]:
    """A thread that takes its turn, and what it sets then."""
    entered = threading.Event()

    def take() -> None:
        with kernel_cache.task("TopK"), kernel_cache.compile_lock(folder, lambda: False, *lock):
            entered.set()

    thread = threading.Thread(target=take)
    thread.start()
    return thread, entered


def test_who_waits_says_so_and_goes_on_when_the_compiler_dies(
    folder: Path, holder: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_cache, "REPORT_AFTER", 0.05)
    thread, entered = waiting(folder)
    assert not entered.wait(0.3)
    holder.kill()
    assert entered.wait(20)
    thread.join()
    (line,) = capfd.readouterr().err.splitlines()
    assert line == "gradwire: waiting for another process to compile kernels for TopK, once"
    assert not kernel_cache._alone


def test_who_has_waited_long_enough_goes_on_alone(
    folder: Path, holder: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_cache, "PATIENCE", 0.2)
    for _ in range(2):
        thread, entered = waiting(folder)
        assert entered.wait(20)
        thread.join()
    assert kernel_cache._alone
    assert holder.poll() is None
    assert capfd.readouterr().err == ""  # in less than two seconds


def test_who_compiles_something_else_or_cannot_lock_files_does_not_wait(
    folder: Path, holder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*args: Any) -> None:
        raise OSError(37, "No locks available")

    for lock in (["topk-sm_90.lock"], []):
        thread, entered = waiting(folder, *lock)
        assert entered.wait(20)
        thread.join()
        assert holder.poll() is None
        monkeypatch.setattr(kernel_cache.fcntl, "flock", unsupported)


def test_the_lock_is_given_back_whatever_happens(folder: Path) -> None:
    with suppress(ZeroDivisionError), kernel_cache.compile_lock(folder, lambda: False):
        raise ZeroDivisionError
    for _ in range(2):
        thread, entered = waiting(folder)
        assert entered.wait(20)
        thread.join()


def test_one_of_two_processes_compiles(folder: Path) -> None:
    packages = reversed(Path(str(numba_cache.__file__)).parents[:5])
    command = [sys.executable, "-c", KERNELS, *map(str, packages)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both: list[Any] = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = sorted(process.communicate(timeout=120)[0] for process in both)
    assert said == ["0 1\n", "2 0\n"]
    assert len(files(folder)) == 2


def test_compiling_says_what_for_and_where_it_is_kept_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_cache, "REPORT_AFTER", 0.0)
    with kernel_cache.task("TopK"):
        assert kernel(2)(3) == 6
        assert kernel(3)(3) == 9
    assert re.fullmatch(
        rf"gradwire: compiling kernels for TopK, once; kept in {re.escape(str(folder))}/cpu-\w+\n",
        capfd.readouterr().err,
    )
    with kernel_cache.task("TopK"):
        assert kernel(2)(3) == 6  # loaded
    assert capfd.readouterr().err == ""


# ---- ahead


def test_warm_fills_the_cache_and_says_how_far_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = []
    for codec in CODECS:
        kernels = codec.kernels(torch.device("cpu"))
        monkeypatch.setattr(kernels, "prepare", lambda codec, dtype, device: asked.append((codec, dtype, device)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # rich is not needed
    assert cli.main(["warm", "topk", "cast", "--dtypes", "float32", "bfloat16", "--devices", "cpu"]) == 0
    codecs = [codec for codec in CODECS if codec.name in ("topk", "cast")]
    dtypes = torch.float32, torch.bfloat16
    assert set(asked) == {(codec, dtype, torch.device("cpu")) for codec in codecs for dtype in dtypes}
    out, err = capfd.readouterr()
    first, *lines = out.splitlines()
    assert first == f"kernels are kept in {folder}"
    assert [line.split("]")[0] for line in lines] == [f"[{i}/{len(asked)}" for i in range(1, len(asked) + 1)]
    assert err == ""
    asked.clear()
    assert cli.main(["warm", "--devices", "cpu"]) == 0
    assert set(asked) == {(codec, dtype, torch.device("cpu")) for codec in CODECS for dtype in DTYPES}


def test_warm_says_what_it_cannot_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["warm", "zip"]) == 2
    assert "unknown codec 'zip': expected one of onebit, qsgd" in capfd.readouterr().err
    monkeypatch.setattr(kernel_cache, "folders", list)
    assert cli.main(["warm"]) == 2
    assert (
        f"nothing can be kept: {folder} must be a folder that you, and you alone, can write to"
        in capfd.readouterr().err
    )
