"""`ring_attention` by the kernels of `attention`: on eight devices, compiled for absent chips, and its refusals."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stack_core import ops
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.chips.targets import Target, use_target
from stack_core.testing import OpCheck, op_checks
from stack_kernels.laboratory.without_cudnn import pretend_cudnn
from stack_kernels.ring_attention.blocks import blocks

SPLIT = P(None, "context")


@pytest.mark.parametrize("checks", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_on_eight_devices(checks: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    script = Path(__file__).with_name("blocks_on_eight_devices.py")
    subprocess.run([sys.executable, "-W", "error", script, checks], check=True, env=environment)


@pytest.mark.parametrize(
    "check",
    [
        check if str(check) == "causal_over_1-float32" else pytest.param(check, marks=pytest.mark.slow)
        for check in op_checks("ring_attention")
        if check.case.name.endswith("_over_1") and check.aspect != "float16"
    ],
    ids=str,
)
def test_the_contract_on_one_device(check: OpCheck) -> None:
    with use_chip(registries.chips["v6e"]):
        check(blocks(interpret=True))


def attend(mesh: Any) -> Any:
    """Returns a loss of (query, key, value, segment_ids), with the sequence split over a mesh."""

    def local(query: Any, key: Any, value: Any, segment_ids: Any) -> Any:
        packed = ops.PackedSegments.of(segment_ids)
        # In this order a pair of devices has one pair of blocks, so few kernels are compiled.
        return ops.ring_attention(
            query, key, value, segment_ids=packed, axis_name="context", order="contiguous", causal=True
        )

    ring = jax.shard_map(local, mesh=mesh, in_specs=(SPLIT,) * 4, out_specs=SPLIT)
    return lambda *arrays: jnp.sum(ring(*arrays).astype(jnp.float32))


def operands(sharding: Any = None) -> tuple[jax.ShapeDtypeStruct, ...]:
    shapes = [(1, 1024, heads, 128) for heads in (4, 2, 2)]
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    return (*structs, jax.ShapeDtypeStruct((1, 1024), jnp.int32, sharding=sharding))


@pytest.mark.parametrize(
    ("chip", "expected"),
    [
        ("h100", "no kernel of attention supports its blocks (cudnn: it provides no lse; splash: it is for tpu"),
        ("cpu", "it is for gpu and tpu, and the target is cpu"),
    ],
)
def test_without_a_kernel_the_reason_is_explained(chip: str, expected: str) -> None:
    mesh = AbstractMesh((2,), ("context",), (AxisType.Auto,))
    with pretend_cudnn():
        (call,) = ops.explain(
            jax.grad(attend(mesh)), *operands(), chip=None if chip == "cpu" else registries.chips[chip]
        )
    assert call.forward.implementation.name == call.backward.implementation.name == "reference"
    assert dict(call.forward.refused)["blocks"].startswith(expected)


def check_compiles(target: Target, *kernels: str) -> None:
    mesh = Mesh(np.array(target.devices).reshape(-1), ("context",), axis_types=(AxisType.Auto,))
    with use_target(target):
        gradients = jax.jit(jax.grad(attend(mesh), argnums=(0, 1, 2)))
        text = gradients.lower(*operands(NamedSharding(mesh, SPLIT))).compile().as_text()
    for kernel in kernels:
        assert kernel in text, kernel
    assert "collective-permute" in text


@pytest.mark.tpu_aot
def test_it_compiles_for_tpus_with_splash() -> None:
    check_compiles(
        Target("v5p:2x2x1"), "splash_mha_fwd_segmented", "splash_mha_dq_segmented", "splash_mha_dkv_segmented"
    )


@pytest.mark.gpu_aot
def test_it_compiles_for_gpus_with_tokamax() -> None:
    pytest.importorskip("tokamax", reason="Tokamax needs Python 3.12")
    check_compiles(Target("h100:1x1x2"), "mosaic_gpu")
