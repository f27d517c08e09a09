import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stack_core import ops
from stack_core.abi.errors import PluginError, UnknownName, UnsupportedOp
from stack_core.abi.ops import OWN, OpImplementation
from stack_core.abi.registry import Entry, Registry
from stack_core.chips import current_chip, use_chip
from stack_core.ops import building
from stack_core.ops.definitions.linear import OP as LINEAR_OP
from stack_core.ops.definitions.linear import REFERENCE as LINEAR
from stack_core.ops.definitions.rope import REFERENCE as ROPE
from stack_core.ops.dispatch import choosing, implementations, request
from stack_core.ops.dispatch.dispatch import requested

X = jnp.ones((2, 3))
WEIGHT = jnp.full((3, 4), 0.5)
STRUCTS = {"x": X, "weight": WEIGHT, "bias": None}
OPTIONS = {"preferred_dtype": jnp.dtype("float32")}


def _returning(value: float, name: str = "other", **fields: Any) -> OpImplementation:
    def forward(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any, requested: Any) -> Any:
        return jnp.full((*x.shape[:-1], weight.shape[1]), value, preferred_dtype) + 0 * jnp.sum(x), {}

    return OpImplementation(op="linear", name=name, forward=forward, **fields)


def _zeros(
    arrays: Any, options: Any, outputs: Any, residuals: Any, cotangents: Any, *, requested: Any, **config: Any
) -> Mapping[str, Any]:
    return {}


def _only(direction: str) -> Any:
    return lambda call, chip, config: call.direction == direction or f"does {direction} only"


def _chosen(implementation: Any = None) -> tuple[str, str]:
    plan = choosing.plan(*requested(LINEAR_OP, STRUCTS, OPTIONS, implementation))
    return plan.forward.implementation.name, plan.backward.implementation.name


def test_the_reference_is_found_through_the_registry() -> None:
    assert _chosen("reference") == ("reference", "reference")


def test_the_reference_alone_is_the_choice(register: Any) -> None:
    register()
    assert _chosen() == ("reference", "reference")


def test_an_unknown_name_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(UnknownName, match="linear/reference"):
        ops.linear(X, WEIGHT, implementation="refrence")


def test_the_highest_priority_that_supports_the_call_wins(register: Any) -> None:
    refuses = _returning(3.0, "refuses", priority=9, supports=lambda call, chip, config: "too wide")
    register(_returning(1.0, "low", priority=1), _returning(2.0, "high", priority=2), refuses)
    assert _chosen() == ("high", "reference")
    assert float(ops.linear(X, WEIGHT)[0, 0]) == 2.0


def test_what_the_caller_names_goes_before_priority(register: Any) -> None:
    register(_returning(1.0, "low", priority=1), _returning(2.0, "high", priority=2))
    assert _chosen("low")[0] == "low"
    assert _chosen(["reference", "high"]) == ("reference", "reference")


def test_of_several_names_the_first_that_supports_the_call_runs(register: Any) -> None:
    refuses = _returning(1.0, "refuses", supports=lambda call, chip, config: "too wide")
    register()
    assert _chosen([refuses, "reference"])[0] == "reference"


def test_of_equal_priorities_the_first_installed_runs_with_one_warning(register: Any) -> None:
    """A kernel of the default priority breaks no caller, whatever else is installed."""
    register(_returning(1.0, "two"), _returning(2.0, "one"))
    with pytest.warns(
        RuntimeWarning,
        match=r"'one' runs because it was installed first, but 'two' could run.*priority 1.*before=\('one',\)",
    ):
        assert float(ops.linear(X, WEIGHT)[0, 0]) == 2.0
    assert float(ops.linear(2 * X, WEIGHT[:, :2])[0, 0]) == 2.0  # warned of already


