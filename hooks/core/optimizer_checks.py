"""Optimizers: what to compress with for each, what is known to fail, and a look at the one in use."""

from __future__ import annotations

import bisect
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...compress import QSGD, Cast, ChunkedTopK, Codec, OneBit, Outliers, Residual, Ternary, TernGrad, TopK
from ...compress.codecs.chunked_topk import MOST_ENTRIES
from ...compress.feedback.base import Feedback, betas_of
from ..comm.untraced import untraced
from .options import Options

#: See docs/benchmark-tables.md, "The same model at the end".
CHUNKED = (
    "sends the largest elements of each chunk, in two bits each and with the chunk's own levels, and keeps the rest in "
    "a residual. Of all codecs this small, models under adaptive optimizers have ended closest to float32 with it. "
    "What the residual holds back arrives late, which acts as momentum: give the optimizer a β1 of 0.5, as models end "
    "clearly worse with 0.9"
)
OUTLIERS = (
    "sends the largest elements exactly and the signs of the others, and keeps the rest in a residual. Under SGD the "
    "outliers decide, and a small model has ended as close to float32 with it as with any codec this small. On a "
    "larger one, where it has not been tried, TernGrad() reached float32's loss"
)
LOCAL = (
    "lets every rank step by itself, and every few steps exchanges how far the parameters have come: the largest "
    "elements of each chunk, in two bits each. Of all ways this small, models have ended closest to float32 with it, "
    "given a β1 of 0.8 and twice float32's learning rate. delay=1, carry=True hides the latency of a distance"
)
#: In fewer bytes than models have been trained with.
UNTRIED = ". So few bytes have not been tried"
SPARSE = (
    "sends the largest elements in 8 bits each, and keeps the rest in a residual, which arrives late: expect a worse "
    "model after a short run, and tune the learning rate again"
)
#: β1 of Adam and its kin beside a residual that keeps most of a gradient back.
LESS_MOMENTUM = 0.5
#: And where that is of parameters' differences, as gradients reach the optimizer whole. Above this the residual shows.
MOST_MOMENTUM = 0.8
#: Elements of a chunk: of larger ones the choice is better, and an entry's index takes as many bits.
CHUNKS = (65536, 32768, 16384, 8192, 4096)
#: With as few bytes, as two ranks count them, models have been trained so: by gradients, and by parameters' differences
#: every fourth step, which takes a twentieth of a step over 25 ms at 100 Mbit/s.
MOST_TIMES, MOST_TIMES_LOCAL, STEPS_APART = 400.0, 1000.0, 4
#: Elements by which a density is chosen.
MILLION = 1_000_000


@dataclass(frozen=True)
class Recommendation:
    """What to compress with, and why.

    Attributes:
        codec, feedback: as `CompressState(model, codec, error_feedback=feedback)` takes them; with `every` above 1 they
            are for `LocalUpdates`, and for gradients something else would be better.
        ratio: how many times fewer bytes a step than float32 the codec's wires have.
        why: a sentence or two, with what was measured.
        every: steps from one exchange to the next: 1, of gradients, or more, of parameters.
        momentum: what to give the optimizer, as β1; None: as it is.
    """

    codec: Codec
    feedback: Feedback | bool
    ratio: float
    why: str
    every: int = 1
    momentum: float | None = None

    @property
    def call(self) -> str:
        """What to write."""
        if self.every == 1:
            return f"CompressState(model, {_written(self.codec)}, error_feedback={_written(self.feedback)})"
        how = f"every={self.every}, exchange='gather', error_feedback={_written(self.feedback)}"
        return f"LocalUpdates(model, optimizer, {_written(self.codec)}, {how})"

    def __str__(self) -> str:
        return f"{self.call}: {self.why}"


