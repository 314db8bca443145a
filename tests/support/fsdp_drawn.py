"""Sharded training that is drawn, beside FSDP's own HSDP on the same gradients: what that hands out is what ours must,
now or later."""

from __future__ import annotations

import math
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from drawn import Short, search
from gradwire import Codec, OneBit, Residual, compress_fsdp
from gradwire.compress.feedback.base import Feedback
from gradwire.hooks.comm.group import Group
from gradwire.hooks.fsdp.replicate import FSDPState
from hypothesis import strategies as st
from lacking import RESETS, needs
from ranks import Ranks
from rounded import counted
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from training import digest, told

FSDPMeshInfo: Any = _fsdp_common.FSDPMeshInfo
HSDPMeshInfo: Any = _fsdp_common.HSDPMeshInfo
ShardPlacementResult: Any = getattr(_fsdp_common, "ShardPlacementResult", None)
PLACES = needs("FSDP2's ShardPlacementResult", ShardPlacementResult is not None)

EVENTS = ("step", "each", "local", "hold", "raise", "save")
#: How far a law may be off, relative to all that went in: what is reduced in fewer digits is rounded by FSDP too.
TOLERANCE = {None: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True, repr=False)
class Sharded(Short):
    """How a model is trained.

    Attributes:
        mesh: replicas and shards.
        reduce: the dtype of reductions; None: the parameters'.
        divide: "no" factor, by "shards", or by 3 in a "forced" sum.
        zeros: whether unused parameters get zeros in the place of nothing.
        offload: whether shards are offloaded to the CPU, on which they are.
        inline: whether exchanges are launched where they are submitted, as over NCCL.
        scatter: whether gradients are compressed between shards, not between replicas.
        warmup: so many steps are not compressed.
        layout: where some parameters are. "crossed": others' replicas are their shards. "placed": the same, inside of
            others' modules. "flat": sharded over all ranks, and compressed there. "experts": sharded over half of the
            ranks, without replicas. "": as all others.
    """

    mesh: tuple[int, int]
    codec: Codec
    feedback: bool | Feedback = True
    exchange: str = "auto"
    reduce: torch.dtype | None = None
    divide: str = "no"
    exclude: bool = False
    zeros: bool = False
    offload: bool = False
    inline: bool = False
    scatter: bool = False
    warmup: int = 0
    entropy_coding: bool = False
    layout: str = ""

    @property
    def keeps_gradients(self) -> bool:
        """Whether nothing is lost: what is kept is then plain residuals."""
        if not isinstance(self.feedback, Residual):
            return self.feedback is True
        return self.feedback.decay == 1.0 and self.feedback.only_residual

    @property
    def is_exact(self) -> bool:
        """Whether HSDP's sums are of two replicas, its divisions by powers of two, and both rounded where ours are."""
        sums = {"": self.mesh[:1], "flat": (self.mesh[0] * self.mesh[1],)}.get(self.layout, self.mesh)
        simple = (
            max(self.mesh[1:] if self.scatter else sums) <= 2
            and self.reduce is not torch.float16
            and self.divide != "forced"
        )
        return self.keeps_gradients and simple


