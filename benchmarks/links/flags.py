"""Speed and length of links, as flags of subcommands."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict, dataclass
from typing import Any

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_rate(text: str) -> int | None:
    """Bits a second of "1gbit", "100mbit" or "2.5gbit"; None for "none".

    Raises:
        ValueError: anything else.
    """
    if text == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"rate {text!r}: expected a number and a unit such as 100mbit or 1gbit, or none")
    return round(float(match[1]) * _UNITS[match[2]])


def parse_time(text: str, option: str) -> float:
    """Seconds of "50us", "1.5ms" or "0s". Raises ValueError, naming the option, for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text)
    if match is None:
        raise ValueError(f"{option} {text}: expected a number and a unit such as 50us or 1ms")
    return float(match[1]) * _TIMES[match[2]]


@dataclass(frozen=True)
class Distance:
    """The length of a link.

    Attributes:
        delay: seconds, one way.
        mtu: bytes of the largest packet.
    """

    delay: float
    mtu: int = 1500

    def __post_init__(self) -> None:
        if not self.delay > 0:
            raise ValueError(f"a delay of {self.delay:g} s: expected more than 0; without one, links have no distance")


def add_links(parser: argparse.ArgumentParser, *rates: str, whose: str = "rank", world: bool = True) -> None:
    """`--rate`, or where several are usual `--rates`; `--delay`; and `--world`.

    Args:
        rates: usual ones; none: one of 1 Gbit/s.
        whose: links these are; each rank's may have a distance.
        world: whether the number of ranks is an option too.
    """
    if rates:
        usual = " ".join(rates)
        parser.add_argument(
            "--rates", nargs="+", default=list(rates), metavar="RATE", help=f"of the links; none: loopback ({usual})"
        )
    else:
        shown = f"of each {whose}'s link, such as 100mbit; none: unshaped loopback (default: %(default)s)"
        parser.add_argument("--rate", default="1gbit", help=shown)
    if whose == "rank":
        add_distance(parser)
    if world:
        parser.add_argument("--world", type=int, default=2, help="ranks (default: %(default)s)")


def add_distance(parser: argparse.ArgumentParser) -> None:
    """`--delay` and `--limit`, beside the links' rate."""
    parser.add_argument("--delay", help="of each packet, one way, such as 25ms (default: none but the machine's own)")
    shown = "the rates: tc, or a token bucket preloaded into each rank (default: tc where it can be had)"
    parser.add_argument("--limit", choices=("tc", "bucket"), help=f"what keeps {shown}")


def network_of(options: argparse.Namespace) -> tuple[dict[str, int | None], Distance | None]:
    """The rates of `--rate` or `--rates`, in bits a second by how they were written, and the distance.

    Raises:
        ValueError: they make no sense, by themselves or together.
    """
    rates = {text: parse_rate(text) for text in getattr(options, "rates", None) or [options.rate]}
    delay = getattr(options, "delay", None)
    distance = None if delay is None else Distance(parse_time(delay, "--delay"))
    if distance is not None and None in rates.values():
        raise ValueError("--delay needs a rate: a loopback has no distance")
    return rates, distance


def recorded(distance: Distance | None) -> dict[str, Any]:
    """A distance as arguments of a document; nothing if there is none."""
    return {} if distance is None else {"distance": asdict(distance)}
