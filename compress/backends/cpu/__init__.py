"""Codecs on the CPU: numba kernels over threads of our own.

Kernels release the GIL and share no state, so any thread may run them at any time; numba's own parallel loops abort
when two threads enter them at once. A call is split over `torch.get_num_threads()` threads when each gets enough to
do, which never changes a byte. Nothing is allocated by a call once its workspace has met the same number of threads
and ranks.
"""

from __future__ import annotations

import warnings

from numba.core import config

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
from .passes import Momentum, Tracking, Vectors

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
BACKEND = Backend(KERNELS, Entries(), Tracking(), Momentum(), LowPrecision(), Vectors())
if config.DISABLE_JIT:  # type: ignore[attr-defined]  # our kernels read addresses, which Python cannot
    from .. import reference

    BACKEND = reference.BACKEND
    warnings.warn(
        "NUMBA_DISABLE_JIT is set: gradwire uses its reference in NumPy, which sends the same bytes and takes far "
        "longer; unset it to train",
        stacklevel=2,
    )
