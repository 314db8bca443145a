"""The pipeline: everything under way at once, errors, and no life of its own."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from random import Random
from typing import Any

import pytest
import torch
from gradwire.hooks.comm.pipeline import Pipeline, no_clock
from gradwire.hooks.comm.ports import Stages
from hypothesis import given, settings
from hypothesis import strategies as st


def test_jobs_run_in_order_on_one_thread() -> None:
    pipeline, seen = Pipeline("test"), []
    threads = set()

    def job(number: int) -> torch.Tensor:
        time.sleep(0.002 * (5 - number % 5))
        seen.append(number)
        threads.add(threading.get_ident())
        return torch.tensor(number)

    futures = [pipeline.submit(lambda number=number: job(number)) for number in range(20)]  # type: ignore[misc]
    assert [int(future.wait()) for future in futures] == list(range(20))
    assert seen == list(range(20))
    assert threads.isdisjoint({threading.get_ident()})
    assert len(threads) == 1


def test_after_an_error_nothing_runs_any_more() -> None:
    pipeline, ran = Pipeline("test"), []

    def fail() -> torch.Tensor:
        raise RuntimeError("peer 3 went away")

    first, second = pipeline.submit(fail), pipeline.submit(lambda: ran.append(1) or torch.zeros(1))  # type: ignore[func-returns-value]
    with pytest.raises(RuntimeError, match="peer 3 went away"):
        first.wait()
    with pytest.raises(RuntimeError, match=r"earlier error.*peer 3"):
        second.wait()
    pipeline.flush()
    assert ran == []


class Bell:
    """Something under way, until somebody rings."""

    def __init__(self) -> None:
        self.rung = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> None:
        assert self.rung.wait(10)
        if self.error is not None:
            raise self.error


def stages(name: str, bells: list[Bell], seen: list[str]) -> Stages:
    for number, bell in enumerate(bells):
        seen.append(f"{name}{number}")
        yield bell
    seen.append(f"{name} ends")


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


@pytest.mark.parametrize("waits", [False, True])
def test_what_has_failed_is_collected(waits: bool) -> None:
    """Futures hold the error, out of the collector's sight, and its traceback what was at work."""

    class Owner:
        def wait(self) -> None:
            raise RuntimeError("no message")

        def stages(self) -> Stages:
            if not waits:
                self.wait()
            yield self

        def job(self) -> None:
            self.wait()

    pipeline, owner = Pipeline("test"), Owner()
    futures = [pipeline.start(owner.stages(), torch.zeros(1)), pipeline.submit(owner.job)]
    with pytest.raises(RuntimeError, match="no message"):
        pipeline.wait()
    gone = weakref.ref(owner)
    del pipeline, owner, futures
    gc.collect()
    assert gone() is None


def test_units_are_under_way_together_and_jobs_wait_for_all() -> None:
    pipeline, seen = Pipeline("test"), list[str]()
    bells = {name: [Bell(), Bell()] for name in "ab"}
    futures = [pipeline.start(stages(name, bells[name], seen), torch.ones(1)) for name in "ab"]
    last = pipeline.submit(lambda: seen.append("job"))
    late = pipeline.start(stages("c", [], seen), torch.ones(1))
    assert until(lambda: seen == ["a0", "b0"]), "neither waits for the other's messages"
    for name, number in (("a", 0), ("b", 0), ("a", 1), ("b", 1)):
        assert not any(future.done() for future in (*futures, last, late))
        bells[name][number].rung.set()
    for future in (*futures, last, late):
        future.wait()
    assert [name for name in seen if name[0] == "a"] == ["a0", "a1", "a ends"]
    assert seen[-2:] == ["job", "c ends"], "after everything before it, before everything after"


def test_no_unit_waits_for_what_another_waits_for() -> None:
    """Other ranks wait in orders of their own: one that hangs on this one's answer would close a circle."""
    pipeline, seen = Pipeline("test"), list[str]()
    bells = {name: [Bell(), Bell(), Bell()] for name in "abc"}
    futures = {name: pipeline.start(stages(name, bells[name], seen), torch.ones(1)) for name in "abc"}
    for name in "abc":
        bells[name][0].rung.set()
    assert until(lambda: {"a1", "b1", "c1"} <= set(seen))
    for name in "cb":  # the first still waits
        for bell in bells[name]:
            bell.rung.set()
        futures[name].wait()
    assert not futures["a"].done()
    for bell in bells["a"]:
        bell.rung.set()
    futures["a"].wait()


