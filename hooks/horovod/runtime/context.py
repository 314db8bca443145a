"""`init`, `shutdown`, and who is who."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import launch
from .engine import Engine
from .timeline import Timeline

_engine: Engine | None = None
#: Called at the end of `init` with the process sets it was given.
started: list[Callable[[Sequence[Any]], None]] = []
#: Rendezvous store by where it leads: a second `init` meets there again, and its first owner must not close it.
_stores: dict[str, dist.Store] = {}
_generations: dict[str, int] = {}
_owner: int | None = None


def engine() -> Engine:
    """The engine that `init` started.

    Raises:
        ValueError: before `init`, or after `shutdown`.
    """
    if _engine is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _engine


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Meet the other ranks; a collective. Does nothing if that has been done. The end of the process shuts down.

    Where torch.distributed is initialised, its ranks are the world; otherwise the launcher's variables say who this is
    (`launch`). torch.distributed is then left uninitialised, for the script to use or not.

    Args:
        comm: the ranks that take part, in the order of their new numbers; or an mpi4py communicator.
        process_sets: `ProcessSet`s to add, equal on all ranks; or "dynamic", which changes nothing, for process sets
            can always be added.

    Raises:
        ValueError: `comm` leaves this rank out, a process set cannot be, or the environment makes no sense. Horovod is
            then not initialised.
        RuntimeError: the ranks did not find each other.
    """
    global _engine, _owner  # noqa: PLW0603
    if _engine is not None:
        return
    sets: tuple[Any, ...] = ()
    if process_sets is not None and not (isinstance(process_sets, str) and process_sets == "dynamic"):
        if isinstance(process_sets, str) or not isinstance(process_sets, Iterable):
            raise ValueError(f'process_sets={process_sets!r}: expected a list of ProcessSet, or "dynamic"')
        sets = tuple(process_sets)
    where, place, store = _meet(comm)
    if comm is not None and not hasattr(comm, "Get_rank"):
        place, name = _among(place, list(comm))
        where += name
    _generations[where] = _generations.get(where, 0) + 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"gradwire/horovod/{where}/{attempt}/{_generations[where]}"
    _engine = Engine(dist.PrefixStore(prefix, store), place)
    if _owner is None:
        atexit.register(_at_exit)
    _owner = os.getpid()
    try:
        # "DYNAMIC" is no file: `start_timeline` will say which, and when.
        if os.environ.get("HOROVOD_TIMELINE", "DYNAMIC") not in ("", "DYNAMIC"):
            start_timeline(os.environ["HOROVOD_TIMELINE"], os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES") == "1")
        for follow_up in started:
            follow_up(sets)
    except BaseException:  # the next `init` would do nothing, and say nothing of what is missing
        shutdown()
        raise


def _meet(comm: Any) -> tuple[str, launch.Launch, dist.Store]:
    if comm is not None and hasattr(comm, "Get_rank"):
        place, store = launch.of_communicator(comm)
        return "mpi", place, store
    if dist.is_available() and dist.is_initialized():
        told = launch.read_environment()
        rank, size = dist.get_rank(), dist.get_world_size()
        if (told.rank, told.size) != (rank, size):
            told = launch.Launch(rank, size, source="torch.distributed")
        return "torch", told, dist.distributed_c10d._get_default_store()
    place = launch.read_environment()
    if "own" not in _stores:
        _stores["own"] = launch.open_store(place)
    return "own", place, _stores["own"]


def _among(place: launch.Launch, ranks: list[int]) -> tuple[launch.Launch, str]:
    if place.rank not in ranks or len(set(ranks)) != len(ranks) or not all(0 <= r < place.size for r in ranks):
        raise ValueError(
            f"comm={ranks}: expected distinct ranks below {place.size}, rank {place.rank} among them; "
            "call init(comm=…) on those ranks only"
        )
    return launch.Launch(ranks.index(place.rank), len(ranks), source=place.source), "-".join(map(str, ranks))


def shutdown() -> None:
    """Leave. Operations that not all ranks are ready for fail with `HorovodInternalError`, here and on other ranks."""
    global _engine
    if _engine is not None:
        left, _engine = _engine, None
        left.stop()


def _at_exit() -> None:
    if os.getpid() == _owner:  # not in a forked child
        shutdown()


def is_initialized() -> bool:
    """True after `init`, until `shutdown`."""
    return _engine is not None


def rank() -> int:
    """This process's number among all, from 0."""
    return engine().rank


def size() -> int:
    """Number of processes."""
    return engine().size


def local_rank() -> int:
    """This process's number on its host, from 0: which GPU to take."""
    return engine().place["local_rank"]


def local_size() -> int:
    """Number of processes on this host."""
    return engine().place["local_size"]


def cross_rank() -> int:
    """This host's number among all hosts, from 0."""
    return engine().place["cross_rank"]


def cross_size() -> int:
    """Number of hosts."""
    return engine().place["cross_size"]


def is_homogeneous() -> bool:
    """True if every host has as many processes as this one."""
    hosts = engine().hosts
    return len({hosts.count(host) for host in hosts}) == 1


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record from now on when operations wait and run; rank 0 writes a Chrome trace to `file_path`.

    A timeline that is being written ends.

    Args:
        file_path: overwritten.
        mark_cycles: also mark every decision of what runs next.

    Raises:
        OSError: rank 0 cannot write the file.
    """
    stop_timeline()
    here = engine()
    if here.rank == 0:
        here.timeline = Timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the file that `start_timeline` began."""
    here = engine()
    if here.timeline is not None:
        timeline, here.timeline = here.timeline, None
        timeline.close()


def nccl_built() -> int:
    """1 if torch has NCCL, else 0."""
    return int(dist.is_available() and dist.is_nccl_available())


def gloo_built() -> bool:
    """True if torch has Gloo."""
    return bool(dist.is_available() and dist.is_gloo_available())


#: True if torch has Gloo, which then serves.
gloo_enabled = gloo_built


def mpi_built() -> bool:
    """False: collectives go over Gloo or NCCL, however the processes are launched."""
    return False


mpi_enabled = ddl_built = ccl_built = mpi_built


def mpi_threads_supported() -> bool:
    """False, as `mpi_built`.

    Raises:
        ValueError: before `init`.
    """
    engine()
    return False


def cuda_built() -> bool:
    """True if torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """True if torch was built for ROCm."""
    return getattr(torch.version, "hip", None) is not None