class Parts(nn.Module):
    """Layers of sizes that no number of shards divides, one in two places, one that is used by turns, one that is
    never used, one frozen, and parameters of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scale = nn.Parameter(torch.randn(7))
        self.first, self.turns, self.frozen = nn.Linear(7, 33), nn.Linear(33, 33), nn.Linear(33, 33)
        self.block = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 1, bias=False))
        self.never, self.twice = nn.Linear(3, 3), nn.Linear(33, 33)
        self.frozen.requires_grad_(False)
        self.calls, self.raises = 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.tanh(self.first(x * self.scale))
        places = [x, self.twice(torch.tanh(self.twice(x)))]
        x = self.turns(places[1]) if self.calls % 2 else places[1]
        places.append(x)
        if self.raises:
            places[self.calls // 2 % 3].register_hook(_raise)
        return self.block(self.frozen(x) + x)


class Stopped(Exception):
    """What a backward pass raises."""


def _raise(grad: Tensor) -> None:
    raise Stopped


_meshes: dict[tuple[int, int, bool], DeviceMesh] = {}


def mesh_of(shape: tuple[int, int], crossed: bool = False) -> DeviceMesh:
    """A mesh of this process, which makes its groups once; `crossed`: its shards are the replicas of the other one."""
    key, names = (*shape, crossed), ("replicate", "shard")
    if key not in _meshes:
        if crossed:
            _meshes[key] = DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape).t(), mesh_dim_names=names)
        else:
            _meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[key]


#: Layouts that this torch has.
LAYOUTS = [
    "crossed",
    *(["flat"] if hasattr(FSDPModule, "set_custom_reduce_scatter") else []),
    *(["placed"] if ShardPlacementResult is not None else []),
]
#: The parameters that a layout places apart.
APART = "block.*", "twice.*"
PLACED = "scale", "block.0.weight", "twice.bias"


def elsewhere(setup: Sharded) -> DeviceMesh:
    """The mesh of the parameters that are placed apart, of two dimensions; that of replicas is not used by others."""
    if setup.layout == "flat":
        return mesh_of((1, setup.mesh[0] * setup.mesh[1]))
    if setup.layout == "experts":
        return mesh_of((2, setup.mesh[1] // 2))
    return mesh_of(setup.mesh, crossed=True)


def sharded(setup: Sharded, native: bool = False) -> Any:
    """A model; `native`: FSDP sums over its replicas, too."""
    model: Any = Parts()
    offload = CPUOffloadPolicy(pin_memory=False) if setup.offload else OffloadPolicy()
    how: Any = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=setup.reduce), "offload_policy": offload}
    mesh, other = (m if native and not setup.scatter else m["shard"] for m in (mesh_of(setup.mesh), elsewhere(setup)))
    if setup.layout in ("flat", "experts"):
        other = elsewhere(setup)["shard"]
    if setup.layout == "placed":
        placed = {model.get_parameter(name) for name in PLACED}
        info: Any = HSDPMeshInfo(other, 1, 0) if other.ndim == 2 else FSDPMeshInfo(other, 0)
        how["shard_placement_fn"] = lambda p: ShardPlacementResult(None, info) if p in placed else None
    for part in (model.first, model.turns, model.block, model.twice):
        apart = setup.layout not in ("", "placed") and part in (model.block, model.twice)
        fully_shard(part, mesh=other if apart else mesh, **how)
    fully_shard(model, mesh=mesh, **how)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            if setup.divide != "no":
                module.set_gradient_divide_factor(3.0 if setup.divide == "forced" else float(setup.mesh[1]))
            module.set_force_sum_reduction_for_comms(setup.divide == "forced")
    if setup.zeros:
        model.set_reduce_scatter_unused_params(True)
    return model


def compressed(setup: Sharded, model: nn.Module) -> Any:
    how: dict[str, Any] = {"exchange": setup.exchange, "error_feedback": setup.feedback, "warmup_steps": setup.warmup}
    how["entropy_coding"] = setup.entropy_coding
    if not setup.scatter:
        how |= {"mesh": mesh_of(setup.mesh)["replicate"], "fallback": None}  # not by what this machine measures
        if setup.layout:
            apart: dict[str, Any] = {"mesh": elsewhere(setup)["replicate"], "fallback": None}
            if setup.layout == "flat":
                apart = {"mesh": None, "fallback": "auto", "exchange": "auto", "error_feedback": "auto"}
            names = PLACED if setup.layout == "placed" else APART
            how |= {key: {**dict.fromkeys(names, value), "*": how[key]} for key, value in apart.items()}
    with pytest.MonkeyPatch.context() as patch:
        if setup.inline:
            patch.setattr(Group, "blocks", staticmethod(lambda group, device: False))
        state = compress_fsdp(model, setup.codec, exclude=["*.bias"] if setup.exclude else None, **how)
    for part in parts_of(state):
        assert part._reducer is None or part._running().session.pipeline.threaded != setup.inline
    return state


def parts_of(state: Any) -> Sequence[Any]:
    """The states of parameter groups that differ, or a single one."""
    return getattr(state, "parts", (state,))


def local(x: Any) -> Tensor:
    """This rank's part of a DTensor."""
    found: Tensor = x.detach().to_local()
    return found


def locals_of(model: nn.Module, grads: bool = False) -> dict[str, Tensor]:
    """This rank's shards, in float64; of what has no gradient zeros."""
    return _locals(dict(model.named_parameters()), grads)


