"""What several test files share: the pools of processes, and a GPU that is not there."""

from __future__ import annotations

import gc
import json
import multiprocessing.spawn
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
import variables
from emulated import EmulatedDevice, emulated_gpu
from hypothesis import settings
from ranks import Pool

PYTHON = pytest.StashKey[str]()
SERVER = pytest.StashKey[preloaded.Server]()


def pytest_addoption(parser: pytest.Parser) -> None:
    how = "run the CUDA kernels as NVRTC compiles them for this architecture, 90 for example, on the CPU"
    parser.addoption("--ptx", type=int, metavar="ARCHITECTURE", help=how)
    parser.addoption("--rows", metavar="FILE", help="append a line of JSON for each test, for the report of a GPU")


def pytest_configure(config: pytest.Config) -> None:
    """Have one server for the session, of which xdist's workers are told, one thread a process, and no environment
    variables but those that tests may see."""
    variables.forget_others(os.environ)
    hold_programs(config)
    # Threads of OpenMP wait for each other in a loop: where others run as well, that takes ten times the time.
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    # What decides whether a change is good draws the same examples each time; the slow tests' run draws new ones. A
    # busy machine is no fault of an example's.
    settings.register_profile("gradwire", derandomize="not slow" in config.getoption("markexpr"), deadline=None)
    settings.load_profile("gradwire")
    config.stash[PYTHON] = sys.executable
    if hasattr(config, "workerinput"):
        config.stash[PYTHON] = config.workerinput["python"]
    elif sys.platform == "linux" and not Path("/dev/nvidiactl").exists():  # CUDA does not survive a fork
        config.stash[SERVER] = preloaded.Server(Path(tempfile.mkdtemp(prefix="gradwire-")))
        config.stash[PYTHON] = config.stash[SERVER].python


def hold_programs(config: pytest.Config) -> None:
    """Have temporary folders hold programs and libraries, which some machines' /tmp may not."""
    with tempfile.NamedTemporaryFile() as program:
        os.chmod(program.name, 0o700)
        if os.access(program.name, os.X_OK):
            return
    assert config.cache is not None
    os.environ["TMPDIR"] = tempfile.tempdir = str(config.cache.mkdir("tmp"))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["python"] = node.config.stash[PYTHON]


def pytest_unconfigure(config: pytest.Config) -> None:
    server = config.stash.get(SERVER, None)
    if server is not None:
        server.close()
        shutil.rmtree(Path(server.python).parent)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """xdist's workers must collect the same tests; no later collection of garbage goes over these and all modules."""
    gc.collect()
    gc.freeze()
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid} has another name in each process: use ids=ranks.without_address")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Write its row, if `--rows` asks for them: what the test says, or the last line of what is wrong."""
    report: Any = yield
    file = item.config.getoption("rows")
    if file and (report.when == "call" or not report.passed):
        says = next((text for name, text in report.user_properties if name == "says"), "")
        row = {"name": item.name, "status": "ok" if report.passed else report.outcome, "seconds": report.duration}
        row["reason"] = str(says)
        if not report.passed:
            lines = str(report.longrepr[2] if report.skipped else report.longrepr).strip().splitlines()
            wrong = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")] or lines
            row |= {"reason": wrong[0], "output": lines[-60:] if report.failed else []}
        with open(file, "a", encoding="utf-8") as rows:
            rows.write(json.dumps(row) + "\n")
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests start processes with `sys.executable`: the server's."""
    sys.executable = item.config.stash[PYTHON]
    multiprocessing.spawn.set_executable(sys.executable)


@pytest.fixture(scope="session", autouse=True)
def gpu(pytestconfig: pytest.Config) -> Iterator[EmulatedDevice]:
    """The backend "cuda" takes CPU tensors too: for those its kernels run in the emulator's checked build, or, with
    `--ptx 90`, as NVRTC has compiled them for that architecture."""
    with emulated_gpu(EmulatedDevice(architecture=pytestconfig.getoption("ptx"))) as device:
        yield device


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """`ranks(3).run(function, …)` runs `function(rank, …)` on 3 ranks, in processes that all tests share."""
    pools: dict[int, Pool] = {}

    def get(world_size: int) -> Pool:
        if world_size not in pools or pools[world_size].broken:
            pools[world_size] = Pool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        if not pool.broken:
            pool.close()
