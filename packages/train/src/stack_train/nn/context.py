"""Context parallelism: zigzag token order and attention over sequences that several devices share.

If a mesh splits "seq" into n parts, a decoder puts tokens into zigzag order: the sequence is cut into 2n equal blocks,
and device i has blocks i and 2n - 1 - i, which balances the work of causal attention. Each device's part of a sequence
becomes a separate row, [n * batch, seq / n], and "batch" is also split over the devices of "seq". Operations on single
tokens are unaffected, and XLA can merge rows and tokens into one axis.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from stack_core import ops
from stack_core.abi.errors import ShardingError
from stack_core.abi.mesh import LogicalAxes, axes_of, constrain, in_mesh, parts_of
from stack_core.ops.kv_cache import ahead_mask
from stack_train.nn.parts import map_parts

__all__ = [
    "ContextKeys",
    "attend",
    "check_unsplit_sequence",
    "from_zigzag",
    "shared_axis",
    "shared_rows",
    "shared_sequence_tokens",
    "sharing_devices",
    "to_zigzag",
]

_SHARED = "shared_seq"
"""Logical axis of the devices that share a sequence inside `shared_rows`; no array uses it."""

ContextKeys = Literal["ring", "gathered", "ulysses"]
"""Exchange between devices that share a sequence.

ring: keys of one device at a time; gathered: keys of all devices together; ulysses: each device gets some heads of all
tokens in place of all heads of its tokens (Jacobs et al., DeepSpeed Ulysses, 2023, arXiv:2309.14509).
"""


def attend(
    query: Float[Array, "batch seq heads key_dim"],
    key: Float[Array, "batch seq kv_heads key_dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    *,
    segment_ids: Int[Array, "batch seq"] | ops.PackedSegments | None,
    axes: Mapping[str, LogicalAxes],
    context_keys: ContextKeys = "ring",
    sinks: Float[Array, " heads"] | None = None,
    ahead: Int[Array, "batch seq"] | None = None,
    **options: Any,
) -> Float[Array, "batch seq heads value_dim"]:
    """Computes causal `ops.attention`; inside `shared_rows`, over the tokens of all devices that share a sequence.

    Args:
      query, key, value, segment_ids, sinks: see `ops.attention`.
      axes: logical axes of query, key and value.
      context_keys: exchange of keys between devices.
      ahead: number of later tokens that each token attends to, the rest of its image; None in calls without images.
      options: window, softcap and scale of `ops.attention`.
    """
    if ahead is not None:
        return _with_images(query, key, value, ahead, segment_ids=segment_ids, sinks=sinks, axes=axes, **options)
    if parts_of(_SHARED) == 1:
        output: Any = ops.attention(
            query, key, value, causal=True, segment_ids=segment_ids, sinks=sinks, axes=axes, **options
        )
        return output
    arguments: list[tuple[Any, LogicalAxes]] = [(query, axes["query"]), (key, axes["key"]), (value, axes["value"])]
    packed = isinstance(segment_ids, ops.PackedSegments)
    optional: dict[str, tuple[Any, LogicalAxes]] = {
        "segment_ids": (None if segment_ids is None else _of_tokens(segment_ids), _TOKENS),
        "sinks": (sinks, (axes["query"][2],)),
    }
    # `map_parts` maps arrays only: absent operands are omitted, and the rest get their names back on each device.
    given = {name: found for name, found in optional.items() if found[0] is not None}

    def of_device(query: jax.Array, key: jax.Array, value: jax.Array, *more: jax.Array) -> jax.Array:
        named: dict[str, Any] = dict(zip(given, more, strict=True))
        if packed:
            named["segment_ids"] = ops.PackedSegments.of(named["segment_ids"])
        return _EXCHANGES[context_keys](query, key, value, **named, **options)

    arguments += given.values()
    shared: Any = map_parts(of_device, arguments, tuple(axes["query"]), name="attention over a shared sequence")
    return shared


def _with_images(
    query: jax.Array, key: jax.Array, value: jax.Array, ahead: jax.Array, *, window: Any, axes: Any, **options: Any
) -> jax.Array:
    """Computes attention with a mask, because kernels of causal attention hide the rest of an image."""
    if parts_of(_SHARED) > 1:
        raise ShardingError("Attention with images is not split over the sequence. Set mesh.context to 1.")
    seq = query.shape[1]
    mask = ahead_mask(jnp.broadcast_to(jnp.arange(seq), ahead.shape), seq, ahead)
    window = None if window is None else (window[0], None)
    names = {**axes, "mask": ("batch", None, None, None)}
    output: Any = ops.attention(query, key, value, mask=mask, window=window, axes=names, **options)
    return output


def _with_passed_keys(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    found: Any = ops.ring_attention(query, key, value, axis_name=_axis(_SHARED), causal=True, **options)
    return found


def _with_gathered_keys(
    query: jax.Array, key: jax.Array, value: jax.Array, *, segment_ids: Any = None, window: Any = None, **options: Any
) -> jax.Array:
    """Computes attention of the device's two query blocks over the gathered keys of all devices."""
    axis, devices, half = _axis(_SHARED), parts_of(_SHARED), query.shape[1] // 2
    back = np.argsort(_zigzag(2 * half * devices, devices))

    def gather(x: jax.Array) -> jax.Array:
        # Gathered keys are in device order, and causal masks need sequence order.
        gathered: jax.Array = lax.all_gather(x, axis, axis=1, tiled=True)[:, back]
        return gathered

    keys, values = gather(key), gather(value)
    of_queries = None if segment_ids is None else _of_tokens(segment_ids)
    of_keys = None if of_queries is None else gather(of_queries)
    left = None if window is None else window[0]

    def of_device(device: int) -> jax.Array:
        outputs = list[jax.Array]()
        for rows, block in ((slice(0, half), device), (slice(half, None), 2 * devices - 1 - device)):
            # Only keys up to the block are visible, from the block where the window begins.
            first = 0 if left is None else max(block * half - left, 0) // half * half
            seen = slice(first, (block + 1) * half)
            pair: Any = None
            if of_queries is not None and of_keys is not None:
                pair = (of_queries[:, rows], of_keys[:, seen])
                pair = ops.PackedSegments(*pair) if isinstance(segment_ids, ops.PackedSegments) else pair
            found: Any = ops.attention(
                query[:, rows],
                keys[:, seen],
                values[:, seen],
                causal=True,
                query_offset=block * half - first,
                segment_ids=pair,
                window=window,
                **options,
            )
            outputs.append(found)
        return jnp.concatenate(outputs, axis=1)

    # One branch per device, because kernels need static offsets.
    branches = [functools.partial(of_device, device) for device in range(devices)]
    output: jax.Array = lax.switch(lax.axis_index(axis), branches)
    return output


