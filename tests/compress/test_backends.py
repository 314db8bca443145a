"""Every backend writes the bytes of the reference, reads what the reference reads, and fuses without a difference."""

from __future__ import annotations

import functools
import io
import math
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import pytest
import torch
from gradwire.benchmarks.codec.speed import torch_threads
from gradwire.compress import CODECS, QSGD, Cast, Codec, RandomK, TernGrad, Threshold, TopK, new_draw
from gradwire.compress.backends import (
    Kernels,
    LowPrecisionVector,
    Workspace,
    _backend,
    backend_kernels,
    backend_names,
    entries_for,
    use_backend,
)
from gradwire.compress.backends.cpu import block_codec
from gradwire.compress.backends.cpu.kernels import topk
from gradwire.compress.backends.cpu.runtime import threads as cpu_threads
from gradwire.compress.backends.cpu.runtime.blocks import random_bits
from gradwire.compress.backends.reference import arithmetic
from gradwire.compress.backends.sparse import Pieces
from gradwire.compress.codec import DTYPES
from guarded import Guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    ALL_BACKENDS,
    OTHER_BACKENDS,
    VARIANTS,
    Case,
    cases,
    device_of,
    gradient,
    hostile_wires,
    kernels_of,
    parts_of,
    same,
)
from torch import Tensor

every_codec = pytest.mark.parametrize("codec", VARIANTS, ids=str)
other_backends = pytest.mark.parametrize("backend", OTHER_BACKENDS)


def outcome_of(
    codec: Codec, backend: str, case: Case, hostile: Tensor, alpha: float, kept_as: torch.dtype, composed: bool
) -> list[Tensor]:
    """All that a codec's kernels write: wires, residuals, and what they make of hostile wires [ranks, bytes], with
    what they count. Composed: each fused form by `encode` and `decode_add` alone.
    """
    kernels, device = kernels_of(backend, codec), device_of(backend)
    guarded = Guarded(device, case.offset, ("front", "back")[case.seed % 2])
    workspace = kernels.workspace(codec, case.numel, device)
    encode_feedback: Any = functools.partial(Kernels.encode_feedback, kernels) if composed else kernels.encode_feedback
    x = case.gradient().float() if composed else case.gradient()  # half precision is encoded as its float32
    grad, draw = guarded.put(x), case.draw().to(device)
    whole, fed, low = (
        guarded.put(torch.full((codec.wire_bytes(case.numel),), fill + composed, dtype=torch.uint8))
        for fill in (0, 2, 4)
    )
    residual = guarded.put(case.residual())
    kernels.encode(codec, guarded.put(3 * x), whole, draw, workspace)  # which changes nothing
    kernels.encode(codec, grad, whole, draw, workspace)
    encode_feedback(codec, grad, residual, fed, draw, workspace)
    kept = LowPrecisionVector(_backend(backend).low_precision, case.numel, kept_as, device)
    kept.write(case.residual().to(device))
    if composed:
        wide = kept.read()
        encode_feedback(codec, grad, wide, low, draw, workspace)
        kept.write(wide)
    else:
        kernels.encode_low_precision(codec, grad, kept, low, draw, workspace)
    assert workspace.status.tolist() == [0, 0]
    assert same(grad.cpu(), x)
    assert same(draw.cpu(), case.draw())
    mean = guarded.put(torch.full((case.numel,), 3.0, dtype=case.dtype))
    total = guarded.put(gradient("normal", case.numel, 1))
    rows = hostile.to(device)
    decode_mean: Any = functools.partial(Kernels.decode_mean, kernels) if composed else kernels.decode_mean
    parts = parts_of(codec, rows, case.numel)
    if case.offset % 2:  # without a pitch
        parts = tuple(guarded.put(part) for part in parts)
    decode_mean(codec, parts, mean, workspace)
    kernels.decode_add(codec, guarded.put(rows[0]), total, alpha, workspace)
    assert guarded.untouched()
    return [x.cpu().clone() for x in (whole, fed, low, residual, *kept.parts, mean, total, workspace.status)]