def test_one_that_precedes_another_runs_whatever_their_priorities(register: Any) -> None:
    refuses = _returning(3.0, "refuses", before=("two",), supports=lambda call, chip, config: "too wide")
    register(_returning(1.0, "one", before=("two",)), _returning(2.0, "two", priority=9), refuses)
    assert float(ops.linear(X, WEIGHT)[0, 0]) == 1.0
    assert choosing.plan(*requested(LINEAR_OP, STRUCTS, OPTIONS, None)).forward.reason == "before two"
    register(_returning(1.0, "one", before=("two",), priority=-1), _returning(2.0, "two"))
    assert float(ops.linear(X, WEIGHT)[0, 0]) == 2.0  # a negative one runs where it is named


def test_implementations_that_precede_each_other_go_by_priority(register: Any) -> None:
    register(_returning(1.0, "one", before=("two",)), _returning(2.0, "two", before=("one",), priority=2))
    assert float(ops.linear(X, WEIGHT)[0, 0]) == 2.0


def test_a_call_without_elements_is_answered_by_core(register: Any) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a kernel ran on nothing")

    kernel = OpImplementation("linear", "kernel", never, never)
    register(kernel)
    for x, weight in ((X[:0], WEIGHT), (X[:, :0], WEIGHT[:0]), (X, WEIGHT[:, :0])):
        for named in (None, kernel, "kernel"):
            output, gradient = jax.value_and_grad(
                lambda x, weight=weight, named=named: jnp.sum(ops.linear(x, weight, implementation=named))
            )(x)
            assert float(output) == 0.0
            assert gradient.shape == x.shape
    assert choosing.plan(*requested(LINEAR_OP, {**STRUCTS, "x": X[:0]}, OPTIONS, None)).forward.reason == (
        "the call is empty: core answers it"
    )
    with pytest.raises(UnknownName):
        ops.linear(X[:0], WEIGHT, implementation="kernal")


def test_a_refused_name_lists_the_reason_of_every_implementation(register: Any) -> None:
    wide = _returning(
        1.0, "wide", supports=lambda call, chip, config: f"d_in is {call.arrays['x'].shape[-1]}, at least 128 needed"
    )
    register(wide, _returning(1.0, "mute", supports=lambda call, chip, config: False))
    with pytest.raises(UnsupportedOp) as caught:
        ops.linear(X, WEIGHT, implementation=wide)
    message = str(caught.value)
    for part in ("'wide' cannot run", "x float32[2, 3]", "d_in is 3, at least 128", "mute: refused without a reason"):
        assert part in message
    assert "reference: supports the call" in message


