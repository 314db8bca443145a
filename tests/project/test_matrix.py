"""`make matrix` tells what cannot be had from what fails. The matrix itself needs registries, and is run by hand."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrix", ROOT / ".ci" / "matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "WORK", tmp_path)
    return module


@pytest.mark.parametrize(
    ("torch", "outcome", "status"),
    [
        ("2.6", "Python 3.11, torch 2.6: ran", 0),
        ("2.7", "torch 2.7: skipped (0 s): pip: No matching distribution found for torch==2.7.*", 1),
        ("2.8", "torch 2.8: failed", 1),
    ],
)
def test_outcomes(
    matrix: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    torch: str,
    outcome: str,
    status: int,
) -> None:
    def run(*command: object) -> str:
        said = " ".join(map(str, command))
        for what, error in {
            "torch==2.7.*": "noise\nERROR: No matching distribution found for torch==2.7.*\n",
            "torch==2.8.*": "ERROR: Could not build wheels\n",
        }.items():
            if what in said:
                raise subprocess.CalledProcessError(1, list(map(str, command)), error)
        return "3.11\n"

    monkeypatch.setattr(matrix, "run", run)
    monkeypatch.setattr(matrix, "build", lambda python, pip_args: (tmp_path / "a.tar.gz", tmp_path / "a.whl"))
    monkeypatch.setattr(matrix.shutil, "which", lambda name: None if name == "uv" else f"/somewhere/{name}")
    monkeypatch.setattr("sys.argv", ["matrix", "--python", "3.11", "--torch", torch])
    assert matrix.main() == status
    assert outcome in capsys.readouterr().out


def test_a_stranger_s_pip_knows_nothing_of_this_machine(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_CERT", "PIP_CONFIG_FILE", "PYTHONPATH"):
        monkeypatch.setenv(name, "/mine")
    assert {"PIP_FIND_LINKS=/mine", "PIP_CONFIG_FILE=/mine"} <= set(matrix.run("env").splitlines())
    monkeypatch.setattr(matrix, "HIDDEN", [*matrix.HIDDEN, "PIP_"])
    seen = set(matrix.run("env", HOME="/empty").splitlines())
    assert {line for line in seen if line.startswith(("PIP_", "PYTHON"))} == {
        "PIP_CERT=/mine",
        f"PIP_CONFIG_FILE={os.devnull}",
    }
    assert "HOME=/empty" in seen


@pytest.mark.parametrize(("torch", "pinned"), [("2.13", True), ("2.6", False), ("newest", False)])
def test_another_torch_brings_its_own_nvrtc(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, torch: str, pinned: bool
) -> None:
    """For the matrix and for `make` alike."""

    def resolve(python: Path, pip_args: list[str], *what: object, **more: str) -> dict[str, str]:
        if "-c" in pip_args and "gone" in str(what):
            raise matrix.CannotBeHadError("No matching distribution found for numba==0")
        return {"torch": torch}

    monkeypatch.setattr(matrix, "resolve", resolve)
    assert torch in matrix.attempt_resolve("3.11", torch, [], tmp_path / "a.whl")
    pins = (tmp_path / "constraints.txt").read_text()
    assert ("\ntorch==" in pins, "\nnvidia-cuda-nvrtc==" in pins, "\nnumba==" in pins) == (pinned, pinned, True)
    with pytest.raises(subprocess.CalledProcessError):  # only torch may be missing
        matrix.attempt_resolve("3.11", torch, [], tmp_path / "gone.whl")
    if not pinned:
        said = subprocess.run(
            ["make", "-n", "test", f"TORCH={torch}", f"VENV={tmp_path}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        (filtered,) = (line for line in said.stdout.splitlines() if line.startswith("sed "))
        subprocess.run(filtered, shell=True, cwd=ROOT, check=True)
        assert (tmp_path / "constraints.txt").read_text() == pins
        assert f"'torch=={torch}.*'" in said.stdout


@pytest.mark.parametrize(
    ("brings", "extras"),
    [("nvidia-cuda-nvrtc-cu12", ["cuda12"]), ("nvidia-cuda-nvrtc", ["cuda13"]), ("numpy", ["cuda12", "cuda13"])],
)
def test_extras_go_by_the_cuda_that_torch_brings(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, brings: str, extras: list[str]
) -> None:
    asked: list[str] = []

    def install(python: Path, pip_args: list[str], *what: object, **more: str) -> None:
        assert "--dry-run" in pip_args
        asked.append(str(what[-1]))
        found = {"torch": "2.9.1", brings: "1.0", "cupy-cuda12x": "14.2.0"}
        packages = [{"metadata": {"name": name, "version": version}} for name, version in found.items()]
        Path(pip_args[pip_args.index("--report") + 1]).write_text(json.dumps({"install": packages}))

    monkeypatch.setattr(matrix, "install", install)
    said = matrix.attempt_extras("2.9", [], tmp_path / "a.whl")
    assert asked == ["torch==2.9.*", *(f"{tmp_path / 'a.whl'}[{extra}]" for extra in extras)]
    assert said.count("torch 2.9.1: cupy-cuda12x 14.2.0") == len(extras)
