"""A c10d backend around another one. Large reductions travel as codes, in the exchanges' own arithmetic; all else is
the inner backend's.

Over Gloo encoded collectives are messages with tags of their own, so they need no order with others; beside its codes a
collective sends its description, which ranks compare before they decode. Over NCCL they are collectives on streams.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend

from ...compress.aggregation import AggregationKernels
from ...compress.backends import Kernels, Workspace
from ...compress.codec import DTYPES, BlockCodec, Codec, new_draw
from ...compress.feedback.residual import NOTHING
from ..comm.group import Group
from ..comm.pipeline import Completion, Pipeline
from ..comm.ports import Port, Stages, WaitAll, Work, drive
from ..comm.tasks import STOPPED
from ..exchanges import Exchange, ExchangeArgs, ReduceScatter, TwoPass
from ..exchanges.gather import Gather
from .options import BackendOptions

#: Lengths for which memory is kept, and exchanges of each, which collectives take in turn.
LENGTHS, TURNS = 32, 2
#: Bytes of a collective's description.
HEAD_BYTES = 256


@dataclass(frozen=True)
class Total(BlockCodec):
    """Another codec, of whose wires `decode_mean` makes the sum: float32, in rank order, cast once."""

    name: ClassVar[str] = "total"
    clip: ClassVar[None] = None

    inner: BlockCodec

    @property
    def block_size(self) -> int:
        return self.inner.block_size

    @property
    def stochastic(self) -> bool:
        return self.inner.stochastic

    def fields(self) -> tuple[Any, ...]:
        return self.inner.fields()

    def kernels(self, device: torch.device) -> Kernels:
        return TOTAL_KERNELS


class TotalKernels(AggregationKernels):
    def decode_mean(self, codec: Any, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        inner = self._workspace(workspace)
        if len(wires[0]) == 1:
            codec.inner.decode_mean(wires, out, inner)
            return
        wide = nullcontext(out) if out.dtype == torch.float32 else workspace.scratch.open(out.numel(), out.device)
        with wide as total:
            total.zero_()
            for wire in wires[0]:
                codec.inner.decode_add(wire, total, 1.0, inner)
            if total is not out:
                out.copy_(total)


TOTAL_KERNELS = TotalKernels()


class AllGather(Gather):
    """`out` has a row for each rank, what its code decodes to: the same on all ranks, the sender included."""

    name = "all_gather"

    def reduce(self, x: ExchangeArgs) -> Stages:
        self.codec.encode(x.grad, self.wire, x.draw, self.workspaces[1])
        yield WaitAll([port.start() for port in self.ports])
        for row, wire in zip(x.out.view(self.world_size, self.numel), self.wires[0], strict=True):
            self.codec.decode_mean((wire[None],), row, self.workspaces[1])


class Messages(Group):
    """Ranks whose collectives come once each: no receive is posted before its message is due."""

    def persistent_gather(self, output: Tensor, row: Tensor, ahead: int = 1, coded: bool = False) -> Port:
        return super().persistent_gather(output, row, 1, coded)

    def persistent_swap(self, output: Tensor, rows: Tensor, ahead: int = 1, coded: bool = False) -> Port:
        return super().persistent_swap(output, rows, 1, coded)


class Compared:
    """Messages of a collective, behind the descriptions that all ranks have sent of theirs."""

    def __init__(self, group: Group, heads: Tensor, own: Tensor, head: Work, messages: Work) -> None:
        self._group, self._heads, self._own, self._head, self._messages = group, heads, own, head, messages

    def wait(self) -> None:
        self._head.wait()
        for rank in (self._heads != self._own).any(1).nonzero().view(-1).tolist()[:1]:
            with suppress(RuntimeError):  # all must have seen it before one closes the connections
                self._group.pairwise(list(torch.empty_like(self._heads)), [self._own] * self._group.size).wait()
            mine, other = (bytes(row.tolist()).rstrip(b"\0").decode() for row in (self._own, self._heads[rank]))
            raise ValueError(
                f"ranks disagree on a collective of the backend gradwire: this rank calls {mine}; rank {rank} of the "
                f"group calls {other}. Call the same collectives in the same order on all ranks, with equal options"
            )
        self._messages.wait()


class Slot:
    """An exchange of one length and its memory, for one collective at a time."""

    def __init__(self, exchange: Exchange, text: str, number: int, seed: int) -> None:
        self.exchange = exchange
        self.future: torch.futures.Future[Any] | None = None
        device, ranks = exchange.device, exchange.world_size
        self.draws = [new_draw(seed, 0, (2 * number + way) * ranks + exchange.rank, device) for way in range(2)]
        self.extra = torch.empty(0, dtype=torch.float32, device=device)
        head = text.encode()[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0")
        self.own = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self.heads = torch.zeros(ranks, HEAD_BYTES, dtype=torch.uint8, device="cpu")

    def stages(self, out: Tensor, grad: Tensor) -> Stages:
        for draw in self.draws:
            draw[1] += 1
        self._use(out, grad)
        own, owner = self.draws
        yield from self.exchange.reduce(ExchangeArgs(grad, out, self.extra, NOTHING, (), own, owner))
        self._use(out, grad)

    @staticmethod
    def _use(*tensors: Tensor) -> None:
        """Tell the allocator that the current stream uses these."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


