"""Kernels of others inside `jax.shard_map`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from stack_core import ops
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_kernels.mesh_types import untyped
from stack_kernels.ragged_dot.megablox import megablox


def test_results_vary_as_the_arrays_do() -> None:
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("expert")
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((20, 16), (2, 16, 8)))
    sizes = jnp.array([13, 7])

    def gradients(implementation: object) -> object:
        def total(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            local = jax.shard_map(
                lambda lhs, rhs, sizes: ops.ragged_dot(lhs, rhs, sizes, implementation=implementation),  # type: ignore[arg-type]
                mesh=mesh,
                in_specs=(spec, spec, spec),
                out_specs=spec,
            )
            return jnp.sum(local(lhs, rhs, sizes) ** 2)

        return jax.jit(jax.value_and_grad(total, (0, 1)))(lhs, rhs)

    with use_chip(registries.chips["v6e"]):
        found = gradients(megablox(interpret=True))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), found, gradients("reference"))


def test_outside_of_one_nothing_changes() -> None:
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(untyped(jnp.sin, x), jnp.sin(x))


def test_a_kernel_may_close_over_arrays_of_its_trace_and_be_mapped() -> None:
    mesh = jax.make_mesh((1,), ("part",), axis_types=(AxisType.Auto,))

    def local(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jax.vmap(lambda x: untyped(lambda x: x * scale + 1, x))(x)

    spec = PartitionSpec("part")
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec))
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(mapped(x, jnp.array([1.0, 2.0, 3.0])), x * jnp.array([1.0, 2.0, 3.0]) + 1)
