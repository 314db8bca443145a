"""The distance between ranks: a process that delays every packet, run as a script by `links.DistantLinks`.

Every rank's namespace has a TUN device, and this process has their other ends. A packet leaves a rank once its link has
sent those before it, at the link's rate; arrives `delay` later, when the receiver's link has room; and is dropped where
it would have waited longer than a switch's queue holds. Both ends of a link are apart, so ranks send and receive at
once.

The kernel hands over what TCP sends in pieces of up to 64 KB, as it does to a network card that cuts them itself
(`IFF_VNET_HDR`, TSO). TCP still counts in segments of the MTU, so its windows and slow start are those of real links,
while this process sees a fortieth of the packets. Rate and loss are by segment: a lost one is cut out of its piece.

Only the standard library: a start must not take the seconds that importing torch does.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

#: Seconds that a packet may wait for a link, as in the queue of `links.ShapedLinks`.
QUEUE_SECONDS = 0.2
#: Bytes of a frame besides the IP packet, as the kernel's shapers count it.
FRAME_BYTES = 14
#: virtio's header of a packet: flags, kind of segmentation, length of headers, of a segment, and two for checksums.
VIRTUAL = struct.Struct("<BBHHHH")
_TUN, _TUN_FLAGS = "/dev/net/tun", 0x0001 | 0x1000 | 0x4000  # layer 3, no packet information, virtio's header
_SET_INTERFACE, _SET_OFFLOAD, _CHECKSUM_AND_TSO = 0x400454CA, 0x400454D0, 0x01 | 0x02
_FIN_AND_PUSH = 0x01 | 0x08
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
    """The fate of packets: when they arrive, and which are lost. Has no clock and no device.

    Args:
        size: ranks; rank r's address ends in r + 1.
        rate: bytes a second of each rank's link, in each direction.
        delay: seconds, one way.
        loss: the probability that a segment is lost.
    """

    size: int
    rate: float
    delay: float
    loss: float = 0.0
    random: random.Random = field(default_factory=lambda: random.Random(0))
    dropped: int = 0
    lost: int = 0

    def __post_init__(self) -> None:
        self._sending, self._receiving = [0.0] * self.size, [0.0] * self.size  # when each link is free

    def take(self, packet: bytes, sender: int, now: float) -> list[tuple[float, int, bytes]]:
        """The fate of a packet, with virtio's header: (when, to which rank, what) of all that arrives of it."""
        begin = VIRTUAL.size
        if len(packet) < begin + 20 or packet[begin] >> 4 != 4:
            return []
        receiver = packet[begin + 19] - 1
        if not 0 <= receiver < self.size:
            return []
        size, segments = len(packet) - begin + FRAME_BYTES, 1
        if packet[1]:
            headers = headers_of(packet)
            segments = segments_of(packet, headers)
            size += (segments - 1) * (headers + FRAME_BYTES)
        takes = size / self.rate
        if self._sending[sender] - now > QUEUE_SECONDS:
            self.dropped += segments
            return []
        sent = self._sending[sender] = max(now, self._sending[sender]) + takes
        if self._receiving[receiver] - sent > QUEUE_SECONDS:
            self.dropped += segments
            return []
        self._receiving[receiver] = max(sent, self._receiving[receiver] + takes)
        when = self._receiving[receiver] + self.delay
        if not self.loss:
            return [(when, receiver, packet)]
        gone = [segment for segment in range(segments) if self.random.random() < self.loss]
        self.lost += len(gone)
        pieces = [packet] if not gone else without(packet, gone, segments)
        return [(when, receiver, piece) for piece in pieces]


def headers_of(packet: bytes) -> int:
    """Bytes of the IP and TCP headers; virtio's header only hints at it."""
    begin = VIRTUAL.size
    internet = (packet[begin] & 15) * 4
    return internet + (packet[begin + internet + 12] >> 4) * 4


def segments_of(packet: bytes, headers: int) -> int:
    """The number of TCP segments."""
    payload, size = len(packet) - VIRTUAL.size - headers, packet[4] | packet[5] << 8
    return max(1, -(-payload // size))


def without(packet: bytes, gone: list[int], segments: int) -> list[bytes]:
    """The rest of a packet when some of its segments are lost, as packets."""
    runs, begin = [], 0
    for end in [*gone, segments]:
        if end > begin:
            runs.append((begin, end))
        begin = end + 1
    return [packet] if runs == [(0, segments)] else [_cut(packet, first, last, segments) for first, last in runs]


def _cut(packet: bytes, first: int, last: int, segments: int) -> bytes:
    """The segments first to last - 1, with headers of their own."""
    flags, kind, _, size, checksum_start, checksum_offset = VIRTUAL.unpack_from(packet)
    headers, begin = headers_of(packet), VIRTUAL.size
    internet = (packet[begin] & 15) * 4
    head = bytearray(packet[begin : begin + headers])
    payload = packet[begin + headers + first * size : begin + headers + last * size]
    struct.pack_into("!H", head, 2, headers + len(payload))
    struct.pack_into("!H", head, 4, (struct.unpack_from("!H", head, 4)[0] + first) & 0xFFFF)
    struct.pack_into("!H", head, 10, 0)
    struct.pack_into("!H", head, 10, ~_sum(bytes(head[:internet])) & 0xFFFF)
    sequence = struct.unpack_from("!I", head, internet + 4)[0] + first * size
    struct.pack_into("!I", head, internet + 4, sequence & 0xFFFFFFFF)
    if last < segments:
        head[internet + 13] &= ~_FIN_AND_PUSH
    # What the kernel leaves of the checksum to the card: the sum over addresses, protocol and length.
    pseudo = bytes(head[12:20]) + struct.pack("!HH", head[9], headers - internet + len(payload))
    struct.pack_into("!H", head, internet + 16, _sum(pseudo))
    one = len(payload) <= size
    virtual = VIRTUAL.pack(flags, 0 if one else kind, headers, 0 if one else size, checksum_start, checksum_offset)
    return virtual + bytes(head) + payload


def _sum(data: bytes) -> int:
    """The Internet's sum of 16-bit words, before it is inverted."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


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
                for when, receiver, piece in switch.take(packet, ranks[device], clock()):
                    count += 1
                    heapq.heappush(arriving, (when, count, receiver, piece))


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
    carried = Switch(len(told["devices"]), told["rate"] / 8, told["delay"], told["loss"])
    _come_first()
    print("ready", flush=True)
    counted = serve(carried, told["devices"], sys.stdin.fileno())
    mean = counted.total / max(1, counted.packets)
    counts = {"packets": counted.packets, "dropped": carried.dropped, "lost": carried.lost}
    print(json.dumps({**counts, "late_mean_s": mean, "late_worst_s": counted.worst}), flush=True)
