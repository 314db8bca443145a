"""Names of parameters do not depend on what is wrapped around parts of a model: checkpoints and options fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fronts import FRONTS, Front, marked
from gradwire import OneBit
from gradwire.hooks.training.names import matches, names_of, plain_names, renamed
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor


class Compiled(nn.Module):
    """As `torch.compile` wraps a module, which takes long to import."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda module: module,
    "checkpoint": checkpoint_wrapper,
    "compile": Compiled,
    "twice": lambda module: checkpoint_wrapper(Compiled(module)),
}
#: Names as users have them, some of them a wrapper's, or nearly.
PARTS = ("weight", "module", "my_orig_mod", "0")


class Tree(nn.Module):
    """Parameters and parts of these names."""

    def __init__(self, leaves: set[str], parts: dict[str, nn.Module]) -> None:
        super().__init__()
        for name in sorted(leaves):
            self.register_parameter(f"{name}_p", nn.Parameter(torch.zeros(1)))
        for name, part in sorted(parts.items()):
            self.add_module(name, part)


def trees(draw: st.DrawFn, depth: int, wraps: bool) -> tuple[nn.Module, nn.Module]:
    """A module, and the same with wrappers around some of its parts."""
    leaves = draw(st.sets(st.sampled_from(PARTS), max_size=2))
    names = draw(st.sets(st.sampled_from(PARTS), max_size=2)) if depth else set()
    pairs = {name: trees(draw, depth - 1, True) for name in sorted(names)}
    bare, inner = (Tree(leaves, {name: pair[i] for name, pair in pairs.items()}) for i in (0, 1))
    return bare, WRAPPERS[draw(st.sampled_from(sorted(WRAPPERS)))](inner) if wraps else inner


@settings(max_examples=10)
@given(st.data())
def test_names_are_those_without_wrappers(data: st.DataObject) -> None:
    bare, wrapped = data.draw(st.composite(trees)(3, True))
    names = [names_of(module)[id(p)] for module in (bare, wrapped) for p in module.parameters()]
    half = len(names) // 2
    assert names[:half] == names[half:]
    assert len(set(names[:half])) == half
    old = dict.fromkeys(name for name, _ in wrapped.named_parameters())
    assert list(renamed(old, names)) == names[:half]


@settings(max_examples=30)
@given(st.sets(st.lists(st.sampled_from(("_orig_mod", "module", "a", "b")), min_size=1, max_size=4).map(".".join)))
def test_no_two_parameters_have_one_name(names: set[str]) -> None:
    assert len(set(plain_names(names).values())) == len(names)


def net(wrapped: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(8, 8), nn.Linear(8, 4)]
    return nn.Sequential(*(checkpoint_wrapper(layer) if wrapped else layer for layer in layers))


def front(kind: str, wrapped: bool, exclude: str = "1.bias") -> Front:
    """A model in training with activation checkpointing or without."""
    options: dict[str, Any] = {} if kind == "horovod" else {"exclude": [exclude]}
    if kind == "local":
        options["outer_momentum"] = 0.9
    return FRONTS[kind](net(wrapped), OneBit(), **options)


def by_name(saved: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint has by parameter."""
    residuals = saved["gradwire"]["residuals"] if "gradwire" in saved else next(iter(saved["residuals"].values()))
    return residuals | {f"{what} {n}": x for what in ("global", "momentum") for n, x in saved.get(what, {}).items()}


def with_wrappers(saved: Any) -> Any:
    """A checkpoint as it was saved when names had wrappers in them."""
    if not isinstance(saved, dict):
        return saved
    return {re.sub(r"^(\d)\.", r"\1._checkpoint_wrapped_module.", key): with_wrappers(x) for key, x in saved.items()}


def toggled(rank: int, kind: str) -> list[str]:
    """Activation checkpointing is switched on or off between saving and loading; what does not fit."""
    wrong = []
    for before, after, old in ((False, True, False), (True, False, False), (False, False, True), (False, True, True)):
        first = front(kind, before)
        for _ in range(2):
            first.step(torch.randn(4, 8))
        saved = first.state.state_dict()
        found = by_name(saved)
        assert any(bool(x.any()) for x in map(whole, found.values()))
        other = front(kind, after, "1._checkpoint_wrapped_module.bias" if after else "1.bias")
        other.state.load_state_dict(with_wrappers(saved) if old else saved)
        again = by_name(other.state.state_dict())
        if again.keys() != found.keys() or not all(torch.equal(whole(again[n]), whole(x)) for n, x in found.items()):
            wrong.append(f"{before} to {after}, old names: {old}: {sorted(found)} became {sorted(again)}")
        other.step(torch.randn(4, 8))
        for one in (first, other):
            if kind != "horovod":
                one.close()
    return wrong


def whole(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("kind", marked(["ddp", "local", "horovod", "replicas", "shards"]))
def test_checkpoints_fit_whatever_is_wrapped(ranks: Ranks, kind: str) -> None:
    assert ranks(2).run(toggled, kind) == [[], []]


def test_a_pattern_is_a_name_with_stars() -> None:
    names = ["a[0].weight", "a0.weight", "a[0].bias", "b?.weight"]
    assert all(matches(name, names) == {name} for name in names)
    assert matches("*[0].*", names) == {"a[0].weight", "a[0].bias"}
    assert matches("*", names) == set(names)
    assert matches("a?.weight", names) == matches("weight", names) == set()
