"""How a model's parameters and its Hugging Face tensors correspond."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Shaped

__all__ = ["WeightRule", "linear_rules"]


@dataclass(frozen=True)
class WeightRule:
    """Where one parameter lies in a Hugging Face checkpoint.

    Attributes:
      parameter: its path, such as "blocks/attention/query/kernel".
      tensor: the tensor's name; "{layer}" in it stands for the index into the parameter's leading [layers, ...] axis.
      transposed: the tensor has the last two axes the other way round; torch keeps linear weights as [d_out, d_in].
    """

    parameter: str
    tensor: str
    transposed: bool = False

    @property
    def is_stacked(self) -> bool:
        return "{layer}" in self.tensor

    def tensor_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The tensors, in order of layers, that a parameter of `shape` is made of."""
        tensor_shape = shape[1:] if self.is_stacked else shape
        if self.transposed:
            tensor_shape = (*tensor_shape[:-2], tensor_shape[-1], tensor_shape[-2])
        names = [self.tensor.format(layer=layer) for layer in range(shape[0])] if self.is_stacked else [self.tensor]
        return dict.fromkeys(names, tensor_shape)

    def tensors(self, parameter: Shaped[np.ndarray, "..."] | jax.Array) -> dict[str, np.ndarray]:
        """Views of the tensors, by name, that a parameter is made of."""
        array = np.asarray(parameter)
        array = array.swapaxes(-1, -2) if self.transposed else array
        parts = array if self.is_stacked else [array]
        return dict(zip(self.tensor_shapes(parameter.shape), parts, strict=True))


def linear_rules(parameters: Mapping[str, str], *, use_bias: bool) -> tuple[WeightRule, ...]:
    """The rules of linear layers: their kernels and, if they have them, their biases.

    Args:
      parameters: the path of each layer, and the name that its tensors have before ".weight" and ".bias".
    """
    kernels = [WeightRule(f"{path}/kernel", f"{name}.weight", transposed=True) for path, name in parameters.items()]
    biases = [WeightRule(f"{path}/bias", f"{name}.bias") for path, name in parameters.items()]
    return (*kernels, *(biases if use_bias else ()))
