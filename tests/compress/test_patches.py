"""Patches of weights: a reader has the writer's bits; whatever the bytes, it takes all of a patch or nothing."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import struct
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import gradwire
import numpy as np
import pytest
import torch
from gradwire import PatchError, PatchReader, PatchWriter
from gradwire.compress.patches import patch, read_patch, sections, weights
from gradwire.compress.patches.sections import Words
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

State = dict[str, Tensor]
DTYPES = sorted(weights.DTYPES.values(), key=str)
#: A full snapshot, and a patch of it in groups of every kind, as the first version wrote them.
GOLDEN = (
    (
        "M^{imR6|Gsng9R*YybcN00000c-l>jOA5pw5Jd0NYZtc0U#=oqXl!9X6rv%EA$K1$Ffgm4>QV0vF?52po~1B2sGnuP3Wm}`mW$mQC9}v;MI#"
        "-LG9_U}BCaU}?PSU(S(k&+VObI(s$CjX8W;?!y&WA^?;*|}TPwi4*cep0U}GNgoO5YmNHGZ_=YQ~eK3|Gc=hY9*?6i+ptB>0-D;T=%{s3OiI"
        "-dao00002009dC0Dxl{1*2dTi~=eE01E&BfMXa1qhJ(_0xAFi3jhFsV;BXaU=)l3DgXc=004li#R6)ufNCtD3Ja*j0xGb8ax9<>3#cCjqhJ&"
        "a2><{A1poj50000100jU50Dpe~0D#EfVyp4N^R`b$3mN85W3Eo*_a7^j1FYb~$B9K^_z("
    ),
    (
        "M^{imR6|Gs&;S4c(*OVf00000c-l?QOK!v<3<lu4c+CPEjLBRj$^x*FMvancLN!vW-n~p$v$Fhu^5X|;xeRU~rqQyemW4y7Ub#wGd=09UNzE"
        "rKB`ra_XkL1eRAN*^<Q4=ufrE!#U;CK5B9m#88iGop*nO+bw<Tsuot3>s>>P!V(U-QM1d2H+RU~goZ0;I%T<7D0+qy!XeLc?|+)A5+5BnUjx"
        "fS}%`+k-YXcD6L@A`aA{WH$zR(`kdY4>BKIAP|8Jz<;mvNrDL@wzGw6FSU}c>DbWC#zCy0RjL30006219^LWDgXcg00;m809pG0{_pSi4hsM"
        "P000F5004nNGbEq_000010ssI20ssI200#m900033000020001ed;$Of0009`Dq=U2kw^gx00000z2L#tbuk5TaRdVZ000aB6#)PM0003100"
        "0aR000300RjL20RjL2|NjC1|Nj~Q0DuL-0RaFo48tHI;XWs&q7RG3VzF2(7K?lN0R;d6000620DuGl0Dxlv0RRC40000D0RjL30000200000"
        "00IC200027l6+Efe`VY&YDN{Sn2v>wX}yE|nTdK0n&$@7Jl9t"
    ),
)
GOLDEN_FINGERPRINT = "452edc7b33d7a24f0cbc0c94826f5d50e41f54721510ac91732486d2b120e67e"
KINDS = (Words(16, 7), Words(16, 10), Words(32, 23), Words(8), Words(16), Words(32))


@contextmanager
def small_sections(words: int, grouped: int = 8) -> Iterator[None]:
    """Sections of few words, so that small tensors have several, and groups for few changes."""
    with mock.patch.object(weights, "SECTION", words), mock.patch.object(sections, "GROUPED", grouped):
        yield


def as_bytes(tensor: Tensor) -> bytes:
    return weights.flat_words(tensor, weights.words_of(tensor.dtype)).cpu().numpy().tobytes()


def bits_of(state: State) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {name: (tensor.dtype, tensor.shape, as_bytes(tensor)) for name, tensor in state.items()}


def drawn_tensor(rng: np.random.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Any bits, or small numbers."""
    count = math.prod(shape)
    if dtype == torch.bool:
        return torch.from_numpy(rng.random(count) < 0.5).reshape(shape)
    if dtype in weights.FLOATS and rng.random() < 0.7:
        return (
            torch.from_numpy(rng.standard_normal(count) * 10.0 ** rng.integers(-6, 3, count)).to(dtype).reshape(shape)
        )
    noise = torch.from_numpy(rng.integers(0, 256, count * dtype.itemsize, np.uint8))
    return noise.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def drawn_change(rng: np.random.Generator, tensor: Tensor) -> Tensor:
    """Some of its words changed: by a little, or to any bits."""
    flat = weights.flat_words(tensor, weights.words_of(tensor.dtype)).clone()
    share = rng.choice([0, 0.002, 0.05, 0.3, 0.9, 1])
    chosen = torch.from_numpy(np.flatnonzero(rng.random(len(flat)) < share))
    if tensor.dtype == torch.bool:
        flat[chosen] ^= 1
    elif rng.random() < 0.7:
        steps = np.where(rng.random(len(chosen)) < 0.9, 1, rng.integers(1, 2000, len(chosen)))
        flat[chosen] += torch.from_numpy(steps * rng.choice([-1, 1], len(chosen))).to(flat.dtype)
    else:
        flat[chosen] = torch.from_numpy(rng.integers(0, 1 << 31, len(chosen))).to(flat.dtype)
    return flat.view(tensor.dtype).reshape(tensor.shape)


