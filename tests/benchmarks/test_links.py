"""Links between processes of one machine: what they refuse, what proves them, and that they do what they should."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import faults
import pytest
from gradwire.benchmarks import cli
from gradwire.benchmarks.links import delay, flags, links, verification
from gradwire.benchmarks.links.delay import VIRTUAL, Switch

NEAR = flags.Distance(delay=0.005)
NO_LINKS, NO_DISTANCE = links.missing(), links.missing(NEAR)
needs_distance = pytest.mark.skipif(NO_DISTANCE is not None, reason=str(NO_DISTANCE))


def test_rates_and_times() -> None:
    rates = {"100mbit": 10**8, "1gbit": 10**9, "2.5gbit": 25 * 10**8, "none": None}
    assert {text: flags.parse_rate(text) for text in rates} == rates
    assert [flags.parse_time(text, "-t") for text in ("50us", "1.5ms", "0s")] == pytest.approx([5e-5, 1.5e-3, 0.0])


@pytest.mark.parametrize(
    ("fastest", "median", "complaint"),
    [(0.0210, 0.0215, None), (0.0120, 0.0210, "are not shaped"), (0.0210, 0.0400, "do not reach their rate")],
)
def test_what_counts_as_proof(fastest: float, median: float, complaint: str | None) -> None:
    reached = median < verification.TOLERANCE * 0.02
    found = verification.Proof(bytes_sent=2.5e6, expected_s=0.02, median_s=median, fastest_s=fastest, reached=reached)
    if complaint is None:
        verification.check_proof(found, "links")
    else:
        with pytest.raises(links.LinkError, match=complaint):
            verification.check_proof(found, "links")


def test_slow_links_may_be_used_if_the_table_says_so() -> None:
    slow = verification.Proof(bytes_sent=2.5e7, expected_s=0.02, median_s=0.05, fastest_s=0.04, reached=False)
    verification.check_proof(slow, "links", strict=False)
    assert verification.caption(slow).startswith("RATE NOT REACHED")
    assert verification.caption({**slow, "reached": True}).startswith("links proven")
    assert verification.caption(None).startswith("NOT SHAPED")
    with pytest.raises(links.LinkError, match="are not shaped"):
        verification.check_proof({**slow, "fastest_s": 0.01}, "links", strict=False)


def test_what_passes_unshaped_is_little_of_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """On links of 10 Mbit/s 16 KB were two thirds of it."""
    slow, jobs = links.ShapedLinks(2, 10**7), list[dict[str, Any]]()

    def run(function: Any, job: dict[str, Any], *_: Any) -> list[dict[str, Any]]:
        jobs.append(job)
        return [{"times": [1.0], "result": None}] * 2

    monkeypatch.setattr(slow, "run", run)
    shown, _ = slow.run_proven(None, {}, 1.0)
    assert shown is not None
    assert shown["bytes_sent"] == 4 * jobs[0]["numel"] >= 16 * slow.burst
    with pytest.raises(ValueError, match="1mbit or more"):
        links.ShapedLinks(2, 10**6 - 1)


@pytest.fixture
def no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary user, on a machine without user namespaces."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(links, "_which", lambda tool: f"/nowhere/{tool}")


@pytest.mark.usefixtures("no_root")
def test_without_root_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["step", "--rate", "1gbit"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_rank_that_fails_ends_the_run() -> None:
    with pytest.raises(links.LinkError, match="TypeError"):
        links.Loopback(1).run(verification.timed_all_reduce, {"wrong": 1}, timeout=60)


def test_a_rank_ends_in_order_while_a_callback_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(Path(__file__).parents[1] / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    assert links.Loopback(2).run(faults.late_callback, {}, timeout=60) == ["done"] * 2


def test_time_is_limited() -> None:
    with pytest.raises(links.LinkError, match="not done after"):
        links.Loopback(2).run(verification.timed_all_reduce, {"numel": 1, "repeats": 10**9}, timeout=0.3)


@pytest.mark.skipif(NO_LINKS is not None, reason=str(NO_LINKS))
def test_shaped_links_run_at_their_rate_and_leave_nothing_behind() -> None:
    leftover = f"{links.PREFIX}-{2**30}-0"  # no process has a number this high
    subprocess.run([links._which("ip"), "netns", "add", leftover], check=True)
    with links.ShapedLinks(2, rate=10**8) as shaped:
        assert sorted(links._namespaces(os.getpid())) == [shaped._name(m) for m in (0, 1, "switch")]
        assert leftover not in links._namespaces()
        try:
            shown, _ = shaped.run_proven(
                verification.timed_all_reduce, {"numel": 1, "repeats": 1}, timeout=60, strict=True
            )
        except links.LinkError as busy:  # other work on this machine can slow the links, but never speed them up
            assert "the machine is busy" in str(busy)  # noqa: PT017
        else:
            assert shown is not None
            assert shown["fastest_s"] >= 0.95 * shown["expected_s"]
            assert shown["reached"]
    assert links._namespaces(os.getpid()) == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no cc")
@pytest.mark.parametrize("rate", [10**8, 10**9])
def test_a_token_bucket_keeps_its_rate(rate: int) -> None:
    with links.BucketLinks(2, rate) as limited:
        try:
            shown, _ = limited.run_proven(None, {}, timeout=60)
        except links.LinkError as busy:  # other work on this machine can slow the links, but never speed them up
            assert "the machine is busy" in str(busy)  # noqa: PT017
        else:
            assert shown is not None
            assert 0.95 <= shown["fastest_s"] / shown["expected_s"] <= 1.15


def test_without_tc_a_token_bucket_keeps_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "missing", lambda distance=None: "shaped links need a moon")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert isinstance(links.open_links(2, 10**9), links.BucketLinks)
    assert isinstance(links.open_links(2, 10**9, NEAR), links.DistantLinks), "which says what is missing"
    assert isinstance(links.open_links(2, 10**9, limit="tc"), links.ShapedLinks)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # then the command begins again as root of a namespace of its own
    assert isinstance(links.open_links(2, 10**9), links.ShapedLinks)


# -- distance -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_root")
def test_without_root_a_distance_is_refused_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["links", "--rate", "1gbit", "--delay", "5ms", "--", "true"]) == 2
    reason = "shaped links need root, or user namespaces, to make network namespaces"
    assert capsys.readouterr().err == f"gradwire-bench: {reason}\n"


USER = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
IS_USER = shutil.which("unshare") and subprocess.run([*USER, "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not IS_USER, reason="this machine refuses user namespaces")
def test_an_ordinary_user_is_root_in_a_namespace() -> None:
    command = ["links", "--world", "2", "--rate", "100mbit", "--no-proof", "--", "sh", "-c", "echo $MASTER_ADDR"]
    run = [*USER, sys.executable, "-m", "gradwire.benchmarks.cli", *command]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "10.231.0.1\n"


def test_without_tun_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(delay, "_TUN", str(tmp_path / "tun"))
    if NO_LINKS is None:
        assert "need TUN devices" in str(links.missing(NEAR))


@pytest.mark.parametrize(
    ("ping", "stream", "says"),
    [
        (0.0502, 0.11, None),
        (0.0300, 0.11, "are shorter than that"),
        (0.0900, 0.11, "or keep their delay"),
        (0.0502, 0.30, "do not reach their rate"),
        (0.0502, 0.05, "are not shaped"),
    ],
)
def test_what_counts_as_proof_of_a_distance(ping: float, stream: float, says: str | None) -> None:
    arrivals = [stream * piece for piece in range(1, 16)]
    sides = [{"times": [0.1, 0.12], "pings": [ping] * 3, "stream": arrivals}] * 2
    assert verification.stream_bytes(10**9) == 12_500_000
    found = verification.prove(10**9, 0.025, 2, 625_000, sides, {"wmem": "1 2 3"})
    assert found["expected_s"] == pytest.approx(0.02 + 0.025)
    assert found["expected_stream_s"] == pytest.approx(0.1)
    assert found["reached"] == (stream < 0.13)
    if says is None:
        verification.check_proof(found, "links")
        assert "wmem 1 2 3" in verification.caption(found)
        assert verification.caption(found).startswith("links proven")
        found["fastest_s"] = 0.03  # less than its bytes and one way
        says = "are not shaped"
    with pytest.raises(links.LinkError, match=says):
        verification.check_proof(found, "links")
    if "shape" not in says and "short" not in says:
        verification.check_proof(found, "links", strict=False)
        assert "NOT" in verification.caption(found)


# -- the switch between distant ranks --------------------------------------------------------------------------------


def packet(payload: bytes, segment: int = 0, sender: int = 0, receiver: int = 1, sequence: int = 7) -> bytes:
    """TCP over IPv4 as the kernel hands it over, with virtio's header; `segment`: to be cut into such pieces."""
    addresses = bytes((10, 231, 0, sender + 1)) + bytes((10, 231, 0, receiver + 1))
    transport = struct.pack("!HHIIBBHHH", 5000, 5001, sequence, 9, 8 << 4, 0x19, 1000, 0, 0) + bytes(12)
    internet = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(transport) + len(payload), 11, 0x4000, 64, 6, 0) + addresses
    return VIRTUAL.pack(1, 1 if segment else 0, 0, segment, 20, 16) + internet + transport + payload


