"""The byte format: what a codec puts on the network, described once.

A wire is one or more parts, laid one after the other. A part is a sequence of equal records, and a record a sequence
of fields, little-endian, without padding between them. Every record is a multiple of 4 bytes long, and the length of
a wire depends on the number of elements alone, so that no rank ever has to ask another for a size.

NumPy's structured dtypes describe exactly this, so a `Part` is one, and `Part.view` gives typed access to the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Raised when a byte on the wire changes its meaning. Ranks compare it before they exchange anything.
WIRE_VERSION = 2


@dataclass(frozen=True)
class Field:
    """`count` little-endian numbers of one type: `dtype` is NumPy's name for it (`"<f4"`, `"<u4"`, `"u1"`)."""

    name: str
    dtype: str
    count: int
    meaning: str


@dataclass(frozen=True)
class Part:
    """`records` equal records of `fields`: what one collective exchanges."""

    name: str
    fields: tuple[Field, ...]
    records: int

    @property
    def record(self) -> np.dtype:
        """One record as a NumPy structured dtype."""
        return np.dtype([(f.name, f.dtype, (f.count,)) for f in self.fields])

    @property
    def nbytes(self) -> int:
        return self.record.itemsize * self.records

    def view(self, data: np.ndarray) -> np.ndarray:
        """The records in `data`, uint8 of `nbytes`, without a copy."""
        return data.view(self.record)
