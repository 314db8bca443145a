"""A few bytes of every rank to every rank, in ⌈log2 P⌉ messages a rank instead of P - 1.

The all-gather of Bruck et al. ("Efficient algorithms for all-to-all communications in multiport message-passing
systems", 1997): before round k a rank has the rows of the 2^k ranks from itself onwards; it sends them to the rank 2^k
before it, and gets the next ones from the rank 2^k after it. Each round waits for the one before, so it takes ⌈log2 P⌉
latencies where sending to everybody takes one: it pays where a rank is busy with sending rather than waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def rounds(size: int) -> Iterator[tuple[int, int]]:
    """Of each round: how far away its peers are, which is how many rows a rank has, and how many rows move."""
    distance = 1
    while distance < size:
        yield distance, min(distance, size - distance)
        distance *= 2


class Dissemination:
    """One all-gather under way. Several are waited for in the order in which they were started: a rank passes on what
    it has only while it waits, and messages between two ranks are told apart by their order.

    Args:
        output: where the rows go, in rank order: [P, anything], any dtype, without gaps.
        row: this rank's.
        rank: which that is.
        send, receive: start to move some rows to or from a rank; what they return has `wait()`.
    """

    def __init__(
        self,
        output: Tensor,
        row: Tensor,
        rank: int,
        send: Callable[[Tensor, int], Any],
        receive: Callable[[Tensor, int], Any],
    ) -> None:
        self._output, self._rank, self._send = output, rank, send
        self._size = size = len(output)
        self._rows = torch.empty_like(output)  # of this rank, the next, and so on
        self._rows[0].copy_(row)
        # Gloo begins to send once the receiver has announced itself: all receives at once save a latency a round.
        self._coming = [receive(self._rows[d : d + n], (rank + d) % size) for d, n in rounds(size)]
        self._steps = list(rounds(size))
        self._done = False
        self._going = [self._pass_on(0)] if size > 1 else []

    def _pass_on(self, step: int) -> Any:
        distance, count = self._steps[step]
        return self._send(self._rows[:count], (self._rank - distance) % self._size)

    def wait(self) -> None:
        """Return when every row is there; at once, from the second time on."""
        if self._done:
            return
        for step in range(max(0, len(self._going) - 1), len(self._coming)):  # from where it was left
            self._coming[step].wait()
            if step + 1 < len(self._steps):
                self._going.append(self._pass_on(step + 1))
        for going in self._going:
            going.wait()
        self._output[self._rank :].copy_(self._rows[: self._size - self._rank])
        self._output[: self._rank].copy_(self._rows[self._size - self._rank :])
        self._done = True
