"""The arms of benchmarks: the ways to exchange gradients that are compared, and which of them each benchmark takes."""

# Annotations stay evaluated here: DDP compares those of a hook with its own.
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ... import CompressState, LocalUpdates, Rounds, SufficientFactors, compress_hook, overlap_forward, recommend
from ...compress import (
    EDEN,
    QSGD,
    Cast,
    ChunkedTopK,
    Codec,
    Identity,
    OneBit,
    PowerSGD,
    Ternary,
    TernGrad,
    TopK,
)
from ...hooks import Statistics
from ...hooks.auto.planner import HALF_PRECISION
from ...hooks.training.recommend import is_adaptive

FLOOR, DENSE, BASELINE = "none", "fp32", "fp16"
#: Steps that PowerSGD's hook leaves dense: the fewest that it takes. Its default of 1000 is longer than our runs.
POWERSGD_DENSE_STEPS = 2
#: PowerSGD's hook dies on Gloo when several of its buckets are in flight.
ONE_BUCKET_MB = 10_000


class Hook(NamedTuple):
    """Arguments of `register_comm_hook`, or one of DDP's hooks in C++. Without a function: DDP's own all-reduce."""

    state: Any
    function: Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]] | dist.BuiltinCommHookType | None


class Floor:
    """The state of `without_communication`: how many buckets a step has."""

    buckets = 0


def without_communication(floor: Floor, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook that gives every rank its own gradients back: the floor."""
    if bucket.is_last():
        floor.buckets = bucket.index() + 1
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def label(codec: Codec) -> str:
    """A codec with its first option, which is the one that matters most, and those that are not the default."""
    fields = dataclasses.fields(codec)
    shown = [field.name for field in fields if field is fields[0] or getattr(codec, field.name) != field.default]
    values = [getattr(codec, name) for name in shown]
    texts = [label(value) if isinstance(value, Codec) else value for value in values]
    return f"{type(codec).__name__}({', '.join(f'{name}={text}' for name, text in zip(shown, texts, strict=True))})"


@dataclass(frozen=True)
class Arm:
    """One way to exchange the gradients of a model.

    Attributes:
        name: on command lines and in JSON files.
        colour: in pictures.
        what: for people, of an arm without a codec.
        codec: gradwire's; None: PyTorch's own ways, or no communication.
        exchange: gradwire's; "auto" may send float32 too; None: for `install` to say.
        coded: messages go through an entropy coder.
        overlaps: the next forward pass begins while means are on their way.
        horovod: by the Horovod interface instead of DDP.
        backend: by the backend "gradwire" of `torch.distributed`, beneath PyTorch's own reductions.
        whole_mesh: parameters are `DTensor`s on the mesh that `fully_shard` gets, with `dp_mesh_dims`.
        rank: PowerSGD's.
        factors: the linear layers whose gradients `SufficientFactors` takes, by name; DDP all-reduces the others.
        bits: on the wire for each element, where nothing counts them.
        every, rounds: steps from one exchange of parameters to the next, by `LocalUpdates`, and its options; 0:
            gradients, in every step.
        learns_as: the arm whose learning curve holds for this one too; None: its own.
        call: the code to write, of an arm that is recommended.
    """

    name: str
    colour: str = "#000000"
    what: str = ""
    codec: Codec | None = None
    exchange: str | None = None
    coded: bool = False
    overlaps: bool = False
    horovod: bool = False
    backend: bool = False
    whole_mesh: bool = False
    rank: int = 0
    factors: tuple[str, ...] = ()
    bits: float = 32.0
    every: int = 0
    rounds: Rounds = field(default_factory=Rounds)
    learns_as: str | None = None
    call: str = ""

    @property
    def title(self) -> str:
        """For people."""
        if self.codec is None:
            return f"{self.what}, rank {self.rank}, one bucket" if self.rank else self.what
        by = f" by {self.exchange}" if self.exchange else ""
        codec = label(self.codec).replace("torch.", "") + (" and zstd" if self.coded else "")
        steps = "every step" if self.every == 1 else f"every {self.every} steps"
        rounds = f", parameters {steps}" if self.every else ""
        rounds += f", delay {self.rounds.delay}" if self.rounds.delay else ""
        rounds += ", forward overlapped" if self.overlaps else ""
        rounds += ", dp_mesh_dims" if self.whole_mesh else ""
        whose = "Horovod interface" if self.horovod else "backend gradwire" if self.backend else "gradwire"
        return f"{whose}, {codec}{by}{rounds}"

    @property
    def dense_steps(self) -> int:
        """Steps at the start that cost what float32 costs."""
        return POWERSGD_DENSE_STEPS if self.rank else 0

    def at(self, density: float) -> "Arm":
        """This arm with a density of its own, where it has TopK's and the name leaves it open."""
        return dataclasses.replace(self, codec=TopK(density=density)) if self.codec == ONE_PERCENT else self

    def hook(self, ddp: DistributedDataParallel, seed: int = 0, exchange: str = "auto") -> Hook:
        """The hook and its state, for a model; the arguments are `install`'s. A collective."""
        if self.codec is not None:
            # All but "auto" compress always.
            way: dict[str, Any] = {"exchange": self.exchange or exchange}
            way |= {} if self.exchange == "auto" else {"fallback": None}
            return Hook(CompressState(ddp, self.codec, seed=seed, entropy_coding=self.coded, **way), compress_hook)
        if self.rank:
            power = powerSGD_hook.PowerSGDState(
                None,
                matrix_approximation_rank=self.rank,
                start_powerSGD_iter=POWERSGD_DENSE_STEPS,
                orthogonalization_epsilon=1e-8,  # without it, columns of zeros become NaN
                compression_stats_logging_frequency=10**9,
            )
            return Hook(power, powerSGD_hook.powerSGD_hook)
        if self.name == FLOOR:
            return Hook(Floor(), without_communication)
        return Hook(None, OTHERS.get(self.name))

    def install(
        self, model: nn.Module, bucket_mb: float | None = None, seed: int = 0, exchange: str = "auto"
    ) -> "Installed":
        """DDP around `model`, with this arm's hook. A collective.

        Args:
            bucket_mb: DDP's `bucket_cap_mb`; None: its default.
            seed: of stochastic codecs.
            exchange: of an arm that names none; "auto" takes one of those that the codec has.
        """
        if self.horovod or self.every:
            return Installed(self, model, model, seed=seed)
        factors = SufficientFactors(model, self.factors) if self.factors else None
        one = self.rank and dist.get_backend() == "gloo"
        ddp = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB if one else bucket_mb)
        # Buffers never change here, and DDP would send them before every step, a latency that no hook hides. The
        # argument for that has another name from torch 2.13 on.
        ddp.broadcast_buffers = False
        hook = self.hook(ddp, seed, exchange)
        if isinstance(hook.function, dist.BuiltinCommHookType):
            ddp._register_builtin_comm_hook(hook.function)
        elif hook.function is not None:
            ddp.register_comm_hook(hook.state, hook.function)
        return Installed(self, model, ddp, factors or hook.state)


