"""User options and their validation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...compress.backends import backend_for
from ...compress.codec import DTYPES, Codec, check_flag
from ...compress.feedback.base import RESIDUAL, Feedback
from ...compress.feedback.residual import NoFeedback, Residual
from ...compress.formats.wire import WIRE_VERSION
from ..auto.planner import Choice, Fallback, check_exchange, codecs_of
from ..comm.coded_message import check_available
from ..comm.topology import node_size
from ..exchanges import ExchangeKind
from ..training.names import OUTERMOST, matches, unwrapped
from ..training.optimizer_checks import known_problem

#: The argument `exchange` of `CompressState`: one of these, or the name of a registered class.
ExchangeName = Literal["auto", "hierarchical"] | ExchangeKind | str
#: A predicate, or names of parameters in which "*" stands for anything.
Exclude = Callable[[str, nn.Parameter], bool] | Sequence[str]

FALLBACKS = ("auto", torch.float32, torch.bfloat16, None)


@dataclass
class Options:
    """Options that are equal on all ranks. The arguments are `CompressState`'s."""

    codec: Codec | Callable[[int], Codec]
    exchange: ExchangeName = "auto"
    error_feedback: bool | Literal["auto"] | Feedback = "auto"
    warmup_steps: int = 0
    fallback: Fallback = "auto"
    topology: Any = "auto"
    seed: int = 0
    entropy_coding: bool = False
    _chosen: tuple[tuple[Codec, bool], Choice] | None = field(default=None, init=False, repr=False)

    def check(self, world_size: int | None) -> None:
        """Raise TypeError or ValueError for invalid options. `world_size` None: not known yet."""
        codec, feedback, warmup, seed = self.codec, self.error_feedback, self.warmup_steps, self.seed
        if not (isinstance(feedback, bool | Feedback) or feedback == "auto"):
            raise ValueError(f"error_feedback={feedback!r}: expected True, False, 'auto' or a strategy: Residual()")
        if isinstance(feedback, Feedback) and not isinstance(feedback, NoFeedback):
            kept = feedback.state_names
            if kept and RESIDUAL not in kept:
                raise ValueError(
                    f"{feedback} keeps {', '.join(kept)}: its `state_names` must have {RESIDUAL!r} too, or it must "
                    "derive from NoFeedback"
                )
        if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
            raise ValueError(f"warmup_steps={warmup!r}: expected a number of steps, 0 or more")
        if self.fallback not in FALLBACKS:
            raise ValueError(f"fallback={self.fallback!r}: expected one of {', '.join(map(repr, FALLBACKS))}")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"seed={seed!r}: expected an integer, equal on all ranks")
        check_flag("entropy_coding", self.entropy_coding)
        if self.entropy_coding:
            check_available()
        if isinstance(codec, type) and issubclass(codec, Codec):
            raise TypeError(f"codec={codec.__name__} is a class: make one, such as {codec.__name__}()")
        if isinstance(codec, type) or not (isinstance(codec, Codec) or callable(codec)):
            raise TypeError(f"codec={codec!r}: expected a codec, such as TopK(density=0.01), or a function of the step")
        if world_size is not None:
            node_size(self.topology, world_size)

    @property
    def strategy(self) -> Feedback | None:
        """The feedback strategy that the user has named, if any."""
        return self.error_feedback if isinstance(self.error_feedback, Feedback) else None

    @property
    def scheduled(self) -> bool:
        """True if the codec is a function of the step."""
        return not isinstance(self.codec, Codec)

    def codec_at(self, step: int) -> Codec:
        """The user's codec for a step."""
        codec = self.codec if isinstance(self.codec, Codec) else self.codec(step)
        if not isinstance(codec, Codec):
            raise TypeError(f"codec at step {step} is {codec!r}: expected a codec, such as gradwire.TopK(density=0.01)")
        return codec

    def choice(self, step: int) -> Choice:
        """Codec, exchange and feedback of a step."""
        asked = self.codec_at(step), step < self.warmup_steps
        if self._chosen is None or self._chosen[0] != asked:
            self._chosen = asked, self._choose(*asked)
        return self._chosen[1]

    def _choose(self, codec: Codec, warm: bool) -> Choice:
        feedback = codec.default_feedback if self.error_feedback == "auto" else bool(self.error_feedback)
        feedback = feedback and not codec.lossless
        if feedback:
            codec = (self.strategy or Residual()).codec_for(codec)
        check_exchange(self.exchange, codec)
        return Choice(codec, "dense" if warm else self.exchange, feedback, warmup=self.warmup_steps if warm else 0)

    @property
    def keeps_all(self) -> bool:
        """True if the strategy keeps state of every parameter in every step, of uncompressed ones too."""
        return self.strategy is not None and not self.strategy.only_residual

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn of a `known_problem` of these options with an optimizer.

        Raises:
            ValueError: both the optimizer and the strategy have a momentum.
        """
        if self.strategy is not None:
            self.strategy.check_optimizer(optimizer)
        choice = self.choice(self.warmup_steps)
        problem = known_problem(optimizer, choice.codec, choice.feedback and not self.keeps_all)
        if problem is not None and choice.exchange != "dense":
            warnings.warn(problem, stacklevel=8)  # where the optimizer's step was called

    def prepare(self, step: int, dtypes: Iterable[torch.dtype], device: torch.device) -> None:
        """Compile the kernels that a step of such gradients needs."""
        for codec in codecs_of(self.choice(step), self.fallback):
            for dtype in set(dtypes):
                codec.kernels(device).prepare(codec, dtype, device)
        (self.strategy or Residual()).prepare(device)
        backend_for(device).vectors.prepare(device)

    def may_keep(self) -> bool:
        """True if any step may leave a residual or other state."""
        if (self.exchange == "auto" and self.fallback == torch.bfloat16) or self.keeps_all:
            return True
        return self.scheduled or self.choice(self.warmup_steps).feedback

    @property
    def codec_text(self) -> str:
        """The codec, for people and checkpoints."""
        return f"a function of the step, at 0 {self.codec_at(0)}" if self.scheduled else str(self.codec)

    def describe(self, world_size: int) -> dict[str, Any]:
        """Options by name, for ranks to compare."""
        return {
            "wire format": WIRE_VERSION,
            "codec": self.codec_text,
            "exchange": self.exchange,
            "error_feedback": self.error_feedback if self.strategy is None else str(self.strategy),
            "warmup_steps": self.warmup_steps,
            "fallback": str(self.fallback),
            "ranks a node": node_size(self.topology, world_size),
            "seed": self.seed,
            "entropy_coding": self.entropy_coding,
        }


def check_dtypes(parameters: Mapping[str, Tensor]) -> None:
    """Raise TypeError for parameters whose dtype cannot be compressed."""
    for name, parameter in parameters.items():
        if parameter.dtype not in DTYPES:
            raise TypeError(f"parameter {name!r} is {parameter.dtype}: gradwire compresses float32, float16, bfloat16")


def check_whole(parameters: Mapping[str, Tensor], owner: str) -> None:
    """Raise TypeError for sharded parameters: `owner` needs whole ones, in flat tensors."""
    for name, parameter in parameters.items():
        if type(parameter).__torch_dispatch__ != Tensor.__torch_dispatch__:
            raise TypeError(
                f"parameter {name!r} is a {type(parameter).__name__}: {owner} takes plain tensors, so leave out "
                "fully_shard and parallelize_module, or compress the gradients of replicas with gradwire.compress_fsdp"
            )


def excluded_names(exclude: Exclude | None, parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """The names of the parameters that `exclude` selects.

    Raises:
        TypeError: `exclude` is neither a predicate nor a sequence of names.
        ValueError: a name in it matches no parameter.
    """
    if exclude is None:
        return frozenset()
    if callable(exclude):
        return frozenset(name for name, parameter in parameters.items() if exclude(name, parameter))
    names = isinstance(exclude, Collection) and not isinstance(exclude, str)
    if not names or not all(isinstance(pattern, str) for pattern in exclude):
        raise TypeError(
            f"exclude={exclude!r}: expected names such as ['*.bias'], or a predicate (name, parameter) -> bool"
        )
    return frozenset().union(*(named_by("exclude", pattern, parameters) for pattern in exclude))


def named_by(argument: str, pattern: str, names: Collection[str]) -> set[str]:
    """The names that a pattern of an argument fits.

    Raises:
        ValueError: it fits none.
    """
    inner = unwrapped(pattern)
    for way in (pattern, inner, inner.removeprefix(OUTERMOST)):
        if found := matches(way, names):
            return found
    first = ", ".join(map(repr, list(names)[:4]))
    raise ValueError(
        f"{argument}: {pattern!r} matches none of the model's parameters ({first}, …): "
        "give whole names, with '*' for any part, as in '*.bias'"
    )
