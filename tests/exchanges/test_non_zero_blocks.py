"""`blocks`: the bits of a dense mean, in fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradwire import CompressState, compress_hook
from gradwire.benchmarks.learning.ranks import InProcessRanks
from gradwire.compress import Identity
from gradwire.compress.formats.layout import Slot
from gradwire.hooks.exchanges.non_zero_blocks import BLOCK, NonZeroBlocks, present_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import digest


def ranks_of(size: int, numel: int, exchange: str) -> InProcessRanks:
    return InProcessRanks(size, (Slot("a", 0, (numel,), (1,)),), Identity(), exchange, None)


def mostly_zero(size: int, numel: int, densities: list[float], alike: bool, seed: int) -> list[Tensor]:
    """Gradients of which each rank has a share of the blocks, the same ones or its own."""
    generator = torch.Generator().manual_seed(seed)
    chances = [torch.rand(-(-numel // BLOCK), generator=generator) for _ in range(1 if alike else size)]
    return [
        torch.randn(numel, generator=generator)
        * (chances[rank % len(chances)] < densities[rank]).repeat_interleave(BLOCK)[:numel]
        for rank in range(size)
    ]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


@settings(max_examples=80, deadline=None)
@given(
    size=st.integers(1, 5),
    numel=st.one_of(st.integers(1, 600), st.integers(1, 40_000)),
    densities=st.lists(st.sampled_from([0.0, 0.02, 0.3, 1.0]), min_size=5, max_size=5),
    alike=st.booleans(),
    odd=st.sampled_from([None, torch.nan, torch.inf, 1e-40, -0.0]),
    seed=st.integers(0, 9),
)
def test_it_has_the_bits_of_a_dense_mean(
    size: int, numel: int, densities: list[float], alike: bool, odd: float | None, seed: int
) -> None:
    sparse, dense = (ranks_of(size, numel, exchange) for exchange in ("blocks", "gather"))
    counted = 0
    for step in range(3):  # whose messages have other sizes
        grads = mostly_zero(size, numel, densities[step:] + densities[:step], alike, seed + step)
        if odd is not None:
            grads[step % size][numel // 2] = odd
        mean = sparse.reduce([grad.clone() for grad in grads])
        assert torch.equal(bits(mean), bits(dense.reduce([grad.clone() for grad in grads])))
        counted, before = sum(int(row[1]) for row in sparse.units[0].exchange.counts()), counted
        assert (counted == before) == bool(mean.isfinite().all())


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(2, 6),
    density=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    alike=st.booleans(),
    seed=st.integers(0, 9),
)
def test_it_takes_the_bytes_of_what_is_there(size: int, density: float, alike: bool, seed: int) -> None:
    numel = 100 * BLOCK
    grads = mostly_zero(size, numel, [density] * size, alike, seed)
    ranks = ranks_of(size, numel, "blocks")
    ranks.reduce([grad.clone() for grad in grads])
    has = torch.stack([present_blocks(grad) for grad in grads])
    bitmaps, block = (size - 1) * (4 + 16), 4 * BLOCK
    union = int(has.any(0).sum())
    assert ranks.bytes_received <= bitmaps + block * int(has.sum(1).sort().values[1:].sum())
    # Owners' shares are whole blocks.
    assert ranks.bytes_received <= bitmaps + block * (2 * union * (size - 1) / size + size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 5000])
def test_what_counts_as_zero(dtype: torch.dtype, numel: int) -> None:
    x = torch.zeros(numel, dtype=dtype)
    assert not present_blocks(x).any()
    for value in (1.0, -1.0, torch.nan, -torch.inf, torch.finfo(dtype).smallest_normal / 2):
        for at in {0, numel // 2, numel - 1}:
            x[at] = value
            assert present_blocks(x).nonzero().view(-1).tolist() == [at // BLOCK]
            x[at] = 0.0


def two_tables(rank: int, exchange: str, dtype: torch.dtype) -> tuple[str, int]:
    """The weights of embeddings after some steps that use few of their rows, and the bytes received."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(2000, 16), nn.Linear(16, 4)).to(dtype)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    state = CompressState(ddp, Identity(), exchange=exchange, exclude=["*.bias"])
    ddp.register_comm_hook(state, compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = ddp(torch.randint(2000, (3, 5), generator=generator)).float().square().mean()
        (loss * (rank != step)).backward()  # a rank has nothing, or all have something
        optimizer.step()
        optimizer.zero_grad()
    received = state.statistics().bytes_received
    state.close()
    return digest(model.parameters()), received


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_train_alike_in_fewer_bytes(ranks: Ranks, size: int, dtype: torch.dtype) -> None:
    found = ranks(size).run(two_tables, "blocks", dtype)
    dense = ranks(size).run(two_tables, "gather", dtype)
    assert len({weights for weights, _ in found + dense}) == 1
    assert max(received for _, received in found) < 0.2 * min(received for _, received in dense)


@on_ranks(2)
def test_a_residual_of_one_rank_is_sent_whole_beside_half_precision(rank: int) -> None:
    """As where only one rank's checkpoint had one: its elements then have four bytes, the others' two."""
    model = nn.Linear(64, 8, bias=False).bfloat16()
    ddp = DistributedDataParallel(model)
    state = CompressState(ddp, Identity(), exchange="blocks")
    ddp.register_comm_hook(state, compress_hook)
    if rank == 1:
        # Rounded before the sum, it would be 2^-7, and the mean 1.
        state._feedback.load({"residual": {"weight": torch.full((8, 64), 1.4 * 2.0**-7)}})
    ddp(torch.ones(1, 64).bfloat16()).float().sum().backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((8, 64), 1.0 + 2.0**-7).bfloat16())
    state.close()


def test_what_cannot_be_right_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ranks_of(2, 600, "blocks")
    reduce = NonZeroBlocks._reduce_blocks

    def damaged(exchange: NonZeroBlocks, x: Any) -> Any:
        exchange.rows[1, :4] = 7
        return reduce(exchange, x)

    monkeypatch.setattr(NonZeroBlocks, "_reduce_blocks", damaged)
    with pytest.raises(RuntimeError, match="rank 1 tells of a dtype by the number 117901063"):
        ranks.reduce([torch.ones(600), torch.ones(600)])
