"""Connections: nobody is trusted before both ends have proved to know the secret, and the secret never travels."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gradwire.hooks.comm import socket_loop
from gradwire.hooks.comm.socket_loop import SocketLoop
from gradwire.hooks.comm.sockets import Connection, connect, listen
from hypothesis import given, settings
from hypothesis import strategies as st


def framed(text: bytes) -> bytes:
    return struct.pack("!I", len(text)) + text


def greeting(called: str, calling: str) -> tuple[list[bool], bytes]:
    """Two ends greet over a wire that keeps every byte; whether each trusts the other, and the bytes."""
    (a, to_a), (b, to_b) = socket.socketpair(), socket.socketpair()
    ends, seen = [Connection(a, called), Connection(b, calling, dialled=True)], bytearray()

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                seen.extend(data)
                target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def greet(end: Connection) -> None:
        end.end.settimeout(5)
        try:
            end.greet()
        except (OSError, ValueError):
            end.close()

    with to_a, to_b:
        jobs: list[tuple[Any, ...]] = [(pass_on, to_a, to_b), (pass_on, to_b, to_a), (greet, ends[0]), (greet, ends[1])]
        threads = [threading.Thread(target=job, args=arguments) for job, *arguments in jobs]
        for thread in threads:
            thread.start()
        for thread in threads[2:]:
            thread.join()
        for end in ends:
            end.close()
        for thread in threads[:2]:
            thread.join()
    return [end.trusted for end in ends], bytes(seen)


@given(st.text(max_size=20), st.text(max_size=20))
@settings(max_examples=50)
def test_both_ends_trust_each_other_only_if_they_know_the_same_secret(one: str, other: str) -> None:
    assert greeting(one, one)[0] == [True, True]
    trust, seen = greeting(one, other)
    assert trust == [one == other] * 2
    assert len(one) < 6 or (one.encode() not in seen and json.dumps(one).encode() not in seen)


def test_an_end_that_repeats_what_it_hears_is_not_trusted() -> None:
    here, there = socket.socketpair()
    with here:
        here.settimeout(5)
        caller = Connection(there, "key", dialled=True)
        there.settimeout(5)
        here.sendall(framed(b'{"nonce": ""}'))
        with ThreadPoolExecutor(1) as pool:
            mirror = pool.submit(lambda: here.sendall(here.recv(4096)))
            with pytest.raises(ValueError, match="a stranger"):
                caller.greet()
            mirror.result()
        assert not caller.trusted
        caller.close()


RUBBISH = (
    b"GET / HTTP/1.0\r\n\r\n" * 100,
    b"\xff" * 600,
    framed(b"[" * 500),
    framed(b"[1]"),
    framed(b"{"),
    framed(b'{"nonce": [], "proof": {"a": 1}}'),
    framed(b'{"refused": 1}'),
)


@pytest.mark.parametrize("message", RUBBISH)
def test_a_loop_hands_over_nothing_of_strangers(message: bytes) -> None:
    listener = listen(8)
    loop = SocketLoop(listener, "key")
    with socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5) as end:
        end.sendall(message)
        seen = list[Any]()
        while not seen or loop.connections:
            for connection in loop.poll(5):
                assert connection is not None
                try:
                    seen += [*connection.messages()] or ["nothing"]
                except (OSError, ValueError) as error:
                    seen.append(str(error))
                    loop.drop(connection)
        assert seen == [seen[0]]
    loop.close()


def test_whoever_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = listen(8)
    loop = SocketLoop(listener, "key")
    silent = socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5)
    assert list(loop.poll(5)) == []
    assert len(loop.connections) == 1
    monkeypatch.setattr(socket_loop, "GREETING_SECONDS", 0.0)
    list(loop.poll(0))
    assert not loop.connections
    silent.close()
    loop.close()


def test_a_long_message_of_a_friend_is_refused_too() -> None:
    listener = listen(8)
    loop = SocketLoop(listener, "key", limit=1000)
    error, made = "", threading.Event()

    def call() -> None:
        friend = connect("127.0.0.1", listener.getsockname()[1], "key", 5)
        friend.send({"long": "x" * 2000})
        made.wait(5)
        friend.close()

    caller = threading.Thread(target=call)
    caller.start()
    while not error:
        for connection in loop.poll(5):
            try:
                assert connection is not None
                list(connection.messages())
            except ValueError as problem:
                error = str(problem)
    assert error == "a message of 2012 bytes"
    made.set()
    caller.join()
    loop.close()
