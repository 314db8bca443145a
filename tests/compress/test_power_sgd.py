"""PowerSGD: matrices by two thin factors, and the exchange that averages them."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import numpy as np
import pytest
import torch
from gradwire import Codec, Identity, PowerSGD, Residual, TopK, Tracking
from gradwire.benchmarks.learning.ranks import InProcessRanks
from gradwire.compress import Feedback, new_draw
from gradwire.compress.backends import backend_kernels
from gradwire.compress.backends.power_sgd import Matrices, PowerSGDKernels
from gradwire.compress.codecs.power_sgd import Piece
from gradwire.compress.feedback.base import RESIDUAL
from gradwire.compress.formats.layout import Layout, Slot, layout_numel
from gradwire.hooks.auto.planner import check_exchange, default_exchange
from gradwire.hooks.exchanges import possible
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from strategies import FINITE, KINDS, OTHER_BACKENDS, decode, device_of, encode, gradient, same
from torch import Tensor
from training import digest, perceptron, wrap

SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 140), st.integers(1, 300)),
        st.tuples(st.integers(0, 600), st.just(0)),
        st.sampled_from([(64, 64), (65, 63), (300, 9), (9, 300), (1, 500), (500, 1)]),
    ),
    min_size=1,
    max_size=5,
).filter(lambda shapes: any(rows for rows, _ in shapes))


def numel_of(shapes: list[tuple[int, int]]) -> int:
    return sum(rows * max(1, columns) for rows, columns in shapes)


def layout_of(*tensors: Tensor) -> Layout:
    slots, start = [], 0
    for number, tensor in enumerate(tensors):
        slots.append(Slot(str(number), start, tuple(tensor.shape), tensor.stride()))
        start += tensor.numel()
    return tuple(slots)


# -- which matrices there are ------------------------------------------------------------------------------------------


def test_matrices_are_the_parameters_as_they_lie_in_memory() -> None:
    conv = torch.empty(32, 16, 3, 3)
    layout = layout_of(
        torch.empty(40, 60), torch.empty(60, 41).t(), conv, conv.to(memory_format=torch.channels_last), torch.empty(7),
        torch.empty(()), torch.empty(0), torch.empty(3, 0), torch.empty(2, 500), torch.empty(30, 1, 50),
        torch.empty(1, 40, 60), torch.empty(1, 7),
    )  # fmt: skip
    codec = PowerSGD(rank=2).for_layout(layout)
    matrices = [
        (40, 60),
        (60, 41),
        (32, 144),
        (32, 144),
        (7, 0),
        (1, 0),
        (0, 0),
        (0, 0),
        (2, 500),
        (30, 50),
        (40, 60),
        (7, 0),
    ]
    assert codec.shapes == tuple(matrices)
    starts = np.cumsum([0, 2400, 2460, 4608, 4608]).tolist()
    end = starts[-1] + 7 + 1 + 1000  # what is no smaller as two factors travels as it is, in one run
    assert codec.pieces(layout_numel(layout)) == (
        *(Piece(start, *shape) for start, shape in zip(starts, matrices[:4], strict=False)),
        Piece(starts[-1], 1008, 0),
        Piece(end, 30, 50),
        Piece(end + 1500, 40, 60),
        Piece(end + 3900, 7, 0),
    )
    factors = 2 * (100 + 101 + 176 + 176 + 80 + 100)
    assert codec.wire_bytes(layout_numel(layout)) == 4 * (1008 + 7 + factors)
    assert codec.for_layout(()) == PowerSGD(rank=2) == codec.speed_key


def test_a_bare_tensor_is_nearly_square() -> None:
    assert PowerSGD().pieces(10_005) == (Piece(0, 100, 100), Piece(10_000, 5, 0))
    assert PowerSGD().pieces(64) == (Piece(0, 64, 0),)
    assert PowerSGD().bits_per_element(1 << 20) == 8 * 4 * 2 * 4 / 1024


def test_what_cannot_be_meant() -> None:
    for rank in (0, 65, 1.5, True):
        with pytest.raises(ValueError, match=f"rank={rank}: expected a whole number from 1 to 64"):
            PowerSGD(rank=rank)  # type: ignore[arg-type]
    for shapes in (5, [(30, 40)], ((30,),), ((30, 40.0),), ([30, 40],), (30, 40)):
        with pytest.raises(ValueError, match=rf"shapes={re.escape(str(shapes))}: expected rows and columns"):
            PowerSGD(shapes=shapes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shapes \(\(30, 40\),\) have 1200 elements, not 1201"):
        PowerSGD(shapes=((30, 40),)).workspace(1201)
    with pytest.raises(ValueError, match=r"needs a low-rank codec, not TopK.*: use one of 'gather'"):
        check_exchange("factors", TopK())
    assert possible(PowerSGD()) == ("gather", "factors", "dense")
    assert {default_exchange(PowerSGD(), size) for size in (2, 8)} == {"factors"}


def drawn(codec: PowerSGD, seed: int) -> Tensor:
    """S for a gradient of `LAYOUT`."""
    kernels, matrices = codec.kernels(torch.device("cpu")), Matrices.of(codec, NUMEL, torch.device("cpu"))
    assert isinstance(kernels, PowerSGDKernels)
    kernels.draw(matrices, new_draw(seed), start := torch.empty(matrices.right))
    return start


# -- the passes --------------------------------------------------------------------------------------------------------


def passes(kernels: PowerSGDKernels, codec: PowerSGD, x: Tensor, seed: int, alpha: float) -> list[Tensor]:
    """What every pass writes, on the device of `x`."""
    matrices = Matrices.of(codec, x.numel(), x.device)
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.full((codec.wire_bytes(x.numel()) // 4,), torch.nan, device=x.device)
    whole, left, right = matrices.split(numbers.view(torch.uint8))
    start = torch.full((matrices.right,), torch.nan, device=x.device)
    residual = torch.randn(x.numel(), generator=generator).to(x.device)
    kernels.draw(matrices, new_draw(seed, 5, -(1 << 40) + 7, device=x.device), start)
    drew = start.clone()
    kernels.take(matrices, x, whole)
    kernels.left(matrices, x, start, left)
    products = left.clone()
    kernels.orthonormalise(matrices, left)
    kernels.right(matrices, x, left, right)
    kernels.settle(matrices, left, right)
    kernels.follow(matrices, right, start)
    kernels.leave(matrices, left, right, x, residual)
    out, fresh = torch.ones_like(x), torch.full_like(x, torch.nan)
    status = torch.zeros(2, dtype=torch.int64, device=x.device)
    kernels.add(matrices, numbers, out, alpha, False, status)
    kernels.add(matrices, numbers, fresh, alpha, True, status)
    return [found.cpu() for found in (drew, numbers, products, start, residual, out, fresh, status)]


@pytest.mark.parametrize("backend", OTHER_BACKENDS)
@settings(max_examples=25, deadline=None)
@given(
    shapes=SHAPES, rank=st.integers(1, 5), kind=st.sampled_from(tuple(KINDS)), offset=st.integers(0, 3),
    seed=st.integers(0, 99), alpha=st.sampled_from([1.0, -0.3]),
)  # fmt: skip
def test_every_pass_is_the_reference_s(
    backend: str, shapes: list[tuple[int, int]], rank: int, kind: str, offset: int, seed: int, alpha: float
) -> None:
    codec, numel = PowerSGD(rank, tuple(shapes)), numel_of(shapes)
    x = torch.cat([torch.zeros(offset), gradient(kind, numel, seed)])
    wanted = passes(backend_kernels("reference")["power_sgd"], codec, x[offset:].clone(), seed, alpha)  # type: ignore[arg-type]
    kernels: Any = backend_kernels(backend)["power_sgd"]
    found = passes(kernels, codec, x.to(device_of(backend))[offset:], seed, alpha)  # at any alignment
    names = ("drawn", "numbers", "M·S", "S", "residual", "sum", "fresh", "status")
    for name, a, b in zip(names, found, wanted, strict=True):
        assert same(a, b), name


def test_the_bytes_are_what_they_were() -> None:
    """Of a gradient that is finite: that of the other golden bytes would be one matrix of NaN."""
    shapes = ((50, 70), (11, 0), (64, 300), (7, 9))
    wire = encode(PowerSGD(2, shapes), gradient("normal", numel_of(list(shapes)), 7), new_draw(1, 2, 3))
    assert wire.numel() == 4 * (11 + 2 * (120 + 364 + 16))
    assert hashlib.sha256(wire.numpy().tobytes()).hexdigest()[:16] == "621f9ec617c2ac0c"


# -- what they mean ----------------------------------------------------------------------------------------------------


def factors(codec: PowerSGD, x: Tensor) -> tuple[Tensor, Tensor]:
    """P [rank, rows] and Q [rank, columns] of one matrix, float64."""
    (rows, columns), matrices = codec.shapes[0], Matrices.of(codec, x.numel(), x.device)
    _, left, right = matrices.split(encode(codec, x))
    return left.view(-1, rows).double(), right.view(-1, columns).double()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(12, 90), columns=st.integers(12, 90), rank=st.integers(1, 5), true=st.integers(0, 6),
    scale=st.sampled_from([1e-12, 1.0, 1e12]), seed=st.integers(0, 99),
)  # fmt: skip
def test_columns_are_orthonormal_and_a_matrix_of_low_rank_is_sent_whole(
    rows: int, columns: int, rank: int, true: int, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(rows, true, generator=generator), torch.randn(true, columns, generator=generator)
    m = (scale * left.double() @ right.double()).float()
    codec = PowerSGD(rank, ((rows, columns),))
    p, q = factors(codec, m.view(-1))
    used = p.norm(dim=1) > 0
    assert int(used.sum()) == min(rank, true)
    products = p[used] @ p[used].t()
    assert float((products - torch.eye(len(products), dtype=torch.float64)).norm()) < 1e-3
    assert float((q - p @ m.double()).norm()) <= 1e-5 * float(m.norm())
    if true <= rank:
        assert float((p.t() @ q - m).norm()) <= 1e-4 * float(m.norm())


def test_a_warm_start_finds_what_matters_most() -> None:
    """Steps of subspace iteration: the error falls to that of the best matrix of this rank."""
    generator = torch.Generator().manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(80, 60, generator=generator))
    v, _ = torch.linalg.qr(torch.randn(60, 60, generator=generator))
    values = torch.tensor([0.6**i for i in range(60)])
    m, codec = (u * values @ v.t()).contiguous().view(-1), PowerSGD(3, ((80, 60),))
    best = float(values[3:].norm())
    ranks = InProcessRanks(2, (Slot("m", 0, (80, 60), (60, 1)),), PowerSGD(3), "factors", None)
    errors = [float((ranks.reduce([m.clone(), m.clone()]) - m).norm()) for _ in range(12)]
    assert errors[0] > 1.05 * best
    assert errors[-1] < 1.001 * best
    assert float((decode(codec, encode(codec, m), m.numel()) - m).norm()) > 1.05 * best


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3.4e38])
def test_what_is_not_finite_in_a_matrix_stays_there(value: float) -> None:
    codec = PowerSGD(2, ((40, 50), (30, 0), (60, 20)))
    x, old = gradient("normal", 3230, 1), gradient("normal", 3230, 2)
    x[777 : 1900 if abs(value) < torch.inf else 778] = value  # the largest numbers: their sums are infinite
    residual, workspace = old.clone(), codec.workspace(3230)
    wire = torch.zeros(codec.wire_bytes(3230), dtype=torch.uint8)
    codec.encode_feedback(x, residual, wire, new_draw(0), workspace)
    decoded = decode(codec, wire, 3230)
    assert decoded[:2000].isnan().all()
    assert decoded[2000:].isfinite().all()
    assert same(residual[:2000], old[:2000])
    codec.decode_add(wire, torch.zeros(3230), 1.0, workspace)
    assert workspace.status.tolist() == [0, 1]
    x[2010] = torch.nan  # in no matrix
    wire = encode(codec, x)
    assert int(decode(codec, wire, 3230)[2000:].isnan().sum()) == 1
    codec.decode_add(wire, torch.zeros(3230), 1.0, workspace)
    assert workspace.status.tolist() == [0, 3]


# -- the exchange ------------------------------------------------------------------------------------------------------

LAYOUT = layout_of(torch.empty(48, 30), torch.empty(17), torch.empty(20, 9, 3, 3))
NUMEL = layout_numel(LAYOUT)


def by_hand(gradients: list[list[Tensor]], codec: PowerSGD, start: Tensor) -> tuple[list[Tensor], Tensor]:
    """PowerSGD of the mean gradient, in float64 by torch.linalg: the means of each step, and what is kept at last."""
    error = torch.zeros(NUMEL, dtype=torch.float64)
    matrices, means = Matrices.of(codec, NUMEL, error.device), []
    starts = {row[0]: start[row[4] :][: codec.rank * row[2]].view(codec.rank, -1).double() for row in matrices.rows}
    for of_ranks in gradients:
        total = torch.stack(of_ranks).double().mean(0) + error
        mean = total.clone()
        for begin, rows, columns, *_ in matrices.rows:
            if columns:
                m = total[begin : begin + rows * columns].view(rows, columns)
                p, _ = torch.linalg.qr(m @ starts[begin].t())
                q = m.t() @ p
                mean[begin : begin + rows * columns] = (p @ q.t()).reshape(-1)
                # Gram-Schmidt's columns are QR's but for their signs, which S takes on.
                starts[begin] = (q / q.norm(dim=0)).t()
        error = total - mean
        means.append(mean)
    return means, error


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("rank", [1, 3])
def test_ranks_together_are_one_rank_that_has_their_mean(size: int, rank: int) -> None:
    steps = [[gradient("normal", NUMEL, 10 * step + r) for r in range(size)] for step in range(6)]
    codec = PowerSGD(rank).for_layout(LAYOUT)
    start = drawn(codec, 3)
    wanted, left = by_hand(steps, codec, start)
    ranks = InProcessRanks(size, LAYOUT, PowerSGD(rank), "factors", Residual(), seed=3)
    for of_ranks, mean in zip(steps, wanted, strict=True):
        got = ranks.reduce([x.clone() for x in of_ranks])
        assert float((got - mean).norm()) <= 1e-4 * float(mean.norm())
    kept = sum(memory.of(LAYOUT).whole(RESIDUAL).double() for memory in ranks.memories) / size
    assert float((kept - left).norm()) <= 1e-4 * float(left.norm())


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 4), rank=st.integers(1, 4), kind=st.sampled_from(FINITE), seed=st.integers(0, 99),
    strategy=st.sampled_from([Residual(), Residual(dtype=torch.bfloat16), Tracking(0.5), None]),
)  # fmt: skip
def test_nothing_is_lost(size: int, rank: int, kind: str, seed: int, strategy: Feedback | None) -> None:
    """By the strategy's own law, over steps; replicas are compared bit for bit by `InProcessRanks`."""
    ranks = InProcessRanks(size, LAYOUT, PowerSGD(rank), "factors", strategy, seed=seed)
    for step in range(3):
        of_ranks = [gradient(kind, NUMEL, 7 * seed + 3 * step + r) for r in range(size)]
        before = {} if strategy is None else vectors(ranks)
        mean = torch.stack(of_ranks).double().mean(0)
        applied = ranks.reduce([x.clone() for x in of_ranks]).double()
        if strategy is None:
            assert applied.isfinite().all()
            continue
        off = strategy.invariant(mean, before, applied, vectors(ranks))
        size_of = mean.norm() + sum(vector.norm() for vector in before.values())
        coarse = 2.0**-8 if isinstance(strategy, Residual) and strategy.dtype == torch.bfloat16 else 1e-5
        assert float(off.norm()) <= coarse * float(size_of) + 1e-40


