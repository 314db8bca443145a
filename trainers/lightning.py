"""Lightning: a callback for every strategy that wraps the model in DDP, on CPUs too."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

from ..hooks import CompressState
from .registering import register_hook


class LightningCallback(Callback):
    """Compresses the gradients of `Trainer.fit`, and saves the state in Lightning's checkpoints.

    Lightning's own slot, `DDPStrategy(ddp_comm_state=…, ddp_comm_hook=…)`, takes a `CompressState(codec)` too, but
    registers hooks on CUDA only, and saves nothing.

    A checkpoint has the mean of all ranks' residuals (`consolidated_state_dict`): it is as large as the model in
    float32, loads on any number of ranks, and nothing is lost. Making it is a collective, as Lightning's
    `save_checkpoint` is. With one process nothing is compressed, and the state of a loaded checkpoint is saved
    unchanged in the next one. The GradScaler of "16-mixed" is followed.

    Args:
        state: from `CompressState(codec)`.
        strict: `CompressState.load_state_dict`'s.

    Raises:
        TypeError: in `fit`, the strategy does not wrap the model in DDP.
        RuntimeError: in `fit`, the model has another hook.
    """

    def __init__(self, state: CompressState, *, strict: bool = True) -> None:
        self.state, self.strict = state, strict

    @property
    def state_key(self) -> str:
        return "gradwire"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            if trainer.world_size == 1:
                return
            raise TypeError(
                f"{type(trainer.strategy).__name__} makes no DistributedDataParallel of the model: LightningCallback "
                "goes with strategy='ddp'"
            )
        register_hook(model, self.state, getattr(trainer.precision_plugin, "scaler", None))

    def state_dict(self) -> dict[str, Any]:
        if self.state.bound:
            return self.state.consolidated_state_dict()
        try:
            return self.state.state_dict()  # the loaded checkpoint, as long as there is no model
        except RuntimeError:
            return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Before there is a model: Lightning restores callbacks first.
        self.state.load_state_dict(state_dict, self.strict)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.state_key not in checkpoint["callbacks"] and checkpoint["global_step"] > 0 and trainer.world_size > 1:
            warnings.warn(
                "the checkpoint has nothing of gradwire's: it goes on without residuals",
                stacklevel=2,
            )