def recommend(
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | str,
    *,
    ratio: float | None = None,
    bits: float | None = None,
) -> Recommendation:
    """The codec and the feedback with which models have ended best under an optimizer, for so few bytes.

    Args:
        optimizer: one, its class, or its name, such as "adamw".
        ratio: how many times fewer bytes than float32, from 2 to 2000.
        bits: the same as bits an element, 32 / ratio. One of the two.

    Raises:
        TypeError: `optimizer` is none of these, or not one of `ratio` and `bits` was given.
        ValueError: nothing of ours is that small, or that large.
    """
    if (ratio is None) == (bits is None):
        raise TypeError(f"recommend(ratio={ratio!r}, bits={bits!r}): give one of the two")
    name, asked = ("bits", bits) if ratio is None else ("ratio", ratio)
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not asked > 0:
        raise ValueError(f"{name}={asked!r}: expected a number above 0")
    times = float(asked) if ratio is not None else 32.0 / float(asked)
    if not 2.0 <= times <= 2000.0:
        raise ValueError(f"{name}={asked!r}: expected from 2 to 2000 times fewer bytes than float32, 16 to 0.016 bits")
    adaptive = is_adaptive(optimizer)
    if times <= 2.0:
        return _recommendation(Cast(torch.float16), True, "halves the bytes, and keeps what rounding leaves out")
    if times <= _ratio(QSGD()):
        return _recommendation(QSGD(), False, "4 bits an element, unbiased: nothing is kept, and nothing arrives late")
    if adaptive:
        if times <= MOST_TIMES:
            return _recommendation(_chunked(times), Residual(), CHUNKED, LESS_MOMENTUM)
        every = math.ceil(STEPS_APART * max(times / MOST_TIMES_LOCAL, 1.0))
        codec = _chunked(times / every)
        why = LOCAL + (UNTRIED if times > MOST_TIMES_LOCAL else "")
        return Recommendation(codec, Residual(), every * _ratio(codec), why, every, MOST_MOMENTUM)
    name = _name_of(optimizer)
    other = "" if name.lower() == "sgd" else f". Nothing has been measured with {name}: this is what serves SGD"
    if times <= _ratio(Outliers(OneBit())):
        return _recommendation(Outliers(OneBit()), Residual(), OUTLIERS + other)
    return _recommendation(_top(times), Residual(), SPARSE + other)


def _written(value: Any) -> str:
    """As somebody would write it: without the arguments that are what they are by default."""
    if not is_dataclass(value):
        return repr(value)
    given = [(field.name, getattr(value, field.name)) for field in fields(value)]
    default = {field.name: field.default for field in fields(value)}
    arguments = (f"{name}={_written(x)}" for name, x in given if x != default[name])
    return f"{type(value).__name__}({', '.join(arguments)})"


def _recommendation(codec: Codec, feedback: Feedback | bool, why: str, momentum: float | None = None) -> Recommendation:
    return Recommendation(codec, feedback, _ratio(codec), why, momentum=momentum)


def _ratio(codec: Codec) -> float:
    return 4.0 * MILLION / codec.wire_bytes(MILLION)


def _chunked(times: float) -> ChunkedTopK:
    """With the most entries that take so many times fewer bytes, of the largest chunk that may have as many."""
    whole = [ChunkedTopK(MOST_ENTRIES, chunk, values=2) for chunk in CHUNKS]
    codec = next((codec for codec in whole if _ratio(codec) <= times), whole[-1])
    most = bisect.bisect_right(range(1, MOST_ENTRIES + 1), -times, key=lambda k: -_ratio(replace(codec, k=k)))
    return replace(codec, k=max(most, 1))


def _top(times: float) -> TopK:
    """The densest that takes so many times fewer bytes, its density to two digits."""
    few, many = 1e-5, 0.5
    for _ in range(40):
        middle = (few + many) / 2
        few, many = (middle, many) if _ratio(TopK(middle, values=torch.int8)) >= times else (few, middle)
    digits = 10.0 ** (math.floor(math.log10(few)) - 1)
    return TopK(density=round(math.floor(few / digits) * digits, 8), values=torch.int8)


# -- optimizers --------------------------------------------------------------------------------------------------------


def is_adaptive(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | str) -> bool:
    """Whether it divides each element by a running size of its own, as Adam does: by its name.

    Raises:
        TypeError: it is neither an optimizer nor the class or name of one.
    """
    return any(part in _name_of(optimizer).lower() for part in ("ada", "rmsprop", "lamb", "rprop"))


def _name_of(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | str) -> str:
    if isinstance(optimizer, str):
        return optimizer
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return optimizer.__name__
    if isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer).__name__
    raise TypeError(f"optimizer={optimizer!r}: expected a torch optimizer, its class, or its name")


