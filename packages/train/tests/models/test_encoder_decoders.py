"""Encoder-decoders: a target sees its own source and its earlier tokens, and checkpoints come in several layouts."""

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
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.generation.static_engine import StaticEngine
from stack_train.huggingface import FORMAT
from stack_train.run.config import run_config

from ..huggingface.published import small_checkpoint
from ..random_models import draw_model

SIZES = {"vocab_size": 61, "embed": 24, "heads": 3, "head_dim": 6, "mlp": 40, "layers": 2, "decoder_layers": 3}
SIZES |= {"buckets": 6, "max_distance": 9, "max_positions": 24, "start_token": 7, "dtype": "float32"}
FAMILIES = {"t5": {}, "mt5": {}, "umt5": {"tie_embeddings": True, "feed_forward": "gated-silu"}}
SOURCE = np.random.default_rng(0).integers(0, 61, 14)
TARGET = np.random.default_rng(1).integers(0, 61, 12)


def make_config(name, **changes):
    return registries.models[name].config_class(**{**SIZES, **FAMILIES[name], **changes})


# An mT5 has the layers of a T5.
@pytest.fixture(scope="module", params=["t5", pytest.param("mt5", marks=pytest.mark.slow), "umt5"])
def model(request):
    with jax.enable_x64(False):
        family, config = registries.models[request.param], make_config(request.param)
        return draw_model(lambda: family.build(config, key=jax.random.key(0)), scale=0.3, norm=0.0)


@jax.jit
def hidden_of(model, tokens, segments, source, source_segments):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model(tokens, positions, segments, source_tokens=source, source_segment_ids=source_segments).hidden


def test_packed_texts_give_what_each_gives_alone(model):
    """Two pairs in a row, of other lengths, and the second alone before padding."""
    segments = jnp.array([[1] * 5 + [2] * 7, [2] * 7 + [0] * 5])
    source_segments = jnp.array([[1] * 8 + [2] * 6, [2] * 6 + [0] * 8])
    tokens = jnp.stack([TARGET, np.concatenate([TARGET[5:], TARGET[:5]])])
    source = jnp.stack([SOURCE, np.concatenate([SOURCE[8:], SOURCE[:8]])])
    packed, alone = hidden_of(model, tokens, segments, source, source_segments)
    np.testing.assert_allclose(packed[5:], alone[:7], atol=2e-5)
    changed = hidden_of(model, tokens, segments, source.at[0, 3].add(1), source_segments)[0]
    assert np.all(np.abs(changed - packed)[:5].max(-1) > 1e-4)
    np.testing.assert_array_equal(changed[5:], packed[5:])


def test_a_target_token_sees_none_after_it(model):
    tokens, ones = jnp.stack([TARGET, TARGET]).at[1, 6].add(1), jnp.ones((2, 12), jnp.int32)
    source = jnp.stack([SOURCE, SOURCE])
    first, changed = hidden_of(model, tokens, ones, source, jnp.ones_like(source))
    seen = np.abs(changed - first).max(axis=-1) > 1e-6
    assert seen.tolist() == [False] * 6 + [True] * 6


def test_decoding_with_a_cache_gives_what_the_whole_target_gives(model):
    """Two rows, with sources of other lengths, whose keys and values are computed once."""
    tokens, source = jnp.stack([TARGET, TARGET[::-1]]), jnp.stack([SOURCE, SOURCE[::-1]])
    source_segments = (jnp.arange(14) < jnp.array([[14], [9]])).astype(jnp.int32)
    expected = hidden_of(model, tokens, None, source, source_segments)
    encoded = jax.jit(lambda model: model.encode(source, source_segments))(model)
    assert encoded.keys.shape == (3, 2, 14, 3, 6)
    step = jax.jit(lambda model, tokens, cache: model(tokens, cache.lengths[:, None], cache=cache, source=encoded))
    cache, found = DenseKVCache.empty(model.states, batch=2, capacity=13), []
    for place in range(12):
        outputs = step(model, tokens[:, place : place + 1], cache)
        cache = outputs.cache
        found.append(outputs.hidden)
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), expected, atol=2e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_config_survives_config_json_and_yaml(name):
    family, config = registries.models[name], make_config(name)
    written = json.loads(json.dumps(family.config_map.write(config)))
    assert parse(type(config), {**family.config_map.read(written), "name": name, "dtype": "float32"}) == config
    assert parse(type(config), to_mapping(config)) == config
    wrong = {"frobnicate": 3, "is_encoder_decoder": False, "feed_forward_proj": "gated-relu", "dense_act_fn": "swish"}
    for key, value in wrong.items():
        with pytest.raises(ConversionError, match=f"{key}={value!r}"):
            family.config_map.read({**written, key: value})


