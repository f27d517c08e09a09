"""Mapping between slices of parameters and the linear modules of transformers models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stack_core.abi.errors import ConversionError
from stack_core.abi.models import ConvertibleFamily
from stack_core.abi.plugins import registries
from stack_train.checkpoint import named_leaves
from stack_train.models.weight_map import WeightRule
from stack_train.run.model import abstract_params

__all__ = ["AdaptedModule", "modules_of", "outer_tensors"]

_END = ".weight"


@dataclass(frozen=True)
class AdaptedModule:
    """A linear module of a transformers model.

    Attributes:
      name: name of the module, such as "model.layers.0.self_attn.q_proj".
      parameter: path of the parameter that contains the weight.
      place: index of the weight on the parameter's first axis; None for parameters that are not stacked.
      layer: index of the layer in the model; None outside of layers.
      d_in: number of input features.
      d_out: number of output features.
    """

    name: str
    parameter: str
    place: int | None
    layer: int | None
    d_in: int
    d_out: int


def outer_tensors(config: Any) -> dict[str, WeightRule]:
    """Returns the rules of all tensors outside of layers, such as embeddings and head, by tensor name.

    A duplicate, such as a head tied to the embedding, has the rule of the original tensor.
    """
    family = registries.models[config.name]
    found = {rule.tensor: rule for rule in family.weight_rules(config) if not rule.layers}
    repeated = family.redundant_tensors(config).items()
    return {**found, **{name: found[original] for name, original in repeated if original in found}}


def modules_of(config: Any) -> dict[str, AdaptedModule]:
    """Lists the linear modules of a model by their names in transformers, in the order of Hugging Face checkpoints.

    Parameters that are not plain linear modules in transformers, such as experts, are excluded.

    Raises:
      ConversionError: transformers does not support the family.
    """
    family = registries.models[config.name]
    if not isinstance(family, ConvertibleFamily):
        raise ConversionError(f"Models of family {config.name!r} have no Hugging Face counterpart.")
    shapes: Mapping[str, Any] = named_leaves(abstract_params(config))
    found = {}
    for rule in family.weight_rules(config):
        shape = shapes[rule.parameter].shape
        # A part of a tensor, such as an expert, is not a module that PEFT could wrap.
        is_linear = rule.transposed and rule.part == (0, 1) and rule.fused is None and rule.tensor.endswith(_END)
        if not is_linear or len(shape) != (3 if rule.layers else 2):
            continue
        for place, tensor in enumerate(rule.tensor_shapes(shape)):
            name = tensor.removesuffix(_END)
            layer = rule.layers[place] if rule.layers else None
            found[name] = AdaptedModule(
                name, rule.parameter, place if rule.layers else None, layer, shape[-2], shape[-1]
            )
    return found
