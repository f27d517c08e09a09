"""`linear_cross_entropy` on CPUs: chunks of rows by tiles of the vocabulary, with products that have fast kernels."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_core.abi.ops import OWN, OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import RowParts, accurate_dtype, dequantize, differentiated, vary_alike
from stack_kernels.cpu import as_bits
from stack_kernels.linear.product import XLA, Products
from stack_kernels.linear_cross_entropy import kept_exponentials, logits_again
from stack_kernels.linear_cross_entropy.chunks import Chunks, Loss, Rows, divide, in_chunks, read_tiles
from stack_kernels.supports import takes_no

__all__ = ["CONFIGS", "XLA_CPU", "linear_cross_entropy"]


def linear_cross_entropy(
    products: Products,
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    ignore_index: int,
    reduction: str,
    config: Chunks,
    requested: frozenset[str],
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """Computes the op, without bias and softcap, by the given products."""
    regularization = {name: options[name] for name in ("z_loss", "label_smoothing")}
    weight = dequantize(weight, hidden.dtype)
    vocab = weight.shape[1]
    parts = RowParts.of(labels)
    # Sizes per device, because each device has its own loop.
    divided = divide(labels.size // parts.total, vocab, hidden.dtype, config)
    loss = Loss(products, vocab, *divided, weight.dtype, config.keeps_exponentials, **regularization)
    counted = labels != ignore_index
    shares = counted.astype(accurate_dtype(hidden.dtype))
    if reduction == "mean":
        shares = shares / jnp.maximum(jnp.sum(shares), 1)
    rows = Rows(*map(parts.split, (hidden, labels, shares)))
    of_part = functools.partial(_losses if reduction == "none" else _total, loss)
    result = _over_parts(of_part, *vary_alike(rows, weight))
    by_row = reduction == "none"
    return jnp.where(counted, parts.join(result), 0) if by_row else jnp.sum(result), {}


def _over_parts(function: Any, rows: Rows, weight: Any) -> Any:
    """Maps over the row parts of a mesh; each loop then stays on one device."""
    if rows.labels.shape[0] == 1:
        return function(jax.tree.map(lambda x: x[0], rows), weight)[None]
    return jax.vmap(function, in_axes=(0, None))(rows, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(loss: Loss, rows: Rows, weight: Any) -> Any:
    """Computes the sum of losses times shares. Under differentiation it also computes the gradients."""
    return _weighted_sum(_losses(loss, rows, weight), rows)


def _total_forward(loss: Loss, rows: Rows, weight: Any) -> Any:
    losses, *gradients = _with_gradients(loss, rows, weight)
    return _weighted_sum(losses, rows), gradients


def _total_backward(loss: Loss, gradients: Any, cotangent: Any) -> Any:
    # In the wider dtype of the cotangent, to round once.
    of_hidden, of_weight = (
        (gradient.astype(cotangent.dtype) * cotangent).astype(gradient.dtype) for gradient in gradients
    )
    return Rows(of_hidden, None, None), of_weight


_total.defvjp(_total_forward, _total_backward)


def _weighted_sum(losses: Any, rows: Rows) -> Any:
    # The loss of an ignored row is NaN if its label is outside the vocabulary, and 0 * NaN is NaN.
    return jnp.sum(jnp.where(rows.shares == 0, 0, losses * rows.shares))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(loss: Loss, rows: Rows, weight: Any) -> Any:
    """Computes the loss of each row, ignoring shares."""
    bits = as_bits(weight)
    losses = lax.map(lambda chunk: read_tiles(loss, chunk, bits).losses, in_chunks(loss, rows))
    return losses.reshape(-1)[: rows.labels.size]


def _losses_forward(loss: Loss, rows: Rows, weight: Any) -> Any:
    return _losses(loss, rows, weight), (rows, weight)


def _losses_backward(loss: Loss, operands: Any, cotangent: Any) -> Any:
    rows, weight = operands
    # The total whose shares are the cotangents has the gradient that is needed.
    _, of_hidden, of_weight = _with_gradients(loss, rows._replace(shares=cotangent), weight)
    return Rows(of_hidden, None, None), of_weight


_losses.defvjp(_losses_forward, _losses_backward)


def _with_gradients(loss: Loss, rows: Rows, weight: Any) -> tuple[Any, Any, Any]:
    is_one_tile = loss.width == loss.vocab  # its exponentials take no more memory than its logits
    module = kept_exponentials if loss.keeps_exponentials or is_one_tile else logits_again
    return module.losses_and_gradients(loss, rows, weight)


CONFIGS = (
    Chunks(),
    Chunks(tile_bytes=16 * 2**20),
    Chunks(chunk_rows=256),
    Chunks(chunk_rows=1024),
    Chunks(chunk_rows=2048, tile_bytes=8 * 2**20, keeps_exponentials=False),
)


def _supports(call: OpCall, chip: Chip, config: Any) -> bool | str:
    return takes_no(call, "bias", "softcap")


_forward, _backward = differentiated(functools.partial(linear_cross_entropy, XLA))

XLA_CPU = OpImplementation(
    op="linear_cross_entropy",
    name="xla_cpu",
    forward=_forward,
    backward=_backward,
    platforms=("cpu",),
    supports=_supports,
    default=lambda call, chip: CONFIGS[0],
    space=lambda call, chip: CONFIGS,
    residuals=(OWN,),
)
