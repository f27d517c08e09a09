"""Inside `jax.shard_map` JAX checks which mesh axes each array varies over: every op takes operands that differ."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from stack_core import ops
from stack_core.ops.dispatch.manual_axes import vary_alike

X = np.random.default_rng(0).normal(size=(2, 6, 4, 4))
WEIGHT = np.random.default_rng(1).normal(size=(4, 4))

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "attention": lambda x, weight: ops.attention(x, x, x @ weight),
    "gated_linear_unit": lambda x, weight: ops.gated_linear_unit(x, weight, weight),
    "linear": ops.linear,
    "linear_attention": lambda x, weight: ops.linear_attention(x, x, x @ weight, decay=None, beta=None)[0],
    "linear_attention_from_a_shared_state": lambda x, weight: ops.linear_attention(
        x, x, x, decay=None, beta=None, initial_state=jnp.broadcast_to(weight, (2, 4, 4, 4)).astype(jnp.float32)
    )[1],
    "norm": lambda x, weight: ops.norm(x, weight[0]),
    "state_space_from_a_shared_state": lambda x, weight: ops.state_space(
        x, x, x, decay=None, beta=None, initial_state=jnp.broadcast_to(weight, (2, 4, 4, 4)).astype(jnp.float32)
    )[1],
    "ragged_dot": lambda x, weight: ops.ragged_dot(
        x.reshape(-1, 4), jnp.stack([weight, 2 * weight]), jnp.array([30, 10])
    ),
}


@pytest.mark.covering
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", CALLS)
def test_a_weight_that_all_devices_share(op: str, dtype: str) -> None:
    x, weight = jnp.asarray(X / 4, dtype), jnp.asarray(WEIGHT, dtype)
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))

    def total(x: Any, weight: Any) -> Any:
        return jnp.sum(jnp.sin(CALLS[op](x, weight).astype(jnp.float32)))[None]

    def sharded_total(x: Any, weight: Any) -> Any:
        return jnp.sum(jax.shard_map(total, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))(x, weight))

    actual = jax.jit(jax.grad(sharded_total, argnums=(0, 1)))(x, weight)
    expected = jax.jit(jax.grad(lambda *operands: total(*operands)[0], argnums=(0, 1)))(x, weight)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), e.astype(jnp.float32), rtol=1e-5, atol=1e-5)


def test_arrays_vary_over_the_axes_of_all() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def types(by_data: Any, by_tensor: Any) -> Any:
        alike = vary_alike(by_data, {"by_tensor": by_tensor, "absent": None}, jnp.arange(3))
        assert {jax.typeof(leaf).mat.varying for leaf in jax.tree.leaves(alike)} == {frozenset({"data", "tensor"})}
        assert alike[1]["absent"] is None
        return by_data

    jax.shard_map(types, mesh=mesh, in_specs=(P("data"), P("tensor")), out_specs=P("data"))(jnp.ones(2), jnp.ones(2))


def test_outside_shard_map_nothing_changes() -> None:
    x = jnp.ones(2)
    assert vary_alike(x, np.arange(3))[0] is x
