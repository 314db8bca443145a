"""The names and signatures that Horovod scripts rely on, and how a process finds out who it is."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gradwire.hooks.horovod as hvd
import pytest
import torch
import torch.distributed as dist
from gradwire.hooks.comm.sockets import listen
from gradwire.hooks.horovod.consensus.addresses import addresses
from gradwire.hooks.horovod.consensus.coordinator import Coordinator
from gradwire.hooks.horovod.consensus.negotiation import REMOVE, Negotiator, request_bytes
from gradwire.hooks.horovod.runtime import launch
from gradwire.hooks.horovod.runtime.operations import AllReduce, Sum
from hypothesis import given
from hypothesis import strategies as st
from loopback import every_loopback
from ranks import Ranks
from test_horovod_operations import equal, raised

DTYPES = [torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float16, torch.float32, torch.complex128]

PS = "process_set=PS"
SCALES = "prescale_factor=1.0, postscale_factor=1.0"
REDUCE = f"average=None, name=None, op=None, {SCALES}, {PS}"
SCATTER = f"op=0, {PS}, {SCALES}"
#: Every function, with the defaults as Horovod 0.28.1 has them. PS is the global process set, NONE Compression.none.
SIGNATURES = {
    "init": "comm=None, process_sets=None",
    "DistributedOptimizer": "optimizer, named_parameters=None, compression=NONE, backward_passes_per_step=1, op=0, "
    f"gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, {PS}",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": f"obj, root_rank=0, name=None, {PS}",
    "allgather_object": f"obj, name=None, {PS}",
    "allreduce": f"tensor, average=None, name=None, compression=NONE, op=None, {SCALES}, {PS}",
    "allreduce_": f"tensor, {REDUCE}",
    "allreduce_async": f"tensor, {REDUCE}",
    "allreduce_async_": f"tensor, {REDUCE}",
    "grouped_allreduce": f"tensors, average=None, name=None, compression=NONE, op=None, {SCALES}, {PS}",
    "grouped_allreduce_": f"tensors, {REDUCE}",
    "grouped_allreduce_async": f"tensors, {REDUCE}",
    "grouped_allreduce_async_": f"tensors, {REDUCE}",
    "sparse_allreduce_async": f"tensor, name, op, {PS}",
    "allgather": f"tensor, name=None, {PS}",
    "allgather_async": f"tensor, name=None, {PS}",
    "grouped_allgather": f"tensors, name=None, {PS}",
    "grouped_allgather_async": f"tensors, name=None, {PS}",
    "broadcast": f"tensor, root_rank, name=None, {PS}",
    "broadcast_": f"tensor, root_rank, name=None, {PS}",
    "broadcast_async": f"tensor, root_rank, name=None, {PS}",
    "broadcast_async_": f"tensor, root_rank, name=None, {PS}",
    "alltoall": f"tensor, splits=None, name=None, {PS}",
    "alltoall_async": f"tensor, splits=None, name=None, {PS}",
    "reducescatter": f"tensor, name=None, compression=NONE, {SCATTER}",
    "reducescatter_async": f"tensor, name=None, {SCATTER}",
    "grouped_reducescatter": f"tensors, name=None, compression=NONE, {SCATTER}",
    "grouped_reducescatter_async": f"tensors, name=None, {SCATTER}",
    "poll": "handle",
    "synchronize": "handle",
    "barrier": PS,
    "join": "device=-1",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "ProcessSet": "ranks",
    "start_timeline": "file_path, mark_cycles=False",
    "elastic.run": "function",
    "elastic.TorchState": "model=None, optimizer=None, **kwargs",
    "elastic.TorchState.register_reset_callbacks": "self, callbacks",
    "elastic.ElasticSampler": "dataset, shuffle=True, seed=0",
    "elastic.ElasticSampler.set_epoch": "self, epoch",
    "elastic.ElasticSampler.record_batch": "self, batch_idx, batch_size",
    "elastic.ElasticSampler.load_state_dict": "self, state_dict",
    "Compression.fp16.compress": "tensor",
    "Compression.fp16.decompress": "tensor, ctx",
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
    **dict.fromkeys(
        [
            "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size",
            "nccl_built", "mpi_built", "mpi_enabled", "gloo_built", "gloo_enabled", "ddl_built", "ccl_built",
            "cuda_built", "rocm_built", "mpi_threads_supported", "stop_timeline",
        ],
        "",
    ),
    **{f"elastic.TorchState.{name}": "self" for name in
       ("save", "restore", "sync", "commit", "check_host_updates", "on_reset")},
    **{f"elastic.ElasticSampler.{name}": "self" for name in ("state_dict", "reset")},
    **{f"ProcessSet.{name}": "self" for name in ("size", "rank", "included")},
}  # fmt: skip


def named(path: str) -> Any:
    found: Any = hvd
    for name in path.split("."):
        found = getattr(found, name)
    return found


def text_of(path: str, function: Any) -> str:
    words = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("device", "dtype", "bias") and path != "join":
            continue  # what newer versions of torch have added to BatchNorm
        default = parameter.default
        value = {id(hvd.global_process_set): "PS", id(hvd.Compression.none): "NONE"}.get(id(default), repr(default))
        star = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        words.append(f"{star}{parameter.name}" + ("" if default is parameter.empty else f"={value}"))
    return ", ".join(words)


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path: str) -> None:
    assert text_of(path, named(path)) == SIGNATURES[path]
    assert inspect.getdoc(named(path)) or path.startswith("Compression")


def test_constants_and_classes() -> None:
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == tuple(range(6))
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert hvd.global_process_set.process_set_id == 0
    assert type(hvd.nccl_built()) is int
    built = [
        *(f"{name}_built" for name in ("mpi", "gloo", "ddl", "ccl", "cuda", "rocm")),
        "mpi_enabled",
        "gloo_enabled",
    ]
    assert all(type(named(name)()) is bool for name in built)
    assert hvd.gloo_built()
    assert not hvd.mpi_enabled()
    assert all(hasattr(hvd, name) for name in hvd.__all__)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("mpi_ops", "allreduce synchronize poll rank size Average ProcessSet global_process_set HorovodInternalError"),
        ("compression", "Compression Compressor NoneCompressor FP16Compressor"),
        ("functions", "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object"),
        ("optimizer", "DistributedOptimizer"),
        ("sync_batch_norm", "SyncBatchNorm"),
        ("elastic", "run TorchState ElasticSampler"),
        ("elastic.state", "TorchState"),
        ("elastic.sampler", "ElasticSampler"),
    ],
)
def test_submodules(module: str, names: str) -> None:
    imported = importlib.import_module(f"gradwire.hooks.horovod.{module}")
    assert all(hasattr(imported, name) for name in names.split())


def test_before_init() -> None:
    questions = (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size)
    for function in (*questions, hvd.mpi_threads_supported, lambda: hvd.allreduce(torch.ones(1)), hvd.join):
        assert raised(ValueError, function) == "Horovod has not been initialized; use hvd.init()."
    assert not hvd.is_initialized()
    hvd.shutdown()  # harmless


# -- who am I ----------------------------------------------------------------------------------------------------------


def test_the_order_of_launchers() -> None:
    pmi = {"PMI_RANK": "1", "PMI_SIZE": "9"}
    ompi = {**pmi, **{f"OMPI_COMM_WORLD_{k}": v for k, v in
                      {"RANK": "2", "SIZE": "8", "LOCAL_RANK": "0", "LOCAL_SIZE": "4"}.items()}}  # fmt: skip
    torchrun = {**ompi, "RANK": "3", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    horovod = {**torchrun, **{f"HOROVOD_{k}": v for k, v in
                              {"RANK": "4", "SIZE": "6", "LOCAL_RANK": "1", "LOCAL_SIZE": "3", "CROSS_RANK": "1",
                               "CROSS_SIZE": "2"}.items()}}  # fmt: skip
    read = launch.read_environment
    assert read(horovod) == launch.Launch(4, 6, 1, 3, 1, 2, "HOROVOD")
    assert read(torchrun) == launch.Launch(3, 7, 1, 2, source="torchrun")
    assert read(ompi) == launch.Launch(2, 8, 0, 4, source="mpirun")
    assert read(pmi) == launch.Launch(1, 9, source="PMI")
    assert read({}) == launch.Launch(0, 1)
    assert "RANK=5" in raised(ValueError, lambda: read({"RANK": "5", "WORLD_SIZE": "5"}))
    assert "'x'" in raised(ValueError, lambda: read({"RANK": "x", "WORLD_SIZE": "5"}))


SCRIPT = """
import sys, torch
import gradwire.hooks.horovod as hvd
hvd.init()
sums = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).tolist()
sys.stdout.write(f"{hvd.rank()} {hvd.size()} {hvd.local_rank()} {hvd.local_size()} {sums}\\n")
"""


@pytest.mark.parametrize("launcher", ["mpirun", "PMI"])
def test_mpirun_needs_no_master_address(tmp_path: Path, launcher: str) -> None:
    clean = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "RANK", "WORLD_SIZE")}
    processes = []
    for rank in range(2):
        env = {**clean, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        if launcher == "mpirun":
            values = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
            env |= {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}
            env["PMIX_NAMESPACE"] = "prterun-host-1234@1"
        else:
            env |= {"PMI_RANK": str(rank), "PMI_SIZE": "2"}
        processes.append(subprocess.Popen([sys.executable, "-c", SCRIPT], env=env, text=True, stdout=subprocess.PIPE))
    lines = sorted(process.communicate(timeout=60)[0] for process in processes)
    assert lines == ["0 2 0 2 [3.0]\n", "1 2 1 2 [3.0]\n"]
    assert all(process.returncode == 0 for process in processes)
    assert not list(tmp_path.rglob("*1234*"))  # nothing is left behind


def test_several_hosts_without_an_address_are_told_what_to_set() -> None:
    where = launch.Launch(1, 4, local_rank=1, local_size=2, source="mpirun")
    assert "-x MASTER_ADDR" in raised(RuntimeError, lambda: launch.open_store(where, {}))


@pytest.mark.parametrize(
    ("host", "port", "place"),
    [
        ("head", None, "tcp://head:29500"),
        ("head", "", "tcp://head:29500"),
        ("fd00::1", "1234", "tcp://[fd00::1]:1234"),
    ],
)
def test_meeting_at_an_address_leaves_the_environment_alone(
    monkeypatch: pytest.MonkeyPatch, host: str, port: str | None, place: str
) -> None:
    """The first process that the script starts would meet there, too."""
    before, asked = dict(os.environ), []

    def rendezvous(url: str, *arguments: object, **options: object) -> Iterator[tuple[Any, int, int]]:
        asked.append(url)
        yield dist.HashStore(), 0, 2

    monkeypatch.setattr(launch.dist, "rendezvous", rendezvous)
    launch.open_store(launch.Launch(0, 2), {"MASTER_ADDR": host} | ({} if port is None else {"MASTER_PORT": port}))
    assert asked == [place]
    assert dict(os.environ) == before
    with pytest.raises(ValueError, match="MASTER_PORT='x'"):
        launch.open_store(launch.Launch(0, 2), {"MASTER_ADDR": host, "MASTER_PORT": "x"})


def test_ranks_meet_where_the_mapping_says() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(lambda rank: launch.open_store(launch.Launch(rank, 2), where), range(2))
    first.set("from", "first")
    assert second.get("from") == b"first"


def test_the_rendezvous_folder_must_be_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = launch.private_folder("x")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert "only this user" in raised(RuntimeError, lambda: launch.private_folder("x"))


class Communicator:
    """What mpi4py's has, over torch.distributed."""

    def Get_rank(self) -> int:
        return torch.distributed.get_rank()

    def Get_size(self) -> int:
        return torch.distributed.get_world_size()

    def bcast(self, value: Any, root: int) -> Any:
        values = [value]
        torch.distributed.broadcast_object_list(values, src=root)
        return values[0]

    def allgather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.Get_size()
        torch.distributed.all_gather_object(values, value)
        return values


