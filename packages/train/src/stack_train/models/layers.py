"""What decoder architectures share: a linear layer, and a scan over stacked layers."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from stack_core import ops

__all__ = ["FloatName", "Linear", "RematPolicy", "scan_layers"]

FloatName = Literal["bfloat16", "float16", "float32"]
RematPolicy = Literal["none", "full", "dots", "dots_no_batch"]

Layer = TypeVar("Layer", bound=nnx.Module)

_SAVED = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Linear(nnx.Module):
    """y = x @ kernel + bias, with kernel[d_in, d_out] cast to the dtype of x.

    Args:
      shape: of the kernel, [d_in, d_out]; or [layers, d_in, d_out], in which case a scan calls it layer by layer.
      axes: logical names of the kernel's axes.
      std: standard deviation of the kernel's normal initial values; a bias starts at zero.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        *,
        use_bias: bool,
        std: float,
        param_dtype: FloatName,
        key: jax.Array,
    ) -> None:
        self.kernel = nnx.Param(std * jax.random.normal(key, shape, param_dtype), logical_axes=axes)
        bias_shape, bias_axes = (*shape[:-2], shape[-1]), (*axes[:-2], axes[-1])
        self.bias = nnx.Param(jnp.zeros(bias_shape, param_dtype), logical_axes=bias_axes) if use_bias else None

    def __call__(self, x: Float[Array, "... d_in"]) -> Float[Array, "... d_out"]:
        bias = None if self.bias is None else self.bias[...]
        return ops.linear(x, self.kernel[...].astype(x.dtype), bias=bias)


def scan_layers(
    body: Callable[[Layer, Any, Any], tuple[Any, Any]],
    layers: Layer,
    carry: Any,
    inputs: Any,
    *,
    remat: RematPolicy,
) -> tuple[Any, Any]:
    """Runs stacked layers one after the other, traced once for all of them.

    Args:
      body: (layer, carry, its slice of `inputs`) -> (carry, output).
      inputs: pytree whose leaves lead with [layers, ...], or None.
      remat: what the backward pass finds saved of each layer's forward pass. "none": everything it needs, without any
        `jax.checkpoint`; "dots": matrix products; "dots_no_batch": matrix products without batch axes, so none of
        attention's; "full": the layer's input alone. The rest is computed again.

    Returns:
      The last carry, and the outputs stacked [layers, ...].
    """
    graph, state = nnx.split(layers)

    def step(carry: Any, per_layer: Any) -> tuple[Any, Any]:
        layer_state, layer_input = per_layer
        return body(nnx.merge(graph, layer_state), carry, layer_input)

    if remat != "none":
        step = jax.checkpoint(step, policy=_SAVED[remat], prevent_cse=False)  # scan itself keeps the body apart
    return jax.lax.scan(step, carry, (state, inputs))
