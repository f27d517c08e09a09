"""`linear` on TPUs with a quantized weight: codes are decoded in VMEM, tile by tile, just before the product.

If many rows need the weight, XLA writes the decoded weight to memory, at two to four times the traffic of the codes.
The gradient of x multiplies by the transpose in the same way. XLA computes products of two quantized operands.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from stack_core.abi.ops import OWN, OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import contract, dequantize, differentiated, vary_alike
from stack_kernels.lazy_pallas import pl, pltpu
from stack_kernels.mesh_types import untyped
from stack_kernels.supports import abstract_view, first_problem, is_beyond, only_weight_is_quantized

__all__ = ["MOSAIC_TPU", "ProductTile", "mosaic_tpu"]

_DTYPES = ("bfloat16", "float32")
_CODES = ("int8", "int4", "uint4", "float8_e4m3fn", "float8_e5m2")
_MAX_LEVELS = 16  # each level costs a comparison and a select per code
_SUBLANES = 32  # rows of an 8-bit tile; scales are repeated over full ones
_ROWS = (512, 256, 128, 64, 32, 16)
_WIDTHS = (2048, 1024, 512, 256, 128)
_LONGEST = 4096  # longest axis taken unsplit if no width divides it
_VMEM_BYTES = 12 * 2**20  # of the default 16 MiB per kernel on the smallest chip


@dataclass(frozen=True)
class ProductTile:
    """Tile sizes along rows, d_in and d_out."""

    rows: int
    d_in: int
    d_out: int


@dataclass(frozen=True)
class _Weight:
    """A quantized weight in the form that the kernel reads.

    Attributes:
      codes: [d_in, d_out].
      scale: float32[tiles, d_out].
      levels: float32[levels] indexed by the codes, or None without a codebook.
    """

    codes: Any
    scale: Any
    levels: Any

    @classmethod
    def of(cls, weight: Any) -> "_Weight":
        view = weight.__stack_qview__()
        (tiles, columns), d_out = view.scale.shape, view.qvalue.shape[1]
        scale = jnp.repeat(view.scale.astype(jnp.float32), d_out // columns, axis=1)
        return cls(view.qvalue, scale.reshape(tiles, d_out), view.codebook)


def mosaic_tpu(*, interpret: Any = False) -> OpImplementation:
    """Builds the implementation.

    Args:
      interpret: True, or `pltpu.InterpretParams`, interprets the kernel on any device.
    """
    forward, backward = differentiated(lambda requested, **call: (_linear(**call, interpret=interpret), {}))
    return OpImplementation(
        "linear",
        "mosaic_tpu",
        forward,
        backward,
        platforms=("tpu",),
        supports=_supports,
        default=lambda call, chip: next(_space(call, chip), None),
        space=_space,
        residuals=(OWN,),
        is_opaque=True,
    )


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    x, weight = call.arrays["x"], call.arrays["weight"]
    if (refusal := only_weight_is_quantized(call)) is not True:
        return refusal
    view = abstract_view(weight)
    (d_in, d_out), tiles = view.qvalue.shape, view.scale.shape[0]
    problems = {
        f"it takes {' or '.join(_DTYPES)}, not {x.dtype.name}": x.dtype.name not in _DTYPES,
        f"codes are {view.qvalue.dtype.name}, not {', '.join(_CODES)}": view.qvalue.dtype.name not in _CODES,
        "it takes no zero point": view.zero_point is not None,
        f"it takes codebooks of at most {_MAX_LEVELS} levels": view.codebook is not None
        and view.codebook.shape[0] > _MAX_LEVELS,
        f"codes that share a scale are the whole of d_in, or a multiple of {_SUBLANES}": tiles > 1
        and d_in % (_SUBLANES * tiles) != 0,
        "Mosaic does not sum 16-bit numbers over an axis of length one": d_in == 1 and x.dtype.itemsize == 2,
    }
    if not any(problems.values()):
        problems[f"no tile of {d_in} x {d_out} fits into VMEM"] = not list(_space(call, chip))
        problems[f"{config} does not fit the call"] = is_beyond(config, _space(call, chip))
    return first_problem(problems)


def _space(call: OpCall, chip: Chip) -> Iterator[ProductTile]:
    """Yields tiles that divide the weight and fit into VMEM with double buffering.

    Large and square tiles come first.
    """
    x, weight = call.arrays["x"], call.arrays["weight"]
    if only_weight_is_quantized(call) is not True:
        return
    view = abstract_view(weight)
    (d_in, d_out), tiles = view.qvalue.shape, view.scale.shape[0]
    rows, shared = x.size // max(d_in, 1), d_in // tiles
    found = [
        ProductTile(of_rows, of_in, of_out)
        for of_rows in _ROWS
        if of_rows < 2 * rows or of_rows == _ROWS[-1]
        for of_in in _widths(d_in)
        if tiles == 1 or of_in % shared == 0
        for of_out in _widths(d_out)
        if _vmem_bytes(of_rows, of_in, of_out, x.dtype.itemsize) <= _VMEM_BYTES
    ]
    yield from sorted(found, key=lambda tile: (-tile.rows * tile.d_in * tile.d_out, abs(tile.d_in - tile.d_out)))


def _widths(size: int) -> list[int]:
    return [width for width in _WIDTHS if size % width == 0] or ([size] if size <= _LONGEST else [])


def _vmem_bytes(rows: int, d_in: int, d_out: int, itemsize: int) -> int:
    """Bytes of double-buffered operands and results, the accumulator of either pass, and the codes decoded to fp32."""
    return rows * (d_in + d_out) * 2 * itemsize + rows * max(d_in, d_out) * 4 + d_in * d_out * (2 + 4 + itemsize)


def _linear(
    x: Any, weight: Any, *, bias: Any, preferred_dtype: DTypeLike, config: ProductTile, interpret: Any
) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])
    dtype = jnp.dtype(preferred_dtype if bias is None else jnp.float32)
    result = _product(dtype, config, interpret, *vary_alike(rows, weight))
    result = result.reshape(*x.shape[:-1], result.shape[-1])
    return result if bias is None else (result + bias.astype(jnp.float32)).astype(preferred_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(dtype: jnp.dtype, config: ProductTile, interpret: Any, rows: Any, weight: Any) -> jax.Array:
    return _multiply(rows, _Weight.of(weight), dtype, config, transposed=False, interpret=interpret)


def _forward(dtype: jnp.dtype, config: ProductTile, interpret: Any, rows: Any, weight: Any) -> tuple[Any, Any]:
    return _product(dtype, config, interpret, rows, weight), (rows, weight)


def _backward(dtype: jnp.dtype, config: ProductTile, interpret: Any, operands: Any, cotangent: Any) -> tuple[Any, Any]:
    rows, weight = operands
    narrow = cotangent.astype(rows.dtype)
    of_rows = _multiply(narrow, _Weight.of(weight), rows.dtype, config, transposed=True, interpret=interpret)
    # XLA drops this if the scales are not trained.
    _, vjp = jax.vjp(lambda weight: contract("ni,io->no", rows, dequantize(weight, rows.dtype), dtype), weight)
    return of_rows, *vjp(cotangent)


_product.defvjp(_forward, _backward)


def _multiply(
    rows: Any, weight: _Weight, dtype: DTypeLike, config: ProductTile, *, transposed: bool, interpret: Any
) -> jax.Array:
    """Computes rows @ W or rows @ W.T, tile by tile of the weight, with fp32 accumulation over tiles."""
    (d_in, d_out), tiles = weight.codes.shape, weight.scale.shape[0]
    steps = (d_in // config.d_in, d_out // config.d_out)
    of_result, of_sum = (0, 1) if transposed else (1, 0)
    width, depth = (config.d_in, config.d_out) if transposed else (config.d_out, config.d_in)

    def place(result: Any, term: Any) -> tuple[Any, Any]:
        """Which tile of the weight a step of the grid reads, along d_in and d_out."""
        return (result, term) if transposed else (term, result)

    # Scale tiles per weight tile; `_space` offers only weight tiles for which this is an integer.
    scales = max(1, tiles // steps[0])
    in_specs = [
        pl.BlockSpec((config.rows, depth), lambda row, result, term: (row, term)),
        pl.BlockSpec((config.d_in, config.d_out), lambda row, result, term: place(result, term)),
        pl.BlockSpec(
            (None, scales, config.d_out),
            lambda row, result, term: (place(result, term)[0] if tiles > 1 else 0, 0, place(result, term)[1]),
        ),
    ]
    operands = [rows, weight.codes, weight.scale.reshape(-1, scales, d_out)]
    if weight.levels is not None:
        # Scalar memory: `_decoded` compares all codes with one level at a time.
        in_specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
        operands.append(weight.levels)
    call = pl.pallas_call(
        functools.partial(_kernel, transposed=transposed, by_column=tiles == 1, steps=steps[of_sum]),
        grid=(pl.cdiv(len(rows), config.rows), steps[of_result], steps[of_sum]),
        in_specs=in_specs,
        out_specs=pl.BlockSpec((config.rows, width), lambda row, result, term: (row, result)),
        out_shape=jax.ShapeDtypeStruct((len(rows), weight.codes.shape[of_result]), dtype),
        scratch_shapes=[pltpu.VMEM((config.rows, width), jnp.float32)],
        # The terms of a sum share the accumulator and run in order.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="stack_quantized_linear",
    )
    return untyped(call, *operands)


def _kernel(rows: Any, codes: Any, scale: Any, *refs: Any, transposed: bool, by_column: bool, steps: int) -> None:
    """Adds the product with one weight tile. A scale per column multiplies the sum, or the cotangent."""
    *levels, output, total = refs
    x, values = rows[...], _decoded(codes[...], levels)
    if not by_column:
        values = values * jnp.repeat(scale[...], values.shape[0] // scale.shape[0], axis=0)
    elif transposed:
        x = (x.astype(jnp.float32) * scale[...]).astype(x.dtype)
    contracted = (((1,), (1,)), ((), ())) if transposed else (((1,), (0,)), ((), ()))
    product = jax.lax.dot_general(x, values.astype(x.dtype), contracted, preferred_element_type=jnp.float32)
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        total[...] = product

    @pl.when(step > 0)
    def _() -> None:
        total[...] += product

    @pl.when(step == steps - 1)
    def _() -> None:
        scaled = total[...] * scale[...] if by_column and not transposed else total[...]
        output[...] = scaled.astype(output.dtype)


def _decoded(codes: Any, levels: list[Any]) -> Any:
    """Decodes codes to float32, before scaling."""
    if not levels:
        return codes.astype(jnp.float32)
    places = codes.astype(jnp.int32)
    values = jnp.full(places.shape, levels[0][0])
    for place in range(1, levels[0].shape[0]):
        values = jnp.where(places == place, levels[0][place], values)
    return values


MOSAIC_TPU = mosaic_tpu()
