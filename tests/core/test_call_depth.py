"""How much of the library a bucket's way leads through: what a reader has to open to follow it."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradwire
import page_pictures
import pytest
import torch
import torch.distributed as dist
from gradwire import Codec, CompressState, LocalUpdates, OneBit, TopK, compress_fsdp, compress_hook
from ranks import Ranks
from test_architecture import library
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import train

#: A step of training, and the state that compresses it.
Trained = tuple[Callable[[], None], Any]
ROOT = str(Path(gradwire.__file__).parent)


@contextmanager
def watched() -> Iterator[tuple[set[str], Callable[[bool], None]]]:
    """Files of the library whose functions run while a function says so, on its thread and on those that begin here."""
    files: set[str] = set()
    watching = False

    def look(frame: Any, event: str, argument: Any) -> None:
        if watching and event == "call" and frame.f_code.co_filename.startswith(ROOT):
            files.add(frame.f_code.co_filename.removeprefix(ROOT))

    def watch(on: bool) -> None:
        nonlocal watching
        watching = on
        sys.setprofile(look if on else None)

    gc.collect()  # else states of other tests may end, and run their last functions, meanwhile
    gc.disable()
    threading.setprofile(look)
    try:
        yield files, watch
    finally:
        threading.setprofile(None)
        gc.enable()


def four_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))


def four_buckets(codec: Codec, exchange: Any, hook: Any) -> tuple[DistributedDataParallel, CompressState]:
    ddp = DistributedDataParallel(four_layers(), bucket_cap_mb=0.01)
    state = CompressState(ddp, codec, exchange=exchange)
    ddp.register_comm_hook(state, hook)
    return ddp, state


def files_entered(rank: int, codec: Codec, exchange: Any) -> set[str]:
    """Files of the library whose functions run between the hook's call and the mean, on any thread, for a bucket that
    neither begins nor ends a step."""
    with watched() as (files, watch):

        def hook(state: CompressState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            if bucket.index() != 1 or state.step < 4:
                return compress_hook(state, bucket)
            assert state._reducer is not None
            state._reducer.session.pipeline.idle()  # the buckets before have ended
            watch(True)
            future = compress_hook(state, bucket)
            future.wait()
            watch(False)
            return future

        ddp, state = four_buckets(codec, exchange, hook)
        train(rank, ddp, range(6))
        state.close()
    return files


def ddp_step(rank: int, codec: Codec, exchange: Any) -> Trained:
    ddp, state = four_buckets(codec, exchange, compress_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step() -> None:
        ddp(torch.ones(8, 64)).square().sum().backward()
        optimizer.step()

    return step, state


def sharded_step(rank: int, codec: Codec, exchange: Any) -> Trained:
    """With `exchange` between replicas; "scatter": between shards."""
    model, scatters = four_layers(), exchange == "scatter"
    mesh = init_device_mesh("cpu", (2,) if scatters else (2, 1), mesh_dim_names=("replicate", "shard")[: 2 - scatters])
    shards = mesh if scatters else mesh["shard"]
    for layer in model:
        fully_shard(layer, mesh=shards)
    fully_shard(model, mesh=shards)
    how: Any = {} if scatters else {"exchange": exchange, "mesh": mesh["replicate"], "fallback": None}
    state = compress_fsdp(model, codec, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.ones(8, 64)).square().sum().backward()
        optimizer.step()

    return step, state


def local_round(rank: int, codec: Codec, exchange: Any) -> Trained:
    model = four_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    updates = LocalUpdates(model, optimizer, codec, every=1, exchange=exchange)

    def step() -> None:
        model(torch.ones(8, 64)).square().sum().backward()
        optimizer.step()
        updates.step()

    return step, updates


def files_of_a_step(rank: int, front: Callable[..., Trained], codec: Codec, exchange: Any) -> set[str]:
    """Files of the library whose functions run in a step, from the begin of its backward pass to the end of the
    optimizer's step."""
    with watched() as (files, watch):
        step, state = front(rank, codec, exchange)
        for number in range(6):
            watch(number == 5)
            step()
        if state._reducer is not None:
            state._session.pipeline.idle()
        watch(False)
    state.close()
    return files


TOPK = TopK(0.05)


@pytest.mark.parametrize(
    ("codec", "exchange", "most"), [(OneBit(), "two_pass", 13), (TOPK, "gather", 14), (TOPK, "split", 17)]
)
def test_a_bucket_s_way_is_short(ranks: Ranks, codec: Codec, exchange: str, most: int) -> None:
    for files in ranks(2).run(files_entered, codec, exchange):
        assert "/hooks/core/reducer.py" in files
        assert len(files) <= most, sorted(files)


@pytest.mark.parametrize(
    ("front", "codec", "exchange", "most"),
    [
        (ddp_step, OneBit(), "two_pass", 20),
        (ddp_step, TOPK, "gather", 21),
        (ddp_step, TOPK, "split", 24),
        (sharded_step, OneBit(), "two_pass", 21),
        (sharded_step, TOPK, "gather", 22),
        (sharded_step, OneBit(), "scatter", 22),
        (local_round, OneBit(), "two_pass", 29),
        (local_round, TOPK, "gather", 30),
    ],
)
def test_a_step_is_short(ranks: Ranks, front: Callable[..., Trained], codec: Codec, exchange: str, most: int) -> None:
    for files in ranks(2).run(files_of_a_step, front, codec, exchange):
        assert "/hooks/core/session.py" in files
        assert len(files) <= most, sorted(files)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="newer Pythons make fewer calls, and so enter fewer files")
def test_the_picture_of_the_way_has_these_files(ranks: Ranks) -> None:
    drawn = page_pictures.WAY.read_text("utf-8")
    assert page_pictures.way_picture(page_pictures.measured(ranks(2)), library()) == drawn, (
        "run `python tests/support/page_pictures.py`"
    )
