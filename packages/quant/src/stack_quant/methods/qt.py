"""Quantized training: forward and backward products multiply codes, and the residuals are codes.

For y[m, n] = x[m, k] w[k, n] with cotangent g[m, n]:

    y = Q_m(x) Q_n(w),  dL/dx = Q_m(g) Q_k(w)^T,  dL/dw = Q_k(x)^T Q_n(g)

Q_i rounds with one scale per entry of axis i, which is not the axis that the product sums over. Both x and w are
therefore rounded twice from their floats. The only residuals are Q_k(x) and Q_k(w): one byte per entry in int8 or fp8.
Gradients that are not requested, such as the gradient of the input of the first layer, are not computed and need no
residuals. Rounding has the gradient of the identity.

With a key, cotangents are rounded stochastically: their mean over keys is the cotangent (Gupta et al., Deep Learning
with Limited Numerical Precision, 2015, arXiv:1502.02551). Each product draws from its own key. Without a key,
cotangents are rounded to the nearest.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_core import ops
from stack_core.ops.building import (
    has_ragged_outer_product_of_codes,
    has_ragged_product_of_codes,
    is_quantized,
    ragged_outer_product_of_codes,
    ragged_product_of_codes,
    vary_alike,
)
from stack_quant.errors import RuleError
from stack_quant.methods import Method, ProductTypes, TrainedProducts
from stack_quant.methods.ptq import as_it_comes
from stack_quant.qtypes import qtype
from stack_quant.rules import Rule
from stack_quant.spec import ArraySpec, range_ends_at_run_time
from stack_quant.transform import views
from stack_quant.transform.versions import struct_like

__all__ = ["QT"]


def _check(rules: Sequence[Rule]) -> None:
    for number, rule in enumerate(rules):
        if rule.tile_size is not None or rule.double_quantized:
            option = "tile_size" if rule.tile_size is not None else "double_quantized"
            raise RuleError(
                f"Rule {number}, {rule}: method 'qt' has a scale for each row and each column of a product. "
                f"Leave `{option}` out, or use method 'qat'."
            )
        if rule.is_static:
            raise RuleError(
                f"Rule {number}, {rule}: method 'qt' finds the range of each row at each step. "
                "Leave out `static_ranges`, or the average, or use method 'qat'."
            )
        if rule.gradients is not None and rule.weights is None and rule.activations is None:
            raise RuleError(
                f"Rule {number}, {rule}: gradients of products whose operands stay in float. "
                "Set the types of weights and activations, too."
            )
        for name in filter(None, (rule.weights, rule.activations, rule.gradients)):
            kind = qtype(name)
            if kind.block_size is not None or kind.codebook is not None:
                raise RuleError(
                    f"Rule {number}, {rule}: method 'qt' does not support products of {name}. "
                    "Use an integer type, fp8_e4m3 or fp8_e5m2."
                )


def _unchanged(array: Any, spec: ArraySpec, _: Any = None) -> Any:
    return array


@dataclass(frozen=True)
class _Call:
    """The static part of a product of two operands.

    Attributes:
      types: types of the operands and the cotangent.
      dtypes: names of the dtypes of the operands.
    """

    types: ProductTypes
    dtypes: tuple[str, str]

    def coded(self, place: int, array: jax.Array, axes: Sequence[int]) -> Any:
        """Quantizes an operand for a product that sums over `axes`."""
        kind, calibration = (self.types.left, self.types.right)[place], self.types.calibrations[place]
        return _coded(array, kind, axes, calibration, self.types.range_ends)

    def cotangent(self, array: jax.Array, axes: Sequence[int], key: jax.Array | None) -> Any:
        # absmax never clips, as rounding without bias requires.
        return _coded(array, self.types.gradients, axes, "absmax", self.types.range_ends, key)


def _coded(
    array: jax.Array,
    kind: str | None,
    axes: Sequence[int],
    calibration: str,
    range_ends: str,
    key: jax.Array | None = None,
) -> Any:
    if kind is None:
        return array
    # A scale must be constant over the sum to apply to its result.
    channels = tuple(axis for axis in range(array.ndim) if axis not in axes)
    ends = range_ends_at_run_time(range_ends, kind)
    spec = ArraySpec(type=kind, channel_axes=channels, calibration=calibration, range_ends=ends)
    return as_it_comes(spec)(array, key=key)


def _two_keys(key: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    # The cotangent is rounded once for each operand; with one key, the two errors would be correlated.
    return (None, None) if key is None else (jax.random.fold_in(key, 0), jax.random.fold_in(key, 1))


@dataclass(frozen=True)
class _Linear(_Call):
    dtype: str  # of the result


def _linear(left: jax.Array, right: jax.Array, dtype: Any, types: ProductTypes, key: jax.Array | None) -> jax.Array:
    call = _Linear(types, (left.dtype.name, right.dtype.name), jnp.dtype(dtype).name)
    return _trained_linear(call, left, right, key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _trained_linear(call: _Linear, left: jax.Array, right: jax.Array, key: jax.Array | None) -> jax.Array:
    codes = call.coded(0, left, (left.ndim - 1,)), call.coded(1, right, (0,))
    return ops.linear(*codes, preferred_dtype=call.dtype)


def _linear_forward(call: _Linear, left: Any, right: Any, key: Any) -> tuple[jax.Array, Any]:
    """Computes the product, and quantizes each operand that the backward pass needs as a residual."""
    # `symbolic_zeros` wraps each primal with the flag `perturbed`: a
    # gradient with respect to this operand is requested.
    x, w = left.value, right.value
    rows = call.coded(0, x.reshape(-1, x.shape[-1]), (0,)) if right.perturbed else None
    columns = call.coded(1, w, (1,)) if left.perturbed else None
    key = None if key is None else key.value
    return _trained_linear(call, x, w, key), (rows, columns, key)


def _linear_backward(call: _Linear, residuals: Any, cotangent: Any) -> tuple[Any, Any, None]:
    rows, columns, key = residuals
    # The result is unused, and None stands for a zero gradient.
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return None, None, None
    of_left, of_right = _two_keys(key)
    flat = cotangent.reshape(-1, cotangent.shape[-1])
    to_left = to_right = None
    if columns is not None:
        codes = call.cotangent(flat, (1,), of_left)
        to_left = ops.linear(codes, _transposed(columns), preferred_dtype=call.dtypes[0])
        to_left = to_left.reshape(*cotangent.shape[:-1], -1)
    if rows is not None:
        codes = call.cotangent(flat, (0,), of_right)
        to_right = ops.linear(_transposed(rows), codes, preferred_dtype=call.dtypes[1])
    return to_left, to_right, None


_trained_linear.defvjp(_linear_forward, _linear_backward, symbolic_zeros=True)


def _transposed(array: Any) -> Any:
    return views.transpose(views.view_of(array), (1, 0)) if is_quantized(array) else array.T


@dataclass(frozen=True)
class _Convolution(_Call):
    """The static part of a convolution: the parameters of `lax.conv_general_dilated` and the shapes of its operands."""

    params: tuple[tuple[str, Any], ...]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def numbers(self) -> tuple[Sequence[int], ...]:
        """Axes of the operands and the result: (batch, feature, *space), or (feature out, feature in, *space)."""
        return dict(self.params)["dimension_numbers"]

    def __call__(self, left: Any, right: Any) -> jax.Array:
        """Convolves the dequantized operands, as codes cannot be convolved for all parameters."""
        options: dict[str, Any] = dict(self.params)
        images, kernel = ops.dequantize(left, self.dtypes[0]), ops.dequantize(right, self.dtypes[1])
        return lax.conv_general_dilated(images, kernel, **options)

    def transposed(self, place: int, call: Callable[[Any], Any], cotangent: jax.Array) -> jax.Array:
        """Returns the gradient of an operand by the transposed convolution, which JAX derives for all parameters."""
        # JAX would sum the gradient over manual mesh axes over which only the cotangent varies.
        operand = struct_like(cotangent, self.shapes[place], self.dtypes[place])
        (gradient,) = jax.linear_transpose(call, operand)(cotangent)
        return gradient


_OF_CONVOLUTIONS = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "dimension_numbers",
    "feature_group_count",
    "batch_group_count",
    "preferred_element_type",
)


def _convolution(
    left: jax.Array, right: jax.Array, params: Mapping[str, Any], types: ProductTypes, key: jax.Array | None
) -> jax.Array:
    # A tuple, because static arguments of `custom_vjp` must be hashable.
    options = tuple((name, params[name]) for name in _OF_CONVOLUTIONS)
    call = _Convolution(types, (left.dtype.name, right.dtype.name), options, (left.shape, right.shape))
    return _trained_convolution(call, left, right, key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _trained_convolution(call: _Convolution, left: jax.Array, right: jax.Array, key: jax.Array | None) -> jax.Array:
    of_left, of_right, _ = call.numbers
    return call(call.coded(0, left, of_left[1:]), call.coded(1, right, of_right[1:]))


def _convolution_forward(call: _Convolution, left: Any, right: Any, key: Any) -> tuple[jax.Array, Any]:
    """Computes the product and its residuals, as `_linear_forward`.

    The gradient of the kernel sums over batch and space, the gradient of the input over output features and the window.
    """
    (batch, _, *space), (out, _, *window), _ = call.numbers
    images = call.coded(0, left.value, (batch, *space)) if right.perturbed else None
    kernel = call.coded(1, right.value, (out, *window)) if left.perturbed else None
    key = None if key is None else key.value
    return _trained_convolution(call, left.value, right.value, key), (images, kernel, key)


def _convolution_backward(call: _Convolution, residuals: Any, cotangent: Any) -> tuple[Any, Any, None]:
    images, kernel, key = residuals
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return None, None, None
    of_left, of_right = _two_keys(key)
    batch, feature, *space = call.numbers[2]
    to_left = to_right = None
    if kernel is not None:
        codes = call.cotangent(cotangent, (feature, *space), of_left)
        to_left = call.transposed(0, lambda left: call(left, kernel), ops.dequantize(codes, cotangent.dtype))
    if images is not None:
        codes = call.cotangent(cotangent, (batch, *space), of_right)
        to_right = call.transposed(1, lambda right: call(images, right), ops.dequantize(codes, cotangent.dtype))
    return to_left, to_right, None


_trained_convolution.defvjp(_convolution_forward, _convolution_backward, symbolic_zeros=True)


@dataclass(frozen=True)
class _Ragged(_Call):
    """The static part of a ragged product, which multiplies each row with the matrix of its group.

    With rows of group g, y[r] = x[r] w[g]: w has a scale for each group and column, and the gradient of w[g] sums over
    the rows of the group, so there both operands have a scale for each of their columns.
    """

    def __call__(self, rows: Any, matrices: Any, sizes: jax.Array) -> jax.Array:
        if has_ragged_product_of_codes(rows, matrices):
            return ragged_product_of_codes(rows, matrices, sizes, self.dtypes[0])
        # An operand that stays in float, or integers times fp8: `ragged_dot` takes rows in float only.
        return ops.ragged_dot(ops.dequantize(rows, self.dtypes[0]), matrices, sizes)

    def of_rows(self, cotangent: Any, matrices: Any, sizes: jax.Array) -> jax.Array:
        """Multiplies the cotangent of each row with the transposed matrix of its group."""
        if has_ragged_product_of_codes(cotangent, back := _swapped(matrices)):
            return ragged_product_of_codes(cotangent, back, sizes, self.dtypes[0])
        floats = ops.dequantize(matrices, self.dtypes[1]).swapaxes(1, 2)
        return ops.ragged_dot(ops.dequantize(cotangent, self.dtypes[0]), floats, sizes)

    def of_matrices(self, columns: Any, cotangent: Any, sizes: jax.Array) -> jax.Array:
        """Sums the outer products of rows and cotangents of each group."""
        if has_ragged_outer_product_of_codes(columns, cotangent):
            return ragged_outer_product_of_codes(columns, cotangent, sizes, self.dtypes[1])
        shape = (sizes.shape[0], columns.shape[1], cotangent.shape[1])
        matrices = jnp.zeros(shape, self.dtypes[1])  # the product is linear: its gradient does not depend on these
        rows = ops.dequantize(columns, self.dtypes[0])
        _, pull = jax.vjp(lambda matrices: ops.ragged_dot(rows, matrices, sizes), matrices)
        (found,) = pull(ops.dequantize(cotangent, self.dtypes[0]))
        return found


def _swapped(matrices: Any) -> Any:
    return views.transpose(views.view_of(matrices), (0, 2, 1)) if is_quantized(matrices) else matrices


def _in_groups(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """Zeroes the rows after all groups, which may contain any value, before they share a scale with other rows."""
    is_in_group = jnp.arange(rows.shape[0])[:, None] < jnp.sum(jnp.clip(sizes, 0, rows.shape[0]))
    return jnp.where(is_in_group, rows, jnp.zeros((), rows.dtype))


def _ragged(
    rows: jax.Array, matrices: jax.Array, sizes: jax.Array, types: ProductTypes, key: jax.Array | None
) -> jax.Array:
    # In a `jax.shard_map`, the gradient of matrices that devices share is summed over the devices.
    rows, matrices, sizes = vary_alike(rows, matrices, sizes)
    return _trained_ragged(_Ragged(types, (rows.dtype.name, matrices.dtype.name)), rows, matrices, sizes, key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _trained_ragged(
    call: _Ragged, rows: jax.Array, matrices: jax.Array, sizes: jax.Array, key: jax.Array | None
) -> jax.Array:
    return call(call.coded(0, rows, (1,)), call.coded(1, matrices, (1,)), sizes)


def _ragged_forward(call: _Ragged, rows: Any, matrices: Any, sizes: Any, key: Any) -> tuple[jax.Array, Any]:
    """Computes the product and its residuals, as `_linear_forward`; the gradient of a matrix sums over its rows."""
    columns = call.coded(0, _in_groups(rows.value, sizes.value), (0,)) if matrices.perturbed else None
    turned = call.coded(1, matrices.value, (2,)) if rows.perturbed else None
    key = None if key is None else key.value
    result = _trained_ragged(call, rows.value, matrices.value, sizes.value, key)
    return result, (columns, turned, sizes.value, key)


def _ragged_backward(call: _Ragged, residuals: Any, cotangent: Any) -> tuple[Any, Any, None, None]:
    columns, turned, sizes, key = residuals
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None
    of_rows, of_matrices = _two_keys(key)
    to_rows = to_matrices = None
    if turned is not None:
        to_rows = call.of_rows(call.cotangent(cotangent, (1,), of_rows), turned, sizes)
    if columns is not None:
        codes = call.cotangent(_in_groups(cotangent, sizes), (0,), of_matrices)
        to_matrices = call.of_matrices(columns, codes, sizes)
    return to_rows, to_matrices, None, None


_trained_ragged.defvjp(_ragged_forward, _ragged_backward, symbolic_zeros=True)


QT = Method("qt", _check, _unchanged, _unchanged, _unchanged, TrainedProducts(_linear, _convolution, _ragged))
