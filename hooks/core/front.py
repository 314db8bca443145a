"""The lifecycle around the reducer, once for all interfaces: ranks meet, steps begin and end, what is in flight is
waited for, and what is kept between steps is counted, thrown away, saved and loaded.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ... import __version__
from ...compress.deprecated import former_property
from ...compress.feedback.base import Feedback
from ...compress.feedback.store import FeedbackStore
from ..comm.between_steps import undivided, within_step
from ..training.autograd_end import AtEnd, in_backward, waited
from ..training.grad_scaler import LossScale, ScalerSync
from .bucket import Bucket
from .checkpoint import Checkpoint, Vectors
from .discarded import DiscardedMeans
from .options import Options
from .reducer import Reducer, Step
from .session import Session
from .sparse_gradient import SparseGradient
from .statistics import WIDTH, Statistics


class Front:
    """An interface to the reducer. It says which buckets it has made (`_made_buckets`), what ranks must have in common
    (`_description`), where the means of a step go, and what else becomes of a step that is thrown away (`_dropped`).
    """

    #: The class or function that the user calls, for messages, and the message once it is closed.
    _owner: str
    _closed_text: ClassVar[str] = "this is closed"
    _group: Any
    _options: Options
    _device = torch.device("cpu")
    _feedback: FeedbackStore
    _scaler_sync: ScalerSync
    _statistics: Statistics
    #: None before the ranks have met, after `close`, and in a copy.
    _reducer: Reducer | None = None
    _step = 0

    def __str__(self) -> str:
        """The state and its counts so far; waits for nothing."""
        head = (textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in repr(self).splitlines())
        return "\n".join([*head, str(self._statistics)])

    def statistics(self) -> Statistics:
        """This rank's counts so far; within a step without a wait for what is in flight."""
        if not within_step(self):
            self._flush()
        return self._statistics.copied()

    # -- other ranks -------------------------------------------------------------------------------------------------

    def _keep(self, strategy: Feedback | None, loss_scale: LossScale | None = None) -> None:
        """Keep by this strategy what lies between steps: nothing so far."""
        loss_scale = loss_scale or LossScale(None)
        self._feedback = FeedbackStore(strategy, keep_previous=loss_scale.skips)
        self._scaler_sync = ScalerSync(loss_scale, self._feedback)

    @torch.inference_mode(False)  # a step changes what is made here
    def _meet(self, problem: Exception | None, **session: Any) -> Session:
        """Make a session. A collective, in which the other ranks hear of this one's problem, if any.

        Args:
            session: further arguments of `Session`.
        """
        return Session(self._owner, self._group, self._device, self._description, problem, **session)

    @torch.inference_mode(False)
    def _meet_to_reduce(
        self, problem: Exception | None, *, numel: int, clean: bool, speaks: bool = True, **session: Any
    ) -> Reducer:
        """`_meet`, and make a reducer of the session.

        Args:
            numel, clean, speaks: `Reducer`'s.
        """
        met = self._meet(problem, entropy_coding=self._options.entropy_coding, **session)
        parts = self._feedback, self._scaler_sync, self._statistics
        self._reducer = Reducer(met, *parts, self._options.seed, clean=clean, numel=numel, speaks=speaks)
        return self._reducer

    def _description(self) -> dict[str, Any]:
        """Values that must be equal on all ranks, by the names for messages."""
        return {"version": __version__, **self._options.describe(dist.get_world_size(self._group))}

    def _running(self) -> Reducer:
        if self._reducer is None:
            raise RuntimeError(self._closed_text)
        return self._reducer

    @property
    def _session(self) -> Session:
        """The tie to the other ranks."""
        return self._running().session

    def _flush(self) -> None:
        """Wait for queued work."""
        if self._reducer is not None:
            self._reducer.flush()

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._reducer is not None:
            self._options.check_optimizer(optimizer)

    # -- a step ------------------------------------------------------------------------------------------------------

    def _await_means(self, futures: Iterable[torch.futures.Future[Tensor]] = ()) -> BaseException | None:
        """Wait for what is in flight. Returns an exception of a signal's handler, to be raised once means are used.

        Args:
            futures: of the means; on a GPU, later kernels on this stream wait for them.
        """
        pipeline = self._session.pipeline
        interruption = waited(pipeline.wait, lambda _: pipeline.failed)
        for future in futures:
            future.wait()
        return interruption

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _made_buckets(self) -> Iterable[Bucket | SparseGradient]:
        """The buckets so far."""
        raise NotImplementedError

    @property
    def _checkpoint(self) -> Checkpoint:
        """The checkpoint of the state as it is now."""
        raise NotImplementedError

    def _resume(self, saved: Mapping[str, Any], vectors: Vectors | None) -> None:
        """Go on from a checkpoint that has been read, with nothing in flight; None: residuals stay."""
        if vectors is not None:
            self._checkpoint.load(saved, vectors)
        self._step = saved["step"]
        self._options = replace(self._options, seed=saved["seed"])
        if self._reducer is not None:
            self._reducer.forget(self._options.seed, self._made_buckets())


class BackwardFront(Front):
    """An interface whose steps are backward passes: a step begins with the first gradients of a pass, and its means are
    there when the pass ends."""

    _in_step = in_backward
    _discarded: DiscardedMeans
    #: The step in progress, from its first gradients to its last.
    _open: Step | None = None

    @property
    def step(self) -> int:
        """Synchronised backward passes so far."""
        return self._step

    @property
    def tuning(self) -> bool:
        """True while "auto" times steps with and without compression: for dozens of steps."""
        if not within_step(self):
            self._flush()
        return self._reducer is not None and self._reducer.controller.tuning

    deciding = former_property("deciding", "tuning")

    def _begin(self, reducer: Reducer) -> Step:
        self._open = reducer.begin(self._step, self._options.choice(self._step))
        return self._open

    def _queue_end(self, step: Step) -> bool:
        """Have `_ended` or `_discard` called at the end of the backward pass. Returns False where none runs."""
        return AtEnd(partial(self._ended, step), partial(self._discard, step)).queue()

    def _close_step(self, step: Step, reducer: Reducer) -> None:
        """End a step whose buckets have all been submitted."""
        self._open, self._step = None, step.number + 1
        reducer.end(step)

    def _ended(self, step: Step) -> None:
        """The backward pass of the step's first gradients has ended."""
        raise NotImplementedError

    @undivided
    def _discard(self, step: Step) -> None:
        """Give up a step: its backward pass has raised, here or on the pipeline. Its means return to the residuals."""
        if step is self._open:
            self._open, self._step = None, step.number + 1
            if self._reducer is not None:
                self._reducer.session.raised(step.number, step.names)
        self._dropped()
        if self._reducer is not None:
            self._discarded.discard(step, self._reducer.session.pipeline)

    def _dropped(self) -> None:
        """A step is given up: forget what is known of it."""
