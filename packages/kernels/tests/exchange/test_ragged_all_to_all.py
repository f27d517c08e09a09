"""The ragged all-to-all: interpreted, on one device here and on eight in a process that has them; and compiled."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stack_core import ops
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.chips.targets import Target, use_target
from stack_core.programs.roofline import program_cost
from stack_core.testing import OpCheck, op_checks
from stack_kernels.exchange.ragged_all_to_all import ragged_all_to_all

ROWS, WIDTH, BUFFER, GROUPS = 256, 512, 384, 32


FEW = ("send_all_over_1-float32", "send_cut_off_over_1-bfloat16", "return_cut_off_over_1-transformed")


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=() if str(check) in FEW else pytest.mark.slow)
        for check in op_checks("exchange")
        if check.case.name.endswith("_over_1")
    ],
    ids=str,
)
def test_the_contract_on_one_device(check: OpCheck) -> None:
    with use_chip(registries.chips["v6e"]):
        check(ragged_all_to_all(interpret=True))


@pytest.mark.parametrize("cases", ["covering", pytest.param("all", marks=pytest.mark.slow)])
def test_on_eight_devices(cases: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    script = Path(__file__).with_name("ragged_all_to_all_on_eight_devices.py")
    subprocess.run([sys.executable, "-W", "error", script, cases], check=True, env=environment)


def check_moves_each_row_once(name: str) -> None:
    """Forward and back, with gradients, a device sends four times its rows, and gathers only the sizes."""
    target = Target(name)
    mesh = Mesh(np.array(target.devices), ("expert",))
    split = NamedSharding(mesh, P("expert"))
    x = jax.ShapeDtypeStruct((4 * ROWS, WIDTH), jnp.bfloat16, sharding=split)
    sizes = jax.ShapeDtypeStruct((4 * GROUPS,), jnp.int32, sharding=split)

    def on_part(x: jax.Array, sizes: jax.Array) -> jax.Array:
        received = ops.exchange(x, sizes, axis_name="expert", out_rows=BUFFER)
        return ops.exchange(jnp.tanh(received), sizes, axis_name="expert", out_rows=len(x), kind="return")

    def total(x: jax.Array, sizes: jax.Array) -> jax.Array:
        y = jax.shard_map(on_part, mesh=mesh, in_specs=(P("expert"), P("expert")), out_specs=P("expert"))(x, sizes)
        return jnp.sum(jnp.tanh(y.astype(jnp.float32)))

    with use_target(target):
        compiled = jax.jit(jax.grad(total)).lower(x, sizes).compile()
    cost = program_cost(compiled, target.devices, target.chip, link_share=target.link_share)
    times = {"ragged-all-to-all": 0, "all-gather": 0}
    for found in cost.collectives:
        if found.kind == "ragged-all-to-all":
            times[found.kind] += found.times
        elif found.array_bytes >= ROWS * WIDTH * 2:
            times[found.kind] = times.get(found.kind, 0) + found.times
    assert times == {"ragged-all-to-all": 4, "all-gather": 0}


@pytest.mark.tpu_aot
@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "v7x:2x2x1"])
def test_a_tpu_moves_each_row_once(name: str) -> None:
    check_moves_each_row_once(name)


@pytest.mark.gpu_aot
def test_a_gpu_moves_each_row_once() -> None:
    check_moves_each_row_once("h100:1x1x4")
