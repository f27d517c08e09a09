"""What the packages expect of each other's objects; a plugin implements these without importing anyone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import jax
    import numpy as np

    from stack_core.abi import OpCall, OpImplementation, TunedChoice
    from stack_core.events import Event
    from stack_core.generation import EngineStats, GenerationRequest, GenerationUpdate
    from stack_core.hardware import Chip

__all__ = [
    "AttentionSpec",
    "ConvertibleFamily",
    "DataSource",
    "Document",
    "Engine",
    "GenerativeCheckpoint",
    "KVCache",
    "KVCacheShape",
    "KVCacheType",
    "LanguageModel",
    "ModelFamily",
    "Objective",
    "Observer",
    "Quantizer",
    "Tokenizer",
    "TrainedModel",
    "Trainer",
    "TunedTable",
]


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model; the head is apart from the body, so that loss and sampler choose what to form."""

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        """Returns hidden[batch, seq, embed]; with a cache, (hidden, cache).

        Args:
          tokens: int32[batch, seq].
          positions: int32[batch, seq], each token's place in its document.
          segment_ids: int32[batch, seq], 0 for padding; tokens attend within their segment only.
        """
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden[..., embed] -> float32 logits[..., vocab]."""
        ...

    def head_weight(self) -> jax.Array:
        """The weight[embed, vocab] that `ops.linear_cross_entropy` takes."""
        ...


@dataclass(frozen=True)
class AttentionSpec:
    """The static attributes of one attention layer, as a cache needs them."""

    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    scale: float | None = None


@runtime_checkable
class KVCache(Protocol):
    """Keys and values of earlier tokens, a pytree; stands in for `ops.attention` inside a model.

    Attributes:
      layers: a pytree whose leaves lead with a [layers, ...] axis, which the model scans over.
    """

    layers: Any

    def attend(
        self, layer_cache: Any, query: jax.Array, key: jax.Array, value: jax.Array, spec: AttentionSpec
    ) -> tuple[jax.Array, Any]:
        """Appends key and value [batch, seq, kv_heads, head_dim]; returns (output like query, layer_cache)."""
        ...

    def advance(self, layers: Any, tokens: int) -> KVCache:
        """The cache after all layers appended `tokens` tokens a row."""
        ...


KVCacheType = Literal["model", "int8", "fp8_e4m3", "fp8_e5m2"]
"""How a cache holds keys and values: in the model's dtype, or as codes with a scale for each token and head."""


@dataclass(frozen=True)
class KVCacheShape:
    """The keys and values that one token of a model leaves: for each layer, two arrays [kv_heads, head_dim]."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str


@runtime_checkable
class GenerativeCheckpoint(Protocol):
    """A language model as a checkpoint format opens it to generate text.

    Attributes:
      name: for people, and for clients that ask which model they talk to.
      parameters: shapes and dtypes of its parameters, a pytree of `jax.ShapeDtypeStruct`; none are read for it.
      kv_cache: what its layers keep of a token.
      vocab_size: tokens that it has logits for.
      max_positions: tokens of the longest sequence.
      tokenizer: its own, or None.
      end_tokens: tokens that end a text.
      chat_template: Jinja source that turns messages into a prompt, or None.
      special_tokens: texts that the template may name, such as `bos_token`.
      sampling_defaults: fields of `SamplingParams` that the model's makers recommend.
    """

    name: str
    parameters: Any
    kv_cache: KVCacheShape
    vocab_size: int
    max_positions: int
    tokenizer: Tokenizer | None
    end_tokens: frozenset[int]
    chat_template: str | None
    special_tokens: Mapping[str, str]
    sampling_defaults: Mapping[str, Any]

    def load_params(self, shardings: Any = None) -> Any:
        """Reads the parameters, in the structure, shapes and dtypes of `parameters`; some may be quantized arrays.

        They are the caller's alone, so that memory holds them once; another call reads them again.

        Args:
          shardings: where each is to lie, as `shardings` has them, each device getting its own part alone; None puts
            all on the default device.

        Raises:
          StackError: they cannot be read.
        """
        ...

    def model(self, params: Any) -> LanguageModel:
        """The model with these parameters, in the structure of `parameters`; called while JAX traces."""
        ...

    def shardings(self, mesh: Any) -> Any:
        """How the parameters lie on a mesh, in their structure; a quantized array's sharding is a tree, too."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Continues many prompts at once; made of a `GenerativeCheckpoint`. Its methods may be called from any thread."""

    def warm_up(self) -> None:
        """Compiles all that a request can need, so that none waits for it; before `start`, or not at all."""
        ...

    def start(self) -> None:
        """Begins to work on requests; what was submitted before waits for it."""
        ...

    def close(self, *, drain_s: float = 0.0) -> None:
        """Waits up to `drain_s` for requests to end, ends the others with "abort", and stops for good."""
        ...

    def submit(self, request: GenerationRequest, receive: Callable[[GenerationUpdate], None] | None = None) -> None:
        """Queues a request.

        Args:
          receive: gets each update on the engine's own thread, and must not wait; None leaves them to `stream`.

        Raises:
          GenerationError: the model cannot serve it; names the parameter, what was given and what is possible.
          EngineBusy: the queue is full.
        """
        ...

    def stream(self, request_id: str) -> Iterator[GenerationUpdate]:
        """Yields the updates of a request that was submitted without `receive`, until all continuations ended."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request before its next step; one that has ended is left alone."""
        ...

    def update_weights(self, params: Any) -> None:
        """Replaces the parameters between two steps, and forgets what was kept of other requests.

        Args:
          params: pytree in the structure of the checkpoint's; each array is cast to the dtype of the one it replaces.

        Raises:
          ConversionError: it has another structure or other shapes; names each parameter that differs.
        """
        ...

    def stats(self) -> EngineStats: ...


