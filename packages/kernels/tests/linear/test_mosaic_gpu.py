"""Hopper's quantized product for few rows, interpreted, and compiled for GPUs that are not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.chips.targets import Target, use_target
from stack_core.testing import OpCheck, Quantized, accelerator_checks, first_call
from stack_kernels.laboratory.interpreted import on_hopper
from stack_kernels.linear.mosaic_gpu import MOSAIC_GPU, SplitTile, mosaic_gpu

H100 = registries.chips["h100"]
CODES = {"int8": 128, "int4": 8}


def weight(codes: str, d_in: int, d_out: int, tiles: int) -> Quantized:
    rng = np.random.default_rng(0)
    values = rng.integers(-CODES[codes], CODES[codes], size=(d_in, d_out)).astype(jnp.dtype(codes))
    return jax.tree.map(jnp.asarray, Quantized(values, rng.uniform(0.01, 0.02, (tiles, d_out)).astype(np.float32)))


@pytest.mark.covering
@pytest.mark.gpu_aot  # its device is one that is not there
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs jax 0.11: before, Pallas cannot interpret it")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tiles", [1, 4])
@pytest.mark.parametrize("codes", sorted(CODES))
@pytest.mark.parametrize("rows", [1, 21, 64])
def test_it_is_the_product_with_what_the_codes_stand_for(rows: int, codes: str, tiles: int, dtype: str) -> None:
    """In every row, over several tiles and parts of d_in; the sum is fp32's."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, 512)), dtype)
    quantized, bias = weight(codes, 512, 192, tiles), jnp.linspace(-1, 1, 192).astype(dtype)
    interpreted = mosaic_gpu(interpret=plgpu.InterpretGPUParams())
    options = {"bias": bias, "preferred_dtype": "float32", "implementation": interpreted}
    with use_chip(H100), on_hopper():
        found = jax.jit(lambda x, quantized: ops.linear(x, quantized, **options))(x, quantized)
    view = quantized.__stack_qview__()
    decoded = np.asarray(view.qvalue, np.float64) * np.repeat(np.asarray(view.scale, np.float64), 512 // tiles, axis=0)
    if tiles > 1:  # one scale a column multiplies the sum, and nothing is rounded
        decoded = np.asarray(jnp.asarray(decoded, jnp.float32).astype(dtype), np.float64)
    exact = np.asarray(x, np.float64) @ decoded + np.asarray(bias, np.float64)
    np.testing.assert_allclose(found, exact, atol=2e-6 * np.abs(exact).max(), rtol=0)


@pytest.mark.slow
@pytest.mark.gpu_aot
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs jax 0.11: before, Pallas cannot interpret it")
@pytest.mark.parametrize("check", accelerator_checks("linear"), ids=str)
def test_contract_in_poisoned_memory(check: OpCheck) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    with use_chip(H100), on_hopper():
        check.isolated(mosaic_gpu(interpret=plgpu.InterpretGPUParams(uninitialized_memory="nan")))


@pytest.mark.parametrize(
    ("rows", "codes", "sizes", "chip", "reason"),
    [
        (65, "int8", (512, 256, 1), "h100", "it is for 64 rows or fewer, not 65"),
        (4, "int8", (500, 256, 1), "h200", "d_in=500 and d_out=256 are not multiples of 64 and 64"),
        (4, "int4", (512, 256, 16), "h100", "codes that share a scale are the whole of d_in, or a multiple of 64"),
        (4, "int8", (512, 256, 1), "b200", "it is for h100 and h200, not b200"),
    ],
)
def test_what_it_cannot_take_is_refused(rows: int, codes: str, sizes: tuple[int, ...], chip: str, reason: str) -> None:
    x = jax.ShapeDtypeStruct((rows, sizes[0]), jnp.bfloat16)
    structs = jax.eval_shape(lambda: weight(codes, *sizes))
    (call,) = ops.explain(ops.linear, x, structs, chip=registries.chips[chip])
    assert reason in str(dict(call.forward.refused)["mosaic_gpu"])


def test_parts_give_each_core_a_block() -> None:
    x = jax.ShapeDtypeStruct((1, 4096), jnp.bfloat16)
    structs = jax.eval_shape(lambda: weight("int8", 4096, 4096, 1))
    call = first_call(ops.linear, x, structs)
    assert next(iter(MOSAIC_GPU.space(call, H100))) == SplitTile(64, 64, 4)


@pytest.mark.gpu_aot
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("tiles", [1, 32])
@pytest.mark.parametrize("codes", sorted(CODES))
@pytest.mark.parametrize("target", ["h100:1x1x1", "h200:1x1x1"])
def test_it_compiles(target: str, codes: str, tiles: int, rows: int) -> None:
    sharding = jax.sharding.SingleDeviceSharding(Target(target).devices[0])
    place = lambda struct: jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)
    x = place(jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16))
    quantized = jax.tree.map(place, jax.eval_shape(lambda: weight(codes, 4096, 1536, tiles)))
    with use_target(Target(target)):
        call = lambda x, quantized: ops.linear(x, quantized, implementation=MOSAIC_GPU)
        compiled = jax.jit(call).lower(x, quantized).compile()
    assert "mosaic_gpu" in compiled.as_text()
