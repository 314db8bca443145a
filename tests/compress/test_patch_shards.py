"""Patches from shards: a reader of whole tensors has the trainer's bits, from all parts of a patch or from none."""

from __future__ import annotations

import io
import math
import random
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradwire import PatchError, PatchReader, PatchWriter
from gradwire.compress.patches import patch
from hypothesis import given, settings
from hypothesis import strategies as st
from lacking import UNEVEN, needs_hook
from often import by_time
from ranks import on_ranks
from test_patches import State, bits_of, drawn_states, opened, refuses, sealed, small_sections, two_states, with_header
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

MESHES = ((1,), (2,), (3,), (4,), (2, 2), (1, 3), (4, 1), (2, 2, 2))


@dataclass
class Mesh:
    shape: tuple[int, ...]
    at: tuple[int, ...]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.at

    @property
    def mesh(self) -> Tensor:
        return torch.arange(math.prod(self.shape)).reshape(self.shape)

    def _get_root_mesh(self) -> Mesh:
        return self


@dataclass
class Sharded:
    """A DTensor as far as patches look at it, without a process group."""

    whole: Tensor
    device_mesh: Mesh
    placements: Sequence[Any]

    def __post_init__(self) -> None:
        self.shape, self.dtype, mine = self.whole.shape, self.whole.dtype, self.whole
        inner = [k for k, p in enumerate(self.placements) if isinstance(p, Shard) and not hasattr(p, "split_factor")]
        outer = [k for k, p in enumerate(self.placements) if isinstance(p, _StridedShard)]
        for k in inner + outer:
            p, n = self.placements[k], self.device_mesh.shape[k]
            if k in outer and not inner:
                pieces = [chunked(piece, n, p.dim) for piece in chunked(mine, p.split_factor, p.dim)]
                chunks = [torch.cat(own, p.dim) for own in zip(*pieces, strict=True)]
            else:
                chunks = chunked(mine, n, p.dim)
            mine = chunks[self.device_mesh.at[k]]
        self.mine = mine

    def to_local(self) -> Tensor:
        return self.mine


def chunked(tensor: Tensor, count: int, dim: int) -> list[Tensor]:
    """torch.chunk, with the empty ones."""
    chunks = list(tensor.chunk(count, dim))
    return chunks + [tensor.narrow(dim, 0, 0)] * (count - len(chunks))


def drawn_placements(rng: np.random.Generator, dims: int, mesh: tuple[int, ...]) -> list[Any] | None:
    """For each dimension of the mesh; None for a plain tensor."""
    fate = rng.random()
    if fate < 0.15:
        return None
    if dims and fate < 0.3:  # FSDP over tensor parallelism, or rows dealt in turns
        dim, outer = int(rng.integers(dims)), _StridedShard
        if len(mesh) > 1:
            inner = math.prod(mesh[1:])
            if inner == 1:
                return [Shard(dim), Replicate()]
            return [outer(dim, split_factor=inner), *[Shard(dim)] * (len(mesh) - 1)]
        return [outer(dim, split_factor=int(rng.integers(2, 4)))]
    return [Shard(int(rng.integers(dims))) if dims and rng.random() < 0.7 else Replicate() for _ in mesh]


def on_each(state: State, mesh: tuple[int, ...], seed: int) -> list[dict[str, Any]]:
    """A state, as each rank of a mesh has it. Tensors in the same memory stay so."""
    found = []
    for at in np.ndindex(*mesh):
        rng, mine, own = np.random.default_rng(seed), {}, {}
        for name, tensor in state.items():
            placements = drawn_placements(rng, tensor.ndim, mesh)
            if id(tensor) not in own:
                own[id(tensor)] = tensor if placements is None else Sharded(tensor, Mesh(mesh, at), placements)
            mine[name] = own[id(tensor)]
        found.append(mine)
    return found


def strided(tensor: Tensor, rng: np.random.Generator) -> Tensor:
    """A copy, perhaps with its dimensions in another order in memory."""
    if tensor.ndim == 4 and rng.random() < 0.5:
        return tensor.clone(memory_format=torch.channels_last)
    order = list(rng.permutation(tensor.ndim))
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(list(np.argsort(order)))


def writers(count: int, **options: Any) -> list[PatchWriter]:
    return [PatchWriter(part=(rank, count), **options) for rank in range(count)]


