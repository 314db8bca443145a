"""A process that is killed within a message: Gloo does not wake those that wait for its rest."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
from gradwire import Cast, LocalUpdates, Meeting
from gradwire.hooks.local_sgd.meeting.server import MeetingPoint
from torch import nn

#: A replica that is killed while its first long message of a kind is on its way, as soon as a part of it has been sent.
VICTIM = """
import os, signal, sys, threading, time, torch
from gradwire import Cast, LocalUpdates
from gradwire.hooks.comm.group import Group
from torch import nn

address, numel, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
plain = Group.with_peer_context

class Never:
    def is_completed(self):
        return False
    def wait(self, *arguments):
        time.sleep(60)

def dying(group, peer, call, *arguments):
    if call.__name__ != "send" or arguments[0][0].nbytes != nbytes:
        return plain(group, peer, call, *arguments)
    def die():  # once the other's message is here: an error of its own would wake the other
        work = plain(group, peer, call, *arguments)
        threading.Timer(0.01, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        work.wait()
    threading.Timer(1, die).start()
    return Never()

Group.with_peer_context = dying
model = nn.Linear(numel, 1, bias=False)
updates = LocalUpdates(model, torch.optim.SGD(model.parameters(), lr=0.1), Cast(torch.bfloat16), every=1,
                       exchange="gather", meeting=address, error_feedback=False)
print("joined", flush=True)
while True:
    updates.step()
"""
NUMEL = 1 << 26


def replica(address: str) -> LocalUpdates:
    model = nn.Linear(NUMEL, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meeting = Meeting(address, patience=60.0)
    options = {"every": 1, "exchange": "gather", "error_feedback": False}
    return LocalUpdates(model, optimizer, Cast(torch.bfloat16), meeting=meeting, **options)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("element", [4, 2], ids=["healing", "round"])
def test_who_waits_for_the_rest_of_a_message_goes_on(element: int) -> None:
    """Healing sends float32, a round bfloat16."""
    with MeetingPoint() as point:
        point._membership._recovering = 0.0
        arguments = [point.address, str(NUMEL), str(element * NUMEL)]
        with subprocess.Popen([sys.executable, "-c", VICTIM, *arguments], stdout=subprocess.PIPE, text=True) as victim:
            assert victim.stdout is not None
            assert victim.stdout.readline() == "joined\n"
            began = time.monotonic()
            updates = replica(point.address)  # heals from the victim
            while victim.poll() is None:
                updates.step()
            after = updates.rounds + 2
            while updates.rounds < after:
                updates.step()
            assert victim.returncode == -9
            assert time.monotonic() - began < 40, "patience is 60"
            updates.close()
