"""Messages through an entropy coder: the same bits, in fewer bytes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock, patch

import endings
import pytest
import torch
import torch.distributed as dist
from fronts import FRONTS, marked
from gradwire import QSGD, ChunkedTopK, Codec, CompressState, TernGrad, TopK
from gradwire.hooks.comm.coded_message import HEAD_BYTES, RETRY, CodedMessage
from gradwire.hooks.comm.group import Group
from gradwire.hooks.core.session import Session
from gradwire.hooks.horovod import Compression
from gradwire.hooks.horovod.compression import CodecCompression
from gradwire.hooks.horovod.runtime.channel import Channel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lacking import needs_reduce_scatter
from ranks import Ranks, on_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from training import batch, digest, perceptron, told

#: Kinds of bytes: alike, of few values, and any.
KINDS = ("zeros", "few", "any")


def some_bytes(kind: str, length: int, seed: int) -> Tensor:
    values = {"zeros": 1, "few": 6, "any": 256}[kind]
    return torch.randint(values, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def carried(rank: int, length: int, steps: Sequence[str], gathers: bool, named: str) -> list[int]:
    """Rows that change their kind from step to step, each rank's in another order, arrive. Bytes saved, by step."""
    group = Group(dist.group.WORLD)
    group = group.channel(named) if named else group
    size, saved = group.size, []
    rows = torch.zeros(size, length, dtype=torch.uint8)
    got = torch.zeros(size, length, dtype=torch.uint8)
    port: Any
    if gathers:
        port = group.persistent_gather(got, rows[0], coded=True)
    else:
        port = group.persistent_swap(got, rows, coded=True)
    for step in range(len(steps)):
        sent = [
            [some_bytes(steps[(step + source) % len(steps)], length, 100 * step + 10 * source + (not gathers) * target)
             for target in range(size)] for source in range(size)
        ]  # fmt: skip
        rows.copy_(torch.stack(sent[rank]))
        port.post_receives()
        work = port.start()
        work.wait()
        work.wait()  # once more changes nothing
        assert torch.equal(got, torch.stack([sent[source][rank] for source in range(size)]))
        counted = torch.tensor([0 if size == 1 else port.saved[0] * (size - 1 if gathers else 1), port.saved[1]])
        dist.all_reduce(counted)
        assert size == 1 or counted[0] == counted[1]  # what is sent arrives
        saved.append(port.saved[0])
    return saved


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.sampled_from([1, 2, 3]),
    length=st.one_of(st.integers(0, 300), st.sampled_from([70_000, 1 << 20])),
    steps=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
    gathers=st.booleans(),
    named=st.sampled_from(["", "coded"]),
)
def test_whatever_is_sent_arrives(
    ranks: Ranks, size: int, length: int, steps: list[str], gathers: bool, named: str
) -> None:
    ranks(size).run(carried, length, steps, gathers, named)


def test_what_does_not_shrink_goes_as_it_is_for_a_while(ranks: Ranks) -> None:
    length = 1 << 16
    bad = ranks(2).run(carried, length, ["any"] * 2 + ["few"] * (2 * RETRY), True, "coded")
    for saved in bad:
        # Rank 1 is a step ahead of rank 0 in this list.
        first = saved.index(-HEAD_BYTES)
        tried = [step for step, less in enumerate(saved) if less > 0]
        assert tried
        assert max(saved) > length // 2
        assert all(less == -HEAD_BYTES for less in saved[first : first + RETRY])
        assert min(step for step in tried if step > first) == first + RETRY + 1


