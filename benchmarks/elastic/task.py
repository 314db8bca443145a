"""The task that replicas train: a student of 1 M parameters learns the answers of a fixed teacher, a step at a time."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, CLASSES = 128, 16
BATCH, HELD_OUT = 32, 4096


class Task:
    """A teacher of random weights; its samples never end, so replicas with other seeds see other data.

    Args:
        seed: of the student; the teacher is always the same.
    """

    def __init__(self, seed: int) -> None:
        torch.manual_seed(0)
        self.teacher = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, CLASSES)).requires_grad_(False)
        for values in self.teacher.parameters():
            values.mul_(3)
        torch.manual_seed(seed)
        self.student = nn.Sequential(
            nn.Linear(FEATURES, 1024), nn.ReLU(), nn.Linear(1024, 832), nn.ReLU(), nn.Linear(832, CLASSES)
        )

    def batch(self, generator: torch.Generator, samples: int = BATCH) -> tuple[Tensor, Tensor]:
        x = torch.randn(samples, FEATURES, generator=generator)
        return x, self.teacher(x).argmax(1)

    def loss(self, generator: torch.Generator) -> Tensor:
        """Cross-entropy of a batch."""
        x, y = self.batch(generator)
        return F.cross_entropy(self.student(x), y)

    @torch.no_grad()
    def held_out(self, state: Tensor) -> float:
        """Cross-entropy of a student with these parameters, on samples that no replica draws."""
        nn.utils.vector_to_parameters(state, self.student.parameters())
        x, y = self.batch(torch.Generator().manual_seed(2**40), HELD_OUT)
        return F.cross_entropy(self.student(x), y).item()

    def state(self) -> Tensor:
        """The student's parameters, one after the other."""
        return nn.utils.parameters_to_vector(self.student.parameters()).detach()


class Pace:
    """Steps of a fixed time, whatever the processors take for one, as on machines that do nothing else.

    Args:
        seconds: of a step.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Count from now: a wait for other replicas is not caught up."""
        self.due = time.monotonic() + self.seconds

    def wait(self) -> None:
        """Sleep until the step's time is over. A step that took longer is not caught up either."""
        left = self.due - time.monotonic()
        if left > 0:
            time.sleep(left)
        self.due += self.seconds
        if left < 0:
            self.restart()
