"""The largest attention logit of each head, recorded in training for `optimizer.qk_clip`.

A step attaches a `MaxLogits` to each attention layer before the forward pass and reads it afterwards. Layers without
the variable compute nothing.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from stack_core.abi.errors import ConfigError
from stack_core.ops.building import accurate_dtype, contract
from stack_train.nn.context import check_unsplit_sequence
from stack_train.nn.residual import Rows

__all__ = ["ClipsLogits", "MaxLogits", "max_logits", "record_logits"]

_BLOCK_TOKENS = 512
"""Queries and keys of a block, whose float32 logits take 1 MiB a row and head, whatever the length of the sequence."""


class MaxLogits(nnx.Variable[jax.Array]):
    """Largest logit of each head in the forward passes since its creation, float32[repeats, heads]; -inf without any.

    A forward pass uses the slice of one layer, and `scan_layers` stacks the slices again.
    """

    def __init__(self, repeats: int, heads: int) -> None:
        super().__init__(jnp.full((repeats, heads), -jnp.inf, jnp.float32), trained=False)


@runtime_checkable
class ClipsLogits(Protocol):
    """An attention layer whose logits are products of projected queries and keys.

    Attributes:
      max_logits: largest logits of the forward pass; None records none.
    """

    max_logits: MaxLogits | None

    def recorder(self) -> MaxLogits:
        """Returns an empty record of this layer's logits."""
        ...

    def clip_refusal(self) -> str | None:
        """Returns a reason against clipping the logits of a head by its projections, or None."""
        ...

    def clip_factors(self, gamma: Float[Array, "repeats heads"]) -> Mapping[tuple[str, str], jax.Array]:
        """Returns the factors that multiply the logits of each head by `gamma`.

        They broadcast to the layer's parameters, whose paths in the layer are the keys.
        """
        ...


def record_logits(
    record: MaxLogits | None,
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    rows: Rows,
    *,
    scale: float | None,
    segments: Int[Array, "batch seq"] | None = None,
    window: int | None = None,
) -> None:
    """Raises the record of a layer to `max_logits` of its queries and keys; does nothing without a record.

    Args:
      segments: ids of tokens that attend to each other, if not the segment ids of `rows`.
      window: maximum distance of a query from its keys, or None.

    Raises:
      ShardingError: several devices share a sequence.
      ConfigError: tokens of images attend to later tokens.
    """
    if record is None:
        return
    if rows.ahead is not None:
        raise ConfigError(
            "optimizer.qk_clip reads logits of causal attention, and tokens of an image attend to later tokens. Leave "
            "optimizer.qk_clip out."
        )
    check_unsplit_sequence("optimizer.qk_clip")
    ids = rows.segment_ids if segments is None else segments
    pair = None if ids is None else (ids, ids)
    if ids is not None and rows.segment_ids is not None:
        # Different ids, because padding sees nothing.
        is_padding = rows.segment_ids == 0
        pair = (jnp.where(is_padding, -1, ids), jnp.where(is_padding, -2, ids))
    largest = max_logits(query, key, segments=pair, window=window)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    record[...] = jnp.maximum(record[...], largest.astype(jnp.float32) * scale)


def max_logits(
    query: Float[Array, "batch seq heads dim"],
    key: Float[Array, "batch seq kv_heads dim"],
    *,
    segments: tuple[Int[Array, "batch seq"], Int[Array, "batch seq"]] | None = None,
    window: int | None = None,
) -> Float[Array, " heads"]:
    """Computes the largest product of a head's queries and visible keys, without a gradient.

        S_h = max over rows and tokens i >= j of query_ih . key_jh

    One block of products is in memory at a time. Blocks above the diagonal or outside of the window are skipped: the
    cost is half of the products in the forward pass of causal attention.

    Args:
      segments: ids of queries and keys; a query sees keys with its id. None sees all.
      window: a query sees keys up to this distance; None sees all.

    Returns:
      S, and -inf for heads without a visible pair.
    """
    query, key = lax.stop_gradient((query, key))
    (batch, seq, heads, dim), kv_heads = query.shape, key.shape[2]
    size = min(_BLOCK_TOKENS, seq)
    pad = lambda x, axis: jnp.pad(x, [(0, -seq % size if place == axis else 0) for place in range(x.ndim)])
    # [batch, kv_heads, group, seq, dim] and [batch, kv_heads, seq, dim].
    query = pad(query.reshape(batch, seq, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4), 3)
    key = pad(key.swapaxes(1, 2), 2)
    ids = None if segments is None else [pad(each, 1) for each in segments]

    def visit(largest: jax.Array, block: jax.Array) -> tuple[jax.Array, None]:
        (first_query, first_key), places = block * size, jnp.arange(size)
        rows = lax.dynamic_slice_in_dim(query, first_query, size, 3).reshape(batch, kv_heads, -1, dim)
        columns = lax.dynamic_slice_in_dim(key, first_key, size, 2)
        products = contract("bhqd,bhkd->bhqk", rows, columns, largest.dtype).reshape(*largest.shape, size, size)
        query_places = first_query + places[:, None]
        distance = query_places - (first_key + places)
        # Padding after the last key is hidden by its place.
        visible = (distance >= 0) & (query_places < seq)
        if window is not None:
            visible &= distance <= window
        if ids is not None:
            own = lax.dynamic_slice_in_dim(ids[0], first_query, size, 1)
            others = lax.dynamic_slice_in_dim(ids[1], first_key, size, 1)
            visible = (visible & (own[:, :, None] == others[:, None, :]))[:, None, None]
        return jnp.maximum(largest, jnp.max(jnp.where(visible, products, -jnp.inf), axis=(-2, -1))), None

    count = -(-seq // size)
    nearest = [(row, column, (row - column - 1) * size + 1) for row in range(count) for column in range(row + 1)]
    blocks = [(row, column) for row, column, distance in nearest if window is None or distance <= window]
    # Maxima of rows are joined at the end: devices with different rows communicate once.
    empty = jnp.full((batch, kv_heads, heads // kv_heads), -jnp.inf, accurate_dtype(query.dtype))
    largest, _ = lax.scan(visit, empty, jnp.asarray(blocks, jnp.int32))
    return jnp.max(largest, axis=0).reshape(heads)
