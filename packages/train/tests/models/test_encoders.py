"""Encoders: every token sees its whole text and nothing else, and checkpoints come in several layouts."""

import dataclasses
import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from stack_core.abi.config import parse, to_mapping
from stack_core.abi.errors import (
    ArgumentError,
    ConfigError,
    ConversionError,
    GenerationError,
    ShapeError,
    ShardingError,
)
from stack_core.abi.mesh import DEFAULT_RULES, in_mesh
from stack_core.abi.model_formats import open_for_generation
from stack_core.abi.plugins import registries
from stack_train.huggingface import FORMAT
from stack_train.objectives import CausalLMConfig
from stack_train.run.config import run_config

from ..huggingface.published import small_checkpoint
from ..random_models import draw_model

SIZES = {"vocab_size": 61, "embed": 24, "heads": 4, "mlp": 40, "max_positions": 16, "dtype": "float32"}
FAMILIES = {
    "bert": {"layers": 2},
    "roberta": {"layers": 1},
    "modernbert": {"layers": 4, "window": 4, "norm_bias": True, "attention_bias": True},
}
SEQ = 12


def make_model(name, **changes):
    config = registries.models[name].config_class(**{**SIZES, "initializer_std": 0.2, **FAMILIES[name], **changes})
    return draw_model(lambda: registries.models[name].build(config, key=jax.random.key(0)), scale=0.3, norm=0.0)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    with jax.enable_x64(False):
        return make_model(request.param)


@jax.jit
def hidden_of(model, tokens, positions, segments):
    return model(tokens, positions, segments).hidden


TOKENS = jnp.array(np.random.default_rng(1).integers(0, 61, SEQ))
WHOLE = jnp.arange(SEQ)[None].repeat(2, 0), jnp.ones((2, SEQ), jnp.int32)
"""Positions and segments of two rows, each one text."""


def test_a_text_gives_the_same_behind_another_and_before_padding(model):
    tokens = jnp.stack([TOKENS, jnp.roll(TOKENS, -5).at[SEQ - 5 :].set(3)])
    positions = jnp.array([[*range(5), *range(SEQ - 5)], range(SEQ)])
    segments = jnp.array([[1] * 5 + [2] * (SEQ - 5), [1] * (SEQ - 5) + [0] * 5])
    behind, before = hidden_of(model, tokens, positions, segments)
    np.testing.assert_allclose(behind[5:], before[: SEQ - 5], atol=2e-5)


@pytest.mark.parametrize("place", [0, SEQ - 1])
def test_attention_has_both_directions(model, place):
    first, changed = hidden_of(model, jnp.stack([TOKENS, TOKENS.at[place].add(1)]), *WHOLE)
    assert np.all(np.abs(changed - first).max(axis=-1) > 1e-4)


def test_a_window_hides_distant_tokens_in_both_directions():
    model = make_model("modernbert", layers=1)
    block = model.blocks[0][0].attention
    block.spec = dataclasses.replace(block.spec, window=3)
    first, changed = hidden_of(model, jnp.stack([TOKENS, TOKENS.at[6].add(1)]), *WHOLE)
    seen = np.abs(changed - first).max(axis=-1) > 1e-6
    assert seen.tolist() == [abs(place - 6) <= 3 for place in range(SEQ)]


def test_token_types_and_the_pooler():
    model = make_model("bert")
    tokens, positions = jnp.arange(SEQ)[None], jnp.arange(SEQ)[None]
    types = jnp.zeros_like(tokens)
    typed = jax.jit(lambda model, types: model(tokens, positions, token_types=types).hidden)
    hidden, pooled = jax.jit(lambda model: model.on_batch({"tokens": tokens, "positions": positions}))(model)
    np.testing.assert_allclose(typed(model, types), hidden, atol=1e-6)
    assert np.abs(typed(model, types.at[0, 6:].set(1)) - hidden).max() > 0.01
    expected = np.tanh(np.asarray(hidden)[:, 0] @ np.asarray(model.pooler.kernel[...]) + model.pooler.bias[...])
    np.testing.assert_allclose(pooled, expected, atol=1e-6)
    with pytest.raises(ArgumentError, match="no pooler"):
        make_model("bert", pooler=False).pooled(hidden)
    with pytest.raises(ArgumentError, match="no token types"):
        make_model("modernbert")(tokens, positions, token_types=types)