def drawn_shape(rng: np.random.Generator) -> tuple[int, ...]:
    largest = rng.choice([4, 40])
    return tuple(map(int, rng.integers(0, largest, rng.integers(0, 4))))


def drawn_states(seed: int, count: int) -> list[State]:
    """States of which each changes the one before: values, and now and then tensors come, go or change their shape."""
    rng = np.random.default_rng(seed)
    state = {
        f"layer.{i}": drawn_tensor(rng, DTYPES[rng.integers(len(DTYPES))], drawn_shape(rng))
        for i in range(rng.integers(0, 6))
    }
    state |= {f"weight.{i}": drawn_tensor(rng, torch.bfloat16, (int(rng.integers(1, 3000)),)) for i in range(2)}
    found = [state]
    for _ in range(count - 1):
        state = {name: drawn_change(rng, tensor) for name, tensor in state.items()}
        fate, name = rng.random(), rng.choice([*state, ""])
        if not name:
            pass
        elif fate < 0.1:
            del state[name]
        elif fate < 0.2:
            state[name] = drawn_tensor(rng, DTYPES[rng.integers(len(DTYPES))], drawn_shape(rng))
        elif fate < 0.3:
            state[f"new.{rng.integers(9)}"] = state[name]  # in the same memory
        found.append(state)
    return found


def sealed(body: bytes) -> bytes:
    """Bytes with the BLAKE2b that belongs to them."""
    return body + hashlib.blake2b(body, digest_size=32).digest()


def opened(data: bytes) -> tuple[dict, bytes]:
    header, body = patch.parse(data)
    return header, bytes(body)


def with_header(data: bytes, **changes: object) -> bytes:
    """A sound patch, but for what its header says."""
    header, body = opened(data)
    packed = zlib.compress(patch.json.dumps(header | changes).encode())
    return sealed(patch.PREFIX.pack(patch.MAGIC, patch.VERSION, len(packed), len(body)) + packed + body)


