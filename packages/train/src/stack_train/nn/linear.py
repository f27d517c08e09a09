"""Linear layers and embedding lookup."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from stack_core import ops
from stack_core.abi.mesh import constrain
from stack_core.ops import Head
from stack_core.ops.building import accurate_dtype, is_quantized
from stack_train.nn.quantized import QuantizedMatrix, read_weight
from stack_train.nn.residual import Hidden, shard_residual

__all__ = ["FloatName", "Linear", "activation_axis", "head_of", "lookup", "take_rows"]

FloatName = Literal["bfloat16", "float16", "float32"]


class Linear(nnx.Module):
    """Linear layer, y = x @ kernel + bias, with kernel[d_in, d_out] cast to the dtype of x.

    Args:
      shape: shape of the kernel, [d_in, d_out], or [layers, d_in, d_out] if a scan calls it layer by layer.
      axes: logical names of the kernel's axes.
      use_bias: adds a zero-initialized bias.
      std: standard deviation of the kernel's normal initial values.
      param_dtype: dtype of kernel and bias.
      key: PRNG key of the kernel.
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
        # Cut to the rank of x, which may have fewer or more leading axes than [batch, seq].
        rows = ("batch", "seq", *[None] * x.ndim)[: x.ndim - 1]
        axes = {"x": (*rows, self.axes[0]), "weight": self.axes}
        return ops.linear(x, read_weight(self.kernel, x.dtype), bias=bias, axes=axes)


def activation_axis(axis: str | None) -> str | None:
    """Returns the logical name of a kernel's axis in activations, because "embed" splits only parameters."""
    return None if axis is None else f"act_{axis}"


def lookup(
    table: Float[Array, "vocab embed"] | QuantizedMatrix, tokens: Int[Array, "batch seq"], dtype: FloatName
) -> Hidden:
    """Returns the rows of an embedding for tokens, cast to `dtype`; NaN for tokens outside of the vocabulary.

    Each device looks up its slice of the embedding for all tokens of its group, and an all-to-all assembles complete
    rows. Without these constraints, XLA may gather the table on every device, or each row.
    """
    tokens = constrain(tokens, "lookup_batch", "seq", name="tokens")
    if isinstance(table, QuantizedMatrix):
        places = jnp.where(tokens < 0, tokens + table.shape[0], tokens)  # as `take_rows`
        is_known = (places >= 0) & (places < table.shape[0])
        parts = jnp.where(is_known[..., None], table.rows(places, dtype), jnp.nan)
    else:
        if jax.__version_info__ >= (0, 12) and jax.sharding.get_abstract_mesh().manual_axes:
            # Inside a `jax.shard_map` over stages, XLA's partitioner fails if both operands are split ("Check failed:
            # num_replica_groups"), so the vocabulary is not split here.
            table = constrain(table, None, "embed", name="embedding")
        parts = take_rows(table, tokens).astype(dtype)
    return shard_residual(constrain(parts, "lookup_batch", "seq", "embed", name="embedded tokens"))


def head_of(
    embedding: Any, lm_head: Any, dtype: FloatName, *, scale: float = 1.0, softcap: float | None = None
) -> Head:
    """Returns the head of a language model in `dtype`.

    Args:
      embedding: parameter [vocab, embed], which is the head's transposed weight if `lm_head` is None.
      lm_head: parameter [embed, vocab], or None.
      scale, softcap: see `Head`.
    """
    stored = read_weight(embedding if lm_head is None else lm_head, dtype)
    weight = stored.T if lm_head is None else stored
    is_table = lm_head is None and not is_quantized(weight) and jax.sharding.get_abstract_mesh().empty
    if not is_quantized(weight):
        # Gathered once here; otherwise the loss would gather it in every iteration of its loop over chunks of rows.
        weight = constrain(weight, "act_embed", "act_vocab", name="head")
    return Head(weight, scale=scale, softcap=softcap, table=stored if is_table else None)


@jax.custom_jvp
def take_rows(table: Float[Array, "rows embed"], places: Int[Array, "*places"]) -> Float[Array, "*places embed"]:
    """Returns rows of a table, NaN for indices out of range. Gradients of repeated rows are summed in a wider dtype.

    The transpose of `jnp.take` sums in the table's dtype: a bfloat16 sum of 1,000 equal gradients stops at about 256.
    """
    return jnp.take(table, places, axis=0, mode="fill")


@take_rows.defjvp
def _take_rows_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    (table, places), (tangent, _) = primals, tangents
    # 0 outside of the table: the default fill, NaN, would not be a linear function of the tangent.
    taken = jnp.take(tangent.astype(accurate_dtype(table.dtype)), places, axis=0, mode="fill", fill_value=0)
    return take_rows(table, places), taken.astype(table.dtype)
