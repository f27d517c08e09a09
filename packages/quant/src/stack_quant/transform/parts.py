"""Parameters that are concatenated, as the weights of query, key and value are before one product."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from stack_quant.transform.provenance import Source

__all__ = ["Concatenated"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Concatenated:
    """Arrays, some of them quantized, that stand for their concatenation: each keeps its codes, scales and rule.

    Attributes:
      sources: of each array.
      dtype: the name of the one that all stand for.
    """

    arrays: tuple[Any, ...]
    axis: int = dataclasses.field(metadata={"static": True})
    sources: tuple[Source | None, ...] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        first, axis = self.arrays[0].shape, self.axis
        return (*first[:axis], sum(array.shape[axis] for array in self.arrays), *first[axis + 1 :])
