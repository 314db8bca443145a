"""Residuals in fewer bytes: what is rounded off is bounded, and everything else stays as with float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gradwire import CompressState, Residual
from gradwire.compress import CODECS, QSGD, Codec, OneBit, Ternary, TopK, new_draw
from gradwire.compress.backends import LowPrecisionVector, _backend
from gradwire.compress.backends.cpu.low_precision import PASSES
from gradwire.compress.backends.low_precision import BLOCK, DTYPES, LEAST_STEP, MOST, LowPrecisionKernels
from gradwire.compress.feedback.store import FeedbackStore
from gradwire.compress.formats.layout import Slot
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from strategies import (
    LENGTHS,
    VARIANTS,
    Case,
    cases,
    gradient,
    same,
)
from torch import Tensor, nn
from training import residuals_of, train, wrap

CPU = torch.device("cpu")
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
quick = settings(max_examples=25, deadline=None)


def kept_as(dtype: torch.dtype, x: Tensor) -> LowPrecisionVector:
    found = LowPrecisionVector(_backend("cpu").low_precision, x.numel(), dtype, CPU)
    for part in found.parts:
        part.fill_(3)
    found.write(x)
    return found


def most_rounded(x: Tensor, kept: LowPrecisionVector) -> Tensor:
    """The most that may be missing of each element, float64."""
    sound = x.double().where(x.isfinite(), 0.0).clamp(-MOST, MOST)
    if kept.dtype == torch.bfloat16:
        return 2.0**-8 * sound.abs() + 2.0**-134  # half of the least subnormal
    rows = torch.nn.functional.pad(sound, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    step = (rows.abs().amax(1) / 127 * (1 + 2.0**-15)).clamp(min=LEAST_STEP)
    return (step / 2 * (1 + 2.0**-16)).repeat_interleave(BLOCK)[: len(x)]


# -- the formats


@every_dtype
@quick
@given(case=cases())
def test_what_is_rounded_off_is_bounded_and_coded_alike_again(dtype: torch.dtype, case: Case) -> None:
    x = case.residual()
    kept = kept_as(dtype, x)
    found = kept.read()
    sound = x.double().where(x.isfinite(), 0.0).clamp(-MOST, MOST)
    assert bool(found.isfinite().all()), "nothing that is read may spread"
    assert bool(((sound - found.double()).abs() <= most_rounded(x, kept)).all())
    again = kept_as(dtype, found)
    assert all(same(a, b) for a, b in zip(kept.parts, again.parts, strict=True))


@every_dtype
def test_a_vector_is_float32_while_it_is_open_and_stays_if_that_fails(dtype: torch.dtype) -> None:
    x = gradient("normal", 1000, 1)
    kept = kept_as(dtype, x)
    before = kept.read()
    with kept.open() as wide:
        assert same(wide, before)
        wide.mul_(2.0)
    assert same(kept.read(), 2 * before)

    def fail() -> None:
        with kept.open() as wide:
            wide.zero_()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert same(kept.read(), 2 * before)
    kept.zero_()
    assert not bool(kept.any())


# -- codecs


@pytest.mark.parametrize("codec", [c for c in VARIANTS if not c.lossless], ids=str)
@settings(max_examples=10, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    numel=st.sampled_from(LENGTHS),
    kind=st.sampled_from(["normal", "ties", "tiny", "constant"]),
)
def test_what_is_not_sent_is_kept_but_for_what_is_rounded_off(
    codec: Codec, dtype: torch.dtype, numel: int, kind: str
) -> None:
    """gradient + old residual = output + new residual + r, and r is within the format's bound, element by element."""
    codec = codec.with_feedback()
    grad, kept, out = gradient(kind, numel, 1), kept_as(dtype, gradient(kind, numel, 2)), torch.zeros(numel)
    old, workspace = kept.read().double(), codec.workspace(numel)
    wire = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8)
    codec.encode_feedback(grad, kept, wire, new_draw(0), workspace)
    codec.decode_add(wire, out, 1.0, workspace)
    rest = grad.double() + old - out.double()
    float32 = 2.0**-22 * (grad.double().abs() + old.abs() + out.double().abs())
    off = (rest - kept.read().double()).abs()
    assert bool((off <= most_rounded(rest.float(), kept) * (1 + 2.0**-10) + float32).all())


