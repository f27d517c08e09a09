"""Kernels of machine code where JAX tracks what varies from device to device, on the one device they run on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from stack_core import ops

CALLS = {
    "norm": lambda x, weight: ops.norm(x, weight[0]),
    "linear": lambda x, weight: ops.linear(x[:4], weight),
    "rope": lambda x, weight: ops.rope(x.reshape(1, -1, 8, 64) * weight[0, 0], jnp.arange(len(x))[None]),
}


@pytest.mark.parametrize("op", CALLS)
def test_gradients_of_what_all_devices_share_are_summed(op: str) -> None:
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((64, 512), (512, 512)))

    def loss(x: Any, weight: Any) -> Any:
        return jnp.sum(jnp.sin(CALLS[op](x, weight)))

    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(
        lambda x, weight: jax.lax.psum(loss(x, weight), "rows"),
        mesh=mesh,
        in_specs=(PartitionSpec("rows"), PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    assert "jit_x86" in {decision.forward.implementation.name for decision in ops.explain(sharded, x, weight)}
    found = jax.jit(jax.grad(sharded, argnums=(0, 1)))(x, weight)
    for one, other in zip(found, jax.jit(jax.grad(loss, argnums=(0, 1)))(x, weight), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
