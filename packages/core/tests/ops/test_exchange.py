"""`exchange` on one device here, and on eight in a process that has them; and what it says when it cannot."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from stack_core import ops
from stack_core.abi.errors import ArgumentError, ShapeError, UnknownName
from stack_core.ops.definitions.exchange import REFERENCE
from stack_core.testing import OpCheck, op_checks


@pytest.mark.covering
@pytest.mark.parametrize(
    "check", [check for check in op_checks("exchange") if check.case.name.endswith("_over_1")], ids=str
)
def test_the_contract_on_one_device(check: OpCheck) -> None:
    check(REFERENCE)


@pytest.mark.parametrize("checks", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_on_eight_devices(checks: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    script = Path(__file__).with_name("exchange_on_eight_devices.py")
    subprocess.run([sys.executable, "-W", "error", script, checks], check=True, env=environment)


@pytest.mark.parametrize(
    ("arguments", "kind", "expected"),
    [
        ({"group_sizes": jnp.zeros(6, jnp.int32)}, ShapeError, "'groups' is 6 in group_sizes, and 'expert' spans 4"),
        ({"out_rows": 0}, ArgumentError, "out_rows is 0"),
        ({"kind": "receive"}, UnknownName, "send, return"),
        ({"axis_name": "experts"}, ArgumentError, "axis_name is 'experts'.* bound by jax.shard_map: 'expert'"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], kind: type[Exception], expected: str) -> None:
    given = {"group_sizes": jnp.zeros(8, jnp.int32), "axis_name": "expert", "out_rows": 4, **arguments}
    mesh = AbstractMesh((4,), ("expert",), (AxisType.Auto,))

    def exchanged(x: Any, group_sizes: Any) -> Any:
        return ops.exchange(x, **{**given, "group_sizes": group_sizes})

    sharded = jax.shard_map(exchanged, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    with pytest.raises(kind, match=expected):
        jax.eval_shape(sharded, jnp.zeros((3, 2)), given["group_sizes"])
