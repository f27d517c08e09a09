"""Construction of an engine in its own process, from the address of a model."""

import sys
from collections.abc import Callable

from stack_core.abi.engines import Engine
from stack_core.abi.errors import ConfigError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.model_formats import open_for_generation
from stack_core.runtime.compile_cache import keep_compiled
from stack_core.text.embeddings import is_encoder
from stack_core.text.images import image_reader_of
from stack_core.text.sources import check_continues
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.encoder_engine import make_engine
from stack_serve.llm.engine import LLMEngine
from stack_serve.llm.lockstep import connect_group
from stack_serve.parallel.config import ParallelConfig

__all__ = ["check_parallel", "open_replica", "open_sharded"]


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


def open_sharded(model: str, config: EngineConfig, progress: Callable[[str, int, int], None]) -> Engine:
    """Opens a language model in one of the processes over whose devices it is sharded; see `open_replica`."""
    keep_compiled()
    sys.setswitchinterval(0.001)
    checkpoint = open_for_generation(model)
    check_continues(checkpoint)
    return LLMEngine(checkpoint, config, progress=progress, group=connect_group())


def check_parallel(checkpoint: GenerativeCheckpoint, parallel: ParallelConfig) -> None:
    """Raises a ConfigError for a model that several engines, or an engine over several hosts, do not support."""
    if parallel.hosts > 1 and (is_encoder(checkpoint) or image_reader_of(checkpoint) is not None):
        kind = "is an encoder" if is_encoder(checkpoint) else "reads images"
        raise ConfigError(
            f"hosts={parallel.hosts}: {checkpoint.name!r} {kind}, but only models that generate from text can be "
            "sharded over hosts. Serve it on one host."
        )
    if parallel.prefill_engines and is_encoder(checkpoint):
        raise ConfigError(
            f"prefill_engines={parallel.prefill_engines}: {checkpoint.name!r} is an encoder, which has no keys to hand "
            "over. Leave it out, or use data_parallel."
        )
