"""`linear` of a few rows or columns on CPUs, in machine code: for decoding, which is bound by reading weights."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_core.abi.ops import OpCall, OpImplementation, QView
from stack_core.chips import Chip
from stack_core.ops.building import forward_only, is_quantized
from stack_kernels.jit_cpu import host
from stack_kernels.jit_cpu.linear.block import Product
from stack_kernels.jit_cpu.linear.dots import RowDots, dots_module
from stack_kernels.jit_cpu.linear.streams import SEGMENT_COLUMNS, STREAMS, StreamedProduct, streamed_module
from stack_kernels.jit_cpu.linear.tiles import product_module
from stack_kernels.jit_cpu.numbers import BITS
from stack_kernels.linear.codes import QuantizedView, dequantized
from stack_kernels.linear.integer_dot import rows_of
from stack_kernels.supports import abstract_view

__all__ = ["JIT_X86", "few_rows_product", "supports_few_rows"]

_MAX_ROWS = 64
_MAX_ROWS_WITH_TILES = 8
_MAX_STREAMED_ROWS = {"float32": 8, "bfloat16": 4, "int8": 8}
_MIN_ROWS_OF_DOTS = 2**12
"""Fewer rows of `x` are no vocabulary, and XLA's products are as fast."""
_PART_ROWS = 64
_LEVELS = 16
_STREAMED_BYTES = 2**22
"""Weights of at least this size do not fit the caches; then integer streams are faster for several rows too."""
_MIN_ROWS_OF_TILES = 3
"""Fewer rows are memory-bound, and an integer product in tiles reads four rows of the weight at a time."""
_MAX_INTEGER_DEPTH = 2**16
"""The sum of this many products of int8 numbers always fits an int32; intermediate sums may wrap."""


def supports_few_rows(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    """Checks for up to 64 rows of `x`, and weights that are floats or 4-bit or 8-bit codes.

    The limit is 8 rows for bf16 or int8 operands if the processor has AMX tiles for them.
    """
    answer = host.on_this_cpu(call, chip)
    if answer is not True:
        return answer
    rows, max_rows = math.prod(_shape(call.arrays["x"])[:-1]), _max_rows(call)
    if rows > max_rows:
        return f"it is for {max_rows} rows or fewer, and x has {rows}"
    if any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(dict(call.arrays))):
        return "it computes in float32, and an array is float64"
    for name in _products(call) - {"x"}:
        answer = _reads(call.arrays[name])
        if answer is not True:
            return answer
    return True


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    return (host.on_this_cpu(call, chip) is True and _has_few_columns(call)) or supports_few_rows(call, chip, config)


def _has_few_columns(call: OpCall) -> bool:
    """Returns whether `x` is a matrix of a vocabulary's size, and the weight has up to 64 columns."""
    x, weight = call.arrays["x"], call.arrays["weight"]
    if is_quantized(x) or is_quantized(weight) or call.arrays.get("bias") is not None or x.ndim != 2:
        return False
    is_wide = x.dtype.name in ("float32", "bfloat16", "float16") and x.shape[1] % 16 == 0
    return is_wide and x.shape[0] >= _MIN_ROWS_OF_DOTS and weight.shape[1] <= _MAX_ROWS


