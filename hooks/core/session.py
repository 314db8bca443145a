"""The tie of a state to the other ranks: groups, handshake, announcements and the pipeline."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..auto.planner import Choice, Fallback, Planner
from ..comm import handshake
from ..comm.between_steps import Reentered
from ..comm.coded_message import NOT_CODED
from ..comm.group import Group
from ..comm.pipeline import Pipeline
from ..comm.ports import Work
from ..comm.rendezvous import HANDSHAKE_TIMEOUT, meeting_timeout
from ..comm.send_queue import SendQueue
from ..comm.threads import start_thread
from ..comm.topology import make_topology
from ..network import probe
from ..training.grad_scaler import Scaling, check_equal

CONSTRUCT = "Construct {} with equal arguments and models on every rank"
#: Words of an announcement: step, digest of its meaning, number of saves, flags, and a scaling's two.
WORDS = 6
RAISED, LOADED = "failed backward passes", "loaded checkpoints"


class Announcement:
    """Words that ranks announce once a step. No GPU is waited for.

    Args:
        channel: a channel of the ranks, for these alone.
        width: number of words, of 64 bits each.

    Attributes:
        in_flight: the other ranks' words, after `start`, to be waited for; None before the first one.
    """

    def __init__(self, channel: Group, width: int) -> None:
        self._channel = channel
        mine = torch.zeros(width, dtype=torch.int64, device="cpu")
        self._every = torch.zeros(channel.size, width, dtype=torch.int64, device="cpu")
        self._mine = mine.numpy()  # the same memory: writing to it is faster than through torch
        self._port = channel.small_gather_port(self._every, mine)
        self.in_flight: Work | None = None

    def start(self, *words: int) -> None:
        """Announce words; the remaining ones are 0."""
        self._mine[: len(words)], self._mine[len(words) :] = words, 0
        self.in_flight = self._port.start()

    @property
    def words(self) -> list[list[int]]:
        """All ranks' words, as of the last wait."""
        words: list[list[int]] = self._every.tolist()
        return words

    def equal(self) -> bool:
        """True if all ranks have announced the same words last; waits for them, once."""
        if self.in_flight is not None:
            try:
                self.in_flight.wait()
            except RuntimeError as error:
                if not isinstance(error, Reentered):
                    self.in_flight = None
                raise
            self.in_flight = None  # not before: a signal handler may raise meanwhile
            self.post_receives()
        return len(set(map(tuple, self.words))) == 1

    def post_receives(self) -> None:
        """Post the receives of the next announcement, between two steps."""
        self._port.post_receives()

    @contextmanager
    def within(self, patience: timedelta | None) -> Iterator[None]:
        """Wait for other ranks no longer than `patience`; None: the group's timeout."""
        usual, self._channel.timeout = self._channel.timeout, patience or self._channel.timeout
        try:
            yield
        finally:
            self._channel.timeout = usual


