"""Decoders that replay the experts of another forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ShapeError
from stack_core.abi.plugins import registries
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.models.gpt_oss import GptOssConfig
from stack_train.models.llama import LlamaConfig
from stack_train.models.qwen3_moe import Qwen3MoeConfig

from ..random_models import draw_model

SIZES = {"vocab_size": 16, "embed": 16, "heads": 2, "mlp": 16, "max_positions": 16, "dtype": "float32"}
EXPERTS = {"experts": 5, "active_experts": 2}
ALTERNATING = GptOssConfig(**SIZES, **EXPERTS, layers=4)
SPARSE = Qwen3MoeConfig(**SIZES, **EXPERTS, layers=4, expert_mlp=8, dense_layers=(0, 2), remat="full")
TOKENS = jax.random.randint(jax.random.key(0), (2, 6), 0, 16)
POSITIONS = jnp.broadcast_to(jnp.arange(6), (2, 6))


def build(config):
    return draw_model(lambda: registries.models[config.name].build(config, key=jax.random.key(0)))


def generated(model, **more):
    """Outputs with a cache, which report the experts."""
    cache = DenseKVCache.empty(model.states, batch=2, capacity=6)
    return model(TOKENS, POSITIONS, cache=cache, **more)


def draw_experts(mixtures):
    shares = np.random.default_rng(1).random((2, 6, mixtures, EXPERTS["experts"]))
    return jnp.asarray(shares.argsort()[..., :2], jnp.int16)


@pytest.mark.parametrize(("config", "mixtures"), [(ALTERNATING, 4), (SPARSE, 2)], ids=["alternating", "sparse"])
def test_each_layer_replays_its_experts_with_and_without_a_cache(config, mixtures):
    model = build(config)
    own, plain = generated(model), model(TOKENS, POSITIONS)
    assert own.facts["experts"].shape == (mixtures, 2, 6, 2) and "experts" not in plain.facts
    same = model(TOKENS, POSITIONS, experts=jnp.moveaxis(own.facts["experts"], 0, 2).astype(jnp.int16))
    np.testing.assert_array_equal(same.hidden, plain.hidden)
    assert same.facts["routing_mismatch"] == 0

    experts = draw_experts(mixtures).at[1, 2].set(-1)
    found, trained = generated(model, experts=experts), model(TOKENS, POSITIONS, experts=experts)
    is_own = np.moveaxis(experts, 2, 0) < 0
    np.testing.assert_array_equal(np.where(is_own, -1, found.facts["experts"]), np.moveaxis(experts, 2, 0))
    assert (found.facts["experts"] >= 0).all() and trained.facts["routing_mismatch"] > 0.5
    np.testing.assert_allclose(trained.hidden, found.hidden, rtol=1e-4, atol=1e-4)
    assert np.abs(trained.hidden - plain.hidden).max() > 0.1


def test_experts_of_other_sizes_are_refused():
    with pytest.raises(ShapeError, match=r"experts have shape \(2, 6, 3, 2\); the model has 2 mixtures of experts, so"):
        build(SPARSE)(TOKENS, POSITIONS, experts=draw_experts(3))
    with pytest.raises(ShapeError, match="the model has 0 mixtures"):
        build(LlamaConfig(**SIZES, layers=1))(TOKENS, POSITIONS, experts=draw_experts(1))
