import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.errors import ArgumentError, ShapeError, UnknownName
from stack_quant import Rule, dequantize, quantize_function, report
from stack_quant.errors import QuantError, RuleError

D_IN = D_OUT = 64  # equal, so that most tests share compiled programs


def inputs(seed: int, rows: int = 128) -> jax.Array:
    """Returns correlated rows, as activations of a model are: most of their variance lies in a few directions."""
    mix = jax.random.normal(jax.random.key(7), (12, D_IN))
    own, noise = jax.random.split(jax.random.key(seed))
    return jax.random.normal(own, (rows, 12)) @ mix + 0.3 * jax.random.normal(noise, (rows, D_IN))


def weight(*lead: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (*lead, D_IN, D_OUT))


STREAM = [(inputs(seed),) for seed in range(3)]


def error_of(fn, params, rule, stream=STREAM) -> float:
    quantized, held_out = quantize_function(fn, params, rule, stream[0], stream=stream), inputs(9)
    expected = fn(params, held_out)
    return float(jnp.linalg.norm(quantized(held_out) - expected) / jnp.linalg.norm(expected))


def linear(params, x):
    return x @ params["w"]


@pytest.mark.parametrize(("kind", "tile"), [("int4", 32), ("nvfp4", None), ("nf4", (32, 8))], ids=str)
def test_gptq_has_at_most_half_of_the_error_of_rounding_on_correlated_inputs(kind: str, tile) -> None:
    rounded = Rule(path="w", weights=kind, tile_size=tile)
    gptq = Rule(path="w", weights=kind, tile_size=tile, algorithm="gptq")
    params = {"w": weight()}
    assert error_of(linear, params, gptq) <= 0.5 * error_of(linear, params, rounded)


@pytest.mark.parametrize("act_order", [0, 1])
def test_gptq_chooses_the_codes_of_a_plain_implementation_in_float64(act_order: int) -> None:
    rule = Rule(path="w", weights="int4", tile_size=32, algorithm=f"gptq,act_order={act_order}")
    held = quantize_function(linear, {"w": weight()}, rule, STREAM[0], stream=STREAM).params["w"]
    scale = np.repeat(np.asarray(held.scale, np.float64), 32, axis=0)
    expected = plain_gptq(np.asarray(weight(), np.float64), np.concatenate([x for (x,) in STREAM]), scale, act_order)
    # Values next to a tie may round differently in float32, and then change later rows of the same column.
    assert np.mean(np.asarray(held.codes, int) == expected) > 0.99


def plain_gptq(w: np.ndarray, x: np.ndarray, scale: np.ndarray, act_order: int) -> np.ndarray:
    x = x.astype(np.float64)
    moments = x.T @ x / len(x)
    moments += 0.01 * np.mean(np.diag(moments)) * np.eye(D_IN)
    order = np.argsort(-np.diag(moments), kind="stable") if act_order else np.arange(D_IN)
    w, scale, moments = w[order].copy(), scale[order], moments[order][:, order]
    codes = np.zeros(w.shape, int)
    for row in range(D_IN):
        inverse = np.linalg.inv(moments[row:, row:])  # of the rows that are not rounded yet
        codes[row] = np.clip(np.round(w[row] / scale[row]), -7, 7)
        error = (w[row] - codes[row] * scale[row]) / inverse[0, 0]
        w[row:] -= np.outer(inverse[:, 0], error)
    return codes[np.argsort(order)]


def scanned(params, x):
    return jax.lax.scan(lambda carry, w: (carry + jnp.tanh(carry @ w), None), x, params["w"])[0]


def stacked(params, x):
    layers = jnp.stack([params["a"], params["b"]])
    return jax.lax.scan(lambda carry, w: (carry + jnp.tanh(w.T @ carry.T).T, None), x, layers)[0]


def joined(params, x):
    both = jax.jit(lambda x: x @ jnp.concatenate([params["a"], params["b"]], axis=1))(x)
    return both[:, :D_IN] * both[:, D_IN:]


