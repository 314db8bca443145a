"""The laws, in configurations that nobody has thought of: drawn, played on all ranks, and made small when they fail."""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from drawn import (
    Close,
    Configuration,
    Copy,
    Event,
    Join,
    Overflow,
    Parameter,
    Raise,
    Rescale,
    Resize,
    Resume,
    Schedule,
    Step,
    ranks_needed,
    script,
    simpler,
    verdict,
)
from drawn_machine import play
from gradwire import (
    QSGD,
    Cast,
    ChunkedTopK,
    Codec,
    Identity,
    Lead,
    Momentum,
    OneBit,
    Outliers,
    PowerSGD,
    Residual,
    Ternary,
    TernGrad,
    TopK,
    Tracking,
)
from gradwire.compress import Feedback
from gradwire.hooks.exchanges import EXCHANGES, possible
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from lacking import SKIPS_BUCKETS, needs_skipped_buckets
from ranks import Pool, RankError

Ranks = Callable[[int], Pool]

CODECS: tuple[Codec, ...] = (
    TopK(0.1), TopK(0.01), TopK(0.5), TopK(1.0), TopK(0.2, values=torch.bfloat16), TopK(0.2, values=torch.int8),
    TopK(0.2, indices="plain"),
    OneBit(), OneBit(block=256), OneBit(block=256, scale="symmetric"),
    QSGD(), QSGD(bits=2, block=256), QSGD(bits=8, rounding="nearest"), TernGrad(), TernGrad(rounding="nearest"),
    Ternary(), ChunkedTopK(), ChunkedTopK(k=20, chunk=256, values=torch.int8), Outliers(OneBit(block=256), 0.05),
    Outliers(QSGD(), 0.1, values=torch.int8), PowerSGD(rank=1), PowerSGD(rank=2),
    Cast(torch.float16), Cast(torch.bfloat16), Identity(),
)  # fmt: skip
SPARSE = tuple(codec for codec in CODECS if codec.block_size is None)
BLOCKS = tuple(codec for codec in CODECS if codec.block_size is not None)
FEEDBACK: tuple[bool | str | Feedback, ...] = (
    "auto", "auto", "auto", True, True, False, Tracking(), Tracking(0.5, clip=1.0),
    Momentum(), Momentum(0.5, nesterov=True, clip=1.0),
    Momentum(0.5, masking=False), Momentum(nesterov=True, masking=False),
    Residual(dtype=torch.bfloat16), Residual(dtype=torch.int8), Lead(), Lead(momentum=0.5, acts_as=0.0),
)  # fmt: skip
SHAPES = ((40, 20), (300,), (1500,), (16, 8, 3, 3), (), (1,), (7,), (0,), (3, 0))


def parameters(draw: st.DrawFn, uses: tuple[str, ...]) -> tuple[Parameter, ...]:
    dtypes = draw(st.sampled_from([(torch.float32,), (torch.bfloat16,), (torch.float32, torch.bfloat16)]))
    result = [Parameter((40, 20), dtype=dtypes[0])]  # there always is one with a gradient
    for _ in range(draw(st.integers(0, 5))):
        shape = draw(st.sampled_from(SHAPES))
        last = len(shape) == 4 and draw(st.booleans())
        result.append(Parameter(shape, draw(st.sampled_from(uses)), draw(st.sampled_from(dtypes)), last))
    return tuple(draw(st.permutations(result)))


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    world_size = draw(st.sampled_from([2, 3, 4]))
    family = draw(st.sampled_from([SPARSE, BLOCKS, CODECS]))
    codecs = [draw(st.sampled_from(family)) for _ in range(draw(st.sampled_from([1, 1, 2, 3])))]
    carried = [name for name in EXCHANGES if all(name in possible(codec) for codec in codecs)]
    feedback = st.sampled_from(FEEDBACK)
    ways: dict[str, Any] = {}
    uses: tuple[str, ...] = ("always", "tied", "frozen")
    how = draw(st.sampled_from(["plain", "unused", "static", *(["skip"] if SKIPS_BUCKETS else [])]))
    if how == "unused":
        ways, uses = {"find_unused_parameters": True}, (*uses, "never", "turns", "some")
    elif how == "static":
        ways, uses = {"static_graph": True}, (*uses, "never")
    elif how == "skip":
        ways = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
        uses = (*uses, "never")
    return Configuration(
        world_size=world_size,
        codec=codecs[0] if len(codecs) == 1 else Schedule(tuple(codecs)),
        exchange=draw(st.sampled_from([*carried, *carried, "hierarchical", "auto"])),
        error_feedback=draw(feedback),
        fallback=draw(st.sampled_from([None, "auto", torch.float32, torch.bfloat16])),
        network=draw(st.sampled_from([1e-7, 1e-9, 1e-12])),
        topology=draw(st.sampled_from([2, 2, None])) if world_size == 4 else None,
        warmup_steps=draw(st.sampled_from([0, 0, 1, 3])),
        exclude=draw(st.sampled_from(["nothing", "vectors", "first"])),
        scaler=draw(st.sampled_from(["none", "enabled", "enabled", "disabled"])),
        parameters=parameters(draw, uses),
        gradient_as_bucket_view=draw(st.booleans()),
        cap=draw(st.sampled_from([1, 1024, 4096, 1 << 20])),
        set_to_none=draw(st.booleans()),
        entropy_coding=draw(st.booleans()),
        **ways,
    )