def communicators(rank: int) -> None:
    hvd.shutdown()
    hvd.init(Communicator(), process_sets=[hvd.ProcessSet([1, 2])])
    assert (hvd.rank(), hvd.size(), hvd.local_size()) == (rank, 4, 4)
    equal(hvd.allreduce(torch.ones(1), op=hvd.Sum), [4.0])
    assert hvd.mpi_ops.process_set_ids() == [0, 1]
    assert "exists" in raised(ValueError, lambda: hvd.add_process_set(hvd.ProcessSet(Communicator())))
    hvd.shutdown()
    assert not hvd.is_initialized()
    if rank in (3, 1):  # two of four, the other way round
        hvd.init([3, 1])
        assert (hvd.rank(), hvd.size()) == ((rank == 1), 2)
        equal(hvd.allgather(torch.tensor([rank])), [3, 1])
        hvd.shutdown()
    else:
        assert "comm=[3, 1]" in raised(ValueError, lambda: hvd.init([3, 1]))
    assert "dynamic" in raised(ValueError, lambda: hvd.init(process_sets="static"))
    refused: list[tuple[Any, str]] = [
        ([hvd.ProcessSet([1, 2]), [3], [2, 1]], "ranks [1, 2] twice"),
        ([[1, 2], [0, 1, 2, 3]], "exists already, with id 0"),
        ([[1, 2], [9]], "[9]: expected ranks below size() = 4"),
        ([1, 2], "ranks=1: expected"),
        (5, "process_sets=5: expected a list"),
        (hvd.ProcessSet([1]), "ranks=[1]): expected a list"),
    ]
    for sets, message in refused:
        assert message in raised(ValueError, partial(hvd.init, process_sets=sets))
        assert not hvd.is_initialized()
    torch.distributed.barrier()
    for _ in range(2):  # and again
        hvd.init(process_sets="dynamic")
        hvd.init()
        equal(hvd.allgather(torch.tensor([rank])), [0, 1, 2, 3])
        hvd.shutdown()
        assert "not been initialized" in raised(ValueError, hvd.rank)
        torch.distributed.barrier()


