"""Advice: the codec and feedback with which models have ended best under an optimizer."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from ...compress import EDEN, QSGD, Cast, ChunkedTopK, Codec, Magnitudes, Residual, TopK
from ...compress.codecs.chunked_topk import MOST_ENTRIES
from ...compress.feedback.base import Feedback

#: See docs/tables-learning.md.
ROTATED = (
    "three levels of rotated elements, unbiased: nothing is kept, and nothing arrives late. Of all codes this small "
    "GPT-2's model has ended closest to float32 with it. Compare losses at your own size first: it has not been tried "
    "above 10 million parameters"
)
SIGNS = (
    "signs of rotated elements, unbiased, and three levels of the mean: nothing arrives late. Elements are divided by "
    "how large they have been before that, and multiplied after, so that errors do no harm to small ones. GPT-2's "
    "model ended where float32 does with it, in the mean of three seeds. Between FSDP's shards, where Magnitudes() "
    "cannot be, take EDEN(). Compare losses at your own size first: it has not been tried above 10 million parameters"
)
APART = (
    "lets every rank step by itself, and every few steps exchanges the parameters' progress, in three unbiased levels "
    "of rotated elements, so that nothing is kept. Each tensor's steps are made as long as those of one optimizer on "
    "the mean gradient. Leave β1 and the learning rate as they are. Measured every 5 steps: 6 % above float32 on "
    "GPT-2's model, 3 % where queries and keys are normalized, one seed each. Compare losses at your own size first: "
    "it has not been tried above 1 million parameters"
)
KEPT = (
    "lets every rank step by itself, and exchanges the parameters' progress: the largest elements of each chunk, in "
    "two bits each and with the chunk's own levels. What a rank has not sent stays in its own parameters, as gradients "
    "that arrive late have cost GPT-2's model a fifth of its loss and more, and each tensor's steps are made as long "
    "as those of one optimizer on the mean gradient. Where late gradients cost most, models have ended closest to "
    "float32 with it. Leave β1 and the learning rate as they are. A model that normalizes queries and keys may end "
    "closer with the same codec in a CompressState and a β1 of 0.5. Compare losses at your own size first: it has not "
    "been tried above 1 million parameters"
)
MUON = (
    "lets every rank step by itself, and every few steps exchanges the parameters' progress. Muon gives every "
    "direction of an update the same size, errors of compressed gradients too, which have made a small model's loss a "
    "tenth larger; here gradients reach it whole. Take about twice float32's learning rate, and a list of optimizers "
    "where AdamW has some of the parameters. Compare losses at your own size first: GPT-2's model ended a tenth above "
    "float32 and more, at float32's rate"
)
#: Ending of the reason for ratios beyond these.
UNTRIED = ". So few bytes have not been tried"
SPARSE = (
    "sends the largest elements in 8 bits each, and keeps the rest in a residual, which arrives late. Under SGD these "
    "elements decide: a small model ended 0.3 % above float32 with 20 times fewer bytes, and 2.4 % with 54 times, in "
    "the mean of three seeds. With far fewer bytes expect a worse model after a short run, and tune the learning rate "
    "again. By gather a rank receives all the others' elements: on 8 ranks and more EDEN() takes fewer bytes, and "
    "ended 3.7 % above. On a larger model, where this has not been tried, TernGrad() reached float32's loss"
)
#: β1 of Adam and its kin beside a residual that keeps most of a gradient back, and the largest beside which it does
#: not show.
LESS_MOMENTUM, MOST_MOMENTUM = 0.5, 0.8
#: Elements of a chunk, largest first: larger chunks allow a better choice, with as many bits for an entry's index.
CHUNKS = (65536, 32768, 16384, 8192, 4096)
#: Steps between two rounds of parameters' differences with ChunkedTopK, up to a ratio, for two ranks; beyond it they
#: are further apart. With QSGD they are this many steps apart at most.
STEPS_APART, MOST_TIMES, QSGD_STEPS_APART = 5, 1000.0, 3
#: The smallest ratio at which the largest elements have been tried under SGD.
LEAST_TOP = 20.0
#: The largest ratio with which models have been trained so under Adam; under Muon that is `MOST_TIMES`.
MOST_TIMES_ADAM = 110.0
#: Number of elements for which ratios are computed.
MILLION = 1_000_000


@dataclass(frozen=True)
class Recommendation:
    """A codec and a feedback, with the reason.

    Attributes:
        codec, feedback: for `CompressState(model, codec, error_feedback=feedback)`, of gradients; with `rounds` for
            `LocalUpdates`, of parameters.
        ratio: bytes a step of float32 divided by those of the codec.
        why: a sentence or two, with the measured results.
        every: steps from one exchange to the next.
        momentum: the optimizer's β1; None: as it is.
        exchange: of `LocalUpdates`.
        rounds: arguments of its `Rounds`; None: gradients are exchanged.
    """

    codec: Codec
    feedback: Feedback | bool
    ratio: float
    why: str
    every: int = 1
    momentum: float | None = None
    exchange: str = "auto"
    rounds: Mapping[str, bool] | None = None

    @property
    def call(self) -> str:
        """The code to write."""
        feedback = f"error_feedback={written(self.feedback)}"
        if self.rounds is None:
            return f"CompressState(model, {written(self.codec)}, {feedback})"
        exchange = "" if self.exchange == "auto" else f"exchange={self.exchange!r}, "
        options = ", ".join(f"{name}={value}" for name, value in self.rounds.items())
        how = f"every={self.every}, {exchange}{feedback}" + (f", rounds=Rounds({options})" if options else "")
        return f"LocalUpdates(model, optimizer, {written(self.codec)}, {how})"

    def __str__(self) -> str:
        return f"{self.call}: {self.why}"


def recommend(
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | str,
    *,
    ratio: float | None = None,
    bits: float | None = None,
) -> Recommendation:
    """The codec and the feedback with which models have ended best under an optimizer, for a number of bytes.

    Args:
        optimizer: one, its class, or its name, such as "adamw".
        ratio: bytes of float32 divided by those of the codec, from 2 to 2000.
        bits: bits an element instead, 32 / ratio.

    Raises:
        TypeError: `optimizer` is none of these, or not exactly one of `ratio` and `bits` is given.
        ValueError: no codec is that small, or that large.
    """
    if (ratio is None) == (bits is None):
        raise TypeError(f"recommend(ratio={ratio!r}, bits={bits!r}): give one of the two")
    wish, asked = ("bits", bits) if ratio is None else ("ratio", ratio)
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not asked > 0:
        raise ValueError(f"{wish}={asked!r}: expected a number above 0")
    times = float(asked) if ratio is not None else 32.0 / float(asked)
    if not 2.0 <= times <= 2000.0:
        raise ValueError(f"{wish}={asked!r}: expected from 2 to 2000 times fewer bytes than float32, 16 to 0.016 bits")
    name = _name_of(optimizer)
    if times <= 2.0:
        return _recommendation(Cast(torch.float16), True, "halves the bytes, and keeps the rounding errors")
    if orthogonalises(optimizer):
        if times <= QSGD_STEPS_APART * ratio_of(QSGD()):
            every = max(2, math.ceil(times / ratio_of(QSGD())))
            return Recommendation(QSGD(), Residual(), every * ratio_of(QSGD()), MUON, every, rounds={})
        return _rounds(times, STEPS_APART, MOST_TIMES, MUON, "gather")
    if times <= ratio_of(QSGD()):
        return _recommendation(QSGD(), False, "4 bits an element, unbiased: nothing is kept, and nothing arrives late")
    if is_adaptive(optimizer):
        if times <= ratio_of(EDEN()):
            return _recommendation(EDEN(), False, ROTATED)
        if times <= ratio_of(EDEN(levels=2)):
            return _recommendation(EDEN(levels=2), Magnitudes(), SIGNS)
        every = math.ceil(times / ratio_of(EDEN()))
        if every <= STEPS_APART:
            rounds = {"lengthen_steps": True}
            return Recommendation(EDEN(), False, every * ratio_of(EDEN()), APART, every, rounds=rounds)
        return _rounds(times, STEPS_APART, MOST_TIMES_ADAM, KEPT, keep_unsent=True, lengthen_steps=True)
    other = "" if name.lower() == "sgd" else f". Nothing has been measured with {name}: this is the advice for SGD"
    return _recommendation(_top(max(times, LEAST_TOP)), Residual(), SPARSE + other)


def written(value: Any) -> str:
    """A value as code, without arguments that have their default."""
    if not is_dataclass(value):
        return repr(value)
    given = [(field.name, getattr(value, field.name)) for field in fields(value)]
    default = {field.name: field.default for field in fields(value)}
    arguments = (f"{name}={written(x)}" for name, x in given if x != default[name])
    return f"{type(value).__name__}({', '.join(arguments)})"


def _recommendation(codec: Codec, feedback: Feedback | bool, why: str) -> Recommendation:
    return Recommendation(codec, feedback, ratio_of(codec), why)


def _rounds(times: float, apart: int, tried: float, why: str, exchange: str = "auto", **rounds: bool) -> Recommendation:
    """Rounds so many steps apart, or more; models have been trained so with up to `tried` times fewer bytes."""
    every = math.ceil(apart * max(times / MOST_TIMES, 1.0))
    codec = _chunked(times / every)
    why += UNTRIED if times > tried else ""
    return Recommendation(codec, Residual(), every * ratio_of(codec), why, every, None, exchange, rounds)


def ratio_of(codec: Codec) -> float:
    """How many times fewer bytes than float32: of both passes of "two_pass", which for most codecs are as long."""
    return 8.0 * MILLION / (codec.wire_bytes(MILLION) + codec.second_pass().wire_bytes(MILLION))


def _chunked(times: float) -> ChunkedTopK:
    """The codec of this ratio with the largest chunk, and the most entries of it."""
    whole = [ChunkedTopK(MOST_ENTRIES, chunk, values=2) for chunk in CHUNKS]
    codec = next((codec for codec in whole if ratio_of(codec) <= times), whole[-1])
    most = bisect.bisect_right(range(1, MOST_ENTRIES + 1), -times, key=lambda k: -ratio_of(replace(codec, k=k)))
    return replace(codec, k=max(most, 1))


def _top(times: float) -> TopK:
    """The densest codec of this ratio, with a density of two digits."""
    few, many = 1e-5, 0.5
    for _ in range(40):
        middle = (few + many) / 2
        few, many = (middle, many) if ratio_of(TopK(middle, values=torch.int8)) >= times else (few, middle)
    digits = 10.0 ** (math.floor(math.log10(few)) - 1)
    return TopK(density=round(math.floor(few / digits) * digits, 8), values=torch.int8)


def is_adaptive(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | str) -> bool:
    """True if an optimizer divides each element by its own running size, as Adam does; judged by its name.

    Raises:
        TypeError: `optimizer` is neither an optimizer nor the class or name of one.
    """
    return any(part in _name_of(optimizer).lower() for part in ("ada", "rmsprop", "lamb", "rprop"))


def orthogonalises(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | str) -> bool:
    """True if an optimizer gives every direction of a matrix's update the same size, as Muon does; judged by its name.

    Raises:
        TypeError: as `is_adaptive`.
    """
    return "muon" in _name_of(optimizer).lower()


def _name_of(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | str) -> str:
    if isinstance(optimizer, str):
        return optimizer
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return optimizer.__name__
    if isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer).__name__
    raise TypeError(f"optimizer={optimizer!r}: expected a torch optimizer, its class, or its name")
