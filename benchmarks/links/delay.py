"""The distance between ranks: a process that delays every packet, run as a script by `links.DistantLinks`.

Every rank's namespace has a TUN device, and this process has their other ends. A packet leaves a rank once its link has
sent those before it, at the link's rate; arrives `delay` later, when the receiver's link has room; and is dropped where
it would have waited longer than a switch's queue holds. Both ends of a link are apart, so ranks send and receive at
once.

The kernel hands over what TCP sends in pieces of up to 64 KB, as it does to a network card that cuts them itself
(`IFF_VNET_HDR`, TSO). TCP still counts in segments of the MTU, so its windows and slow start are those of real links,
while this process sees a fortieth of the packets. The rate counts every segment's headers.

Only the standard library: a start must not take the seconds that importing torch does.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import select
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

#: Seconds that a packet may wait for a link, as in the queue of `links.ShapedLinks`.
QUEUE_SECONDS = 0.2
#: Bytes of a frame besides the IP packet, as the kernel's shapers count it.
FRAME_BYTES = 14
#: virtio's header of a packet: flags, kind of segmentation, length of headers, of a segment, and two for checksums.
VIRTUAL = struct.Struct("<BBHHHH")
_TUN, _TUN_FLAGS = "/dev/net/tun", 0x0001 | 0x1000 | 0x4000  # layer 3, no packet information, virtio's header
_SET_INTERFACE, _SET_OFFLOAD, _CHECKSUM_AND_TSO = 0x400454CA, 0x400454D0, 0x01 | 0x02
#: Packets read from one device before the others get their turn.
_TURN = 16


def open_tun(name: str) -> int:
    """A new TUN device's file descriptor, not inherited. Raises OSError."""
    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH", name.encode(), _TUN_FLAGS))
        fcntl.ioctl(device, _SET_OFFLOAD, _CHECKSUM_AND_TSO)
    except OSError:
        os.close(device)
        raise
    return device


@dataclass
class Switch:
    """The fate of packets: when they arrive, and which are dropped. Has no clock and no device.

    Args:
        size: ranks; rank r's address ends in r + 1.
        rate: bytes a second of each rank's link, in each direction.
        delay: seconds, one way.
    """

    size: int
    rate: float
    delay: float
    dropped: int = 0

    def __post_init__(self) -> None:
        self._sending, self._receiving = [0.0] * self.size, [0.0] * self.size  # when each link is free

    def take(self, packet: bytes, sender: int, now: float) -> tuple[float, int] | None:
        """When a packet, with virtio's header, arrives, and at which rank; None: not at all."""
        begin = VIRTUAL.size
        if len(packet) < begin + 20 or packet[begin] >> 4 != 4:
            return None
        receiver = packet[begin + 19] - 1
        if not 0 <= receiver < self.size:
            return None
        size, segments = len(packet) - begin + FRAME_BYTES, 1
        if packet[1]:
            headers = headers_of(packet)
            segments = segments_of(packet, headers)
            size += (segments - 1) * (headers + FRAME_BYTES)
        takes = size / self.rate
        if self._sending[sender] - now > QUEUE_SECONDS:
            self.dropped += segments
            return None
        sent = self._sending[sender] = max(now, self._sending[sender]) + takes
        if self._receiving[receiver] - sent > QUEUE_SECONDS:
            self.dropped += segments
            return None
        self._receiving[receiver] = max(sent, self._receiving[receiver] + takes)
        return self._receiving[receiver] + self.delay, receiver


def headers_of(packet: bytes) -> int:
    """Bytes of the IP and TCP headers; virtio's header only hints at it."""
    begin = VIRTUAL.size
    internet = (packet[begin] & 15) * 4
    return internet + (packet[begin + internet + 12] >> 4) * 4


def segments_of(packet: bytes, headers: int) -> int:
    """The number of TCP segments."""
    payload, size = len(packet) - VIRTUAL.size - headers, packet[4] | packet[5] << 8
    return max(1, -(-payload // size))


@dataclass
class Lateness:
    """Delay that this process itself adds: how late packets were handed over."""

    packets: int = 0
    total: float = 0.0
    worst: float = 0.0

    def add(self, seconds: float) -> None:
        self.packets += 1
        self.total += seconds
        self.worst = max(self.worst, seconds)


def serve(switch: Switch, devices: list[int], end: int, clock: Callable[[], float] = time.monotonic) -> Lateness:
    """Carry packets until `end`, a file descriptor, can be read."""
    ranks, late = {device: rank for rank, device in enumerate(devices)}, Lateness()
    arriving: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        while arriving and arriving[0][0] <= (now := clock()):
            when, _, receiver, packet = heapq.heappop(arriving)
            late.add(now - when)
            try:
                os.write(devices[receiver], packet)
            except OSError:  # the receiver's device is full, or down
                switch.dropped += 1
        wait = max(0.0, arriving[0][0] - clock()) if arriving else None
        ready, _, _ = select.select([end, *devices], [], [], wait)
        if end in ready:
            return late
        for device in ready:
            for _ in range(_TURN):
                try:
                    packet = os.read(device, VIRTUAL.size + 65536)
                except BlockingIOError:
                    break
                if fate := switch.take(packet, ranks[device], clock()):
                    count += 1
                    heapq.heappush(arriving, (fate[0], count, fate[1], packet))


def _come_first() -> None:
    """Before everything else that computes here: a wire does not wait for a processor."""
    for attempt in (
        lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)),
        lambda: os.setpriority(os.PRIO_PROCESS, 0, -20),
    ):
        with contextlib.suppress(OSError):
            attempt()
            return


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    carried = Switch(len(told["devices"]), told["rate"] / 8, told["delay"])
    _come_first()
    print("ready", flush=True)
    counted = serve(carried, told["devices"], sys.stdin.fileno())
    mean = counted.total / max(1, counted.packets)
    counts = {"packets": counted.packets, "dropped": carried.dropped}
    print(json.dumps({**counts, "late_mean_s": mean, "late_worst_s": counted.worst}), flush=True)
