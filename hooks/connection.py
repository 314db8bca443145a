"""What ties a state to the other ranks: the groups, what was compared when they met, and the lane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from . import handshake, probe
from .group import HANDSHAKE_TIMEOUT, Group
from .lane import Lane
from .plan import Choice, Planner, make_topology


class Connection:
    """Constructing it is a collective: the ranks meet, and compare what each says of itself.

    Args:
        model_group: the model's process group.
        given: the one that the user wants gradients to take, or None.
        device: where gradients are.
        description: what must be equal on all ranks, by name.
        problem: why this rank cannot start, if it cannot: the others hear of it, and it is raised here.
        topology, fallback: `CompressState`'s.
        probes: whether to measure the group, for `exchange="auto"`.
        ahead: whether dense buckets may go ahead of the lane.

    Attributes:
        group: for gradients, on the lane.
        control: for what the host has to know.
        dense_group: for dense gradients that go ahead of the lane; None where none may.
        planner: decides how buckets go.
        lane: runs their jobs.

    Raises:
        RuntimeError: a rank did not arrive.
        ValueError: the ranks disagree, or one cannot start; on every rank alike.
    """

    def __init__(
        self,
        model_group: Any,
        given: dist.ProcessGroup | None,
        device: torch.device,
        description: Mapping[str, Any],
        problem: Exception | None,
        topology: Any,
        fallback: torch.dtype | None,
        *,
        probes: bool,
        ahead: bool,
    ) -> None:
        ranks = dist.get_process_group_ranks(model_group)
        if given is not None and dist.get_process_group_ranks(given) != ranks:
            raise ValueError(
                f"process_group has other ranks than the model's group {ranks}: make one of the same ranks"
            )
        carrier = model_group if given is None else given
        blocking = Group.blocks(carrier, device)
        try:
            # NCCL's collectives order themselves on streams, so the model's own group serves; Gloo needs one apart.
            self.control = Group(given) if given is not None and blocking else Group.of_ranks(ranks)
            self.group = self.control if blocking else Group(carrier)
            error = None if problem is None else {"error": f"{type(problem).__name__}: {problem}"}
            sides = self.control.objects(error or dict(description))
        except RuntimeError as failure:
            raise RuntimeError(
                f"gradwire could not reach all ranks within {HANDSHAKE_TIMEOUT.total_seconds():.0f} s: every rank must "
                f"construct CompressState. {failure}"
            ) from failure
        if problem is not None:
            raise problem
        handshake.compare(sides)
        if given is None:
            self.control.follow_timeout(model_group)
        nodes = make_topology(topology, ranks, self.group, carrier, blocking)
        for part in (nodes.inside, nodes.between):
            if part is not None and blocking:
                part.follow_timeout(model_group)
        # Where the user has named a group, nothing goes elsewhere.
        self.dense_group = Group(model_group) if ahead and blocking and given is None and self.group.size > 1 else None
        self.planner = Planner(nodes, device, fallback)
        if probes:
            self.planner.calibrate()
        self._mine, self._all = torch.zeros(2, dtype=torch.int64), torch.zeros(self.group.size, 2, dtype=torch.int64)
        self.lane = Lane(f"gradwire-{self.group.rank}", device, threaded=blocking)

    def announce(self, step: int, choice: Choice) -> None:
        """Begin to tell the other ranks what comes next here. From host to host, so that no GPU is waited for."""
        self._mine[0], self._mine[1] = step, choice.digest
        self._under_way = self.control.all_gather(self._all, self._mine)

    def compare(self, choice: Choice) -> None:
        """Wait for what the others have announced.

        Raises:
            ValueError: they are at another step, or mean something else; on every rank alike.
        """
        self._under_way.wait()
        if not (self._all == self._mine).all():
            mine = {"step": int(self._mine[0]), "codec": str(choice.codec), "exchange": choice.exchange}
            handshake.compare(self.control.objects({**mine, "error_feedback": choice.feedback, "way": choice.way}))

    def agreed(self, seconds: list[float]) -> list[float]:
        """The slowest rank's. A collective."""
        return probe.agreed(self.control, torch.device("cpu"), seconds)
