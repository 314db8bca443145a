"""The emulator itself: CUDA's semantics, and bugs that the checked build must report. Codecs' tests hold the rest."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cuda_on_cpu.compiler
import numpy as np
import pytest
import torch
from cuda_on_cpu import EmulationError, Module

SAMPLES = Path(__file__).parents[1] / "support" / "cuda_on_cpu" / "samples"
SCHEDULES: list[dict[str, Any]] = [
    {"order": "forward"},
    {"order": "reverse"},
    {"order": "random", "seed": 1},
    {"order": "random", "seed": 2},
]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: "-".join(map(str, s.values())))

Array = np.ndarray[Any, Any]
float32, int32, uint32 = np.float32, np.int32, np.uint32


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "checked"])
def checked(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def semantics(checked: bool) -> Module:
    return Module(SAMPLES / "semantics.cu", check=checked)


@pytest.fixture(scope="module")
def bugs() -> Module:
    return Module(SAMPLES / "bugs.cu", check=True)


def nans(shape: int | tuple[int, ...]) -> Array:
    return np.full(shape, np.nan, float32)


# ---- semantics


def signed(bits: int) -> int:
    return int(np.array([bits], uint32).view(int32)[0])


def mask(lanes: Sequence[bool] | Array) -> int:
    return signed(sum(1 << lane for lane, set_ in enumerate(lanes) if set_))


@every_schedule
def test_warp_collectives(semantics: Module, schedule: dict[str, Any]) -> None:
    v = np.random.default_rng(0).integers(0, 50, 32).astype(int32)
    out = np.full((16, 32), -1, int32)
    semantics.get_function("warp_ops", **schedule)((1,), (32,), (v, out))
    lane = np.arange(32)
    segment, end = lane & ~7, (lane & ~7) + 7
    expected = [
        np.full(32, mask(v & 1)),  # ballot
        np.full(32, (v == 7).any()),
        np.full(32, (v >= 0).all()),
        np.full(32, v[5]),  # shuffles, the second of each pair in segments of 8
        v[segment + ((lane + 3) & 7)],
        np.where(lane >= 3, v[lane - 3], v),
        np.where(lane % 8 >= 3, v[lane - 3], v),
        np.where(lane + 3 < 32, v[np.minimum(lane + 3, 31)], v),
        np.where(lane + 3 <= end, v[np.minimum(lane + 3, 31)], v),
        v[lane ^ 5],
        np.where((lane ^ 9) <= end, v[lane ^ 9], v),  # a later segment is out of reach, an earlier one is not
        np.full(32, v.sum()),  # reductions
        np.full(32, v.max()),
        np.array([mask((v & 3) == (own & 3)) for own in v]),  # match
        np.array([(n & -n).bit_length() + 100 * n.bit_count() + 10000 * (32 - n.bit_length()) for n in v.tolist()]),
        np.array([signed(int(f"{n:032b}"[::-1], 2)) for n in v.tolist()]),
    ]
    np.testing.assert_array_equal(out, np.array(expected))


@every_schedule
def test_threads_may_exit_before_a_collective(semantics: Module, schedule: dict[str, Any]) -> None:
    out = np.full((70, 3), -1, int32)
    semantics.get_function("divergent", **schedule)((1,), (128,), (out,))
    for thread in range(70):
        lane, lanes = thread % 32, range(32) if thread < 64 else range(6)
        votes = sum(other % 2 == lane % 2 and other > 10 for other in lanes)
        assert tuple(out[thread]) == (len(lanes), votes if lane % 2 else 100 + votes, 50 + 1000 + 2000), thread


def test_grids_and_blocks_have_three_dimensions(semantics: Module) -> None:
    out = np.full((24, 30), -1, int32)
    semantics.get_function("dims")((2, 3, 4), (5, 3, 2), (out,))
    np.testing.assert_array_equal(out, np.arange(24)[:, None] * 1000 + np.arange(30))


def test_each_instance_of_a_template_has_its_own_shared_memory(semantics: Module) -> None:
    out = nans(32)
    semantics.get_function("templated")((1,), (32,), (np.arange(32, dtype=int32), out))
    assert (out == 31 * 1.5).all()


def test_compare_and_swap_under_preemption(semantics: Module) -> None:
    x, largest = np.random.default_rng(0).random(1000, float32), np.zeros(1, float32)
    semantics.get_function("cas_max", preempt=3)((4,), (256,), (largest, x, 1000))
    assert largest[0] == x.max()


@pytest.mark.parametrize("flush", [False, True])
def test_subnormals_stay_unless_flushed(checked: bool, flush: bool) -> None:
    code = 'extern "C" __global__ void halve(float* x) { x[threadIdx.x] = x[threadIdx.x] * 0.5f; }'
    x = np.array([1e-38, 1e-44, 2.0], float32)
    Module(code=code, check=checked).get_function("halve", ftz=flush)((1,), (3,), (x,))
    np.testing.assert_array_equal(x, np.array([0, 0, 1] if flush else [0.5e-38, 5e-45, 1], float32))


def test_fibers_of_other_processors(checked: bool) -> None:
    portable = Module(SAMPLES / "semantics.cu", check=checked, options=["-DEMULATOR_UCONTEXT"])
    for schedule in SCHEDULES:
        test_threads_may_exit_before_a_collective(portable, schedule)


# ---- what the checked build reports


class Bug(NamedTuple):
    """A launch of one kernel of bugs.cu, and the report that is due."""

    report: str
    grid: int
    block: int
    arguments: Callable[[], tuple[Any, ...]]
    shared_mem: int = 0


X = np.linspace(-4e9, 4e9, 600).astype(float32)
BUGS = {
    "missing_sync": Bug("data race|uninitialised", 1, 256, lambda: (X, nans(256))),
    "missing_syncwarp": Bug("data race|uninitialised", 1, 32, lambda: (X, nans(32))),
    "reuse_without_sync": Bug("data race", 1, 64, lambda: (X, nans(64))),
    "lost_update": Bug("data race", 4, 64, lambda: (np.zeros(8, uint32), 200)),
    "oob_write": Bug("out-of-bounds 4-byte write", 4, 64, lambda: (nans(200), 200)),
    "oob_read": Bug("out-of-bounds 4-byte read", 4, 64, lambda: (X[:200].copy(), nans(200), 200)),
    "oob_shared": Bug("index out of bounds", 1, 32, lambda: (nans(32), 1)),
    "oob_dynamic": Bug("out-of-bounds", 1, 32, lambda: (nans(32),), shared_mem=100),
    "write_const": Bug("write to a const", 1, 32, lambda: (X,)),
    "misaligned": Bug("misaligned", 1, 4, lambda: (X, nans(4))),
    "uninit_shared": Bug("uninitialised __shared__", 1, 32, lambda: (nans(32),)),
    "barrier_divergent": Bug("divergent __syncthreads", 1, 64, lambda: (nans(64),)),
    "barrier_vs_ballot": Bug("deadlock", 1, 32, lambda: (np.zeros(32, int32),)),
    "shfl_exited": Bug("reads lane", 1, 32, lambda: (np.zeros(32, int32),)),
    "tail_ballot": Bug("deadlock", 1, 64, lambda: (np.zeros(2, uint32), X, 40)),
    "not_in_mask": Bug("not in mask", 1, 32, lambda: (np.zeros(32, int32),)),
    "bad_shift": Bug("shift count", 1, 32, lambda: (np.zeros(32, uint32), 4)),
    "bad_cast": Bug("float to integer", 1, 32, lambda: (np.zeros(32, int32), X)),
    "block_spin": Bug("livelock", 2, 1, lambda: (np.zeros(1, int32), np.zeros(2, int32))),
    "cross_block": Bug("data race", 2, 32, lambda: (nans(32),)),
}


def test_every_bug_has_a_report(bugs: Module) -> None:
    assert set(bugs.kernels) == set(BUGS)


@every_schedule
@pytest.mark.parametrize("kernel", BUGS)
def test_bug_is_reported(bugs: Module, kernel: str, schedule: dict[str, Any]) -> None:
    bug = BUGS[kernel]
    # Only in order does the block that waits run before the one that it waits for.
    options = SCHEDULES[0] if kernel == "block_spin" else schedule
    with pytest.raises(EmulationError, match=bug.report):
        bugs.get_function(kernel, **options)((bug.grid,), (bug.block,), bug.arguments(), shared_mem=bug.shared_mem)


def test_a_report_names_the_line(bugs: Module) -> None:
    line = next(
        number
        for number, text in enumerate((SAMPLES / "bugs.cu").read_text("utf-8").splitlines(), start=1)
        if "if (i <= n) o[i] = 1.0f;" in text
    )
    with pytest.raises(EmulationError, match=rf" at bugs\.cu:{line}$"):
        bugs.get_function("oob_write")((4,), (64,), BUGS["oob_write"].arguments())


def test_blocks_in_flight_may_wait_for_each_other(bugs: Module) -> None:
    flag, out = np.zeros(1, int32), np.zeros(2, int32)
    bugs.get_function("block_spin", order="forward", resident=2)((2,), (1,), (flag, out))
    assert out.tolist() == [1, 1]


def test_overruns_do_not_reach_a_neighbour(bugs: Module) -> None:
    memory = nans(300)
    with pytest.raises(EmulationError, match=r"runs|inside no array"):
        bugs.get_function("oob_write")((4,), (64,), (memory[:200], 200))
    assert np.isnan(memory[200:]).all()


# ---- what a launch refuses


ADD = """
extern "C" __global__ void add(float* out, const int* to, const float* from, float scale, int n) {
    __shared__ float sums[2];
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        sums[0] = scale * (from == nullptr ? 7 : from[i]);
        atomicAdd(out + to[i], sums[0]);
    }
}
"""


def test_impossible_launches_are_refused(checked: bool) -> None:
    add = Module(code=ADD, check=checked).get_function("add")
    out, to, one = nans(4), np.zeros(4, int32), float32(1)
    for wrong in (
        (out, to, out, 0.5, 4),  # a Python float, which CuPy passes as a double
        (out, out, out, one, 4),
        (out, to, out, one),
        (out, to, out[::2], one, 4),
        (out, to, out, one, 2**31),
        (out, to, torch.zeros(4, dtype=torch.int32), one, 4),
        (out, to, "out", one, 4),
    ):
        with pytest.raises(EmulationError, match="add"):
            add((1,), (4,), wrong)
    for grid, block in (((1,), (2048,)), ((0,), (32,)), ((1, 65536), (32,)), ((1,), (1, 1, 65))):
        with pytest.raises(EmulationError, match="invalid launch configuration"):
            add(grid, block, (out, to, out, one, 4))
    with pytest.raises(EmulationError, match="bytes of shared memory"):
        add((1,), (1,), (out, to, out, one, 4), shared_mem=50_000)
    with pytest.raises(EmulationError, match="no kernel 'nothing'"):
        Module(code=ADD, check=checked).get_function("nothing")
    with pytest.raises(EmulationError, match="compile failed"):
        Module(code='extern "C" __global__ void broken(int* p) { p = 1.0 }')


def test_views_of_tensors_and_null_pointers(checked: bool) -> None:
    add, memory = Module(code=ADD, check=checked).get_function("add"), torch.arange(20.0)
    for source, expected in ((memory[3:14], memory[3:14]), (None, torch.full((11,), 7.0))):
        target = torch.zeros(13)
        add((1,), (1,), (target[1:12], np.arange(11, dtype=int32), source, float32(1), 11))
        assert torch.equal(target[1:12], expected)
        assert target[0] == target[12] == 0


def test_missing_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmulationError, match=r"once g\+\+ is installed"):
        Module(code=f"// {os.getpid()}, never compiled before")


def test_cache_of_another_user_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.getuid()
    monkeypatch.setattr(cuda_on_cpu.compiler.os, "getuid", iter([user, user + 1]).__next__)
    with pytest.raises(EmulationError, match="belongs to another user"):
        Module(code="// anything")