#: Values of `Installed.sends`.
WHOLE, HALF, COMPRESSED = "dense", "half precision", "compressed"


@dataclass
class Installed:
    """A model whose gradients an arm exchanges: by itself, as it is called in training, and the state of its hook, or
    what is in the place of one."""

    arm: Arm
    module: nn.Module
    model: nn.Module
    state: Any = None
    seed: int = 0

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The model's optimizer: the given one, or Horovod's around it. With `LocalUpdates` its steps are counted, with
        `overlap_forward` they are taken later. A collective."""
        if self.arm.overlaps:
            overlap_forward(self.model, optimizer)
        if self.arm.every:
            assert self.arm.codec is not None
            longer = self.arm.rounds.lengthen_steps and is_adaptive(optimizer)  # SGD's steps are long enough
            how: Any = {"every": self.arm.every, "rounds": replace(self.arm.rounds, lengthen_steps=longer)}
            self.state = LocalUpdates(self.module, optimizer, self.arm.codec, seed=self.seed, **how)
            self.state.__enter__()
        if not self.arm.horovod:
            return optimizer
        import gradwire.hooks.horovod as hvd

        hvd.init()
        compression = hvd.Compression.none if self.arm.codec is None else self.arm.codec
        return hvd.DistributedOptimizer(
            optimizer, named_parameters=self.module.named_parameters(), compression=compression
        )

    @property
    def deciding(self) -> bool:
        """True while "auto" still tries candidates; the same on all ranks."""
        return bool(getattr(self.state, "tuning", False))

    def statistics(self) -> Statistics | None:
        """gradwire's statistics so far; None for other arms."""
        return self.state.statistics() if isinstance(self.state, CompressState | LocalUpdates) else None

    def bits_per_element(self) -> float:
        """Sent for each element of a gradient, so far."""
        done = self.statistics()
        if done is not None:
            return 32 * done.bytes_sent / done.dense_bytes / (self.arm.every or 1)
        if self.arm.rank:
            _, before, after = self.state.compression_stats()
            return 32 * after / before if before else 32.0
        return self.arm.bits

    def share_of_bytes(self) -> float:
        """Bytes that a rank received so far, as a share of a float32 ring all-reduce's: by `gather` as much as the
        other ranks have sent, so that it is not `bits_per_element` of 32 on more than two."""
        done = self.statistics()
        if done is None:
            return self.bits_per_element() / 32
        ranks = dist.get_world_size()
        ring = 2 * (ranks - 1) / ranks * done.dense_bytes
        return done.bytes_received / ring / (self.arm.every or 1)

    def sends(self) -> str:
        """`WHOLE` or `HALF` if "auto" decided for it in every bucket, else `COMPRESSED`."""
        done = self.statistics()
        if done is None or self.arm.every:
            return COMPRESSED
        found = {decision.partition(":")[0] for decision in done.decisions.values()}
        smaller = [what for what in found if not what.startswith("dense ")]
        if not smaller:
            return WHOLE
        half = f" of {HALF_PRECISION}"
        return HALF if self.arm.codec != HALF_PRECISION and all(what.endswith(half) for what in smaller) else COMPRESSED

    def close(self) -> None:
        if isinstance(self.state, CompressState | LocalUpdates | SufficientFactors):
            self.state.close()


