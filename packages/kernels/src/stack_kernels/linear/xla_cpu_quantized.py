"""`linear` on CPUs with a quantized operand, each scheme in the form that is fast for its codes and its rows."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import differentiated, is_quantized, vary_alike
from stack_kernels.linear.codes import Columns, columns, dequantized, interleaved
from stack_kernels.linear.float_dot import float_dot, has_float_dot
from stack_kernels.linear.integer_dot import has_integer_dot, integer_dot
from stack_kernels.linear.product import product, total

__all__ = ["CONFIGS", "XLA_CPU_QUANTIZED", "QuantizedConfig", "quantized_product", "supports_quantized"]

_FUSED_TERMS = (8, 4)
_FEW_ROWS = 64


@dataclass(frozen=True)
class QuantizedConfig:
    """Settings that depend on the machine.

    Attributes:
      fused_rows: maximum number of rows for which weights are decoded inside the product's loop, without writing them
        to memory.
      block_bytes: size of the blocks in which weights are decoded for up to 64 rows; a block should fit the cache.
    """

    fused_rows: int
    block_bytes: int


CONFIGS = (
    QuantizedConfig(fused_rows=2, block_bytes=2**20),
    QuantizedConfig(fused_rows=0, block_bytes=2**20),
    QuantizedConfig(fused_rows=4, block_bytes=2**22),
)


def supports_quantized(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    """Checks for a quantized operand and no float64 arrays."""
    if not any(is_quantized(array) for array in call.arrays.values()):
        return "no operand is quantized"
    if any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(dict(call.arrays))):
        return "it computes in float32, and an array is float64"
    return True


def quantized_product(x: Any, weight: Any, dtype: DTypeLike, config: QuantizedConfig) -> jax.Array:
    """Computes x[..., d_in] @ weight[d_in, d_out] as `dtype`, with one or both operands quantized.

    The gradients are computed from the product of the dequantized operands.
    """
    return _product(jnp.dtype(dtype), config, *vary_alike(x, weight))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(dtype: jnp.dtype, config: QuantizedConfig, x: Any, weight: Any) -> jax.Array:
    if not is_quantized(weight):
        return _dense_product(dtype, x, weight)
    shape = (*_shape(x)[:-1], _shape(weight)[-1])
    if is_quantized(x):
        views = x.__stack_qview__(), weight.__stack_qview__()
        dot = integer_dot if has_integer_dot(*views) else float_dot if has_float_dot(*views) else None
        if dot is not None and not _is_better_fused(x, weight, config):
            return dot(views[0], weight).astype(dtype).reshape(shape)
        x = dequantized(x, jnp.float32)
    rows = x.reshape(-1, x.shape[-1])
    products = [_weight_only(rows, part, dtype, config) for part in columns(weight)]
    return interleaved(products).reshape(shape)


def _dense_product(dtype: jnp.dtype, x: Any, weight: Any) -> jax.Array:
    """Computes the product of the dequantized operands, which defines the result and all gradients."""
    floating = next((array.dtype for array in (x, weight) if not is_quantized(array)), jnp.float32)
    if is_quantized(x):
        x = dequantized(x, floating)
    rows = x.reshape(-1, x.shape[-1])
    if is_quantized(weight):
        result = interleaved([product(rows, part.dense(floating), dtype) for part in columns(weight)])
    else:
        result = product(rows, weight, dtype)
    return result.reshape(*x.shape[:-1], result.shape[-1])


def _forward(dtype: jnp.dtype, config: QuantizedConfig, x: Any, weight: Any) -> tuple[jax.Array, tuple[Any, Any]]:
    return _product(dtype, config, x, weight), (x, weight)


def _backward(
    dtype: jnp.dtype, config: QuantizedConfig, operands: tuple[Any, Any], cotangent: jax.Array
) -> tuple[Any, Any]:
    # XLA drops unused results: the product, and the gradient of a weight whose scales are not trained.
    _, vjp = jax.vjp(functools.partial(_dense_product, dtype), *operands)
    return vjp(cotangent)


_product.defvjp(_forward, _backward)


def _shape(array: Any) -> tuple[int, ...]:
    return array.__stack_qview__().qvalue.shape if is_quantized(array) else array.shape


def _is_better_fused(x: Any, weight: Any, config: QuantizedConfig) -> bool:
    """Checks whether a product of two quantized operands is faster in floats: few rows, in one pass over the codes."""
    *batch, d_in = _shape(x)
    tiles = weight.__stack_qview__().scale.shape[0]
    return math.prod(batch) <= config.fused_rows and _fused_terms(d_in // tiles) > 0


def _weight_only(rows: jax.Array, part: Columns, dtype: jnp.dtype, config: QuantizedConfig) -> jax.Array:
    terms = _fused_terms(part.stored.shape[0] // part.scale.shape[0])
    if 0 < rows.shape[0] <= config.fused_rows and terms:
        return _fused(rows.astype(jnp.float32), part, terms).astype(dtype)
    blocks = _blocks(part, rows, config)
    if blocks > 1:
        return _in_blocks(rows, part, blocks).astype(dtype)
    return product(rows, part.dense(rows.dtype), dtype)


def _fused_terms(tile_rows: int) -> int:
    """Returns how many of a tile's entries along d_in the fused loop adds in one pass.

    0 if no count divides the tile.
    """
    return next((terms for terms in _FUSED_TERMS if tile_rows % terms == 0), 0)


def _fused(rows: jax.Array, part: Columns, terms: int) -> jax.Array:
    """Sums `terms` products in one pass over the codes, then the rest of the sum, then applies the scales.

    The terms of a sum are as far apart as the tile allows: codes are read in `terms` long contiguous streams, which
    processors prefetch. For 512 x 1408 int8 read from memory, a row took 39 us, and 66 us with neighboring terms. More
    than 8 streams, often a multiple of 4096 bytes apart, would evict each other from the L1 cache.
    """
    tiles, width = len(part.scale), part.stored.shape[1]
    # Without the barrier, the rows are recomputed in the loop, which XLA of jax 0.10 then does not vectorize.
    x = lax.optimization_barrier(rows.T).reshape(tiles, terms, -1, len(rows), 1)
    stored = part.stored.reshape(tiles, terms, -1, 1, width)
    sums = 0.0
    for term in range(terms):
        sums = sums + x[:, term] * part.decode(stored[:, term]).astype(jnp.float32)
    sums = lax.optimization_barrier(sums)  # Fused with the second sum, it would loop along d_in.
    of_tiles = total(sums, 1)
    if part.zero_point is not None:
        of_tiles = of_tiles - jnp.sum(x, axis=(1, 2)) * part.zero_point.astype(jnp.float32)[:, None]
    return total(of_tiles * part.scale[:, None], 0)


def _blocks(part: Columns, rows: jax.Array, config: QuantizedConfig) -> int:
    """Returns the number of blocks of d_in that are decoded in turn: a multiple or a divisor of the tiles."""
    d_in, width = part.stored.shape
    tiles = part.scale.shape[0]
    wanted = d_in * width * rows.dtype.itemsize // config.block_bytes
    if rows.shape[0] > _FEW_ROWS or wanted < 2:
        return 1
    # A power of two that divides d_in into equal blocks.
    blocks = math.gcd(d_in, 2 ** (wanted.bit_length() - 1))
    return blocks if blocks % tiles == 0 or tiles % blocks == 0 else 1


def _in_blocks(rows: jax.Array, part: Columns, blocks: int) -> jax.Array:
    width = part.stored.shape[1]

    def by_block(values: jax.Array | None) -> jax.Array | None:
        if values is None:
            return None
        if len(values) < blocks:
            values = jnp.repeat(values, blocks // len(values), axis=0)
        return values.reshape(blocks, -1, values.shape[1])

    def add_block(total: jax.Array, block: Any) -> tuple[jax.Array, None]:
        x, stored, scale, zero_point = block
        dense = Columns(stored, part.decode, scale, zero_point).dense(x.dtype)
        return total + product(x, dense, jnp.float32), None

    x = rows.reshape(len(rows), blocks, -1).swapaxes(0, 1)
    xs = (x, by_block(part.stored), by_block(part.scale), by_block(part.zero_point))
    total = jnp.zeros_like(rows, shape=(len(rows), width), dtype=jnp.float32)
    return lax.scan(add_block, total, xs)[0]


def _linear(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any, config: QuantizedConfig) -> jax.Array:
    if bias is None:
        return quantized_product(x, weight, preferred_dtype, config)
    result = quantized_product(x, weight, jnp.float32, config)
    return (result + bias.astype(jnp.float32)).astype(preferred_dtype)


_forward_pass, _backward_pass = differentiated(lambda requested, **call: (_linear(**call), {}))

XLA_CPU_QUANTIZED = OpImplementation(
    op="linear",
    name="xla_cpu_quantized",
    forward=_forward_pass,
    backward=_backward_pass,
    platforms=("cpu",),
    supports=supports_quantized,
    default=lambda call, chip: CONFIGS[0],
    space=lambda call, chip: CONFIGS,
)
