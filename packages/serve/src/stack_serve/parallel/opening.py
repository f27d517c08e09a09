"""Construction of an engine in its own process, from the address of a model."""

import sys
from collections.abc import Callable

from stack_core.abi.engines import Engine
from stack_core.abi.errors import ConfigError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.model_formats import open_for_generation
from stack_core.runtime.compile_cache import keep_compiled
from stack_core.text.embeddings import is_encoder
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.encoder_engine import make_engine
from stack_serve.parallel.config import ParallelConfig

__all__ = ["check_parallel", "open_replica"]


def open_replica(model: str, config: EngineConfig, progress: Callable[[str, int, int], None]) -> Engine:
    """Opens a language model or an encoder in this process, and sets the options that a server sets.

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
    return make_engine(open_for_generation(model, encoders=True), config, progress=progress)


def check_parallel(checkpoint: GenerativeCheckpoint, parallel: ParallelConfig) -> None:
    """Raises a ConfigError for prefill engines of an encoder."""
    if parallel.prefill_engines and is_encoder(checkpoint):
        raise ConfigError(
            f"prefill_engines={parallel.prefill_engines}: {checkpoint.name!r} is an encoder, which has no keys to hand "
            "over. Leave it out, or use data_parallel."
        )