#: PyTorch's hooks that have no state.
OTHERS: dict[str, Any] = {
    BASELINE: default_hooks.fp16_compress_hook,
    "bf16-hook": default_hooks.bf16_compress_hook,
    "builtin": dist.BuiltinCommHookType.ALLREDUCE,
    "python": default_hooks.allreduce_hook,
}
ONE_PERCENT = TopK(density=0.01)
#: A density at which int8 values and packed indices still take 29 times fewer bytes than float32, and error feedback's
#: delay, of about 1/density steps, is short beside a run of a few hundred.
EIGHT_PERCENT = TopK(density=0.08, values=torch.int8)

#: Codecs of differences of parameters, by the steps between two rounds: 514 to 622 times fewer bytes than float32
#: of a model of 0.85 M parameters on four ranks; and where rounds arrive late.
WIDE = {3: ChunkedTopK(k=448, chunk=65536), 4: ChunkedTopK(k=780, chunk=65536), 5: ChunkedTopK(k=1000, chunk=65536)}
CARRIED = ChunkedTopK(k=560, chunk=65536)

#: Every arm. The colours are mostly Okabe and Ito's, which colour-blind readers can tell apart.
ARMS = {
    arm.name: arm
    for arm in (
        Arm(FLOOR, "#BBBBBB", "no communication"),
        Arm(DENSE, "#000000", "PyTorch DDP"),
        Arm(BASELINE, "#999999", "PyTorch's fp16 hook", bits=16.0),
        Arm("bf16-hook", what="PyTorch's bf16 hook", bits=16.0),
        Arm("builtin", what="PyTorch's all-reduce hook in C++"),
        Arm("python", what="PyTorch's all-reduce hook in Python"),
        Arm("dense", codec=OneBit(), exchange="dense"),
        Arm("blocks", "#1F6F54", codec=Identity(), exchange="blocks"),
        Arm("bf16", "#AA7744", codec=Cast(torch.bfloat16)),
        Arm("powersgd", "#56B4E9", "PyTorch's PowerSGD hook", rank=2),
        Arm("qsgd", "#0072B2", codec=QSGD()),
        Arm("qsgd-overlap", codec=QSGD(), overlaps=True),
        Arm("qsgd8", codec=QSGD(bits=8)),
        Arm("qsgd8-overlap", codec=QSGD(bits=8), overlaps=True),
        Arm("eden", "#6A3D9A", codec=EDEN()),
        Arm("terngrad", "#009E73", codec=TernGrad()),
        Arm("ternary", "#005C43", codec=Ternary()),
        Arm("onebit", "#D55E00", codec=OneBit()),
        Arm("onebit-gather", "#D55E00", codec=OneBit(), exchange="gather"),
        Arm("onebit-two_pass", "#8C3D00", codec=OneBit(), exchange="two_pass"),
        Arm("topk", "#CC79A7", codec=ONE_PERCENT),
        Arm("topk-gather", "#CC79A7", codec=ONE_PERCENT, exchange="gather"),
        Arm("topk-split", "#CC79A7", codec=ONE_PERCENT, exchange="split"),
        Arm("topk-mask", "#7A3E63", codec=ONE_PERCENT, exchange="mask"),
        Arm("topk8", "#E69F00", codec=EIGHT_PERCENT),
        Arm("low-rank", "#332288", codec=PowerSGD(rank=4)),
        Arm("factors", "#4477AA", "gradwire, SufficientFactors of the head", factors=("head",)),
        Arm("chunked", "#882255", codec=ChunkedTopK()),
        Arm("chunked25", "#882255", codec=ChunkedTopK(k=1024)),
        Arm("qsgd-zstd", codec=QSGD(), coded=True),
        Arm("terngrad-zstd", codec=TernGrad(), coded=True),
        Arm("ternary-zstd", codec=Ternary(), coded=True),
        Arm("chunked25-zstd", codec=ChunkedTopK(k=1024), coded=True),
        Arm("chunked6", "#882255", codec=ChunkedTopK(k=1000, chunk=16384)),
        Arm("chunked1.5", "#AA6688", codec=ChunkedTopK(k=1000, chunk=65536)),
        Arm("local", "#117733", codec=Ternary(), every=10),
        Arm("local3", "#88BB66", codec=WIDE[3], every=3),
        Arm("local4", "#77B35E", codec=WIDE[4], every=4),
        Arm("local5", "#66AA55", codec=WIDE[5], every=5),
        Arm("local30", "#44AA77", codec=Ternary(), every=30),
        Arm("carried", "#999933", codec=CARRIED, every=3, rounds=Rounds(delay=1, keep_local=True)),
        Arm("auto", "#B5A900", codec=OneBit(), exchange="auto"),
        Arm("hvd-none", what="Horovod interface, float32", horovod=True),
        Arm("hvd-onebit", codec=OneBit(), horovod=True),
        Arm("hvd-topk", codec=ONE_PERCENT, horovod=True),
    )
}