def two_states(numel: int = 3000, share: float = 0.02) -> tuple[State, State]:
    rng = np.random.default_rng(0)
    old = {"a": torch.from_numpy(rng.standard_normal(numel) * 0.02).bfloat16(), "b": torch.ones(7, 3)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    words = new["a"].view(torch.int16)
    chosen = torch.from_numpy(np.flatnonzero(rng.random(numel) < share))
    words[chosen] += torch.from_numpy(rng.choice([-1, 1], len(chosen))).short()
    new["b"][3, 1] = -0.0
    return old, new


# ---- nothing is lost


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from([50, 333, 1 << 22]), st.sampled_from([None, 1, 2]))
def test_readers_have_the_writer_s_bits(seed: int, count: int, words: int, full_every: int | None) -> None:
    states = drawn_states(seed, count)
    writer, again = (PatchWriter(full_every=full_every) for _ in range(2))
    readers = [PatchReader()]
    with small_sections(words):
        for number, state in enumerate(states):
            data = writer.write(state)
            assert data == again.write(dict(reversed(state.items())))
            if opened(data)[0]["base"] is None and number:
                readers.append(PatchReader())  # joins here
            fresh = PatchReader({name: tensor.clone() for name, tensor in state.items()})
            for reader in readers:
                where = {name: tensor.data_ptr() for name, tensor in reader.state.items()}
                had = bits_of(reader.state)
                assert reader.apply(data)
                assert bits_of(reader.state) == bits_of(state)
                reader.verify()
                assert reader.fingerprint == fresh.fingerprint == writer.fingerprint
                for name in where.keys() & state.keys():
                    if had[name][:2] == (state[name].dtype, state[name].shape):
                        assert reader.state[name].data_ptr() == where[name]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(data=st.data())
@settings(max_examples=30)
def test_ordered_integers_are_in_the_order_of_numbers(kind: Words, data: st.DataObject) -> None:
    words = np.array(data.draw(st.lists(st.integers(0, (1 << kind.bits) - 1), min_size=1)), kind.dtype)
    ordered = kind.ordered(words)
    assert (kind.ordered(ordered) == words).all()
    if kind.mantissa is not None and kind.bits == 32:
        values, integers = words.view(np.float32), ordered.view(np.int32)
        finite = np.isfinite(values)
        order = np.argsort(integers[finite], kind="stable")
        assert (np.diff(values[finite][order].astype(np.float64)) >= 0).all()


def test_a_patch_is_shorter_than_places_and_differences_can_be_that_ignore_the_old_weights() -> None:
    """Entropies: of a changed bit for each weight, and of the differences."""
    generator = torch.Generator().manual_seed(0)
    exact = 0.02 * torch.randn(1 << 20, generator=generator)
    for update, most in ((1e-7, 0.9), (1e-6, 0.8), (1e-5, 0.85)):
        old, new = exact.bfloat16(), (exact + update * torch.randn(1 << 20, generator=generator)).bfloat16()
        ordered = [Words(16, 7).ordered(t.view(torch.int16).numpy().view(np.uint16)).view(np.int16) for t in (old, new)]
        difference = (ordered[1] - ordered[0])[ordered[1] != ordered[0]]
        shares = [np.array([len(difference), len(old) - len(difference)]) / len(old)]
        shares.append(np.unique(difference, return_counts=True)[1] / len(difference))
        entropy = [-(p * np.log2(p)).sum() * n for p, n in zip(shares, (len(old), len(difference)), strict=True)]
        data = PatchWriter({"w": old}).write({"w": new})
        assert 8 * len(data) < most * sum(entropy), (update, 8 * len(data) / sum(entropy))


def test_a_patch_is_hardly_longer_than_the_weights() -> None:
    noise = [torch.randint(-(1 << 15), 1 << 15, (50_000,), dtype=torch.int16) for _ in range(2)]
    for dtype in (torch.bfloat16, torch.int16, torch.float64):
        old, new = ({"w": x[:48_000].view(dtype)} for x in noise)
        assert len(PatchWriter(old).write(new)) < 96_000 + 500


def test_threads_make_no_difference() -> None:
    old, new = two_states(30_000)
    with small_sections(1000):
        alone = PatchWriter(old).write(new)
        torch.set_num_threads(3)
        try:
            reader = PatchReader({name: tensor.clone() for name, tensor in old.items()})
            assert PatchWriter(old).write(new) == alone
            reader.apply(alone)
        finally:
            torch.set_num_threads(1)
    assert bits_of(reader.state) == bits_of(new)


