"""Golden bytes: what the reference wrote for one gradient when the format was made.

`python tests/support/golden.py` adds missing files to `tests/support/golden/`. It never replaces one: bytes that change
need a new `wire.WIRE_VERSION`, and someone who deletes the old ones on purpose.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gradwire import compress
from gradwire.compress import Codec, new_draw
from gradwire.compress.backends import use_backend
from gradwire.compress.formats.wire import WIRE_VERSION
from strategies import VARIANTS, decode, encode, gradient

FOLDER = Path(__file__).resolve().parent / "golden"
GRADIENT = FOLDER / "gradient.npy"
DRAW = (0x0123456789ABCDEF, 42, -7)


@dataclass(frozen=True)
class Golden:
    codec: Codec
    draw: tuple[int, int, int]
    wire: bytes
    #: SHA-256 of the decoded float32, every NaN as 0x7FC00000.
    decoded: str

    @staticmethod
    def digest(decoded: torch.Tensor) -> str:
        clean = torch.where(decoded.isnan(), torch.tensor(math.nan, device=decoded.device), decoded)
        return hashlib.sha256(clean.cpu().numpy().astype("<f4").tobytes()).hexdigest()


def saved() -> list[Golden]:
    names = {"torch": torch, "inf": math.inf} | {name: getattr(compress, name) for name in compress.__all__}
    goldens = []
    for path in sorted(FOLDER.glob("*.json")):
        text = json.loads(path.read_text())
        assert text["version"] == WIRE_VERSION, f"{path} is of version {text['version']}"
        codec = eval(text["codec"], {"__builtins__": {}}, names)
        goldens.append(Golden(codec, tuple(text["draw"]), bytes.fromhex(text["wire"]), text["decoded"]))
    return goldens


def file_name(codec: Codec) -> str:
    return "".join(c if c.isalnum() or c == "." else "_" for c in str(codec)).strip("_").lower() + ".json"


def make() -> None:
    FOLDER.mkdir(exist_ok=True)
    if not GRADIENT.exists():
        kinds = ("wide", "subnormal", "zeros", "ties", "normal", "tiny", "not finite", "any bits")
        np.save(GRADIENT, torch.cat([gradient(kind, 320, 1) for kind in kinds]).numpy())
    x = torch.from_numpy(np.load(GRADIENT))
    for codec in VARIANTS:
        path = FOLDER / file_name(codec)
        if path.exists():
            continue
        with use_backend("reference"):
            wire = encode(codec, x, new_draw(*DRAW))
            decoded = Golden.digest(decode(codec, wire, x.numel()))
        content = {"version": WIRE_VERSION, "codec": str(codec), "draw": DRAW, "decoded": decoded}
        path.write_text(json.dumps(content | {"wire": wire.numpy().tobytes().hex()}, indent=1) + "\n")
        print(f"wrote {path}")


if __name__ == "__main__":
    make()
