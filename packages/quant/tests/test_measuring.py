"""Static ranges of activations: measured over a stream, kept with the model, used for calls of any size."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from stack_core import ops
from stack_quant.conversion import quantize_array
from stack_quant.errors import QuantError, RuleError
from stack_quant.model import quantize_function, quantize_model, report
from stack_quant.qarray import dequantize
from stack_quant.rules import Rule
from stack_quant.scales import Range
from stack_quant.spec import ArraySpec

W = jax.random.normal(jax.random.key(0), (16, 16)) / 4
STACK = jax.random.normal(jax.random.key(1), (3, 16, 16)) / 4


def batch(seed: int, *shape: int, factor: float = 1.0) -> Any:
    return factor * jax.random.normal(jax.random.key(seed), (*shape, 16))


BATCHES = [batch(seed, 2 + seed, 8, factor=1.0 + seed) for seed in range(3)]
STREAM = [(x,) for x in BATCHES]


def static(**given: Any) -> list[Rule]:
    return [Rule(**{"path": ".*", "weights": "int8", "activations": "int8", "static_ranges": True, **given})]


def product(w: Any, x: Any) -> Any:
    return x @ w


def measured(fn: Any, params: Any, *args: Any, rules: Any = None, stream: Any = STREAM, **options: Any) -> Any:
    quantized = quantize_function(fn, params, rules or static(), args, stream=stream, **options)
    return {site: np.asarray(span.high) for site, span in quantized.ranges.items()}


def largest(arrays: Any) -> Any:
    return np.float32(max(float(jnp.abs(array).max()) for array in arrays))


def test_a_range_that_was_measured_at_one_size_serves_another() -> None:
    wide = [(batch(seed, 4, 128),) for seed in range(4)]
    quantized = quantize_function(product, W, static(), wide[0], stream=wide)
    (site, span), *_ = quantized.ranges.items()
    assert (site, span.low, span.high.shape) == ("", None, (1,))
    assert float(span.high[0]) == largest(x for (x,) in wide)
    x = batch(9, 1, 4) / 8
    found = jax.jit(quantized.apply)(quantized.params, x)
    codes = quantize_array(x, ArraySpec(), range=Range(None, span.high.reshape(1, 1, 1)))
    np.testing.assert_allclose(found, dequantize(codes) @ dequantize(quantized.params), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(quantized(1e8 * x), quantized(1e9 * x))  # all is beyond the range
    assert [row.operands for row in report(quantized).operations] == [("int8 static", "int8")]


@pytest.mark.parametrize(
    ("calibration", "expected"),
    [
        ("absmax", largest(BATCHES)),
        ("moving,0.5", np.average([largest([x]) for x in BATCHES], weights=[0.25, 0.5, 1])),
        ("rms,2", 2 * np.sqrt(np.mean(np.square(np.concatenate([x.ravel() for x in BATCHES]))))),
        ("fixed,3", 3),
    ],
)
def test_calibrations_over_a_stream(calibration: str, expected: Any) -> None:
    rules = static(activation_calibration=calibration, static_ranges=calibration != "moving,0.5")
    np.testing.assert_allclose(measured(product, W, BATCHES[0], rules=rules)[""], [expected], rtol=1e-5)


def test_so_many_batches_are_taken_and_no_more() -> None:
    seen = []

    def stream() -> Any:
        for x in BATCHES:
            seen.append(x)
            yield (x,)

    found = measured(product, W, BATCHES[0], stream=stream(), stream_batches=2)
    assert len(seen) == 2 and found[""] == largest(BATCHES[:2])


def test_an_asymmetric_range_and_one_of_each_tile() -> None:
    rules = static(activation_calibration="minmax")
    quantized = quantize_function(product, W, rules, (BATCHES[0],), stream=[(x + 3,) for x in BATCHES])
    span = quantized.ranges[""]
    assert span.low.shape == (1,) and float(span.high[0]) == pytest.approx(3 + max(float(x.max()) for x in BATCHES))
    x = BATCHES[2] + 3
    np.testing.assert_allclose(quantized(x), x @ W, atol=0.5)
    tiled = measured(product, W, BATCHES[0], rules=static(tile_size=4))[""]
    parts = np.concatenate([x.reshape(-1, 4, 4) for x in BATCHES])
    np.testing.assert_array_equal(tiled, np.abs(parts).max(axis=(0, 2)))


def layers(stack: Any, x: Any) -> Any:
    step = jax.checkpoint(lambda x, w: (jnp.tanh(ops.linear(2 * x, w)), None))
    return lax.scan(step, x, stack, reverse=True)[0]


def test_layers_of_a_scan_have_ranges_of_their_own() -> None:
    expected = []
    x = BATCHES[0]
    for layer in (2, 1, 0):
        expected.insert(0, largest([2 * x]))
        x = jnp.tanh(ops.linear(2 * x, STACK[layer]))
    quantized = quantize_function(layers, STACK, static(), (x,), stream=STREAM[:1])
    assert quantized.ranges[""].high.shape == (3, 1)
    np.testing.assert_allclose(quantized.ranges[""].high[:, 0], expected, rtol=1e-5)
    difference = jnp.linalg.norm(quantized(BATCHES[0]) - layers(STACK, BATCHES[0]))
    assert 0 < difference < 0.05 * jnp.linalg.norm(layers(STACK, BATCHES[0]))


def in_shard_map(w: Any, x: Any) -> Any:
    mesh = jax.make_mesh((1, 1), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
    specs = (PartitionSpec(None, "columns"), PartitionSpec("rows"))
    return jax.shard_map(product, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("rows"), check_vma=False)(w, x)


def in_while(w: Any, x: Any) -> Any:
    return lax.while_loop(lambda carry: carry[0] < 2, lambda carry: (carry[0] + 1, 2 * product(w, carry[1])), (0, x))[1]


@jax.custom_vjp
def with_vjp(w: Any, x: Any) -> Any:
    return product(w, x)


with_vjp.defvjp(lambda w, x: (product(w, x), None), lambda _, cotangent: (W, cotangent))

INSIDE = {
    "jit": jax.jit(product),
    "scan over rows": lambda w, x: lax.scan(lambda _, row: (None, product(w, row)), None, x)[1],
    "vmap": jax.vmap(product, in_axes=(None, 0)),
    "cond": lambda w, x: lax.cond(x[0, 0, 0] > -9, product, lambda w, x: x, w, x),
    "custom_vjp": with_vjp,
    "shard_map": in_shard_map,
}


@pytest.mark.parametrize("where", INSIDE)
def test_a_range_is_measured_wherever_the_product_is(where: str) -> None:
    fn = INSIDE[where]
    quantized = quantize_function(fn, W, static(), (BATCHES[0],), stream=STREAM)
    assert quantized.ranges[""].high.tolist() == [largest(BATCHES)]
    plain = quantize_function(product, W, static(), (BATCHES[0],), stream=STREAM)
    np.testing.assert_allclose(jax.jit(quantized.apply)(quantized.params, BATCHES[1]), plain(BATCHES[1]), rtol=1e-5)


def test_all_trips_of_a_while_loop_share_a_range() -> None:
    expected = [BATCHES[0], 2 * BATCHES[0] @ W]
    assert measured(in_while, W, BATCHES[0], stream=STREAM[:1])[""] == pytest.approx(largest(expected))


def test_products_of_two_activations_are_named_by_operation_and_operand() -> None:
    def fn(stack: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            with jax.named_scope("mixing"):
                mixed = jnp.einsum("bse,bte->bst", x, 2 * x)
            return x + mixed.mean() * w[0], None

        return lax.scan(layer, x, stack)[0]

    rules = [Rule(op="mixing", activations="int8", static_ranges=True)]
    found = measured(fn, STACK, BATCHES[0], rules=rules, stream=STREAM[:1])
    left, right = (found[name] for name in sorted(found))
    assert left.shape == (3, 1) and sorted(name.split("/")[-1] for name in found) == ["left", "right"]
    assert left[0, 0] == largest(BATCHES[:1]) and left[1, 0] != left[0, 0]
    np.testing.assert_array_equal(right, 2 * left)


def test_no_stream_and_a_place_that_was_not_measured_are_refused() -> None:
    with pytest.raises(RuleError, match=r"none were given\. Give some as `stream`"):
        quantize_function(product, W, static(), (BATCHES[0],))
    with pytest.raises(QuantError, match="hold NaN or infinities for some batch"):
        quantize_function(product, W, static(), (BATCHES[0],), stream=[(BATCHES[0] / 0,)])

    @jax.tree_util.register_pytree_node_class
    class Two:
        def __init__(self, *params: Any) -> None:
            self.params = params

        def __call__(self, x: Any) -> Any:
            return x @ self.params[0]

        def other(self, x: Any) -> Any:
            return x @ self.params[1]

        def tree_flatten(self) -> Any:
            return self.params, None

        @classmethod
        def tree_unflatten(cls, _: Any, params: Any) -> Any:
            return cls(*params)

    quantized = quantize_model(Two(W, W), static(), BATCHES[0], stream=BATCHES)
    with pytest.raises(QuantError, match=r"The activation at 1 needs a static range of shape \[1\], .* Measured: 0\."):
        quantized.other(BATCHES[0])  # pyrefly: ignore


def shrunken(w: Any, x: Any) -> Any:
    return jnp.tanh(0.01 * (x @ w))


_jitted = jax.jit(shrunken)
SEVERAL = {
    "two products": (lambda w, x: shrunken(w, x) @ w, {"@dot_general/left#1": (1,), "@dot_general/left#2": (1,)}),
    "a function twice": (
        lambda w, x: _jitted(w, _jitted(w, x)),
        {"@dot_general/left#1": (1,), "@dot_general/left#2": (1,)},
    ),
    "two kinds of product": (
        lambda w, x: ops.linear(shrunken(w, x), w),
        {"@dot_general/left": (1,), "@linear/x": (1,)},
    ),
    "loop": (lambda w, x: lax.fori_loop(0, 3, lambda _, x: shrunken(w, x), x), {"": (3, 1)}),
    "branches": (
        lambda w, x: lax.cond(x[0, 0, 0] > 0, lambda w, x: x @ w, lambda w, x: shrunken(w, x) @ w, w, x),
        {"@dot_general/left#1": (1,), "@dot_general/left#2": (1,), "@dot_general/left#3": (1,)},
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_each_operation_on_a_parameter_has_a_range_of_its_own(name: str) -> None:
    fn, shapes = SEVERAL[name]
    x = BATCHES[1]
    quantized = quantize_function(fn, W, static(), (x,), stream=[(x,), (-x,)])
    assert {site: span.high.shape for site, span in quantized.ranges.items()} == shapes
    for x in (BATCHES[1], -BATCHES[1]):
        assert 0 < jnp.linalg.norm(quantized(x) - fn(W, x)) < 0.03 * jnp.linalg.norm(fn(W, x))


def test_a_shared_parameter_does_not_return_zeros() -> None:
    fn = lambda p, x: jnp.tanh(0.01 * (x @ p)) @ p
    p, x = jnp.diag(jnp.asarray([5.0, -5.0, 5.0])), jnp.asarray([1.0008, 2.0875, 2.0875])
    np.testing.assert_allclose(fn(p, x), [0.25, 0.52, 0.52], atol=0.001)
    quantized = quantize_function(fn, p, static(), (x,), stream=[(x,)])
    np.testing.assert_allclose(quantized(x), [0.25, 0.52, 0.52], atol=0.005)


def test_a_layer_that_is_called_twice_has_two_ranges() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="needs flax: install stack-quant[flax]")

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            return self.layer(jnp.tanh(0.01 * self.layer(x)))

    net, x = Net(), BATCHES[1]
    found, expected = quantize_model(net, static(path="kernel"), x, stream=[(x,)])(x), net(x)
    assert 0 < jnp.linalg.norm(found - expected) < 0.03 * jnp.linalg.norm(expected)


def test_layers_and_a_product_after_them_have_ranges_of_their_own() -> None:
    def fn(stack: Any, x: Any) -> Any:
        return layers(stack, x) @ stack[0]

    quantized = quantize_function(fn, STACK, static(), (BATCHES[0],), stream=STREAM)
    assert {site: span.high.shape for site, span in quantized.ranges.items()} == {
        "@linear/x": (3, 1),
        "@dot_general/left": (1,),
    }


def test_products_of_activations_that_are_called_alike_are_told_apart() -> None:
    def fn(w: Any, x: Any) -> Any:
        return (0.001 * (x @ x.mT)) @ x + w[0]

    rules = [Rule(op="dot_general", activations="int8", static_ranges=True)]
    quantized = quantize_function(fn, W, rules, (BATCHES[0],), stream=STREAM[:1])
    sides = ("left", "right")
    assert set(quantized.ranges) == {f"dot_general/{side}#{number}" for side in sides for number in (1, 2)}
    assert jnp.linalg.norm(quantized(BATCHES[0]) - fn(W, BATCHES[0])) < 0.03 * jnp.linalg.norm(fn(W, BATCHES[0]))


def test_a_branch_that_no_batch_took_is_named() -> None:
    fn, _ = SEVERAL["branches"]
    with pytest.raises(QuantError, match=r"No batch reached the activations at @dot_general/left#\d.* not taken"):
        quantize_function(fn, W, static(), (BATCHES[0],), stream=STREAM[:1])


def test_a_function_that_uses_a_parameter_otherwise_is_refused() -> None:
    fn, _ = SEVERAL["two products"]
    model = quantize_function(product, W, static(), (BATCHES[0],), stream=STREAM)
    with pytest.raises(QuantError, match=r"The activation at @dot_general/left#1 needs .* Measured: "):
        replace(model, function=fn)(BATCHES[0])


def test_shapes_have_shapes_of_ranges() -> None:
    shape = jax.ShapeDtypeStruct(STACK.shape, "float32")
    quantized = quantize_function(layers, shape, static(), (BATCHES[0],))
    assert quantized.ranges[""].high == jax.ShapeDtypeStruct((3, 1), jnp.float32)


def test_training_finds_them_at_each_call() -> None:
    quantized = quantize_function(product, W, static(), (BATCHES[0],), method="qat")
    codes = quantize_array(BATCHES[0], ArraySpec(range_ends="exact"))
    weight = quantize_array(W, ArraySpec(channel_axes=(1,)))
    expected = dequantize(codes) @ dequantize(weight)
    np.testing.assert_allclose(quantized(BATCHES[0]), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuleError, match="method 'qt' finds the range of each row at each step"):
        quantize_function(product, W, static(), (BATCHES[0],), method="qt")


def test_a_module_keeps_them_with_its_variables() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="needs flax: install stack-quant[flax]")

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.kernel = nnx.Param(W)

        def __call__(self, x: Any) -> Any:
            return x @ self.kernel[...]

    quantized = quantize_model(Net(), static(), BATCHES[0], stream=iter(BATCHES))
    graph, state = nnx.split(quantized)
    (span,) = nnx.to_pure_dict(state)["static_ranges"]["kernel"].values()
    assert span.tolist() == [largest(BATCHES)]
    span = Range(None, 2 * span.reshape(1, 1, 1))
    state["static_ranges"] = jax.tree.map(lambda end: 2 * end, state["static_ranges"])
    x = BATCHES[2]
    expected = dequantize(quantize_array(x, ArraySpec(), range=span))
    found = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)
    np.testing.assert_allclose(found, expected @ dequantize(quantized.kernel.get_value()), rtol=1e-4, atol=1e-5)