def test_the_head_is_read_as_the_checkpoint_has_it(tmp_path):
    """Releases of transformers agree on no key: 4 writes the tie, 5 a tie of every model and whether it scales."""
    small_checkpoint("t5-v1_1-base", tmp_path / "hf", files=1)
    path, file = tmp_path / "hf" / "config.json", tmp_path / "hf" / "model-00001-of-00001.safetensors"
    (tmp_path / "hf" / "model.safetensors.index.json").unlink()
    file = file.rename(tmp_path / "hf" / "model.safetensors")
    config, tensors = json.loads(path.read_text()), load_file(file)
    of_five = {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    whole = {name: each for name, each in tensors.items() if name != "lm_head.weight"}
    copied = {**whole, "lm_head.weight": whole["shared.weight"], "decoder.embed_tokens.weight": whole["shared.weight"]}
    cases = {
        "own": (config, tensors, (False, False)),
        "own, by transformers 5": (config | of_five, tensors, (False, False)),
        "tied, by transformers 5": (config | of_five, whole, (True, False)),
        "tied": (config | {"tie_word_embeddings": True}, whole, (True, True)),
        "copied": (config | {"tie_word_embeddings": True}, copied, (True, True)),
    }
    for name, (mapping, stored, expected) in cases.items():
        path.write_text(json.dumps(mapping))
        save_file(stored, file)
        FORMAT.import_run(tmp_path / "hf", tmp_path / name)
        model = run_config(tmp_path / name).model
        assert (model.tie_embeddings, model.scale_hidden) == expected, name
    save_file(tensors | {"encoder.embed_tokens.weight": tensors["shared.weight"] + 1}, file)
    with pytest.raises(ConversionError, match=r"encoder\.embed_tokens\.weight differs from shared\.weight"):
        FORMAT.import_run(tmp_path / "hf", tmp_path / "other")


def test_what_an_encoder_decoder_does_not_do_is_refused(model, tmp_path):
    tokens, long = jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 25), jnp.int32)
    with pytest.raises(ArgumentError, match=r"this call has no source\. Train it on data\.name: pairs"):
        model(tokens, tokens)
    for target, source in ((long, tokens), (tokens, long)):
        with pytest.raises(ShapeError, match="25 tokens; the model has max_positions=24"):
            model(target, target, source_tokens=source)
    cache = DenseKVCache.empty(model.states, batch=1, capacity=8)
    with pytest.raises(ArgumentError, match="A cache was given with no encoded source"):
        model(tokens, tokens, cache=cache, source_tokens=tokens)
    axes = ("data", "fsdp", "tensor", "expert", "context", "stage")
    mesh = jax.sharding.AbstractMesh((1, 1, 1, 1, 2, 1), axes, axis_types=(jax.sharding.AxisType.Auto,) * 6)
    with in_mesh((mesh, DEFAULT_RULES)), pytest.raises(ShardingError, match=r"Set mesh\.context to 1"):
        model(tokens, tokens, source_tokens=tokens)


def test_wrong_sizes_are_refused():
    with pytest.raises(ConfigError, match="Set buckets"):
        make_config("t5", buckets=2)
    with pytest.raises(ConfigError, match=r"Set buckets to 4 or more, and max_distance above 3"):
        make_config("t5", max_distance=3)
    with pytest.raises(ConfigError, match="start_token=61 is outside of the vocabulary, 0 to 60"):
        make_config("t5", start_token=61)
    with pytest.raises(ConfigError, match="an mT5 does not scale its hidden states"):
        make_config("mt5", scale_hidden=True)


def test_programs_that_continue_prompts_refuse_it(tmp_path):
    small_checkpoint("t5-small", tmp_path / "hf")
    with pytest.raises(GenerationError, match="hf is an encoder-decoder: it generates a target from a source text"):
        open_for_generation(f"hf:{tmp_path}/hf")
    checkpoint = open_for_generation(f"hf:{tmp_path}/hf", sources=True)
    with pytest.raises(GenerationError, match="hf is an encoder-decoder"):
        StaticEngine(checkpoint)