def test_a_plugin_may_choose_each_direction(register: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    register(_returning(1.0, "low", priority=1, backward=_zeros), _returning(2.0, "high", priority=2, backward=_zeros))
    answers = {"forward": "low", "backward": None}
    monkeypatch.setattr(choosing.plugins, "select_op", lambda call, chip, candidates: answers[call.direction])
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


def test_without_a_backward_the_reference_gives_the_gradient() -> None:
    gradient = _gradient(implementation=_returning(7.0))
    assert jnp.array_equal(gradient["x"], jnp.full((2, 3), 2.0))
    assert jnp.array_equal(gradient["weight"], jnp.full((3, 4), 2.0))


def test_a_backward_of_its_own_gives_the_gradient() -> None:
    assert not jnp.any(_gradient(implementation=_returning(7.0, backward=_zeros))["x"])


def test_a_backward_is_chosen_apart_from_the_forward_and_sees_its_output(register: Any) -> None:
    def backward(
        arrays: Any, options: Any, outputs: Any, residuals: Any, cotangents: Any, *, requested: Any
    ) -> Mapping[str, Any]:
        assert options["preferred_dtype"] == jnp.float32 and requested == {"x", "weight"}
        return {"x": jnp.full_like(arrays["x"], outputs[0, 0] + cotangents[0, 0])}

    register(_returning(0.0, "backward", backward=backward, priority=4, supports=_only("backward")))
    assert _chosen() == ("reference", "backward")
    gradient = _gradient()
    assert jnp.array_equal(gradient["x"], jnp.full((2, 3), 2.5))
    assert not jnp.any(gradient["weight"])


def test_a_backward_that_refuses_falls_back_to_the_reference(register: Any) -> None:
    register(_returning(7.0, "forward", backward=_zeros, priority=4, supports=_only("forward")))
    assert _chosen() == ("forward", "reference")
    assert jnp.array_equal(_gradient()["x"], jnp.full((2, 3), 2.0))


def test_integer_and_absent_arrays_have_no_gradient() -> None:
    reference = dataclasses.replace(ROPE, name="mine", backward=None)
    x = jnp.ones((1, 2, 1, 4))
    positions = jnp.arange(2)[None]
    gradient = jax.grad(lambda x: jnp.sum(ops.rope(x, positions, implementation=reference)))(x)
    expected = jax.grad(lambda x: jnp.sum(ops.rope(x, positions)))(x)
    assert jnp.allclose(gradient, expected)


def test_a_config_is_passed_to_those_that_have_some() -> None:
    assert float(ops.linear(X, WEIGHT, implementation=_configured("tuned"))[0, 0]) == 64.0


@pytest.mark.parametrize(
    "target",
    [len, dataclasses.replace(LINEAR, name="another"), OpImplementation("norm", "odd", len)],
    ids=["callable", "name", "op"],
)
def test_what_is_no_implementation_under_its_own_name_is_reported_and_passed_over(
    monkeypatch: pytest.MonkeyPatch, target: Any
) -> None:
    targets = {"linear/odd": target, "linear/reference": LINEAR}
    entries = {name: Entry(name, target, "test") for name, target in targets.items()}
    monkeypatch.setattr(implementations.registries, "ops", Registry("ops", lambda: (entries, {})), raising=False)
    with pytest.warns(RuntimeWarning, match="ops 'linear/odd' is registered as .* Calls go to other implementations"):
        assert _chosen() == ("reference", "reference")
    with pytest.raises(PluginError, match="expected an OpImplementation of that op and that name"):
        _chosen("odd")


def test_an_implementation_that_cannot_be_loaded_is_reported_and_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        "linear/broken": Entry("linear/broken", "stack_core.ops.definitions.linear:NO_SUCH", "test"),
        "linear/reference": Entry("linear/reference", LINEAR, "core"),
    }
    monkeypatch.setattr(implementations.registries, "ops", Registry("ops", lambda: (entries, {})), raising=False)
    with pytest.warns(RuntimeWarning, match="linear/broken"):
        assert _chosen() == ("reference", "reference")


def _configured(name: str, **fields: Any) -> OpImplementation:
    """Its value is its config, by default 64."""

    def forward(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any, config: int, requested: Any) -> Any:
        kept = {OWN: x} if OWN in requested else {}
        return jnp.full((*x.shape[:-1], weight.shape[1]), float(config), preferred_dtype) + 0 * jnp.sum(x), kept

    return OpImplementation(op="linear", name=name, forward=forward, default=lambda call, chip: 64, **fields)


def _config_backward(
    arrays: Any, options: Any, outputs: Any, residuals: Any, cotangents: Any, *, config: int, requested: Any
) -> Mapping[str, Any]:
    return {"x": jnp.full_like(arrays["x"], config)}


def _plan(implementation: Any = None) -> Any:
    return choosing.plan(*requested(LINEAR_OP, STRUCTS, OPTIONS, implementation))


def test_a_tuned_table_chooses_implementation_and_config_in_each_direction(register: Any, register_tables: Any) -> None:
    register(
        _configured("fast", backward=_zeros),
        _configured("other", backward=_config_backward),
        _returning(9.0, "high", priority=9),
    )
    tables = register_tables(mine={"forward": ("fast", 128, "1.3 ms at 2 x 3"), "backward": ("other", 96, "2.5 ms")})
    plan = _plan()
    assert (plan.forward.implementation.name, plan.forward.config) == ("fast", 128)
    assert plan.forward.reason == "tuned table 'mine': 1.3 ms at 2 x 3"
    assert (plan.backward.implementation.name, plan.backward.config) == ("other", 96)
    assert float(ops.linear(X, WEIGHT)[0, 0]) == 128.0
    assert jnp.array_equal(_gradient()["x"], jnp.full((2, 3), 96.0))
    call, chip, candidates, before = tables["mine"].asked[0]
    assert (call.op, call.direction, call.arrays["x"].shape, chip) == ("linear", "forward", (2, 3), current_chip())
    assert (set(candidates), before) == ({"fast", "other", "high", "reference"}, None)
    call, _, candidates, before = tables["mine"].asked[1]
    assert (call.direction, set(candidates)) == ("backward", {"fast", "other", "reference"})
    assert (before.implementation, before.config, before.reason) == ("fast", 128, plan.forward.reason)


