"""Process groups: one that is to a GPU what NCCL is, and one that carries words from host to host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .machine import Machine, Stream
from .tensors import GpuTensor, blank

#: How memory is kept from the allocator: by `record_stream`, as older versions of torch do, or by holding it until
#: somebody waits, as newer ones.
Keeping = Literal["record", "hold"]
#: What the names of collectives end with that divide.
AVERAGED = " of means"
#: The tag of what is summed between hosts.
SUMS = -1


class Mismatch(RuntimeError):
    """Ranks have started different collectives: NCCL would hang, or mistake one for the other."""


class Communicator:
    """NCCL's, of some ranks: `member(rank)` is a rank's process group.

    Args:
        machine: the ranks' GPUs.
        name: of its streams.
        ranks: the members.
        keeping: how it keeps memory that a collective works on.
        order: what each rank has started, over all communicators that share this.
    """

    def __init__(
        self,
        machine: Machine,
        name: str,
        ranks: Sequence[int],
        keeping: Keeping = "hold",
        order: dict[int, list[tuple[str, int]]] | None = None,
    ) -> None:
        self.machine, self.name, self.ranks, self.keeping = machine, name, tuple(ranks), keeping
        self.calls: list[_Call] = []
        self.order = {} if order is None else order
        for rank in ranks:
            self.order.setdefault(rank, [])

    def member(self, rank: int) -> Member:
        return Member(self, rank)


def check_order(order: dict[int, list[tuple[str, int]]]) -> None:
    """Ranks that share communicators must use them in the same order, or they may wait in a circle.

    Raises:
        Mismatch: they did not.
    """
    for a, mine in order.items():
        for b, theirs in order.items():
            shared = {name for name, _ in mine} & {name for name, _ in theirs}
            if [c for c in mine if c[0] in shared] != [c for c in theirs if c[0] in shared]:
                raise Mismatch(f"ranks {a} and {b} have started collectives of {sorted(shared)} in different orders")


class _Call:
    """One collective, of all ranks."""

    def __init__(self, ranks: Sequence[int], kind: str, signature: Any) -> None:
        self.ranks, self.kind, self.signature = ranks, kind, signature
        self.parts: dict[int, tuple[Tensor, Tensor]] = {}
        #: The streams in which it waits, and the places where.
        self.places: dict[int, tuple[Stream, int]] = {}
        self.done = False
        #: Of an all-to-all: how much each rank sends to each, and receives.
        self.sent: dict[int, list[int]] = {}
        self.received: dict[int, list[int]] = {}

    def expect(self, rank: int, sent: list[int], received: list[int]) -> None:
        """Raises Mismatch where ranks expect something else than others send."""
        self.sent[rank], self.received[rank] = sent, received
        for i, a in enumerate(self.ranks):
            for j, b in enumerate(self.ranks):
                if a in self.sent and b in self.received and self.sent[a][j] != self.received[b][i]:
                    raise Mismatch(f"rank {a} sends {self.sent[a]}, rank {b} expects {self.received[b]}")

    def ready(self) -> bool:
        """Whether it is the first in every rank's stream."""
        return self.done or (
            len(self.places) == len(self.ranks) and all(stream.ended == at for stream, at in self.places.values())
        )

    def run(self) -> None:
        if self.done:
            return
        self.done = True
        parts = [self.parts[rank] for rank in self.ranks]
        given = [source.clone() for _, source in parts]
        if self.kind.endswith(AVERAGED):  # multiplied as it is read
            given = [part * (1.0 / len(parts)) for part in given]
        if self.kind.startswith(("all_reduce", "reduce_scatter")):
            total = given[0]
            for part in given[1:]:
                total = total + part
            scatters = self.kind.startswith("reduce_scatter")
            result = list(total.reshape(len(parts), -1)) if scatters else [total] * len(parts)
        elif self.kind == "all_gather":
            result = [torch.cat([part.reshape(-1) for part in given])] * len(parts)
        else:
            pieces = [list(part.reshape(-1).split(self.sent[r])) for part, r in zip(given, self.ranks, strict=True)]
            result = [torch.cat([row[i] for row in pieces]) for i in range(len(parts))]
        for (target, _), value in zip(parts, result, strict=True):
            target.copy_(value.view(target.shape))


