"""Patches of weights: a reader has the writer's bits; whatever the bytes, it takes all of a patch or nothing."""

from __future__ import annotations

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
#: A full snapshot, and a patch of it, as the first version wrote them.
GOLDEN = (
    (
        "47575041544348019b000000890a00000000000078da4d8c4b0ac4201044efd26b176ac75fae2259685a614014a2218b2177"
        "1f333030aba2ea51ef0d31f4046b3d4b6170a47e96012b64528b1331aa2c33a2b23c68cdb3e0d60574c1396154248bc62681"
        "6428698a66d768242d8ad06a603052edede8b07a0f71f6d85a01e6e5c6a0a60b36e621cf39971606ca499073fe07afe7f3a5"
        "62eabcfaa1993dede3d5eae3364c6a2399b0dbfd01662a3a52010200000002000114000080edc13101000000c220fba75e0d"
        "0f600000c0bd006d030080edc1810004410c04c14609caa004a551166550827220ff55fcfd36111111111111111111111111"
        "1111111111111111111111111111111111111111111111111111111111111111111111111111111111111111111111111111"
        "1111111111111111111111111111111111111111111111111111111111111111111111111111111111111111111111111111"
        "1111111111111111111111111111119158628925965862892596586289259658628925965862892596586289259658628925"
        "9658628925965862892596586289259658628925965862892596586289259658628925965862892596586289259658628925"
        "9658628925965862892596586289259658628925965862892596586289259658628925965862892596586289259658628925"
        "9658628925965862892596586289259658628925965862892596586289259658628925965862892596586289259658628925"
        "9658628925965862892596586289259658628925965862892596586289259658628925965862892596586289259658628925"
        "9658628925965862892596586289259658628925965862892596586289259658628925965862892596586289259658628925"
        "965862892596586289259658628925965862892596586289259658628925965862892596c9fa7a4cd6d763b2be1e93f5f598"
        "acafc7647d3d26ebeb31595f8fc9fa7a4cd6d763b2be1e93f5f598acafc7647d3d26ebeb31595f8fc9fa7a4cd6d763b2be1e"
        "93f5f598acafc7647d3d26ebeb31595f8fc9fa7a4cd6d763b2be1e93f5f598acafc7647d3d26ebeb31595f8fc9fa7a4cd6d7"
        "63b2be1e93f5f598acafc7647d3d26ebeb31595f8fc9fa7a4cd6d763b2be1e93f5f598acafc7647d3d26ebeb31595f8fc9fa"
        "7a4cd6d763b2be1e93f5f598acafc7647d3d26ebeb31595f8fc9fa7a4cd6d763b2be1e93f5f598acafc7647d3d26ebeb3159"
        "5f8fc9fa7a4cd6d763b2be1e93f5f598acafc7647d3d26ebeb31595f8fc9fa7a4cd6d763b2be1e93f5f598acafc7647d3d26"
        "ebeb31595f8fc9fa7a4cd6d763b2be1e93f5f598acafc7647d3d26ebeb31595f8fc9fa7a4cd6d763b2be1e93f5f598acafc7"
        "647d3d26ebeb31595f8fc9fa7a4cd6d763b2be1e93f5f598acafc7647d3d26ebeb31595f8fc9fa7a4cd6d763b2be1e93f5f5"
        "98acafc7647d3d26ebeb31595f8fc9fa7a4cd6d763b2be1e93f5f598acafc7647d3d26ebeb7db10600802dc167400c001806"
        "e02b2d497ba9e4da43526949e3da7baaa492b6242d95104e922424499224490821494248922424494892908424c9787f7ccf"
        "c36030d80c16bb91c16405b34b1bfb18c24c1d9647703c3bb7b4bab1a36f94c1272ccd54d731663978f80547c5a7b2b3720b"
        "4b2babeb1a5b3abafb864627185c7c02c2e2d2724c65752d1d7d6353968d838b87b75f607078544c7c526a1a3b232b2737bf"
        "b0b8b4bcb2aabaa6aea1b1a9a5ada3b3bbb76f606878746c628ac1c9c5c3c72f20282c2a2e292d2327cf54545655d7d4d2d6"
        "d1d337343631356759d9d83938b9b8797879fbfaf90706058786474645c7c4c62726a5a4ae4fdbc44ecfc8cccaced99d9b97"
        "5f5058545c525a565e5179aaea6cf5859adabafa86eb8db79a9a5b5adbda3b1e777675f7f4beeaeb1f181cfa383c32fa6d6c"
        "7c6272ea2f8383731a17370f2fdf74fe1902330585844544c5c42524a5a467c9c8cacd969fc35450545256515553d7d09cab"
        "354f7bbe8eaede027d034323e385268b4ccdcc2d589656d636b676f60e8e4ece2eae6eee1e9e5e8bbd7d7c97f82df50f085c"
        "16b43c3824342c3c227245d4cae85531ab63e3e21312d72425a7ac4d5db77e43dac64d9bd95bd2b7666ccbdc9eb5237b67ce"
        "aedd7b72f7e6edcbdf5f70a0f060d1a1e2c325474a8f961d2b3f5e71a2f2e4a9d35567ce9eab3e7fe162cda5dacb7557eaaf"
        "365cbb7ea3f1e6addb4d779aefb6dc6bbddff6a0fd61c7a3c74f3a9f763deb7edef3a2f7e5abd77d6ffadf0ebc1b7c3ff4e1"
        "e3a7e1cf235f46bf7efb3ef663fce7c4afc9df537ffefe633038383839a74de3e2e2e6e6e1e1e5e5e39b3e9d9f7fc60c0181"
        "993305058584848545444445c5c4c4c525242425a5a4a4a567cd9291919595939b3d5b5e7ece1c2653414151514949595945"
        "4555554d4d5d5d43435373ee5c2dad79f3b4b5e7cfd7d1d1d5d5d35bb0405fdfc0c0d0d0c8c8d878e1421393458b4c4dcdcc"
        "cccd2d2c582c4b4b2b2b6b6b1b1b5b5b3b3b7b7b070747472727676717175757373777770f0f4f4f2fafc58bbdbd7d7c7c7d"
        "972cf1f35bbad4df3f20203070d9b2a0a0e5cb838343424243c3c2c2c32322222357ac888a5ab9323a7ad5aa9898d5ab6363"
        "e3e2e2e313121213d7ac494a4a4e4e4959bb363575ddbaf5eb376c484bdbb871d3a6cd9bd9ec2d5bd2d3b76ecdc8d8b62d33"
        "73fbf6acac1d3bb2b377eeccc9d9b56bf7ee3d7b7273f7eecdcbdbb72f3f7ffffe828203070a0b0f1e2c2a3a74a8b8f8f0e1"
        "929223474a4b8f1e2d2b3b76acbcfcf8f18a8a13272a2b4f9e3c75eaf4e9aaaa3367ce9e3d77aebafafcf90b172e5eaca9b9"
        "74a9b6f6f2e5baba2b57eaebaf5e6d68b876edfaf51b371a1b6fdebc75ebf6eda6a63b779a9befde6d69b977afb5f5fefdb6"
        "b6070fdadb1f3eece878f4e8f1e3274f3a3b9f3eedea7af6acbbfbf9f39e9e172f7a7b5fbe7cf5eaf5ebbebe376ffafbdfbe"
        "1d1878f76e70f0fdfba1a10f1f3e7efcf46978f8f3e791912f5f4647bf7efdf6edfbf7b1b11f3fc6c77ffe9c98f8f56b72f2"
        "f7efa9a93f7ffefefdf78f011cc009d3800bb8810778810fa6033fcc00019809822004c22002a22006e22001922005d2300b"
        "644016e46036c8c31c60820228821228830aa8821aa8830668c25cd08279a00df3410774410f16803e1880211881312c0413"
        "5804a66006e660012cb0042bb0061bb0053bb0070770042770061770053770070ff0042f580cdee003beb004fc6029f84300"
        "04c2320882e5100c21100a61100e1110092b200a564234ac8218580db11007f1900089b00692201952602da4c23a580f1b20"
        "0d36c226d80c6cd802e9b01532601b64c276c8821d900d3b210776c16ed803b9b017f2601fe4c37e288003500807a1080e41"
        "311c86123802a57014cae01894c371a88013500927e1149c862a380367e11c54c379b80017a1062e412d5c863ab802f57015"
        "1ae01a5c871bd00837e116dc8626b803cd70175ae01eb4c27d688307d00e0fa1031ec16378029df014bae01974c373e88117"
        "d00b2fe115bc863e7803fdf01606e01d0cc27b18820ff0113ec1307c8611f802a3f015bec17718831f300e3f61027ec124fc"
        "8629f8037fe11f300807e124d30817e1263c8497f091e9849fcc2002642611244244988810512246c48904912452449acc22"
        "324496c891d9449ecc214ca24014891251262a4495a81175a24134c95ca245e6116d329fe8105da24716107d62400c891131"
        "260b890959444c891931271684452c8915b12636c496d8117be2401c891371262ec495b81177e2413c8917594cbc890ff125"
        "4b881f594afc49000924cb4810594e824908092561249c449048b282449195249aac22316435892571249e249044b2862491"
        "649242fe032d000080edc1391200101000413fb7eee3d504228940a0d44eb7b1226ef24bd8c48374293f5694ab50ad0150ab"
        "03f8ce00010400008063000100050000007f7f00008092ea01d322fcc0d0c700fb1abed517e13de219e8882c625daf718ed9"
        "6dbd086e"
    ),
    (
        "4757504154434801cf000000f20200000000000078da4d8ecb6a03310c45ff456b2ffc94acfc8a99853d9621749829b14ba0"
        "a5ff5ea5abac84eee11ee9075a9d0237183d4576ada5e1470829db8a6887b3996be0caec28b59e036571a15317ec8d760ce4"
        "7b4c3d6404030f995fc7529790251530653f30f6b4b3e7dd26e6e1d1d72c16c5650ae879a8df11ed4cc482b9a36bd2bdba96"
        "9cf37a4cb895024df7765d0798e237031ff2b960330586e6e3b8ea0ada28c15afb4e9fafd63f76fa5c49efec5bd9fd5c1815"
        "687eca13369d53f675bfced7553264a371d9f8b4fdfe010cff514c010200000000020002828b040000000001000000550405"
        "0000007d00008005c1010d00000c02a014463280dbe95fe51035173517351735173517351735173517351735173517351735"
        "173517351735173517351735173517351735173517351735a2e6a2e6a2e6a2e6a2e6a2e6a2e6a2e6a2e6a2e6a2e6a2e6a2e6"
        "a2e6a2e6a2e6a2e6a2e6a2e6a2e6a2e6a2e6a2e6a2e6a246d45cd45cd45cf401000000000100000000000000000000000000"
        "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "0000000000000000000001000000938e00008005c141110201100341692321e222052198d82a0cdc671e04bab1582c168bc5"
        "17168bc562b1582c168bc562b1582c168bc5627f168bc562b158bec562b1582c168bc562b1582c66975d76d965975d76ef5d"
        "76d965975d76d965975d76d965975d76d965975d76d965975df6c92ebbecb2cb2ebbecc92ebbecb2cb2ebbecb2cb2ebbecb2"
        "cb2e3b2c168bc562b1fc0100000000b200008005c101010000008220f5ffe78261188661188661188661d8300cc3300cc330"
        "0cc3306c86611886611886611886e1300cc3300cc3300cc3306c18866118866118866118360cc3300cc3300cc3300c636118"
        "8661188661188661d8300cc3300cc3300cc3306c1886611886611886611836c3300cc3300cc3300cc3701886611886611886"
        "6118360cc3300cc3300cc3300c1b86611886611886611886b1300cc3300cc3300cc3306c1886611886611886611876250000"
        "8005c1070100300080202d6f8afda48391ace4242f99c94e6e3292959ce42533d9c94d46f201010500000000020001800400"
        "008063000100010200000006000200000000000200000000000200000000007ad2757468284fe329f13585dfb86d24ebf0d6"
        "63581253a1566184d90a87afe4"
    ),
)
GOLDEN_FINGERPRINT = "e70780a9782f64d5c929c0599f262a8e06e1873629f089177c9779e68d61bed2"
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
    real = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    changed = flat.view(real)
    return (torch.view_as_complex(changed.reshape(-1, 2)) if tensor.is_complex() else changed).reshape(tensor.shape)


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
        fate, name = rng.random(), rng.choice(list(state))
        if fate < 0.1:
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
        reader.apply(bytes.fromhex(data))
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
    data[7] = 2
    with pytest.raises(PatchError, match="has format 2, and this gradwire reads 1"):
        PatchReader().apply(bytes(data))
    with pytest.raises(PatchError, match="is not how a patch begins"):
        PatchReader().apply(b"PK\x03\x04" + bytes(100))
    assert issubclass(gradwire.PatchError, ValueError)
    assert struct.calcsize("<7sBIQ") == 20