@every_dtype
def test_a_dtype_that_has_passes_in_torch_alone_is_coded_alike(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, grad, wires = OneBit(block=256), gradient("normal", 3000, 1), list[list[Tensor]]()
    for _ in range(2):
        kept = kept_as(dtype, gradient("normal", 3000, 2))
        if wires:
            monkeypatch.delitem(PASSES, dtype)
            kept.kernels = LowPrecisionKernels()
        wires.append([torch.zeros(codec.wire_bytes(3000), dtype=torch.uint8), *kept.parts])
        codec.encode_feedback(grad, kept, wires[-1][0], None, codec.workspace(3000))
    assert all(same(a, b) for a, b in zip(*wires, strict=True))


@pytest.mark.parametrize("codec", [OneBit(block=256), TopK(0.1), QSGD(rounding="nearest"), Ternary()], ids=str)
@every_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_never_enters(codec: Codec, dtype: torch.dtype, bad: float) -> None:
    numel = 3000
    grad, kept = gradient("normal", numel, 1), kept_as(dtype, gradient("normal", numel, 2))
    old = kept.read()
    grad[1500] = bad
    wire, workspace = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8), codec.workspace(numel)
    codec.encode_feedback(grad, kept, wire, None, workspace)
    now, out = kept.read(), torch.zeros(numel)
    codec.decode_add(wire, out, 1.0, workspace)
    assert not bool(out[1500].isfinite()), "it is seen"
    assert bool(now.isfinite().all())
    assert abs(float(now[1500] - old[1500])) <= float(most_rounded(now, kept)[1500]), "and the residual stays"


# -- memory


@pytest.mark.parametrize("codec", [OneBit(), TopK(0.01)], ids=str)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 4.0), (torch.bfloat16, 2.0), (torch.int8, 1.03)], ids=str)
def test_memory_is_what_the_pages_say(codec: Codec, dtype: torch.dtype, most: float) -> None:
    """Bytes an element of a model of many buckets; half as much for an owner's half, as much again for undoing."""
    numel, buckets, memory = 5000, 20, FeedbackStore(Residual(dtype=dtype), keep_previous=True)
    rooms = 0
    for bucket in range(buckets):
        layout = (Slot(str(bucket), 0, (numel,), (1,)),)
        kept, workspace = memory.of(layout), codec.workspace(numel)
        wire = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8)
        kept.owned([(0, numel // 2, 2)])
        kept.encode(codec, gradient("normal", numel, bucket), wire, None, workspace)
    own = copies = 0
    for kept in memory._memories.values():
        assert kept._saved is not None
        own += sum(vector.nbytes for vector in kept.held.values())
        own += sum(vector.nbytes for part in kept._owned for vector in part.kept.held.values())
        copies += sum(vector.nbytes for vector in kept._saved.vectors.values())
        copies += sum(part.residual.nbytes for part in kept._saved.owned)
    rooms = sum(room.nbytes for rooms in memory._scratch._free.values() for room in rooms)
    assert own <= 1.5 * most * numel * buckets
    assert copies == own
    assert rooms <= 2 * 4 * numel, "of two buckets at the most, however many there are"


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.float64, "int8", 8, None], ids=str)
def test_what_is_no_dtype_of_residuals_is_refused(dtype: Any) -> None:
    error = ValueError if isinstance(dtype, torch.dtype) else TypeError
    with pytest.raises(error, match=r"dtype=.*: a residual is kept as one of torch\.float32"):
        Residual(dtype=dtype)


# -- learning


def learn(feedback: Callable[[Tensor, int], Tensor]) -> float:
    """400 steps of logistic regression on gradients that went through `feedback`; final loss over the first."""
    generator = torch.Generator().manual_seed(3)
    inputs, truth = torch.randn(512, 640, generator=generator), torch.randn(640, 4, generator=generator)
    labels = (inputs @ truth).argmax(1)
    weights = torch.zeros(640, 4)
    first = float(torch.nn.functional.cross_entropy(inputs @ weights, labels))
    for step in range(400):
        rows = torch.randint(0, 512, (64,), generator=generator)
        wrong = (inputs[rows] @ weights).softmax(1)
        wrong[torch.arange(64), labels[rows]] -= 1
        weights -= 0.1 * feedback((inputs[rows].T @ wrong / 64).reshape(-1), step).view(640, 4)
    loss = float(torch.nn.functional.cross_entropy(inputs @ weights, labels))
    return loss / first


def residual_of_learning(codec: Codec) -> tuple[float, float]:
    """The largest residual in units of the largest gradient, both in norm, and how far the loss fell."""
    numel = 2560
    residual, wire = torch.zeros(numel), torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8)
    workspace = codec.workspace(numel)
    largest = {"gradient": 0.0, "residual": 0.0}

    def feedback(grad: Tensor, step: int) -> Tensor:
        largest["gradient"] = max(largest["gradient"], float(grad.norm()))
        codec.encode_feedback(grad, residual, wire, new_draw(0, step), workspace)
        largest["residual"] = max(largest["residual"], float(residual.norm()))
        out = torch.zeros(numel)
        codec.decode_add(wire, out, 1.0, workspace)
        return out

    fell = learn(feedback)
    return largest["residual"] / largest["gradient"], fell


@pytest.mark.parametrize("codec", [c for c in CODECS if not c.lossless], ids=str)
def test_residuals_stay_bounded_while_a_model_learns(codec: Codec) -> None:
    residual, loss = residual_of_learning(codec.with_feedback())
    assert residual < 60
    assert loss < 0.7


