"""Cross-entropy of a linear head, without materializing all logits."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from stack_core.abi.errors import ArgumentError
from stack_core.abi.ops import OpCall
from stack_core.chips.context import target_chip, target_platform
from stack_core.ops.dispatch.check import (
    Axes,
    check_floating,
    check_integer,
    check_known,
    check_positive,
    check_same_dtype,
    check_static,
)
from stack_core.ops.dispatch.contract import accurate_dtype, contract
from stack_core.ops.dispatch.dispatch import dispatch
from stack_core.ops.dispatch.manual_axes import vary_alike
from stack_core.ops.dispatch.op import Op, OpAxes
from stack_core.ops.dispatch.picked import picked
from stack_core.ops.dispatch.plain import is_plain
from stack_core.ops.dispatch.request import Implementation
from stack_core.ops.dispatch.splitting import LogicalNames
from stack_core.ops.dispatch.symbolic import Size, is_symbolic
from stack_core.ops.references.quantized import QuantizedArray, dequantize, is_quantized, logical_array
from stack_core.ops.references.row_parts import HeadGroups, RowParts

__all__ = ["OP", "REFERENCE", "linear_cross_entropy"]

# On CPUs a chunk of fp32 logits takes about 8 MiB, to stay in a cache; accelerators need large products, and a chunk
# takes up to 1/32 of their memory. Neither has chunks of fewer than 256 rows or more than 64 chunks.
_CHUNK_BYTES = 8 * 2**20
_MEMORY_SHARE = 32
_FEWEST_ROWS = 256
_MOST_CHUNKS = 64


def linear_cross_entropy(
    hidden: Float[Array, "*batch embed"],
    weight: Float[Array, "embed vocab"] | QuantizedArray,
    labels: Int[Array, "*batch"],
    *,
    bias: Float[Array, " vocab"] | None = None,
    softcap: float | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    implementation: Implementation = None,
    axes: LogicalNames | None = None,
) -> Float[Array, ""] | Float[Array, "*batch"]:
    """Computes the cross-entropy in nats between labels and the softmax of a linear head.

        l_r = log sum_v exp(z_rv) - (1 - s) z_r,y - s mean_v z_rv + c (log sum_v exp(z_rv))^2
        z_rv = t tanh((h_r W_v + b_v) / t)

    t is `softcap` (None: z_rv = h_r W_v + b_v).

    Products run in the dtype of the operands with an fp32 accumulator, everything else in fp32. Logits are formed for
    one chunk of rows at a time, in the forward and the backward pass.

    Args:
      hidden: h, [..., embed].
      weight: W, [embed, vocab], of the dtype of `hidden`; a tied head passes its transposed embedding. If quantized,
        the reference dequantizes it once, because every chunk needs the full matrix.
      labels: y, [...], integers in [0, vocab). Any other label except `ignore_index` gives a loss of NaN.
      bias: b, [vocab], of any floating dtype.
      softcap: t, positive; bounds logits to [-t, t] as in Gemma 2.
      ignore_index: label of rows to skip; they have zero loss and gradient and do not count in the mean.
      z_loss: c, weight of the squared log-partition.
      label_smoothing: s, fraction of the target distributed uniformly over the vocabulary, in [0, 1].
      reduction: "mean" over the rows that are not ignored, "sum", or "none".
      implementation: implementation name, or several in order of preference; None lets core choose.
      axes: logical axis names of the arrays, as in `linear`; used to shard implementations that XLA cannot partition.

    Returns:
      The fp32 loss: a scalar, or [...] for "none" with 0 for ignored rows. The mean is 0 if all rows are ignored.

    Raises:
      ShapeError: `embed` or `vocab` differ, or `labels` does not have the leading axes of `hidden`.
      ArgumentError: wrong dtypes, a `label_smoothing` outside [0, 1], or a non-positive softcap.
      UnknownName: unknown reduction.
      UnsupportedOp: no implementation supports the call, or no requested implementation does.

    Source: the cap as in Gemma 2, 2024 (arXiv:2408.00118), section 2.
    """
    sizes = Axes("linear_cross_entropy")
    sizes.match("hidden", hidden, "... embed")
    sizes.match("weight", logical_array(weight), "embed vocab")
    sizes.match("labels", labels, "...")
    sizes.match("bias", bias, "vocab")
    check_floating("linear_cross_entropy", hidden=hidden, bias=bias)
    check_positive("linear_cross_entropy", softcap=softcap)
    check_static("linear_cross_entropy", label_smoothing=label_smoothing)
    if not is_quantized(weight):
        check_same_dtype("linear_cross_entropy", hidden=hidden, weight=weight)
    check_known("linear_cross_entropy", "reduction", reduction, ("mean", "sum", "none"))
    check_integer("linear_cross_entropy", labels=labels)
    if not 0 <= label_smoothing <= 1:
        raise ArgumentError(f"linear_cross_entropy: label_smoothing is {label_smoothing}; expected a number in [0, 1].")
    options = {
        "softcap": softcap,
        "ignore_index": ignore_index,
        "z_loss": z_loss,
        "label_smoothing": label_smoothing,
        "reduction": reduction,
    }
    arrays = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias}
    return dispatch(OP, arrays, options, implementation, axes)


def _reference(
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    bias: Any,
    ignore_index: int,
    reduction: str,
    requested: Any,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    row_losses = functools.partial(_row_losses, ignore_index=ignore_index, **options)
    head = _Head(dequantize(weight, hidden.dtype), bias)
    vocab = head.weight.shape[1]
    parts = RowParts.of(labels)
    groups = HeadGroups.of(parts)
    part_rows = labels.size // parts.total
    chunks = _chunks(part_rows, vocab)
    hidden_chunks = _split_rows(parts.split(hidden), chunks, fill=0)
    # Padding rows have the ignored label, so they add nothing.
    label_chunks = _split_rows(parts.split(labels), chunks, fill=ignore_index)
    hidden_chunks, head, label_chunks = vary_alike(hidden_chunks, head, label_chunks)
    if reduction == "none":
        losses = _map_rows(row_losses, groups, hidden_chunks, head, label_chunks)
        return parts.join(jnp.moveaxis(losses, 0, 2).reshape(parts.total, -1)[:, :part_rows]), {}
    total = (_plain_total if is_plain() else _total)(row_losses, groups, hidden_chunks, head, label_chunks)
    if reduction == "sum":
        return total, {}
    # All rows may be ignored.
    return total / jnp.maximum(jnp.sum(labels != ignore_index), 1).astype(total.dtype), {}


class _Head(NamedTuple):
    """Dequantized head: weight[embed, vocab], and bias[vocab] or None."""

    weight: Any
    bias: Any


def _row_losses(
    hidden: Any,
    head: _Head,
    labels: Any,
    *,
    softcap: float | None,
    ignore_index: int,
    z_loss: float,
    label_smoothing: float,
) -> Any:
    """Computes the losses of one chunk of rows, materializing its logits."""
    logits = contract("re,ev->rv", hidden, head.weight, accurate_dtype(hidden.dtype))
    if head.bias is not None:
        logits = logits + head.bias.astype(logits.dtype)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    log_partition = jax.nn.logsumexp(logits, axis=-1)
    label_logits = picked(logits, labels)
    losses = log_partition - (1 - label_smoothing) * label_logits
    if label_smoothing:
        losses = losses - label_smoothing * jnp.mean(logits, axis=-1)
    if z_loss:
        losses = losses + z_loss * jnp.square(log_partition)
    # `picked` may index from the end for negative labels; labels >= vocab are NaN already.
    losses = jnp.where(labels < 0, jnp.nan, losses)
    return jnp.where(labels == ignore_index, 0.0, losses)


def _map_rows(row_losses: Any, groups: HeadGroups, hidden_chunks: Any, head: _Head, label_chunks: Any) -> Any:
    """Computes the losses, [chunks, parts, rows]."""
    # With one copy of the head per group, gradients are accumulated per group and summed once after the loop.
    count = groups.count(hidden_chunks.shape[1])
    heads = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), head)

    @jax.checkpoint
    def chunk_losses(hidden: Any, labels: Any) -> Any:
        return groups.scatter(_over_parts(row_losses, 0)(groups.gather(hidden), heads, groups.gather(labels)))

    return lax.map(lambda chunk: chunk_losses(*chunk), (hidden_chunks, label_chunks))


def _plain_total(row_losses: Any, groups: HeadGroups, hidden_chunks: Any, head: _Head, label_chunks: Any) -> Any:
    """Computes the sum of all losses."""
    return jnp.sum(_map_rows(row_losses, groups, hidden_chunks, head, label_chunks))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _total(row_losses: Any, groups: HeadGroups, hidden_chunks: Any, head: _Head, label_chunks: Any) -> Any:
    """Computes `_plain_total`; the forward pass of its VJP also computes the gradients, from the same logits."""
    return _plain_total(row_losses, groups, hidden_chunks, head, label_chunks)


def _total_forward(row_losses: Any, groups: HeadGroups, hidden_chunks: Any, head: _Head, label_chunks: Any) -> Any:
    chunk_total = jax.value_and_grad(lambda *chunk: jnp.sum(row_losses(*chunk)), argnums=(0, 1))
    part_totals = _over_parts(chunk_total, None)
    # A bf16 sum over many chunks would lose small gradients.
    accumulator = accurate_dtype(head.weight.dtype)

    def add_chunk(carry: Any, chunk: Any) -> Any:
        total, of_heads = carry
        hidden, labels = map(groups.gather, chunk)
        losses, (of_hidden, of_head) = part_totals(hidden, head, labels)
        of_heads = jax.tree.map(lambda sum_so_far, x: sum_so_far + x.astype(accumulator), of_heads, of_head)
        return (total + losses, of_heads), groups.scatter(of_hidden)

    count = groups.count(hidden_chunks.shape[1])
    zeros = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), accumulator), head)
    start = vary_alike((jnp.zeros((count,), accumulator), zeros), hidden_chunks)[0]
    (totals, of_heads), of_hidden = lax.scan(add_chunk, start, (hidden_chunks, label_chunks))
    of_head = jax.tree.map(lambda gradients, x: jnp.sum(gradients, axis=0).astype(x.dtype), of_heads, head)
    return jnp.sum(totals), (of_hidden, of_head)


def _total_backward(row_losses: Any, groups: HeadGroups, gradients: Any, cotangent: Any) -> Any:
    def scaled(gradient: Any) -> Any:
        return (gradient.astype(cotangent.dtype) * cotangent).astype(gradient.dtype)

    return *jax.tree.map(scaled, gradients), None


_total.defvjp(_total_forward, _total_backward)


def _over_parts(function: Any, head_axis: int | None) -> Any:
    """Maps a function of (hidden, head, labels) over parts; `head_axis` is the head's entry of `in_axes` in `jax.vmap`.

    A single part is not mapped, since XLA would then transpose the product for the weight's gradient.
    """

    def call(hidden: Any, head: _Head, labels: Any) -> Any:
        if hidden.shape[0] > 1:
            return jax.vmap(function, in_axes=(0, head_axis, 0))(hidden, head, labels)
        of_part = head if head_axis is None else jax.tree.map(lambda x: x[0], head)
        return jax.tree.map(lambda x: x[None], function(hidden[0], of_part, labels[0]))

    return call


def _chunks(rows: Size, vocab: int) -> int:
    """Returns the number of chunks, preferably a divisor of the rows so that none of them is padded."""
    if is_symbolic(rows):
        return 1
    chunk_rows = max(_chunk_bytes() // (vocab * 4), _FEWEST_ROWS)
    target = min(-(-rows // chunk_rows), _MOST_CHUNKS)
    divisors = (count for count in range(target, 2 * target) if rows % count == 0)
    return next(divisors, target) or 1


def _chunk_bytes() -> int:
    if target_platform() == "cpu":
        return _CHUNK_BYTES
    return max((target_chip().hbm_bytes or 0) // _MEMORY_SHARE, _CHUNK_BYTES)


def _split_rows(array: Any, chunks: int, fill: Any) -> Any:
    """[parts, rows, ...] -> [chunks, parts, rows per chunk, ...].

    Chunks are strided over the rows: rows stay on their devices even if no mesh states how they are sharded.
    """
    padding = -array.shape[1] % chunks
    padded = jnp.pad(array, [(0, 0), (0, padding), *[(0, 0)] * (array.ndim - 2)], constant_values=fill)
    return jnp.moveaxis(padded.reshape(array.shape[0], -1, chunks, *array.shape[2:]), 2, 0)


def _axes(call: OpCall) -> OpAxes:
    by_row = call.options["reduction"] == "none"
    operands = {"hidden": "... embed", "weight": "embed vocab", "labels": "...", "bias": "vocab"}
    # Rows stay whole: a mean over all rows is not the sum of the means over its parts.
    leading = () if by_row else (f"...{number}" for number in range(len(call.arrays["labels"].shape)))
    return OpAxes(operands, ("..." if by_row else "",), whole=frozenset({"embed", "vocab", *leading}))


OP = Op("linear_cross_entropy", _reference, _axes, folds="...", keeps=True)
REFERENCE = OP.implementation()