@runtime_checkable
class ModelFamily(Protocol):
    """An architecture: how to build it from a config. Its FLOPs are counted from its jaxpr.

    Attributes:
      name: the name that `model.family` selects.
      config_class: a `@config` class with the fields `family`, `vocab_size` and `max_positions`.
    """

    name: str
    config_class: type

    def build(self, config: Any, *, key: jax.Array) -> Any:
        """Returns the model, a `LanguageModel` and `nnx.Module` with random weights; abstract under `jax.eval_shape`.

        Each parameter is an `nnx.Param` with the metadata `logical_axes`, a name for each of its axes.
        """
        ...


@runtime_checkable
class ConvertibleFamily(ModelFamily, Protocol):
    """A family whose weights have names in Hugging Face checkpoints.

    Attributes:
      config_map: `architecture`, the name in `config.json`; `read(mapping)` and `write(config)` convert.
    """

    config_map: Any

    def weight_rules(self, config: Any) -> Sequence[Any]:
        """Where each parameter lies: its path, the tensors that make it up, and how they are laid out."""
        ...

    def redundant_tensors(self, config: Any) -> Mapping[str, str | None]:
        """Tensors that may stand beside, each with the one that it repeats, or None if nothing reads it."""
        ...


@runtime_checkable
class Objective(Protocol):
    """A pure loss; host-side batch entries that the device does not need are gone by then."""

    def __call__(
        self, model: Any, batch: Mapping[str, jax.Array], *, key: jax.Array
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """Returns (scalar loss, metrics); `metrics["weight"]` is what the loss was averaged over."""
        ...


@runtime_checkable
class Trainer(Protocol):
    """A state machine over a pytree; the loop around it and the checkpoints of its state belong to others."""

    def init(self, *, key: jax.Array) -> Any:
        """Returns the state before the first step."""
        ...

    def step(self, state: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, Mapping[str, jax.Array]]:
        """Pure: returns the next state and scalar metrics; compiled by its owner with the state donated."""
        ...


@runtime_checkable
class TrainedModel(Protocol):
    """A trained model and the data that it is measured on, as a checkpoint format opens them in a directory.

    Attributes:
      model: with its parameters, in float.
      sections: registered configs by name, of the run that it is from.
    """

    model: Any

    @property
    def sections(self) -> Mapping[str, Any]: ...

    def training_batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        """Batches of the data that it was trained on, without end."""
        ...

    def validation_batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        """Batches that were held out, the same at each call; none where nothing was."""
        ...

    def metrics(self, model: Any, batch: Mapping[str, Any]) -> Mapping[str, jax.Array]:
        """Pure: the metrics of its objective, "loss" and "weight" among them, for this or another such model."""
        ...

    def save(self, directory: Path, model: Any, sections: Mapping[str, Any]) -> None:
        """Writes a run directory with `model` in the place of this one, whole or not at all; overwrites nothing.

        Args:
          sections: what the run's config has besides, a registered config by the section's name.
        """
        ...


@runtime_checkable
class Quantizer(Protocol):
    """Makes a quantized model of a model, by a recipe: the section of a run's config that has the quantizer's name."""

    def apply(self, model: Any, recipe: Any, sample_batch: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns the quantized model, and a report whose `str` is for people; `model` stays as it is.

        Args:
          model: with values, or abstract as `jax.eval_shape` gives it; the result is abstract, too, then.
          recipe: config of the class that is registered for the section.
          sample_batch: arrays, or their shapes.
        """
        ...

    def call(self, function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """`function(model, *args, **kwargs)` of a model that `apply` gave, quantized as one program.

        What the function computes from several of the model's methods, as a loss does, is quantized, too.
        """
        ...


@runtime_checkable
class Observer(Protocol):
    """Receives every event of a run on the host, in order."""

    def observe(self, event: Event) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Document:
    """One text of a corpus; `name` tells a person where it came from: a path, or "path:line"."""

    name: str
    text: str


@runtime_checkable
class DataSource(Protocol):
    """A corpus that can be read again and again in the same order."""

    def documents(self) -> Iterator[Document]: ...

    def fingerprint(self) -> str:
        """Changes whenever the documents do; cheap beside reading them all."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocab_size: int
    eos_id: int | None
    bos_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Encodes a prompt; the names of special tokens in `text` become those tokens.

        Args:
          add_special_tokens: also those that the tokenizer puts around a text, such as one for its beginning.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 that one token stands for within a text, which may be a part of a character.

        Of a special token it is the name, and b"" of an id that is no token.
        """
        ...

    def save(self, directory: Path) -> None: ...


@runtime_checkable
class TunedTable(Protocol):
    """Measurements that choose among the implementations of ops, and their configs."""

    def lookup(
        self,
        call: OpCall,
        chip: Chip,
        *,
        candidates: Mapping[str, OpImplementation],
        forward: TunedChoice | None = None,
    ) -> TunedChoice | None:
        """What to use for one direction of a call on a chip, or None where nothing near enough was measured.

        It is asked while JAX traces, for the forward and then for the backward pass, and reads no arrays.

        Args:
          candidates: what it may choose from, by name: all that support the call, or the one that the caller named.
          forward: what runs forward, when this is the backward pass.
        """
        ...


ObserverFactory = Callable[[Any], "Observer | None"]
