import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_core import ops
from stack_core.abi.config import parse, to_mapping
from stack_core.abi.errors import ArgumentError, ConfigError, ShapeError
from stack_core.abi.plugins import registries
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.models import decoder
from stack_train.models.llama import FAMILY, LlamaConfig
from stack_train.nn.stack import NamedRemat

TINY = LlamaConfig(vocab_size=61, embed=24, layers=3, heads=4, kv_heads=2, mlp=40, max_positions=32, dtype="float32")
KEY = jax.random.key(0)


@functools.cache
def build(**changes):
    """A model of the changed config; with the parameters of `build()` wherever they have the same shapes and dtypes."""
    config = dataclasses.replace(TINY, **changes)
    graph, abstract = nnx.split(jax.eval_shape(lambda: FAMILY.build(config, key=KEY)))
    if changes and "initializer_std" not in changes:
        params = nnx.to_pure_dict(nnx.state(build()))
        if jax.eval_shape(lambda: params) == nnx.to_pure_dict(abstract):
            return nnx.merge(graph, nnx.State(params))
    return jax.jit(lambda: FAMILY.build(config, key=KEY))()


def tokens_and_positions(batch=2, seq=9):
    tokens = jax.random.randint(jax.random.key(1), (batch, seq), 0, TINY.vocab_size)
    return tokens, jnp.broadcast_to(jnp.arange(seq), (batch, seq))


def loss(model):
    tokens, positions = tokens_and_positions()
    return model.head().cross_entropy(model(tokens, positions).hidden, tokens)


@jax.jit
def logits(model):
    return model.logits(model(*tokens_and_positions()).hidden)


loss_and_gradients = jax.jit(jax.value_and_grad(loss))


def shapes_and_dtypes(model):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), nnx.to_pure_dict(nnx.state(model)))


def primitives(function, config):
    """The names of all primitives in the jaxpr of a function of the model, those of inner jaxprs included."""
    model = jax.eval_shape(lambda: FAMILY.build(config, key=KEY))
    names, waiting = [], [jax.make_jaxpr(function)(model)]
    while waiting:
        jaxpr = waiting.pop()
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            names.append(equation.primitive.name)
            waiting += [inner for inner in jax.tree.leaves(tuple(equation.params.values())) if hasattr(inner, "eqns")]
    return names


def test_parameters_have_the_configured_shapes_and_axes():
    model = build()
    axes = {path: leaf.get_metadata("logical_axes") for path, leaf in nnx.to_flat_state(nnx.state(model))}
    assert axes[("blocks", 0, 0, "attention", "query", "kernel")] == ("layers", "embed", "heads")
    assert axes[("blocks", 0, 0, "attention_norm")] == ("layers", "norm")
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        assert len(axes[path]) == leaf.ndim, path
        assert (axes[path][0] == "layers") == (path[0] == "blocks"), path
    assert model.blocks[0][0].attention.key.kernel.shape == (3, 24, 2 * 6)
    assert model.head().weight.shape == (24, 61)


SHAPE_CHANGES = {
    "vocab_size": 62,
    "embed": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 8,
    "mlp": 24,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_embeddings": True,
    "param_dtype": "bfloat16",
}
VALUE_CHANGES = {
    "rope_theta": 100.0,
    "rope_scaling": ops.LinearScaling(factor=2.0),
    "norm_epsilon": 0.1,
    "initializer_std": 0.1,
    "dtype": "bfloat16",
}


def test_every_config_field_is_covered_here():
    elsewhere = {"name", "max_positions", "remat", "unroll", "context_keys"}
    assert {field.name for field in dataclasses.fields(LlamaConfig)} == {*SHAPE_CHANGES, *VALUE_CHANGES, *elsewhere}


@pytest.mark.parametrize("field", SHAPE_CHANGES)
def test_field_changes_the_parameters_and_the_model_takes_them(field):
    config = dataclasses.replace(TINY, **{field: SHAPE_CHANGES[field]})
    model = jax.eval_shape(lambda: FAMILY.build(config, key=KEY))
    assert shapes_and_dtypes(model) != shapes_and_dtypes(build())
    assert jax.eval_shape(logits, model).shape == (2, 9, config.vocab_size)


