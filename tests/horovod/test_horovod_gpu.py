"""What Horovod's engine does for tensors on GPUs, seen without one: streams, devices, and what is refused."""

from __future__ import annotations

import io
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gradwire.hooks.horovod import functions
from gradwire.hooks.horovod.gradients.residuals import States
from gradwire.hooks.horovod.runtime.channel import Channel
from gradwire.hooks.horovod.runtime.compressed import zero_input
from gradwire.hooks.horovod.runtime.engine import Engine, Pending, memory_of
from gradwire.hooks.horovod.runtime.operations import AllReduce, Broadcast
from torch import Tensor

SECOND = torch.device("cuda", 1)


class Recorded(Tensor):
    """A tensor that says it is on a GPU, and keeps account of the streams that use it."""

    streams: list[Any]

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return SECOND

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


def recorded(*shape: int) -> Recorded:
    tensor = torch.zeros(shape).as_subclass(Recorded)
    tensor.streams = []
    return tensor


class Stream:
    """Keeps account of the events that it waits for."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.events.append(event)

    def record_event(self) -> str:
        return "recorded"


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return stream


def test_results_are_recorded_on_the_stream_that_takes_them(current: Stream) -> None:
    operation: Any = SimpleNamespace(device=SECOND, key="x")
    pending = Pending(operation)
    results = [recorded(2), recorded(3)]
    pending.result, pending.done = (results, torch.zeros(1)), "done"
    pending.ended.set()
    assert pending.wait() is pending.result
    assert current.events == ["done"]
    assert [r.streams for r in results] == [[current], [current]]


def test_inputs_and_outputs_are_recorded_on_the_engines_stream(
    current: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    import contextlib

    own = Stream()
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    tensor, output = recorded(2), recorded(2)
    pending = Pending(Broadcast("x", 0, [tensor], 0, [output]))
    engine: Any = SimpleNamespace(_streams={SECOND: own})
    with Engine._on_stream(engine, [pending, None], SECOND):
        assert own.events == ["recorded"]
    assert (tensor.streams, output.streams) == ([own], [own])
    assert pending.done == "recorded"


def test_the_memory_of_sparse_results_is_that_of_their_parts() -> None:
    assert list(memory_of([torch.eye(2).to_sparse(), [torch.ones(1)], None])) == []  # on the CPU
    parts = recorded(1, 2), recorded(2)
    sparse: Any = torch.eye(2).to_sparse()
    sparse._indices, sparse._values = (lambda: parts[0]), (lambda: parts[1])
    assert [id(part) for part in memory_of([sparse])] == [id(part) for part in parts]


def test_a_joined_ranks_part_is_on_its_own_gpu() -> None:
    reference: dict[str, Any] = {"key": "x", "set": 0, "kind": "allreduce", "tensors": [["float32", [2]]],
                 "must_match": {"device": "cuda", "op": "Sum", "prescale factor": 1.0, "postscale factor": 1.0},
                 "per_rank": {}}  # fmt: skip
    ops = [{"key": "x", "info": {"reference": reference}}]
    engine: Any = SimpleNamespace(device=SECOND)
    assert Engine._device_of(engine, ops, [None]) == SECOND
    # Not on whatever GPU is current, but where it is told; here one that needs no memory.
    assert zero_input(reference, States(), torch.device("meta")).device.type == "meta"
    reference["must_match"]["device"] = "cpu"
    assert Engine._device_of(engine, ops, [None]).type == "cpu"


def test_operations_on_several_gpus_are_not_fused() -> None:
    first, second = (AllReduce("x", 0, [torch.zeros(2, device=device)], 1, 1.0, 1.0) for device in ("cpu", "meta"))
    assert first.fuse() != second.fuse()


def test_a_graph_cannot_capture_an_operation(current: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    operation: Any = SimpleNamespace(device=SECOND, key="allreduce.x")
    with pytest.raises(RuntimeError, match=r"allreduce.x cannot be captured in a CUDA graph.*between replays"):
        Pending(operation)


def test_objects_of_other_ranks_come_to_this_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    storage: Any = SimpleNamespace(cuda=places.append)
    functions.here(storage, "cuda:0")
    assert places == [1]
    assert functions.here(storage, "cpu") is storage
    buffer = io.BytesIO()
    torch.save({"x": torch.ones(2)}, buffer)
    loaded = functions._from_bytes(torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8))
    assert torch.equal(loaded["x"], torch.ones(2))


@pytest.mark.parametrize(("failed", "names", "called"), [
    (False, ("shutdown", "abort"), "shutdown"), (False, ("_shutdown", "abort"), "_shutdown"),
    (True, ("shutdown", "abort"), "abort"),
])  # fmt: skip
def test_a_channel_ends_its_nccl_group(failed: bool, names: tuple[str, ...], called: str) -> None:
    """Torch would warn, and NCCL's threads would outlive it; where a rank is gone nobody must wait for it."""
    calls: list[str] = []
    channel: Any = Channel.__new__(Channel)
    channel._nccl = SimpleNamespace(**{name: partial(calls.append, name) for name in names})
    channel._gloo, channel._groups, channel._scratch = None, {}, {}
    channel.close(failed)
    channel.close(failed)
    assert calls == [called]