class CodedWork(dist._Work):
    """Collectives in flight: encoded ones, whose futures get `result`, and works of the inner backend."""

    def __init__(self, futures: Sequence[torch.futures.Future[Any]], result: list[Any], works: Sequence[Any]) -> None:
        super().__init__()
        self._futures, self._result, self._works = futures, result, works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout or timedelta(0))
        done = Completion()

        def ended(_: Any) -> None:
            if all(future.done() for future in self._futures):
                done.set()

        for future in self._futures:
            if timeout:
                future.add_done_callback(ended)
        if timeout and not done.wait(timeout.total_seconds()):
            raise RuntimeError(f"a collective of the backend gradwire took longer than {timeout}: see the logs")
        for future in self._futures:
            future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        futures = [*self._futures, *(work.get_future() for work in self._works)]
        result = self._result
        return futures[0] if len(futures) == 1 else torch.futures.collect_all(futures).then(lambda _: result)


class CodedBackend(Backend):
    """Encodes reductions, and all-gathers if asked to, of `min_numel` elements and more.

    Args:
        inner: carries everything.
        choice: what is encoded, and how.
        ranks: global ranks of the group.

    Attributes:
        counts: as `statistics` returns them.
    """

    def __init__(self, inner: Any, choice: BackendOptions, ranks: Sequence[int]) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.choice, self.ranks = inner, choice, tuple(ranks)
        self.counts: Counter[str] = Counter(encoded=0, unchanged=0, bytes_sent=0, bytes_received=0)
        self._group = Messages(inner, self.ranks).channel("gradwire backend")
        self._heads = self._group.channel("heads")
        self._lock = threading.RLock()
        self._slots: OrderedDict[Any, Slot] = OrderedDict()
        self._uses: Counter[Any] = Counter()
        self._pipelines: dict[torch.device, Pipeline] = {}
        self._made, self._coalescing, self._failure = 0, False, ""

    # -- collectives that may be encoded ---------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._reduce("all_reduce", tensors, tensors, opts or dist.AllreduceOptions(), self.inner.allreduce)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Any:
        return self._reduce("all_reduce", tensors, tensors, opts, self.inner.allreduce_coalesced)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        def rest(outputs: list[Any], inputs: list[Any], opts: Any) -> Any:
            return self.inner.reduce_scatter_single(outputs[0], inputs[0], opts)

        return self._reduce("reduce_scatter", [output], [input], opts, rest)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        return self._reduce("reduce_scatter", outputs, inputs, opts, self.inner.reduce_scatter_single_coalesced)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        return self._reduce("reduce_scatter", outputs, inputs, opts, self.inner.reduce_scatter)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        def rest(outputs: list[Any], inputs: list[Any], opts: Any) -> Any:
            return self.inner.all_gather_single(outputs[0], inputs[0], opts)

        return self._run("all_gather", "", [output], [input], opts, rest)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        return self._run("all_gather", "", outputs, inputs, opts, self.inner.all_gather_single_coalesced)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        return self._run("all_gather", "", outputs, inputs, opts, self.inner.allgather)

    def _reduce(self, kind: str, outputs: Any, inputs: Any, opts: Any, rest: Callable[..., Any]) -> Any:
        op = next((op.name for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) if opts.reduceOp == op), None)
        return self._run(kind, op, outputs, inputs, opts, rest)

    def _run(self, kind: str, op: str | None, outputs: Any, inputs: Any, opts: Any, rest: Callable[..., Any]) -> Any:
        """Encode what can be, and leave the rest to the inner backend, in one call."""
        pairs = list(zip(outputs, inputs, strict=True))
        codec = self.choice.all_gather if kind == "all_gather" else self.choice.codec
        works, futures, left = [], [], []
        for pair in pairs:
            if op is not None and codec is not None and self._carries(kind, *pair):
                futures.append(self._start(kind, op, codec, *pair, opts.asyncOp))
            else:
                left.append(pair)
        self.counts["encoded"] += len(futures)
        self.counts["unchanged"] += len(left)
        if left or not futures:
            arguments = [[pair[side] for pair in left] for side in range(1 if kind == "all_reduce" else 2)]
            works.append(rest(*arguments, opts))
        return CodedWork(futures, list(outputs), works) if futures else works[0]

    def _carries(self, kind: str, out: Any, given: Any) -> bool:
        """True if these are encoded: alike on all ranks, if they call alike."""
        if self._coalescing or self.size() == 1:
            return False
        rows = {"all_reduce": (1, 1), "reduce_scatter": (1, self.size()), "all_gather": (self.size(), 1)}[kind]
        sides = [[x] if isinstance(x, Tensor) else list(x) for x in (out, given)]
        if any(len(side) not in (1, count) for side, count in zip(sides, rows, strict=True)):
            return False  # the inner backend says so
        first = sides[0][0]
        row = sum(x.numel() for x in sides[0]) // rows[0]
        return (
            first.dtype in DTYPES
            and row * max(rows) >= max(1, self.choice.min_numel)
            and all(
                x.layout == torch.strided
                and (x.dtype, x.device) == (first.dtype, first.device)
                and x.numel() * len(side) == row * count
                for side, count in zip(sides, rows, strict=True)
                for x in side
            )
        )

    # -- encoded collectives ---------------------------------------------------------------------------------------

    def _start(
        self, kind: str, op: str, codec: Codec, out: Any, given: Any, asynchronous: bool
    ) -> torch.futures.Future[Any]:
        if self._failure:
            raise RuntimeError(f"{STOPPED}: {self._failure}")
        gives = flat(given)
        outs = gives if out is given else flat(out, read=False)
        numel = gives.numel() if kind == "all_gather" else outs.numel()
        device, result = outs.device, [out] if isinstance(out, Tensor) else list(out)
        with self._lock:
            slot = self._slot(kind, op, codec, numel, outs)
            if slot.future is not None:
                slot.future.wait()  # its memory may be in use
            head = (
                None if device.type == "cuda" else self._heads.pairwise(slot.heads.unbind(), [slot.own] * self.size())
            )
            stages = self._guarded(slot, outs, gives, result, head)
            if device not in self._pipelines:
                self._pipelines[device] = Pipeline("gradwire-backend", device, threaded=device.type == "cpu")
            pipeline = self._pipelines[device]
            self.counts["bytes_sent"] += slot.exchange.bytes_sent
            self.counts["bytes_received"] += slot.exchange.bytes_received
            slot.future = future = pipeline.new_future()
            if asynchronous or device.type != "cpu":
                return pipeline.start(stages, cast(Tensor, result), future=future)
        try:  # the caller waits: on its own thread
            drive(stages)
            future.set_result(result)
        except BaseException as error:  # a signal's handler may raise anything
            failed = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self._fail(failed)
            pipeline.fail(failed)
            future.set_exception(failed)
            if failed is not error:
                raise
        return future

    def _slot(self, kind: str, op: str, codec: Codec, numel: int, out: Tensor) -> Slot:
        what = (kind, op, numel, out.dtype, out.device)
        turn = self._uses[what] % TURNS
        self._uses[what] += 1
        slot = self._slots.pop((*what, turn), None)
        if slot is None:
            if kind == "all_reduce":
                cls: type[Exchange] = TwoPass if self.size() >= TwoPass.least_ranks else Gather
            else:
                cls = ReduceScatter if kind == "reduce_scatter" else AllGather
            code = Total(cast(BlockCodec, codec)) if op == "SUM" else codec
            dtype = str(out.dtype).removeprefix("torch.")
            text = f"{kind}({op.lower()}) of {numel} {dtype} with {self.choice.text}"
            exchange = cls(code, numel, 0, out.device, self._group.channel(f"{text} {turn}"))
            # Unlike calls have unlike channels: a message longer than its place would end the process.
            slot = Slot(exchange, text, self._made, self.choice.seed)
            self._made += 1
        self._slots[(*what, turn)] = slot
        if len(self._slots) > TURNS * LENGTHS:
            oldest = self._slots.popitem(last=False)[1].future
            if oldest is not None:
                oldest.wait()
        return slot

    def _guarded(self, slot: Slot, outs: Tensor, gives: Tensor, result: list[Tensor], head: Work | None) -> Stages:
        """The stages of a collective, which move the result where it belongs."""
        try:
            stages = slot.stages(outs, gives)
            if head is not None:
                yield Compared(self._heads, slot.heads, slot.own, head, next(stages))
            yield from stages
            if len(result) > 1 or outs.data_ptr() != result[0].data_ptr():
                for part, row in zip(result, outs.chunk(len(result)), strict=True):
                    part.detach().copy_(row.view(part.shape))
        except Exception as error:
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        """Refuse all that is encoded later, and close the connections, so that no rank waits."""
        if not self._failure:
            self._failure = str(error)
            self._group.abort()

    # -- the inner backend's ---------------------------------------------------------------------------------------

    def start_coalescing(self) -> None:
        self.inner._start_coalescing()
        self._coalescing = True  # what the inner backend launches as one cannot have stages

    def end_coalescing(self) -> Any:
        self._coalescing = False
        return self.inner._end_coalescing()

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        self.inner.monitored_barrier(opts.timeout, wait_all_ranks)

    def _set_group_uid(self, uid: str) -> None:
        cast(Any, super())._set_group_uid(uid)  # by which the group has its name
        self.inner._set_group_uid(uid)

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.timeout = self._heads.timeout = timeout
        self.inner.set_timeout(timeout)

    def split(self, store: Any, ranks: list[int], opts: Any) -> Any:
        inner = self.inner.split(store, ranks, opts)
        return None if inner is None else CodedBackend(inner, self.choice, [self.ranks[rank] for rank in ranks])

    def shutdown(self) -> None:
        for pipeline in self._pipelines.values():
            pipeline.end()
        self._pipelines.clear()
        self.inner.shutdown()

    def getBackendName(self) -> str:
        return f"gradwire+{self.inner.name()}"