def vectors(ranks: InProcessRanks) -> dict[str, Tensor]:
    assert ranks.strategy is not None
    return {
        name: torch.stack([memory.of(LAYOUT).whole(name).double() for memory in ranks.memories]).mean(0)
        for name in ranks.strategy.state_names
    }


def test_one_rank_s_nan_is_seen_by_all_and_forgotten_by_the_next_step() -> None:
    ranks = InProcessRanks(3, LAYOUT, PowerSGD(2), "factors", Residual())
    steps = [[gradient("normal", NUMEL, 10 * step + r) for r in range(3)] for step in range(4)]
    ranks.reduce(steps[0])
    unit: Any = ranks.units[0].exchange
    start = unit.start.clone()
    steps[1][1][5] = torch.nan
    mean = ranks.reduce(steps[1])
    matrix = 48 * 30
    assert mean[:matrix].isnan().all()
    assert mean[matrix:].isfinite().all()
    first = unit.matrices.rows[0][4], 2 * 30
    assert same(unit.start[first[0] : sum(first)], start[first[0] : sum(first)])
    assert not same(unit.start, start)
    assert int(sum(int(count[1]) for count in unit.counts())) > 0
    assert all(memory.of(LAYOUT).whole(RESIDUAL).isfinite().all() for memory in ranks.memories)
    assert ranks.reduce(steps[2]).isfinite().all()


