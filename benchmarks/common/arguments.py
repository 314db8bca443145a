"""Options that several subcommands have, and what their numbers must be."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping


def expect_at_least(options: argparse.Namespace, **least: int) -> None:
    """Raises ValueError, naming the option, where one of these is smaller than it may be; an option may be a list."""
    for name, smallest in least.items():
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) < smallest:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected at least {smallest}")


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
