"""Ray actors as replicas that come and go: one is killed, the others train on, and Ray starts it again.

    pip install ray
    python examples/elastic_ray.py

The meeting point is a process of the driver. Replicas train in calls of `train`, each up to a round that counts for all
replicas, so Ray may repeat a call on an actor that it has started again: `max_restarts` and `max_task_retries` are all
that it needs. For a cluster set RAY_ADDRESS; every two of its machines must reach each other.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import time
from typing import Any

import ray
import torch
import torch.nn.functional as F
from gradwire import ChunkedTopK, LocalUpdates, Residual
from torch import nn


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Replica:
    """A replica. After its death Ray runs `__init__` again, which joins the others by a new number."""

    def __init__(self, meeting: str) -> None:
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        codec, feedback = ChunkedTopK(k=64, chunk=1024, values=2), Residual(decay=0.95)
        self.updates = LocalUpdates(
            self.model, self.optimizer, codec, every=10, exchange="gather", error_feedback=feedback, meeting=meeting
        )
        self.data = torch.Generator().manual_seed(self.updates.member)

    def train(self, rounds: int) -> dict[str, Any]:
        """Train until all replicas together have made so many rounds."""
        while self.updates.rounds < rounds:
            x = torch.randn(32, 64, generator=self.data)
            F.cross_entropy(self.model(x), x[:, :10].argmax(1)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            time.sleep(0.01)  # as a larger model would take
            self.updates.step()
        bits = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        report = {name: getattr(self.updates, name) for name in ("member", "rounds", "members")}
        return report | {"views": self.updates.statistics().views, "state": hashlib.sha256(bits).hexdigest()[:16]}


def drive(meeting: str, stretch: int = 10) -> None:
    replicas = [Replica.remote(meeting) for _ in range(3)]
    began = ray.get([replica.train.remote(stretch) for replica in replicas])
    print(*began, sep="\n")
    # A round waits for all replicas that are there: whoever returns is called again at once.
    furthest, end = 2 * stretch, sys.maxsize
    calls = {replica.train.remote(furthest): replica for replica in replicas}
    print(f"killing member {began[1]['member']}")
    ray.kill(replicas[1], no_restart=False)
    ended = []
    while calls:
        (call,), _ = ray.wait(list(calls))
        replica, report = calls.pop(call), ray.get(call)
        print(report)
        if end == sys.maxsize and report["member"] not in {former["member"] for former in began}:  # it is back
            end = furthest + stretch
        if report["rounds"] == end:
            ended.append(report["state"])
            continue
        rounds = min(report["rounds"] + stretch, end)
        furthest = max(furthest, rounds)
        calls[replica.train.remote(rounds)] = replica
    print(f"{len(ended)} replicas have {'equal states' if len(set(ended)) == 1 else 'other states'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=29400, help="of the meeting point (29400)")
    port = parser.parse_args().port
    with subprocess.Popen([sys.executable, "-m", "gradwire.meet", "--port", str(port)]) as meet:
        try:
            ray.init()
            drive(f"{ray.util.get_node_ip_address()}:{port}")
        finally:
            ray.shutdown()
            meet.terminate()