def test_a_packet_leaves_at_the_rate_and_arrives_after_the_delay() -> None:
    between = Switch(3, rate=1e6, delay=0.025)
    full, frame = packet(bytes(1448)), (1500 + delay.FRAME_BYTES) / 1e6
    first = 1.0 + frame + 0.025
    assert between.take(full, 0, now=1.0) == (pytest.approx(first), 1)
    assert between.take(full, 0, now=1.0) == (pytest.approx(first + frame), 1), "the sender's link was busy"
    third = between.take(packet(bytes(1448), sender=2), 2, now=1.0)
    assert third == (pytest.approx(first + 2 * frame), 1), "so was the receiver's"
    back = between.take(packet(b"", sender=1, receiver=0), 1, now=1.0)
    assert back == (pytest.approx(1.0 + (52 + delay.FRAME_BYTES) / 1e6 + 0.025), 0), "the other direction was not"


def test_segments_that_travel_in_one_piece_take_as_long_as_alone() -> None:
    whole, apart = Switch(2, rate=1e6, delay=0.01), Switch(2, rate=1e6, delay=0.01)
    together = whole.take(packet(bytes(5 * 1448 + 10), segment=1448), 0, now=0.0)
    for size in (1448,) * 5 + (10,):
        last = apart.take(packet(bytes(size)), 0, now=0.0)
    assert together == pytest.approx(last)


