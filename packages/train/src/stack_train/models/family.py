"""A family of decoders: its config, its layers, and what they are called in Hugging Face checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from stack_train.models.decoder import Decoder, DecoderConfig, DecoderSpec
from stack_train.models.reader import ConfigMap
from stack_train.models.weight_map import Names, WeightRule, weight_rule
from stack_train.nn.groups import groups_of

__all__ = ["DecoderFamily"]


@dataclass(frozen=True, kw_only=True)
class DecoderFamily:
    """A `ConvertibleFamily` of decoders.

    Attributes:
      spec: from a config to its layers.
      names: what parameters are called, where most families call them otherwise.
    """

    name: str
    config_class: type
    config_map: ConfigMap
    spec: Callable[[Any], DecoderSpec]
    names: Names = field(default_factory=dict)

    def build(self, config: DecoderConfig, *, key: jax.Array) -> Decoder:
        return Decoder(config, self.spec(config), key=key)

    def weight_rules(self, config: DecoderConfig) -> tuple[WeightRule, ...]:
        """One rule a parameter, in the order in which a checkpoint is read and written."""
        groups = groups_of(self.spec(config).layers)
        model = nnx.eval_shape(lambda: self.build(config, key=jax.random.key(0)))
        paths: list[Any] = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
        layers = [groups[path[1]].layers(path[2]) if path[0] == "blocks" else () for path in paths]
        return tuple(weight_rule(path, stacked, self.names) for path, stacked in zip(paths, layers, strict=True))

    def redundant_tensors(self, config: DecoderConfig) -> Mapping[str, str | None]:
        """Tensors that a checkpoint may hold besides: the one that each repeats, or None if nothing reads it.

        "{layer}" stands for any layer.
        """
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_embeddings else {}
        return {**tied, "model.layers.{layer}.self_attn.rotary_emb.inv_freq": None}
