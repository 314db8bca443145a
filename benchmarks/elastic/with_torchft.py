"""torchft's DiLoCo on the same task, and its lighthouse: an arm where torchft is installed."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import signal
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .replica import LEARNING_RATE, say, train
from .task import Task

#: Milliseconds for which the lighthouse waits for replicas that it has heard of; its program's own default. With 1 s
#: rounds go on sooner after a death, and more of them lack a replica that is late.
JOIN_TIMEOUT = 60_000
HEARTBEAT_TIMEOUT, QUORUM_TICK = 5_000, 100
#: DiLoCo's outer optimizer, of its paper and of torchft's example.
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def version() -> str | None:
    """torchft's, or None where it is not installed."""
    from ..common import report

    return report.version("torchft") if importlib.util.find_spec("torchft") else None


def replica(job: Mapping[str, Any]) -> None:
    """A life of a replica of torchft's DiLoCo: a manager, and a process group of one rank in each."""
    # torchft tells the others a name of this host, and network namespaces share theirs.
    socket.gethostname = lambda: job["host"]
    logging.basicConfig(level=logging.ERROR)
    torchft: Any = importlib.import_module("torchft")
    local_sgd: Any = importlib.import_module("torchft.local_sgd")
    task = Task(job["seed"])
    optimizer = torch.optim.AdamW(task.student.parameters(), lr=LEARNING_RATE)
    outer = torch.optim.SGD(task.student.parameters(), **OUTER)
    say("joining")
    store = dist.TCPStore(job["host"], 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=15)),
        load_state_dict=task.student.load_state_dict,
        state_dict=task.student.state_dict,
        min_replica_size=1,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=job["host"],
        store_port=store.port,
        lighthouse_addr=f"http://{job['hub']}",
        replica_id=f"replica{job['life']}",
        hostname=job["host"],
        timeout=timedelta(seconds=job["patience"]),
        quorum_timeout=timedelta(seconds=120),
        connect_timeout=timedelta(seconds=20),
    )
    # A newcomer trains on before it is given the others' state, in the next quorum: no round has counted these steps.
    healed = False
    quorum = manager.start_quorum

    def start_quorum(*positional: Any, **named: Any) -> None:
        nonlocal healed
        before = manager.current_step()
        quorum(*positional, **named)
        healed = manager.current_step() != before

    manager.start_quorum = start_quorum
    with local_sgd.DiLoCo(
        manager, [task.student], optimizer, outer, sync_every=job["every"], use_bucketization=True, bucket_cap_mb=64
    ):

        def call(since: int) -> dict[str, Any] | None:
            optimizer.step()
            if since < job["every"]:
                return None
            counted = since if manager._commit_failures == 0 and not healed else 0
            return {"round": manager.current_step(), "steps": counted, "replicas": manager.num_participants()}

        train(job, task, torch.Generator().manual_seed(job["seed"] * 1000 + job["life"]), lambda: None, call)


def lighthouse() -> None:
    """Main function of the process that decides who takes part."""
    parser = argparse.ArgumentParser(description=lighthouse.__doc__)
    parser.add_argument("port", type=int)
    coordination: Any = importlib.import_module("torchft.coordination")
    server = coordination.LighthouseServer(
        bind=f"[::]:{parser.parse_args().port}",
        min_replicas=1,
        join_timeout_ms=JOIN_TIMEOUT,
        quorum_tick_ms=QUORUM_TICK,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT,
    )
    signal.pause()
    server.shutdown()


if __name__ == "__main__":
    lighthouse()
