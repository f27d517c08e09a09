"""`norm` on TPUs: the root mean square norm of full rows, with the residual sum in the same pass.

If a product reads the result, XLA computes the sum, its mean square and the normed rows in separate fusions. This
kernel reads the operands once and writes the sum once. The backward pass reads the saved reciprocal root mean square.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import BackwardCall, as_backward
from stack_kernels.lazy_pallas import pl, pltpu
from stack_kernels.mesh_types import untyped
from stack_kernels.supports import first_problem

__all__ = ["MOSAIC_TPU", "NormTile", "mosaic_tpu"]

_DTYPES = ("bfloat16", "float32")
_ROWS = (512, 256, 128, 64, 32, 16)  # bf16 is laid out in tiles of 16 rows
_TILE_BYTES = 2**23  # of VMEM; a kernel has 16 MiB by default on the smallest chip
_ARRAYS = 5  # per row in the larger pass: two operands, two cotangents, a gradient


@dataclass(frozen=True)
class NormTile:
    """Number of rows normed at a time, a multiple of 16."""

    rows: int


def mosaic_tpu(*, interpret: Any = False) -> OpImplementation:
    """Builds the implementation.

    Args:
      interpret: True, or `pltpu.InterpretParams`, interprets the kernel on any device.
    """
    return OpImplementation(
        "norm",
        "mosaic_tpu",
        lambda **call: _forward(**call, interpret=interpret),
        functools.partial(_backward, interpret=interpret),
        platforms=("tpu",),
        supports=_supports,
        default=lambda call, chip: next(_space(call, chip), None),
        space=_space,
        residuals=("inverse_rms",),
        is_opaque=True,
    )


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    x, options = call.arrays["x"], call.options
    problems = {
        f"it computes rms norms, not {options['kind']!r}": options["kind"] != "rms",
        "it norms the last axis": options["axis"] != -1,
        "it adds no offset": call.arrays["offset"] is not None,
        f"it takes {' or '.join(_DTYPES)}, not {x.dtype.name}": x.dtype.name not in _DTYPES,
    }
    if not any(problems.values()):
        problems["16 rows do not fit into VMEM"] = not list(_space(call, chip))
        problems[f"{config} does not fit into VMEM"] = config is not None and _vmem_bytes(call, config) > _TILE_BYTES
    if call.direction == "backward":
        problems[f"{call.forward!r} hands it no inverse_rms"] = "inverse_rms" not in call.residuals
    return first_problem(problems)


def _space(call: OpCall, chip: Chip) -> Iterator[NormTile]:
    """Yields tiles that fit into VMEM with double buffering; the largest come first."""
    x = call.arrays["x"]
    rows = x.size // x.shape[-1]
    for tile in map(NormTile, _ROWS):
        if _vmem_bytes(call, tile) <= _TILE_BYTES and (tile.rows < 2 * rows or tile.rows == _ROWS[-1]):
            yield tile


def _vmem_bytes(call: OpCall, tile: NormTile) -> int:
    x = call.arrays["x"]
    of_row = 2 * _ARRAYS * x.dtype.itemsize + 3 * 4  # plus three rows in fp32 during the computation
    return tile.rows * x.shape[-1] * of_row


def _forward(
    *,
    x: Any,
    scale: Any,
    residual: Any,
    epsilon: float,
    scale_offset: float,
    requested: frozenset[str],
    config: NormTile,
    interpret: Any,
    **_: Any,
) -> tuple[Any, Mapping[str, Any]]:
    def kernel(factor: Any, *refs: Any) -> None:
        *operands, y, inverse = refs if residual is None else refs[:-1]
        total = operands[0][...] if residual is None else operands[0][...] + operands[1][...]
        if residual is not None:
            refs[-1][...] = total
        wide = total.astype(jnp.float32)
        inverse[...] = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
        y[...] = (wide * inverse[...] * factor[...]).astype(y.dtype)

    rows, size = x.size // x.shape[-1], x.shape[-1]
    operands = [array.reshape(rows, size) for array in (x, residual) if array is not None]
    out_shapes = [((rows, size), x.dtype), ((rows, 1), jnp.float32)]
    out_shapes += [] if residual is None else [((rows, size), x.dtype)]
    y, inverse, *total = _on_tiles(kernel, config, _factor(scale, scale_offset, size), operands, out_shapes, interpret)
    residuals = {"inverse_rms": inverse.reshape(*x.shape[:-1], 1)} if "inverse_rms" in requested else {}
    return (y.reshape(x.shape) if residual is None else (y.reshape(x.shape), total[0].reshape(x.shape))), residuals


@as_backward
def _backward(call: BackwardCall, *, config: NormTile, interpret: Any) -> Mapping[str, Any]:
    """Computes dh = r (g - n mean(g n)) + dsum with g = dy (s + c), n = h r, and ds = sum over rows of dy n."""
    x, has_sum = call.arrays["x"], call.arrays["residual"] is not None
    total = call.outputs[1] if has_sum else x
    of_y, *of_sum = call.cotangents if has_sum else (call.cotangents,)
    rows, size = x.size // x.shape[-1], x.shape[-1]

    def kernel(factor: Any, total: Any, of_y: Any, inverse: Any, *refs: Any) -> None:
        *of_sum, gradient, of_scale = refs
        place = pl.program_id(0) * config.rows + jax.lax.broadcasted_iota(jnp.int32, total.shape, 0)
        is_row = place < rows  # the last tile holds garbage after the last row
        normed = jnp.where(is_row, total[...].astype(jnp.float32) * inverse[...], 0)
        of_normed = jnp.where(is_row, of_y[...].astype(jnp.float32), 0)
        scaled = of_normed * factor[...]
        centred = inverse[...] * (scaled - normed * jnp.mean(scaled * normed, axis=-1, keepdims=True))
        if of_sum:
            centred = centred + of_sum[0][...].astype(jnp.float32)
        gradient[...] = centred.astype(gradient.dtype)
        of_scale[...] = jnp.sum(of_normed * normed, axis=0, keepdims=True)

    operands = [array.reshape(rows, -1) for array in (total, of_y, call.residuals["inverse_rms"], *of_sum)]
    # The gradient of the scale has a row per tile, added later, because tiles may run in parallel.
    out_shapes = [((rows, size), x.dtype), ((pl.cdiv(rows, config.rows), 1, size), jnp.float32)]
    factor = _factor(call.arrays["scale"], call.options["scale_offset"], size)
    gradient, of_scale = _on_tiles(kernel, config, factor, operands, out_shapes, interpret)
    gradient = gradient.reshape(x.shape)
    return {"x": gradient, "residual": gradient, "scale": jnp.sum(of_scale, (0, 1))}


def _factor(scale: Any, scale_offset: float, size: int) -> Any:
    return jnp.ones((1, size), jnp.float32) if scale is None else (scale.astype(jnp.float32) + scale_offset)[None]


def _on_tiles(
    kernel: Callable[..., None],
    config: NormTile,
    factor: Any,
    operands: Sequence[Any],
    out_shapes: Sequence[tuple[tuple[int, ...], Any]],
    interpret: Any,
) -> Sequence[Any]:
    """Runs the kernel on tiles of rows. A result of three axes has one row per tile."""

    def spec(shape: tuple[int, ...]) -> pl.BlockSpec:
        if len(shape) == 3:
            return pl.BlockSpec((None, 1, shape[-1]), lambda tile: (tile, 0, 0))
        return pl.BlockSpec((config.rows, shape[-1]), lambda tile: (tile, 0))

    call = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(len(operands[0]), config.rows),),
        in_specs=[pl.BlockSpec(factor.shape, lambda tile: (0, 0)), *(spec(array.shape) for array in operands)],
        out_specs=[spec(shape) for shape, _ in out_shapes],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in out_shapes],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="stack_norm",
    )
    return untyped(call, factor, *operands)


MOSAIC_TPU = mosaic_tpu()
