"""The objective on what models return besides hidden states: routers' facts, and states that predict later tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_core.abi.config import parse
from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import ConfigError
from stack_core.abi.plugins import registries
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.objectives import CausalLMConfig

SIZES = {"vocab_size": 17, "embed": 8, "layers": 1, "heads": 2, "mlp": 12, "max_positions": 8, "dtype": "float32"}
SIZES |= {"initializer_std": 0.4}
EXPERTS = {"experts": 3, "active_experts": 1, "expert_mlp": 6}
FAMILIES = {
    "llama": {},
    "qwen3_moe": {**EXPERTS, "kv_heads": 1},
    "deepseek_v3": {**EXPERTS, "kv_rank": 4, "nope_dim": 4, "rope_dim": 2, "value_dim": 4, "mtp_layers": 2},
}
BATCH = {
    "tokens": jnp.array([[1, 2, 3, 4, 5, 6, 7, 8]]),
    "targets": jnp.array([[2, 3, 4, IGNORED_TARGET, 6, 7, 8, 9]]),
    "positions": jnp.array([[0, 1, 2, 3, 0, 1, 2, 3]]),
    "segment_ids": jnp.array([[1, 1, 1, 1, 2, 2, 2, 2]]),
}


@functools.cache
def model_of(family):
    """To read only: what is traced changes nothing of the model that it is given."""
    entry = registries.models[family]
    config = entry.config_class(**SIZES, **FAMILIES[family])
    return jax.jit(lambda: entry.build(config, key=jax.random.key(0)))()


def run(model):
    return model(BATCH["tokens"], BATCH["positions"], BATCH["segment_ids"])


def gradients_of(model, function):
    """The gradient of function(model) by each trained parameter's path, in one program."""
    graph, params, rest = nnx.split(model, lambda path, leaf: leaf.get_metadata().get("trained", True), ...)
    found = jax.jit(jax.grad(lambda params: function(nnx.merge(graph, params, rest, copy=True))))(params)
    return {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(found)}


def objective_loss(**coefficients):
    objective = CausalLMConfig(**coefficients).build()
    return lambda model: objective(model, BATCH, key=jax.random.key(0))[0]


def test_a_routers_facts_join_the_loss_with_their_gradients():
    def weighted(model):
        facts = run(model).facts
        return 0.5 * facts["balance_loss"] + 0.03 * facts["router_z"]

    model = model_of("qwen3_moe")
    plain = gradients_of(model, objective_loss())
    whole = gradients_of(model, objective_loss(balance_loss=0.5, router_z_loss=0.03))
    own = gradients_of(model, weighted)
    assert np.abs(own["blocks/0/0/feed_forward/router/kernel"]).max() > 1e-4
    for name, gradient in own.items():
        np.testing.assert_allclose(whole[name] - plain[name], gradient, atol=1e-5, err_msg=name)


def test_states_that_predict_later_tokens_join_the_loss():
    """Token 4 of the first document follows token 2 by two, and no target is of the other document."""
    model = model_of("deepseek_v3")

    @jax.jit
    def logprobs_of(model):
        return [jax.nn.log_softmax(model.logits(state)[0], axis=-1) for state in run(model).further]

    logprobs = jax.device_get(logprobs_of(model))
    targets = [{0: 3, 1: 4, 4: 7, 5: 8, 6: 9}, {0: 4, 4: 8, 5: 9}]
    of_depths = [[-logprobs[depth][each] for each in wanted.items()] for depth, wanted in enumerate(targets)]
    expected = np.mean(list(map(np.mean, of_depths)))
    objective = CausalLMConfig(mtp_loss=0.25).build()
    loss, metrics = jax.jit(lambda model: objective(model, BATCH, key=jax.random.key(0)))(model)
    np.testing.assert_allclose(metrics["mtp_loss"].value, expected, rtol=1e-5)
    np.testing.assert_allclose(loss, metrics["loss"].value + 0.25 * expected, rtol=1e-5)


def test_only_a_coefficient_trains_the_layers_that_predict_later_tokens():
    model = model_of("deepseek_v3")
    plain, whole = (gradients_of(model, objective_loss(mtp_loss=weight)) for weight in (0.0, 0.25))
    further = [name for name in plain if name.startswith("further/")]
    assert further and not any(plain[name].any() for name in further)
    learning = [name for name in further if "expert" not in name and "router" not in name]  # one expert weighs one
    assert all(np.abs(whole[name][place]).max() > 1e-4 for name in learning for place in (0, 1))
    assert np.abs(whole["embedding"] - plain["embedding"]).max() > 1e-4


def test_later_states_depend_on_the_tokens_up_to_the_one_before_theirs():
    model = model_of("deepseek_v3")
    tokens = BATCH["tokens"]
    states = jax.jit(lambda model, tokens: model(tokens, jnp.arange(8)[None]).further)
    before, after = states(model, tokens), states(model, tokens.at[0, 5].set(0))
    for depth, (one, other) in enumerate(zip(before, after, strict=True), 1):
        changed = np.abs(one - other).max(axis=-1)[0] > 1e-6
        assert changed.tolist() == [place + depth >= 5 for place in range(8)]


def test_the_first_layer_predicts_the_same_in_pieces_with_a_cache():
    model, tokens, positions = model_of("deepseek_v3"), BATCH["tokens"], jnp.arange(8)[None]

    @jax.jit
    def run_in_pieces(model):
        whole = model(tokens, positions)
        cache, found = DenseKVCache.empty(model.mtp_states, batch=1, capacity=8), []
        for piece in (slice(0, 4), slice(4, 5), slice(5, 7)):
            following = tokens[:, piece.start + 1 : piece.stop + 1]
            outputs = model.predict_ahead(whole.hidden[:, piece], following, positions[:, piece], cache)
            found.append(outputs.hidden)
            cache = outputs.cache
        return whole.further[0][:, :7], jnp.concatenate(found, axis=1)

    expected, found = run_in_pieces(model)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert model_of("llama").mtp_states is None


@pytest.mark.parametrize("coefficient", ["balance_loss", "router_z_loss", "mtp_loss", "index_loss"])
def test_a_coefficient_of_what_the_model_lacks_is_refused(coefficient):
    with pytest.raises(ConfigError, match=f"objective.{coefficient}=0.5.*model"):
        jax.eval_shape(objective_loss(**{coefficient: 0.5}), model_of("llama"))


def test_the_metrics_name_the_routers_facts_whatever_the_coefficients():
    metrics = jax.eval_shape(
        lambda model: CausalLMConfig()(model, BATCH, key=jax.random.key(0))[1], model_of("qwen3_moe")
    )
    assert set(metrics) == {"loss", "balance_loss", "router_z"}
    assert dataclasses.asdict(CausalLMConfig())["mtp_loss"] == 0.0


def test_former_names_of_multi_token_prediction_are_refused_with_the_new_ones():
    with pytest.raises(ConfigError, match=r"no key 'objective.further_loss' any more: it is now objective.mtp_loss"):
        parse(CausalLMConfig, {"name": "causal_lm", "further_loss": 0.3}, path="objective")
    for name in ("deepseek_v3", "qwen3_next"):
        family = registries.models[name].config_class
        with pytest.raises(ConfigError, match=r"no key 'model.further_layers' any more: it is now model.mtp_layers"):
            parse(family, {"name": name, "further_layers": 1}, path="model")
