"""How numbers are stored, and read as float32: the `kind` of the numba kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .simd import as_f32, as_i32, get_u32, inlined, load_f32, load_u16, select, to_i32, to_u16

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
Source = tuple[int, int]  # kind, address

#: Elements that the sparse and the cast kernels take at once, in place of a block.
TILE = 1024

F32 = np.float32

ZERO, ONE = F32(0), F32(1)

TINY = F32(2.0**-149)

NAN_BITS = np.int32(0x7FC00000)

NAN = NAN_BITS.view(F32)

INF_BITS = 0x7F800000

MAGNITUDE = 0x7FFFFFFF

LOW = 0xFFFFFFFF

#: A thousand numbers whose keys are below this, 2^117, add up to a finite sum.
SUMMABLE = (117 + 127) << 23


@inlined
def width(kind: int) -> int:
    """Bytes an element; 0 where there are none, but a record: see `fused_inputs`."""
    return 4 if kind == FLOAT32 else 2 if kind <= BFLOAT16 else 0


@inlined
def from_half(word: Any) -> Any:
    """float16 as float32, exactly, without arithmetic on subnormals, which some machines do slowly."""
    w = to_i32(word)
    magnitude = (w & 0x7FFF) << 13
    exponent = magnitude & 0x0F800000
    subnormal = as_f32(magnitude + (113 << 23)) - F32(2.0**-14)
    value = select(exponent == 0, subnormal, as_f32(magnitude + (112 << 23)))
    value = select(exponent == 0x0F800000, as_f32(magnitude | INF_BITS), value)
    return as_f32(as_i32(value) | (w & 0x8000) << 16)


@inlined
def to_half(value: Any) -> Any:
    """float32 as float16, to nearest even, NaN as 0x7E00."""
    word = as_i32(value)
    magnitude = word & MAGNITUDE
    normal = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    subnormal = as_i32(as_f32(magnitude) + F32(0.5)) - 0x3F000000  # one half has its last place at 2^-24
    half = select(magnitude < (113 << 23), subnormal, normal)
    half = select(magnitude >= (143 << 23), 0x7C00, half) | ((word >> 16) & 0x8000)
    return to_u16(select(magnitude > INF_BITS, 0x7E00, half))


@inlined
def from_bfloat(word: Any) -> Any:
    return as_f32(to_i32(word) << 16)


@inlined
def to_bfloat(value: Any) -> Any:
    """float32 as bfloat16, to nearest even, NaN as 0x7FC0."""
    word = as_i32(value)
    rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    return to_u16(select((word & MAGNITUDE) > INF_BITS, 0x7FC0, rounded))


@inlined
def finite(value: Any) -> Any:
    return (as_i32(value) & MAGNITUDE) < INF_BITS


@inlined
def load_as(stored: int, address: int) -> Any:
    """64 elements as float32."""
    if stored == FLOAT32:
        return load_f32(address)
    if stored == FLOAT16:
        return from_half(load_u16(address))
    return from_bfloat(load_u16(address))


@inlined
def int_at(address: int) -> Any:
    """An unsigned 32-bit number, for arithmetic."""
    return np.int64(get_u32(address))


@inlined
def key_at(address: int) -> Any:
    return int_at(address) & MAGNITUDE


KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
