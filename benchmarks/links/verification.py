"""Proof that links keep their rate and delay, by the processes that use them.

Without a distance an all-reduce shows the rate, as it takes what its bytes take. At a distance Gloo's waits for rounds
within it (of 25 MB at 1 Gbit/s and 25 ms, 0.8 s where the bytes need 0.2), so a stream of messages whose receives are
posted ahead shows the rate, a ping the delay, and the all-reduce that nothing is faster than it can be.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
import torch.distributed as dist

from ..common.launch import LinkError, device, function_at, synchronize
from ..common.report import median

#: Names the file of a rank's token bucket: its rate, and what was sent (bucket.c).
BUCKET = "GRADWIRE_BUCKET"
#: How much longer than its bytes need an all-reduce, or a stream, may take on links that run at their rate.
TOLERANCE = 1.3
#: Seconds of sending that an all-reduce takes.
SECONDS = 0.02
#: At least so many times what passes unshaped after an idle moment, so that the proof on a slow link is of its rate.
BURSTS = 16
#: Pieces of a stream, each a tenth of a second of the link: first untimed, as TCP's window opens, then timed.
PIECES_FIRST, PIECES, PIECE_SECONDS = 10, 5, 0.1
#: How much longer than two ways a ping may take: a share of them, and seconds that busy processors need to answer.
PING_SHARE, PING_SECONDS = 0.1, 2e-3
PINGS = 9


class Proof(TypedDict):
    """An all-reduce on the links: bytes that each rank sends, the seconds that takes at the rate (with the delay, one
    way, where there is one; 0: without a limit), the median and the fastest measured, and whether the rate was reached.

    On links with a distance also that delay, the quickest ping and the median of all; what a piece of a stream from
    each rank to the next needs, the mean of the fastest stream from its first piece on, and the median of all timed
    ones; and the kernel's settings of TCP by their names.
    """

    bytes_sent: float
    expected_s: float
    median_s: float
    fastest_s: float
    reached: bool
    delay_s: NotRequired[float]
    fastest_ping_s: NotRequired[float]
    median_ping_s: NotRequired[float]
    expected_stream_s: NotRequired[float]
    fastest_stream_s: NotRequired[float]
    median_stream_s: NotRequired[float]
    tcp: NotRequired[dict[str, str]]


def stream_bytes(rate: int) -> int:
    """Of a piece of the stream."""
    return round(rate / 8 * PIECE_SECONDS)


def prove(
    rate: int | None,
    delay: float,
    world_size: int,
    numel: int,
    ranks: Sequence[Mapping[str, Any]],
    tcp: dict[str, str],
    tolerance: float = TOLERANCE,
) -> Proof:
    """The proof of all ranks' measurements (`proven`'s) on links of `rate` bits a second, each way `delay` long."""
    sent = 2 * (world_size - 1) * 4 * numel / world_size
    slowest_rank = [max(step) for step in zip(*(rank["times"] for rank in ranks), strict=True)]
    expected, typical = (sent * 8 / rate if rate else 0.0) + delay, median(slowest_rank)
    proof = Proof(
        bytes_sent=sent,
        expected_s=expected,
        median_s=typical,
        fastest_s=min(slowest_rank),
        reached=rate is None or typical <= tolerance * expected,
    )
    if delay:
        pings = [ping for rank in ranks for ping in rank["pings"]]
        proof["delay_s"], proof["fastest_ping_s"], proof["median_ping_s"] = delay, min(pings), median(pings)
        proof["expected_stream_s"] = PIECE_SECONDS
        proof["fastest_stream_s"] = min(rank["stream"][-1] for rank in ranks) / (PIECES_FIRST + PIECES)
        timed = [pairwise(rank["stream"][PIECES_FIRST - 1 :]) for rank in ranks]
        proof["median_stream_s"] = median([after - before for before, after in chain.from_iterable(timed)])
        proof["reached"] = proof["median_stream_s"] <= TOLERANCE * proof["expected_stream_s"]
        proof["tcp"] = tcp
    return proof


def check_proof(proof: Proof, links: str, strict: bool = True) -> None:
    """Raises LinkError unless the measured all-reduce took about as long as its bytes take at the rate; and, at a
    distance, a stream too, and a ping as long as two ways.

    Longer is an error only if `strict`.
    """
    expected, fastest = proof["expected_s"], proof["fastest_s"]
    if fastest < 0.95 * expected:
        raise LinkError(
            f"{links} are not shaped: an all-reduce took {fastest * 1e3:.1f} ms, its bytes need {expected * 1e3:.1f}"
        )
    if "delay_s" in proof and proof["fastest_ping_s"] < 0.99 * 2 * proof["delay_s"]:
        raise LinkError(
            f"{links} are shorter than that: a ping took {proof['fastest_ping_s'] * 1e3:.2f} ms, two ways are "
            f"{proof['delay_s'] * 2e3:g}"
        )
    if "delay_s" in proof and proof["fastest_stream_s"] < 0.95 * proof["expected_stream_s"]:
        raise LinkError(
            f"{links} are not shaped: a piece of a stream took {proof['fastest_stream_s'] * 1e3:.1f} ms, its bytes "
            f"need {proof['expected_stream_s'] * 1e3:.1f}"
        )
    if strict and not (proof["reached"] and as_long(proof)):
        raise LinkError(
            f"{links} do not reach their rate or keep their delay: {_measured(proof)}; the machine is busy, or too "
            "slow for this rate"
        )


def as_long(proof: Proof) -> bool:
    """True if pings take at most two ways, within the tolerance, or links have no distance."""
    return "delay_s" not in proof or proof["median_ping_s"] <= 2 * proof["delay_s"] * (1 + PING_SHARE) + PING_SECONDS


def caption(proof: Proof | None) -> str:
    """The line on the links below a table; None is a loopback's proof."""
    if proof is None:
        return "NOT SHAPED: loopback, as fast as the processors allow; says nothing about a network"
    if not proof["expected_s"]:
        megabytes, took = proof["bytes_sent"] / 1e6, proof["median_s"]
        speed = f"{proof['bytes_sent'] * 8e-9 / took:.1f} Gbit/s"
        return (
            f"NOT LIMITED: an all-reduce for which a rank sends {megabytes:.0f} MB took {took * 1e3:.1f} ms ({speed})"
        )
    if not proof["reached"]:
        first = "TCP, or what" if "delay_s" in proof else "what"
        limit = f"{first} this machine can send and receive is the limit, not the link"
        return f"RATE NOT REACHED: {_measured(proof)}; {limit}"
    if not as_long(proof):
        return f"DELAY NOT KEPT: {_measured(proof)}; the machine is busy"
    return f"links proven: {_measured(proof)}"


