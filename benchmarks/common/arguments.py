"""Options that several subcommands have, and what their numbers must be."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

#: The least that options may be, by name, where a subcommand has no limit of its own.
LEAST = dict.fromkeys(
    ("batch", "jobs", "layers", "models", "numel", "readings", "repeats", "rounds", "seeds", "steps", "timed", "width"),
    1,
) | {"warmup": 0, "world": 2, "worlds": 1}


def expect_at_least(options: argparse.Namespace, **least: int) -> None:
    """Raises ValueError, naming the option, where one of these is smaller than it may be; an option may be a list."""
    for name, smallest in least.items():
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) < smallest:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected at least {smallest}")


def expect_counts(options: argparse.Namespace) -> None:
    """`expect_at_least` of `LEAST`, for the options that are there."""
    expect_at_least(options, **{name: least for name, least in LEAST.items() if hasattr(options, name)})


def add_arms(parser: argparse.ArgumentParser, titles: Mapping[str, str], default: Iterable[str] | None = None) -> None:
    """`--arms`, some of `titles`; what each is stands at the end of the help. Compared by default: all."""
    chosen = list(titles if default is None else default)
    summary = "all" if default is None else " ".join(chosen)
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=list(titles),
        default=chosen,
        metavar="ARM",
        help=f"what to compare, of those listed below (default: {summary})",
    )
    width = max(map(len, titles))
    parser.epilog = "arms:\n" + "\n".join(f"  {name:<{width}}  {title}" for name, title in titles.items())


def add_turns(parser: argparse.ArgumentParser, steps: int, rounds: int, warmup: int) -> None:
    """The length of a run: rounds, and steps in each."""
    parser.add_argument("--steps", type=int, default=steps, help="timed in each round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=rounds, help="each runs every arm once (default: %(default)s)")
    parser.add_argument(
        "--warmup", type=int, default=warmup, help="untimed steps of each arm first (default: %(default)s)"
    )


def add_layers(parser: argparse.ArgumentParser, width: int = 2048, layers: int = 6, batch: int = 8) -> None:
    """The model of `models.perceptron`."""
    parser.add_argument("--width", type=int, default=width, help="of each linear layer (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=layers, help="linear layers (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=batch, help="samples a rank (default: %(default)s)")


def add_output(
    parser: argparse.ArgumentParser, plot: str = "", timeout: float | None = None, each: str = "all of it"
) -> None:
    """`--json`, `--plot` if something can be drawn, and `--timeout`."""
    if timeout is not None:
        parser.add_argument("--timeout", type=float, default=timeout, help=f"seconds for {each} (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write arguments, environment and everything measured there")
    if plot:
        parser.add_argument("--plot", type=Path, metavar="FILE.png", help=f"draw {plot} there")
