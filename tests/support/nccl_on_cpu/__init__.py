"""GPUs and NCCL that are not there: what is asynchronous about them, on CPU tensors and in one process.

`Machine` has streams and events; whatever is launched waits in its stream's queue until the machine runs it, in any
order that events allow: it may keep one stream back for as long as nothing demands it, or draw. `GpuTensor` says that
it lies on a GPU, and launches what is done with it; what would make the host wait is refused while a step runs.
`Communicator` is NCCL's: collectives are queued, must be alike on all ranks, and are waited for by streams. `World`
runs ranks as threads, one at a time, so that a run depends on nothing but its schedule.

Of two launches that no event orders, keeping back the stream of the first lets the second overtake it, so a run for
each stream shows every order that is missing, where it changes a result. Memory holds NaN before it is written, and
again as soon as an allocator could give it to somebody else.

Not covered: how kernels work inside (`cuda_on_cpu`), which calls of torch wait by themselves, beyond those in
`tensors.WAITING`, and speed.
"""

from .machine import HostWaits, Machine, Schedule
from .nccl import Communicator, Mismatch
from .tensors import DEVICE, GpuTensor, on_gpu, read
from .world import Deadlock, World

__all__ = [
    "DEVICE", "Communicator", "Deadlock", "GpuTensor", "HostWaits", "Machine", "Mismatch", "Schedule", "World",
    "on_gpu", "read",
]  # fmt: skip
