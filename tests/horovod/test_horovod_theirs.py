"""Horovod's own tests of its PyTorch interface, from a clone of its repository, with this interface in its place."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import sys
import unittest
import warnings
from pathlib import Path
from unittest import mock

import gradwire.hooks.horovod as hvd
import pytest
import torch
from ranks import Pool

CLONE = os.environ.get("GRADWIRE_HOROVOD", "")
#: Tests that ask for something else than what this interface does; `docs/horovod.md` names them.
DIFFERENT = {
    "test_broadcast_state_no_grad",
    "test_horovod_join_allgather",
    "test_horovod_reducescatter_adasum",
    "test_optimizer_no_named_parameters",
}
#: Tests with bounds of a second, which a busy machine may miss.
TIMED = {"test_global_barrier_op", "test_process_set_barrier_op"}


def theirs(rank: int, clone: str, name: str) -> str:
    """Run one of their tests on this rank: "passed", "skipped: …", or its tracebacks."""
    stand_ins = {"horovod": mock.Mock(torch=hvd), "horovod.torch": hvd, "horovod.runner.util.threads": mock.Mock()}
    stand_ins |= {"mock": mock, "cloudpickle": pickle}  # which these tests import and do not use
    paths = [str(Path(clone, "test", folder)) for folder in ("parallel", "utils")]
    with mock.patch.dict(sys.modules, stand_ins), mock.patch.object(sys, "path", paths + sys.path):
        case = importlib.import_module("test_torch").TorchTests(name)
    if hasattr(torch.optim, "Muon"):  # newer than their tests, which give biases to each of torch's optimizers
        torch.optim.Muon.__module__ = "newer"
    warnings.resetwarnings()
    result = unittest.TestResult()
    case.run(result)
    hvd.shutdown()
    problems = "\n".join(text for _, text in result.errors + result.failures)
    return problems or "".join(f"skipped: {why}" for _, why in result.skipped) or "passed"


@pytest.mark.slow
@pytest.mark.skipif(not CLONE, reason="GRADWIRE_HOROVOD names no clone of github.com/horovod/horovod")
@pytest.mark.parametrize("world", [2, 4])
def test_theirs(world: int) -> None:
    place = {f"HOROVOD_{level}SIZE": str(world) for level in ("", "LOCAL_")}
    environments = [{**place, "HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(rank)} for rank in range(world)]
    names = re.findall(r"^    def (test_\w+)", Path(CLONE, "test/parallel/test_torch.py").read_text(), re.MULTILINE)
    pool, found = None, dict[str, str]()
    for name in [*names, *2 * sorted(TIMED)]:
        if found.get(name) == "passed":
            continue
        if pool is None or pool.broken:
            pool = Pool(world, environments=environments)
        try:
            found[name] = "\n".join(sorted(set(pool.run(theirs, CLONE, name, within=90))))
        except AssertionError as failed:
            found[name] = str(failed)
    if pool is not None:
        pool.close()
    wrong = {name: text for name, text in found.items() if text != "passed" and not text.startswith("skipped")}
    assert wrong.keys() == DIFFERENT, "\n".join(f"{name}: {text[-1500:]}" for name, text in wrong.items())
    assert list(found.values()).count("passed") >= 102  # more on a GPU
