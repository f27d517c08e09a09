import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.testing import OpCheck, op_checks
from stack_kernels.jit_cpu import host
from stack_kernels.jit_cpu.linear_cross_entropy.jit_amx import JIT_AMX
from stack_kernels.linear_cross_entropy.chunks import Chunks


@pytest.fixture(autouse=True)
def tiles() -> None:
    found = host.this_processor()
    if found is None or not found.has_tiles:
        pytest.skip("this processor has no AMX")


@pytest.mark.parametrize(
    "check", [check for check in op_checks("linear_cross_entropy") if check.aspect == "bfloat16"], ids=str
)
def test_contract(check: OpCheck) -> None:
    check(JIT_AMX)


@pytest.mark.parametrize("keeps_exponentials", [True, False])
@pytest.mark.parametrize("rows", [9, 700])
def test_losses_and_gradients_are_those_of_the_reference(rows: int, keeps_exponentials: bool) -> None:
    """Of a chunk that is not filled, and of three; the last tile overlaps the one before."""
    chunks = Chunks(chunk_rows=256, tile_bytes=256 * 96 * 4, keeps_exponentials=keeps_exponentials)
    implementation = dataclasses.replace(JIT_AMX, default=lambda call, chip: chunks)
    rng = np.random.default_rng(0)
    hidden, weight = (jnp.asarray(rng.normal(size=shape) / 8, jnp.bfloat16) for shape in ((rows, 64), (64, 4128)))
    labels = jnp.asarray(rng.integers(0, 4128, rows))

    def of(implementation: Any) -> Any:
        def loss(hidden: Any, weight: Any) -> Any:
            return ops.linear_cross_entropy(hidden, weight, labels, z_loss=0.01, implementation=implementation)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, weight)

    (found, found_gradients), (expected, expected_gradients) = of(implementation), of("reference")
    assert float(found) == pytest.approx(float(expected), rel=1e-4)
    for one, other in zip(found_gradients, expected_gradients, strict=True):
        exact = np.asarray(other, np.float64)
        np.testing.assert_allclose(np.asarray(one, np.float64), exact, rtol=2.0**-6, atol=2.0**-8 * np.abs(exact).max())
