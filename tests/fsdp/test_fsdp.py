"""FSDP2 and HSDP: as HSDP's own gradients, or those later; nothing lost, across meshes too; mistakes named."""

from __future__ import annotations

import ast
import importlib.util
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsdp_drawn
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_drawn import (
    EVENTS,
    LAYOUTS,
    Ranks,
    Sharded,
    loads_on,
    mesh_of,
    play_drawn,
    residuals,
    says,
    verdict,
)
from gradwire import (
    EDEN,
    QSGD,
    ChunkedTopK,
    Identity,
    Lead,
    Magnitudes,
    Momentum,
    OneBit,
    PowerSGD,
    Residual,
    Ternary,
    TopK,
    Tracking,
    compress_fsdp,
)
from gradwire.hooks.core.session import Session
from gradwire.hooks.exchanges import possible
from gradwire.hooks.fsdp.torch_internals import fsdp_modules, post_divide
from hypothesis import strategies as st
from lacking import GIVES_ZEROS, RESETS, needs_reduce_scatter, needs_reset
from often import by_time
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
from torch.distributed.tensor import DTensor, Replicate
from training import digest, told

pytestmark = needs_reduce_scatter

ALL = ("step", "each", "step", "local", "hold", "step", "raise", "hold", "raise", "step", "save", "step")


@pytest.mark.parametrize(("mesh", "inline"), [((2, 2), False), ((2, 2), True), ((1, 2), False)])
def test_identity_is_hsdp_to_the_bit(ranks: Ranks, mesh: tuple[int, int], inline: bool) -> None:
    assert not verdict(ranks, Sharded(mesh, Identity(), inline=inline), ALL)


@pytest.mark.parametrize("inline", [False, True])
def test_what_nobody_uses_keeps_what_it_is_owed(ranks: Ranks, inline: bool) -> None:
    for codec in (OneBit(), EDEN()):  # which decode zeros as something else
        assert not verdict(ranks, Sharded((2, 2), codec, inline=inline), ("step", "raise", "hold", "step", "step"))


# -- an example of FSDP2's own, changed by three lines -----------------------------------------------------------------


def torchs_own_transformer() -> Any:
    """What PyTorch tests FSDP2 with. Its module imports packages that torch does not install, so its classes are taken
    out of the file."""
    found = importlib.util.find_spec("torch.testing")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "_internal/distributed/_tensor/common_dtensor.py"
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": nn.functional, "dataclass": dataclass, "__name__": __name__}
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name in THEIRS:
            exec(compile(ast.Module([node], []), str(path), "exec"), names)
    args = names["ModelArgs"](dropout_p=0.0, vocab_size=64, n_layers=2, dim=32)
    return names["Transformer"](args)


THEIRS = ("ModelArgs", "Attention", "FeedForward", "TransformerBlock", "Transformer")