def test_bytes_of_former_versions_are_read() -> None:
    """The format is that of `GOLDEN`, whatever zlib makes of new patches."""
    reader = PatchReader()
    for data in GOLDEN:
        reader.apply(base64.b85decode(data))
    assert reader.fingerprint == GOLDEN_FINGERPRINT
    assert reader.state["w"].tolist() == [1.0, 1.0078125, 0.0, -0.0, 3.0]


# ---- tensors of all kinds


def test_autograd_sees_that_weights_have_changed() -> None:
    weight = nn.Parameter(torch.ones(3))
    writer, reader = PatchWriter({"w": weight}), PatchReader({"w": weight})
    loss = (weight * weight).sum()
    reader.apply(writer.write({"w": torch.full((3,), 2.0)}))
    assert weight.tolist() == [2, 2, 2]
    assert weight.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_targets_may_have_gaps_and_come_from_inference() -> None:
    with torch.inference_mode():
        inference = torch.zeros(6, 4, dtype=torch.bfloat16)
    complex_ = torch.zeros(6, 4, dtype=torch.complex64)
    for target in (torch.zeros(4, 6).t(), torch.zeros(6, 8)[:, ::2], inference, complex_.conj(), complex_.t().t()):
        old = torch.zeros(6, 4, dtype=target.dtype)
        for new in (torch.arange(24).reshape(6, 4).to(target.dtype), old + torch.eye(6, 4).to(target.dtype)):
            target.zero_() if not target.is_inference() else None
            data = PatchWriter({"w": target.clone()}).write({"w": new})
            PatchReader({"w": target}).apply(data)
            assert torch.equal(target, new)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_dimension_may_have_gaps(dtype: torch.dtype) -> None:
    for target in (torch.zeros(8, dtype=dtype)[::2], torch.zeros(2, 3, dtype=dtype)[:1, 0]):
        new = drawn_tensor(np.random.default_rng(1), dtype, tuple(target.shape))
        writer = PatchWriter({"w": target})
        PatchReader({"w": target}).apply(writer.write({"w": new}))
        assert as_bytes(target) == as_bytes(new)


def test_tied_tensors_are_sent_once() -> None:
    old, new = two_states()
    alone = len(PatchWriter(old).write(new))
    tied = [{**state, "z": state["a"]} for state in (old, new)]
    data = PatchWriter(tied[0]).write(tied[1])
    assert len(data) < alone + 100
    memory = old["a"].clone()
    for state in ({"a": memory, "b": old["b"].clone(), "z": memory}, {k: v.clone() for k, v in tied[0].items()}):
        reader = PatchReader(state)
        reader.apply(data)
        assert bits_of(reader.state) == bits_of(tied[1])


def test_tensors_that_share_memory_here_must_not_differ() -> None:
    old, new = two_states()
    memory = old["a"].clone()
    reader = PatchReader({**old, "a": memory, "z": memory})
    data = PatchWriter({**old, "z": old["a"].clone()}).write({**new, "z": old["a"].clone()})
    with pytest.raises(PatchError, match="z and a share memory here, and differ in the patch: copy one"):
        reader.apply(data)
    assert torch.equal(memory, old["a"])
    twins = PatchWriter({**old, "z": old["a"].clone()}).write({**new, "z": new["a"].clone()})
    reader.apply(twins)  # equal values, though not in the same memory
    assert torch.equal(memory, new["a"])


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"w": [1.0]}, TypeError, "got list under 'w'"),
        ({3: torch.ones(1)}, TypeError, "got Tensor under 3"),
        ({"w": torch.ones(2, 2).to_sparse()}, ValueError, "w has layout torch.sparse_coo"),
        ({"w": torch.ones(2, device="meta")}, ValueError, "w has layout torch.strided, torch.float32 on meta"),
    ],
    ids=str,
)
def test_what_is_no_tensor_is_named(state: State, error: type[Exception], message: str) -> None:
    for call in (lambda: PatchWriter(state), lambda: PatchWriter().write(state)):
        with pytest.raises(error, match=message):
            call()