def overflows(configuration: Configuration, passes: int) -> st.SearchStrategy[Overflow | None]:
    trained = [i for i, p in enumerate(configuration.parameters) if p.use != "frozen" and 0 not in p.shape]
    if not configuration.scales:
        return st.none()
    where = st.builds(
        Overflow, st.integers(0, configuration.world_size - 1), st.sampled_from(trained), st.integers(0, passes - 1)
    )
    return st.sampled_from([False, False, True]).flatmap(lambda bad: where if bad else st.none())


@st.composite
def steps(draw: st.DrawFn, configuration: Configuration) -> Step:
    backwards, no_sync = draw(st.sampled_from([1, 1, 1, 2, 3])), draw(st.sampled_from([0, 0, 0, 1, 2, 4]))
    overflow = draw(overflows(configuration, backwards * (no_sync + 1)))
    return Step(backwards, no_sync, overflow, configuration.scaler != "none" and draw(st.booleans()))


@st.composite
def joins(draw: st.DrawFn, configuration: Configuration) -> Join:
    return Join(draw(st.tuples(*[st.integers(1, 4)] * 4)), draw(overflows(configuration, 1)))


@st.composite
def scripts(draw: st.DrawFn) -> tuple[Configuration, list[Event]]:
    configuration = draw(configurations())
    trained = [i for i, p in enumerate(configuration.parameters) if p.use != "frozen"]
    kinds: list[st.SearchStrategy[Any]] = [
        *[steps(configuration)] * 12,
        st.builds(Close),
        st.builds(Copy, st.sampled_from(["deepcopy", "pickle"]), st.booleans()),
        *[st.builds(Resume, consolidated=st.booleans(), fresh=st.booleans())] * 2,
    ]
    if configuration.scales:
        kinds.append(st.builds(Rescale, st.sampled_from([0.5, 4.0])))
    if configuration.topology is None:
        kinds.append(st.builds(Resize, st.sampled_from([2, 3, 4])))
    if not (configuration.static_graph or configuration.skip_all_reduce_unused_params):  # which DDP.join() cannot
        kinds.append(joins(configuration))
    if not (configuration.static_graph or configuration.find_unused_parameters):  # else DDP does not recover from it
        kinds += 2 * [st.builds(Raise, st.sampled_from(trained), st.integers(0, 1))]
    # As `st.one_of` would have it, each would be as likely as a step.
    return configuration, draw(st.lists(st.sampled_from(kinds).flatmap(lambda kind: kind), min_size=1, max_size=12))


def areas(configuration: Configuration, events: Sequence[Event]) -> set[str]:
    """Where features meet, by name, in a script."""
    uses = {p.use for p in configuration.parameters}
    overflows = [e for e in events if isinstance(e, Step | Join) and e.overflow is not None]
    sparse = configuration.exchange in ("union", "split")
    touched = {
        "a parameter that no rank uses": bool(uses & {"never", "turns"}),
        "buckets that never come": configuration.skip_all_reduce_unused_params,
        "a parameter that a static graph of two types does not use": configuration.static_graph
        and "never" in uses
        and len({p.dtype for p in configuration.parameters}) > 1,
        "a raised backward pass": any(isinstance(e, Raise) for e in events),
        "an overflow between nodes": bool(overflows) and configuration.topology is not None,
        "an overflow of what is excluded": bool(overflows) and configuration.exclude != "nothing" and sparse,
        "an overflow in one of several backward passes": any(
            isinstance(e, Step) and e.backwards > 1 for e in overflows
        ),
        "a copy with another scaler": configuration.scales
        and any(isinstance(e, Copy) and not e.together for e in events),
        "an overflow under join": any(isinstance(e, Join) for e in overflows),
    }
    return {name for name, is_there in touched.items() if is_there}