def train_a_transformer(rank: int, how: str, steps: int, folder: str | None = None, begin: int = 0) -> Any:
    """The model of torch's own tests of FSDP2, trained as its documentation has it, by HSDP or by ours. The loop is as
    it is in both; before it, ours has two lines more and one that is different."""
    mesh = mesh_of((2, 2))
    torch.manual_seed(1)
    model = torchs_own_transformer()
    placed = mesh if how == "hsdp" else mesh["shard"]  # 1
    for layer in model.layers:
        fully_shard(layer, mesh=placed)
    fully_shard(model, mesh=placed)
    state: Any = None
    if how != "hsdp":
        codec = {"identity": Identity(), "onebit": OneBit(), "topk": TopK(0.05)}[how]
        state = compress_fsdp(model, codec, mesh=mesh["replicate"], exchange="gather")  # 2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if folder is not None and begin:
        held = {"model": model.state_dict(), "gradwire": state}
        dcp.load(held, checkpoint_id=folder)
        model.load_state_dict(held["model"])
    losses = []
    for _ in range(steps):
        torch.manual_seed(rank)
        tokens = torch.randint(64, (4, 16))
        loss = nn.functional.cross_entropy(model(tokens)[:, :-1].reshape(-1, 64), tokens[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if folder is not None and not begin:
        dcp.save({"model": model.state_dict(), "gradwire": state}, checkpoint_id=folder)  # 3
    shards = digest(fsdp_drawn.local(p) for p in model.parameters())
    kept = {} if state is None else {name: x.to_local() for name, x in residuals(state.state_dict()).items()}
    if state is not None:
        state.close()
    return {"losses": losses, "shards": shards, "place": tuple(mesh.get_coordinate() or ()), "kept": kept}


def test_a_transformer_learns_as_under_hsdp(ranks: Ranks, tmp_path: Path) -> None:
    plain = ranks(4).run(train_a_transformer, "hsdp", 8)
    same = ranks(4).run(train_a_transformer, "identity", 8)
    assert [r["losses"] for r in same] == [r["losses"] for r in plain]  # to the bit: two replicas, a division by 2
    assert [r["shards"] for r in same] == [r["shards"] for r in plain]
    for how in ("onebit", "topk"):
        folder = str(tmp_path / how)
        first = ranks(4).run(train_a_transformer, how, 8, folder)
        if how == "onebit":
            ranks(4).close()  # kills them
        again = ranks(4).run(train_a_transformer, how, 8, folder, 8)
        for results in (first, again):
            for result in results:
                [peer] = [r for r in results if r["place"][1] == result["place"][1] and r is not result]
                assert result["shards"] == peer["shards"]
        assert sum(r["losses"][-1] for r in again) < sum(r["losses"][0] for r in first)
        assert any(float(x.abs().sum()) > 0 for x in first[0]["kept"].values())


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_loads_on_other_meshes(ranks: Ranks, tmp_path: Path) -> None:
    loads_on((2, 2), [(4, 1), (2, 2), (1, 2), (2, 1)], ranks, tmp_path)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def small(mesh: Any) -> Any:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@on_ranks(4)
def test_mistakes_are_named_on_every_rank(rank: int) -> None:
    mesh = mesh_of((2, 2))
    shard, replicate = mesh["shard"], mesh["replicate"]

    def refused(words: str, model: Any = None, codec: Any = OneBit(), **how: Any) -> None:  # noqa: B008
        says(
            words, lambda: compress_fsdp(small(shard) if model is None else model, codec, **{"mesh": replicate, **how})
        )

    def fails(words: str) -> None:
        says(words, lambda: model(torch.ones(2, 8)).sum().backward())

    refused("Linear without an FSDP module: call torch.distributed.fsdp.fully_shard", nn.Linear(2, 2))
    refused(r'of two dimensions.*fully_shard\(…, mesh=mesh\["shard"\]\)', small(mesh))
    refused(r'replicate, shard: pass the one.*mesh=mesh\["replicate"\]', mesh=mesh)
    refused("ranks disagree on shard: rank 0 has 0 of 2, rank 1 has 1 of 2", mesh=shard)
    refused("expected a DeviceMesh", mesh=replicate.get_group())
    clips = Momentum(clip=1.0)
    refused("leave out clip, and call torch.nn.utils.clip_grad_norm_", codec=TopK(0.1), error_feedback=clips)
    refused("exchange='hierarchical'", exchange="hierarchical")
    refused("'nobody' matches none", exclude=["nobody"])
    refused("ranks disagree on seed: rank 0 has 0, rank 1 has 1", seed=rank // 2)
    partly = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    fully_shard(partly[0], mesh=shard)
    with pytest.warns(UserWarning, match=r"'1.weight' is in no FSDP module"):
        compress_fsdp(partly, OneBit(), mesh=replicate).close()
    model = small(shard)
    state = compress_fsdp(model, OneBit(), mesh=replicate, fallback=None)
    refused("has an all-reduce hook already", model)
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    fails("'0.weight' has a post-accumulate-grad hook.*let the optimizer step after backward")
    handle.remove()
    if RESETS:  # and both go on
        model.reset_iter_state()
    else:
        state.close()
        model = small(shard)
        state = compress_fsdp(model, OneBit(), mesh=replicate, fallback=None)
    saved = state.state_dict()
    says("the checkpoint has codec TopK", lambda: state.load_state_dict({**saved, "codec": "TopK()"}))
    says("it lacks", lambda: state.load_state_dict({"step": 1}))
    whole = mesh_of((4, 1))["shard"]
    foreign = {
        name: DTensor.from_local(torch.zeros(x.shape), whole, [Replicate()]) for name, x in residuals(saved).items()
    }
    unsharded = {**saved, "residuals": {"mean": foreign}}
    says("let torch.distributed.checkpoint load it", lambda: state.load_state_dict(unsharded))
    model[2].bias.requires_grad_(False)
    model(torch.ones(2, 8)).sum().backward()
    state.close()
    fails("is closed, and nothing reduces its gradients")
    if RESETS:
        model.reset_iter_state()
        model.zero_grad()
    else:
        model = small(shard)
    model[2].bias.requires_grad_(False)
    state = compress_fsdp(model, OneBit(), mesh=replicate, fallback=None)
    model[2].bias.requires_grad_(True)
    fails("'2.bias' did not require gradients when compress_fsdp was called")
    state.close()


def raised_elsewhere(rank: int, everywhere: bool) -> str:
    """A backward pass raises after other modules on rank 1 than on rank 0, or on rank 0 alone: what ranks say then, or
    in the next one."""
    shard, replicate = (mesh_of((2, 1))[name] for name in ("shard", "replicate"))
    model = small(shard)
    state = compress_fsdp(model, OneBit(), mesh=replicate, exchange="gather")

    def fail(grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    def breaks(module: nn.Module, given: Any, out: torch.Tensor) -> None:
        out.register_hook(fail)

    model(torch.ones(2, 8)).sum().backward()
    model.zero_grad()
    if rank == 0 or everywhere:
        handle = model[0 if rank else 1].register_forward_hook(breaks)
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 8)).sum().backward()
        handle.remove()
        model.reset_iter_state()
        model.zero_grad()
    text = told(lambda: [model(torch.ones(2, 8)).sum().backward() for _ in range(2)])
    state.close()
    return text


@needs_reset
@pytest.mark.parametrize("everywhere", [True, False], ids=["differently", "alone"])
def test_replicas_that_have_not_raised_alike_say_so(ranks: Ranks, everywhere: bool) -> None:
    wanted = "ranks disagree on failed backward passes" if everywhere else "not all replicas had gradients of the same"
    for text in ranks(2).run(raised_elsewhere, everywhere, within=60.0):
        assert wanted in text, text


@needs_reset
@on_ranks(2, within=60.0)
def test_replicas_that_have_raised_alike_go_on(rank: int) -> None:
    """All ranks raise after the same module: rank 0 before its pipeline tells of the step, rank 1 when it has heard."""
    shard, replicate = (mesh_of((2, 1))[name] for name in ("shard", "replicate"))
    model = small(shard)
    state = compress_fsdp(model, OneBit(), mesh=replicate, exchange="gather")
    announce = Session.announce

    def late(connection: Session, *args: Any, **words: Any) -> None:
        time.sleep(0.1 * (1 - rank))
        announce(connection, *args, **words)

    def fail(grad: torch.Tensor) -> None:
        time.sleep(0.4 * rank)
        raise ZeroDivisionError

    def breaks(module: nn.Module, given: Any, out: torch.Tensor) -> None:
        if state.step in (1, 2):
            out.register_hook(fail)

    model[1].register_forward_hook(breaks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "announce", late)
        for step in range(4):
            try:
                model(torch.ones(2, 8)).sum().backward()
                assert step in (0, 3)
            except ZeroDivisionError:
                model.reset_iter_state()
            model.zero_grad()
    state.close()
    assert state.step == 4


@on_ranks(3)
def test_gradients_go_to_their_owners_directly(rank: int) -> None:
    shard, replicate = (mesh_of((1, 3))[name] for name in ("shard", "replicate"))
    model = small(shard)
    group = model[0]._get_fsdp_state()._fsdp_param_group
    plain = group._reduce_scatter_comm
    own: Any = SimpleNamespace(allocate=plain.allocate)
    model[2].set_custom_reduce_scatter(own)
    state = compress_fsdp(model, OneBit(), mesh=replicate, fallback=None)
    assert model[2]._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm is own
    direct = group._reduce_scatter_comm
    assert direct is not plain
    torch.manual_seed(rank)
    for dtype, op in product((torch.float32, torch.bfloat16, torch.float16), (dist.ReduceOp.SUM, dist.ReduceOp.AVG)):
        x = torch.randn(3 * 37).to(dtype)
        before, found, wanted = x.clone(), x.new_empty(37), x.new_empty(37)
        direct(found, x, group.mesh_info.shard_process_group, op)
        assert torch.equal(x, before)
        plain(wanted, x, group.mesh_info.shard_process_group, op)
        torch.testing.assert_close(found, wanted, atol=4 * torch.finfo(dtype).eps, rtol=4 * torch.finfo(dtype).eps)
    state.close()
    assert group._reduce_scatter_comm is plain


def test_torch_must_be_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_all_reduce_hook")
    with pytest.raises(RuntimeError, match=r"set_all_reduce_hook, which torch has from 2.7 on; this is"):
        fsdp_modules(nn.Linear(2, 2), "set_all_reduce_hook")


@on_ranks(4)
def test_replicas_that_use_other_parameters_are_told(rank: int) -> None:
    mesh = mesh_of((2, 2))
    model = small(mesh["shard"])
    state = compress_fsdp(model, OneBit(), mesh=mesh["replicate"], fallback=None)
    x = torch.ones(2, 8)

    def train() -> None:
        for step in range(3):
            skipping = step == 0 and mesh.get_local_rank("replicate") == 1
            (model[2](model[0](x)) if skipping else model(x)).sum().backward()

    text = told(train)
    state.close()
    assert "not all replicas had gradients of the same parameters" in text


def test_what_is_divided_after_the_hook() -> None:
    """As torch's own function has it, which is private, and has other arguments in other versions."""
    dtypes = torch.float32, torch.bfloat16, torch.float16
    for dtype, forced, factor in product(dtypes, (False, True), (None, 1.0, 2.0, 4.0, 12.0)):
        group = SimpleNamespace(
            gradient_divide_factor=factor, force_sum_reduction_for_comms=forced, device=torch.device("cpu"),
            mesh_info=SimpleNamespace(shard_mesh_size=8),
        )  # fmt: skip
        shards: Any = SimpleNamespace(size=lambda: 8)
        theirs = _get_gradient_divide_factors(shards, None, dtype, "cpu", factor, forced)[1]
        assert post_divide(group, dtype) == (theirs or 1.0), (dtype, forced, factor)


# -- drawn -------------------------------------------------------------------------------------------------------------

CODECS = [
    OneBit(), TopK(0.1), QSGD(rounding="nearest"), Ternary(), ChunkedTopK(k=16, chunk=256), Identity(),
    PowerSGD(rank=1),
]  # fmt: skip


@st.composite
def setups(draw: st.DrawFn) -> Sharded:
    codec = draw(st.sampled_from([*CODECS, QSGD()]))
    sparse = isinstance(codec, TopK)
    feedbacks: list[Any] = [True, True, Residual(), Tracking(), Lead(), Residual(decay=0.9)]
    feedbacks += [Residual(dtype=torch.bfloat16), Residual(dtype=torch.int8)]
    feedbacks += [Momentum(0.9, clip=None)] if sparse else []
    layout = draw(st.sampled_from(["", "", *LAYOUTS]))
    divides = ["no", "no", "forced", *([] if layout else ["shards"])]  # Gloo has no sums for FSDP's other factors
    return Sharded(
        mesh=draw(st.sampled_from([(2, 2), (2, 1), (1, 2), (4, 1)])),
        codec=codec,
        feedback=draw(st.sampled_from([False, Magnitudes()] if codec == QSGD() else feedbacks)),
        exchange=draw(st.sampled_from(["auto", *possible(codec)])),
        reduce=draw(st.sampled_from([None, None, torch.bfloat16, torch.float16])),
        divide=draw(st.sampled_from(divides)),
        exclude=draw(st.booleans()),
        zeros=GIVES_ZEROS and draw(st.booleans()),
        offload=draw(st.booleans()),
        entropy_coding=draw(st.booleans()),
        inline=draw(st.booleans()),
        layout=layout,
    )


@needs_reset
@pytest.mark.parametrize(("mesh", "scatter"), [((2, 1), False), ((1, 2), True)])
def test_a_pass_that_raises_wherever_it_is_loses_nothing(ranks: Ranks, mesh: tuple[int, int], scatter: bool) -> None:
    """Also of a module that is used twice in it, whose first mean is in the gradients already."""
    setup = Sharded(mesh, OneBit(), scatter=scatter)
    assert not verdict(ranks, setup, ["raise", "local", *["raise"] * 4, "save", "step", "step"])


def test_drawn_configurations_and_events(ranks: Ranks) -> None:
    play_drawn(ranks, setups(), EVENTS, by_time(8, 150))
