"""A replica's ledger: what it has given to each round and what it has kept, for the law of each round.

    P·U + Σ e after = Σ (Δ + e before), over the members of the round's view (outer lr 1, no momentum)

States are chained by name, so that rounds which no survivor's state goes back to are told apart.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from gradwire import LocalUpdates
from gradwire.hooks.local_sgd.outer_sgd import GlobalParameters

Name = tuple[int, int]
#: Smaller numbers are rounded to multiples of 2**-149.
SUBNORMAL = 2.0**-126


@dataclass
class Entry:
    """A replica's part of one round: vectors of the elements that the round has exchanged."""

    name: Name
    before: Name
    ranks: int
    given: np.ndarray
    kept_before: np.ndarray
    kept_after: np.ndarray
    #: Ranks times the step of θ0, and times the round's mean; None where the others have made it.
    moved: np.ndarray | None
    total: np.ndarray | None
    #: None of one that was killed before it had the round's state.
    digest: str | None
    #: The largest magnitude in θ0, whose rounding limits how closely a step can be told.
    largest: float
    at: float = field(default_factory=time.monotonic)


@dataclass
class Ledger:
    """Records the rounds of one `LocalUpdates` from now on."""

    updates: LocalUpdates
    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        updates: Any = self.updates
        send, apply, follow = updates._send, updates._apply, updates._follow
        self._pending: Any = None
        self._last_kept: dict[int, np.ndarray] = {}

        def sending(sent: Any) -> bool:
            #: A newcomer's or straggler's state may be replaced in there, so this is taken when it has been sent.
            done = send(sent)
            if done:
                view = updates._replicas.view
                parts = list(sent.globals)
                self._pending = (parts, view.number, len(view.members), updates._step, updates._replicas._name)
            return done

        def taking(shared: GlobalParameters, difference: Any) -> Any:
            def taken(*args: Any, **options: Any) -> torch.Tensor:
                self._check_kept(shared)
                found = difference(*args, **options)
                self._given[shared.bucket.index] = found.double().numpy().copy()
                self._before[shared.bucket.index] = self._kept(shared), shared.values.double().numpy().copy()
                return found

            return taken

        def moving(shared: GlobalParameters, move: Any) -> Any:
            def moved(mean: torch.Tensor, *args: Any) -> None:
                self._means[shared.bucket.index] = mean.double().numpy().copy()
                move(mean, *args)

            return moved

        def leaving(shared: GlobalParameters, take: Any) -> Any:
            def left(feedback: Any) -> None:
                take(feedback)
                own = shared._read(shared.empty())
                self._unsent[shared.bucket.index] = (shared.values.double() - own.double()).numpy()

            return left

        self._given: dict[int, np.ndarray] = {}
        self._before: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._means: dict[int, np.ndarray] = {}
        #: What parameters keep in the place of a residual, until the round has its entry.
        self._unsent: dict[int, np.ndarray] = {}
        for shared in updates._every:
            shared.move = moving(shared, shared.move)
            shared.difference = taking(shared, shared.difference)
            shared.difference_again = taking(shared, shared.difference_again)
            shared.take_unsent = leaving(shared, shared.take_unsent)

        def applying(goes_on: bool = False) -> None:
            name = updates._replicas._name
            try:
                apply(goes_on)
            finally:
                after = updates._replicas._name
                if self._pending is not None and after == (self._pending[1], self._pending[3]) != name:
                    self._write(moved=True)
                self._pending = None

        def following(arrival: Any, *sent: Any) -> None:
            follow(arrival, *sent)
            if arrival.ending == "counted" and self._pending is not None:
                self._write(moved=False)
            if arrival.ending == "counted" or arrival.healed is not None:
                self._pending = None

        updates._send, updates._apply, updates._follow = sending, applying, following

    def detach(self) -> None:
        """Let go of the parameters, which would keep the `LocalUpdates`."""
        for shared in self.updates._every:
            del shared.difference, shared.difference_again, shared.move, shared.take_unsent

    def _kept(self, shared: GlobalParameters) -> np.ndarray:
        named = self.updates._feedback.by_name()
        zero = {slot.name: torch.zeros(slot.shape) for slot in shared.slots}
        return np.concatenate([named.get(s.name, zero[s.name]).double().flatten().numpy() for s in shared.slots])

    def _check_kept(self, shared: GlobalParameters) -> None:
        """Between rounds residuals stay, whatever views come and go. Narrow ones are rounded again where those of owned
        slices are added."""
        last = self._last_kept.get(shared.bucket.index)
        if last is None:
            return
        strategy: Any = self.updates._feedback.strategy
        narrow = getattr(strategy, "dtype", torch.float32) != torch.float32
        slack = float(np.abs(last).max(initial=0.0)) / 254 if narrow else 1e-6  # of int8; of bfloat16 less
        if not np.allclose(last, self._kept(shared), rtol=1e-5, atol=slack):
            self.problems.append(f"the residual of bucket {shared.bucket.index} has changed between two rounds")

    def last_words(self) -> list[Entry]:
        """All entries of one that is about to be killed, with the round that it has sent, which others may complete."""
        if self._pending is None:
            return self.entries
        updates: Any = self.updates
        _, view, _, number, _ = self._pending
        if updates._replicas._name == (view, number):
            return [*self.entries, self._entry(moved=True)]
        return [*self.entries, replace(self._entry(moved=False), digest=None)]

    def _write(self, moved: bool) -> None:
        self._last_kept |= {shared.bucket.index: self._kept(shared) for shared in self._pending[0]}
        self.entries.append(self._entry(moved))

    def _entry(self, moved: bool) -> Entry:
        parts, view, ranks, number, before = self._pending

        def flat(pick: Any) -> np.ndarray:
            return np.concatenate([pick(shared) for shared in parts])

        return Entry(
            (view, number), before, ranks,
            flat(lambda s: self._given[s.bucket.index]),
            flat(lambda s: self._before[s.bucket.index][0]),
            flat(lambda s: self._kept(s) + self._unsent.pop(s.bucket.index, 0.0)),
            flat(lambda s: ranks * (self._before[s.bucket.index][1] - s.values.double().numpy())) if moved else None,
            flat(lambda s: ranks * self._means[s.bucket.index]) if moved else None,
            state_digest(self.updates),
            max(float(shared.values.abs().max()) for shared in parts),
        )  # fmt: skip