def test_expanded_tensors_are_read_and_not_written() -> None:
    data = PatchWriter().write({"w": torch.ones(1).expand(4)})
    reader = PatchReader()
    reader.apply(data)
    assert reader.state["w"].tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"w is expanded.*Pass w.contiguous\(\)"):
        PatchReader({"w": torch.zeros(1).expand(4)}).apply(data)
    with pytest.raises(ValueError, match="full_every is 0"):
        PatchWriter(full_every=0)


# ---- the chain


def test_another_base_is_refused_by_name_and_remedy() -> None:
    old, new = two_states()
    writer = PatchWriter(old)
    first, second = writer.write(new), writer.write(old)
    reader = PatchReader({name: tensor.clone() for name, tensor in old.items()})
    before = bits_of(reader.state)
    header = opened(second)[0]
    with pytest.raises(PatchError, match="ask for a full snapshot") as caught:
        reader.apply(second)
    assert all(name in str(caught.value) for name in (header["base"], header["result"], reader.fingerprint))
    assert bits_of(reader.state) == before
    assert reader.apply(first)
    with pytest.raises(PatchError):
        reader.apply(first)  # once more
    assert reader.apply(second)
    assert bits_of(reader.state) == before


def test_weights_that_somebody_else_wrote_to_are_noticed() -> None:
    old, new = two_states()
    reader = PatchReader({name: tensor.clone() for name, tensor in old.items()})
    writer = PatchWriter(old)
    assert reader.fingerprint == writer.fingerprint
    place = int((old["a"] != new["a"]).nonzero()[0])
    reader.state["a"].view(torch.int16)[place] ^= 0x10
    before = bits_of(reader.state)
    with pytest.raises(PatchError, match="somebody else has written to the reader's"):
        reader.apply(writer.write(new))
    with pytest.raises(PatchError, match="ask for a full snapshot"):
        reader.verify()
    assert bits_of(reader.state) == before
    reader.apply(writer.write(new, full=True))
    assert bits_of(reader.state) == bits_of(new)


def test_streams_hold_patches_one_after_the_other() -> None:
    states = drawn_states(3, 5)
    writer, reader = PatchWriter(), PatchReader()
    data = b"".join(writer.write(state) for state in states)

    class Slow(io.BytesIO):
        """Gives a few bytes at a time, as sockets do."""

        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(size or 0, 7))

    for stream in (io.BytesIO(data), Slow(data)):
        reader = PatchReader()
        for state in states:
            assert reader.apply(stream)
            assert bits_of(reader.state) == bits_of(state)
        assert not reader.apply(stream)
    with pytest.raises(PatchError, match=r"has \d+ bytes and should have"):
        PatchReader().apply(io.BytesIO(data[:100]))
    assert read_patch(io.BytesIO(b"")) is None


# ---- bytes that may be anything


def refuses(reader: PatchReader, data: bytes) -> bool:
    """True if this is refused, and changes nothing."""
    before, known = bits_of(reader.state), reader.fingerprint
    try:
        reader.apply(data)
    except PatchError:
        assert bits_of(reader.state) == before
        assert reader.fingerprint == known
        return True
    return False


def test_each_byte_counts() -> None:
    old, new = two_states(300)
    data = PatchWriter(old).write(new)
    reader = PatchReader({name: tensor.clone() for name, tensor in old.items()})
    for place in range(len(data)):
        wrong = bytearray(data)
        wrong[place] ^= 1 << (place % 8)
        assert refuses(reader, bytes(wrong)), place
        assert refuses(reader, data[:place])
    assert refuses(reader, data + b"\0")
    assert not refuses(reader, data)
    assert bits_of(reader.state) == bits_of(new)


