"""Meshes have every axis; rules place each axis of an array, or say why they cannot and what would fit."""

import math
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from stack_core.abi.config import parse, to_mapping
from stack_core.abi.errors import ConfigError, HardwareError, ShardingError
from stack_core.abi.mesh import AXES, DEFAULT_RULES, MeshConfig, ShardingRules, constrain, use_mesh
from stack_core.chips import device_mesh
from stack_core.chips.device_mesh import make_mesh

EIGHT_DEVICES = Path(__file__).with_name("mesh_on_eight_devices.py")


def abstract(**sizes):
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES, (AxisType.Auto,) * len(AXES))


def run(*arguments, **environment):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    subprocess.run([sys.executable, "-W", "error", *map(str, arguments)], check=True, env=environment)


def test_on_eight_devices():
    run(EIGHT_DEVICES, JAX_NUM_CPU_DEVICES="8")


def test_importing_initializes_no_backend():
    run(
        "-c",
        "import stack_core.abi.mesh, jax; jax.config.update('jax_num_cpu_devices', 2); assert jax.device_count() == 2",
    )


def test_a_step_that_enters_its_mesh_is_traced_once():
    run(
        "-c",
        """if True:
        import jax
        from stack_core.abi.mesh import MeshConfig, use_mesh
        from stack_core.chips.device_mesh import make_mesh

        mesh, traced = make_mesh(MeshConfig()), []

        @jax.jit
        def step(x):
            with use_mesh(mesh):
                traced.append(1)
                return 2 * x

        step(1.0), step(1.0)
        assert len(traced) == 1
        """,
    )


def test_the_default_takes_every_device():
    assert device_mesh._axis_sizes(MeshConfig(), 6) == dict.fromkeys(AXES, 1) | {"fsdp": 6}


@pytest.mark.parametrize(
    ("sizes", "devices", "expected"),
    [
        ({"tensor": 3}, 8, r"fsdp=-1, tensor=3 takes a multiple of 3 devices, but there are 8. .* tensor=2 or 4"),
        ({"tensor": 64}, 1, "takes a multiple of 64 devices, but there are 1. .* tensor=1"),
        ({"data": 3, "fsdp": 2}, 8, "data=3, fsdp=2 takes 6 devices, but there are 8. .* data=4; -1 for one axis"),
        ({"fsdp": 1}, 8, "of one device takes 1 devices, but there are 8. .*: -1 for one axis"),
        ({"data": 3, "tensor": 5}, 8, "several axes changed together"),
    ],
)
def test_sizes_that_do_not_use_the_devices_name_those_that_would(sizes, devices, expected):
    with pytest.raises(ShardingError, match=expected):
        device_mesh._axis_sizes(MeshConfig(**sizes), devices)


def test_make_mesh_raises_for_the_devices_it_is_given():
    with pytest.raises(ShardingError, match="takes a multiple of 64 devices, but there are 1"):
        make_mesh(MeshConfig(tensor=64), jax.devices()[:1])


def test_make_mesh_refuses_devices_of_different_kinds():
    devices = [Mock(spec=jax.Device, device_kind=kind, platform="gpu") for kind in ("NVIDIA B200", "NVIDIA H100")]
    with pytest.raises(HardwareError, match="1 of kind 'NVIDIA B200' and 1 of kind 'NVIDIA H100'"):
        make_mesh(MeshConfig(), devices)


def test_slices_are_spread_over_the_axes_with_the_least_traffic():
    assert device_mesh._across_slices({"data": 6, "fsdp": 2, "tensor": 4, "stage": 2}, 4) == {
        "data": 2,
        "stage": 2,
        "fsdp": 1,
        "tensor": 1,
    }
    assert set(device_mesh._across_slices({"data": 4, "fsdp": 2, "stage": 1}, 1).values()) == {1}
    with pytest.raises(ShardingError, match=r"2 slices, .* data=1, stage=1, fsdp=1\. Set mesh\.data=2"):
        device_mesh._across_slices({"data": 1, "fsdp": 1, "tensor": 8, "stage": 1}, 2)


@pytest.mark.parametrize(
    ("spans", "sizes", "slices", "expected"),
    [
        (
            {"dcn_data": 2},
            {"data": 3, "fsdp": 8},
            0,
            r"dcn_data is 2, but the axis has 3 devices.* multiple of 2",
        ),
        ({"dcn_data": 2}, {"data": 2, "fsdp": 8}, 4, r"are 4 slices, but the product of mesh\.dcn_data=2, .* is 2\."),
        ({"dcn_fsdp": 1}, {"data": 2, "fsdp": 8}, 2, r"are 2 slices, but the product of mesh\.dcn_data=1, .* is 1\."),
    ],
)
def test_slices_that_the_devices_do_not_have_are_refused(spans, sizes, slices, expected):
    with pytest.raises(ShardingError, match=expected):
        device_mesh._slices_of(MeshConfig(**spans), dict.fromkeys(AXES, 1) | sizes, slices)


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"dcn_data": 0}, "mesh.dcn_data"),
        ({"data": 0}, "mesh.data is 0; expected a number of devices, or -1"),
        ({"tensor": -2}, "mesh.tensor is -2"),
        ({"data": -1}, "mesh.data and mesh.fsdp are -1; only one"),
        ({"tenser": 2}, "Did you mean 'tensor'"),
    ],
)
def test_a_mesh_config_is_checked(mapping, expected):
    with pytest.raises(ConfigError, match=expected):
        parse(MeshConfig, mapping, path="mesh")


