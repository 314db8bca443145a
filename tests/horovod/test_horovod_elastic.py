"""Elastic state, samplers and SyncBatchNorm; and jobs whose ranks die."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gradwire.hooks.horovod as hvd
import pytest
import torch
from gradwire import TopK
from gradwire.hooks.horovod.elastic import state as elastic_state
from ranks import Ranks
from test_horovod_operations import equal, horovod_ranks, raised
from test_horovod_optimizer import nested, outlined
from torch import nn

WORLDS = pytest.mark.parametrize("world", [2, 4])
QUICK = 15.0


# -- SyncBatchNorm -----------------------------------------------------------------------------------------------------


@horovod_ranks(2, 4)
def test_batch_norm_over_all_ranks(rank: int) -> None:
    n = hvd.size()
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(3 * n, 5, 4, generator=generator) * 2 + 100
    pieces = list(whole.split([2 if r == 0 else 4 if r == 1 else 3 for r in range(n)]))
    plain: Any = nn.BatchNorm1d(5)
    sync: Any = hvd.SyncBatchNorm(5)
    x: Any = whole.clone().requires_grad_()
    mine: Any = pieces[rank].clone().requires_grad_()
    weight = torch.arange(1.0, 5.0)
    for _ in range(2):
        expected, got = plain(x), sync(mine)
        start = sum(len(piece) for piece in pieces[:rank])
        assert torch.allclose(got, expected[start : start + len(mine)], atol=1e-4)
        (expected.square() * weight).sum().backward()
        (got.square() * weight).sum().backward()
    assert torch.allclose(mine.grad, x.grad[start : start + len(mine)], atol=1e-3)
    assert torch.allclose(sync.running_mean, plain.running_mean, atol=1e-4)
    assert torch.allclose(sync.running_var, plain.running_var, atol=1e-4)
    total = hvd.allreduce(sync.weight.grad, op=hvd.Sum)
    assert torch.allclose(total, plain.weight.grad, rtol=1e-3, atol=1e-3)
    sync.eval()
    plain.eval()
    assert torch.allclose(sync(mine), plain(x)[start : start + len(mine)], atol=1e-4)
    sync.train()
    assert "1D" in raised(ValueError, lambda: sync(torch.ones(3)))
    assert sync(mine.detach().bfloat16()).dtype == torch.bfloat16


# -- sampler and state -------------------------------------------------------------------------------------------------


@horovod_ranks(2, 4)
def test_the_sampler_leaves_out_what_was_processed(rank: int) -> None:
    n = hvd.size()
    data = list(range(10 * n + 1))
    sampler = hvd.elastic.ElasticSampler(data, shuffle=True, seed=1)
    mine = list(sampler)
    assert len(mine) == len(sampler) == 11
    rows = hvd.allgather_object(mine)
    assert set().union(*rows) == set(data)
    assert mine != sorted(mine)
    assert list(sampler) == mine
    sampler.record_batch(0, 3)
    sampler.record_batch(1, 3)
    assert sampler.processed_indices == set(mine[:6])
    saved = sampler.state_dict()
    sampler.reset()
    assert set(sampler.remaining_indices) == set(data) - set(mine[:6])
    sampler.set_epoch(1)
    assert not sampler.processed_indices
    assert list(sampler) != mine
    sampler.load_state_dict(saved)
    assert (sampler.epoch, sampler.processed_indices) == (0, set(mine[:6]))
    few = hvd.elastic.ElasticSampler([5], shuffle=False)
    assert list(few) == [0]  # on every rank, there being one


def committed(rank: int, folder: str) -> None:
    hvd.init()
    n = hvd.size()
    os.environ["GRADWIRE_ELASTIC_DIR"] = folder
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), compression=TopK(0.3)
    )
    sampler = hvd.elastic.ElasticSampler(range(4 * n), shuffle=False)
    state: Any = hvd.elastic.TorchState(model, optimizer, epoch=rank, sampler=sampler, note={"text": "x"})
    state.sync()
    assert state.epoch == 0
    rows = hvd.allgather_object([p.tolist() for p in model.parameters()])
    assert all(row == rows[0] for row in rows)

    def step(value: float) -> None:
        optimizer.zero_grad()
        model(torch.full((1, 3), value + rank)).sum().backward()
        optimizer.step()

    step(1.0)
    mine = list(sampler)
    sampler.record_batch(0, 1)
    state.epoch = 5
    state.commit()
    assert len(sampler.processed_indices) == n  # everybody's
    kept = [p.detach().clone() for p in model.parameters()]
    residuals = optimizer.state_dict()["gradwire"]["residuals"]
    step(2.0)
    state.epoch = 6
    state.note["text"] = "y"
    state.restore()
    assert (state.epoch, state.note["text"]) == (5, "x")
    assert all(torch.equal(a, b) for a, b in zip(kept, model.parameters(), strict=True))
    back = optimizer.state_dict()["gradwire"]["residuals"]
    assert all(torch.equal(back[name], residuals[name]) for name in residuals)

    # Another process, as after a restart: from the file, on all ranks.
    other = nn.Linear(3, 2)
    again = hvd.DistributedOptimizer(
        torch.optim.SGD(other.parameters(), lr=0.3, momentum=0.9), other.named_parameters(), compression=TopK(0.3)
    )
    calls: list[int] = []
    fresh: Any = hvd.elastic.TorchState(
        other, again, epoch=0, sampler=hvd.elastic.ElasticSampler(range(4 * n), shuffle=False), note={}
    )
    fresh.register_reset_callbacks([lambda: calls.append(hvd.size())])

    @hvd.elastic.run
    def go(state: Any, text: str) -> str:
        assert (state.epoch, state.note) == (5, {"text": "x"})
        assert all(torch.equal(a, b) for a, b in zip(kept, other.parameters(), strict=True))
        assert again.param_groups[0]["lr"] == 0.1
        mean = again.state_dict()["gradwire"]["residuals"]
        for name, residual in residuals.items():
            equal(mean[name], hvd.allreduce(residual))
        assert len(state.sampler.processed_indices) == n
        assert mine[0] not in state.sampler.remaining_indices
        return text

    assert go(fresh, "done") == "done"
    assert calls == [n]
    # A restart that one rank has heard of interrupts all, at the same commit.
    if rank == 1:
        elastic_state._terminating.set()
    assert "restarting" in raised(hvd.elastic.HostsUpdatedInterrupt, fresh.commit)
    elastic_state._terminating.clear()
    fresh.commit()
    wrong = hvd.elastic.TorchState(other)
    assert "committed with" in raised(ValueError, wrong._load_commit)
    del os.environ["GRADWIRE_ELASTIC_DIR"]


@WORLDS
def test_commits_are_kept_in_memory_and_on_disk(ranks: Ranks, world: int, tmp_path: Path) -> None:
    ranks(world).run(committed, str(tmp_path))


def restored(rank: int, folder: str) -> None:
    hvd.init()
    os.environ["GRADWIRE_ELASTIC_DIR"] = folder

    def made(seed: int) -> tuple[nn.Linear, Any]:
        model = nn.Linear(3, 2, dtype=torch.bfloat16)
        optimizer: Any = torch.optim.Adam(model.parameters())
        for p in model.parameters():
            optimizer.state[p] = nested(p, seed)
        del optimizer.state[model.bias]["parameter"]
        return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=TopK(0.3))

    model, optimizer = made(3)
    expected = outlined(optimizer)
    state: Any = hvd.elastic.TorchState(model, optimizer)
    for p in model.parameters():  # a step that fails on the way
        optimizer.state[p]["by dimension"][0].add_(1)
        optimizer.state[p]["deque"].append(7)
        optimizer.state[p]["step"] = "another"
    assert outlined(optimizer) != expected
    state.restore()
    assert outlined(optimizer) == expected
    assert optimizer.state[model.weight].pop("parameter")[0] is model.weight
    for p in model.parameters():  # torch.save refuses memory that is seen as two dtypes
        optimizer.state[p]["views"] = optimizer.state[p]["views"][::2]
    expected = outlined(optimizer)
    state.commit()
    other, again = made(4)
    assert hvd.elastic.TorchState(other, again)._load_commit()
    assert outlined(again) == expected
    del os.environ["GRADWIRE_ELASTIC_DIR"]


def test_any_optimizer_state_is_restored_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(restored, str(tmp_path))


@horovod_ranks(2)
def test_ranks_outside_of_the_optimizers_process_set_commit_too(rank: int) -> None:
    members = hvd.add_process_set([0])
    model = nn.Linear(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    compression = hvd.Compression.codec(TopK(0.3), exchange="gather")  # one rank alone compresses if it is told to
    optimizer = hvd.DistributedOptimizer(plain, compression=compression, process_set=members)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    hvd.elastic.TorchState(model, optimizer).commit()
    saved = optimizer.consolidated_state_dict()["gradwire"]
    assert (saved["rank"], bool(saved["residuals"])) == (-1, rank == 0)
    hvd.remove_process_set(members)


# -- processes that end, well or not -----------------------------------------------------------------------------------


def launch(tmp_path: Path, world: int, script: str, *arguments: str, **environment: str) -> tuple[int, str, float]:
    """Run a script with torchrun: exit status, output, seconds."""
    path = tmp_path / "script.py"
    path.write_text("if True:\n" + script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **environment}
    start = time.monotonic()
    done = subprocess.run(
        [*command, str(path)], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=90,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, time.monotonic() - start


PREAMBLE = """
    import os, sys, time, torch
    import gradwire.hooks.horovod as hvd
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
"""


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_script_that_forgets_shutdown_exits_0(tmp_path: Path, world: int) -> None:
    """Rank 0 leaves with something pending, and rank 1 hears that it has left, not that its connection broke."""
    status, output, _ = launch(
        tmp_path,
        world,
        PREAMBLE
        + """
    if rank == 0:
        time.sleep(0.5)
    # Before what both take part in: rank 0 may leave as soon as it has that.
    alone = hvd.allreduce_async(torch.ones(2), name="of rank %d alone" % rank)
    total = hvd.allreduce(torch.ones(3), op=hvd.Sum)
    assert total.tolist() == [float(size)] * 3
    sys.stdout.write("well %d %d %d %d\\n" % (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()))
    if rank == 1:
        try:
            hvd.synchronize(alone)
        except hvd.HorovodInternalError as error:
            sys.stdout.write("heard: %s\\n" % error)
    """,
    )
    assert status == 0, output
    assert world == 1 or "heard: Horovod has been shut down: rank 0 has shut down" in output
    for rank in range(world):
        assert f"well {rank} {world} 0 1" in output


ENDS = {
    "killed": "os.kill(os.getpid(), 9)",
    "left": "sys.exit(0)",
    "failed": "raise RuntimeError('of its own')",
    "shut down": "hvd.shutdown(); time.sleep(3); sys.exit(0)",
}


@pytest.mark.parametrize(
    ("end", "who"),
    [
        ("killed", 0),
        ("shut down", 0),
        *(pytest.param(end, 1, marks=pytest.mark.slow) for end in ("killed", "left", "failed")),
    ],
)
def test_a_rank_that_is_gone_ends_in_an_error_on_the_others(tmp_path: Path, end: str, who: int) -> None:
    """One goes in the middle; the others hear of it, quickly, and can say so."""
    script = (
        PREAMBLE
        + f"""
    hvd.allreduce(torch.ones(3))
    if rank == {who}:
        {ENDS[end]}
    start = time.monotonic()
    try:
        for i in range(1000):
            hvd.allreduce(torch.ones(1 << 20), name=f"big{{i}}")
        print("no error on", rank)
    except hvd.HorovodInternalError as error:
        with open(sys.argv[0] + f".{{rank}}", "w") as file:
            file.write(f"{{time.monotonic() - start}} {{error}}")
    try:
        hvd.allreduce(torch.ones(3))
    except hvd.HorovodInternalError:
        hvd.shutdown()
    """
    )
    # Processes by themselves: torchrun would stop the others as soon as one fails.
    path = tmp_path / "script.py"
    path.write_text("if True:\n" + script)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen([sys.executable, str(path)], env={**env, "HOROVOD_RANK": str(r), "HOROVOD_SIZE": "3"})
        for r in range(3)
    ]
    for rank, process in enumerate(processes):
        status = process.wait(60)
        if rank != who:
            assert status == 0
            seconds, message = Path(f"{path}.{rank}").read_text().split(" ", 1)
            assert float(seconds) < QUICK
            assert "shut down" in message or "Connection" in message or f"rank {who}" in message


def free_port() -> int:
    import socket

    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        return int(end.getsockname()[1])


def test_an_elastic_job_goes_on_after_a_rank_is_lost(tmp_path: Path) -> None:
    script = (
        PREAMBLE
        + """
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

    @hvd.elastic.run
    def train(state):
        sys.stdout.write(f"begin at {state.batch}\\n")
        while state.batch < 6:
            if rank == 1 and state.batch == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                sys.stdout.flush()  # Python's own end, which does so, does not come
                os.kill(os.getpid(), 9)
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            state.batch += 1
            state.commit()
        sys.stdout.write(f"end at {state.batch}\\n")

    train(hvd.elastic.TorchState(model, optimizer, batch=0))
    """
    )
    status, output, _ = launch(tmp_path, 2, script, "--max-restarts=1")
    assert status == 0, output
    assert output.count("begin at 0") == 2, output
    assert output.count("begin at 3") == 2, output
    assert output.count("end at 6") == 2, output
