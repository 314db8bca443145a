"""A replica's ledger: what it has given to each round and what it has kept, for the law of each round.

    P·U + Σ e after = Σ (Δ + e before), over the members of the round's view (outer lr 1, no momentum)

States are chained by name, so that rounds which no survivor's state goes back to are told apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gradwire import LocalUpdates
from gradwire.hooks.local_sgd.outer_sgd import GlobalParameters

Name = tuple[int, int]


@dataclass
class Entry:
    """A replica's part of one round: vectors of the elements that the round has exchanged."""

    name: Name
    before: Name
    ranks: int
    given: np.ndarray
    kept_before: np.ndarray
    kept_after: np.ndarray
    #: Ranks times the step of θ0; None where the others have made it.
    moved: np.ndarray | None
    digest: str
    #: The largest magnitude in θ0, whose rounding limits how closely a step can be told.
    largest: float


@dataclass
class Ledger:
    """Records the rounds of one `LocalUpdates` from now on."""

    updates: LocalUpdates
    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        runner: Any = self.updates._runner
        send, apply, follow = runner._send, runner.apply, runner.follow
        self._pending: Any = None
        self._last_kept: dict[int, np.ndarray] = {}

        def sending(sent: Any) -> bool:
            parts = list(sent.globals)
            #: A newcomer's or straggler's state may be replaced in there, so this is taken when it has been sent.
            done = send(sent)
            if done:
                view = runner.replicas.view
                self._pending = (parts, view.number, len(view.members), runner.number)
            return done

        def taking(shared: GlobalParameters, difference: Any) -> Any:
            def taken(*args: Any, **options: Any) -> torch.Tensor:
                self._check_kept(shared)
                found = difference(*args, **options)
                self._given[shared.bucket.index] = found.double().numpy().copy()
                self._before[shared.bucket.index] = self._kept(shared), shared.values.double().numpy().copy()
                return found

            return taken

        self._given: dict[int, np.ndarray] = {}
        self._before: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for shared in runner.every:
            shared.difference = taking(shared, shared.difference)
            shared.difference_again = taking(shared, shared.difference_again)

        def applying(*args: Any) -> None:
            name = runner.replicas._name
            try:
                apply(*args)
            finally:
                after = runner.replicas._name
                if self._pending is not None and after == (self._pending[1], self._pending[3]) != name:
                    self._write(after, name, moved=True)
                self._pending = None

        def following(arrival: Any) -> None:
            before = runner.replicas._name
            follow(arrival)
            if arrival.ending == "counted" and self._pending is not None:
                self._write(arrival.name, before, moved=False)
            if arrival.ending == "counted" or arrival.healed is not None:
                self._pending = None

        runner._send, runner.apply, runner.follow = sending, applying, following

    def _kept(self, shared: GlobalParameters) -> np.ndarray:
        named = self.updates._feedback.by_name()
        zero = {slot.name: torch.zeros(slot.shape) for slot in shared.slots}
        return np.concatenate([named.get(s.name, zero[s.name]).double().flatten().numpy() for s in shared.slots])

    def _check_kept(self, shared: GlobalParameters) -> None:
        """Between rounds residuals stay, whatever views come and go."""
        last = self._last_kept.get(shared.bucket.index)
        if last is not None and not np.allclose(last, self._kept(shared), rtol=1e-5, atol=1e-6):
            self.problems.append(f"the residual of bucket {shared.bucket.index} has changed between two rounds")

    def _write(self, name: Name, before: Name, moved: bool) -> None:
        parts, _, ranks, _ = self._pending

        def flat(pick: Any) -> np.ndarray:
            return np.concatenate([pick(shared) for shared in parts])

        kept = {shared.bucket.index: self._kept(shared) for shared in parts}
        self._last_kept |= kept
        steps = flat(lambda s: ranks * (self._before[s.bucket.index][1] - s.values.double().numpy())) if moved else None
        self.entries.append(
            Entry(
                name, before, ranks,
                flat(lambda s: self._given[s.bucket.index]),
                flat(lambda s: self._before[s.bucket.index][0]),
                flat(lambda s: kept[s.bucket.index]),
                steps,
                state_digest(self.updates),
                max(float(shared.values.abs().max()) for shared in parts),
            )
        )  # fmt: skip


def state_digest(updates: LocalUpdates) -> str:
    """Of the global parameters and their momentum."""
    found = hashlib.blake2b(digest_size=8)
    for shared in updates._runner.every:
        for flat in (shared.values, shared.momentum):
            if flat is not None:
                found.update(flat.numpy().tobytes())
    return found.hexdigest()


def check(every: Iterable[list[Entry]], last: Name, law: bool = True) -> int:
    """Check the rounds that led to a state: equal bits for equal names, and the law where all members have entries.
    Returns the number of rounds whose law was checked."""
    by_name: dict[Name, list[Entry]] = {}
    for entries in every:
        for entry in entries:
            by_name.setdefault(entry.name, []).append(entry)
    for name, entries in by_name.items():
        digests = {entry.digest for entry in entries}
        assert len(digests) == 1, f"states of the name {name} differ: {digests}"
    checked, name = 0, last
    while name in by_name:
        entries = by_name[name]
        moves = [entry.moved for entry in entries if entry.moved is not None]
        assert all(np.array_equal(moves[0], move) for move in moves), f"round {name} has moved replicas differently"
        if law and moves and len(entries) == entries[0].ranks:
            put_in = sum(entry.given + entry.kept_before for entry in entries)
            out = moves[0] + sum(entry.kept_after for entry in entries)
            rounding = 2.0**-23 * len(entries) * (entries[0].largest + 2 * float(np.abs(put_in).max()))
            worst = float(np.abs(put_in - out).max())
            assert worst <= rounding, f"round {name} of {entries[0].ranks}: off by {worst:.1e}, rounding {rounding:.1e}"
            checked += 1
        before = {entry.before for entry in entries}
        name = before.pop() if len(before) == 1 else max(before)
    return checked
