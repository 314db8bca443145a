"""Whether an installed gradwire works: every codec's kernels, two ranks that train, and the command line.

Run with `python -I` from a folder that is not the repository. The last line says what ran.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import gradwire
import torch
from gradwire.compress import new_draw
from gradwire.compress.backends import use_backend

ROOT = Path(__file__).resolve().parent.parent


def wire_and_decoded(codec: gradwire.Codec, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    workspace = codec.workspace(gradient.numel())
    wire = torch.empty(codec.wire_bytes(gradient.numel()), dtype=torch.uint8)
    codec.encode(gradient, wire, new_draw(seed=0, step=0), workspace)
    decoded = torch.zeros_like(gradient)
    codec.decode_add(wire, decoded, 1.0, workspace)
    return wire, decoded


def check_codecs() -> None:
    """The compiled kernels write the specification's bytes."""
    gradient = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    for codec in gradwire.CODECS:
        with use_backend("reference"):
            expected = wire_and_decoded(codec, gradient)
        for found, right in zip(wire_and_decoded(codec, gradient), expected, strict=True):
            if not torch.equal(found, right):
                raise AssertionError(f"{codec}: the kernels' bytes are not the specification's")


def check_training() -> None:
    """The script of docs/ddp.md, on two ranks."""
    page = (ROOT / "docs" / "ddp.md").read_text("utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (script,) = (snippet for snippet in snippets if "init_process_group" in snippet)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script, "utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode or "20 steps, " not in done.stdout:
        raise AssertionError(f"the script of docs/ddp.md failed:\n{done.stdout}{done.stderr}")


def check_command_line() -> None:
    command = Path(sys.executable).parent / "gradwire-bench"
    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    if "advise" not in done.stdout:
        raise AssertionError(f"gradwire-bench --help says:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    if Path(gradwire.__file__).resolve().parent == ROOT:
        raise SystemExit(f"this is the repository's gradwire, {gradwire.__file__}, not an installed one")
    check_codecs()
    check_training()
    check_command_line()
    python = ".".join(map(str, sys.version_info[:3]))
    import numba
    import numpy

    print(
        f"gradwire {gradwire.__version__}: Python {python}, torch {torch.__version__}, numpy {numpy.__version__}, "
        f"numba {numba.__version__}: {len(gradwire.CODECS)} codecs, two ranks, gradwire-bench"
    )
