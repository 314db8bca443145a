"""Compile kernels ahead, so that no training has to begin with it: once a machine, or once for all that share a folder.

Takes what is kept already, and compiles the rest. The folder is $GRADWIRE_CACHE, or "gradwire" in $XDG_CACHE_HOME, or
~/.cache/gradwire; an image of a container may bring it along, for anyone to read. Run it with the Python, the versions
and the processor that the training has: other ones need kernels of their own. Needs no other packages than gradwire.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence

import torch

from ...compress import CODECS, Codec
from ...compress.backends import kernel_cache

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = tuple(dict.fromkeys(codec.name for codec in CODECS))
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("codecs", nargs="*", metavar="codec", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=list(DTYPES), help="default: all")
    parser.add_argument("--devices", nargs="+", choices=("cpu", "cuda"), default=devices, help="default: those there")


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench warm`."""
    chosen = {name: [codec for codec in CODECS if codec.name == name] for name in options.codecs}
    unknown = [name for name, codecs in chosen.items() if not codecs]
    if unknown:
        names = ", ".join(dict.fromkeys(codec.name for codec in CODECS))
        raise ValueError(f"unknown codec {unknown[0]!r}: expected one of {names}")
    codecs = [codec for found in chosen.values() for codec in found] or list(CODECS)
    work = [(codec, dtype, device) for device in options.devices for codec in codecs for dtype in options.dtypes]
    folders = kernel_cache.folders()
    if not folders:
        raise ValueError(
            f"nothing can be kept: {kernel_cache.cache_folder()} must be a folder that you, and you alone, can write to"
        )
    print(f"kernels are kept in {folders[-1]}", flush=True)
    silence, kernel_cache.REPORT_AFTER = kernel_cache.REPORT_AFTER, math.inf  # the lines below say it
    try:
        prepare(work)
    finally:
        kernel_cache.REPORT_AFTER = silence
    return 0


def prepare(work: Sequence[tuple[Codec, str, str]]) -> None:
    for number, (codec, dtype, device) in enumerate(work, 1):
        print(f"[{number}/{len(work)}] {codec}, {dtype}, {device} …", end=" ", flush=True)
        began = time.perf_counter()
        place = torch.device(device)
        codec.kernels(place).prepare(codec, DTYPES[dtype], place)
        print(f"{time.perf_counter() - began:.1f} s", flush=True)
