"""Matching of the ranks' announcements: which operations are ready to run, and whether all ranks mean the same.

Ranks announce operations under a key, in any order. An operation is ready once every member of its process set has
announced its key, or has joined. Then the announcements are compared: equal ones run, in the order in which they became
ready; others fail, on every rank. Nothing here talks to a network or touches a tensor.

A request is a dictionary that JSON can carry:

    key          name of the operation, the same on all ranks
    set          id of its process set
    kind         "allreduce", "allgather", …
    tensors      dtype and shape of each tensor: [["float32", [2, 3]], …]
    must_match   facts that must be equal on all ranks, by the name to complain with
    per_rank     facts of each rank by itself, e.g. the splits of an alltoall
    fuse         operations with equal text here may share one buffer; None for others
    no_gradient  true: this rank has no gradient, and goes along with whatever the others announce
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ...training.grad_scaler import EQUAL_SCALES

Request = dict[str, Any]
#: A request that all agree on, and `describe` of it.
Ready = tuple[Request, dict[str, Any]]

#: Key of the loss scale among facts that must match.
LOSS_SCALE = "loss scale"
#: Kind and key of the operation that gives up a process set.
REMOVE = "process_set.remove"
#: Kinds whose tensors may differ in their first dimension.
UNEVEN = ("allgather", "alltoall")
#: Kinds in which ranks that have joined can take part: with zeros, with no rows, or with what they have left out.
JOINABLE = ("allreduce", "exchange", "allgather", "residual")

#: Decisions of a process set in flight at which fused ones wait. The next one is formed while these run, from all that
#: comes meanwhile, so that buffers grow if the network is the bottleneck.
MAX_IN_FLIGHT = 2


#: A message for some ranks, by their global numbers.
Decision = tuple[tuple[int, ...], dict[str, Any]]


@dataclass
class _Pending:
    set_id: int
    since: float
    requests: dict[int, Request] = field(default_factory=dict)
    warned: bool = False


class Negotiator:
    """The state of the negotiation of `size` ranks.

    Args:
        size: number of ranks.
        fusion_bytes: the most bytes of operations that share a buffer.
    """

    def __init__(self, size: int, fusion_bytes: int = 64 << 20) -> None:
        self.size, self.fusion_bytes = size, fusion_bytes
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._next_set = 1
        self._pending: dict[str, _Pending] = {}
        self._ready: dict[int, list[Ready]] = {}
        self._urgent: list[Decision] = []
        self._running: dict[int, int] = {}
        self._joined: list[int] = []

    def announce(self, rank: int, request: Request) -> None:
        """Take a rank's announcement of an operation."""
        if request["kind"] == "join":
            self._join(rank, request)
            return
        key, set_id = request["key"], request["set"]
        if rank not in self.sets.get(set_id, ()):
            self._fail((rank,), key, f"rank {rank} is not in process set {set_id}, or that was removed")
            return
        pending = self._pending.setdefault(key, _Pending(set_id, time.monotonic()))
        pending.requests[rank] = request
        self._settle(key)

    def done(self, set_id: int) -> None:
        """Count a decision for this process set as carried out."""
        self._running[set_id] -= 1

    def decisions(self) -> Iterator[Decision]:
        """Every decision that can be made now, in the order in which it must be sent."""
        yield from self._urgent
        self._urgent.clear()
        for set_id, ready in self._ready.items():
            while ready and (taken := self._take(ready, self._running.get(set_id, 0) < MAX_IN_FLIGHT)):
                self._running[set_id] = self._running.get(set_id, 0) + 1
                batch = [{"key": request["key"], "info": info} for request, info in taken]
                yield self.sets[set_id], {"do": "run", "set": set_id, "ops": batch}

    @property
    def drained(self) -> bool:
        """True if every operation that all ranks are ready for has been decided on."""
        return not any(self._ready.values())

    def overdue(self, seconds: float, again: bool = False) -> Iterator[tuple[str, list[int], list[int], float]]:
        """Keys that some ranks have waited for longer than this: key, waiting ranks, missing ranks, seconds. Each once,
        unless `again`."""
        now = time.monotonic()
        for key, pending in self._pending.items():
            if now - pending.since > seconds and (again or not pending.warned):
                pending.warned = True
                waiting = sorted(pending.requests)
                missing = [r for r in self.sets[pending.set_id] if r not in waiting and r not in self._joined]
                yield key, waiting, missing, now - pending.since

    def _join(self, rank: int, request: Request) -> None:
        self._joined.append(rank)
        for key in list(self._pending):
            self._settle(key)
        if len(self._joined) == self.size:
            info = {"last": rank, **request["per_rank"]}
            self._ready.setdefault(0, []).append(({"key": "join", "fuse": None}, info))
            self._joined = []

    def _settle(self, key: str) -> None:
        pending = self._pending[key]
        members = self.sets[pending.set_id]
        if any(rank not in pending.requests and rank not in self._joined for rank in members):
            return
        del self._pending[key]
        reference, problem = compare(pending.requests)
        joined = [rank for rank in members if rank not in pending.requests]
        if problem is None and joined and reference["kind"] not in JOINABLE:
            problem = f"{reference['kind']} cannot go on without ranks {joined}, which have joined"
        if problem is None:
            problem = self._change_sets(reference)
        if problem is not None:
            self._fail(members, key, f"{key}: {problem}")
            return
        info = describe(reference, pending.requests, members)
        if reference["kind"] == "process_set.add":
            info["id"] = reference["id"]
        self._ready.setdefault(pending.set_id, []).append((reference, info))

    def _fail(self, members: tuple[int, ...], key: str, message: str) -> None:
        self._urgent.append((members, {"do": "fail", "key": key, "message": message}))

    def _change_sets(self, reference: Request) -> str | None:
        if reference["kind"] == "process_set.add":
            ranks = tuple(reference["must_match"]["ranks"])
            if ranks in self.sets.values():
                return f"a process set of ranks {list(ranks)} exists already"
            reference["id"] = self._next_set
            self.sets[self._next_set] = ranks
            self._next_set += 1
        elif reference["kind"] == REMOVE:
            set_id = reference["must_match"]["id"]
            waiting = any(pending.set_id == set_id for pending in self._pending.values())
            if waiting or self._ready.get(set_id):  # those that run end before, on every rank
                return f"process set {set_id} has operations under way: synchronize them before you remove it"
            self.sets.pop(set_id, None)
        return None

    def _take(self, ready: list[Ready], fused: bool) -> list[Ready]:
        """The next operations to run: one by itself or, if `fused` ones may go, the first and those that fit into one
        buffer with it."""
        for place, (request, _) in enumerate(ready):
            if request["fuse"] is None:  # gains nothing by waiting
                return [ready.pop(place)]
        if not fused:
            return []
        first = ready.pop(0)
        batch, size = [first], request_bytes(first[0])
        for item in list(ready):
            if item[0]["fuse"] == first[0]["fuse"] and size + request_bytes(item[0]) <= self.fusion_bytes:
                ready.remove(item)
                batch.append(item)
                size += request_bytes(item[0])
        return batch


