"""Kernels get addresses: what lies behind them is checked where a tensor becomes one."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire import LocalUpdates, OneBit, TopK, sparse_all_reduce
from gradwire.compress import CODECS, Codec, backends, new_draw
from gradwire.compress.backends import entries_for, use_backend
from gradwire.compress.backends.memory import ScratchPool, address, rows_at
from gradwire.compress.backends.sparse import EntryKernels, Pieces, whole_rows
from gradwire.compress.formats.entries import index_bytes
from gradwire.optim import DistributedLion
from lacking import no_default_device
from ranks import Pool
from torch import Tensor
from training import batch, digest, perceptron, wrap

K = 8
REFUSED = r"without gaps|have gaps"


def odd(x: Tensor) -> list[Tensor]:
    """The same numbers, as no kernel may read them: a column, at one address, of another type."""
    return [torch.stack([x, x], dim=-1)[..., 0], x[..., :1].expand(x.shape), x.double()]


def test_a_thread_works_in_memory_of_its_own() -> None:
    """Collectives may run on the caller's thread beside those that run behind it."""
    pool, cpu = ScratchPool(), torch.device("cpu")

    def used() -> int:
        with pool.open(100, cpu) as outer, pool.open(50, cpu) as inner:
            assert outer.data_ptr() != inner.data_ptr()
            return outer.data_ptr()

    mine = used()
    with ThreadPoolExecutor(1) as thread:
        theirs = thread.submit(used).result()
        assert (theirs == mine, used(), thread.submit(used).result()) == (False, mine, theirs)
        with pool.open(100, cpu) as kept:
            thread.submit(pool.clear).result()  # a new bucket's, from any thread
            with pool.open(100, cpu) as other:
                assert kept.data_ptr() != other.data_ptr()


def operations(kernels: EntryKernels) -> dict[str, tuple[Any, list[Tensor]]]:
    """Each of the kernels that take tensors by address, and sound tensors for it."""
    indices, values = torch.arange(0, 80, 10, dtype=torch.int32), torch.ones(K)
    residual, wire = torch.zeros(100), torch.zeros(index_bytes(100, K), dtype=torch.uint8)
    value_wire, pieces = torch.zeros(2 * K, dtype=torch.uint8), Pieces([K], [0], [100])
    out = torch.zeros(K, dtype=torch.int32), torch.zeros(K)
    half = torch.bfloat16
    return {
        "pack indices": (lambda i, w: kernels.pack_indices(i, None, 0, 100, w), [indices, wire]),
        "unpack indices": (lambda w, i: kernels.unpack_indices(w, 0, 100, None, i), [wire[None], indices[None]]),
        "pack values": (
            lambda v, w, i, r: kernels.pack_values(v, half, w, i, None, r),
            [values, value_wire, indices, residual],
        ),
        "unpack values": (lambda w, v: kernels.unpack_values(w, half, v), [value_wire[None], values[None]]),
        "pack index pieces": (lambda i, w: kernels.pack_index_pieces(i, pieces, w), [indices, wire]),
        "unpack index pieces": (lambda w, i: kernels.unpack_index_pieces(w, pieces, i), [wire, indices]),
        "pack value pieces": (
            lambda v, w: kernels.pack_value_pieces(v, pieces, half, w),
            [values, value_wire],
        ),
        "unpack value pieces": (lambda w, v: kernels.unpack_value_pieces(w, pieces, half, v), [value_wire, values]),
        "put back": (lambda i, v, k, r: kernels.put_back((i, v), k, r), [indices, values, indices[:2], residual]),
        "merge": (lambda i, v, a, b: kernels.merge(i, v, (0, K), 0, 100, a, b), [indices, values, *out]),
    }


@pytest.mark.parametrize("name", operations(None))  # type: ignore[arg-type]
def test_no_kernel_takes_memory_with_gaps(name: str) -> None:
    with use_backend("cpu"):
        run, sound = operations(entries_for(torch.device("cpu")))[name]
    run(*sound)
    for place, tensor in enumerate(sound):
        for wrong in odd(tensor):
            with pytest.raises(ValueError, match=REFUSED):
                run(*sound[:place], wrong, *sound[place + 1 :])


def test_what_has_no_gaps_has_an_address() -> None:
    x = torch.arange(12.0)
    assert address(x[3:]) == x.data_ptr() + 12
    assert address(x.view(3, 4)) == x.data_ptr()
    assert address(x.as_strided((1,), (7,))) == x.data_ptr()  # of one element the stride means nothing
    assert rows_at(x.view(3, 4)[:, :2]) == (x.data_ptr(), 16)
    assert rows_at(x.as_strided((1, 4), (5, 1))) == (x.data_ptr(), 20)
    assert rows_at(x.as_strided((3, 1), (2, 9))) == (x.data_ptr(), 8)
    assert whole_rows(x.as_strided((3, 1), (2, 9))).tolist() == [0, 1, 2, 3, 4]


