"""Compressions of tensors before they are sent.

Two kinds. A *compressor*, as in Horovod, has `compress(tensor) -> (smaller tensor, context)` and `decompress(tensor,
context)`; the smaller tensors are what is summed, so it must be linear: `none`, `fp16`, `bf16`, or one of your own. A
*codec* of `gradwire.compress` need not be: its bytes are exchanged, and every rank decodes their mean. What it leaves
out is kept by name and added the next time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...compress import EDEN, QSGD, ChunkedTopK, OneBit, Ternary, TernGrad, TopK
from ...compress.codec import Codec
from ...compress.codecs.outliers import Outliers, codec_of_today
from ...compress.feedback.base import Feedback
from ...compress.feedback.residual import RESIDUAL_DTYPES, Residual
from ..auto.planner import check_exchange
from ..core.options import Options


class Compressor:
    """Interface of a linear compression."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, and context for `decompress`."""
        raise NotImplementedError("a Compressor needs a static method compress(tensor) -> (tensor, context)")

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Of the reduced tensor."""
        raise NotImplementedError("a Compressor needs a static method decompress(tensor, context) -> tensor")


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Rounds floating-point tensors to float16 and reduces them as such."""

    dtype = torch.float16

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(cls.dtype), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Rounds floating-point tensors to bfloat16, which keeps float32's range, and reduces them as such."""

    dtype = torch.bfloat16


@dataclass(frozen=True)
class CodecCompression:
    """A codec and its use.

    Args:
        codec: any of `gradwire.compress`.
        error_feedback: keep what compression leaves out, and add it to the next tensor of that name. "auto" does so for
            codecs that contract (the deterministic ones); True makes stochastic codecs round to nearest. A strategy,
            such as `gradwire.Residual(decay=…, dtype=…)`, `Momentum()` or `Tracking()`, also says how.
        exchange: "gather", "two_pass", "mask", "union", "split", "factors", "blocks", "dense" or "auto": the
            one that receives the fewest bytes, or is made for the codec.
        seed: of stochastic rounding, equal on all ranks.
        entropy_coding: `CompressState`'s.
    """

    codec: Codec
    error_feedback: bool | str | Feedback = "auto"
    exchange: str = "auto"
    seed: int = 0
    entropy_coding: bool = False

    def __repr__(self) -> str:
        """As in releases that had no entropy coding, where there is none: checkpoints have it."""
        names = ["codec", "error_feedback", "exchange", "seed", *(["entropy_coding"] if self.entropy_coding else [])]
        return f"CodecCompression({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not -(1 << 63) <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed!r}: expected a whole number of 64 bits, equal on all ranks")
        how: dict[str, Any] = {name: getattr(self, name) for name in ("error_feedback", "seed", "entropy_coding")}
        Options(self.codec, **how).check(None)
        if not isinstance(self.codec, Codec):
            raise TypeError(f"codec={self.codec!r}: expected a codec, such as gradwire.TopK(density=0.01)")
        check_exchange(self.exchange, self.codec, besides=("auto",))
        if self.feedback:
            self.strategy.codec_for(self.codec)

    @property
    def feedback(self) -> bool:
        """True if a step that does not send everything keeps the rest."""
        wanted = self.codec.default_feedback if self.error_feedback == "auto" else bool(self.error_feedback)
        return wanted and not self.codec.lossless

    @property
    def encodes_feedback(self) -> bool:
        """True if steps encode with feedback."""
        return self.feedback and self.exchange != "dense"

    @property
    def keeps(self) -> bool:
        """True if anything is kept between steps."""
        return self.encodes_feedback or not self.strategy.only_residual

    @property
    def strategy(self) -> Feedback:
        """The feedback strategy."""
        return self.error_feedback if isinstance(self.error_feedback, Feedback) else Residual()

    def goes_on_from(self, text: str) -> bool:
        """True if a checkpoint of a compression of this text fits: one that keeps the same, in whatever dtype."""
        same: list[bool | str | Feedback] = [self.error_feedback]
        if isinstance(self.strategy, Residual):
            same += [replace(self.strategy, dtype=dtype) for dtype in RESIDUAL_DTYPES]
            if self.strategy.decay == 1.0 and self.strategy.only_residual:
                same += ["auto", True]
        text = codec_of_today(text).replace(", entropy_coding=True)", ")")  # nothing that is kept depends on it
        others = (replace(self, error_feedback=each, entropy_coding=False) for each in same)
        return any(repr(other) == text and other.feedback == self.feedback for other in others)


class Compression:
    """Values of `compression=`: one of these, any codec of `gradwire.compress`, or your own `Compressor`.

    `Compression.topk(density=0.01)`, `.onebit()`, `.ternary()`, `.qsgd(bits=4)`, `.eden()`, `.terngrad()`
    and `.chunked_topk(k=64)` are codecs with their arguments;
    `Compression.codec(codec, error_feedback=…, exchange=…, seed=…, …)` also says how it is used.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    topk = TopK
    chunked_topk = ChunkedTopK
    onebit = OneBit
    qsgd = QSGD
    eden = EDEN
    terngrad = TernGrad
    ternary = Ternary
    outliers = staticmethod(Outliers)  # a former codec
    codec = CodecCompression


def codec_of(compression: Any) -> CodecCompression | None:
    """The codec and its use; None for compressors.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(compression, Codec):
        return CodecCompression(compression)
    if isinstance(compression, CodecCompression):
        return compression
    if isinstance(compression, type) and issubclass(compression, Codec | CodecCompression):
        raise ValueError(
            f"compression={compression.__name__} is a class: make a codec of it, as Compression.topk(density=0.01), "
            "Compression.onebit() or Compression.codec(TopK(density=0.01), exchange='auto') do"
        )
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ValueError(
            f"compression={compression!r}: expected Compression.none, .fp16, .bf16, a codec such as "
            "Compression.topk(density=0.01), or an object with compress and decompress"
        )
    return None
