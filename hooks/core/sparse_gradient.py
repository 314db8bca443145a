"""Sparse gradients: the rows of an embedding that a batch has used (`nn.Embedding(sparse=True)`).

As in Parallax (Kim et al., EuroSys 2019), dense gradients are compressed, and the rows of sparse ones are sent exactly,
by `hooks.sparse`. Nothing is kept of them between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ...compress.backends import all_finite
from ..comm.entry_exchange import Entries, EntryExchanger, bounds_of, range_samples, used
from ..comm.group import Group
from ..comm.ports import Port, Stages
from ..comm.tasks import Clock
from ..network.cost import Calibration, Shape, expected_union
from ..sparse.all_reduce import total
from ..sparse.costs import choose


def sparse_names(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """The names of parameters with sparse gradients, found as by `DistributedDataParallel`: by the first module that
    has the parameter."""
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), module)
    return frozenset(
        name
        for name, parameter in parameters.items()
        if isinstance(owner := owners.get(id(parameter)), nn.Embedding | nn.EmbeddingBag) and owner.sparse
    )


class SparseGradient:
    """The sparse gradient of one parameter of shape [rows, n].

    Args:
        index: the index of its bucket.
        name: the parameter's name.
        parameter: the owner of the gradient.
        group: the ranks; a channel of its own, where other messages are in flight.

    Attributes:
        finite: True if the last mean was finite.
        algorithm: the algorithm of the last exchange, one of `hooks.sparse`'s names.
    """

    def __init__(self, index: int, name: str, parameter: Tensor, group: Group) -> None:
        self.index, self.names, self.parameters = index, frozenset((name,)), [parameter]
        self.numel, self.device, self.dtype = parameter.numel(), parameter.device, parameter.dtype
        travel = torch.bfloat16 if parameter.dtype == torch.bfloat16 else torch.float32
        rows, n = parameter.shape
        self.exchanger = EntryExchanger(rows, travel, parameter.device, group, row=(n,))
        self.collective = not group.is_channel
        #: Samples of each rank's row indices: of one length in every step, so that receives are posted ahead.
        self._samples = range_samples(
            torch.empty(0, dtype=torch.int32, device=self.device), rows, group.rank, group.size
        )
        self._every = torch.zeros(group.size, len(self._samples), dtype=torch.int32, device=parameter.device)
        apart = group.channel("samples") if group.is_channel else group
        self.ports: Sequence[Port] = (apart.persistent_gather(self._every, self._samples),)
        self.clock: Clock | None = None
        self.finite, self.algorithm = True, ""

    def serves(self, parameters: list[Tensor], like: Tensor) -> bool:
        """True if DDP's bucket of these parameters still is this one."""
        return len(parameters) == 1 and parameters[0] is self.parameters[0]

    def forget(self) -> None:
        """Do nothing: no state depends on earlier steps."""

    def reduce(self, grad: Tensor, network: Calibration | None) -> Stages:
        """Stages: replace a sparse gradient by the ranks' mean, in place.

        Args:
            network: the measured network; None: not measured, and the number of bytes decides.
        """
        exchanger, own = self.exchanger, grad.float().coalesce()  # rows that come twice are added up in float32
        if own.sparse_dim() != 1:
            raise TypeError(
                f"a gradient with {own.sparse_dim()} sparse dimensions: gradwire takes rows, as embeddings'"
            )
        entries = Entries(own.indices()[0].int(), own.values())
        self._samples.copy_(range_samples(entries.indices, exchanger.numel, exchanger.rank, exchanger.world_size))
        yield self.ports[0].start()
        k = int(self._every[:, 0].max())
        self.algorithm = self._choose(k, network)
        bounds = bounds_of(self._every, exchanger.numel) if self.algorithm == "split" else []
        mean = yield from total(exchanger, self.algorithm, entries, k, bounds, 1.0 / exchanger.world_size)
        if isinstance(mean, Tensor):  # without rows that no rank has used: optimizers would move them
            mean = used(mean)
        indices, values = mean.indices.long(), mean.values
        values = values.to(grad.dtype, copy=True)  # the next step works in the same memory
        self.finite = bool(all_finite(values))  # in float16 a mean may be infinite that was not before
        grad.copy_(
            torch.sparse_coo_tensor(indices[None], values, grad.shape, is_coalesced=True, check_invariants=False)
        )

    def _choose(self, k: int, network: Calibration | None) -> str:
        rows, ranks, n = self.exchanger.numel, self.exchanger.world_size, self.exchanger.width
        if network is None:  # dense receives 2 (P-1)/P rows for each of the parameter's
            return "gather" if ranks * k < 2 * rows else "dense"
        union = expected_union(rows, k, ranks)
        return choose(network, Shape(n * rows, n * k, ranks, n * union, self.exchanger.dtype)).name
