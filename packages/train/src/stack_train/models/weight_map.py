"""Mapping between a model's parameters and Hugging Face tensors. It only moves data, so both directions are exact."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Shaped

from stack_core.abi.errors import ConversionError

__all__ = ["Names", "Stored", "WeightRule", "joined_tensors", "shared_tensors", "stored_rules", "weight_rule"]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor that contains a parameter as a part.

    Attributes:
      name: name of the tensor within a layer.
      transposed, part, units, part_axis, interleaved: see `WeightRule`.
      fused: name of the tensor that has the parameters of all experts in checkpoints of another layout, or None.
      dtype, blocks: see `WeightRule`.
    """

    name: str
    dtype: str | None = None
    blocks: int | None = None
    transposed: bool = False
    part: tuple[int, int] = (0, 1)
    units: int = 1
    part_axis: Literal[-2, -1] = -1
    interleaved: bool = False
    fused: str | None = None


Names = Mapping[str, "str | Stored"]
"""Tensor names by parameter path, both relative to a layer.

Linear layers omit the last part: "attention/query" -> "self_attn.q_proj", whose kernel is ".weight". "{expert}" in a
name stands for the index into the parameter's [experts, ...] axis. The parameters of a `MultiTokenLayer` outside of its
block have paths that start with "further/". A name that starts with "/" is a full tensor name, and so are the names of
parameters outside of layers: "embedding", "norm", "lm_head", and complete paths that start with "layer_inputs/" or
"streams/".
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
"""Tensor names of most families."""


@dataclass(frozen=True)
class WeightRule:
    """The location of one parameter in a Hugging Face checkpoint.

    Attributes:
      parameter: path of the parameter, such as "blocks/0/0/attention/query/kernel".
      tensor: name of the tensor, in which "{layer}" and "{expert}" stand for indices into the parameter's leading axes,
        [layers, experts, ...].
      layers: layer of the model for each index of the parameter's first axis; empty if it is not stacked.
      transposed: True if the last two axes are swapped in the tensor; torch stores linear weights as [d_out, d_in].
      part: (i, n) if the parameter starts at the i-th of n equal parts of the tensor; (0, 1) is the complete tensor.
      units: number of these parts that the parameter has, such as the query heads per key head in a tensor of queries,
        keys and values.
      part_axis: axis of the tensor along which it is divided into parts.
      interleaved: True if the parameter is every n-th entry from the i-th on, instead of a contiguous slice.
      fused: location in checkpoints of another layout, which is read but never written.
      dtype: name of the dtype of written tensors of integers; None is the dtype of the parameter.
      blocks: number of equal blocks of the tensor's rows, which the parameter stacks in an axis of its own, [blocks,
        ...]; None does not divide the rows.
    """

    parameter: str
    tensor: str
    layers: Sequence[int] = ()
    transposed: bool = False
    part: tuple[int, int] = (0, 1)
    units: int = 1
    part_axis: Literal[-2, -1] = -2
    interleaved: bool = False
    fused: "WeightRule | None" = None
    dtype: str | None = None
    blocks: int | None = None

    def stored_in(self, tensors: Mapping[str, Any], shape: tuple[int, ...]) -> "WeightRule":
        """Returns the rule for the layout of a checkpoint that has these tensors.

        Two layouts of one square tensor are not distinguished; see `stored_rules`.

        Args:
          tensors: tensors by name, of which the shapes are read.
          shape: shape of the parameter.
        """
        if self.fused is None or self.fused._first not in tensors:
            return self
        # Layouts with their own names are known by the first of them, others by its shape.
        is_same = self.fused._first == self._first
        return self if is_same and tensors[self._first].shape == self.tensor_shapes(shape)[self._first] else self.fused

    def tensor_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Returns names and shapes of the tensors that contain a parameter of `shape`, in order."""
        names = self._names(shape)
        tensor_shape = shape[names.ndim :]
        if self.transposed:
            tensor_shape = (*tensor_shape[:-2], tensor_shape[-1], tensor_shape[-2])
        sizes = list(tensor_shape)
        if self.blocks is not None:
            sizes = [sizes[0] * sizes[1], *sizes[2:]]
        if self.part[1] > 1:
            sizes[self.part_axis] = sizes[self.part_axis] // self.units * self.part[1]
        return dict.fromkeys(names.flat, tuple(sizes))

    def part_of(self, tensor: np.ndarray) -> np.ndarray:
        """Returns a view of the parameter's part of a tensor, in the layout of an entry of `tensors`."""
        index, count = self.part
        if self.blocks is not None:
            return tensor.reshape(self.blocks, -1, *tensor.shape[1:])
        if count == 1:
            return tensor
        size = tensor.shape[self.part_axis] // count
        wanted = slice(index, None, count) if self.interleaved else slice(index * size, (index + self.units) * size)
        # A view, because `joined_tensors` writes into it through this function.
        return tensor[(..., wanted, *[slice(None)] * (-1 - self.part_axis))]

    def tensors(self, parameter: Shaped[np.ndarray, "..."] | jax.Array) -> dict[str, np.ndarray]:
        """Returns views of a parameter by tensor name."""
        array = np.asarray(parameter)
        names = self._names(array.shape)
        array = array.swapaxes(-1, -2) if self.transposed else array
        # The ellipsis makes a view of a number, too.
        return {name: array[(*index, ...)] for index, name in np.ndenumerate(names)}

    @property
    def _first(self) -> str:
        return self.tensor.format(layer=next(iter(self.layers), 0), expert=0)

    def _names(self, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the tensor names as an array over the parameter's leading axes; 0-d for a name without indices."""
        layers = self.layers
        experts = range(shape[1]) if "{expert}" in self.tensor else ()
        sizes = tuple(len(indices) for indices in (layers, experts) if indices)
        names = [self.tensor.format(layer=layer, expert=expert) for layer in layers or [0] for expert in experts or [0]]
        # As objects, since NumPy would give all texts the width of the longest.
        return np.array(names, object).reshape(sizes)


def stored_rules(
    rules: Sequence[WeightRule], tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> list[WeightRule]:
    """Returns the rules for the layout of a checkpoint that has these tensors.

    Two layouts with the same names differ in the shapes of their tensors. A square tensor has the layout of
    the rest, because a checkpoint is written in one layout.

    Args:
      rules: rules of all parameters of a model.
      tensors: tensors by name, of which the shapes are read.
      shapes: shape of each parameter by path.

    Raises:
      ConversionError: all tensors with two layouts are square, or the rest has different layouts.
    """
    found = [rule.stored_in(tensors, shapes[rule.parameter]) for rule in rules]
    square, fused = dict[int, WeightRule](), set[bool]()
    for place, rule in enumerate(rules):
        other, shape = rule.fused, shapes[rule.parameter]
        if other is None or other.tensor != rule.tensor or other._first not in tensors:
            continue
        if other.tensor_shapes(shape) == rule.tensor_shapes(shape):
            square[place] = other
        else:
            fused.add(found[place] is other)
    if square and len(fused) != 1:
        names = sorted({rules[place]._first for place in square})
        raise ConversionError(
            f"{', '.join(names)}: square tensors, which may be transposed; the layouts of the other tensors differ or "
            "are unknown. Save the checkpoint again with its publisher's library."
        )
    return [square[place] if place in square and True in fused else rule for place, rule in enumerate(found)]


def shared_tensors(rules: Sequence[WeightRule]) -> list[list[WeightRule]]:
    """Groups rules whose parameters are parts of the same tensors."""
    groups: dict[tuple[str, tuple[int, ...]], list[WeightRule]] = {}
    for rule in rules:
        groups.setdefault((rule.tensor, tuple(rule.layers)), []).append(rule)
    return list(groups.values())


def joined_tensors(rules: Sequence[WeightRule], parameters: Sequence[Any]) -> dict[str, np.ndarray]:
    """Assembles parameters into tensors, by name; `rules` is one group of `shared_tensors`."""
    if rules[0].part[1] == 1:
        parameter = parameters[0] if rules[0].dtype is None else np.asarray(parameters[0]).astype(rules[0].dtype)
        shapes = rules[0].tensor_shapes(parameter.shape)
        return {name: array.reshape(shapes[name]) for name, array in rules[0].tensors(parameter).items()}
    shapes = rules[0].tensor_shapes(parameters[0].shape)
    # Several parameters fill different parts of these tensors.
    found = {name: np.empty(shape, np.asarray(parameters[0]).dtype) for name, shape in shapes.items()}
    for rule, parameter in zip(rules, parameters, strict=True):
        for name, view in rule.tensors(parameter).items():
            rule.part_of(found[name])[...] = view
    return found


_EXPERTS = "mlp.experts."
_FUSED: Mapping[str, tuple[str, tuple[int, int]]] = {
    "feed_forward/expert_gate": (_EXPERTS + "gate_up_proj", (0, 2)),
    "feed_forward/expert_up": (_EXPERTS + "gate_up_proj", (1, 2)),
    "feed_forward/expert_down": (_EXPERTS + "down_proj", (0, 1)),
}
"""Tensor name and part of the experts' parameters in transformers 5, which fuses all experts of a layer."""


def weight_rule(path: Sequence[str | int], layers: Sequence[int], names: Names, *, prefix: str = _LAYER) -> WeightRule:
    """Returns the rule of one parameter of a `Decoder`.

    Args:
      path: path of the parameter.
      layers: layers of the model that are stacked in the parameter; empty for parameters outside of layers.
      names: tensor names of the family, which override the default names.
      prefix: prefix of a layer's tensor names.
    """
    parameter = "/".join(map(str, path))
    if not layers:
        # Both layouts store embeddings as [vocab, embed]; only torch stores the head like that, too.
        outer = {**_OUTER, **names}[parameter]
        if isinstance(outer, Stored):
            return WeightRule(parameter, outer.name, transposed=outer.transposed)
        return WeightRule(parameter, outer, transposed=parameter == "lm_head")
    names = {**_LAYER_NAMES, **names}
    place = _place(path)
    match names.get(place):
        case Stored() as stored:
            options: Any = {name: value for name, value in vars(stored).items() if name not in ("name", "fused")}
            fused_rule = stored.fused and WeightRule(parameter, prefix + stored.fused, layers, **options)
            return WeightRule(parameter, prefix + stored.name, layers, **options, fused=fused_rule or None)
        case str(name) if place in _FUSED:
            whole, part = _FUSED[place]
            fused = WeightRule(parameter, prefix + whole, layers, transposed=True, part=part)
            return WeightRule(parameter, _full(prefix, name), layers, transposed=True, fused=fused)
        case str(name):
            return WeightRule(parameter, _full(prefix, name), layers)
    place, _, kind = place.rpartition("/")
    end = {"kernel": ".weight", "bias": ".bias"}[kind]
    return WeightRule(parameter, _full(prefix, f"{names[place]}{end}"), layers, transposed=kind == "kernel")


def _place(path: Sequence[str | int]) -> str:
    """Returns a parameter's path within its layer, without "blocks/GROUP/PLACE/" or "further/block/"."""
    steps = path[3:] if path[0] == "blocks" else path[2 if path[1] == "block" else 1 :]
    inside = path[0] == "blocks" or path[1] == "block"
    return "/".join(map(str, steps)) if inside else "further/" + "/".join(map(str, steps))


def _full(prefix: str, name: str) -> str:
    """Returns the full name of a tensor; a name that starts with "/" omits the prefix."""
    return name[1:] if name.startswith("/") else prefix + name
