"""A server whose model follows a sharded trainer: it applies the patches that have come between two requests.

    python examples/follow_trainer.py FOLDER        answers each line of numbers with the model's output

Each rank of the trainer writes its part of a step, under another name first, so that no part is read half-written:

    writer = PatchWriter(part=(dist.get_rank(), dist.get_world_size()))
    ...
    part = f"{FOLDER}/{step:06}.{dist.get_rank()}"
    Path(f"{part}.new").write_bytes(writer.write(model.state_dict()))
    os.rename(f"{part}.new", f"{part}.part")
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from gradwire import PatchError, PatchReader
from torch import nn


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))


class Follower:
    """Keeps a model at the newest step of which all parts are there."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        self.reader, self.folder, self.step = PatchReader(model.state_dict()), folder, 0

    def catch_up(self) -> None:
        """Apply what has come since the last call; where parts are missing, the model stays as it is."""
        while parts := sorted(self.folder.glob(f"{self.step:06}.*.part")):
            try:
                self.reader.apply([part.read_bytes() for part in parts])
            except PatchError as error:
                print(f"still at step {self.step - 1}: {error}", file=sys.stderr)
                return
            self.step += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    model = new_model()
    follower = Follower(model, parser.parse_args().folder)
    for request in sys.stdin:
        follower.catch_up()
        with torch.inference_mode():
            answer = model(torch.tensor([float(number) for number in request.split()]))
        print(f"step {follower.step - 1}: {answer.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