def test_what_has_none_is_refused() -> None:
    x = torch.arange(12.0)
    for wrong in (x[::2], x[:1].expand(5), x.view(3, 4)[:, :2], torch.complex(x, x).conj().imag[:1]):
        with pytest.raises(ValueError, match=REFUSED):
            address(wrong)
    with pytest.raises(ValueError, match=r"of torch\.int32"):
        address(x, torch.int32)
    for rows in (x.view(3, 4).T, x.view(3, 4)[:, ::2], x[:1].expand(3, 4)):
        with pytest.raises(ValueError, match=REFUSED):
            rows_at(rows)
        with pytest.raises(ValueError, match=REFUSED):
            whole_rows(rows)


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_what_is_made_for_kernels_does_not_depend_on_the_default_dtype(
    backend: str, codec: Codec, double_by_default: None
) -> None:
    cpu, n = torch.device("cpu"), 3000
    grad = torch.randn(n, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    found = []
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        with use_backend(backend):
            codec.kernels(cpu).prepare(codec, torch.float32, cpu)
            workspace, wire = codec.workspace(n, cpu), torch.zeros(codec.wire_bytes(n), dtype=torch.uint8)
            residual, out = torch.zeros_like(grad), torch.zeros_like(grad)
            codec.encode_feedback(grad, residual, wire, new_draw(0), workspace)
            codec.decode_mean([part[None] for part in wire.split(codec.part_bytes(n))], out, workspace)
            found.append((wire, residual, out))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


#: What is on the default device unless another is given, and of the default dtype but for those behind.
MAKERS = {"empty", "eye", "full", "linspace", "ones", "rand", "randn", "scalar_tensor", "zeros", "arange", "tensor"}
WITH_INTEGERS = ("torch.arange", "torch.tensor")


def made_by_default(source: str) -> list[str]:
    """Calls that make a tensor of the default dtype, or on the default device."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in MAKERS:
            continue
        name, text, words = ast.unparse(call.func), ast.unparse(call), {word.arg for word in call.keywords}
        if name != f"torch.{call.func.attr}":
            continue
        any_dtype = re.match(r"torch\.empty\(0\b|.*device='meta'\)$", text)
        typed = "dtype" in words or any_dtype or (name in WITH_INTEGERS and not re.match(r"torch\.\w+\(\d*\.", text))
        if not typed or "device" not in words:
            found.append(text)
    return found


def test_nothing_is_made_of_the_default_dtype_or_on_the_default_device() -> None:
    root = Path(backends.__file__).parents[2]
    folders = ("compress", "hooks", "optim", "trainers")
    sources = {path: path.read_text("utf-8") for folder in folders for path in (root / folder).rglob("*.py")}
    assert len(sources) > 100
    assert not {str(path): found for path, source in sources.items() if (found := made_by_default(source))}
    bad = ["torch.zeros(3, device='cpu')", "torch.tensor(1.0, device='cpu')", "torch.empty(0)", "torch.tensor([n])"]
    assert made_by_default("; ".join(bad)) == bad


def by_default_elsewhere(rank: int, device: str | None) -> list[str]:
    """What a state, periodic updates, an optimizer and a sparse sum give where torch makes tensors on this device."""
    models = [perceptron() for _ in range(3)]
    batches = [batch(rank, step, models[0]) for step in range(4)]
    indices, values = torch.arange(0, 50, 3 + rank), torch.arange(0.0, 50.0, 3 + rank)
    torch.set_default_device(device)
    try:
        ddp, state = wrap(models[0], TopK(0.1), exchange="split")
        optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1)
        updates = LocalUpdates(models[1], optimizer, OneBit(), every=2, exchange="two_pass")
        lion = DistributedLion(models[2].parameters())
        for x in batches:
            for model in (ddp, *models[1:]):
                model(x).square().mean().backward()
            optimizer.step()
            updates.step()
            lion.step()
        found = [p.grad for p in models[0].parameters() if p.grad is not None]
        found += [p.detach() for model in models[1:] for p in model.parameters()]
        found += sparse_all_reduce(indices, values, 50, algorithm="split")
        for each in (state, updates, lion):
            each.load_state_dict(each.consolidated_state_dict())
            each.close()
    finally:
        no_default_device()
    return [digest([x]) for x in found]


def test_the_default_device_does_not_matter(ranks: Callable[[int], Pool]) -> None:
    """ "meta" in the place of "cuda": where anything would read it, it raises, or the process ends."""
    usual = ranks(2).run(by_default_elsewhere, None)
    assert ranks(2).run(by_default_elsewhere, "meta") == usual


def test_nothing_else_takes_an_address() -> None:
    folder = Path(backends.__file__).parent
    takers = {path.name for path in folder.rglob("*.py") if re.search(r"\.data_ptr\(", path.read_text())}
    assert takers == {"memory.py"}
