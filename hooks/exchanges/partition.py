"""How long the rows are in which entries go to owners."""

from __future__ import annotations

import math

#: A row to an owner has room for so many standard deviations more than its share, if entries fell to owners by chance.
SPREAD = 3.0


def row_capacity(k: int, span: int, ranks: int, feedback: bool) -> int:
    """How many of k entries fit in the row to each of so many owners of at most `span` elements. What does not fit
    waits in the residual; without one there is room for all."""
    share = k / ranks
    return min(k, span, math.ceil(share + SPREAD * math.sqrt(share)) if feedback else k)
