import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stack_core import ops
from stack_core.abi import AUTODIFF, OpImplementation
from stack_core.errors import PluginError, UnknownName, UnsupportedOp
from stack_core.ops import _dispatch
from stack_core.ops._linear import REFERENCE
from stack_core.ops._rope import REFERENCE as ROPE
from stack_core.registry import Entry, Registry

X = jnp.ones((2, 3))
WEIGHT = jnp.full((3, 4), 0.5)
STRUCTS = {"x": X, "weight": WEIGHT, "bias": None}
OPTIONS = {"preferred_dtype": jnp.dtype("float32")}


def _returning(value: float, name: str = "other", **fields: Any) -> OpImplementation:
    def function(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any) -> Any:
        return jnp.full((*x.shape[:-1], weight.shape[1]), value, preferred_dtype) + 0 * jnp.sum(x)

    return OpImplementation(op="linear", name=name, function=function, **fields)


def _only(direction: str) -> Any:
    return lambda call, chip: call.direction == direction or f"does {direction} only"


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts implementations of `linear` beside the reference."""

    def register(*implementations: Any) -> None:
        entries = {f"linear/{found.name}": found for found in (REFERENCE, *implementations)}
        found = {name: Entry(name, target, "test") for name, target in entries.items()}
        monkeypatch.setattr(_dispatch.registries, "ops", Registry("ops", lambda: (found, {})), raising=False)

    return register


def _chosen(implementation: Any = None) -> tuple[str, str]:
    plan = _dispatch.plan("linear", STRUCTS, OPTIONS, implementation)
    return plan.forward.implementation.name, plan.backward.implementation.name


def test_the_reference_is_found_through_the_registry() -> None:
    assert _chosen() == ("reference", "reference")
    assert _chosen("reference") == ("reference", "reference")


def test_an_unknown_name_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(UnknownName, match="linear/reference"):
        ops.linear(X, WEIGHT, implementation="refrence")


def test_the_highest_priority_that_supports_the_call_wins(register: Any) -> None:
    refuses = _returning(3.0, "refuses", priority=9, supports=lambda call, chip: "too wide")
    register(_returning(1.0, "low", priority=1), _returning(2.0, "high", priority=2), refuses)
    assert _chosen() == ("high", "reference")
    assert float(ops.linear(X, WEIGHT)[0, 0]) == 2.0


def test_what_the_caller_names_goes_before_priority(register: Any) -> None:
    register(_returning(1.0, "low", priority=1), _returning(2.0, "high", priority=2))
    assert _chosen("low")[0] == "low"
    assert _chosen(["reference", "high"]) == ("reference", "reference")


def test_of_several_names_the_first_that_supports_the_call_runs(register: Any) -> None:
    refuses = _returning(1.0, "refuses", supports=lambda call, chip: "too wide")
    register()
    assert _chosen([refuses, "reference"])[0] == "reference"


def test_a_tie_is_an_error_that_names_both(register: Any) -> None:
    register(_returning(1.0, "one", priority=5), _returning(2.0, "two", priority=5))
    with pytest.raises(UnsupportedOp, match=r"'one' and 'two' .* same priority 5"):
        ops.linear(X, WEIGHT)


def test_a_refused_name_lists_the_reason_of_every_implementation(register: Any) -> None:
    wide = _returning(
        1.0, "wide", supports=lambda call, chip: f"d_in is {call.arrays['x'].shape[-1]}, at least 128 needed"
    )
    register(wide, _returning(1.0, "mute", supports=lambda call, chip: False))
    with pytest.raises(UnsupportedOp) as caught:
        ops.linear(X, WEIGHT, implementation=wide)
    message = str(caught.value)
    for part in ("'wide' cannot run", "x float32[2, 3]", "d_in is 3, at least 128", "mute: refused without a reason"):
        assert part in message
    assert "reference: supports the call" in message


def test_a_plugin_may_choose_each_direction(register: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    register(_returning(1.0, "low", priority=1, vjp=AUTODIFF), _returning(2.0, "high", priority=2, vjp=AUTODIFF))
    answers = {"forward": "low", "backward": None}
    monkeypatch.setattr(_dispatch.plugins, "select_op", lambda call, chip, candidates: answers[call.direction])
    assert _chosen() == ("low", "high")
    answers["backward"] = "reference"
    assert _chosen() == ("low", "reference")
    answers["forward"] = "absent"
    with pytest.raises(PluginError, match="'absent'"):
        _chosen()


def _gradient(**arguments: Any) -> Mapping[str, jax.Array]:
    def loss(arrays: Mapping[str, jax.Array]) -> jax.Array:
        return jnp.sum(ops.linear(arrays["x"], arrays["weight"], **arguments))

    return jax.jit(jax.grad(loss))({"x": X, "weight": WEIGHT})


def test_without_a_vjp_the_reference_gives_the_gradient() -> None:
    gradient = _gradient(implementation=_returning(7.0))
    assert jnp.array_equal(gradient["x"], jnp.full((2, 3), 2.0))
    assert jnp.array_equal(gradient["weight"], jnp.full((3, 4), 2.0))


def test_autodiff_differentiates_the_function_itself() -> None:
    assert not jnp.any(_gradient(implementation=_returning(7.0, vjp=AUTODIFF))["x"])


def test_a_vjp_is_chosen_apart_from_the_forward_and_sees_its_output(register: Any) -> None:
    def vjp(arrays: Any, options: Any, output: Any, cotangent: Any) -> Mapping[str, Any]:
        assert options["preferred_dtype"] == jnp.float32
        return {"x": jnp.full_like(arrays["x"], output[0, 0] + cotangent[0, 0])}

    register(_returning(0.0, "backward", vjp=vjp, priority=4, supports=_only("backward")))
    assert _chosen() == ("reference", "backward")
    gradient = _gradient()
    assert jnp.array_equal(gradient["x"], jnp.full((2, 3), 2.5))
    assert not jnp.any(gradient["weight"])


def test_a_backward_that_refuses_falls_back_to_the_reference(register: Any) -> None:
    register(_returning(7.0, "forward", vjp=AUTODIFF, priority=4, supports=_only("forward")))
    assert _chosen() == ("forward", "reference")
    assert jnp.array_equal(_gradient()["x"], jnp.full((2, 3), 2.0))


def test_integer_and_absent_arrays_have_no_gradient() -> None:
    reference = dataclasses.replace(ROPE, name="mine", vjp=None)
    x = jnp.ones((1, 2, 1, 4))
    positions = jnp.arange(2)[None]
    gradient = jax.grad(lambda x: jnp.sum(ops.rope(x, positions, implementation=reference)))(x)
    expected = jax.grad(lambda x: jnp.sum(ops.rope(x, positions)))(x)
    assert jnp.allclose(gradient, expected)


def test_a_config_is_passed_to_those_that_have_some() -> None:
    def function(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any, config: int) -> Any:
        return jnp.full((*x.shape[:-1], weight.shape[1]), float(config), preferred_dtype)

    tuned = OpImplementation(op="linear", name="tuned", function=function, configs=(64, 128))
    assert float(ops.linear(X, WEIGHT, implementation=tuned)[0, 0]) == 64.0


def test_an_implementation_that_cannot_be_loaded_is_reported_and_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        "linear/broken": Entry("linear/broken", "no_such_module:REFERENCE", "test"),
        "linear/reference": Entry("linear/reference", REFERENCE, "core"),
    }
    monkeypatch.setattr(_dispatch.registries, "ops", Registry("ops", lambda: (entries, {})), raising=False)
    with pytest.warns(RuntimeWarning, match="linear/broken"):
        assert _chosen() == ("reference", "reference")