def _locals(parameters: dict[str, nn.Parameter], grads: bool) -> dict[str, Tensor]:
    found = {}
    for name, p in parameters.items():
        x = p.grad if grads else p
        x = torch.zeros_like(p) if x is None else x
        found[name] = local(x).double().clone()
    return found


def one_pass(rank: int, model: Any, number: int, kind: str) -> dict[str, Tensor] | None:
    """A backward pass; where it raised, returns the gradients that FSDP may now drop."""
    model.set_requires_gradient_sync(kind != "local")
    if kind != "local":
        model.set_requires_all_reduce(kind != "hold")
    model.raises, model.calls = kind == "raise", number
    torch.manual_seed(100 * number + rank)
    x, sharded = torch.randn(6, 7), dict(model.named_parameters())
    try:
        model(x).square().mean().backward()
    except Stopped:
        left = _locals(sharded, grads=True)
        model.reset_iter_state()
        return left
    return None


def saved_and_loaded(setup: Sharded, model: nn.Module, state: Any) -> Any:
    """The state of another process, as it were."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({"gradwire": state}, checkpoint_id=folder[0])
    state.close()
    fresh = compressed(setup, model)
    dcp.load({"gradwire": fresh}, checkpoint_id=folder[0])
    assert fresh.step == state.step
    dist.barrier()
    if folder[0] is not None and dist.get_rank() == 0:
        shutil.rmtree(Path(folder[0]))
    return fresh


def play(rank: int, setup: Sharded, events: Sequence[str]) -> dict[str, Any]:
    """`_play`, and "rounded": what residuals have rounded off on this rank, at most, in the units of "law"."""
    with counted() as norms:
        result = _play(rank, setup, events)
    return {**result, "rounded": sum(norms) / result["total"]}


def _play(rank: int, setup: Sharded, events: Sequence[str]) -> dict[str, Any]:
    """Train by ours and by FSDP's own side by side.

    Returns:
        "law": how far what has been handed out and what is kept are from what HSDP has handed out, relative to that,
        "total", here;
        "equal": whether all gradients were as HSDP's, bit for bit; "digests" of the shards after each step.
    """
    native, ours = sharded(setup, native=True), sharded(setup)
    state = compressed(setup, ours)
    off = {name: torch.zeros_like(p) for name, p in locals_of(ours).items()}
    total, equal, digests = 0.0, True, []
    for number, event in enumerate(events):
        if event == "save":
            if any(shards.held for part in parts_of(state) for shards in part._shards):
                assert "save after that" in _refusal(state)
                continue
            state = saved_and_loaded(setup, ours, state)
            continue
        if event == "divide":
            for module in (*native.modules(), *ours.modules()):
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(7.0)
            continue
        grads = []
        for model in (native, ours):
            before = locals_of(model, grads=True)
            left = one_pass(rank, model, number, event)
            after = locals_of(model, grads=True) if left is None else left
            grads.append({name: x - before[name] for name, x in after.items()})
        raised = left is not None
        kept = _kept(state) if raised else set()
        for name, wanted in grads[0].items():
            got = grads[1][name]
            if not raised or name in kept:
                off[name] += wanted
                total += float(wanted.square().sum())
            if not raised:
                off[name] -= got
                equal &= torch.equal(wanted, got)
        if not raised:
            have = [{n for n, p in m.named_parameters() if p.grad is not None} for m in (native, ours)]
            assert have[0] <= have[1], have  # after "hold" ours has zeros
        if event in ("step", "raise"):
            with torch.no_grad():
                for p, q in zip(native.parameters(), ours.parameters(), strict=True):
                    if q.grad is not None and event == "step":
                        q.to_local().sub_(0.05 * q.grad.to_local())
                    p.to_local().copy_(q.to_local())
            native.zero_grad()
            ours.zero_grad()
            places = {name: (name, p.device_mesh.get_local_rank()) for name, p in ours.named_parameters()}
            digests.append({places[name]: digest([p.to_local()]) for name, p in ours.named_parameters()})
    for name, residual in residuals(state.state_dict()).items():
        off[name] -= residual.to_local().double()
    state.close()
    size = (total or 1.0) ** 0.5
    law = sum(float(x.square().sum()) for x in off.values()) ** 0.5 / size
    return {"law": law, "total": size, "equal": equal, "digests": digests}


def _refusal(state: FSDPState) -> str:
    """Why it does not save now."""
    with pytest.raises(RuntimeError) as refused:
        state.state_dict()
    return str(refused.value)


def _kept(state: Any) -> set[str]:
    """Of which parameters that is kept which a pass has sent that raised: where a step goes dense, nothing is."""
    return {name for part in parts_of(state) for name in part._feedback.by_name()}


def through_a_checkpoint(
    rank: int, shape: tuple[int, int], folder: str, scatter: bool, write: bool
) -> dict[str, Tensor]:
    """Train a little on a mesh and save, or load on it and go on; the residuals, whole, by name."""
    setup = Sharded(shape, OneBit(), scatter=scatter and shape[0] == 1)
    model = sharded(setup)
    state = compressed(setup, model)
    if write:
        for number in range(3):
            one_pass(rank, model, number, "step")
        dcp.save({"gradwire": state}, checkpoint_id=folder)
    else:
        dcp.load({"gradwire": state}, checkpoint_id=folder)
    assert state.step == 3
    found = {name: x.full_tensor() for name, x in residuals(state.state_dict()).items()}
    if not write:
        one_pass(rank, model, 3, "step")
        assert state.step == 4
    state.close()
    return found


def loads_on(
    first: tuple[int, int], others: Sequence[tuple[int, int]], ranks: Ranks, folder: Path, scatter: bool = False
) -> None:
    """What is saved on the first mesh is loaded, whole, on the others."""
    saved, *_ = ranks(math.prod(first)).run(through_a_checkpoint, first, str(folder), scatter, True)
    assert sum(float(x.abs().sum()) for x in saved.values()) > 0
    for shape in others:
        *_, found = ranks(math.prod(shape)).run(through_a_checkpoint, shape, str(folder), scatter, False)
        assert found.keys() == saved.keys()
        for name, x in saved.items():
            torch.testing.assert_close(found[name], x, rtol=1e-6, atol=1e-9)


def residuals(saved: dict[str, Any]) -> dict[str, Any]:
    [found] = saved["residuals"].values()
    return dict(found)


def wrong(setup: Sharded, results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What the ranks have seen that must not be."""
    # A rank's part of a residual is the optimizer's business once at the most.
    rounded = sum(result["rounded"] for result in results)
    for rank, result in enumerate(results):
        for other, peer in enumerate(results[:rank] if not setup.scatter else ()):
            for step, (mine, theirs) in enumerate(zip(result["digests"], peer["digests"], strict=True)):
                if differing := [place for place in mine.keys() & theirs.keys() if mine[place] != theirs[place]]:
                    yield f"step {step}: ranks {other} and {rank} have different shards of {sorted(differing)}"
        if setup.keeps_gradients and result["law"] > TOLERANCE[setup.reduce] + 1.01 * rounded:
            yield f"rank {rank}: the law is off by {result['law']:.1e}"
        if setup.codec.lossless and setup.is_exact and not result["equal"]:
            yield f"rank {rank}: gradients are not those of HSDP"


