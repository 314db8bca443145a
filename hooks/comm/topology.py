"""How the ranks lie on nodes, and the groups that follow from it."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .group import Group


@dataclass(frozen=True)
class Topology:
    """The ranks, and how they lie on nodes.

    Attributes:
        all: every rank.
        inside, between: the ranks of this node, and the ranks of all nodes that hold the same place in theirs; None
            where there is only one node, or one rank on each.
    """

    all: Group
    inside: Group | None = None
    between: Group | None = None


def node_size(topology: Any, world_size: int) -> int:
    """Ranks on each node, of ranks that are numbered node by node; 1 where nodes play no role.

    Args:
        topology: "auto" (what torchrun says of this machine), a number, a two-dimensional DeviceMesh whose last
            dimension is inside the node, or None.

    Raises:
        ValueError, TypeError: it is none of these, or does not divide the world.
    """
    if topology is None:
        return 1
    if topology == "auto":
        # Set by torchrun alone; elsewhere nothing is known of nodes.
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return local if 1 < local < world_size and world_size % local == 0 else 1
    if isinstance(topology, int) and not isinstance(topology, bool):
        if topology < 1 or world_size % topology:
            raise ValueError(f"topology={topology} ranks a node do not divide {world_size} ranks")
        return 1 if topology == world_size else topology
    if hasattr(topology, "get_group") and hasattr(topology, "mesh"):
        if topology.mesh.dim() != 2 or topology.mesh.numel() != world_size:
            raise ValueError(
                f"topology is a mesh of shape {tuple(topology.mesh.shape)}: expected two dimensions, nodes and ranks "
                f"inside a node, of {world_size} ranks in all"
            )
        local = int(topology.mesh.shape[1])
        return 1 if 1 in topology.mesh.shape else local
    raise TypeError(f"topology={topology!r}: expected 'auto', ranks a node, a DeviceMesh or None")


def make_topology(topology: Any, ranks: list[int], everyone: Group, carrier: Any, blocking: bool) -> Topology:
    """Make the groups. A collective; of all processes of the default group, where it makes any that Gloo does not carry
    and the carrier cannot be split.

    Args:
        ranks: global ranks, in the order of the group's.
        everyone: these ranks.
        carrier: the process group that carries gradients, where that is not Gloo's.
        blocking: whether Gloo carries everything.

    Raises:
        ValueError: the nodes are named by a number, and groups inside and between them cannot be made.
    """
    size = node_size(topology, len(ranks))
    if size == 1 or (topology == "auto" and not _node_by_node(ranks, size)):
        return Topology(everyone)
    if hasattr(topology, "get_group"):
        mesh = topology.mesh.tolist()
    else:
        mesh = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    inside_ranks = next(node for node in mesh if dist.get_rank() in node)
    between_ranks = [node[inside_ranks.index(dist.get_rank())] for node in mesh]
    if blocking:
        return Topology(everyone, Group.of_ranks(inside_ranks), Group.of_ranks(between_ranks))
    if hasattr(topology, "get_group"):
        return Topology(everyone, Group(topology.get_group(1)), Group(topology.get_group(0)))
    if ranks != list(range(dist.get_world_size())) and not _splits(carrier):
        if topology == "auto":
            return Topology(everyone)
        raise ValueError(
            "over NCCL, for a model on some of the processes, topology must be a DeviceMesh, which brings the groups "
            "along, or torch must be able to split the model's group: pass device_id to init_process_group"
        )
    return Topology(everyone, *_subgroups(mesh, carrier))


def _node_by_node(ranks: list[int], size: int) -> bool:
    """Whether each `size` ranks in turn are all of one of torchrun's nodes, and of no other."""
    nodes = [[rank // size for rank in ranks[start : start + size]] for start in range(0, len(ranks), size)]
    return all(len(set(node)) == 1 for node in nodes)


#: The subgroups of a process group, by ranks a node. They go with it.
_made: weakref.WeakKeyDictionary[Any, dict[int, tuple[Group, Group]]] = weakref.WeakKeyDictionary()


def _splits(carrier: Any) -> bool:
    """Whether torch can make groups out of a process group's own connections, by its members alone: over NCCL, where
    `init_process_group` was told the device, and no other backend is there that cannot."""
    default = dist.group.WORLD
    if not hasattr(dist, "split_group") or getattr(default, "bound_device_id", None) is None:
        return False
    backends = [carrier._get_backend(device) for device in carrier._device_types]  # Gloo's too, where there is one
    return all(getattr(backend, "supports_splitting", False) for backend in backends)


def _subgroups(mesh: list[list[int]], carrier: Any) -> tuple[Group, Group]:
    """The groups inside and between nodes, of the carrier's backend. At the first call for a carrier a collective, of
    its members where it `_splits`, else of all processes, each of which must take part in making each group, its own or
    not, in the same order; every later call returns the same groups."""
    made = _made.setdefault(carrier, {})
    size = len(mesh[0])
    if size not in made:
        rows = mesh, [list(ranks) for ranks in zip(*mesh, strict=True)]
        make = _split if _splits(carrier) else _enumerated
        inside, between = (make(each, carrier) for each in rows)
        made[size] = inside, between
    return made[size]


def _split(rows: list[list[int]], carrier: Any) -> Group:
    """This rank's of these groups: NCCL derives its communicator from the carrier's."""
    place = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(carrier))}
    made = dist.split_group(carrier, [[place[rank] for rank in row] for row in rows])
    return Group(made, next(row for row in rows if dist.get_rank() in row))


def _enumerated(rows: list[list[int]], carrier: Any) -> Group:
    return Group(dist.new_subgroups_by_enumeration(rows, backend=dist.get_backend_config(carrier))[0])
