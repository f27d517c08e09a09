"""Construction of an engine in its own process, from the address of a model."""

import sys
from collections.abc import Callable

from stack_core.abi.engines import Engine, checked_engine
from stack_core.abi.errors import ConfigError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.model_formats import open_for_generation
from stack_core.abi.plugins import registries
from stack_core.runtime.compile_cache import keep_compiled
from stack_core.text.embeddings import is_encoder
from stack_serve.llm.config import EngineConfig

__all__ = ["check_parallel", "open_replica"]


def open_replica(model: str, config: EngineConfig, progress: Callable[[str, int, int], None]) -> Engine:
    """Opens a model with the engine "llm" in this process, and sets the options that a server sets.

    Args:
      model: address of the model.
      config: settings of the engine.
      progress: callback as in `LLMEngine`.

    Raises:
      StackError: the model cannot be opened, or the config does not fit it.
    """
    keep_compiled()
    # Limits how long the threads that receive requests and send updates wait for the interpreter's lock.
    sys.setswitchinterval(0.001)
    return checked_engine("llm", registries.engines["llm"](open_for_generation(model), config, progress=progress))


def check_parallel(checkpoint: GenerativeCheckpoint) -> None:
    """Raises a ConfigError for an encoder, which one engine serves."""
    if is_encoder(checkpoint):
        raise ConfigError(
            f"data_parallel: {checkpoint.name!r} is an encoder, which one engine serves. Leave it out, or start "
            "several servers."
        )
