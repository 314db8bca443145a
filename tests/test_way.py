"""How much of the library a bucket's way leads through: what a reader has to open to follow it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradwire
import pytest
import torch
from gradwire import Codec, OneBit, TopK
from ranks import Pool
from torch import nn
from training import train, wrap

Ranks = Callable[[int], Pool]
ROOT = str(Path(gradwire.__file__).parent)


def files_entered(rank: int, codec: Codec, exchange: Any) -> set[str]:
    """Files of the library whose functions run between the hook's call and the mean, on any thread, in a usual step."""
    files, watching = set(), False

    def look(frame: Any, event: str, argument: Any) -> None:
        if watching and event == "call" and frame.f_code.co_filename.startswith(ROOT):
            files.add(frame.f_code.co_filename.removeprefix(ROOT))

    threading.setprofile(look)  # threads that begin from now on: the pipeline's
    try:
        torch.manual_seed(0)
        ddp, state = wrap(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), codec, exchange=exchange)
        train(rank, ddp, range(5))
        hook = next(iter(ddp.reducer.__class__.__mro__))  # the reducer is C++: the hook is seen where it enters Python
        assert hook.__module__.startswith("torch")
        sys.setprofile(look)
        watching = True
        train(rank, ddp, range(5, 7))
        state._flush()
        watching = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    state.close()
    return files


@pytest.mark.parametrize(
    ("codec", "exchange", "most"), [(OneBit(), "two_pass", 10), (TopK(0.05), "split", 13)], ids=["onebit", "topk"]
)
def test_a_bucket_s_way_is_short(ranks: Ranks, codec: Codec, exchange: str, most: int) -> None:
    for files in ranks(2).run(files_entered, codec, exchange):
        names = sorted(files)
        assert any(name.endswith("/reducer.py") for name in names)
        assert len(names) <= most, names
