"""An entropy coder behind the codecs: the bits that it saves, what it takes of one core, and on which links it pays.

The bytes of a wire's codes and indices go through rANS (an experiment: `rans`), zlib's Huffman codes and, where it is
installed, zstandard at level 1 (Huffman codes too), each field as one stream; units, levels and scales travel as they
are, and so does what does not shrink. A byte has 2 codes of QSGD's 4 bits, 5 ternary ones or 4 of ChunkedTopK, so that
coding by bytes costs a part of coding by elements.

Entropies: of all codes of a wire by one table, and of each block's by a table of its own, which costs nothing (so it is
less than any coder reaches, and of short blocks also less than their source has). Of indices: the ways to place them.

An exchange by `gather` takes of an element: encode and code once, then for each other rank bits / rate and the coder's
decoding, and the mean of all wires, one after the other. The coder pays below the rate at which it takes as long as the
bits that it saves. Coders run on bytes that lie one behind the other, in the cache: inside a codec they would cost no
less.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...compress import QSGD, ChunkedTopK, Codec, Ternary, TernGrad, new_draw
from ..common import report
from ..common.arguments import add_output, expect_at_least
from ..common.arms import label
from ..common.progress import Progress
from . import inputs
from .quality import codes, entropy, log2_ways, symbol_entropy
from .speed import timed, torch_threads

#: The last three are what `recommend("adamw", ratio=…)` names for 20, 100 and 200 times fewer bytes.
CODECS: tuple[Codec, ...] = (
    QSGD(bits=8),
    QSGD(),
    TernGrad(),
    Ternary(),
    ChunkedTopK(k=1024),
    ChunkedTopK(k=576, chunk=16384),
    ChunkedTopK(k=986, chunk=65536),
)
RATES = {"100mbit": 1e8, "1gbit": 1e9}
RANKS = (2, 8)
#: Bytes by one table of rANS: half a per cent of them.
SEGMENT = 1 << 17


class Coder(NamedTuple):
    """Bytes there and back: `encode` returns what `size` has the bytes of, `decode` writes into an array."""

    encode: Callable[[np.ndarray], Any]
    decode: Callable[[Any, np.ndarray], object]
    size: Callable[[Any], int]


def coders() -> dict[str, Coder]:
    """By name: rANS, zlib's Huffman codes alone, and zstandard at level 1 if it can be imported."""
    from . import rans  # with numba, which the other commands must do without where it is broken

    def inflate(coded: bytes, out: np.ndarray) -> None:
        out[:] = np.frombuffer(zlib.decompress(coded), np.uint8)

    def deflate(symbols: np.ndarray) -> bytes:
        coder = zlib.compressobj(level=1, strategy=zlib.Z_HUFFMAN_ONLY)
        return coder.compress(symbols.data) + coder.flush()

    found = {
        "rANS": Coder(partial(rans.encode, segment=SEGMENT), rans.decode, lambda coded: sum(s.nbytes for s in coded)),
        "zlib": Coder(deflate, inflate, len),
    }
    try:
        zstandard = importlib.import_module("zstandard")
    except ModuleNotFoundError:
        return found
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def expand(coded: bytes, out: np.ndarray) -> None:
        out[:] = np.frombuffer(decompressor.decompress(coded), np.uint8)

    return found | {"zstd": Coder(compressor.compress, expand, len)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--inputs", nargs="+", choices=inputs.INPUTS, default=["captured", "gaussian"], help="(default: both)"
    )
    parser.add_argument("--numel", type=int, default=3 << 18, help="elements (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="timings of each operation (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=20, help="encodes first, in turn with four gradients")
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench entropy`."""
    expect_at_least(options, numel=1, repeats=1, warmup=0)
    arguments = {name: getattr(options, name) for name in ("inputs", "numel", "repeats", "warmup")}
    recorded = inputs.captured(None) if "captured" in options.inputs else None
    with torch_threads(1), Progress("entropy", len(options.inputs) * len(CODECS)) as progress:
        result = report.document("entropy", arguments)
        result["zstandard"], result["rows"] = report.version("zstandard"), []
        for name in options.inputs:
            gradients = inputs.sequence(name, options.numel, 4, recorded)
            for codec in CODECS:
                progress.advance(1, f"{label(codec)} on {name} gradients")
                row = measure(codec, gradients, options.repeats, options.warmup)
                result["rows"].append({"gradients": name, **row})
    report.deliver(result, tables(result), options)
    return 0


@torch.no_grad()
def measure(codec: Codec, gradients: Sequence[Tensor], repeats: int, warmup: int) -> dict[str, Any]:
    """One codec's bits and times, on the wire that it writes after `warmup` steps: with a residual, if it has one."""
    numel, draw = gradients[0].numel(), new_draw(0)
    kept = codec.with_feedback() if codec.default_feedback else codec
    wire, residual = torch.empty(kept.wire_bytes(numel), dtype=torch.uint8), torch.zeros(numel)
    workspace, out, wires = (
        kept.workspace(numel),
        torch.zeros(numel),
        torch.empty(max(RANKS), len(wire), dtype=torch.uint8),
    )

    def encode(grad: Tensor) -> None:
        if codec.default_feedback:
            kept.encode_feedback(grad, residual, wire, draw, workspace)
        else:
            kept.encode(grad, wire, draw, workspace)

    def mean(ranks: int, _: Tensor) -> None:
        kept.decode_mean([wires[:ranks]], out, workspace)

    for step in range(warmup + 1):
        draw[1] = step
        encode(gradients[step % len(gradients)])
    wires.copy_(wire)
    bytes_ = wire.numpy().copy()
    found = coders()
    pieces = streams(kept, bytes_, numel)
    room = [np.empty_like(piece) for piece in pieces]
    coded = {name: [coder.encode(piece) for piece in pieces] for name, coder in found.items()}
    sizes = {}
    for name, coder in found.items():
        shrunk = [min(coder.size(one), len(piece)) for one, piece in zip(coded[name], pieces, strict=True)]
        sizes[name] = len(bytes_) - sum(map(len, pieces)) + sum(shrunk)
        for one, into, piece in zip(coded[name], room, pieces, strict=True):
            coder.decode(one, into)
            assert np.array_equal(into, piece), f"{name} did not give back what it was given"
    # A piece that does not shrink is known not to from the step before: it costs nothing.
    worth = {
        name: [i for i, piece in enumerate(pieces) if coder.size(coded[name][i]) < len(piece)]
        for name, coder in found.items()
    }
    operations: dict[str, Callable[[Tensor], object]] = {
        "encode": encode,
        **{f"mean of {ranks}": partial(mean, ranks) for ranks in RANKS},
    }

    def code(name: str, _: Tensor) -> None:
        for i in worth[name]:
            found[name].encode(pieces[i])

    def expand(name: str, _: Tensor) -> None:
        for i in worth[name]:
            found[name].decode(coded[name][i], room[i])

    for name in found:
        operations[f"{name} encode"] = partial(code, name)
        operations[f"{name} decode"] = partial(expand, name)
    times = timed(operations, gradients, repeats, 1, draw)
    return {
        "label": label(codec),
        "codec": repr(kept),
        "bits": 8 * len(bytes_) / numel,
        "entropy": entropy_of(kept, bytes_, numel, by_block=False),
        "entropy_by_block": entropy_of(kept, bytes_, numel, by_block=True),
        "coded_bits": {name: 8 * size / numel for name, size in sizes.items()},
        "ns": {name: report.median(values) / numel * 1e9 for name, values in times.items()},
        "times_s": times,
    }


def streams(codec: Codec, wire: np.ndarray, numel: int) -> list[np.ndarray]:
    """The bytes of a wire's codes and indices, each field one behind the other, uint8."""
    (part,) = codec.parts(numel)
    records = part.view(wire)
    fields = [records[name] for name in records.dtype.names or ()]
    return [np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in fields if one.dtype.kind == "u"]


def entropy_of(codec: Codec, wire: np.ndarray, numel: int, by_block: bool) -> float:
    """Bits an element that an ideal coder would need: `quality.entropy`, of `ChunkedTopK`'s codes too, or with a table
    for each block."""
    (part,) = codec.parts(numel)
    records = part.view(wire)
    found = codes(codec, records)
    assert found is not None
    if not by_block and not isinstance(codec, ChunkedTopK):
        return entropy(codec, wire, numel)
    each = [symbol_entropy(row) * len(row) for row in found]
    spent = sum(each) if by_block else symbol_entropy(found) * found.size
    for field in part.fields:
        spent += 8 * np.dtype(field.dtype).itemsize * field.count * len(records) if field.dtype == "<f4" else 0
    if isinstance(codec, ChunkedTopK):
        spent += sum(log2_ways(codec.chunk, codec.k) for _ in records)
    return spent / numel


def tables(result: Mapping[str, Any]) -> list[report.Table]:
    """Bits of every codec, then what coders take and where they pay."""
    arguments, notes = result["arguments"], [report.describe(result["environment"])]
    names = list(result["rows"][0]["coded_bits"])
    version = result["zstandard"]
    notes.append(f"{arguments['numel']:,} float32; zstd: {f'zstandard {version}' if version else 'not installed'}")
    bits = [
        [row["label"], row["gradients"], *(f"{row[name]:.3f}" for name in ("bits", "entropy", "entropy_by_block"))]
        + [f"{row['coded_bits'][name]:.3f}" for name in names]
        for row in result["rows"]
    ]
    columns = ["codec", "gradients", "on the wire", "entropy", "by block", *names]
    found = [report.Table("Bits an element", columns, bits, "\n".join(notes))]
    rows = []
    for row in result["rows"]:
        cells = [row["label"], row["gradients"]]
        each = {name: against(row, name) for name in names}
        for name in names:
            cells.append(f"{row['ns'][f'{name} encode']:.2f} + {row['ns'][f'{name} decode']:.2f}")
            cells.append(f"{each[name]['pays_below'][RANKS[0]] / 1e6:.0f}")
        for rate, ranks in itertools.product(RATES, RANKS):
            plain, coded = each[names[0]]["plain"][rate, ranks], {n: each[n]["coded"][rate, ranks] for n in names}
            best = min(coded, key=coded.__getitem__)
            cells.append(f"{plain:.2f} ns, {coded[best] / plain:.3f} ({best})")
        rows.append(cells)
    columns = ["codec", "gradients"]
    for name in names:
        columns += [f"{name} code + decode, ns", f"pays below, P = {RANKS[0]}, Mbit/s"]
    columns += [f"at {rate}, P = {ranks}; with a coder" for rate, ranks in itertools.product(RATES, RANKS)]
    caption = (
        f"{notes[0]}\none core, medians of {arguments['repeats']} in turns, an element; at a rate: an exchange by "
        "gather without a coder, and what is left of it with the best one"
    )
    return [*found, report.Table("Coders behind codecs", columns, rows, caption)]


def against(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A coder's saved bits; for each number of ranks the rate below which it pays, in bits a second; for each of
    `RATES` and each number of ranks an exchange's ns, without it ("plain") and with it ("coded")."""
    ns, saved = row["ns"], row["bits"] - row["coded_bits"][name]
    # If nothing shrinks, nothing is coded: an empty loop was timed.
    once, each = (ns[f"{name} {way}"] if saved else 0.0 for way in ("encode", "decode"))
    result: dict[str, Any] = {"saved": saved, "pays_below": {}, "plain": {}, "coded": {}}
    for ranks in RANKS:
        others = ranks - 1
        result["pays_below"][ranks] = others * saved / (once + others * each) * 1e9 if saved else 0.0
        for title, rate in RATES.items():
            plain = ns["encode"] + others * row["bits"] / rate * 1e9 + ns[f"mean of {ranks}"]
            result["plain"][title, ranks] = plain
            result["coded"][title, ranks] = plain + once + others * (each - saved / rate * 1e9)
    return result
