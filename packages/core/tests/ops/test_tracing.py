"""What calls of ops cost while JAX traces: each distinct call is traced once."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.errors import ArgumentError, PluginError
from stack_core.abi.ops import OpImplementation
from stack_core.ops.definitions.linear import OP as LINEAR
from stack_core.ops.dispatch.dispatch import dispatch
from stack_core.ops.dispatch.op import Op, op_named
from stack_core.testing import op_checks
from stack_core.testing.op_contract import draw

CALLS = 6
OPTIONS = {"preferred_dtype": jnp.dtype("float32")}
X = jnp.ones((2, 3))
WEIGHTS = [jnp.full((3, 3), 0.1 * number) for number in range(CALLS)]


@pytest.fixture
def traces(register: Any) -> Counter[str]:
    """Counts how often each function of an implementation, and the reference, is traced."""
    counts: Counter[str] = Counter()

    def forward(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any, requested: Any) -> Any:
        counts["forward"] += 1
        return x @ weight, {}

    def backward(arrays: Any, options: Any, outputs: Any, residuals: Any, cotangents: Any, *, requested: Any) -> Any:
        counts["backward"] += 1
        return {"x": cotangents @ arrays["weight"].T, "weight": arrays["x"].T @ cotangents}

    def supports(call: Any, chip: Any, config: Any) -> bool:
        counts["supports"] += 1
        return True

    register(OpImplementation("linear", "counted", forward, backward, supports=supports))
    return counts


def _deep(traces: Counter[str]) -> Any:
    """A network of several calls of one shape, whose op counts the traces of its reference."""

    def reference(**arguments: Any) -> Any:
        traces["reference"] += 1
        return LINEAR.reference(**arguments)

    op = Op("linear", reference, LINEAR.axes, folds="...", linear_in=LINEAR.linear_in)

    def deep(weights: Any, x: Any) -> Any:
        for weight in weights:
            arrays = {"x": x, "weight": weight, "bias": None}
            x = jnp.sin(dispatch(op, arrays, OPTIONS, None))
        return jnp.sum(x)

    return deep


def test_the_gradient_of_many_equal_calls_traces_each_function_once_and_no_tangent(traces: Counter[str]) -> None:
    found = jax.jit(jax.grad(_deep(traces), argnums=(0, 1)))(WEIGHTS, X)
    assert traces == {"supports": 2, "forward": 1, "backward": 1}

    def plain(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = jnp.sin(x @ weight)
        return jnp.sum(x)

    for actual, expected in zip(
        jax.tree.leaves(found), jax.tree.leaves(jax.grad(plain, argnums=(0, 1))(WEIGHTS, X)), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)


def test_another_program_traces_nothing_again_but_another_shape_does(traces: Counter[str]) -> None:
    deep = _deep(traces)
    jax.jit(jax.grad(deep)).trace(WEIGHTS, X)
    before = Counter(traces)
    jax.jit(lambda weights, x: jax.grad(deep)(weights, 2 * x)).trace(WEIGHTS, X)
    assert traces == before
    jax.jit(deep).trace(WEIGHTS, X[:1])
    assert traces["forward"] == before["forward"] + 1


def test_forward_mode_and_second_derivatives_trace_the_reference_once(traces: Counter[str]) -> None:
    deep = _deep(traces)
    jax.jit(lambda weights, x: jax.jvp(deep, (weights, x), (weights, x))).lower(WEIGHTS, X)
    jax.jit(lambda weights, x: jax.jvp(jax.grad(deep, argnums=(0, 1)), (weights, x), (weights, x))).lower(WEIGHTS, X)
    assert traces["reference"] == 1


def test_the_tangent_is_of_the_contexts_of_the_call(register: Any) -> None:
    register()
    x, weight = jnp.ones((2, 3)), jnp.ones((3, 4))
    with jax.default_matmul_precision("float32"):
        traced = jax.jit(lambda x, weight: jax.jvp(ops.linear, (x, weight), (x, weight))).trace(x, weight)
    products = [line for line in traced.lower().as_text().splitlines() if "dot_general" in line]
    assert len(products) == 3
    assert all("HIGHEST" in line for line in products), products


def test_the_line_of_each_call_is_its_own() -> None:
    """Calls that share what was traced keep their scopes and lines in the compiled program."""

    def function(x: Any) -> Any:
        with jax.named_scope("first"):
            x = ops.norm(x)
        with jax.named_scope("second"):
            return ops.norm(x)

    text = jax.jit(function).lower(jnp.ones((3, 24))).as_text(debug_info=True)
    start = function.__code__.co_firstlineno
    for scope, line in (("first", start + 2), ("second", start + 4)):
        assert scope in text
        assert f'test_tracing.py":{line}:' in text


LINEAR_IN = [  # by default one operand of each op
    pytest.param(op, name, id=f"{op}-{name}", marks=pytest.mark.slow if place else ())
    for op in ("attention", "linear", "low_rank", "norm", "ragged_dot", "rope")  # the others need several devices
    for place, name in enumerate(op_named(op).linear_in)
]


@pytest.mark.parametrize(("op", "name"), LINEAR_IN)
def test_an_op_is_linear_in_what_it_declares_and_its_gradient_keeps_none_of_it(op: str, name: str) -> None:
    drawn = ((check.case, draw(check.case, "float32")) for check in op_checks(op) if check.aspect == "float32")
    case, arrays = next(each for each in drawn if isinstance(each[1].get(name), jax.Array) and each[1][name].size)
    x = arrays[name]

    def call(x: Any) -> Any:
        return getattr(ops, op)(**{**arrays, name: x}, **case.options)

    output, move = jax.vjp(call, x)
    moved = jax.jvp(call, (x,), (jnp.cos(x),))[1]
    cotangent = jax.tree.map(jnp.sin, output)
    (gradient,) = move(cotangent)
    (transposed,) = jax.linear_transpose(call, x)(cotangent)
    np.testing.assert_allclose(jnp.vdot(cotangent, moved), jnp.vdot(gradient, jnp.cos(x)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(transposed, gradient, rtol=0, atol=2e-5 * max(float(jnp.abs(gradient).max()), 1.0))
    alike = [leaf for name, leaf in arrays.items() for leaf in jax.tree.leaves(leaf) if leaf is not x]
    kept = [leaf for leaf in jax.tree.leaves(move) if leaf.shape == x.shape and bool(jnp.all(leaf == x))]
    assert len(kept) <= sum(leaf.shape == x.shape for leaf in alike)


def test_what_is_not_linear_is_not_transposed() -> None:
    with pytest.raises(ArgumentError, match=r"norm: jax\.linear_transpose cannot transpose it in x"):
        jax.linear_transpose(ops.norm, X)(X)
    with pytest.raises(ArgumentError, match="x and weight, because it is linear only in one of x, weight, bias"):
        jax.linear_transpose(ops.linear, X, WEIGHTS[0])(X)
    mapped = jax.linear_transpose(jax.vmap(lambda x: ops.linear(x, WEIGHTS[1])), X[None])(X[None])[0]
    np.testing.assert_allclose(mapped[0], X @ WEIGHTS[1].T, rtol=1e-6)


def test_a_false_declaration_is_found_when_the_tangent_is_needed() -> None:
    op = Op("linear", lambda x, requested, **_: (x * x, {}), LINEAR.axes, linear_in=("x",))
    with pytest.raises(PluginError, match="linear: `linear_in` names 'x', but the reference is not linear in it"):
        jax.jvp(lambda x: dispatch(op, {"x": x, "weight": WEIGHTS[0], "bias": None}, OPTIONS, "reference"), (X,), (X,))
