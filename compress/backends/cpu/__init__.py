"""Codecs on the CPU: numba kernels over threads of our own.

Kernels release the GIL and share no state, so any thread may run them at any time; numba's own parallel loops abort
when two threads enter them at once. A call is split over `torch.get_num_threads()` threads when each gets enough to
do, which never changes a byte. Nothing is allocated by a call once its workspace has met the same number of threads
and ranks.
"""

from __future__ import annotations

from .. import Backend, Kernels
from .drawn import RandomK
from .kernels import QSGD, Cast, ChunkedTopK, OneBit, Ternary, TernGrad
from .low_rank import PowerSGD
from .momentum import Momentum
from .outliers import Outliers
from .residuals import Narrow
from .topk import Entries, Threshold, TopK
from .tracking import Tracking
from .vectors import Vectors

KERNELS: dict[str, Kernels] = {
    "onebit": OneBit(),
    "qsgd": QSGD(),
    "terngrad": TernGrad(),
    "ternary": Ternary(),
    "topk": TopK(),
    "threshold": Threshold(),
    "random_k": RandomK(),
    "power_sgd": PowerSGD(),
    "chunked_topk": ChunkedTopK(),
    "cast": Cast(),
    "identity": Cast(),
}
KERNELS["outliers"] = Outliers(KERNELS, Entries())
BACKEND = Backend(KERNELS, Entries(), Tracking(), Momentum(), Narrow(), Vectors())
