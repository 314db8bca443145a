"""Persistent Gloo processes: a test runs a function on every rank, and pays milliseconds for it.

The function is named by its file and its name, so that any test module can hold it; arguments and results are pickled.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

#: The process group's timeout on every rank; what a test must do, it does in less.
GROUP_TIMEOUT = timedelta(seconds=30)
#: How warnings begin that some torch gives whatever its caller does.
TORCHS_OWN = (
    "TypedStorage is deprecated",  # 2.6
    "DTensor random operators may not have",  # 2.6
    "Sparse invariant checks are implicitly disabled",  # 2.11, also where check_invariants is passed
    "Warning: Profiler clears events",  # 2.11, in any profile
)


def without_address(parameter: object) -> str:
    """The `ids` of parameters with functions in them: the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(parameter))


def on_ranks(
    *sizes: int, within: float = 120.0, before: Callable[[], object] = int
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A test that runs on every rank of worlds of these sizes, `before` it something else, and returns the same on all
    of them. Its first argument is the rank; the others are pytest's, and are pickled."""

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        _, *others = inspect.signature(test).parameters.values()

        @functools.wraps(test)
        def run(ranks: Callable[[int], Pool], world: int = sizes[0], **arguments: Any) -> None:
            found = ranks(world).run(test, *(arguments[other.name] for other in others), within=within)
            assert all(result == found[0] for result in found), f"the ranks differ: {found}"

        keyword = inspect.Parameter.KEYWORD_ONLY
        own = ["ranks"] if len(sizes) == 1 else ["ranks", "world"]
        parameters = [inspect.Parameter(name, keyword) for name in (*own, *(other.name for other in others))]
        vars(run).update(
            __signature__=inspect.Signature(parameters), on_rank=lambda *given: (before(), test(*given))[1]
        )
        return run if len(sizes) == 1 else pytest.mark.parametrize("world", sizes)(run)

    return decorate


class RankError(AssertionError):
    """A function failed on some rank; the message has every rank's traceback."""


class Pool:
    """`world_size` processes in one process group, each waiting for functions to run.

    Args:
        world_size: number of ranks.
        timeout: of the process group.
        backend: of the process group.
        environments: variables of each rank's own.

    Attributes:
        pids: of the ranks themselves, which `multiprocessing` need not know (`preloaded.py`).
        broken: a rank has failed, and new processes are needed.
    """

    def __init__(
        self,
        world_size: int,
        timeout: timedelta = GROUP_TIMEOUT,
        backend: str = "gloo",
        environments: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.world_size = world_size
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            own = dict(environments[rank]) if environments else {}
            args = (rank, world_size, store, timeout, backend, own, theirs)
            process = context.Process(target=_serve, args=args, daemon=True, name=f"rank-{rank}-of-{world_size}")
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self.pids: list[int] = [pipe.recv() for pipe in self._pipes]
        self.broken = False

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        within: float = 120.0,
        may_die: tuple[int, ...] = (),
        after_failure: float = math.inf,
    ) -> Any:
        """Call `function(rank, *args)` on every rank; the results in rank order, None for ranks that died and may.

        Args:
            within: seconds that it may take.
            may_die: these ranks.
            after_failure: seconds that the others have once one has failed; at most what is left of `within`.

        Raises:
            RankError: it raised, hung for longer than `within` seconds, or a rank died that may not.
        """
        task = (inspect.getfile(function), function.__name__, args)
        for pipe in self._pipes:
            pipe.send(task)
        results: list[Any] = [None] * self.world_size
        problems: dict[int, str] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        end = time.monotonic() + within
        while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
            for answered in ready:
                assert isinstance(answered, Connection)
                rank = waiting.pop(answered)
                try:
                    failed, results[rank] = answered.recv()
                    if failed:
                        problems[rank] = results[rank]
                except (EOFError, ConnectionResetError):
                    self.broken = True
                    if rank not in may_die:
                        problems[rank] = "the process died"
            if problems:
                end = min(end, time.monotonic() + after_failure)
        problems |= dict.fromkeys(waiting.values(), f"no answer within {within:.0f} s")
        if problems:
            self.close()
            raise RankError("\n".join(f"rank {rank}: {problems[rank]}" for rank in sorted(problems)))
        return results

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.broken = True
        for pid, process in zip(self.pids, self._processes, strict=True):
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # killed, and the process that stands for it not yet
                    os.kill(pid, signal.SIGKILL)
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


#: The fixture `ranks`: the pool of so many.
Ranks = Callable[[int], Pool]


def _serve(
    rank: int, world_size: int, store: str, timeout: timedelta, backend: str, own: dict[str, str], pipe: Connection
) -> None:
    import warnings

    os.environ |= own
    pipe.send(os.getpid())
    import torch
    import torch.distributed as dist

    warnings.simplefilter("error" if backend == "gloo" else "default")  # torch has advice for every group of NCCL's
    warnings.filterwarnings("ignore", message=".*gradwire.recommend")  # tests are of what is exchanged
    # torch says so where the host's name means nothing, as on a machine without a network.
    warnings.filterwarnings("ignore", message=".*resolve hostname")
    for theirs in TORCHS_OWN:
        warnings.filterwarnings("ignore", message=theirs)
    torch.set_num_threads(1)
    files = dist.FileStore(store, world_size)
    dist.init_process_group(backend, store=files, rank=rank, world_size=world_size, timeout=timeout)
    # A task may end the group at once, and Gloo fails on a rank that is still connecting to one that has left.
    files.set(f"connected {rank}", "")
    files.wait([f"connected {other}" for other in range(world_size)], timeout)
    while True:
        try:
            path, name, args = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            pipe.send((False, _load(path, name)(rank, *args)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))


def _load(path: str, name: str) -> Callable[..., Any]:
    module_name = Path(path).stem
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return getattr(function, "on_rank", function)