def digest(text: str) -> int:
    """A text as a word; equal texts have equal ones."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


class Session:
    """The groups of ranks, and what these agree on. Constructing it is a collective: ranks compare their descriptions.

    Args:
        owner: the class or function that the user calls, for messages.
        model_group: the model's process group; or a group over Gloo that these ranks have made for this alone, and that
            becomes `control`.
        device: the gradients' device.
        describe: returns values that must be equal on all ranks, by name; not called if there is a problem.
        problem: the reason why this rank cannot start, if any: it is raised here, and reported to the other ranks.
        given: the process group that the user wants gradients to take, if any.
        topology, fallback: `CompressState`'s.
        probes: measure the group, for `exchange="auto"`.
        dense_path: allow all-dense steps without the pipeline.
        entropy_coding: exchanges code their messages by zstandard.

    Attributes:
        group: carries gradients, on the pipeline.
        control: carries words between hosts.
        dense_group: carries gradients of all-dense steps; None where these take the pipeline.
        planner: decides on the exchange of each bucket.
        pipeline: runs the exchanges.

    Raises:
        RuntimeError: a rank did not arrive.
        ValueError: the ranks disagree, or one cannot start; on every rank alike.
    """

    #: Events before a step that all ranks must have in common: the backward passes that raised within a step and how
    #: far each had come, and the loaded checkpoints. Steps hold it, so it is replaced and never changed.
    _history: Mapping[str, str] = {RAISED: "nothing", LOADED: "none"}
    #: Number of steps that followed a load, and the seed of the checkpoint loaded since the last step.
    _loads = 0
    _seed: int | None = None

    def __init__(
        self,
        owner: str,
        model_group: Any,
        device: torch.device,
        describe: Callable[[], Mapping[str, Any]],
        problem: Exception | None,
        *,
        given: dist.ProcessGroup | None = None,
        topology: Any = None,
        fallback: Fallback = None,
        probes: bool = False,
        dense_path: bool = False,
        entropy_coding: bool = False,
    ) -> None:
        made = model_group if isinstance(model_group, Group) else None
        ranks = dist.get_process_group_ranks(model_group) if made is None else list(made.ranks)
        if problem is None and given is not None and dist.get_process_group_ranks(given) != ranks:
            problem = ValueError(
                f"process_group has the ranks {dist.get_process_group_ranks(given)}, not those of the model's group, "
                f"{ranks}: make one of the same ranks"
            )
        if problem is None and entropy_coding and device.type != "cpu":
            problem = ValueError(NOT_CODED.format(device=device))
        whose = "none" if given is None else "one of its own"
        side = handshake.side({} if problem else {**describe(), "process_group": whose}, problem)
        process_group, timeout = model_group if given is None else given, meeting_timeout(model_group)
        blocking = made is not None or Group.blocks(process_group, device)
        try:
            # Some rank's arguments may be wrong, so ranks meet in a group of our own.
            self.control = Group.of_ranks(ranks, timeout) if made is None else made
            shares = blocking and given is not None and (given is model_group or bool(_users_of(given)))
            # Those that have made a group for this have compared their sides before.
            sides = [(side, shares)] if made is not None else self.control.all_gather_object((side, shares))
        except RuntimeError as failure:
            raise RuntimeError(
                f"gradwire could not reach all ranks within {timeout.total_seconds():.0f} s: every rank must construct "
                f"{owner}, and ranks that need longer want init_process_group(timeout=…). {failure}"
            ) from None
        if problem is not None:
            raise problem
        handshake.compare([side for side, _ in sides], CONSTRUCT.format(owner))
        self.control.follow_timeout(model_group)  # before its channels are made, which have its timeout
        # NCCL's collectives order themselves on streams, so the model's own group serves; Gloo needs one apart.
        # Several states may share a group: each has a channel of it. Only the first uses its collectives, and in the
        # model's own group only DDP: Gloo counts them, and two threads would start them in different orders on each
        # rank.
        group = self.control if blocking and given is None else Group(process_group)
        group.shared = any(shared for _, shared in sides)
        self.group = group.channel("state")
        #: Where first messages of buckets wait for the link, once messages are ordered.
        self.sends = self.group.sends = SendQueue()
        _users_of(given).add(self)
        nodes = make_topology(topology, ranks, self.group, process_group, blocking)
        for part in (nodes.inside, nodes.between):
            if part is not None and blocking:
                part.follow_timeout(model_group)
        for part in (self.group, nodes.between):  # inside a node links are fast
            if part is not None:
                part.entropy_coding = entropy_coding
        # All messages go through the group that the user has named.
        self.dense_group = Group(process_group) if dense_path and not group.shared else None
        self.planner = Planner(nodes, device, fallback, inline=not blocking)
        if probes:
            self.planner.calibrate()
        #: True if ranks have saved their parts of the state unequally often; alike on all ranks.
        self.uneven_saves = False
        #: True if a rank saw a change of the network before the step that ranks compared last.
        self.drifted = False
        for used in {self.group.traffic: self.group, self.control.traffic: self.control}.values():
            used.hold_unfinished(self)
        self._announcement = Announcement(self.control.channel("steps"), WORDS)
        self.pipeline = Pipeline(f"gradwire-{self.group.rank}", device, threaded=blocking)

    @property
    def announced(self) -> Work:
        """The announcements of the other ranks, in flight after `announce`; `compare` waits for them, too."""
        assert self._announcement.in_flight is not None
        return self._announcement.in_flight

    def announce(
        self,
        step: int,
        choice: Choice,
        history: Mapping[str, str],
        *,
        saves: int = 0,
        drift: bool = False,
        scaling: Scaling | None = None,
        patience: timedelta | None = None,
        joined: bool = False,
    ) -> None:
        """Start to announce this rank's next step to the other ranks. From host to host, without a wait for a GPU.

        Args:
            history: `history` as of the begin of the step, which may have raised since.
            saves: number of times that this rank has saved its part of the state.
            drift: this rank sees that the network has changed.
            scaling: the loss scaler's state, as far as this rank knows.
            patience: time limit for the other ranks' announcements; None: the group's timeout.
            joined: this rank has run out of data, and contributes zeros.
        """
        means = choice.digest ^ (digest(repr(sorted(history.items()))) if history is not Session._history else 0)
        scale = () if scaling is None else scaling.words()
        with self._announcement.within(patience):
            self._announcement.start(step, means, saves, drift + 2 * joined, *scale)

    def raised(self, step: int, names: Iterable[str]) -> None:
        """Note that a backward pass has raised before its step was complete, after the gradients of `names`. Ranks
        compare these: messages that one rank has not sent, another would take from the next step."""
        before = "" if self._history[RAISED] == "nothing" else f", and before that {digest(self._history[RAISED]):x}"
        self._history = {**self._history, RAISED: f"step {step} after {sorted(names)}{before}"}

    def loaded(self, seed: int) -> None:
        """Note that a checkpoint has been loaded: the next step makes new exchanges, on new channels, with draws of
        this seed. Ranks compare this: one would send on a new channel, and another wait on the old one."""
        self._seed = seed

    def history(self) -> Mapping[str, str]:
        """Events before the step that begins now that all ranks must have in common, for `announce` and `compare`."""
        if self._seed is not None:
            self._loads += 1
            self._history = {**self._history, LOADED: f"{self._loads}, the last one of seed {self._seed}"}
            self._seed = None
        return self._history

    def order_messages(self) -> None:
        """From now on buckets' first messages leave by priority, that of the highest index first."""
        if not self.sends.ordered:
            self.sends.ordered = True
            start_thread(f"gradwire-{self.group.rank}-sends", self.sends.run, self.sends, owner=self)

    def begin(self) -> None:
        """Begin a step: receives posted during it are announced at its end."""
        for traffic in {self.group.traffic, self.control.traffic}:
            traffic.begin(self)

    def post_receives(self) -> None:
        """Between two steps: post the receives of the next announcements."""
        self._announcement.post_receives()

    def end(self) -> None:
        """End a step: all of its messages have arrived."""
        for traffic in {self.group.traffic, self.control.traffic}:
            traffic.end(self)

    def compare(self, choice: Choice, history: Mapping[str, str]) -> None:
        """Wait for the announcements of the other ranks, and compare them with this rank's.

        Raises:
            ValueError: ranks differ in the step, its choice or history, or the loss scale; on every rank alike.
        """
        means = {"error_feedback": choice.feedback, "the candidate that auto times": choice.candidate, **history}
        rows = self._compare("a training step", {"codec": str(choice.codec), "exchange": choice.exchange, **means})
        if any(row[4] for row in rows):  # a rank knows a scale
            check_equal([row[4:] for row in rows])

    def share(self) -> float:
        """After `announced`: the number of ranks divided by the number of those that have not joined."""
        rows = self._announcement.words
        return len(rows) / max(1, sum(not row[3] & 2 for row in rows))

    def scaling(self) -> Scaling | None:
        """After `compare`: the scaling announced by the first rank that knows one; None if none does."""
        for row in self._announcement.words:
            if (reported := Scaling.of(row[4:])) is not None:
                return reported
        return None

    def agree(self, call: str, step: int, patience: timedelta | None = HANDSHAKE_TIMEOUT) -> None:
        """Check that all ranks are in the same call, at the same step.

        Args:
            patience: time limit for the other ranks; None: the group's timeout.

        Raises:
            ValueError: they are not; on every rank alike.
            RuntimeError: a rank did not come.
        """
        try:
            with self._announcement.within(patience):
                self._announcement.start(step, digest(call))
                self._compare(call, {})
        except RuntimeError as failure:
            raise RuntimeError(
                f"gradwire: not every rank called {call}, which each must at this step. {failure}"
            ) from None

    def refuse(self, problem: str, patience: timedelta | None = None) -> None:
        """Report to ranks that begin a step why this rank does not.

        Args:
            patience: time limit for these ranks; None: the group's timeout.

        Raises:
            ValueError: the problem; on every rank alike.
            RuntimeError: a rank did not come.
        """
        with self._announcement.within(patience):
            self._announcement.start(-1, digest(problem))
            self._compare("", {"error": problem})

    def _compare(self, call: str, means: dict[str, Any]) -> list[list[int]]:
        self.announced.wait()
        rows = self._announcement.words
        mine = rows[self.control.rank]
        if any(row[:2] != mine[:2] for row in rows):
            remedy = (
                "Every rank must make the same calls with the same arguments, and resume from one step's checkpoint"
            )
            handshake.compare(self.control.all_gather_object({"call": call, "step": mine[0], **means}), remedy)
        self.uneven_saves |= any(row[2] != mine[2] for row in rows)
        # A drifted network is measured again, by collectives, which a shared group may not use.
        self.drifted = any(row[3] & 1 for row in rows) and not self.group.shared
        return rows

    def averaged(self, numbers: list[float]) -> list[float]:
        """The ranks' mean of each number, the same on all. A collective."""
        return probe.averaged(self.control, torch.device("cpu"), numbers)


#: The sessions of each process group that a user has named.
_users: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Session]] = weakref.WeakKeyDictionary()


def _users_of(given: dist.ProcessGroup | None) -> weakref.WeakSet[Session]:
    return weakref.WeakSet() if given is None else _users.setdefault(given, weakref.WeakSet())
