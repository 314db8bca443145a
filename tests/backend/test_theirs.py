"""PyTorch's own tests of collectives, with the backend in the place of Gloo."""

from __future__ import annotations

import re
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from gradwire.hooks import backend
from lacking import needs
from ranks import Pool

#: Their names; other tests of the class are of DDP and its parts, of profilers, or of two backends. Those of `isend`,
#: `irecv` and any source ask for `is_completed` and `_source_rank`, which torch 2.15 takes from no backend in Python;
#: two of `monitored_barrier` wait longer than a test may, with plain Gloo as well.
COLLECTIVES = re.compile(
    r"test_(all_?(reduce|gather|to_all)|reduce|gather|scatter|broadcast|barrier|coalescing|send_recv(?!_any)|batch_isend"
    r"|monitored_barrier(?!_gloo($|_rank))|new_subgroups|sparse_all|Backend|backend_(group|full)|get_rank)"
)


def theirs(rank: int, name: str) -> str:
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed.distributed_test import DistributedTest

    class Case(DistributedTest._DistTestBase, TestCase):
        def _barrier(self, *args: Any, **options: Any) -> None:
            dist.barrier()

    kind: Any = Case
    case, kind.world_size = kind(name), dist.get_world_size()
    case.rank = rank
    test = getattr(case, name)
    if getattr(test, "__unittest_skip__", False):
        return f"skipped: {test.__unittest_skip_why__}"
    try:
        test()
    except unittest.SkipTest as skipped:
        return f"skipped: {skipped}"
    except SystemExit as skipped:
        return f"skipped: {skipped.code}"
    return "passed"


@needs("backends in Python, which 2.15 has", hasattr(dist.Backend, "_ensure_backend_registered"))
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variable", ["identity,min_numel=1", "qsgd8"])
def test_theirs(variable: str, tmp_path: Path) -> None:
    """On a default group of three ranks, which encodes all that it can, without loss; and as it is by default, where
    nothing that they send is large enough."""
    for folder in ("barrier", "test_dir", "init_dir"):
        (tmp_path / folder).mkdir()
    variables = {"BACKEND": "gloo", "TEMP_DIR": str(tmp_path), "INIT_METHOD": "env://", "WORLD_SIZE": "3"}
    variables[backend.VARIABLE] = variable
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        from torch.testing._internal.distributed.distributed_test import DistributedTest
    pool, found = None, {}
    for name in filter(COLLECTIVES.match, dir(DistributedTest._DistTestBase)):
        if pool is None or pool.broken:
            pool = Pool(3, backend="cpu:gradwire+gloo", environments=[variables] * 3)
        try:
            found[name] = pool.run(theirs, name, within=60)[0]
        except AssertionError as failed:
            found[name] = str(failed)[-1500:]
    if pool is not None:
        pool.close()
    assert not {name: text for name, text in found.items() if not text.startswith(("passed", "skipped"))}
    assert Counter(found.values())["passed"] >= 60
