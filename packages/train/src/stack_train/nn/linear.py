"""A linear layer, and the lookup of an embedding."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from stack_core import ops
from stack_core.abi.mesh import constrain
from stack_core.ops.building import accurate_dtype
from stack_train.nn.residual import Hidden, shard_residual

__all__ = ["FloatName", "Linear", "activation_axis", "lookup", "take_rows"]

FloatName = Literal["bfloat16", "float16", "float32"]


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
        axes: tuple[str | None, ...],
        *,
        use_bias: bool,
        std: float,
        param_dtype: FloatName,
        key: jax.Array,
    ) -> None:
        self.axes = tuple(map(activation_axis, axes[-2:]))
        self.kernel = nnx.Param(std * jax.random.normal(key, shape, param_dtype), logical_axes=axes)
        bias_shape, bias_axes = (*shape[:-2], shape[-1]), (*axes[:-2], axes[-1])
        self.bias = nnx.Param(jnp.zeros(bias_shape, param_dtype), logical_axes=bias_axes) if use_bias else None

    def __call__(self, x: Float[Array, "... d_in"]) -> Float[Array, "... d_out"]:
        bias = None if self.bias is None else self.bias[...]
        rows = ("batch", "seq", *[None] * x.ndim)[: x.ndim - 1]
        axes = {"x": (*rows, self.axes[0]), "weight": self.axes}
        return ops.linear(x, self.kernel[...].astype(x.dtype), bias=bias, axes=axes)


def activation_axis(axis: str | None) -> str | None:
    """The logical name that activations give an axis of a kernel: "embed" splits parameters only."""
    return None if axis is None else f"act_{axis}"


def lookup(table: Float[Array, "vocab embed"], tokens: Int[Array, "batch seq"], dtype: FloatName) -> Hidden:
    """Returns the rows of an embedding for tokens, cast to `dtype`; a token outside the vocabulary gets NaN.

    Each device looks up its slice of the embedding for every token of its group; an all-to-all then assembles whole
    rows. XLA by itself may gather the table on every device, or each row.
    """
    if jax.__version_info__ >= (0, 12) and jax.sharding.get_abstract_mesh().manual_axes:
        # Inside a `jax.shard_map` over stages XLA's partitioner fails where both operands are split ("Check failed:
        # num_replica_groups"), so each device takes the whole vocabulary.
        table = constrain(table, None, "embed", name="embedding")
    tokens = constrain(tokens, "lookup_batch", "seq", name="tokens")
    parts = take_rows(table, tokens).astype(dtype)
    return shard_residual(constrain(parts, "lookup_batch", "seq", "embed", name="embedded tokens"))


@jax.custom_jvp
def take_rows(table: Float[Array, "rows embed"], places: Int[Array, "*places"]) -> Float[Array, "*places embed"]:
    """Returns rows of a table, NaN for places outside of it. The gradient of a row taken many times is summed wide.

    The transpose of `jnp.take` adds in the table's dtype: of 1,000 equal gradients a bfloat16 sum keeps about 256.
    """
    return jnp.take(table, places, axis=0, mode="fill")


@take_rows.defjvp
def _take_rows_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    (table, places), (tangent, _) = primals, tangents
    taken = jnp.take(tangent.astype(accurate_dtype(table.dtype)), places, axis=0, mode="fill", fill_value=0)
    return take_rows(table, places), taken.astype(table.dtype)
