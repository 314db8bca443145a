"""Random words that all ranks share, in torch on any device: Philox4x32-10 (Salmon et al., SC 2011)."""

from __future__ import annotations

import torch
from torch import Tensor

LOW = 0xFFFFFFFF


def words_of(draw: Tensor) -> Tensor:
    """The words of a draw that ranks share, int32[4] on its device: seed, step, bucket."""
    return torch.stack([draw[0], (draw[1] & LOW) | (draw[2] << 32)]).view(torch.int32)


def philox(words: Tensor, groups: int) -> Tensor:
    """Philox4x32-10 of the counters (i, stream, step, 0), i = 0 … groups - 1, under the key `seed`.

    Args:
        words: int32 [4], from `words_of`: seed (low, high), step, stream.

    Returns:
        int64 [groups, 4], 32 bits in each.
    """
    seed, seed_high, step, stream = (words.long() & LOW).unbind()
    zero = torch.zeros(groups, dtype=torch.int64, device=words.device)
    a, b, c, d = torch.arange(groups, device=words.device), zero + stream, zero + step, zero
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57  # modulo 2^64, of which the upper half is what it should be
        a, b, c, d = (second >> 32 & LOW) ^ b ^ seed, second & LOW, (first >> 32 & LOW) ^ d ^ seed_high, first & LOW
        seed, seed_high = seed + 0x9E3779B9 & LOW, seed_high + 0xBB67AE85 & LOW
    return torch.stack([a, b, c, d], dim=1)
