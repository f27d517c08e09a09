"""Tests `collective_matmul` on one device, and its errors; `test_on_eight_devices.py` tests it on several."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from stack_core import ops
from stack_core.abi.errors import ArgumentError, ShapeError, UnknownName
from stack_core.ops.definitions.collective_matmul import REFERENCE
from stack_core.testing import OpCheck, op_checks

X, WEIGHT = jax.ShapeDtypeStruct((6, 8), "float32"), jax.ShapeDtypeStruct((8, 4), "float32")


@pytest.mark.covering
@pytest.mark.parametrize(
    "check", [check for check in op_checks("collective_matmul") if check.case.name.endswith("_over_1")], ids=str
)
def test_the_contract_on_one_device(check: OpCheck) -> None:
    check(REFERENCE)


@pytest.fixture
def unchecked_annotations() -> Iterator[None]:
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def _on_four(x: Any, weight: Any, **options: Any) -> Any:
    """The shape of the result over four devices that need not be there; every device gets all of both arrays."""
    mesh = AbstractMesh((4,), ("tensor",), (AxisType.Auto,))

    def product(x: Any, weight: Any) -> Any:
        return ops.collective_matmul(x, weight, **{"axis_name": "tensor", **options})

    return jax.eval_shape(
        jax.shard_map(product, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False), x, weight
    )


def test_rows_are_the_last_axis_but_one() -> None:
    x = jax.ShapeDtypeStruct((2, 3, 8, 16), "bfloat16")
    weight = jax.ShapeDtypeStruct((16, 5), "bfloat16")
    assert _on_four(x, weight, kind="all_gather").shape == (2, 3, 32, 5)
    assert _on_four(x, weight, kind="reduce_scatter").shape == (2, 3, 2, 5)


@pytest.mark.parametrize(("rows", "remedy"), [(6, "Pad x to 8 rows or cut it to 4."), (3, "Pad x to 4 rows.")])
def test_rows_that_do_not_divide(rows: int, remedy: str) -> None:
    with pytest.raises(ShapeError, match=f"axis 'rows' is {rows} in x, and 'tensor' spans 4 devices.*{remedy}"):
        _on_four(jax.ShapeDtypeStruct((rows, 8), "float32"), WEIGHT, kind="reduce_scatter")


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    ("arguments", "kind", "expected"),
    [
        ({"x": X.update(shape=(6, 7))}, ShapeError, "'d_in' is 8 in weight, but 7 in x"),
        ({"x": X.update(shape=(8,))}, ShapeError, r"x has shape \(8,\)"),
        ({"x": X.update(dtype=jnp.bfloat16)}, ArgumentError, "x bfloat16, weight float32"),
        ({"kind": "all_reduce"}, UnknownName, "all_gather, reduce_scatter"),
        ({"axis_name": "tenser"}, ArgumentError, "axis_name is 'tenser'.* bound by jax.shard_map: 'tensor'"),
        ({"axis_name": ("tensor", "data")}, ArgumentError, r"axis_name is \('tensor', 'data'\)"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], kind: type[Exception], expected: str) -> None:
    with pytest.raises(kind, match=expected):
        _on_four(**{"x": X, "weight": WEIGHT, **arguments})


def test_outside_shard_map() -> None:
    with pytest.raises(
        ArgumentError, match=r"axis_name is 'tensor', .* bound by jax.shard_map: none. Call the op inside"
    ):
        ops.collective_matmul(jnp.ones((2, 3)), jnp.ones((3, 4)), axis_name="tensor")
