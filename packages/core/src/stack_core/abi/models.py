"""Models: what a language model returns, and the family that builds it."""

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
    "IsPart",
    "LanguageModel",
    "LanguageModelConfig",
    "ModelFamily",
    "Outputs",
    "RunsOnBatches",
    "ShardsItself",
]


@partial(jax.tree_util.register_dataclass, data_fields=["hidden", "cache", "further", "facts"], meta_fields=[])
@dataclass(frozen=True)
class Outputs:
    """What a `LanguageModel` returns, always.

    Attributes:
      hidden: [batch, seq, embed], what the head takes.
      cache: the cache that the call was given, with the call's tokens appended; None without one.
      further: hidden states like `hidden` that predict later tokens (multi-token prediction), nearest first.
      facts: measurements that objectives and reports may use, by name: "expert_load"[layers, experts], the share of
        each expert; "balance_loss" and "router_z", scalars.
    """

    hidden: Any
    cache: KVCache | None = None
    further: tuple[Any, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model; the head is apart from the body, so that loss and sampler choose what to form.

    Attributes:
      states: what each group of layers keeps of a sequence, in the structure of `cache.layers`: a pytree whose leaves
        are `KeysValues`, `Latent` or `Recurrent` (`stack_core.abi.caches`).
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
          positions: int32[batch, seq], each token's place in its document.
          segment_ids: int32[batch, seq], 0 for padding; tokens attend within their segment only.
          cache: earlier tokens of the rows, which the call's tokens follow.
        """
        ...

    def head(self) -> Any:
        """Returns the last layer, a `stack_core.ops.Head`."""
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """`head().logits(hidden)`, as a method: a transform of the model's methods then sees the head's product."""
        ...


@runtime_checkable
class RunsOnBatches(Protocol):
    """A model of other data than tokens that says what a batch of its data goes through.

    Sections that transform a run's model trace this to find the products of its parameters.
    """

    def on_batch(self, batch: Mapping[str, jax.Array]) -> Any:
        """Computes what a step of training does with the model, by all parameters that training moves."""
        ...


@runtime_checkable
class LanguageModelConfig(Protocol):
    """What the config of a language model says besides `family`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_positions(self) -> int: ...


@runtime_checkable
class ModelFamily(Protocol):
    """An architecture: how to build it from a config. Its FLOPs are counted from its jaxpr.

    Attributes:
      name: the name that `model.family` selects.
      config_class: a `@config` class with the field `family`; that of a language model is a
        `LanguageModelConfig` and has `dtype` and `param_dtype` too.
    """

    name: str
    config_class: type

    def build(self, config: Any, *, key: jax.Array) -> Any:
        """Returns the model, an `nnx.Module` with random weights; abstract under `jax.eval_shape`.

        Each parameter is an `nnx.Param` with the metadata `logical_axes`, a name for each of its axes.
        """
        ...


class ConfigReader(Protocol):
    """How a family's config and a Hugging Face `config.json` say the same."""

    architecture: str

    def read(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of our config that a `config.json` gives.

        Raises:
          ConversionError: it asks for what the model cannot do; names each key and value.
        """
        ...

    def write(self, config: Any) -> dict[str, Any]: ...


@runtime_checkable
class ConvertibleFamily(ModelFamily, Protocol):
    """A family whose weights have names in Hugging Face checkpoints."""

    config_map: ConfigReader

    def weight_rules(self, config: Any) -> Sequence[Any]:
        """Where each parameter lies: its path, the tensors that make it up, and how they are laid out."""
        ...

    def redundant_tensors(self, config: Any) -> Mapping[str, str | None]:
        """Tensors that may stand beside, each with the one that it repeats, or None if nothing reads it."""
        ...


@runtime_checkable
class FitsTensors(Protocol):
    """A family some of whose layers a checkpoint may lack, although its `config.json` names them."""

    def fitting(self, config: Any, tensors: Container[str]) -> Any:
        """Returns the config of the model that a checkpoint with these tensors holds."""
        ...


@runtime_checkable
class IsPart(Protocol):
    """A family whose models are published on their own and as the language model of larger ones.

    Attributes:
      published_in: the architectures of the larger models, whose `config.json` has a `text_config`.
    """

    published_in: Sequence[str]


@runtime_checkable
class ShardsItself(Protocol):
    """A family whose parameters have logical axes of their own."""

    rules: Mapping[str, MeshAxes]
    """Mesh axes by logical axis; a run's `mesh.rules` go before them, and they before the default rules."""
