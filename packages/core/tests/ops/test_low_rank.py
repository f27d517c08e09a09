"""Weights with adapters in the ops that take them, and what is said of those that do not fit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.errors import ArgumentError, ShapeError
from stack_core.abi.ops import LowRankView
from stack_core.ops.dispatch.dispatch import recording, run
from stack_core.ops.dispatch.op import op_named
from stack_core.testing import Quantized

RNG = np.random.default_rng(0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    base: Any
    down: Any
    up: Any
    scale: Any
    rows: Any = None

    def __stack_low_rank__(self) -> LowRankView:
        return LowRankView((1, 0), self.base, self.down, self.up, self.scale, self.rows)

    def whole(self, adapter: int) -> Any:
        return self.base + self.scale[adapter] * jnp.matmul(self.down[adapter], self.up[adapter])


def _normal(*shape: int) -> Any:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def _adapted(*lead: int, rows: Any = None) -> Adapted:
    """Two adapters of rank 3 on a base [*lead, 6, 5]."""
    return Adapted(_normal(*lead, 6, 5), _normal(2, *lead, 6, 3), _normal(2, *lead, 3, 5), jnp.array([0.5, 2.0]), rows)


def _assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5), actual, expected)


def test_a_linear_map_is_that_of_base_and_adapter_with_gradients_of_both() -> None:
    x, bias, weight = _normal(4, 6), _normal(5), _adapted()

    def loss(product: Any, weight: Adapted) -> Any:
        return jnp.sum(jnp.sin(product(x, weight)))

    actual = jax.value_and_grad(lambda w: loss(lambda x, w: ops.linear(x, w, bias=bias), w))(weight)
    expected = jax.value_and_grad(lambda w: loss(lambda x, w: x @ w.whole(0) + bias, w))(weight)
    _assert_close(actual, expected)


def test_each_row_has_its_adapter_or_none() -> None:
    x, weight = _normal(3, 2, 6), _adapted(rows=jnp.array([1, -1, 0]))
    expected = jnp.stack([x[0] @ weight.whole(1), x[1] @ weight.base, x[2] @ weight.whole(0)])
    _assert_close(ops.linear(x, weight), expected)


def test_a_base_may_be_quantized() -> None:
    x, weight = _normal(4, 6), _adapted()
    base = Quantized(jnp.asarray(RNG.integers(-9, 9, size=(6, 5)), jnp.int8), jnp.full((1, 5), 0.1))
    adapted = replace(weight, base=base)
    _assert_close(ops.linear(x, adapted), x @ replace(weight, base=ops.dequantize(base, jnp.float32)).whole(0))


@pytest.mark.parametrize("rows", [None, [1, 0, -1, 1, 1, 0, 0]])
def test_each_group_of_a_ragged_product_has_its_matrices(rows: Any) -> None:
    weight = _adapted(3, rows=None if rows is None else jnp.array(rows))
    x, groups = _normal(7, 6), [0, 0, 2, 2, 2]
    products = ops.ragged_dot(x, weight, jnp.array([2, 0, 3]))
    for row, product in enumerate(products):
        adapter = 0 if rows is None else rows[row]
        if row >= len(groups):
            expected = jnp.zeros(5)
        else:
            matrices = weight.base if adapter < 0 else weight.whole(adapter)
            expected = x[row] @ matrices[groups[row]]
        _assert_close(product, expected)


def test_a_gated_unit_takes_one_weight_with_adapters() -> None:
    x, gate, up = _normal(4, 6), _adapted(), _normal(6, 5)
    expected = ops.gated_linear_unit(x, gate.whole(0), up, limit=1.0)
    _assert_close(ops.gated_linear_unit(x, gate, up, limit=1.0), expected)


def test_a_named_implementation_and_names_of_axes_reach_the_products() -> None:
    x, weight, sizes = _normal(4, 6), _adapted(), jnp.array([2, 2])
    requests: list[Any] = []

    def keep(request: Any, operands: Any) -> Any:
        requests.append((request.op.name, request.implementation, request.axes))
        with recording(None):
            return run(request, operands)

    with recording(keep):
        ops.gated_linear_unit(
            x, weight, weight.base, implementation="reference", axes={"x": ("batch", None), "w_gate": (None, "mlp")}
        )
        ops.ragged_dot(x, _adapted(2), sizes, implementation="reference", axes={"lhs": ("batch", None)})
    of_x = {"x": ("batch", None)}
    assert requests == [
        ("linear", "reference", {**of_x, "weight": (None, "mlp")}),
        ("low_rank", None, of_x),
        ("linear", "reference", of_x),
        ("ragged_dot", "reference", {"lhs": ("batch", None)}),
        ("low_rank", None, of_x),
    ]
    gated = op_named("gated_linear_unit").implementation()
    with pytest.raises(ArgumentError, match="linear: 'reference' is an implementation of gated_linear_unit"):
        ops.gated_linear_unit(x, weight, weight.base, implementation=gated)


def test_a_number_that_no_adapter_has_is_nan() -> None:
    weight = _adapted()
    output = ops.low_rank(_normal(4, 6), weight.down, weight.up, weight.scale, jnp.array([0, 2, -1, -2]))
    assert jnp.isnan(output).all(axis=1).tolist() == [False, True, False, True]
    assert not output[2].any()


@pytest.fixture
def unchecked_annotations() -> Iterator[None]:
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    ("arguments", "kind", "expected"),
    [
        ({"up": jnp.zeros((2, 4, 5))}, ShapeError, "'rank' is 4 in up, but 3 in down"),
        ({"scale": jnp.zeros(3)}, ShapeError, "'adapters' is 3 in scale, but 2 in down"),
        ({"rows": jnp.zeros(5, jnp.int32)}, ShapeError, r"rows has shape \(5,\), but x \(4, 6\); expected \(4,\)"),
        ({"rows": jnp.zeros(4)}, ArgumentError, "rows has dtype float32"),
        ({"down": jnp.zeros((2, 6, 3), jnp.bfloat16)}, ArgumentError, "down bfloat16"),
        (
            {"down": jnp.zeros((0, 6, 3)), "up": jnp.zeros((0, 3, 5)), "scale": jnp.zeros(0)},
            ShapeError,
            "'adapters' is 0",
        ),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], kind: type[Exception], expected: str) -> None:
    given = {"down": jnp.zeros((2, 6, 3)), "up": jnp.zeros((2, 3, 5)), "scale": jnp.zeros(2), **arguments}
    with pytest.raises(kind, match=expected):
        ops.low_rank(jnp.zeros((4, 6)), **given)


def test_a_view_that_does_not_fit_its_base() -> None:
    with pytest.raises(ShapeError, match=r"The up of Adapted has shape \(2, 3, 4\); expected \(2, 3, 5\)"):
        ops.linear(_normal(4, 6), replace(_adapted(), up=jnp.zeros((2, 3, 4))))
