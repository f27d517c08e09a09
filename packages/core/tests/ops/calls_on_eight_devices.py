"""What XLA cannot split runs on each device's part of the arrays, forward and backward.

`test_on_eight_devices.py` runs this; the argument `all` makes every call on explicit axes too.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from stack_core import ops
from stack_core.abi.errors import UnsupportedOp
from stack_core.abi.mesh import ShardingRules, use_mesh
from stack_core.ops.dispatch.op import op_named

RULES = ShardingRules({"batch": "data", "seq": None, "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"})
HEADS = ("batch", "seq", "heads", None)
CALLS = {
    "norm": ({"x": (8, 6, 16), "scale": (16,)}, {}, {"x": ("batch", "seq", None)}, ((2, 6, 16), (16,))),
    "linear": (
        {"x": (8, 6, 16), "weight": (16, 12)},
        {},
        {"x": ("batch", "seq", None), "weight": (None, "mlp")},
        ((2, 6, 16), (16, 6)),
    ),
    "linear, its sum split": (
        {"x": (8, 6, 16), "weight": (16, 12)},
        {},
        {"x": ("batch", "seq", "mlp")},
        ((2, 6, 8), (8, 12)),
    ),
    "gated_linear_unit": (
        {"x": (8, 6, 16), "w_gate": (16, 12), "w_up": (16, 12)},
        {},
        {"x": ("batch", "seq", None), "w_gate": (None, "mlp")},
        ((2, 6, 16), (16, 6), (16, 6)),
    ),
    "attention": (
        {"query": (8, 6, 4, 8), "key": (8, 6, 2, 8), "value": (8, 6, 2, 8)},
        {"causal": True},
        {"query": HEADS, "key": ("batch", "seq", "kv_heads", None)},
        ((2, 6, 2, 8), (2, 6, 1, 8), (2, 6, 1, 8)),
    ),
    "attention, heads that do not divide": (
        {"query": (8, 6, 3, 8), "key": (8, 6, 1, 8), "value": (8, 6, 1, 8)},
        {"causal": True},
        {"query": HEADS, "key": ("batch", "seq", "kv_heads", None)},
        ((2, 6, 3, 8), (2, 6, 1, 8), (2, 6, 1, 8)),
    ),
}
LAYOUT = P("data")


def opaque(op, seen):
    """The reference as a kernel would be registered; `seen` gets the shapes that it is asked about."""
    reference = op_named(op).implementation()

    def supports(call, chip, config):
        seen.add(frozenset((name, x.shape) for name, x in call.arrays.items() if x is not None))
        return True

    kept = tuple(name for name in reference.residuals if name != "own")
    fields = {"is_opaque": True, "supports": supports, "residuals": kept}
    return dataclasses.replace(reference, name="opaque", **fields)


def arrays_of(shapes):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def value_and_gradients(call, arrays):
    return jax.value_and_grad(lambda arrays: jnp.sum(jnp.sin(call(**arrays))))(arrays)


def assert_close(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(jax.device_get(a), e, rtol=0, atol=2e-5 * max(np.abs(e).max(), 1))


def placed(mesh, arrays):
    batch = next(iter(arrays.values())).shape[0]
    places = {name: NamedSharding(mesh, LAYOUT if x.shape[0] == batch else P()) for name, x in arrays.items()}
    return {name: jax.device_put(x, places[name]) for name, x in arrays.items()}


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(kind,) * 2)


def each_device_runs_its_part(kind, names):
    mesh = mesh_of(kind)
    for name in names:
        shapes, options, axes, local = CALLS[name]
        op, seen, arrays = name.partition(",")[0], set(), arrays_of(shapes)
        call = functools.partial(getattr(ops, op), **options, axes=axes, implementation=opaque(op, seen))
        expected = value_and_gradients(functools.partial(getattr(ops, op), **options), arrays)
        with use_mesh(mesh, RULES), jax.set_mesh(mesh):
            actual = jax.jit(functools.partial(value_and_gradients, call))(placed(mesh, arrays))
        assert_close(actual, expected)
        assert seen == {frozenset(zip(shapes, local, strict=True))}, (name, seen)


def inside_a_shard_map_over_one_axis():
    mesh, (shapes, _, axes, _) = mesh_of(AxisType.Auto), CALLS["norm"]
    arrays, seen = arrays_of(shapes), set()
    call = functools.partial(ops.norm, axes=axes, implementation=opaque("norm", seen))
    for checked in (True, False):

        def mapped(x, scale, checked=checked):
            specs = {"in_specs": (P("data"), P()), "out_specs": P("data"), "axis_names": {"data"}}
            return jax.shard_map(call, check_vma=checked, **specs)(x, scale)

        with use_mesh(mesh, RULES), jax.set_mesh(mesh):
            actual = jax.jit(functools.partial(value_and_gradients, mapped))(placed(mesh, arrays))
        assert_close(actual, value_and_gradients(ops.norm, arrays))
        assert seen == {frozenset({("x", (2, 6, 16)), ("scale", (16,))})}, seen


def a_scan_with_remat_and_a_vmap():
    mesh, (shapes, _, axes, _) = mesh_of(AxisType.Auto), CALLS["norm"]
    arrays = arrays_of(shapes)
    call = functools.partial(ops.norm, implementation=opaque("norm", set()))

    def repeated(call, x, scale):
        body = jax.checkpoint(lambda x, _: (jnp.sin(call(x, scale)), None))
        return jax.lax.scan(body, x, None, length=3)[0]

    def mapped(call, x, scale):
        return jax.vmap(call, in_axes=(0, None))(x, scale)

    for transformed, names in ((repeated, axes), (mapped, {"x": ("seq", None)})):
        with use_mesh(mesh, RULES), jax.set_mesh(mesh):
            of_parts = functools.partial(transformed, functools.partial(call, axes=names))
            actual = jax.jit(functools.partial(value_and_gradients, of_parts))(placed(mesh, arrays))
        assert_close(actual, value_and_gradients(functools.partial(transformed, ops.norm), arrays))


def without_names_it_is_refused():
    mesh, arrays = mesh_of(AxisType.Auto), arrays_of(CALLS["norm"][0])
    with use_mesh(mesh, RULES):
        refused = pytest.raises(UnsupportedOp, match="the call does not name the axes of its operands: pass axes=")
        with refused:
            jax.jit(lambda x, scale: ops.norm(x, scale, implementation=opaque("norm", set())))(**arrays)


def explain_names_the_rule_that_is_dropped():
    mesh, (shapes, options, axes, _) = mesh_of(AxisType.Auto), CALLS["attention, heads that do not divide"]
    call = functools.partial(ops.attention, **options, axes=axes, implementation=opaque("attention", set()))
    with use_mesh(mesh, RULES):
        (explained,) = ops.explain(call, *arrays_of(shapes).values())
    assert "'heads' is not split: 3 is not a multiple of 2" in explained.forward.reason


if __name__ == "__main__":
    each_device_runs_its_part(AxisType.Auto, CALLS)
    each_device_runs_its_part(AxisType.Explicit, CALLS if "all" in sys.argv else ("linear, its sum split", "attention"))
    inside_a_shard_map_over_one_axis()
    a_scan_with_remat_and_a_vmap()
    without_names_it_is_refused()
    explain_names_the_rule_that_is_dropped()
