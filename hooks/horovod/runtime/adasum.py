"""Adasum: a sum that adapts to how much the ranks' gradients agree (Maleki et al., "Scaling distributed training with
adaptive summation", MLSys 2021).

Two gradients a, b become (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b: their sum where they are orthogonal, their mean
where they are equal. More than two go in pairs, pairs of pairs, and so on, by recursive vector halving: partners swap
halves, each combines the one it keeps, and the halves come back in the opposite order. A rank sends 2N(P-1)/P elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .channel import Channel


def adasum(tensor: Tensor, channel: Channel) -> Tensor:
    """Adasum over the ranks of a channel: float32 or float64, flat, on the CPU; equal on all ranks, bit for bit.

    The ranks must be a power of two.
    """
    piece, distance, pieces = tensor.clone(), 1, []
    while distance < channel.size:
        peer = channel.rank ^ distance
        middle = (piece.numel() + 1) // 2
        lower = channel.rank < peer
        kept, given = (piece[:middle], piece[middle:]) if lower else (piece[middle:], piece[:middle])
        other = torch.empty_like(kept)
        channel.swap(given, other, peer)
        first, second = (kept, other) if lower else (other, kept)
        products = torch.stack([first.double() @ second.double(), _square(first), _square(second)])
        products = _sum_among(products, channel, 2 * distance)
        pieces.append((given.numel(), lower))
        piece = _combine(first, second, products)
        distance *= 2
    for length, lower in reversed(pieces):
        distance //= 2
        peer = channel.rank ^ distance
        other = piece.new_empty(length)
        channel.swap(piece, other, peer)
        piece = torch.cat([piece, other] if lower else [other, piece])
    return piece


def _square(x: Tensor) -> Tensor:
    return x.double() @ x.double()


def _combine(a: Tensor, b: Tensor, products: Tensor) -> Tensor:
    dot, squared_a, squared_b = products.tolist()
    weight_a = 1.0 - dot / (2 * squared_a) if squared_a > 0 else 1.0
    weight_b = 1.0 - dot / (2 * squared_b) if squared_b > 0 else 1.0
    return a * weight_a + b * weight_b


def _sum_among(values: Tensor, channel: Channel, size: int) -> Tensor:
    """The sum over the `size` ranks that hold parts of the same two vectors, equal on all of them."""
    distance = 1
    while distance < size:
        other = torch.empty_like(values)
        channel.swap(values, other, channel.rank ^ distance)
        values = values + other
        distance *= 2
    return values
