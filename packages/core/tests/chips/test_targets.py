"""Targets are refused by what is wrong with their names; those that exist compile without their hardware."""

import importlib.util
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stack_core.abi.errors import HardwareError
from stack_core.abi.installing import install_command
from stack_core.abi.plugins import registries
from stack_core.chips import chip_of, target_chip, use_chip
from stack_core.chips.gpu_configs import GPU_CONFIGS
from stack_core.chips.targets import Target, use_target
from stack_core.programs.roofline import program_cost

TPUS = {
    "v4:2x2x1": 4,
    "v5e:1x1": 1,
    "v5e:2x2": 4,
    "v5p:2x2x2": 8,
    "v5p:8x16x16": 2048,
    "v6e:4x4": 16,
    "v7x:2x2x1": 8,
}
GPUS = {"a100-40gb:1x1x1": 1, "a100-80gb:1x1x8": 8, "h100:1x1x8": 8, "h200:1x1x1": 1, "b200:2x4x8": 64}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p", "'v5p' is not of the form CHIP:SIZES, such as v5p:8x16x16"),
        ("v5p:8x", "not of the form"),
        ("v5p:8x16x16 ", "not of the form"),
        ("v5q:2x2x1", "nothing is known about compiling for 'v5q'. Did you mean 'v5p' or 'v5e'"),
        ("cpu:8", "Targets: a100-40gb, a100-80gb, b200, h100, h200, v4, v5e, v5p, v6e, v7x"),
        ("v5p:2x2", "has 2 sizes; the torus of a v5p has 3 axes, as in v5p:2x2x1"),
        ("v6e:2x2x1", "has 3 sizes; the torus of a v6e has 2 axes, as in v6e:2x2"),
        ("v5p:3x5x7", "does not exist: .* Nearest: v5p:2x4x7 or v5p:4x6x7"),
        ("v5p:0x2x2", "does not exist: .* Nearest: v5p:2x2x2"),
        ("v6e:16x15", "Nearest: v6e:16x14 or v6e:16x16"),
        ("v6e:32x32", "has 1024 chips; the largest slice of v6e has 256"),
        ("h100:8", "slices x hosts x GPUs per host, with at most 8 per host, as in h100:1x1x8"),
        ("h100:1x1x16", "at most 8"),
        ("h100:1x0x8", "at most 8"),
        ("h100:1x1x8*2", r"for GPUs the number of slices is the first size, as in h100:2x1x8"),
        ("v5p:2x2x1*0", r"\*0 is not a number of slices"),
        ("v5p:3x5x7*2", "does not exist: .* Nearest: v5p:2x4x7"),
    ],
)
def test_a_name_that_is_no_target_is_refused(name, message):
    with pytest.raises(HardwareError, match=message):
        Target(name)


@pytest.mark.parametrize("name", [*TPUS, *GPUS, "v5e:16x16", "v5p:16x16x20"])
def test_a_target_knows_its_chip_without_a_compiler(name):
    target = Target(name)
    assert target.chip.kind == name.partition(":")[0]
    with use_chip(target.chip):
        assert target_chip() is target.chip
    assert target_chip() is not target.chip


@pytest.mark.parametrize(
    ("name", "modules", "extra"),
    [("v6e:2x2", ["libtpu"], "tpu"), ("h100:1x1x1", ["jax_cuda13_plugin", "jax_cuda12_plugin"], "cuda13")],
)
def test_a_missing_compiler_names_the_extra(name, modules, extra, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in modules else find(name))
    with pytest.raises(
        HardwareError, match=rf"needs {modules[0]}, .* {re.escape(install_command(f'stack-core[{extra}]'))}"
    ):
        _ = Target(name).devices


@pytest.mark.parametrize("name", GPU_CONFIGS)
def test_every_gpu_has_a_row_with_all_that_its_target_config_says(name):
    chip = registries.chips[name]
    assert None not in (chip.hbm_bytes, chip.hbm_bandwidth_bytes_s, chip.on_chip_bytes)
    proto = GPU_CONFIGS[name].text_proto(chip, "NVIDIA Test")
    assert f"device_memory_size: {chip.hbm_bytes} " in proto
    assert 'device_description_str: "NVIDIA Test"' in proto


def at(*coords, process=0):
    return SimpleNamespace(coords=coords, process_index=process)


