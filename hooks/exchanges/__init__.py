"""The exchanges: how buckets become one mean on every rank. Replicas end bit-identical in all of them, and all but
`dense` sum in rank order.

To add one, derive from `Exchange` and call `register`.
"""

from __future__ import annotations

from ...compress.codec import Codec
from .base import BucketSpec, Exchange, ExchangeArgs, all_finite
from .dense import Dense
from .gather import Gather
from .hierarchical import Hierarchical
from .low_rank import Factors
from .reduce_scatter import ReduceScatter
from .split import Split
from .two_pass import TwoPass
from .union import Union

__all__ = [
    "EXCHANGES",
    "BucketSpec",
    "Dense",
    "Exchange",
    "ExchangeArgs",
    "Hierarchical",
    "ReduceScatter",
    "TwoPass",
    "all_finite",
    "possible",
    "register",
    "serving",
]  # fmt: skip

#: By name; of equally fast ones "auto" takes the first.
EXCHANGES: dict[str, type[Exchange]] = {}


def register(exchange: type[Exchange]) -> type[Exchange]:
    """Let a class serve as `exchange=` its `name`, and let "auto" choose it where its `estimate` is least. On every
    rank alike.

    Raises:
        ValueError: there is another one of this name.
    """
    if EXCHANGES.setdefault(exchange.name, exchange) is not exchange:
        raise ValueError(f"there is an exchange named {exchange.name!r} already: choose another name")
    return exchange


for _exchange in (Gather, TwoPass, Union, Split, Factors, Dense):
    register(_exchange)


def possible(codec: Codec) -> tuple[str, ...]:
    """The names of the exchanges that can carry what a codec encodes."""
    return tuple(name for name, exchange in EXCHANGES.items() if exchange.carries(codec))


def serving(name: str, inline: bool) -> type[Exchange]:
    """What serves as `exchange=` this name. `inline`: where the host must not wait for the device, if there is such."""
    exchange = EXCHANGES[name]
    return exchange.device_variant or exchange if inline else exchange