@functools.lru_cache(maxsize=16)  # each backend is held against the same draws
def reference_of(codec: Codec, case: Case, ranks: int, alpha: float, kept_as: torch.dtype) -> list[Tensor]:
    hostile = hostile_wires(codec, case.numel, ranks, case.seed % 1000)
    return outcome_of(codec, "reference", case, hostile, alpha, kept_as, composed=True)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@every_codec
@settings(max_examples=10, deadline=None)
@given(
    case=cases(),
    ranks=st.integers(1, 4),
    alpha=st.sampled_from([1.0, 0.1, -2.5]),
    kept_as=st.sampled_from([torch.bfloat16, torch.int8]),
)
def test_every_backend_does_what_the_reference_does(
    codec: Codec, backend: str, case: Case, ranks: int, alpha: float, kept_as: torch.dtype
) -> None:
    """To the bit: fused as composed, whatever the gradient, its dtype and address, and whatever bytes arrive."""
    hostile = hostile_wires(codec, case.numel, ranks, case.seed % 1000)
    wanted = reference_of(codec, case, ranks, alpha, kept_as)
    found = outcome_of(codec, backend, case, hostile, alpha, kept_as, composed=False)
    assert [same(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * len(wanted)


def outcome(codec: Codec, x: Tensor, wires: Tensor) -> tuple[Tensor, ...]:
    """All that the CPU kernels give for one gradient."""
    workspace, residual, out = codec.workspace(x.numel()), torch.ones(x.numel()), torch.empty(x.numel())
    wire = torch.empty(codec.wire_bytes(x.numel()), dtype=torch.uint8)
    codec.encode_feedback(x, residual, wire, new_draw(1), workspace)
    codec.decode_mean(parts_of(codec, wires, x.numel()), out, workspace)
    return wire, residual, out, workspace.status


@pytest.mark.parametrize("codec", [c for c in VARIANTS if not isinstance(c, RandomK)], ids=str)  # which is in torch
def test_threads_do_not_change_a_byte(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    numel = 50_001
    x, wires = gradient("wide", numel, 3), hostile_wires(codec, numel, 4, 8)
    with torch_threads(1):
        expected = outcome(codec, x, wires)
    monkeypatch.setattr(cpu_threads, "ELEMENTS_PER_THREAD", 1 << 12)
    submitted: list[int] = []
    pool = cpu_threads.pool()
    monkeypatch.setattr(cpu_threads, "pool", lambda: Counting(pool, submitted))
    with torch_threads(3):
        results = outcome(codec, x, wires)
    assert submitted, "nothing ran on a second thread"
    assert all(same(a, b) for a, b in zip(results, expected, strict=True))


class Counting:
    def __init__(self, pool: Any, submitted: list[int]) -> None:
        self.pool, self.submitted = pool, submitted

    def submit(self, *args: Any) -> Any:
        self.submitted.append(1)
        return self.pool.submit(*args)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_two_threads_at_once(codec: Codec) -> None:
    """As autograd's thread and the pipeline's do."""
    xs = [gradient("normal", 40_000, seed) for seed in range(2)]
    wires = hostile_wires(codec, 40_000, 2, 4)
    expected, results = [outcome(codec, x, wires) for x in xs], [[], []]  # type: ignore[var-annotated]

    def work(which: int) -> None:
        for _ in range(5):
            results[which].append(outcome(codec, xs[which], wires))

    both = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    for which in range(2):
        assert len(results[which]) == 5
        assert all(same(a, b) for got in results[which] for a, b in zip(got, expected[which], strict=True))


PREDICTING = [
    *(TopK(density=density) for density in (0.001, 0.01, 0.3, 1.0)),
    *(
        Threshold(threshold, most)
        for threshold, most in ((0.5, 0.01), (0.5, 1.0), (1e-30, 0.01), (2.5, 0.1), (1e30, 0.1))
    ),
]


@pytest.mark.parametrize("codec", PREDICTING, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_prediction_never_changes_the_bytes(
    codec: Codec, dtype: torch.dtype, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of where the k-th largest lies: right, too high or too low, the k largest are the k largest."""
    numel = 20_000
    for module in (topk, block_codec):
        monkeypatch.setattr(module, "pieces_of", lambda elements, count: min(pieces, count))
    kernels: Any = kernels_of("cpu", codec)
    specification = kernels_of("reference", codec)
    workspace = kernels.workspace(codec, numel, torch.device("cpu"))
    residuals = [torch.zeros(numel), torch.zeros(numel)]
    wires = [torch.empty(codec.wire_bytes(numel), dtype=torch.uint8) for _ in range(2)]
    story = ["normal", "normal", "tiny", "wide", "zeros", "normal", "not finite", "subnormal", "any bits", "ties"]
    for step, kind in enumerate(story):
        grad = gradient(kind, numel, step, dtype)
        specification.encode_feedback(codec, grad, residuals[0], wires[0], None, Workspace.on("cpu"))
        kernels.encode_feedback(codec, grad, residuals[1], wires[1], None, workspace)
        assert same(*wires), (step, kind)
        assert same(*residuals), (step, kind)
    lowest = kernels.lowest(codec)
    for threshold in {max(lowest, key) for key in (1, 2, 0x3F800000, 0x40400000, 0x7F7FFFFF)}:
        for kind in story:
            residuals[1].copy_(residuals[0])
            guess = topk.Estimate(threshold, threshold + 20_000 * (threshold % 3), threshold + 100_000)
            monkeypatch.setattr(kernels, "_estimate", lambda *_, guess=guess: guess)
            grad = gradient(kind, numel, threshold, dtype)
            kept = residuals[0].clone()
            specification.encode_feedback(codec, grad, residuals[0], wires[0], None, Workspace.on("cpu"))
            kernels.encode_feedback(codec, grad, residuals[1], wires[1], None, workspace)
            assert same(*wires), (threshold, kind)
            assert same(*residuals), (threshold, kind)
            residuals[0].copy_(kept)


@pytest.mark.parametrize("run", [1, 64, 2048])
@pytest.mark.parametrize(("density", "most"), [(0.001, 1.8), (0.01, 1.6), (0.1, 1.3)])
def test_a_sampled_threshold_finds_little_more_than_k(run: int, density: float, most: float) -> None:
    """And no fewer, whatever the scale: a second pass is rare, even where elements that lie together are alike."""
    numel, gradients = 1 << 20, []
    for step in range(40):
        generator = torch.Generator().manual_seed(step)
        scales = torch.randn(numel // run, 1, generator=generator).exp() if run > 1 else torch.ones(numel, 1)
        gradients.append((torch.randn(numel // run, run, generator=generator) * scales).flatten() * 10.0 ** (step % 5))
    found = candidates(TopK(density=density), gradients)
    assert sum(ratio < 1 for ratio in found) <= (0 if run == 1 else 4), found
    assert sorted(found)[len(found) // 2] < (most if run == 1 else 2 * most), found


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_a_sample_sees_every_column_of_a_matrix(scale: float) -> None:
    gradients = []
    for step in range(10):
        x = torch.randn(128, 8192, generator=torch.Generator().manual_seed(step))
        x[:, :64] *= scale
        gradients.append(x.flatten())
    found = candidates(TopK(density=0.01), gradients)
    assert all(1 <= ratio < 2 for ratio in found[1:]), found


def test_a_workspace_grows_with_the_codec_that_uses_it() -> None:
    """A lower density samples more: as much as its own workspace has room for, and nothing beyond."""
    numel, kernels = 1 << 18, backend_kernels("cpu")["topk"]
    codec, x = TopK(density=0.001), torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    own, other = (kernels.workspace(c, numel, torch.device("cpu")) for c in (codec, TopK(density=0.5)))
    wires = [torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8) for _ in range(2)]
    for workspace, wire in zip((own, other), wires, strict=True):
        kernels.encode(codec, x, wire, None, workspace)
    assert len(other.buffers["sample"]) == len(own.buffers["sample"])
    assert torch.equal(*wires)


def candidates(codec: TopK, gradients: Sequence[Tensor]) -> list[float]:
    """Of each of several gradients, how many elements are at or above the predicted threshold, over k."""
    numel, kernels = len(gradients[0]), backend_kernels("cpu")["topk"]
    workspace = kernels.workspace(codec, numel, torch.device("cpu"))
    wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8)
    found = []
    for x in gradients:
        kernels.encode(codec, x, wire, None, workspace)
        keys = x.view(torch.int32) & 0x7FFFFFFF
        found.append(int((keys >= workspace.buffers["threshold"]).sum()) / codec.k(numel))
    return found


@pytest.mark.parametrize("codec", [*CODECS, TopK(values=torch.bfloat16), TopK(values=torch.int8)], ids=str)
def test_prepare_compiles_all_that_is_ever_run(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled() -> int:
        return sum(
            len(function.signatures)
            for name, module in list(sys.modules.items())
            if name.startswith("gradwire.compress.backends.cpu.")
            for function in vars(module).values()
            if hasattr(function, "signatures")
        )

    kernels_of("cpu", codec).prepare(codec, torch.float32, torch.device("cpu"))
    before = compiled()
    for dtype in DTYPES:
        for numel in (1, 1000, 300_000):
            workspace, x = codec.workspace(numel), torch.randn(numel).to(dtype)
            wire, draw = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8), new_draw(-1, 1 << 40, -1)
            codec.encode(x, wire, draw, workspace)
            codec.encode_feedback(x, torch.zeros(numel), wire, draw, workspace)
            codec.decode_add(wire, torch.zeros(numel), 0.5, workspace)
            codec.decode_mean(parts_of(codec, torch.stack([wire, wire]), numel), x, workspace)
            if codec.name == "topk":
                # A threshold that was predicted too high: a second pass.
                monkeypatch.setattr(backend_kernels("cpu")["topk"], "_estimate", lambda *_: topk.Estimate(1 << 30, 1))
                codec.encode_feedback(x, torch.zeros(numel), wire, draw, workspace)
                exchange_entries(numel)
    assert compiled() == before


def exchange_entries(numel: int) -> None:
    """All that exchanges do with the entries of a codec, whether that packs them or not."""
    entries, n = entries_for(torch.device("cpu")), min(numel, 50)
    indices, values, residual = torch.arange(n, dtype=torch.int32), torch.randn(n), torch.zeros(numel)
    pieces = Pieces([n], [0], [numel])
    wire = torch.zeros(sum(pieces.index_sizes()), dtype=torch.uint8)
    entries.pack_index_pieces(indices, pieces, wire)
    entries.unpack_index_pieces(wire, pieces, indices)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        wire = torch.zeros(sum(pieces.value_sizes(dtype)), dtype=torch.uint8)
        entries.pack_value_pieces(values, pieces, dtype, wire)
        entries.unpack_value_pieces(wire, pieces, dtype, values)
        entries.pack_values(values, dtype, wire)
        entries.unpack_values(wire[None], dtype, values[None])
    entries.put_back((indices, values), indices[:1], residual)
    entries.merge(indices, values, [0, n], 0, numel, torch.empty_like(indices), torch.empty_like(values))


# Numbers.

#: Salmon et al.'s own vectors for philox4x32-10 (Random123's kat_vectors): counter, key, result.
KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def signed(low: int, high: int) -> int:
    """Two 32-bit words as the signed 64-bit number they are in."""
    return (low | high << 32) - (1 << 64 if high >> 31 else 0)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    group, step = counter[0], counter[2]
    seed, stream = signed(*key), signed(counter[1], counter[3])
    words = arithmetic.philox(seed, step, stream, np.array([group]))
    assert tuple(words[0].tolist()) == expected
    draws = np.zeros(128, np.uint16)
    random_bits(draws.ctypes.data, seed, step, stream, group, 128)
    assert tuple(draws.view("<u4")[:4].tolist()) == expected


def test_philox_positions_agree() -> None:
    draws = np.zeros(1280, np.uint16)
    random_bits(draws.ctypes.data, -5, 77, -(1 << 62), (1 << 32) - 20, 1280)
    groups = (np.arange((1 << 32) - 20, (1 << 32) + 140)) & 0xFFFFFFFF
    assert (draws == arithmetic.philox(-5, 77, -(1 << 62), groups).view("<u2").reshape(-1)).all()


@pytest.mark.parametrize("backend", backend_names())
@pytest.mark.parametrize("codec", [QSGD(bits=2, block=256), QSGD(bits=2), TernGrad(clip=math.inf)], ids=str)
@pytest.mark.parametrize("ids", [(0, 0, 0), (-1, 7, -1), (0x299F31D0A4093822, 0x113198A2E, 3 << 40 | 5)])
def test_the_wire_shows_the_very_draws_of_philox(backend: str, codec: Codec, ids: tuple[int, int, int]) -> None:
    numel, block = 4000, codec.block_size
    words = arithmetic.philox(*ids, np.arange(numel // 8)).astype("<u4").view("<u2").reshape(-1)
    draws = torch.from_numpy(words.astype(np.float32))
    workspace = codec.workspace(numel)
    # One minus a draw's share rounds up to one; a 2^-16 less of it does not.
    for below, expected in ((0, 1.0), (1, 0.0)):
        x = 1 - (draws + below) / 65536
        x[::block] = 1.0  # every block's scale
        wire, out = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8), torch.zeros(numel)
        with use_backend(backend):
            codec.encode(x, wire, new_draw(*ids), workspace)
            codec.decode_add(wire, out, 1.0, workspace)
        out[::block] = expected
        assert bool((out == expected).all())


@other_backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_is_read_exactly_and_every_rounding_is_to_nearest_even(backend: str, dtype: torch.dtype) -> None:
    kernels, device = kernels_of(backend, Cast(dtype)), device_of(backend)
    halves = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    numel = halves.numel()
    workspace, out = kernels.workspace(Cast(dtype), numel, device), torch.zeros(numel, device=device)
    kernels.decode_add(Cast(dtype), halves.view(torch.uint8).to(device), out, 1.0, workspace)
    assert same(out.cpu(), halves.float() + 0.0)
    # Each half, the middle to the next one, and the floats beside that middle.
    bits = halves.float().view(torch.int32).long()
    step = 1 << (13 if dtype == torch.float16 else 16)
    around = torch.cat([bits + step // 2 + d for d in (-step // 2, -1, 0, 1)]).to(torch.int32).view(torch.float32)
    tiny = torch.arange(1 << 12).float() * 2.0**-27
    x = torch.cat([around, tiny, -tiny])
    wire = torch.empty(2 * x.numel(), dtype=torch.uint8, device=device)
    kernels.encode(Cast(dtype), x.to(device), wire, None, kernels.workspace(Cast(dtype), x.numel(), device))
    assert same(wire.cpu().view(dtype), x.to(dtype))


def test_without_numbas_compiler_the_reference_serves() -> None:
    script = (
        "import torch, gradwire\n"
        "x, codec = torch.linspace(-1, 1, 300), gradwire.QSGD(bits=4, rounding='nearest')\n"
        "wire = torch.empty(codec.wire_bytes(300), dtype=torch.uint8)\n"
        "codec.encode(x, wire, None, codec.workspace(300, x.device))\n"
        "print(wire.tolist())\n"
    )
    environment, here = {**os.environ, "NUMBA_DISABLE_JIT": "1"}, io.StringIO()
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, env=environment)
    with redirect_stdout(here):
        exec(script, {})
    assert found.stdout == here.getvalue() != ""
    assert "NUMBA_DISABLE_JIT is set" in found.stderr
