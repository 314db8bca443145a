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
from gradwire.compress import (
    CODECS,
    EDEN,
    ChunkedTopK,
    Codec,
    OneBit,
    RandomK,
    TernGrad,
    Threshold,
    TopK,
    new_draw,
)
from gradwire.compress.backends import use_backend
from gradwire.compress.backends.cuda.runtime.compiler import CSRC
from gradwire.compress.codec import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from nvrtc import ARCHITECTURES, FILES, build
from parity import equal
from preloaded import PLAIN_PYTHON
from strategies import KINDS, gradient, parts_of

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


#: An element of encoding with feedback, once a threshold is known, and of the mean of 8 ranks: launches, bytes that the
#: kernels move, and instructions of PTX that they issue, at most. `pytest -s` prints them.
MOST: dict[Codec, list[list[float]]] = {
    ChunkedTopK(): [[1, 12.1, 91], [1, 4.2, 70]],
    ChunkedTopK(k=1024): [[1, 12.2, 123], [1, 5.6, 227]],
    EDEN(): [[1, 12.8, 119], [1, 8.1, 251]],
    EDEN(levels=2): [[1, 12.7, 111], [1, 7.4, 218]],
    TernGrad(block=1280): [[1, 12.8, 59], [1, 5.7, 70]],
    TopK(): [[4, 13.6, 67], [2, 6.4, 59]],
    TopK(0.001): [[4, 12.8, 62], [2, 4.4, 51]],
}


def moved_and_issued() -> tuple[float, float]:
    """Bytes and instructions since the last call. A warp issues one as often as the lane that executes it
    most often."""
    bytes_moved = issued = 0.0
    for code, module in emulated._ptx_modules.items():
        rows = int(re.findall(r"ptx_counts\[(\d+)\]", code)[0])
        counts = np.ctypeslib.as_array((ctypes.c_uint32 * (256 * rows)).in_dll(module.library, "ptx_counts"))
        by_line = counts.reshape(rows, 8, 32)
        text = build(f"{Path(module.name).stem}.cu", 90).ptx.splitlines()
        moved = [
            re.search(r"\b(?:ld|st|red|atom)\.(?:\w+\.)*?global[\w.]*?(?:\.v(\d))?\.[usbf](\d+)\s", line)
            for line in text
        ]
        size = np.array([int(m[1] or 1) * int(m[2]) // 8 if m else 0 for m in moved])
        bytes_moved += size @ by_line[: len(size)].sum((1, 2))
        issued += 32 * by_line.max(2).sum()
        counts[:] = 0  # the library stays loaded
    return bytes_moved, issued


@pytest.mark.parametrize("codec", MOST, ids=str)
def test_no_byte_is_moved_twice(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of normal numbers."""
    monkeypatch.setattr(ptx, "translate", partial(translate, counted=True))
    monkeypatch.setattr(emulated, "_ptx_modules", {})
    numel = 5 * 4096 if codec.block_size else 64 * 4096  # entries are counted besides in words, tiles and blocks
    found: list[list[float]] = []
    wires, residual = torch.zeros(8, codec.wire_bytes(numel), dtype=torch.uint8), torch.zeros(numel)
    with emulated_gpu(EmulatedDevice(architecture=90, sm_count=1)) as device, use_backend("cuda"):
        workspace = codec.workspace(numel)
        for step, wire in enumerate(wires[:6]):
            device.launches.clear()
            moved_and_issued()
            codec.encode_feedback(gradient("normal", numel, step), residual, wire, new_draw(1, step), workspace)
        found.append([len(device.launches), *moved_and_issued()])
        device.launches.clear()
        wires[6:] = wires[:2]
        codec.decode_mean(parts_of(codec, wires, numel), torch.empty(numel), workspace)
        found.append([len(device.launches), *moved_and_issued()])
    found = [[launches, moved / numel, issued / numel] for launches, moved, issued in found]
    print(codec, found)
    assert (np.array(found) <= np.array(MOST[codec])).all()