def test_a_factor_that_overflows_leaves_nothing_of_its_matrix() -> None:
    """M·S is finite here, and Mᵀ·P is not in one of its columns."""
    large = gradient("normal", NUMEL, 1)
    large[: 48 * 30].view(48, 30)[:, 7] = 1e38
    codec = PowerSGD(2).for_layout(LAYOUT)
    matrices = Matrices.of(codec, NUMEL, large.device)
    kernels: Any = backend_kernels("cpu")["power_sgd"]
    kernels.left(matrices, large, drawn(codec, 0), products := torch.empty(matrices.left))
    assert products.isfinite().all()
    ranks = InProcessRanks(2, LAYOUT, PowerSGD(2), "factors", Residual())
    means = decode(codec, encode(codec, large), NUMEL), ranks.reduce([large.clone(), large.clone()])
    for mean in means:
        assert mean[: 48 * 30].isnan().all()
        assert mean[48 * 30 :].isfinite().all()


def test_bytes_are_those_of_two_means() -> None:
    codec = PowerSGD(2).for_layout(LAYOUT)
    wire = codec.wire_bytes(NUMEL)
    for size in (2, 3, 4):
        ranks = InProcessRanks(size, LAYOUT, PowerSGD(2), "factors", Residual())
        ranks.reduce([gradient("normal", NUMEL, r) for r in range(size)])
        most = 2 * wire * (size - 1) / size if size > 2 else wire
        assert most <= ranks.bytes_received <= most + 2 * 8 * size


