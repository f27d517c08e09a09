"""Cross-entropy of a linear head, without its logits ever being whole in memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from stack_core.abi import AUTODIFF, OpImplementation
from stack_core.errors import ArgumentError
from stack_core.mesh import constrain, parts_of
from stack_core.ops._check import Axes, check_floating, check_known, check_same_dtype
from stack_core.ops._contract import accurate_dtype, contract
from stack_core.ops._dispatch import Implementation, dispatch
from stack_core.ops._quantized import QuantizedArray, dequantize, is_quantized, logical_array

__all__ = ["REFERENCE", "linear_cross_entropy"]

_CHUNK_BYTES = 8 * 2**20
_FEWEST_ROWS = 256
_MOST_CHUNKS = 64


def linear_cross_entropy(
    hidden: Float[Array, "*batch embed"],
    weight: Float[Array, "embed vocab"] | QuantizedArray,
    labels: Int[Array, "*batch"],
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    implementation: Implementation = None,
) -> Float[Array, ""] | Float[Array, "*batch"]:
    """Cross-entropy in nats between labels and the softmax of a linear head.

        l_r = log sum_v exp(z_rv) - (1 - s) z_r,y - s mean_v z_rv + c (log sum_v exp(z_rv))^2         z = h W

    Products run in the dtype of the operands with an fp32 accumulator, everything else in fp32. No more than a chunk
    of rows meets the vocabulary at a time, forward and backward.

    Args:
      hidden: h, [..., embed].
      weight: W, [embed, vocab], of the dtype of `hidden`, a tied head passes its embedding transposed; or quantized,
        then the reference dequantizes it once, since every chunk of rows meets all of it.
      labels: y, [...], integers in [0, vocab). Any other label but `ignore_index` makes its loss NaN.
      ignore_index: rows with this label count as absent: no loss, no gradient, no share in the mean.
      z_loss: c, the weight of the squared log-partition.
      label_smoothing: s, the share of the target spread evenly over the vocabulary, in [0, 1].
      reduction: "mean" over the rows that count, "sum", or "none".
      implementation: a name, several in order of preference, or None to let core choose.

    Returns:
      The fp32 loss, a scalar; with "none" [...], 0 where ignored. The mean over no rows is 0.

    Raises:
      ShapeError: `embed` differs, or `labels` does not have the leading axes of `hidden`.
      ArgumentError: wrong dtypes, or a `label_smoothing` outside [0, 1].
      UnknownName: the reduction is none of the three.
      UnsupportedOp: no implementation, or not the one named, supports the call.
    """
    axes = Axes("linear_cross_entropy")
    axes.match("hidden", hidden, "... embed")
    axes.match("weight", logical_array(weight), "embed vocab")
    axes.match("labels", labels, "...")
    check_floating("linear_cross_entropy", hidden=hidden)
    if not is_quantized(weight):
        check_same_dtype("linear_cross_entropy", hidden=hidden, weight=weight)
    check_known("linear_cross_entropy", "reduction", reduction, ("mean", "sum", "none"))
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ArgumentError(f"linear_cross_entropy: labels has dtype {labels.dtype}; expected an integer dtype.")
    if not 0 <= label_smoothing <= 1:
        raise ArgumentError(f"linear_cross_entropy: label_smoothing is {label_smoothing}; expected a number in [0, 1].")
    options = {
        "ignore_index": ignore_index,
        "z_loss": z_loss,
        "label_smoothing": label_smoothing,
        "reduction": reduction,
    }
    arrays = {"hidden": hidden, "weight": weight, "labels": labels}
    return dispatch("linear_cross_entropy", arrays, options, implementation)


def _reference(
    hidden: Any, weight: Any, labels: Any, *, ignore_index: int, z_loss: float, label_smoothing: float, reduction: str
) -> Any:
    row_losses = functools.partial(
        _row_losses, ignore_index=ignore_index, z_loss=z_loss, label_smoothing=label_smoothing
    )
    weight = dequantize(weight, hidden.dtype)
    parts = _parts(labels)
    part_rows = labels.size // parts
    chunks = _chunks(part_rows, weight.shape[1])
    hidden_chunks = _split_rows(hidden.reshape(parts, part_rows, weight.shape[0]), chunks, fill=0)
    label_chunks = _split_rows(labels.reshape(parts, part_rows), chunks, fill=ignore_index)
    if reduction == "none":
        losses = _map_rows(row_losses, hidden_chunks, weight, label_chunks)
        return jnp.moveaxis(losses, 0, 2).reshape(parts, -1)[:, :part_rows].reshape(labels.shape)
    total = _total(row_losses, hidden_chunks, weight, label_chunks)
    if reduction == "sum":
        return total
    return total / jnp.maximum(jnp.sum(labels != ignore_index), 1).astype(total.dtype)


def _row_losses(
    hidden: Any, weight: Any, labels: Any, *, ignore_index: int, z_loss: float, label_smoothing: float
) -> Any:
    """The losses of rows that are few enough for their logits to be formed."""
    logits = contract("re,ev->rv", hidden, weight, accurate_dtype(hidden.dtype))
    log_partition = jax.nn.logsumexp(logits, axis=-1)
    label_logits = jnp.take_along_axis(logits, labels[:, None], axis=-1, mode="fill")[:, 0]
    losses = log_partition - (1 - label_smoothing) * label_logits
    if label_smoothing:
        losses = losses - label_smoothing * jnp.mean(logits, axis=-1)
    if z_loss:
        losses = losses + z_loss * jnp.square(log_partition)
    losses = jnp.where(labels < 0, jnp.nan, losses)
    return jnp.where(labels == ignore_index, 0.0, losses)


def _map_rows(row_losses: Any, hidden_chunks: Any, weight: Any, label_chunks: Any) -> Any:
    """The losses [chunks, parts, rows]."""
    # A weight for each part has a gradient for each part, and they are added after the loop.
    weights = jnp.broadcast_to(weight, (hidden_chunks.shape[1], *weight.shape))

    @jax.checkpoint
    def chunk_losses(hidden: Any, labels: Any) -> Any:
        return _over_parts(row_losses, 0)(hidden, weights, labels)

    return lax.map(lambda chunk: chunk_losses(*chunk), (hidden_chunks, label_chunks))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(row_losses: Any, hidden_chunks: Any, weight: Any, label_chunks: Any) -> Any:
    """The sum of all losses. When differentiated, each chunk's gradients are formed while its logits are there."""
    return jnp.sum(_map_rows(row_losses, hidden_chunks, weight, label_chunks))