#: `gradwire-bench train`'s, which learn. "auto" takes the codec that a short run learns well with.
TRAINED = {
    name: ARMS[name]
    for name in [
        "none",
        "fp32",
        "fp16",
        "bf16",
        "powersgd",
        "qsgd",
        "low-rank",
        "terngrad",
        "onebit",
        "topk",
        "topk8",
        "chunked6",
        "chunked1.5",
        "local",
        "local30",
        "carried",
        "auto",
    ]
}
TRAINED["powersgd"] = replace(ARMS["powersgd"], rank=4)
TRAINED["auto"] = replace(ARMS["auto"], codec=EIGHT_PERCENT, learns_as="topk8")


def recommended(optimizer: str, times: float, colour: str = Arm.colour) -> Arm:
    """The arm that `recommend` names under an optimizer for so many times fewer bytes."""
    found = recommend(optimizer, ratio=times)
    arm = Arm(f"{times:g}x", colour, codec=found.codec, call=found.call)
    return arm if found.rounds is None else replace(arm, every=found.every, rounds=Rounds(**found.rounds))


#: The demo's, beside PyTorch's own ways.
DEMONSTRATED = {name: ARMS[name] for name in (DENSE, BASELINE)} | {
    arm.name: arm
    for arm in (
        recommended("adamw", times, colour) for times, colour in ((7, "#0072B2"), (19, "#D55E00"), (100, "#CC79A7"))
    )
}

#: `gradwire-bench hsdp`'s, between replicas of a sharded model; `bits` are those of FSDP's own reductions.
HSDP = "hsdp"
REPLICATED = {
    arm.name: arm
    for arm in (
        Arm(FLOOR, what="no replicas: sharding alone"),
        Arm(HSDP, what="FSDP2's own HSDP"),
        Arm("hsdp-bf16", what="FSDP2's own HSDP, reduce_dtype=bfloat16", bits=16.0),
        ARMS["onebit"],
        ARMS["topk"],
        ARMS["qsgd8"],
        ARMS["qsgd"],
        Arm("backend-qsgd8", codec=QSGD(bits=8), backend=True),
        Arm("backend-qsgd", codec=QSGD(), backend=True),
        Arm("mesh", what="FSDP2's own HSDP, dp_mesh_dims", whole_mesh=True),
        Arm("mesh-qsgd8", codec=QSGD(bits=8), whole_mesh=True),
        Arm("mesh-backend-qsgd8", codec=QSGD(bits=8), backend=True, whole_mesh=True),
    )
}
