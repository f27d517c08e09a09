"""Concatenated parameters, such as the weights of query, key and value before a joint product."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from stack_quant.transform.provenance import Source

__all__ = ["Concatenated"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Concatenated:
    """The concatenation of arrays, kept as its parts, each of which keeps its codes, scales and rule.

    Attributes:
      arrays: the parts, some of which may be quantized.
      axis: axis of the concatenation.
      sources: source of each part.
      dtype: name of the dtype of all dequantized parts.
    """

    arrays: tuple[Any, ...]
    axis: int = dataclasses.field(metadata={"static": True})
    sources: tuple[Source | None, ...] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        first, axis = self.arrays[0].shape, self.axis
        return (*first[:axis], sum(array.shape[axis] for array in self.arrays), *first[axis + 1 :])
