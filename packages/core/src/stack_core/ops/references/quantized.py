"""Quantized operands: any pytree class with a `__stack_qview__` method, detected by its type without imports."""

import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from stack_core.abi.errors import ArgumentError, ShapeError
from stack_core.abi.ops import ABI_MAJOR, QView
from stack_core.chips.context import target_platform
from stack_core.ops.dispatch.automatic_axes import with_automatic_axes

__all__ = [
    "MAX_TERMS",
    "QuantizedArray",
    "are_multipliable",
    "dequantize",
    "has_product_of_codes",
    "is_fp8",
    "is_quantized",
    "logical_array",
    "product_of_codes",
    "repeated",
    "take",
]

MAX_TERMS = 2**16
"""Maximum number of products of two 8-bit integers with a sum below 2^31."""


@runtime_checkable
class QuantizedArray(Protocol):
    """Protocol of arrays stored in fewer bits, described by a `QView`."""

    def __stack_qview__(self) -> QView: ...


def is_quantized(array: Any) -> bool:
    """Returns whether the type of `array` defines `__stack_qview__`."""
    return hasattr(type(array), "__stack_qview__")


def logical_array(array: Any) -> Any:
    """Returns an array with the logical shape: quantized values, or any other array unchanged."""
    return _checked_view(array).qvalue if is_quantized(array) else array


def dequantize(array: Any, dtype: DTypeLike) -> jax.Array:
    """Computes (value - zero_point) * scale in fp32 and casts it to `dtype`; plain arrays are returned unchanged.

    The value is `codebook[qvalue]`, or `qvalue` itself without a codebook. Gradients go to the scale and to a floating
    zero point. Stored values and the codebook get no gradient, even if they are floating, since their updates are up to
    the quantizer.

    Raises:
      ArgumentError: the view has another ABI major version, or a codebook with non-integer codes.
      ShapeError: the size of a scale does not divide its axis, or the codebook is not one-dimensional.
    """
    if not is_quantized(array):
        return array
    view = _checked_view(array)
    return _dequantized(view, dtype)


def _dequantized(view: QView, dtype: DTypeLike) -> jax.Array:
    def computed(codes: jax.Array, scale: jax.Array, zero_point: Any, codebook: Any) -> jax.Array:
        value = lax.stop_gradient(codes if codebook is None else _decoded(codes, codebook)).astype(jnp.float32)
        if zero_point is not None:
            value = value - repeated(zero_point, value.shape)
        return (value * repeated(scale, value.shape)).astype(dtype)

    parts = (view.qvalue, view.scale, view.zero_point, view.codebook)
    # A tile of one scale may span several shards, which cannot be written with Explicit axes.
    return with_automatic_axes(computed, *parts, like=view.qvalue)


def _decoded(codes: jax.Array, codebook: jax.Array) -> jax.Array:
    # By default, `take` gives NaN for codes beyond the codebook.
    return jnp.take(codebook, codes.astype(jnp.int32), mode="clip")


