"""Horovod's response cache: a request that a rank repeats travels as the number of a slot.

The sender chooses the slot, so that both ends have the same request in it.
"""

from __future__ import annotations

from collections import OrderedDict

from .negotiation import Request


class RequestCache:
    """Slots of requests, of this rank and of others.

    Args:
        capacity: number of slots; 0: every request travels whole.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._known: dict[tuple[int, int], Request] = {}

    def outgoing(self, text: str) -> tuple[int, str | None]:
        """The slot of a request, and its text unless the others have it; slot -1 is not kept."""
        if text in self._slots:
            self._slots.move_to_end(text)
            return self._slots[text], None
        if self._capacity <= 0:
            return -1, text
        slot = len(self._slots)
        if slot >= self._capacity:
            _, slot = self._slots.popitem(last=False)
        self._slots[text] = slot
        return slot, text

    def incoming(self, rank: int, slot: int, request: Request | None) -> Request:
        """The request that a rank means by a slot."""
        if request is None:
            return self._known[rank, slot]
        if slot >= 0:
            self._known[rank, slot] = request
        return request