def flat(x: Any, read: bool = True) -> Tensor:
    """A tensor's elements, or those of several of the same length end to end, in one row: a view if they lie so;
    without `read` memory that is to be filled."""
    parts = [part.detach() for part in ([x] if isinstance(x, Tensor) else x)]
    if len(parts) == 1 and parts[0].is_contiguous():
        return parts[0].view(-1)
    if read:
        return torch.cat([part.reshape(-1) for part in parts])
    return parts[0].new_empty(sum(part.numel() for part in parts))


def _delegate(name: str) -> Callable[..., Any]:
    def call(self: CodedBackend, *arguments: Any) -> Any:
        return getattr(self.inner, name)(*arguments)

    return call


for _name in (
    "_enable_collectives_timing",
    "_end_time_estimate",
    "_get_sequence_number_for_group",
    "_set_sequence_number_for_group",
    "_start_time_estimate",
    "_wait_for_pending_works",
    "abort",
    "all_to_all_single",
    "allgather_coalesced",
    "allreduce_sparse",
    "alltoall",
    "barrier",
    "broadcast",
    "eager_connect_single_device",
    "gather",
    "get_error",
    "memory_stats",
    "perform_nocolor_split",
    "recv",
    "recv_anysource",
    "reduce",
    "resume",
    "scatter",
    "send",
    "supports_tensor_alloc",
    "allocate_tensor",
    "suspend",
):
    setattr(CodedBackend, _name, _delegate(_name))
