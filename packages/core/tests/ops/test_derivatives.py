"""Derivatives and mappings of calls, by whatever implementations are installed, against the oracles in float64.

Reverse mode runs the backward pass that was chosen; forward mode and derivatives of derivatives are the reference's.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.ops.dispatch.op import suite_of
from stack_core.testing.cases import OpCase
from stack_core.testing.op_contract import draw

OPS = (
    "attention",
    "gated_linear_unit",
    "linear",
    "linear_attention",
    "linear_cross_entropy",
    "norm",
    "paged_attention",
    "ragged_dot",
    "rope",
)  # collective_matmul needs several devices; state_space is built as linear_attention is
ONE_OF_EACH = [pytest.param(next(iter(suite_of(op).cases)), id=op) for op in OPS]


def _keep_by_default(*names: str) -> list[Any]:
    """Marks the other ops as slow."""
    return [
        pytest.param(*each.values, id=each.id, marks=() if each.id in names else pytest.mark.slow)
        for each in ONE_OF_EACH
    ]


def _moving(case: OpCase, arrays: Any) -> dict[str, Any]:
    return {
        name: x
        for name, x in arrays.items()
        if name not in case.fixed and isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    }


def _sum(case: OpCase, call: Callable[..., Any], arrays: Any, moving: Any) -> Any:
    """A number that depends on every output in a way of its own."""
    outputs = [
        x.astype(np.float64 if x.dtype == np.float64 else np.float32)
        for x in jax.tree.leaves(call(**{**arrays, **moving}, **case.options))
    ]
    return sum(jnp.sum(jnp.where(jnp.isfinite(x), jnp.sin(x), 0)) for x in outputs)


def _jvp(function: Callable[[Any], Any], moving: Any) -> Any:
    return jax.jvp(function, (moving,), (jax.tree.map(jnp.cos, moving),))


def _hessian_times_vector(function: Callable[[Any], Any], moving: Any) -> Any:
    return jax.jvp(jax.grad(function), (moving,), (jax.tree.map(jnp.cos, moving),))[1]


def _gradient_of_gradient(function: Callable[[Any], Any], moving: Any) -> Any:
    def squared(moving: Any) -> Any:
        return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(jax.grad(function)(moving)))

    return jax.grad(squared)(moving)


def _exactly(case: OpCase, derive: Callable[..., Any], arrays: Any) -> Any:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = _widened(arrays)
        function = functools.partial(_sum, case, suite_of(case.op).oracle, wide)
        return jax.tree.map(np.asarray, jax.jit(lambda moving: derive(function, moving))(_moving(case, wide)))


def _widened(arrays: Any) -> Any:
    return jax.tree.map(
        lambda x: jnp.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(x), arrays
    )


def _compare(actual: Any, expected: Any, tolerance: float) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64),
            np.asarray(e, np.float64),
            rtol=0,
            atol=tolerance * max(float(np.max(np.abs(np.asarray(e, np.float64)))), 1e-3),
        )


@pytest.mark.covering
@pytest.mark.parametrize("case", ONE_OF_EACH)
@pytest.mark.parametrize("derive", [_jvp, _hessian_times_vector, _gradient_of_gradient])
def test_forward_mode_and_second_derivatives_are_those_of_the_definition(case: OpCase, derive: Any) -> None:
    arrays = draw(case, "float32")
    function = functools.partial(_sum, case, getattr(ops, case.op), arrays)
    actual = jax.jit(lambda moving: derive(function, moving))(_moving(case, arrays))
    _compare(actual, _exactly(case, derive, arrays), 2e-4)


# Such a derivative takes the same tangents, so either test has half of the ops by default.
@pytest.mark.parametrize(
    "case", _keep_by_default("gated_linear_unit", "linear", "linear_cross_entropy", "paged_attention")
)
def test_narrow_operands_have_second_derivatives_too(case: OpCase) -> None:
    arrays = draw(case, "bfloat16")
    if case.op == "gated_linear_unit":  # the sine of its large outputs depends on bits that bf16 does not have
        arrays |= {name: x / 4 for name, x in _moving(case, arrays).items()}
    function = functools.partial(_sum, case, getattr(ops, case.op), arrays)
    actual = jax.jit(lambda moving: _hessian_times_vector(function, moving))(_moving(case, arrays))
    _compare(actual, _exactly(case, _hessian_times_vector, arrays), 5e-2)


@pytest.mark.parametrize("case", _keep_by_default("attention", "linear_attention", "norm", "ragged_dot", "rope"))
def test_narrow_operands_have_a_tangent_too(case: OpCase) -> None:
    arrays = draw(case, "bfloat16")
    call = functools.partial(getattr(ops, case.op), **case.options)
    actual = jax.jit(lambda moving: _tangents(call, arrays, moving))(_moving(case, arrays))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = _widened(arrays)
        expected = _tangents(functools.partial(suite_of(case.op).oracle, **case.options), wide, _moving(case, wide))
    _compare(actual, jax.tree.map(np.asarray, expected), 5e-2)


def _tangents(call: Callable[..., Any], arrays: Any, moving: Any) -> Any:
    rounded = jax.tree.map(lambda x: jnp.cos(x.astype(jnp.float32)).astype(jnp.bfloat16).astype(x.dtype), moving)
    return jax.jvp(lambda moving: call(**{**arrays, **moving}), (moving,), (rounded,))[1]


@pytest.mark.parametrize(
    ("ways", "dtype", "tolerance"),
    [
        ("by turns", "float32", 1e-4),
        pytest.param("both", "float32", 1e-4, marks=pytest.mark.slow),
        pytest.param("both", "bfloat16", 5e-2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_any_operand_may_be_mapped(case: OpCase, ways: str, dtype: str, tolerance: float) -> None:
    """One operand is mapped and the others are shared: each example's gradient, and that of all together."""
    arrays = draw(case, dtype)
    moving = _moving(case, arrays)
    sum_of = functools.partial(_sum, case, getattr(ops, case.op), arrays)
    one_call = jax.jit(jax.value_and_grad(sum_of))
    for place, name in enumerate(moving if ways == "both" else list(moving)[:3]):
        mapped = jnp.stack([moving[name], 0.5 * moving[name]])
        others = {other: x for other, x in moving.items() if other != name}

        def value(x: Any, others: Any, name: str = name) -> Any:
            return sum_of({**others, name: x})

        def by_example(x: Any, others: Any) -> Any:
            return jax.vmap(jax.value_and_grad(value, argnums=(0, 1)), in_axes=(0, None))(x, others)

        def together(x: Any, others: Any) -> Any:
            return jax.grad(lambda *at: jnp.sum(jax.vmap(value, in_axes=(0, None))(*at)), argnums=(0, 1))(x, others)

        values, gradients = zip(*(one_call({**moving, name: x}) for x in mapped), strict=True)
        of_mapped, of_others = (
            jax.tree.map(lambda *calls: np.stack(calls), *each)
            for each in ([found.pop(name) for found in gradients], gradients)
        )
        if ways == "both" or place % 2 == 0:
            _compare(jax.jit(by_example)(mapped, others), (np.stack(values), (of_mapped, of_others)), tolerance)
        if ways == "both" or place % 2 == 1:
            summed = of_mapped, jax.tree.map(lambda x: np.sum(x, axis=0), of_others)
            _compare(jax.jit(together)(mapped, others), summed, tolerance)
