"""The longest waits of ranks for each other: a `timedelta` for torch.distributed, seconds for sockets and threads.

A wait for compiled kernels, of processes on one host, is `PATIENCE` of `compress/backends/kernel_cache.py`.
"""

from __future__ import annotations

from datetime import timedelta

#: All ranks, until the others make the same state; longer where the user has given their group longer.
HANDSHAKE_TIMEOUT = timedelta(seconds=60)
#: A rank whose attempt to connect has failed, for the others' verdicts.
VERDICT_TIMEOUT = timedelta(seconds=10)
#: A rank whose backward pass has raised, for its messages in flight.
RAISED_TIMEOUT = timedelta(seconds=10)
#: An exiting process or a collected state, for a thread: a message that never comes must not keep the process.
STOP_SECONDS = 10.0
#: A process that leaves in the middle of a step, until the others' hosts have acknowledged its data.
LINGER_SECONDS = 5.0

#: Horovod: all ranks, until the others call `init`.
START_SECONDS = 120.0
#: Horovod: ranks in a collective that every rank was ready for.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
#: Horovod: a rank, for gradients in flight that nobody asks for any more.
UNCLAIMED_SECONDS = 10.0
#: Horovod: ranks at an orderly end, until the others have heard of it; and for a thread that a dead peer may keep.
END_SECONDS = 5.0

#: Replicas of a proposed view, until all are connected.
MESH_SECONDS = 10.0
#: The meeting point, for a sign of life of a replica (`gradwire-meet --dead-after`); and a replica, for its answer.
DEAD_SECONDS, SILENT_SECONDS = 4.0, 5.0
#: A replica that leaves, until the others' hosts have acknowledged its data.
LEAVE_SECONDS = 1.0
