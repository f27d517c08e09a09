"""Layer norms with parameters."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from stack_core import ops
from stack_core.abi.mesh import LogicalAxes
from stack_train.nn.build import Build, Parameter
from stack_train.nn.linear import FloatName

__all__ = ["LayerNorm"]


class LayerNorm(nnx.Module):
    """The layer norm y = scale (x - mean(x)) / sqrt(var(x) + epsilon) + bias.

    Args:
      scale, bias: parameters, [embed] or, for repeated layers, [layers, embed]; a bias of None is 0.
      epsilon: term added to the variance.
      axes: logical axes of the input.
    """

    def __init__(self, scale: Parameter, bias: Parameter | None, epsilon: float, axes: LogicalAxes) -> None:
        self.scale, self.bias, self.epsilon, self.axes = scale, bias, epsilon, axes

    @classmethod
    def of_layers(cls, build: Build, axes: LogicalAxes, *, bias: bool = True) -> "LayerNorm":
        """Returns the norm of repeated layers, initialized to the identity."""
        offset = build.full(build.embed, "norm", 0.0) if bias else None
        return cls(build.full(build.embed, "norm", 1.0), offset, build.norm.epsilon, axes)

    @classmethod
    def single(
        cls, embed: int, epsilon: float, axes: LogicalAxes, param_dtype: FloatName, *, bias: bool = True
    ) -> "LayerNorm":
        """Returns a norm outside of repeated layers, initialized to the identity."""
        scale, offset = (nnx.Param(jnp.full(embed, x, param_dtype), logical_axes=("norm",)) for x in (1.0, 0.0))
        return cls(scale, offset if bias else None, epsilon, axes)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        bias = None if self.bias is None else self.bias[...]
        normed: Any = ops.norm(
            x, self.scale[...], offset=bias, kind="layer", epsilon=self.epsilon, axes={"x": self.axes}
        )
        return normed
