"""The cost of each algorithm of `sparse_all_reduce`, and the choice between them."""

from __future__ import annotations

from dataclasses import replace

from ..exchanges.dense import all_reduce_estimate
from ..exchanges.split import split_estimate
from ..exchanges.union import union_estimate
from ..network.cost import Calibration, Decision, Estimate, Shape, decide


def gather(network: Calibration, shape: Shape) -> Estimate:
    """The cost of an all-gather of all entries."""
    ranks, k, work = shape.world_size, shape.k, network.work
    moves = [(network.all_gather, (ranks - 1) * shape.entry_bytes(shape.numel, k))]
    decode = (work.unpack + work.merge) * ranks * k + work.sweep * shape.numel + work.scatter * shape.union
    return network.estimate("gather", moves, work.pack * k, decode, network.latency.gather)


def split(network: Calibration, shape: Shape) -> Estimate:
    """The cost of sums by owners, all of which are kept."""
    return split_estimate(network, shape, shape.union, network.latency.split)


def dense(network: Calibration, shape: Shape) -> Estimate:
    """The cost of an all-reduce of all elements."""
    return replace(all_reduce_estimate(network, shape.numel, shape.world_size), encode=network.work.scatter * shape.k)


def choose(network: Calibration, shape: Shape) -> Decision:
    """The fastest algorithm."""
    return decide(estimate(network, shape) for estimate in (gather, union_estimate, split, dense))
