"""Rows of a table of 16-bit floats or 4-bit integers are the same in a loop, which casts no table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_serve.llm.unstacking import layer_by_layer

ROWS, FEATURES = 1000, 16


def embedded(table, places):
    return jnp.take(table, places, axis=0, mode="fill").astype(jnp.float32)


@jax.custom_jvp
def with_a_gradient_of_its_own(table, places):
    return embedded(table, places)


with_a_gradient_of_its_own.defjvp(lambda given, tangents: (embedded(*given), embedded(tangents[0], given[1])))


def in_a_loop(function):
    """Sums rows, and goes on to others."""

    def run(table, places):
        def turn(_, carry):
            places, total = carry
            return (places * 7) % ROWS, total + function(table, places)

        return jax.lax.fori_loop(0, 8, turn, (places, jnp.zeros((*places.shape, FEATURES))))[1]

    return jax.jit(run)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "function", [embedded, jax.jit(embedded), with_a_gradient_of_its_own], ids=["plain", "in a call", "own gradient"]
)
def test_rows_are_those_of_the_table(dtype, function):
    table = jax.random.normal(jax.random.key(0), (ROWS, FEATURES)).astype(dtype).at[6, 0].set(jnp.nan)
    places = jnp.array([[3, 0], [7, 6], [-1, ROWS]])  # -1 is the last; the other end is outside
    found = jax.jit(layer_by_layer(function))(table, places)
    np.testing.assert_array_equal(found, embedded(table, places))
    assert np.isnan(found[2, 1]).all()
    np.testing.assert_array_equal(
        in_a_loop(layer_by_layer(function))(table, places), in_a_loop(function)(table, places)
    )


@pytest.mark.parametrize("function", [embedded, with_a_gradient_of_its_own], ids=["plain", "own gradient"])
@pytest.mark.parametrize(("dtype", "cast_bytes"), [(jnp.bfloat16, 4), (jnp.int4, 1)])
def test_a_loop_casts_no_table(dtype, cast_bytes, function):
    table, places = jax.ShapeDtypeStruct((ROWS, FEATURES), dtype), jax.ShapeDtypeStruct((2,), jnp.int32)
    cast, taken = (
        in_a_loop(each).lower(table, places).compile().memory_analysis().temp_size_in_bytes
        for each in (function, layer_by_layer(function))
    )
    assert taken < 5_000
    if jax.__version_info__ < (0, 11):  # later ones cast the rows alone by themselves
        assert cast >= cast_bytes * ROWS * FEATURES
