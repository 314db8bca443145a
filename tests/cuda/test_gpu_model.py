"""`gradwire-bench gpu-model`: it counts what it says it counts, and no kernel's instructions grow unnoticed."""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any

import pytest
from gradwire.benchmarks.gpu import gpu_model
from gradwire.benchmarks.gpu.gpu_model import GPUS, KERNELS, RANKS, Kernel, count, estimate, listing, nvdisasm, warps
from gradwire.benchmarks.gpu.sass import blocks_of, hot_path, loops_of
from nvrtc import build

#: Each compiles all kernels: `make test-all` does so for all three.
SLOW = pytest.mark.slow
#: Instructions an element on the hot path, at most: what there is today and a tenth. By sm_80, sm_90 and sm_100.
BUDGETS = {
    "onebit_encode_f32": (29, 29, 29),
    "qsgd_encode_f32": (50, 52, 57),
    "terngrad_encode_f32": (45, 45, 44),
    "topk_collect_f32": (49, 52, 53),
    "onebit_decode_f32": (45, 46, 42),
    "qsgd_decode_f32": (56, 59, 59),
    "ternary_decode_f32": (55, 55, 55),
}
#: At most so many times torch.add, by the model.
LIMITS = {
    "A100": {"encode": 1.08, "collect": 1.25, "onebit_decode": 0.47, "qsgd_decode": 0.75, "ternary_decode": 0.55},
    "H100": {"encode": 1.08, "collect": 1.25, "onebit_decode": 0.47, "qsgd_decode": 0.75, "ternary_decode": 0.55},
    # Its memory is so fast that the decoders' arithmetic takes longer.
    "B200": {"encode": 1.08, "collect": 1.25, "onebit_decode": 0.7, "qsgd_decode": 1.0, "ternary_decode": 0.93},
}


@functools.cache
def listed(file: str, architecture: int) -> str:
    return listing(build(file, architecture).cubin)


def counted(kernel: Kernel, architecture: int) -> dict[str, float]:
    return count(listed(kernel.file, architecture), kernel)


@pytest.mark.parametrize("which", [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW)])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.label)
def test_a_kernel_stays_within_its_budget(kernel: Kernel, which: int) -> None:
    gpu, budget = GPUS[which], BUDGETS[kernel.name][which]
    counts = counted(kernel, gpu.architecture)
    total = sum(counts.values())
    assert budget / 1.35 < total <= budget, f"sm_{gpu.architecture}: {total:.1f} instructions an element, {counts}"
    limit = next(limit for part, limit in LIMITS[gpu.name].items() if part in kernel.name)
    assert estimate(gpu, kernel, counts)["times_add"] <= limit
    # Whoever finds another path than the fast one finds other accesses.
    assert counts["store 16 B"] == 0.25, counts
    assert counts.get("load 16 B", 0) == (0 if kernel.at_once else 0.5), counts
    assert counts.get("local", 0) == 0


#: Instructions for an item of each of TopK's stages, as `BUDGETS`, and times torch.add for 100 M elements.
STAGE_BUDGETS = ((49, 52, 53), (24, 24, 29), (73, 73, 72), (109, 116, 112), (29, 29, 27))
WHOLE = {"A100": 1.15, "H100": 1.2, "B200": 1.38}