def _measured(proof: Proof) -> str:
    expected, took = proof["expected_s"] * 1e3, proof["median_s"] * 1e3
    all_reduce = f"an all-reduce that needs {expected:.1f} ms at this rate took {took:.1f}"
    if "delay_s" not in proof:
        return all_reduce
    ways, ping = proof["delay_s"] * 2e3, proof["median_ping_s"] * 1e3
    needs, stream = proof["expected_stream_s"] * 1e3, proof["median_stream_s"] * 1e3
    return (
        f"a ping there and back, {ways:g} ms, took {ping:.2f}; a piece of a stream that needs {needs:.1f} ms took "
        f"{stream:.1f}; {all_reduce}; TCP: {', '.join(f'{name} {value}' for name, value in proof['tcp'].items())}"
    )


def proven(
    numel: int,
    repeats: int,
    piece: int,
    function: str | None,
    arguments: Mapping[str, Any],
    per_node: int = 1,
) -> dict[str, Any]:
    """Every rank's part of `links.Loopback.run_proven`.

    Args:
        numel, repeats: of `timed_all_reduce`.
        piece: bytes of a piece of the stream that each rank sends the next one, after pings; 0: neither.
        function, arguments: what to call after that, by `launch.path_of`; None: nothing.
        per_node: ranks that share a link, of which the first makes the all-reduce.
    """
    return {
        "times": timed_all_reduce(numel, repeats, per_node),
        "pings": ping(PINGS) if piece else [],
        "stream": timed_stream(piece) if piece else [],
        "result": None if function is None else function_at(function)(**arguments),
    }


def timed_all_reduce(numel: int, repeats: int, per_node: int = 1) -> list[float]:
    """Seconds of each of `repeats` all-reduces of `numel` float32 among every `per_node`-th rank, with idle moments
    between them; what other ranks return means nothing."""
    x = torch.zeros(numel, device=device())
    times = []
    group = None if per_node == 1 else dist.new_group(list(range(0, dist.get_world_size(), per_node)))
    joins = dist.get_rank() % per_node == 0
    for repeat in range(5 + repeats):
        dist.barrier()
        if repeat >= 5:  # the first ones open TCP's windows
            time.sleep(0.01)
        begin = time.perf_counter()
        if joins:
            dist.all_reduce(x, group=group)
        synchronize()
        times.append(time.perf_counter() - begin)
    return times[5:]


def timed_stream(piece: int) -> list[float]:
    """Seconds after which each next `piece` bytes of a stream have arrived from the rank before, since before it sent
    the first. A collective: all send, and receive, at once; receives are posted ahead, so that TCP never waits."""
    (before, following), numbers, moments = _beside(), range(PIECES_FIRST + PIECES), []
    sent, into = torch.zeros(2, piece, dtype=torch.uint8)
    arriving = [dist.irecv(into, before, tag=number) for number in numbers]
    begin = time.perf_counter()
    dist.barrier()
    leaving = [dist.isend(sent, following, tag=number) for number in numbers]
    for work in arriving:
        _wait(work)
        moments.append(time.perf_counter() - begin)
    for work in leaving:
        _wait(work)
    return moments


def ping(times: int) -> list[float]:
    """Seconds from each message to the next rank until its answer. A collective; receives are posted ahead."""
    (before, following), spent, leaving = _beside(), [], []
    letter, into = torch.zeros(2, 1)
    asked, answered = (
        [dist.irecv(into, rank, tag=2 * number + answer) for number in range(times)]
        for answer, rank in enumerate((before, following))
    )
    dist.barrier()
    for number in range(times):
        begin = time.perf_counter()
        leaving.append(dist.isend(letter, following, tag=2 * number))
        _wait(asked[number])
        leaving.append(dist.isend(letter, before, tag=2 * number + 1))
        _wait(answered[number])
        spent.append(time.perf_counter() - begin)
    for work in leaving:
        _wait(work)
    return spent


def _beside() -> tuple[int, int]:
    """The rank before this one, and the next."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % size, (rank + 1) % size


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def sent_bytes() -> int:
    """Bytes this rank's interface has sent so far, counted by the kernel, headers and all; or its token bucket's count,
    without headers.

    On links with a distance the headers of what the kernel sends in one piece count once.
    """
    if BUCKET in os.environ:
        return int(struct.unpack("dQ", Path(os.environ[BUCKET]).read_bytes())[1])
    return _counter("tx_bytes")


def received_bytes() -> int:
    """Bytes this rank's interface has received so far, counted by the kernel, as `sent_bytes`."""
    return _counter("rx_bytes")


def _counter(name: str) -> int:
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{interface}/statistics/{name}").read_text())
