"""DDP communication hooks, sharded models, periodic synchronisation, and the exchanges behind them."""

from .core.statistics import Statistics
from .ddp.hook import CompressState, compress_hook
from .ddp.overlap import OverlapForward, overlap_forward
from .fsdp import compress_fsdp
from .local_sgd.meeting.options import Meeting, MeetingLost
from .local_sgd.options import Aggregate
from .local_sgd.outer_sgd import OuterSGD
from .local_sgd.schedule import Rounds
from .local_sgd.updates import LocalUpdates
from .pipelining.stage import StageCompression, compress_stage
from .sparse.all_reduce import sparse_all_reduce
from .sufficient_factors.gradients import SufficientFactors
from .training.recommend import Recommendation, recommend

__all__ = [
    "Aggregate",
    "CompressState",
    "LocalUpdates",
    "Meeting",
    "MeetingLost",
    "OuterSGD",
    "OverlapForward",
    "Recommendation",
    "Rounds",
    "StageCompression",
    "Statistics",
    "SufficientFactors",
    "compress_fsdp",
    "compress_hook",
    "compress_stage",
    "overlap_forward",
    "recommend",
    "sparse_all_reduce",
]