def experts(params, x):
    return ops.ragged_dot(x, params["w"], jnp.asarray([x.shape[0] // 4, 0, x.shape[0] - x.shape[0] // 4], jnp.int32))


def mapped(params, x):
    products, _ = jax.lax.map(lambda w: (x @ w, jnp.sum(w)), params["w"])
    return products[0] * products[1]


def recurrent(params, x):
    steps = x.reshape(4, -1, D_IN)
    return jax.lax.scan(lambda carry, row: (jnp.tanh(0.1 * row @ params["w"] + carry), None), steps[0], steps)[0]


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (scanned, {"w": (2, D_IN, D_IN)}),
        (stacked, {"a": (D_IN, D_IN), "b": (D_IN, D_IN)}),
        (joined, {"a": (D_IN, D_IN), "b": (D_IN, D_IN)}),
        (experts, {"w": (3, D_IN, D_OUT)}),
        (recurrent, {"w": (D_IN, D_IN)}),
        (mapped, {"w": (2, D_IN, D_IN)}),
    ],
)
def test_gptq_finds_the_products_of_a_program(fn, shapes) -> None:
    keys = jax.random.split(jax.random.key(1), len(shapes))
    params = {name: jax.random.normal(key, shape) / 10 for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
    rounded, gptq = (Rule(path=".*", weights="int4", tile_size=32, algorithm=algorithm) for algorithm in (None, "gptq"))
    assert error_of(fn, params, gptq) <= 0.7 * error_of(fn, params, rounded)


def test_a_layer_sees_the_outputs_of_the_quantized_layers_before_it() -> None:
    # The first weight is lost in int2, so that the second one gets inputs unlike those in float.
    fn = lambda params, x: jnp.tanh(x @ params["first"] / 10) @ params["second"]
    params = {"first": jax.random.normal(jax.random.key(3), (D_IN, D_IN)), "second": weight()}
    rules = [Rule(path="first", weights="int2"), Rule(path="second", weights="int4", tile_size=32, algorithm="gptq")]
    held = quantize_function(fn, params, rules, STREAM[0], stream=STREAM)
    hidden = lambda first: [(jnp.tanh(x @ first / 10),) for (x,) in STREAM]
    alone = [
        quantize_function(linear, {"w": weight()}, Rule(path="w", **fields), hidden(first)[0], stream=hidden(first))
        for fields in [{"weights": "int4", "tile_size": 32, "algorithm": "gptq"}]
        for first in (dequantize(held.params["first"]), params["first"])
    ]
    agree = [float(jnp.mean(held.params["second"].codes == one.params["w"].codes)) for one in alone]
    assert agree[0] > 0.99 > agree[1]


@pytest.mark.parametrize("algorithm", ["hqq", "autoround", "gptq,sweeps=1"])
def test_scales_with_zero_points_are_fitted_and_stored_in_eight_bits(algorithm: str) -> None:
    options = {"path": "w", "weights": "int4", "tile_size": 32, "weight_calibration": "minmax", "algorithm": algorithm}
    rules = [Rule(**options, double_quantized=each) for each in (False, True)]
    wide, narrow = (error_of(linear, {"w": weight()}, rule) for rule in rules)
    assert narrow < 1.05 * wide
    assert (
        quantize_function(linear, {"w": weight()}, rules[1], STREAM[0], stream=STREAM).params["w"].scale.dtype
        == "uint8"
    )


@pytest.mark.parametrize(
    ("kind", "tile", "calibration"), [("int4", 32, "absmax"), ("int3", 16, "minmax"), ("mxfp4", None, "absmax")]
)
def test_sweeps_lower_the_error_of_gptq_on_its_stream(kind: str, tile: int | None, calibration: str) -> None:
    options = {"path": "w", "weights": kind, "tile_size": tile, "weight_calibration": calibration}
    params, rows = {"w": weight()}, jnp.concatenate([x for (x,) in STREAM])

    def error(sweeps: int) -> float:
        rule = Rule(**options, algorithm=f"gptq,damp=0,sweeps={sweeps}")
        found = dequantize(quantize_function(linear, params, rule, STREAM[0], stream=STREAM).params["w"])
        return float(jnp.linalg.norm(rows @ (found - params["w"])))

    # Scales of mxfp4 are powers of two, which cannot be fitted.
    assert error(3) < error(1) < (1.0 if kind == "mxfp4" else 0.95) * error(0)


@pytest.mark.parametrize(("kind", "calibration"), [("int4", "absmax"), ("int3", "minmax")])
def test_autoround_lowers_the_error_further_with_more_steps(kind: str, calibration: str) -> None:
    rules = [
        Rule(path="w", weights=kind, tile_size=32, weight_calibration=calibration, algorithm=algorithm)
        for algorithm in ("autoround", "autoround,steps=10", None)
    ]
    many, few, rounded = (error_of(linear, {"w": weight()}, rule) for rule in rules)
    assert many < 0.7 * rounded and many < few < rounded


def test_autoround_keeps_exact_codes_and_refuses_uneven_ones() -> None:
    # Halves have exact codes, and their error of 0 is the smallest, so neither ranges nor codes may change.
    halves = jnp.round(jax.random.uniform(jax.random.key(4), (D_IN, D_OUT), minval=-7, maxval=7)).at[0].set(7) / 2
    rule = Rule(path="w", weights="int4", algorithm="autoround,steps=20")
    held = quantize_function(linear, {"w": halves}, rule, STREAM[0], stream=STREAM).params["w"]
    np.testing.assert_array_equal(held.codes.astype(int), 2 * halves)
    with pytest.raises(QuantError, match="w: autoround learns offsets of evenly spaced codes, which nf4 does not have"):
        rule = Rule(path="w", weights="nf4", algorithm="autoround")
        quantize_function(linear, {"w": halves}, rule, STREAM[0], stream=STREAM)


def test_hqq_lowers_the_robust_error_without_a_stream() -> None:
    params = {"w": jax.random.t(jax.random.key(2), 3.0, (D_IN, D_OUT))}

    def robust_error(algorithm):
        rule = Rule(path="w", weights="int4", tile_size=32, algorithm=algorithm)
        held = quantize_function(linear, params, rule, STREAM[0])
        return jnp.sum(jnp.abs(dequantize(held.params["w"]) - params["w"]) ** 0.7)

    assert robust_error("hqq") < robust_error(None)


def test_a_tied_table_is_quantized_for_its_product_and_a_table_alone_is_refused() -> None:
    tokens = jnp.arange(16).reshape(2, 8) % D_OUT
    tied = lambda params, tokens: params["table"][tokens] @ params["table"].T
    params, rule = {"table": weight().T}, Rule(path="table", weights="int4", algorithm="gptq")
    held = quantize_function(tied, params, rule, (tokens,), stream=[(tokens,)])
    assert held.params["table"].scale.shape == (D_OUT, 1) and report(held).parameters[0].scheme == "int4"
    with pytest.raises(RuleError, match="only looked up by index"):
        quantize_function(lambda params, tokens: params["table"][tokens], params, rule, (tokens,), stream=[(tokens,)])


@pytest.mark.parametrize(
    ("stream", "error", "message"),
    [
        (None, RuleError, "needs batches of inputs, but none were given"),
        ([(inputs(0),), (inputs(1, rows=64),)], ShapeError, r"different shapes: .*128, 64.* then .*64, 64"),
        ([(inputs(0).at[3, 4].set(jnp.nan),)], QuantError, "inputs of the product with w hold NaN"),
    ],
)
def test_a_stream_that_does_not_fit_is_refused(stream, error: type[Exception], message: str) -> None:
    rule = Rule(path="w", weights="int4", algorithm="gptq")
    with pytest.raises(error, match=message):
        quantize_function(linear, {"w": weight()}, rule, STREAM[0], stream=stream)


def test_a_product_of_a_part_of_a_parameter_is_refused() -> None:
    rule = Rule(path="w", weights="int4", algorithm="gptq")
    part = lambda params, x: x[:, :40] @ params["w"][:40]
    with pytest.raises(RuleError, match="cannot act on w: the product takes only a part"):
        quantize_function(part, {"w": weight()}, rule, STREAM[0], stream=STREAM)


def test_an_algorithm_that_would_not_act_is_refused() -> None:
    Rule(path="w", weights="int4", algorithm="nearest")  # imports the module of this name
    with pytest.raises(RuleError, match="an algorithm chooses the codes of weights"):
        Rule(path="w", algorithm="gptq")
    with pytest.raises(UnknownName, match="Did you mean 'gptq'"):
        Rule(path="w", weights="int4", algorithm="gtpq")
    with pytest.raises(ArgumentError, match=r"no option 'dampe'\. Did you mean 'damp'"):
        Rule(path="w", weights="int4", algorithm="gptq,dampe=1")
    for option, wanted in (("damp=-1", "a number"), ("act_order=0.5", "a whole number"), ("damp=nan", "a number")):
        with pytest.raises(ArgumentError, match=f"must be {wanted} of at least 0"):
            Rule(path="w", weights="int4", algorithm=f"gptq,{option}")
    rule, x = Rule(path="w", weights="int4", algorithm="gptq"), STREAM[0]
    with pytest.raises(RuleError, match="rounds weights again at each call"):
        quantize_function(linear, {"w": weight()}, rule, x, method="qat")
    held = quantize_function(linear, {"w": weight()}, rule, x, stream=STREAM)
    with pytest.raises(QuantError, match="an algorithm, which needs the whole model"):
        held.quantization.quantize("w", weight())
