"""State that survives a restart of a job's workers, and the function that resumes from it.

torchrun is what makes a job elastic: with `--max-restarts` it starts all workers again when one has failed, and with
`--nnodes=MIN:MAX` also when hosts come or go, with new ranks. So `commit` keeps the state in memory *and* in a file,
and `run` begins with the newest commit that any host has.

The files are `<folder>/commit.pt` on every host, written by its first rank. The folder is `GRADWIRE_ELASTIC_DIR`, or
`<temporary folder>/gradwire-elastic-<user id>/<torchrun's run id>`; without torchrun, and without the variable, commits
stay in memory. Files are pickles: write access to the folder is the right to run code in the job.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...training.loaded_values import parameters_of, values_kept
from ..errors import HorovodInternalError, HostsUpdatedInterrupt
from ..functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters, here
from ..runtime.context import init, local_rank, rank, shutdown
from ..runtime.launch import private_folder
from .sampler import ElasticSampler

#: Set by SIGTERM, with which torchrun announces a restart.
_terminating = threading.Event()


def commit_file() -> Path | None:
    """The file of this host's commits; None if they stay in memory."""
    folder = os.environ.get("GRADWIRE_ELASTIC_DIR")
    if folder:
        path = Path(folder)
    elif os.environ.get("TORCHELASTIC_RUN_ID"):
        job = f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ.get('MASTER_ADDR', '')}"
        if os.environ["TORCHELASTIC_RUN_ID"] == "none":  # torchrun's default: jobs differ by their port
            job += f"-{os.environ.get('MASTER_PORT', '')}"
        path = private_folder("gradwire-elastic") / re.sub(r"[^\w.-]", "_", job)
    else:
        return None
    path.mkdir(parents=True, exist_ok=True)
    return path / "commit.pt"


