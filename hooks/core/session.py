"""What ties a state to the other ranks: the groups, what was compared when they met, and the pipeline."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..auto.planner import Choice, Fallback, Planner
from ..comm import handshake
from ..comm.group import Group
from ..comm.pipeline import Pipeline
from ..comm.ports import Work
from ..comm.rendezvous import HANDSHAKE_TIMEOUT, meeting_timeout
from ..comm.topology import make_topology
from ..network import probe
from .grad_scaler import Scaling, check_equal

CONSTRUCT = "Construct {} with equal arguments and models on every rank"
RAISED, LOADED = "what raised before", "loaded checkpoints"


class Session:
    """Constructing it is a collective: the ranks meet, and compare what each says of itself.

    Args:
        model_group: the model's process group.
        given: the one that the user wants gradients to take, or None.
        device: where gradients are.
        description: what must be equal on all ranks, by name.
        problem: why this rank cannot start, if it cannot: the others hear of it, and it is raised here.
        topology, fallback: `CompressState`'s.
        probes: whether to measure the group, for `exchange="auto"`.
        dense_path: steps in which all is dense may go without the pipeline.
        owner: what the user constructs, for messages.

    Attributes:
        group: for gradients, on the pipeline.
        control: for what the host has to know.
        dense_group: for gradients of steps in which all is dense; None where there are none such.
        planner: decides how buckets go.
        pipeline: carries what is under way.

    Raises:
        RuntimeError: a rank did not arrive.
        ValueError: the ranks disagree, or one cannot start; on every rank alike.
    """

    #: What ranks must have done alike before a step: which backward passes have raised within one, and how far each had
    #: come, and before how many a checkpoint was loaded. Steps keep it, so it is replaced and never changed.
    _past: Mapping[str, str] = {RAISED: "nothing", LOADED: "none"}
    #: Steps that a load came before, and the seed of what has been loaded since the last one.
    _loads = 0
    _seed: int | None = None

    def __init__(
        self,
        model_group: Any,
        given: dist.ProcessGroup | None,
        device: torch.device,
        description: Mapping[str, Any],
        problem: Exception | None,
        topology: Any,
        fallback: Fallback,
        *,
        probes: bool,
        dense_path: bool,
        owner: str = "CompressState",
    ) -> None:
        ranks = dist.get_process_group_ranks(model_group)
        if problem is None and given is not None and dist.get_process_group_ranks(given) != ranks:
            problem = ValueError(
                f"process_group has the ranks {dist.get_process_group_ranks(given)}, not those of the model's group, "
                f"{ranks}: make one of the same ranks"
            )
        carrier, timeout = model_group if given is None else given, meeting_timeout(model_group)
        blocking = Group.blocks(carrier, device)
        try:
            # What a user passes may be wrong on some rank, so ranks meet in a group of our own.
            self.control = Group.of_ranks(ranks, timeout)
            error = None if problem is None else {"error": f"{type(problem).__name__}: {problem}"}
            whose = "none" if given is None else "one of its own"
            says = {**description, "process_group": whose}
            shares = blocking and given is not None and (given is model_group or bool(_users_of(given)))
            sides = self.control.all_gather_object(error or {"says": says, "shares": shares})
        except RuntimeError as failure:
            raise RuntimeError(
                f"gradwire could not reach all ranks within {timeout.total_seconds():.0f} s: every rank must construct "
                f"{owner}, and ranks that need longer want init_process_group(timeout=…). {failure}"
            ) from failure
        if problem is not None:
            raise problem
        handshake.compare([side.get("says", side) for side in sides], CONSTRUCT.format(owner))
        self.control.follow_timeout(model_group)  # before its channels are made, which have its timeout
        # NCCL's collectives order themselves on streams, so the model's own group serves; Gloo needs one apart.
        # Several states may use one group: each has a channel of it. Its collectives are the first one's, or in the
        # model's own DDP's: Gloo counts them, and two threads would begin them in an order of their own on each rank.
        group = self.control if blocking and given is None else Group(carrier)
        group.shared = any(side["shares"] for side in sides)
        self.group = group.channel("state")
        _users_of(given).add(self)
        nodes = make_topology(topology, ranks, self.group, carrier, blocking)
        for part in (nodes.inside, nodes.between):
            if part is not None and blocking:
                part.follow_timeout(model_group)
        # Where the user has named a group, nothing goes elsewhere.
        self.dense_group = Group(carrier) if dense_path and not group.shared else None
        self.planner = Planner(nodes, device, fallback, inline=not blocking)
        if probes:
            self.planner.calibrate()
        #: Whether ranks have saved their parts of the state unequally often, as seen by all of them alike.
        self.uneven_saves = False
        #: Whether a rank has seen, before the step that ranks compared last, that the network has changed.
        self.drifted = False
        for used in {self.group.traffic: self.group, self.control.traffic: self.control}.values():
            used.hold_unfinished(self)
        self._words_from(self.control)
        self.pipeline = Pipeline(f"gradwire-{self.group.rank}", device, threaded=blocking)

    def _words_from(self, control: Group) -> None:
        """Where ranks tell each other what comes next, and the memory for it."""
        self._mine = torch.zeros(6, dtype=torch.int64, device="cpu")
        self._all = torch.zeros(control.size, 6, dtype=torch.int64, device="cpu")
        self._said = self._mine.numpy()  # the same memory: writing there takes less than a tensor to copy from
        self._words = control.channel("steps")
        self._port = self._words.small_gather_port(self._all, self._mine)

    @property
    def announced(self) -> Work:
        """What arrives from the others after `announce`; `compare` waits for it too."""
        return self._under_way

    def announce(
        self,
        step: int,
        choice: Choice,
        history: Mapping[str, str],
        saves: int,
        drift: bool,
        scaling: Scaling | None,
        patience: timedelta | None = None,
        joined: bool = False,
    ) -> None:
        """Begin to tell the other ranks what comes next here. From host to host, so that no GPU is waited for.

        Args:
            past: as it was when the step began, which may have raised meanwhile.
            saves: how often this rank has saved its part of the state.
            drift: whether this rank sees that the network has changed.
            scaling: what the loss scaler has done, as far as this rank knows.
            patience: how long the others may take to tell, where that is not the group's timeout.
            joined: whether this rank has run out of data, and gives zeros.
        """
        self._words.timeout, usual = patience or self._words.timeout, self._words.timeout
        digest = choice.digest ^ (_digest(repr(sorted(history.items()))) if history is not Session._past else 0)
        self._announce(step, digest, saves, drift + 2 * joined, *(() if scaling is None else scaling.words()))
        self._words.timeout = usual

    def raised(self, step: int, names: Iterable[str]) -> None:
        """A backward pass has raised before its step was whole, after the gradients of these. Ranks must have sent the
        same of it: what one has not, another would take from the next step. So ranks compare it."""
        before = "" if self._past[RAISED] == "nothing" else f", and before that {_digest(self._past[RAISED]):x}"
        self._past = {**self._past, RAISED: f"step {step} after {sorted(names)}{before}"}

    def loaded(self, seed: int) -> None:
        """A checkpoint has been loaded: the next step makes exchanges again, on channels of their own, with draws of
        this seed. What one rank sends on a new channel, another would wait for on the old one, so ranks compare it."""
        self._seed = seed

    def history(self) -> Mapping[str, str]:
        """What ranks must have done alike before the step that begins now: for `announce` and `compare`."""
        if self._seed is not None:
            self._loads += 1
            self._past = {**self._past, LOADED: f"{self._loads}, the last one of seed {self._seed}"}
            self._seed = None
        return self._past

    def begin(self) -> None:
        """Messages of a step are in flight from now on: what is posted meanwhile is announced when one has ended."""
        for traffic in {self.group.traffic, self.control.traffic}:
            traffic.begin(self)

    def post_receives(self) -> None:
        """Between two steps: be ready for what the others will tell."""
        self._port.post_receives()

    def end(self) -> None:
        """All messages of the step have arrived."""
        for traffic in {self.group.traffic, self.control.traffic}:
            traffic.end(self)

    def compare(self, choice: Choice, history: Mapping[str, str]) -> None:
        """Wait for what the others have announced, as this rank has.

        Raises:
            ValueError: they are at another step, mean something else, or scale their losses otherwise; on every rank
                alike.
        """
        means = {"error_feedback": choice.feedback, "way": choice.candidate, **history}
        rows = self._compare("a training step", {"codec": str(choice.codec), "exchange": choice.exchange, **means})
        check_equal([row[4:] for row in rows])

    def share(self) -> float:
        """After `announced`: how many ranks there are for each that has not joined."""
        return len(self._all) / max(1, sum(not row[3] & 2 for row in self._all.tolist()))

    def scaling(self) -> Scaling | None:
        """After `compare`: what the loss scaler has done by the word of the first rank that knows, if one does."""
        for row in self._all.tolist():
            if (told := Scaling.of(row[4:])) is not None:
                return told
        return None

    def agree(self, call: str, step: int, patience: timedelta | None = HANDSHAKE_TIMEOUT) -> None:
        """Make sure that all ranks are in the same call, at the same step.

        Args:
            patience: how long the others may take to come; None: the group's timeout.

        Raises:
            ValueError: they are not; on every rank alike.
            RuntimeError: a rank did not come.
        """
        self._words.timeout, usual = patience or self._words.timeout, self._words.timeout
        try:
            self._announce(step, _digest(call))
            self._compare(call, {})
        except RuntimeError as failure:
            raise RuntimeError(
                f"gradwire: not every rank called {call}, which each must at this step. {failure}"
            ) from failure
        finally:
            self._words.timeout = usual

    def refuse(self, problem: str, patience: timedelta | None = None) -> None:
        """Tell ranks that are in a step, or come to one, why this one is not.

        Args:
            patience: how long these may take to come; None: the group's timeout.

        Raises:
            ValueError: it, on every rank alike.
            RuntimeError: a rank did not come.
        """
        self._words.timeout, usual = patience or self._words.timeout, self._words.timeout
        try:
            self._announce(-1, _digest(problem))
            self._compare("", {"error": problem})
        finally:
            self._words.timeout = usual

    def _announce(self, *words: int) -> None:
        self._said[: len(words)], self._said[len(words) :] = words, 0
        self._under_way = self._port.start()

    def _compare(self, call: str, means: dict[str, Any]) -> list[list[int]]:
        self._under_way.wait()
        rows, mine = self._all.tolist(), self._mine.tolist()
        if any(row[:2] != mine[:2] for row in rows):
            remedy = (
                "Every rank must make the same calls with the same arguments, and resume from one step's checkpoint"
            )
            handshake.compare(self.control.all_gather_object({"call": call, "step": mine[0], **means}), remedy)
        self.uneven_saves |= any(row[2] != mine[2] for row in rows)
        # To measure it takes collectives.
        self.drifted = any(row[3] & 1 for row in rows) and not self.group.shared
        return rows

    def averaged(self, numbers: list[float]) -> list[float]:
        """The ranks' mean of each number, the same on all. A collective."""
        return probe.averaged(self.control, torch.device("cpu"), numbers)


#: What uses a process group that a user has named.
_users: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Session]] = weakref.WeakKeyDictionary()


def _users_of(given: dist.ProcessGroup | None) -> weakref.WeakSet[Session]:
    return weakref.WeakSet() if given is None else _users.setdefault(given, weakref.WeakSet())


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
