"""`Outliers`, a codec of 0.2 that is gone: its name works until the next release, and warns."""

from __future__ import annotations

import re
import warnings

import torch

from ..codec import Codec
from .topk import TopK

#: The codec in its place: a small model has ended as close to float32 under SGD with it, by 2.5 times fewer bytes.
INSTEAD = TopK(density=0.04, values=torch.int8)


def Outliers(inner: Codec, density: float = 0.01, values: torch.dtype = torch.float32) -> TopK:
    """Former codec: the largest elements exactly, and the others in another code. Returns
    `TopK(density=0.04, values=torch.int8)`, 0.6 bits an element, whatever the arguments: with `OneBit()` it had 1.5."""
    asked = f"Outliers({inner}, density={density}, values={values})"
    now = "TopK(density=0.04, values=torch.int8) now, which keeps a residual by default"
    text = f"{asked} is {now}: name that, or EDEN(), which keeps none, as Outliers will go in the next release"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return INSTEAD


def codec_of_today(text: str) -> str:
    """A checkpoint's text of its codecs or its compression, with today's codec in the place of `Outliers`: both keep
    residuals of gradients."""
    today = re.sub(r"Outliers\(inner=.+?, density=[^,()]+, values=torch\.\w+\)", lambda _: str(INSTEAD), text)
    return "; ".join(dict.fromkeys(today.split("; ")))  # of groups that had other codecs, and have the same one now