def test_communicators_and_subsets(ranks: Ranks) -> None:
    ranks(4).run(communicators)


# -- the negotiation, by itself ----------------------------------------------------------------------------------------


def request(key: str, fuse: str | None = "f", numel: int = 10, **changes: Any) -> dict[str, Any]:
    return {"key": key, "set": 0, "kind": "allreduce", "tensors": [["float32", [numel]]], "must_match": {},
            "per_rank": {}, "fuse": fuse, "no_gradient": False, **changes}  # fmt: skip


def ran(negotiator: Negotiator) -> list[list[str]]:
    return [[op["key"] for op in message["ops"]] for _, message in negotiator.decisions() if message["do"] == "run"]


def test_ready_operations_are_fused_up_to_the_threshold() -> None:
    negotiator = Negotiator(2, fusion_bytes=100)
    for rank in range(2):
        for key in ("a", "b", "c"):
            negotiator.announce(rank, request(key))
        negotiator.announce(rank, request("other", fuse="g"))
        negotiator.announce(rank, request("alone", fuse=None))
        negotiator.announce(rank, request("large", numel=1000))
    # What cannot be fused does not wait; then buffers of 100 bytes, while fewer than two decisions are under way.
    assert ran(negotiator) == [["alone"], ["a", "b"]]
    negotiator.done(0)
    assert ran(negotiator) == [["c"]]
    for _ in range(2):
        negotiator.done(0)
    assert ran(negotiator) == [["other"], ["large"]]


