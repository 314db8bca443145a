"""The laws, in configurations that nobody has thought of: drawn, played on all ranks, and made small when they fail."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from drawn import (
    TENTH,
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
    search,
    search_for_long,
    verdict,
)
from drawn_machine import play
from gradwire import (
    EDEN,
    QSGD,
    Cast,
    ChunkedTopK,
    Codec,
    Identity,
    Lead,
    Magnitudes,
    Momentum,
    OneBit,
    PowerSGD,
    Residual,
    Ternary,
    TernGrad,
    TopK,
    Tracking,
)
from gradwire.compress import Feedback
from gradwire.hooks.exchanges import EXCHANGES, possible
from hypothesis import strategies as st
from lacking import SKIPS_BUCKETS, needs_skipped_buckets
from ranks import RankError, Ranks

CODECS: tuple[Codec, ...] = (
    TopK(0.1), TopK(0.01), TopK(0.5), TopK(1.0), TopK(0.2, values=torch.bfloat16), TopK(0.2, values=torch.int8),
    TopK(0.2, indices="plain"),
    OneBit(), OneBit(block=256), OneBit(block=256, scale="symmetric"),
    QSGD(), QSGD(bits=2, block=256), QSGD(bits=8, rounding="nearest"), TernGrad(), TernGrad(rounding="nearest"),
    Ternary(), EDEN(), EDEN(scale="closest"), EDEN(levels=2),
    ChunkedTopK(), ChunkedTopK(k=20, chunk=256, values=torch.int8), PowerSGD(rank=1), PowerSGD(rank=2),
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


TABLES = ((1, 3), (9, 1), (50, 16), (3000, 3))


def parameters(draw: st.DrawFn, uses: tuple[str, ...], tables: bool) -> tuple[Parameter, ...]:
    dtypes = draw(st.sampled_from([(torch.float32,), (torch.bfloat16,), (torch.float32, torch.bfloat16)]))
    result = [Parameter((40, 20), dtype=dtypes[0])]  # there always is one with a gradient
    for _ in range(draw(st.integers(0, 5))):
        if tables and draw(st.integers(0, 3)) == 3:
            use = draw(st.sampled_from(["always", "always", "frozen"]))  # DDP takes no pass without their gradients
            result.append(Parameter(draw(st.sampled_from(TABLES)), use, draw(st.sampled_from(dtypes)), sparse=True))
            continue
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
    loyal = all(codec.unbiased or codec.lossless for codec in codecs)
    feedback = draw(st.sampled_from((*FEEDBACK, *3 * (Magnitudes(),)) if loyal else FEEDBACK))
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
        error_feedback=feedback,
        fallback=draw(st.sampled_from([None, "auto", torch.float32, torch.bfloat16])),
        network=draw(st.sampled_from([1e-7, 1e-9, 1e-12])),
        topology=draw(st.sampled_from([2, 2, None])) if world_size == 4 else None,
        warmup_steps=draw(st.sampled_from([0, 0, 1, 3])),
        exclude=draw(st.sampled_from(["nothing", "vectors", "first"])),
        scaler=draw(st.sampled_from(["none", "enabled", "enabled", "disabled"])),
        parameters=parameters(draw, uses, not isinstance(feedback, Tracking | Momentum | Lead | Magnitudes)),
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


def replay(ranks: Ranks, configuration: Configuration, events: Sequence[Event]) -> None:
    """Play a script, as a failing test has printed it."""
    pool = ranks(ranks_needed(configuration, events))
    try:
        wrong = verdict(pool.run(play, configuration, events, within=150, after_failure=10))
    except RankError as error:
        wrong = [str(error)]
    assert not wrong, "\n".join([script(configuration, events), *wrong])


PAIR = (Parameter((40, 20)), Parameter((40, 20)))
SKIPS: dict[str, Any] = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "cap": 1}

ROWS = (
    Parameter((50, 16), sparse=True), Parameter((40, 20)), Parameter((3000, 3), sparse=True), Parameter((300,)),
    Parameter((1, 3), sparse=True),
)  # fmt: skip
BY_TURNS = (Parameter((40, 20)), Parameter((300,), "turns"), Parameter((1500,), "never"))

#: What has failed once, made small, and ways to build and use DDP.
SCRIPTS: tuple[tuple[Configuration, list[Any]], ...] = (
    # Every codec that keeps what it leaves out, by each of its ways, across DDP's other buckets and a checkpoint.
    *(
        (Configuration(codec=codec, exchange=exchange), [Step(), Step(), Resume(), Step(), Step()])
        for codec in {codec.name: codec for codec in CODECS if codec.default_feedback}.values()
        for exchange in possible(codec)
    ),
    (Configuration(static_graph=True, gradient_as_bucket_view=True), [Step()] * 6),
    (Configuration(static_graph=True, cap=1), [Step()] * 6),
    (Configuration(gradient_as_bucket_view=True, cap=1 << 20), [Step()] * 6),
    (Configuration(codec=OneBit(), scaler="disabled"), [Step(no_sync=2, unscale=True)] * 5),
    *(
        (Configuration(codec=codec, exchange=exchange), [Step(), Join(steps=(3, 5, 1, 1)), Step(), Step()])
        for codec, exchange in [(OneBit(), "gather"), (OneBit(), "dense"), (TENTH, "union"), (TENTH, "split")]
    ),
    *(
        (
            Configuration(
                codec=codec,
                exchange=exchange,
                parameters=BY_TURNS,
                find_unused_parameters=True,
                exclude=exclude,
                gradient_as_bucket_view=view,
                set_to_none=not view,
                cap=2048 - 2047 * view,
            ),
            [Step(backwards=1 + view)] * 6,
        )
        for codec, exchange, exclude, view in [
            (OneBit(), "gather", "nothing", True),
            (OneBit(), "two_pass", "nothing", False),
            (OneBit(), "two_pass", "nothing", True),
            (TENTH, "split", "nothing", True),
            (TENTH, "union", "vectors", True),
        ]
    ),
    *(
        (Configuration(codec=OneBit(), exchange=exchange, cap=1), [Step(), Raise(), Step(), Raise(), Step()])
        for exchange in ("gather", "two_pass")
    ),
    (Configuration(codec=OneBit(block=256)), [*[Step()] * 3, Copy(), *[Step()] * 3]),
    # Overflows, in all passes since the last update.
    *(
        (
            Configuration(codec=OneBit(), exchange=exchange, exclude=exclude, scaler="enabled", cap=1),
            [Step(), Step(backwards=2, overflow=Overflow(1, parameter, 1), unscale=True), Step(), Step()],
        )
        for exchange, exclude, parameter in [
            ("gather", "nothing", 0),
            ("two_pass", "nothing", 1),
            ("two_pass", "vectors", 1),
        ]
    ),
    (
        Configuration(world_size=4, codec=OneBit(), exchange="hierarchical", topology=2, scaler="enabled"),
        [Step(), Step(overflow=Overflow(rank=1)), Step(overflow=Overflow(parameter=1)), Step()],
    ),
    # What ranks know of past means stays the same on all of them.
    *(
        (
            Configuration(
                codec=codec,
                exchange="auto",
                network=network,
                error_feedback=Magnitudes(),
                exclude="vectors",
                scaler="enabled",
                cap=1,
            ),
            [
                Step(),
                Step(2, overflow=Overflow(1)),
                Step(),
                Copy(),
                Resume(),
                Rescale(),
                Step(),
                Resize(3),
                Step(),
                Close(),
                Join((2, 1, 3, 1)),
                Step(),
            ],
        )
        for codec, network in [(EDEN(), 1e-7), (QSGD(), 1e-12), (Identity(), 1e-7)]
    ),
    # Rows of tables, first, in the middle and last.
    *(
        (
            Configuration(codec=codec, exchange=exchange, network=network, scaler="enabled", cap=1, parameters=ROWS),
            [Step(no_sync=1), Step(overflow=Overflow(1, 2)), Resume(consolidated=True), Step(2), Close(), Step()],
        )
        for codec, exchange, network in [(OneBit(), "gather", 1e-7), (TENTH, "auto", 1e-9), (Identity(), "auto", 1e-12)]
    ),
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
        for script in SCRIPTS
    ],
)
def test_scripts(ranks: Ranks, drawn: tuple[Configuration, list[Event]]) -> None:
    replay(ranks, *drawn)


@pytest.mark.parametrize("number", range(2))
def test_drawn_scripts(ranks: Ranks, number: int) -> None:
    search(scripts(), partial(replay, ranks), number, 30)


@pytest.mark.slow
def test_drawn_scripts_for_long(ranks: Ranks) -> None:
    search_for_long(scripts(), partial(replay, ranks), 100)
