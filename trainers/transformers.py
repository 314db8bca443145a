"""Transformers' Trainer: a callback, which holds the trainer, since callbacks get the model without DDP."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ..hooks import CompressState
from . import files
from .registering import register_hook


class TransformersCallback(TrainerCallback):
    """Compresses the gradients of `Trainer.train`, and saves each rank's state in the Trainer's checkpoints, in a file
    of its own like their random states. With one process nothing is done.

    The Trainer tells callbacks that it has resumed, but not the folder, which is taken from the load of its optimizer.
    If a Trainer loads that otherwise, the folder is `resume_from`, `TrainingArguments.resume_from_checkpoint`, or the
    checkpoint of that step in `output_dir`; it is used only if its log is the one that the Trainer has resumed with. On
    another number of ranks, each gets the mean of all ranks' residuals.

    If `train` begins with another model than the last time, as with `model_init` in each trial of a
    `hyperparameter_search`, the state begins anew, as in `CompressState.bind`.

    Args:
        trainer: the trainer that gets the callback.
        state: from `CompressState(codec)`.
        resume_from: the folder of `train(resume_from_checkpoint=…)`, for Trainers that hide it.
        strict: `CompressState.load_state_dict`'s.

    Raises:
        TypeError: in `train`, the Trainer has not made a `DistributedDataParallel` of the model.
    """

    def __init__(
        self, trainer: Trainer, state: CompressState, resume_from: str | Path | None = None, *, strict: bool = True
    ) -> None:
        self.trainer, self.state, self.resume_from, self.strict = trainer, state, resume_from, strict
        #: The folder from which the Trainer loaded its optimizer, when it began to train.
        self._loaded: str | Path | None = None
        load: Any = getattr(trainer, "_load_optimizer_and_scheduler", None)
        if load is not None:

            def seen(checkpoint: str | Path | None) -> None:
                self._loaded = checkpoint
                load(checkpoint)

            trainer._load_optimizer_and_scheduler = seen  # type: ignore[method-assign]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = self.trainer.model_wrapped
        if args.world_size == 1 and not isinstance(model, DistributedDataParallel):
            return
        if state.global_step > 0:
            self._resume(args, state)
        register_hook(model, self.state, self.trainer.accelerator.scaler)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.state.bound and not args.save_only_model:
            files.save(self.state, self._folder(args, state))

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        if self._loaded is not None:
            files.load(self.state, self._loaded, strict=self.strict)
            return
        for folder in self._candidates(args, state):
            saved = folder / TRAINER_STATE_NAME
            if saved.is_file() and TrainerState.load_from_json(str(saved)).log_history == state.log_history:
                files.load(self.state, folder, strict=self.strict)
                return
        warnings.warn(
            f"the Trainer has resumed at step {state.global_step}, and gradwire does not find from where: name the "
            "folder in TransformersCallback(…, resume_from=…); it goes on without residuals",
            stacklevel=2,
        )

    def _candidates(self, args: TrainingArguments, state: TrainerState) -> Iterator[Path]:
        if self.resume_from is not None:
            yield Path(self.resume_from)
        if isinstance(args.resume_from_checkpoint, str):
            yield Path(args.resume_from_checkpoint)
        yield self._folder(args, state)

    def _folder(self, args: TrainingArguments, state: TrainerState) -> Path:
        """The folder of this step's checkpoint; each trial of a hyperparameter search has its own."""
        trainer: Any = self.trainer
        trial = getattr(trainer, "_trial", None)
        assert args.output_dir is not None
        run = Path(args.output_dir) if trial is None else Path(trainer._get_output_dir(trial))
        return run / f"checkpoint-{state.global_step}"
