"""Addresses at which other hosts may reach this one."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

#: A scope in /proc/net/if_inet6, of addresses that mean nothing on another host.
LINK_LOCAL = "20"


def addresses() -> list[str]:
    """Addresses at which other hosts may reach this one, likeliest first."""
    found: list[str] = []
    interface = os.environ.get("HOROVOD_GLOO_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        found.extend(_interface_addresses(interface.split(",")[0]))
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


def _interface_addresses(name: str) -> Iterator[str]:
    import fcntl

    siocgifaddr = 0x8915
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        packed = fcntl.ioctl(end.fileno(), siocgifaddr, struct.pack("256s", name[:15].encode()))
        yield socket.inet_ntoa(packed[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text("ascii").splitlines():
            digits, _, _, scope, _, interface = line.split()
            if interface == name and scope != LINK_LOCAL:
                yield str(ipaddress.IPv6Address(int(digits, 16)))
