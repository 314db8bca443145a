"""The contract of a codec that sends some of the elements."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .backends import Kernels, backend_for, generic_sparse
from .codec import OLD_NAMES, Codec
from .formats.entries import index_fields, value_fields
from .formats.wire import Part


@dataclass(frozen=True)
class SparseCodec(Codec, renamed={**OLD_NAMES, "plain": "raw_entries"}):
    """A codec that sends some of the elements, as *entries*: an index and a value each.

    A subclass says how many there can be (`k`) and which they are: by `select`, in torch, or by kernels that backends
    have under its `name`. Packing and adding up entries is there for all (`formats.entries`, `backends.sparse`). Where
    the wire has something else in the place of indices, or values that are not the elements', override `parts` and
    `kernels` too.

    The exchange `gather` sends the codec's own wire. `union` and `split` bring the ranks' entries together one by one:
    they take what `raw_entries` selects, so whole elements, and let values travel as `value_dtype`.
    """

    @property
    def packs_indices(self) -> bool:
        """True if indices are packed near their entropy; else they take 32 bits each, after their number."""
        return True

    @property
    def value_dtype(self) -> torch.dtype:
        """How values travel: torch.float32, torch.bfloat16 or torch.int8."""
        return torch.float32

    @abstractmethod
    def k(self, numel: int) -> int:
        """The most entries that a gradient of `numel` elements has: from 1 to `numel`, and dependent on it alone."""

    def select(self, x: Tensor, draw: Tensor | None) -> Tensor:
        """Which elements are sent, unless kernels see to that.

        What is not finite must be selected, before anything else: it has to stay visible.

        Args:
            x: float32, flat: gradient and residual together.
            draw: from `new_draw`, where the codec is `stochastic`. Ranks have distinct streams; seed and step, and the
                low 32 bits of the stream, which number the bucket, they share.

        Returns:
            int64, ascending, at most k(numel).
        """
        raise NotImplementedError(f"{type(self).__name__} has neither `select` nor kernels for this device")

    @property
    def raw_entries(self) -> SparseCodec:
        """The codec that selects the same elements and sends them as they are: a count, k 32-bit indices and k float32
        values (`entries.split_raw`)."""
        return RawEntries(self)

    def _check_numel(self, numel: int) -> None:
        if numel >= 1 << 31:
            raise ValueError(
                f"{type(self).__name__} sends 32-bit indices and cannot serve {numel} elements: use buckets below 2^31"
            )

    def parts(self, numel: int) -> tuple[Part, ...]:
        self._check_numel(numel)
        k = self.k(numel)
        indices, values = index_fields(numel, k, self.packs_indices), value_fields(k, self.value_dtype)
        return Part("indices", indices, 1), Part("values", values, 1)

    def kernels(self, device: torch.device) -> Kernels:
        backend = backend_for(device)
        return backend.kernels.get(self.name) or generic_sparse(backend)


@dataclass(frozen=True)
class RawEntries(SparseCodec):
    """The entries that another sparse codec selects, as they are."""

    name: ClassVar[str] = "plain"

    codec: SparseCodec

    @property
    def stochastic(self) -> bool:
        return self.codec.stochastic

    @property
    def packs_indices(self) -> bool:
        return False

    def k(self, numel: int) -> int:
        return self.codec.k(numel)

    def select(self, x: Tensor, draw: Tensor | None) -> Tensor:
        return self.codec.select(x, draw)