class Member:
    """A rank's process group, as far as `hooks.comm.group` calls it."""

    def __init__(self, communicator: Communicator, rank: int) -> None:
        self.communicator, self._rank = communicator, rank
        self.started = 0
        self.stream: Stream | None = None

    def rank(self) -> int:
        return self.communicator.ranks.index(self._rank)

    def size(self) -> int:
        return len(self.communicator.ranks)

    def name(self) -> str:
        """As torch 2.15 has it; there will be others."""
        return "nccl2"

    @property
    def supports_coalescing(self) -> bool:
        return True

    def _get_backend(self, device: Any) -> Member:
        return self

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Collecting:
        (tensor,) = tensors
        kind = "all_reduce" + _averaged(options)
        return self._start(kind, (tensor.dtype, tensor.numel()), tensor, tensor)

    def _reduce_scatter_base(self, output: Tensor, rows: Tensor, options: Any = None) -> Collecting:
        if rows.numel() != self.size() * output.numel() or output.dtype != rows.dtype:
            raise ValueError(f"{output!r} is no {self.size()}th of {rows!r}")
        return self._start("reduce_scatter" + _averaged(options), (rows.dtype, output.numel()), output, rows)

    def _allgather_base(self, output: Tensor, row: Tensor) -> Collecting:
        if output.numel() != self.size() * row.numel() or output.dtype != row.dtype:
            raise ValueError(f"{output!r} cannot take {self.size()} times {row!r}")
        return self._start("all_gather", (row.dtype, row.numel()), output, row)

    def alltoall_base(self, output: Tensor, given: Tensor, received: list[int], sent: list[int]) -> Collecting:
        each = given.numel() // self.size()
        sent, received = sent or [each] * self.size(), received or [each] * self.size()
        if sum(sent) != given.numel() or sum(received) != output.numel():
            raise ValueError(f"{given!r} is sent as {sent}, {output!r} received as {received}")
        return self._start("all_to_all", (given.dtype,), output, given, (sent, received))

    def _start(self, kind: str, signature: Any, output: Tensor, source: Tensor, sizes: Any = None) -> Collecting:
        assert isinstance(output, GpuTensor)
        assert isinstance(source, GpuTensor)
        communicator, number = self.communicator, self.started
        machine, self.started = communicator.machine, number + 1
        communicator.order[self._rank].append((communicator.name, number))
        if number == len(communicator.calls):
            communicator.calls.append(_Call(communicator.ranks, kind, signature))
        call = communicator.calls[number]
        if (call.kind, call.signature) != (kind, signature):
            raise Mismatch(
                f"{communicator.name}: collective {number} is {kind} of {signature} on rank {self._rank}, and "
                f"{call.kind} of {call.signature} elsewhere"
            )
        if self.stream is None:
            self.stream = machine.new_stream(communicator.name)
        stream, into, out = self.stream, output.inner, source.inner
        stream.wait_stream(machine.current)
        if into.data_ptr() != out.data_ptr():
            stream.launch(lambda: _spoil(into))
        if sizes is not None:
            call.expect(self._rank, *sizes)
        call.parts[self._rank], call.places[self._rank] = (into, out), (stream, stream.launched)
        stream.launch(call.run, call.ready)
        work = Collecting(machine, stream)
        if communicator.keeping == "record":
            output.record_stream(stream)
            source.record_stream(stream)
        else:
            work.held = [output, source]
        machine.advance()
        return work


def _averaged(options: Any) -> str:
    """What tells a collective of means from one of sums."""
    if options is None or options.reduceOp == dist.ReduceOp.SUM:
        return ""
    assert options.reduceOp == dist.ReduceOp.AVG, options.reduceOp
    return AVERAGED


def _spoil(x: Tensor) -> None:
    x.copy_(blank(torch.empty_like(x)))


class Collecting:
    """A collective under way: `wait` makes the current stream wait, and never the host."""

    def __init__(self, machine: Machine, stream: Stream) -> None:
        self.machine, self.end = machine, stream.record_event()
        self.held: list[Tensor] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.machine.current.wait_event(self.end)
        self.held = []
        return True


class Words:
    """Messages between hosts, by tags, as Gloo's: `member(rank)` is a rank's process group."""

    def __init__(self, ranks: Sequence[int], wait_until: Callable[[Callable[[], bool], str], None]) -> None:
        self.ranks, self.wait_until = tuple(ranks), wait_until
        self.sent: dict[tuple[int, int, int], deque[Tensor]] = {}

    def member(self, rank: int) -> WordsMember:
        return WordsMember(self, rank)

    def queue(self, source: int, target: int, tag: int) -> deque[Tensor]:
        return self.sent.setdefault((source, target, tag), deque())


class WordsMember:
    """A rank's."""

    def __init__(self, words: Words, rank: int) -> None:
        self.words, self._rank = words, words.ranks.index(rank)
        #: Of each peer and tag, how many messages have been announced, and how many have arrived.
        self.counts: dict[tuple[int, int], list[int]] = {}

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self.words.ranks)

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Message:
        self.words.queue(self._rank, target, tag).append(tensors[0].clone())
        return Message(lambda: True, lambda: None, self.words)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Message:
        """Messages of one tag are waited for in the order in which they are announced."""
        counts, queue = self.counts.setdefault((source, tag), [0, 0]), self.words.queue(source, self._rank, tag)
        number = counts[0]
        counts[0] += 1

        def take() -> None:
            assert counts[1] == number, "messages were waited for in another order than they were announced in"
            sent = queue.popleft()
            tensors[0][: len(sent)].copy_(sent)  # what is shorter fills the beginning, as Gloo's
            counts[1] += 1

        return Message(lambda: bool(queue), take, self.words)

    def allreduce(self, tensors: list[Tensor]) -> Message:
        """The sum in rank order."""
        (mine,), ranks = tensors, range(self.size())
        for target in ranks:
            self.send(tensors, target, SUMS)
        queues = [self.words.queue(source, self._rank, SUMS) for source in ranks]

        def take() -> None:
            parts = [queue.popleft() for queue in queues]
            mine.copy_(sum(parts[1:], parts[0]))

        return Message(lambda: all(queues), take, self.words)


class Message:
    """Under way from host to host."""

    def __init__(self, there: Callable[[], bool], take: Callable[[], None], words: Words) -> None:
        self.there, self.take, self.words = there, take, words
        self.taken = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.words.wait_until(self.there, "a message")
        self.take()
        self.taken = True
        return True

    def is_completed(self) -> bool:
        return self.taken