def request_bytes(request: Request) -> int:
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in request["tensors"])


def compare(requests: dict[int, Request]) -> tuple[Request, str | None]:
    """The request that ranks agree on, and the first difference, in words."""
    given = {rank: request for rank, request in sorted(requests.items()) if not request["no_gradient"]}
    first, reference = next(iter((given or requests).items()))
    for rank, request in sorted(requests.items()):
        if request["no_gradient"] and request["kind"] != reference["kind"]:
            continue
        difference = _difference(reference, request)
        if difference is not None:
            what, ours, theirs = difference
            remedy = EQUAL_SCALES if what == LOSS_SCALE else "Operations of one name must be equal on all ranks"
            return (
                reference,
                f"ranks disagree on the {what}: rank {first} has {ours}, rank {rank} has {theirs}. {remedy}",
            )
    return reference, None


def _difference(a: Request, b: Request) -> tuple[str, Any, Any] | None:
    if a["kind"] != b["kind"]:
        return "operation", a["kind"], b["kind"]
    if len(a["tensors"]) != len(b["tensors"]):
        return "number of tensors", len(a["tensors"]), len(b["tensors"])
    for (dtype, shape), (other_dtype, other_shape) in zip(a["tensors"], b["tensors"], strict=True):
        if dtype != other_dtype:
            return "dtype", dtype, other_dtype
        start = 1 if a["kind"] in UNEVEN else 0
        if len(shape) != len(other_shape) or shape[start:] != other_shape[start:]:
            return "shape", shape, other_shape
    for what in dict.fromkeys([*a["must_match"], *b["must_match"]]):
        if a["must_match"].get(what) != b["must_match"].get(what):
            return what, a["must_match"].get(what), b["must_match"].get(what)
    return None


def describe(reference: Request, requests: dict[int, Request], members: Iterable[int]) -> dict[str, Any]:
    """Facts that the ranks need of each other before they run an operation."""
    members = list(members)
    info: dict[str, Any] = {}
    if reference["kind"] == "allgather":
        info["rows"] = [
            [_rows(requests.get(rank), reference, index) for rank in members]
            for index in range(len(reference["tensors"]))
        ]
    elif reference["kind"] == "alltoall":
        info["splits"] = [requests[rank]["per_rank"]["splits"] for rank in members]
    elif reference["kind"] == "exchange":
        info["restart"] = any(request["per_rank"].get("restart") for request in requests.values())
    if any(rank not in requests or requests[rank]["kind"] != reference["kind"] for rank in members):
        info["reference"] = reference
    return info


def _rows(request: Request | None, reference: Request, index: int) -> int:
    if request is None or request["kind"] != reference["kind"]:
        return 0
    return int(request["tensors"][index][1][0])