#: Where the laws are known not to hold yet. It should be empty.
KNOWN: set[str] = set()


def found(ranks: Ranks, configuration: Configuration, events: Sequence[Event]) -> list[str]:
    """What is wrong with a script."""
    pool = ranks(ranks_needed(configuration, events))
    try:
        return verdict(pool.run(play, configuration, events, within=150, after_failure=10))
    except RankError as error:
        return [str(error)]


def replay(ranks: Ranks, configuration: Configuration, events: Sequence[Event]) -> None:
    """Play a script, as a failing test has printed it."""
    wrong = found(ranks, configuration, events)
    assert not wrong, "\n".join([script(configuration, events), *wrong])


PAIR = (Parameter((40, 20)), Parameter((40, 20)))
SKIPS: dict[str, Any] = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "cap": 1}

#: What has failed once, made small.
FAILED: tuple[tuple[Configuration, list[Event]], ...] = (
    # An overflow in a slice that only some ranks see.
    (
        Configuration(world_size=4, exchange="hierarchical", topology=2, scaler="enabled"),
        [Step(), Step(), Step(overflow=Overflow()), Step()],
    ),
    (
        Configuration(world_size=4, codec=Identity(), exchange="hierarchical", topology=2, scaler="enabled"),
        [Step(), Step(overflow=Overflow(rank=3, parameter=1)), Step()],
    ),
    # A bucket without elements.
    (
        Configuration(
            world_size=4,
            exchange="hierarchical",
            topology=2,
            parameters=(Parameter((40, 20)), Parameter((3, 0), dtype=torch.bfloat16)),
        ),
        [Step()] * 3,
    ),
    # An overflow in an excluded parameter alone.
    (
        Configuration(exchange="split", exclude="first", scaler="enabled", parameters=PAIR, cap=1),
        [Step(), Step(overflow=Overflow())],
    ),
    (
        Configuration(exchange="union", exclude="first", scaler="enabled", parameters=PAIR, cap=1),
        [Step(), Step(), Step(), Step(overflow=Overflow())],
    ),
    # A mean that DDP throws away, as no rank has used the parameter.
    (
        Configuration(find_unused_parameters=True, parameters=(Parameter((40, 20)), Parameter((300,), "turns"))),
        [Step()] * 6,
    ),
    # An overflow in one of two backward passes of a step.
    (Configuration(scaler="enabled"), [Step(), Step(backwards=2, overflow=Overflow(backward=1)), Step()]),
    (
        Configuration(codec=OneBit(), scaler="enabled"),
        [Step(), Step(backwards=2, overflow=Overflow(backward=1)), Step()],
    ),
    # A first bucket that never comes.
    (Configuration(parameters=(Parameter((40, 20)), Parameter((300,), "never")), **SKIPS), [Step()] * 3),
    # Buckets that were sent before an exception.
    (Configuration(cap=1), [Step(), Step(), Raise(), Step()]),
    # A mean that DDP throws away in the first step of a static graph, when there are several buckets already.
    (
        Configuration(
            codec=OneBit(),
            parameters=(Parameter((300,), "never"), Parameter((40, 20)), Parameter((7,), dtype=torch.bfloat16)),
            static_graph=True,
        ),
        [Step()],
    ),
    # A loss scale that a joined rank has not seen fall.
    (Configuration(scaler="enabled"), [Step(), Join(steps=(3, 1, 1, 1), overflow=Overflow())]),
    # A mean that DDP throws away, of a pickled model whose state nobody has told about it.
    (
        Configuration(
            codec=OneBit(),
            parameters=(Parameter((300,)), Parameter((1500,), "never")),
            find_unused_parameters=True,
        ),
        [Copy(how="pickle"), Step()],
    ),
    (
        Configuration(parameters=(Parameter((40, 20)), Parameter((1500,), "turns")), find_unused_parameters=True),
        [Copy(how="pickle"), Step(backwards=2)],
    ),
    # A mean that DDP throws away in the step that has emptied the residuals.
    (
        Configuration(
            codec=Schedule((TopK(0.05), Identity())),
            exchange="auto",
            parameters=(Parameter((40, 20)), Parameter((300,), "turns")),
            find_unused_parameters=True,
        ),
        [Step()] * 6,
    ),
    # Buckets that wait for the norm of all gradients, while DDP waits for them.
    (
        Configuration(
            error_feedback=Tracking(0.5, clip=1.0),
            parameters=(Parameter((40, 20)), Parameter((300,), dtype=torch.bfloat16)),
            static_graph=True,
        ),
        [Step(), Step()],
    ),
    # A bucket without elements, after those that the norm of all gradients is made of.
    (
        Configuration(
            error_feedback=Tracking(0.5, clip=1.0),
            parameters=(Parameter((0,), dtype=torch.bfloat16), Parameter((40, 20))),
            static_graph=True,
        ),
        [Step(), Step()],
    ),
    # A copy with the scaler of the original.
    (Configuration(scaler="enabled"), [Step(), Copy(together=False), Step(overflow=Overflow()), Step()]),
)


