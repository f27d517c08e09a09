"""Checkpoints opened for text generation: parameters in the compute dtype, tokenizer and sampling defaults."""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from stack_core.abi.adapters import Adapters
from stack_core.abi.caches import KeysValues
from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, GenerationError
from stack_core.abi.generation import SamplingParams
from stack_core.abi.mesh import DEFAULT_RULES, AnyMesh, LogicalAxes
from stack_core.ops.building import is_quantized
from stack_core.runtime.gathering import place_copies
from stack_core.text.embeddings import EmbeddingSettings, TextEncoder
from stack_core.text.images import ImageReader, SeesImages
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.generation.embedding_settings import read_encoder_settings
from stack_train.vision.reader import image_reader

__all__ = ["ModuleCheckpoint", "ReadsSource", "generative_checkpoint", "parameters_of"]

_Path = tuple[Any, ...]
_Read = Callable[[Any], Iterable[tuple[_Path, Any]]]
"""Function of shardings (or None) that yields the path and value of each parameter, on the host or sharded."""

_GENERATION_CONFIG, _CONFIG = "generation_config.json", "config.json"
_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_OF_HEADS = ("heads", "kv_heads")


@runtime_checkable
class ReadsSource(Protocol):
    """A `LanguageModel` that generates a target from a source; calls with a cache also take `source=encode(...)`.

    Attributes:
      start_token: token that begins every target.
    """

    start_token: int

    def encode(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> Any:
        """Encodes the sources of a batch, int32[batch, source_seq]; segments are 1 for tokens and 0 for padding."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModuleCheckpoint:
    """A `GenerativeCheckpoint` of an `nnx.Module` that also implements `ReadsAdapters`.

    When it is pickled, for an engine in another process, it leaves its parameters and adapters behind.

    Attributes:
      parameters: shapes and dtypes of the parameters, as nested dicts.
      dtype: compute dtype of the matrices.
      read: function that yields the parameters' values.
      graph: static structure (`nnx.GraphDef`) of the module.
      logical_axes: logical axes of each parameter, in the structure of `parameters`; () if a parameter has none.
      adapters_at: function that reads the adapters at an address for this model.
      images: preprocessing of images; None for models of text.
      as_floats: function that opens the checkpoint with dequantized matrices; None without quantized matrices.
      embedding, generates: see `EmbedsText`.
      start_token: see `GeneratesFromSource`.
    """

    name: str
    parameters: Any
    states: Any
    vocab_size: int
    max_positions: int
    tokenizer: HuggingFaceTokenizer | None
    end_tokens: frozenset[int]
    chat_template: str | None
    special_tokens: Mapping[str, str]
    sampling_defaults: Mapping[str, Any]
    dtype: str
    read: _Read
    graph: Any
    logical_axes: Any
    adapters_at: Callable[[str], Adapters]
    images: ImageReader | None = None
    as_floats: Callable[[], "ModuleCheckpoint"] | None = None
    embedding: EmbeddingSettings | None = None
    generates: bool = True
    start_token: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "read": _read_nothing, "adapters_at": no_adapters, "as_floats": None}

    def dequantized(self) -> "ModuleCheckpoint":
        """Returns the checkpoint with weights in floating point; see `Dequantizes`.

        Raises:
          GenerationError: it is not a checkpoint with quantized matrices.
        """
        if self.as_floats is None:
            raise GenerationError(
                f"The weights of {self.name} are not read in another form: dequantize is for GGUF files and "
                "Hugging Face checkpoints with quantized matrices. Leave it out."
            )
        return self.as_floats()

    def read_adapters(self, address: str) -> Adapters:
        return self.adapters_at(address)

    def load_params(self, shardings: Any = None) -> Any:
        """Reads the parameters.

        Raises:
          GenerationError: the model declares no states, but its output depends on earlier tokens.
        """
        axes = nnx.traversals.flatten_mapping(self.logical_axes)
        params = {}
        for path, value in self.read(shardings):
            place = None if shardings is None else _at(path, shardings)
            params[path] = place_copies(_as_computed(value, axes[path], self.dtype), place)
        loaded = nnx.traversals.unflatten_mapping(params)
        if self.generates and not jax.tree.leaves(self.states):
            self._check_stateless(loaded)
        return loaded

    def _check_stateless(self, params: Any) -> None:
        """Raises a GenerationError if the last hidden state depends on an earlier token, which no cache would hold."""
        if self.max_positions < 3:
            return
        # Sequences that end in the same token and differ before it, which only a model without memory maps alike.
        last = 1 % self.vocab_size
        tokens = jnp.array([[first, first, last] for first in range(min(self.vocab_size, 4))])
        positions = jnp.arange(3)[None]
        # One row per call, because rows of one batch may be rounded differently.
        last_hidden = jax.jit(lambda params, row: self.model(params)(row, positions).hidden[:, -1])
        hidden = [last_hidden(params, row[None]) for row in tokens]
        if not all(jnp.array_equal(each, hidden[0], equal_nan=True) for each in hidden):
            raise GenerationError(
                f"The model of {self.name} declares no `states`, but its output depends on earlier tokens: generating "
                "would compute each token without them. Declare in `states` what each layer keeps of a sequence "
                "(KeysValues, Latent or Recurrent of stack_core.abi.caches) and read it through the cache."
            )

    def model(self, params: Any) -> Any:
        """Returns the `LanguageModel`, or the `TextEncoder` of a checkpoint that generates nothing."""
        return nnx.merge(self.graph, nnx.State(params))

    def shardings(self, mesh: AnyMesh) -> Any:
        """Returns the parameters' shardings by the default rules.

        An axis stays unsharded if the mesh does not divide its size. Axes of heads also stay unsharded if the mesh
        does not divide the number of KV heads.
        """

        def of_parameter(axes: LogicalAxes, parameter: Any) -> Any:
            return jax.tree.map(lambda leaf: self._sharding(mesh, axes, leaf.shape), parameter)

        return jax.tree.map(
            of_parameter, self.logical_axes, self.parameters, is_leaf=lambda node: isinstance(node, tuple)
        )

    def _sharding(self, mesh: AnyMesh, axes: LogicalAxes, shape: tuple[int, ...]) -> NamedSharding:
        heads = [state.kv_heads for state in jax.tree.leaves(self.states) if isinstance(state, KeysValues)]

        def divides(axis: str | None, size: int) -> bool:
            parts = math.prod(mesh.shape[mesh_axis] for mesh_axis in DEFAULT_RULES.mesh_axes(axis))
            return size % parts == 0 and (axis not in _OF_HEADS or all(count % parts == 0 for count in heads))

        axes = axes or (None,) * len(shape)
        split = [axis if divides(axis, size) else None for axis, size in zip(axes, shape, strict=True)]
        return DEFAULT_RULES.sharding(mesh, split, shape)


def _read_nothing(shardings: Any) -> Iterator[tuple[_Path, Any]]:
    """Raises a GenerationError: a pickled checkpoint lacks its values."""
    raise GenerationError("This checkpoint was pickled, which leaves its parameters behind. Open it again.")


def no_adapters(address: str) -> Adapters:
    """Raises a GenerationError: adapters can only be read for a model on disk."""
    raise GenerationError(f"Adapters such as {address} require a model on disk. Open a run or a checkpoint.")


def generative_checkpoint(
    model: Any,
    config: Any,
    *,
    name: str,
    tokenizer: Path | HuggingFaceTokenizer,
    origin: Path | None,
    read: _Read | None = None,
    adapters_at: Callable[[str], Adapters] = no_adapters,
) -> ModuleCheckpoint:
    """Returns a module as a checkpoint for engines.

    Args:
      model: an `nnx.Module` of a registered family, quantized or not, that is a `LanguageModel` or a `TextEncoder`;
        abstract if `read` yields the values. Its property `kv_cache_positions`, if any, bounds the tokens of a sequence
        that a cache may hold.
      config: the config that the model was built from, a `LanguageModelConfig`.
      name: name of the checkpoint in messages.
      tokenizer: the tokenizer, or its directory, which need not exist.
      origin: directory with the original `config.json` and `generation_config.json`, both optional; None without
        such a directory.
      read: function that yields the parameters' values, afresh on every call; None if `model` holds the values.
      adapters_at: function that reads the adapters at an address for this model.

    Raises:
      GenerationError: the model or its config lacks an attribute that engines need (named in the message), the
        tokenizer has more tokens than the model, or a file cannot be read.
      DataError: the tokenizer is malformed.
    """
    is_encoder = isinstance(model, TextEncoder)
    _check_parts(model, config, is_encoder=is_encoder)
    encoder = read_encoder_settings(origin) if is_encoder else None
    max_positions: int = getattr(model, "kv_cache_positions", config.max_positions)
    if max_positions < config.max_positions:
        warnings.warn(
            f"{name} generates up to {max_positions} of its {config.max_positions} positions: beyond that, its "
            "rope_scaling rotates every token differently, which would invalidate the cached keys. To use all "
            "positions with longrope, give short_factor the values of long_factor, in config.json or in the run's "
            "config.yaml.",
            stacklevel=2,
        )
    found = _tokenizer_in(tokenizer) if isinstance(tokenizer, Path) else tokenizer
    if found is not None and found.vocab_size > config.vocab_size:
        place = tokenizer if isinstance(tokenizer, Path) else name
        raise GenerationError(
            f"The tokenizer has {found.vocab_size} tokens, but the model only {config.vocab_size}. "
            f"Put the tokenizer that the model was trained with into {place}."
        )
    if encoder is not None:
        # Newer releases of sentence-transformers write the maximum length to the tokenizer's config.
        own = encoder.max_tokens or (None if found is None else found.max_tokens)
        max_positions = min(max_positions, own or max_positions)
        found = None if found is None else found.for_encoder(lowercase=encoder.lowercase)
    start_token = model.start_token if isinstance(model, ReadsSource) else None
    if start_token is not None and found is not None:
        # A source keeps its end token: no text follows it.
        found = found.for_encoder()
    graph, state = nnx.split(model)
    variables = dict(nnx.to_flat_state(state))
    logical_axes = {path: variable.get_metadata().get("logical_axes", ()) for path, variable in variables.items()}
    parameters = {
        path: jax.eval_shape(partial(_as_computed, axes=logical_axes[path], dtype=config.dtype), variable.get_value())
        for path, variable in variables.items()
    }
    generation = {} if origin is None else _mapping(origin / _GENERATION_CONFIG)
    return ModuleCheckpoint(
        name=name,
        parameters=nnx.traversals.unflatten_mapping(parameters),
        states=() if is_encoder else model.states,
        vocab_size=config.vocab_size,
        max_positions=max_positions,
        tokenizer=found,
        end_tokens=frozenset()
        if is_encoder
        else _end_tokens(found, generation, {} if origin is None else _mapping(origin / _CONFIG)),
        chat_template=None if found is None or is_encoder else found.chat_template,
        special_tokens={} if found is None else found.special_tokens,
        sampling_defaults={} if origin is None else _recommended(generation, origin / _GENERATION_CONFIG),
        dtype=config.dtype,
        read=(lambda shardings: parameters_of(model)) if read is None else read,
        graph=graph,
        logical_axes=nnx.traversals.unflatten_mapping(logical_axes),
        adapters_at=adapters_at,
        images=image_reader(config, found) if isinstance(config, SeesImages) and found is not None else None,
        embedding=None if encoder is None else encoder.embedding,
        generates=not is_encoder,
        start_token=start_token,
    )


def _tokenizer_in(directory: Path) -> HuggingFaceTokenizer | None:
    return HuggingFaceTokenizer.load(directory) if (directory / "tokenizer.json").is_file() else None


def _check_parts(model: Any, config: Any, *, is_encoder: bool) -> None:
    """Raises a GenerationError that names the attributes missing from a model or its config."""
    for part, value, names, contract in (
        ("model", model, () if is_encoder else ("states", "head", "logits"), "LanguageModel"),
        ("config", config, ("vocab_size", "max_positions", "dtype"), "LanguageModelConfig"),
    ):
        if missing := [name for name in names if not hasattr(value, name)]:
            raise GenerationError(
                f"No text can be generated with the family {config.name!r}: its {part} lacks {', '.join(missing)}. "
                f"See `{contract}` in docs/abi.md."
            )


def parameters_of(model: Any) -> Iterator[tuple[_Path, Any]]:
    """Yields the path and value of each parameter; releases each before it yields the next."""
    variables = dict(nnx.to_flat_state(nnx.state(model)))
    # Otherwise this name would hold all parameters until the last one is read.
    del model
    while variables:
        # Popping releases a parameter as soon as the caller drops this value.
        path, variable = variables.popitem()
        yield path, variable.get_value()


def _as_computed(value: Any, axes: LogicalAxes, dtype: str) -> Any:
    """Casts matrices to the compute dtype once, as the model would on every use.

    Quantized matrices, scales, biases and arrays without named axes, such as tables of integers, keep their dtype.
    """
    # A stack of vectors, such as scales of all layers, has two axes as well.
    is_matrix = sum(axis != "layers" for axis in axes) >= 2 and any(axis not in ("layers", None) for axis in axes)
    return value.astype(dtype, copy=False) if is_matrix and not is_quantized(value) else value


def _at(path: tuple[Any, ...], tree: Any) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _mapping(path: Path) -> Mapping[str, Any]:
    """Reads a JSON object from `path`; returns an empty one if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        mapping = json.loads(path.read_bytes())
    except ValueError as error:
        raise GenerationError(f"{path} cannot be read: {error}. Restore it, or delete it.") from error
    if not isinstance(mapping, dict):
        raise GenerationError(f"{path} holds a {type(mapping).__name__}, not an object. Restore it, or delete it.")
    return mapping


def _end_tokens(tokenizer: HuggingFaceTokenizer | None, *settings: Mapping[str, Any]) -> frozenset[int]:
    """Collects the end tokens of the tokenizer and of the checkpoint's generation settings."""
    found = [None if tokenizer is None else tokenizer.eos_id]
    for mapping in settings:
        # Published configs name one id or a list.
        ids = mapping.get("eos_token_id")
        found += ids if isinstance(ids, list) else [ids]
    return frozenset(index for index in found if index is not None)


def _recommended(generation: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Selects and validates the settings of a generation config that `SamplingParams` supports."""
    settings = {name: generation[name] for name in _RECOMMENDED if generation.get(name) is not None}
    try:
        parse(SamplingParams, settings)
    except ConfigError as error:
        raise GenerationError(f"{path} recommends invalid sampling settings: {error} Correct or delete it.") from error
    return settings
