"""Decoder families: config, layers and Hugging Face tensor names."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
from flax import nnx

from stack_train.models.decoder import Decoder, DecoderConfig, DecoderSpec
from stack_train.models.reader import ConfigMap
from stack_train.models.weight_map import Names, WeightRule, weight_rule

__all__ = ["DecoderFamily", "Tested"]


Tested = Literal[
    "logits", "greedy", "gradients", "conversion", "pages", "w8a8 pages", "compiled", "hidden states", "embeddings"
]


@dataclass(frozen=True, kw_only=True)
class DecoderFamily:
    """A `ConvertibleFamily` of decoders.

    Attributes:
      name: name of the family.
      config_class: config class of the family.
      config_map: mapping between the config and `config.json`.
      spec: function from a config to its architecture.
      names: tensor names that differ from the default names, or a function that returns these names for a config.
      layer_prefix: prefix of the tensor names of a layer.
      further_prefix: prefix of the tensor names of multi-token prediction layers; None numbers them after the
        decoder's layers.
      redundant: see `redundant_tensors`.
      published_in: architectures of larger models whose language model belongs to this family; see `IsPart`.
      sizes: names of published models, for listings.
      tested: aspects covered by the project's tests, which use this field to select cases.
    """

    name: str
    config_class: type
    config_map: ConfigMap
    spec: Callable[[Any], DecoderSpec]
    names: Names | Callable[[Any], Names] = field(default_factory=dict)
    layer_prefix: str = "model.layers.{layer}."
    further_prefix: str | None = None
    redundant: Mapping[str, str | None] = field(default_factory=dict)
    published_in: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    tested: tuple[Tested, ...] = ()

    def build(self, config: DecoderConfig, *, key: jax.Array) -> Decoder:
        return Decoder(config, self.spec(config), key=key)

    def weight_rules(self, config: DecoderConfig) -> tuple[WeightRule, ...]:
        """Returns one rule per parameter, in the order in which a checkpoint is read and written."""
        spec = self.spec(config)
        groups, names = spec.groups, self.names(config) if callable(self.names) else self.names
        # Only the paths are needed, so nothing is allocated.
        model = nnx.eval_shape(lambda: self.build(config, key=jax.random.key(0)))
        paths: list[Any] = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
        return tuple(self._rule(path, groups, spec, names) for path in paths)

    def _rule(self, path: Any, groups: Any, spec: DecoderSpec, names: Names) -> WeightRule:
        if path[0] == "blocks":
            return weight_rule(path, groups[path[1]].layers(path[2]), names, prefix=self.layer_prefix)
        if path[0] != "further":
            return weight_rule(path, (), names)
        first = len(spec.layers) if self.further_prefix is None else 0
        prefix = {} if self.further_prefix is None else {"prefix": self.further_prefix}
        return weight_rule(path, range(first, first + len(spec.further)), names, **prefix)

    def redundant_tensors(self, config: DecoderConfig) -> Mapping[str, str | None]:
        """Returns optional tensors of a checkpoint, each with the tensor that it repeats, or None for an unused tensor.

        "{layer}" in a name stands for any layer.
        """
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_embeddings else {}
        return {**tied, **self.redundant, "model.layers.{layer}.self_attn.rotary_emb.inv_freq": None}

    def fitting(self, config: Any, tensors: Container[str]) -> Any:
        """Returns the config, without multi-token prediction layers if the checkpoint has none of their tensors.

        transformers omits these layers when it saves a model, but keeps their number in config.json.
        """
        if not self.spec(config).further:
            return config
        rules = [rule for rule in self.weight_rules(config) if rule.parameter.startswith("further/")]
        names = (rule.tensor.format(layer=rule.layers[0], expert=0) for rule in rules)
        return config if any(name in tensors for name in names) else replace(config, mtp_layers=0)