@settings(max_examples=300)
@given(st.integers(0, 10**9), st.booleans())
def test_damage_under_a_right_digest_is_refused_or_harmless(seed: int, full: bool) -> None:
    """As somebody writes who forges digests: any exception but PatchError fails, and so does any half of a change."""
    rng = np.random.default_rng(seed)
    old, new = two_states(int(rng.integers(1, 2000)), rng.choice([0.01, 0.3]))
    with small_sections(500):
        data = bytearray(PatchWriter(old).write(new, full=full)[:-32])
        for _ in range(rng.integers(1, 4)):
            first = int(rng.integers(patch.PREFIX.size, len(data)))
            last = min(len(data), first + int(rng.integers(1, 5)))
            data[first:last] = rng.integers(0, 256, last - first, np.uint8).tobytes()
        reader = PatchReader({name: tensor.clone() for name, tensor in old.items()})
        if not refuses(reader, sealed(bytes(data))):
            assert bits_of(reader.state) == bits_of(new)


@settings(max_examples=400)
@given(st.integers(0, 10**9))
def test_any_section_gives_words_or_is_refused(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kind = KINDS[rng.integers(len(KINDS))]
    count = int(rng.integers(1, 700))
    old = rng.integers(0, 1 << kind.bits, count, np.uint64).astype(kind.dtype)
    new = old + (rng.random(count) < rng.choice([0.02, 0.3])).astype(kind.dtype)
    with small_sections(500, grouped=2):
        sound, _ = sections.encode(old, new, kind)
        places, words = sections.decode(memoryview(sound), old, count, kind)
        now = old.copy()
        now[slice(None) if places is None else places] = words
        assert (now == new).all()
        data = bytearray(sound)
        fate = rng.random()
        if fate < 0.2:
            data = bytearray(rng.integers(0, 256, rng.integers(0, 200), np.uint8).tobytes())
            data[:1] = bytes([rng.integers(2)])
        else:
            for _ in range(rng.integers(1, 5)):
                data[int(rng.integers(len(data)))] = int(rng.choice([0, 1, 2, 3, 255, int(rng.integers(256))]))
            data = data[: rng.integers(len(data) + 1)] if fate < 0.3 else data
        try:
            places, words = sections.decode(memoryview(bytes(data)), old, count, kind)
        except PatchError:
            return
    assert words.dtype == kind.dtype
    if places is None:
        assert len(words) == count
    else:
        assert len(places) == len(words) == len(np.unique(places))
        assert not len(places) or 0 <= places.min() <= places.max() < count


RECORD = ["b", "float32", [7, 3], "kept"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors": [["w", "float32", [1 << 40], "new"]]}, "not in .* bytes"),
        ({"tensors": [["w", "float32", [1 << 47, 1 << 47, 1 << 47], "new"]]}, "not in .* bytes"),
        ({"tensors": [["w", "float32", [-1], "new"]]}, "is no tensor of a patch"),
        ({"tensors": [["w", "float32", [True], "new"]]}, "is no tensor of a patch"),
        ({"tensors": [["w", "qint8", [1], "new"]]}, "is no tensor of a patch"),
        ({"tensors": [["w", ["float32"], [1], "new"]]}, "is no tensor of a patch"),
        ({"tensors": [RECORD, RECORD]}, "is no tensor of a patch"),
        ({"tensors": [RECORD, 5]}, "is no tensor of a patch"),
        ({"tensors": [["c", *RECORD[1:]]]}, "is not in these weights"),
        ({"tensors": [["b", "float32", [21], "kept"]]}, "is not in these weights"),
        ({"tensors": [["b", "float32", [7, 3], "=a"]]}, "is not in these weights"),
        ({"tensors": [RECORD, ["c", "float32", [3, 7], "=b"]]}, "is not in these weights"),
        ({"tensors": [RECORD, ["c", "float32", [0], "old"]]}, "is not in these weights"),
        ({"tensors": [RECORD]}, "sections, divided as"),
        ({"tensors": {}}, "header cannot be read"),
        ({"sections": [1 << 60, -(1 << 60)]}, "sections, divided as"),
        ({"sections": ["1", 2]}, "sections, divided as"),
        ({"base": 3}, "header cannot be read"),
        ({"base": None}, "is not in these weights"),
        ({"result": "0" * 64}, "this patch would make the weights"),
    ],
    ids=str,
)
def test_headers_may_say_anything(changes: dict, message: str) -> None:
    old, new = two_states()
    reader = PatchReader({name: tensor.clone() for name, tensor in old.items()})
    data = with_header(PatchWriter(old).write(new), **changes)
    with pytest.raises(PatchError, match=message):
        reader.apply(data)
    assert bits_of(reader.state) == bits_of(old)


