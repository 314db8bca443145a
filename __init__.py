"""gradwire: gradient compression for PyTorch's distributed data parallel training.

>>> state = gradwire.CompressState(model, gradwire.TopK(density=0.01))
>>> model.register_comm_hook(state, gradwire.compress_hook)
"""

__version__ = "0.3.0.dev0"

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import optim
    from .compress import (
        CODECS,
        EDEN,
        QSGD,
        Cast,
        ChunkedTopK,
        Codec,
        Identity,
        Lead,
        Magnitudes,
        Momentum,
        OneBit,
        Outliers,
        PatchError,
        PatchReader,
        PatchWriter,
        PowerSGD,
        RandomK,
        Residual,
        Ternary,
        TernGrad,
        Threshold,
        TopK,
        Tracking,
        schedules,
    )
    from .hooks import (
        Aggregate,
        CompressState,
        LocalUpdates,
        Meeting,
        MeetingLost,
        OuterSGD,
        Rounds,
        SufficientFactors,
        compress_fsdp,
        compress_hook,
        compress_stage,
        overlap_forward,
        recommend,
        sparse_all_reduce,
    )

__all__ = [
    "CODECS",
    "EDEN",
    "QSGD",
    "Aggregate",
    "Cast",
    "ChunkedTopK",
    "Codec",
    "CompressState",
    "Identity",
    "Lead",
    "LocalUpdates",
    "Magnitudes",
    "Meeting",
    "MeetingLost",
    "Momentum",
    "OneBit",
    "OuterSGD",
    "Outliers",
    "PatchError",
    "PatchReader",
    "PatchWriter",
    "PowerSGD",
    "RandomK",
    "Residual",
    "Rounds",
    "SufficientFactors",
    "TernGrad",
    "Ternary",
    "Threshold",
    "TopK",
    "Tracking",
    "__version__",
    "compress_fsdp",
    "compress_hook",
    "compress_stage",
    "optim",
    "overlap_forward",
    "recommend",
    "schedules",
    "sparse_all_reduce",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are asked for, so that `gradwire-bench --help` needs no torch."""
    if name in ("compress", "hooks", "optim"):
        return importlib.import_module(f".{name}", __name__)
    if name in __all__:
        for part in ("compress", "hooks"):
            found = getattr(importlib.import_module(f".{part}", __name__), name, None)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