@pytest.mark.slow  # test_every_choice_acts.py looks for a change of the program by default
@pytest.mark.parametrize("field", VALUE_CHANGES)
def test_field_changes_the_logits(field):
    assert not jnp.array_equal(logits(build(**{field: VALUE_CHANGES[field]})), logits(build()))


def test_longer_than_max_positions_is_refused():
    assert jax.eval_shape(logits, build(max_positions=9)).shape == (2, 9, 61)
    with pytest.raises(ShapeError, match=r"9 tokens.*max_positions=8"):
        logits(build(max_positions=8))


def test_remat_none_means_none_and_the_others_save_less():
    products = {}
    for remat in ("none", "dots", "dots_no_batch", "full"):
        config = dataclasses.replace(TINY, remat=remat)
        forward = primitives(lambda model: model(*tokens_and_positions()), config)
        assert any("remat" in name or "checkpoint" in name for name in forward) == (remat != "none")
        names = primitives(jax.grad(loss), config)
        products[remat] = names.count("dot_general") + names.count("ffi_call")  # in machine code, where there is some
    assert products["none"] == products["dots"] < products["dots_no_batch"] < products["full"]


def test_named_values_are_kept_and_nothing_of_them_is_recomputed():
    def names_in(remat):
        return primitives(jax.grad(loss), dataclasses.replace(TINY, remat=remat))

    def products(**kept):
        names = names_in(NamedRemat(**kept) if kept else "full")
        return names.count("dot_general") + names.count("ffi_call")

    full = products()
    assert products(save=("layer_input",)) == full
    assert products(save=("query", "key", "value")) == full - 3
    assert products(save=("attention",)) < full
    # The products with the gate and up matrices.
    assert products(save=("hidden",)) <= full - 2
    every = ("query", "key", "value", "attention", "attention_output", "hidden")
    copies = names_in(NamedRemat(offload=every)).count("device_put")
    assert copies == 2 * len(every) and "device_put" not in names_in(NamedRemat(save=every))


@pytest.mark.parametrize(
    "remat",
    [
        "full",
        pytest.param("dots_no_batch", marks=pytest.mark.slow),
        pytest.param("dots", marks=pytest.mark.slow),
        NamedRemat(save=("attention", "hidden"), offload=("layer_input", "query")),
    ],
    ids=str,
)
def test_remat_leaves_the_gradient_as_it_is(remat):
    (_, expected), (_, actual) = (loss_and_gradients(build(remat=policy)) for policy in ("none", remat))
    for left, right in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-7)


def test_names_without_a_value_are_refused():
    with pytest.raises(ConfigError, match=r"keeps no value.*layer_input, query"):
        NamedRemat()
    with pytest.raises(ConfigError, match="query in save and in offload"):
        NamedRemat(save=("query",), offload=("query",))
    mixture = registries.models["mixtral"]
    sizes = {"vocab_size": 61, "embed": 16, "layers": 1, "heads": 2, "mlp": 16, "max_positions": 16}
    config = mixture.config_class(name="mixtral", remat=NamedRemat(save=("hidden", "key")), **sizes)
    model = jax.eval_shape(lambda: mixture.build(config, key=KEY))
    with pytest.raises(ConfigError, match=r"names hidden, which no layer.*It has: layer_input, query, key"):
        jax.eval_shape(lambda model: model(*tokens_and_positions()).hidden, model)


def test_unrolled_layers_stand_in_no_loop_and_have_the_same_gradient():
    def loops(model):
        """Over the layers, whatever loops the ops have."""
        program = str(jax.make_jaxpr(lambda model: model(*tokens_and_positions()))(model))
        return len(re.findall(rf"\blength={TINY.layers}\b[^\[\]]*\bunroll=1\b", program))

    assert (loops(build()), loops(build(unroll=True))) == (1, 0)
    (_, expected), (_, actual) = (loss_and_gradients(build(unroll=unroll, remat="full")) for unroll in (False, True))
    for left, right in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-7)


def test_blocks_are_traced_once_whatever_their_number(monkeypatch):
    calls = []
    forward = decoder.Block.__call__
    monkeypatch.setattr(
        decoder.Block, "__call__", lambda self, *arguments: calls.append(1) or forward(self, *arguments)
    )
    config = dataclasses.replace(TINY, layers=7)
    jax.make_jaxpr(loss)(jax.eval_shape(lambda: FAMILY.build(config, key=KEY)))
    assert len(calls) == 1


