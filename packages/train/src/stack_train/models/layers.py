"""What decoder architectures share: a linear layer, an embedding, how activations are split, a scan over layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from stack_core import ops
from stack_core.mesh import constrain

__all__ = [
    "FloatName",
    "Linear",
    "RematPolicy",
    "ResidualStream",
    "as_residual",
    "gathered",
    "lookup",
    "scan_layers",
]

Hidden = Float[Array, "batch seq embed"]

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


def lookup(table: Float[Array, "vocab embed"], tokens: Int[Array, "batch seq"], dtype: FloatName) -> Hidden:
    """Returns the rows of an embedding for tokens, cast to `dtype`; a token outside the vocabulary gets NaN.

    Each device reads the part of a row that it holds for the tokens of all devices that hold the other parts, and then
    they exchange parts of rows for whole ones. XLA by itself may gather the table on every device, or each row.
    """
    tokens = constrain(tokens, "lookup_batch", "seq", name="tokens")
    parts = jnp.take(table, tokens, axis=0, mode="fill").astype(dtype)
    return as_residual(constrain(parts, "lookup_batch", "seq", "embed", name="embedded tokens"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ResidualStream:
    """The residual stream between two layers, its last sum not formed yet: the norm that follows does it in passing.

    Attributes:
      x: [batch, seq, embed].
      added: like `x`, what the layer before adds to it; None if that is done.
    """

    x: Any
    added: Any

    def normed(self, scale: Float[Array, " embed"], epsilon: float) -> tuple[Any, Any]:
        """The RMS norm of the sum, and the sum."""
        if self.added is None:
            return ops.norm(self.x, scale, epsilon=epsilon), self.x
        normed, x = ops.norm(self.added, scale, epsilon=epsilon, residual=self.x)
        return normed, x

    def joined(self) -> "ResidualStream":
        """With the sum formed, which takes half the memory to keep."""
        return self if self.added is None else ResidualStream(self.x + self.added, None)


def as_residual(x: Hidden) -> Hidden:
    """Splits activations as the residual stream is split, where only norms and sums act on them.

    Where rules split its sequence over `tensor`, the sum of products that `tensor` leaves in parts becomes a
    reduce-scatter. Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022
    (arXiv:2205.05198).
    """
    return constrain(x, "batch", "norm_seq", "act_embed", name="the residual stream")


def gathered(x: Hidden) -> Hidden:
    """Splits activations as products and attention need them, with the whole sequence on each part of `tensor`."""
    return constrain(x, "batch", "seq", "act_embed", name="normed activations")


def scan_layers(
    body: Callable[[Layer, Any, Any], tuple[Any, Any]],
    layers: Layer,
    carry: Any,
    inputs: Any,
    *,
    remat: RematPolicy,
    unroll: bool,
) -> tuple[Any, Any]:
    """Runs stacked layers one after the other, traced once for all of them.

    Args:
      body: (layer, carry, its slice of `inputs`) -> (carry, output).
      inputs: pytree whose leaves lead with [layers, ...], or None.
      remat: what the backward pass finds saved of each layer's forward pass. "none": everything it needs, without any
        `jax.checkpoint`; "dots": matrix products; "dots_no_batch": matrix products without batch axes, so none of
        attention's; "full": the layer's input alone. The rest is computed again.
      unroll: compile every layer by itself and no loop, which would copy what it saves of each layer in and out of
        arrays of all layers.

    Returns:
      The last carry, and the outputs stacked [layers, ...].
    """
    graph, state = nnx.split(layers)

    def step(carry: Any, per_layer: Any) -> tuple[Any, Any]:
        layer_state, layer_input = per_layer
        return body(nnx.merge(graph, layer_state), carry, layer_input)

    if remat != "none":
        step = jax.checkpoint(step, policy=_SAVED[remat], prevent_cse=unroll)  # a loop itself keeps the body apart
    return jax.lax.scan(step, carry, (state, inputs), unroll=unroll)
