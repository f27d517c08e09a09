from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, ShapeError, UnknownName
from stack_core.abi.plugins import registries
from stack_quant.errors import RuleError
from stack_quant.model import quantize_function, report
from stack_quant.recipes import as_rules, load_recipe, recipe_names
from stack_quant.rules import Rule
from stack_quant.section import QuantConfig, Quantization

SHAPES = {"embedder": (64, 256), "layers/up": (256, 256), "norm": (256,), "lm_head": (256, 64)}
SCHEMES = {
    "fp8": {"embedder": "fp8_e4m3", "layers/up": "fp8_e4m3", "lm_head": "fp8_e4m3"},
    "nf4": {"embedder": "int8", "layers/up": "nf4/t64", "lm_head": "int8"},
    "w4": {"embedder": "int8", "layers/up": "int4/t32", "lm_head": "int8"},
    "w4_t128": {"embedder": "int8", "layers/up": "int4/t128", "lm_head": "int8"},
    "w4a8": {"embedder": "int8/t32", "layers/up": "int4/t32", "lm_head": "int8/t32"},
    "w4a8_t128": {"embedder": "int8", "layers/up": "int4/t128", "lm_head": "int8"},
    "w8a8": {"embedder": "int8", "layers/up": "int8", "lm_head": "int8"},
}


def forward(params, tokens):
    hidden = params["embedder"][tokens] * params["norm"]
    return (hidden @ params["layers/up"]) @ params["lm_head"]


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_quantizes_what_its_name_says(name: str) -> None:
    params = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in SHAPES.items()}
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    quantized = quantize_function(forward, params, name, (tokens,))
    schemes = {row.path: row.scheme for row in report(quantized).parameters if not row.reason}
    assert schemes == SCHEMES[name]
    computed = {row.computed for row in report(quantized).operations if "layers/up" in row.paths}
    assert computed == {"quantized" if name in ("w8a8", "w4a8", "w4a8_t128", "fp8") else "dequantized"}


@pytest.mark.parametrize("name", ["w4_t128", "w4a8_t128"])
@pytest.mark.parametrize(("entries", "tile"), [(64, 64), (192, 96), (257, 257), (262, 131)])
def test_a_recipe_takes_the_largest_tile_that_divides_and_says_so(name: str, entries: int, tile: int) -> None:
    weight, x = jax.random.normal(jax.random.key(0), (entries, 16)), jnp.ones((2, entries))
    fn = lambda params, x: x @ params["up"]
    quantized = quantize_function(fn, {"up": weight}, name, (x,))
    (row,) = report(quantized).parameters
    assert row.scale_shape == (entries // tile, 16) and row.scheme.startswith("int4")
    assert f"{tile} entries share a scale: the tile_size of rule 1 does not divide its axes" in str(report(quantized))
    assert quantized(x).shape == (2, 16)
    with pytest.raises(ShapeError, match="up: a tile of 128 entries"):
        quantize_function(fn, {"up": weight}, [Rule(path="up", weights="int4", tile_size=128)], (x,))


def test_two_contracted_axes_are_cut_as_one_and_activations_as_the_weight() -> None:
    weight, x = jax.random.normal(jax.random.key(0), (6, 20, 8)), jax.random.normal(jax.random.key(1), (3, 6, 20))
    fn = lambda params, x: jnp.einsum("bhd,hde->be", x, params["out"])
    rule = Rule(path="out", weights="int8", activations="int8", tile_size=32, smaller_tiles=True)
    quantized = quantize_function(fn, {"out": weight}, rule, (x,))
    assert quantized.params["out"].scale.shape == (1, 4, 8)  # 5 of the 20, and all 6: einsum's order
    expected = fn({"out": weight}, x)
    assert jnp.linalg.norm(quantized(x) - expected) < 0.02 * jnp.linalg.norm(expected)


def test_a_recipe_is_a_name_or_a_file_of_rules(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("rules:\n- path: up\n  weights: int4\n  tile_size: 4\n- {op: attention, activations: fp8_e4m3}\n")
    expected = (Rule(path="up", weights="int4", tile_size=4), Rule(op="attention", activations="fp8_e4m3"))
    assert load_recipe(str(path)) == load_recipe(path) == expected
    path.write_text("rules:\n- {path: up, weight: int4}\n")
    with pytest.raises(ConfigError, match=r"rules\.0\.weight.*'weights'"):
        load_recipe(path)
    path.write_text("- {path: up, weights: int4}\n")
    with pytest.raises(ConfigError, match=r"holds a list.* `rules:`, then a list of mappings"):
        load_recipe(path)
    with pytest.raises(UnknownName, match=r"'w8b8'. Did you mean 'w8a8'.*path of a file that ends in .yaml"):
        load_recipe("w8b8")


@pytest.mark.parametrize(
    "rules",
    [
        Rule(path="up", weights="int8"),
        {"path": "up", "weights": "int8"},
        [{"path": "up", "weights": "int8"}],
        {"rules": [{"path": "up", "weights": "int8"}]},
    ],
)
def test_rules_are_one_or_several_and_may_be_mappings(rules: Any) -> None:
    quantized = quantize_function(lambda p, x: x @ p["up"], {"up": jnp.ones((4, 4))}, rules, (jnp.ones((2, 4)),))
    assert quantized.params["up"].codes.dtype == jnp.int8
    assert parse(QuantConfig, {"rules": rules}, path="quant").rules == (Rule(path="up", weights="int8"),)


def test_a_mistake_in_a_recipe_is_reported_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("rules: [{path: up, weight: int8}]")
    with pytest.raises(ConfigError, match=rf"^Unknown key '{path}: rules.0.weight'. Did you mean 'weights'"):
        load_recipe(path)


def test_what_are_no_rules_is_refused() -> None:
    with pytest.raises(RuleError, match=r"rules is 7, neither a rule nor a list of rules\. Give Rule"):
        as_rules(7)
    with pytest.raises(ConfigError, match=r"rules\.0 is 7; a mapping with keys of Rule"):
        as_rules([7])


def test_the_section_of_a_run_is_registered_with_its_quantizer() -> None:
    assert registries.sections["quant"] is QuantConfig and registries.transforms["quant"] is Quantization
    section = parse(QuantConfig, {"rules": [{"path": "up", "weights": "int8"}], "method": "ptq"}, path="quant")
    assert section.rules == (Rule(path="up", weights="int8"),)


@pytest.mark.parametrize(
    ("section", "error", "message"),
    [
        ({"rules": [{"path": "up", "weight": "int8"}]}, ConfigError, "^Unknown key 'quant.rules.0.weight'"),
        ({"rules": {"path": "up", "weight": "int8"}}, ConfigError, "^Unknown key 'quant.rules.0.weight'"),
        ({"rules": [{"path": "up"}, {"weights": "int8"}]}, RuleError, "^quant.rules.1: .* neither path nor op"),
        ({"rules": [], "method": "pdq"}, UnknownName, "Did you mean 'ptq'"),
        ({"rules": [{"path": "up", "gradients": "int8"}]}, RuleError, "no gradients to quantize"),
    ],
)
def test_a_section_that_does_not_fit_is_refused(section: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse(QuantConfig, section, path="quant")
