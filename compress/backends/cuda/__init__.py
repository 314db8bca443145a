"""Codecs on a GPU: what launches the kernels of csrc/.

One launch serves a call, or a few where the codec is sparse, on torch's current stream. Nothing here allocates, waits
for the device, or reads from it: the draw's state, a threshold, the status word all stay in device memory, so a call
can be captured in a CUDA graph.
"""

from __future__ import annotations

from .. import Backend, Kernels
from .entries import Entries
from .kernels.cast import Cast
from .kernels.chunked_topk import ChunkedTopK
from .kernels.eden import EDEN
from .kernels.onebit import OneBit
from .kernels.power_sgd import PowerSGD
from .kernels.qsgd import QSGD
from .kernels.ternary import Ternary
from .kernels.terngrad import TernGrad
from .kernels.threshold import Threshold
from .kernels.topk import TopK
from .low_precision import LowPrecision
from .passes import Momentum, Tracking

KERNELS: dict[str, Kernels] = {
    "onebit": OneBit(),
    "qsgd": QSGD(),
    "terngrad": TernGrad(),
    "ternary": Ternary(),
    "eden": EDEN(),
    "topk": TopK(),
    "threshold": Threshold(),
    "power_sgd": PowerSGD(),
    "chunked_topk": ChunkedTopK(),
    "cast": Cast(),
    "identity": Cast(),
}
BACKEND = Backend(KERNELS, Entries(), Tracking(), Momentum(), LowPrecision())
