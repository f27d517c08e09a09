from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from stack_core.config import parse
from stack_core.errors import ConfigError, UnknownName
from stack_core.plugins import registries
from stack_quant.errors import RuleError
from stack_quant.model import quantize_function
from stack_quant.recipes import named_or_read, recipe_names
from stack_quant.rules import Rule
from stack_quant.section import QUANTIZER, QuantConfig

SHAPES = {"embedder": (64, 256), "layers/up": (256, 256), "norm": (256,), "lm_head": (256, 64)}
SCHEMES = {
    "fp8": {"embedder": "fp8_e4m3", "layers/up": "fp8_e4m3", "lm_head": "fp8_e4m3"},
    "nf4": {"embedder": "int8", "layers/up": "nf4/t64", "lm_head": "int8"},
    "w4": {"embedder": "int8", "layers/up": "int4/t128", "lm_head": "int8"},
    "w4a8": {"embedder": "int8", "layers/up": "int4/t128", "lm_head": "int8"},
    "w8a8": {"embedder": "int8", "layers/up": "int8", "lm_head": "int8"},
}


def forward(params, tokens):
    hidden = params["embedder"][tokens] * params["norm"]
    return (hidden @ params["layers/up"]) @ params["lm_head"]


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_quantizes_what_its_name_says(name: str) -> None:
    params = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in SHAPES.items()}
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    _, _, report = quantize_function(forward, params, named_or_read(name), (tokens,))
    schemes = {row.path: row.scheme for row in report.parameters if not row.reason}
    assert schemes == SCHEMES[name]
    computed = {row.computed for row in report.operations if "layers/up" in row.paths}
    assert computed == {"quantized" if name in ("w8a8", "w4a8", "fp8") else "dequantized"}


def test_a_file_is_read_and_a_name_that_is_unknown_suggests(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("rules: [{path: up, weights: int8}]")
    assert named_or_read(str(path)) == (Rule(path="up", weights="int8"),)
    with pytest.raises(UnknownName, match=r"'w8b8'. Did you mean 'w8a8'.*path of a file that ends in .yaml"):
        named_or_read("w8b8")


def test_the_section_of_a_run_is_registered_with_its_quantizer() -> None:
    assert registries.configs["quant"] is QuantConfig and registries.quantizers["quant"] is QUANTIZER
    section = parse(QuantConfig, {"rules": [{"path": "up", "weights": "int8"}], "method": "ptq"}, path="quant")
    assert section.rules == (Rule(path="up", weights="int8"),)


@pytest.mark.parametrize(
    ("section", "error", "message"),
    [
        ({"rules": [{"path": "up", "weight": "int8"}]}, ConfigError, "weight"),
        ({"rules": [{"weights": "int8"}]}, RuleError, "neither path nor op"),
        ({"rules": [], "method": "pdq"}, UnknownName, "Did you mean 'ptq'"),
        ({"rules": [{"path": "up", "gradients": "int8"}]}, RuleError, "no gradients to quantize"),
    ],
)
def test_a_section_that_does_not_fit_is_refused(section: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse(QuantConfig, section, path="quant")
