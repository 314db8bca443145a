"""Patches of weights: what a trainer sends to many readers after a step, in as few bytes as can be."""

from .patch import PatchReader, PatchWriter, read_patch
from .sections import PatchError

__all__ = ["PatchError", "PatchReader", "PatchWriter", "read_patch"]