@given(dtypes=st.lists(st.sampled_from(DTYPES), max_size=4), numel=st.integers(0, 100))
def test_the_size_of_what_is_fused_is_what_it_takes(dtypes: list[torch.dtype], numel: int) -> None:
    tensors = [torch.zeros(numel, dtype=dtype) for dtype in dtypes]
    assert request_bytes(AllReduce("a", 0, tensors, Sum, 1.0, 1.0).request()) == sum(t.nbytes for t in tensors)


def test_a_set_may_be_removed_when_its_first_member_has_joined_and_ends_last() -> None:
    """The others have their results, and that one has nothing to synchronize."""
    negotiator = Negotiator(2)
    negotiator.sets[1] = (0, 1)
    for change in ({"set": 1}, {"key": REMOVE, "kind": REMOVE, "must_match": {"id": 1}}):
        for rank in range(2):
            negotiator.announce(rank, request("last") | change)
        assert [message["do"] for _, message in negotiator.decisions()] == ["run"]


def test_nothing_runs_before_all_are_ready() -> None:
    negotiator = Negotiator(3)
    negotiator.announce(0, request("a"))
    negotiator.announce(2, request("a"))
    assert ran(negotiator) == []
    assert [(key, who, missing) for key, who, missing, _ in negotiator.overdue(-1.0)] == [("a", [0, 2], [1])]
    assert list(negotiator.overdue(-1.0)) == []  # once
    negotiator.announce(1, request("a"))
    assert ran(negotiator) == [["a"]]


def framed(text: bytes) -> bytes:
    return struct.pack("!I", len(text)) + text


@every_loopback
def test_its_addresses_are_those_toward_the_first_rank_and_of_the_interface_named(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", host)
    assert addresses()[0] == host
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert host in addresses()[:2]
    with listen(1) as listener:
        socket.create_connection((host, listener.getsockname()[1]), timeout=5).close()


def test_strangers_are_not_let_in() -> None:
    store = torch.distributed.HashStore()
    coordinator = Coordinator(store, Negotiator(1), 0.0, 0.0)
    place = json.loads(store.get("control"))
    for message in (framed(b"{}"), b"\xff" * 12 + b"x" * 9000, b"GET / HTTP/1.0\r\n\r\n" * 500,
                    framed(json.dumps({"nonce": "guess", "proof": place["secret"], "rank": 0}).encode())):  # fmt: skip
        with socket.create_connection(("127.0.0.1", place["port"]), timeout=5) as end:
            end.sendall(message)
            end.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                while end.recv(1000):
                    pass
    assert coordinator._peers == {}
    assert coordinator.thread.is_alive()
    coordinator._end("the test is over", clean=True)
    coordinator.thread.join(10)
    assert not coordinator.thread.is_alive()


def stalled(rank: int) -> float:
    hvd.shutdown()
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "1"
    hvd.init()
    del os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]
    start = time.monotonic()
    if rank == 0:
        text = raised(hvd.HorovodInternalError, lambda: hvd.allreduce(torch.ones(1), name="lonely"))
        assert "lonely" in text
        assert "[1]" in text
    else:
        time.sleep(1.5)
    seconds = time.monotonic() - start
    hvd.shutdown()
    torch.distributed.barrier()
    return seconds


def test_a_stall_can_be_made_an_error(ranks: Ranks) -> None:
    assert max(ranks(2).run(stalled)) < 10
