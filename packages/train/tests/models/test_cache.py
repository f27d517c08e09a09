import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_core.abi.caches import KVCache
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.models.llama import FAMILY, LlamaConfig

from ..random_models import draw_model

CONFIG = LlamaConfig(vocab_size=61, embed=24, layers=3, heads=4, kv_heads=2, mlp=40, max_positions=32, dtype="float32")
SEQ = 12


@pytest.fixture(scope="module")
def model():
    return draw_model(lambda: FAMILY.build(CONFIG, key=jax.random.key(0)))


@pytest.fixture(scope="module")
def run(model):
    """The model's call, compiled."""
    graph, state = nnx.split(model)
    compiled = jax.jit(lambda state, *arguments, cache=None: nnx.merge(graph, state)(*arguments, cache=cache))
    return functools.partial(compiled, state)


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (2, SEQ), 0, CONFIG.vocab_size)


def empty_cache(model):
    return DenseKVCache.empty(model.states, batch=2, capacity=16)


def positions_from(starts, seq):
    return jnp.asarray(starts)[:, None] + jnp.arange(seq)


def test_is_a_kv_cache(model):
    assert isinstance(empty_cache(model), KVCache)


SLOW_CUTS = [pytest.param(cuts, marks=pytest.mark.slow) for cuts in ([12], [1, 1, 10], [5, 7])]


@pytest.mark.parametrize("cuts", [[8, 1, 1, 1, 1], *SLOW_CUTS])
def test_pieces_give_what_the_whole_gives(model, run, tokens, cuts):
    expected = run(tokens, positions_from([0, 0], SEQ)).hidden
    cache, start = empty_cache(model), 0
    for cut in cuts:
        piece = tokens[:, start : start + cut]
        outputs = run(piece, positions_from([start, start], cut), cache=cache)
        np.testing.assert_allclose(outputs.hidden, expected[:, start : start + cut], atol=1e-5)
        cache = outputs.cache
        start += cut
    assert cache.lengths.tolist() == [SEQ, SEQ]


def test_rows_of_different_lengths_go_on_where_each_stands(model, run, tokens):
    lengths = jnp.array([7, 3])
    cache = run(tokens[:, :8], positions_from([0, 0], 8), cache=empty_cache(model).expecting(lengths)).cache
    expected = run(tokens, positions_from([0, 0], SEQ)).hidden
    for step in range(2):
        following = jnp.stack([tokens[0, 7 + step], tokens[1, 3 + step]])[:, None]
        outputs = run(following, positions_from(lengths + step, 1), cache=cache)
        cache = outputs.cache
        np.testing.assert_allclose(outputs.hidden[0, 0], expected[0, 7 + step], atol=1e-5)
        np.testing.assert_allclose(outputs.hidden[1, 0], expected[1, 3 + step], atol=1e-5)
    assert cache.lengths.tolist() == [9, 5]


def test_layout_is_head_major_in_the_compute_dtype(model):
    cache = empty_cache(model)
    ((layer,),) = cache.layers
    assert layer.key.shape == (3, 2, 2, 16, 6)
    assert layer.value.dtype == jnp.float32