def test_what_an_encoder_does_not_do_is_refused(model):
    tokens = jnp.zeros((1, 17), jnp.int32)
    with pytest.raises(ShapeError, match="17 tokens; the model has max_positions=16"):
        model(tokens, tokens)
    axes = ("data", "fsdp", "tensor", "expert", "context", "stage")
    mesh = jax.sharding.AbstractMesh((1, 1, 1, 1, 2, 1), axes, axis_types=(jax.sharding.AxisType.Auto,) * 6)
    with in_mesh((mesh, DEFAULT_RULES)), pytest.raises(ShardingError, match=r"Set mesh\.context to 1"):
        model(tokens[:, :4], tokens[:, :4])
    batch = dict.fromkeys(("tokens", "positions", "segment_ids", "targets"), tokens[:, :4])
    with pytest.raises(ConfigError, match="predicts the next token, and this model has no head"):
        inspect.unwrap(CausalLMConfig.__call__)(CausalLMConfig(), model, batch, key=jax.random.key(0))


def test_wrong_sizes_are_refused():
    with pytest.raises(ConfigError, match="embed=25 is not a multiple of heads=4"):
        make_model("bert", embed=25)
    with pytest.raises(ConfigError, match="heads of 5 features"):
        make_model("modernbert", embed=20)


@pytest.mark.parametrize("name", FAMILIES)
def test_config_survives_config_json_and_yaml(name):
    family = registries.models[name]
    config = family.config_class(**{**SIZES, **FAMILIES[name]})
    written = json.loads(json.dumps(family.config_map.write(config)))
    assert parse(type(config), {**family.config_map.read(written), "dtype": "float32"}) == config
    assert parse(type(config), to_mapping(config)) == config
    with pytest.raises(ConversionError, match=r"frobnicate=3"):
        family.config_map.read({**written, "frobnicate": 3})


def test_the_kinds_of_layers_give_the_period():
    read = registries.models["modernbert"].config_map.read
    full, local = "full_attention", "sliding_attention"
    for kinds, period in (([full, local, full, local], 2), ([full] * 3, 1), ([full, local], 2)):
        assert read({"num_hidden_layers": len(kinds), "layer_types": kinds})["period"] == period
    for kinds in ([local, full], [full, local, full, full]):
        with pytest.raises(ConversionError, match="layer_types="):
            read({"num_hidden_layers": len(kinds), "layer_types": kinds})
    scaled = {full: {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(ConversionError, match=r"rope_parameters=.*linear"):
        read({"num_hidden_layers": 2, "rope_parameters": scaled})


def test_the_first_layout_of_bert_is_read_without_its_heads(tmp_path):
    """BERT as it was first published: under a prefix, with TensorFlow's names of norms, and two heads."""
    tensors = small_checkpoint("all-MiniLM-L6-v2", tmp_path / "new", files=1)
    renamed = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): each
        for name, each in tensors.items()
        if not name.startswith("pooler")
    }
    heads = {"cls.predictions.bias": np.ones(53, np.float32), "cls.seq_relationship.bias": np.ones(2, np.float32)}
    (tmp_path / "old").mkdir()
    config = json.loads((tmp_path / "new" / "config.json").read_text()) | {"architectures": ["BertForPreTraining"]}
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    save_file({**renamed, **heads}, tmp_path / "old" / "model.safetensors")
    assert FORMAT.import_run(tmp_path / "old", tmp_path / "run").left_out == ("cls (2 tensors)",)
    assert not run_config(tmp_path / "run").model.pooler
    FORMAT.export_run(tmp_path / "run", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == {name for name in tensors if not name.startswith("pooler")}
    for name, each in back.items():
        np.testing.assert_array_equal(each.view(np.uint8), tensors[name].view(np.uint8), err_msg=name)


def test_an_encoder_generates_no_text(tmp_path):
    small_checkpoint("all-MiniLM-L6-v2", tmp_path / "hf")
    with pytest.raises(GenerationError, match="hf is an encoder: it embeds texts and generates none"):
        open_for_generation(f"hf:{tmp_path}/hf")