def test_a_full_queue_drops_and_a_stranger_is_ignored() -> None:
    between = Switch(2, rate=1e5, delay=0.01)
    for _ in range(60):
        between.take(packet(bytes(1448)), 0, now=0.0)
    # At most the queue's seconds wait, and the packet on the wire.
    kept = 1 + int(delay.QUEUE_SECONDS / (1514 / 1e5))
    assert between.dropped == 60 - kept
    assert between.take(packet(b"", receiver=2), 0, now=9.0) is None
    assert between.take(packet(b"")[:20], 0, now=9.0) is None
    sixth = bytearray(packet(b""))
    sixth[VIRTUAL.size] = 0x60
    assert between.take(bytes(sixth), 0, now=9.0) is None


def test_packets_are_carried_in_order_and_no_earlier_than_due() -> None:
    """`serve` between two pairs of sockets in place of TUN devices."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    ending, end = os.pipe()
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    for side in theirs:
        side.setblocking(False)
    counted: list[delay.Lateness] = []
    devices = [side.fileno() for side in theirs]
    carrier = threading.Thread(target=lambda: counted.append(delay.serve(Switch(2, 1e6, 0.03), devices, ending)))
    carrier.start()
    try:
        begin = time.monotonic()
        sent = [packet(bytes([n]) * 1000) for n in range(5)]
        for each in sent:
            ours[0].send(each)
        ours[1].settimeout(10)
        assert [ours[1].recv(1 << 16) for _ in sent] == sent
        assert time.monotonic() - begin >= 0.03 + 5 * (1052 + delay.FRAME_BYTES) / 1e6
    finally:
        os.close(end)
        carrier.join(10)
        os.close(ending)
        for side in (*ours, *theirs):
            side.close()
    assert counted[0].packets == 5
    assert 0 <= counted[0].total <= 5 * counted[0].worst


# -- programs and functions on them ---------------------------------------------------------------------------------

SHOW = """
import json, os, sys
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME OMP_NUM_THREADS"
print(json.dumps({name: os.environ[name] for name in names.split()}), flush=True)
sys.exit({0: 0, 1: 3}[int(os.environ["RANK"])])
"""

#: Each rank sends the next one random bytes, which tells a digest of what it got.
SEND = """
import hashlib, os, random, socket, threading, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
addresses = [os.environ["MASTER_ADDR"][:-1] + str(r + 1) for r in range(size)]
payload = random.Random(7).randbytes(2_000_000)
server = socket.create_server((addresses[rank], 5000))
while True:
    try:
        out = socket.create_connection((addresses[(rank + 1) % size], 5000))
        break
    except OSError:
        time.sleep(0.05)
