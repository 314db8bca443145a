"""gradwire under Lightning, Accelerate and Transformers: the hook, and its state in their checkpoints.

>>> Trainer(callbacks=[LightningCallback(CompressState(TopK(density=0.01)))])  # lightning.pytorch's
>>> register_with_accelerator(accelerator, model, CompressState(TopK(density=0.01)))  # after accelerator.prepare(model)
>>> trainer.add_callback(TransformersCallback(trainer, CompressState(TopK(density=0.01))))  # transformers' Trainer
>>> register_hook(model, CompressState(TopK(density=0.01)))  # Fabric, or any DDP model

Importing this module imports none of them: each is imported with the first name that needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .registering import register_hook

if TYPE_CHECKING:
    from .accelerate import register_with_accelerator
    from .lightning import LightningCallback
    from .transformers import TransformersCallback

__all__ = ["LightningCallback", "TransformersCallback", "register_hook", "register_with_accelerator"]

_MODULES = {
    "LightningCallback": "lightning",
    "TransformersCallback": "transformers",
    "register_with_accelerator": "accelerate",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES[name]
    try:
        return getattr(import_module(f".{module}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module:
            raise
        raise ModuleNotFoundError(
            f"{name} needs {module}: pip install 'gradwire[{module}]', or {module} by itself", name=error.name
        ) from error
