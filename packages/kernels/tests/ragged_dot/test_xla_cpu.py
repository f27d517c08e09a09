import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.testing import OpCheck, op_checks
from stack_kernels.ragged_dot.xla_cpu import XLA_CPU


@pytest.mark.covering
@pytest.mark.parametrize("check", op_checks("ragged_dot"), ids=str)
def test_contract(check: OpCheck) -> None:
    check(XLA_CPU)


def test_groups_of_several_full_tiles_beside_empty_and_cut_ones() -> None:
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.integers(-2, 3, shape), jnp.float32) for shape in ((900, 4), (5, 4, 3)))
    sizes = jnp.array([0, 530, 1, 256, 300])

    def total(lhs, rhs, implementation):
        product = ops.ragged_dot(lhs, rhs, sizes, implementation=implementation)
        return jnp.sum(product * jnp.arange(1.0, 4.0)), product

    run = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True), static_argnums=2)
    jax.tree.map(np.testing.assert_array_equal, run(lhs, rhs, XLA_CPU), run(lhs, rhs, "reference"))


@pytest.mark.parametrize("rows", [17, 40, 100, 150, 255, 256, 257])
def test_one_group_may_have_all_rows(rows: int) -> None:
    lhs, rhs = jnp.ones((rows, 4)), jnp.ones((2, 4, 5))
    output = ops.ragged_dot(lhs, rhs, jnp.array([0, rows]), implementation=XLA_CPU)
    np.testing.assert_array_equal(output, np.full((rows, 5), 4))


@pytest.mark.parametrize("garbage", [jnp.nan, jnp.inf])
def test_rows_of_no_group_may_hold_anything(garbage: float) -> None:
    lhs, rhs = jnp.ones((9, 4)).at[6:].set(garbage), jnp.ones((3, 4, 5))
    output, vjp = jax.vjp(
        lambda lhs, rhs: ops.ragged_dot(lhs, rhs, jnp.array([2, 0, 4]), implementation=XLA_CPU), lhs, rhs
    )
    of_lhs, of_rhs = vjp(jnp.ones((9, 5)).at[6:].set(garbage))
    for rows, inside in ((output, 4), (of_lhs, 5)):
        np.testing.assert_array_equal(rows[:, 0], [inside] * 6 + [0] * 3)
    np.testing.assert_array_equal(of_rhs[:, 0, 0], [2, 0, 4])


def test_mapped_calls_compute_the_tiles_of_each_element_alone() -> None:
    lhs, rhs, sizes = jnp.ones((2, 40, 4)), jnp.ones((2, 3, 4, 5)), jnp.array([[40, 0, 0], [1, 2, 3]])

    def total(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.sum(ops.ragged_dot(lhs, rhs, sizes, implementation=XLA_CPU))

    mapped = jax.jit(jax.vmap(jax.grad(total, argnums=(0, 1)), in_axes=(0, 0, 0)))
    of_lhs, of_rhs = mapped(lhs, rhs, sizes)
    np.testing.assert_array_equal(of_lhs[..., 0], [[5] * 40, [5] * 6 + [0] * 34])
    np.testing.assert_array_equal(of_rhs[..., 0, 0], sizes)
    # A choice among sizes of tiles by a mapped number would become a computation of all of them.
    assert mapped.lower(lhs, rhs, sizes).compile().as_text().count(" conditional(") == 2