def says(pattern: str, function: Callable[[], Any]) -> None:
    """It raises this."""
    text = told(function)
    assert re.search(pattern, text, re.DOTALL), (pattern, text)


def verdict(ranks: Ranks, setup: Sharded, events: Sequence[str]) -> list[str]:
    """All that is wrong with a training of these events. Where FSDP cannot give up a pass, none raises."""
    events = ["step" if event == "raise" and not RESETS else event for event in events]
    return list(wrong(setup, ranks(setup.mesh[0] * setup.mesh[1]).run(play, setup, events)))


def play_drawn(ranks: Ranks, setups: st.SearchStrategy[Sharded], events: Sequence[str], examples: int) -> None:
    """Plays events, drawn from these, on drawn setups, and fails with the first that breaks a law."""

    def held(setup: Sharded, events: Sequence[str]) -> None:
        if setup.reduce is not None:  # FSDP then accumulates in another dtype than that of what is new, and refuses it
            events = ["each" if event == "local" else event for event in events]
        found = verdict(ranks, setup, (*events, "step", "step"))  # of each module what is held is sent
        assert not found, f"{setup}, {events}: {found}"

    number = 0 if examples < 100 else random.SystemRandom().getrandbits(32)
    search(st.tuples(setups, st.lists(st.sampled_from(events), min_size=3, max_size=7)), held, number, examples)
