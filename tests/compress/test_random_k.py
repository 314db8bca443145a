"""Codes that were published with few words: a threshold, and elements that a shared draw picks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gradwire.compress import Codec, RandomK, Threshold, TopK, new_draw
from gradwire.compress.backends.philox import philox, words_of
from gradwire.compress.backends.reference import arithmetic
from gradwire.compress.codec import DTYPES
from gradwire.compress.codecs.random_k import pick
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import decode, encode, gradient, parts_of, same

WORDS = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=30, deadline=None)
@given(seed=WORDS, step=st.integers(0, 2**32 - 1), bucket=st.integers(0, 2**32 - 1))
def test_the_draw_is_philox(seed: int, step: int, bucket: int) -> None:
    found = philox(words_of(new_draw(seed, step, bucket)), 9)
    assert np.array_equal(found.numpy(), arithmetic.philox(seed, step, bucket, np.arange(9)))


@settings(max_examples=50, deadline=None)
@given(first=WORDS, second=WORDS, numel=st.integers(1, 5000), share=st.floats(0.001, 1.0))
def test_whatever_the_words_are_entries_ascend_and_lie_inside(
    first: int, second: int, numel: int, share: float
) -> None:
    k = RandomK(share).k(numel)
    chosen = pick(torch.tensor([first, second]).view(torch.int32), numel, k)
    assert len(chosen) == k
    assert 0 <= int(chosen[0]) <= int(chosen[-1]) < numel
    assert bool((chosen.diff() > 0).all())


@settings(max_examples=60, deadline=None)
@given(
    draw=st.tuples(WORDS, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)),
    numel=st.sampled_from([1, 63, 64, 65, 1000, 4097]),
    share=st.sampled_from([0.001, 0.1, 0.37, 1.0]),
    kind=st.sampled_from(["normal", "tiny", "ties", "zeros", "constant"]),
    dtype=st.sampled_from(DTYPES),
)
def test_the_wire_is_the_words_and_what_they_pick(
    draw: tuple[int, int, int], numel: int, share: float, kind: str, dtype: torch.dtype
) -> None:
    """Of ranks with the same words, and with others: a mean is the sum of each rank's own in rank order."""
    codec, now = RandomK(share), new_draw(*draw)
    x, residual, workspace = gradient(kind, numel, 1, dtype), gradient("normal", numel, 9), codec.workspace(numel)
    total, wire = x.float() + residual, torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8)
    codec.encode_feedback(x, residual, wire, now, workspace)
    chosen = pick(words_of(now), numel, codec.k(numel))
    assert wire[:16].view(torch.int32).tolist() == words_of(now).tolist()
    assert same(wire[16:].clone().view(torch.float32), total[chosen])
    sent = torch.zeros(numel).index_copy_(0, chosen, total[chosen])
    assert same(residual, total - (0.0 + sent))  # of a -0 that stays, the sign stays
    wires = torch.stack([wire, wire, encode(codec, x, new_draw(draw[0] ^ 1, draw[1], draw[2]))])
    rows = [decode(codec, row, numel) for row in wires]
    mean = torch.empty(numel)
    codec.decode_mean(parts_of(codec, wires, numel), mean, workspace)
    assert same(mean, (rows[0] + rows[1] + rows[2]) * (torch.tensor(1.0) / 3))
    assert same(rows[0], sent + 0.0)


def test_every_element_is_drawn_alike() -> None:
    numel, draws, codec = 997, 3000, RandomK(0.05)
    counts = torch.zeros(numel)
    for step in range(draws):
        counts[pick(words_of(new_draw(7, step)), numel, codec.k(numel))] += 1
    share = codec.k(numel) / numel
    assert abs(float(counts.mean()) / draws - share) < 1e-9
    # Pieces have 19 or 20 elements; five standard deviations of a count.
    assert float((counts / draws - share).abs().max()) < 0.0013 + 5 * (share / draws) ** 0.5


def test_ranks_share_what_is_drawn_and_buckets_and_steps_do_not() -> None:
    x, codec = gradient("normal", 2500, 1), RandomK()
    drawn = [codec.select(x, new_draw(0, 3, rank << 33 | 5)).tolist() for rank in range(3)]
    others = [codec.select(x, new_draw(*draw)).tolist() for draw in ((0, 3, 6), (0, 4, 5), (1, 3, 5))]
    assert drawn[0] == drawn[1] == drawn[2]
    assert all(drawn[0] != other for other in others)
    decoded = decode(codec, encode(codec, x, new_draw(0, 3, 5)), 2500)
    assert decoded.nonzero().view(-1).tolist() == drawn[0]


def test_what_is_not_finite_goes_first_where_entries_travel() -> None:
    x, codec = gradient("normal", 2500, 1), RandomK(0.01)
    x[::90] = torch.nan
    chosen = codec.select(x, new_draw(0))
    assert len(chosen) == codec.k(2500) == 25
    assert x[chosen].isnan().all()


@pytest.mark.parametrize("kind", ["normal", "ties", "constant", "zeros", "wide"])
def test_a_threshold_of_zero_is_top_k(kind: str) -> None:
    x = gradient(kind, 2500, 1)
    top, low = TopK(0.02), Threshold(0.0, most=0.02)
    assert same(encode(top, x), encode(low, x))


def test_a_threshold_sends_what_exceeds_it() -> None:
    x = gradient("normal", 2500, 1)
    x[[3, 77]] = torch.tensor([torch.nan, -torch.inf])
    chosen = Threshold(2.0, most=0.5).select(x, None)
    assert chosen.tolist() == ((x.abs() > 2.0) | x.isnan()).nonzero().view(-1).tolist()
    few = Threshold(2.0, most=0.01).select(x, None)
    assert len(few) == 25
    assert {3, 77} <= set(few.tolist()) <= set(chosen.tolist())
    assert not decode(Threshold(5.0), encode(Threshold(5.0), x.nan_to_num(0.0, 0.0, 0.0)), 2500).any()


@pytest.mark.parametrize("kind", [RandomK, lambda share: Threshold(share, most=share), TopK])
def test_a_schedule_of_shares_is_measured_a_few_times(kind: Callable[[float], Codec]) -> None:
    """To measure a codec takes all ranks, and stops them: not in every step of a schedule."""
    timed = {kind(0.25 * 0.97**step).speed_key for step in range(200)}
    assert len(timed) <= 10