for _name in ("options", "supports_splitting", "supports_coalescing", "_supports_time_estimate"):
    setattr(CodedBackend, _name, property(attrgetter(f"inner.{_name}")))


def create(inner_name: str, options: Any, choice: Any) -> CodedBackend:
    """The backend of a new group, around an inner one of this name. `options` are torch's, `choice` the user's.

    Raises:
        TypeError: `choice` is no `BackendOptions`.
        ValueError: the group is to be reconfigured.
    """
    if choice is None:
        choice = BackendOptions.from_environment()
    if not isinstance(choice, BackendOptions):
        raise TypeError(f"pg_options={choice!r}: the backend gradwire takes gradwire.hooks.backend.BackendOptions")
    if options.enable_reconfigure:
        raise ValueError(
            f"enable_reconfigure=True: the ranks of a backend in Python stay as they are: use {inner_name!r}"
        )
    backends: Any = dist.Backend
    backends._ensure_backend_registered(inner_name)
    if isinstance(options.split_from, CodedBackend):
        options.split_from = options.split_from.inner
    inner = backends._plugins[inner_name.upper()].creator_fn(options, choice.inner)
    coded = CodedBackend(inner, choice, options.global_ranks_in_group or range(options.group_size))
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch itself holds nothing of it but what is in C++.
    weakref.finalize(options.process_group, id, coded).atexit = False
    return coded
