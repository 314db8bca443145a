"""Addresses at which other hosts may reach this one."""

from __future__ import annotations

import contextlib
import os
import socket
import struct


def addresses() -> list[str]:
    """Addresses at which other hosts may reach this one, likeliest first."""
    found: list[str] = []
    interface = os.environ.get("HOROVOD_GLOO_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        with contextlib.suppress(OSError):
            found.append(_interface_address(interface.split(",")[0]))
    # Connecting a datagram socket sends nothing; it only chooses the interface that leads there.
    for host in (os.environ.get("MASTER_ADDR"), "192.0.2.1"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            if host:
                probe.connect((host, 9))
                found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _interface_address(name: str) -> str:
    import fcntl

    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        packed = fcntl.ioctl(end.fileno(), siocgifaddr, struct.pack("256s", name[:15].encode()))
    return socket.inet_ntoa(packed[20:24])
