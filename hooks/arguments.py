"""What a user may pass to `CompressState`, and what is said about anything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn

from ..compress.codec import DTYPES, Codec
from ..compress.feedback import Feedback

#: What `CompressState(exchange=…)` takes.
ExchangeName = Literal["auto", "gather", "two_pass", "union", "split", "dense", "hierarchical"]
#: A predicate, or names of parameters in which "*" stands for anything.
Exclude = Callable[[str, nn.Parameter], bool] | Sequence[str]

FALLBACKS = (torch.float32, torch.bfloat16, None)


def check_codec(codec: Any) -> None:
    """Raises TypeError unless `codec` is one, or can be a function of the step."""
    if isinstance(codec, type) and issubclass(codec, Codec):
        raise TypeError(f"codec={codec.__name__} is a class: make one, such as {codec.__name__}()")
    if isinstance(codec, type) or not (isinstance(codec, Codec) or callable(codec)):
        raise TypeError(f"codec={codec!r}: expected a codec, such as TopK(density=0.01), or a function of the step")


def check_options(error_feedback: Any, warmup_steps: Any, fallback: Any, seed: Any) -> None:
    """Raises TypeError or ValueError for what cannot be meant."""
    if not (isinstance(error_feedback, bool | Feedback) or error_feedback == "auto"):
        raise ValueError(f"error_feedback={error_feedback!r}: expected True, False, 'auto' or a strategy: Residual()")
    if not isinstance(warmup_steps, int) or isinstance(warmup_steps, bool) or warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps!r}: expected a number of steps, 0 or more")
    if fallback not in FALLBACKS:
        raise ValueError(f"fallback={fallback!r}: expected one of {', '.join(map(str, FALLBACKS))}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed={seed!r}: expected an integer, equal on all ranks")


def check_model(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises TypeError for gradients that cannot be compressed."""
    for name, parameter in parameters.items():
        if parameter.dtype not in DTYPES:
            raise TypeError(f"parameter {name!r} is {parameter.dtype}: gradwire compresses float32, float16, bfloat16")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise TypeError(f"module {name!r} makes sparse gradients: build it with sparse=False")


def excluded_names(exclude: Exclude | None, parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """The names of the parameters that `exclude` means.

    Raises:
        TypeError: it is neither a predicate nor a sequence of names.
        ValueError: a name in it matches no parameter.
    """
    if exclude is None:
        return frozenset()
    if callable(exclude):
        return frozenset(name for name, parameter in parameters.items() if exclude(name, parameter))
    if isinstance(exclude, str) or not all(isinstance(pattern, str) for pattern in exclude):
        raise TypeError(
            f"exclude={exclude!r}: expected names such as ['*.bias'], or a predicate (name, parameter) -> bool"
        )
    found: set[str] = set()
    for pattern in exclude:
        matching = {name for name in parameters if fnmatchcase(name, pattern)}
        if not matching:
            first = ", ".join(map(repr, list(parameters)[:4]))
            raise ValueError(
                f"exclude: {pattern!r} matches none of the model's parameters ({first}, …): "
                "give whole names, with '*' for any part, as in '*.bias'"
            )
        found |= matching
    return frozenset(found)
