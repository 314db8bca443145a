"""The files of a checkpoint that ranks write beside each other, in any order, and may be killed between."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gradwire.trainers import files
from hypothesis import given, settings
from hypothesis import strategies as st


class State:
    """What a rank keeps: its number."""

    def __init__(self, rank: int, step: int) -> None:
        self.saved: dict[str, Any] = {"step": step, "residuals": {f"rank {rank}": rank}}

    def state_dict(self) -> dict[str, Any]:
        return self.saved

    def load_state_dict(self, saved: dict[str, Any], strict: bool) -> None:
        self.saved = saved


@contextmanager
def ranked(rank: int, size: int) -> Iterator[None]:
    with patch.object(files.dist, "get_rank", lambda: rank), patch.object(files.dist, "get_world_size", lambda: size):
        yield


def save(folder: Path, rank: int, size: int, step: int, name: str = "gradwire") -> None:
    with ranked(rank, size):
        files.save(State(rank, step), folder, name)  # type: ignore[arg-type]


def put(folder: Path, size: int, step: int) -> None:
    """A checkpoint that has been there before, whatever lies beside it."""
    for rank in range(size):
        save(folder / "apart", rank, size, step)
    for file in (folder / "apart").iterdir():
        file.rename(folder / file.name)


def whole(folder: Path, size: int, step: int, name: str = "gradwire") -> bool:
    """Whether each rank's file of a checkpoint is there, and loads."""
    steps = set()
    for rank in range(size):
        state: Any = State(rank, -1)
        with ranked(rank, size):
            if (folder / f"{name}_{rank}_of_{size}.pt").exists():
                files.load(state, folder, name)
        steps.add(state.saved["step"])
    return steps == {step}


@settings(max_examples=25)
@given(
    before=st.integers(1, 3),
    order=st.integers(1, 3).flatmap(lambda size: st.permutations(range(size))),
    earlier=st.booleans(),
    beside=st.sampled_from(["gradwire2", "gradwire_other"]),
)
def test_a_checkpoint_is_whole_at_any_time(before: int, order: list[int], earlier: bool, beside: str) -> None:
    """Of as many ranks or of others, in a folder that has one of an earlier step, and another state's."""
    size = len(order)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if earlier:  # a run of as many ranks
            put(folder, size, 2)
        for rank in range(4):
            save(folder, rank, 4, 5, beside)
        put(folder, before, 5)
        for written, rank in enumerate(order, 1):
            save(folder, rank, size, 7)
            assert whole(folder, size, 7) == (written == size)
            assert before == size or whole(folder, before, 5) == (written < size)
        assert whole(folder, 4, 5, beside)
