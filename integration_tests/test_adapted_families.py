"""Which parameters of every family take adapters and nf4: the table in docs/adapters.md, which this module writes.

python integration_tests/test_adapted_families.py > docs/adapters.md
"""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stack_core.contracts.models import LanguageModel
from stack_core.plugins import registries
from stack_quant.lora.planning import adapted_treatment, factors_of
from stack_quant.lora.rules import AdapterRule
from stack_quant.nnx_model import ModuleProgram, plain_module
from stack_quant.recipes import load_recipe
from stack_quant.section import QuantConfig, Quantization
from stack_train.run.model import abstract_model

TABLE = Path(__file__).parents[1] / "docs" / "adapters.md"
HEAD = """\
# Adapters and nf4, by family

Which parameters of a layer take adapters of low rank (`lora:`, path `blocks`), and which of these the recipe `nf4`
leaves out. In the products of all of them adapters go by way of the rank. Parameters without a product, such as norms
and biases, have neither.
"""
SMALL = {"vocab_size": 64, "embed": 64, "heads": 4, "mlp": 64, "max_positions": 32}
FEW = ("llama", "deepseek_v3", "qwen3_next")  # every kind of layer with products
SLOW = pytest.mark.slow
NARROW = {
    "mixtral": {"experts": 4, "active_experts": 2},
    "qwen3_moe": {"experts": 4, "active_experts": 2, "expert_mlp": 64, "dense_layers": (0,)},
    "gemma3": {"layers": 3, "period": 2, "query_scalar": 16},
    "deepseek_v3": {"query_rank": 64, "kv_rank": 64, "nope_dim": 16, "rope_dim": 8, "value_dim": 16, "experts": 4}
    | {"active_experts": 2, "expert_mlp": 64, "expert_groups": 2, "kept_groups": 1},
    "qwen3_next": {"layers": 3, "period": 2, "key_heads": 2, "value_heads": 2, "key_dim": 32, "value_dim": 32}
    | {"experts": 4, "active_experts": 2, "expert_mlp": 64, "shared_mlp": 64},
}


def families() -> Iterator[str]:
    """Those of language models."""
    return (name for name in sorted(registries.models) if "vocab_size" in fields_of(name))


def fields_of(name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(registries.models[name].config_class)}


def row(name: str) -> str:
    fields = fields_of(name)
    sizes = {key: value for key, value in {**SMALL, "layers": 2, **NARROW.get(name, {})}.items() if key in fields}
    model = abstract_model(registries.models[name].config_class(family=name, **sizes))
    assert isinstance(model, LanguageModel)
    batch = {key: jax.ShapeDtypeStruct((2, 8), jnp.int32) for key in ("tokens", "positions", "segment_ids")}
    quantized: Any = Quantization(QuantConfig(rules=load_recipe("nf4")), batch).apply(model)
    program = ModuleProgram.of(plain_module(quantized), (), batch)
    arrays, traced = program.parameters.arrays, program.trace()
    treatment = adapted_treatment([AdapterRule(path="blocks")], traced, arrays, quantized.quantization.treatment, bool)
    factors = factors_of(treatment.adapters, arrays, jax.random.key(0), "float32")
    merged = [row for row in traced.survey(arrays, treatment, factors).rows if "are merged" in row.reason]
    assert not merged, merged
    nf4 = {path for path, spec in treatment.specs.items() if spec.type == "nf4"}
    names = {_place(path): path in nf4 for path in treatment.adapters}
    left = ", ".join(place for place, is_nf4 in names.items() if not is_nf4) or "none"
    return f"| {name} | {', '.join(names)} | {left} |"


def _place(path: str) -> str:
    return "/".join(path.removesuffix("/kernel").split("/")[3:])


def page() -> str:
    rows = "\n".join(map(row, families()))
    return f"{HEAD}\n| family | with adapters | of these not in nf4 |\n|---|---|---|\n{rows}\n"


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=SLOW) for name in families()])
def test_the_table_says_what_a_family_takes(name: str) -> None:
    assert row(name) in TABLE.read_text(encoding="utf-8").splitlines()


def test_the_table_has_every_language_model() -> None:
    listed = {line.split("|")[1].strip() for line in TABLE.read_text(encoding="utf-8").splitlines() if "/" in line}
    assert set(families()) <= listed


if __name__ == "__main__":
    sys.stdout.write(page())