@pytest.mark.parametrize(
    "drawn",
    [
        pytest.param(
            script, marks=needs_skipped_buckets if script[0].skip_all_reduce_unused_params else (), id=repr(script)
        )
        for script in FAILED
        if not areas(*script) & KNOWN
    ],
)
def test_scripts_that_have_failed(ranks: Ranks, drawn: tuple[Configuration, list[Event]]) -> None:
    replay(ranks, *drawn)


def kind(wrong: list[str]) -> str:
    """What went wrong first, without ranks, names and numbers; of exceptions the last line."""
    return re.sub(r"rank \d+: |p\d+|[\d.e+-]+", "", wrong[0].strip().splitlines()[-1])[:60] if wrong else ""


@dataclass
class Search:
    """Draws scripts, and makes the first that fails small.

    Attributes:
        scripts, events: how many were played.
        failure: a script that failed, and what was wrong; None where all went well.
    """

    ranks: Ranks
    scripts: int = 0
    events: int = 0
    failure: str | None = None

    def run(self, number: int, examples: int = 100, until: float = math.inf, within: float = 60.0) -> None:
        """Draw up to `examples` by a seed, until a time of `time.monotonic`; make a failure small `within` seconds."""
        failed: list[tuple[Configuration, list[Event], list[str]]] = []

        @seed(number)
        @settings(
            max_examples=examples, database=None, deadline=None, phases=[Phase.generate], report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(scripts())
        def draw(drawn: tuple[Configuration, list[Event]]) -> None:
            if failed or time.monotonic() > until or areas(*drawn) & KNOWN:
                return
            self.scripts, self.events = self.scripts + 1, self.events + len(drawn[1])
            wrong = found(self.ranks, *drawn)
            if wrong:
                failed.append((*drawn, wrong))

        draw()
        self.failure = None
        if failed:
            small = self.small(*failed[0], time.monotonic() + within)
            self.failure = "\n".join([f"seed {number}:", script(*small[:2]), *small[2]])

    def small(
        self, configuration: Configuration, events: list[Event], wrong: list[str], until: float
    ) -> tuple[Configuration, list[Event], list[str]]:
        """The script with as little as makes it fail in the same way, where DDP by itself can do it, and what is wrong
        with it. One that fails by chance may stay as it is."""
        for less in simpler(configuration, events):
            if time.monotonic() > until:
                break
            with contextlib.suppress(IndexError):  # of a parameter that is not there any more
                still = found(self.ranks, *less)
                if kind(still) == kind(wrong) and not found(self.ranks, replace(less[0], codec=None), less[1]):
                    return self.small(*less, still, until)
        return configuration, events, wrong


@pytest.mark.parametrize("number", range(3))
def test_drawn_scripts(ranks: Ranks, number: int) -> None:
    search = Search(ranks)
    search.run(number, examples=30)
    assert search.failure is None, search.failure


@pytest.mark.slow
def test_drawn_scripts_for_long(ranks: Ranks) -> None:
    """`GRADWIRE_DRAWN_SECONDS` says how long."""
    search, failures = Search(ranks), list[str]()
    end = time.monotonic() + float(os.environ.get("GRADWIRE_DRAWN_SECONDS", "60"))
    while time.monotonic() < end and len(failures) < 10:
        search.run(random.SystemRandom().getrandbits(32), until=end)
        if search.failure is not None:
            failures.append(search.failure)
            print(search.failure, flush=True)
    print(f"{search.scripts} scripts of {search.events} events, {len(failures)} failed")
    assert not failures, "\n\n".join(failures)
