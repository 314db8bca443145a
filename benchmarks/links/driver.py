"""Measuring on links: the document, and the processes on the links."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from ..common import report
from ..common.arguments import expect_counts
from . import flags, links


def document(benchmark: str, options: argparse.Namespace, *names: str, **arguments: Any) -> dict[str, Any]:
    """The document of a run on links, before it has run.

    Args:
        names: of options that are recorded, besides those of the links.
        arguments: what is recorded besides.

    Raises:
        ValueError: an option makes no sense.
    """
    expect_counts(options)
    _, distance = flags.network_of(options)
    given = {name: getattr(options, name) for name in ("rate", "rates", "world", "worlds") if hasattr(options, name)}
    given |= flags.recorded(distance) | {name: getattr(options, name) for name in names} | arguments
    result = report.document(benchmark, given)
    result["environment"]["threads"] = 1  # of each rank
    return result


def measured(
    options: argparse.Namespace,
    rate: str,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    world: int | None = None,
    per_node: int = 1,
    **how: Any,
) -> tuple[dict[str, Any], list[Any]]:
    """Run a function on every rank, on links of `rate` that have been proven.

    Args:
        options: with those of `flags.add_links` and a timeout.
        function, arguments, how: as of `Loopback.run_proven`.
        world: ranks; None: as the options say.
        per_node: of these on each node.

    Returns:
        What is recorded of the links, and what the ranks returned.
    """
    rates, distance = flags.network_of(options)
    limit = getattr(options, "limit", None)
    with links.open_links(world or options.world, rates[rate], distance, per_node, limit) as connection:
        connection.device = getattr(options, "device", "cpu")
        proof, ranks = connection.run_proven(function, arguments, options.timeout, **how)
    network = {"rate": rate, "bits_per_s": rates[rate], "links": str(connection), "proof": proof}
    return network | {"counter": connection.counter}, ranks


def measured_arms(
    options: argparse.Namespace,
    function: Callable[..., dict[str, Any]],
    arguments: Mapping[str, Any],
    summarize: Callable[[list[Any], bool], list[dict[str, Any]]],
    world: int | None = None,
    per_node: int = 1,
) -> list[dict[str, Any]]:
    """`measured` at every rate: for each, what is recorded of its links, what the first rank returned, and in the place
    of its "arms" what `summarize` makes of all ranks', and of whether each rank's bytes are counted."""
    found = []
    for rate in flags.network_of(options)[0]:
        network, ranks = measured(options, rate, function, arguments, world, per_node)
        arms = summarize([rank["arms"] for rank in ranks], network["proof"] is not None)
        found.append(network | ranks[0] | {"arms": arms})
    return found
