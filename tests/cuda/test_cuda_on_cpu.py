"""The emulator itself: CUDA's semantics, sample kernels against NumPy, and bugs that the checked build must report."""

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
def samples(checked: bool) -> Module:
    return Module(SAMPLES / "samples.cu", check=checked)


@pytest.fixture(scope="module")
def bugs() -> Module:
    return Module(SAMPLES / "bugs.cu", check=True)


def divided_up(a: int, b: int) -> int:
    return -(-a // b)


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


# ---- sample kernels


@every_schedule
@pytest.mark.parametrize("n", [1, 31, 1000, 1024, 5000])
def test_onebit(samples: Module, n: int, schedule: dict[str, Any]) -> None:
    rng = np.random.default_rng(n)
    grad, before = rng.standard_normal(n).astype(float32), rng.standard_normal(n).astype(float32) * float32(0.1)
    residual, blocks = before.copy(), divided_up(n, 1024)
    words, means = np.full(divided_up(n, 32), 0xAAAAAAAA, uint32), nans((blocks, 2))
    encode = samples.get_function("onebit_encode", **schedule)
    encode((blocks,), (256,), (grad, residual, words, means, n))
    total = grad + before
    positive = np.zeros(divided_up(n, 32) * 32, np.uint8)
    positive[:n] = total >= 0
    np.testing.assert_array_equal(words, np.packbits(positive, bitorder="little").view(uint32))
    for block, mean in enumerate(means):
        values = total[block * 1024 : (block + 1) * 1024].astype(np.float64)
        sides = values[values >= 0], values[values < 0]
        np.testing.assert_allclose(mean, [side.mean() if len(side) else 0 for side in sides], rtol=2e-6)
    by_element = np.repeat(means, 1024, axis=0)[:n]
    decoded = np.where(positive[:n], by_element[:, 0], by_element[:, 1])
    np.testing.assert_array_equal(residual, total - decoded)
    out = nans(n)
    decode = samples.get_function("onebit_decode", **schedule)
    decode((divided_up(n, 128),), (128,), (words, means, out, 1024, n))
    np.testing.assert_array_equal(out, decoded)


def philox(counter: Sequence[Any], key: Sequence[int]) -> Array:
    """Philox4x32-10: four numbers for each counter."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(part, np.uint64) for part in counter)
    for turn in range(10):
        k0, k1 = (np.uint64((k + turn * weyl) % 2**32) for k, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & low, (p0 >> shift) ^ c3 ^ k1, p0 & low
    return np.stack([part.astype(uint32) for part in (c0, c1, c2, c3)], -1)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),  # from Random123's known-answer tests
    [
        ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox(samples: Module, counter: Sequence[int], key: Sequence[int], expected: str) -> None:
    out = np.zeros(4, uint32)
    samples.get_function("philox_raw")((1,), (1,), (out, *key, *counter))
    assert " ".join(f"{number:08x}" for number in out) == expected
    np.testing.assert_array_equal(philox(counter, key), out)


@every_schedule
@pytest.mark.parametrize("n", [1, 7, 1024, 5003])
def test_qsgd(samples: Module, n: int, schedule: dict[str, Any]) -> None:
    blocks, words = divided_up(n, 1024), divided_up(n, 8)
    padded = np.zeros(blocks * 1024, float32)
    x = padded[:n]
    x[:] = np.random.default_rng(n).standard_normal(n)
    codes, norms = np.full(words, 0xAAAAAAAA, uint32), nans(blocks)
    encode = samples.get_function("qsgd4_encode", **schedule)
    encode((blocks,), (128,), (x, codes, norms, n, 123, 456, 7))

    largest = np.abs(padded.reshape(blocks, 1024)).max(1)
    np.testing.assert_array_equal(norms, largest)
    word = np.arange(words)
    draws = [philox((word, np.full(words, half), np.full(words, 7), np.zeros(words)), (123, 456)) for half in (0, 1)]
    noise = (np.concatenate(draws, -1).reshape(-1) >> 8).astype(float32) * float32(2**-24)
    padded = padded[: words * 8]
    scale = np.repeat((float32(7) / largest).astype(float32), 1024)[: words * 8]
    levels = np.clip(np.floor(np.abs(padded) * scale + noise), 0, 7).astype(uint32)
    quantized = levels | np.where(padded < 0, 8, 0).astype(uint32)
    packed = (quantized.reshape(-1, 8) << (4 * np.arange(8, dtype=uint32))).sum(1, dtype=uint32)
    np.testing.assert_array_equal(codes, packed)

    out = torch.zeros(n, dtype=torch.bfloat16)
    decode = samples.get_function("qsgd4_decode_bf16", **schedule)
    decode((divided_up(n, 256),), (256,), (codes, norms, out, 1024, n))
    step = np.repeat((largest / float32(7)).astype(float32), 1024)[:n]
    decoded = step * levels[:n].astype(float32) * np.where(padded[:n] < 0, float32(-1), float32(1))
    assert torch.equal(out, torch.from_numpy(decoded.astype(float32)).bfloat16())


def kth_largest(samples: Module, x: Array, k: int, schedule: dict[str, Any]) -> Array:
    """Of the magnitudes' bits, by a radix select of four passes; and how many equal ones belong to the k largest."""
    histogram, state = np.zeros(256, uint32), np.array([0, k], uint32)
    for shift in (24, 16, 8, 0):
        count = samples.get_function("radix_hist", **schedule)
        count((7,), (256,), (x, histogram, state, shift, len(x)), shared_mem=1024)
        samples.get_function("radix_pick", **schedule)((1,), (256,), (histogram, state, shift))
    return state


@every_schedule
@pytest.mark.parametrize(("n", "k"), [(50, 1), (1000, 10), (5000, 500), (5000, 5000)])
def test_topk(samples: Module, n: int, k: int, schedule: dict[str, Any]) -> None:
    x = np.random.default_rng(n + k).standard_normal(n).astype(float32)
    x[::7] = x[0]  # ties
    magnitudes = np.abs(x).view(uint32)
    state = kth_largest(samples, x, k, schedule)
    assert state[0] == np.partition(magnitudes, n - k)[n - k]
    kept = np.nonzero(magnitudes >= state[0])[0]

    indices, values, count = np.full(n, -1, int32), nans(n), np.zeros(1, uint32)
    compact = samples.get_function("compact", **schedule)
    compact((divided_up(n, 256),), (256,), (x, state, indices, values, count, n, n))
    found = int(count[0])
    order = np.argsort(indices[:found])
    np.testing.assert_array_equal(indices[:found][order], kept)
    np.testing.assert_array_equal(values[:found][order], x[kept])
    assert (indices[found:] == -1).all()

    out, expected = np.zeros(n, float32), np.zeros(n, float32)
    expected[kept] = x[kept]
    for _ in range(2):
        scatter = samples.get_function("scatter_add", **schedule)
        scatter((divided_up(found, 128),), (128,), (out, indices, values, float32(0.5), found, n))
    np.testing.assert_array_equal(out, expected)


@every_schedule
@pytest.mark.parametrize("resident", [1, 3, 40])
def test_blocks_that_wait_for_earlier_blocks(samples: Module, resident: int, schedule: dict[str, Any]) -> None:
    n, blocks = 5000, 40
    x = np.random.default_rng(n).standard_normal(n).astype(float32)
    state = np.array([np.float32(1).view(uint32), 0], uint32)
    indices, values, count = np.full(n, -1, int32), nans(n), np.zeros(1, uint32)
    status, ticket = np.zeros(blocks, uint32), np.zeros(1, uint32)
    compact = samples.get_function("compact_lookback", **schedule)
    compact((blocks,), (128,), (x, state, indices, values, status, ticket, count, n), resident=resident)
    kept = np.nonzero(np.abs(x) >= 1)[0]
    assert count[0] == len(kept)
    np.testing.assert_array_equal(indices[: len(kept)], kept)
    np.testing.assert_array_equal(values[: len(kept)], x[kept])


def test_conversions(samples: Module, checked: bool) -> None:
    """Every float16, every bfloat16, what lies between neighbours, and random bits, as NumPy and torch convert them."""
    every_half = np.arange(65536, dtype=np.uint16).view(np.float16).astype(float32)
    every_bfloat = (np.arange(65536, dtype=uint32) << 16).view(float32)
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000 if checked else 400_000, dtype=uint32)
    with np.errstate(all="ignore"):
        between = ((every_half[:-1].astype(np.float64) + every_half[1:]) / 2).astype(float32)
        beside = np.nextafter(every_half, np.inf, dtype=float32)
        x = np.concatenate([every_half, every_bfloat, bits.view(float32), beside, between])
        halves = x.astype(np.float16)
    n, number = len(x), ~np.isnan(x)
    half, bfloat = np.zeros(n, np.float16), torch.zeros(n, dtype=torch.bfloat16)
    from_half, from_bfloat = nans(n), nans(n)
    convert = samples.get_function("convert")
    convert((divided_up(n, 256),), (256,), (x, half, bfloat, from_half, from_bfloat, n))

    np.testing.assert_array_equal(half.view(np.uint16)[number], halves.view(np.uint16)[number])
    assert np.isnan(half[~number]).all()
    bfloats = torch.from_numpy(x).bfloat16()
    bfloat_bits, expected = bfloat.view(torch.int16).numpy(), bfloats.view(torch.int16).numpy()
    np.testing.assert_array_equal(bfloat_bits[number], expected[number])
    np.testing.assert_array_equal(from_half[number], halves.astype(float32)[number])
    np.testing.assert_array_equal(from_bfloat[number], bfloats.float().numpy()[number])


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


