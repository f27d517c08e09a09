"""Folded rotations leave models of stack-train unchanged, or are refused with the operation that prevents them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_core.abi.plugins import registries
from stack_quant import Rule, quantize_model
from stack_quant.errors import RuleError

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


def test_what_holds_a_stream_in_place_is_named() -> None:
    for name, changes, reason in [
        (
            "llama",
            {"tie_embeddings": True},
            "the scale norm of a norm stays, because embedding is also used without it",
        ),
        ("olmo2", {}, "the scale blocks/0/0/attention_output_norm of a norm stays"),
    ]:
        with pytest.raises(RuleError, match=reason):
            rotated(model_of(name, **changes))
