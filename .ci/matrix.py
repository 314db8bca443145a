"""Whether what would be published installs and runs: sdist and wheel, on each Python, with each torch.

    python .ci/matrix.py --python 3.11 3.14 --torch 2.6 newest

Builds both with `build`, and for each pair makes an environment in .matrix/, installs that torch and the wheel as a
user does, from the registry that pip is set up for, and runs `.ci/smoke.py` from another folder; then the same with the
sdist. With --extras it installs nothing, and asks pip whether the extras for GPUs fit each torch, by the CUDA that it
brings:

    python .ci/matrix.py --extras --torch 2.6 2.7 2.8 2.9 2.10 2.11 2.12 2.13 2.14

With --resolve it asks pip the same about what `make test` and `make demo` install; with --demo it runs `make demo` in a
new clone of the last commit, with an empty home. With --stranger pip has no configuration file and no PIP_ variables,
as on a machine that nobody has set up:

    python .ci/matrix.py --stranger --resolve --torch 2.6 2.11 2.13 newest
    python .ci/matrix.py --stranger --demo --python 3.12 --torch 2.13

For a Python that is not here, --resolve goes by its tags, and markers by the Python that asks. What cannot be had is
skipped, with the reason; the exit status is 1 where something failed, or nothing ran.
Needs nothing but a Python. An environment with PyTorch for CUDA takes 6 GB, and is removed before the next one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".matrix"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.6", "2.13", "newest")
#: How pip says that a registry has no such thing, as opposed to failing.
ABSENT = re.compile(r"^ERROR: (No matching distribution found for .*|Could not find a version .*)", re.MULTILINE)

#: What `make` installs beside gradwire, and the pins that it leaves out for another torch than the constraints'.
EXTRAS = "bench,docs,test,lightning,accelerate,transformers"
WITH_TORCH = re.compile(r"^(?:torch|nvidia-cuda-nvrtc)==.*\n", re.MULTILINE)

#: What the extras for GPUs are about.
GPU_PACKAGES = re.compile(r"cupy|cuda-bindings|nvidia-cuda-nvrtc")


#: Variables that no command is given. A certificate says nothing of what pip finds.
HIDDEN = ["PYTHON", "VIRTUAL_ENV"]
KEPT = "PIP_CERT"


class CannotBeHadError(Exception):
    """An interpreter or a package that is not to be had here."""


def run(*command: object, **more: str) -> str:
    """The output of a command that runs in .matrix/ and knows nothing of the environment variables of this Python, but
    has `more` of them.

    Raises:
        subprocess.CalledProcessError: it failed; `output` has what it said.
    """
    env = {name: value for name, value in os.environ.items() if name == KEPT or not name.startswith(tuple(HIDDEN))}
    if "PIP_" in HIDDEN:
        more["PIP_CONFIG_FILE"] = os.devnull
    words = list(map(str, command))
    done = subprocess.run(
        words, cwd=WORK, env=env | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, words, done.stdout)
    return done.stdout


def interpreter(version: str) -> Path:
    """A Python of `version`: on the PATH, among pyenv's, or among uv's.

    Raises:
        CannotBeHadError: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python3"), reverse=True)]
    if uv := shutil.which("uv"):
        done = subprocess.run([uv, "python", "find", version], stdout=subprocess.PIPE, text=True, check=False)
        found.append(done.stdout.strip() or None)
    script = "import sys, venv; print('.'.join(map(str, sys.version_info[:2])))"
    for python in filter(None, found):
        try:
            if run(python, "-c", script).strip() == version:
                return Path(python)
        except (OSError, subprocess.CalledProcessError):
            continue  # such as pyenv's shim of a version that is not chosen
    raise CannotBeHadError(f"no Python {version} on the PATH, of pyenv or of uv")


def wanted(torch: str) -> str:
    return "torch" if torch == "newest" else f"torch=={torch}.*"


def install(python: Path, pip_args: list[str], *what: object, **more: str) -> None:
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *pip_args]
    try:
        run(*pip, *what, **more)
    except subprocess.CalledProcessError as error:
        if absent := ABSENT.search(error.output):
            raise CannotBeHadError(f"pip: {absent[1]}") from None
        raise


