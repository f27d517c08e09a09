import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.testing import OpCheck, op_checks
from stack_kernels.linear_attention.xla_cpu import XLA_CPU, Chunks


@pytest.mark.covering
@pytest.mark.parametrize("check", op_checks("linear_attention"), ids=str)
def test_contract(check: OpCheck) -> None:
    check(XLA_CPU)


@pytest.mark.covering
@pytest.mark.parametrize("tokens", [1, 5, 512])
@pytest.mark.parametrize(
    "check",
    [
        check
        for check in op_checks("linear_attention")
        if str(check) in {"forgets_everything-float32", "odd_sizes-float32", "initial_state-float32"}
    ],
    ids=str,
)
def test_chunks_of_any_size(check: OpCheck, tokens: int) -> None:
    check(dataclasses.replace(XLA_CPU, default=lambda call, chip: Chunks(tokens)))


def _outputs(operands: Any, implementation: Any) -> Any:
    query, key, value, decay, beta = operands
    return ops.linear_attention(query, key, value, decay=decay, beta=beta, implementation=implementation)


def test_weak_decays_keep_their_digits_after_strong_ones() -> None:
    """As differences of cumulative sums, of -1e6 and more, they would have none."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(1, 64, 1, 8)) / 8**0.5 for _ in range(3))
    decay = np.where(np.arange(64) % 4, -0.1, -1e5)[None, :, None]
    operands = [jnp.asarray(x, jnp.float32) for x in (query, key, value, decay, np.full(decay.shape, 0.7))]
    for actual, expected in zip(_outputs(operands, XLA_CPU), _outputs(operands, "reference"), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_equal_keys_do_not_grow() -> None:
    """A system solved through powers of its matrix would pass 1e17 on the way."""
    key = jnp.full((1, 128, 1, 4), 0.5)
    values = jnp.cos(jnp.arange(512.0)).reshape(1, 128, 1, 4)
    one_chunk = dataclasses.replace(XLA_CPU, default=lambda call, chip: Chunks(128))
    output, _ = _outputs((key, key, values, None, None), one_chunk)
    np.testing.assert_allclose(output, values, atol=1e-5)


def test_a_gradient_takes_no_loop_over_tokens() -> None:
    shape = jax.ShapeDtypeStruct((1, 256, 1, 4), jnp.float32)
    gradient = jax.grad(lambda x: jnp.sum(partial(_outputs, implementation=XLA_CPU)((x, x, x, None, None))[0]))
    assert "length=256" not in str(jax.make_jaxpr(gradient)(shape))
    assert "length=4" in str(jax.make_jaxpr(gradient)(shape))
