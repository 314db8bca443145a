"""The network that `gradwire-bench advise` predicts for: from flags, or from a probe of the running group.

Ranks are numbered node by node, and those of one node share its network card. NCCL's all-gather and everybody's
all-reduce go round a ring, of which one link leaves each node: the card carries what one rank receives. In an
all-to-all, and in what gradwire sends over Gloo, every rank of a node talks to every rank outside: the card carries
that for all of them. In a hierarchical exchange each rank of a node has a ring of its own through the card, with a
share of the data.

gradwire's messages of known sizes are announced ahead, so each stage takes one way; entries whose number differs from
step to step are not, and take two. Gloo's all-reduce goes 2·(P-1) times round by pieces of 1 MB, two under way at once,
and each piece is announced before it is sent.

What software adds to a network's latency (waking threads, Gloo's own rounds) is measured here, over loopback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...hooks.network.cost import GLOO_PIECE, UNLIMITED, Calibration, Latency, Line, Nodes, Work

#: TCP's share of Ethernet's rate: 1448 bytes of 1538, with headers, preamble and the gap between frames.
PAYLOAD = 1448 / 1538


@dataclass(frozen=True)
class Network:
    """The cost of exchanges.

    Attributes:
        world_size, local_size: ranks, and those on each node.
        flat: among all ranks.
        nodes: inside nodes and between them, where there are several with several ranks.
        processor: seconds of a processor for each byte received: of an exchange of wires ("exchange"), and of PyTorch's
            all-reduces ("float32", "float16").
    """

    world_size: int
    local_size: int
    flat: Calibration
    nodes: Nodes | None
    processor: Mapping[str, float]


def from_flags(
    here: Mapping[str, Any], work: Work, world_size: int, local_size: int, rate: float, latency: float, inside: float
) -> Network:
    """A network of given speed.

    Args:
        here: what `measurement.measure_network` found between two processes of this machine.
        work: of `measurement.measure_model`.
        world_size, local_size: ranks, and those on each node.
        rate: bits a second of each node's card, in each direction.
        latency: seconds from node to node, one way.
        inside: bits a second that each rank can receive from ranks of its own node.
    """
    card, memory = 8 / (rate * PAYLOAD), 8 / inside if local_size > 1 else 0.0
    outside = world_size - local_size
    if not outside:
        flat = _calibration(here, work, world_size, 0.0, memory, memory)
        return Network(world_size, local_size, flat, None, here["processor"])
    crowded = card * local_size * outside / (world_size - 1)
    flat = _calibration(here, work, world_size, latency, max(card, memory), max(crowded, memory))
    nodes = None
    if local_size > 1:
        between = _calibration(here, work, world_size // local_size, latency, card * local_size, card * local_size)
        nodes = Nodes(_calibration(here, work, local_size, 0.0, memory, memory), between, local_size)
    return Network(world_size, local_size, flat, nodes, here["processor"])


def _calibration(
    here: Mapping[str, Any], work: Work, size: int, latency: float, ring: float, all_to_all: float
) -> Calibration:
    """Of a group.

    Args:
        latency: seconds that the network adds to each round.
        ring, all_to_all: seconds for each byte received.
    """
    gloo = here["gloo"]
    alphas = {name: line["alpha"] for name, line in here["lines"].items()}
    software = Latency(**here["latency"])
    others = max(1, size - 1)  # of two processes, one: what was measured
    swap, ways = Line(alphas["all_to_all"] + latency, all_to_all), 2 if gloo else 1
    reduce = Line(others * (alphas["all_reduce"] + 2 * ways * latency), ring)
    if gloo:
        gather = Line(alphas["all_gather"] + latency, all_to_all)
        reduce = replace(reduce, window=4.0 * others * GLOO_PIECE)
    else:
        gather = Line(others * (alphas["all_gather"] + latency), ring)
    rounds = Latency(
        software.gather + ways * latency, software.union + 3 * ways * latency, software.split + 4 * ways * latency
    )
    return Calibration(gather, swap, reduce, work, rounds, UNLIMITED if gloo else 1)