def test_headers_need_not_be_json() -> None:
    for text in (b"[" * 100_000, b"\xff", b"1" * 10_000, b"null", b"{}"):
        packed = zlib.compress(text)
        data = sealed(patch.PREFIX.pack(patch.MAGIC, patch.VERSION, len(packed), 0) + packed)
        with pytest.raises(PatchError, match="header cannot be read"):
            PatchReader().apply(data)


def test_lengths_ask_for_no_memory_that_has_not_come() -> None:
    old, new = two_states()
    PatchReader({name: tensor.clone() for name, tensor in old.items()}).apply(PatchWriter(old).write(new))  # compiles
    claims = patch.PREFIX.pack(patch.MAGIC, patch.VERSION, (1 << 32) - 1, (1 << 64) - 1)
    bomb = zlib.compress(bytes(1 << 28), 9)[2:-4]
    giant = ["w", "float32", [1 << 21], "new"]
    packed = zlib.compress(patch.json.dumps({"base": None, "result": "", "tensors": [giant], "sections": [1]}).encode())
    inside = sections.struct.pack("<I", len(bomb) | sections.DEFLATED) + bomb
    bombs = [claims, claims + bytes(99), sealed(patch.PREFIX.pack(b"GWPATCH", 1, len(packed), 1) + packed + b"\1")]
    tracemalloc.start()
    try:
        begin = time.process_time()
        for data in bombs:
            with pytest.raises(PatchError):
                PatchReader().apply(data)
            with pytest.raises(PatchError):
                PatchReader().apply(io.BytesIO(data))
        with pytest.raises(PatchError, match="has not the 10 bytes"):
            sections.Reader(memoryview(inside)).unpack(10)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        assert time.process_time() - begin < 30
    finally:
        tracemalloc.stop()


def test_nothing_is_written_before_all_is_verified() -> None:
    """A fault in the last section leaves the first ones alone."""
    old, new = two_states(5000)
    with small_sections(500):
        data = PatchWriter(old).write(new)
        reader = PatchReader({name: tensor.clone() for name, tensor in old.items()})
        calls = []

        def failing(part: memoryview, *rest: Any) -> Any:
            calls.append(part)
            if len(calls) == len(opened(data)[0]["sections"]):
                raise PatchError("the last one")
            return sections.decode(part, *rest)

        with mock.patch.object(patch, "decode", failing), pytest.raises(PatchError, match="the last one"):
            reader.apply(data)
        assert len(calls) > 5
        assert bits_of(reader.state) == bits_of(old)
        reader.apply(data)
    assert bits_of(reader.state) == bits_of(new)


def test_another_format_s_version_is_named() -> None:
    data = bytearray(PatchWriter().write({}))
    data[7] = 3
    with pytest.raises(PatchError, match="has format 3, and this gradwire reads 1 and 2"):
        PatchReader().apply(bytes(data))
    with pytest.raises(PatchError, match="is not how a patch begins"):
        PatchReader().apply(b"PK\x03\x04" + bytes(100))
    assert issubclass(gradwire.PatchError, ValueError)
    assert struct.calcsize("<7sBIQ") == 20
