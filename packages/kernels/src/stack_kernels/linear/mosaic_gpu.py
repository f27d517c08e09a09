"""`linear` on Hopper with a quantized weight and few rows: codes are decoded in registers just before the product.

Such a call is bound by reading the weight, so most of the tensor cores' 64 rows may be padding. The weight is also
split along d_in, until each core of the chip has a block; the partial sums, in fp32, are added afterwards.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import forward_only, vary_alike
from stack_kernels.from_tokamax import GENERATIONS
from stack_kernels.mesh_types import untyped
from stack_kernels.supports import abstract_view, first_problem, is_beyond, only_weight_is_quantized

__all__ = ["MOSAIC_GPU", "SplitTile", "mosaic_gpu"]

_DTYPES = ("bfloat16", "float16")
_CODE_BITS = {"int8": 8, "int4": 4}
_ROWS = 64  # rows of the smallest tensor-core product
_ROW_TILE = 8  # granularity of the rows that are written
_WIDTHS = (128, 64)
_DEPTHS = (64, 128)
_PARTS = (1, 2, 4, 8, 16)
# Streaming multiprocessors of an H100 or H200 (SXM).
_CORES = 132
_STEPS = 4  # weight tiles in flight
_SHARED_BYTES = 200 * 2**10  # of the 227 KiB limit per block


@dataclasses.dataclass(frozen=True)
class SplitTile:
    """Tile sizes along d_in and d_out, and the number of parts into which d_in is split."""

    d_in: int
    d_out: int
    parts: int


def mosaic_gpu(*, interpret: Any = None) -> OpImplementation:
    """Builds the implementation.

    Args:
      interpret: `mosaic_gpu.InterpretGPUParams` of Pallas (from jax 0.11) interprets the kernel on the CPU.
    """
    return OpImplementation(
        "linear",
        "mosaic_gpu",
        forward_only(lambda **call: _linear(**call, interpret=interpret)),
        platforms=("gpu",),
        supports=_supports,
        default=lambda call, chip: next(_space(call, chip), None),
        space=_space,
        is_opaque=True,
        # Before `triton_gpu`: it is right on an H100, for 16 rows of int8 weights; neither was timed.
        priority=2,
    )


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    x, weight = call.arrays["x"], call.arrays["weight"]
    if GENERATIONS.get(chip.kind.partition("-")[0].lower()) != "sm90":
        return f"it is for h100 and h200, not {chip.kind}"
    if (refusal := only_weight_is_quantized(call)) is not True:
        return refusal
    view = abstract_view(weight)
    (d_in, d_out), tiles = view.qvalue.shape, view.scale.shape[0]
    rows = x.size // max(d_in, 1)
    problems = {
        f"it takes {' or '.join(_DTYPES)}, not {x.dtype.name}": x.dtype.name not in _DTYPES,
        f"codes are {view.qvalue.dtype.name}, not {' or '.join(_CODE_BITS)}": view.qvalue.dtype.name not in _CODE_BITS,
        "it takes no zero point": view.zero_point is not None,
        "it takes no codebook": view.codebook is not None,
        f"it is for {_ROWS} rows or fewer, not {rows}": rows > _ROWS,
        f"d_in={d_in} and d_out={d_out} are not multiples of {_DEPTHS[0]} and {_WIDTHS[-1]}": d_in % _DEPTHS[0] != 0
        or d_out % _WIDTHS[-1] != 0
        or d_in * d_out == 0,
        f"codes that share a scale are the whole of d_in, or a multiple of {_DEPTHS[0]}": tiles > 1
        and d_in % (_DEPTHS[0] * tiles) != 0,
    }
    if not any(problems.values()):
        problems["no tile fits into shared memory"] = not list(_space(call, chip))
        problems[f"{config} does not fit the call"] = is_beyond(config, _space(call, chip))
    return first_problem(problems)


def _space(call: OpCall, chip: Chip) -> Iterator[SplitTile]:
    """Yields tiles that divide the weight: the fewest parts that give each core a block, then wide, shallow tiles."""
    x, weight = call.arrays["x"], call.arrays["weight"]
    if only_weight_is_quantized(call) is not True:
        return
    view = abstract_view(weight)
    (d_in, d_out), tiles = view.qvalue.shape, view.scale.shape[0]
    shared = d_in // max(tiles, 1)
    bits = _CODE_BITS.get(view.qvalue.dtype.name, 8)
    found = [
        SplitTile(depth, width, parts)
        for depth in _DEPTHS
        for width in _WIDTHS
        for parts in _PARTS
        if d_in and d_in % (depth * parts) == 0 and d_out % width == 0 and shared % depth == 0
        if _shared_bytes(depth, width, bits, x.dtype.itemsize) <= _SHARED_BYTES
    ]

    def idle(tile: SplitTile) -> tuple[int, int, int, int]:
        blocks = d_out // tile.d_out * tile.parts
        return max(_CORES - blocks, 0), tile.parts, -tile.d_out, tile.d_in

    yield from sorted(found, key=idle)


def _shared_bytes(depth: int, width: int, bits: int, itemsize: int) -> int:
    """Returns the bytes of the tiles in flight, the decoded tile, and the result in fp32."""
    arriving = _ROWS * depth * itemsize + depth * width * bits // 8 + width * 4
    return _STEPS * arriving + depth * width * itemsize + _ROWS * width * 4


def _linear(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any, config: SplitTile, interpret: Any) -> jax.Array:
    rows, weight = vary_alike(x.reshape(-1, x.shape[-1]), weight)
    view = weight.__stack_qview__()
    (tiles, columns), d_out = view.scale.shape, view.qvalue.shape[1]
    scale = jnp.repeat(view.scale.astype(jnp.float32), d_out // columns, axis=1)
    padded = jnp.pad(rows, ((0, _ROWS - len(rows)), (0, 0)))
    parts = _multiply(padded, view.qvalue, None if tiles == 1 else scale, len(rows), config, interpret)
    result = jnp.sum(parts, axis=0)[: len(rows)]
    result = result * scale if tiles == 1 else result
    result = result if bias is None else result + bias.astype(jnp.float32)
    return result.astype(preferred_dtype).reshape(*x.shape[:-1], d_out)


def _multiply(rows: Any, codes: Any, scale: Any, used_rows: int, config: SplitTile, interpret: Any) -> jax.Array:
    """Computes the products with each part of d_in, float32[parts, rows, d_out].

    Args:
      rows: [64, d_in].
      codes: [d_in, d_out].
      scale: float32[tiles, d_out], or None to use the codes unscaled.
      used_rows: number of rows to write, rounded up to a multiple of 8.
      config: tile sizes.
      interpret: as for `mosaic_gpu`.
    """
    # Imported here, because every process that lists the implementations of `linear` imports this file.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    d_in, d_out = codes.shape
    written = -(-used_rows // _ROW_TILE) * _ROW_TILE
    steps = d_in // config.d_in // config.parts
    each = 1 if scale is None else d_in // scale.shape[0] // config.d_in  # weight tiles per scale

    def tiled(width: int, dtype: Any) -> tuple[Any, ...]:
        bits = _CODE_BITS.get(jnp.dtype(dtype).name, jnp.dtype(dtype).itemsize * 8)
        # The tensor cores read shared memory in swizzled rows of at most 128 bytes.
        swizzle = min(width * bits // 8, 128)
        return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)

    def stack_quantized_linear(*refs: Any) -> None:
        *operands, output, decoded, result = refs
        column, part = lax.axis_index("column"), lax.axis_index("part")

        def add(total: Any, _: Any, rows: Any, codes: Any, *scale: Any) -> None:
            decoded[...] = _decoded(codes[...], scale[0][0] if scale else None, decoded.dtype)
            # Makes the decoded tile visible to the tensor cores, which bypass the order of ordinary stores.
            plgpu.commit_smem()
            plgpu.wgmma(total, rows, decoded)
            # The next step overwrites the decoded tile.
            plgpu.wgmma_wait(0)

        def product(total: Any) -> Any:
            pipeline = plgpu.emit_pipeline(
                functools.partial(add, total),
                grid=(steps,),
                in_specs=specs(column, part),
                max_concurrent_steps=min(_STEPS, steps),
            )
            pipeline(*operands)
            return total[...]

        result[...] = pl.run_scoped(product, plgpu.ACC((_ROWS, config.d_out), jnp.float32))
        plgpu.commit_smem()
        place = output.at[part, :, pl.ds(column * config.d_out, config.d_out)]
        plgpu.copy_smem_to_gmem(result.at[pl.ds(0, written)], place)
        plgpu.wait_smem_to_gmem(0)

    def specs(column: Any, part: Any) -> list[Any]:
        depth, width = config.d_in, config.d_out
        found = [
            plgpu.BlockSpec((_ROWS, depth), lambda step: (0, part * steps + step), transforms=tiled(depth, rows.dtype)),
            plgpu.BlockSpec(
                (depth, width), lambda step: (part * steps + step, column), transforms=tiled(width, codes.dtype)
            ),
        ]
        if scale is not None:
            found.append(plgpu.BlockSpec((1, width), lambda step: ((part * steps + step) // each, column)))
        return found

    call = plgpu.kernel(
        stack_quantized_linear,
        out_type=jax.ShapeDtypeStruct((config.parts, written, d_out), jnp.float32),
        scratch_types=[
            plgpu.SMEM((config.d_in, config.d_out), rows.dtype, transforms=tiled(config.d_out, rows.dtype)),
            plgpu.SMEM((_ROWS, config.d_out), jnp.float32),
        ],
        grid=(d_out // config.d_out, config.parts),
        grid_names=("column", "part"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    return untyped(call, rows, codes, *(() if scale is None else (scale,)))


def _decoded(codes: Any, scale: Any, dtype: Any) -> Any:
    """Multiplies codes [d_in, d_out] by a scale per column, rounding once."""
    if scale is None:
        return codes.astype(dtype)
    return (codes.astype(jnp.float32) * lax.broadcast_in_dim(scale, codes.shape, (1,))).astype(dtype)


MOSAIC_GPU = mosaic_gpu()
