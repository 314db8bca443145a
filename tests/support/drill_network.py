"""Hosts in network namespaces, which can be cut into two halves."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from gradwire.benchmarks.links.links import PREFIX, missing

__all__ = ["INTERFACE", "Network", "missing"]

INTERFACE = "link0"
CLONE_NEWNET = 0x40000000


class Network:
    """So many hosts on two bridges, which a cable joins. A context manager: it makes and removes them.

    Args:
        hosts: their number. All are at the first bridge.
    """

    def __init__(self, hosts: int) -> None:
        self._hosts, self._owner = range(hosts), os.getpid()

    def _name(self, host: int | str) -> str:
        return f"{PREFIX}-{self._owner}-drill{host}"

    @staticmethod
    def address(host: int) -> str:
        return f"10.78.0.{host + 1}"

    def __enter__(self) -> Self:
        switch = self._name("switch")
        _ip([f"netns add {name}" for name in (switch, *map(self._name, self._hosts))])
        _ip([
            "link add bridge0 type bridge", "link set bridge0 up",
            "link add bridge1 type bridge", "link set bridge1 up",
            "link add end0 type veth peer name end1",
            "link set end0 master bridge0 up", "link set end1 master bridge1 up",
            *(f"link add port{host} type veth peer name {INTERFACE} netns {self._name(host)}" for host in self._hosts),
            *(f"link set port{host} master bridge0 up" for host in self._hosts),
        ], switch)  # fmt: skip
        for host in self._hosts:
            commands = [f"address add {self.address(host)}/24 dev {INTERFACE}", f"link set {INTERFACE} up"]
            _ip([*commands, "link set lo up"], self._name(host))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _ip([f"netns delete {self._name(host)}" for host in ("switch", *self._hosts)])

    def cut(self, beyond: Iterable[int]) -> None:
        """Cut these hosts off from the others."""
        there = set(beyond)
        moved = [f"link set port{host} master bridge{int(host in there)}" for host in self._hosts]
        _ip(["link set end0 down", *moved], self._name("switch"))

    def heal(self) -> None:
        """Join all hosts again."""
        _ip(
            ["link set end0 up", *(f"link set port{host} master bridge0" for host in self._hosts)], self._name("switch")
        )

    def enter(self, host: int) -> None:
        """Go to a host, with this thread."""
        with Path(f"/run/netns/{self._name(host)}").open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"host {host} cannot be entered")


def _ip(commands: list[str], namespace: str | None = None) -> None:
    where = [] if namespace is None else ["-n", namespace]
    done = subprocess.run(
        ["ip", *where, "-batch", "-"], check=False, input="\n".join(commands), text=True, capture_output=True
    )
    if done.returncode:
        raise RuntimeError(f"ip: {done.stderr}")
