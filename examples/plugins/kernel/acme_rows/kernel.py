"""The root mean square norm in Pallas, one tile of rows at a time: compiled on TPUs, interpreted on CPUs."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from stack_core.chips import target_chip
from stack_core.ops.building import as_backward
from stack_kernels import implementation, untyped


@dataclass(frozen=True)
class Tile:
    rows: int


def supports(call, chip, config):
    axis, kind = call.options["axis"], call.options["kind"]
    others = any(call.arrays[name] is not None for name in ("offset", "residual"))
    if kind != "rms" or axis != -1 or others:
        return "computes only rms norms of the last axis, from x and scale"
    known = call.direction == "forward" or "inverse_rms" in call.residuals
    return known or f"{call.forward} does not return the residual inverse_rms"


@as_backward
def backward(call, *, config):
    x, scale = call.arrays["x"], call.arrays["scale"]

    def kernel(x, cotangent, inverse, factor, dx, dfactor):
        place = pl.program_id(0) * config.rows + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        is_row = place < rows  # the last tile has arbitrary values after the last row
        normed = jnp.where(is_row, x[...].astype(jnp.float32) * inverse[...], 0)
        cotangent = jnp.where(is_row, cotangent[...].astype(jnp.float32), 0)
        scaled = cotangent * factor[...]
        centred = scaled - normed * jnp.mean(scaled * normed, axis=-1, keepdims=True)
        dx[...] = (inverse[...] * centred).astype(dx.dtype)
        dfactor[...] = jnp.sum(cotangent * normed, axis=0, keepdims=True)

    rows, size = x.size // x.shape[-1], x.shape[-1]
    by_row = [array.reshape(rows, -1) for array in (x, call.cotangents, call.residuals["inverse_rms"])]
    outs = [((rows, size), x.dtype), ((pl.cdiv(rows, config.rows), 1, size), jnp.float32)]
    dx, parts = on_tiles(kernel, config, by_row, factor_of(scale, call.options["scale_offset"], size), outs)
    return {"x": dx.reshape(x.shape), "scale": None if scale is None else jnp.sum(parts, axis=(0, 1))}


@implementation(
    "norm",
    name="acme_rows",
    configs=(Tile(32), Tile(8)),
    supports=supports,
    backward=backward,
    residuals=("inverse_rms",),
    platforms=("cpu", "tpu"),
    priority=-1,
)
def acme_rows(x, scale, *, offset, kind, epsilon, scale_offset, residual, axis, requested, config):
    def kernel(x, factor, y, inverse):
        wide = x[...].astype(jnp.float32)
        inverse[...] = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
        y[...] = (wide * inverse[...] * factor[...]).astype(y.dtype)

    rows, size = x.size // x.shape[-1], x.shape[-1]
    outs = [((rows, size), x.dtype), ((rows, 1), jnp.float32)]
    y, inverse = on_tiles(kernel, config, [x.reshape(rows, size)], factor_of(scale, scale_offset, size), outs)
    return y.reshape(x.shape), {"inverse_rms": inverse.reshape(*x.shape[:-1], 1)}


def factor_of(scale, scale_offset, size):
    return jnp.ones((1, size)) if scale is None else (scale.astype(jnp.float32) + scale_offset)[None]


def on_tiles(kernel, config, by_row, factor, outs):
    """Runs the kernel on one tile of rows at a time. Sums over the rows of a tile have a leading axis of tiles."""

    def spec(shape):
        by_tile = pl.BlockSpec((None, 1, shape[-1]), lambda i: (i, 0, 0))
        return by_tile if len(shape) == 3 else pl.BlockSpec((config.rows, shape[-1]), lambda i: (i, 0))

    call = pl.pallas_call(
        kernel,
        grid=pl.cdiv(len(by_row[0]), config.rows),
        in_specs=[*(spec(array.shape) for array in by_row), pl.BlockSpec(factor.shape, lambda i: (0, 0))],
        out_specs=[spec(shape) for shape, _ in outs],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outs],
        interpret=target_chip().kind == "cpu",
    )
    return untyped(call, *by_row, factor)  # inside jax.shard_map, results vary over the same mesh axes as the operands
