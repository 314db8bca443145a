"""The host's own addresses, for tests of what listens."""

from __future__ import annotations

import contextlib
import socket

import pytest


def _listens(host: str, family: socket.AddressFamily) -> bool:
    with contextlib.suppress(OSError), socket.create_server((host, 0), family=family):
        return True
    return False


#: Parametrizes `host` by 127.0.0.1 and, where this host has IPv6, ::1.
every_loopback = pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        pytest.param("::1", marks=pytest.mark.skipif(not _listens("::1", socket.AF_INET6), reason="there is no IPv6")),
    ],
)
