import jax
import jax.numpy as jnp
import numpy as np

from stack_core.ops.building import joined_by_sinks
from stack_kernels.attention.sinks import sinks_gradient


def test_it_is_that_of_joining_them_also_where_a_query_has_neither_key_nor_sink() -> None:
    rng = np.random.default_rng(0)
    values, cotangents = (jnp.asarray(rng.normal(size=(2, 3, 2, 4)), jnp.float32) for _ in range(2))
    lse = jnp.asarray(rng.normal(size=(2, 3, 2)), jnp.float32).at[0, 1].set(-jnp.inf)
    values, sinks = values.at[0, 1].set(0), jnp.array([-jnp.inf, 0.5])

    def joined(sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
        share, whole = joined_by_sinks(lse, sinks)
        return values * share[..., None], whole

    expected = jax.grad(lambda sinks: jnp.sum(joined(sinks)[0] * cotangents))(sinks)
    outputs, whole = joined(sinks)
    np.testing.assert_allclose(sinks_gradient(sinks, whole, outputs, cotangents), expected, rtol=1e-5)