def test_a_thread_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, seen = Pipeline("test"), list[str]()
    bells = [Bell(), Bell()]

    def refuse(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    future = pipeline.start(stages("a", bells, seen), torch.ones(1))
    assert until(lambda: seen == ["a0"])
    monkeypatch.setattr("gradwire.hooks.comm.pipeline.start_thread", refuse)
    bells[0].rung.set()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        future.wait()
    assert pipeline.idle(10)
    assert pipeline.failed


def test_units_are_resumed_in_order_for_the_first_time() -> None:
    """Collectives start no later than then."""
    pipeline, seen = Pipeline("test"), list[str]()
    bells = [Bell() for _ in range(20)]
    futures = [pipeline.start(stages(f"{i:02} ", [bell], seen), torch.ones(1)) for i, bell in enumerate(bells)]
    for bell in reversed(bells):
        bell.rung.set()
    for future in futures:
        future.wait()
    assert [name for name in seen if name.endswith("ends")] == [f"{i:02}  ends" for i in range(20)]


def test_a_unit_that_fails_takes_all_others_along_at_once() -> None:
    pipeline, seen = Pipeline("test"), list[str]()
    bells = [Bell() for _ in range(3)]
    futures = [pipeline.start(stages(str(i), [bell], seen), torch.ones(1)) for i, bell in enumerate(bells)]
    bells[0].error = RuntimeError("peer 3 went away")
    bells[0].rung.set()  # the others never ring
    with pytest.raises(RuntimeError, match="peer 3 went away"):
        futures[0].wait()
    for future in futures[1:]:
        with pytest.raises(RuntimeError, match=r"earlier error.*peer 3"):
            future.wait()
    assert not any(name.endswith("ends") for name in seen)
    pipeline.flush()
    with pytest.raises(RuntimeError, match="peer 3 went away"):
        pipeline.check()
    for bell in bells:
        bell.rung.set()


def test_who_gives_up_waits_for_no_message() -> None:
    pipeline, seen = Pipeline("test"), list[str]()
    bells = [Bell(), Bell()]  # neither rings
    futures = [pipeline.start(stages(str(i), [bell], seen), torch.ones(1)) for i, bell in enumerate(bells)]
    pipeline.fail(RuntimeError("another view"))
    futures.append(pipeline.start(stages("later", [], seen), torch.ones(1)))
    for future in futures:
        with pytest.raises(RuntimeError, match=r"earlier error.*another view"):
            future.wait()
    pipeline.flush()
    with pytest.raises(RuntimeError, match="another view"):
        pipeline.check()
    for bell in bells:  # so that their threads end
        bell.rung.set()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    st.sampled_from(["threads", "launched"]),
)
def test_whatever_arrives_first_every_unit_ends_with_its_own_stages_in_order(
    lengths: list[int], random: Random, how: str
) -> None:
    threaded = how != "launched"
    pipeline, seen = Pipeline("test", threaded=threaded), list[str]()
    units = [[Bell() for _ in range(length)] for length in lengths]
    ringing = [bell for bells in units for bell in bells]
    random.shuffle(ringing)
    if not threaded:
        for bell in ringing:
            bell.rung.set()
    futures = [pipeline.start(stages(f"{i}.", bells, seen), torch.tensor(i)) for i, bells in enumerate(units)]
    pipeline.submit(lambda: seen.append("job"))
    after = pipeline.start(stages("after", [], seen), torch.tensor(-1))
    for bell in ringing:
        bell.rung.set()
    assert [int(future.wait()) for future in (*futures, after)] == [*range(len(units)), -1]
    assert seen[-2:] == ["job", "after ends"]
    for i, bells in enumerate(units):
        own = [name for name in seen if name.startswith(f"{i}.")]
        assert own == [*(f"{i}.{number}" for number in range(len(bells))), f"{i}. ends"]


class Late:
    """An inbox that a thread leaves late after putting something in, and only then lets go of that."""

    def __init__(self, inbox: Any) -> None:
        self.get, self._inbox = inbox.get, inbox

    def put(self, item: Any) -> None:
        self._inbox.put(item)
        if "-messages-" in threading.current_thread().name:
            time.sleep(0.5)


def alive(name: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(name)]


@pytest.mark.parametrize("explicitly", [True, False])
def test_a_thread_that_holds_the_last_reference_keeps_no_other_waiting(explicitly: bool) -> None:
    """It would wait for the one that computes, which waits for it."""
    name = f"held-{explicitly}"
    pipeline = Pipeline(name)
    pipeline._scheduler.inbox = Late(pipeline._scheduler.inbox)  # type: ignore[assignment]

    def stages() -> Stages:
        yield torch.futures.collect_all([])

    def timed(phase: str, held: Pipeline = pipeline) -> AbstractContextManager[None]:
        return no_clock(phase)

    future = pipeline.start(stages(), torch.zeros(1), clock=timed)
    future.wait()
    assert alive(name)
    if explicitly:
        pipeline.idle()
        pipeline.end()
        assert not alive(name), "what it ran last is let go of first"
    del pipeline, future, timed
    gc.collect()
    deadline = time.monotonic() + 5
    while alive(name) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(name)


def test_the_process_ends_in_order_while_the_last_job_holds_the_pipeline() -> None:
    """The main thread ends while the pipeline's lets go of what its job has held, for which it is inside torch."""
    script = """
        import threading
        from datetime import timedelta

        import torch
        import torch.distributed as dist
        from gradwire.hooks.comm.pipeline import Pipeline, Stages

        class Connections:
            def __del__(self) -> None:
                going.set()
                try:
                    dist.HashStore().wait(["nothing"], timedelta(seconds=1))
                except dist.DistStoreError:
                    print("gone", flush=True)

        going, dropped = threading.Event(), threading.Event()
        held = [Connections(), Pipeline("test")]  # a list lets go of its last first
        held[1].submit(lambda held=held: dropped.wait(10) and torch.zeros(1))
        del held
        dropped.set()
        going.wait(10)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "gone\n"


def test_the_process_waits_for_threads_that_start_at_its_end() -> None:
    script = """
        import queue, time
        from gradwire.hooks.comm.threads import start_thread

        def first() -> None:
            inbox.get()
            time.sleep(0.1)
            start_thread("second", second, None)

        def second() -> None:
            time.sleep(0.3)
            print("done", flush=True)

        inbox = queue.SimpleQueue()
        start_thread("first", first, inbox)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "done\n"
