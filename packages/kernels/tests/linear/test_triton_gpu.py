"""Quantized weights times few rows on GPUs: interpreted, and compiled for GPUs that are not there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.chips.targets import Target, use_target
from stack_core.chips.wheel_compilers import use_wheel_compilers
from stack_core.testing import OpCheck, Quantized, accelerator_checks
from stack_kernels.linear.triton_gpu import CodeTile, first_tile, triton_gpu

A100 = registries.chips["a100-80gb"]
LIMITS = {"int8": (-128, 128), "uint8": (0, 256), "int4": (-8, 8)}
_QUICK = ("tiles_int4_by_tile-bfloat16", "tiles_int8_by_channel_and_bias-bfloat16")


def structs(codes: str, d_in: int, d_out: int, scales: tuple[int, int], zeros: bool = False) -> Quantized:
    scale = jax.ShapeDtypeStruct(scales, jnp.float32)
    return Quantized(jax.ShapeDtypeStruct((d_in, d_out), jnp.dtype(codes)), scale, scale if zeros else None)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=str(check), marks=() if str(check) in _QUICK else pytest.mark.slow)
        for check in accelerator_checks("linear")
    ],
)
def test_contract(check: OpCheck) -> None:
    with use_chip(A100):
        check(triton_gpu(interpret=True))


@pytest.mark.parametrize(("codes", "tile"), [("uint8", CodeTile(32, 64, 2)), ("int4", CodeTile(64, 64, 1))])
def test_zero_points_and_scales_belong_to_their_tiles(codes: str, tile: CodeTile) -> None:
    """Two tiles along d_in, and one scale for each half of the columns."""
    rng = np.random.default_rng(0)
    values = rng.integers(*LIMITS[codes], size=(128, 128)).astype(jnp.dtype(codes))
    scale, zero = rng.uniform(0.5, 1, (2, 2)).astype(np.float32), rng.integers(0, 8, (2, 2)).astype(np.float32)
    x = jnp.asarray(rng.normal(size=(5, 128)), jnp.bfloat16)
    weight = jax.tree.map(jnp.asarray, Quantized(values, scale, zero))
    kernel, bias = triton_gpu(interpret=True), jnp.linspace(-1, 1, 128, dtype=jnp.bfloat16)
    assert tile in kernel.space(ops.explain(ops.linear, x, weight, chip=A100)[0].call, A100)  # type: ignore[misc]
    options = {"weight": weight, "bias": bias, "preferred_dtype": jnp.dtype("float32"), "requested": frozenset()}
    found, _ = kernel.forward(x=x, **options, config=tile)
    wide = [np.repeat(np.repeat(each, 64, 0), 64, 1).astype(np.float64) for each in (scale, zero)]
    exact = np.asarray(x, np.float64) @ ((values.astype(np.float64) - wide[1]) * wide[0]) + np.asarray(bias, np.float64)
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-6 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("rows", "weight", "reason"),
    [
        (65, structs("int8", 128, 128, (1, 128)), "it is for 64 rows or fewer, not 65"),
        (4, structs("int8", 128, 96, (1, 96)), "d_out=96 is not a multiple of 64"),
        (4, structs("int8", 128, 128, (8, 128)), "codes of a column that share a scale are a multiple of 32"),
        (4, structs("float8_e4m3fn", 128, 128, (1, 128)), "codes are float8_e4m3fn, not int8, uint8, int4"),
    ],
)
def test_what_it_cannot_take_is_refused(rows: int, weight: Quantized, reason: str) -> None:
    x = jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16)
    (call,) = ops.explain(ops.linear, x, weight, chip=A100)
    assert dict(call.forward.refused)["triton_gpu"] == reason


def test_parts_keep_the_gpu_busy() -> None:
    assert first_tile(structs("int8", 4096, 14336, (1, 14336))) == CodeTile(128, 64, 2)
    assert first_tile(structs("int4", 4096, 1024, (128, 1024))) == CodeTile(32, 64, 16)


@pytest.mark.parametrize(
    ("chip", "product"),
    [("a100-80gb", "triton_gpu"), ("h100", "mosaic_gpu"), ("h200", "mosaic_gpu"), ("b200", "triton_gpu")],
)
def test_quantized_rows_have_a_kernel_by_default(chip: str, product: str) -> None:
    def layer(x: Any, weight: Any) -> Any:
        return ops.gated_linear_unit(ops.linear(x, weight), weight, weight)

    weight = structs("int8", 256, 256, (1, 256))
    found = ops.explain(layer, jax.ShapeDtypeStruct((4, 256), jnp.bfloat16), weight, chip=registries.chips[chip])
    assert [call.forward.implementation.name for call in found] == [product, "triton_gpu"]


@pytest.mark.gpu_aot
@pytest.mark.parametrize("target", ["a100-80gb:1x1x1", "h100:1x1x1", "b200:1x1x1"])
def test_its_program_has_no_copy_of_the_weight(target: str) -> None:
    place = jax.sharding.SingleDeviceSharding(Target(target).devices[0])
    weights = [structs("int8", 1024, 4096, (1, 4096)), structs("int4", 1024, 4096, (32, 4096), zeros=True)]
    arguments = jax.tree.map(
        lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=place),
        (jax.ShapeDtypeStruct((4, 1024), jnp.bfloat16), weights),
    )

    def products(x: Any, weights: Any) -> Any:
        gated = ops.gated_linear_unit(x, weights[0], weights[1], implementation="triton_gpu")
        return gated, [ops.linear(x, weight, implementation="triton_gpu") for weight in weights]

    with use_target(Target(target)), use_wheel_compilers():
        compiled = jax.jit(products).lower(*arguments).compile()
    assert compiled.as_text().count("stack_quantized_rows") >= 4
    assert compiled.memory_analysis().temp_size_in_bytes < 1024 * 4096


@pytest.mark.gpu_aot
def test_xla_copies_the_weight_to_bfloat16() -> None:
    """Once it does not, the kernel may not be needed."""
    place = jax.sharding.SingleDeviceSharding(Target("h100:1x1x1").devices[0])
    arguments = jax.tree.map(
        lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=place),
        (jax.ShapeDtypeStruct((4, 1024), jnp.bfloat16), structs("int8", 1024, 4096, (1, 4096))),
    )
    with use_target(Target("h100:1x1x1")):
        reference = jax.jit(lambda x, weight: ops.linear(x, weight, implementation="reference"))
        compiled = reference.lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes >= 2 * 1024 * 4096