@pytest.mark.parametrize("which", [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW)])
def test_top_k_stays_within_its_budget(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = GPUS[which]
    for stage, budget in zip(gpu_model.TOPK, STAGE_BUDGETS, strict=True):
        total = sum(counted(stage.kernel, gpu.architecture).values())
        assert budget[which] / 1.35 < total <= budget[which], f"{stage.kernel.name} {stage.kernel.loop}: {total:.1f}"
    monkeypatch.setattr(gpu_model, "compiled", lambda file, sm: (listed(file, sm), ""))
    whole = gpu_model.encode(gpu, 100_000_000)
    assert whole["launches"] <= 5
    assert 1 < whole["streamed"] < whole["times_add"] <= WHOLE[gpu.name]


def test_an_encode_is_the_sum_of_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    _, h100, *_ = GPUS
    monkeypatch.setattr(gpu_model, "compiled", lambda file, sm: ("", ""))
    monkeypatch.setattr(gpu_model, "count", lambda listed, kernel: {"ALU": 1.0})
    first, second = Kernel("", "x", 1, 12.0), Kernel("", "y", 1, 6.0)
    stages = gpu_model.Stage(first, 1, launches=1), gpu_model.Stage(second, 0.5, launches=1, waits=2)
    found = gpu_model.encode(h100, 1_000_000, stages)
    assert found["streamed"] == pytest.approx(1.25)
    assert (found["launches"], found["waits"], found["instructions"]) == (2, 2, 1.5)
    add = 12e6 / (h100.bandwidth * h100.share)
    assert found["fixed"] == pytest.approx((2 * gpu_model.LAUNCH + 2 * gpu_model.WAIT) / add)
    assert found["times_add"] == found["streamed"] + found["fixed"]


def test_the_loop_that_is_meant() -> None:
    loop = ".text.f:\n" + LOOP.split(".text.f:")[1]
    found = count("\n" + loop, Kernel("", "f", 1, 0.0, loop=("FADD",)))
    assert found == {"FP32": 1, "branch": 1}
    with pytest.raises(ValueError, match="empty"):
        count("\n" + loop, Kernel("", "f", 1, 0.0, loop=("FADD", "HMMA")))


@pytest.mark.parametrize("architecture", [pytest.param(80, marks=SLOW), 90, pytest.param(100, marks=SLOW)])
def test_decoding_counts_every_rank(architecture: int) -> None:
    """A rank adds once to each element; what scales the sum is one more."""
    for kernel in KERNELS:
        if kernel.at_once:
            assert RANKS < counted(kernel, architecture)["FP32"] < 3 * RANKS, kernel.name


LOOP = """
.text.f:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   ISETP.NE.AND P0, PT, R2, RZ, PT ;
        /*0020*/              @!P0 BRA `(.L_x_3) ;
        /*0030*/                   LDG.E.128 R4, [R2.64] ;
.L_x_2:
        /*0040*/                   FADD R5, R5, R6 ;
        /*0050*/               @P2 BRA `(.L_x_2) ;
        /*0060*/                   STG.E.128 [R2.64], R4 ;
        /*0070*/                   BRA `(.L_x_4) ;
.L_x_3:
        /*0080*/                   LDG.E R4, [R2.64] ;
        /*0090*/                   MUFU.RCP R5, R6 ;
        /*00a0*/                   STG.E [R2.64], R4 ;
.L_x_4:
        /*00b0*/              @!P1 BRA `(.L_x_1) ;
        /*00c0*/                   EXIT ;
"""


def test_the_hot_path_through_a_loop() -> None:
    blocks = blocks_of(LOOP.splitlines())
    (loop,) = loops_of(blocks)
    assert loop.header == ".L_x_1"
    assert [inner.header for inner in loop.inner] == [".L_x_2"]
    wide = {r"LDG\.E\.128": 100.0}
    path = hot_path(blocks, loop, wide, {".L_x_2": 8.0})
    assert dict(path.counts) == {"ALU": 1, "branch": 11, "load 16 B": 1, "FP32": 8, "store 16 B": 1}
    other = hot_path(blocks, loop, {"MUFU": 100.0}, {})
    assert dict(other.counts) == {"ALU": 1, "branch": 2, "load narrow": 1, "XU": 1, "store narrow": 1}
    with pytest.raises(ValueError, match="no kernel g"):
        gpu_model.kernel_lines(LOOP, "g")


def test_what_binds() -> None:
    _, h100, *_ = GPUS
    kernel = Kernel("", "x", 1, 12.0)
    assert estimate(h100, kernel, {"ALU": 10.0})["binds"] == "memory"
    assert estimate(h100, kernel, {"ALU": 10.0})["times_add"] == 1.0
    found = estimate(h100, kernel, {"ALU": 80.0, "FP32": 40.0})
    assert found["binds"] == "integer"
    assert found["units"] == {"issue": 120, "integer": 160, "multiply-add": 40, "conversion": 0, "shuffle": 0}
    assert found["compute"] == pytest.approx(160 / (132 * 128 * h100.clock) / (12 / (h100.bandwidth * h100.share)))
    assert warps(h100, 64, 0) == 32
    assert warps(h100, 32, 100_000) == 16


def test_without_nvdisasm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvdisasm()
    monkeypatch.setattr(gpu_model.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_model.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="pip install nvidia-cuda-nvdisasm"):
        nvdisasm()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="nvdisasm cannot read"):
        listing(b"no machine code")


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_model, "compiled", lambda file, sm: (listed(file, sm), build(file, sm).log))
    out = tmp_path / "model.json"
    assert gpu_model.run(argparse.Namespace(gpus=["H100"], json=str(out))) == 0
    result = json.loads(out.read_text())
    assert [one["kernel"] for one in result["results"]] == [kernel.label for kernel in KERNELS]
    assert all(one["binds"] == "memory" for one in result["results"])
    assert [one["numel"] for one in result["encodes"]] == list(gpu_model.NUMELS)
    assert "A model, not measured" in capsys.readouterr().out
