"""Measurements of `gradwire-bench advise`: a model's step, the codecs on its buckets, and the network stack.

Each function runs in every process of a Gloo group, all at once, as the ranks of a node do, and the slowest counts.
What they return can travel as JSON.
"""

# Annotations stay evaluated here: DDP compares those of a hook with its own.
import gc
import importlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...compress.codec import DTYPES
from ...hooks.comm.group import Group
from ...hooks.comm.ports import Work
from ...hooks.network import probe
from ..common import models
from ..common.arms import PREDICTED
from ..common.report import median

CODECS = {arm.name: arm.codec for arm in PREDICTED if arm.codec is not None}
#: Short names for models that come along.
MODELS = {name: f"{models.__name__}:{name}" for name in ("linear", "small", "language")}
#: DDP rebuilds its buckets after the first step.
WARM_UP = 4
#: Seconds for which steps are timed, about, and how many at least and at most.
SECONDS, FEWEST, MOST = 4.0, 5, 25
#: Bytes of the messages whose work is measured, and how often.
MESSAGE, MESSAGES = 1 << 23, 8
#: Short messages whose delay on busy cores is measured. Some wait for a core and some do not, so the mean counts.
SHORT_MESSAGES = 60


class ModelError(ValueError):
    """`--model` cannot be measured; says why and what to do."""


def load(name: str) -> models.Built:
    """The model that `--model` names, and its loss.

    Raises:
        ModelError: it is not there, or not what it should be.
    """
    module_name, _, attribute = MODELS.get(name, name).partition(":")
    here = f"--model {name}"
    if not module_name or not attribute:
        raise ModelError(f"{here}: expected module:function, such as train:build, or one of {', '.join(MODELS)}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ModelError(f"{here}: importing {module_name} failed: {_last(error)}") from error
        raise ModelError(
            f"{here}: there is no module {error.name!r}: run this in the folder that holds it, or install it"
        ) from error
    except Exception as error:
        raise ModelError(f"{here}: importing {module_name} failed: {_last(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        kind = "has no" if function is None else "has a value, not a function,"
        raise ModelError(f"{here}: module {module_name} {kind} {attribute!r}: write a function that builds the model")
    torch.manual_seed(0)
    try:
        built = function()
    except Exception as error:
        raise ModelError(f"{here}: {attribute}() failed: {_last(error)}") from error
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module) and callable(built[1])):
        found = f"({', '.join(type(b).__name__ for b in built)})" if isinstance(built, tuple) else type(built).__name__
        raise ModelError(
            f"{here}: {attribute}() returned {found}: expected a tuple (model, loss), where loss(model) runs the model "
            "on an example batch and returns a scalar"
        )
    _check(here, *built)
    return built


