"""An all-gather of a few bytes in ⌈log2 P⌉ messages a rank instead of P - 1.

The all-gather of Bruck et al. ("Efficient algorithms for all-to-all communications in multiport message-passing
systems", 1997): before round k a rank has the rows of the 2^k ranks from itself onwards; it sends them to the rank 2^k
before it, and gets the next ones from the rank 2^k after it. Each round waits for the one before, so it takes ⌈log2 P⌉
latencies instead of one: it pays if sending P - 1 messages keeps a rank busy for longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def rounds(size: int) -> Iterator[tuple[int, int]]:
    """The distance to the peers of each round, which is also the rows that a rank has, and the rows that move."""
    distance = 1
    while distance < size:
        yield distance, min(distance, size - distance)
        distance *= 2


class Dissemination:
    """One all-gather in flight. Wait for several in the order in which they were started: a rank forwards rows only
    while it waits, and only the order distinguishes messages between two ranks.

    Args:
        output: for the rows in rank order: [P, anything], any dtype, contiguous.
        row: this rank's.
        send, receive: start to move rows to or from a rank, and return an object with `wait()`.
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
        self._rows = torch.empty_like(output)  # of this rank, the next one, and so on
        self._rows[0].copy_(row)
        # Gloo sends once the receiver has posted its receive: posting all of them now saves a latency a round.
        self._coming = [receive(self._rows[d : d + n], (rank + d) % size) for d, n in rounds(size)]
        self._steps = list(rounds(size))
        self._done = False
        self._going = [self._pass_on(0)] if size > 1 else []

    def _pass_on(self, step: int) -> Any:
        distance, count = self._steps[step]
        return self._send(self._rows[:count], (self._rank - distance) % self._size)

    def wait(self) -> None:
        """Wait until every row has arrived. Later calls return at once."""
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