def _with_exchanged_heads(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    segment_ids: Any = None,
    sinks: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Computes attention of the device's share of the heads over the full sequence."""
    axis, devices, (heads, kv_heads) = _axis(_SHARED), parts_of(_SHARED), (query.shape[2], key.shape[2])
    if heads % devices or (kv_heads % devices and devices % kv_heads):
        raise ShardingError(
            f"context_keys='ulysses' divides the heads of attention over the {devices} devices that share a sequence, "
            f"and each has {heads} query heads and {kv_heads} key heads. Choose mesh.context and mesh.tensor so that "
            "they divide the heads, or set model.context_keys to 'ring'.",
            logical_axes=["seq"],
        )
    order = _zigzag(query.shape[1] * devices, devices)
    back = np.argsort(order)

    def exchange(x: jax.Array) -> jax.Array:
        # Each device needs its own key head, even if several query groups share one.
        x = jnp.repeat(x, max(devices // x.shape[2], 1), axis=2)
        exchanged: jax.Array = lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)[:, back]
        return exchanged

    if segment_ids is not None:
        gathered = lax.all_gather(_of_tokens(segment_ids), axis, axis=1, tiled=True)[:, back]
        segment_ids = ops.PackedSegments.of(gathered) if isinstance(segment_ids, ops.PackedSegments) else gathered
    if sinks is not None:
        share = heads // devices
        sinks = lax.dynamic_slice_in_dim(sinks, lax.axis_index(axis) * share, share)
    output: Any = ops.attention(
        exchange(query),
        exchange(key),
        exchange(value),
        causal=True,
        query_offset=0,
        segment_ids=segment_ids,
        sinks=sinks,
        **options,
    )
    restored: jax.Array = lax.all_to_all(output[:, order], axis, split_axis=1, concat_axis=2, tiled=True)
    return restored


def _of_tokens(segment_ids: Any) -> jax.Array:
    found: jax.Array = segment_ids.keys if isinstance(segment_ids, ops.PackedSegments) else segment_ids
    return found


_TOKENS: LogicalAxes = ("batch", "seq")
_EXCHANGES: Mapping[ContextKeys, Callable[..., jax.Array]] = {
    "ring": _with_passed_keys,
    "gathered": _with_gathered_keys,
    "ulysses": _with_exchanged_heads,
}


@contextlib.contextmanager
def shared_rows() -> Iterator[None]:
    """Sets the sharding rules for arrays from `to_zigzag`: "batch" is also split over the devices of "seq"."""
    context = axes_of("seq")
    if not context:
        yield
        return
    mesh, rules = in_mesh.value
    table = dict(rules.table)
    # Each shard of a sequence becomes a row, so the batch is split over these devices and the sequence is not.
    changed = {name: (*context, *table[name]) for name in ("batch", "lookup_batch")}
    whole = {name: tuple(axis for axis in table[name] if axis not in context) for name in ("seq", "norm_seq")}
    with in_mesh((mesh, rules.updated({**changed, **whole, _SHARED: context}))):
        yield


def to_zigzag(x: Int[Array, "batch seq *values"]) -> Int[Array, "rows tokens *values"]:
    """Reorders tokens, or arrays of values per token, into rows [n * batch, seq / n] in zigzag order.

    Returns the array unchanged if the mesh does not split the sequence.

    Raises:
      ShardingError: the sequence does not divide into two equal blocks per device.
    """
    devices = parts_of("seq")
    if devices == 1:
        return x
    # [batch, seq] -> [batch, devices, seq / devices] -> rows [devices * batch, seq / devices], the device index major.
    values = x.shape[2:]
    parts = x[:, _zigzag(x.shape[1], devices)].reshape(x.shape[0], devices, -1, *values).swapaxes(0, 1)
    with shared_rows():
        rows = parts.reshape(-1, *parts.shape[2:])
        return constrain(rows, "batch", "seq", *[None] * len(values), name="tokens")


def from_zigzag(x: Float[Array, "rows tokens embed"]) -> Float[Array, "batch seq embed"]:
    """Restores activations to sequence order, the inverse of `to_zigzag`.

    Every device has one block with an even index and one with an odd index. One permutation sends all even blocks to
    their devices, and another one all odd blocks.
    """
    devices = parts_of("seq")
    if devices == 1:
        return x
    axis = _axis("seq")
    # Device of each block in zigzag order.
    holder = [min(block, 2 * devices - 1 - block) for block in range(2 * devices)]

    def of_device(x: jax.Array) -> jax.Array:
        # Blocks i and 2n - 1 - i: their indices have opposite parity, because they add up to an odd number.
        low, high = jnp.split(x, 2, axis=1)
        is_even = lax.axis_index(axis) % 2 == 0
        even, odd = jnp.where(is_even, low, high), jnp.where(is_even, high, low)
        # Device d of the result has blocks 2 d and 2 d + 1, which have opposite parity.
        moved = [
            lax.ppermute(part, axis, [(holder[2 * device + kind], device) for device in range(devices)])
            for kind, part in enumerate((even, odd))
        ]
        return jnp.concatenate(moved, axis=1)

    mesh, rules = in_mesh.value
    rows = (*axes_of("seq"), *axes_of("batch"))
    # Rows are still [n * batch], split over both groups of devices, so they need a rule that neither axis has.
    with in_mesh((mesh, rules.updated({"shared_batch": rows}))):
        given = [(x, ("shared_batch", None, "act_embed"))]
        found: jax.Array = map_parts(of_device, given, ("batch", "seq", "act_embed"), name="the order of the sequence")
    return found


def shared_sequence_tokens(tokens: int) -> int:
    """Returns the length of a sequence whose share on one device is `tokens` tokens; see `to_zigzag`."""
    return tokens * parts_of(_SHARED)


def sharing_devices() -> int:
    """Returns the number of devices that share a sequence inside `shared_rows`, 1 outside."""
    return parts_of(_SHARED)


def shared_axis() -> str | tuple[str, ...]:
    """Returns the mesh axis, or axes, of the devices that share a sequence inside `shared_rows`."""
    return _axis(_SHARED)


def check_unsplit_sequence(label: str) -> None:
    """Raises a ShardingError if the mesh splits the sequence, which `label` must process in order."""
    if parts_of(_SHARED) > 1:
        raise ShardingError(
            f"{label} reads its sequence in order, and the mesh splits it into {parts_of(_SHARED)} parts. "
            "Set mesh.context=1; use mesh.fsdp or mesh.tensor instead."
        )


def _zigzag(seq: int, devices: int) -> np.ndarray:
    """Returns the positions of the sequence in device order."""
    if seq % (2 * devices):
        below = seq - seq % (2 * devices)
        sizes = " or ".join(str(size) for size in (below, below + 2 * devices) if size)
        raise ShardingError(
            f"The sequence has {seq} tokens; {devices} devices share it in pairs of blocks (mesh.context), so its "
            f"length must be a multiple of {2 * devices}. These would fit: {sizes}.",
            logical_axes=["seq"],
        )
    blocks = np.split(np.arange(seq), 2 * devices)
    return np.concatenate([blocks[place] for one in range(devices) for place in (one, 2 * devices - 1 - one)])


def _axis(logical_axis: str) -> str | tuple[str, ...]:
    axes = axes_of(logical_axis)
    return axes[0] if len(axes) == 1 else axes
