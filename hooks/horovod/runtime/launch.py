"""This process's rank, and the place where ranks meet, from the environment that the launcher left.

| launcher                | rank, size                                  | place on the host                     |
| ----------------------- | ------------------------------------------- | ------------------------------------- |
| horovodrun, by hand     | `HOROVOD_RANK`, `HOROVOD_SIZE`              | `HOROVOD_LOCAL_RANK`, … `_CROSS_SIZE` |
| torchrun                | `RANK`, `WORLD_SIZE`                        | `LOCAL_RANK`, `LOCAL_WORLD_SIZE`      |
| Open MPI's mpirun       | `OMPI_COMM_WORLD_RANK`, `_SIZE`             | `OMPI_COMM_WORLD_LOCAL_RANK`, `_SIZE` |
| MPICH, Intel MPI, srun  | `PMI_RANK`, `PMI_SIZE`                      | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS`  |
| none                    | 0 of 1                                      |                                       |

The first launcher in the table whose variables are there counts. Ranks meet at `MASTER_ADDR`:`MASTER_PORT` where these
are set, as torchrun does. mpirun sets neither; then the ranks of one host meet through a file,
`<temporary folder>/gradwire-<user id>/<job>`, in which rank 0 writes the port it listens at, and the ranks of several
hosts at the host of mpirun itself, which Open MPI tells, provided that rank 0 runs there.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...timeouts import START_SECONDS

#: Rank 0's port if MASTER_ADDR is set and MASTER_PORT is not, as torchrun has it.
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Launch:
    """The launcher's variables of this process; None for places on the host that it does not tell."""

    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None
    source: str = "none"


#: Variables of each launcher, as far as it has them: rank, size, local rank, local size, cross rank, cross size.
LAUNCHERS = {
    "HOROVOD": tuple(f"HOROVOD_{name}{what}" for name in ("", "LOCAL_", "CROSS_") for what in ("RANK", "SIZE")),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    "mpirun": tuple(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def read_environment(environment: Mapping[str, str] = os.environ) -> Launch:
    """The launch that the variables describe.

    Raises:
        ValueError: a variable is not a number, or the rank is not below the size.
    """
    for source, names in LAUNCHERS.items():
        rank, size, *more = (_number(environment, name) for name in names)
        if rank is not None and size is not None:
            if not 0 <= rank < size:
                raise ValueError(f"{names[0]}={rank}, {names[1]}={size}: expected 0 <= rank < size")
            return Launch(rank, size, *more, source=source)  # type: ignore[arg-type, misc]
    return Launch(0, 1)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None or not text.strip():
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment has {name}={text!r}: expected a number") from None


def open_store(launch: Launch, environment: Mapping[str, str] = os.environ) -> dist.Store:
    """A store that all ranks of the launch share. A collective.

    Raises:
        RuntimeError: the ranks did not find each other, or nothing says where they could.
    """
    timeout = timedelta(seconds=START_SECONDS)
    if launch.size == 1:
        return dist.HashStore()
    try:
        if host := environment.get("MASTER_ADDR"):
            port = _number(environment, "MASTER_PORT")
            place = f"tcp://{f'[{host}]' if ':' in host else host}:{DEFAULT_PORT if port is None else port}"
            store, _, _ = next(dist.rendezvous(place, launch.rank, launch.size, timeout=timeout))
            store.set_timeout(timeout)
            return store
        if launch.local_size in (None, launch.size):
            return _meet_through_file(launch, environment, timeout)
        return _meet_at_mpirun(launch, environment, timeout)
    except (dist.DistError, dist.DistNetworkError, TimeoutError, OSError) as error:
        raise RuntimeError(
            f"rank {launch.rank} of {launch.size} (from {launch.source}) did not find the other ranks within "
            f"{START_SECONDS:.0f} s: {error}. Start every rank, and set MASTER_ADDR and MASTER_PORT to an address of "
            "rank 0's host where the launcher does not"
        ) from error


def _meet_at_mpirun(launch: Launch, environment: Mapping[str, str], timeout: timedelta) -> dist.Store:
    """A store of several hosts, none of them named: rank 0 is expected beside mpirun, whose address Open MPI tells."""
    uri = next((environment[n] for n in ("OMPI_MCA_orte_hnp_uri", "PMIX_SERVER_URI2") if n in environment), "")
    addresses = re.findall(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])", uri)
    address = next((a for a in addresses if not a.startswith("127.")), None)
    if address is None:
        raise RuntimeError(
            f"{launch.source} started {launch.size} ranks on several hosts and says no address where they could meet: "
            "set MASTER_ADDR to the host of rank 0, with mpirun -x MASTER_ADDR=… -x MASTER_PORT=29500"
        )
    port = 20000 + zlib.crc32(job_name(environment).encode()) % 20000
    return dist.TCPStore(address, port, launch.size, launch.rank == 0, timeout, wait_for_workers=False)


def _meet_through_file(launch: Launch, environment: Mapping[str, str], timeout: timedelta) -> dist.Store:
    """A store of one host: rank 0 takes a free port and writes it into a file that only this user can read."""
    path = private_folder("gradwire") / job_name(environment)
    if launch.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, launch.size, True, timeout, wait_for_workers=False)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(str(store.port), "utf-8")
        os.replace(draft, path)
    else:
        port = _wait_for(path, time.monotonic() + timeout.total_seconds())
        store = dist.TCPStore("127.0.0.1", port, launch.size, False, timeout, wait_for_workers=False)
    arrived = store.add("arrived", 1)
    if arrived == launch.size:
        path.unlink(missing_ok=True)  # the next job may have the same name
        store.set("all", "1")
    store.wait(["all"], timeout)
    return store


