"""Models that pipeline stages cannot divide are refused by name; `pipeline_on_eight_devices.py` trains the others."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from stack_core.abi.errors import TrainingError
from stack_core.abi.plugins import registries
from stack_train.models.deepseek_v3 import DeepseekV3Config
from stack_train.models.llama import LlamaConfig
from stack_train.models.nemotron_h import NemotronHConfig
from stack_train.nn.boundary import Received, as_auxiliary, check_independent, in_stage

SIZES = {"vocab_size": 48, "embed": 16, "heads": 2, "max_positions": 16, "initializer_std": 0.2}
EXPERTS = {"experts": 4, "active_experts": 2, "expert_mlp": 8}
LATENT = {"query_rank": 8, "kv_rank": 8, "nope_dim": 4, "rope_dim": 4, "value_dim": 4}
DENSE_FIRST = DeepseekV3Config(**SIZES, **EXPERTS, **LATENT, layers=4, dense_layers=1)
MAMBA = {"mamba_heads": 4, "mamba_head_dim": 8, "mamba_state": 6}
BALANCED_FIRST = NemotronHConfig(**SIZES, **EXPERTS, **MAMBA, layers=5, pattern="E-*-*")


def run_in_stage(config, **arguments):
    def run():
        model = registries.models[config.name].build(config, key=jax.random.key(0))
        tokens = jnp.zeros((1, 8), jnp.int32)
        return in_stage(Received(None, None, 0, 1), model, tokens, tokens, **arguments)[0].hidden

    return nnx.eval_shape(run)


@pytest.mark.parametrize(
    ("config", "arguments", "reason"),
    [
        (dataclasses.replace(DENSE_FIRST, dense_layers=2), {}, "are in several groups that repeat equally often"),
        (BALANCED_FIRST, {}, "precede the largest group and balance their experts by biases"),
        (DENSE_FIRST, {"experts": jnp.zeros((1, 8, 3, 2), jnp.int16)}, "replay experts"),
    ],
)
def test_layers_that_stages_cannot_divide_are_named(config, arguments, reason):
    with pytest.raises(TrainingError, match=f"layers of this model {reason}. Set mesh.stage=1"):
        run_in_stage(config, **arguments)


@pytest.mark.parametrize("config", [DENSE_FIRST, LlamaConfig(**SIZES, layers=3, mlp=16)])
def test_one_stage_is_the_whole_model(config):
    assert run_in_stage(config).shape == (1, 8, 16)


def test_a_step_without_divided_layers_is_named():
    with pytest.raises(TrainingError, match="this step runs none"):
        in_stage(Received(None, None, 0, 1), lambda: None)


@pytest.mark.parametrize("is_dependent", [False, True])
def test_a_model_that_reads_the_results_of_another_is_named(is_dependent):
    """All models run their pieces in the same tick, so one cannot wait for the layers of another."""

    def objective(model, other, tokens):
        hidden = model(tokens, tokens).hidden
        return other(jnp.argmax(hidden, -1) if is_dependent else tokens, tokens).hidden

    def run():
        config = LlamaConfig(**SIZES, layers=2, mlp=16)
        models = [registries.models["llama"].build(config, key=jax.random.key(seed)) for seed in range(2)]
        as_auxiliary(models[1], "reference")
        return in_stage(Received(None, None, 0, 1), objective, *models, jnp.zeros((1, 8), jnp.int32))[1]

    traced = jax.make_jaxpr(run)()
    if not is_dependent:
        check_independent(traced)
        return
    with pytest.raises(TrainingError, match="layers of the objective's model 'reference' read results of the trained"):
        check_independent(traced)


def test_a_model_that_runs_twice_is_named():
    def run():
        model = registries.models["llama"].build(LlamaConfig(**SIZES, layers=2, mlp=16), key=jax.random.key(0))
        tokens = jnp.zeros((1, 8), jnp.int32)
        return in_stage(Received(None, None, 0, 1), lambda: (model(tokens, tokens), model(tokens, tokens)))

    with pytest.raises(TrainingError, match="or its objective calls a model twice"):
        nnx.eval_shape(run)
