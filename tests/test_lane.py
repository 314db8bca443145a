"""The lane: order, errors, and no life of its own."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
import torch
from gradwire.hooks.comm.lane import Lane


def test_jobs_run_in_order_on_one_thread() -> None:
    lane, seen = Lane("test"), []
    threads = set()

    def job(number: int) -> torch.Tensor:
        time.sleep(0.002 * (5 - number % 5))
        seen.append(number)
        threads.add(threading.get_ident())
        return torch.tensor(number)

    futures = [lane.submit(lambda number=number: job(number)) for number in range(20)]  # type: ignore[misc]
    assert [int(future.wait()) for future in futures] == list(range(20))
    assert seen == list(range(20))
    assert threads.isdisjoint({threading.get_ident()})
    assert len(threads) == 1


def test_submitting_does_not_wait() -> None:
    lane, gate = Lane("test"), threading.Event()

    def blocked() -> torch.Tensor:
        assert gate.wait(10)
        return torch.zeros(1)

    future = lane.submit(blocked)
    assert not future.done()
    gate.set()
    future.wait()


def test_after_an_error_nothing_runs_any_more() -> None:
    lane, ran = Lane("test"), []

    def fail() -> torch.Tensor:
        raise RuntimeError("peer 3 went away")

    first, second = lane.submit(fail), lane.submit(lambda: ran.append(1) or torch.zeros(1))  # type: ignore[func-returns-value]
    with pytest.raises(RuntimeError, match="peer 3 went away"):
        first.wait()
    with pytest.raises(RuntimeError, match=r"earlier error.*peer 3"):
        second.wait()
    lane.flush()
    assert ran == []


def test_the_thread_ends_with_the_lane_and_holds_no_owner() -> None:
    class Owner:
        def __init__(self) -> None:
            self.lane = Lane("mortal")

    owner = Owner()
    owner.lane.submit(lambda held=owner: torch.zeros(1)).wait()  # type: ignore[misc]
    owner.lane.flush()
    remembered = weakref.ref(owner)
    del owner
    gc.collect()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(thread.name == "mortal" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert remembered() is None
    assert all(thread.name != "mortal" for thread in threading.enumerate())


def test_the_process_ends_in_order_while_the_last_job_holds_the_lane() -> None:
    """The main thread ends while the lane's lets go of what its job has held, for which it is inside torch."""
    script = """
        import threading
        from datetime import timedelta

        import torch
        import torch.distributed as dist
        from gradwire.hooks.comm.lane import Lane

        class Connections:
            def __del__(self) -> None:
                going.set()
                try:
                    dist.HashStore().wait(["nothing"], timedelta(seconds=1))
                except dist.DistStoreError:
                    print("gone", flush=True)

        going, dropped = threading.Event(), threading.Event()
        held = [Connections(), Lane("test")]  # a list lets go of its last first
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
