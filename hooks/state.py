"""CompressState: what compression of one model's gradients needs from step to step."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import __version__
from ..compress.codec import DTYPES, Codec
from ..compress.feedback import ErrorFeedback, Slot, layout_numel
from ..compress.wire import WIRE_VERSION
from . import handshake
from .bucket import Bucket, strides_in_bucket
from .connection import Connection
from .exchange import Exchange
from .plan import REVIEW_EVERY, Choice, check_exchange, check_fallback, node_size
from .statistics import Statistics
from .trial import Trial

CHECKPOINT_FORMAT = 1

#: What belongs to a process and is left out of copies of a state.
OF_PROCESS = ("_connection", "_buckets", "_names", "_asked", "_current", "_trial", "_began")


class CompressState:
    """The state of `compress_hook` for one DDP model. Constructing it is a collective: every rank must, and with equal
    arguments, which are compared.

    Args:
        model: the `DistributedDataParallel` model, or what `torch.compile` made of it.
        codec: a codec, or a function of the step (counted from 0) that returns one, equal on all ranks.
        exchange: "gather", "two_pass", "union", "split", "dense", "hierarchical", or "auto": what is fastest for each
            bucket by `hooks.cost`, whose probe of the group takes a second or two when the first state is made; over
            Gloo some steps are then trained each way (`hooks.trial`). Measured times differ between runs, and so may
            decisions: name an exchange where runs must be repeatable.
        error_feedback: whether to keep what compression leaves out and add it to the next gradient. "auto" does so for
            codecs that contract (the deterministic ones); True makes stochastic codecs round to nearest.
        warmup_steps: this many first steps are dense.
        exclude: predicate `(name, parameter)`; parameters it is true of stay float32, inside the same messages.
        fallback: what "auto" sends where compression does not pay (a fast network, a small bucket): torch.float32,
            torch.bfloat16 (with error feedback), or None: it compresses always.
        topology: how ranks lie on nodes, for "auto" and "hierarchical", which compress between nodes only: ranks on
            each node, a two-dimensional DeviceMesh (nodes × ranks inside), "auto" (what torchrun says, over Gloo), or
            None.
        grad_scaler: the GradScaler in use, if any: residuals follow its scale, and those of a step that it skips
            because of an overflow are put back.
        process_group: used for the exchanges and nothing else. By default a Gloo group of the model's ranks is made,
            and dense buckets go in the model's own, as without a hook; for a model on GPUs whose own group is NCCL's,
            that one serves.
        seed: of stochastic rounding.

    Raises:
        TypeError, ValueError: an argument cannot work, here or on another rank, or the ranks disagree.
        RuntimeError: torch.distributed is not initialised, or a rank did not arrive within 60 s.
    """

    _connection: Connection | None
    _buckets: dict[int, Bucket]
    _names: dict[int, str]
    _asked: Choice | None  # this step's, as the user wants it
    _current: Choice  # and as a trial of it does
    _trial: Trial | None
    _began: float  # when its first bucket was ready

    def __init__(
        self,
        model: nn.Module,
        codec: Codec | Callable[[int], Codec],
        *,
        exchange: str = "auto",
        error_feedback: bool | str = "auto",
        warmup_steps: int = 0,
        fallback: torch.dtype | None = torch.float32,
        topology: Any = "auto",
        exclude: Callable[[str, nn.Parameter], bool] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "CompressState needs torch.distributed: call torch.distributed.init_process_group() first"
            )
        model = getattr(model, "_orig_mod", model)
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"model is a {type(model).__name__}, expected DistributedDataParallel: wrap the model in it first "
                "(FSDP reduces its gradients by itself and cannot use this hook)"
            )
        self.codec = codec
        self.exchange = exchange
        self.error_feedback = error_feedback
        self.warmup_steps = warmup_steps
        self.fallback = fallback
        self._topology = topology
        self.grad_scaler = grad_scaler
        self.seed = seed
        self._parameters = {clean_name(n): p for n, p in model.module.named_parameters() if p.requires_grad}
        self._device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        self._excluded = frozenset(n for n, p in self._parameters.items() if exclude is not None and exclude(n, p))
        self._step = 0
        self._scale = self._read_scale()
        self._feedback = ErrorFeedback(keep_previous=grad_scaler is not None)
        self._statistics = Statistics()
        self._model_group: dist.ProcessGroup | None = model.process_group
        self._given_group = process_group
        self._disconnect()
        problem: Exception | None = None
        try:
            self._check(model)
            choice = self._choice(0)
            for dtype in {p.dtype for p in self._parameters.values()}:
                choice.codec.kernels(self._device).prepare(choice.codec, dtype, self._device)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = error
        self._connect(problem)

    @property
    def step(self) -> int:
        """Synchronised backward passes so far."""
        return self._step

    @property
    def deciding(self) -> bool:
        """Whether "auto" still tries which is faster, to compress or not: over Gloo it does for some twenty steps."""
        self._flush()
        return self._trial is not None and self._trial.verdict is None

    def statistics(self) -> Statistics:
        """What this rank has done so far, as of now; call it between steps."""
        self._flush()
        return copy.deepcopy(self._statistics)

    def codec_at(self, step: int) -> Codec:
        """The codec of a step, as the user gave it."""
        codec = self.codec if isinstance(self.codec, Codec) else self.codec(step)
        if not isinstance(codec, Codec):
            raise TypeError(f"codec at step {step} is {codec!r}: expected a codec, such as gradwire.TopK(density=0.01)")
        return codec

    # -- one step, seen from DDP -------------------------------------------------------------------------------------

    def submit(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Queue a bucket: what `compress_hook` does. DDP calls it in the order of the buckets, equal on all ranks."""
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            raise TypeError("gradwire cannot compress sparse gradients: build the embedding with sparse=False")
        connection = self._connection or self._connect(None)  # none after `close`, or in a copy
        first, last, step = bucket.index() == 0, bucket.is_last(), self._step
        place = self._place(bucket, buffer)
        if first:
            self._follow(self._choice(step), connection)
        choice, began = self._current, time.perf_counter()
        scale = self._read_scale() if first else None
        if last:
            self._step += 1
            self._buckets = {index: b for index, b in self._buckets.items() if index <= place.index}
        # As DDP would: the lane's thread may have to wait for a core that backward is using.
        if connection.dense_group is not None and not self._is_due(place, choice, step):
            place.start(buffer, connection.dense_group)

        def job() -> Tensor:
            if buffer.is_cuda:
                buffer.record_stream(torch.cuda.current_stream(buffer.device))
            try:
                if first:
                    self._began = began
                    self._rescale(scale)
                    connection.announce(step, choice)
                self._reduce(connection, place, buffer, step, choice, first)
                if last:
                    self._end(connection)
            except Exception as error:
                where = f"step {step}, bucket {place.index}, rank {connection.group.rank} of {connection.group.size}"
                name = place.plan.exchange if place.plan is not None else choice.exchange
                raise RuntimeError(f"gradwire: {error} [{where}, {choice.codec}, {name}]") from error
            return buffer

        return connection.lane.submit(job)

    def _rescale(self, scale: float | None) -> None:
        if scale is not None and self._scale is not None and scale != self._scale:
            self._feedback.rescale(scale / self._scale)
        self._scale = scale

    def _reduce(
        self, connection: Connection, place: Bucket, buffer: Tensor, step: int, choice: Choice, first: bool
    ) -> None:
        clock = self._statistics.clock(place.index, buffer.device)
        compared = not first
        if not connection.planner.knows(choice):
            # Measuring takes all ranks: first make sure that they all mean this codec.
            if first:
                connection.compare(choice)
                compared = True
            connection.planner.learn(choice, place.numel)
        with clock("encode"):
            exchange = self._prepare(connection, place, choice, step)
            place.draw[1] = place.owner_draw[1] = step
            grad = place.gather(buffer)
            owned = [] if exchange.under_way else self._encode(place, exchange, grad)
        if not compared:
            # Only now, as the others' announcements came meanwhile: sizes that differ would abort, or hang.
            with clock("exchange"):
                connection.compare(choice)
        exchange.exchange(owned, place.owner_draw, clock)
        with clock("decode"):
            exchange.decode(grad, place.extra)
            if choice.exchange == "auto" and step % REVIEW_EVERY == REVIEW_EVERY - 1:
                place.union = exchange.union_of(grad) or place.union
            place.scatter(buffer)
        self._count(place, exchange)

    def _encode(self, place: Bucket, exchange: Exchange, grad: Tensor) -> list[Tensor]:
        """Returns the residuals of what this rank encodes for others."""
        assert place.plan is not None
        if not (place.plan.feedback and exchange.numel):
            exchange.encode(self._feedback.take(place.layout, grad), place.extra, None, place.draw)
            return []
        residual = self._feedback.residual(place.layout, grad.device)
        owned = self._feedback.owned(place.layout, exchange.owned_slices)
        self._feedback.remember(place.layout)
        exchange.encode(grad, place.extra, residual, place.draw)
        return owned

    @staticmethod
    def _is_due(place: Bucket, choice: Choice, step: int) -> bool:
        """Whether it is time to decide what serves a bucket: when its codec changes, and now and then."""
        return place.choice != choice or (choice.exchange == "auto" and step % REVIEW_EVERY == 0)

    def _prepare(self, connection: Connection, place: Bucket, choice: Choice, step: int) -> Exchange:
        """The exchange that serves a bucket."""
        plan = place.plan
        if plan is None or self._is_due(place, choice, step):
            plan, why = connection.planner.plan(choice, layout_numel(place.layout), place.union)
            place.choice = choice
            trial = "" if self._trial is None else str(self._trial)
            self._statistics.decisions[place.index] = f"{plan.exchange} of {plan.codec}: {why}{trial}"
        return place.prepare(plan, connection.planner.topology, self.seed)

    def _count(self, place: Bucket, exchange: Exchange) -> None:
        statistics = self._statistics
        statistics.elements += place.numel
        statistics.dense_bytes += 4 * place.numel
        statistics.payload_bytes += exchange.payload_bytes
        statistics.transfer_bytes += exchange.transfer_bytes

    def _end(self, connection: Connection) -> None:
        self._judge(connection, time.perf_counter() - self._began)
        self._statistics.steps += 1
        # A GradScaler waits for the GPU at every step anyway, and residuals must be put back before the next one.
        counts = [place.new_status(wait=self.grad_scaler is not None) for place in list(self._buckets.values())]
        self._statistics.skipped_entries += sum(skipped for skipped, _ in counts)
        if any(not_finite for _, not_finite in counts):
            self._statistics.nonfinite_steps += 1
            if self.grad_scaler is not None:
                self._feedback.undo()

    def _judge(self, connection: Connection, span: float) -> None:
        """Tell the trial what the step took. A collective at the end of its turns."""
        trial, asked, places = self._trial, self._asked, list(self._buckets.values())
        if trial is None or asked is None or trial.verdict is not None:
            return
        served = [(layout_numel(place.layout), place.union, place.plan) for place in places if place.plan is not None]
        trial.end_step(span, lambda: connection.planner.rival(asked, served), connection.agreed)
        if trial.verdict is not None:
            for place in places:
                place.choice = None  # decide anew, by the verdict

    def _place(self, bucket: dist.GradBucket, buffer: Tensor) -> Bucket:
        index, parameters = bucket.index(), bucket.parameters()
        place = self._buckets.get(index)
        if place is None or not place.serves(parameters, buffer):
            slots = []
            for parameter, grad in zip(parameters, bucket.gradients(), strict=True):
                name = self._names.get(id(parameter))
                if name is None:
                    raise ValueError(
                        f"bucket {index} holds a parameter of shape {tuple(parameter.shape)} that this state does not "
                        "know: it was made for another model; make a CompressState for each model"
                    )
                start = int(grad.storage_offset()) - int(buffer.storage_offset())
                slots.append(Slot(name, start, tuple(parameter.shape), strides_in_bucket(parameter)))
            place = self._buckets[index] = Bucket(index, parameters, tuple(slots), self._excluded, buffer)
        return place

    def _follow(self, choice: Choice, connection: Connection) -> None:
        """The next step is of this choice, and goes the way that a trial wants."""
        if choice != self._asked:
            self._asked = self._current = choice
            tried = connection.lane.threaded and connection.planner.undecided(choice)
            self._trial = Trial() if tried else None
        if self._trial is not None and self._trial.way != self._current.way:
            self._current = replace(choice, way=self._trial.way)

    def _choice(self, step: int) -> Choice:
        codec = self.codec_at(step)
        feedback = codec.default_feedback if self.error_feedback == "auto" else bool(self.error_feedback)
        feedback = feedback and not codec.lossless
        if feedback:
            codec = codec.with_feedback()
        check_exchange(self.exchange, codec)
        return Choice(codec, "dense" if step < self.warmup_steps else self.exchange, feedback)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state: tensors, numbers and strings only, so `torch.load` reads it with
        `weights_only=True`. It loads on the same rank of the same number of ranks; save one for each rank.

        Residuals that an owner keeps for all ranks are folded into its own, here and in the running state, so that
        going on and loading give the same.
        """
        self._flush()
        self._feedback.fold()
        return self._export(self._feedback.by_name(), *self._world())

    def consolidated_state_dict(self) -> dict[str, Any]:
        """The mean of the residuals over the ranks, equal on all: loads on any number of ranks, and nothing is lost.

        A collective: every rank must call it.
        """
        self._flush()
        group = (self._connection or self._connect(None)).group
        self._feedback.fold()
        residuals = self._feedback.by_name()
        for name in sorted(residuals):
            group.all_reduce(residuals[name]).wait()
            residuals[name] /= group.size
        return self._export(residuals, -1, -1)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint. Every rank must load one of the same step; the next step compares them.

        Raises:
            ValueError: it is of another format, rank, world size, codec or model. Nothing has changed then.
        """
        expected = self._export({}, *self._world())
        missing = expected.keys() - state_dict.keys()
        if missing:
            raise ValueError(f"this is not a checkpoint of CompressState: it lacks {', '.join(sorted(missing))}")
        consolidated = state_dict["rank"] == -1
        for key in ("format", "codec", *(() if consolidated else ("world_size", "rank"))):
            if state_dict[key] != expected[key]:
                raise ValueError(
                    f"the checkpoint has {key} {state_dict[key]}, this state {expected[key]}"
                    + ("; save consolidated_state_dict() to change ranks" * (key in ("rank", "world_size")))
                )
        for name, residual in state_dict["residuals"].items():
            parameter = self._parameters.get(name)
            if parameter is None or parameter.shape != residual.shape:
                mine = "no such parameter" if parameter is None else f"shape {tuple(parameter.shape)}"
                raise ValueError(
                    f"the checkpoint is of another model: it has {name!r} of shape {tuple(residual.shape)}, "
                    f"this model {mine}"
                )
        self._flush()
        self._feedback.load(state_dict["residuals"])
        self._step = state_dict["step"]
        scale = 1.0 if state_dict["scale"] is None else state_dict["scale"]
        self._scale = scale if self.grad_scaler is not None else None
        if self.grad_scaler is None:
            self._feedback.rescale(1 / scale)
        self.seed = state_dict["seed"]
        for place in self._buckets.values():
            place.plan = place.choice = None  # draws and predictions start anew

    def _export(self, residuals: dict[str, Tensor], rank: int, world_size: int) -> dict[str, Any]:
        return {
            "format": CHECKPOINT_FORMAT,
            "rank": rank,
            "world_size": world_size,
            "codec": self._codec_text(),
            "step": self._step,
            "seed": self.seed,
            "scale": self._scale,
            "residuals": residuals,
        }

    def __getstate__(self) -> dict[str, Any]:
        self._flush()
        kept = self.__dict__.copy()
        for name in OF_PROCESS:
            kept.pop(name, None)
        # As in DDP's own copies, which are of the default group.
        kept["_model_group"] = kept["_given_group"] = None
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._disconnect()

    # -- other ranks -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for what is queued, then give back the thread and the connections. The next use makes new ones."""
        self._flush()
        self._disconnect()

    def _disconnect(self) -> None:
        for name in OF_PROCESS:
            self.__dict__.pop(name, None)
        self._connection = self._asked = self._trial = None
        self._buckets = {}
        self._names = {id(p): name for name, p in self._parameters.items()}

    def _connect(self, problem: Exception | None) -> Connection:
        """Meet the other ranks, who hear of the problem that this one has, if it has any. A collective."""
        self._connection = connection = Connection(
            self._model_group or dist.group.WORLD,
            self._given_group,
            self._device,
            {} if problem is not None else self._description(),
            problem,
            self._topology,
            self.fallback,
            probes=self.exchange == "auto",
            ahead=self.grad_scaler is None,  # a step that may be undone has to be remembered
        )
        self._follow(self._choice(self._step), connection)
        return connection

    def _world(self) -> tuple[int, int]:
        """This rank, and how many there are."""
        group: Any = self._model_group or dist.group.WORLD
        return dist.get_rank(group), dist.get_world_size(group)

    def _description(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "wire format": WIRE_VERSION,
            "codec": self._codec_text(),
            "exchange": self.exchange,
            "error_feedback": self.error_feedback,
            "warmup_steps": self.warmup_steps,
            "fallback": str(self.fallback),
            "ranks a node": node_size(self._topology, self._world()[1]),
            "seed": self.seed,
            "grad_scaler": self.grad_scaler is not None,
            "step": self._step,
            "the model's parameters": handshake.describe_model(self._parameters, self._excluded),
        }

    def _codec_text(self) -> str:
        return str(self.codec) if isinstance(self.codec, Codec) else f"a function of the step, at 0 {self.codec_at(0)}"

    def _check(self, model: DistributedDataParallel) -> None:
        if not (isinstance(self.codec, Codec) or callable(self.codec)):
            raise TypeError(
                f"codec={self.codec!r}: expected a codec, such as TopK(density=0.01), or a function of the step"
            )
        if not (isinstance(self.error_feedback, bool) or self.error_feedback == "auto"):
            raise ValueError(f"error_feedback={self.error_feedback!r}: expected True, False or 'auto'")
        if not isinstance(self.warmup_steps, int) or self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps!r}: expected a number of steps, 0 or more")
        check_fallback(self.fallback)
        node_size(self._topology, dist.get_world_size(model.process_group))
        if not isinstance(self.seed, int):
            raise TypeError(f"seed={self.seed!r}: expected an integer, equal on all ranks")
        for name, parameter in self._parameters.items():
            if parameter.dtype not in DTYPES:
                raise TypeError(
                    f"parameter {name!r} is {parameter.dtype}: gradwire compresses float32, float16, bfloat16"
                )
        for name, module in model.module.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise TypeError(f"module {name!r} makes sparse gradients: build it with sparse=False")

    def _flush(self) -> None:
        if self._connection is not None:
            self._connection.lane.flush()

    def _read_scale(self) -> float | None:
        return None if self.grad_scaler is None else float(self.grad_scaler.get_scale())


def clean_name(name: str) -> str:
    """A parameter's name without what DDP and torch.compile put in front."""
    return name.replace("_orig_mod.", "").removeprefix("module.")
