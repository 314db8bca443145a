"""What a profiler shows of a step: the phases of each bucket, and that the statistics count the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import Codec, OneBit, TopK
from gradwire.hooks import Statistics
from gradwire.hooks.core import bucket as core_bucket
from gradwire.hooks.core.bucket import NVTX_TOOLS, clock
from lacking import needs_all_threads
from ranks import Ranks
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile
from training import batch, convnet, wrap

RECIPE = Path(__file__).parents[2] / "docs" / "profiling.md"
RANGE = re.compile(r"gradwire:(\w+) bucket (\d+)")
STEPS = 3
#: Numbers the runs of a process, alike on all ranks.
RUNS = count()
#: By how much the second rank is late in every step, from when the first one has nearly done its backward pass, however
#: busy the machine is; the first one waits for it in its exchange.
LATE = 0.1


def every_thread() -> profile:
    config = _ExperimentalConfig(profile_all_threads=True)
    return profile(activities=[ProfilerActivity.CPU], experimental_config=config)


def profiled_steps(rank: int, codec: Codec, exchange: str) -> dict[str, Any]:
    """Ranges as (phase, bucket, thread, start, end) in order, and what the state counted meanwhile, in seconds."""
    model, state = wrap(convnet(), codec, exchange=exchange)
    store, run = dist.distributed_c10d._get_default_store(), next(RUNS)
    if rank == 0:
        first, *_ = model.parameters()  # whose gradient comes last
        first.register_hook(lambda grad: store.add(f"profiled {run}", 1) and None)

    def step(number: int) -> None:
        loss = model(batch(rank, number, model.module)).square().mean()
        if rank:
            while store.add(f"profiled {run}", 0) <= number:
                time.sleep(0.001)
            time.sleep(LATE)
        loss.backward()

    for number in range(2):  # after the first one DDP rebuilds its buckets
        step(number)
    before = state.statistics().seconds
    with every_thread() as profiler:
        for number in range(2, 2 + STEPS):
            step(number)
        after = state.statistics().seconds
    buckets = len(state._buckets)
    state.close()
    ranges = []
    for event in profiler.events():
        if found := RANGE.fullmatch(event.name):
            span = event.time_range
            ranges.append((found[1], int(found[2]), event.thread, span.start * 1e-6, span.end * 1e-6))
    return {
        "buckets": buckets,
        "ranges": sorted(ranges, key=lambda found: found[3]),
        "seconds": {phase: after[phase] - before[phase] for phase in after},
    }


@needs_all_threads
@pytest.mark.parametrize(
    ("codec", "exchange", "way"),
    [
        (TopK(0.05), "gather", ["encode", "exchange", "decode"]),
        (OneBit(), "two_pass", ["encode", "exchange", "decode", "exchange", "decode"]),
    ],
    ids=str,
)
def test_a_profiler_shows_each_bucket_s_phases_and_statistics_agree(
    ranks: Ranks, codec: Codec, exchange: str, way: list[str]
) -> None:
    sides = ranks(2).run(profiled_steps, codec, exchange)
    for side in sides:
        ranges, buckets = side["ranges"], side["buckets"]
        assert buckets >= 3
        waiting = {thread for phase, _, thread, _, _ in ranges if phase == "exchange"}
        computing = {thread for phase, _, thread, _, _ in ranges if phase != "exchange"}
        assert waiting.isdisjoint(computing), "one thread computes, another waits"
        for thread in {thread for _, _, thread, _, _ in ranges}:
            own = [(start, end) for _, _, where, start, end in ranges if where == thread]
            assert all(end <= start for (_, end), (start, _) in pairwise(own)), "one after the other"
        for bucket in range(1, buckets):  # in the first one's name ranks compare their steps besides
            assert [phase for phase, where, *_ in ranges if where == bucket] == way * STEPS
        spans: dict[str, float] = defaultdict(float)
        for phase, _, _, start, end in ranges:
            spans[phase] += end - start
        assert spans.keys() == side["seconds"].keys()
        for phase, counted in side["seconds"].items():
            # A range encloses what is counted, and a thread may lose the processor between the two clocks.
            assert counted - 0.001 < spans[phase] < 1.2 * counted + 0.4 * STEPS * LATE
    waited = sides[0]["seconds"]
    assert waited["exchange"] > 0.7 * STEPS * LATE > waited["encode"] + waited["decode"]


def test_phases_on_the_profiled_thread_need_no_option() -> None:
    """Over NCCL buckets have no thread of their own."""
    statistics = Statistics()
    decoding = clock(statistics.seconds, 7, torch.device("cpu"))
    with profile(activities=[ProfilerActivity.CPU]) as profiler, decoding("decode"):
        time.sleep(0.01)
    (event,) = (event for event in profiler.events() if RANGE.fullmatch(event.name))
    assert event.name == "gradwire:decode bucket 7"
    assert statistics.seconds["decode"] >= 0.01
    assert event.time_range.elapsed_us() >= 1e4


def test_former_names_of_counts_warn() -> None:
    statistics = Statistics(bytes_sent=3, bytes_received=5)
    with pytest.warns(DeprecationWarning, match="payload_bytes is called bytes_sent now"):
        assert statistics.payload_bytes == 3
    with pytest.warns(DeprecationWarning, match="transfer_bytes is called bytes_received now"):
        assert statistics.transfer_bytes == 5


@pytest.mark.parametrize("profiled", [False, True])
@pytest.mark.parametrize("tool", [None, *NVTX_TOOLS])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranges_are_opened_for_those_who_look_at_them(
    device: str, tool: str | None, profiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's for its profiler, NVTX's for Nsight on a GPU, and for nobody none: they take longer than some phases."""
    seen = []

    def opens(kind: str) -> Callable[[str], AbstractContextManager[None]]:
        @contextmanager
        def opened(name: str) -> Iterator[None]:
            seen.append(f"{kind}: {name}")
            yield
            seen.append(f"{kind} ends")

        return opened

    monkeypatch.setattr(torch.cuda.nvtx, "range", opens("nvtx"))
    monkeypatch.setattr(core_bucket, "record_function", opens("torch"))
    for name in NVTX_TOOLS:
        monkeypatch.delenv(name, raising=False)
    if tool is not None:
        monkeypatch.setenv(tool, "1")
    profiler = profile(activities=[ProfilerActivity.CPU]) if profiled else nullcontext()
    with profiler, clock(Statistics().seconds, 3, torch.device(device))("encode"):
        seen.append("inside")
    kinds = [kind for kind, wanted in (("torch", profiled), ("nvtx", device == "cuda" and tool is not None)) if wanted]
    begins, ends = [f"{kind}: gradwire:encode bucket 3" for kind in kinds], [f"{kind} ends" for kind in reversed(kinds)]
    assert seen == [*begins, "inside", *ends]


@needs_all_threads
def test_the_recipe_runs(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```$", RECIPE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (tmp_path / "profile_steps.py").write_text(script, "utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "profile_steps.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    for phase in ("encode", "exchange", "decode"):
        assert re.search(rf"^{phase}\s+\d+\.\d+ ms in the trace, \d+\.\d+ ms counted$", done.stdout, re.MULTILINE)
    for rank in range(2):
        trace = json.loads((tmp_path / f"trace-{rank}.json").read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {f"gradwire:{phase} bucket 0" for phase in ("encode", "exchange", "decode")} <= names