def test_links_on_a_torus_are_those_of_the_axes_that_devices_span():
    target = Target("v5p:4x4x4")
    assert target.link_share([at(0, 0, 0), at(3, 0, 0)]) == pytest.approx(1 / 3)
    assert target.link_share([at(0, 0, 0), at(0, 1, 0), at(0, 0, 2)]) == pytest.approx(2 / 3)
    assert target.link_share([at(0, 0, 0), at(1, 1, 1)]) == 1.0
    assert Target("v6e:4x4").link_share([at(0, 0, 0), at(1, 0, 0)]) == 0.5


def test_slices_are_told_apart_by_their_devices():
    target = Target("v5p:2x2x1*2")
    assert target.slices == 2 and target.sizes == (2, 2, 1)
    devices = [SimpleNamespace(coords=(0, 0, 0), slice_index=index) for index in range(2)]
    assert [target.slice_of(device) for device in devices] == [0, 1]
    assert target.link_share(devices) is None and target.link_share(devices[:1]) is not None
    gpus = Target("h100:2x4x8")
    assert gpus.slices == 2 and [gpus.slice_of(at(process=host)) for host in (0, 3, 4, 7)] == [0, 0, 1, 1]


def test_links_between_hosts_with_gpus_are_not_known():
    target = Target("h100:1x2x8")
    assert target.link_share([at(process=0), at(process=0)]) == 1.0
    assert target.link_share([at(process=0), at(process=1)]) is None


def check_devices(name, count):
    before = dict(os.environ)
    target = Target(name)
    assert len(target.devices) == count
    assert {device.device_kind for device in target.devices} == {target.devices[0].device_kind}
    assert chip_of(target.devices[0]) is target.chip
    assert dict(os.environ) == before
    check_kernels_see(target)


def check_kernels_see(target):
    """What libraries of kernels ask JAX for is the target's, on a mesh too."""
    (device, *_), mesh = target.devices, Mesh(np.array(target.devices), ("x",))
    with use_target(target):
        assert target_chip() is target.chip
        assert jax.sharding.get_abstract_mesh().empty
        assert jax.sharding.get_abstract_mesh().abstract_device.device_kind == device.device_kind
        assert jax.jit(lambda x: x + 1).trace(jax.ShapeDtypeStruct((), jnp.float32)).lower().compile().as_text()
        if device.platform == "tpu":
            assert pltpu.get_tpu_info().generation == int(target.chip.kind[1])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), use_target(target):
        assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
    assert jax.config.jax_default_device is None


def check_compiles(name):
    target = Target(name)
    mesh = Mesh(np.array(target.devices), ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x", None))
    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=rows)
    weight = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16, sharding=rows)
    with use_target(target):
        compiled = jax.jit(lambda x, weight: x @ weight, out_shardings=rows).lower(x, weight).compile()
    cost = program_cost(compiled, target.devices, target.chip, link_share=target.link_share)
    assert cost.flops.by_dtype == {"bfloat16": 2 * 1024 * 512 * 256 // len(target.devices)}
    assert [found.kind for found in cost.collectives] == ["all-gather"]
    assert cost.collectives[0].array_bytes == 512 * 256 * 2
    assert cost.roofline.step_s > 0


@pytest.mark.tpu_aot
@pytest.mark.parametrize("name", TPUS)
def test_tpus_that_are_not_there(name):
    check_devices(name, TPUS[name])


@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", GPUS)
def test_gpus_that_are_not_there(name):
    check_devices(name, GPUS[name])


@pytest.mark.tpu_aot
@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "v7x:2x2x1"])
def test_a_product_compiles_for_tpus(name):
    check_compiles(name)


@pytest.mark.gpu_aot
@pytest.mark.parametrize("name", ["a100-80gb:1x1x8", "h100:1x1x8", "h200:1x1x2", "b200:1x1x8"])
def test_a_product_compiles_for_gpus(name):
    check_compiles(name)


@pytest.mark.gpu_aot
def test_gpus_can_be_compiled_for_after_jax_gave_up_on_their_plugin():
    program = "import jax; jax.devices()\nfrom stack_core.chips.targets import Target\nTarget('h100:1x1x2').devices[1]"
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, stderr=subprocess.DEVNULL)
