"""An entropy coder behind the codecs: rANS gives back what it was given, and the arithmetic of where it pays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gradwire.benchmarks import cli
from gradwire.benchmarks.codec import entropy_coding, rans
from gradwire.benchmarks.codec.quality import symbol_entropy
from gradwire.compress import QSGD, ChunkedTopK, Codec, Ternary, TernGrad, new_draw
from hypothesis import given
from hypothesis import strategies as st


@st.composite
def bytes_to_code(draw: st.DrawFn) -> np.ndarray:
    """Of any length, from one byte alone to all 256, often of very unequal frequency."""
    length = draw(st.integers(0, 3000))
    kinds = draw(st.integers(1, 256))
    skew = draw(st.sampled_from([0.0, 1.0, 4.0]))
    generator = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    shares = (1 + np.arange(kinds)) ** -skew
    return generator.permutation(256)[generator.choice(kinds, length, p=shares / shares.sum())].astype(np.uint8)


@given(bytes_to_code(), st.integers(1, 4000))
def test_rans_gives_back_what_it_was_given(symbols: np.ndarray, segment: int) -> None:
    segments = rans.encode(symbols, segment)
    out = np.full_like(symbols, 255)
    rans.decode(segments, out)
    assert np.array_equal(out, symbols)


@given(bytes_to_code())
def test_frequencies_are_of_what_occurs(symbols: np.ndarray) -> None:
    counts = rans.counted(symbols)
    assert counts.tolist() == np.bincount(symbols, minlength=256).tolist()
    frequencies = rans.normalized(counts)
    assert frequencies.sum() == rans.TOTAL
    assert bool(((frequencies > 0) >= (counts > 0)).all())


@pytest.mark.parametrize("spread", [0.3, 3.0, 20.0])
def test_rans_comes_near_to_the_entropy(spread: float) -> None:
    symbols = np.random.default_rng(0).normal(128, spread, 200_000).round().clip(0, 255).astype(np.uint8)
    spent = 8 * sum(one.nbytes for one in rans.encode(symbols, 1 << 17)) / len(symbols)
    aside = 8 * 2 * rans.ASIDE / len(symbols)
    assert symbol_entropy(symbols) < spent < 1.005 * symbol_entropy(symbols) + aside + 0.005


@pytest.mark.parametrize("codec", [QSGD(), QSGD(bits=8), QSGD(bits=3), TernGrad(), Ternary(), ChunkedTopK()], ids=str)
def test_streams_are_all_but_units_and_levels(codec: Codec) -> None:
    numel = 3 * 20480
    wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8)
    codec.encode(
        torch.randn(numel, generator=torch.Generator().manual_seed(0)), wire, new_draw(0), codec.workspace(numel)
    )
    (part,) = codec.parts(numel)
    floats = sum(field.count for field in part.fields if field.dtype == "<f4")
    pieces = entropy_coding.streams(codec, wire.numpy(), numel)
    assert sum(map(len, pieces)) == len(wire) - 4 * floats * part.records
    whole, by_block = (entropy_coding.entropy_of(codec, wire.numpy(), numel, by_block=way) for way in (False, True))
    assert by_block <= whole < 8 * len(wire) / numel


def test_entropy_of_codes_that_are_known() -> None:
    """Half of the elements are at the norm of their block and half at zero: one bit each, and a unit for each block."""
    x = torch.zeros(4096)
    x[::2] = 1.0
    codec = QSGD(bits=4, rounding="nearest")
    wire = torch.empty(codec.wire_bytes(4096), dtype=torch.uint8)
    codec.encode(x, wire, new_draw(0), codec.workspace(4096))
    for by_block in (False, True):
        assert entropy_coding.entropy_of(codec, wire.numpy(), 4096, by_block) == pytest.approx(1 + 32 / 512)


def test_a_coder_pays_below_the_rate_at_which_both_take_as_long() -> None:
    ns = {"encode": 0.5, "mean of 2": 0.5, "mean of 8": 2.0, "zstd encode": 1.0, "zstd decode": 1.0}
    found = entropy_coding.against({"bits": 4.0, "coded_bits": {"zstd": 3.0}, "ns": ns}, "zstd")
    assert found["pays_below"] == {2: pytest.approx(5e8), 8: pytest.approx(7e9 / 8)}  # a bit in 2 ns, and 7 in 8
    plain, coded = found["plain"], found["coded"]
    assert (plain["100mbit", 2], coded["100mbit", 2]) == pytest.approx((41.0, 33.0))
    assert (plain["1gbit", 2], coded["1gbit", 2]) == pytest.approx((5.0, 6.0))
    assert (plain["1gbit", 8], coded["1gbit", 8]) == pytest.approx((30.5, 31.5))
    assert (plain["100mbit", 8], coded["100mbit", 8]) == pytest.approx((282.5, 220.5))
    nothing = entropy_coding.against({"bits": 4.0, "coded_bits": {"zstd": 4.0}, "ns": ns}, "zstd")
    assert nothing["pays_below"] == {2: 0.0, 8: 0.0}
    assert nothing["plain"] == nothing["coded"]


def test_other_commands_need_no_numba() -> None:
    """A report on a machine whose numba is broken begins with the command line."""
    code = "import sys; sys.modules['numba'] = None; import gradwire.benchmarks.cli as cli; cli.main(['--help'])"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)


def test_entropy_in_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "entropy.json"
    line = "entropy --inputs gaussian laplace --numel 70000 --repeats 2 --warmup 1"
    assert cli.main([*line.split(), "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert [(row["gradients"], row["label"]) for row in document["rows"]] == [
        (name, entropy_coding.label(codec)) for name in ("gaussian", "laplace") for codec in entropy_coding.CODECS
    ]
    for row in document["rows"]:
        assert {"rANS", "zlib"} <= set(row["coded_bits"])
        assert all(0 < bits <= row["bits"] for bits in row["coded_bits"].values())
        assert all(len(times) == 2 for times in row["times_s"].values())
    assert "Coders behind codecs" in capsys.readouterr().out
