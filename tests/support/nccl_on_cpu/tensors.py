"""Tensors that say they are on a GPU: what is done with them is launched, and runs when the machine wants it to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from .machine import Block, active

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten
#: What reads its result, or the size of it, on the host.
WAITING = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten._unique2,
    aten.unique_dim, aten.unique_consecutive, aten.bincount, aten.repeat_interleave, aten.argwhere,
}  # fmt: skip
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
FACTORIES_FROM_HOST = (torch.tensor, torch.as_tensor, torch.asarray)
PARSE = torch._C._nn._parse_to
NAN = 0xFF


def blank(inner: Tensor) -> Tensor:
    """Fill memory of its own with what nobody has written."""
    torch.empty(0, dtype=torch.uint8).set_(inner.untyped_storage()).fill_(NAN)
    return inner


class GpuTensor(Tensor):
    """Its elements are in `inner`, when all has run that has been launched."""

    inner: Any
    block: Block

    @staticmethod
    def __new__(cls, inner: Tensor, block: Block | None = None) -> GpuTensor:
        made: GpuTensor = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        return made

    def __init__(self, inner: Tensor, block: Block | None = None) -> None:
        super().__init__()
        self.inner, self.block = inner, block or Block(inner)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    # C++ takes it for a CPU tensor, since it refuses to know of others; Python does not.
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    device = property(lambda self: DEVICE)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GpuTensor({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def record_stream(self, stream: Any) -> None:
        self.block.users.add(stream)

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return on_gpu(torch.tensor(data, dtype=kwargs.get("dtype") or self.dtype))

    def __setitem__(self, place: Any, value: Any) -> None:
        if isinstance(value, int | float) and not isinstance(place, Tensor):
            self[place].fill_(value)  # as torch does on a GPU, where a number needs no copy
        else:
            super().__setitem__(place, value)

    def tolist(self) -> Any:
        active().waits("tolist")
        return self.inner.tolist()

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        active().waits("a copy to the host")
        return self.inner.clone()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        copy = kwargs.pop("copy", False)
        device, dtype, *_ = PARSE(*args, **kwargs)
        if device is not None and device.type != DEVICE.type:
            return self.cpu().to(dtype or self.dtype)
        return super().to(dtype or self.dtype, copy=copy)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name not in ("device", "pin_memory")}
        packet = func.overloadpacket
        if packet is aten.copy_:
            return _copy(*args, **kwargs)
        given, named = tree_map(_inner, args), tree_map(_inner, kwargs)
        if reads_on_the_host(func, args):
            active().waits(str(func))
            return tree_map(lambda x: GpuTensor(x) if isinstance(x, Tensor) else x, func(*given, **named))
        if func.is_view:
            block = args[0].block
            return tree_map(lambda x: GpuTensor(x, block) if isinstance(x, Tensor) else x, func(*given, **named))
        written = [
            args[i] if i < len(args) else kwargs.get(a.name)
            for i, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        if written:
            active().launch(lambda: func(*given, **named))
            returned = written[: len(func._schema.returns)]
            return returned[0] if len(returned) == 1 else tuple(returned) or None
        return _fresh(func, given, named)


def _fresh(func: Any, given: Any, named: Any) -> Any:
    """Launch what makes new tensors. Their shapes follow from those of the others."""
    shapes = func(*tree_map(_meta, given), **tree_map(_meta, named))
    places = tree_map(
        lambda m: blank(torch.empty_strided(m.size(), m.stride(), dtype=m.dtype)) if isinstance(m, Tensor) else m,
        shapes,
    )
    flat = [place for place in (places if isinstance(places, tuple | list) else [places]) if isinstance(place, Tensor)]
    if func.overloadpacket not in (aten.empty_like, aten.new_empty, aten.new_empty_strided, aten.empty_strided):

        def run() -> None:
            found = func(*given, **named)
            for place, part in zip(flat, found if isinstance(found, tuple | list) else [found], strict=True):
                place.copy_(part)

        active().launch(run)
    return tree_map(lambda x: GpuTensor(x) if isinstance(x, Tensor) else x, places)


def reads_on_the_host(func: Any, args: Sequence[Any]) -> bool:
    """Whether the host has to know what the device makes, or how much of it there is."""
    packet = func.overloadpacket
    masks = packet in INDEXING and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return packet in WAITING or masks


def _inner(x: Any) -> Any:
    """What a launch takes: numbers by value."""
    if isinstance(x, GpuTensor):
        return x.inner
    if isinstance(x, Tensor):
        if x.dim():
            raise RuntimeError("expected all tensors to be on the same device, found some on cuda:0 and on the CPU")
        return x.clone()
    return x


def _meta(x: Any) -> Any:
    return x.to("meta") if isinstance(x, Tensor) and x.dim() else x


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    machine = active()
    if isinstance(target, GpuTensor) and isinstance(source, GpuTensor):
        into, out = target.inner, source.inner
        machine.launch(lambda: into.copy_(out))
        return target
    host, gpu = (source, target) if isinstance(target, GpuTensor) else (target, source)
    assert isinstance(gpu, GpuTensor)
    if isinstance(target, GpuTensor):
        into, out = gpu.inner, host
        if not is_pinned(host):  # it is copied before the call returns
            machine.waits("a copy from pageable memory")
            out = host.clone()
    else:
        into, out = host, gpu.inner
        if not (non_blocking and is_pinned(host)):
            machine.waits("a copy to the host")
        elif host.is_contiguous():
            host.view(torch.uint8).fill_(NAN) if host.dim() else host.fill_(
                torch.nan if host.is_floating_point() else -1
            )
    machine.launch(lambda: into.copy_(out))
    if not non_blocking:
        machine.waits("a copy that blocks")
    return target


def is_pinned(x: Tensor) -> bool:
    return getattr(x, "pinned", False)


class Factories(TorchFunctionMode):
    """`device="cuda"` and `pin_memory=True`, wherever tensors are made."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is PARSE:
            return func(*args, **kwargs)
        if func is torch.Tensor.to and not isinstance(args[0], GpuTensor):
            target, dtype, *_ = PARSE(*args[1:], **kwargs)
            if target is not None and target.type == DEVICE.type:
                return on_gpu(args[0].to(dtype or args[0].dtype))
        device: Any = kwargs.get("device")
        if device is not None and torch.device(device).type == DEVICE.type:
            del kwargs["device"]
            if func in FACTORIES_FROM_HOST:
                return on_gpu(func(*args, **kwargs))
            made = func(*args, **kwargs)
            if isinstance(made, GpuTensor):
                return made
            place = blank(torch.empty_like(made))
            if func is not torch.empty:
                active().launch(lambda: place.copy_(made))
            return GpuTensor(place)
        if kwargs.pop("pin_memory", False):
            made = func(*args, **kwargs)
            made.pinned = True
            return made
        return func(*args, **kwargs)


def on_gpu(x: Tensor) -> GpuTensor:
    """A copy there: the host waits until it has been made."""
    active().waits("a copy from pageable memory")
    place, content = blank(torch.empty_like(x)), x.detach().clone()
    active().launch(lambda: place.copy_(content))
    return GpuTensor(place)


def read(x: Tensor) -> Tensor:
    """A copy on the host, once all that was launched on the current stream has run."""
    return x.cpu() if isinstance(x, GpuTensor) else x.clone()
