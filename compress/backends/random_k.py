"""RandomK on any device, in torch; the other backends write its bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels import Kernels, Workspace

LOW = 0xFFFFFFFF


def words_of(draw: Tensor) -> Tensor:
    """The words of a draw that ranks share, int32[4] on its device: seed, step, bucket."""
    return torch.stack([draw[0], (draw[1] & LOW) | (draw[2] << 32)]).view(torch.int32)


def pick(words: Tensor, numel: int, k: int) -> Tensor:
    """The elements that `words_of` stands for: int64 [k], ascending. The host does not wait."""
    place = torch.arange(k + 1, device=words.device) * numel // k
    start, length = place[:-1], place.diff()
    return start + (philox(words, -(-k // 4)).view(-1)[:k] * length >> 32)


def philox(words: Tensor, groups: int) -> Tensor:
    """Philox4x32-10 for positions 0 … groups - 1, int64 [groups, 4] of 32 bits each, in torch."""
    seed, seed_high, step, stream = (words.long() & LOW).unbind()
    zero = torch.zeros(groups, dtype=torch.int64, device=words.device)
    a, b, c, d = torch.arange(groups, device=words.device), zero + stream, zero + step, zero
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57  # modulo 2^64, of which the upper half is what it should be
        a, b, c, d = (second >> 32 & LOW) ^ b ^ seed, second & LOW, (first >> 32 & LOW) ^ d ^ seed_high, first & LOW
        seed, seed_high = seed + 0x9E3779B9 & LOW, seed_high + 0xBB67AE85 & LOW
    return torch.stack([a, b, c, d], dim=1)


class RandomKKernels(Kernels):
    """In torch, on any device."""

    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        chosen = self._begin(codec, len(x), wire, draw)
        least, largest = torch.aminmax(x)
        self._finish(wire, x[chosen], least.isfinite() & largest.isfinite())

    def encode_feedback(
        self, codec: Any, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        chosen, total = self._begin(codec, len(grad), wire, draw), grad.float() + residual
        sound, sent = total.isfinite().all(), total[chosen]
        self._finish(wire, sent, sound)
        total[chosen] = sent - (sent + 0.0)  # zero, and of -0 the sign, as in the composition
        residual.copy_(torch.where(sound, total, residual))

    @staticmethod
    def _begin(codec: Any, numel: int, wire: Tensor, draw: Tensor | None) -> Tensor:
        assert draw is not None
        words = words_of(draw)
        wire[:16].view(torch.int32).copy_(words)
        return pick(words, numel, codec.k(numel))

    @staticmethod
    def _finish(wire: Tensor, values: Tensor, sound: Tensor) -> None:
        wire[16:].view(torch.float32).copy_(torch.where(sound, values.float(), torch.nan))

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        words, values = wire[:16].view(torch.int32), wire[16:].view(torch.float32)
        bad = ~values.isfinite().all()
        workspace.status[1] += bad
        out[pick(words, len(out), len(values))] += alpha * values
        if out.is_cuda:  # the host does not wait to know
            out += torch.where(bad, torch.nan, -0.0)
        elif bad:
            out.fill_(torch.nan)


#: For backends without anything better.
RANDOM_K = RandomKKernels()