def _few_columns_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Computes x[rows, k] @ weight[k, columns] as float32[rows, columns]."""
    product, columns = RowDots(x.dtype.name), weight.T.astype(jnp.float32)
    result = jax.ShapeDtypeStruct((len(columns), len(x)), jnp.float32)
    build = functools.partial(dots_module, product)
    return host.kernel_call(product.name, build, result, x, columns, flops=2 * x.size * len(columns)).T


def _products(call: OpCall) -> set[str]:
    """Returns the names of the arguments that are multiplied."""
    return {name for name in call.arrays if not name.startswith("bias")}


def _max_rows(call: OpCall) -> int:
    processor = host.this_processor()
    has_tiles = processor is not None and processor.has_tiles
    operands = [call.arrays[name] for name in _products(call)]
    return _MAX_ROWS_WITH_TILES if has_tiles and all(map(_fits_tiles, operands)) else _MAX_ROWS


def _fits_tiles(operand: Any) -> bool:
    if not is_quantized(operand):
        return operand.dtype == jnp.bfloat16
    return abstract_view(operand).qvalue.dtype == jnp.int8


def _reads(weight: Any) -> bool | str:
    if not is_quantized(weight):
        return weight.dtype.name in BITS or f"it does not read {weight.dtype.name}"
    view = abstract_view(weight)
    name = view.qvalue.dtype.name
    if name not in BITS:
        return f"it does not read {view.scheme}"
    if view.codebook is not None and (BITS[name] != 4 or view.codebook.shape[0] > _LEVELS):
        return f"it looks up to {_LEVELS} levels for codes of 4 bits, and {view.scheme} is another"
    return BITS[name] != 4 or view.qvalue.shape[1] % 2 == 0 or "two codes of different rows share a byte"


def few_rows_product(x: Any, weight: Any) -> jax.Array:
    """Computes x[..., k] @ weight[k, n] as float32[rows, n], with either operand possibly quantized.

    Has no gradient.
    """
    view = weight.__stack_qview__() if is_quantized(weight) else None
    # With one zero point per column, or integer inputs, they are subtracted from the finished sums.
    if view is not None and view.zero_point is not None and (is_quantized(x) or len(view.scale) == 1):
        of_codes = few_rows_product(x, QuantizedView(dataclasses.replace(view, zero_point=None)))
        return of_codes - _product_of_zero_points(x, view)
    if is_quantized(x):
        if view is not None and _has_integer_dot(x.__stack_qview__(), view):
            return _integer_product(x.__stack_qview__(), view)
        x = dequantized(x, jnp.float32)
    rows = x.reshape(-1, x.shape[-1])
    return _plain_product(rows, weight) if view is None else _product_of_codes(rows, view)


def _product_of_codes(rows: jax.Array, view: QView) -> jax.Array:
    # With one scale per column, the finished sums are scaled.
    if len(rows) == len(view.scale) == 1 and view.qvalue.dtype == jnp.int8:
        part = _part_rows(view.qvalue, 2 * _PART_ROWS)
        if part % STREAMS == 0:
            return _streamed(rows.astype(jnp.float32), view.qvalue, part) * _column_scales(view, 1)
    tiles, zero_point = len(view.scale), view.zero_point
    product = Product(
        len(rows),
        view.qvalue.dtype.name,
        scaled=True,
        has_codebook=view.codebook is not None,
        has_zero_point=zero_point is not None,
    )
    rows = rows.astype(jnp.float32)
    shifts = [] if zero_point is None else [_of_columns(zero_point, view, tiles), _sums_of_tiles(rows, tiles)]
    # A code beyond the last level counts as the last, as in `linear.codes`.
    levels = [] if view.codebook is None else [jnp.pad(view.codebook, (0, _LEVELS - len(view.codebook)), mode="edge")]
    return _call(product, rows, view.qvalue, _column_scales(view, tiles), *shifts, *levels)


def _product_of_zero_points(x: Any, weight: QView) -> jax.Array:
    """Returns the product of `x` with the weight's zero points times their scales, float32[rows, n].

    They are constant within a tile, so it needs one sum of `x` per tile.
    """
    assert weight.zero_point is not None
    tiles = len(weight.scale)
    rows = dequantized(x, jnp.float32) if is_quantized(x) else x.astype(jnp.float32)
    sums = _sums_of_tiles(rows, tiles)
    offsets = weight.zero_point.astype(jnp.float32) * weight.scale.astype(jnp.float32)
    product = jnp.dot(sums, offsets, precision=lax.Precision.HIGHEST)
    return jnp.repeat(product, weight.qvalue.shape[1] // product.shape[1], axis=1)


def _sums_of_tiles(x: jax.Array, tiles: int) -> jax.Array:
    """Returns the sums of each row over each tile, float32[rows, tiles]."""
    return jnp.sum(x.reshape(-1, tiles, x.shape[-1] // tiles), axis=2)


def _plain_product(rows: jax.Array, weight: jax.Array) -> jax.Array:
    kind = "bfloat16" if _has_bf16_dot(rows, weight) else "float32"
    part = _part_rows(weight, _PART_ROWS)
    # Every stream reads an equal number of a part's rows.
    if len(rows) <= _MAX_STREAMED_ROWS[kind] and part % STREAMS == 0:
        return _streamed(rows.astype(kind), weight, part)
    return _call(Product(len(rows), weight.dtype.name, kind), rows.astype(kind), weight)


def _part_rows(weight: jax.Array, limit: int) -> int:
    """Returns the number of weight rows per part: equal parts, large for wide weights to add few sums."""
    depth, columns = weight.shape
    return math.gcd(depth, limit if columns <= SEGMENT_COLUMNS else 4 * _PART_ROWS)


def _streamed(rows: jax.Array, weight: jax.Array, part: int) -> jax.Array:
    depth, columns = weight.shape
    kind: Any = rows.dtype.name
    product = StreamedProduct(len(rows), weight.dtype.name, kind)
    sums = jax.ShapeDtypeStruct((depth // part, len(rows), columns), jnp.int32 if kind == "int8" else jnp.float32)
    results = [jax.ShapeDtypeStruct(sums.shape[1:], jnp.float32), sums]
    build = functools.partial(streamed_module, product)
    return host.kernel_call(product.name, build, results, rows, weight, flops=2 * rows.size * columns)[0]


def _call(product: Product, x: jax.Array, weight: jax.Array, *more: jax.Array) -> jax.Array:
    if BITS[product.weight] == 4:
        # stack-quant stores uint4 and fp4 codes as int4. XLA converts between 4-bit types one element at a time, but a
        # bitcast there and back is free.
        weight = lax.bitcast_convert_type(weight, jnp.int4)
    result = jax.ShapeDtypeStruct((product.rows, weight.shape[1]), jnp.float32)
    build = functools.partial(product_module, product)
    return host.kernel_call(product.name, build, result, x, weight, *more, flops=2 * x.size * weight.shape[1])


def _shape(array: Any) -> tuple[int, ...]:
    return abstract_view(array).qvalue.shape if is_quantized(array) else array.shape


def _has_bf16_dot(rows: jax.Array, weight: jax.Array) -> bool:
    processor = host.this_processor()
    is_bf16 = rows.dtype == weight.dtype == jnp.bfloat16
    return is_bf16 and rows.shape[1] % 2 == 0 and processor is not None and processor.has_bf16_dot


def _has_integer_dot(x: QView, weight: QView) -> bool:
    processor = host.this_processor()
    both_int8 = x.qvalue.dtype == weight.qvalue.dtype == jnp.int8 and x.codebook is None and x.zero_point is None
    depth = weight.qvalue.shape[0] // _tiles(x, weight)
    rows = math.prod(x.qvalue.shape[:-1])
    is_faster = _tiles(x, weight) == 1 or rows >= _MIN_ROWS_OF_TILES
    fits = depth % 4 == 0 and depth <= _MAX_INTEGER_DEPTH
    return both_int8 and fits and is_faster and processor is not None and processor.has_int8_dot


def _integer_product(x: QView, weight: QView) -> jax.Array:
    tiles = _tiles(x, weight)
    codes, scale, _ = rows_of(x)
    max_rows = 1 if weight.qvalue.size < _STREAMED_BYTES else _MAX_STREAMED_ROWS["int8"]
    part = _part_rows(weight.qvalue, 2 * _PART_ROWS)
    if tiles == 1 and len(codes) <= max_rows and part % STREAMS == 0:
        return _streamed(codes, weight.qvalue, part) * (scale * _column_scales(weight, 1))
    scale = jnp.repeat(scale, tiles // scale.shape[1], axis=1)
    product = Product(len(codes), "int8", "int8", scaled=True)
    return _call(product, codes, weight.qvalue, _column_scales(weight, tiles), scale)


def _tiles(x: QView, weight: QView) -> int:
    return math.lcm(x.scale.shape[-1], weight.scale.shape[0])


def _column_scales(weight: QView, tiles: int) -> jax.Array:
    return _of_columns(weight.scale, weight, tiles)


def _of_columns(numbers: jax.Array, weight: QView, tiles: int) -> jax.Array:
    """Returns float32[tiles, n]: each number repeated over the columns and the tiles that it covers."""
    numbers, columns = numbers.astype(jnp.float32), weight.qvalue.shape[1]
    for axis, size in enumerate((tiles, columns)):
        if numbers.shape[axis] != size:
            numbers = jnp.repeat(numbers, size // numbers.shape[axis], axis=axis)
    return numbers


def _linear(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any) -> jax.Array:
    if not is_quantized(x) and math.prod(x.shape[:-1]) > _MAX_ROWS:
        return _few_columns_product(x, weight).astype(preferred_dtype)
    result = few_rows_product(x, weight)
    if bias is not None:
        result = result + bias.astype(jnp.float32)
    return result.astype(preferred_dtype).reshape(*_shape(x)[:-1], result.shape[1])


JIT_X86 = OpImplementation(
    op="linear",
    name="jit_x86",
    forward=forward_only(_linear),
    platforms=("cpu",),
    supports=_supports,
    is_opaque=True,
    exports=False,
    priority=2,
)
