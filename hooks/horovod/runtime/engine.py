"""The engine: operations go in under a name, in any order, and come out in one order on all ranks.

`submit` announces an operation to rank 0 (`coordinator`) and returns. A thread hears from rank 0 what all ranks are
ready for. Another thread carries it out, in an order that is the same on every rank, on connections of its own. Thus
the script cannot mix up two collectives, and no rank enters one before all are ready.

When a rank is gone, every operation that has not ended fails on every other rank, at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm.between_steps import Section
from ...comm.pipeline import Completion
from ...comm.sockets import Connection
from ...timeouts import END_SECONDS, START_SECONDS
from ..consensus.coordinator import Coordinator, connect
from ..consensus.negotiation import Negotiator
from ..errors import HorovodInternalError
from ..gradients.residuals import States
from .channel import Channel
from .compressed import Join, Stateful, zero_input
from .launch import Launch
from .operations import Nameless, Operation
from .timeline import Timeline


class Pending:
    """A submitted operation and its result."""

    def __init__(self, operation: Operation) -> None:
        self.operation, self.ended = operation, Completion()
        self.result: Any = None
        self.error: str | None = None
        self.submitted = 0.0
        # On a GPU: when the inputs are there, and when the results are.
        self.ready: Any = None
        self.done: Any = None
        if operation.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{operation.key} cannot be captured in a CUDA graph, for the ranks talk about each operation: "
                    "capture forward and backward without it, and call it between replays"
                )
            self.ready = torch.cuda.current_stream(operation.device).record_event()

    def poll(self) -> bool:
        """True if `wait` would return at once."""
        return self.ended.is_set() and (self.done is None or self.done.query())

    def wait(self) -> Any:
        """The result; later work on the current stream waits for it."""
        self.settle()
        if self.error is not None:
            raise HorovodInternalError(self.error)
        if self.done is not None:
            # Its memory belongs to the engine's stream, which must not use it again before this one is done with it.
            stream = torch.cuda.current_stream(self.operation.device)
            for tensor in memory_of(self.result):
                tensor.record_stream(stream)
        return self.result

    def settle(self, timeout: float | None = None) -> None:
        """Wait until the operation has ended, well or not, or `timeout` seconds have passed; on a GPU, later work on
        the current stream waits."""
        if self.ended.wait(timeout) and self.done is not None:
            torch.cuda.current_stream(self.operation.device).wait_event(self.done)


def memory_of(result: Any) -> Iterator[Tensor]:
    """Tensors on GPUs in a result."""
    if isinstance(result, Tensor):
        parts = (result._indices(), result._values()) if result.is_sparse else (result,)
        yield from (part for part in parts if part.is_cuda)
    elif isinstance(result, list | tuple):
        for each in result:
            yield from memory_of(each)


class Engine:
    """Joins the other ranks: making one is a collective, `stop` ends it for all.

    Args:
        store: where the ranks meet; names in it are this engine's alone.
        launch: this process's place in the world.

    Attributes:
        joins: how often this rank has joined.
        meeting: another object each time that all ranks have met, in `init` or in `join`.

    Raises:
        ConnectionError: not all ranks came.
    """

    def __init__(self, store: dist.Store, launch: Launch) -> None:
        rank, size = self.rank, self.size = launch.rank, launch.size
        self.timeline: Timeline | None = None
        #: Held while this rank submits an operation.
        self.submitting = Section()
        self._lock = threading.RLock()
        self._pending: dict[str, Pending] = {}
        self._stopped: str | None = None
        #: True once all ranks have agreed to leave.
        self._ended = False
        #: Of the compressions that this rank uses.
        self.states = States()
        #: The GPU that this rank has used last; on it are made the zeros of a rank that has joined.
        self.device: torch.device | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._coordinator: Coordinator | None = None
        #: Numbers for operations that have no name, by their keys, and how often all ranks have joined.
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._rounds = self.joins = 0
        self.meeting = object()
        if rank == 0:
            fusion_bytes = int(os.environ.get("HOROVOD_FUSION_THRESHOLD") or 64 << 20)
            stall = float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS") or 60)
            if os.environ.get("HOROVOD_STALL_CHECK_DISABLE") == "1":
                stall = 0.0
            give_up = float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") or 0)
            self._coordinator = Coordinator(store, Negotiator(size, fusion_bytes), stall, give_up)
        hello = {"rank": rank, "host": host_identity()}
        self._connection: Connection
        self._connection, answer = connect(store, hello, START_SECONDS)
        #: The host of every rank.
        self.hosts: list[str] = answer["hosts"]
        host, names = self.hosts[rank], list(dict.fromkeys(self.hosts))
        peers = [other for other, its in enumerate(self.hosts) if its == host]
        counted = {
            "local_rank": peers.index(rank),
            "local_size": len(peers),
            "cross_rank": names.index(host),
            "cross_size": len(names),
        }
        #: The place among ranks and hosts, where the launcher does not tell it as the ranks' hosts say.
        self.place = counted | {what: told for what in counted if (told := getattr(launch, what)) is not None}
        # What an earlier start of the same job has left in the store must not be taken for this one's.
        self._store = dist.PrefixStore(answer["session"], store)
        self._channels = {0: Channel(dist.PrefixStore("0", self._store), range(size), rank)}
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, name="gradwire-listener", daemon=True)
        self._executor = threading.Thread(target=self._execute, name="gradwire-executor", daemon=True)
        self._listener.start()
        self._executor.start()

    # -- for the script's threads ------------------------------------------------------------------------------------

    def submit(self, operation: Operation) -> Pending:
        """Announce an operation.

        Raises:
            ValueError: one of this key has not ended yet.
            HorovodInternalError: the engine has stopped.
            RuntimeError: a signal's handler has interrupted another submission.
        """
        with self.submitting:
            return self.announce(operation)

    def announce(self, operation: Operation) -> Pending:
        """`submit`, for a caller that holds `submitting`."""
        if isinstance(operation.key, Nameless):
            operation.key = f"{operation.key}.{self._rounds}.{next(self._numbers[operation.key])}"
        if isinstance(operation, Stateful):
            operation.label = self.states.label(operation.state, operation.set_id)
        if operation.device.type == "cuda":
            self.device = operation.device
        pending = Pending(operation)
        if operation.set_id not in self._channels:  # another thread has removed it since this one looked
            raise ValueError(f"{operation.key}: process set {operation.set_id} has been removed")
        with self._lock:
            if self._stopped is not None:
                raise HorovodInternalError(self._stopped)
            if operation.key in self._pending:
                raise ValueError(
                    f"{operation.key} is still under way: an operation needs a name of its own until it has ended; "
                    "synchronize the first one, or pass another name"
                )
            self._pending[operation.key] = pending
        if (timeline := self.timeline) is not None:  # which another thread may stop
            pending.submitted = timeline.now()
        self.joins += isinstance(operation, Join)
        self._connection.send(operation.request())
        return pending

    def joined(self) -> None:
        """Number operations from zero: all ranks have joined, and those with fewer batches have counted fewer."""
        with self.submitting:
            self._numbers.clear()
            self._rounds += 1
            self.meeting = object()

    def members(self, set_id: int) -> tuple[int, ...]:
        """The global ranks of a process set that this rank is in."""
        return self._channels[set_id].ranks

    def add_channel(self, set_id: int, ranks: Sequence[int]) -> None:
        """Connect the ranks of a new process set. Called by the executor, on every rank of the set at once."""
        self._channels[set_id] = Channel(dist.PrefixStore(str(set_id), self._store), ranks, self.rank)

    def remove_channel(self, set_id: int) -> None:
        """Disconnect a process set. A member that has joined may be in the last operation yet."""
        channel = self._channels.pop(set_id, None)
        if channel is not None:
            channel.barrier(END_SECONDS)
            channel.close()

    def stop(self) -> None:
        """Leave. Operations that all ranks are ready for still run; all others fail here and on the other ranks."""
        with self.submitting:  # no handler may find a message half sent
            self._connection.send({"bye": True})
        self._executor.join(2 * END_SECONDS)
        self._connection.close()
        self._listener.join(END_SECONDS)
        if self._coordinator is not None:
            self._coordinator.thread.join(2 * END_SECONDS)
        if self.timeline is not None:
            self.timeline.close()

    # -- the threads -------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        why = "rank 0 is gone"
        with contextlib.suppress(OSError):  # the end of the connection
            while True:
                message = self._connection.receive()
                if message["do"] == "stop" and not message["clean"]:
                    why = message["message"]
                    break
                if message["do"] == "fail":
                    self._end(message["key"], error=message["message"])
                    continue
                self._ended = message["do"] == "stop"
                self._queue.put(message)
        if not self._ended:
            # At once: the executor may be waiting for the one who is gone.
            self._fail(f"Horovod has been shut down: {why}")
        self._queue.put(None)

    @torch.no_grad()
    def _execute(self) -> None:
        failed = True
        while (message := self._queue.get()) is not None:
            if message["do"] == "stop":
                # All ranks are alive and come by here. None must cut a connection that another still reads from.
                with contextlib.suppress(RuntimeError):
                    self._channels[0].barrier(END_SECONDS)
                self._fail(f"Horovod has been shut down: {message['message']}")
                failed = False
                break
            try:
                self._run(message)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                self._fail(f"Horovod has been shut down: {why}")
                self._connection.send({"failed": why})
                break
        self.states.disconnect()
        # Ranks that wait for this one inside of a collective are woken by this.
        for channel in self._channels.values():
            channel.close(failed)

    def _run(self, message: dict[str, Any]) -> None:
        if self._stopped is not None:
            raise HorovodInternalError(self._stopped)
        channel, begin = self._channels[message["set"]], 0.0
        if (timeline := self.timeline) is not None:
            timeline.mark("CYCLE_START")
            begin = timeline.now()
        pending = [self._pending.get(item["key"]) for item in message["ops"]]
        device = self._device_of(message["ops"], pending)
        with self._on_stream(pending, device):
            operations = [self._operation(item, device) for item in message["ops"]]
            if len(operations) > 1:
                results: list[Any] = operations[0].run_together(operations, channel)
            else:
                results = [operations[0].run(channel, message["ops"][0]["info"])]
        if channel.rank == 0:
            self._connection.send({"done": message["set"]})
        for operation, result in zip(operations, results, strict=True):
            self._end(operation.key, result=result, begin=begin)

    def _device_of(self, ops: Sequence[dict[str, Any]], pending: Sequence[Pending | None]) -> torch.device:
        """The device of this rank's part. Threads would otherwise allocate on the first GPU."""
        for each in pending:
            if each is not None:
                return each.operation.device
        reference = ops[0]["info"]["reference"]
        if reference["must_match"]["device"] != "cuda":
            return torch.device("cpu")
        return self.device or torch.device("cuda", torch.cuda.current_device())

    def _operation(self, item: dict[str, Any], device: torch.device) -> Operation:
        """This rank's part: the operation that it submitted, or one with zero input."""
        pending, reference = self._pending.get(item["key"]), item["info"].get("reference")
        if pending is None or (reference is not None and reference["kind"] != pending.operation.kind):
            return zero_input(reference, self.states, device)
        return pending.operation

    @contextlib.contextmanager
    def _on_stream(self, pending: Sequence[Pending | None], device: torch.device) -> Iterator[None]:
        """On a GPU: work on a stream of the engine's own, after the inputs are there, and record when it is done."""
        if device.type != "cuda":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        with torch.cuda.stream(stream):
            for each in pending:
                if each is not None and each.ready is not None:
                    stream.wait_event(each.ready)
                    for tensor in memory_of([each.operation.tensors, each.operation.outputs]):
                        tensor.record_stream(stream)
            yield
            done = stream.record_event()
        for each in pending:
            if each is not None:
                each.done = done

    def _end(self, key: str, result: Any = None, error: str | None = None, begin: float = 0.0) -> None:
        with self._lock:
            pending = self._pending.pop(key, None)
        if pending is None:
            return
        timeline = self.timeline
        if timeline is not None and error is None:
            kind = pending.operation.kind.upper()
            end = timeline.now()
            timeline.span(key, f"NEGOTIATE_{kind}", pending.submitted, begin)
            timeline.span(key, kind, begin, end, tensors=len(pending.operation.tensors))
        pending.result, pending.error = result, error
        pending.ended.set()

    def _fail(self, why: str) -> None:
        with self._lock:
            self._stopped = self._stopped or why
            left = list(self._pending)
        for key in left:
            self._end(key, error=why)


def host_identity() -> str:
    """The same for processes on one host, and for no others."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{socket.gethostname()}/{file.read().strip()}"
    return socket.gethostname()
