"""Rotations folded into the parameters of a decoder that is made of core's ops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_quant import Rule, quantize_function
from stack_quant.errors import RuleError
from stack_quant.rotations.fold import rotate

VOCAB, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 31, 24, 4, 2, 7, 20, 2
TOKENS = jnp.arange(18).reshape(2, 9) % VOCAB
INT8 = {"weights": "int8", "activations": "int8"}
WIDE, NARROW = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
SHAPES = {
    "attention_norm": (LAYERS, EMBED),
    "query": (LAYERS, EMBED, WIDE),
    "key": (LAYERS, EMBED, NARROW),
    "value": (LAYERS, EMBED, NARROW),
    "value_bias": (LAYERS, NARROW),
    "output": (LAYERS, WIDE, EMBED),
    "mlp_norm": (LAYERS, EMBED),
    "gate": (LAYERS, EMBED, MLP),
    "up": (LAYERS, EMBED, MLP),
    "down": (LAYERS, MLP, EMBED),
    "down_bias": (LAYERS, EMBED),
}
MODEL = {"table": (VOCAB, EMBED), "layers": SHAPES, "last_norm": (EMBED,), "head": (EMBED, VOCAB)}


def drawn(shapes=MODEL):
    random = np.random.default_rng(0)
    shapes, structure = jax.tree.flatten(shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    leaves = [jnp.asarray(random.normal(0.2, 0.3, shape), jnp.float32) for shape in shapes]
    return jax.tree.unflatten(structure, leaves)


def attended(params, x):
    rows = x.shape[:2]
    query, key = (ops.linear(x, params[name]).reshape(*rows, -1, HEAD_DIM) for name in ("query", "key"))
    positions = jnp.broadcast_to(jnp.arange(rows[1]), rows)
    query, key = (ops.rope(each, positions, rotary_dim=4) for each in (query, key))
    value = ops.linear(x, params["value"], bias=params["value_bias"]).reshape(*rows, -1, HEAD_DIM)
    found = ops.attention(query, key, value, causal=True)
    return ops.linear(found.reshape(*rows, -1), params["output"])


def decoder(params, tokens, *, kind="rms", after=False, tied=False):
    """Returns logits. Options make the norms layer norms, scale the results of layers, or tie the head."""

    def layer(x, own):
        added = attended(own, ops.norm(x, own["attention_norm"], kind=kind, scale_offset=1.0))
        added = ops.norm(added, own["mlp_norm"]) if after else added
        normed, x = ops.norm(added, own["mlp_norm"], residual=x)
        hidden = ops.gated_linear_unit(normed, own["gate"], own["up"])
        return x + 0.5 * ops.linear(hidden, own["down"], bias=own["down_bias"]), None

    x, _ = jax.lax.scan(layer, jnp.take(params["table"], tokens, axis=0), params["layers"])
    return ops.linear(ops.norm(x, params["last_norm"]), params["table"].T if tied else params["head"])


def rotated(fn, params, algorithm="quarot"):
    # A rule that matches no operation quantizes nothing, so parameters stay in float.
    rule = Rule(path=".*", op="no_such_op", weights="int8", algorithm=algorithm, optional=True)
    return quantize_function(fn, params, rule, (TOKENS,)).params


@pytest.mark.parametrize("size", [7, 24, 64])
def test_a_rotation_is_orthogonal_and_spreads_every_entry(size: int) -> None:
    matrix = rotate(jnp.eye(size), 1)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-5)
    assert jnp.abs(matrix).max() <= 1.5 / np.sqrt(size)
    array = jax.random.normal(jax.random.key(0), (3, size, 2))
    np.testing.assert_allclose(rotate(array, 1), jnp.einsum("aib,ij->ajb", array, matrix), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "stream", "heads"), [("", True, True), (",stream=0", False, True), (",heads=0", True, False)]
)
def test_a_decoder_with_rotated_parameters_computes_the_same_logits(options: str, stream: bool, heads: bool) -> None:
    params = drawn()
    found = rotated(decoder, params, f"quarot{options}")
    np.testing.assert_allclose(decoder(found, TOKENS), decoder(params, TOKENS), rtol=1e-4, atol=1e-4)
    changed = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, before), after in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(found), strict=True)
        if not np.array_equal(before, after)
    }
    of_stream = {"table", "last_norm", "head", *(f"layers/{name}" for name in SHAPES if name != "value_bias")}
    of_heads = {f"layers/{name}" for name in ("value", "value_bias", "output")}
    assert changed == (of_stream if stream else set()) | (of_heads if heads else set())


def test_rotations_lower_the_error_of_a_model_with_outlier_channels() -> None:
    params = drawn()
    outliers = jnp.ones(EMBED).at[jnp.array([3, 17])].set(40.0)
    params["table"] *= outliers
    for name in ("output", "down"):
        params["layers"][name] *= outliers
    expected = decoder(params, TOKENS)

    def error(algorithm: str) -> float:
        held = quantize_function(decoder, params, Rule(path=".*", algorithm=algorithm, **INT8), (TOKENS,))
        return float(jnp.linalg.norm(held(TOKENS) - expected) / jnp.linalg.norm(expected))

    assert error("quarot") <= 0.65 * error("nearest")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "layer"}, "which table writes: a layer norm"),
        ({"after": True}, "the scale layers/mlp_norm of a norm stays, because norm uses the result"),
        ({"tied": True}, "the scale last_norm of a norm stays, because table is also used without it"),
    ],
)
def test_a_stream_that_cannot_be_rotated_is_refused_and_its_heads_can_be(options, message: str) -> None:
    params, fn = drawn(), functools.partial(decoder, **options)
    if "tied" in options:
        del params["head"]
    with pytest.raises(RuleError, match=message):
        rotated(fn, params)
    found = rotated(fn, params, "quarot,stream=0")
    assert not np.array_equal(found["layers"]["value"], params["layers"]["value"])
    np.testing.assert_allclose(fn(found, TOKENS), fn(params, TOKENS), rtol=1e-4, atol=1e-4)


def test_a_model_without_rotations_is_refused() -> None:
    with pytest.raises(RuleError, match="no axes of parameters"):
        rotated(lambda params, tokens: params["w"][tokens] * 2.0, {"w": jnp.ones((VOCAB, 4))}, "quarot,stream=0")
    with pytest.raises(RuleError, match="does not use head"):
        rotated(functools.partial(decoder, tied=True), drawn())
