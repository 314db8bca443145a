"""The CUDA backend: what the contract of codecs does not say of it. Its kernels run in the emulator's checked build."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from emulated import EmulatedDevice, emulated_gpu
from gradwire.compress import CODECS, ChunkedTopK, Codec, PowerSGD, RandomK, Threshold, TopK, new_draw
from gradwire.compress.backends import Kernels, Workspace, use_backend
from gradwire.compress.backends.cuda.entries import Union
from gradwire.compress.backends.cuda.runtime.device import (
    DEVICES,
    FULL,
    SHARES,
    THREADS,
    Argument,
    Device,
    Function,
    full_waves,
)
from gradwire.compress.codec import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import equal, rows_of
from strategies import KINDS, gradient, kernels_of, same
from torch import Tensor

CPU = torch.device("cpu")
SPARSE = TopK(indices="plain"), TopK(0.3, values=torch.int8), TopK(indices="plain", values=torch.bfloat16)
DTYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int8: "int8"}
every_codec = pytest.mark.parametrize("codec", [*CODECS, *SPARSE], ids=str)
#: Those whose kernels are all ours, and not torch's.
OWN = [codec for codec in CODECS if not isinstance(codec, RandomK | Threshold)]
every_own_codec = pytest.mark.parametrize("codec", [*OWN, *SPARSE], ids=str)


@every_own_codec
@pytest.mark.parametrize(
    "options",
    [
        {"sm_count": 1, "order": "reverse"},
        {"sm_count": 1, "order": "random", "seed": 7, "preempt": 5},
        {"sm_count": 40, "order": "random", "seed": 8, "resident": 3},
    ],
    ids=str,
)
def test_neither_the_grid_nor_the_order_of_threads_changes_a_byte(codec: Codec, options: dict) -> None:
    """Many blocks on a tiny grid, so that every kernel has to stride; and a grid that is larger than the work."""
    with emulated_gpu(EmulatedDevice(**options)) as device:
        assert equal(codec, 20_001, ("normal", "wide"))
        assert equal(codec, 5, ("normal", "wide"))
    assert device.launches


def selections(dtypes: Sequence[torch.dtype]) -> st.SearchStrategy[TopK | Threshold]:
    share = st.sampled_from([0.0003, 0.01, 0.1, 0.5, 1.0])
    threshold = st.sampled_from([0.0, 1e-3, 0.5, 2.0, 1e30])
    made = st.builds(Threshold, threshold, share, st.sampled_from(dtypes))
    return st.builds(TopK, share, values=st.sampled_from(dtypes)) | made | made.map(lambda codec: codec.raw_entries)


@settings(max_examples=50, deadline=None)
@given(
    codec=selections(list(DTYPE_NAMES)),
    numel=st.sampled_from([1, 300, 2047, 2048, 2049, 9001, 20_011]),
    kinds=st.lists(st.sampled_from(tuple(KINDS)), min_size=2, max_size=5),
    dtype=st.sampled_from(DTYPES),
)
def test_a_selection_is_exact_whatever_the_predicted_threshold(
    codec: Codec, numel: int, kinds: list[str], dtype: torch.dtype
) -> None:
    """A threshold that is too high finds fewer than k; one that is too low finds more than there is room for."""
    assert equal(codec, numel, kinds, dtype)


@settings(max_examples=12, deadline=None)
@given(
    k=st.integers(1, 300) | st.integers(1, 1024),
    chunk=st.sampled_from([512, 4096, 65536]),
    values=st.sampled_from([2, 4, torch.int8, torch.bfloat16, torch.float32]),
    numel=st.sampled_from([100, 4096, 9001]),
)
def test_a_chunk_may_have_any_number_of_entries(k: int, chunk: int, values: int | torch.dtype, numel: int) -> None:
    """Those of a thread need not fill a byte."""
    assert equal(ChunkedTopK(min(k, chunk), chunk, values=values), numel, ["normal", "ties"], torch.float32)


@pytest.mark.parametrize("architecture", [None, 90], ids=str)
@pytest.mark.parametrize("places", [[], [0], [3, 100_000], [2048, 4095, 4096], [139_999, 140_000]], ids=str)
@pytest.mark.parametrize("indices", ["packed", "plain"])
def test_a_sum_of_wires_with_hardly_an_entry(places: list[int], architecture: int | None, indices: str) -> None:
    """An entry begins its tile of the output, and all those since the one before, which may be thousands. Here packed
    indices have more low bits than a tile's have."""
    codec, numel = TopK(1e-4, indices=indices), 140_001
    x = torch.zeros(numel)
    x[places] = 1.5
    with use_backend("reference"):
        wire = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8)
        codec.encode(x, wire, new_draw(0), codec.workspace(numel))
    out = torch.ones(numel)
    with emulated_gpu(EmulatedDevice(architecture=architecture)) as device, use_backend("cuda"):
        workspace = codec.workspace(numel)
        codec.decode_mean(rows_of(codec, numel, [wire] * 65), out, workspace)
    assert "topk_mean_f32" in device.launches
    assert same(out, x)
    assert workspace.status.tolist() == [0, 0]


