"""Run a program on links of a known speed and length: once on every rank, each in a network namespace of its own.

    gradwire-bench links --world 2 --rate 1gbit --delay 25ms -- python train.py

The program finds what `torchrun` would set: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and
GLOO_SOCKET_IFNAME. Rank 0 writes here; what another rank wrote is shown if it fails. The exit status is the worst of
all ranks. Before that the links are proven, which takes some seconds and goes to standard error; after it follows, at a
distance, how late packets were handed over, as this machine's processors were busy.
"""

from __future__ import annotations

import argparse
import sys

from . import flags, links, verification

#: Seconds that the proof may take.
TIMEOUT = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", default="1gbit", help="of each rank's link, such as 100mbit; none: unshaped loopback")
    flags.add_distance(parser)
    parser.add_argument("--world", type=int, default=2, help="ranks (default: %(default)s)")
    parser.add_argument("--no-proof", dest="proof", action="store_false", help="begin at once")
    parser.add_argument("program", nargs="+", help="and its arguments, after --")


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench links`."""
    rates, distance = flags.network_of(options)
    with links.open_links(options.world, rates[options.rate], distance, limit=options.limit) as connection:
        print(connection, file=sys.stderr)
        if options.proof:
            shown, _ = connection.run_proven(None, {}, TIMEOUT)
            print(verification.caption(shown), file=sys.stderr)
        status = connection.run_program(options.program)
    if isinstance(connection, links.DistantLinks) and connection.carried:
        counts = connection.carried
        late, worst = counts["late_mean_s"] * 1e3, counts["late_worst_s"] * 1e3
        print(
            f"{counts['packets']} packets, {late:.2f} ms late on average, {worst:.1f} at worst; "
            f"{counts['dropped']} dropped by full queues",
            file=sys.stderr,
        )
    return status
