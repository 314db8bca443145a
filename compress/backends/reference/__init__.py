"""The specification, in NumPy: what every byte means, written to be read. One codec a file.

Each class gives `encode` and `decode_add` of one codec; the fused forms are the compositions in `Kernels`. Nothing
here is fast. Whoever writes another backend compares its bytes with these.
"""

from __future__ import annotations

from .. import Backend, GenericSparseKernels, Kernels
from .cast import Cast, Identity
from .chunked_topk import ChunkedTopK
from .eden import EDEN
from .entries import Entries
from .low_precision import LowPrecision
from .onebit import OneBit
from .power_sgd import PowerSGD
from .qsgd import QSGD
from .ternary import Ternary
from .terngrad import TernGrad
from .topk import TopK

KERNELS: dict[str, Kernels] = {
    "onebit": OneBit(),
    "qsgd": QSGD(),
    "terngrad": TernGrad(),
    "ternary": Ternary(),
    "eden": EDEN(),
    "topk": (TOPK := TopK()),
    "power_sgd": PowerSGD(),
    "chunked_topk": ChunkedTopK(),
    "cast": Cast(),
    "identity": Identity(),
}
KERNELS["threshold"] = GenericSparseKernels(Entries(), TOPK)
BACKEND = Backend(KERNELS, Entries(), low_precision=LowPrecision())
