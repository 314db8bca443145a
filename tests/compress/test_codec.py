"""The contract of `compress.codec`, over every codec; and a test for each mistake that peers have made.

On CPUs alone: `test_backends.py` holds every backend to the same bits.
"""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from golden import FOLDER, GRADIENT, Golden, saved
from gradwire.compress import (
    CODECS,
    QSGD,
    Cast,
    ChunkedTopK,
    Codec,
    Identity,
    OneBit,
    PowerSGD,
    RandomK,
    Ternary,
    TernGrad,
    Threshold,
    TopK,
    new_draw,
)
from gradwire.compress.backends.reference import arithmetic
from gradwire.compress.codec import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    FINITE,
    LENGTHS,
    VARIANTS,
    Case,
    cases,
    decode,
    encode,
    gradient,
    parts_of,
    same,
)
from torch import Tensor

every_codec = pytest.mark.parametrize("codec", VARIANTS, ids=str)
stochastic_codecs = pytest.mark.parametrize(
    "codec", [c for c in VARIANTS if c.stochastic and not c.default_feedback], ids=str
)
sliced_codecs = pytest.mark.parametrize("codec", [c for c in VARIANTS if c.block_size], ids=str)


def feedback(
    codec: Codec, grad: Tensor, residual: Tensor, draw: Tensor | None = None, steps: int = 1
) -> tuple[Tensor, Tensor]:
    """(decoded, new residual)"""
    residual, wire = (
        residual.clone(),
        torch.empty(codec.wire_bytes(grad.numel()), dtype=torch.uint8),
    )
    draw = new_draw(0) if draw is None else draw
    codec.encode_feedback(grad, residual, wire, draw, codec.workspace(grad.numel()))
    return decode(codec, wire, grad.numel()), residual


# Sizes and bytes.


