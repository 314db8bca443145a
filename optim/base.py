"""The base of optimizers whose ranks exchange something else than gradients."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compress.feedback.store import FeedbackStore
from ..hooks.comm import handshake, pieces
from ..hooks.comm.between_steps import between_steps, undivided
from ..hooks.comm.untraced import untraced
from ..hooks.core.bucket import Bucket
from ..hooks.core.checkpoint import MEAN, Checkpoint, Vectors
from ..hooks.core.front import Front
from ..hooks.core.options import Options, check_dtypes, check_whole
from ..hooks.core.reducer import Reducer
from ..hooks.core.statistics import Statistics
from ..hooks.local_sgd.outer_sgd import fragments_of
from ..hooks.training.loaded_values import parameters_of, values_kept
from .flat_state import FlatState
from .groups import called, check_group
from .replicated import Replicas

#: The key of gradwire's part of a state_dict.
KEY = "gradwire"


class ExchangingOptimizer(Front, torch.optim.Optimizer):
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
    #: The step of the checkpoint loaded last, if its residuals are the ranks' means.
    _mean_step: int | None = None

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
        self._group: Any = process_group or dist.group.WORLD
        self._options, self._bucket_cap_mb = options, bucket_cap_mb
        self._buckets: list[FlatState] = []
        self._trained: set[int] = set()  # ids of their parameters
        self._replicas: Replicas | None = None
        self._statistics = Statistics()
        problem: Exception | None = None
        made: list[FlatState] = []
        try:
            super().__init__(params, defaults)
            self._check()
            self._device = device = next(iter(self._named().values())).device
            made = self._made(0)
            choice = options.choice(options.warmup_steps)
            choice.codec.kernels(device).prepare(choice.codec, torch.float32, device)
            FeedbackStore(options.strategy).strategy.prepare(device)
        except Exception as error:  # the other ranks must hear of any error
            problem = error
        self._keep(options.strategy)
        self._meet_to_reduce(problem, clean=False, numel=sum(flat.bucket.numel for flat in made))
        self._begin(made)

    @property
    def _owner(self) -> str:  # type: ignore[override]
        return type(self).__name__

    @property
    def _closed_text(self) -> str:  # type: ignore[override]
        return f"this {self._owner} is closed, or a copy: make another, and load its state_dict() there"

    def __repr__(self) -> str:
        if self._reducer is None:
            return super().__repr__()
        return f"{super().__repr__()}\n<{self._options.codec_text} by {self._options.exchange!r}, step {self._step}>"

    def statistics(self) -> Statistics:
        """This rank's counts so far; within a step without a wait for what is in flight."""
        self._running()
        return super().statistics()

    @between_steps
    def close(self) -> None:
        """Release the thread and the connections. Nothing can follow."""
        self._flush()
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
        session.agree("add_param_group()", self._step)
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
        reducer, number = self._running(), self._step
        problem = self._adopt() or self._problem()
        if problem is not None:
            reducer.session.pipeline.wait()
            reducer.session.refuse(problem)
            raise RuntimeError(f"gradwire: {problem}")
        step = reducer.begin(number, self._options.choice(number), self._hyperparameters())
        reducer.announce_step(step, self._buckets[0].bucket)
        sent, futures = [], []
        for flat in self._buckets:  # each while those before it are in flight
            sent.append(self._encoded(flat))
            futures.append(reducer.reduce(step, flat.bucket, sent[-1]))
        reducer.end(step)
        interruption = self._await_means(futures)  # before the first is used: an error leaves all parameters unchanged
        step.reduced.clear()
        for flat, mean in zip(self._buckets, sent, strict=True):
            self._decoded(flat, self.param_groups[flat.group], mean)
        self._step += 1
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
        of ranks: save one on each. A resumed run goes on with the same bits, and saving changes nothing."""
        self._adopted()
        return {**super().state_dict(), KEY: self._checkpoint.of_rank()}

    @between_steps
    def consolidated_state_dict(self) -> dict[str, Any]:
        """A state_dict that is equal on all ranks, with the ranks' mean of tensors that differ: loads on any number of
        ranks, and nothing is lost. A collective.

        Raises:
            RuntimeError, ValueError: a rank is in another call, or at another step; or one is gone.
        """
        session = self._adopted().session
        session.agree("consolidated_state_dict()", self._step)
        saved = super().state_dict()
        state = saved["state"] = copy.deepcopy(saved["state"])  # torch's shows the tensors that the next step changes
        own = [(flat, name, flat.flat[name].clone()) for flat in self._buckets for name in sorted(self.own)]
        pieces.all_reduce(session.group, self._buckets[0].exchanged.device, [mean for *_, mean in own])
        for flat, name, mean in own:
            mean.div_(session.group.size)
            for index, part in zip(flat.names, flat.parts(mean), strict=True):
                state[int(index)][name] = part
        return {**saved, KEY: self._checkpoint.mean_over_ranks(session)}

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
        self._running()
        named = self._named()
        if KEY not in state_dict:
            raise ValueError(
                f"this is not a checkpoint of {self._owner}: it lacks {KEY!r}, which torch.distributed.checkpoint's "
                "get_optimizer_state_dict() leaves out: save what state_dict() or consolidated_state_dict() returns"
            )
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
        with values_kept(self):  # torch's copies have the parameter's dtype
            super().load_state_dict({key: value for key, value in state_dict.items() if key != KEY})
        self._adopted()
        self._resume(saved, vectors)

    def _resume(self, saved: Mapping[str, Any], vectors: Vectors | None) -> None:
        super()._resume(saved, vectors)
        self._mean_step = self._step if vectors is not None and MEAN in saved["residuals"] else None

    def _made_buckets(self) -> list[Bucket]:
        return [flat.bucket for flat in self._buckets]

    def shared(self) -> dict[str, Any]:
        """The part of a checkpoint that the other ranks get from `hvd.broadcast_optimizer_state`, besides `state`.
        Residuals are a rank's own, but means that have just been loaded are everybody's."""
        self._adopted()
        means = self._feedback.everything() if self._mean_step == self._step else {}
        return self._checkpoint.export(MEAN, means)

    def follow_broadcast(self, shared: Mapping[str, Any]) -> None:
        """Take over `shared` of the root; the root does so too, as ranks compare how often they have loaded."""
        self._adopted()
        saved, vectors = self._checkpoint.read(shared, True)
        self._resume(saved, vectors if any(vectors.values()) else None)

    @property
    def _checkpoint(self) -> Checkpoint:
        named = self._named()
        return Checkpoint(self._owner, self._options, self._feedback, named, self._group, self._step, zeros=named)

    # -- what there is -------------------------------------------------------------------------------------------------

    def _named(self) -> dict[str, nn.Parameter]:
        """The trained parameters, by their numbers in a state_dict."""
        every: list[Any] = parameters_of(self)
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
        pieces.broadcast(self._session.group, self._buckets[0].exchanged.device, begun)
        self._adopt()
        self._replicas = None

    def _adopt(self) -> str | None:
        """Make `state` show the buckets' tensors, with the values of whatever has been put there instead: scripts,
        trainers and broadcasts replace a state's tensors. What is missing is zero, as in a fresh optimizer.

        Returns the error message if a value does not fit, else None; nothing has changed then.
        """
        replaced = [(flat, *found) for flat in self._buckets for found in flat.replaced(self.state)]
        if not replaced:
            return None
        own = {flat.untyped_storage().data_ptr() for bucket in self._buckets for flat in bucket.flat.values()}
        taken: list[Tensor | None] = []
        for flat, place, name, found in replaced:
            p = flat.parameters[place]
            try:
                # `as_tensor` of a tensor would move it to the default device.
                values = (
                    found if found is None or isinstance(found, Tensor) else torch.as_tensor(found, device=p.device)
                )
                values = None if values is None else values.detach()
            except Exception:  # of something that is no number
                values = torch.empty(0, device="meta")
            if values is not None and (values.shape != p.shape or values.is_meta):
                has = f"a tensor of shape {tuple(values.shape)}" if isinstance(found, Tensor) else repr(found)
                return (
                    f"state[parameter {flat.names[place]}][{name!r}] has been replaced by {has}, where {self._owner} "
                    f"keeps one of shape {tuple(p.shape)}"
                )
            # It may show another parameter's part, which is about to change.
            shared = values is not None and values.untyped_storage().data_ptr() in own
            taken.append(values.clone() if shared and values is not None else values)
        for (flat, place, name, _), values in zip(replaced, taken, strict=True):
            flat.take(place, name, values)
            p = flat.parameters[place]
            self.state[p] = {**self.state.get(p, {}), name: flat.views[name][place]}
        return None

    def _adopted(self) -> Reducer:
        """The reducer, with `state` as of now. Raises ValueError if a value there does not fit."""
        reducer = self._running()
        reducer.settle()
        problem = self._adopt()
        if problem is not None:
            raise ValueError(problem)
        return reducer

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
        self._options.check(dist.get_world_size(self._group))

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
            **super()._description(),
            "bucket_cap_mb": self._bucket_cap_mb,
            "parameter groups": groups,
            "the parameters": handshake.describe_model(self._named(), ()),
        }