def known_problem(optimizer: torch.optim.Optimizer, codec: Codec, feedback: bool) -> str | None:
    """What is known to go wrong with an optimizer, a codec, and whether a plain residual is kept; None: nothing.

    See docs/benchmark-tables.md, "The same model at the end".
    """
    name, inner = type(optimizer).__name__, codec.inner if isinstance(codec, Outliers) else codec
    if feedback and isinstance(codec, TopK | ChunkedTopK):
        return _too_much_momentum(optimizer, codec)
    if not feedback or not isinstance(inner, OneBit | Ternary | TernGrad):
        return None
    if is_adaptive(optimizer):
        return (
            f"{codec} with {name}: every element gets an error of its block's size, which swells the second moment "
            f"where gradients are small, and the model ends worse. {_instead(optimizer, codec)}"
        )
    if inner is codec and isinstance(inner, OneBit):
        return (
            f"{codec} with {name}: at a learning rate found for float32 it may diverge, as outliers are cut and arrive "
            f"late. {_instead(optimizer, codec)}"
        )
    return None


def _too_much_momentum(optimizer: torch.optim.Optimizer, codec: Codec) -> str | None:
    """What is known of β1 beside a residual that keeps most of a gradient back."""
    pairs = [betas for group in optimizer.param_groups if len(betas := betas_of(group)) == 2]
    first, second = max(pairs, default=(0.0, 0.0))
    if not is_adaptive(optimizer) or first <= MOST_MOMENTUM:
        return None
    return (
        f"{codec} with {type(optimizer).__name__}: what its residual keeps back arrives late, which is a momentum too, "
        f"and beside a β1 of {first:g} the model ends worse: give it betas=({LESS_MOMENTUM:g}, {second:g}) "
        "(gradwire.recommend)"
    )


def _instead(optimizer: torch.optim.Optimizer, codec: Codec) -> str:
    """The arguments alone: this may be for `CompressState`, `compress_fsdp` or Horovod's `Compression.codec`."""
    other = recommend(optimizer, ratio=_ratio(codec))
    momentum = "" if other.momentum is None else f" and with a β1 of {other.momentum:g}"
    instead = f"{_written(other.codec)}, error_feedback={_written(other.feedback)}"
    return f"For as few bytes{momentum} take {instead} (gradwire.recommend)"


def check_optimizer(options: Options, optimizer: torch.optim.Optimizer) -> None:
    """Warn of what `known_problem` knows, for what a user has asked for.

    Raises:
        ValueError: the optimizer has a momentum, and the strategy hands one out.
    """
    if options.strategy is not None:
        options.strategy.check_optimizer(optimizer)
    choice = options.choice(options.warmup_steps)
    problem = known_problem(optimizer, choice.codec, choice.feedback and not options.keeps_all)
    if problem is not None and choice.exchange != "dense":
        warnings.warn(problem, stacklevel=7)  # where the optimizer's step was called


@dataclass(eq=False)  # weak references to tensors compare as these do: by element
class _Waiting:
    """Parameters whose optimizer has not stepped yet, and who is to look at it."""

    parameters: list[weakref.ref[nn.Parameter]]
    check_optimizer: Callable[[torch.optim.Optimizer], None]


_waiting: list[_Waiting] = []


def expect_optimizer(
    parameters: Iterable[nn.Parameter], check_optimizer: Callable[[torch.optim.Optimizer], None]
) -> None:
    """Call `check_optimizer` before the first step of an optimizer of these parameters; and before later steps, as long
    as it raises."""
    _listen()
    _waiting.append(_Waiting([weakref.ref(parameter) for parameter in parameters], check_optimizer))


@functools.cache
def _listen() -> None:
    """Once in a process, and for good: a hook cannot be taken away from inside, as others may be called after it."""
    register_optimizer_step_pre_hook(_look)


@untraced
def _look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for entry in _waiting[:]:
        alive = {id(parameter) for reference in entry.parameters if (parameter := reference()) is not None}
        own = any(id(parameter) in alive for group in optimizer.param_groups for parameter in group["params"])
        if own:
            entry.check_optimizer(optimizer)
        if own or not alive:
            _waiting.remove(entry)
