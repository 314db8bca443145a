"""The base of optimizers whose ranks exchange something else than gradients."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import __version__
from ..compress.feedback.store import FeedbackStore
from ..hooks.comm import handshake, pieces
from ..hooks.comm.between_steps import between_steps, undivided, within_step
from ..hooks.comm.untraced import untraced
from ..hooks.core.checkpoint import Checkpoint
from ..hooks.core.options import Options, check_dtypes, check_whole
from ..hooks.core.reducer import Reducer
from ..hooks.core.session import Session
from ..hooks.core.statistics import Counted, Statistics
from ..hooks.local_sgd.outer_sgd import fragments_of
from ..hooks.training.autograd_end import waited
from ..hooks.training.grad_scaler import LossScale, ScalerSync
from .flat_state import FlatState
from .groups import called, check_group
from .replicated import Replicas

#: The key of gradwire's part of a state_dict.
KEY = "gradwire"


class ExchangingOptimizer(Counted, torch.optim.Optimizer):
    """A torch optimizer whose `step` is a reduction through gradwire. `step` and `consolidated_state_dict` are
    collectives, and so is constructing it: ranks compare options and parameters, and start from the first rank's
    parameters.

    Gradients must be each rank's own: see `gradwire.optim.keep_gradients`. A parameter without a gradient counts as
    one with a gradient of zero, as other ranks may have one. Parameters that require no gradient when the optimizer is
    made are left alone.

    Args:
        params: those of torch's optimizers.
        defaults: defaults of each group's options.
        options: the options of the exchange.
        bucket_cap_mb: size of the pieces of the exchange, in MiB of float32.
        process_group: the ranks; by default all.
    """

    #: A parameter's state tensors, dtypes by name, and the names of those that differ between ranks.
    kept: ClassVar[Mapping[str, torch.dtype]]
    own: ClassVar[frozenset[str]] = frozenset()
    #: A GradScaler then calls `step`, which refuses it on all ranks, where it would skip it on some.
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None
    found_inf: Tensor
    #: None before the ranks have met, after `close`, and in a copy.
    _reducer: Reducer | None = None

    @torch.inference_mode(False)  # a step changes what is made here
    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        options: Options,
        bucket_cap_mb: float,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                f"{self._owner} needs torch.distributed: call torch.distributed.init_process_group() first"
            )
        self._ranks: Any = process_group or dist.group.WORLD
        self._options, self._bucket_cap_mb = options, bucket_cap_mb
        self._buckets: list[FlatState] = []
        self._trained: set[int] = set()  # ids of their parameters
        self._replicas: Replicas | None = None
        self._steps, self._statistics = 0, Statistics()
        problem: Exception | None = None
        device, made = torch.device("cpu"), []
        try:
            super().__init__(params, defaults)
            self._check()
            device = next(iter(self._named().values())).device
            made = self._made(0)
            choice = options.choice(options.warmup_steps)
            choice.codec.kernels(device).prepare(choice.codec, torch.float32, device)
            FeedbackStore(options.strategy).strategy.prepare(device)
        except Exception as error:  # the other ranks must hear of any error
            problem = error
        session = Session(self._owner, self._ranks, device, self._description, problem)
        self._feedback = FeedbackStore(options.strategy)
        scaler_sync = ScalerSync(LossScale(None), self._feedback)
        numel = sum(flat.bucket.numel for flat in made)
        self._reducer = Reducer(
            session, self._feedback, scaler_sync, self._statistics, options.seed, clean=False, numel=numel
        )
        self._begin(made)

    @property
    def _owner(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        if self._reducer is None:
            return super().__repr__()
        return f"{super().__repr__()}\n<{self._options.codec_text} by {self._options.exchange!r}, step {self._steps}>"

    def statistics(self) -> Statistics:
        """This rank's counts so far; within a step without a wait for what is in flight."""
        if not within_step(self):
            self._running().flush()
        return self._statistics.copied()

    @between_steps
    def close(self) -> None:
        """Release the thread and the connections. Nothing can follow."""
        if self._reducer is not None:
            self._reducer.flush()
        self._reducer = None

    @torch.inference_mode(False)
    @between_steps
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Torch's `add_param_group`; once the optimizer is made, a collective."""
        if self._reducer is None:  # the constructor's
            super().add_param_group(param_group)
            return
        session, groups = self._reducer.session, len(self.param_groups)
        problem: Exception | None = None
        added: list[FlatState] = []
        self._reducer.settle()
        session.agree("add_param_group()", self._steps)
        try:
            self._check_addition()
            super().add_param_group(param_group)
            self._check()
            added = self._made(groups)
        except Exception as error:
            problem = error
            del self.param_groups[groups:]
        sides = session.control.all_gather_object(handshake.side(self._description(), problem))
        if problem is not None:
            raise problem
        try:
            handshake.compare(sides, "Add equal groups of parameters on every rank")
        except ValueError:
            del self.param_groups[groups:]
            raise
        self._begin(added)

    # -- a step --------------------------------------------------------------------------------------------------------

    @untraced
    @torch.no_grad()
    @undivided
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all ranks, which each must call equally often.

        Args:
            closure: computes the loss and the gradients again, and returns the loss.

        Raises:
            RuntimeError: gradients are not each rank's own, or scaled; or another rank has failed or is gone.
                Parameters are unchanged.
            ValueError: ranks disagree; on every rank alike.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        reducer, number = self._running(), self._steps
        problem = self._problem()
        if problem is not None:
            reducer.session.pipeline.wait()
            reducer.session.refuse(problem)
            raise RuntimeError(f"gradwire: {problem}")
        step = reducer.begin(number, self._options.choice(number), self._hyperparameters())
        reducer.announce_step(step, self._buckets[0].bucket, 0, None)
        sent, futures = [], []
        for flat in self._buckets:  # each while those before it are in flight
            sent.append(self._encoded(flat))
            futures.append(reducer.reduce(step, flat.bucket, sent[-1]))
        reducer.end(step)
        pipeline = reducer.session.pipeline
        # For all means before the first is used: an error leaves every parameter unchanged.
        interruption = waited(pipeline.wait, lambda _: pipeline.failed)
        for future in futures:
            future.wait()
        step.reduced.clear()
        for flat, mean in zip(self._buckets, sent, strict=True):
            self._decoded(flat, self.param_groups[flat.group], mean)
        self._steps += 1
        if interruption is not None:
            raise interruption
        return loss

    @abstractmethod
    def _encoded(self, flat: FlatState) -> Tensor:
        """The tensor of a bucket to exchange in this step: flat float32, replaced by the ranks' mean."""

    @abstractmethod
    def _decoded(self, flat: FlatState, group: Mapping[str, Any], mean: Tensor) -> None:
        """Move the bucket's parameters, by the ranks' mean of `_encoded`."""

    def _hyperparameters(self) -> dict[str, str]:
        """Hyperparameters by name, for ranks to compare: schedulers, scripts and checkpoints change them."""
        return {
            f"{name} of parameter group {number}": str(float(value) if isinstance(value, int | float) else value)
            for number, group in enumerate(self.param_groups)
            for name, value in group.items()
            if name in self.defaults
        }

    def _problem(self) -> str | None:
        """The error message if this step cannot be made, else None."""
        if "found_inf" in self.__dict__:
            del self.grad_scale, self.found_inf  # the scaler would, after the step
            return (
                f"{self._owner} takes no GradScaler, which on each rank skips steps by that rank's own gradients: use "
                "torch.autocast with bfloat16, whose gradients need no scale"
            )
        for number, group in enumerate(self.param_groups):
            for place, p in enumerate(group["params"]):
                if p.grad is not None and p.numel() and id(p) not in self._trained:
                    return (
                        f"{called(group, number, place)} has a gradient, and required none when "
                        f"{self._owner} was made: let it require one before, or add it as a group later on"
                    )
                if p.grad is not None and p.grad.layout != torch.strided:
                    return (
                        f"{called(group, number, place)} has a gradient of layout {p.grad.layout}: build the "
                        "embedding with sparse=False"
                    )
        if self._replicas is None:
            self._replicas = Replicas(p for flat in self._buckets for p in flat.parameters)
        return self._replicas.problem(self._owner)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @between_steps
    def state_dict(self) -> dict[str, Any]:
        """Torch's state_dict, with this rank's residuals under "gradwire". It loads on the same rank of the same number
        of ranks: save one on each. Residuals that a rank keeps for its slice are folded into its own, here and in the
        running state: this run and a resumed one go on with the same bits."""
        self._running().settle()
        return {**super().state_dict(), KEY: self._checkpoint.of_rank()}

    @between_steps
    def consolidated_state_dict(self) -> dict[str, Any]:
        """A state_dict that is equal on all ranks, with the ranks' mean of tensors that differ: loads on any number of
        ranks, and nothing is lost. A collective.

        Raises:
            RuntimeError, ValueError: a rank is in another call, or at another step; or one is gone.
        """
        reducer = self._running()
        reducer.settle()
        session = reducer.session
        session.agree("consolidated_state_dict()", self._steps)
        saved = super().state_dict()
        state = saved["state"] = copy.deepcopy(saved["state"])  # torch's shows the tensors that the next step changes
        own = [(flat, name, flat.flat[name].clone()) for flat in self._buckets for name in sorted(self.own)]
        pieces.all_reduce(session.group, self._buckets[0].exchanged.device, [mean for *_, mean in own])
        for flat, name, mean in own:
            mean.div_(session.group.size)
            for index, part in zip(flat.names, flat.parts(mean), strict=True):
                state[int(index)][name] = part
        return {**saved, KEY: self._checkpoint.second_pass(session)}

    @torch.inference_mode(False)
    @between_steps
    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Go on from a checkpoint. Every rank must load one of the same step; parameters are left alone.

        Args:
            state_dict: from `state_dict` on this rank of as many, or from `consolidated_state_dict`.
            strict: False accepts, with a warning, a checkpoint that has no residuals for this rank.

        Raises:
            ValueError: the checkpoint is of another optimizer, rank, world size, codec or model. Nothing has changed
                then.
        """
        reducer, named = self._running(), self._named()
        if KEY not in state_dict:
            raise ValueError(f"this is not a checkpoint of {self._owner}: it lacks {KEY!r}")
        saved, vectors = self._checkpoint.read(state_dict[KEY], strict)
        for index, p in named.items():
            found = state_dict["state"].get(int(index), {})
            for name in self.kept:
                if name not in found or found[name].shape != p.shape:
                    has = tuple(found[name].shape) if name in found else "nothing"
                    raise ValueError(
                        f"the checkpoint is of another model: it has {has} as {name} of parameter {index}, whose shape "
                        f"is {tuple(p.shape)}"
                    )
        super().load_state_dict({key: value for key, value in state_dict.items() if key != KEY})
        reducer.settle()
        for flat in self._buckets:
            for name, views in flat.views.items():
                for index, view in zip(flat.names, views, strict=True):
                    view.copy_(state_dict["state"][int(index)][name])  # torch's own copy has the parameter's dtype
            self._show(flat)
        self._feedback.load(vectors)
        self._steps, self._options.seed = saved["step"], saved["seed"]
        reducer.forget(self._options.seed, (flat.bucket for flat in self._buckets))

    @property
    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(self._owner, self._options, self._feedback, self._named(), self._ranks, self._steps)

    # -- what there is -------------------------------------------------------------------------------------------------

    def _running(self) -> Reducer:
        if self._reducer is None:
            raise RuntimeError(
                f"this {self._owner} is closed, or a copy: make another, and load its state_dict() there"
            )
        return self._reducer

    def _named(self) -> dict[str, nn.Parameter]:
        """The trained parameters, by their numbers in a state_dict."""
        every = [p for group in self.param_groups for p in group["params"]]
        return {str(index): p for index, p in enumerate(every) if p.requires_grad and p.numel()}

    def _made(self, first: int) -> list[FlatState]:
        """Make buckets of the groups from `first` on."""
        every = self._named()
        made: list[FlatState] = []
        for number, group in list(enumerate(self.param_groups))[first:]:
            inside = {id(p) for p in group["params"]}
            named = {name: p for name, p in every.items() if id(p) in inside}
            for part in fragments_of(named, 1, self._bucket_cap_mb)[0] if named else ():
                made.append(FlatState(len(self._buckets) + len(made), number, part, self.kept))
        return made

    def _begin(self, buckets: list[FlatState]) -> None:
        """Add buckets that all ranks have made, and give all ranks the same parameters."""
        self._buckets += buckets
        begun = [p for flat in buckets for p in flat.parameters]
        self._trained |= {id(p) for p in begun}
        pieces.broadcast(self._running().session.group, self._buckets[0].exchanged.device, begun)
        for flat in buckets:
            self._show(flat)
        self._replicas = None

    def _show(self, flat: FlatState) -> None:
        """Set `state` to views of the bucket's tensors."""
        for place, p in enumerate(flat.parameters):
            self.state[p] = {name: views[place] for name, views in flat.views.items()}

    # -- what must be right --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        named = self._named()
        if not named:
            raise ValueError(f"{self._owner} was given no parameters that require gradients: there is nothing to train")
        check_dtypes(named)
        check_whole(named, self._owner)
        devices = dict.fromkeys(p.device for p in named.values())
        if len(devices) > 1:
            raise ValueError(
                f"parameters are on {', '.join(map(str, devices))}: {self._owner} takes parameters on one device"
            )
        for group in self.param_groups:
            self._check_group(group)
        self._options.check(dist.get_world_size(self._ranks))

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError for invalid options of a group."""
        check_group(group)

    def _check_addition(self) -> None:
        """Raise ValueError if no group can be added any more."""

    def _description(self) -> dict[str, Any]:
        groups = [
            f"{len(group['params'])} parameters with { ({k: v for k, v in group.items() if k in self.defaults}) }"
            for group in self.param_groups
        ]
        return {
            "optimizer": self._owner,
            "version": __version__,
            **self._options.describe(dist.get_world_size(self._ranks)),
            "bucket_cap_mb": self._bucket_cap_mb,
            "parameter groups": groups,
            "the parameters": handshake.describe_model(self._named(), ()),
        }
