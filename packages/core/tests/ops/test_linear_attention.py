"""What `linear_attention` promises beyond its contract: a state to go on from, and a gradient of little memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.ops.definitions.linear_attention import _chunks


def _drawn(seq: int, heads: int = 2, key_dim: int = 8, value_dim: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"query": key_dim, "key": key_dim, "value": value_dim}
    drawn = {name: rng.normal(size=(1, seq, heads, size)) / 3 for name, size in shapes.items()}
    gates = {"decay": -rng.uniform(size=(1, seq, heads)), "beta": rng.uniform(size=(1, seq, heads))}
    return {name: jnp.asarray(x, jnp.float32) for name, x in (drawn | gates).items()}


def test_by_hand() -> None:
    """Two tokens with the same key: the second takes half of what the first has stored, after it has halved."""
    key = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2).repeat(2, axis=1)
    value = jnp.array([8.0, 4.0]).reshape(1, 2, 1, 1)
    decay = jnp.log(jnp.array([0.25, 0.5])).reshape(1, 2, 1)
    beta = jnp.array([1.0, 0.5]).reshape(1, 2, 1)
    output, state = ops.linear_attention(2 * key, key, value, decay=decay, beta=beta)
    np.testing.assert_allclose(output[0, :, 0, 0], [16.0, 8.0], rtol=1e-6)  # 0.5 * 8 + 0.5 * (4 - 0.5 * 8) = 4
    np.testing.assert_allclose(state[0, 0, :, 0], [4.0, 0.0], rtol=1e-6)


@pytest.mark.parametrize("cut", [0, 1, 7, 12])
def test_the_state_goes_on_where_a_call_ended(cut: int) -> None:
    tokens = _drawn(12)
    whole, whole_state = ops.linear_attention(**tokens)
    first, state = ops.linear_attention(**{name: x[:, :cut] for name, x in tokens.items()})
    second, state = ops.linear_attention(**{name: x[:, cut:] for name, x in tokens.items()}, initial_state=state)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state, whole_state, rtol=1e-5, atol=1e-6)


def test_dtypes_of_the_results() -> None:
    tokens = {name: x.astype(jnp.bfloat16) for name, x in _drawn(3).items()}
    output, state = ops.linear_attention(**tokens)
    assert (output.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)


def test_a_gradient_keeps_about_the_root_of_all_states() -> None:
    seq, heads, key_dim, value_dim = 1024, 2, 32, 32
    state_bytes = 4 * heads * key_dim * value_dim

    def total(tokens: Any) -> Any:
        output, state = ops.linear_attention(**tokens)
        return jnp.sum(output) + jnp.sum(state)

    tokens = jax.eval_shape(lambda: _drawn(seq, heads, key_dim, value_dim))
    memory = jax.jit(jax.grad(total)).lower(tokens).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * seq**0.5 * state_bytes + 16 * memory.argument_size_in_bytes
    assert 8 * seq**0.5 < seq / 3


@pytest.mark.parametrize(("seq", "expected"), [(0, 1), (1, 1), (2, 1), (12, 3), (13, 3), (2048, 64), (2053, 45)])
def test_chunks_are_about_as_many_as_each_has_tokens(seq: int, expected: int) -> None:
    assert _chunks(seq) == expected
