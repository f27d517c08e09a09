"""The root mean square norm in Pallas, some rows at a time: compiled for GPUs and TPUs, interpreted on CPUs."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from stack_core.hardware import target_chip
from stack_kernels import implementation


@dataclass(frozen=True)
class Tile:
    rows: int


def supports(call, chip):
    x, axis, kind = call.arrays["x"], call.options["axis"], call.options["kind"]
    others = any(call.arrays[name] is not None for name in ("offset", "residual"))
    if kind != "rms" or axis != x.ndim - 1 or others or not x.size:
        return "computes rms norms of the last axis, from x and scale alone, of at least one row"
    return chip.kind == "cpu" or x.shape[-1] in (1024, 2048, 4096, 8192) or "takes 1024, 2048, 4096 or 8192 columns"


@implementation("norm", name="acme_rows", configs=(Tile(32), Tile(8)), supports=supports, priority=-1)
def acme_rows(x, scale, *, offset, kind, epsilon, scale_offset, residual, axis, config):
    def kernel(x, factor, y):
        wide = x[...].astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
        y[...] = (wide * inverse * factor[...]).astype(y.dtype)

    rows, size = x.reshape(-1, x.shape[-1]), x.shape[-1]
    factor = jnp.ones(size) if scale is None else scale.astype(jnp.float32) + scale_offset
    tile, interpret = pl.BlockSpec((config.rows, size), lambda i: (i, 0)), target_chip().kind == "cpu"
    specs = {"grid": pl.cdiv(len(rows), config.rows), "in_specs": [tile, pl.BlockSpec()], "out_specs": tile}
    call = pl.pallas_call(kernel, out_shape=jax.typeof(rows), interpret=interpret, **specs)
    return call(rows, factor[None]).reshape(x.shape)
