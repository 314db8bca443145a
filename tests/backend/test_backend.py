"""The backend "gradwire" of torch.distributed: laws of what it encodes, and all else equal to the inner backend."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import re
import socket
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from gradwire import QSGD, Cast, Codec, Identity, OneBit, TernGrad, TopK
from gradwire.hooks import backend
from gradwire.hooks.backend import BackendOptions, statistics
from hypothesis import given, settings
from hypothesis import strategies as st
from lacking import needs
from pages import blocks
from ranks import Pool, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

NEW = hasattr(dist.Backend, "_ensure_backend_registered")
on_new_torch = needs("backends in Python, which 2.15 has", NEW)
PAGE = Path(__file__).parents[2] / "docs" / "backend.md"
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
CODECS: dict[str, Codec] = {
    "identity": Identity(),
    "qsgd8": QSGD(bits=8),
    "qsgd4": QSGD(bits=4),
    "terngrad": TernGrad(clip=float("inf")),
    "bfloat16": Cast(torch.bfloat16),
}


@cache
def group(codec: str = "qsgd8") -> Any:
    """A group of all ranks that encodes all that it can, made once in each process."""
    return new_group(BackendOptions(CODECS[codec], all_gather=CODECS[codec], min_numel=1))


def new_group(options: BackendOptions | None = None, **others: Any) -> Any:
    backend.register()  # as the entry point does, where the package is installed
    return dist.new_group(backend="gradwire", pg_options=options, **others)


def given_to(rank: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def reduce(x: Tensor, group: Any, asynchronous: bool) -> None:
    work = dist.all_reduce(x, group=group, async_op=asynchronous)
    if work is not None:
        work.wait()


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"codec": TopK()}, "keeps no residuals"),
        ({"all_gather": OneBit()}, "keeps no residuals"),
        ({"codec": QSGD(rounding="nearest")}, "keeps no residuals"),
        ({"codec": "qsgd8"}, "expected a codec"),
        ({"min_numel": -1}, "min_numel=-1"),
        ({"seed": True}, "seed=True"),
    ],
)
def test_wrong_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        BackendOptions(**options)


def test_options_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    assert BackendOptions.from_environment() == BackendOptions()
    monkeypatch.setenv(backend.VARIABLE, "qsgd4, min_numel=7,all_gather=bfloat16,seed=3")
    expected = BackendOptions(QSGD(bits=4), Cast(torch.bfloat16), 7, 3)
    assert BackendOptions.from_environment() == expected
    for wrong in ("qsgd5", "min_numel=many", "codecs=qsgd4"):
        monkeypatch.setenv(backend.VARIABLE, wrong)
        with pytest.raises(ValueError, match=wrong):
            BackendOptions.from_environment()


def test_torch_finds_it() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    found = project["entry-points"]["torch.distributed.backends"]
    assert found == dict.fromkeys(backend.INNER, "gradwire.hooks.backend:register")


@pytest.mark.skipif(NEW, reason="this torch has backends in Python")
@on_ranks(2)
def test_an_older_torch_says_what_it_needs(rank: int) -> None:
    with pytest.raises(RuntimeError, match=r"needs PyTorch 2\.15"):
        dist.new_group(backend="gradwire")


# -- what is encoded -------------------------------------------------------------------------------------------------


def reduced(rank: int, kind: str, codec: str, op: str, rows: int, dtype: torch.dtype, form: str) -> tuple[Any, ...]:
    """One collective by the backend; with `Identity` it must be the float32 sum in rank order, cast once."""
    mine, world = group(codec), dist.get_world_size()
    numel = rows * world
    all_given = [given_to(r, numel, dtype) for r in range(world)]
    x, total = all_given[rank].clone(), all_given[0].float()
    for other in all_given[1:]:
        total = total + other.float()
    exact = total if op == "sum" else total * torch.tensor(1.0 / world)
    before, asynchronous, which = statistics(mine)["encoded"], "async" in form, SUM if op == "sum" else AVG
    if kind == "all_reduce":
        out = x.view(world, rows).t() if "strided" in form else x  # the same elements, in another order
        work = dist.all_reduce(out, which, mine, asynchronous)
        result = x
    elif kind == "reduce_scatter":
        result = torch.empty(rows, dtype=dtype)
        lists = "strided" in form
        call: Callable[..., Any] = dist.reduce_scatter if lists else dist.reduce_scatter_tensor
        work = call(result, list(x.view(world, rows)) if lists else x, which, mine, asynchronous)
        exact = exact.view(world, rows)[rank]
    else:
        result = torch.empty(numel * world, dtype=dtype)
        if "strided" in form:
            work = dist.all_gather(list(result.view(world, numel)), x, mine, asynchronous)
        else:
            work = dist.all_gather_into_tensor(result, x, mine, asynchronous)
        exact = torch.cat(all_given).float()
    if work is not None:
        work.wait()
    assert statistics(mine)["encoded"] == before + 1
    if codec == "identity":
        assert torch.equal(result, exact.to(dtype))
    error = float((result.float() - exact).norm() / sum(x.float().norm() for x in all_given))
    same = () if kind == "reduce_scatter" else (result.view(torch.uint8).numpy().tobytes(),)
    return error, *same


@on_new_torch
@pytest.mark.parametrize("world", [2, 3])
@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]),
    codec=st.sampled_from(sorted(CODECS)),
    op=st.sampled_from(["sum", "avg"]),
    rows=st.sampled_from([1, 2, 255, 512, 700, 3001]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    form=st.sampled_from(["", "async", "strided", "async strided"]),
)
def test_what_is_encoded(ranks: Any, world: int, **drawn: Any) -> None:
    """Near the exact result, alike on all ranks, and with `Identity` the sum in rank order, in any form."""
    found = ranks(world).run(reduced, *drawn.values())
    assert len({same for _, *rest in found for same in rest}) <= 1, "replicas differ"
    bounds = {"identity": 0.004, "qsgd8": 0.05, "bfloat16": 0.01, "qsgd4": 1.0, "terngrad": 6.0}
    assert max(error for error, *_ in found) <= bounds[drawn["codec"]]


@on_new_torch
@pytest.mark.parametrize("codec", ["qsgd4", "qsgd8", "terngrad"])
@on_ranks(3)
def test_the_error_averages_out(rank: int, codec: str) -> None:
    x, mine, total = given_to(rank, 2048), group(codec), torch.zeros(2048)
    exact = sum(given_to(r, 2048) for r in range(3))
    for calls in range(1, 101):
        y = x.clone()
        dist.all_reduce(y, group=mine)
        total += y
        if calls == 1:
            once = float((y - exact).norm())
    assert float((total / 100 - exact).norm()) < 0.15 * once  # a tenth is expected


@on_new_torch
@on_ranks(2)
def test_many_in_flight(rank: int) -> None:
    """More than there are exchanges of one length, and more lengths than are kept."""
    mine, works = group("identity"), []
    for turn in range(200):
        x = torch.full((200 + turn // 5,), float(rank + turn))
        works.append((turn, x, dist.all_reduce(x, group=mine, async_op=True)))
    for turn, x, work in works:
        work.wait()
        assert x.unique().tolist() == [2.0 * turn + 1]


# -- what is not -----------------------------------------------------------------------------------------------------


def collectives(rank: int, world: int) -> dict[str, Callable[[Any], Any]]:
    """Every collective of torch.distributed, by its name and what tells its calls apart: a function of the group that
    returns all that the collective returns or writes."""
    floats, ints = given_to(rank, 12), torch.arange(100_000) * (rank + 1)
    after, before, big = (rank + 1) % world, (rank - 1) % world, given_to(rank, 100_000)
    told: Any = [{"rank": rank}]

    def written(call: Callable[..., Any], *tensors: Tensor, kept: bool = True, **options: Any) -> Callable[[Any], Any]:
        def run(group: Any) -> Any:
            mine = [tensor.clone() for tensor in tensors]
            call(*mine, group=group, **options)
            return mine if kept else []

        return run

    def listed(call: Callable[..., Any], outs: int, given: int) -> Callable[[Any], Any]:
        def run(group: Any) -> Any:
            result, x = list(torch.zeros(outs, 6)), list(given_to(rank, 6 * given).view(given, 6))
            call(result if outs > 1 else result[0], x if given > 1 else x[0], group=group)
            return result

        return run

    def rooted(call: Callable[..., Any], one: Any, many: Any, root: int = 1) -> Callable[[Any], Any]:
        def run(group: Any) -> Any:
            single, several = copy.deepcopy((one, many))
            call(single, several if rank == root else None, root, group=group)
            return single, several

        return run

    def passed(send: Callable[..., Any], receive: Callable[..., Any], what: Any, place: Any) -> Callable[[Any], Any]:
        def run(group: Any) -> Any:
            got = copy.deepcopy(place)
            calls = [lambda: send(what, after, group=group), lambda: receive(got, before, group=group)]
            for work in [call() for call in (calls if rank == 0 or send is dist.isend else calls[::-1])]:
                if isinstance(work, dist.Work):
                    work.wait()
            return got

        return run

    def pairs(group: Any) -> Any:
        got = torch.zeros(12)
        sends = [dist.P2POp(dist.isend, floats, after, group, 3), dist.P2POp(dist.irecv, got, before, group, 3)]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        return got

    def coalesced(group: Any) -> Any:
        mine = [big.clone(), floats[:5].clone()]
        dist.all_reduce_coalesced(mine, group=group)
        return mine

    def gathered(group: Any) -> Any:
        rows = [[torch.zeros(12), torch.zeros(5)] for _ in range(world)]
        dist.all_gather_coalesced(rows, [floats, floats[:5]], group=group)
        return rows

    def sparse(group: Any) -> Any:
        x = torch.sparse_coo_tensor(torch.tensor([[rank, 5]]), torch.ones(2), (12,), check_invariants=True)
        dist.all_reduce(x, group=group)
        return x.coalesce().to_dense()

    def objects(call: Callable[..., Any], *arguments: Any) -> Callable[[Any], Any]:
        def run(group: Any) -> Any:
            mine = copy.deepcopy(arguments)
            call(*mine, group=group)
            return mine

        return run

    scattered, none = [floats + r for r in range(world)], [None] * world
    ops = [("SUM", x) for x in (floats, ints, big, big.double())]
    ops += [("AVG", x) for x in (floats, big)] + [(op, x) for op in ("PRODUCT", "MIN", "MAX") for x in (ints, big)]
    ops += [(op, ints) for op in ("BAND", "BOR", "BXOR")]
    rows, halves = torch.zeros(world * 100_000), given_to(rank, 50_000 * world)
    return {
        **{f"all_reduce {op} {x.dtype} {x.numel()}": written(dist.all_reduce, x, op=getattr(dist.ReduceOp, op))
           for op, x in ops},
        "all_reduce premultiplied": written(dist.all_reduce, big, op=dist._make_nccl_premul_sum(2.0)),
        "all_reduce sparse": sparse, "all_reduce_coalesced": coalesced, "all_gather_coalesced": gathered,
        "broadcast": written(dist.broadcast, big, src=1),
        "reduce": written(dist.reduce, big, dst=1, kept=rank == 1),
        "all_gather": listed(dist.all_gather, world, 1), "all_to_all": listed(dist.all_to_all, world, world),
        "reduce_scatter": listed(dist.reduce_scatter, 1, world),
        "all_to_all_single": written(dist.all_to_all_single, torch.zeros(world * 2), given_to(rank, world * 2)),
        **{name: written(getattr(dist, name), rows, big) for name in ("all_gather_into_tensor", "all_gather_single")},
        **{name: written(getattr(dist, name), torch.zeros(50_000), halves)
           for name in ("reduce_scatter_tensor", "reduce_scatter_single")},
        "reduce_scatter_tensor wrong": written(dist.reduce_scatter_tensor, torch.zeros(50_000), halves[1:]),
        "all_gather_into_tensor wrong": written(dist.all_gather_into_tensor, rows[1:], big),
        **{name: rooted(getattr(dist, name), floats, torch.zeros(12 * world))
           for name in ("gather_single", "gather_into_tensor")},
        "gather": rooted(dist.gather, floats, [torch.zeros(12)] * world),
        "scatter": rooted(dist.scatter, floats, scattered),
        "gather_object": rooted(dist.gather_object, told, none),
        "scatter_object_list": rooted(dist.scatter_object_list, [None], told * world),
        "all_gather_object": objects(dist.all_gather_object, none, told),
        "broadcast_object_list": objects(dist.broadcast_object_list, told, 1),
        "send recv": passed(dist.send, dist.recv, floats, torch.zeros(12)),
        "isend irecv": passed(dist.isend, dist.irecv, floats, torch.zeros(12)),
        "batch_isend_irecv": pairs,
        "barrier": lambda group: dist.barrier(group=group),
        "monitored_barrier": lambda group: dist.monitored_barrier(group=group, timeout=timedelta(seconds=20)),
    }  # fmt: skip


def outcome(call: Callable[[Any], Any], group: Any) -> tuple[str, Any]:
    try:
        return "returned", call(group)
    except (RuntimeError, ValueError) as error:
        return "raised", str(error).splitlines()[0]


def page() -> dict[str, str]:
    """By collective, the first word of docs/backend.md on it: encoded, or unchanged."""
    rows = re.findall(r"^\| (`.*?) \| (\w+)", PAGE.read_text("utf-8"), re.MULTILINE)
    return {name: says for names, says in rows for name in re.findall(r"`(\w+)`", names)}


def collective_functions() -> set[str]:
    """Names in torch.distributed of functions that move data, or wait, within a group."""
    others = re.compile("get_|new_|destroy_|set_timeout|shrink_group")
    found = {"batch_isend_irecv"}
    for name in dist.distributed_c10d.__all__:
        function = getattr(dist.distributed_c10d, name)
        if inspect.isfunction(function) and "group" in inspect.signature(function).parameters:
            found.add(name)
    return {name for name in found if not others.match(name)}


@on_new_torch
@pytest.mark.filterwarnings("ignore")  # of names that are going
def test_the_page_has_every_collective() -> None:
    assert set(page()) == collective_functions()
    tried = {name for key in collectives(0, 2) for name in key.split() if name in page()}
    assert set(page()) - tried == {"send_object_list", "recv_object_list"}  # by send and recv
    assert set(page().values()) == {"encoded", "unchanged"}


@on_new_torch
@pytest.mark.filterwarnings("ignore")
@on_ranks(2, 3)
def test_everything_else_is_the_inner_backends(rank: int) -> None:
    """Equal bits and equal errors where nothing is encoded, and with `Identity`: of two ranks, any sum is exact."""
    warnings.simplefilter("ignore", FutureWarning)  # a rank's process has filters of its own
    mine, exact, plain = new_group(BackendOptions(codec=None)), group("identity"), dist.new_group(backend="gloo")
    says = page()
    for key, call in collectives(rank, dist.get_world_size()).items():
        expected, got, before = outcome(call, plain), outcome(call, mine), statistics(exact)["encoded"]
        encoded = outcome(call, exact)
        name, *rest = key.split()
        for found, slack in ((got, 0.0), (encoded, 1e-5)):  # Gloo adds in another order
            assert found[0] == expected[0], (key, expected, found)
            if "object" in name:
                assert found == expected, key
            elif found[0] == "returned":
                torch.testing.assert_close(found[1], expected[1], rtol=slack, atol=slack, equal_nan=True, msg=key)
        if not rest or (rest[0] in ("SUM", "AVG") and rest[1] == "torch.float32"):
            assert (statistics(exact)["encoded"] > before) == (says[name] == "encoded"), key
        else:
            assert statistics(exact)["encoded"] == before, key
    assert statistics(mine)["encoded"] == 0
    usual = new_group()
    for numel in (65_535, 65_536):
        dist.all_reduce(torch.ones(numel), group=usual)
    dist.all_gather_into_tensor(torch.empty(100_000 * dist.get_world_size()), torch.ones(100_000), usual)
    counts = statistics(usual)
    assert (counts["encoded"], counts["unchanged"]) == (1, 2)
    assert 65_536 < counts["bytes_sent"] < 1.1 * 65_536
    assert mine._get_backend(torch.device("cpu")).name() == "gradwire+gloo"
    with pytest.raises(TypeError, match="its backend is 'gloo', not gradwire"):
        statistics(plain)


@on_new_torch
@on_ranks(2)
def test_with_all_of_torchs_checks(rank: int) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL, where torch puts its own wrapper around the backend."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        mine = new_group(BackendOptions(Identity(), min_numel=1))
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    gc.collect()
    x = torch.full((100,), float(rank))
    dist.all_reduce(x, group=mine)
    assert x.unique().tolist() == [1.0]
    assert statistics(mine)["encoded"] == 1


# -- errors ----------------------------------------------------------------------------------------------------------


@on_new_torch
@on_ranks(2, 3)
def test_unlike_calls_raise_on_every_rank(rank: int) -> None:
    last = dist.get_world_size() - 1
    for asynchronous in (False, True):
        mine = new_group(BackendOptions(min_numel=1))
        x = torch.ones(300 if rank == last else 200)
        with pytest.raises(ValueError, match=r"ranks disagree.* of [23]00 float32.* of [23]00 float32.*same order"):
            reduce(x, mine, asynchronous)
        with pytest.raises(RuntimeError, match="ranks disagree"):
            dist.all_reduce(torch.ones(200), group=mine)
    other = BackendOptions(QSGD(bits=4 if rank == last else 8), min_numel=1)
    with pytest.raises(ValueError, match=r"bits=[48].*bits=[48].*equal options"):
        dist.all_reduce(torch.ones(200), group=new_group(other))


def survive(rank: int, victim: int) -> str:
    mine = group("qsgd8")
    dist.all_reduce(torch.ones(5000), group=mine)
    if rank == victim:
        os._exit(3)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"is not responding|stopped after an earlier error") as caught:
            reduce(torch.ones(5000), mine, rank == 0)
    return str(caught.value)


@on_new_torch
def test_a_rank_dies() -> None:
    with Pool(3) as pool:
        found = pool.run(survive, 1, may_die=(1,), within=40)
    assert found[0]
    assert found[2]


@on_new_torch
@on_ranks(2)
def test_a_wait_ends(rank: int) -> None:
    mine = new_group(BackendOptions(min_numel=1), timeout=timedelta(seconds=1))
    if rank:
        with pytest.raises(RuntimeError, match="not responding"):
            dist.all_reduce(torch.ones(500), group=mine)
    dist.barrier()


SCRIPT = """
{page}
import torch
from gradwire.hooks.backend import statistics
work = dist.all_reduce(torch.ones(100_000), async_op=True)
assert statistics()["encoded"] == 1
"""


@on_new_torch
def test_the_page_runs_and_a_process_may_end_as_it_likes() -> None:
    """Without `destroy_process_group`, and with a collective in flight."""
    (block,) = (block for block in blocks(PAGE) if block.language == "python")
    page = block.text if torch.cuda.is_available() else block.text.replace(",cuda:gradwire+nccl", "")
    with socket.create_server(("127.0.0.1", 0)) as free:
        own = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, "-c", SCRIPT.format(page=page)]
    processes = [subprocess.Popen(command, env=os.environ | own | {"RANK": str(rank)}) for rank in range(2)]
    try:
        assert [process.wait(100) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()


# -- trainers --------------------------------------------------------------------------------------------------------


def train(model: nn.Module, rank: int, steps: int = 12, optimizers: Any = torch.optim.SGD) -> list[float]:
    x = given_to(rank, 64 * 32).view(64, 32)
    target = x[:, :8] * 2 - x[:, 8:16]
    optimizer, losses = optimizers(model.parameters(), lr=0.3), []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


@on_new_torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@on_ranks(4)
def test_native_hybrid_sharding(rank: int, compiled: bool) -> bytes:
    """Hybrid sharding by `fully_shard` alone: its all-reduce between replicas is encoded, and they stay equal. So are
    sums of DTensors on this mesh."""
    backend.register()
    options: Any = {"replicate": ("gradwire", BackendOptions(min_numel=1))}  # torch's types have no own options
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"), backend_override=options)
    model: Any = fully_shard(net(), mesh=mesh)
    trained: Any = torch.compile(model, backend="eager") if compiled else model
    losses = train(trained, rank)
    assert losses[-1] < 0.7 * losses[0]
    assert statistics(mesh.get_group("replicate"))["encoded"] == len(losses)
    summand = DTensor.from_local(given_to(rank, 4096), mesh["replicate"], [Partial()])
    total, exact = summand.full_tensor(), given_to(rank % 2, 4096) + given_to(rank % 2 + 2, 4096)
    assert 0 < float((total - exact).norm() / exact.norm()) < 0.05
    return b"".join(p.full_tensor().detach().numpy().tobytes() for p in model.parameters())


@on_new_torch
@on_ranks(2)
def test_ddp_with_zero_and_compiled_graphs(rank: int) -> bytes:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns before torch 2.15

    mine = group("qsgd8")
    model = nn.parallel.DistributedDataParallel(net(), process_group=mine)
    before = statistics(mine)["encoded"]
    sharded = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD, process_group=mine)
    losses = train(model, rank, optimizers=sharded)
    assert losses[-1] < 0.7 * losses[0]
    assert statistics(mine)["encoded"] >= before + len(losses)

    def doubled(x: Tensor) -> Tensor:
        return functional.wait_tensor(functional.all_reduce(2 * x, "sum", mine.group_name))

    exact = 2 * (given_to(0, 4096) + given_to(1, 4096))
    out = torch.compile(doubled, backend="eager", fullgraph=True)(given_to(rank, 4096))
    assert float((out - exact).norm() / exact.norm()) < 0.05
    both = functional.all_reduce_coalesced([given_to(rank, 4096), given_to(rank, 300).double()], "avg", mine)
    assert float((both[0] - exact / 4).norm() / exact.norm()) < 0.05
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters()) + out.numpy().tobytes()
