"""Quantization and fake quantization of arrays."""

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, use_abstract_mesh

from stack_core.abi.errors import ArgumentError
from stack_core.ops.building import with_automatic_axes
from stack_quant.blocks import ONE_BLOCK, Blocks, blocks, over_blocks
from stack_quant.calibrate import calibrate, half_step_tiles, shows_all
from stack_quant.packing import pack
from stack_quant.qarray import QArray, dequantize
from stack_quant.qtypes import QType
from stack_quant.rounding import as_codes, encode
from stack_quant.scales import Range, Scales, scales
from stack_quant.spec import ArraySpec
from stack_quant.tiling import Tiling

__all__ = ["encode_with", "fake_quantize", "quantize_array"]


def quantize_array(
    array: jax.Array,
    spec: ArraySpec,
    *,
    range: Range | None = None,  # noqa: A002 (this module does not use the builtin)
    name: str = "",
    key: jax.Array | None = None,
) -> QArray:
    """Quantizes `array` to codes and scales.

        q = saturate(round(x / s) + z)

    The scale s and the zero point z map the range onto the type by `spec.range_ends`. Without a key, values are rounded
    to the nearest code, ties to even. With a key, the ends of the range always lie on the outermost codes.

    Args:
      array: floating array. The computation is in float32.
      range: range of the values, in the form of `stack_quant.calibrate`; its axes divide the axes of the array. None
        calibrates the array itself.
      name: name of the array in messages.
      key: PRNG key of unbiased stochastic rounding: within the range, the mean over keys is the array.

    Raises:
      ArgumentError: the array is not floating, or contains NaN or infinities (checked only outside of jit).
      ShapeError: a tile does not divide its axis.
    """
    _check_floating(array, name)
    tiles = spec.tiling(array.shape, name)
    # A trace can neither loop over blocks in Python nor raise an error for NaN.
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((array, range, key))):
        result = functools.partial(_quantized, spec=spec)
        return with_automatic_axes(lambda *args: result(*args)[0], array, range, key, like=array)
    local, mesh, context = _on_auto_mesh(array)
    cut = blocks(tiles, _unsharded_axes(local))
    with context:
        # Blocks run in a Python loop, outside of `jit`.
        result, finite = (_compiled if cut.count == 1 else _quantized)(local, range, key, spec=spec, cut=cut)
    if not finite:
        raise ArgumentError(_not_finite(local, name))
    if mesh is None:
        return result
    return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, leaf.sharding.spec)), result)


def _on_auto_mesh(array: jax.Array) -> tuple[jax.Array, Any, contextlib.AbstractContextManager[Any]]:
    """Moves an array from a mesh with Explicit axes to a mesh with Auto axes on the same devices.

    With Explicit axes, splitting a sharded axis into tiles requires a sharding of the result. Such a sharding does not
    exist if a tile extends over several shards.

    Returns:
      The array, the mesh with Explicit axes or None, and the context for the computation. The context replaces the
      caller's mesh, because a mesh with Explicit axes would not fit the array.
    """
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return array, None, contextlib.nullcontext()
    mesh = sharding.mesh
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return jax.device_put(array, NamedSharding(auto, sharding.spec)), mesh, use_abstract_mesh(auto.abstract_mesh)


def _unsharded_axes(array: jax.Array) -> tuple[int, ...]:
    """Returns the axes that are not sharded."""
    partition = getattr(getattr(array, "sharding", None), "spec", ())
    return tuple(axis for axis, _ in enumerate(array.shape) if axis >= len(partition) or partition[axis] is None)


def _quantized(
    array: jax.Array,
    span: Range | None,
    key: jax.Array | None,
    *,
    spec: ArraySpec,
    cut: Blocks = ONE_BLOCK,
    is_calibrated: bool = False,
) -> tuple[QArray, jax.Array]:
    """Returns the quantized array, and whether the array and its range are finite.

    Args:
      is_calibrated: True if `span` was calibrated on this array, which allows its ends to be fitted.
    """
    # A NaN shows in most calibrated ranges, which are checked below without another pass over the array.
    finite = [] if span is None and shows_all(spec) else [_all_finite(array)]
    if span is None:
        span, is_calibrated = calibrate(array, spec, cut=cut), True
    half_step: bool | jax.Array = spec.range_ends == "half_step" and key is None
    if is_calibrated and key is None:
        half_step = half_step_tiles(array, span, spec, cut)
    finite += [jnp.all(jnp.isfinite(end)) for end in jax.tree.leaves(span)]
    kind = spec.qtype
    mapped = scales(
        span,
        kind,
        unit_axes=spec.unit_axes(array.ndim),
        double=spec.double_quantized,
        half_step=half_step,
        unbiased=key is not None,
    )
    return _encoded(array, mapped, spec, array.dtype, key, cut), functools.reduce(jnp.logical_and, finite)


