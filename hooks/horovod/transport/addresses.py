"""Addresses at which other hosts may reach this one."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator


def addresses() -> list[str]:
    """Addresses at which other hosts may reach this one, likeliest first."""
    found: list[str] = []
    interface = os.environ.get("HOROVOD_GLOO_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        with contextlib.suppress(OSError):
            found.append(_interface_address(interface.split(",")[0]))
    for host in (os.environ.get("MASTER_ADDR"), "192.0.2.1", "2001:db8::1"):
        if host:
            found.extend(_addresses_toward(host))
    with contextlib.suppress(OSError):
        found.extend(str(place[0]) for *_, place in socket.getaddrinfo(socket.gethostname(), None))
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _addresses_toward(host: str) -> Iterator[str]:
    """This host's addresses on the interfaces that lead to another one. Connecting a datagram socket sends nothing."""
    with contextlib.suppress(OSError):
        for family, kind, *_, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)
                yield str(probe.getsockname()[0])


def _interface_address(name: str) -> str:
    import fcntl

    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        packed = fcntl.ioctl(end.fileno(), siocgifaddr, struct.pack("256s", name[:15].encode()))
    return socket.inet_ntoa(packed[20:24])
