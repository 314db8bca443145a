"""The tests of DistributedOptimizer can fail: these faults, put in on every rank, are found by those beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradwire.hooks.horovod as hvd
import pytest
import test_horovod_optimizer as tests
import torch
from gradwire import OneBit, TopK
from gradwire.hooks.horovod.gradients import bucketing, residuals
from gradwire.hooks.horovod.runtime import operations
from ranks import Pool

Ranks = Callable[[int], Pool]


def never_communicates(patch: pytest.MonkeyPatch) -> None:
    def synchronize(self: Any) -> None:
        self.reset()
        self.synchronized = True

    patch.setattr(bucketing.GradientReducer, "_launch", lambda self, unit: None)
    patch.setattr(bucketing.GradientReducer, "synchronize", synchronize)


def sums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operations, "divide", lambda x, by: None)


def averages_always(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operations.Scaled, "finish", lambda self, reduced, size: operations.divide(reduced, size))


def ignores_compression(patch: pytest.MonkeyPatch) -> None:
    init = bucketing.GradientReducer.__init__

    def without(self: Any, named: Any, options: Any) -> None:
        options.compression = hvd.Compression.none
        init(self, named, options)

    patch.setattr(bucketing.GradientReducer, "__init__", without)


def keeps_no_residual(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(residuals.CodecCompression, "feedback", property(lambda self: False))


def forgets_residuals(patch: pytest.MonkeyPatch) -> None:
    def nothing(self: Any, own: Any) -> None:
        self.reset()

    patch.setattr(residuals.CompressionState, "load_state_dict", nothing)


def reduces_every_pass(patch: pytest.MonkeyPatch) -> None:
    set_passes = bucketing.GradientReducer.set_passes
    add_unit = bucketing.GradientReducer._add_unit

    def add(self: Any, parameters: Any) -> None:
        self.options.backward_passes_per_step = 1
        add_unit(self, parameters)

    patch.setattr(bucketing.GradientReducer, "_add_unit", add)
    patch.setattr(bucketing.GradientReducer, "set_passes", lambda self, passes: set_passes(self, 1))


def ignores_predivide(patch: pytest.MonkeyPatch) -> None:
    init = operations.Scaled.__init__

    def without(self: Any, key: Any, set_id: Any, tensors: Any, op: int, pre: float, post: float, **more: Any) -> None:
        init(self, key, set_id, tensors, op, 1.0, 1.0, **more)

    patch.setattr(operations.Scaled, "__init__", without)


def ignores_residuals_of_a_skipped_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bucketing, "are_finite", lambda tensors: True)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], list[tuple[str, tuple[Any, ...]]]]] = {
    "never communicates": (
        never_communicates,
        [
            ("test_steps_use_the_average_over_the_ranks", ()),
            ("test_a_parameter_that_a_rank_skips_counts_as_zeros", ()),
            ("test_accumulated_gradients_are_summed_then_averaged", ()),
            ("test_sparse_gradients_are_averaged", ()),
            ("test_half_precision_gradients_are_rounded", ()),
            ("test_synchronize_and_skip_synchronize", ()),
            ("test_every_codec_trains", (OneBit(),)),
            ("nothing_lost", (TopK(0.1), True)),
        ],
    ),
    "sums": (
        sums,
        [
            ("test_steps_use_the_average_over_the_ranks", ()),
            ("test_a_parameter_that_a_rank_skips_counts_as_zeros", ()),
            ("test_accumulated_gradients_are_summed_then_averaged", ()),
            ("test_sparse_gradients_are_averaged", ()),
        ],
    ),
    "averages always": (averages_always, [("test_steps_use_the_average_over_the_ranks", ())]),
    "ignores compression": (
        ignores_compression,
        [
            ("test_half_precision_gradients_are_rounded", ()),
            ("nothing_lost", (TopK(0.1), True)),
            ("nothing_lost", (OneBit(), "auto")),
            ("resumed", (TopK(0.1), "auto")),
        ],
    ),
    "keeps no residual": (keeps_no_residual, [("nothing_lost", (TopK(0.1), True)), ("resumed", (TopK(0.1), "auto"))]),
    "forgets residuals": (
        forgets_residuals,
        [("resumed", (TopK(0.1), "auto")), ("test_consolidated_residuals_load_everywhere", ())],
    ),
    "reduces every pass": (reduces_every_pass, [("test_accumulated_gradients_are_summed_then_averaged", ())]),
    "ignores predivide": (ignores_predivide, [("test_predivide_keeps_sums_small", ())]),
    "takes skipped steps for made ones": (
        ignores_residuals_of_a_skipped_step,
        [("test_residuals_follow_the_loss_scale", ())],
    ),
}


def on_one_rank(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(tests, name)
    return getattr(function, "on_rank", function)


def survivors(rank: int, fault: str) -> list[str]:
    """The tests that do not find a fault on this rank."""
    put_in, names = FAULTS[fault]
    missed = []
    for name, arguments in names:
        with pytest.MonkeyPatch.context() as patch:
            put_in(patch)
            try:
                on_one_rank(name)(rank, *arguments)
                missed.append(name)
            except Exception:
                pass  # found, or the other ranks have found it and left
            finally:
                hvd.shutdown()
        torch.distributed.barrier()
    hvd.init()
    for name in (
        "test_steps_use_the_average_over_the_ranks",
        "test_half_precision_gradients_are_rounded",
    ):  # and without the fault all is well
        on_one_rank(name)(rank)
    return missed


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(ranks: Ranks, fault: str) -> None:
    results = ranks(2).run(survivors, fault)
    assert not set(results[0]) & set(results[1])
