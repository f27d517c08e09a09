"""A weight with adapters, as a pytree in the place of a parameter."""

from dataclasses import dataclass, field
from typing import Any

import jax

from stack_core.abi.ops import LowRankView

__all__ = ["LowRankWeight"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRankWeight:
    """A parameter with its adapters, implementing `__stack_low_rank__`.

    All arrays have a leading axis of layers, which lets a loop over layers slice them together.

    Attributes:
      base: parameter of the model, [layers, d_in, d_out].
      down, up: factors, [layers, adapters, d_in, rank] and [layers, adapters, rank, d_out].
      scale: [layers, adapters], factor of each adapter's product.
      rows: [layers, tokens], adapter of each token, -1 for the base alone; None selects adapter 0.
      path: path of the parameter, for messages.
    """

    base: Any
    down: Any
    up: Any
    scale: Any
    rows: Any
    path: str = field(metadata={"static": True})

    def __stack_low_rank__(self) -> LowRankView:
        return LowRankView((1, 0), self.base, self.down, self.up, self.scale, self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def ndim(self) -> int:
        return len(self.base.shape)

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    def __getitem__(self, index: Any) -> "LowRankWeight":
        # Any other index would slice the base and leave the factors behind.
        if index is not Ellipsis:
            raise TypeError(f"{self.path} has adapters, which can be sliced only by a loop over layers.")
        return self

    def astype(self, dtype: Any, copy: bool = True) -> "LowRankWeight":
        """Casts the base and the factors, as models do before a matrix product."""
        del copy
        base, down, up = (array.astype(dtype) for array in (self.base, self.down, self.up))
        return LowRankWeight(base, down, up, self.scale, self.rows, self.path)