# -- in training -------------------------------------------------------------------------------------------------------


def learns(rank: int, codec: Codec, cap: float, accumulate: int, **options: Any) -> tuple[float, str, set[str]]:
    """The loss of the last steps, a digest of the model, and what has served its buckets."""
    model = perceptron()
    teacher = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)) / 8
    ddp, state = wrap(model, codec, ddp={"bucket_cap_mb": cap}, **options)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), []
    for step in range(60):
        for part in range(accumulate):
            x = torch.randn(32, 40, generator=torch.Generator().manual_seed(1000 * step + 10 * part + rank))
            loss = (ddp(x) - torch.tanh(x @ teacher)).square().mean()
            (loss / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    served = {text.partition(":")[0] for text in state.statistics().decisions.values()}
    state.close()
    return sum(losses[-10:]) / 10, digest(model.parameters()), served


@pytest.mark.parametrize(("cap", "accumulate"), [(100.0, 1), (0.02, 2)])
def test_models_learn_whatever_the_buckets(ranks: Ranks, cap: float, accumulate: int) -> None:
    """With several buckets under way PyTorch's own hook fails on Gloo."""
    found = ranks(3).run(learns, PowerSGD(rank=2), cap, accumulate)
    (plain, _, _), *_ = ranks(3).run(learns, Identity(), cap, accumulate)
    assert len({replica for _, replica, _ in found}) == 1
    assert found[0][2] == {"factors of PowerSGD(rank=2)"}
    assert found[0][0] < 1.35 * plain  # without feedback it is 2.2 times as much