def test_order_is_named_then_tuned_then_hook_then_priority(
    register: Any, register_tables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(
        *(
            _returning(1.0, name, priority=priority)
            for priority, name in enumerate(("named", "table", "hook", "highest"))
        )
    )
    tables = register_tables(mine={"forward": ("table", None, "measured")})
    monkeypatch.setattr(choosing.plugins, "select_op", lambda call, chip, candidates: "hook")
    assert [_chosen("named")[0], _chosen()[0]] == ["named", "table"]
    tables["mine"].answers.clear()
    assert _chosen()[0] == "hook"
    monkeypatch.setattr(choosing.plugins, "select_op", lambda call, chip, candidates: None)
    assert _chosen()[0] == "highest"


def test_a_table_gives_its_config_to_what_the_caller_names(register: Any, register_tables: Any) -> None:
    register(_configured("fast"), _configured("other"))
    register_tables(
        first={"forward": ("other", 128, "measured")}, second={"forward": ("fast", None, "default is best")}
    )
    plan = _plan("other")
    assert (plan.forward.implementation.name, plan.forward.config) == ("other", 128)
    assert plan.forward.reason == "named by the caller; config of tuned table 'first': measured"
    assert (_plan("fast").forward.config, _plan("reference").forward.config) == (64, None)


def test_a_table_chooses_among_what_supports_the_call_or_was_named(register: Any, register_tables: Any) -> None:
    register(_configured("fast"), _returning(1.0, "wide", supports=lambda call, chip, config: "too wide"))
    asked = register_tables(mine={})["mine"].asked
    _plan()
    _plan("fast")
    forward = [candidates for call, _, candidates, _ in asked if call.direction == "forward"]
    assert [set(candidates) for candidates in forward] == [{"fast", "reference"}, {"fast"}]


def test_a_table_in_use_is_the_only_one_and_part_of_jits_key(register: Any, register_tables: Any) -> None:
    register(_returning(1.0, "one"), _returning(2.0, "two"))
    two = register_tables(mine={"forward": ("two", None, "measured")})["mine"]
    reference = register_tables(mine={"forward": ("reference", None, "")})["mine"]
    register_tables(mine={"forward": ("one", None, "measured")})
    value = jax.jit(lambda: ops.linear(X, WEIGHT)[0, 0])
    assert float(value()) == 1.0
    with ops.use_tuned_table(two):
        assert float(value()) == 2.0
        assert _plan().forward.reason == "tuned table 'in use': measured"
        with ops.use_tuned_table(reference):
            assert float(value()) == 1.5
        assert float(value()) == 2.0
    assert float(value()) == 1.0


def test_of_several_tables_the_first_by_name_that_knows_the_call_is_followed(
    register: Any, register_tables: Any
) -> None:
    register(_returning(1.0, "one"), _returning(2.0, "two"))
    register_tables(c={"forward": ("two", None, "")}, b={"forward": ("one", None, "")}, a={})
    assert _chosen()[0] == "one"


@pytest.mark.parametrize(
    ("advice", "expected"),
    [
        (("fats", 64, ""), r"'mine' chooses 'fats' for linear forward, but there is no such .* Did you mean 'fast'"),
        (("wide", None, ""), "'wide' for linear forward, but that does not support the call: too wide"),
        (("reference", 64, ""), "'reference' for linear forward, but its config 64 is of type int; it takes none"),
    ],
)
def test_advice_that_cannot_be_followed_is_reported_once_and_passed_over(
    register: Any, register_tables: Any, advice: Any, expected: str
) -> None:
    register(_configured("fast"), _returning(1.0, "wide", supports=lambda call, chip, config: "too wide"))
    register_tables(mine={"forward": advice}, other={"forward": ("fast", 128, "measured")})
    with pytest.warns(RuntimeWarning, match=expected):
        assert _plan().forward.config == 128
    assert _plan().forward.config == 128  # warnings are errors: a second one would raise


def test_advice_for_a_backward_that_is_not_there_is_passed_over(register: Any, register_tables: Any) -> None:
    register(_configured("fast", priority=1))
    register_tables(mine={"backward": ("fast", 64, "")})
    with pytest.warns(RuntimeWarning, match="linear backward, but .* has no backward pass of its own"):
        assert _chosen() == ("fast", "reference")


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"forward": KeyError("bucket")}, r"'mine' is ignored if it fails; .* linear forward raised KeyError"),
        ({"forward": "fast"}, "'mine' is ignored if it returns a str; expected a TunedChoice"),
        ("no_such_module:TABLE", "'mine' .* raised PluginError: .* cannot be loaded from 'no_such_module:TABLE'"),
    ],
)
def test_a_table_that_fails_is_reported_once_and_ignored(
    register: Any, register_tables: Any, table: Any, expected: str
) -> None:
    register()
    register_tables(mine=table)
    with pytest.warns(RuntimeWarning, match=expected) as caught:
        assert _chosen() == ("reference", "reference")
    assert len(caught) == 1
    assert _chosen() == ("reference", "reference")


