"""The compiler's own output runs: NVRTC's PTX, as C++, on the CPU (`cuda_on_cpu.ptx`).

sm_75 … sm_90 get one PTX, word for word, and sm_100 and sm_120 another one with few differences; each is run once.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import emulated
import numpy as np
import pytest
import torch
from cuda_on_cpu import KERNEL, ptx
from cuda_on_cpu.ptx import translate
from emulated import EmulatedDevice, emulated_gpu
from gradwire.compress import CODECS, ChunkedTopK, Codec, OneBit, RandomK, TernGrad, Threshold, new_draw
from gradwire.compress.backends import use_backend
from gradwire.compress.backends.cuda.runtime.compiler import CSRC
from gradwire.compress.codec import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from nvrtc import ARCHITECTURES, FILES, build
from parity import equal
from preloaded import PLAIN_PYTHON
from strategies import KINDS, gradient

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


#: An element of encoding with feedback, and of the mean of 8 ranks: bytes that each kernel moves, and instructions of
#: PTX that it issues, at most. `pytest -s` prints them.
MOST: dict[Codec, list[list[float]]] = {
    ChunkedTopK(): [[12.1, 91], [4.2, 70]],
    ChunkedTopK(k=1024): [[12.2, 123], [5.6, 227]],
    TernGrad(block=1280): [[12.8, 59], [5.7, 70]],
}


@pytest.mark.parametrize("codec", MOST, ids=str)
def test_no_byte_is_moved_twice(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of normal numbers. A warp issues an instruction as often as that of its lanes which executes it most often."""
    monkeypatch.setattr(ptx, "translate", partial(translate, counted=True))
    monkeypatch.setattr(emulated, "_ptx_modules", {})
    numel = 5 * 4096
    found: list[tuple[float, float]] = []
    wires = torch.zeros(8, codec.wire_bytes(numel), dtype=torch.uint8)
    with emulated_gpu(EmulatedDevice(architecture=90, sm_count=1)) as device, use_backend("cuda"):
        workspace = codec.workspace(numel)
        for step, wire in enumerate(wires):
            x, residual = gradient("normal", numel, step), gradient("normal", numel, step + 8) * 0.5
            codec.encode_feedback(x, residual, wire, new_draw(1, step), workspace)
        codec.decode_mean([wires], torch.empty(numel), workspace)
    assert len(device.launches) == 9
    for (code, module), times in zip(emulated._ptx_modules.items(), (len(wires), 1), strict=True):
        rows = int(re.findall(r"ptx_counts\[(\d+)\]", code)[0])
        counts = np.ctypeslib.as_array((ctypes.c_uint32 * (256 * rows)).in_dll(module.library, "ptx_counts"))
        by_line, per = counts.reshape(rows, 8, 32), numel * times
        text = build(f"{Path(module.name).stem}.cu", 90).ptx.splitlines()
        moved = [
            re.search(r"\b(?:ld|st|red|atom)\.(?:\w+\.)*?global[\w.]*?(?:\.v(\d))?\.[usbf](\d+)\s", line)
            for line in text
        ]
        size = np.array([int(m[1] or 1) * int(m[2]) // 8 if m else 0 for m in moved])
        found.append((size @ by_line[: len(size)].sum((1, 2)) / per, 32 * by_line.max(2).sum() / per))
        counts[:] = 0  # the library stays loaded
    print(codec, found)
    assert (np.array(found) <= np.array(MOST[codec])).all()