@every_codec
def test_size_is_a_function_of_numel_alone_and_whole_records(codec: Codec) -> None:
    for numel in (*LENGTHS, 10**6, 10**8):
        parts = codec.parts(numel)
        assert codec.wire_bytes(numel) == sum(codec.part_bytes(numel)) == sum(p.nbytes for p in parts)
        assert all(part.record.itemsize % 4 == 0 for part in parts)
        if codec.block_size:
            assert parts[0].records == -(-numel // codec.block_size)


def test_element_counts_are_exact_where_float32_is_not() -> None:
    """n = 67108865 in float32 loses its last element, and one block with it."""
    numel = 67_108_865
    assert OneBit(block=1024).wire_bytes(numel) == (65536 + 1) * (8 + 128)
    assert QSGD(bits=4, block=512).wire_bytes(numel) == (131072 + 1) * (4 + 256)
    assert Identity().wire_bytes(numel) == 4 * numel
    for numel in (10**2, 10**3, 10**6, 2**24 + 1, 2**31 - 1):
        for density in (0.01, 0.07, 0.001, 1 / 3, 1.0):
            assert TopK(density).k(numel) == max(1, math.ceil(Fraction(repr(density)) * numel))
    assert TopK(0.07).k(100) == 7


def test_padding_is_zero_on_the_wire() -> None:
    used = {OneBit(): 8 + 13, QSGD(bits=4): 4 + 50, TernGrad(): 4 + 100, Ternary(): 4 + 100, Cast(): 200}
    for codec, count in used.items():
        assert not encode(codec, torch.full((100,), -1.0))[count:].any(), codec


@pytest.mark.parametrize("codec", [c for c in VARIANTS if c.block_size and not c.stochastic], ids=str)
@pytest.mark.parametrize("kind", ["normal", "not finite"])
def test_a_slice_of_the_gradient_is_a_slice_of_the_wire(codec: Codec, kind: str) -> None:
    """With draws too, but those follow the position in what is encoded."""
    assert codec.block_size is not None
    block, numel = codec.block_size, 5 * codec.block_size + 3
    x = gradient(kind, numel, 2)
    wire, record = encode(codec, x), codec.wire_bytes(block)
    for first in range(5):
        assert same(encode(codec, x[first * block :]), wire[first * record :])
        assert same(encode(codec, x[: (first + 1) * block]), wire[: (first + 1) * record])


@sliced_codecs
def test_wires_end_to_end_decode_as_one(codec: Codec) -> None:
    assert codec.block_size is not None
    block, tail = codec.block_size, 7
    x = gradient("normal", 3 * block + tail, 3)
    pieces = [x[:block], x[block : 3 * block], x[3 * block :]]
    draws = [new_draw(1, stream=i) for i in range(3)]
    wires = [encode(codec, piece, draw) for piece, draw in zip(pieces, draws, strict=True)]
    separate = torch.cat([decode(codec, wire, piece.numel()) for wire, piece in zip(wires, pieces, strict=True)])
    assert same(decode(codec, torch.cat(wires), x.numel()), separate)


@every_codec
def test_decoding_adds_alpha_times_and_a_mean_is_the_sum_in_rank_order(codec: Codec) -> None:
    numel, ranks = 2500, 3
    wires = torch.stack([encode(codec, gradient("normal", numel, rank)) for rank in range(ranks)])
    decoded = [decode(codec, wire, numel) for wire in wires]
    workspace, out = codec.workspace(numel), torch.ones(numel)
    codec.decode_add(wires[0], out, -0.5, workspace)
    assert same(out, 1 - 0.5 * decoded[0])
    for dtype in DTYPES:
        mean = torch.empty(numel, dtype=dtype)
        codec.decode_mean(parts_of(codec, wires, numel), mean, workspace)
        assert same(mean, ((decoded[0] + decoded[1] + decoded[2]) * (torch.tensor(1.0) / ranks)).to(dtype))


# Laws.


@every_codec
@settings(max_examples=20, deadline=None)
@given(case=cases(FINITE))
def test_nothing_is_lost(codec: Codec, case: Case) -> None:
    """decoded + new residual = gradient + old residual."""
    grad, old = case.gradient(), case.residual()
    if not (grad.isfinite().all() and (grad.float() + old).isfinite().all()):
        return  # a wide gradient in half precision
    decoded, new = feedback(codec, grad, old, case.draw())
    sent = decoded.isfinite()  # beyond float16's range a value is not
    assert same(new[~sent], old[~sent])
    have, want = (decoded.double() + new)[sent], (grad.double() + old)[sent]
    assert float((have - want).norm()) <= 1e-6 * max(float(want.norm()), float(decoded[sent].norm())) + 1e-44


@every_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_is_seen_and_the_residual_keeps_its_value(codec: Codec, bad: float) -> None:
    numel, at = 4000, 2600
    grad, old = gradient("normal", numel, 1), gradient("normal", numel, 2)
    grad[at] = bad
    decoded, new = feedback(codec, grad, old)
    assert not decoded[at].isfinite()
    assert new.isfinite().all()
    hit = ~decoded.isfinite()
    assert same(new[hit], old[hit])
    block = codec.block_size
    if isinstance(codec, RandomK):  # which might not have drawn it
        assert hit.all()
    elif isinstance(codec, PowerSGD):  # all of its matrix
        start, rows, columns = codec.pieces(numel)[0]
        assert hit[start : start + rows * columns].all()
        assert int(hit.sum()) == rows * columns
    elif block is None or block < 256:
        assert int(hit.sum()) == 1
    else:  # all of its block, nothing else
        assert hit[at // block * block : (at // block + 1) * block].all()
        assert int(hit.sum()) == min(block, numel - at // block * block)
    # On one rank of three it shows in the mean of all, and is counted.
    clean = encode(codec, old)
    dirty = encode(codec, grad)
    out, workspace = torch.empty(numel), codec.workspace(numel)
    codec.decode_mean(parts_of(codec, torch.stack([clean, dirty, clean]), numel), out, workspace)
    assert not out[at].isfinite()
    assert workspace.status.tolist() == [0, 1]


@pytest.mark.parametrize(
    "codec",
    [OneBit(), QSGD(norm="l2"), QSGD(rounding="nearest"), TernGrad(), Ternary(), TopK(0.5)],
    ids=str,
)
def test_sums_that_overflow_are_seen_or_avoided(codec: Codec) -> None:
    x = torch.full((2000,), 3.4e38)
    decoded, new = feedback(codec, x, torch.zeros_like(x))
    assert new.isfinite().all()
    if codec.name in ("onebit", "ternary"):
        assert not decoded.isfinite().any()  # a mean of finite numbers whose sum is not
    if codec == QSGD(rounding="nearest"):
        assert torch.allclose(decoded, x)


@stochastic_codecs
def test_unbiased(codec: Codec) -> None:
    numel, draws = 1280, 200
    x = gradient("normal", numel, 1)
    unclipped, workspace = x, codec.workspace(numel)
    if isinstance(codec, TernGrad):
        limit = codec.clip * float(x.double().square().mean().sqrt())
        unclipped = x.clamp(-limit, limit)
    wire, total, squares = encode(codec, x), torch.zeros(numel).double(), torch.zeros(numel).double()
    for step in range(draws):
        codec.encode(x, wire, new_draw(5, step, 6), workspace)
        decoded = decode(codec, wire, numel).double()
        total, squares = total + decoded, squares + decoded.square()
    mean = total / draws
    spread = (squares / draws - mean.square()).clamp(min=0).sqrt().max() / math.sqrt(draws)
    error = mean - unclipped
    assert float(error.abs().max()) < 5 * float(spread)
    assert abs(float(error.mean())) < 5 * float(spread) / math.sqrt(numel)


def test_the_bias_of_a_level_is_at_most_two_to_the_minus_16() -> None:
    """Over all 65536 draws: the mean of ⌊y + r⌋ against y itself."""
    r = (np.arange(1 << 16) / (1 << 16)).astype(np.float32)[None]
    one = np.ones(1, np.float32)
    for y in (0.0, 1e-6, 2.0**-17, 0.1, 0.5, 0.999, 1.0, 3.3, 6.999, 7.0):
        levels = arithmetic.levels_of(np.full_like(r, y), one, one, 7, r)
        assert abs(levels.astype(np.float64).mean() - y) <= 2.0**-16 * 1.01, y


def keeps_bounded(codec: Codec, steps: int = 400, numel: int = 2560) -> bool:
    """Whether feedback around this codec contracts, on noisy gradients with a mean: at every step the residual is
    smaller than what was to be sent, so that it cannot grow without end."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(numel, generator=generator)
    residual, workspace = torch.zeros(numel), codec.workspace(numel)
    wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8)
    for step in range(steps):
        grad = mean + torch.randn(numel, generator=generator)
        before = (grad + residual).norm()
        codec.encode_feedback(grad, residual, wire, new_draw(0, step), workspace)
        if residual.norm() > 0.9999 * before or residual.norm() > 60 * grad.norm():
            return False
    return True


@every_codec
def test_residuals_stay_bounded(codec: Codec) -> None:
    assert keeps_bounded(codec.with_feedback(), 400 if codec in CODECS else 100)
    assert codec.with_feedback().default_feedback or codec.lossless
    unbiased = getattr(codec, "rounding", None) == "stochastic" or getattr(codec, "scale", None) == "unbiased"
    assert codec.default_feedback != (codec.lossless or unbiased)


# What each codec means.


def test_onebit_levels_are_the_means_of_the_sides() -> None:
    x = torch.tensor([-1.0, -3.0, 2.0, 0.0, -0.0, 4.0])
    assert decode(OneBit(), encode(OneBit(), x), 6).tolist() == [-2.0, -2.0, 1.5, 1.5, 1.5, 1.5]
    symmetric = OneBit(scale="symmetric")
    mean = float(np.float32(10) / np.float32(6))
    assert decode(symmetric, encode(symmetric, x), 6).tolist() == [-mean, -mean, mean, mean, mean, mean]


def test_terngrad_clips_and_keeps_sign() -> None:
    x = torch.ones(1280)
    x[5] = -100
    decoded = decode(TernGrad(), encode(TernGrad(), x), 1280)
    scale = 2.5 * float(x.square().mean().sqrt())
    assert float(decoded[5]) == pytest.approx(-scale, rel=1e-6)
    assert all(v == 0 or v == -decoded[5] for v in decoded[:5].tolist())


@pytest.mark.parametrize(
    "codec", [TernGrad(), TernGrad(clip=math.inf), QSGD(), QSGD(norm="l2"), OneBit(), TopK()], ids=str
)
def test_a_block_of_zeros_decodes_to_zeros(codec: Codec) -> None:
    decoded, new = feedback(codec, torch.zeros(3000), torch.zeros(3000))
    assert same(decoded, torch.zeros_like(decoded))
    assert not new.any()


def test_topk_sends_the_largest_ties_to_the_lower_index() -> None:
    x = torch.tensor([1.0, -5.0, 0.0, 5.0, 2.0, -2.0, 5.0, -1.0, 0.0, 2.0])
    words = encode(TopK(0.4, indices="plain"), x).view(torch.int32)
    assert words[:5].tolist() == [4, 1, 3, 4, 6]
    assert words[5:].view(torch.float32).tolist() == [-5, 5, 2, 5]


def test_topk_ranks_every_nan_above_infinity_and_alike() -> None:
    x = torch.ones(100)
    x[10] = math.inf
    payloads = torch.tensor([0x7FC00000, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    x[[90, 50, 70]] = payloads
    words = encode(TopK(0.02, indices="plain"), x).view(torch.int32)
    assert words.tolist() == [2, 50, 70, 0x7FC00000, 0x7FC00000]


def test_indices_are_integers_of_32_bits() -> None:
    """As float32 an index above 2^24 moves to its neighbour: a peer's sparse wire did that."""
    numel = (1 << 24) + 8
    x = torch.zeros(numel)
    x[(1 << 24) + 1], x[(1 << 24) + 3] = 1.0, -2.0
    decoded = decode(TopK(1e-7), encode(TopK(1e-7), x), numel)
    assert decoded.nonzero()[:, 0].tolist() == [(1 << 24) + 1, (1 << 24) + 3]


# Mistakes that peers have made.


@stochastic_codecs
def test_ranks_steps_and_seeds_draw_differently(codec: Codec) -> None:
    """Seeding by the clock gave every rank the same noise, which averaging then cannot remove."""
    x = gradient("normal", 5000, 1)
    draws = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 1 << 32), (1 << 32, 0, 0), (-1, 0, 0)]
    wires = [encode(codec, x, new_draw(*draw)) for draw in draws]
    assert len({bytes(wire.numpy()) for wire in wires}) == len(draws)
    assert same(encode(codec, x, new_draw(*draws[3])), wires[3])


@pytest.mark.parametrize(
    "codec", [OneBit(), OneBit(scale="symmetric"), TernGrad(rounding="nearest"), Ternary(), QSGD(norm="l2")], ids=str
)
def test_padding_enters_no_statistic(codec: Codec) -> None:
    """The last block of three elements has their scale, not that of three among a thousand zeros."""
    assert codec.block_size is not None
    x = torch.full((codec.block_size + 3,), 0.25)
    x[-3:] = 7.0
    decoded = decode(codec, encode(codec, x), x.numel())
    alone = decode(codec, encode(codec, x[-3:].contiguous()), 3)
    if not codec.stochastic:
        assert decoded[-3:].tolist() == alone.tolist() == [7.0] * 3


@pytest.mark.parametrize("codec", [QSGD(bits=8, rounding="nearest"), TernGrad(rounding="nearest")], ids=str)
def test_nearest_rounds_and_does_not_truncate(codec: Codec) -> None:
    x = torch.linspace(-1, 1, 1280)
    unit = 1 / 127 if codec.name == "qsgd" else 1
    error = decode(codec, encode(codec, x), 1280) - x
    assert float(error.abs().max()) <= unit / 2 * 1.001
    assert abs(float(error.mean())) < unit / 100
    assert not encode(codec, 0 * x)[:4].any()


@every_codec
@pytest.mark.parametrize("magnitude", [1e-30, 1e-41, 2.0**-149])
def test_tiny_gradients_are_not_crushed(codec: Codec, magnitude: float) -> None:
    """A peer divided by the scale plus an absolute epsilon."""
    products = isinstance(codec, PowerSGD) or getattr(codec, "values", None) == torch.bfloat16
    below = magnitude < (2.0**-130 if codec.name == "eden" else 2.0**-140 if products else 0.0)
    if codec.name in ("cast", "threshold") or below:
        return  # its range is that of the format, or of its elements' products, or what it is told
    x = torch.full((1280,), magnitude)
    x[::2] *= -1
    x[::200] *= 8  # so that not all lie below the l2 norm's unit
    total = torch.zeros(1280)
    for step in range(20):
        total += decode(codec, encode(codec, x, new_draw(0, step)), 1280)
    touched = total != 0
    assert touched.any()
    if getattr(codec, "scale", "") != "closest":  # EDEN's few rotations leave more than an element, maybe
        assert (total.sign() == x.sign())[touched].all()
    assert float(total.abs().max()) <= 20 * 18 * magnitude


def test_a_nan_does_not_stop_the_selection() -> None:
    """A sampled threshold that is NaN compares false with everything, and nothing is sent any more."""
    codec = TopK(0.01, indices="plain")
    workspace = codec.workspace(10_000)
    wire = torch.empty(codec.wire_bytes(10_000), dtype=torch.uint8)
    for step in range(4):
        x = gradient("normal", 10_000, step)
        if step == 1:
            x[:] = math.nan
        codec.encode(x, wire, None, workspace)
        assert wire[:4].view(torch.int32).item() == 100


def test_a_hostile_count_or_index_is_skipped_and_counted() -> None:
    codec, numel = TopK(0.05, indices="plain"), 100
    words = torch.zeros(11, dtype=torch.int32)
    words[0] = 9  # four more than fit
    words[1:6] = torch.tensor([3, 2, -1, 3, 99])
    words[6:] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(torch.int32)
    out, workspace = torch.zeros(numel), codec.workspace(numel)
    codec.decode_add(words.view(torch.uint8), out, 1.0, workspace)
    assert out.nonzero()[:, 0].tolist() == [3, 99]
    assert out[[3, 99]].tolist() == [1.0, 5.0]
    assert workspace.status.tolist() == [4 + 3, 0]


def test_codes_outside_their_table_are_counted() -> None:
    wire = encode(TernGrad(), torch.ones(1280))
    wire[4:7] = torch.tensor([242, 243, 255])
    workspace = TernGrad().workspace(1280)
    TernGrad().decode_add(wire, torch.zeros(1280), 1.0, workspace)
    assert workspace.status.tolist() == [2, 0]
    wire = encode(QSGD(bits=4), torch.ones(512))
    wire[4] = 0x88  # -0, twice
    workspace = QSGD(bits=4).workspace(512)
    QSGD(bits=4).decode_add(wire, torch.zeros(512), 1.0, workspace)
    assert workspace.status.tolist() == [2, 0]


# A user's mistakes.


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: TopK(density=0), "density=0"),
        (lambda: TopK(density=1.5), "density=1.5"),
        (lambda: TopK(density=math.nan), "density=nan"),
        (lambda: TopK(density=True), "density=True"),
        (lambda: TopK(density="0.1"), "density='0.1'"),  # type: ignore[arg-type]
        (lambda: TopK(indices="delta"), "indices='delta'"),
        (lambda: TopK(values=torch.float16), "values=torch.float16"),
        (lambda: QSGD(bits=1), "bits=1"),
        (lambda: QSGD(bits=9), "bits=9"),
        (lambda: QSGD(bits=4.0), "bits=4.0"),  # type: ignore[arg-type]
        (lambda: QSGD(norm="l1"), "norm='l1'"),
        (lambda: QSGD(rounding="up"), "rounding='up'"),
        (lambda: QSGD(block=0), "block=0"),
        (lambda: OneBit(block=-1), "block=-1"),
        (lambda: OneBit(block=100), "block=100"),
        (lambda: OneBit(block=1 << 17), "block=131072"),
        (lambda: OneBit(scale="mean"), "scale='mean'"),
        (lambda: TernGrad(block=1024), "block=1024"),
        (lambda: TernGrad(clip=0), "clip=0"),
        (lambda: Ternary(block=1024), "block=1024"),
        (lambda: ChunkedTopK(k=0), "k=0"),
        (lambda: ChunkedTopK(k=1025), "k=1025: expected a whole number of entries from 1 to 1024"),
        (lambda: ChunkedTopK(k=257, chunk=256), "k=257: expected a whole number of entries from 1 to 256"),
        (lambda: ChunkedTopK(k=True), "k=True"),
        (lambda: ChunkedTopK(k=6.4), "k=6.4"),  # type: ignore[arg-type]
        (lambda: ChunkedTopK(chunk=1000), "chunk=1000"),
        (lambda: ChunkedTopK(chunk=1 << 17), "chunk=131072"),
        (lambda: ChunkedTopK(values=3), "values=3"),
        (lambda: ChunkedTopK(values=True), "values=True"),
        (lambda: ChunkedTopK(values=[]), "values=[]: expected one of"),  # type: ignore[arg-type]
        (lambda: ChunkedTopK(values=torch.float16), "values=torch.float16"),
        (lambda: Threshold(-1.0), "threshold=-1.0: expected a number from 0"),
        (lambda: Threshold(math.nan), "threshold=nan"),
        (lambda: Threshold(True), "threshold=True"),
        (lambda: Threshold(most=0.0), "most=0.0"),
        (lambda: Threshold(values=torch.float16), "values=torch.float16"),
        (lambda: RandomK(1.5), "density=1.5"),
        (lambda: RandomK().wire_bytes(1 << 31), str(1 << 31)),
        (lambda: Cast(torch.float32), "dtype=torch.float32"),
        (lambda: TopK().wire_bytes(1 << 31), str(1 << 31)),
        (lambda: OneBit().workspace(0), "0 elements"),
        (lambda: QSGD().workspace((1 << 35) + 1), "34359738369 elements"),
        (lambda: OneBit().workspace(-5), "-5 elements"),
        (lambda: OneBit().workspace(5, "meta"), "meta"),
    ],
)
def test_bad_options_are_named(make: Any, named: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("x", "error", "named"),
    [
        (torch.ones(10).double(), TypeError, "float64"),
        (torch.ones(10).int(), TypeError, "int32"),
        (torch.ones(10, dtype=torch.complex64), TypeError, "complex64"),
        (torch.ones(10).to_sparse(), TypeError, "sparse"),
        ([1.0, 2.0], TypeError, "list"),
        (torch.ones(0), ValueError, "empty"),
        (torch.ones(20)[::2], ValueError, "contiguous"),
        (torch.ones(2, 5), ValueError, "flat"),
        (torch.tensor(1.0), ValueError, "flat"),
    ],
    ids=str,
)
def test_bad_gradients_are_named(x: Any, error: type[Exception], named: str) -> None:
    codec = OneBit()
    wire, workspace = torch.empty(codec.wire_bytes(10), dtype=torch.uint8), codec.workspace(10)
    with pytest.raises(error, match=named):
        codec.encode(x, wire, None, workspace)
    with pytest.raises(error, match=named):
        codec.encode_feedback(x, torch.zeros(10), wire, None, workspace)
    with pytest.raises(error, match=named):
        codec.decode_mean((wire[None],), x, workspace)


