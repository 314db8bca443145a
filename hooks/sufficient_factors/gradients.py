"""`SufficientFactors`: exact gradients of linear layers, exchanged as their factors."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from ..comm.between_steps import between_steps, undivided
from ..comm.untraced import untraced
from ..core.front import Front
from ..core.report import tell
from ..core.session import Session
from ..core.statistics import Statistics, fewer
from ..training.autograd_end import AtEnd, current_pass, in_backward, raise_at_end
from ..training.weak_method import weakly
from .layer import Call, Factors, Layer
from .linear import FactorLinear, owners
from .selection import chosen_modules, describe

#: Of each model that has one.
_of_model: weakref.WeakKeyDictionary[nn.Module, SufficientFactors] = weakref.WeakKeyDictionary()


class SufficientFactors(Front):
    """Exchanges gradients of linear layers' weights as their factors, exactly (Poseidon, Zhang et al., ATC 2017).

    The gradient of a weight [out, in] over b samples is dyᵀ x, of the output's gradient [b, out] and the input [b, in].
    Where b is small beside the layer, these take fewer bytes than the gradient. Every rank gathers all ranks' factors
    and computes the same product, so that means agree bit for bit. A step whose factors would take more bytes than a
    dense ring all-reduce sends gradients instead.

    Make it before `DistributedDataParallel` wraps the model, which then leaves these weights alone, with any
    communication hook or none. The weights of the first rank become everybody's, as in DDP. Under DDP passes in
    `no_sync()` exchange nothing; without DDP use the method of that name here. `weight.grad` holds the mean when
    backward returns. Constructing it is a collective.

    `statistics().decisions` has the last exchange of each weight, from the model's last layer to its first.

    Args:
        model: the model, not wrapped.
        modules: names of `nn.Linear` modules, with `*` for any part; None: all for which `rows` samples pay at least
            twofold.
        rows: samples a rank of a step, for `modules=None`: batch, times sequence where the layer sees each token.
        process_group: the ranks, in a group for this alone; by default one is made of all.

    Raises:
        TypeError, ValueError: an argument is invalid, here or on another rank, or the ranks disagree.
        RuntimeError: torch.distributed is not initialised, or a rank did not arrive within 60 s.
    """

    _owner, _in_step = "SufficientFactors", in_backward

    @torch.inference_mode(False)  # a step changes what is made here
    def __init__(
        self,
        model: nn.Module,
        modules: Collection[str] | None = None,
        *,
        rows: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "SufficientFactors needs torch.distributed: call torch.distributed.init_process_group() first"
            )
        group = dist.group.WORLD if process_group is None else process_group
        assert group is not None
        first = next(iter(model.parameters()), None) if isinstance(model, nn.Module) else None
        self._device = torch.device("cpu") if first is None else first.device
        if process_group is None and self._device.type == "cuda":
            # Where a rank does not use a layer, its collectives come later among DDP's than another rank's.
            process_group = dist.new_group()
        problem: Exception | None = None
        chosen: dict[str, nn.Linear] = {}
        try:
            if model in _of_model:
                raise ValueError(
                    f"the model has {_of_model[model]!r} already: name all layers at once, or close() it first"
                )
            chosen = chosen_modules(model, modules, rows, dist.get_world_size(group))
        except (TypeError, ValueError) as error:  # the other ranks must hear of it
            problem = error
        self._described = {} if problem else describe(chosen, self._device)
        self._group, self._statistics = group, Statistics()
        self._met = self._meet(problem, given=process_group)
        self._syncs, self._under_ddp, self._open = True, False, False
        self._kept: dict[Layer, None] = {}
        #: In the order in which backward is likely to reach them, which all ranks must start them in.
        self._layers: list[Layer] = []
        self._modules: list[weakref.ref[nn.Linear]] = []
        self._handles: list[Any] = []
        for name, module in reversed(chosen.items()):
            weight: Any = module.weight
            layer = Layer(f"{name}.weight".removeprefix("."), weight, self._met)
            dist.broadcast(weight.detach(), self._met.group.ranks[0], group)
            # By number: the hook of a weight that led back to the weight would keep it for ever.
            refuse = partial(weakly(self._refuse), len(self._layers))
            self._handles.append(weight.register_post_accumulate_grad_hook(refuse))
            module.__class__ = FactorLinear
            owners[module] = layer, self
            self._layers.append(layer)
            self._modules.append(weakref.ref(module))
        self._started = 0
        self._ignore(model, chosen)
        self._handles.append(model.register_forward_hook(watch_outputs))
        _of_model[model] = self

    def __repr__(self) -> str:
        return f"<SufficientFactors of {', '.join(layer.name for layer in reversed(self._layers))}, step {self._step}>"

    @property
    def _session(self) -> Session:
        return self._met

    def _description(self) -> dict[str, Any]:
        return self._described

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes of forward passes in here add to the gradients of this rank alone, until one outside
        exchanges them all. For models without DDP, which has a `no_sync` of its own."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    @between_steps
    def close(self) -> None:
        """Give the layers back, and end the threads. DDP goes on to leave their weights alone: wrap the model again.
        Every rank must close after the same step."""
        for handle in self._handles:
            handle.remove()
        for module in filter(None, (reference() for reference in self._modules)):
            owners.pop(module, None)
            module.__class__ = nn.Linear
        for model in [model for model, factors in _of_model.items() if factors is self]:
            ignored = {layer.name for layer in self._layers}
            before: Any = model._ddp_params_and_buffers_to_ignore
            kept: Any = [name for name in before if name.removeprefix(".") not in ignored]
            model._ddp_params_and_buffers_to_ignore = kept
            del _of_model[model]
        self._met.pipeline.flush()
        self._met.pipeline.end()

    @staticmethod
    def _ignore(model: nn.Module, chosen: dict[str, nn.Linear]) -> None:
        # DDP names a parameter of the model itself with a dot in one place, and without in another.
        names = [f"{name}.weight" for name in chosen] + ["weight"] * ("" in chosen)
        before: Any = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*before, *names])

    # -- forward -----------------------------------------------------------------------------------------------------

    def call(self, layer: Layer) -> Call:
        """Note a forward pass through a layer."""
        call = Call(self.syncs())
        layer.waiting.add(call)
        return call

    def syncs(self) -> bool:
        """True if the backward pass of the forward pass that runs now exchanges gradients."""
        ddp = DistributedDataParallel._active_ddp_module
        if ddp is not None:
            self._under_ddp = True
            if getattr(ddp._join_config, "enable", False):
                raise RuntimeError("SufficientFactors cannot wait for ranks that have joined: leave out DDP.join()")
            self._syncs = bool(ddp.require_backward_grad_sync)
        elif self._under_ddp and current_pass() == -1:  # past DDP, which would not exchange gradients either
            return False
        return self._syncs

    # -- backward ----------------------------------------------------------------------------------------------------

    @undivided
    def begin(self) -> None:
        """In a backward pass that exchanges gradients: begin the step, unless it has begun."""
        if not self._open:
            if self._kept:
                raise RuntimeError("one backward pass over forward passes inside and outside of no_sync()")
            self._open = AtEnd(self._ended, self._raised).queue()
            self._met.begin()
            for layer in self._layers:
                if layer.weight.device != self._device:
                    raise RuntimeError(
                        f"{layer.name!r} has moved from {self._device} to {layer.weight.device}: move the model first, "
                        "and then make SufficientFactors"
                    )
                layer.before.note(layer.weight.grad)

    @undivided
    def take(self, layer: Layer, call: Call, factors: Factors) -> bool:
        """Take factors of a layer's gradient; False: compute it here, as in a pass that exchanges nothing."""
        layer.waiting.discard(call)
        if not (call.syncs or self._open):
            if not self._kept:
                AtEnd(self._kept_ended, self._kept.clear).queue()
            if layer not in self._kept:
                self._kept[layer] = None
                layer.begin_kept()
            layer.keep(factors)
            return False
        self.begin()
        layer.find(factors)
        while self._started < len(self._layers):
            layer = self._layers[self._started]
            if not layer.found or layer.waiting:
                break
            self._start(layer)
        return True

    def _start(self, layer: Layer, raised: bool = False) -> None:
        self._started += 1
        stages = layer.reduce(self._step, layer.contribution(raised))
        layer.future = self._met.pipeline.start(stages)

    def _end_step(self, raised: bool) -> None:
        for layer in self._layers[self._started :]:
            self._start(layer, raised)
        self._met.pipeline.submit(self._post_receives)
        self._started, self._open = 0, False
        self._step += 1

    @undivided
    def _ended(self) -> None:
        """At the end of a pass: wait for the means, and put them into place."""
        self._end_step(raised=False)
        try:
            interruption = self._await_means()
        except Exception as error:
            raise RuntimeError(f"gradwire: {error} [step {self._step - 1}, SufficientFactors]") from error
        lost = next((layer for layer in self._layers if layer.lost is not None), None)
        if lost is not None:
            self._forget()
            raise RuntimeError(
                f"gradwire: the backward pass of rank {lost.lost} raised an error before it had sent its part of the "
                f"gradient of {lost.name!r}: see that rank's log [step {self._step - 1}, SufficientFactors]"
            )
        statistics = self._statistics
        for number, layer in enumerate(self._layers):
            assert layer.future is not None
            layer.future.wait()
            statistics.elements += layer.weight.numel()
            statistics.dense_bytes += 4 * layer.weight.numel()
            statistics.bytes_sent += layer.sent
            statistics.bytes_received += layer.received
            statistics.decisions[number] = layer.how
            layer.apply()
        statistics.steps += 1
        if statistics.told is None and self._met.group.rank == 0:
            hows = ", ".join(sorted({layer.how.partition(":")[0] for layer in self._layers}))
            less, count = fewer(statistics.dense_bytes, statistics.bytes_sent), len(self._layers)
            tell(statistics, f"SufficientFactors sends {hows} of {count} layer{'s' * (count > 1)}{less}")
        if interruption is not None:
            raise_at_end(interruption)

    @undivided
    def _raised(self) -> None:
        """The pass has raised: tell those that wait for this rank's factors."""
        self._end_step(raised=True)
        self._forget()

    def _forget(self) -> None:
        for layer in self._layers:
            layer.forget()

    @undivided
    def _kept_ended(self) -> None:
        for layer in self._kept:
            layer.end_kept()
        self._kept.clear()

    def _post_receives(self) -> None:
        """On the pipeline: all messages of the step have arrived."""
        for layer in self._layers:
            layer.post_receives()
        self._met.end()

    @untraced
    def _refuse(self, number: int, weight: Tensor) -> None:
        layer = self._layers[number]
        if self._open and weight.grad is not None and weight.grad not in layer.before:
            raise RuntimeError(
                f"{layer.name!r} has a gradient from elsewhere than its linear layer, as of a penalty or another use "
                "of the weight, which has no factors: leave the layer out of SufficientFactors"
            )


@untraced
def watch_outputs(model: nn.Module, inputs: Any, output: Any) -> None:
    """A forward hook: a backward pass through any output begins a step, also where it does not reach these layers."""
    factors = _of_model.get(model)
    if factors is not None and torch.is_grad_enabled() and factors.syncs():
        begin = weakly(factors.begin)
        for tensor in _find_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: begin())
