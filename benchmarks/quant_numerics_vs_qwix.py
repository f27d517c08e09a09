"""Relative errors of stack-quant and Qwix, round to nearest, on one program: two residual MLP blocks, 512-2048-512.

    python benchmarks/quant_numerics_vs_qwix.py

Runs in an environment of its own, with stack-core, stack-quant and qwix; exits with status 1 if ours is the larger
error for a scheme. Means over draws of weights and inputs, which both are given alike.
"""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import qwix

from stack_quant import ArraySpec, dequantize, quantize_array

DRAWS = 5
ROUNDING = 1e-5
Map = Callable[[jax.Array], jax.Array]

# Of weights and of activations (Qwix's name, ours), and the entries of d_in that share a scale.
INT8, INT4, NF4 = ("int8", "int8"), ("int4", "int4"), ("nf4", "nf4")
FP8, MXFP8 = ("float8_e4m3fn", "fp8_e4m3"), ("mxfp8", "mxfp8")
MXFP4, NVFP4 = ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4")
SCHEMES = {
    "w8a8": (INT8, INT8, None),
    "w8": (INT8, None, None),
    "w4 t128": (INT4, None, 128),
    "w4a4 t128": (INT4, INT4, 128),
    "nf4 t128": (NF4, None, 128),
    "fp8 w": (FP8, None, None),
    "fp8 wa": (FP8, FP8, None),
    "mxfp8 w": (MXFP8, None, 32),
    "mxfp4 w": (MXFP4, None, 32),
    "nvfp4 w": (NVFP4, None, 16),
}


def theirs(name: tuple[str, str] | None, axis: int, tile: int | None) -> Map:
    if name is None:
        return lambda array: array
    qtype = name[0] if name[0] == name[1] and name[0] not in ("int8", "int4") else jnp.dtype(name[0])
    tiles = {axis: tile} if tile else {}
    return lambda array: qwix.dequantize(qwix.quantize(array, qtype, channelwise_axes=(1 - axis,), tiled_axes=tiles))


def ours(name: tuple[str, str] | None, axis: int, tile: int | None) -> Map:
    if name is None:
        return lambda array: array
    spec = ArraySpec(type=name[1], channel_axes=(1 - axis,), tiles={axis: tile} if tile else {})
    return lambda array: dequantize(quantize_array(array, spec))


def program(blocks: list[tuple[jax.Array, jax.Array]], x: jax.Array, of_weights: Map, of_activations: Map) -> jax.Array:
    for up, down in blocks:
        hidden = jax.nn.gelu(of_activations(x) @ of_weights(up))
        x = x + of_activations(hidden) @ of_weights(down)
    return x


def errors(seed: int, scheme: tuple[tuple[str, str], tuple[str, str] | None, int | None]) -> tuple[float, float]:
    weights, activations, tile = scheme
    rng = np.random.default_rng(seed)

    def drawn(rows: int, columns: int) -> jax.Array:
        return jnp.asarray(rng.normal(scale=rows**-0.5, size=(rows, columns)), jnp.float32)

    blocks, x = [(drawn(512, 2048), drawn(2048, 512)) for _ in range(2)], drawn(64, 512) * 8
    exact = program(blocks, x, lambda w: w, lambda a: a)

    def error(quantized: Callable[..., Map]) -> float:
        found = program(blocks, x, quantized(weights, 0, tile), quantized(activations, 1, tile))
        return float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))

    return error(theirs), error(ours)


def main() -> int:
    worse = False
    for name, scheme in SCHEMES.items():
        of_qwix, of_stack = np.mean([errors(seed, scheme) for seed in range(DRAWS)], axis=0)
        worse |= bool(of_stack > of_qwix * (1 + ROUNDING))
        print(f"{name:10} qwix {of_qwix:.5f}  stack {of_stack:.5f}  ratio {of_stack / of_qwix:.4f}")
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
