from typing import Any

import jax.numpy as jnp
import pytest

from stack_core.abi.errors import ArgumentError, ShapeError, UnknownName
from stack_quant.errors import RuleError
from stack_quant.model import quantize_function, report
from stack_quant.rules import Rule

W = jnp.ones((8, 4))
PARAMS = {"layers": {"1": {"mlp": W}, "10": {"mlp": W}}, "embedder": {"table": W}, "norm": jnp.ones(8)}


def fn(params: Any, x: Any) -> Any:
    layers = params["layers"]
    return x @ params["embedder"]["table"] + (x * params["norm"]) @ layers["1"]["mlp"] + x @ layers["10"]["mlp"]


def rows(*rules: Rule) -> dict[str, Any]:
    quantized = quantize_function(fn, PARAMS, rules, (jnp.ones((2, 8)),))
    return {row.path: row for row in report(quantized).parameters}


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("embedder", {"embedder/table"}),
        ("table", {"embedder/table"}),
        ("layers/1", {"layers/1/mlp"}),
        ("layers/.*/mlp", {"layers/1/mlp", "layers/10/mlp"}),
        ("mlp|table", {"layers/1/mlp", "layers/10/mlp", "embedder/table"}),
        ("layers", {"layers/1/mlp", "layers/10/mlp"}),
    ],
)
def test_a_path_covers_whole_segments(pattern: str, paths: set[str]) -> None:
    assert {path for path, row in rows(Rule(path=pattern, weights="int8")).items() if row.rule == 0} == paths


def test_the_first_rule_that_matches_wins() -> None:
    found = rows(Rule(path="layers/1", weights="int4"), Rule(path="embedder"), Rule(path=".*", weights="int8"))
    assert {path: (row.rule, row.scheme) for path, row in found.items()} == {
        "layers/1/mlp": (0, "int4"),
        "embedder/table": (1, "float32"),
        "layers/10/mlp": (2, "int8"),
        "norm": (2, "float32"),
    }
    assert found["embedder/table"].reason == "rule 1 leaves it in float"
    assert found["norm"].reason == "no product and no lookup uses it, only broadcast_in_dim, mul"


def test_a_rule_that_matches_nothing_names_what_is_near() -> None:
    with pytest.raises(RuleError, match=r"Rule 0, Rule\(path='embeder/table', .*matches nothing.*'embedder/table'"):
        rows(Rule(path="embeder/table", weights="int8"))
    with pytest.raises(RuleError, match="The operations: dot_general"):
        rows(Rule(op="conv", activations="int8"))


def test_a_rule_whose_parameters_an_earlier_one_took_matches_nothing() -> None:
    with pytest.raises(RuleError, match="Rule 1"):
        rows(Rule(path=".*", weights="int8"), Rule(path="norm", weights="int4"))


def test_an_optional_rule_may_match_nothing() -> None:
    assert {row.rule for row in rows(Rule(path="adapter", weights="int8", optional=True)).values()} == {None}


def test_a_rule_with_path_and_op_is_for_that_operation() -> None:
    found = rows(Rule(path="embedder", op="conv|dot_general", weights="int8"))
    assert found["embedder/table"].scheme == "int8"
    with pytest.raises(RuleError, match="matches nothing"):
        rows(Rule(path="embedder", op="conv", weights="int8"))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"weights": "int8"}, RuleError, "neither path nor op"),
        ({"op": "dot", "weights": "int8"}, RuleError, "weights without a path"),
        ({"path": "(", "weights": "int8"}, RuleError, "is not a regular expression"),
        ({"path": "a", "weights": "int9"}, UnknownName, "int8"),
        ({"path": "a", "weights": "int8", "weight_calibration": "abs_max"}, UnknownName, "absmax"),
        ({"path": "a", "weights": "int8", "activation_calibration": "rms"}, ArgumentError, "rms"),
        ({"path": "a", "weights": "int8", "weight_calibration": "moving"}, RuleError, "averages over a stream"),
        ({"path": "a", "weights": "int8", "static_ranges": True}, RuleError, "activations that stay in float"),
        ({"path": "a", "weights": "int8", "activation_calibration": "moving"}, RuleError, "that stay in float"),
        ({"path": "a", "weights": "int8", "smaller_tiles": True}, RuleError, "smaller_tiles needs a tile_size"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(given: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        Rule(**given)


def test_a_tile_that_does_not_divide_is_refused_with_both_sizes() -> None:
    with pytest.raises(ShapeError, match=r"embedder/table: a tile of 3 entries .* axis 0, of 8 entries"):
        rows(Rule(path="embedder", weights="int8", tile_size=3))


def test_gradients_are_not_for_ptq() -> None:
    with pytest.raises(RuleError, match="'ptq' has no gradients"):
        rows(Rule(path="embedder", weights="int8", gradients="int8"))


def test_an_average_over_a_stream_needs_one() -> None:
    with pytest.raises(RuleError, match=r"1 activations, the first at embedder/table, .* none were given"):
        rows(Rule(path="embedder", weights="int8", activations="int8", activation_calibration="moving,0.9"))


def test_an_unknown_method_suggests() -> None:
    with pytest.raises(UnknownName, match="'ptq'"):
        quantize_function(fn, PARAMS, [Rule(path=".*", weights="int8")], (jnp.ones((2, 8)),), method="pqt")
