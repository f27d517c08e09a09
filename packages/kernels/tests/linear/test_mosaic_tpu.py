"""The TPU's quantized product, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from stack_core import ops
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.chips.targets import Target, use_target
from stack_core.testing import OpCheck, Quantized, op_checks
from stack_kernels.linear.mosaic_tpu import MOSAIC_TPU, mosaic_tpu

V6E = registries.chips["v6e"]
CODES = {"int8": 127, "int4": 7, "uint4": 15, "float8_e4m3fn": 448}


def weight(codes: str, d_in: int, d_out: int, tiles: int) -> Quantized:
    rng = np.random.default_rng(0)
    lowest = 0 if codes == "uint4" else -CODES[codes]
    values = rng.integers(lowest, CODES[codes] + 1, size=(d_in, d_out)).astype(jnp.dtype(codes))
    levels = np.sort(rng.normal(size=16)).astype(np.float32) if codes == "uint4" else None
    scale = rng.uniform(0.01, 0.02, size=(tiles, d_out)).astype(np.float32)
    return jax.tree.map(jnp.asarray, Quantized(values, scale, None, levels))


@pytest.mark.covering
@pytest.mark.parametrize(
    "check", [check for check in op_checks("linear") if check.case.name.startswith("quantized")], ids=str
)
def test_contract(check: OpCheck) -> None:
    with use_chip(V6E):
        check(mosaic_tpu(interpret=True))


@pytest.mark.covering
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tiles", [1, 8])
@pytest.mark.parametrize("codes", sorted(CODES))
@pytest.mark.parametrize("rows", [1, 21])
def test_every_type_of_codes_over_several_tiles(codes: str, tiles: int, rows: int, dtype: str) -> None:
    """Rows behind the last one hold NaN, as memory that nobody wrote may on a TPU."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, 256)), dtype)
    quantized = weight(codes, 256, 384, tiles)

    def value_and_gradient(implementation: object) -> object:
        call = lambda x: ops.linear(x, quantized, implementation=implementation)  # type: ignore[arg-type]
        y, vjp = jax.vjp(call, x)
        return y, vjp(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))

    poisoned = mosaic_tpu(interpret=pltpu.InterpretParams(uninitialized_memory="nan"))
    with use_chip(V6E):
        found = value_and_gradient(poisoned)
    exact = value_and_gradient("reference")
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    for actual, expected in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        largest = np.abs(np.asarray(expected, np.float32)).max()
        np.testing.assert_allclose(
            np.asarray(actual, np.float32), np.asarray(expected, np.float32), atol=tolerance * largest, rtol=0
        )


@pytest.mark.parametrize(
    ("d_in", "d_out", "tiles", "reason"),
    [
        (256, 384, 16, "codes that share a scale are the whole of d_in, or a multiple of 32"),
        (6007, 384, 1, "no tile of 6007 x 384 fits into VMEM"),
    ],
)
def test_what_it_cannot_tile_is_refused(d_in: int, d_out: int, tiles: int, reason: str) -> None:
    x = jax.ShapeDtypeStruct((4, d_in), jnp.bfloat16)
    structs = jax.eval_shape(lambda: weight("int8", d_in, d_out, tiles))
    (call,) = ops.explain(ops.linear, x, structs, chip=V6E)
    assert reason in str(call)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("target", ["v5e:1x1", "v5p:1x1x1", "v6e:1x1", "v7x:1x1x1"])
@pytest.mark.parametrize("rows", [1, 4000])
@pytest.mark.parametrize("codes", sorted(CODES))
def test_value_and_gradient_compile(target: str, rows: int, codes: str) -> None:
    sharding = jax.sharding.SingleDeviceSharding(Target(target).devices[0])
    place = lambda struct: jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
    x = place(jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16))
    quantized = jax.tree.map(place, jax.eval_shape(lambda: weight(codes, 4096, 1536, 1 if rows == 1 else 32)))

    def total(x: jax.Array, quantized: Quantized) -> jax.Array:
        return jnp.sum(ops.linear(x, quantized, implementation=MOSAIC_TPU).astype(jnp.float32) ** 2)

    with use_target(Target(target)):
        compiled = jax.jit(jax.value_and_grad(total)).lower(x, quantized).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 2
