"""The compiler's own output runs: NVRTC's PTX, as C++, on the CPU (`cuda_on_cpu.ptx`).

sm_75 … sm_90 get one PTX, word for word, and sm_100 and sm_120 another one with few differences; each is run once.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import KERNEL
from cuda_on_cpu.ptx import translate
from emulated import EmulatedDevice, emulated_gpu
from gradwire.compress import CODECS, Codec, OneBit, RandomK, Threshold
from gradwire.compress.backends.cuda.runtime.compiler import CSRC
from gradwire.compress.codec import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from nvrtc import ARCHITECTURES, FILES, build
from parity import equal
from preloaded import PLAIN_PYTHON
from strategies import KINDS

ROOT = Path(__file__).resolve().parents[2]


def program(file: str, architecture: int) -> str:
    """A file's PTX, but for the lines that name the architecture."""
    return re.sub(r"^\.(version|target) .*", "", build(file, architecture).ptx, flags=re.MULTILINE)


def distinct(files: Sequence[str]) -> list[int]:
    """The first of the architectures that share what these files are compiled to."""
    first: dict[tuple[str, ...], int] = {}
    for architecture in ARCHITECTURES:
        first.setdefault(tuple(program(file, architecture) for file in files), architecture)
    return list(first.values())


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", FILES)
def test_every_instruction_is_understood(file: str, every: bool) -> None:
    """Of sm_90, which other tests compile as well; `every` one takes the compiler's time."""
    source = (CSRC / file).read_text("utf-8")
    for architecture in distinct([file]) if every else (90,):
        code = translate(build(file, architecture).ptx, source)
        assert re.findall(KERNEL, code) == re.findall(KERNEL, source)


@pytest.mark.parametrize("codec", [c for c in CODECS if not isinstance(c, RandomK | Threshold)], ids=str)
def test_what_the_compiler_made_of_the_kernels_writes_the_reference_s_bytes(codec: Codec) -> None:
    """A share of the contract, on the PTX of one architecture: float32, and OneBit in half precision."""
    kinds = st.lists(st.sampled_from(tuple(KINDS)), min_size=2, max_size=4)
    dtypes = DTYPES if isinstance(codec, OneBit) else (torch.float32,)

    @settings(max_examples=5, deadline=None)
    @given(numel=st.sampled_from([1, 257, 5003, 9001]), kinds=kinds, offset=st.integers(0, 1))
    def agree(numel: int, kinds: list[str], offset: int) -> None:
        assert all(equal(codec, numel, kinds, dtype, offset) for dtype in dtypes)

    with emulated_gpu(EmulatedDevice(architecture=90)) as device:
        agree()
    assert device.launches


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_contract_holds_for_what_the_compiler_made_of_the_kernels(architecture: int) -> None:
    if architecture not in distinct(FILES):
        pytest.skip("the PTX of an architecture before")
    suite = [f"tests/compress/test_{name}.py" for name in ("backends", "entries", "vectors", "momentum")]
    # pytest in a process that has imported Hypothesis already cannot rewrite its assertions.
    command = [
        PLAIN_PYTHON,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not cuda",
        "-k",
        "cuda",
    ]
    done = subprocess.run(
        [*command, "--ptx", str(architecture), *suite], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) > 60
