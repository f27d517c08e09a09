"""Checks of `stack_core.abi.mesh` that need eight devices; `test_mesh.py` runs them in a process that has eight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from stack_core.abi.errors import ShardingError
from stack_core.abi.mesh import (
    AXES,
    DEFAULT_RULES,
    MeshConfig,
    check_shardings,
    constrain,
    parts_of,
    use_mesh,
)
from stack_core.chips.device_mesh import make_mesh


def every_axis_is_there_and_auto():
    mesh = make_mesh(MeshConfig(data=2, tensor=2))
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2, "expert": 1, "context": 1, "stage": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}


def tensor_spans_neighbours_and_stages_do_not():
    mesh = make_mesh(MeshConfig(stage=2, fsdp=2, tensor=2))
    ids = np.vectorize(lambda device: device.id)(mesh.devices).squeeze()
    assert ids[0, :, 0].tolist() == [0, 1]  # fsdp, tensor, stage
    assert ids[0, 0, :].tolist() == [0, 4]


def some_devices_make_a_mesh():
    mesh = make_mesh(MeshConfig(), jax.devices()[2:5])
    assert [device.id for device in mesh.devices.flat] == [2, 3, 4]


def shards_have_their_part_of_the_values():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))
    values = jnp.arange(32.0).reshape(8, 4)
    shardings = DEFAULT_RULES.tree_shardings(mesh, {"w": values}, {"w": ("embed", "mlp")})
    placed = jax.device_put(values, shardings["w"])
    assert {shard.data.shape for shard in placed.addressable_shards} == {(4, 1)}
    np.testing.assert_array_equal(placed.addressable_shards[0].data, values[:4, :1])


def leaves_that_lie_elsewhere_are_named_with_both_places():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))
    values = {"layer": {"up": jnp.ones((8, 4)), "down": jnp.ones((4, 8))}}
    axes = {"layer": {"up": ("embed", "mlp"), "down": ("mlp", "embed")}}
    shardings = DEFAULT_RULES.tree_shardings(mesh, values, axes)
    placed = jax.device_put(values, shardings)
    check_shardings(placed, shardings)
    placed["layer"]["up"] = jax.device_put(placed["layer"]["up"], jax.devices()[1])
    with pytest.raises(ShardingError) as caught:
        check_shardings(placed, shardings)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2 and lines[0].startswith("layer/up (8, 4) should lie as NamedSharding"), lines
    assert "('fsdp', 'tensor')" in lines[0] and "SingleDeviceSharding" in lines[0], lines


def parts_are_counted_inside_the_context_only():
    with use_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        assert parts_of("batch") == 4 and parts_of("seq") == 1 and parts_of("no such axis") == 1
    assert parts_of("batch") == 1


def constrain_splits_inside_its_context_only():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))

    @jax.jit
    def double(x):
        return constrain(2 * x, "batch", "act_mlp")

    x = jnp.ones((8, 4))
    before = double(x)
    with use_mesh(mesh):
        with use_mesh(make_mesh(MeshConfig()), DEFAULT_RULES.updated({"batch": None, "act_mlp": None})):
            pass  # leaving it brings the outer mesh and its rules back
        inside = double(x)
    after = double(x)
    assert len(before.sharding.device_set) == len(after.sharding.device_set) == 1
    assert inside.sharding.spec == PartitionSpec(("data", "fsdp"), "tensor")
    np.testing.assert_array_equal(inside, before)


def a_jitted_function_is_traced_once_for_each_set_of_rules():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    traced = []

    @jax.jit
    def inner(x):
        traced.append(1)
        return constrain(2 * x, "batch", "act_mlp")

    outer = jax.jit(lambda x: inner(x) + 1)
    x = jnp.ones((8, 4))
    for _ in range(2):
        for rules, spec in (
            (DEFAULT_RULES, PartitionSpec(("data", "fsdp"), "tensor")),
            (DEFAULT_RULES.updated({"act_mlp": None}), PartitionSpec(("data", "fsdp"), None)),
            (DEFAULT_RULES.updated({"batch": "tensor", "act_mlp": "data"}), PartitionSpec("tensor", "data")),
        ):
            with use_mesh(mesh, rules):
                for function in (inner, outer):
                    result = function(x)
                    assert result.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 2), result.sharding
    assert len(traced) == 3


def constrain_goes_through_scan_remat_and_grad():
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    weights, x = jnp.full((3, 8, 8), 0.1), jnp.arange(64.0).reshape(8, 8) / 64

    def loss(weights, x):
        def layer(x, weight):
            return jnp.tanh(constrain(x @ weight, "batch", "act_mlp")), None

        return jax.lax.scan(jax.checkpoint(layer), x, weights)[0].sum()

    def sharded(weights, x):
        with use_mesh(mesh):
            return jax.grad(loss)(weights, x)

    placed = jax.device_put(weights, DEFAULT_RULES.sharding(mesh, ("layers", "embed", "mlp"), weights.shape))
    np.testing.assert_allclose(jax.jit(sharded)(placed, x), jax.grad(loss)(weights, x), rtol=1e-5)


def consecutive_devices_form_a_slice():
    def ids(**sizes):
        return [device.id for device in make_mesh(MeshConfig(**sizes)).devices.flat]

    # In the order of the axes, data before fsdp before tensor: the axis that spans both slices jumps by four devices.
    assert ids(data=4, fsdp=2, dcn_data=2) == ids(data=4, fsdp=2) == list(range(8))
    assert ids(data=2, fsdp=4, dcn_fsdp=2) == [0, 1, 4, 5, 2, 3, 6, 7]
    assert ids(fsdp=2, stage=4, dcn_fsdp=2) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert ids(fsdp=2, stage=4, dcn_stage=2) == [0, 2, 4, 6, 1, 3, 5, 7]


def constrain_refuses_what_does_not_divide():
    with (
        use_mesh(make_mesh(MeshConfig(fsdp=4, tensor=2))),
        pytest.raises(ShardingError, match=r"^the rows \(6, 2\): axis 0, 'batch', has size 6, .* size 4 or 8"),
    ):
        jax.jit(lambda x: constrain(x, "batch", None, name="the rows"))(jnp.ones((6, 2)))


if __name__ == "__main__":
    for check in [value for value in globals().values() if getattr(value, "__module__", None) == __name__]:
        check()