def _check(here: str, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    """Raises ModelError unless a step of the model gives every parameter a gradient that can be exchanged."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ModelError(f"{here}: the model has no parameter that requires a gradient: there is nothing to exchange")
    devices = sorted({str(p.device) for p in trained.values()})
    if len(devices) > 1:
        raise ModelError(f"{here}: the model lies on {', '.join(devices)}: put all of it on one device")
    try:
        value = loss(model)
    except Exception as error:
        raise ModelError(f"{here}: loss(model) failed: {_last(error)}") from error
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        if isinstance(value, Tensor) and value.numel() == 1:
            found = "a tensor without a gradient"
        raise ModelError(f"{here}: loss(model) returned {found}: expected a scalar to call backward() on")
    if not bool(torch.isfinite(value)):
        raise ModelError(f"{here}: loss(model) is {value.item()}: it must be finite; look at the batch and the weights")
    value.backward()
    for name, parameter in trained.items():
        if parameter.grad is None:
            raise ModelError(
                f"{here}: loss(model) does not use parameter {name!r}: set its requires_grad to False, or use it"
            )
        if parameter.grad.layout != torch.strided or parameter.dtype not in DTYPES:
            kind = "sparse" if parameter.grad.layout != torch.strided else str(parameter.dtype)
            raise ModelError(
                f"{here}: the gradient of {name!r} is {kind}: gradwire compresses dense floats of 16 or 32 bits"
            )
    model.zero_grad()


def _last(error: Exception) -> str:
    """An exception, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"


# -- a model -----------------------------------------------------------------------------------------------------------


def measure_model(model: str, threads: int, bucket_mb: float | None = None) -> dict[str, Any]:
    """Time a model's steps without communication, and codecs and casts on its largest bucket.

    Args:
        model: as `load` takes it.
        threads: of each rank.
        bucket_mb: DDP's `bucket_cap_mb`; None: its default.

    Returns:
        `parameters`, `device`, `element_bytes`, a `Profile`'s fields, `codecs` (a `CodecSpeed` for each), `casts` (to
        float16 and back, seconds an element), `work` (`hooks.cost.Work`); or `error` alone, if `model` is none.
    """
    torch.set_num_threads(threads)
    try:
        built, loss = load(model)
    except ModelError as error:
        return {"error": str(error)}
    steps = Steps(built, loss, bucket_mb)
    group = Group(dist.group.WORLD)
    profile = steps.profile(group)
    numel = max(profile["numels"])
    speeds = {
        name: asdict(probe.codec_speed(codec, codec.default_feedback, numel, group, steps.device, most=numel))
        for name, codec in CODECS.items()
    }
    result = {
        "parameters": sum(p.numel() for p in built.parameters() if p.requires_grad),
        "device": str(steps.device),
        "element_bytes": steps.element_bytes,
        "profile": profile,
        "codecs": speeds,
        "casts": _casts(numel, group, steps.device),
        "work": asdict(probe.work(group, steps.device)),
    }
    # Models in reference cycles keep the group, and with it Gloo's threads, until the interpreter ends, which aborts.
    del steps, loss
    gc.collect()
    return result


class Marks:
    """Moments, on the clock of the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._moments: list[Any] = []

    def __call__(self) -> None:
        if self._cuda:
            self._moments.append(torch.cuda.Event(enable_timing=True))
            self._moments[-1].record()
        else:
            self._moments.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Since the first."""
        if self._cuda:
            torch.cuda.synchronize()
            return [self._moments[0].elapsed_time(moment) / 1e3 for moment in self._moments]
        return [moment - self._moments[0] for moment in self._moments]


class Steps:
    """Training steps under DDP, whose hook gives every rank its own gradients back, and notes when it was called."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor], bucket_mb: float | None = None) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        self.device, self.loss = trained[0].device, loss
        self.model = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        self.model.register_comm_hook(self, note)
        # The cheapest optimizer; it must not change what the next step takes.
        self.optimizer = torch.optim.SGD(trained, lr=0.0)
        self.marks, self.numels, self.element_bytes = Marks(self.device), [0], 4

    def step(self) -> list[float]:
        """Seconds since its start: when backward began, when each bucket was ready, when backward and step ended."""
        dist.barrier()
        self.marks, self.numels = Marks(self.device), []
        self.marks()
        self.optimizer.zero_grad()
        loss = self.loss(self.model)
        self.marks()
        loss.backward()
        self.marks()
        self.optimizer.step()
        self.marks()
        return self.marks.seconds()[1:]

    def profile(self, group: Group) -> dict[str, Any]:
        """`Profile`'s fields: medians over steps of the slowest rank. A collective."""
        first = [self.step()[-1] for _ in range(WARM_UP)][-1]
        (typical,) = probe.agreed(group, torch.device("cpu"), [first])
        count = max(FEWEST, min(MOST, round(SECONDS / typical)))
        rows = [durations(self.step()) for _ in range(count)]
        everyone: list[Any] = [None] * group.size
        dist.all_gather_object(everyone, rows)
        # A step lasts until the slowest rank is done: of each step, that rank's.
        slowest = [max(ranks, key=total) for ranks in zip(*everyone, strict=True)]
        forward, *ready, copying, optimizer = (median(column) for column in zip(*slowest, strict=True))
        share = copying / sum(self.numels)
        return {
            "numels": self.numels,
            "forward": forward,
            "ready": ready,
            "copy_back": [share * numel for numel in self.numels],
            "optimizer": optimizer,
        }


def note(steps: Steps, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's hook."""
    steps.marks()
    steps.numels.append(bucket.buffer().numel())
    steps.element_bytes = bucket.buffer().element_size()
    future: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[steps.device] if steps.device.type == "cuda" else None
    )
    future.set_result(bucket.buffer())
    return future


def durations(row: Sequence[float]) -> list[float]:
    """Of `Steps.step`'s moments: forward, then the buckets' since backward began, then what came after each other."""
    forward, *ready, backward, end = row
    return [forward, *(moment - forward for moment in ready), backward - ready[-1], end - backward]


def total(row: Sequence[float]) -> float:
    """A whole step, of `durations`."""
    return row[0] + sum(row[-3:])


def _casts(numel: int, group: Group, device: torch.device) -> list[float]:
    """Seconds an element, to float16 and back, as PyTorch's hook casts."""
    buffer = torch.randn(numel, device=device)

    def there(_: int) -> Tensor:
        return buffer.to(torch.float16).div_(group.size)

    half = there(0)
    seconds = []
    for run in (there, lambda _: buffer.copy_(half)):
        run(0)
        probe.agreed(group, device, [0.0])
        seconds.append(median([probe.timed(run, 0, device) for _ in range(5)]))
    return [spent / numel for spent in probe.agreed(group, device, seconds)]


# -- the network stack -------------------------------------------------------------------------------------------------


def measure_network(threads: int) -> dict[str, Any]:
    """Time of this group's collectives, and their processor time.

    Returns:
        `lines` (a `Line` for each collective), `latency` (`hooks.cost.Latency`), `processor` (seconds of all threads of
        a rank for each byte received), `waking` (seconds more that a short message takes where every core computes).
    """
    torch.set_num_threads(threads)
    group, cpu = Group(dist.group.WORLD), torch.device("cpu")
    found = probe.calibrate(group, cpu)
    rows = torch.zeros(group.size, max(1, MESSAGE // max(1, group.size - 1)), dtype=torch.uint8)
    received = torch.empty_like(rows)
    reduced = MESSAGE * group.size // (2 * max(1, group.size - 1))
    floats, halves = torch.zeros(reduced // 4), torch.zeros(reduced // 2, dtype=torch.float16)
    collectives: dict[str, Callable[[], Work]] = {
        "exchange": lambda: group.all_to_all(received, rows),
        "float32": lambda: group.all_reduce(floats),
        "float16": lambda: group.all_reduce(halves),
    }
    spent = probe.agreed(group, cpu, [_processor(run) / MESSAGE for run in collectives.values()])
    lines = {name: asdict(getattr(found, name)) for name in ("all_gather", "all_to_all", "all_reduce")}
    return {
        "lines": {name: {"alpha": line["alpha"], "beta": line["beta"]} for name, line in lines.items()},
        "latency": asdict(found.latency),
        "processor": dict(zip(collectives, spent, strict=True)),
        "waking": _waking(group, max(1, min(threads, (os.cpu_count() or 1) // group.size))),
    }


def _processor(run: Callable[[], Work]) -> float:
    """Seconds that this process's threads work, the kernel's part included."""
    run().wait()
    dist.barrier()
    begin = time.process_time()
    for _ in range(MESSAGES):
        run().wait()
    return (time.process_time() - begin) / MESSAGES


def _waking(group: Group, threads: int) -> float:
    """Seconds that a short exchange takes longer while `threads` of every rank compute: the scheduler lets a
    thread that wakes up wait until another one's slice is over."""
    cpu, rows = torch.device("cpu"), torch.zeros(group.size, probe.SHORT, dtype=torch.uint8)
    received, stop = torch.empty_like(rows), threading.Event()

    def compute() -> None:
        torch.set_num_threads(threads)
        batch, weights = torch.zeros(8, 1024), torch.zeros(1024, 1024)
        while not stop.is_set():
            torch.mm(batch, weights)

    def exchange(_: int) -> None:
        group.all_to_all(received, rows).wait()

    def seconds() -> float:
        exchange(0)
        probe.agreed(group, cpu, [0.0])
        return probe.agreed(
            group, cpu, [fmean(probe.timed(exchange, 0, cpu, probe.PAUSE) for _ in range(SHORT_MESSAGES))]
        )[0]

    idle = seconds()
    busy = threading.Thread(target=compute)
    busy.start()
    try:
        return max(0.0, seconds() - idle)
    finally:
        stop.set()
        busy.join()