@every_dtype
@pytest.mark.parametrize("codec", [OneBit(block=256), TopK(0.02)], ids=str)
def test_a_model_learns_as_with_float32(codec: Codec, dtype: torch.dtype) -> None:
    losses = []
    for kept in (torch.zeros(2560), kept_as(dtype, torch.zeros(2560))):
        wire, workspace = torch.zeros(codec.wire_bytes(2560), dtype=torch.uint8), codec.workspace(2560)

        def feedback(
            grad: Tensor, step: int, kept: Any = kept, wire: Tensor = wire, workspace: Any = workspace
        ) -> Tensor:
            codec.encode_feedback(grad, kept, wire, None, workspace)
            out = torch.zeros(2560)
            codec.decode_add(wire, out, 1.0, workspace)
            return out

        losses.append(learn(feedback))
    assert abs(losses[1] / losses[0] - 1) < 0.02


@pytest.mark.parametrize(("dtype", "sent"), [(torch.float32, True), (torch.bfloat16, True), (torch.int8, False)])
def test_gradients_that_are_small_and_always_the_same_add_up_unless_a_neighbour_is_large(
    dtype: torch.dtype, sent: bool
) -> None:
    """The limit that the pages name."""
    codec, memory, layout = TopK(0.002), FeedbackStore(Residual(dtype=dtype)), (Slot("p", 0, (512,), (1,)),)
    grad, wire = torch.zeros(512), torch.zeros(codec.wire_bytes(512), dtype=torch.uint8)
    grad[:4] = torch.tensor([1.0, 1.0, 1.0, 0.003])  # one of them is sent in a step, and another waits
    out, workspace = torch.zeros(512), codec.workspace(512)
    for _ in range(1200):
        memory.of(layout).encode(codec, grad, wire, None, workspace)
        codec.decode_add(wire, out, 1.0, workspace)
    kept = memory.by_name()["p"]
    assert bool(kept[3] + out[3] > 3.0) == sent


# -- checkpoints of real ranks


def saved_and_gone_on(rank: int, dtype: torch.dtype, other: torch.dtype, folder: str) -> Any:
    """Go on, go on from a checkpoint, and go on from it with another dtype; through DCP too."""

    def fresh(kind: torch.dtype) -> tuple[Any, CompressState]:
        model = nn.Sequential(nn.Linear(40, 64, bias=False))  # one parameter lies alike in every bucket
        return wrap(model, OneBit(block=256), exchange="two_pass", error_feedback=Residual(dtype=kind))

    torch.manual_seed(1)
    ddp, state = fresh(dtype)
    train(rank, ddp, range(4))
    weights = {name: x.clone() for name, x in ddp.module.state_dict().items()}
    saved, mean = state.state_dict(), state.consolidated_state_dict()
    dcp.save({"gradwire": state}, checkpoint_id=folder)
    digests = [train(rank, ddp, range(4, 7))]
    results = []
    for kind in (dtype, other):
        for checkpoint in (saved, mean, None):
            ddp, state = fresh(kind)
            ddp.module.load_state_dict(weights)
            if checkpoint is None:
                dcp.load({"gradwire": state}, checkpoint_id=folder)
            else:
                state.load_state_dict(checkpoint)
            results.append(max(float(x.abs().max()) for x in residuals_of(state.state_dict()).values()))
            digests.append(train(rank, ddp, range(4, 7)))
    ddp, state = fresh(dtype)
    ddp.module.load_state_dict(weights)
    state.load_state_dict({key: value for key, value in saved.items() if key != "owned"})
    digests.append(train(rank, ddp, range(4, 7)))
    kinds = {str(x.dtype) for x in residuals_of(saved).values()}, {str(x.dtype) for x in residuals_of(mean).values()}
    return digests, kinds, results


@pytest.mark.parametrize(
    ("dtype", "other"),
    [(torch.bfloat16, torch.float32), (torch.int8, torch.bfloat16), (torch.float32, torch.int8)],
    ids=str,
)
def test_checkpoints_go_from_one_dtype_to_another(
    ranks: Ranks, dtype: torch.dtype, other: torch.dtype, tmp_path: Path
) -> None:
    first, second = ranks(2).run(saved_and_gone_on, dtype, other, str(tmp_path))
    digests, kinds, results = first
    assert digests == second[0], "replicas differ"
    assert digests[1] == digests[0], "resuming changes no bit"
    # DCP fills what a fresh state shows, which owns no slice yet: what owners keep comes folded in, to the same bit.
    assert digests[3] == digests[7]
    assert min(results) > 0
    assert kinds[0] == {"torch.bfloat16" if dtype == torch.bfloat16 else "torch.float32"}
    assert kinds[1] == {"torch.float32"}