@every_own_codec
def test_a_call_is_a_fixed_number_of_launches_and_keeps_its_memory(codec: Codec) -> None:
    numel = 6001
    with emulated_gpu(EmulatedDevice()) as device, use_backend("cuda"):
        workspace, residual = codec.workspace(numel), torch.zeros(numel)
        wire = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8)
        rows = [part.repeat(3, 1) for part in wire.split(codec.part_bytes(numel))]
        out = torch.empty(numel)
        seen = []
        for kind in ("normal", "zeros", "huge", "normal"):
            before = len(device.launches)
            codec.encode_feedback(gradient(kind, numel, 1), residual, wire, new_draw(1), workspace)
            codec.decode_mean(rows, out, workspace)
            memory = {name: at.data_ptr() for name, at in workspace.buffers.items() if isinstance(at, Tensor)}
            seen.append((len(device.launches) - before, memory))
    assert all(this == seen[0] for this in seen)
    packed = isinstance(codec, TopK) and codec.values != torch.float32  # a launch packs values, and none unpacks them
    expected = 2 if codec.block_size else 6
    if isinstance(codec, PowerSGD):  # eight passes, the draw among them, and 2 for each rank
        expected = 8 + 2 * 3
    assert seen[0][0] == expected + packed


@pytest.mark.parametrize("feedback", [False, True], ids=["encode", "encode_feedback"])
@pytest.mark.parametrize("numel", [1, 2049, 6001])
@pytest.mark.parametrize("codec", [TopK(), TopK(0.0001), TopK(1.0), TopK(0.3, values=torch.bfloat16), *SPARSE], ids=str)
def test_a_selection_is_five_launches_at_most(codec: TopK, numel: int, feedback: bool) -> None:
    """The first step, which knows no threshold, those for which it is right, too high and too low, and ties."""
    expected = ["topk_collect_f32", "topk_digits_f32", "topk_write_f32"]
    expected += ["entries_pack_indices"] * (codec.indices == "packed")
    expected += [f"entries_pack_{DTYPE_NAMES[codec.values]}"] * (codec.values != torch.float32)
    assert len(expected) <= 5
    with emulated_gpu(EmulatedDevice(check=False)) as device, use_backend("cuda"):
        workspace, residual = codec.workspace(numel), torch.zeros(numel)
        wire = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8)
        for step, kind in enumerate(("normal", "normal", "ties", "tiny", "zeros", "huge", "not finite")):
            device.launches.clear()
            if feedback:
                codec.encode_feedback(gradient(kind, numel, step), residual, wire, new_draw(1), workspace)
            else:
                codec.encode(gradient(kind, numel, step), wire, new_draw(1), workspace)
            assert device.launches == expected, kind


class Recorder(Device):
    """Takes every launch and runs none."""

    sm_count = 132

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int, Sequence[Argument]]] = []
        self.files: set[str] = set()

    def function(self, file: str, name: str) -> Function:
        self.files.add(file)
        return lambda grid, block, args: self.calls.append((name, grid, block, args))

    def wave(self, file: str, name: str, threads: int = THREADS) -> int:
        return 6 * self.sm_count


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    before, device = DEVICES[CPU], Recorder()
    DEVICES[CPU] = device
    yield device
    DEVICES[CPU] = before