def take(array: Any, indices: jax.Array, axis: int, dtype: DTypeLike) -> jax.Array:
    """Takes slices along an axis of a possibly quantized array and dequantizes only these, to `dtype`.

    Indices out of range are clamped to the first or last slice.
    """
    if not is_quantized(array):
        return jnp.take(array, indices, axis=axis, mode="clip")
    view = _checked_view(array)
    size = view.qvalue.shape[axis]

    def take_part(part: jax.Array) -> jax.Array:
        if part.shape[axis] == 1:
            return jnp.expand_dims(part, tuple(range(axis, axis + indices.ndim - 1)))
        return jnp.take(part, indices // (size // part.shape[axis]), axis=axis, mode="clip")

    zero_point = None if view.zero_point is None else take_part(view.zero_point)
    parts = dataclasses.replace(view, qvalue=take_part(view.qvalue), scale=take_part(view.scale), zero_point=zero_point)
    return _dequantized(parts, dtype)


def has_product_of_codes(x: Any, weight: Any) -> bool:
    """Returns whether codes can be multiplied as they are, with one scale per row of x and per weight column.

    Both operands are signed integers of up to 8 bits, or both are fp8.
    """
    if not are_multipliable(x, weight, (-1, 0)):
        return False
    codes = _checked_view(x).qvalue
    return is_fp8(codes.dtype) or codes.shape[-1] <= MAX_TERMS


def are_multipliable(left: Any, right: Any, axes: tuple[int, int]) -> bool:
    """Returns whether the scales of two quantized operands apply after a product of their codes.

    Args:
      axes: contracted axis of each operand, along which its scale must be constant.
    """
    if not (is_quantized(left) and is_quantized(right)):
        return False
    views = _checked_view(left), _checked_view(right)
    if any(view.codebook is not None or view.zero_point is not None for view in views):
        return False
    if any(view.scale.shape[axis] != 1 for view, axis in zip(views, axes, strict=True)):
        return False
    dtypes = [view.qvalue.dtype for view in views]
    return all(map(is_fp8, dtypes)) or all(
        jnp.issubdtype(dtype, jnp.signedinteger) and jnp.iinfo(dtype).bits <= 8 for dtype in dtypes
    )


def product_of_codes(x: Any, weight: Any) -> jax.Array:
    """Computes x W in float32 for x[..., d_in] and W[d_in, d_out] accepted by `has_product_of_codes`.

    With codes q, r and scales a, b, y[m, n] = (sum_k q[m, k] r[k, n]) a[m] b[n]. Sums of integers are exact in int32,
    except on several TPUs; sums of fp8 codes are fp32. CPUs and TPUs multiply int8 faster than floats, and H100s, B200s
    and TPUs v7x fp8.
    """
    left, right = x.__stack_qview__(), weight.__stack_qview__()
    *batch, d_in = left.qvalue.shape
    is_integer = not is_fp8(left.qvalue.dtype)
    # Scales have gradients, and codes have none; see `dequantize`.
    rows, columns = (
        view.qvalue.astype(jnp.int8) if is_integer else lax.stop_gradient(view.qvalue) for view in (left, right)
    )
    rows = rows.reshape(math.prod(batch), d_in)
    # XLA's CPU backend uses a generic loop for a single row, which takes 2 to 4 times as long as two rows.
    padded = jnp.pad(rows, ((0, 1), (0, 0))) if len(rows) == 1 else rows
    # The TPU compiler has no reduce-scatter of int32, so each device would sum the whole gradient of a sharded weight.
    on_several_tpus = target_platform() == "tpu" and jax.sharding.get_abstract_mesh().size > 1
    dtype = jnp.int32 if is_integer and not on_several_tpus else jnp.float32
    sums = lax.dot_general(padded, columns, (((1,), (0,)), ((), ())), preferred_element_type=dtype)
    sums = sums[: len(rows)].astype(jnp.float32).reshape(*batch, sums.shape[-1])
    return sums * repeated(left.scale, (*batch, 1)) * repeated(right.scale, (1, sums.shape[-1]))[0]


def is_fp8(dtype: Any) -> bool:
    """Returns whether a dtype is a float of 8 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 8


def repeated(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats a scale along each axis with several entries to the size of the quantized values; casts it to fp32."""
    scale = scale.astype(jnp.float32)
    for axis, size in enumerate(shape):
        if scale.shape[axis] not in (1, size):
            scale = jnp.repeat(scale, size // scale.shape[axis], axis=axis)
    return scale


def _checked_view(array: Any) -> QView:
    view = array.__stack_qview__()
    name = f"{type(array).__name__} ({view.scheme})"
    if view.abi[0] != ABI_MAJOR:
        raise ArgumentError(
            f"The view of {name} is of ABI {view.abi[0]}.{view.abi[1]}; this core reads ABI {ABI_MAJOR}. "
            "Install a matching release of the package that defines it."
        )
    value_shape, scale_shape = view.qvalue.shape, view.scale.shape
    divides = len(value_shape) == len(scale_shape) and all(
        v == s or (s and v % s == 0) for v, s in zip(value_shape, scale_shape, strict=True)
    )
    if not divides:
        raise ShapeError(
            f"The scale of {name} has shape {scale_shape}; every axis must divide the value's {value_shape}."
        )
    if view.zero_point is not None and view.zero_point.shape != scale_shape:
        raise ShapeError(
            f"The zero point of {name} has shape {view.zero_point.shape}; expected its scale's {scale_shape}."
        )
    if view.codebook is not None:
        _check_codebook(name, view.qvalue, view.codebook)
    return view


def _check_codebook(name: str, codes: jax.Array, codebook: jax.Array) -> None:
    if codebook.ndim != 1:
        raise ShapeError(f"The codebook of {name} has shape {codebook.shape}; expected one axis, [levels].")
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise ArgumentError(
            f"The values of {name} are {codes.dtype} and index a codebook; expected integers. "
            "Leave the codebook out where the values stand for themselves."
        )
