"""Creation of stacked layer parameters with dtypes and logical axes."""

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
    """Builder of the parameters of `repeats` identical layers, stacked on a leading axis "layers".

    The n-th call that samples values uses the key `fold_in(key, n)`.

    Attributes:
      embed: width of the residual stream.
      repeats: number of stacked layers.
      std: standard deviation of initial values.
      residual_std: standard deviation of matrices that write to the residual stream.
      norm: RMS norm of the layers.
      param_dtype: dtype of the parameters.
      key: PRNG key.
      draws: number of keys used so far.
    """

    embed: int
    repeats: int
    std: float
    residual_std: float
    norm: Norm
    param_dtype: FloatName
    key: jax.Array
    # `replace` skips it, so a child, whose key is new, counts anew.
    draws: int = field(default=0, init=False)

    def child(self) -> "Build":
        """Returns a builder with a new key, for a submodule of the layer."""
        return replace(self, key=self._key())

    def linear(
        self,
        shape: tuple[int, int],
        axes: tuple[str | None, str | None],
        *,
        bias: bool = False,
        residual: bool = False,
        dtype: FloatName | None = None,
    ) -> Linear:
        """Returns a linear layer with a kernel of `shape`, [d_in, d_out], in `dtype` or else `param_dtype`."""
        return Linear(
            (self.repeats, *shape),
            ("layers", *axes),
            use_bias=bias,
            std=self.residual_std if residual else self.std,
            param_dtype=dtype or self.param_dtype,
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
        """Returns a parameter with normal initial values."""
        if std is None:
            std = self.residual_std if residual else self.std
        values = std * jax.random.normal(self._key(), (self.repeats, *shape), self.param_dtype)
        return nnx.Param(values, logical_axes=("layers", *axes))

    def full(self, size: int, axis: str | None, value: float | jax.Array, **metadata: Any) -> Parameter:
        """Returns a vector filled with `value`, a number or one per entry.

        `metadata` may contain a `dtype` to use instead of `param_dtype`.
        """
        dtype = metadata.pop("dtype", self.param_dtype)
        return nnx.Param(jnp.full((self.repeats, size), value, dtype), logical_axes=("layers", axis), **metadata)

    def scale(self, size: int, axis: str = "norm") -> Parameter:
        """Returns the scale of a norm, initialized to the identity."""
        # The norm adds `offset` to the stored scale.
        return self.full(size, axis, 1 - self.norm.offset)

    def _key(self) -> jax.Array:
        key = jax.random.fold_in(self.key, self.draws)
        self.draws += 1
        return key
