"""The placement of ranks on nodes, and the groups inside and between nodes."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .group import Group


@dataclass(frozen=True)
class Topology:
    """The ranks, and their placement on nodes.

    Attributes:
        all: every rank.
        inside, between: the ranks of this node, and the ranks at the same place of every node; None with a single node,
            or one rank a node.
    """

    all: Group
    inside: Group | None = None
    between: Group | None = None


def node_size(topology: Any, world_size: int) -> int:
    """Ranks a node, for ranks numbered node by node; 1 if nodes do not matter.

    Args:
        topology: "auto" (from torchrun's LOCAL_WORLD_SIZE), a number, a two-dimensional DeviceMesh whose last dimension
            is inside the node, or None.

    Raises:
        ValueError, TypeError: it is none of these, or does not divide the world.
    """
    if topology is None:
        return 1
    if topology == "auto":
        # Only torchrun sets it.
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


def make_topology(topology: Any, ranks: list[int], everyone: Group, process_group: Any, blocking: bool) -> Topology:
    """Make the groups. A collective of the ranks; of all processes of the default group, if it makes groups of another
    backend than Gloo and `process_group` cannot be split.

    Args:
        ranks: global ranks, in the group's order.
        everyone: the group of these ranks.
        process_group: carries gradients, unless Gloo does.
        blocking: Gloo carries everything.

    Raises:
        ValueError: `topology` is a number, and groups inside and between nodes cannot be made.
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
    if ranks != list(range(dist.get_world_size())) and not _splits(process_group):
        if topology == "auto":
            return Topology(everyone)
        raise ValueError(
            "over NCCL, for a model on some of the processes, topology must be a DeviceMesh, which brings the groups "
            "along, or torch must be able to split the model's group: pass device_id to init_process_group"
        )
    return Topology(everyone, *_subgroups(mesh, process_group))


def _node_by_node(ranks: list[int], size: int) -> bool:
    """True if each `size` consecutive ranks are one of torchrun's nodes."""
    nodes = [[rank // size for rank in ranks[start : start + size]] for start in range(0, len(ranks), size)]
    return all(len(set(node)) == 1 for node in nodes)


#: The subgroups of each process group, by ranks a node; they live as long as it.
_made: weakref.WeakKeyDictionary[Any, dict[int, tuple[Group, Group]]] = weakref.WeakKeyDictionary()


def _splits(process_group: Any) -> bool:
    """True if torch can split the process group, which needs its members alone: over NCCL, if `init_process_group` got
    a device, and if every backend of the group supports it."""
    default = dist.group.WORLD
    if not hasattr(dist, "split_group") or getattr(default, "bound_device_id", None) is None:
        return False
    # Gloo's too, if the group has one.
    backends = [process_group._get_backend(device) for device in process_group._device_types]
    return all(getattr(backend, "supports_splitting", False) for backend in backends)


def _subgroups(mesh: list[list[int]], process_group: Any) -> tuple[Group, Group]:
    """The groups inside and between nodes, of the process group's backend. The first call for a process group is a
    collective, of its members if it `_splits`, else of all processes, which all take part in making each group in the
    same order. Later calls return the same groups."""
    made = _made.setdefault(process_group, {})
    size = len(mesh[0])
    if size not in made:
        rows = mesh, [list(ranks) for ranks in zip(*mesh, strict=True)]
        make = _split if _splits(process_group) else _enumerated
        inside, between = (make(each, process_group) for each in rows)
        made[size] = inside, between
    return made[size]


def _split(rows: list[list[int]], process_group: Any) -> Group:
    """This rank's of these groups, split from the process group: NCCL derives their communicators from its own."""
    place = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(process_group))}
    made = dist.split_group(process_group, [[place[rank] for rank in row] for row in rows])
    return Group(made, next(row for row in rows if dist.get_rank() in row))


def _enumerated(rows: list[list[int]], process_group: Any) -> Group:
    return Group(dist.new_subgroups_by_enumeration(rows, backend=dist.get_backend_config(process_group))[0])
