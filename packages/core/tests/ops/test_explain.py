"""`explain` sees every op call of a function, wherever it is, and says what it would get and why; nothing runs."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from stack_core import ops
from stack_core.abi.errors import UnknownName, UnsupportedOp
from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.abi.plugins import registries
from stack_core.chips import current_chip, use_chip
from stack_core.ops import Explanation, explain
from stack_core.ops.definitions.linear import REFERENCE

X = jnp.ones((4, 4))
WEIGHTS = jnp.ones((3, 4, 4))
SHAPE = jax.ShapeDtypeStruct((4, 4), "float32")


def linear(x: Any, weight: Any = X) -> Any:
    return ops.linear(x, weight)


def _fast(**fields: Any) -> OpImplementation:
    def forward(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any, config: int, requested: Any) -> Any:
        return (x @ weight).astype(preferred_dtype), {}

    return OpImplementation(op="linear", name="fast", forward=forward, default=lambda call, chip: 64, **fields)


def _fast_backward(
    arrays: Any, options: Any, outputs: Any, residuals: Any, cotangents: Any, *, config: int, requested: Any
) -> Mapping[str, Any]:
    return {"x": cotangents @ arrays["weight"].T, "weight": arrays["x"].T @ cotangents}


def _never(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any, requested: Any) -> Any:
    raise AssertionError("it refuses every call")


def _calls(fn: Callable[..., Any], *args: Any) -> list[tuple[str, int]]:
    return [(call.op, call.calls) for call in explain(fn, *args)]


def test_a_call_shows_both_directions_with_config_and_reason(register: Any, register_tables: Any) -> None:
    register(
        _fast(backward=_fast_backward),
        OpImplementation(
            op="linear", name="wide", forward=_never, supports=lambda call, chip, config: "d_in is 4, not 128"
        ),
    )
    register_tables(mine={"forward": ("fast", 128, "1.3 ms at 4 x 4"), "backward": ("fast", None, "2.5 ms at 4 x 4")})
    (call,) = explain(lambda x: ops.linear(x, X, preferred_dtype="float32"), SHAPE)
    assert (call.op, call.calls, call.at_least) == ("linear", 1, False)
    assert call.arrays == {"x": "float32[4, 4]", "weight": "float32[4, 4]"}
    assert call.options == {"preferred_dtype": jnp.dtype("float32")}
    choices = [(choice.implementation.name, choice.config, choice.reason) for choice in (call.forward, call.backward)]
    assert choices == [
        ("fast", 128, "tuned table 'mine': 1.3 ms at 4 x 4"),
        ("fast", 64, "tuned table 'mine': 2.5 ms at 4 x 4"),
    ]
    assert call.forward.refused == (("wide", "d_in is 4, not 128"),)
    assert call.backward.refused == (("wide", "has no backward pass of its own"),)
    with pytest.raises(dataclasses.FrozenInstanceError):
        call.calls = 2


def test_its_text_is_an_aligned_table(register: Any, register_tables: Any) -> None:
    register(
        _fast(),
        OpImplementation(op="linear", name="wide", forward=_never, supports=lambda call, chip, config: "4 < 128"),
    )
    register_tables(mine={"forward": ("fast", 128, "1.3 ms")})

    def layers(x: Any, weights: Any) -> Any:
        x = jax.lax.scan(lambda x, weight: (linear(x, weight), None), x, weights)[0]
        return ops.linear(x, X, implementation="wide")

    within, alone = inspect.getsourcelines(linear)[1] + 1, inspect.getsourcelines(layers)[1] + 2
    assert str(explain(layers, SHAPE, WEIGHTS)).splitlines() == [
        "calls  op      pass      implementation  config  why",
        "    3  linear  forward   fast            128     tuned table 'mine': 1.3 ms",
        "               backward  reference               the only one that supports the call",
        "               x float32[4, 4], weight float32[4, 4], preferred_dtype=float32",
        "               not wide forward: 4 < 128",
        "               not fast backward: has no backward pass of its own",
        "               not wide backward: has no backward pass of its own",
        f"               at ops/test_explain.py:{within}",
        "    1  linear  forward   none                    UnsupportedOp: linear: 'wide' cannot run this call.",
        "               x float32[4, 4], weight float32[4, 4], preferred_dtype=float32",
        "               The call: weight float32[4, 4], x float32[4, 4].",
        "               Implementations:",
        "                 fast: supports the call",
        "                 reference: supports the call",
        "                 wide: 4 < 128",
        "               Name one that supports it (fast, reference) or none.",
        f"               at ops/test_explain.py:{alone}",
    ]


def test_without_any_op_it_says_so() -> None:
    found = explain(lambda x: x + 1, SHAPE)
    assert str(found) == repr(found) == "No op of stack_core.ops is called."


def scanned(x: Any, weights: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda x, weight: (jnp.tanh(linear(x, weight)), None), x, weights)[0])


def rematerialized(x: Any, weights: Any) -> Any:
    layer = jax.checkpoint(lambda x, weight: (jnp.tanh(linear(x, weight)), None))
    return jnp.sum(jax.lax.scan(layer, x, weights)[0])


@jax.custom_vjp
def with_custom_vjp(x: Any) -> Any:
    return jnp.sum(linear(x))


with_custom_vjp.defvjp(lambda x: (jnp.sum(linear(x)), None), lambda _, cotangent: (linear(cotangent * X),))


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (linear, (SHAPE,), 1),
        (lambda x: linear(linear(x)), (SHAPE,), 2),
        (jax.jit(scanned), (SHAPE, WEIGHTS), 3),
        (jax.grad(scanned, argnums=(0, 1)), (SHAPE, WEIGHTS), 3),
        (jax.jit(jax.grad(rematerialized, argnums=(0, 1))), (SHAPE, WEIGHTS), 6),
        (jax.vmap(linear), (WEIGHTS,), 1),
        (jax.vmap(jax.grad(lambda x: jnp.sum(linear(x)))), (WEIGHTS,), 1),
        (lambda x: jax.lax.map(linear, x), (WEIGHTS,), 3),
        (lambda x: jax.lax.map(lambda x: scanned(x, WEIGHTS), x), (WEIGHTS,), 9),
        (lambda x: jax.lax.cond(x[0, 0] > 0, linear, lambda x: x, x), (SHAPE,), 1),
        (lambda x: jax.linearize(linear, x)[1](x), (SHAPE,), 1),
        (with_custom_vjp, (SHAPE,), 1),
        (lambda x: jax.eval_shape(linear, x).shape, (SHAPE,), 0),
    ],
    ids=[
        "call",
        "two calls",
        "jitted scan",
        "gradient of a scan",
        "rematerialized",
        "vmap",
        "vmapped gradient",
        "map",
        "scan in a map",
        "cond",
        "linearized",
        "custom vjp",
        "unused",
    ],
)
def test_calls_are_counted_as_often_as_they_run(fn: Any, args: Any, expected: int) -> None:
    assert _calls(fn, *args) == [("linear", expected)]


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (linear, (SHAPE, SHAPE), ()),
        (jax.grad(lambda x, weight: jnp.sum(linear(x, weight))), (SHAPE, SHAPE), ("x",)),
        (lambda x, weight: jax.jvp(lambda weight: linear(x, weight), (weight,), (weight,)), (X, X), ("weight",)),
        (jax.jit(jax.grad(scanned)), (SHAPE, WEIGHTS), ("x",)),
        (jax.grad(scanned, argnums=1), (SHAPE, WEIGHTS), ("x", "weight")),
        (jax.vmap(jax.grad(rematerialized, argnums=(0, 1)), in_axes=(0, None)), (WEIGHTS, WEIGHTS), ("x", "weight")),
        (jax.grad(lambda x, weight: jnp.sum(linear(jax.lax.stop_gradient(x), weight))), (SHAPE, SHAPE), ()),
    ],
    ids=["forward", "gradient", "jvp", "scan", "scan over weights", "rematerialized in a vmap", "stopped"],
)
def test_it_knows_which_arguments_are_differentiated(fn: Any, args: Any, expected: tuple[str, ...]) -> None:
    (call,) = explain(fn, *args)
    assert call.differentiated == expected


def test_a_line_that_is_differentiated_in_one_place_counts_as_differentiated() -> None:
    (call,) = explain(lambda x: (linear(x), jax.grad(lambda x: jnp.sum(linear(x)))(x)), SHAPE)
    assert (call.calls, call.differentiated) == (2, ("x",))


def test_a_named_backward_is_no_hindrance(register: Any) -> None:
    register(_fast(backward=_fast_backward, priority=9))
    (call,) = explain(jax.grad(lambda x, weight: jnp.sum(linear(x, weight)), argnums=1), SHAPE, SHAPE)
    assert (call.backward.implementation.name, call.differentiated) == ("fast", ("weight",))


def test_it_keeps_the_call_as_choosers_see_it() -> None:
    (call,) = explain(lambda x: ops.linear(x, X, preferred_dtype="float32"), SHAPE)
    assert call.call == OpCall(
        "linear", {"x": SHAPE, "weight": SHAPE, "bias": None}, {"preferred_dtype": jnp.dtype("float32")}, "forward"
    )


def test_a_custom_vjp_counts_by_where_it_calls() -> None:
    """The function itself is traced, but what runs is its forward rule and its backward rule."""
    assert _calls(jax.grad(with_custom_vjp), X) == [("linear", 2)]


def test_a_while_loop_counts_at_least_once() -> None:
    (call,) = explain(lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, linear, linear(x)), SHAPE)
    assert (call.calls, call.at_least) == (2, True)
    assert "\n   2+  linear" in str(Explanation([call]))


def test_a_shard_map_is_seen() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("data")
    sharded = jax.shard_map(linear, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows)
    assert _calls(sharded, SHAPE, X) == [("linear", 1)]
    assert _calls(jax.grad(lambda x: jnp.sum(sharded(x, X))), SHAPE) == [("linear", 1)]


def test_a_jitted_function_that_jax_has_cached_is_seen_and_stays_as_it_was() -> None:
    traced = []

    @jax.jit
    def twice(x: Any) -> Any:
        traced.append(1)
        return linear(linear(x))

    before = twice(X)
    assert _calls(lambda x: twice(twice(x)), X) == [("linear", 4)]
    assert _calls(twice, X) == [("linear", 2)]
    assert jnp.array_equal(twice(X), before)
    assert "stack_op_call" not in str(jax.make_jaxpr(twice)(X))
    count = len(traced)
    twice(X)
    assert len(traced) == count


def test_calls_from_two_lines_or_of_two_shapes_are_told_apart() -> None:
    def fn(x: Any, y: Any) -> Any:
        first = ops.linear(x, X)
        return first, ops.linear(x, X), [linear(rows) for rows in (x, y, x)]

    start = inspect.getsourcelines(fn)[1]
    explained = explain(fn, X, jax.ShapeDtypeStruct((7, 4), "float32"))
    assert [(call.source.rpartition("/")[2], call.arrays["x"], call.calls) for call in explained] == [
        (f"test_explain.py:{start + 1}", "float32[4, 4]", 1),
        (f"test_explain.py:{start + 2}", "float32[4, 4]", 1),
        (f"test_explain.py:{inspect.getsourcelines(linear)[1] + 1}", "float32[4, 4]", 2),
        (f"test_explain.py:{inspect.getsourcelines(linear)[1] + 1}", "float32[7, 4]", 1),
    ]


def test_nothing_runs() -> None:
    def fn(x: Any) -> Any:
        jax.debug.callback(lambda: pytest.fail("it ran"))
        return linear(jax.pure_callback(lambda x: pytest.fail("it ran"), SHAPE, x))

    assert _calls(jax.jit(fn), X) == [("linear", 1)]


def test_what_is_no_array_is_passed_as_it_is() -> None:
    def fn(arrays: Mapping[str, Any], times: int, name: str, apply: Any) -> Any:
        for _ in range(times):
            arrays = {name: apply(arrays[name])}
        return arrays, name

    assert _calls(fn, {"x": SHAPE}, 5, "x", linear) == [("linear", 5)]


def test_it_explains_for_another_chip(register: Any) -> None:
    register(
        _fast(priority=1, supports=lambda call, chip, config: chip.kind == "wide chip" or f"{chip.kind} is too narrow")
    )
    wide = dataclasses.replace(current_chip(), kind="wide chip")
    jitted = jax.jit(linear)
    jitted(X)

    def forward(**chip: Any) -> Any:
        return explain(jitted, X, **chip)[0].forward

    assert forward().implementation.name == "reference"
    assert forward().refused == (("fast", f"{current_chip().kind} is too narrow"),)
    assert forward(chip=wide).implementation.name == "fast"
    with use_chip(wide):
        assert forward().implementation.name == "fast"
        assert forward(chip=current_chip()).implementation.name == "reference"


def test_kernels_of_another_platform_are_not_traced(register: Any) -> None:
    def on_gpus(x: Any, weight: Any, *, bias: Any, preferred_dtype: Any, config: int, requested: Any) -> Any:
        raise NotImplementedError("no GPU is here")

    register(dataclasses.replace(_fast(backward=_fast_backward, platforms=("gpu",)), forward=on_gpus))
    (call,) = explain(jax.grad(lambda x: jnp.sum(linear(x))), X, chip=registries.chips["h100"])
    assert (call.forward.implementation.name, call.backward.implementation.name) == ("fast", "fast")
    assert call.differentiated == ("x",)


def test_a_call_that_nothing_supports_is_shown_and_the_rest_too(register: Any) -> None:
    register(_fast(supports=lambda call, chip, config: "too wide"))
    first, second = explain(lambda x: linear(ops.linear(x, X, implementation="fast")), SHAPE)
    assert isinstance(first.forward, UnsupportedOp)
    assert first.backward is first.forward
    assert "fast: too wide" in str(first.forward)
    assert second.forward.implementation.name == "reference"


def test_a_gradient_that_nothing_gives_is_shown(register: Any) -> None:
    forward_only = dataclasses.replace(REFERENCE, backward=None)
    register(forward_only, _fast(priority=9))
    (call,) = explain(jax.grad(lambda x: jnp.sum(linear(x))), SHAPE)
    assert call.forward.implementation.name == "fast"
    assert isinstance(call.backward, UnsupportedOp)
    assert "backward  none                    UnsupportedOp: linear backward: no implementation" in str(
        Explanation([call])
    )


def test_a_misspelled_name_is_shown() -> None:
    (call,) = explain(lambda x: ops.linear(x, X, implementation="refrence"), SHAPE)
    assert isinstance(call.forward, UnknownName)


def test_an_op_without_a_reference_to_go_on_with_raises(register: Any) -> None:
    register()
    with pytest.raises(UnsupportedOp, match="norm: no implementation supports this call"):
        explain(ops.norm, SHAPE)


def test_an_error_of_the_function_itself_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        explain(lambda x: linear(x)[0, 0] * (1 // 0), SHAPE)


def test_models_of_flax_are_seen() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="needs flax, which stack-train brings")

    class Layer(nnx.Module):
        def __init__(self, key: Any) -> None:
            self.weight = nnx.Param(jax.random.normal(key, (4, 4)))
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x: Any) -> Any:
            self.calls[...] += 1
            return linear(x, self.weight[...])

    def loss(model: Any, x: Any) -> Any:
        return jnp.sum(model(x))

    for model in (Layer(jax.random.key(0)), nnx.eval_shape(lambda: Layer(jax.random.key(0)))):
        assert _calls(nnx.jit(nnx.grad(loss)), model, SHAPE) == [("linear", 1)]
        assert _calls(nnx.jit(lambda model, x: model(model(x))), model, SHAPE) == [("linear", 2)]
