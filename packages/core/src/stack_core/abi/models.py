"""Models: outputs of a language model, and the family that builds the model."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax

from stack_core.abi.caches import KVCache

if TYPE_CHECKING:
    from stack_core.abi.mesh import MeshAxes

__all__ = [
    "ConfigReader",
    "ConvertibleFamily",
    "FitsTensors",
    "ImageTokens",
    "IsPart",
    "LanguageModel",
    "LanguageModelConfig",
    "ModelFamily",
    "Outputs",
    "RunsOnBatches",
    "ShardsItself",
    "UntiesHead",
]


@partial(jax.tree_util.register_dataclass, data_fields=["hidden", "cache", "further", "facts"], meta_fields=[])
@dataclass(frozen=True)
class Outputs:
    """The result of a `LanguageModel` call.

    Attributes:
      hidden: [batch, seq, embed], input of the head.
      cache: the cache passed to the call, with the call's tokens appended; None if there was none.
      further: hidden states for multi-token prediction, in the shape of `hidden`, nearest token first.
      facts: measurements for objectives and reports, by name: "expert_load"[layers, experts], each expert's share;
        "balance_loss", "router_z", "index_loss"; of calls with a cache, "experts"[mixtures, batch, seq, active], the
        experts of each token, which calls replay by `experts=`, [batch, seq, mixtures, active], negative for own ones.
    """

    hidden: Any
    cache: KVCache | None = None
    further: tuple[Any, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@partial(jax.tree_util.register_dataclass, data_fields=["features", "rows", "ahead", "positions"], meta_fields=[])
@dataclass(frozen=True)
class ImageTokens:
    """The image tokens of a call of a language model: `model(tokens, positions, cache=cache, images=images)`.

    Attributes:
      features: [n, embed] for all rows, or [batch, n, embed] per row; (1 + layers) embed if layers add features.
      rows: int32[batch, seq], index of the features of each token; -1 keeps the embedding.
      ahead: int32[batch, seq], number of visible later tokens of the image; None if causal.
      positions: int32[batch, seq, axes], for rotary embeddings with several axes, or None.
    """

    features: Any
    rows: Any
    ahead: Any = None
    positions: Any = None


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model whose head is separate from the body: loss and sampler choose which logits to compute.

    Attributes:
      states: state that each group of layers keeps per sequence, in the structure of `cache.layers`: a pytree whose
        leaves are `KeysValues`, `Latent` or `Recurrent` (`stack_core.abi.caches`), with None for layers that share the
        state of another.
    """

    @property
    def states(self) -> Any: ...

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array | None = None,
        cache: KVCache | None = None,
    ) -> Outputs:
        """Runs the body.

        Args:
          tokens: int32[batch, seq].
          positions: int32[batch, seq], position of each token in its document.
          segment_ids: int32[batch, seq], 0 for padding; tokens attend only within their segment.
          cache: earlier tokens of the rows, which the call's tokens follow.
        """
        ...

    def head(self) -> Any:
        """Returns the last layer, a `stack_core.ops.Head`."""
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Computes `head().logits(hidden)`, as a method that transforms of the model's methods can see."""
        ...


@runtime_checkable
class UntiesHead(Protocol):
    """A language model whose head may share the weights of its embedding."""

    def untied(self) -> Any:
        """Returns a copy whose head has weights of its own, with the same values; itself if its head has them."""
        ...


@runtime_checkable
class RunsOnBatches(Protocol):
    """A model of data other than tokens, which defines its computation on a batch.

    Sections that transform a run's model trace it to find the matrix products of the parameters.
    """

    def on_batch(self, batch: Mapping[str, jax.Array]) -> Any:
        """Computes the model's part of a training step, using all parameters that training updates."""
        ...


@runtime_checkable
class LanguageModelConfig(Protocol):
    """The config of a language model; these properties are required in addition to `name`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...


@runtime_checkable
class ModelFamily(Protocol):
    """An architecture that builds models from a config. Its FLOPs are counted from the model's jaxpr.

    Attributes:
      name: the name that `model.name` selects.
      config_class: a `@config` class with the field `name`. For language models it is a `LanguageModelConfig` and
        also has `dtype` and `param_dtype`.
    """

    name: str
    config_class: type

    def build(self, config: Any, *, key: jax.Array) -> Any:
        """Returns the model, an `nnx.Module` with random weights; abstract under `jax.eval_shape`.

        Each parameter is an `nnx.Param` with the metadata `logical_axes`, one name per axis.
        """
        ...


class ConfigReader(Protocol):
    """A converter between a family's config and a Hugging Face `config.json`."""

    architecture: str

    def read(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of our config for a `config.json`.

        Raises:
          ConversionError: it requires unsupported features; names each key and value.
        """
        ...

    def write(self, config: Any) -> dict[str, Any]: ...


@runtime_checkable
class ConvertibleFamily(ModelFamily, Protocol):
    """A family whose weights have names in Hugging Face checkpoints."""

    config_map: ConfigReader

    def weight_rules(self, config: Any) -> Sequence[Any]:
        """Returns one rule per parameter: its path, its tensors in the checkpoint, and their layout."""
        ...

    def redundant_tensors(self, config: Any) -> Mapping[str, str | None]:
        """Returns optional tensors of a checkpoint, each with its original, or None if unused."""
        ...


@runtime_checkable
class FitsTensors(Protocol):
    """A family with optional layers, which a checkpoint may lack although its `config.json` names them."""

    def fitting(self, config: Any, tensors: Container[str]) -> Any:
        """Returns the config of the model in a checkpoint with these tensors."""
        ...


@runtime_checkable
class IsPart(Protocol):
    """A family whose models are published both separately and as the language model of larger models.

    Attributes:
      published_in: architectures of the larger models, whose `config.json` has a `text_config`.
    """

    published_in: Sequence[str]


@runtime_checkable
class ShardsItself(Protocol):
    """A family whose parameters have logical axes of their own.

    Attributes:
      rules: mesh axes by logical axis. A run's `mesh.rules` override them, and they override the default rules.
    """

    rules: Mapping[str, MeshAxes]
