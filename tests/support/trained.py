"""Runs what somebody else has written, on every rank, and keeps account of what compression does there.

A script's text is taken from a released package and changed by a few lines. `Account` looks on from below: at what goes
into gradwire and what comes out, and at the parameters after each step of any optimizer.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import signal
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from gradwire.hooks.core.bucket import Bucket
from gradwire.hooks.core.checkpoint import Checkpoint
from gradwire.hooks.core.reducer import Reducer, Step
from gradwire.hooks.ddp.hook import CompressState
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from training import digest, law

#: Trainers' own warnings, about themselves, torch and each other.
THEIRS = r"(lightning|pytorch_lightning|transformers|accelerate|torch\.(utils\.data|optim)|huggingface_hub)(\..*)?"


class Account:
    """While it is entered: what each optimizer's step made of its parameters, and what was given to gradwire, what came
    back, and what it keeps, of every parameter.

    Args:
        kill_at: end this process after that many optimizer steps, as nothing can stop it from doing.
    """

    def __init__(self, kill_at: int | None = None) -> None:
        self.kill_at = kill_at
        self.digests: list[str] = []
        self.state: CompressState | None = None
        self.start: dict[str, Tensor] = {}
        self.saved: dict[str, Tensor] | None = None  # at the first checkpoint
        self.wanted: dict[str, Tensor] = {}
        self.received: dict[str, Tensor] = {}
        self._end = contextlib.ExitStack()

    def __enter__(self) -> Self:
        account, reduce, export = self, Reducer._reduce, Checkpoint.export
        bind, load = CompressState._bind, CompressState._load

        def looked_at(reducer: Reducer, step: Step, unit: Bucket, buffer: Tensor) -> Iterator[Any]:
            account._add(account.wanted, unit, buffer)
            yield from reduce(reducer, step, unit, buffer)
            account._add(account.received, unit, buffer)

        def bound(state: CompressState, *args: Any, **options: Any) -> Reducer:
            account.state = state
            return bind(state, *args, **options)

        def loaded(state: CompressState, *args: Any) -> None:
            load(state, *args)
            found = state._feedback.everything().get("residual", {})
            account.start = {name: residual.double().clone() for name, residual in found.items()}
            account.wanted, account.received = {}, {}

        def exported(checkpoint: Checkpoint, key: str, vectors: Any) -> dict[str, Any]:
            if account.saved is None and checkpoint.facts["step"]:
                account.saved = {name: residual.double().clone() for name, residual in vectors["residual"].items()}
            return export(checkpoint, key, vectors)

        of_state = {"_bind": bound, "_load": loaded}
        of_others = (Reducer, {"_reduce": looked_at}), (Checkpoint, {"export": exported})
        for what, by in ((CompressState, of_state), *of_others):
            self._end.enter_context(patch.multiple(what, **by))
        handle = register_optimizer_step_post_hook(self._stepped)
        self._end.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.digests.append(digest(p for group in optimizer.param_groups for p in group["params"]))
        if len(self.digests) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def _add(total: dict[str, Tensor], unit: Bucket, buffer: Tensor) -> None:
        for there in unit.slots:
            part = there.flat(buffer).double()
            total[there.name] = total[there.name] + part if there.name in total else part

    def error(self) -> float:
        """How far it is off that what went in has come out, or is kept; relative to what went in. A collective."""
        assert self.state is not None
        [kept] = self.state.consolidated_state_dict()["residuals"].values()
        wanted = {name: mean(total) for name, total in sorted(self.wanted.items())}
        for name in wanted:
            start = self.start.get(name)
            wanted[name] += mean(torch.zeros_like(wanted[name]) if start is None else start.flatten())
        off = law(wanted, self.received, {name: residual.double().flatten() for name, residual in kept.items()})
        size = torch.cat(list(wanted.values())).norm()
        return float(torch.tensor(list(off.values())).norm() / size)

    def carried(self, saved: bool) -> dict[str, Any]:
        """What the ranks kept, in the mean: when the first checkpoint was saved, or when they went on from one."""
        kept = (self.saved or {}) if saved else self.start
        shapes = {} if self.state is None else {name: p.shape for name, p in self.state._parameters.items()}
        nothing = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        return {name: mean(kept.get(name, zeros)).numpy() for name, zeros in nothing.items()}


def mean(total: Tensor) -> Tensor:
    total = total.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@contextlib.contextmanager
def surroundings(rank: int, folder: str) -> Iterator[None]:
    """What a launcher would have set for a rank whose process group is there already, and will be needed again."""
    size = dist.get_world_size()
    env: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    env |= {
        "MASTER_PORT": 1,
        "MASTER_ADDR": "127.0.0.1",
        "HF_HUB_OFFLINE": 1,
        "HF_HUB_DISABLE_TELEMETRY": 1,
        "ACCELERATE_USE_CPU": "true",
    }
    before, arguments = Path.cwd(), sys.argv
    with (
        patch.dict(os.environ, {name: str(value) for name, value in env.items()}),
        patch.object(dist, "destroy_process_group", lambda *args: None),
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
    ):
        warnings.filterwarnings("ignore", module=THEIRS)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
            sys.argv = arguments


def source(package: str, path: str) -> str:
    """A file of an installed package, as text."""
    import importlib.util

    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / path).read_text("utf-8")


def changed(text: str, *changes: tuple[str, str]) -> str:
    """A script with pieces of it replaced, each of which is there once; and by three lines at most."""
    result = text
    for old, new in changes:
        assert result.count(old) == 1, f"{result.count(old)} times in the script: {old}"
        result = result.replace(old, new)
    assert lines_changed(text, result) <= 3
    return result


def lines_changed(before: str, after: str) -> int:
    """How many lines are new or other than they were."""
    return sum(line.startswith("+ ") for line in difflib.ndiff(before.splitlines(), after.splitlines()))


def executed(text: str, name: str, given: Mapping[str, types.ModuleType] | None = None) -> dict[str, Any]:
    """What a script's text defines, run as a module of that name, with these modules besides those installed."""
    module = types.ModuleType(name)
    with patch.dict(sys.modules, {**(given or {}), name: module}):
        exec(compile(text, f"<{name}>", "exec"), module.__dict__)
    return module.__dict__
