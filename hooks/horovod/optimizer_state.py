"""Optimizer states as they are: types, bits, and what shares memory. `load_state_dict` of torch casts a state's tensors
to the parameter's dtype, in containers too, and rebuilds each iterable, strings and named tuples among them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage

from ..training.loaded_values import parameters_of


class Place(NamedTuple):
    """The memory of some tensors: its bytes, the parameter whose own it is, and one on the same GPU, by number."""

    nbytes: int
    owner: int | None
    neighbour: int | None

    def make(self, parameters: Sequence[Tensor]) -> Tensor:
        """As many bytes, on this rank's device."""
        device = "cpu" if self.neighbour is None else parameters[self.neighbour].device
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)


class _Pickler(pickle.Pickler):
    """Leaves out parameters, and the memory of tensors, by which views stay views."""

    def __init__(self, file: io.BytesIO, parameters: Sequence[Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.places: list[Place] = []
        self.memories: list[Tensor] = []
        self._devices = [p.device for p in parameters]
        self._numbers = {id(p): number for number, p in enumerate(parameters)}
        self._owners = {p.untyped_storage()._cdata: number for number, p in enumerate(parameters)}
        self._known: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> tuple[str, int, Any] | None:
        if isinstance(obj, Tensor):
            return ("parameter", self._numbers[id(obj)], None) if id(obj) in self._numbers else None
        if isinstance(obj, TypedStorage):
            return "memory", self._number(obj._untyped_storage), obj.dtype
        return ("memory", self._number(obj), torch.uint8) if isinstance(obj, UntypedStorage) else None

    @torch.inference_mode(False)
    def _number(self, storage: UntypedStorage) -> int:
        number = self._known.setdefault(storage._cdata, len(self.places))
        if number == len(self.places):
            alike = self._devices.index(storage.device) if storage.device in self._devices else 0
            neighbour = None if storage.device.type == "cpu" else alike
            self.places.append(Place(storage.nbytes(), self._owners.get(storage._cdata), neighbour))
            self.memories.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        return number


class _Unpickler(pickle.Unpickler):
    """The inverse. A parameter's memory is this rank's own."""

    def __init__(self, data: bytes, places: Sequence[Place], memories: Sequence[Tensor], parameters: Any) -> None:
        super().__init__(io.BytesIO(data))
        self._parameters = parameters
        self._storages = [memory.untyped_storage() for memory in memories]
        for number, (nbytes, owner, _) in enumerate(places):
            if owner is not None and parameters[owner].untyped_storage().nbytes() == nbytes:
                self._storages[number] = parameters[owner].untyped_storage()

    def persistent_load(self, pid: tuple[str, int, Any]) -> Any:
        kind, number, dtype = pid
        if kind == "parameter":
            return self._parameters[number]
        # Torch's functions take untyped memory in this form, too, as `torch.load` gives it.
        return TypedStorage(wrap_storage=self._storages[number], dtype=dtype, _internal=True)


def taken_apart(optimizer: torch.optim.Optimizer, **more: Any) -> tuple[bytes, list[Place], list[Tensor]]:
    """A pickle of an optimizer's state, its groups and `more`, and the memory of all tensors in them, uint8 and shared.

    Raises:
        whatever pickle raises of what it cannot carry.
    """
    file, groups = io.BytesIO(), optimizer.param_groups
    pickler = _Pickler(file, parameters_of(optimizer))
    pickler.dump({"state": dict(optimizer.state), "param_groups": groups, **more})
    return file.getvalue(), pickler.places, pickler.memories


def put_together(
    optimizer: torch.optim.Optimizer, data: bytes, places: Sequence[Place], memories: Sequence[Tensor]
) -> dict[str, Any]:
    """Give an optimizer what `taken_apart` gave of one that is made alike; returns `more`."""
    loaded: dict[str, Any] = _Unpickler(data, places, memories, parameters_of(optimizer)).load()
    for group, theirs in zip(optimizer.param_groups, loaded.pop("param_groups"), strict=True):
        own = {name: group[name] for name in ("params", "param_names") if name in group}
        group.clear()
        group.update(own | theirs | {"params": own["params"]})
    optimizer.state.clear()
    optimizer.state.update(loaded.pop("state"))
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)
    return loaded
