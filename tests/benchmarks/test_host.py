"""`gradwire-bench host`, and what a bucket may take of the host: launches are counted, times are not asserted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gradwire.benchmarks import cli
from gradwire.benchmarks.gpu import host
from gradwire.compress import CODECS, QSGD, BlockCodec, Codec, OneBit
from gradwire.compress.backends import backend_kernels
from gradwire.compress.backends.cuda.runtime import device
from gradwire.hooks.core.bucket import Bucket

#: Torch's operations at the end of a step, whatever the number of buckets: what they counted, brought together.
AT_THE_END = 3 / host.BUCKETS
DENSE = [
    codec
    for codec in CODECS
    if isinstance(codec, BlockCodec) and ".cuda" in type(backend_kernels("cuda")[codec.name]).__module__
]


@pytest.fixture(autouse=True)
def hardly_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "WARM", 3)  # DDP has rebuilt its buckets by then


@pytest.mark.parametrize("codec", DENSE, ids=str)
def test_a_bucket_s_encode_is_one_launch_whose_arguments_are_prepared_once(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever converts a number at each call shows here: nothing but tensors is new in the second one."""
    given: list[Sequence[device.Argument]] = []
    monkeypatch.setattr(host, "passed", given.append)
    with host.no_gpu() as gpu:
        x, residual = torch.randn(3000), torch.zeros(3000)
        wire, workspace = torch.zeros(codec.wire_bytes(3000), dtype=torch.uint8), codec.workspace(3000)
        draw = torch.zeros(3, dtype=torch.int64)
        for _ in range(2):
            codec.encode_feedback(x, residual, wire, draw, workspace)
            codec.decode_mean([wire[None]], x, workspace)
    assert gpu.launches == 4
    for first, second in (given[::2], given[1::2]):
        assert all(a is b for a, b in zip(first, second, strict=True) if not isinstance(a, torch.Tensor))


@pytest.mark.parametrize(
    ("codec", "exchange", "exclude", "kernels", "operations"),
    [
        (OneBit(), "gather", (), 2, 0),
        (OneBit(), "two_pass", (), 4, 0),
        (QSGD(bits=4), "gather", (), 2, 1),  # the draw's step
        # Into rows and back; what is excluded to the message; and the kernel that makes the mean of it.
        (OneBit(), "gather", ("*.bias",), 3, 3),
    ],
    ids=str,
)
def test_a_bucket_launches_nothing_but_what_it_needs(
    codec: Codec, exchange: str, exclude: tuple[str, ...], kernels: int, operations: int
) -> None:
    row = host.hook_row(codec, exchange, 1, exclude)
    assert row["kernels"] == kernels
    assert row["operations"] <= operations + AT_THE_END


def test_draws_that_nobody_reads_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Bucket.use

    def use(self: Bucket, *given: object) -> None:
        real(self, *given)  # type: ignore[arg-type]
        self.steps = torch.zeros(2, dtype=torch.int64)

    monkeypatch.setattr(Bucket, "use", use)
    assert host.hook_row(OneBit(), "gather", 1)["operations"] > AT_THE_END


def test_the_table_in_miniature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "CODECS", host.CODECS[:2])
    monkeypatch.setattr(host, "WAYS", host.WAYS[:1])
    assert cli.main(["host", "--calls", "2", "--json", str(tmp_path / "host.json")]) == 0
    result = json.loads((tmp_path / "host.json").read_text())
    assert [row["encode_launches"] for row in result["codecs"]] == [1, 1]
    assert all(row["hook_s"] > row["kernels"] * 1e-7 for row in result["buckets"])
    printed = capsys.readouterr().out
    assert "No GPU: launches and messages are left out" in printed
    assert printed.count(repr(host.CODECS[0])) == 2


def test_no_calls_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["host", "--calls", "0"]) == 2
    assert "--calls 0: expected at least 1" in capsys.readouterr().err
