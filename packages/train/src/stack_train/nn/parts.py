"""Functions of the shards of a device, inside and outside of pipeline stages."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from stack_core.abi import mesh
from stack_core.abi.mesh import LogicalAxes

__all__ = ["map_parts"]


def map_parts(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, LogicalAxes]], out_axes: Any, *, name: str
) -> Any:
    """Calls `stack_core.abi.mesh.map_parts`, with a derivative of its own inside of pipeline stages.

    JAX cannot save values of a `jax.shard_map` that is nested in another one: it would also split them over the axis
    "stage", whose devices have separate values already (jax 0.10.2). Inside of stages the function is therefore a
    single equation. The backward pass calls the function again on each device, and differentiates it there. With
    `remat: full` this takes no extra time.

    Arguments with integer leaves, such as quantized arrays, get no gradients there.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return mesh.map_parts(function, arguments, out_axes, name=name)
    axes = [each for _, each in arguments]
    # JAX differentiates the body of a loop after the loop, where other rules may apply than around this call.
    mesh_and_rules = mesh.in_mesh.value
    places = [place for place, (array, _) in enumerate(arguments) if _is_float(array)]

    def map_again(function: Callable[..., Any], arguments: Sequence[tuple[Any, LogicalAxes]], out_axes: Any) -> Any:
        with mesh.in_mesh(mesh_and_rules):
            return mesh.map_parts(function, arguments, out_axes, name=name)

    def call(*arrays: Any) -> Any:
        def mapped(*arrays: Any) -> Any:
            return map_again(function, list(zip(arrays, axes, strict=True)), out_axes)

        return _as_one_equation(mapped, *arrays)

    def backward(arrays: Sequence[Any], cotangents: Any) -> tuple[Any, ...]:
        leaves, structure = jax.tree.flatten(cotangents)

        def part(*parts: Any) -> tuple[Any, ...]:
            own, received = list(parts[: len(axes)]), structure.unflatten(parts[len(axes) :])

            def of_floats(*floats: Any) -> Any:
                for place, value in zip(places, floats, strict=True):
                    own[place] = value
                return jax.tree.map(_varying_like, function(*own), received)

            return jax.vjp(of_floats, *(own[place] for place in places))[1](received)

        given = [*zip(arrays, axes, strict=True), *zip(leaves, structure.flatten_up_to(out_axes), strict=True)]
        found = map_again(part, given, tuple(axes[place] for place in places))
        by_place = dict(zip(places, found, strict=True))
        return tuple(by_place.get(place) for place in range(len(axes)))

    whole = jax.custom_vjp(call)
    whole.defvjp(lambda *arrays: (call(*arrays), arrays), backward)
    return whole(*(array for array, _ in arguments))


def _is_float(tree: Any) -> bool:
    return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(tree))


def _varying_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Casts an array to the type of arrays that vary over the mesh axes of `other`, too."""
    missing = jax.typeof(other).mat.varying - jax.typeof(x).mat.varying
    return lax.pcast(x, tuple(missing), to="varying") if missing else x


def _as_one_equation(function: Callable[..., Any], *arrays: Any) -> Any:
    """Calls a function as one equation, from which JAX saves no intermediate values."""
    leaves, structure = jax.tree.flatten(arrays)
    traced = jax.make_jaxpr(lambda *leaves: function(*structure.unflatten(leaves)), return_shape=True)
    jaxpr, shapes = traced(*leaves)
    return jax.tree.unflatten(jax.tree.structure(shapes), _primitive().bind(*leaves, jaxpr=jaxpr))


@functools.cache
def _primitive() -> Any:
    def evaluated(*arrays: Any, jaxpr: Any) -> list[Any]:
        return jaxpr_as_fun(jaxpr)(*arrays)

    primitive = Primitive("stack_parts")
    primitive.multiple_results = True
    primitive.def_impl(evaluated)
    primitive.def_abstract_eval(lambda *arrays, jaxpr: jaxpr.out_avals)
    mlir.register_lowering(primitive, mlir.lower_fun(evaluated, multiple_results=True))
    return primitive
