"""Options that count something."""

from __future__ import annotations

import argparse


def expect_at_least(options: argparse.Namespace, **least: int) -> None:
    """Raises ValueError, naming the option, where one of these is smaller than it may be; an option may be a list."""
    for name, smallest in least.items():
        value = getattr(options, name)
        if min(value if isinstance(value, list) else [value]) < smallest:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected at least {smallest}")