def test_bad_wires_residuals_and_draws_are_named() -> None:
    codec, x = QSGD(), torch.ones(100)
    workspace, size = codec.workspace(100), codec.wire_bytes(100)
    wire, draw = torch.empty(size, dtype=torch.uint8), new_draw(0)
    with pytest.raises(ValueError, match=str(size)):
        codec.encode(x, wire[:-4], draw, workspace)
    with pytest.raises(ValueError, match=str(size)):
        codec.decode_add(wire[:-4], x, 1.0, workspace)
    with pytest.raises(TypeError, match="uint8"):
        codec.encode(x, wire.view(torch.int8), draw, workspace)
    with pytest.raises(ValueError, match="multiple of 4"):
        codec.encode(x, torch.empty(size + 1, dtype=torch.uint8)[1:], draw, workspace)
    with pytest.raises(ValueError, match="needs a draw"):
        codec.encode(x, wire, None, workspace)
    with pytest.raises(ValueError, match="needs a draw"):
        codec.encode_feedback(x, torch.zeros(100), wire, torch.zeros(2, dtype=torch.int64), workspace)
    with pytest.raises(ValueError, match="99 elements"):
        codec.encode_feedback(x, torch.zeros(99), wire, draw, workspace)
    with pytest.raises(TypeError, match="float16"):
        codec.encode_feedback(x, x.half(), wire, draw, workspace)
    with pytest.raises(TypeError, match="float16"):
        codec.decode_add(wire, x.half(), 1.0, workspace)
    with pytest.raises(ValueError, match="2-D"):
        codec.decode_mean((wire,), x, workspace)
    with pytest.raises(ValueError, match="1 parts"):
        codec.decode_mean((wire[None], wire[None]), x, workspace)
    memory = torch.empty(2 * size + 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiples of 4"):
        codec.decode_mean((memory.as_strided((2, size), (size + 2, 1)),), x, workspace)


def test_codecs_are_values() -> None:
    assert len({repr(codec) for codec in VARIANTS}) == len(VARIANTS)
    for codec in VARIANTS:
        assert pickle.loads(pickle.dumps(codec)) == codec
        assert hash(codec) == hash(pickle.loads(pickle.dumps(codec)))


# Golden bytes: written once, read and written alike forever.


@pytest.mark.parametrize("golden", saved(), ids=lambda golden: str(golden.codec))
def test_golden_bytes(golden: Golden) -> None:
    wire = torch.frombuffer(bytearray(golden.wire), dtype=torch.uint8)
    x = torch.from_numpy(np.load(GRADIENT))
    assert same(encode(golden.codec, x, new_draw(*golden.draw)), wire)
    assert golden.digest(decode(golden.codec, wire, x.numel())) == golden.decoded


def test_every_codec_has_golden_bytes() -> None:
    assert {golden.codec for golden in saved()} >= set(CODECS)
    assert len(list(FOLDER.glob("*.json"))) == len(saved())


@pytest.mark.parametrize("numel", [1, 700])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000))
def test_identity_is_the_identity(numel: int, seed: int) -> None:
    x = gradient("any bits", numel, seed)
    assert same(decode(Identity(), encode(Identity(), x), numel), x + 0.0)


@every_codec
def test_a_workspace_of_another_codec_or_length_does_no_harm(codec: Codec) -> None:
    x, draw = gradient("normal", 70_000, 1), new_draw(0)
    for other, numel in ((Identity(), 70_000), (OneBit(block=256), 300), (TopK(), 9)):
        wire = torch.zeros(codec.wire_bytes(70_000), dtype=torch.uint8)
        codec.encode(x, wire, draw, other.workspace(numel))
        assert same(wire, encode(codec, x, draw))
