"""Backward passes written as functions of one value."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ArgumentError, PluginError
from stack_core.abi.ops import OpImplementation
from stack_core.ops.building import BackwardCall, as_backward
from stack_core.ops.dispatch.signature import check_signature

NORM: OpImplementation = importlib.import_module("stack_core.ops.definitions.norm").REFERENCE


def test_the_call_has_the_arguments_of_the_backward_pass() -> None:
    calls: list[tuple[BackwardCall, int]] = []

    @as_backward
    def backward(call: BackwardCall, *, config: int) -> Mapping[str, Any]:
        calls.append((call, config))
        return {"x": 1, "scale": 2}

    found = backward({"x": 3}, {"axis": -1}, 4, {"lse": 5}, 6, requested=frozenset({"x"}), config=7)
    expected = BackwardCall(
        arrays={"x": 3},
        options={"axis": -1},
        outputs=4,
        residuals={"lse": 5},
        cotangents=6,
        requested=frozenset({"x"}),
    )
    assert calls == [(expected, 7)]
    assert found == {"x": 1}, "a gradient that was not requested is dropped"


def test_partials_and_bound_methods_are_converted() -> None:
    class Scaled:
        factor = 3

        def gradients(self, call: BackwardCall) -> Mapping[str, Any]:
            return {"x": self.factor * call.cotangents}

    def scaled(factor: int, call: BackwardCall) -> Mapping[str, Any]:
        return {"x": factor * call.cotangents}

    for backward in (as_backward(Scaled().gradients), as_backward(functools.partial(scaled, 3))):
        assert backward({}, {}, None, {}, 2, requested=frozenset({"x"})) == {"x": 6}


def test_a_missing_config_is_found_before_the_first_gradient() -> None:
    def without_config(call: BackwardCall) -> Mapping[str, Any]:
        return {"x": call.cotangents}

    def with_config(call: BackwardCall, *, config: Any) -> Mapping[str, Any]:
        return {"x": call.cotangents}

    # The reference of norm has no configs.
    check_signature(dataclasses.replace(NORM, name="fits", backward=as_backward(without_config)))
    with pytest.raises(PluginError, match="ops 'norm/needs': backward"):
        check_signature(dataclasses.replace(NORM, name="needs", backward=as_backward(with_config)))


@pytest.mark.parametrize(
    "function",
    [lambda *, config: {}, lambda arrays, options: {}, lambda: {"x": 0}],
    ids=["only config", "two", "none"],
)
def test_a_function_of_other_arguments_is_rejected(function: Callable[..., Any]) -> None:
    with pytest.raises(ArgumentError, match=r"as_backward: .* expected a function of \(call\)"):
        as_backward(function)


def test_it_runs_as_the_gradient_of_an_op() -> None:
    @as_backward
    def doubled(call: BackwardCall) -> Mapping[str, Any]:
        assert NORM.backward is not None
        found = NORM.backward(
            call.arrays, call.options, call.outputs, call.residuals, call.cotangents, requested=call.requested
        )
        return {name: 2 * gradient for name, gradient in found.items()}

    from stack_core import ops

    other = dataclasses.replace(NORM, name="doubled", backward=doubled)
    x = jnp.linspace(-1, 2, 8)
    expected = jax.grad(lambda x: jnp.sum(ops.norm(x) ** 3))(x)
    found = jax.grad(lambda x: jnp.sum(ops.norm(x, implementation=other) ** 3))(x)
    np.testing.assert_allclose(found, 2 * expected, rtol=1e-6)