def test_what_keeps_its_own_residuals_has_one_config_both_ways(register: Any, register_tables: Any) -> None:
    register(_configured("fast", backward=_config_backward, residuals=(OWN,)))
    register_tables(mine={"forward": ("fast", 96, ""), "backward": ("fast", 128, "")})
    plan = _plan()
    assert (plan.forward.config, plan.backward.config) == (96, 96)
    assert plan.backward.reason.endswith("with the config of its forward pass")


def test_a_config_that_does_not_support_the_call_gives_way_to_the_default(register: Any, register_tables: Any) -> None:
    register(_configured("fast", supports=lambda call, chip, config: config < 100 or "too large"))
    register_tables(mine={"forward": ("fast", 128, "measured")})
    assert (_plan().forward.config, _plan().forward.implementation.name) == (64, "fast")
    assert "but not with 128: too large" in _plan().forward.reason


def test_a_backward_of_an_implementation_with_a_config_gets_its_default(register: Any) -> None:
    register(_configured("fast", backward=_config_backward, priority=1))
    assert jnp.array_equal(_gradient()["x"], jnp.full((2, 3), 64.0))


def test_a_backward_that_nothing_supports_raises_when_it_is_asked_for(register: Any) -> None:
    register()
    refusing = dataclasses.replace(_returning(7.0, "reference", backward=_zeros), supports=_only("forward"))
    assert float(ops.linear(X, WEIGHT, implementation=refusing)[0, 0]) == 7.0
    with pytest.raises(
        UnsupportedOp, match=r"linear backward: no .*\n.*\n.*\n  reference: does forward only\n"
    ) as caught:
        _gradient(implementation=refusing)
    assert "x float32[2, 3]" in str(caught.value)


def test_a_named_implementation_that_refuses_the_backward_pass_says_so_once(register: Any) -> None:
    register()
    forward_only = _returning(7.0, "mine", backward=_zeros, supports=_only("forward"))
    assert float(ops.linear(X, WEIGHT, implementation=forward_only)[0, 0]) == 7.0
    expected = r"'mine' was named .* not backward: does forward only\. 'reference' gives .*\['mine', 'reference'\]"
    with pytest.warns(RuntimeWarning, match=expected):
        gradient = _gradient(implementation=forward_only)
    assert jnp.array_equal(gradient["x"], jnp.full((2, 3), 2.0))
    _gradient(implementation=forward_only)


