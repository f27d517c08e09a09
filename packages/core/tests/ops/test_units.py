"""Under `as_units` each call of an op is one equation, which stands for it in every transformation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from stack_core import ops
from stack_core.abi.mesh import MeshConfig, use_mesh
from stack_core.abi.ops import OpImplementation, QView
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.chips.device_mesh import make_mesh
from stack_core.ops.units import as_units, unit_of

X = jnp.linspace(-1, 1, 12).reshape(3, 4)
WEIGHT = jnp.linspace(0, 2, 20).reshape(4, 5)


def linear(x: Any, weight: Any) -> Any:
    return ops.linear(x, weight, preferred_dtype="float32")


def traced(fn: Any, *args: Any) -> Any:
    with as_units():
        return jax.make_jaxpr(fn)(*args)


def units(jaxpr: Any) -> list[Any]:
    return [unit for equation in jaxpr.eqns if (unit := unit_of(equation))]


def run(jaxpr: Any, *args: Any) -> Any:
    (result,) = jax.extend.core.jaxpr_as_fun(jaxpr)(*args)
    return result


def test_a_call_is_one_equation_that_says_all_of_it() -> None:
    jaxpr = traced(linear, X, WEIGHT)
    (unit,) = units(jaxpr)
    assert len(jaxpr.eqns) == 1
    assert (unit.op, unit.implementation, unit.batching) == ("linear", None, ())
    assert unit.options == {"preferred_dtype": jnp.dtype("float32")}
    assert unit.arrays(["x", "w"]) == {"x": "x", "weight": "w", "bias": None}


def test_other_equations_are_no_units() -> None:
    assert units(traced(lambda x: x + 1, X)) == []
    assert units(jax.make_jaxpr(linear)(X, WEIGHT)) == []


def test_a_unit_is_evaluated_compiled_and_differentiated_as_the_call() -> None:
    jaxpr = traced(linear, X, WEIGHT)
    expected = jax.jit(linear)(X, WEIGHT)
    np.testing.assert_array_equal(jax.jit(lambda *args: run(jaxpr, *args))(X, WEIGHT), expected)
    np.testing.assert_array_equal(run(jaxpr, X, WEIGHT), linear(X, WEIGHT))
    gradients = jax.grad(lambda *args: jnp.sum(run(jaxpr, *args) ** 2), argnums=(0, 1))(X, WEIGHT)
    wanted = jax.grad(lambda *args: jnp.sum(linear(*args) ** 2), argnums=(0, 1))(X, WEIGHT)
    jax.tree.map(np.testing.assert_array_equal, gradients, wanted)


def test_results_keep_their_structure() -> None:
    jaxpr = traced(lambda x: ops.norm(x, residual=x), X)
    (unit,) = units(jaxpr)
    expected = jax.jit(lambda x: ops.norm(x, residual=x))(X)
    assert jax.tree.structure(unit(X, X)) == jax.tree.structure(expected)
    np.testing.assert_array_equal(jax.jit(jax.extend.core.jaxpr_as_fun(jaxpr))(X)[0], expected[0])


@pytest.mark.parametrize(("axes", "weight"), [((0, None), WEIGHT), ((None, 2), jnp.stack([WEIGHT, -WEIGHT], axis=2))])
def test_a_mapped_call_is_one_equation_and_can_be_called_again(axes: Any, weight: Any) -> None:
    x = X if axes[0] is None else jnp.stack([X, 2 * X])
    jaxpr = traced(jax.vmap(linear, in_axes=axes), x, weight)
    (unit,) = units(jaxpr)
    expected = jax.vmap(linear, in_axes=axes)(x, weight)
    assert unit.batching == (axes,)
    np.testing.assert_allclose(run(jaxpr, x, weight), expected, rtol=1e-6)
    np.testing.assert_allclose(unit(x, weight), expected, rtol=1e-6)


def test_a_call_mapped_twice_can_be_called_again() -> None:
    x = jnp.stack([jnp.stack([X, 2 * X]), jnp.stack([3 * X, 4 * X])])
    weights = jnp.stack([WEIGHT, -WEIGHT])
    twice = jax.vmap(jax.vmap(linear, in_axes=(0, None)), in_axes=(1, 0))
    (unit,) = units(traced(twice, x, weights))
    assert len(unit.batching) == 2
    np.testing.assert_allclose(unit(x, weights), twice(x, weights), rtol=1e-6)


def test_a_quantized_array_may_stand_for_an_operand() -> None:
    (unit,) = units(traced(linear, X, WEIGHT))

    @jax.tree_util.register_pytree_node_class
    class Halves:
        def __init__(self, codes: Any) -> None:
            self.codes = codes

        def tree_flatten(self) -> Any:
            return (self.codes,), None

        @classmethod
        def tree_unflatten(cls, _: Any, children: Any) -> Any:
            return cls(*children)

        def __stack_qview__(self) -> QView:
            return QView((1, 0), self.codes, jnp.full((1, 1), 0.5), None, "halves")

    codes = jnp.arange(20, dtype=jnp.int8).reshape(4, 5)
    np.testing.assert_allclose(unit(X, Halves(codes)), linear(X, codes.astype(jnp.float32) / 2), rtol=1e-6)


def test_jit_never_takes_one_trace_for_the_other() -> None:
    helper = jax.jit(linear)

    def model(x: Any, weight: Any) -> Any:
        return helper(x, weight)

    for _ in range(2):
        plain, marked = jax.make_jaxpr(model)(X, WEIGHT), traced(model, X, WEIGHT)
        assert "stack_op" in str(marked) and "stack_op" not in str(plain)


def test_a_call_is_what_its_contexts_made_it(register: Any) -> None:
    seen = []
    chip = registries.chips["v5e"]

    def supports(call: Any, chip: Any, config: Any) -> bool:
        seen.append(chip.kind)
        return True

    def function(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any, requested: Any) -> Any:
        return (x @ weight).astype(preferred_dtype), {}

    register(OpImplementation(op="linear", name="mine", forward=function, supports=supports))

    def elsewhere(x: Any, weight: Any) -> Any:
        with use_chip(chip):
            return linear(x, weight)

    (unit,) = units(traced(elsewhere, X, WEIGHT))
    assert set(seen) == {chip.kind}
    seen.clear()
    unit(X[:1], WEIGHT)  # other operands than those that it was chosen for before
    assert set(seen) == {chip.kind}


def test_a_call_keeps_the_mesh_and_its_rules() -> None:
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    labels = jnp.zeros(3, jnp.int32)

    def loss(hidden: Any, weight: Any) -> Any:
        with use_mesh(mesh):
            return ops.linear_cross_entropy(hidden, weight, labels)

    (unit,) = units(traced(loss, X, WEIGHT))
    np.testing.assert_allclose(unit(X, WEIGHT, labels), loss(X, WEIGHT), rtol=1e-6)


def test_inside_shard_map_a_unit_has_the_type_of_the_call() -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (PartitionSpec("d"), PartitionSpec()), "out_specs": PartitionSpec("d")}
    mapped = jax.shard_map(linear, mesh=mesh, **specs)
    with as_units():
        jaxpr = jax.make_jaxpr(mapped)(X, WEIGHT)
    np.testing.assert_allclose(run(jaxpr, X, WEIGHT), linear(X, WEIGHT), rtol=1e-6)