def test_building_abstractly_allocates_nothing():
    config = LlamaConfig(
        vocab_size=128_256, embed=4096, layers=32, heads=32, kv_heads=8, mlp=14_336, max_positions=8192
    )
    model = jax.eval_shape(lambda key: FAMILY.build(config, key=key), KEY)
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == 8_030_261_248
    assert model.blocks[0][0].feed_forward.up.kernel.get_metadata("logical_axes") == ("layers", "embed", "mlp")


def test_initial_values():
    block = build(embed=128, mlp=256, layers=8, attention_bias=True).blocks[0][0]
    query = block.attention.query
    assert math.isclose(query.kernel[...].std(), 0.02, rel_tol=0.05)
    assert math.isclose(block.feed_forward.down.kernel[...].std(), 0.02 / 4, rel_tol=0.05)
    assert not jnp.array_equal(query.kernel[0], query.kernel[1])
    assert (block.attention_norm[...] == 1).all()
    assert (query.bias[...] == 0).all()


def test_biases_have_gradients():
    _, gradients = loss_and_gradients(build(attention_bias=True, mlp_bias=True))
    attention, feed_forward = gradients.blocks[0][0].attention, gradients.blocks[0][0].feed_forward
    layers = (attention.query, attention.value, attention.output, feed_forward.gate, feed_forward.up, feed_forward.down)
    assert all(jnp.abs(layer.bias[...]).max() > 0 for layer in layers)


@pytest.mark.parametrize("tie_embeddings", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bfloat16_computes_narrow_and_keeps_gradients_wide(tie_embeddings):
    model = build(dtype="bfloat16", tie_embeddings=tie_embeddings)
    assert jax.eval_shape(lambda model: model(*tokens_and_positions()).hidden, model).dtype == jnp.bfloat16
    assert model.head().weight.dtype == jnp.bfloat16
    assert logits(model).dtype == jnp.float32
    value, gradients = loss_and_gradients(model)
    exact, exact_gradients = loss_and_gradients(build(tie_embeddings=tie_embeddings))
    np.testing.assert_allclose(value, exact, rtol=1e-2)
    for narrow, wide in zip(jax.tree.leaves(gradients), jax.tree.leaves(exact_gradients), strict=True):
        assert narrow.dtype == jnp.float32
        assert jnp.linalg.norm(narrow - wide) < 0.05 * jnp.linalg.norm(wide)


def test_a_tied_head_is_the_embedding():
    model = build(tie_embeddings=True)
    assert model.lm_head is None
    np.testing.assert_array_equal(model.head().weight, model.embedding[...].T)


def test_a_token_outside_the_vocabulary_makes_nan():
    model = jax.jit(build())
    tokens, positions = tokens_and_positions()
    assert jnp.isnan(model(tokens.at[0, 0].set(61), positions).hidden[0]).all()


def test_tokens_that_are_no_integers_are_refused():
    with pytest.raises(ArgumentError, match="tokens are float32; expected integer token ids"):
        build()._check(jnp.zeros((2, 9)), None, None, None)  # past jaxtyping, which only tests check by


def test_segments_with_a_cache_are_refused():
    model = build()
    tokens, positions = tokens_and_positions()
    with pytest.raises(ShapeError, match="segment_ids"):
        model(tokens, positions, positions + 1, DenseKVCache.empty(model.states, batch=2, capacity=16))


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"embed": 100, "heads": 8}, "embed=100 is not a multiple of heads=8"),
        ({"heads": 8, "kv_heads": 3}, "heads=8 is not a multiple of kv_heads=3"),
        ({"embed": 24, "heads": 8}, "head_dim=3 is odd"),
        ({"dtype": "int8"}, "dtype"),
        ({"kv_head": 3}, "Did you mean 'kv_heads'"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"layers": 0}, "layers"),
    ],
)
def test_configs_that_make_no_model(mapping, message):
    with pytest.raises(ConfigError, match=message):
        parse(LlamaConfig, mapping, path="model")


def test_config_survives_the_way_through_yaml():
    scaling = ops.Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
    )
    config = dataclasses.replace(TINY, rope_scaling=scaling)
    assert parse(LlamaConfig, to_mapping(config)) == config
