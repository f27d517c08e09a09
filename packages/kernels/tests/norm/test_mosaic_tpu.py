"""The TPU's norm, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from stack_core import ops
from stack_core.abi.ops import OpCall
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.chips.targets import Target, use_target
from stack_core.testing import OpCheck, op_checks
from stack_kernels.norm.mosaic_tpu import MOSAIC_TPU, NormTile, mosaic_tpu

V6E = registries.chips["v6e"]


@pytest.mark.covering
@pytest.mark.parametrize("check", [check for check in op_checks("norm") if check.aspect != "float16"], ids=str)
def test_contract(check: OpCheck) -> None:
    with use_chip(V6E):
        check(mosaic_tpu(interpret=True))


def test_rows_behind_the_last_one_change_nothing() -> None:
    """Memory that nobody wrote holds NaN here, as it may on a TPU."""
    poisoned = mosaic_tpu(interpret=pltpu.InterpretParams(uninitialized_memory="nan"))
    arrays = {
        "x": jnp.asarray(np.random.default_rng(0).normal(size=(21, 128)), jnp.float32),
        "scale": jnp.linspace(0.5, 1.5, 128),
        "offset": None,
        "residual": jnp.ones((21, 128)),
    }
    options = {"kind": "rms", "epsilon": 1e-6, "scale_offset": 0.0, "axis": -1}
    requested, config = frozenset({"inverse_rms"}), NormTile(16)
    outputs, kept = jax.jit(lambda: poisoned.forward(**arrays, **options, requested=requested, config=config))()
    cotangents = tuple(jnp.cos(jnp.arange(output.size)).reshape(output.shape) for output in outputs)
    assert poisoned.backward is not None
    differentiated = frozenset({"x", "scale", "residual"})
    found = poisoned.backward(arrays, options, outputs, kept, cotangents, requested=differentiated, config=config)

    def reference(x: jax.Array, scale: jax.Array, residual: jax.Array) -> object:
        return ops.norm(x, scale, residual=residual, implementation="reference")

    expected, vjp = jax.vjp(reference, arrays["x"], arrays["scale"], arrays["residual"])
    for actual, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
    for name, wanted in zip(("x", "scale", "residual"), vjp(cotangents), strict=True):
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-4)


def test_tiles_shrink_with_the_width_until_none_fits() -> None:
    def call(rows: int, size: int) -> OpCall:
        arrays = {
            "x": jax.ShapeDtypeStruct((rows, size), jnp.bfloat16),
            "scale": None,
            "offset": None,
            "residual": None,
        }
        return OpCall("norm", arrays, {"kind": "rms", "epsilon": 1e-6, "scale_offset": 0.0, "axis": -1})

    assert MOSAIC_TPU.default is not None
    assert MOSAIC_TPU.default(call(4096, 1024), V6E) == NormTile(256)
    assert MOSAIC_TPU.default(call(5, 1024), V6E) == NormTile(16)
    assert MOSAIC_TPU.default(call(4096, 8192), V6E) == NormTile(32)
    assert MOSAIC_TPU.supports(call(4096, 2**16), V6E, None) == "16 rows do not fit into VMEM"


@pytest.mark.tpu_aot
@pytest.mark.parametrize("target", ["v5e:1x1", "v5p:1x1x1", "v6e:1x1", "v7x:1x1x1"])
@pytest.mark.parametrize(("rows", "size"), [(4096, 4096), (21, 4000)])
def test_value_and_gradient_compile(target: str, rows: int, size: int) -> None:
    sharding = jax.sharding.SingleDeviceSharding(Target(target).devices[0])
    x = jax.ShapeDtypeStruct((rows, size), jnp.bfloat16, sharding=sharding)
    scale = jax.ShapeDtypeStruct((size,), jnp.float32, sharding=sharding)

    def total(x: jax.Array, residual: jax.Array, scale: jax.Array) -> jax.Array:
        y, h = ops.norm(x, scale, residual=residual, implementation="mosaic_tpu")
        return jnp.sum(y.astype(jnp.float32)) + jnp.sum(h.astype(jnp.float32))

    with use_target(Target(target)):
        compiled = jax.jit(jax.value_and_grad(total, (0, 1, 2))).lower(x, x, scale).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 2
