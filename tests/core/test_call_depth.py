"""How much of the library a bucket's way leads through: what a reader has to open to follow it."""

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
from gradwire import Codec, CompressState, OneBit, TopK, compress_hook
from ranks import Pool
from test_architecture import library
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import train

Ranks = Callable[[int], Pool]
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

    threading.setprofile(look)
    try:
        yield files, watch
    finally:
        threading.setprofile(None)


def four_buckets(codec: Codec, exchange: Any, hook: Any) -> tuple[DistributedDataParallel, CompressState]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
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


def files_of_a_step(rank: int, codec: Codec, exchange: Any) -> set[str]:
    """Files of the library whose functions run from the begin of a backward pass to the end of the optimizer's step."""
    with watched() as (files, watch):
        ddp, state = four_buckets(codec, exchange, compress_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for step in range(6):
            loss = ddp(torch.ones(8, 64)).square().sum()
            watch(step == 5)
            loss.backward()
            optimizer.step()
        assert state._reducer is not None
        state._reducer.session.pipeline.idle()
        watch(False)
        state.close()
    return files


@pytest.mark.parametrize(("codec", "exchange"), [(OneBit(), "two_pass"), (TopK(0.05), "split")], ids=["onebit", "topk"])
@pytest.mark.parametrize(("entered", "most"), [(files_entered, (13, 19)), (files_of_a_step, (20, 26))])
def test_a_bucket_s_way_and_a_step_are_short(
    ranks: Ranks, codec: Codec, exchange: str, entered: Callable[..., set[str]], most: tuple[int, int]
) -> None:
    for files in ranks(2).run(entered, codec, exchange):
        names = sorted(files)
        assert any(name.endswith("/reducer.py") for name in names)
        assert len(names) <= most[isinstance(codec, TopK)], names


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="newer Pythons make fewer calls, and so enter fewer files")
def test_the_picture_of_the_way_has_these_files(ranks: Ranks) -> None:
    drawn = page_pictures.WAY.read_text("utf-8")
    assert page_pictures.way_picture(page_pictures.measured(ranks(2)), library()) == drawn, (
        "run `python tests/support/page_pictures.py`"
    )
