"""Codecs that change in the course of training: functions of the step, for `CompressState(codec=…)`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .codec import Codec, check_number
from .codecs.topk import TopK


@dataclass(frozen=True)
class Stages:
    """A function of the step: some codecs for equally many steps each, and another one afterwards.

    Attributes:
        warmup: by stage.
        steps: of all stages together; the first ones are longer where it is no multiple of their number.
        final: from step `steps` on.
    """

    warmup: tuple[Codec, ...]
    steps: int
    final: Codec

    def __call__(self, step: int) -> Codec:
        return self.warmup[step * len(self.warmup) // self.steps] if step < self.steps else self.final


def dgc(density: float = 0.001, *, warmup_steps: int, stages: int = 5, values: torch.dtype = torch.float32) -> Stages:
    """`TopK` whose density falls to what it is to be in `stages` equal stages, as in Deep Gradient Compression (Lin et
    al., ICLR 2018): stage e, from 0, has max(c^(e+1), density) with c = density^(1/(stages+1)), as in the published
    code. For 0.001 in five stages these are 0.316, 0.1, 0.0316, 0.01 and 0.00316.

        CompressState(model, schedules.dgc(0.001, warmup_steps=5 * steps_per_epoch), error_feedback=Momentum(0.9))

    Args:
        density: after the warm-up, in (0, 1].
        warmup_steps: W ≥ 0, all stages together; published results have five epochs, and a learning rate that rises
            meanwhile. Stages that have no step, where W is small, are left out.
        stages: 1 or more.
        values: as `TopK` has them.

    Returns:
        A function of the step, equal and picklable, which gives the same codec throughout a stage.

    Raises:
        ValueError: an argument is none of these.
    """
    check_number("density", density, 0.0, 1.0)
    for name, value, least in (("warmup_steps", warmup_steps, 0), ("stages", stages, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: expected a whole number of {least} or more")
    ratio = density ** (1.0 / (stages + 1))
    # Rounded, since machines differ in the last digit of a power, and ranks must not.
    warm = (float(f"{max(ratio ** (stage + 1), density):.6g}") for stage in range(stages))
    return Stages(tuple(TopK(one, values=values) for one in warm), warmup_steps, TopK(density, values=values))
