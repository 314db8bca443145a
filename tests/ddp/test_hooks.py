"""The hook in DDP: nothing lost, replicas equal. Ways to build and use DDP are in the scripts of
`tests/core/test_drawn.py`."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import (
    QSGD,
    Cast,
    ChunkedTopK,
    Codec,
    CompressState,
    Identity,
    OneBit,
    Outliers,
    PowerSGD,
    Ternary,
    TernGrad,
    TopK,
    compress_hook,
)
from gradwire.hooks.exchanges import possible
from ranks import Pool, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import Ledger, batch, convnet, digest, perceptron, residuals_of, train, wrap

Ranks = Callable[[int], Pool]

LOSSLESS_SUM = [
    OneBit(), QSGD(rounding="nearest"), TernGrad(rounding="nearest"), TopK(0.05), Outliers(Ternary(), 0.05),
    ChunkedTopK(k=16, chunk=256), PowerSGD(rank=1),
    Cast(torch.bfloat16),
]  # fmt: skip


def equal_on_all(results: list[Any]) -> bool:
    return all(result == results[0] for result in results)


def trained_twice(rank: int, codec: Codec, exchange: str, save_at: int) -> Any:
    """Train across DDP's bucket rebuild and, at `save_at`, through a checkpoint into a new model and state."""
    model = convnet()
    ledger = Ledger(model)
    ddp, state = wrap(model, codec, exchange=exchange)
    digests = train(rank, ddp, range(save_at), ledger)
    buckets = len(state._buckets)
    file = io.BytesIO()
    torch.save({"state": state.state_dict(), "model": model.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    state.close()
    model = convnet()
    model.load_state_dict(saved["model"])
    ledger.model, ledger.parameters = model, dict(model.named_parameters())
    ddp, state = wrap(model, codec, exchange=exchange)
    state.load_state_dict(saved["state"])
    digests += train(rank, ddp, range(save_at, 20), ledger)
    error = ledger.error(state)
    steps = state.step
    state.close()
    return digests, error, buckets, steps


@pytest.mark.parametrize(
    ("codec", "exchange"),
    [
        # One way of each codec in `make test`; what draws scripts takes the others too.
        *(
            pytest.param(codec, e, marks=() if n == number % len(ways) else pytest.mark.slow)
            for number, codec in enumerate(LOSSLESS_SUM)
            for ways in [[e for e in possible(codec) if e != "dense"]]
            for n, e in enumerate(ways)
        ),
        (TopK(0.05, values=torch.int8), "split"),
        pytest.param(TopK(0.05, values=torch.bfloat16), "split", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_nothing_is_lost_across_rebuild_and_checkpoint(ranks: Ranks, codec: Codec, exchange: str) -> None:
    results = ranks(3).run(trained_twice, codec, exchange, 8)
    digests, errors, buckets, steps = zip(*results, strict=True)
    assert equal_on_all(list(digests)), "replicas differ"
    assert max(errors) < 1e-5
    assert min(buckets) >= 3
    assert set(steps) == {20}


@on_ranks(2)
def test_the_law_notices_a_lost_residual(rank: int) -> None:
    """The same law, with a residual that is thrown away in the middle."""
    model = convnet()
    ledger = Ledger(model)
    ddp, state = wrap(model, OneBit())
    train(rank, ddp, range(5), ledger)
    state._flush()
    state._feedback.load({})
    train(rank, ddp, range(5, 10), ledger)
    assert ledger.error(state) > 1e-2


def two_models(rank: int) -> Any:
    first, second = perceptron(), convnet()
    ledgers = Ledger(first), Ledger(second)
    (ddp1, state1), (ddp2, state2) = wrap(first, OneBit()), wrap(second, TopK(0.1))
    digests = []
    for step in range(6):
        digests += train(rank, ddp1, range(step, step + 1), ledgers[0])
        digests += train(rank, ddp2, range(step, step + 1), ledgers[1])
    # Both in one backward pass, their buckets between each other.
    x, y = batch(rank, 99, first), batch(rank, 99, second)
    for ledger, model, data in zip(ledgers, (first, second), (x, y), strict=True):
        ledger.expect(lambda model=model, data=data: model(data).square().mean())  # type: ignore[misc]
        model.zero_grad()
    (ddp1(x).square().mean() + ddp2(y).square().mean()).backward()
    for ledger in ledgers:
        ledger.receive()
    return digests, ledgers[0].error(state1), ledgers[1].error(state2)


def test_several_models_in_one_process(ranks: Ranks) -> None:
    results = ranks(2).run(two_models)
    assert equal_on_all([r[0] for r in results])
    assert max(max(r[1:]) for r in results) < 1e-5


def subgroup(rank: int) -> Any:
    """Ranks 0 and 2 train a model of their own; rank 1 is in no such group. Then all three train one."""
    group = dist.new_group([0, 2])
    result: tuple[Any, ...] | None = None
    if rank != 1:
        model = perceptron()
        ddp, state = wrap(model, OneBit(), ddp={"process_group": group})
        result = train(rank, ddp, range(4)), list(state.state_dict()["residuals"])
        state.close()  # and is reconnected to the same ranks, by the next step
        result += (list(state.state_dict()["residuals"]), train(rank, ddp, range(4, 6)))
    everyone, _ = wrap(perceptron(), OneBit())
    return result, train(rank, everyone, range(3))


def test_a_group_that_is_not_the_default_one(ranks: Ranks) -> None:
    results = ranks(3).run(subgroup)
    for which, rank in ((0, 0), (1, 2)):
        digests, before, after, further = results[rank][0]
        assert before == after == [f"rank {which} of 2"]
        assert (digests, further) == (results[0][0][0], results[0][0][3])
    assert equal_on_all([r[1] for r in results])


@on_ranks(2)
def test_a_group_of_the_users(rank: int) -> Any:
    group = dist.new_group([0, 1])
    ddp, state = wrap(perceptron(), OneBit(), process_group=group)
    digests = train(rank, ddp, range(3))
    other = dist.new_group([rank], use_local_synchronization=True)
    with pytest.raises(ValueError, match="process_group has the ranks"):
        CompressState(ddp, OneBit(), process_group=other)
    state.close()
    return digests


def alone(rank: int) -> Any:
    model = perceptron()
    ledger = Ledger(model)
    ddp, state = wrap(model, TopK(0.1), exchange="gather")
    train(rank, ddp, range(5), ledger)
    return ledger.error(state), state.statistics().bytes_sent


def test_world_size_one(ranks: Ranks) -> None:
    [(error, payload)] = ranks(1).run(alone)
    assert error < 1e-5
    assert payload == 0


def compiled(rank: int, around: str) -> Any:
    torch._dynamo.reset()
    model = perceptron()
    ledger = Ledger(model)
    if around == "model":
        ddp = DistributedDataParallel(torch.compile(model, backend="aot_eager"), bucket_cap_mb=1)
        state = CompressState(ddp, OneBit())
        run: Any = ddp
    else:
        ddp = DistributedDataParallel(model, bucket_cap_mb=1)
        run = torch.compile(ddp, backend="aot_eager")
        state = CompressState(run, OneBit())
    ddp.register_comm_hook(state, compress_hook)
    names = sorted(state._parameters)
    digests = []
    for step in range(4):
        data = batch(rank, step, model)
        ledger.expect(lambda data=data: model(data).square().mean())  # type: ignore[misc]
        ddp.zero_grad()
        run(data).square().mean().backward()
        ledger.receive()
        digests.append(digest(p.grad for p in model.parameters()))
    return digests, names, ledger.error(state)


@pytest.mark.parametrize("around", ["model", "ddp"])
def test_compiled_models(ranks: Ranks, around: str) -> None:
    results = ranks(2).run(compiled, around)
    assert equal_on_all([r[0] for r in results])
    assert results[0][1] == sorted(name for name, _ in perceptron().named_parameters())
    assert max(r[2] for r in results) < 1e-5


class Normalised(nn.Module):
    """SyncBatchNorm without a GPU: the same collectives, on the model's own group, in forward and backward."""

    class Sync(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            mean = x.mean(0)
            dist.all_reduce(mean)
            return x - mean / dist.get_world_size()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            mean = grad.mean(0)
            dist.all_reduce(mean)
            return grad - mean / dist.get_world_size()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.Sync.apply(layer(x)).tanh()
        return x


@pytest.mark.parametrize("exchange", ["auto", "dense"])
@on_ranks(3)
def test_collectives_of_the_model_beside_the_hook(rank: int, exchange: str) -> list[str]:
    torch.manual_seed(3)
    ddp, _ = wrap(Normalised(), OneBit(), ddp={"bucket_cap_mb": 0.005}, exchange=exchange)
    digests = train(rank, ddp, range(10))
    assert len(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")) >= 4
    return digests


def scaled(rank: int, overflow_at: int) -> Any:
    """Mixed precision: a loss scale that grows every second step, and on rank 1 an overflow that skips one."""
    model = perceptron()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    ddp, state = wrap(model, OneBit(), grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ledger = Ledger(model)
    scales, snapshots = [], []
    for step in range(8):
        data = batch(rank, step, model)
        skipped = step == overflow_at
        if not skipped:
            ledger.expect(lambda data=data: model(data).square().mean())  # type: ignore[misc]
        optimizer.zero_grad()
        loss = scaler.scale(ddp(data).square().mean())
        before = residuals_of(state.state_dict())
        (loss * float("inf") if skipped and rank == 1 else loss).backward()
        after = residuals_of(state.state_dict())
        if skipped:
            snapshots = [digest(before.values()), digest(after.values())]
        scaler.unscale_(optimizer)
        if not skipped:
            ledger.receive()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    _, unscaled = wrap(perceptron(), OneBit())  # a state without a scaler takes them in units of one
    unscaled.load_state_dict(state.consolidated_state_dict())
    errors = ledger.error(state), ledger.error(unscaled)
    return max(errors), scales, snapshots, state.statistics().nonfinite_steps


def test_grad_scaler_with_an_overflow_on_one_rank(ranks: Ranks) -> None:
    results = ranks(2).run(scaled, 3)
    errors, scales, snapshots, nonfinite = zip(*results, strict=True)
    assert max(errors) < 1e-5
    assert equal_on_all(list(scales))
    assert scales[0][3] < scales[0][2], "the scale did not fall"
    assert scales[0][5] > scales[0][3], "the scale did not grow"
    assert all(before == after for before, after in snapshots), "a skipped step must leave the residual as it was"
    assert nonfinite == (1, 1)


@pytest.mark.parametrize("exchange", ["gather", "two_pass"])
@on_ranks(3)
def test_excluded_parameters_stay_exact(rank: int, exchange: str) -> None:
    model = convnet()
    ledger = Ledger(model)
    ddp, state = wrap(model, OneBit(), exchange=exchange, exclude=lambda name, p: p.dim() < 2)
    worst = 0.0
    for step in range(5):
        data = batch(rank, step, model)
        before = {n: w.clone() for n, w in ledger.wanted.items()}
        ledger.expect(lambda data=data: model(data).square().mean())  # type: ignore[misc]
        ddp.zero_grad()
        ddp(data).square().mean().backward()
        ledger.receive()
        for name, p in model.named_parameters():
            if p.dim() < 2:
                assert p.grad is not None
                worst = max(worst, float((p.grad - (ledger.wanted[name] - before[name])).abs().max()))
    residuals = residuals_of(state.state_dict())
    error, biases = ledger.error(state), [n for n in residuals if n.endswith("bias")]
    assert worst < 1e-7
    assert error < 1e-5
    assert biases == []


@on_ranks(2)
def test_warmup_is_dense(rank: int) -> None:
    model = perceptron()
    ledger = Ledger(model)
    ddp, state = wrap(model, OneBit(), warmup_steps=3)
    train(rank, ddp, range(3), ledger)
    exact = max(float((ledger.wanted[n] - ledger.received[n]).abs().max()) for n in ledger.wanted)
    dense = state.statistics().bytes_sent
    train(rank, ddp, range(3, 6), ledger)
    compressed, error = state.statistics().bytes_sent - dense, ledger.error(state)
    assert exact < 1e-6
    assert compressed < dense / 10
    assert error < 1e-5


def changing_codec(step: int) -> Codec:
    return [OneBit(), TopK(0.5), TopK(0.1), QSGD(), Identity(), TernGrad(), OneBit()][step % 7]


def scheduled(rank: int) -> Any:
    model = perceptron()
    ledger = Ledger(model)
    ddp, state = wrap(model, changing_codec)
    digests = train(rank, ddp, range(3), ledger)
    early = ledger.error(state)
    digests += train(rank, ddp, range(3, 5), ledger)
    left = [float(t.abs().max()) for t in residuals_of(state.state_dict()).values()]
    digests += train(rank, ddp, range(5, 8))
    return digests, early, left


def test_codec_as_a_function_of_the_step(ranks: Ranks) -> None:
    results = ranks(2).run(scheduled)
    assert equal_on_all([r[0] for r in results])
    for _, error, left in results:
        assert error < 1e-5
        assert max(left, default=0.0) == 0.0, "codecs without feedback must send what is left and keep nothing"


def half_precision(rank: int, dtype: torch.dtype) -> Any:
    model = perceptron().to(dtype)
    ddp, state = wrap(model, OneBit())
    digests = []
    for step in range(4):
        ddp.zero_grad()
        ddp(batch(rank, step, model).to(dtype)).float().square().mean().backward()
        digests.append(digest(p.grad for p in model.parameters()))
    return digests, {str(t.dtype) for t in residuals_of(state.state_dict()).values()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_models(ranks: Ranks, dtype: torch.dtype) -> None:
    results = ranks(2).run(half_precision, dtype)
    assert equal_on_all(results)
    assert results[0][1] == {"torch.float32"}


def stochastic_replay(rank: int, seed: int) -> list[str]:
    ddp, _ = wrap(perceptron(), QSGD(), seed=seed)
    return train(rank, ddp, range(4))


def test_draws_replay_and_follow_the_seed(ranks: Ranks) -> None:
    first, again, other = (ranks(2).run(stochastic_replay, seed) for seed in (1, 1, 2))
    assert first == again
    assert first[0] == first[1]
    assert first != other


@pytest.mark.parametrize("codec", [OneBit(), QSGD(), TernGrad(), TopK()], ids=str)
@on_ranks(2)
def test_statistics_match_what_the_codec_promises(rank: int, codec: Codec) -> None:
    ddp, state = wrap(convnet(1024), codec, ddp={"bucket_cap_mb": 25}, exchange="gather")  # others send more
    train(rank, ddp, range(3))
    statistics = state.statistics()
    numel = sum(p.numel() for p in convnet(1024).parameters())
    assert statistics.elements == 3 * numel
    assert statistics.dense_bytes == 12 * numel
    assert statistics.bytes_sent == pytest.approx(3 * codec.bits_per_element() * numel / 8, rel=0.05)
    assert min(statistics.seconds.values()) > 0