def _encoded(
    array: jax.Array, mapped: Scales, spec: ArraySpec, dtype: Any, key: jax.Array | None, cut: Blocks
) -> QArray:
    kind, tiles = spec.qtype, Tiling(array.shape, mapped.full.shape)
    encoded = over_blocks(_Encode(kind, tiles), array, (mapped.full, mapped.zero_point, key), cut)
    return QArray(
        planes=(_packed if cut.count == 1 else _compiled_packed)(encoded, kind),
        scale=mapped.scale,
        scale_unit=mapped.scale_unit,
        zero_point=mapped.zero_point,
        type=spec.type,
        dtype=jnp.dtype(dtype).name,
    )


@functools.partial(jax.jit, static_argnames=("spec", "dtype"))
def encode_with(array: jax.Array, mapped: Scales, spec: ArraySpec, dtype: Any) -> QArray:
    """Quantizes an array by given scales.

    Args:
      dtype: dtype of the dequantized array.
    """
    return _encoded(array, mapped, spec, dtype, None, ONE_BLOCK)


def _packed(encoded: jax.Array, kind: QType) -> tuple[jax.Array, ...]:
    return pack(as_codes(encoded, kind), kind)


@jax.jit
def _all_finite(array: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(array))


_compiled = jax.jit(_quantized, static_argnames=("spec", "cut"))
_compiled_packed = jax.jit(_packed, static_argnames="kind", donate_argnums=0)


@dataclass(frozen=True)
class _Encode:
    """The codes of a block, one per byte: XLA's CPU backend joins arrays of narrower types entry by entry."""

    kind: QType
    tiles: Tiling

    def __call__(
        self,
        index: jax.Array,
        block: jax.Array,
        scale: jax.Array,
        zero_point: jax.Array | None,
        key: jax.Array | None,
    ) -> jax.Array:
        tiles = self.tiles.of(block)
        values = tiles.split(block).astype(jnp.float32) / tiles.split(scale)
        if zero_point is not None:
            values = values + tiles.split(zero_point).astype(jnp.float32)
        # A symmetric range has equally many codes on both sides. With one more negative code the lower end of a
        # half-step range would be a tie between the last two codes.
        smallest = -self.kind.largest if zero_point is None else None
        # Equal noise in each block would be correlated.
        key = None if key is None else jax.random.fold_in(key, index)
        return tiles.join(encode(values, self.kind, key=key, smallest=smallest))


def fake_quantize(
    array: jax.Array,
    spec: ArraySpec,
    *,
    range: Range | None = None,  # noqa: A002 (as in `quantize_array`)
    key: jax.Array | None = None,
) -> jax.Array:
    """Computes `dequantize(quantize_array(array))` in the array's dtype, with a straight-through gradient.

    The gradient is the gradient of `clip(array, low, high)`: one within the range, including its ends, and zero
    outside. The gradient of the range is zero.
    """
    _check_floating(array, "")

    def rounded(array: jax.Array, range: Range | None, key: jax.Array | None) -> jax.Array:  # noqa: A002 (as above)
        span = calibrate(array, spec) if range is None else range
        return _straight_through(array, jax.lax.stop_gradient(span), key, spec, range is None)

    return with_automatic_axes(rounded, array, range, key, like=array)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _straight_through(
    array: jax.Array, span: Range, key: jax.Array | None, spec: ArraySpec, is_calibrated: bool
) -> jax.Array:
    return dequantize(_quantized(array, span, key, spec=spec, is_calibrated=is_calibrated)[0])


@_straight_through.defjvp
def _straight_through_jvp(
    spec: ArraySpec, is_calibrated: bool, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    array, span, key = primals
    tiles = Tiling(array.shape, span.high.shape)
    split = tiles.split(array).astype(jnp.float32)
    high = tiles.split(span.high)
    low = -high if span.low is None else tiles.split(span.low)
    # Clipping has the derivative 1 at its ends, too: the largest magnitude of each tile lies there.
    inside = tiles.join((split >= low) & (split <= high))
    return _straight_through(array, span, key, spec, is_calibrated), jnp.where(
        inside, tangents[0], jnp.zeros_like(tangents[0])
    )


def _check_floating(array: jax.Array, name: str) -> None:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        what = name or "the array"
        raise ArgumentError(f"{what} has dtype {array.dtype}; only floating arrays are quantized. Leave it as it is.")


def _not_finite(array: jax.Array, name: str) -> str:
    what = name or "The array"
    nans, infinities = (int(jnp.sum(found(array))) for found in (jnp.isnan, jnp.isinf))
    if not nans + infinities:
        return (
            f"{what}: the range has entries that are not finite."
            " Observe at least one batch with finite values before using the range."
        )
    place = np.unravel_index(int(jnp.argmax(~jnp.isfinite(array).ravel())), array.shape)
    return (
        f"{what} holds {nans} NaN and {infinities} infinite entries of {array.size}, the first at "
        f"{tuple(map(int, place))}. They would corrupt their tiles; correct them, or leave this array in float."
    )