def _total_forward(row_losses: Any, hidden_chunks: Any, weight: Any, label_chunks: Any) -> Any:
    chunk_total = jax.value_and_grad(lambda *chunk: jnp.sum(row_losses(*chunk)), argnums=(0, 1))
    part_totals = _over_parts(chunk_total, None)
    accumulator = accurate_dtype(weight.dtype)

    def add_chunk(carry: Any, chunk: Any) -> Any:
        total, weight_gradient = carry
        hidden, labels = chunk
        losses, (of_hidden, of_weight) = part_totals(hidden, weight, labels)
        return (total + losses, weight_gradient + of_weight.astype(accumulator)), of_hidden

    parts = hidden_chunks.shape[1]
    start = jnp.zeros((parts,), accumulator), jnp.zeros((parts, *weight.shape), accumulator)
    (totals, weight_gradient), hidden_gradient = lax.scan(add_chunk, start, (hidden_chunks, label_chunks))
    return jnp.sum(totals), (hidden_gradient, jnp.sum(weight_gradient, axis=0).astype(weight.dtype))


def _total_backward(row_losses: Any, gradients: Any, cotangent: Any) -> Any:
    of_hidden, of_weight = (
        (gradient.astype(cotangent.dtype) * cotangent).astype(gradient.dtype) for gradient in gradients
    )
    return of_hidden, of_weight, None


_total.defvjp(_total_forward, _total_backward)


def _parts(labels: Any) -> int:
    """Into how many parts the mesh splits the rows.

    Each part sums the gradient of the weight by itself; a sum over all rows would travel with every chunk.
    """
    parts = parts_of("batch")
    return parts if labels.ndim and labels.shape[0] % parts == 0 else 1


def _over_parts(function: Any, weight_axis: int | None) -> Any:
    """Maps a function of (hidden, weight, labels) over their parts; `weight_axis` is that of `jax.vmap`.

    A single part is not mapped: XLA would transpose the product that forms the weight's gradient.
    """

    def call(hidden: Any, weight: Any, labels: Any) -> Any:
        if hidden.shape[0] > 1:
            return jax.vmap(function, in_axes=(0, weight_axis, 0))(hidden, weight, labels)
        result = function(hidden[0], weight if weight_axis is None else weight[0], labels[0])
        return jax.tree.map(lambda x: x[None], result)

    return call


def _chunks(rows: int, vocab: int) -> int:
    """The number of chunks: small enough to stay in a cache, but not too many of them."""
    chunk_rows = max(_CHUNK_BYTES // (vocab * 4), _FEWEST_ROWS)
    wanted = min(-(-rows // chunk_rows), _MOST_CHUNKS)
    divisors = (count for count in range(wanted, 2 * wanted) if rows % count == 0)
    return next(divisors, wanted) or 1


def _split_rows(array: Any, chunks: int, fill: Any) -> Any:
    """[parts, rows, ...] -> [chunks, parts, rows per chunk, ...].

    Each chunk takes rows from all over, so that rows stay on their devices where no mesh says how they are split.
    """
    if array.shape[0] > 1:
        array = constrain(array, "batch", *[None] * (array.ndim - 1), name="linear_cross_entropy's rows")
    padding = -array.shape[1] % chunks
    padded = jnp.pad(array, [(0, 0), (0, padding), *[(0, 0)] * (array.ndim - 2)], constant_values=fill)
    return jnp.moveaxis(padded.reshape(array.shape[0], -1, chunks, *array.shape[2:]), 2, 0)


REFERENCE = OpImplementation(op="linear_cross_entropy", name="reference", function=_reference, vjp=AUTODIFF, priority=0)
