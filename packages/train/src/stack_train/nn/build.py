"""The parameters of layers: stacked, in their dtype, with logical axes."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from stack_train.nn.linear import FloatName, Linear
from stack_train.nn.residual import Norm

__all__ = ["Build", "Parameter"]

Parameter = nnx.Param[jax.Array]


@dataclass
class Build:
    """Makes the parameters of `repeats` equal layers, stacked on a leading axis "layers".

    The nth call that draws values draws them from `fold_in(key, n)`.

    Attributes:
      embed: width of the residual stream.
      std: standard deviation of initial values.
      residual_std: that of matrices which write to the residual stream.
      norm: of the layers.
    """

    embed: int
    repeats: int
    std: float
    residual_std: float
    norm: Norm
    param_dtype: FloatName
    key: jax.Array
    draws: int = field(default=0, init=False)

    def child(self) -> "Build":
        """The same with a key of its own, for a module inside the layer."""
        return replace(self, key=self._key())

    def linear(
        self, shape: tuple[int, int], axes: tuple[str | None, str | None], *, bias: bool = False, residual: bool = False
    ) -> Linear:
        """A linear layer with a kernel of `shape`, [d_in, d_out]."""
        return Linear(
            (self.repeats, *shape),
            ("layers", *axes),
            use_bias=bias,
            std=self.residual_std if residual else self.std,
            param_dtype=self.param_dtype,
            key=self._key(),
        )

    def normal(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        residual: bool = False,
        std: float | None = None,
    ) -> Parameter:
        """An array of normal initial values."""
        if std is None:
            std = self.residual_std if residual else self.std
        values = std * jax.random.normal(self._key(), (self.repeats, *shape), self.param_dtype)
        return nnx.Param(values, logical_axes=("layers", *axes))

    def full(self, size: int, axis: str | None, value: float, **metadata: Any) -> Parameter:
        """A vector of one value; `metadata` may have a `dtype` other than that of the parameters."""
        dtype = metadata.pop("dtype", self.param_dtype)
        return nnx.Param(jnp.full((self.repeats, size), value, dtype), logical_axes=("layers", axis), **metadata)

    def scale(self, size: int, axis: str = "norm") -> Parameter:
        """The scale of a norm, which starts as the identity."""
        return self.full(size, axis, 1 - self.norm.offset)

    def _key(self) -> jax.Array:
        key = jax.random.fold_in(self.key, self.draws)
        self.draws += 1
        return key