def test_nothing_is_said_where_the_caller_names_the_backward_too(register: Any) -> None:
    register()
    forward_only = _returning(7.0, "mine", backward=_zeros, supports=_only("forward"))
    gradient = _gradient(implementation=[forward_only, "reference"])
    assert jnp.array_equal(gradient["x"], jnp.full((2, 3), 2.0))


def test_a_supports_that_raises_is_a_refusal(register: Any) -> None:
    def supports(call: Any, chip: Any, config: Any) -> bool:
        return call.arrays["no such array"] is not None

    register(_returning(1.0, "broken", supports=supports, priority=9))
    with pytest.warns(RuntimeWarning, match="linear/broken is passed over: its `supports` raised KeyError"):
        assert _chosen() == ("reference", "reference")
    with pytest.raises(UnsupportedOp, match="broken: its `supports` raised KeyError"):
        _chosen("broken")


def test_choices_are_made_while_tracing_only(
    register: Any, register_tables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    register(_returning(1.0, "one", priority=1))
    tables = register_tables(mine={})
    monkeypatch.setattr(
        choosing.plugins, "select_op", lambda call, chip, candidates: asked.append(call.direction) or "one"
    )
    step = jax.jit(lambda x: ops.linear(x, WEIGHT))
    step(X)
    first = (len(asked), len(tables["mine"].asked))
    step(X)
    assert first == (len(asked), len(tables["mine"].asked)) == (1, 2)


def test_a_function_is_traced_again_for_another_target(register: Any) -> None:
    register(
        _returning(
            1.0, "wide", priority=1, supports=lambda call, chip, config: chip.kind == "wide chip" or "for wide chips"
        )
    )
    step = jax.jit(lambda x: ops.linear(x, WEIGHT)[0, 0])
    assert float(step(X)) == 1.5
    with use_chip(dataclasses.replace(current_chip(), kind="wide chip")):
        assert float(step(X)) == 1.0
    assert float(step(X)) == 1.5


def test_what_supports_a_call_is_found_by_direction(register: Any) -> None:
    refuses = _returning(1.0, "refuses", supports=lambda call, chip, config: "too wide")
    register(refuses, _returning(1.0, "forward"), _returning(1.0, "both", backward=_zeros))
    call = request.op_call("linear", STRUCTS, OPTIONS)
    assert set(building.supporting(call)) == {"forward", "both", "reference"}
    assert set(building.supporting(dataclasses.replace(call, direction="backward"))) == {"both", "reference"}


def test_an_implementation_whose_functions_take_other_parameters_is_passed_over(register: Any) -> None:
    def forward(x: Any, weights: Any, *, bias: Any, preferred_dtype: Any, requested: Any) -> Any:
        raise AssertionError("it cannot be called")

    register(OpImplementation(op="linear", name="odd", forward=forward))
    with pytest.warns(RuntimeWarning, match="linear/odd': forward: .* it lacks weight; nothing is passed as weights"):
        assert _chosen() == ("reference", "reference")


def test_a_backend_that_is_not_installed_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        "linear/absent": Entry("linear/absent", "no_such_backend.kernels:LINEAR", "test"),
        "linear/reference": Entry("linear/reference", LINEAR, "core"),
    }
    monkeypatch.setattr(implementations.registries, "ops", Registry("ops", lambda: (entries, {})), raising=False)
    plan = _plan()
    assert plan.forward.implementation.name == "reference"
    assert "its backend is not installed: No module named 'no_such_backend'" in dict(plan.forward.refused)["absent"]


def test_other_platforms_are_refused_by_name(register: Any) -> None:
    register(_returning(1.0, "tpu", platforms=("tpu",)))
    assert dict(_plan().forward.refused) == {"tpu": "it is for tpu, and the target is cpu"}


def test_what_does_not_export_refuses_programs_that_are_exported(register: Any) -> None:
    register(_returning(1.0, "foreign", exports=False))
    step = jax.jit(lambda x: ops.linear(x, WEIGHT)[0, 0])
    assert float(step(X)) == 1.0
    with ops.for_export():
        assert float(step(X)) == 1.5
