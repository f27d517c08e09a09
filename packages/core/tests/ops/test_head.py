import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.ops import Head


@pytest.mark.parametrize("rows", [(0,), (3,), (2, 4), (5, 20)])
def test_logits_of_a_stored_table_are_those_of_its_transpose(rows: tuple[int, ...]) -> None:
    table, hidden = jax.random.normal(jax.random.key(0), (50, 16)), jax.random.normal(jax.random.key(1), (*rows, 16))
    bias = jnp.arange(50.0)
    options = {"bias": bias, "scale": 0.5, "softcap": 30.0}
    logits = Head(table.T, table=table, **options).logits(hidden)
    np.testing.assert_allclose(logits, Head(table.T, **options).logits(hidden), rtol=1e-5, atol=1e-5)

    def loss(table: jax.Array, hidden: jax.Array, stored: bool) -> jax.Array:
        return jnp.sum(Head(table.T, table=table if stored else None, **options).logits(hidden) ** 2)

    ours, theirs = (jax.grad(loss, argnums=(0, 1))(table, hidden, stored) for stored in (True, False))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-2), ours, theirs)