def broken(rank: int, how: str) -> str:
    """The error of rank 1, to which rank 0 sends a message that is no code."""
    group = Group.of_ranks([0, 1]).channel("broken")
    rows, row = torch.zeros(2, 1000, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    port = group.persistent_gather(rows, row, coded=True)
    assert isinstance(port, CodedMessage)
    code = port._code

    def spoiled(row: Tensor, room: Tensor) -> Tensor:
        message = code(row, room)
        if how == "bytes":
            message[HEAD_BYTES:] = 7
        elif how == "length":
            message[:HEAD_BYTES].view(torch.int64).fill_(5000)
        else:
            message = code(row[:500], room)
        return message

    with patch.object(port, "_code", spoiled if rank == 0 else code):
        work = port.start()
    return told(work.wait)


@pytest.mark.parametrize("how", ["bytes", "length", "shorter"])
def test_a_message_that_is_no_code_is_an_error_with_the_senders_rank(ranks: Ranks, how: str) -> None:
    fine, error = ranks(2).run(broken, how)
    assert fine == "nothing"
    assert "rank 0 sent" in error
    assert "same versions" in error


def trained(rank: int, codec: Codec, exchange: str, topology: int | None, coded: bool) -> tuple[str, int, int]:
    """Parameters after some steps, and bytes sent and received."""
    options: Any = {"exchange": exchange, "topology": topology, "exclude": ["0.bias"], "entropy_coding": coded}
    front = FRONTS["ddp"](perceptron(64, 128), codec, ddp={"bucket_cap_mb": 0.05}, **options)
    for step in range(6):
        front.step(batch(rank, step, front.model))
    done = front.state.statistics()
    return digest(front.parameters()), done.bytes_sent, done.bytes_received


@on_ranks(2, 4)
@pytest.mark.parametrize(
    ("codec", "exchange", "shrinks"),
    [
        (QSGD(), "gather", 0.85),
        (TernGrad(), "two_pass", 0.85),
        (ChunkedTopK(k=1024, chunk=4096), "gather", 0.97),
        (TopK(0.1), "split", 1.01),
    ],
    ids=str,
)  # fmt: skip
def test_models_have_the_same_bits(rank: int, codec: Codec, exchange: str, shrinks: float) -> str:
    plain, coded = (trained(rank, codec, exchange, None, coded) for coded in (False, True))
    assert coded[0] == plain[0]
    for less, more in zip(coded[1:], plain[1:], strict=True):
        assert less < shrinks * more
    return coded[0]


@on_ranks(2)
@pytest.mark.parametrize("front", marked(["ddp", "local", "horovod", "replicas", "shards"]))
def test_every_front_codes(rank: int, front: str) -> str:
    """As it is asked to; with the same weights."""
    weights = []
    for coded in (False, True):
        training = endings.Training(front, "qsgd", "gather", 3, "kept", 0, 0, (0, 0, 0.0), coded=coded)
        with patch.object(CodedMessage, "decode", autospec=True, side_effect=CodedMessage.decode) as decode:
            weights.append(endings.train(training, rank, []))
        assert (decode.call_count > 0) == coded
        assert all(port.saved[0] > 0 for (port,), _ in decode.call_args_list)
    assert weights[0] == weights[1]
    return weights[0]


@on_ranks(2)
@needs_reduce_scatter
def test_statistics_between_shards_have_the_bytes_that_travelled(rank: int) -> str:
    sent = []
    for coded in (False, True):
        front = FRONTS["shards"](endings.Net(), QSGD(), entropy_coding=coded)
        front.step(torch.randn(4, endings.WIDTH))
        done = front.state.statistics()
        sent.append((done.bytes_sent, done.bytes_received))
        front.close()
    assert all(0 < less < 0.95 * more for more, less in zip(*sent, strict=True))
    return ""


@on_ranks(4)
def test_messages_inside_a_node_are_not_coded(rank: int) -> str:
    """Between nodes they are."""
    codec, swaps = QSGD(), []
    real = Group.persistent_swap

    def seen(self: Group, output: Tensor, rows: Tensor, ahead: int = 2, coded: bool = False) -> Any:
        swaps.append((self.size, rows.dtype, ahead, coded))
        return real(self, output, rows, ahead, coded)

    plain = trained(rank, codec, "hierarchical", 2, False)
    with patch.object(Group, "persistent_swap", seen):
        coded = trained(rank, codec, "hierarchical", 2, True)
    assert swaps
    assert not any(coded for *_, coded in swaps)  # two nodes gather
    assert coded[0] == plain[0]
    assert coded[2] < 0.85 * plain[2]
    return coded[0]


@on_ranks(2)
def test_what_cannot_be_coded_is_refused_on_all_ranks(rank: int) -> None:
    """Ranks that ask for different things, or of which one lacks the package; devices; and values of another kind."""
    model, gather = DistributedDataParallel(perceptron()), {"exchange": "gather"}
    with pytest.raises(ValueError, match="entropy_coding"):
        CompressState(model, QSGD(), **gather, entropy_coding=rank == 0)  # type: ignore[arg-type]
    with (
        patch.dict(sys.modules, {"zstandard": None} if rank else {}),
        pytest.raises((RuntimeError, ValueError), match=r"pip install 'gradwire\[zstd\]'"),
    ):
        CompressState(model, QSGD(), **gather, entropy_coding=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"entropy_coding=True: gradients are on meta.* leave it out"):
        Session("CompressState", dist.group.WORLD, torch.device("meta"), dict, None, entropy_coding=True)
    with pytest.raises(ValueError, match=r"entropy_coding=True: gradients are on cuda.* leave it out"):
        Channel.group(Mock(), torch.device("cuda"), entropy_coding=True)
    for made in (CompressState, CodecCompression, Compression.codec):
        with patch.dict(sys.modules, {"zstandard": None}):
            made(QSGD())
            with pytest.raises(RuntimeError, match=r"pip install 'gradwire\[zstd\]'"):
                made(QSGD(), entropy_coding=True)
        wrong: Any
        for wrong in (1, "zstd", None):
            with pytest.raises(ValueError, match=r"entropy_coding=.*expected True or False"):
                made(QSGD(), entropy_coding=wrong)


def test_horovods_checkpoints_go_on_with_and_without() -> None:
    """The text of one without is that of releases that had none."""
    plain, coded = CodecCompression(QSGD()), CodecCompression(QSGD(), entropy_coding=True)
    assert repr(plain) == f"CodecCompression(codec={QSGD()!r}, error_feedback='auto', exchange='auto', seed=0)"
    assert repr(coded) != repr(plain)
    with patch.dict(sys.modules, {"zstandard": None}):
        assert plain.goes_on_from(repr(coded))
    assert coded.goes_on_from(repr(plain))
    assert coded.goes_on_from(repr(coded))
    assert not coded.goes_on_from(repr(CodecCompression(QSGD(bits=2))))