def state_digest(updates: LocalUpdates) -> str:
    """Of the global parameters and their momentum."""
    found = hashlib.blake2b(digest_size=8)
    for shared in updates._every:
        for flat in (shared.values, shared.momentum):
            if flat is not None:
                found.update(flat.numpy().tobytes())
    return found.hexdigest()


def chain(every: Iterable[list[Entry]], last: Name) -> dict[Name, list[Entry]]:
    """The rounds that led to a state, the last one first. Rounds that no state goes back to are left out.

    Raises:
        AssertionError: states of one name have different bits.
    """
    by_name: dict[Name, list[Entry]] = {}
    for entries in every:
        for entry in {entry.name: entry for entry in reversed(entries)}.values():
            by_name.setdefault(entry.name, []).append(entry)
    for name, found in by_name.items():
        digests = {entry.digest for entry in found if entry.digest is not None}
        assert len(digests) <= 1, f"states of the name {name} differ: {digests}"
    led: dict[Name, list[Entry]] = {}
    while last in by_name and last not in led:
        led[last] = by_name[last]
        before = {entry.before for entry in led[last]}
        assert len(before) == 1, f"the round {last} was made from {before}"
        last = before.pop()
    return led


def check(every: Iterable[list[Entry]], last: Name, law: bool = True, plain: bool = True, returns: bool = False) -> int:
    """Check the rounds that led to a state: equal bits for equal names, and the law where all members have entries.
    Returns the number of rounds whose law was checked.

    Args:
        law: the codec keeps what it leaves out.
        plain: θ0 steps by the mean itself.
        returns: the exchange's last messages say which entries a rank has sent in vain. One that has not got these
            loses such entries; the law holds with them.
    """
    checked = 0
    for name, entries in chain(every, last).items():
        moves = [(e.moved, e.total) for e in entries if e.moved is not None and e.total is not None]
        assert all(np.array_equal(a, b) for move in moves for a, b in zip(moves[0], move, strict=True)), (
            f"round {name} has moved replicas differently"
        )
        if law and moves and len(entries) == entries[0].ranks:
            put_in = sum(entry.given + entry.kept_before for entry in entries)
            unsent = moves[0][1] == 0
            kept = sum(
                np.where(unsent, entry.given + entry.kept_before, entry.kept_after)
                if returns and entry.moved is None
                else entry.kept_after
                for entry in entries
            )
            size = max(float(np.abs(entry.given + entry.kept_before).max()) for entry in entries)
            allowed = [("mean", moves[0][1], 1e-6 * size * len(entries) + SUBNORMAL)]
            if plain:
                rounding = 2.0**-23 * len(entries) * (entries[0].largest + 2 * float(np.abs(put_in).max())) + SUBNORMAL
                allowed.append(("step", moves[0][0], rounding))
            for what, out, most in allowed:
                worst = float(np.abs(put_in - out - kept).max())
                assert worst <= most, f"round {name} of {len(entries)}: its {what} is off by {worst:.1e} of {most:.1e}"
            checked += 1
    return checked
