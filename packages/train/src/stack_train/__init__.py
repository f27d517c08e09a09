"""Trains models: models, data, optimizers, objectives, checkpoints.

The names below are the Python API, for training without a config file. Each is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stack_train.checkpoint import CheckpointStore as CheckpointStore
    from stack_train.generation.generate import TextGenerator as TextGenerator
    from stack_train.generation.sampling import SamplingConfig as SamplingConfig
    from stack_train.objectives import CausalLMConfig as CausalLMConfig
    from stack_train.run.config import RunConfig as RunConfig
    from stack_train.run.config import RunSettings as RunSettings
    from stack_train.run.run import Run as Run
    from stack_train.run.run import build as build
    from stack_train.run.train import start as start
    from stack_train.run.train import train as train
    from stack_train.step.program import Program as Program
    from stack_train.step.step import Step as Step
    from stack_train.step.step import make_step as make_step

__all__ = [
    "CausalLMConfig",
    "CheckpointStore",
    "Program",
    "Run",
    "RunConfig",
    "RunSettings",
    "SamplingConfig",
    "Step",
    "TextGenerator",
    "build",
    "make_step",
    "start",
    "train",
]

# Imported on first use: importing this package imports no jax.
_MODULES = {
    "CausalLMConfig": "objectives",
    "CheckpointStore": "checkpoint",
    "Program": "step.program",
    "Run": "run.run",
    "RunConfig": "run.config",
    "RunSettings": "run.config",
    "SamplingConfig": "generation.sampling",
    "Step": "step.step",
    "TextGenerator": "generation.generate",
    "build": "run.run",
    "make_step": "step.step",
    "start": "run.train",
    "train": "run.train",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
