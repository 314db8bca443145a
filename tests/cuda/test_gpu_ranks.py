"""The laws on ranks that share a GPU, over real NCCL wherever it lets them; without a GPU, a rehearsal on CPUs.

`GRADWIRE_GPU_RANKS` says how many ranks there are (default: 2). Each test that fails or hangs costs its ranks alone.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import DEVICE, REAL, Shared
from gradwire import (
    EDEN,
    QSGD,
    Cast,
    ChunkedTopK,
    Codec,
    Identity,
    LocalUpdates,
    Momentum,
    OneBit,
    PowerSGD,
    RandomK,
    Residual,
    Ternary,
    TernGrad,
    Threshold,
    TopK,
    Tracking,
    compress_fsdp,
    sparse_all_reduce,
)
from gradwire.hooks.exchanges import possible
from ranks import RankError
from strategies import GPU
from test_cuda_hooks import gradients_of
from torch import Tensor
from training import Ledger, batch, digest, in_groups, perceptron, train, wrap

#: Where there is no GPU, a few rehearse the rest.
pytestmark = [pytest.mark.cuda] if GPU else []
SLOW = () if GPU else (pytest.mark.slow,)
RANKS = int(os.environ.get("GRADWIRE_GPU_RANKS", "2"))
Say = Callable[[str], None]

CODECS: tuple[Codec, ...] = (
    OneBit(), QSGD(bits=4), TernGrad(), Ternary(), EDEN(),
    TopK(0.05), TopK(0.05, values=torch.int8), Threshold(1e-3, most=0.2),
    RandomK(0.1), PowerSGD(rank=2), ChunkedTopK(k=16, chunk=1024), Cast(torch.float16), Identity(),
)  # fmt: skip
#: Each file of kernels and each way of exchanging once: first, in case time runs out.
FIRST: list[tuple[Codec, str]] = [
    (OneBit(), "two_pass"), (TopK(0.05), "split"), (QSGD(bits=4), "gather"), (TopK(0.05), "union"),
    (TopK(0.05), "mask"),
    (ChunkedTopK(k=16, chunk=1024), "gather"), (PowerSGD(rank=2), "factors"),
    (Ternary(), "two_pass"), (EDEN(), "two_pass"),
]  # fmt: skip
HIERARCHICAL = [(codec, "hierarchical") for codec in (OneBit(), TopK(0.05)) if RANKS % 4 == 0]
EVERY = [(codec, exchange) for codec in CODECS for exchange in possible(codec)]
REST = [*HIERARCHICAL, *(way for way in EVERY if way not in FIRST)]


def named(given: Any) -> str:
    return given if isinstance(given, str) else str(given).replace("torch.", "")


def ways(first: int, rest: bool = False) -> pytest.MarkDecorator:
    """Codecs with exchanges; without a GPU all but the first are slow."""
    given = [*FIRST[:first], *(REST if rest else ())]
    params = [pytest.param(*way, marks=SLOW if i else ()) for i, way in enumerate(given)]
    return pytest.mark.parametrize(("codec", "exchange"), params, ids=named)


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    found = Shared(RANKS)
    yield found
    found.close()


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Say:
    """Have the report of a GPU say something of this test."""
    return lambda text: record_property("says", text)


def alike(digests: list[Any]) -> None:
    assert all(one == digests[0] for one in digests), f"replicas differ: {digests}"


# -- DDP ---------------------------------------------------------------------------------------------------------------


def test_ranks_meet(shared: Shared, say: Say) -> None:
    assert shared.way is not None, shared.refused
    say(
        "; ".join(
            [f"{shared.way.name}: {shared.said}", *(f"not {name}: {why}" for name, why in shared.refused.items())]
        )
    )


def trained(rank: int, codec: Codec, exchange: str, steps: int = 5, save_at: int = 0, **options: Any) -> Any:
    """Digests, how far the law is off, and counts; at `save_at` through a checkpoint into a new model and state."""
    model = perceptron().to(DEVICE)
    ledger = Ledger(model)
    if exchange == "hierarchical":
        options["topology"] = 2
    ddp, state = wrap(model, codec, exchange=exchange, **options)
    digests = train(rank, ddp, range(save_at), ledger)
    if save_at:
        torch.save({"state": state.state_dict(), "model": model.state_dict()}, file := io.BytesIO())
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        state.close()
        model = perceptron().to(DEVICE)
        model.load_state_dict(saved["model"])
        ledger.model, ledger.parameters = model, dict(model.named_parameters())
        ddp, state = wrap(model, codec, exchange=exchange, **options)
        state.load_state_dict(saved["state"])
    digests += train(rank, ddp, range(save_at, steps), ledger)
    counted, off = state.statistics(), ledger.error(state)
    state.close()
    assert counted.steps == steps - save_at
    assert (counted.skipped_entries, counted.nonfinite_steps) == (0, 0)
    assert {decision.split()[0] for decision in counted.decisions.values()} == {exchange}
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    return digests, off, counted.bytes_sent / counted.dense_bytes


@ways(len(FIRST), rest=True)
def test_nothing_is_lost_and_replicas_are_one(shared: Shared, say: Say, codec: Codec, exchange: str) -> None:
    if exchange == "hierarchical" and shared.size < 4:
        pytest.skip("one rank alone runs here")
    feedback = True if not codec.default_feedback and not codec.lossless else "auto"
    digests, off, share = zip(*shared.run(with_options, codec, exchange, {"error_feedback": feedback}), strict=True)
    alike(list(digests))
    assert max(off) < 3e-5
    say(f"lost {max(off):.0e}, {share[0]:.3f} of the bytes")


def with_options(rank: int, codec: Codec, exchange: str, options: dict[str, Any]) -> Any:
    return trained(rank, codec, exchange, **options)


@pytest.mark.parametrize(
    "options",
    [{"save_at": 3}, pytest.param({"exclude": ["0.bias", "2.bias"]}, marks=SLOW)],
    ids=lambda options: next(iter(options)),
)
def test_nothing_is_lost_on_other_paths(shared: Shared, options: dict[str, Any]) -> None:
    digests, off, _ = zip(*shared.run(with_options, TopK(0.05), "gather", options), strict=True)
    alike(list(digests))
    assert max(off) < 3e-5


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(s, marks=SLOW) for s in (Residual(decay=0.9), Residual(dtype=torch.bfloat16),
     Residual(dtype=torch.int8), Momentum(), Tracking(), False)],
    ids=named,
)  # fmt: skip
def test_replicas_are_one_whatever_is_kept(shared: Shared, strategy: Any) -> None:
    codec, exchange = (TopK(0.05), "gather") if isinstance(strategy, Momentum) else (OneBit(), "two_pass")
    alike([found[0] for found in shared.run(with_options, codec, exchange, {"error_feedback": strategy})])


@ways(len(FIRST))
def test_late_gradients_and_memory_used_again_change_no_bit(
    shared: Shared, say: Say, codec: Codec, exchange: str
) -> None:
    """Against messages between CPUs; sums that NCCL makes are in no order of ours above two ranks."""
    inline = REAL and shared.way is not None and shared.way.backend == "nccl"
    calm = shared.run(gradients_of, codec, exchange, "cpu", "gloo", False, 6, inline)
    found = shared.run(gradients_of, codec, exchange, DEVICE.type, None, GPU)
    alike([digest(gradients) for gradients in found])
    worst = max(float((a - b).abs().max()) for a, b in zip(calm[0], found[0], strict=True))
    summed = exchange in ("union", "factors", "dense") and shared.size > 2
    assert worst <= (1e-4 if summed else 0.0), f"off the CPUs' by {worst:.1e}"
    say(f"off the CPUs' by {worst:.0e}")


def overflowing(rank: int) -> Any:
    """One rank overflows in one step."""
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0, growth_interval=1000)
    model = perceptron().to(DEVICE)
    ddp, state = wrap(model, OneBit(), exchange="two_pass", grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        before = digest(model.parameters())
        data = batch(rank, step, model)
        if step == 3 and rank == dist.get_world_size() - 1:
            data[0, 5] = math.inf
        scaler.scale(ddp(data).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert (digest(model.parameters()) == before) == (step == 3), f"step {step}"
    state.state_dict()  # waits for what the device has to tell
    counted = state.statistics()
    state.close()
    return digest(model.parameters()), scaler.get_scale(), counted.nonfinite_steps


def test_a_rank_that_overflows_stops_the_step_on_all(shared: Shared) -> None:
    found = shared.run(overflowing)
    alike(found)
    assert found[0][1:] == (512.0, 1)


# -- what else exchanges gradients -------------------------------------------------------------------------------------


def summed_sparsely(rank: int) -> Any:
    numel, size, lists = 40_000, dist.get_world_size(), []
    for other in range(size):
        generator = torch.Generator().manual_seed(7 + other)
        chosen = torch.randperm(numel, generator=generator)[: 900 + 300 * other].sort().values
        lists.append((chosen, torch.randn(len(chosen), generator=generator)))
    wanted = torch.zeros(numel)
    for each, sent in lists:
        wanted[each] += sent / size
    indices, values = (x.to(DEVICE) for x in lists[rank])
    digests = []
    for algorithm in ("gather", "union", "split", "dense"):
        out = torch.empty(numel, device=DEVICE)
        sparse_all_reduce(indices, values, numel, algorithm=algorithm, out=out)
        off = float((out.cpu() - wanted).abs().max())
        assert off < 1e-5, f"{algorithm}: off by {off:.1e}"
        digests.append(digest(sparse_all_reduce(indices, values, numel, algorithm=algorithm)))
    rows = torch.full((len(indices), 3), 1e-40, device=DEVICE)  # which atomics would take for zeros
    assert bool((sparse_all_reduce(indices, rows, numel, algorithm="gather", op="sum")[1] >= 0.9e-40).all())
    return digests


def test_sparse_all_reduce(shared: Shared) -> None:
    alike(shared.run(summed_sparsely))


def stepped_alone(rank: int, options: dict[str, Any]) -> Any:
    model = perceptron(32, 64, 2).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    updates = LocalUpdates(
        model, optimizer, ChunkedTopK(k=64, chunk=1024, values=2), every=3, exchange="gather", **in_groups(options)
    )
    for step in range(7):
        model(batch(rank, step, model)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        updates.step()
    updates.synchronise()
    updates.close()
    return digest(model.parameters())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(o, marks=SLOW)
        for o in ({}, {"outer_lr": 0.7, "outer_momentum": 0.9}, {"delay": 1, "keep_local": True})
    ],
    ids=str,
)
def test_local_updates(shared: Shared, options: dict[str, Any]) -> None:
    alike(shared.run(stepped_alone, options))


def sharded(rank: int, replicas: int, codec: Codec) -> Any:
    """FSDP's own parameters, and how far those by `Identity()` are from them, after three steps."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole: list[list[Tensor]] = []
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh(DEVICE.type, shape, mesh_dim_names=("replicate", "shard"))
    for compressed in (None, Identity(), codec):
        model: Any = perceptron(64, 128, 2).to(DEVICE)
        inside = mesh if compressed is None and replicas > 1 else mesh["shard"]
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=inside)
        fully_shard(model, mesh=inside)
        if compressed is not None:
            across: Any = {"mesh": mesh["replicate"], "fallback": None, "exchange": "gather"} if replicas > 1 else {}
            state = compress_fsdp(model, compressed, **across)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(16, 64, generator=generator).to(DEVICE)).square().mean().backward()
            optimizer.step()
        whole.append([p.full_tensor().detach().cpu() for p in model.parameters()])
        if compressed is not None:
            state.close()
    off = max(float((a - b).abs().max()) for a, b in zip(*whole[:2], strict=True))
    return [digest(parameters) for parameters in whole], off


