"""Subsets of the ranks that run operations of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .consensus.negotiation import REMOVE
from .runtime import context
from .runtime.arithmetic import integers
from .runtime.channel import Channel
from .runtime.context import engine
from .runtime.engine import Engine
from .runtime.operations import Operation


class ProcessSet:
    """Ranks that run operations among themselves. It works once `init(process_sets=…)` or `add_process_set` has it.

    Args:
        ranks: global ranks, in any order; or an mpi4py communicator of them.
    """

    def __init__(self, ranks: Any) -> None:
        if hasattr(ranks, "allgather"):
            ranks = ranks.allgather(engine().rank)
        expected = "one or more distinct ranks, or an mpi4py communicator"
        self._ranks: list[int] | None = sorted(integers("ranks", ranks, expected))
        if len(set(self._ranks)) != len(self._ranks) or not self._ranks or self._ranks[0] < 0:
            raise ValueError(f"ranks={self._ranks}: expected {expected}")
        self._place: tuple[Engine, int] | None = None

    @property
    def process_set_id(self) -> int | None:
        """The same number on all ranks; None while this set is not registered."""
        if self._place is None or self._place[0] is not context._engine:
            return None
        return self._place[1]

    @property
    def ranks(self) -> list[int]:
        """Global ranks, ascending."""
        return list(range(engine().size)) if self._ranks is None else list(self._ranks)

    def size(self) -> int | None:
        """Number of ranks, or None while it is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's number within the set; None if it is not in it, or the set is not registered."""
        return self.ranks.index(engine().rank) if self.included() else None

    def included(self) -> bool | None:
        """True if this process is in the set; None while it is not registered."""
        return None if self.process_set_id is None else engine().rank in self.ranks

    def __getstate__(self) -> dict[str, Any]:
        return {"_ranks": self._ranks, "_place": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        return self  # in this process it stands for the same ranks, which have registered this one

    def __repr__(self) -> str:
        ranks = "all" if self._ranks is None else self._ranks
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={ranks})"


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        super().__init__([0])
        self._ranks = None

    @property
    def process_set_id(self) -> int:
        return 0

    def __reduce__(self) -> str:
        return "global_process_set"


#: All ranks; its id is 0.
global_process_set = _GlobalProcessSet()

_registered: dict[int, ProcessSet] = {}


class _Change(Operation):
    """Every rank makes a process set, or gives one up, at the same place in the order of operations."""

    def __init__(self, engine: Engine, must_match: dict[str, Any]) -> None:
        self.kind = "process_set.add" if "ranks" in must_match else REMOVE  # type: ignore[misc]
        super().__init__(self.kind, 0)
        self._engine, self._must_match = engine, must_match

    def must_match(self) -> dict[str, Any]:
        return self._must_match

    def run(self, channel: Channel, info: dict[str, Any]) -> int:
        if "ranks" not in self._must_match:
            self._engine.remove_channel(self._must_match["id"])
            return int(self._must_match["id"])
        if self._engine.rank in self._must_match["ranks"]:
            self._engine.add_channel(info["id"], self._must_match["ranks"])
        return int(info["id"])


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set; a collective of all ranks, with equal arguments.

    Args:
        process_set: or its ranks.

    Returns:
        The process set, which has an id now.

    Raises:
        ValueError: there is one of the same ranks, or a rank does not exist.
        HorovodInternalError: the ranks passed different ones.
    """
    process_set, here = _checked(process_set), engine()
    set_id = here.submit(_Change(here, {"ranks": process_set.ranks})).wait()
    process_set._place = (here, set_id)
    _registered[set_id] = process_set
    return process_set


def _checked(process_set: ProcessSet | Sequence[int], others: Sequence[ProcessSet] = ()) -> ProcessSet:
    """Raises ValueError unless it can be added after `others`."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    size = engine().size
    if process_set.ranks[-1] >= size:
        raise ValueError(f"{process_set.ranks}: expected ranks below size() = {size}")
    if any(other.ranks == process_set.ranks for other in others):
        raise ValueError(f"process_sets has ranks {process_set.ranks} twice: pass each process set once")
    for known in [global_process_set, *_registered.values()]:
        if known.process_set_id is not None and known.ranks == process_set.ranks:
            raise ValueError(
                f"a process set of ranks {process_set.ranks} exists already, with id {known.process_set_id}: use it, "
                "or remove it first"
            )
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give up a process set; a collective of all ranks. Its operations must have been synchronized.

    Returns:
        False for the global one, and for one that is not registered; else True.
    """
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set={process_set!r}: expected what add_process_set() returns")
    set_id = process_set.process_set_id
    if not set_id:
        return False
    engine().submit(_Change(engine(), {"id": set_id})).wait()
    process_set._place = None
    _registered.pop(set_id, None)
    return True


def process_set_ids() -> list[int]:
    """The ids of all process sets there are, the global one's first."""
    return [0, *sorted(id for id, each in _registered.items() if each.process_set_id is not None)]


def _register(process_sets: Sequence[Any]) -> None:
    _registered.clear()
    checked: list[ProcessSet] = []
    for process_set in process_sets:  # all, before the first: ranks leave then before any message
        checked.append(_checked(process_set, checked))
    for process_set in checked:
        add_process_set(process_set)


context.started.append(_register)