def _wait_for(path: Path, deadline: float) -> int:
    while time.monotonic() < deadline:
        try:
            port = int(path.read_text("utf-8"))
            # A file that an earlier job of this name left behind leads nowhere.
            with socket.create_connection(("127.0.0.1", port), timeout=1.0):
                return port
        except (OSError, ValueError):
            time.sleep(0.02)
    raise TimeoutError(f"{path} did not appear: is rank 0 running on this host?")


def job_name(environment: Mapping[str, str] = os.environ) -> str:
    """A name that the ranks of one job share, and no other job has."""
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "HYDI_CONTROL_FD")
    found = [f"{name}-{environment[name]}" for name in names if environment.get(name)]
    if environment.get("SLURM_JOB_ID"):
        found.append(f"SLURM-{environment['SLURM_JOB_ID']}-{environment.get('SLURM_STEP_ID', '')}")
    if not found:
        found.append(f"child-of-{os.getppid()}")
    return re.sub(r"[^\w.-]", "_", ".".join(found))


def private_folder(name: str) -> Path:
    """`<temporary folder>/<name>-<user id>`, made if it is not there.

    Raises:
        RuntimeError: it belongs to somebody else, or others can write to it.
    """
    path = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
        raise RuntimeError(f"{path} is not a folder that only this user writes to: remove it, or set TMPDIR")
    return path


def of_communicator(comm: Any) -> tuple[Launch, dist.Store]:
    """Rank, size and a store from an mpi4py communicator. A collective of its ranks."""
    launch = Launch(comm.Get_rank(), comm.Get_size(), source="an MPI communicator")
    timeout = timedelta(seconds=START_SECONDS)
    address = None
    if launch.rank == 0:
        own = socket.gethostname()
        store = dist.TCPStore(own, 0, launch.size, True, timeout, wait_for_workers=False)
        address = (own, store.port)
    host, port = comm.bcast(address, root=0)
    if launch.rank != 0:
        store = dist.TCPStore(host, port, launch.size, False, timeout, wait_for_workers=False)
    return launch, store