class TorchState:
    """Model, optimizer and whatever else has to survive a restart. Everything is an attribute: `state.epoch += 1`.

    Args:
        model: its parameters and buffers.
        optimizer: its state; with a compressing DistributedOptimizer, what compression has left out.
        kwargs: anything that can be pickled, by name; an `ElasticSampler` keeps what it has processed; what has
            `state_dict` and `load_state_dict`, such as a scheduler or a GradScaler, is kept by these.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: Any = None, **kwargs: Any) -> None:
        kept = {"model": model, "optimizer": optimizer}
        self._names = [*(name for name, value in kept.items() if value is not None), *kwargs]
        self.__dict__.update(**kept, **kwargs)
        self._callbacks: list[Callable[[], None]] = []
        self._commits = 0
        self.save()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Functions to call after a restart, when the ranks may be others: to scale the learning rate, for instance."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Divide the rest of each sampler among the present ranks, and call the callbacks."""
        for name in self._names:
            if isinstance(value := getattr(self, name), ElasticSampler):
                value.reset()
        for callback in self._callbacks:
            callback()

    def save(self) -> None:
        """Keep everything as it is, in memory."""
        self._saved = {name: self._snapshot(name) for name in self._names}

    def restore(self) -> None:
        """Go back to the last saved state."""
        self._load(self._saved)

    def commit(self) -> None:
        """Keep everything as it is, in memory and on disk; then see whether a restart is announced. A collective.

        Raises:
            HostsUpdatedInterrupt: it is.
        """
        self._share_samplers()
        self.save()
        self._commits += 1
        self._write()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise if the launcher is about to restart the workers, of which SIGTERM tells `run`. A collective.

        Raises:
            HostsUpdatedInterrupt: it is, on some rank.
        """
        if any(allgather_object(_terminating.is_set())):
            raise HostsUpdatedInterrupt("the launcher is restarting the workers")

    def sync(self) -> None:
        """Give every rank the state of the one with the newest commit, by default rank 0's; and keep that. A
        collective."""
        commits = allgather_object(self._commits)
        root = commits.index(max(commits))
        self._commits = max(commits)
        self._share_samplers()
        for name in self._names:
            value = getattr(self, name)
            if isinstance(value, nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=root)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=root)
            elif not isinstance(value, ElasticSampler):
                self._put(name, broadcast_object(self._snapshot(name), root_rank=root))
        self.save()

    def _load_commit(self) -> bool:
        """Take over this host's newest commit, if there is one."""
        path = commit_file()
        if path is None or not path.exists():
            return False
        data = torch.load(path, map_location=here, weights_only=False)
        if sorted(data["state"]) != sorted(self._names):
            raise ValueError(
                f"{path} was committed with {sorted(data['state'])}, this state has {sorted(self._names)}: "
                "remove the file, or make the state as it was"
            )
        self._load(data["state"])
        self._commits = data["commits"]
        return True

    def _write(self) -> None:
        path = commit_file()
        state = {name: self._snapshot(name, consolidated=True) for name in self._names}
        if path is None or local_rank() != 0:
            return
        draft = path.with_suffix(f".{os.getpid()}")
        torch.save({"commits": self._commits, "state": state}, draft, pickle_protocol=pickle.HIGHEST_PROTOCOL)
        os.replace(draft, path)  # a reader finds the old commit or the new one, whole

    def _share_samplers(self) -> None:
        """Count samples that any rank has processed as processed."""
        for name in self._names:
            if isinstance(value := getattr(self, name), ElasticSampler):
                states = allgather_object(value.state_dict())
                newest = max(state["epoch"] for state in states)
                done = [state["processed_indices"] for state in states if state["epoch"] == newest]
                value.epoch, value.processed_indices = newest, set().union(*done)

    def _snapshot(self, name: str, consolidated: bool = False) -> Any:
        value = getattr(self, name)
        if consolidated and hasattr(value, "consolidated_state_dict"):
            return value.consolidated_state_dict()
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            return self._copy(value, value.state_dict())
        return copy.deepcopy(value)

    def _put(self, name: str, snapshot: Any) -> None:
        value = getattr(self, name)
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            with values_kept(value) if isinstance(value, torch.optim.Optimizer) else nullcontext():
                value.load_state_dict(self._copy(value, snapshot))
        else:
            setattr(self, name, copy.deepcopy(snapshot))

    @staticmethod
    def _copy(owner: Any, state: Any) -> Any:
        """A copy, in which an optimizer's parameters, and what shares their memory, stay themselves."""
        mine = parameters_of(owner) if isinstance(owner, torch.optim.Optimizer) else []
        memories = {p.untyped_storage()._cdata: p.untyped_storage() for p in mine}
        memo: dict[Any, Any] = {id(p): p for p in mine} | {"torch": memories}
        return copy.deepcopy(state, memo)

    def _load(self, state: dict[str, Any]) -> None:
        for name, snapshot in state.items():
            self._put(name, snapshot)


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the training function: `train(state, …)` begins with the newest commit, on all ranks.

    If a rank is lost, the others go back to the last commit and end, for torchrun to start all of them again; when it
    stops them itself, they first come to the next `commit`. Launch the script with
    `torchrun --max-restarts=3 --nproc-per-node=… script.py`.

    Raises:
        HorovodInternalError: a rank was lost; the state is that of the last commit.
        SystemExit: torchrun announced a restart.
    """

    @functools.wraps(function)
    def wrapper(state: TorchState, *args: Any, **kwargs: Any) -> Any:
        init()
        _terminating.clear()
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGTERM, lambda *_: _terminating.set()) if main else None
        try:
            resumed = any(allgather_object(state._load_commit()))
            state.sync()
            if resumed:
                state.on_reset()
            result = function(state, *args, **kwargs)
            _forget_commit()
            return result
        except HorovodInternalError as error:
            state.restore()
            shutdown()
            if "TORCHELASTIC_RUN_ID" not in os.environ:
                error.add_note("the state is that of the last commit; torchrun --max-restarts=… would restart from it")
            raise
        except HostsUpdatedInterrupt:
            shutdown()
            raise SystemExit(128 + signal.SIGTERM) from None
        finally:
            if main:
                signal.signal(signal.SIGTERM, before)

    return wrapper


def _forget_commit() -> None:
    """The job is done: another one of the same name starts from scratch. Not before every rank is."""
    allgather_object(rank())
    path = commit_file()
    if path is not None and local_rank() == 0 and "GRADWIRE_ELASTIC_DIR" not in os.environ:
        path.unlink(missing_ok=True)
