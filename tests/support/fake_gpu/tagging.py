"""Tensors that lie on the CPU and say that they lie on a GPU; and what a GPU refuses, refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
#: Of a tensor's `__dict__`: it is on the GPU.
TAG = "on_the_fake_gpu"
#: Take tensors of both kinds: they copy, or what they return is no tensor, or they index by tensors of the CPU.
MIXES = {"copy_", "_foreach_copy_", "to", "type", "set_", "__getitem__", "index", "index_put", "index_put_",
         "_has_compatible_shallow_copy_type", "is_set_to"}  # fmt: skip
#: Wait until the device has come so far.
WAITS = {
    "item",
    "tolist",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "cpu",
    "numpy",
    "nonzero",
    "unique",
    "equal",
}
#: May be given a device by its place, as a string.
PLACED = {"to", "zeros", "empty", "ones", "full", "randn"}


def on_gpu(tensor: Tensor) -> bool:
    return TAG in tensor.__dict__


def tag(given: Any, gpu: bool = True) -> Any:
    """The same, on the GPU or not."""
    for tensor in tensors_in(given):
        if gpu:
            tensor.__dict__[TAG] = True
        else:
            tensor.__dict__.pop(TAG, None)
    return given


def tensors_in(given: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, list | tuple | dict) and depth < 4:
        for one in given.values() if isinstance(given, dict) else given:
            yield from tensors_in(one, depth + 1)


def names_gpu(given: Any) -> bool:
    """Whether it is a device, or its name, and a GPU."""
    return str(given).partition(":")[0] == "cuda" if isinstance(given, str | torch.device) else False


class OnTheCpu(TorchFunctionMode):
    """Where a call names a GPU it means the CPU, and what it returns is tagged.

    Attributes:
        allocated: how many results had memory of their own: no count of all allocations, but zero where there is none.
        strict: whether to raise where the host would wait for the device.
    """

    allocated, strict = 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", str(func))
        if func is torch.device or name == "_parse_to":  # the arguments of nn.Module.to
            return func(*args, **kwargs)
        if name in ("__get__", "__set__", "__delete__"):
            return attribute(func, name, args)
        given = list(tensors_in((args, kwargs)))
        gpu = any(map(on_gpu, given))
        asked = self.asked(name, args, kwargs)
        refuse(name, args, kwargs, given, asked)
        if gpu and OnTheCpu.strict and (name in WAITS or (name in ("to", "copy_") and leaves(args, asked))):
            raise RuntimeError(f"called a synchronizing CUDA operation: {name}")
        args = tuple(CPU if isinstance(a, str | torch.device) and self.places(name, a) else a for a in args)
        if names_gpu(kwargs.get("device")):
            kwargs["device"] = CPU
        if asked is not None and given and name in ("to", "cuda", "cpu") and asked != gpu:
            moved = args[0] if name in ("cuda", "cpu") else func(*args, **kwargs)
            return tag(moved.clone() if moved is args[0] or name != "to" else moved, asked)
        result = func(*args, **kwargs)
        where = gpu if asked is None else asked
        if name == "__getitem__":
            where = on_gpu(args[0])
        if (name.endswith("_") and not name.startswith("__")) or kwargs.get("out") is not None:
            return result  # what it was given
        if where and isinstance(result, Tensor):
            shared = {x.untyped_storage().data_ptr() for x in given if x.layout == torch.strided}
            OnTheCpu.allocated += result.layout == torch.strided and result.untyped_storage().data_ptr() not in shared
        return tag(result) if where else result

    @staticmethod
    def places(name: str, given: Any) -> bool:
        return names_gpu(given) and (isinstance(given, torch.device) or name in PLACED)

    def asked(self, name: str, args: Any, kwargs: Any) -> bool | None:
        """Whether a GPU is asked for; None: no device is named."""
        if name in ("cuda", "cpu"):
            return name == "cuda"
        device = kwargs.get("device")
        for given in args if device is None else ():
            if isinstance(given, torch.device) or (name in PLACED and given in ("cuda", "cpu", "cuda:0")):
                device = given
        return None if device is None else names_gpu(device)


def leaves(args: Any, asked: bool | None) -> bool:
    """Whether a copy goes from the GPU to the CPU."""
    target, *rest = args
    if asked is not None:
        return on_gpu(target) and not asked
    return not on_gpu(target) and any(isinstance(x, Tensor) and on_gpu(x) for x in rest)


def attribute(func: Any, name: str, args: Any) -> Any:
    """A property of a tensor, read, set or deleted."""
    tensor, what = args[0], getattr(func.__self__, "__name__", "")
    if name == "__set__" and what == "data":
        func(*args)
        return tag(tensor, on_gpu(args[1]))
    if name != "__get__" or not isinstance(tensor, Tensor):
        return func(*args)
    gpu = on_gpu(tensor)
    if what == "device":
        return CUDA if gpu else func(*args)
    if what in ("is_cuda", "is_cpu"):
        return gpu == (what == "is_cuda")
    result = func(*args)
    return tag(result) if gpu else result


def refuse(name: str, args: Any, kwargs: Any, given: list[Tensor], asked: bool | None) -> None:
    """As torch does for tensors of a real GPU.

    Raises:
        RuntimeError: it takes tensors of one device alone, and these are of two; memory of a GPU is to be pinned; or a
            generator is on another device.
        TypeError: NumPy cannot read them.
    """
    gpu = [x for x in given if on_gpu(x)]
    if kwargs.pop("pin_memory", None) and asked:
        raise RuntimeError("Only dense CPU tensors can be pinned")
    generator = kwargs.get("generator")
    if generator is not None and asked and generator.device.type == "cpu":
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if name in ("numpy", "__array__") and gpu:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
    if not gpu or name in MIXES:
        return
    others = [x for x in given if not on_gpu(x) and x.dim() > 0]
    if name == "__setitem__":  # of the value only, as an index may be on either
        others = [x for x in tensors_in(args[2:]) if on_gpu(x) != on_gpu(args[0]) and x.dim() > 0]
    if others:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({name})"
        )


def tag_buckets() -> None:
    """What DDP hands to a hook lies where its parameters do; the reducer, in C++, knows nothing of tags."""
    for name in ("buffer", "gradients", "parameters"):
        plain = getattr(dist.GradBucket, name)

        def where_parameters_are(bucket: Any, plain: Any = plain) -> Any:
            return tag(plain(bucket), any(map(on_gpu, PARAMETERS(bucket))))

        setattr(dist.GradBucket, name, where_parameters_are)


PARAMETERS = dist.GradBucket.parameters
