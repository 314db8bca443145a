"""What a user gets from `pip install`: one package, everything in it, and an import that costs nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import gradwire
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "compress", "csrc", "hooks", "optim", "trainers")


def run(*args: object, cwd: Path) -> str:
    """The combined output of a Python that knows nothing of the repository's environment variables."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    """Build the "wheel", "sdist" or "editable" of `source` by its own backend and the setuptools that is installed."""
    target.mkdir()
    hook = f"import sys; sys.path.insert(0, '.ci'); import backend; backend.build_{kind}(sys.argv[1])"
    run("-c", hook, target, cwd=source)
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository that also holds kernels."""
    copy = tmp_path_factory.mktemp("packaging") / "some-clone.1"
    made = (".git", ".venv*", ".gpu", ".editable", ".matrix", ".hypothesis", ".*_cache", "build", "dist")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", *made)
    shutil.copytree(ROOT, copy, ignore=ignore)
    (copy / "csrc" / "probe.cu").write_text("// a kernel\n")
    (copy / "csrc" / "include" / "probe.cuh").write_text("// its header\n")
    return copy


@pytest.fixture(scope="module")
def sdist(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of a clone, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", clone, folder / "built")) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        archive.extractall(folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist of a clone."""
    return build("wheel", sdist, tmp_path_factory.mktemp("wheel") / "built")


@pytest.fixture(scope="module")
def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_sdist_is_the_repository(sdist: Path) -> None:
    """So that the README's links lead somewhere, and `make test` works in it."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    there = [name for name in tracked if name != ".gitignore" and (ROOT / name).is_file()]
    assert len(there) > 100
    assert [name for name in there if not (sdist / name).is_file()] == []


def test_nothing_but_gradwire_lands_in_site_packages(files: set[str]) -> None:
    assert {name.split("/")[0] for name in files} == {"gradwire", f"gradwire-{gradwire.__version__}.dist-info"}


def test_wheel_holds_every_module_and_every_kernel(files: set[str]) -> None:
    modules = {*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))}
    data = {"benchmarks/links/bucket.c", "csrc/probe.cu", "csrc/include/probe.cuh", "py.typed"}
    data |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.cu*")}
    expected = {path.relative_to(ROOT).as_posix() for path in modules} | data
    assert {name.removeprefix("gradwire/") for name in files if name.startswith("gradwire/")} == expected


def test_wheel_has_license_and_entry_point(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"gradwire-{gradwire.__version__}.dist-info"
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        names = archive.namelist()
    assert "gradwire-bench = gradwire.benchmarks.cli:main" in entry_points
    assert "gradwire-meet = gradwire.meet:main" in entry_points
    assert "gradwire/benchmarks/cli.py" in names


def test_wheel_imports_silently_and_lightly(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = """
        import sys, warnings
        import torch, numpy
        warnings.simplefilter("error")
        sys.path.insert(0, ".")
        import gradwire
        assert gradwire.__file__.startswith(sys.argv[1]), gradwire.__file__
        heavy = {"numba", "llvmlite", "cupy", "matplotlib", "rich", "gradwire.benchmarks"} & set(sys.modules)
        assert not heavy, heavy
        unknown = [name for name in gradwire.__all__ if not hasattr(gradwire, name)]
        assert not unknown, unknown
    """
    assert run("-I", "-c", "if True:" + script, tmp_path, cwd=tmp_path) == ""


def test_type_checkers_see_an_editable_installation(clone: Path, tmp_path: Path) -> None:
    wheel = build("editable", clone, tmp_path / "built")
    run("-m", "venv", "--without-pip", "--symlinks", tmp_path / "venv", cwd=tmp_path)
    (packages,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
        (record,) = (name for name in archive.namelist() if name.endswith("/RECORD"))
        recorded = {line.split(",")[0] for line in archive.read(record).decode().splitlines()}
        assert recorded == set(archive.namelist())
    new = clone / "hooks" / "new.py"
    new.write_text("ANSWER: int = 42\n")  # seen without another installation
    (tmp_path / "use.py").write_text(
        "from gradwire import TopK\n"
        "from gradwire.hooks.new import ANSWER\n"
        "reveal_type(TopK(density=0.01).k(ANSWER))\n"
        "reveal_type(ANSWER)\n"
    )
    python = tmp_path / "venv" / "bin" / "python"
    said = run("-m", "mypy", "--python-executable", python, "use.py", cwd=tmp_path)  # any complaint would fail it
    new.unlink()
    assert said.count('Revealed type is "int"') == 2, said
    script = "import importlib.util; print(importlib.util.find_spec('gradwire').origin)"
    found = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert Path(found).samefile(clone / "__init__.py")


def test_compress_imports_no_part_of_torch_distributed(tmp_path: Path) -> None:
    # torch imports some of torch.distributed by itself; the stub keeps the root from importing the hooks.
    script = """
        import sys, types
        import torch
        before = set(sys.modules)
        root = types.ModuleType("gradwire")
        root.__path__ = [sys.argv[1]]
        sys.modules["gradwire"] = root
        import gradwire.compress
        new = {name for name in set(sys.modules) - before if name.startswith(("torch.distributed", "gradwire.hooks"))}
        assert not new, new
    """
    assert run("-I", "-c", "if True:" + script, ROOT, cwd=tmp_path) == ""


def test_the_version_is_released_or_leads_to_the_next_one() -> None:
    """So that main and the last release do not take each other for the same."""
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    versions = re.findall(r"^## \[(?:Unreleased\]: )?(\d+\.\d+\.\d+)", changelog, re.MULTILINE)
    unreleased = "## [Unreleased]: " in changelog
    assert gradwire.__version__ == versions[0] + ".dev0" * unreleased


def test_the_citation_has_the_last_release_and_its_date() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    released = re.search(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})$", changelog, re.MULTILINE)
    assert released is not None
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.findall(r"^(?:version|date-released): (\S+)$", citation, re.MULTILINE) == list(released.groups())


def test_continuous_integration_runs_every_python_and_the_pinned_linters() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text("utf-8")
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text("utf-8"))
    versions = ", ".join(f'"{version}"' for version in classifiers)
    assert f"python: [{versions}]" in workflow
    commands = [line.split() for line in re.findall(r"- run: (.*)", workflow)]
    made = [command for command in commands if command[0] != "python"]
    assert made == [[".ci/run"], ["make", "test", "TORCH=${{", "matrix.torch", "}}"], ["make", "test-all"]]
    lowest = re.search(r'"torch>=(\d+\.\d+)', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert lowest is not None
    newest = re.search(r"\S+ and (\d+\.\d+), as\nby `make test TORCH", (ROOT / "docs/install.md").read_text("utf-8"))
    assert newest is not None
    assert f'torch: ["{lowest[1]}", "{newest[1]}"]' in workflow
    (matrix,) = (command for command in commands if command[0] == "python")
    assert {"--stranger", "--resolve", *classifiers} <= set(matrix)
    assert os.access(ROOT / ".ci/run", os.X_OK)
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    assert f"rev: v{pins['ruff']}\n" in (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
