"""Dual chunk attention in a decoder: equal in every way of computing it, and refused where it is not implemented."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ConfigError, ConversionError
from stack_core.ops.dual_chunk import DualChunk
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.huggingface.source import read_config
from stack_train.models import qwen2

SEQ = 19
SIZES = {"vocab_size": 53, "embed": 24, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 16, "max_positions": 32}
PLAIN = qwen2.Qwen2Config(**SIZES, dtype="float32", initializer_std=0.4)
DUAL = dataclasses.replace(PLAIN, dual_chunk=DualChunk(chunk=7, local=2, trained=11))
TOKENS = np.random.default_rng(0).integers(0, 53, (1, SEQ), dtype=np.int32)
POSITIONS = np.arange(SEQ, dtype=np.int32)[None]
# Of Qwen2.5-7B-Instruct-1M.
PUBLISHED = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}


@pytest.fixture(scope="module")
def model():
    return qwen2.FAMILY.build(DUAL, key=jax.random.key(0))


@jax.jit
def call(model, tokens, positions, segments=None, cache=None):
    return model(tokens, positions, segments, cache)


def plain_of(*arrays):
    return call(qwen2.FAMILY.build(PLAIN, key=jax.random.key(0)), *arrays).hidden


def test_a_sequence_within_a_chunk_is_that_of_ordinary_positions(model):
    short = TOKENS[:, :5], POSITIONS[:, :5]
    np.testing.assert_array_equal(call(model, *short).hidden, plain_of(*short))
    assert np.abs(call(model, TOKENS, POSITIONS).hidden - plain_of(TOKENS, POSITIONS)).max() > 0.1
    # The first chunk has no other one to attend to.
    long = call(model, TOKENS, POSITIONS).hidden[:, :5]
    np.testing.assert_allclose(long, plain_of(*short), atol=1e-5)


def test_documents_of_a_row_are_those_of_rows_of_their_own(model):
    first = 13
    positions = np.concatenate([POSITIONS[:, :first], POSITIONS[:, : SEQ - first]], axis=1)
    segments = np.array([[1] * first + [2] * (SEQ - first)], np.int32)
    packed = call(model, TOKENS, positions, segments).hidden
    apart = [call(model, TOKENS[:, part], positions[:, part]).hidden for part in (slice(0, first), slice(first, None))]
    np.testing.assert_allclose(packed, np.concatenate(apart, axis=1), atol=1e-5)


def test_greedy_tokens_of_a_dense_cache_are_those_of_the_full_sequence(model):
    cache = DenseKVCache.empty(model.states, batch=1, capacity=SEQ + 3)
    prompt, tokens = 8, TOKENS.copy()
    outputs = call(model, tokens[:, :prompt], POSITIONS[:, :prompt], None, cache)
    found = [outputs.hidden]
    for place in range(prompt, SEQ):
        tokens[:, place] = jnp.argmax(model.logits(outputs.hidden[:, -1]), axis=-1)
        outputs = call(model, tokens[:, place : place + 1], POSITIONS[:, place : place + 1], None, outputs.cache)
        found.append(outputs.hidden)
    expected = call(model, tokens, POSITIONS).hidden
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=2e-5)
    greedy = np.argmax(model.logits(expected), axis=-1)
    np.testing.assert_array_equal(greedy[:, prompt - 1 : -1], tokens[:, prompt:])


def test_the_published_config_opens_with_its_chunks():
    mapping = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 1_010_000,
        "max_window_layers": 28,
        "rope_theta": 10_000_000.0,
        "sliding_window": 32_768,
        "use_sliding_window": False,
        "dual_chunk_attention_config": PUBLISHED,
    }
    config = read_config(qwen2.FAMILY, mapping)
    assert config.dual_chunk == DualChunk(chunk=262_144, local=8192, trained=262_144)
    assert qwen2.spec(config).layers[0].attention.dual_chunk == config.dual_chunk
    assert qwen2.FAMILY.config_map.write(config)["dual_chunk_attention_config"] == PUBLISHED
    # Shorter sequences are ordinary, for any cache.
    shorter = dataclasses.replace(config, max_positions=253_952)
    assert qwen2.spec(shorter).layers[0].attention.dual_chunk is None
    sparse = {**PUBLISHED, "sparse_attention_config": [{"0": ["vertical_and_slash", 1000, 6096, 1]}]}
    with pytest.raises(ConversionError, match=r"dual_chunk_attention_config\.sparse_attention_config="):
        read_config(qwen2.FAMILY, {**mapping, "dual_chunk_attention_config": sparse})


def test_what_is_not_implemented_is_refused(model):
    with pytest.raises(ConfigError, match="does not support a window"):
        qwen2.spec(dataclasses.replace(DUAL, window=4))
    with pytest.raises(ConfigError, match="does not support a rope_scaling"):
        qwen2.spec(dataclasses.replace(DUAL, rope_scaling={"rope_type": "linear", "factor": 2.0}))

    methods = dict.fromkeys(("attend", "attend_shared", "attend_latent", "recur", "advance"), print)
    other = types.SimpleNamespace(layers=DenseKVCache.empty(model.states, batch=1, capacity=4).layers, **methods)
    with pytest.raises(ConfigError, match="does not support a SimpleNamespace"):
        model(jnp.asarray(TOKENS[:, :1]), jnp.asarray(POSITIONS[:, :1]), cache=other)
    assert {state.chunk for period in model.states for state in period} == {5}, "the paged engine refuses chunks"
