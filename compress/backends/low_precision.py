"""Vectors of float32 numbers in 2 bytes an element, or in 1: how residuals are kept where memory is short.

- **bfloat16**: the nearest one, ties to even. Off by at most 2^-8 of the number.
- **int8**: numbers from -127 to 127, and a step s for each 256 elements: 1 + 4/256 bytes an element. With m the largest
  magnitude of the 256 and c the float32 nearest to 1/127,

      s = max(m·c rounded up to 16 significant bits, 2^-126)      code = x·(1/s), rounded to nearest, ties to even

  and a code stands for code·s, exactly. Off by at most half a step. What no code has changed is coded alike again, so
  that to read and to write a vector changes nothing.

Magnitudes beyond bfloat16's largest number, 3.39e38, become that; what is not finite counts as zero, so that no number
that is read ever fails to be finite. NumPy's code in `reference` is the specification; all backends give its bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .memory import ScratchPool

#: Elements that share a step.
BLOCK = 256
#: The largest number that is kept: bfloat16's largest.
MOST_BITS = 0x7F7F0000
MOST = float(torch.tensor(MOST_BITS, dtype=torch.int32, device="cpu").view(torch.float32))
#: What one of the 127 codes on a side is of the largest: the float32 nearest to 1/127.
SHARE = float(torch.tensor(1.0 / 127.0, dtype=torch.float32, device="cpu"))
#: Of a step's 32 bits the lowest, which are zero.
STEP_BITS = 0xFF
LEAST_STEP = 2.0**-126
DTYPES = (torch.bfloat16, torch.int8)


class LowPrecisionKernels:
    """The two passes of each format over flat tensors, in torch, for devices without anything better. The host does
    not wait."""

    def to_bfloat16(self, x: Tensor, out: Tensor) -> None:
        """float32 as bfloat16."""
        out.copy_(_sound(x))

    def to_int8(self, x: Tensor, codes: Tensor, steps: Tensor) -> None:
        """float32 as int8 codes, of the same length, and float32 steps."""
        rows = torch.nn.functional.pad(_sound(x), (0, -len(x) % BLOCK)).view(-1, BLOCK)
        share = rows.abs().amax(1) * SHARE
        up = ((share.view(torch.int32) + STEP_BITS) & ~STEP_BITS).view(torch.float32)
        torch.clamp(up, min=LEAST_STEP, out=steps)
        codes.copy_((rows * (torch.ones_like(steps) / steps)[:, None]).round_().view(-1)[: len(x)])

    def from_bfloat16(self, x: Tensor, out: Tensor) -> None:
        """bfloat16 as float32."""
        out.copy_(x)

    def from_int8(self, codes: Tensor, steps: Tensor, out: Tensor) -> None:
        """Codes and steps as float32."""
        whole = len(codes) // BLOCK
        torch.mul(codes[: whole * BLOCK].view(-1, BLOCK), steps[:whole, None], out=out[: whole * BLOCK].view(-1, BLOCK))
        if whole < len(steps):
            torch.mul(codes[whole * BLOCK :], steps[whole], out=out[whole * BLOCK :])


def _sound(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0).clamp_(-MOST, MOST)


class LowPrecisionVector:
    """A flat vector that is float32 to whoever works on it, and kept as `dtype`: zero at first.

    Attributes:
        dtype: torch.bfloat16 or torch.int8.
        parts: what it is kept in: bfloat16 numbers; or int8 codes, and a float32 step for each 256 of them.
    """

    def __init__(
        self,
        kernels: LowPrecisionKernels,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        scratch: ScratchPool | None = None,
    ) -> None:
        self.kernels, self.dtype, self.device = kernels, dtype, device
        self.scratch = ScratchPool() if scratch is None else scratch
        numbers = torch.zeros(numel, dtype=dtype, device=device)
        self.parts: tuple[Tensor, ...] = (numbers,)
        if dtype == torch.int8:
            self.parts = numbers, torch.full((-(-numel // BLOCK),), LEAST_STEP, dtype=torch.float32, device=device)

    def numel(self) -> int:
        return self.parts[0].numel()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def new_zeros(self, numel: int) -> LowPrecisionVector:
        """Another one, kept likewise."""
        return LowPrecisionVector(self.kernels, numel, self.dtype, self.device, self.scratch)

    def copy_(self, other: LowPrecisionVector) -> None:
        for mine, its in zip(self.parts, other.parts, strict=True):
            mine.copy_(its)

    def zero_(self) -> None:
        self.copy_(self.new_zeros(self.numel()))

    def any(self) -> Tensor:
        """Whether any element is not zero, a bool."""
        return self.parts[0].any()

    def read(self, out: Tensor | None = None) -> Tensor:
        """out[i] = x_i, as float32 [n]; in new memory without `out`."""
        if out is None:
            out = torch.empty(self.numel(), dtype=torch.float32, device=self.device)
        if self.dtype == torch.int8:
            self.kernels.from_int8(self.parts[0], self.parts[1], out)
        else:
            self.kernels.from_bfloat16(self.parts[0], out)
        return out

    def write(self, x: Tensor) -> None:
        """Replace the vector by x, float32 [n], rounded as the module says."""
        if self.dtype == torch.int8:
            self.kernels.to_int8(x, self.parts[0], self.parts[1])
        else:
            self.kernels.to_bfloat16(x, self.parts[0])

    @contextmanager
    def open(self) -> Iterator[Tensor]:
        """The vector as float32 [n], to be changed in place: rounded and kept at the end of the block, unless an
        exception ended it."""
        with self.scratch.open(self.numel(), self.device) as wide:
            yield self.read(wide)
            self.write(wide)
