"""The decision at a change of view, over drawn histories: deaths, cuts, and changes that only some members finish."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gradwire.hooks.local_sgd.verdict import Report, decide
from hypothesis import given, settings
from hypothesis import strategies as st


@dataclass
class Member:
    """A replica without its tensors: its state is the list of all that rounds have counted."""

    number: int
    report: Report = field(default_factory=lambda: Report(0, 0, 0, 0, 0, True, 0, 0, False))
    history: tuple[frozenset[tuple[int, int]], ...] = ()
    pieces: int = 0  # of its own training: each is to be counted once
    #: It has been in every view since it came.
    faithful: bool = True
    lost: set[int] = field(default_factory=set)

    @property
    def piece(self) -> tuple[int, int]:
        return self.number, self.pieces

    def counted(self) -> bool:
        return any(self.piece in each for each in self.history)


def report_of(member: Member) -> Report:
    return replace(member.report, digest=hash(member.history))


def change(number: int, members: list[Member], finishing: set[int]) -> bool:
    """A change to view `number`; those not in `finishing` learn nothing of it. True if all have finished."""
    verdict = decide(number, [report_of(member) for member in members])
    assert not verdict.diverged
    born = [member.report.born for member in members if member.report.born]
    assert verdict.born == min(born, default=number)  # the older training goes on
    assert set(verdict.donors) | set(verdict.needy) == set(range(len(members)))
    assert verdict.teller in verdict.donors
    known = {rank for rank in verdict.donors if not members[rank].report.fresh}
    assert verdict.teller in known or not known
    source = members[verdict.donors[0]].history
    for rank, member in enumerate(members):
        if rank in verdict.donors:
            assert member.history == source
        if member.number not in finishing:
            continue
        ending = verdict.endings[rank]
        if rank in verdict.needy:
            member.history = source
        sent = member.report.sent_in > 0
        if sent and ending == "counted":
            assert member.counted()
            member.pieces += 1
        elif ending == "repeated":
            assert not member.counted()
        elif ending == "lost" and member.report.agreed:
            assert not member.faithful or member.report.born != verdict.born
            member.pieces += 1
        view, rounds = verdict.name
        member.report = replace(member.report, born=verdict.born, agreed=number, view=view, rounds=rounds, sent_in=0)
        if rank in verdict.needy:
            member.report = replace(member.report, fresh=True)
    return finishing >= {member.number for member in members}


@settings(max_examples=600)
@given(st.data())
def test_members_agree_and_survivors_lose_nothing(data: st.DataObject) -> None:
    draw = data.draw
    members = [Member(number) for number in range(draw(st.integers(1, 4)))]
    view: list[Member] = []  # of those who have finished the last change, all of its members or none
    for number in range(1, draw(st.integers(2, 12))):
        present = [m for m in members if draw(st.integers(0, 2))] or members[:1]
        if draw(st.booleans()) and len(members) < 7:
            members.append(Member(len(members)))
            present = [members[-1]] if draw(st.integers(0, 5)) == 0 else [*present, members[-1]]
        for member in members:
            member.faithful &= member in present or not member.report.agreed
        unfinished = draw(st.integers(0, 4)) == 0
        finishing = {m.number for m in present if not unfinished or draw(st.booleans())}
        if not change(number, present, finishing):
            for member in present:  # it has taken part, whatever it knows
                member.faithful &= member.number in finishing or not member.report.agreed
            continue
        view = present
        assert len({m.history for m in view}) == 1
        assert len({(m.report.view, m.report.rounds) for m in view}) == 1
        for _ in range(draw(st.integers(0, 2))):
            complete(number, view, set(range(len(view))))
        sending = [m for m in view if draw(st.integers(0, 4))]
        for member in sending:
            member.report = replace(member.report, sent_in=number, fresh=False)
        if len(sending) == len(view):
            complete(number, view, {i for i in range(len(view)) if draw(st.booleans())})


def complete(number: int, view: list[Member], done: set[int]) -> None:
    """A round that all have sent, and that some have completed."""
    counts = frozenset(member.piece for member in view)
    for index, member in enumerate(view):
        member.report = replace(member.report, sent_in=number, fresh=False)
        if index in done:
            member.history = (*member.history, counts)
            member.pieces += 1
            member.report = replace(
                member.report, agreed=number, view=number, rounds=member.report.rounds + 1, sent_in=0
            )
