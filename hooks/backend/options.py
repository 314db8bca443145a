"""Options of the backend "gradwire"."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch

from ...compress import EDEN, QSGD, BlockCodec, Cast, Codec, Identity, TernGrad

#: What `GRADWIRE_BACKEND` calls a codec.
CODECS: dict[str, Codec | None] = {
    "qsgd8": QSGD(bits=8),
    "qsgd4": QSGD(bits=4),
    "eden": EDEN(),
    "terngrad": TernGrad(),
    "bfloat16": Cast(torch.bfloat16),
    "float16": Cast(torch.float16),
    "identity": Identity(),
    "none": None,
}
VARIABLE = "GRADWIRE_BACKEND"


@dataclass(frozen=True)
class BackendOptions:
    """Options of the backend "gradwire": `pg_options` of `init_process_group` and `new_group`. Alike on all ranks.

    No residual is kept, so codecs are unbiased or nearly exact: `QSGD`, `EDEN`, `TernGrad`, `Cast`, `Identity`.

    Args:
        codec: of all-reduces and reduce-scatters; None: they stay as they are.
        all_gather: of all-gathers, whose results every rank then has rounded, its own part too. These may be weights,
            and tensors of a checkpoint: None, the default, leaves them as they are.
        min_numel: elements from which a collective is encoded.
        seed: of stochastic rounding.
        inner: options of the backend beneath.

    Raises:
        TypeError, ValueError: an argument is none of these.
    """

    codec: Codec | None = field(default_factory=lambda: QSGD(bits=8))
    all_gather: Codec | None = None
    min_numel: int = 65536
    seed: int = 0
    inner: Any = None
    #: Meshes take a group's timeout from its options: None is torch's default.
    _timeout: ClassVar[None] = None

    def __post_init__(self) -> None:
        for name, codec in (("codec", self.codec), ("all_gather", self.all_gather)):
            if codec is not None and not isinstance(codec, Codec):
                raise TypeError(f"{name}={codec!r}: expected a codec such as QSGD(bits=8), or None")
            exact = codec is None or codec.unbiased or codec.lossless or isinstance(codec, Cast)
            if not (exact and isinstance(codec, BlockCodec | None)):
                raise ValueError(
                    f"{name}={codec!r}: the backend keeps no residuals, so it takes QSGD, EDEN, TernGrad, Cast or "
                    "Identity, with stochastic rounding; other codecs go with a hook: compress_hook or compress_fsdp"
                )
        for name in ("min_numel", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name}={value!r}: expected an integer, 0 or more")

    @classmethod
    def from_environment(cls) -> BackendOptions:
        """The options in the variable `GRADWIRE_BACKEND`: the name of a codec, or `option=value`, with commas between
        them, such as "qsgd4,min_numel=100000,all_gather=bfloat16".

        Raises:
            ValueError: it holds something else.
        """
        options: dict[str, Any] = {}
        for word in filter(None, os.environ.get(VARIABLE, "").replace(" ", "").split(",")):
            name, _, value = word.rpartition("=")
            name = name or "codec"
            if name in ("codec", "all_gather") and value in CODECS:
                options[name] = CODECS[value]
            elif name in ("min_numel", "seed") and value.isdecimal():
                options[name] = int(value)
            else:
                raise ValueError(
                    f"{VARIABLE} has {word!r}: expected codec=, all_gather= ({', '.join(CODECS)}), min_numel= or seed="
                )
        return cls(**options)

    @property
    def text(self) -> str:
        """All that ranks must have alike."""
        return ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "inner")
