"""The capacity of the messages that carry entries to owners."""

from __future__ import annotations

import math

#: Standard deviations of room beyond an owner's share, as if entries fell to owners by chance.
SPREAD = 3.0


def row_capacity(k: int, span: int, ranks: int, feedback: bool) -> int:
    """Entries, of k, that fit in the row to each of `ranks` owners of at most `span` elements. The others wait in the
    residual; without feedback there is room for all."""
    share = k / ranks
    return min(k, span, math.ceil(share + SPREAD * math.sqrt(share)) if feedback else k)
