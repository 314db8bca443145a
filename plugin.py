"""Names for authors of codecs, feedback strategies, exchanges and backends, in one place.

`CONTRIBUTING.md` says what each must define; `examples/plugins` has a codec and an exchange that run. A codec or a
strategy is passed to a state as it is; an exchange and a backend are registered, alike on every rank.
"""

from .compress.backends import Backend, EntryKernels, Kernels, Workspace, register_backend, use_backend
from .compress.codec import BlockCodec, Codec, new_draw
from .compress.feedback.base import RESIDUAL, Feedback, FeedbackState
from .compress.formats.wire import Field, Part
from .compress.sparse_codec import SparseCodec
from .hooks.comm.group import Group
from .hooks.comm.ports import PersistentMessage, Stages
from .hooks.exchanges import BucketSpec, Exchange, ExchangeArgs
from .hooks.exchanges import register as register_exchange
from .hooks.network.cost import Calibration, CodecSpeed, Estimate

__all__ = [
    "RESIDUAL",
    "Backend",
    "BlockCodec",
    "BucketSpec",
    "Calibration",
    "Codec",
    "CodecSpeed",
    "EntryKernels",
    "Estimate",
    "Exchange",
    "ExchangeArgs",
    "Feedback",
    "FeedbackState",
    "Field",
    "Group",
    "Kernels",
    "Part",
    "PersistentMessage",
    "SparseCodec",
    "Stages",
    "Workspace",
    "new_draw",
    "register_backend",
    "register_exchange",
    "use_backend",
]
