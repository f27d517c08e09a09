"""Folded rotations leave models of stack-train unchanged, or are refused with the operation that prevents them."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from stack_core.abi.plugins import registries
from stack_quant import Rule, quantize_model, report
from stack_quant.errors import RuleError
from stack_quant.evaluation import as_floats
from stack_quant.mixed.sensitivity import measure_sensitivity
from stack_quant.mixed.types import Budget
from stack_quant.nnx_model import untied_for
from stack_quant.recipes import as_rules
from stack_quant.section import QuantConfig
from stack_train.checkpoint import named_leaves
from stack_train.huggingface import FORMAT
from stack_train.huggingface.source import open_source
from stack_train.run.config import run_config
from stack_train.variables.model_variables import stored_values
from stack_train.variables.trained_model import RUN_FORMAT
from stack_train.variables.weights import read_model

SIZES = {
    "vocab_size": 61,
    "embed": 24,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 6,
    "mlp": 40,
    "layers": 2,
    "max_positions": 32,
    "dtype": "float32",
}
SCALES = {"embedding_scale": 3.0, "attention_scale": 0.3, "residual_scale": 0.4, "logit_divisor": 2.0}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPES = {
    "model.embed_tokens.weight": (61, 24),
    "model.norm.weight": (24,),
    **{f"model.layers.0.self_attn.{name}_proj.weight": (24, 24) for name in "qo"},
    **{f"model.layers.0.self_attn.{name}_proj.weight": (12, 24) for name in "kv"},
    **{f"model.layers.0.mlp.{name}_proj.weight": (40, 24) for name in ("gate", "up")},
    "model.layers.0.mlp.down_proj.weight": (24, 40),
    **{f"model.layers.0.{name}_layernorm.weight": (24,) for name in ("input", "post_attention")},
}
BATCH = {"tokens": jnp.arange(16).reshape(2, 8), "positions": jnp.broadcast_to(jnp.arange(8), (2, 8))}


def model_of(name: str, **changes):
    """Returns a model with random parameters, scales of norms included."""
    family = registries.models[name]
    config = family.config_class(**{**SIZES, **changes})
    graph, state = nnx.split(nnx.eval_shape(lambda: family.build(config, key=jax.random.key(0))))
    random = np.random.default_rng(0)
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(random.normal(0.3, 0.3, leaf.shape)), state))


def logits(model) -> jax.Array:
    return model.logits(model(**BATCH).hidden)


def rotated(model, algorithm="quarot"):
    # A rule that matches no operation quantizes nothing, so the model stays in float.
    return quantize_model(model, Rule(path=".*", op="none", weights="int8", algorithm=algorithm, optional=True), BATCH)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"head_dim": 10}),
        ("granite", SCALES),
        pytest.param("mixtral", {"experts": 5, "active_experts": 2}, marks=pytest.mark.slow),
    ],
)
def test_logits_of_a_rotated_model_are_the_same(name: str, changes) -> None:
    model = model_of(name, tie_embeddings=False, **changes)
    expected, found = logits(model), rotated(model)
    paths = {"embedding": model.embedding, "lm_head": model.lm_head, "norm": model.norm}
    for path, before in paths.items():
        assert not np.array_equal(before[...], getattr(found, path)[...])
    np.testing.assert_allclose(logits(found), expected, rtol=1e-4, atol=1e-4)


def test_a_tied_head_gets_weights_of_its_own() -> None:
    model = model_of("llama", tie_embeddings=True)
    expected, found = logits(model), rotated(model)
    np.testing.assert_allclose(logits(found), expected, rtol=1e-4, atol=1e-4)
    assert (model.config.tie_embeddings, model.lm_head, found.config.tie_embeddings) == (True, None, False)
    assert not np.allclose(found.lm_head[...], found.embedding[...].T)
    rows = {row.path: row for row in report(found).parameters}
    assert (rows["lm_head"].bytes_before, rows["lm_head"].bytes_after) == (0, 61 * 24 * 4)
    assert rows["lm_head"].note == "untied from the embedding: 5,856 more bytes"
    # The heads of attention have no part in the embedding.
    assert rotated(model, "quarot,stream=0").lm_head is None
    rules = [{"path": path, "weights": "int8", "algorithm": "quarot"} for path in ("embedding", "blocks")]
    with pytest.raises(RuleError, match=r"no rule matches its parameter lm_head\. Add a rule"):
        quantize_model(model, rules, BATCH)


def test_a_run_with_an_untied_head_is_saved_and_exported_with_it(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    config = {**CONFIG, "tie_word_embeddings": True}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    tensors = {name: random.normal(0.3, 0.3, shape).astype(np.float32) for name, shape in SHAPES.items()}
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    FORMAT.import_run(tmp_path / "hf", tmp_path / "run")
    opened = RUN_FORMAT.open_model(tmp_path / "run")
    rules = as_rules({"path": ".*", "weights": "int4", "tile_size": 8, "algorithm": "quarot"})
    model = quantize_model(opened.model, rules, BATCH)
    opened.save(tmp_path / "quantized", model, {"quant": QuantConfig(rules=rules)})
    saved = run_config(tmp_path / "quantized")
    assert (opened.config.model.tie_embeddings, saved.model.tie_embeddings) == (True, False)
    stored, _ = read_model(tmp_path / "quantized", saved)
    expected = logits(model)
    np.testing.assert_array_equal(logits(stored), expected)
    np.testing.assert_allclose(logits(as_floats(opened.model, model)), expected, rtol=1e-4, atol=1e-4)
    with pytest.warns(UserWarning, match="Written as floats.*: embedding"):
        FORMAT.export_run(tmp_path / "quantized", tmp_path / "exported")
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["tie_word_embeddings"] is False
    leaves = named_leaves(stored_values(as_floats(opened.model, model)))
    for path, leaf in open_source(tmp_path / "exported").leaves():
        np.testing.assert_array_equal(leaf, leaves[path], err_msg=path)


def test_a_budget_covers_an_untied_head(tmp_path: Path) -> None:
    model = model_of("llama", tie_embeddings=True)
    table = measure_sensitivity(
        untied_for(model, ["quarot"]), ("int8", "float"), BATCH, stream=[BATCH], stream_batches=1
    )
    assert {"embedding", "lm_head"} <= table.sites.keys()
    rules = table.rules(table.choose(Budget("9.5bits")), "quarot")
    rows = {row.path: row for row in report(quantize_model(model, rules, BATCH)).parameters}
    assert rows["lm_head"].scheme == "int8"


def test_what_holds_a_stream_in_place_is_named() -> None:
    with pytest.raises(RuleError, match="the scale blocks/0/0/attention_output_norm of a norm stays"):
        rotated(model_of("olmo2"))