def test_a_mesh_config_keeps_the_given_rules_alone_and_reads_back_what_it_wrote():
    given = {"norm_seq": ["context", "tensor"], "embed": "fsdp", "mlp": None, "expert_mlp": ["tensor"]}
    written = to_mapping(parse(MeshConfig, {"rules": given}))
    assert written["rules"] == {**given, "expert_mlp": "tensor"}
    assert parse(MeshConfig, written) == parse(MeshConfig, {"rules": given})
    assert MeshConfig().rules == {}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"mlp": "tenser"}, r"mesh.rules.mlp names the mesh axis 'tenser'. Did you mean 'tensor'\? .* data, fsdp"),
        ({"mlp": ["data", "modle"]}, "mesh.rules.mlp names the mesh axis 'modle'"),
        ({"mlp": 3}, r"mesh.rules.mlp"),
    ],
)
def test_rules_of_a_mesh_config_name_its_axes(rules, expected):
    with pytest.raises(ConfigError, match=expected):
        parse(MeshConfig, {"rules": rules}, path="mesh")


@pytest.mark.parametrize(
    ("logical_axes", "expected"),
    [
        (("vocab", "embed"), PartitionSpec("tensor", "fsdp")),
        (("layers", "embed", "mlp"), PartitionSpec("stage", "fsdp", "tensor")),
        (("layers", "experts", "expert_embed", "mlp"), PartitionSpec("stage", "expert", "fsdp", "tensor")),
        (("heads", "embed"), PartitionSpec("tensor", "fsdp")),
        (("norm",), PartitionSpec(None)),
        (("batch", "seq", "act_embed"), PartitionSpec(("data", "fsdp", "expert"), "context", None)),
        (("batch", "seq", "act_heads", None), PartitionSpec(("data", "fsdp", "expert"), "context", "tensor", None)),
        (("batch", "seq", "act_kv_heads", None), PartitionSpec(("data", "fsdp", "expert"), "context", "tensor", None)),
        (("batch", "seq", "act_vocab"), PartitionSpec(("data", "fsdp", "expert"), "context", "tensor")),
        (("batch", "norm_seq", "act_embed"), PartitionSpec(("data", "fsdp", "expert"), "context", None)),
        (("lookup_batch", "seq", "embed"), PartitionSpec(("data", "expert"), "context", "fsdp")),
        ((), PartitionSpec()),
    ],
)
def test_the_default_rules(logical_axes, expected):
    assert DEFAULT_RULES.spec(logical_axes, abstract()) == expected


def test_rules_are_values():
    rules = ShardingRules({"embed": ["fsdp"], "mlp": None})
    assert rules == ShardingRules({"mlp": (), "embed": "fsdp"})
    assert hash(rules) == hash(rules.updated({}))
    assert rules.updated({"mlp": "tensor"}).spec(("embed", "mlp"), abstract()) == PartitionSpec("fsdp", "tensor")
    assert rules.spec(("embed", "mlp"), abstract()) == PartitionSpec("fsdp", None)


def test_collisions_name_the_array_both_axes_and_the_mesh_axis():
    expected = (
        r"layer/kernel .*\('mlp', 'heads'\): 'mlp' -> 'tensor' and 'heads' -> 'tensor' .* mesh axis 'tensor'"
        r".* Change mesh.rules.mlp or mesh.rules.heads; null"
    )
    with pytest.raises(ShardingError, match=expected):
        DEFAULT_RULES.spec(("mlp", "heads"), abstract(), name="layer/kernel")


def test_unknown_logical_axes_suggest_neighbours():
    with pytest.raises(ShardingError, match=r"kernel: no rule for the logical axis 'emebd'. Did you mean 'embed'"):
        DEFAULT_RULES.spec(("emebd", "mlp"), abstract(), name="kernel")


def test_a_rule_for_an_axis_that_the_mesh_lacks_is_an_error():
    other = AbstractMesh((2,), ("model",), (AxisType.Auto,))
    with pytest.raises(ShardingError, match=r"kernel: 'mlp' goes to the mesh axis 'tensor'; this mesh has model\."):
        DEFAULT_RULES.spec(("mlp",), other, name="kernel")