@every_codec
def test_prepare_compiles_every_file_that_is_run(recorder: Recorder, codec: Codec) -> None:
    kernels, numel = kernels_of("cuda", codec), 100
    kernels.prepare(codec, torch.float32, CPU)
    prepared = set(recorder.files)
    workspace, wire = kernels.workspace(codec, numel, CPU), torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8)
    kernels.encode(codec, torch.zeros(numel), wire, new_draw(0), workspace)
    kernels.decode_mean(codec, rows_of(codec, numel, [wire]), torch.zeros(numel), workspace)
    assert recorder.files == prepared


@pytest.mark.parametrize("numel", [1, 2**31 - 1, 2**31, 2**33 + 1])
def test_launches_are_legal_above_31_bits(recorder: Recorder, numel: int) -> None:
    """A peer rounded the number of elements in float32, and lost a block at 67108865."""
    for codec in CODECS:
        if codec.block_size is None:
            continue
        kernels: Kernels = kernels_of("cuda", codec)
        x = torch.empty(1).expand(numel)  # as long as it says, in four bytes
        wire = torch.empty(1, dtype=torch.uint8).expand(codec.wire_bytes(numel))
        kernels.encode(codec, x, wire, new_draw(0), Workspace.on("cpu"))
        kernels.decode_add(codec, wire, x, 1.0, Workspace.on("cpu"))
    for name, grid, block, args in recorder.calls:
        assert 1 <= grid < 2**31, name
        assert 1 <= block <= 1024
        lengths = [a for a in args if isinstance(a, np.int64)]
        assert lengths[0] == numel, name
        assert not any(isinstance(a, int | np.int32) and a == numel for a in args if numel > 2**31 - 2)


@settings(max_examples=300, deadline=None)
@given(
    turns=st.integers(1, 20_000) | st.integers(1, 2**40),
    multiprocessors=st.integers(1, 200),
    each=st.integers(1, 32),
)
def test_the_grid_covers_the_work_in_full_waves(turns: int, multiprocessors: int, each: int) -> None:
    """All blocks take equally many turns, but for the last; and the last wave of blocks is hardly ever half empty."""
    wave, most = multiprocessors * each, SHARES * multiprocessors
    blocks = full_waves(turns, wave, most)
    rounds, waves = -(-turns // blocks), -(-blocks // wave)
    assert 1 <= blocks <= min(turns, most)
    assert (blocks - 1) * rounds < turns <= blocks * rounds
    assert waves == 1 or blocks >= FULL * waves * wave
    assert waves > 1 or turns <= wave or 2 * blocks > wave, "more than half of the only wave"


def test_top_k_refuses_what_32_bits_cannot_index() -> None:
    with use_backend("cuda"), pytest.raises(ValueError, match=r"2147483648 elements.*below 2\^31"):
        TopK(1e-9).workspace(2**31)
    with pytest.raises(ValueError, match=r"2147483648 elements.*fewer than 2\^31"):
        Union(2**31, 1, CPU)


@settings(max_examples=30, deadline=None)
@given(
    numel=st.sampled_from([1, 31, 32, 33, 8191, 8193, 20_000]),
    sets=st.integers(1, 4),
    share=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_union(numel: int, sets: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    chosen = [np.flatnonzero(rng.random(numel) < share).astype(np.int32) for _ in range(sets)]
    expected = np.unique(np.concatenate(chosen)) if chosen else np.zeros(0, np.int32)
    union = Union(numel, numel, CPU)
    for _ in range(2):  # it can be used again
        union([torch.from_numpy(c) for c in chosen] + [torch.tensor([numel], dtype=torch.int32)])
        assert int(union.size) == len(expected)
        assert union.indices[: len(expected)].tolist() == expected.tolist()
    assert union.status.tolist() == [2, 0]


def test_a_union_that_is_too_large_says_so_and_stays_in_its_memory() -> None:
    union = Union(100, 3, CPU)
    union([torch.arange(10, dtype=torch.int32)])
    assert int(union.size) == 10
    assert union.indices.tolist() == [0, 1, 2]
