"""How much residuals lose that are kept in fewer bytes than float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from gradwire.compress.backends import LowPrecisionVector
from gradwire.compress.backends.cpu.block_codec import Blocks
from torch import Tensor

_write, _encode = LowPrecisionVector.write, Blocks.encode_low_precision


@contextmanager
def counted(unit: Callable[[], float] = lambda: 1.0) -> Iterator[list[float]]:
    """The norms of what is rounded off within the block, one for each time.

    Args:
        unit: of the numbers that are kept, when they are.
    """
    norms: list[float] = []

    def write(self: LowPrecisionVector, x: Tensor) -> None:
        _write(self, x)
        norms.append(float((x - self.read()).norm()) / unit())

    def encode(
        self: Any,
        codec: Any,
        grad: Tensor,
        residual: LowPrecisionVector,
        wire: Tensor,
        draw: Tensor | None,
        workspace: Any,
    ) -> None:
        wide = residual.read()
        self.encode_feedback(codec, grad, wide, wire.clone(), draw, workspace)
        _encode(self, codec, grad, residual, wire, draw, workspace)
        norms.append(float((wide - residual.read()).norm()) / unit())

    with patch.object(LowPrecisionVector, "write", write), patch.object(Blocks, "encode_low_precision", encode):
        yield norms
