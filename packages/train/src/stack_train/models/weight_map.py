"""How a model's parameters and its Hugging Face tensors correspond. Nothing is computed, so both ways are exact."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Shaped

__all__ = ["Names", "WeightRule", "weight_rule"]

Names = Mapping[str, str]
"""What the parameters of a layer are called: the path of one in a layer -> its tensor's name in a layer's tensors.

Of a linear layer, path and name lack the end: "attention/query" -> "self_attn.q_proj", whose kernel is ".weight".
"{expert}" in a name stands for the index into the parameter's [experts, ...] axis.
"""

_LAYER = "model.layers.{layer}."
_OUTER = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_LAYER_NAMES: Names = {
    "attention_norm": "input_layernorm.weight",
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/output": "self_attn.o_proj",
    "attention/query_norm": "self_attn.q_norm.weight",
    "attention/key_norm": "self_attn.k_norm.weight",
    "feed_forward_norm": "post_attention_layernorm.weight",
    "feed_forward/gate": "mlp.gate_proj",
    "feed_forward/up": "mlp.up_proj",
    "feed_forward/down": "mlp.down_proj",
    "feed_forward/router": "mlp.gate",
    "feed_forward/expert_gate": "mlp.experts.{expert}.gate_proj.weight",
    "feed_forward/expert_up": "mlp.experts.{expert}.up_proj.weight",
    "feed_forward/expert_down": "mlp.experts.{expert}.down_proj.weight",
}
"""What most families call them."""


@dataclass(frozen=True)
class WeightRule:
    """Where one parameter lies in a Hugging Face checkpoint.

    Attributes:
      parameter: its path, such as "blocks/0/0/attention/query/kernel".
      tensor: the tensor's name; "{layer}" and "{expert}" in it stand for indices into the parameter's leading axes,
        [layers, experts, ...].
      layers: the model's layer that each index of the first axis stands for.
      transposed: the tensor has the last two axes the other way round; torch keeps linear weights as [d_out, d_in].
      part: (i, n): the parameter is the ith of n equal parts of the tensor's last axis but one. (0, 1) is all of it.
      fused: where checkpoints of another form have it, which are read and not written.
    """

    parameter: str
    tensor: str
    layers: Sequence[int] = ()
    transposed: bool = False
    part: tuple[int, int] = (0, 1)
    fused: "WeightRule | None" = None

    def stored_in(self, tensors: Container[str]) -> "WeightRule":
        """The rule in the form of a checkpoint that has these tensors."""
        return self.fused if self.fused is not None and self.fused._first in tensors else self

    def tensor_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The tensors, in order, that a parameter of `shape` is made of."""
        names = self._names(shape)
        tensor_shape = shape[names.ndim :]
        if self.transposed:
            tensor_shape = (*tensor_shape[:-2], tensor_shape[-1], tensor_shape[-2])
        if self.part[1] > 1:
            tensor_shape = (*tensor_shape[:-2], self.part[1] * tensor_shape[-2], tensor_shape[-1])
        return dict.fromkeys(names.flat, tensor_shape)

    def part_of(self, tensor: np.ndarray) -> np.ndarray:
        """The part of a tensor that is the parameter's, like an entry of `tensors`."""
        index, count = self.part
        return tensor if count == 1 else np.split(tensor, count, axis=-2)[index]

    def tensors(self, parameter: Shaped[np.ndarray, "..."] | jax.Array) -> dict[str, np.ndarray]:
        """Views of what a parameter is made of, by the tensors' names."""
        array = np.asarray(parameter)
        names = self._names(array.shape)
        array = array.swapaxes(-1, -2) if self.transposed else array
        return {name: array[index] for index, name in np.ndenumerate(names)}

    @property
    def _first(self) -> str:
        return self.tensor.format(layer=next(iter(self.layers), 0), expert=0)

    def _names(self, shape: tuple[int, ...]) -> np.ndarray:
        """The names in the parameter's leading axes, of which a name without indices has none."""
        layers = self.layers if "{layer}" in self.tensor else ()
        experts = range(shape[1]) if "{expert}" in self.tensor else ()
        sizes = tuple(len(indices) for indices in (layers, experts) if indices)
        names = [self.tensor.format(layer=layer, expert=expert) for layer in layers or [0] for expert in experts or [0]]
        return np.array(names, object).reshape(sizes)


_EXPERTS = "mlp.experts."
_FUSED: Mapping[str, tuple[str, tuple[int, int]]] = {
    "feed_forward/expert_gate": (_EXPERTS + "gate_up_proj", (0, 2)),
    "feed_forward/expert_up": (_EXPERTS + "gate_up_proj", (1, 2)),
    "feed_forward/expert_down": (_EXPERTS + "down_proj", (0, 1)),
}
"""What transformers 5 calls the experts of a layer, and their parts, where it keeps them in one tensor."""


def weight_rule(path: Sequence[str | int], layers: Sequence[int], names: Names) -> WeightRule:
    """Returns the rule of one parameter of a `Decoder`.

    Args:
      path: of the parameter.
      layers: the model's layers that it is stacked of; none outside of layers.
      names: the family's own, which go before those of most families.
    """
    parameter = "/".join(map(str, path))
    if not layers:
        return WeightRule(parameter, _OUTER[parameter], transposed=parameter == "lm_head")
    names = {**_LAYER_NAMES, **names}
    place = "/".join(map(str, path[3:]))  # blocks, group, place of the period
    if place in _FUSED:
        name, part = _FUSED[place]
        fused = WeightRule(parameter, _LAYER + name, layers, transposed=True, part=part)
        return WeightRule(parameter, _LAYER + names[place], layers, transposed=True, fused=fused)
    if place in names:
        return WeightRule(parameter, _LAYER + names[place], layers)
    place, _, kind = place.rpartition("/")
    end = {"kernel": ".weight", "bias": ".bias"}[kind]
    return WeightRule(parameter, _LAYER + names[place] + end, layers, transposed=kind == "kernel")