def parts_of(made: list[PatchWriter], states: list[dict[str, Any]], **options: Any) -> list[bytes]:
    return [writer.write(state, **options) for writer, state in zip(made, states, strict=True)]


def two_sharded_states() -> tuple[State, State, list[dict[str, Any]], list[dict[str, Any]]]:
    """Two states, and what three ranks have of each: "a" and "b" in rows, one rank without a row of "c"."""
    old, new = ({**state, "c": torch.full((2, 2), 5.0 + k)} for k, state in enumerate(two_states()))
    of_old, of_new = (
        [{n: Sharded(t, Mesh((3,), (r,)), [Shard(0)]) for n, t in state.items()} for r in range(3)]
        for state in (old, new)
    )
    return old, new, of_old, of_new


@settings(max_examples=by_time(12, 300))
@given(
    st.integers(0, 10**6),
    st.sampled_from(MESHES),
    st.integers(1, 4),
    st.sampled_from([50, 1 << 22]),
    st.sampled_from([None, 2]),
    st.booleans(),
)
def test_parts_give_the_bits_of_one_process(
    seed: int, mesh: tuple[int, ...], count: int, words: int, full_every: int | None, on_host: bool
) -> None:
    states, rng = drawn_states(seed, count), np.random.default_rng(seed)
    states = [{name: strided(t, rng) if t.ndim > 1 and name in s else t for name, t in s.items()} for s in states]
    alone, made = PatchWriter(full_every=full_every), writers(int(np.prod(mesh)), full_every=full_every)
    of_one, of_parts, streamed = PatchReader(), PatchReader(), PatchReader()
    with small_sections(words), mock.patch.object(patch, "on_host", return_value=on_host):
        for number, state in enumerate(states):
            parts = parts_of(made, on_each(state, mesh, seed + number // 2))
            of_one.apply(alone.write(state))
            random.Random(seed).shuffle(parts)
            if not number:  # begin with weights of their layout
                of_parts.state.update({name: strided(tensor, rng) for name, tensor in state.items()})
            where = {name: tensor.data_ptr() for name, tensor in of_parts.state.items()}
            assert of_parts.apply(parts)
            assert streamed.apply(io.BytesIO(b"".join(parts)))
            assert bits_of(state) == bits_of(of_one.state) == bits_of(of_parts.state) == bits_of(streamed.state)
            assert of_parts.fingerprint == alone.fingerprint
            of_parts.verify()
            if not number:
                assert where == {name: tensor.data_ptr() for name, tensor in of_parts.state.items()}


# ---- DTensors


class Net(nn.Module):
    """Rows that no number of ranks divides, a tied matrix, buffers of other dtypes, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(7, 6)
        self.up, self.down = nn.Linear(6, 10, dtype=torch.float32), nn.Linear(10, 6, bias=False)
        self.norm, self.scale = nn.BatchNorm1d(6), nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(5).half())

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.scale
        return self.head(self.norm(self.down(torch.relu(self.up(x)))))


@needs_hook  # FSDP2 runs on CPUs from torch 2.7 on
@on_ranks(4, 3)
def test_fsdp_s_shards_make_patches_of_the_whole_model(rank: int) -> None:
    world = dist.get_world_size()
    shapes = {"fsdp": (world,)} | ({"hsdp": (2, 2)} if world == 4 else {})
    shapes |= {"tensor parallel": (2, 2)} if world == 4 and UNEVEN else {}
    for kind, shape in shapes.items():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])
        model = Net()
        if kind == "tensor parallel":
            parallelize_module(model, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        sharding = mesh["outer"] if kind == "tensor parallel" else mesh
        for layer in () if kind == "tensor parallel" else (model.up, model.down):
            fully_shard(layer, mesh=sharding)
        fully_shard(model, mesh=sharding)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        writer, served = PatchWriter(part=(rank, world)), Net()
        reader = PatchReader(served.state_dict())
        for step in range(3):
            torch.manual_seed(step)  # the same batch, so that plain buffers are equal
            model(torch.randint(7, (5,))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with mock.patch.object(DTensor, "redistribute", side_effect=AssertionError("gathered")):
                part = writer.write(model.state_dict())
            parts: list[bytes] = [b""] * world
            dist.all_gather_object(parts, part)
            reader.apply(parts)
            whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}
            assert bits_of(served.state_dict()) == bits_of(whole), (kind, step)
        if kind == "hsdp":
            assert [len(p) < 300 for p in parts] == [False, False, True, True], list(map(len, parts))
        parts = [b""] * world
        dist.all_gather_object(parts, PatchWriter(part=(rank, world)).write({"a": torch.ones(1 + rank)}))
        with pytest.raises(PatchError, match=r"part 1 is of .*model \w+, part 0 of .*model"):
            reader.apply(parts)


@on_ranks(4)
def test_dtensors_of_every_placement(rank: int) -> None:
    meshes = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    layouts: Any = [(Shard(0),), (Shard(1),), (Replicate(),)], [
        (Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(1)),
    ]  # fmt: skip
    for shape in ((5, 3), (9, 4), *[(1, 1), (0, 4)] * UNEVEN):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        state: dict[str, Any] = {"scalar": distribute_tensor(torch.tensor(3.0), meshes[0], [Replicate()])}
        for mesh, of_mesh in zip(meshes, layouts, strict=True):
            for placements in of_mesh:
                state[str(placements)] = distribute_tensor(whole.clone(), mesh, placements)
        parts: list[bytes] = [b""] * 4
        dist.all_gather_object(parts, PatchWriter(part=(rank, 4)).write(state))
        reader = PatchReader()
        reader.apply(parts)
        assert reader.state.pop("scalar") == 3
        assert all(torch.equal(found, whole) for found in reader.state.values())
        assert reader.state.keys() == state.keys() - {"scalar"}
    with pytest.raises(ValueError, match=r"w is placed as .*Partial.*: redistribute it to Shard and Replicate"):
        PatchWriter(part=(rank, 4)).write({"w": DTensor.from_local(torch.ones(2), meshes[0], [Partial()])})
    short = DTensor.from_local(
        torch.ones(2), meshes[0], [Shard(0)], shape=torch.Size([9]), stride=(1,), run_check=False
    )
    with pytest.raises(ValueError, match=r"w has a shard of shape \(2,\), which is not that of \(9,\)"):
        PatchWriter(part=(rank, 4)).write({"w": short})
    with pytest.raises(TypeError, match=r"scalar is a DTensor, no plain tensor: PatchWriter\(part=\(rank, number"):
        PatchWriter().write({"scalar": state["scalar"]})


# ---- all or nothing


def altered(data: bytes, **changes: object) -> bytes:
    """A part whose header says something else, under a right digest."""
    made = with_header(data, **changes)
    return sealed(made[:7] + data[7:8] + made[8:-32])


Case = Callable[[list[bytes], list[bytes], list[bytes]], list[bytes]]
CASES: dict[str, tuple[Case, str]] = {
    "missing": (lambda first, now, _: now[:1], r"2 of the 3 parts of version .1. are missing, of ranks 1, 2: wait"),
    "none": (lambda *_: [], "there are no parts: pass those of all ranks"),
    "twice": (lambda first, now, _: [*now, now[1]], "part 1 of version '1' is there twice: pass each part once"),
    "of another version": (
        lambda first, now, later: [now[0], later[1], now[2]],
        r"part 1 is of 3 parts, version '2', an incremental patch, model \w+, part 0 of 3 parts, version '1'",
    ),
    "a snapshot among": (lambda first, now, _: [first[0], *now[1:]], r"part 1 is of .*, part 0 of .*a full snapshot"),
    "later": (lambda first, now, later: later, "of version 2 leads from the weights .*: apply the patches in between"),
    "corrupted": (
        lambda first, now, _: [now[0], now[1][:-40] + bytes([now[1][-40] ^ 1]) + now[1][-39:], now[2]],
        "number 1 of the parts has another BLAKE2b than when it was written: ask for it again",
    ),
    "cut": (lambda first, now, _: [*now[:2], now[2][:50]], r"number 2 of the parts has 50 bytes and should have \d+"),
    "a whole patch": (
        lambda first, now, _: [*now, PatchWriter().write({"x": torch.ones(1)})],
        "a patch is no part of a patch: ask for the part again",
    ),
    "of no tensor": (
        lambda first, now, _: [*now[:2], altered(now[2], whole={})],
        r"\['a@2000'.* is no box of a part",
    ),
    "elsewhere": (
        lambda _, now, __: [altered(part, whole=opened(part)[0]["whole"] | {"a": ["bfloat16", [9]]}) for part in now],
        r"the parts do not fill a, \[9\]: all ranks of its mesh must write parts of one state",
    ),
    "of two models": (
        lambda first, now, _: [altered(now[0], whole=opened(now[0])[0]["whole"] | {"b": ["float32", [8]]}), *now[1:]],
        r"b is float32 \[7, 3\] in a part, \('float32', \[8\]\) in another",
    ),
    "from another base": (
        lambda first, now, _: [altered(now[0], base="0" * 64), *now[1:]],
        "part 0 of version 1 leads from the weights 0000.*ask for a full snapshot",
    ),
    "to another result": (
        lambda first, now, _: [*now[:2], altered(now[2], result="0" * 64)],
        "part 2 of version 1 would make the weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_parts_that_do_not_belong_together_change_nothing(case: str) -> None:
    old, new, of_old, of_new = two_sharded_states()
    made = writers(3)
    first, now, later = (parts_of(made, states) for states in (of_old, of_new, of_old))
    reader, (call, message) = PatchReader(), CASES[case]
    reader.apply(first)
    before = bits_of(reader.state)
    with pytest.raises(PatchError, match=message):
        reader.apply(call(first, now, later))
    assert bits_of(reader.state) == before
    reader.verify()
    reader.apply(now)
    with pytest.raises(PatchError, match="apply the patches in between, or ask for a full snapshot"):
        reader.apply(now)
    assert bits_of(reader.state) == bits_of(new)
    reader.apply(later)
    assert bits_of(reader.state) == bits_of(old)


def test_readers_of_another_model_are_told_the_tensor() -> None:
    old, _, of_old, of_new = two_sharded_states()
    made = [PatchWriter(state, part=(rank, 3)) for rank, state in enumerate(of_old)]
    parts = parts_of(made, of_new, version="run 7, step 1")
    for change, message in (
        (
            {"b": torch.ones(3, 7)},
            r"b is \('float32', \[7, 3\]\) in the patch, and \('float32', \[3, 7\]\) in the reader",
        ),
        ({"c": torch.ones(2, 2).half()}, r"c is \('float32', \[2, 2\]\) in the patch, and \('float16', \[2, 2\]\)"),
        ({"d": torch.ones(1)}, "d is not in the writer's model: pass a state of the same model"),
        ({"c": None}, r"c is .* in the patch, and not there in the reader: pass a state of the same model"),
    ):
        state = {name: t.clone() for name, t in {**old, **change}.items() if t is not None}
        reader = PatchReader(state)
        before = bits_of(reader.state)
        with pytest.raises(PatchError, match=message):
            reader.apply(parts)
        assert bits_of(reader.state) == before
    reader = PatchReader({name: tensor.clone() for name, tensor in old.items()})
    with pytest.raises(PatchError, match="1 of the 3 parts of version 'run 7, step 1' are missing, of ranks 2"):
        reader.apply(io.BytesIO(b"".join(parts[:2])))
    assert reader.apply(io.BytesIO(b"".join(parts)))
    reader.state["a"].view(torch.int16)[0] ^= 1
    with pytest.raises(PatchError, match=r"the weights are .* and were"):
        reader.verify()


def test_tensors_that_share_memory_here_must_not_differ_across_parts() -> None:
    memory, two = torch.zeros(6), torch.arange(6.0)
    ranks = [{"x": Sharded(two, Mesh((2,), (r,)), [Shard(0)]), "y": two + 1} for r in range(2)]
    alike = [
        {"x": Sharded(two, Mesh((2,), (r,)), [Shard(0)]), "y": Sharded(two + 1, Mesh((2,), (r,)), [Shard(0)])}
        for r in range(2)
    ]
    for states, message in (
        (ranks, "y and x share memory here, and have other shards"),
        (alike, "y@0 and x@0 share memory here, and differ"),
    ):
        reader = PatchReader({"x": memory, "y": memory})
        with pytest.raises(PatchError, match=message):
            reader.apply(parts_of(writers(2), states))
        assert not memory.any()
    twice = [{"x": state["x"], "y": state["x"]} for state in ranks]
    reader.apply(parts_of(writers(2), twice))
    assert torch.equal(memory, two)


@settings(max_examples=by_time(40, 1000))
@given(st.integers(0, 10**9))
def test_damaged_parts_under_a_right_digest_are_refused_or_harmless(seed: int) -> None:
    rng = np.random.default_rng(seed)
    old, new, of_old, of_new = two_sharded_states()
    full = bool(rng.integers(2))
    parts = parts_of([PatchWriter(state, part=(rank, 3)) for rank, state in enumerate(of_old)], of_new, full=full)
    chosen = int(rng.integers(3))
    header, _ = opened(parts[chosen])
    if rng.random() < 0.5:
        field = rng.choice(["part", "version", "whole", "gone", "tensors", "base"])
        value: Any = [
            None,
            5,
            [],
            {},
            "x",
            [0, 1 << 60],
            [["a@0", "bfloat16", [1 << 40], "new"]],
            {"a": ["int8", [-1]]},
        ]
        parts[chosen] = altered(parts[chosen], **{field: value[rng.integers(len(value))]})
        header = header if field == "gone" else {}
    else:
        data = bytearray(parts[chosen][:-32])
        data[int(rng.integers(patch.PREFIX.size, len(data)))] ^= 1 << int(rng.integers(8))
        parts[chosen] = sealed(bytes(data))
    reader = PatchReader({name: tensor.clone() for name, tensor in old.items()})
    if not refuses(reader, parts):  # type: ignore[arg-type]
        assert bits_of(reader.state) == bits_of(new)


def test_only_changes_leave_a_device() -> None:
    old, new = ({"a": state["a"].view(300, 100), "b": state["b"]} for state in two_states(30_000, 0.01))
    copied: list[int] = []
    host = Tensor.cpu

    def counting(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in on_host:
            copied.append(tensor.numel())
        return host(tensor)

    alone = PatchWriter(old)
    with mock.patch.object(patch, "on_host", return_value=False):
        device = PatchWriter(old)
        assert device._weights is not None
        on_host = {tensor.data_ptr() for tensor in device._weights.tensors.values()}  # read in place
        for state in (new, old):
            expected = alone.write(state)
            copied.clear()
            with mock.patch.object(Tensor, "cpu", counting):
                assert device.write(state) == expected
            assert 0 < sum(copied) < 2000


def test_what_parts_are_is_checked() -> None:
    for part in ((2, 2), (-1, 2)):
        with pytest.raises(ValueError, match=r"part is .*: give \(rank, number of ranks\)"):
            PatchWriter(part=part)
    with pytest.raises(ValueError, match="version 'x' is that of a part: give PatchWriter part="):
        PatchWriter().write({}, version="x")


def test_a_server_follows_a_trainer_between_requests(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "follow_trainer.py"
    states = [{n: t + k for n, t in runpy.run_path(str(script))["new_model"]().state_dict().items()} for k in range(4)]
    asks = ((0, 1), (1, 0), (1, 1), (3, 1))  # steps and ranks after whose part a request comes; the last sees two steps
    made, expected = writers(2), []
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    server: Any
    with subprocess.Popen([sys.executable, str(script), str(tmp_path)], **pipes) as server:
        for step, state in enumerate(states):
            ranks = [{n: Sharded(t, Mesh((2,), (r,)), [Shard(0)]) for n, t in state.items()} for r in range(2)]
            for rank, part in enumerate(parts_of(made, ranks)):
                (tmp_path / f"{step:06}.{rank}.part").write_bytes(part)
                model = runpy.run_path(str(script))["new_model"]()
                model.load_state_dict(states[step if rank or not step else step - 1])
                if (step, rank) in asks:  # before the first step is there, weights are random
                    server.stdin.write("1 2 3 4\n")
                    server.stdin.flush()
                    answer = model(torch.tensor([1.0, 2, 3, 4])).item()
                    expected.append((f"step {step if rank else step - 1}: {answer:.6f}\n", server.stdout.readline()))
        server.stdin.close()
        said = server.stderr.read()
    assert [right for right, _ in expected] == [found for _, found in expected], said
    assert "still at step 0: 1 of the 2 parts of version '1' are missing, of ranks 1: wait for them" in said
