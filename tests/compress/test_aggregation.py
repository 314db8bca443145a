"""What ranks have sent, divided by how many have sent it, and clipped: against a re-implementation in float64."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from gradwire import QSGD, Aggregate, ChunkedTopK, Codec, Identity, LocalUpdates, OneBit, Residual, TopK, Tracking
from gradwire.compress.aggregation import Aggregation
from gradwire.hooks.exchanges import possible
from ranks import Ranks, on_ranks
from strategies import encode, gradient, parts_of, same
from torch import Tensor
from training import all_ranks, batch, digest, perceptron

WAYS = [("ranks", None), ("senders", None), ("ranks", "median"), ("senders", "median")]
every_way = pytest.mark.parametrize(("mean", "clip"), WAYS)


def together(sent: Tensor, mean: str, clip: str | None) -> Tensor:
    """What is handed out, in float64, of what ranks have sent: [P, n]."""
    sent = sent.double()
    if clip is not None:
        norms = sent.norm(dim=1)
        middle = norms.sort().values[[(len(norms) - 1) // 2, len(norms) // 2]].mean()
        sent = sent * (middle / norms).clamp(max=1.0).nan_to_num(1.0)[:, None]
    count = (sent != 0).sum(dim=0).clamp(min=1) if mean == "senders" else len(sent)
    total: Tensor = sent.sum(dim=0) / count
    return total


def sparse_loco(rank: int, codec: Codec, mean: Any, clip: Any) -> Any:
    """How far rounds are from what they should be, and from the plain mean, relative to the latter; and a digest."""
    model, learning_rate = perceptron(20, 24), 0.01 * 3.0**rank  # so that norms differ
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    options: dict[str, Any] = {"error_feedback": Residual(decay=0.95), "exclude": ["0.bias"]}
    updates = LocalUpdates(model, optimizer, codec, every=3, exchange=Aggregate(mean, clip), **options)
    named = {name: p for name, p in model.named_parameters() if name != "0.bias"}
    excluded = model.get_parameter("0.bias")
    size = sum(p.numel() for p in named.values())
    kept, k, chunk = torch.zeros(size, dtype=torch.float64), 0, size
    if isinstance(codec, TopK):
        k = codec.k(size)
    elif isinstance(codec, ChunkedTopK):
        k, chunk = codec.k, codec.chunk
    off, plainly = [], []
    for step in range(9):
        optimizer.zero_grad()
        model(batch(rank, step, model)).square().mean().backward()
        optimizer.step()
        if step % 3 < 2:
            updates.step()
            continue
        before: dict[str, Tensor] = updates.state_dict()["global"]
        moved = torch.cat([(before[name].double() - p.detach().double()).reshape(-1) for name, p in named.items()])
        whole = all_ranks(before["0.bias"].double() - excluded.detach().double()).mean(dim=0)
        kept = 0.95 * kept + moved
        sent = torch.zeros_like(kept)
        for part, into in zip(kept.split(chunk), sent.split(chunk), strict=True):
            chosen = part.abs().topk(min(k, len(part))).indices
            into[chosen] = part[chosen]
        kept -= sent
        updates.step()
        after = updates.state_dict()["global"]
        found = torch.cat([(before[name].double() - after[name].double()).reshape(-1) for name in named])
        rows = all_ranks(sent)
        wanted, usual = together(rows, mean, clip), together(rows, "ranks", None)
        assert float((before["0.bias"].double() - after["0.bias"].double() - whole).abs().max()) < 1e-6
        off.append(float((found - wanted).norm() / usual.norm()))
        plainly.append(float((wanted - usual).norm() / usual.norm()))
    updates.close()
    return max(off), min(plainly), digest(model.parameters())


@pytest.mark.parametrize("codec", [TopK(0.1), ChunkedTopK(k=16, chunk=256, values=torch.float32)], ids=str)
@every_way
def test_sparse_loco(ranks: Ranks, codec: Codec, mean: str, clip: str | None) -> None:
    results = ranks(3).run(sparse_loco, codec, mean, clip)
    assert max(off for off, _, _ in results) < 1e-5
    assert (results[0][1] > 0.05) == ((mean, clip) != ("ranks", None))  # it is another thing than the mean
    assert len({replica for _, _, replica in results}) == 1


CODECS = [
    OneBit(), QSGD(rounding="nearest"), TopK(0.05), TopK(0.05, values=torch.int8), TopK(0.1, indices="plain"),
    ChunkedTopK(k=20, chunk=512), ChunkedTopK(k=20, chunk=512, values=torch.bfloat16), Identity(),
]  # fmt: skip


@pytest.mark.parametrize("codec", CODECS, ids=str)
@every_way
@pytest.mark.parametrize("scales", [(1.0,), (1.0, 3.0, 0.1), (1.0, 0.0, 2.0, 1e30), (1e-30, 2e-30)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_what_float64_makes_of_it(
    codec: Codec, mean: Any, clip: Any, scales: tuple[float, ...], dtype: torch.dtype
) -> None:
    """Over every kind of wire: one rank, an even number of them, ranks that send nothing, the largest and the least."""
    numel, whole = 1500, Aggregation(codec, mean, clip)
    x = [gradient("normal", numel, seed) * scale for seed, scale in enumerate(scales)]
    workspace = whole.workspace(numel)
    wires = torch.stack([encode(whole, row) for row in x])
    decoded = torch.zeros(len(x), numel)
    for row, wire in zip(decoded, wires, strict=True):
        whole.decode_add(wire, row, 1.0, workspace)
    out = torch.empty(numel, dtype=dtype)
    whole.decode_mean(parts_of(whole, wires, numel), out, workspace)
    wanted = together(decoded, mean, clip)
    assert float((out.double() - wanted).norm()) <= (1e-6 if dtype == torch.float32 else 4e-3) * float(wanted.norm())
    if (mean, clip) == ("ranks", None):
        usual = torch.empty(numel, dtype=dtype)
        codec.decode_mean(parts_of(codec, wires, numel), usual, codec.workspace(numel))
        assert same(out, usual)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_wire_is_the_codecs_and_a_norm(codec: Codec) -> None:
    """And the residual is the codec's: what is clipped later is not put back."""
    numel, clipped = 1500, Aggregation(codec, "senders", "median")
    size = codec.wire_bytes(numel)
    wire, alone = torch.empty(size + 4, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    residuals = [gradient("normal", numel, 9) for _ in range(2)]
    grad, workspace = gradient("normal", numel, 8), clipped.workspace(numel)
    clipped.encode_feedback(grad, residuals[0], wire, None, workspace)
    codec.encode_feedback(grad, residuals[1], alone, None, codec.workspace(numel))
    assert same(*residuals)
    assert same(wire[:size], alone)
    sent = torch.zeros(numel)
    codec.decode_add(alone, sent, 1.0, codec.workspace(numel))
    assert float(wire[size:].clone().view(torch.float32)) == pytest.approx(float(sent.double().norm()), rel=1e-7)
    assert workspace.status.tolist() == [0, 0]
    assert Aggregation(codec, "senders").wire_bytes(numel) == size


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_norm_that_cannot_be_clips_nothing(norm: float) -> None:
    """Nor does it touch the median, unless it is zero, which may be."""
    numel, whole = 1000, Aggregation(TopK(0.1), "ranks", "median")
    wires = torch.stack([encode(whole, gradient("normal", numel, seed)) for seed in range(3)])
    wires[1, -4:] = torch.tensor([norm]).view(torch.uint8)
    out, sent = torch.empty(numel), torch.zeros(3, numel)
    whole.decode_mean(parts_of(whole, wires, numel), out, whole.workspace(numel))
    for row, wire in zip(sent, wires, strict=True):
        whole.decode_add(wire, row, 1.0, whole.workspace(numel))
    norms = sent[[0, 2]].double().norm(dim=1)
    middle = norms.min() if norm == 0 else norms.mean()
    sent[[0, 2]] *= (middle / norms).clamp(max=1.0)[:, None].float()
    assert torch.allclose(out, sent.mean(dim=0), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"exchange": Aggregate(mean=cast(Any, "sender"))}, "mean='sender': expected one of 'ranks', 'senders'"),
        ({"exchange": Aggregate(clip=cast(Any, "mean"))}, "clip='mean': expected one of None, 'median'"),
        ({"mean": "senders", "exchange": "union"}, "exchange='union' hands out the ranks' mean alone"),
        ({"clip": "median", "exchange": "two_pass"}, "exchange='two_pass' hands out the ranks' mean alone"),
        ({"exchange": Aggregate("senders"), "error_feedback": Tracking()}, "use Residual()"),
    ],
    ids=str,
)
@on_ranks(2)
def test_what_cannot_be_is_refused(rank: int, options: dict[str, Any], text: str) -> None:
    model = perceptron(20, 24)
    with pytest.raises(ValueError) as raised:
        LocalUpdates(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2, **{"codec": TopK(0.1), **options})
    message = str(raised.value)
    assert text in message


def test_no_other_exchange_carries_it() -> None:
    assert [name for name in possible(Aggregation(ChunkedTopK())) if name != "dense"] == ["gather"]
    with pytest.raises(TypeError, match="inner='topk': expected a codec"):
        Aggregation("topk")  # type: ignore[arg-type]