COPY = """
extern "C" __global__ void copy(const unsigned short* from, unsigned short* to, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = from == nullptr ? 7 : from[i];
}
"""


@pytest.mark.parametrize(
    "arguments",
    [
        lambda a, i: (a, i, a, 0.5, 4, 4),  # a Python float, which CuPy passes as a double
        lambda a, i: (a, a, a, float32(1), 4, 4),
        lambda a, i: (a, i, a, float32(1), 4),
        lambda a, i: (a, i, a[::2], float32(1), 4, 4),
        lambda a, i: (a, i, a, float32(1), 2**31, 4),
        lambda a, i: (a, i, torch.zeros(4, dtype=torch.int32), float32(1), 4, 4),
        lambda a, i: (a, i, "a", float32(1), 4, 4),
    ],
)
def test_wrong_arguments_are_refused(samples: Module, arguments: Callable[[Array, Array], tuple[Any, ...]]) -> None:
    with pytest.raises(EmulationError, match="scatter_add"):
        samples.get_function("scatter_add")((1,), (4,), arguments(nans(4), np.zeros(4, int32)))


@pytest.mark.parametrize(("grid", "block"), [((1,), (2048,)), ((0,), (32,)), ((1, 65536), (32,)), ((1,), (1, 1, 65))])
def test_impossible_launches_are_refused(samples: Module, grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    a, i = nans(4), np.zeros(4, int32)
    with pytest.raises(EmulationError, match="invalid launch configuration"):
        samples.get_function("scatter_add")(grid, block, (a, i, a, float32(1), 4, 4))


def test_too_much_shared_memory_is_refused(samples: Module) -> None:
    arguments = nans(4), np.zeros(256, uint32), np.zeros(2, uint32), 24, 4
    with pytest.raises(EmulationError, match="bytes of shared memory"):
        samples.get_function("radix_hist")((1,), (256,), arguments, shared_mem=49152)


def test_views_of_tensors_and_null_pointers(checked: bool) -> None:
    copy = Module(code=COPY, check=checked).get_function("copy")
    memory = torch.arange(20, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16, torch.int16):
        source, target = memory.to(dtype)[3:14], torch.zeros(13, dtype=dtype)
        copy((1,), (32,), (source.view(torch.int16), target[1:12].view(torch.int16), 11))
        assert torch.equal(target[1:12], source)
        assert target[0] == target[12] == 0
    whole = torch.zeros(3, dtype=torch.int16)
    copy((1,), (32,), (None, whole, 3))
    assert whole.tolist() == [7, 7, 7]


def test_unknown_kernels_and_broken_sources_are_reported(samples: Module) -> None:
    with pytest.raises(EmulationError, match="no kernel 'nothing'"):
        samples.get_function("nothing")
    with pytest.raises(EmulationError, match="compile failed"):
        Module(code='extern "C" __global__ void broken(int* p) { p = 1.0 }')


def test_missing_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmulationError, match=r"once g\+\+ is installed"):
        Module(code=f"// {os.getpid()}, never compiled before")


def test_cache_of_another_user_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.getuid()
    monkeypatch.setattr(cuda_on_cpu.compiler.os, "getuid", iter([user, user + 1]).__next__)
    with pytest.raises(EmulationError, match="belongs to another user"):
        Module(code="// anything")
