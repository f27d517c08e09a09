"""Encoder families: config, layers and Hugging Face tensor names."""

from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from flax import nnx

from stack_train.models.encoder import Encoder, EncoderConfig, EncoderSpec
from stack_train.models.family import Tested
from stack_train.models.reader import ConfigMap
from stack_train.models.weight_map import Names, Stored, WeightRule
from stack_train.nn.groups import groups_of

__all__ = ["EncoderFamily"]

_ENDS = {"kernel": ".weight", "scale": ".weight", "bias": ".bias"}


@dataclass(frozen=True, kw_only=True)
class EncoderFamily:
    """A `ConvertibleFamily` of encoders.

    Attributes:
      name: name of the family.
      config_class: config class of the family.
      config_map: mapping between the config and `config.json`.
      spec: function from a config to its architecture.
      names: tensor names by parameter path, as in `DecoderFamily.names`, but complete. Names within layers contain
        "{layer}".
      base_prefix: prefix of the tensor names in the architectures of `published_in`, whose heads are not read.
      published_in: architectures that add a head to the encoder, such as the head of masked language modeling.
      redundant: see `redundant_tensors`.
      sizes: names of published models, for listings.
      tested: aspects covered by the project's tests.
    """

    name: str
    config_class: type
    config_map: ConfigMap
    spec: Callable[[Any], EncoderSpec]
    names: Names
    base_prefix: str
    published_in: tuple[str, ...] = ()
    redundant: Mapping[str, str | None] = field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    tested: tuple[Tested, ...] = ()

    def build(self, config: EncoderConfig, *, key: jax.Array) -> Encoder:
        return Encoder(config, self.spec(config), key=key)

    def weight_rules(self, config: EncoderConfig) -> tuple[WeightRule, ...]:
        """Returns one rule per parameter, in the order in which a checkpoint is read and written."""
        groups = groups_of(self.spec(config).layers)
        # Only the paths are needed, so nothing is allocated.
        model = nnx.eval_shape(lambda: self.build(config, key=jax.random.key(0)))
        paths: list[Any] = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
        return tuple(self._rule(path, groups) for path in paths)

    def _rule(self, path: Any, groups: Any) -> WeightRule:
        parameter = place = "/".join(map(str, path))
        layers: Any = ()
        if path[0] == "blocks":
            layers, place = groups[path[1]].layers(path[2]), "/".join(map(str, path[3:]))
        match self.names.get(place):
            case Stored() as stored:
                options: Any = {name: value for name, value in vars(stored).items() if name != "name"}
                return WeightRule(parameter, stored.name, layers, **options)
            case str(name):
                return WeightRule(parameter, name, layers)
        module, _, kind = place.rpartition("/")
        return WeightRule(parameter, f"{self.names[module]}{_ENDS[kind]}", layers, transposed=kind == "kernel")

    def redundant_tensors(self, config: EncoderConfig) -> Mapping[str, str | None]:
        """Returns tensors that a checkpoint may have and the model does not use."""
        del config
        return self.redundant

    def fitting(self, config: Any, tensors: Container[str]) -> Any:
        """Returns the config, without a pooler if the checkpoint has none."""
        rules = [rule.tensor for rule in self.weight_rules(config) if rule.parameter.startswith("pooler/")]
        return config if all(name in tensors for name in rules) else replace(config, pooler=False)

    def part_of(
        self, mapping: Mapping[str, Any], tensors: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Mapping[str, Any], tuple[str, ...]]:
        """Extracts the encoder from a checkpoint with an architecture in `published_in`.

        Returns:
          Its `config.json`, its tensors by name, and descriptions of the omitted parts.
        """
        prefix = self.base_prefix
        left_out = Counter(name.partition(".")[0] for name in tensors if not name.startswith(prefix))
        return (
            {**mapping, "architectures": [self.config_map.architecture]},
            {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)},
            tuple(f"{owner} ({count} tensors)" for owner, count in left_out.items()),
        )