@pytest.mark.parametrize(
    ("logical_axes", "shape", "expected"),
    [
        (("vocab", "embed"), (33, 8), r"kernel \(33, 8\): axis 0, 'vocab', has size 33, .* of 2 \(mesh.tensor=2\)"),
        (("vocab", "embed"), (33, 8), r"fit: size 32 or 34; mesh.tensor=1; mesh.rules.vocab=null, which does not"),
        (("embed", "batch"), (8, 6), "'embed' -> 'fsdp' and 'batch' -> "),
        (
            ("norm", "batch"),
            (3, 6),
            r"'batch', has size 6, .* of 4 \(mesh.data=2 x mesh.fsdp=2\)\. .* size 4 or 8; mesh.data=1; mesh.fsdp=1;",
        ),
        (("batch",), (1,), "fit: size 4; mesh.rules"),
        (("embed",), (4, 4), r"kernel: 1 logical axes \('embed',\) for an array of 2 axes, \(4, 4\)"),
    ],
)
def test_sizes_that_do_not_divide_name_those_that_would(logical_axes, shape, expected):
    with pytest.raises(ShardingError, match=expected):
        DEFAULT_RULES.sharding(abstract(data=2, fsdp=2, tensor=2), logical_axes, shape, name="kernel")


def test_a_tree_names_everything_that_does_not_fit_by_its_path():
    values = {"blocks": {"up": jnp.ones((4, 5)), "down": jnp.ones((7, 4))}, "scale": jnp.ones(3)}
    axes = {"blocks": {"up": ("embed", "mlp"), "down": ("mlp", "embed")}, "scale": ("norm",)}
    mesh = abstract(fsdp=2, tensor=2)
    expected = r"blocks/down \(7, 4\): axis 0, 'mlp', has size 7.*\nblocks/up \(4, 5\): axis 1"
    with pytest.raises(ShardingError, match=expected) as caught:
        DEFAULT_RULES.tree_shardings(mesh, values, axes)
    assert caught.value.logical_axes == ("mlp",)
    shardings = DEFAULT_RULES.tree_shardings(abstract(fsdp=2), values, axes)
    assert jax.tree.map(lambda sharding: sharding.spec, shardings) == {
        "blocks": {"up": PartitionSpec("fsdp", "tensor"), "down": PartitionSpec("tensor", "fsdp")},
        "scale": PartitionSpec(None),
    }


def test_constrain_returns_its_argument_without_a_mesh_and_on_one_device():
    x = jnp.ones((3, 5))
    assert constrain(x, "batch", "no such axis") is x
    with use_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        assert constrain(x, "batch", "act_mlp") is x
        with pytest.raises(ShardingError, match="constrain: no rule for the logical axis 'no such axis'"):
            constrain(x, "batch", "no such axis")
        with pytest.raises(ShardingError, match="1 logical axes"):
            constrain(x, "batch")


LOGICAL = ("a", "b", "c", "d")
TABLES = st.fixed_dictionaries({name: st.lists(st.sampled_from(AXES), unique=True, max_size=3) for name in LOGICAL})
NAMES = st.lists(st.sampled_from([*LOGICAL, None]), max_size=4)
SIZES = st.fixed_dictionaries(dict.fromkeys(AXES, st.integers(1, 3)))


@given(TABLES, NAMES)
def test_a_spec_places_every_axis_by_its_rule_or_collides(table, names):
    rules = ShardingRules(table)
    used = [axis for name in names if name for axis in table[name]]
    if len(set(used)) < len(used):
        with pytest.raises(ShardingError, match="both use the mesh axis"):
            rules.spec(names, abstract())
        return
    spec = rules.spec(names, abstract())
    assert len(spec) == len(names)
    for name, entry in zip(names, spec, strict=True):
        placed = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        assert list(placed) == (table[name] if name else [])


@given(st.lists(st.sampled_from(AXES), unique=True, max_size=3), SIZES, st.integers(0, 40))
def test_a_size_is_accepted_exactly_where_the_mesh_divides_it(axes, sizes, size):
    mesh, rules = abstract(**sizes), ShardingRules({"a": axes})
    parts = math.prod(sizes[axis] for axis in axes)
    if size % parts == 0:
        assert rules.sharding(mesh, ("a",), (size,)).shard_shape((size,)) == (size // parts,)
    else:
        with pytest.raises(ShardingError, match=f"size {size}, which is not a multiple of {parts}"):
            rules.sharding(mesh, ("a",), (size,))


@given(SIZES, st.sampled_from([None, *AXES]), st.integers(1, 64))
def test_a_mesh_has_the_sizes_that_were_asked_for_and_uses_every_device(sizes, rest, devices):
    asked = {**dict.fromkeys(AXES, 1), **sizes, **({rest: -1} if rest else {})}
    try:
        resolved = device_mesh._axis_sizes(MeshConfig(**asked), devices)
    except ShardingError:
        fixed = math.prod(size for axis, size in asked.items() if axis != rest)
        assert devices % fixed if rest else devices != fixed
        return
    assert math.prod(resolved.values()) == devices
    assert all(resolved[axis] == size for axis, size in asked.items() if axis != rest)
