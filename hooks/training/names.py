"""Names of parameters as the innermost module gives them, without those of wrappers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import TypeVar

from torch import nn

#: Attributes in which torch.compile, activation checkpointing and FSDP1 keep the wrapped module.
WRAPPED = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))
#: Attribute in which DataParallel, AveragedModel and others keep it; also a usual name of a module's own part.
OUTERMOST = "module."

T = TypeVar("T")


def unwrapped(name: str) -> str:
    """A name, or a pattern of names, without the parts of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def matches(pattern: str, names: Iterable[str]) -> set[str]:
    """The names that equal a pattern, in which `*` stands for any part; names may have brackets."""
    fits = re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL).fullmatch
    return {name for name in names if fits(name)}


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Names without wrappers, by full name. Names that would become equal keep their wrappers."""
    short = {name: unwrapped(name) for name in names}
    counts = Counter(short.values())
    plain = {name: inner if counts[inner] == 1 else name for name, inner in short.items()}
    inside = {name: inner.removeprefix(OUTERMOST) for name, inner in plain.items()}
    return inside if len(set(inside.values())) == len(inside) else plain


def names_of(module: nn.Module) -> dict[int, str]:
    """The plain names of a module's parameters, by their id."""
    named = dict(module.named_parameters())
    plain = plain_names(named)
    return {id(p): plain[name] for name, p in named.items()}


def renamed(found: Mapping[str, T], known: Container[str]) -> dict[str, T]:
    """A checkpoint's values under the model's names, which may lack or have wrappers that the checkpoint's have not."""
    result: dict[str, T] = {}
    for name, value in found.items():
        inner = unwrapped(name)
        plain = next((n for n in (name, inner, inner.removeprefix(OUTERMOST)) if n in known), name)
        result[name if plain in found else plain] = value
    return result
