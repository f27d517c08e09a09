"""Tests `exchange` on one device, and its errors; `test_on_eight_devices.py` tests it on several."""

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

FEW = ("send_all_over_1-transformed", "send_cut_off_over_1-bfloat16", "return_cut_off_over_1-float32")


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
    check(REFERENCE)


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
