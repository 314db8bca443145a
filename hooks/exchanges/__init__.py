"""The exchanges turn a bucket's gradients into one mean on every rank. All keep replicas bit-identical, and all but
`dense` sum in rank order.

To add one, derive from `Exchange` and call `register`.
"""

from __future__ import annotations

from ...compress.codec import Codec
from .base import BucketSpec, Exchange, ExchangeArgs
from .dense import Dense
from .gather import Gather
from .hierarchical import Hierarchical
from .low_rank import Factors
from .non_zero_blocks import BlocksReduceScatter, NonZeroBlocks
from .reduce_scatter import ReduceScatter
from .shared_mask import MaskedMean, MaskedReduceScatter
from .split import Split
from .two_pass import TwoPass
from .union import Union

__all__ = [
    "EXCHANGES",
    "SCATTERS",
    "BucketSpec",
    "Dense",
    "Exchange",
    "ExchangeArgs",
    "ExchangeKind",
    "Hierarchical",
    "MaskedMean",
    "NonZeroBlocks",
    "ReduceScatter",
    "TwoPass",
    "possible",
    "register",
    "serving",
]  # fmt: skip

#: The name of one.
ExchangeKind = str
#: By name; of equally fast ones "auto" takes the first.
EXCHANGES: dict[str, type[Exchange]] = {}


def register(exchange: type[Exchange]) -> type[Exchange]:
    """Make a class available as `exchange=` its `name`, and to "auto". Call it alike on every rank.

    Raises:
        ValueError: another exchange has this name.
    """
    if EXCHANGES.setdefault(exchange.name, exchange) is not exchange:
        raise ValueError(f"there is an exchange named {exchange.name!r} already: choose another name")
    return exchange


for _exchange in (Gather, TwoPass, MaskedMean, Union, Split, Factors, NonZeroBlocks, Dense):
    register(_exchange)


#: Reduce-scatters, for sharded training, by the name of the exchange that they are half of.
SCATTERS = {kind.half_of: kind for kind in (ReduceScatter, MaskedReduceScatter, BlocksReduceScatter)}


def possible(codec: Codec) -> tuple[str, ...]:
    """The names of the exchanges that can carry what a codec encodes."""
    return tuple(name for name, exchange in EXCHANGES.items() if exchange.carries(codec))


def serving(name: str, inline: bool) -> type[Exchange]:
    """The class that serves `exchange=name`; with `inline` the one that does not make the host wait for the device, if
    there is one."""
    exchange = EXCHANGES[name]
    return exchange.device_variant or exchange if inline else exchange
