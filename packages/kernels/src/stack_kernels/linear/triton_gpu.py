"""`linear` on GPUs with a quantized weight and few rows: codes are decoded in registers just before the product.

XLA first converts the weight: its program for an H100, 4 rows and int8 codes of 4,096 x 14,336 (56 MiB) writes
and reads a bfloat16 copy of 112 MiB. This kernel reads the codes once. If d_out has too few columns to keep the GPU
busy, d_in is divided into parts, and their fp32 sums are added afterwards.

Like `paged_attention/triton_gpu`, the kernel is written in Pallas and compiled by the Triton inside jaxlib. It was
interpreted and compiled, but has not run on a GPU.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_core.abi.ops import OpCall, OpImplementation, QView
from stack_core.chips import Chip
from stack_core.ops.building import forward_only, is_quantized, vary_alike
from stack_kernels.mesh_types import untyped
from stack_kernels.supports import abstract_view, first_problem, is_beyond, only_weight_is_quantized

__all__ = ["TRITON_GPU", "CodeTile", "first_tile", "quantized_rows", "reasons_against", "tiles_of", "triton_gpu"]

_DTYPES = ("bfloat16", "float16")
_CODES = ("int8", "uint8", "int4")  # differences of two codes and zero points of 8 bits are exact in bfloat16
_MAX_ROWS = 64
_LEAST_ROWS = 16  # in a tensor-core product
_DEPTHS = (128, 64, 32)
_WIDTHS = (128, 64)
_PARTS = (1, 2, 4, 8, 16)
_PROGRAMS = 264  # two for each core of an H100


@dataclass(frozen=True)
class CodeTile:
    """Division of a weight.

    Attributes:
      d_in: rows of the weight per iteration.
      d_out: columns of the weight per program.
      parts: number of programs that share the rows of the weight.
      warps: number of warps per program.
      stages: number of iterations whose codes are in flight.
    """

    d_in: int
    d_out: int
    parts: int
    warps: int = 4
    stages: int = 4


def triton_gpu(*, interpret: bool = False) -> OpImplementation:
    """Builds the implementation.

    Args:
      interpret: True interprets the kernel on any device.
    """
    return OpImplementation(
        "linear",
        "triton_gpu",
        forward_only(lambda **call: _linear(**call, interpret=interpret)),
        platforms=("gpu",),
        supports=_supports,
        default=lambda call, chip: first_tile(call.arrays["weight"]),
        space=lambda call, chip: tiles_of(call.arrays["weight"]),
        is_opaque=True,
    )


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    if (refusal := only_weight_is_quantized(call)) is not True:
        return refusal
    weight = call.arrays["weight"]
    problems = reasons_against(call.arrays["x"], weight)
    return first_problem({**problems, f"{config} does not fit the call": is_beyond(config, tiles_of(weight))})


def reasons_against(x: Any, weight: Any) -> dict[str, bool]:
    """Returns whether each reason applies against rows `x` times a quantized weight [d_in, d_out]."""
    view = abstract_view(weight)
    (d_in, d_out), rows = view.qvalue.shape, x.size // max(x.shape[-1], 1)
    return {
        f"it takes {' or '.join(_DTYPES)}, not {x.dtype.name}": x.dtype.name not in _DTYPES,
        f"codes are {view.qvalue.dtype.name}, not {', '.join(_CODES)}": view.qvalue.dtype.name not in _CODES,
        "it takes no codebook": view.codebook is not None,
        f"it is for {_MAX_ROWS} rows or fewer, not {rows}": rows > _MAX_ROWS,
        "a weight has 2**31 codes or more": d_in * d_out >= 2**31,
        f"d_out={d_out} is not a multiple of {_WIDTHS[-1]}": d_out % _WIDTHS[-1] != 0 or d_in * d_out == 0,
        f"codes of a column that share a scale are a multiple of {_DEPTHS[-1]}": not any(tiles_of(weight)),
    }


def first_tile(weight: Any) -> CodeTile | None:
    """Returns the default tile of a quantized weight, or None if no tile divides it."""
    return next(tiles_of(weight), None)


def tiles_of(weight: Any) -> Iterator[CodeTile]:
    """Yields tiles that divide a quantized weight: the fewest parts that keep a GPU busy, then large tiles."""
    if not is_quantized(weight):
        return
    view = abstract_view(weight)
    if view.qvalue.ndim != 2 or 0 in view.qvalue.shape:
        return
    (d_in, d_out), shared = view.qvalue.shape, view.qvalue.shape[0] // view.scale.shape[0]
    sizes = [
        (depth, width, parts)
        for depth in _DEPTHS
        for width in _WIDTHS
        for parts in _PARTS
        if shared % depth == 0 and d_in % (depth * parts) == 0 and d_out % width == 0
    ]
    sizes.sort(key=lambda size: (max(_PROGRAMS - d_out // size[1] * size[2], 0), size[2], -size[1], -size[0]))
    for warps, stages in ((4, 4), (8, 3), (4, 2)):
        yield from (CodeTile(*size, warps, stages) for size in sizes)


def _linear(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any, config: CodeTile, interpret: bool) -> jax.Array:
    rows, weight = vary_alike(x.reshape(-1, x.shape[-1]), weight)
    result = quantized_rows(rows, weight.__stack_qview__(), config, interpret=interpret)
    result = result if bias is None else result + bias.astype(jnp.float32)
    return result.astype(preferred_dtype).reshape(*x.shape[:-1], result.shape[-1])


def quantized_rows(rows: Any, view: QView, config: CodeTile, *, interpret: bool) -> jax.Array:
    """Computes x W in float32 for rows x[rows, d_in] and the quantized W[d_in, d_out] of a view."""
    d_out = view.qvalue.shape[1]
    # [tiles, d_out], of which a program reads a row at a time.
    scales = [
        jnp.repeat(each.astype(jnp.float32), d_out // each.shape[1], axis=1)
        for each in (view.scale, view.zero_point)
        if each is not None
    ]
    parts = untyped(functools.partial(_multiply, config=config, interpret=interpret), rows, view.qvalue, *scales)
    return jnp.sum(parts, axis=0)


def _multiply(rows: Any, codes: Any, *scales: Any, config: CodeTile, interpret: bool) -> jax.Array:
    """Returns the products with each part of d_in, float32[parts, rows, d_out]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    (d_in, d_out), (count, _) = codes.shape, rows.shape
    return pl.pallas_call(
        functools.partial(_kernel, config=config, steps=d_in // config.d_in // config.parts),
        out_shape=jax.ShapeDtypeStruct((config.parts, count, d_out), jnp.float32),
        grid=(d_out // config.d_out, config.parts),
        compiler_params=plgpu.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="stack_quantized_rows",
    )(rows, codes, *scales)


def _kernel(rows: Any, codes: Any, scale: Any, *rest: Any, config: CodeTile, steps: int) -> None:
    """Multiplies the rows by one block of the weight, `config.d_out` columns of one part."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    *zero_point, output = rest
    (count, d_in), part = rows.shape, pl.program_id(1)
    columns = pl.ds(pl.program_id(0) * config.d_out, config.d_out)
    # Rows after the last one are padding, which the tensor cores need.
    row = jnp.arange(max(_LEAST_ROWS, 1 << (count - 1).bit_length()))
    is_row, feature = row < count, jnp.arange(config.d_in)
    shared = d_in // scale.shape[0]

    def add(number: Any, total: Any) -> Any:
        place = (part * steps + number) * config.d_in
        mask = lax.broadcast_in_dim(is_row, (row.size, config.d_in), (0,))
        left = plgpu.load(rows.at[row[:, None], (place + feature)[None, :]], mask=mask, other=0.0)
        values = codes[pl.ds(place, config.d_in), columns].astype(jnp.float32)
        for each in zero_point:
            values = values - each[place // shared, columns][None, :]
        product = lax.dot_general(
            left, values.astype(left.dtype), (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return total + product * scale[place // shared, columns][None, :]

    total = lax.fori_loop(0, steps, add, jnp.zeros((row.size, config.d_out), jnp.float32))
    column = pl.program_id(0) * config.d_out + jnp.arange(config.d_out)
    mask = lax.broadcast_in_dim(is_row, total.shape, (0,))
    plgpu.store(output.at[part, row[:, None], column[None, :]], total, mask=mask)


TRITON_GPU = triton_gpu()
