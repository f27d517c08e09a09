"""The engine of encoders, which compute embeddings without pages and steps."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

import jax
import numpy as np

from stack_core.abi.engines import Engine, Pooling
from stack_core.abi.errors import ConfigError, EngineStopped, GenerationError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import EngineStats, GenerationRequest, GenerationUpdate
from stack_core.text.embeddings import check_generates, is_encoder
from stack_core.text.sources import check_continues
from stack_serve.llm.compiled_programs import Progress
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine
from stack_serve.llm.limits import Limits
from stack_serve.llm.new_weights import KeysOfOldWeights, check_params, leaves_by_path
from stack_serve.llm.placement import Placement
from stack_serve.llm.pooling import PoolingPrograms, check_pooling
from stack_serve.llm.unstacking import Layers

__all__ = ["EncoderEngine", "make_engine"]

_LOG = logging.getLogger(__name__)
_USED = frozenset({"max_tokens", "step_tokens", "tensor", "embeddings"})


def make_engine(
    checkpoint: GenerativeCheckpoint, config: EngineConfig | None = None, *, progress: Progress | None = None
) -> "LLMEngine | EncoderEngine":
    """Returns the engine of a language model or of an encoder.

    Raises:
      GenerationError: the model is an encoder-decoder.
    """
    check_continues(checkpoint)
    return (EncoderEngine if is_encoder(checkpoint) else LLMEngine)(checkpoint, config, progress=progress)


class EncoderEngine(Engine):
    """An engine that supports only `embed`, on the caller's thread.

    Attributes:
      limits: maximum length and vocabulary, against which texts are validated.
      parameters: shapes and dtypes of the parameters.

    Args:
      checkpoint: encoder to serve.
      config: settings; only `max_tokens`, `step_tokens` (tokens per launch), `tensor` and `embeddings` apply.
      progress: see `LLMEngine`.

    Raises:
      ConfigError: a setting does not apply to encoders, or `max_tokens` exceeds the model's maximum.
      HardwareError: fewer devices are available than `config.tensor`.
    """

    keeps_missing = True

    def __init__(
        self, checkpoint: GenerativeCheckpoint, config: EngineConfig | None = None, *, progress: Progress | None = None
    ) -> None:
        config = EngineConfig() if config is None else config
        self._checkpoint, self._config, self._progress = checkpoint, config, progress
        self.parameters = checkpoint.parameters
        max_tokens = _max_tokens(checkpoint, config)
        has_tokenizer = checkpoint.tokenizer is not None
        self.limits = Limits(max_tokens, 0, checkpoint.vocab_size, 0, has_tokenizer, prefix_caching=False)
        self._placement = Placement((), config.tensor)
        self._programs = PoolingPrograms(
            checkpoint,
            self._placement,
            lambda: self._params,
            max_tokens=max_tokens,
            batch_tokens=config.step_tokens,
        )
        self._looped = self._placement.traced(self._programs.looped, checkpoint.parameters)
        self._params: Any = self._placement.load(checkpoint, self._looped)
        self._lock = threading.Lock()
        self._is_closed, self._prompt_tokens, self._version = False, 0, 0

    def warm_up(self) -> None:
        """Compiles the programs of all shapes."""
        self._programs.compile_all(self._progress)

    def prepare(self) -> None:
        """Compiles the programs of all shapes if `config.embeddings` is set; otherwise each compiles on first use."""
        if self._config.embeddings:
            self.warm_up()
        _LOG.info("Memory: %s", self.memory())

    def memory(self) -> str:
        """Returns the memory of the parameters, as human-readable text."""
        size_bytes = sum(array.nbytes for array in jax.tree.leaves(self._params))
        return f"parameters {size_bytes / 2**20:.0f} MB"

    def embed(self, prompts: Sequence[Sequence[int]], *, pooling: Pooling = "mean") -> np.ndarray:
        """Computes the pooled hidden states of texts; see `Engine`."""
        check_pooling(pooling)
        for prompt in prompts:
            self.limits.check_input(prompt)
        if not prompts:
            raise GenerationError("No prompts were given; give at least one.", parameter="input")
        if self._is_closed:
            raise EngineStopped("The engine was closed. Start another.")
        vectors = self._programs.embed(prompts, pooling)
        with self._lock:
            self._prompt_tokens += sum(map(len, prompts))
        return vectors

    def check(self, request: GenerationRequest) -> NoReturn:
        """Raises a GenerationError, because encoders cannot generate."""
        check_generates(self._checkpoint)
        raise AssertionError

    def start(self) -> None:
        """Does nothing, because texts are embedded on the callers' threads."""

    def close(self, *, drain_s: float = 0.0) -> None:
        """Refuses later calls of `embed`."""
        del drain_s
        self._is_closed = True

    def submit(self, request: GenerationRequest, receive: Callable[[GenerationUpdate], None] | None = None) -> None:
        """Raises a GenerationError, because encoders cannot generate."""
        self.check(request)

    def stream(self, request_id: str) -> Iterator[GenerationUpdate]:
        """Raises a GenerationError, because encoders cannot generate."""
        raise GenerationError(f"No request has the id {request_id!r}.", parameter="request_id")

    def abort(self, request_id: str) -> None:
        """Does nothing, because an encoder accepts only `embed`."""

    def update_weights(
        self,
        params: Any,
        *,
        version: int | None = None,
        kv: KeysOfOldWeights = "keep",
        donate: bool = False,
    ) -> None:
        """Replaces all or some parameters; see `Engine`. Ignores `kv`, which applies to generation."""
        self.use_weights(self.place_weights(params, donate=donate), version=version, kv=kv)

    def place_weights(self, params: Any, *, donate: bool = False) -> Mapping[str, Any]:
        """Checks and copies new parameters for `use_weights`; see `LLMEngine.place_weights`."""
        check_params(params, self.parameters)
        return self._placement.params(self._checkpoint, params, self._looped, donate=donate)

    def use_weights(self, params: Mapping[str, Any], *, version: int | None, kv: KeysOfOldWeights) -> None:
        """Replaces parameters by those of `place_weights`; ignores `kv`."""
        del kv
        with self._lock:
            old, structure = jax.tree.flatten(self._params, is_leaf=lambda node: isinstance(node, Layers))
            paths = leaves_by_path(self.parameters)
            leaves = [params.get(path, leaf) for path, leaf in zip(paths, old, strict=True)]
            self._params = jax.tree.unflatten(structure, leaves)
            self._version = self._version + 1 if version is None else version

    def stats(self) -> EngineStats:
        """Returns the number of embedded tokens and the version of the weights, with 0 for the remaining counts."""
        zeros = {each.name: 0 for each in fields(EngineStats)}
        counts = {"prompt_tokens": self._prompt_tokens, "weights_version": self._version}
        return EngineStats(**{**zeros, **counts})


def _max_tokens(checkpoint: GenerativeCheckpoint, config: EngineConfig) -> int:
    """Returns the maximum length of a text; raises a ConfigError about settings without an effect."""
    default = EngineConfig()
    changed = [each.name for each in fields(EngineConfig) if getattr(config, each.name) != getattr(default, each.name)]
    if unused := [name for name in changed if name not in _USED]:
        raise ConfigError(
            f"{', '.join(unused)}: {checkpoint.name!r} is an encoder, on which only {', '.join(sorted(_USED))} act. "
            "Leave the others out."
        )
    if config.max_tokens is not None and config.max_tokens > checkpoint.max_positions:
        raise ConfigError(
            f"max_tokens={config.max_tokens} is more than the {checkpoint.max_positions} tokens of a text of "
            f"{checkpoint.name!r}. Lower it, or omit it to use all of them."
        )
    return config.max_tokens or checkpoint.max_positions