def environment(folder: Path, python: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def build(python: Path, pip_args: list[str]) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it."""
    builder = environment(WORK / "build", python)
    install(builder, pip_args, "--upgrade", "pip", "build")  # older ones download what they are only asked about
    dist = WORK / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run(builder, "-m", "build", "--outdir", dist, ROOT)
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return sdist, wheel


def attempt(version: str, torch: str, pip_args: list[str], sdist: Path, wheel: Path) -> str:
    """What ran. Raises CannotBeHadError, or CalledProcessError where something failed."""
    folder = WORK / f"{version}-{torch}"
    try:
        python = environment(folder, interpreter(version))
        install(python, [*pip_args, "--only-binary", "torch"], wanted(torch), wheel)
        said = run(python, "-I", ROOT / ".ci" / "smoke.py")
        install(python, pip_args, "--force-reinstall", "--no-deps", sdist)
        run(python, "-I", ROOT / ".ci" / "smoke.py")
        return said.strip().splitlines()[-1]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def resolve(python: Path, pip_args: list[str], *what: object, **more: str) -> dict[str, str]:
    """The versions that pip would install, by name; downloads no more than it has to read."""
    report = WORK / "report.json"
    pip_args = [*pip_args, "--dry-run", "--ignore-installed", "--only-binary", ":all:", "--report", str(report)]
    install(python, pip_args, *what, **more)
    packages = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    return {package["name"]: package["version"] for package in packages}


def extras_of(packages: Iterable[str]) -> list[str]:
    """The extras for the CUDA that a torch brings; both for one that brings none."""
    if any(name.endswith("-cu12") for name in packages):
        return ["cuda12"]
    brings = {"cuda-toolkit", "nvidia-cuda-nvrtc"} & set(packages)
    return ["cuda13"] if brings else ["cuda12", "cuda13"]


def attempt_extras(torch: str, pip_args: list[str], wheel: Path) -> str:
    """What pip would install. Raises as `attempt` does."""
    python = WORK / "build" / "bin" / "python"
    said = []
    for extra in extras_of(resolve(python, pip_args, wanted(torch))):
        found = resolve(python, pip_args, wanted(torch), f"{wheel}[{extra}]")
        shown = [f"{name} {found[name]}" for name in sorted(found) if GPU_PACKAGES.match(name)]
        said.append(f"{extra} with torch {found['torch']}: {', '.join(shown)}")
    return "; ".join(said)


def attempt_resolve(version: str, torch: str, pip_args: list[str], wheel: Path) -> str:
    """The versions that pip would install for `make`. Raises as `attempt` does: only torch may be missing."""
    pip = WORK / "build" / "bin" / "python"
    tags, for_python = [], {}
    try:
        for_python["PIP_PYTHON"] = str(interpreter(version))
    except CannotBeHadError:
        tags = ["--python-version", version]
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    if f"\ntorch=={torch}." not in pins:
        pins = WITH_TORCH.sub("", pins)
    constraints = WORK / "constraints.txt"
    constraints.write_text(pins)
    pip_args = [*pip_args, *tags]
    resolve(pip, pip_args, wanted(torch), **for_python)
    try:
        pip_args += ["-c", str(constraints)]
        found = resolve(pip, pip_args, wanted(torch), f"{wheel}[{EXTRAS}]", **for_python)
    except CannotBeHadError as reason:
        raise subprocess.CalledProcessError(1, ["pip"], str(reason)) from None
    shown = [f"{name} {found[name]}" for name in sorted(found) if re.match("torch$|nvidia-cuda-nvrtc", name)]
    return f"{len(found)} packages, {', '.join(shown)}{', by its tags' if tags else ''}"


def attempt_demo(version: str, torch: str, pip_args: list[str]) -> str:
    """How long it took. Raises as `attempt` does."""
    python, clone, home = interpreter(version), WORK / "clone", WORK / "home"
    try:
        run("git", "clone", "--quiet", ROOT, clone)
        home.mkdir()
        make = ["make", "-C", clone, f"PYTHON={python}", f"PIP_ARGS={' '.join(pip_args)}"]
        if f"\ntorch=={torch}." not in (ROOT / "constraints.txt").read_text("utf-8"):
            pip = WORK / "build" / "bin" / "python"
            make.append(f"TORCH={resolve(pip, pip_args, wanted(torch))['torch'].partition('+')[0]}")
        run(*make, "demo", HOME=str(home))
        gigabytes = run("du", "-sh", clone, home).split()[::2]
        return f"{gigabytes[0]} with what was installed, {gigabytes[1]} in its home"
    finally:
        for folder in (clone, home):
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="X.Y", help=" ".join(PYTHONS))
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="VERSION", help=" ".join(TORCHES))
    parser.add_argument("--pip-args", default="", help="given to every `pip install`, such as --extra-index-url=URL")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--extras", action="store_true", help="only see whether the extras for GPUs fit each torch")
    what.add_argument("--resolve", action="store_true", help="only see whether what `make` installs fits each torch")
    what.add_argument("--demo", action="store_true", help="run `make demo` in a new clone with an empty home")
    parser.add_argument("--stranger", action="store_true", help="pip without configuration file and PIP_ variables")
    options = parser.parse_args()
    pip_args = options.pip_args.split()
    if options.stranger:
        HIDDEN.append("PIP_")
    WORK.mkdir(exist_ok=True)
    sdist, wheel = build(Path(sys.executable), pip_args)
    print(f"built {sdist.name} and {wheel.name}", flush=True)
    counts = {"ran": 0, "skipped": 0, "failed": 0}
    for version in [None] if options.extras else options.python:
        for torch in options.torch:
            began = time.monotonic()
            try:
                if version is None:
                    outcome, text = "ran", attempt_extras(torch, pip_args, wheel)
                elif options.resolve:
                    outcome, text = "ran", attempt_resolve(version, torch, pip_args, wheel)
                elif options.demo:
                    outcome, text = "ran", attempt_demo(version, torch, pip_args)
                else:
                    outcome, text = "ran", attempt(version, torch, pip_args, sdist, wheel)
            except CannotBeHadError as reason:
                outcome, text = "skipped", str(reason)
            except subprocess.CalledProcessError as error:
                outcome, text = "failed", f"{' '.join(error.cmd)}\n{error.output}"
            counts[outcome] += 1
            seconds = time.monotonic() - began
            where = "" if version is None else f"Python {version}, "
            print(f"{where}torch {torch}: {outcome} ({seconds:.0f} s): {text}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int(counts["failed"] > 0 or counts["ran"] == 0)


if __name__ == "__main__":
    sys.exit(main())