@pytest.mark.parametrize("replicas", [pytest.param(n, marks=SLOW) for n in (1, 2) if RANKS % n == 0])
def test_fsdp(shared: Shared, replicas: int) -> None:
    if shared.size % replicas or (GPU and not REAL):
        pytest.skip("the emulated GPU loses sight of FSDP's memory" if GPU and not REAL else "one rank alone runs here")
    digests, off = zip(*shared.run(sharded, replicas, OneBit()), strict=True)
    alike(list(digests))
    assert max(off) < 1e-5


def by_horovod(rank: int, codec: Codec = OneBit(), exchange: str = "auto") -> Any:  # noqa: B008 - codecs are values
    import gradwire.hooks.horovod as hvd

    hvd.init()
    size = hvd.size()
    x = torch.full((1000,), float(rank), device=DEVICE)
    assert float(hvd.allreduce(x)[0]) == (size - 1) / 2
    rows = hvd.allgather(torch.full((rank + 1, 3), float(rank), device=DEVICE))
    assert (len(rows), float(rows[-1, 0])) == (size * (size + 1) // 2, size - 1)
    assert float(hvd.broadcast(x, root_rank=size - 1)[0]) == size - 1
    model = perceptron(64, 64, 2).to(DEVICE)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.codec(codec, exchange=exchange),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(4):
        model(batch(rank, step, model)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    hvd.shutdown()
    return digest(model.parameters())


@pytest.mark.parametrize(
    ("codec", "exchange"),
    [(OneBit(), "auto"), *(pytest.param(TopK(0.05), name, marks=SLOW) for name in ("split", "union"))],
    ids=named,
)
def test_horovod(shared: Shared, codec: Codec, exchange: str) -> None:
    alike(shared.run(by_horovod, codec, exchange))


# -- faults that are found ---------------------------------------------------------------------------------------------


def forgotten(rank: int) -> Any:
    """A residual that is thrown away on the way."""
    model: Any = perceptron().to(DEVICE)
    ledger = Ledger(model)
    ddp, state = wrap(model, TopK(0.05), exchange="gather")
    train(rank, ddp, range(2), ledger)
    state._flush()
    state._feedback.load({})
    digests = train(rank, ddp, range(2, 4), ledger)
    off = ledger.error(state)
    with torch.no_grad():
        model[0].weight[0, 0] += rank
    state.close()
    return digests, off, digest(model.parameters())


def failing(rank: int) -> None:
    assert rank == 0, "this rank alone"


def test_what_is_wrong_is_found_and_the_next_test_has_new_ranks(shared: Shared) -> None:
    digests, off, parameters = zip(*shared.run(forgotten), strict=True)
    alike(list(digests))
    assert min(off) > 1e-3
    if shared.size > 1:
        with pytest.raises(AssertionError, match="replicas differ"):
            alike(list(parameters))
        with pytest.raises(RankError, match="this rank alone"):
            shared.run(failing)
        assert len(shared.run(by_horovod)) == shared.size