into, _ = server.accept()
sender = threading.Thread(target=lambda: (out.sendall(payload), out.shutdown(socket.SHUT_WR)))
sender.start()
got = b"".join(iter(lambda: into.recv(1 << 16), b""))
sender.join()
assert hashlib.sha256(got).digest() == hashlib.sha256(payload).digest()
print("whole")
"""


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradwire.benchmarks.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_program_over_loopback() -> None:
    done = bench("links", "--rate", "none", "--", sys.executable, "-c", SHOW)
    assert done.returncode == 3, "the worst status"
    told = json.loads(done.stdout)
    assert (told["RANK"], told["WORLD_SIZE"], told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("0", "2", "0", "1")
    assert (told["MASTER_ADDR"], told["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
    assert "NOT SHAPED" in done.stderr
    assert "rank 1 ended with status 3" in done.stderr
    assert '"RANK": "1"' in done.stderr, "what it wrote"


def test_a_program_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["links", "--rate", "none", "--", "gradwire-has-no-such-program"]) == 2
    assert "gradwire-has-no-such-program cannot be run" in capsys.readouterr().err


def test_a_rank_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("gradwire.benchmarks.common.launch.GRACE", 0.2)
    script = "import os, sys, time; sys.exit(5) if os.environ['RANK'] == '1' else time.sleep(600)"
    assert links.Loopback(2).run_program([sys.executable, "-c", script]) == 5
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert links.Loopback(1).run_program([sys.executable, "-c", killed]) == 128 + 15


@needs_distance
def test_what_is_sent_arrives_whole_at_a_distance() -> None:
    words = ["links", "--rate", "200mbit", "--delay", "2ms", "--world", "3", "--no-proof", "--"]
    done = bench(*words, sys.executable, "-c", SEND)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "whole\n"
    assert "200 Mbit/s between 3 ranks, 2 ms one way" in done.stderr
    assert "dropped by full queues" in done.stderr


@needs_distance
def test_distant_links_are_as_long_as_they_should_be_and_leave_nothing_behind() -> None:
    before = set(os.listdir("/sys/class/net"))
    with links.DistantLinks(2, 10**8, replace(NEAR, delay=0.02)) as connection:
        assert sorted(links._namespaces(os.getpid())) == [connection._name(rank) for rank in range(2)]
        shown, ranks = connection.run_proven(verification.timed_all_reduce, {"numel": 1, "repeats": 1}, timeout=120)
    assert all(seconds >= 0.02 for (seconds,) in ranks)
    assert shown is not None
    assert shown["fastest_ping_s"] >= 0.04
    assert shown["fastest_s"] >= 0.95 * (0.02 + 0.02)
    assert shown["fastest_stream_s"] >= 0.95 * 0.1
    assert set(shown["tcp"]) == {"congestion_control", "wmem", "rmem", "slow_start_after_idle"}
    assert connection.carried["packets"] > 1000
    assert links._namespaces(os.getpid()) == []
    assert set(os.listdir("/sys/class/net")) == before


@needs_distance
def test_a_run_ends_with_the_process_that_carries_its_packets() -> None:
    with links.DistantLinks(2, 10**8, NEAR) as connection:
        assert connection._emulator is not None
        connection._emulator.kill()
        with pytest.raises(links.LinkError, match="has ended"):
            connection.run_program([sys.executable, "-c", "import time; time.sleep(600)"])
    assert links._namespaces(os.getpid()) == []


@needs_distance
def test_buffers_hold_what_is_on_its_way() -> None:
    """The product of bandwidth and delay, four times, where the kernel's own limit is lower."""
    with links.DistantLinks(2, 10**10, flags.Distance(0.2)) as connection:
        tcp: dict[str, Any] = connection._tcp()
        for name in ("wmem", "rmem"):
            assert int(tcp[name].split()[2]) >= 4 * 10**10 / 8 * 0.4
        assert tcp["slow_start_after_idle"] == links._setting("tcp_slow_start_after_idle")
        assert tcp["congestion_control"] == links._setting("tcp_congestion_control")
