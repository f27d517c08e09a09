"""What all optimizers share: decay of matrices alone, clipping, groups by path."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stack_core.abi.config import config, parse
from stack_core.abi.errors import ConfigError
from stack_core.abi.plugins import registries
from stack_train.optim import AdamWConfig, GroupConfig, MuonConfig, ScheduleConfig, ScheduleFreeConfig, SgdConfig
from stack_train.optim.axes import is_hidden_matrix, is_matrix
from stack_train.optim.optimizer import states_of
from stack_train.run.config import RunConfig
from stack_train.run.train import train
from stack_train.variables.weights import read_params

AXES = {"embedding": ("vocab", "embed"), "layer": {"kernel": ("layers", "embed", "mlp"), "scale": ("layers", "norm")}}
CONSTANT = ScheduleConfig(decay="constant")


def params_like(value):
    return {
        "embedding": jnp.full((3, 2), value),
        "layer": {"kernel": jnp.full((2, 2, 4), value), "scale": jnp.full((2, 2), value)},
    }


def first_update(config, gradient=1.0):
    """The first update of parameters that are all 1."""
    params = params_like(1.0)
    with jax.numpy_dtype_promotion("standard"):
        transformation = config.build(100, AXES)
        updates, _ = transformation.update(params_like(gradient), transformation.init(params), params)
    return updates


@pytest.mark.parametrize(
    ("axes", "matrix", "hidden"),
    [
        (("layers", "embed", "mlp"), True, True),
        (("layers", "norm"), False, False),
        (("mlp",), False, False),
        (("vocab", "embed"), True, False),
        (("layers", "embed", "experts"), True, True),  # a router
        (("layers", "experts", "embed", "mlp"), True, True),
        (("layers", "experts", "mlp"), False, False),
        (("embed", "heads", "head_dim"), True, False),
        ((None, None), True, True),
        ((), False, False),
    ],
)
def test_stacked_axes_do_not_make_a_matrix(axes, matrix, hidden):
    assert (is_matrix(axes), is_hidden_matrix(axes)) == (matrix, hidden)


@pytest.mark.parametrize("config", [AdamWConfig, SgdConfig])
def test_weight_decay_is_decoupled_and_leaves_scales_alone(config):
    updates = first_update(config(learning_rate=0.1, schedule=CONSTANT, weight_decay=0.5), gradient=0.0)
    np.testing.assert_allclose(updates["embedding"], -0.05, rtol=1e-5)
    np.testing.assert_allclose(updates["layer"]["kernel"], -0.05, rtol=1e-5)
    np.testing.assert_array_equal(updates["layer"]["scale"], 0)


def test_clipping_acts_on_the_global_norm_and_can_be_off():
    plain = {"learning_rate": 0.1, "schedule": CONSTANT, "weight_decay": 0.0}
    clipped, free = (first_update(SgdConfig(clip_norm=clip, **plain)) for clip in (0.5, None))
    assert float(optax.tree.norm(clipped)) == pytest.approx(0.05)
    np.testing.assert_allclose(free["layer"]["scale"], -0.1)


def test_groups_change_rate_and_decay_of_what_their_pattern_covers():
    groups = {"scale": GroupConfig(rate_factor=2.0), "layer": GroupConfig(weight_decay=1.0)}
    config = SgdConfig(learning_rate=0.1, schedule=CONSTANT, weight_decay=0.5, clip_norm=None, groups=groups)
    updates = first_update(config)
    np.testing.assert_allclose(updates["layer"]["scale"], -0.2, rtol=1e-6)  # the first pattern that matches holds
    np.testing.assert_allclose(updates["layer"]["kernel"], -0.2, rtol=1e-6)
    np.testing.assert_allclose(updates["embedding"], -0.15, rtol=1e-6)


def test_muon_and_schedule_free_train_in_groups():
    groups = {"kernel": GroupConfig(rate_factor=0.5)}
    for settings in (MuonConfig(groups=groups), ScheduleFreeConfig(groups=groups)):
        halved, whole = first_update(settings), first_update(type(settings)())
        kernel, all_of_it = halved["layer"]["kernel"], whole["layer"]["kernel"]
        np.testing.assert_allclose(kernel, 0.5 * all_of_it, rtol=1e-3)
        np.testing.assert_allclose(halved["embedding"], whole["embedding"], rtol=1e-6)
    state = settings.build(100, AXES).init(params_like(1.0))
    averages = settings.evaluation_params(params_like(1.0), state)
    assert jax.tree.structure(averages) == jax.tree.structure(params_like(1.0))
    assert len(states_of(state, optax.contrib.ScheduleFreeState)) == 2


def test_muon_orthogonalizes_each_matrix_of_a_stack():
    config = MuonConfig(learning_rate=1.0, schedule=CONSTANT, weight_decay=0.0, clip_norm=None)
    params = params_like(0.0)
    gradients = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), params)
    transformation = config.build(10, AXES)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = transformation.update(gradients, transformation.init(params), params)
    for layer, gradient in zip(updates["layer"]["kernel"], gradients["layer"]["kernel"], strict=True):
        left, _, right = np.linalg.svd(gradient, full_matrices=False)
        # Newton-Schulz brings singular values near 1; each update has the root mean square 0.2 then.
        alignment = np.sum(layer * -(left @ right)) / np.linalg.norm(layer) / np.linalg.norm(left @ right)
        assert alignment > 0.98
        assert np.sqrt(np.mean(layer**2)) == pytest.approx(0.2, rel=0.2)
    np.testing.assert_allclose(np.abs(updates["embedding"]), 1.0, rtol=1e-4)  # Adam's first step


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "adamw", "beta1": 1.5}, "beta1"),
        ({"name": "adamw", "schedule": {"warm_up_steps": 3}}, "Did you mean 'warmup_steps'"),
        ({"name": "schedule_free", "schedule": {"decay": "cosine"}}, "takes 'constant'"),
        ({"name": "schedule_free", "ema_decay": 0.9}, "averages the weights already"),
        ({"name": "schedule_free", "beta1": 0.0}, "requires a value above 0"),
        ({"name": "adamw", "groups": {"embeding": {}}}, "Did you mean 'embedding'"),
        (
            {"name": "adamw", "groups": {"layer": {}, "scale": {}}},
            "'scale' matches no parameter outside of earlier groups",
        ),
        ({"name": "adamw", "groups": {"(": {}}}, "not a regular expression"),
        ({"name": "adamw", "groups": {"scale": {"rate": 2}}}, "rate"),
    ],
)
def test_wrong_settings_are_refused(given, message):
    kind = ScheduleFreeConfig if given["name"] == "schedule_free" else AdamWConfig
    with pytest.raises(ConfigError, match=message):
        config = parse(kind, given)
        config.check(["embedding", "layer/kernel", "layer/scale"])
        config.build(10, AXES)


def test_a_malformed_pattern_is_refused_before_the_groups_are_checked():
    with pytest.raises(ConfigError, match="not a regular expression"):
        parse(AdamWConfig, {"name": "adamw", "groups": {"(": {}}}).build(10, AXES)


def test_a_config_that_builds_an_optax_transformation_is_an_optimizer(tmp_path, monkeypatch):
    built = []

    @config
    class Signs:
        name: str = "signs"
        rate: float = 0.1

        def build(self, steps):
            built.append(steps)
            return optax.sign_sgd(optax.linear_schedule(self.rate, 0.0, steps))

    monkeypatch.setitem(registries.optimizers._resolved, "signs", Signs)  # as a plugin would register it
    (tmp_path / "text.txt").write_text("one two buckle my shoe, three four knock at the door. " * 20)
    data = {"source": f"text:{tmp_path}/text.txt", "seq_tokens": 16, "batch_size": 4, "validation_fraction": 0.0}
    model = {"name": "llama", "vocab_size": 262, "layers": 1, "embed": 8, "heads": 2, "mlp": 16}
    base = {"output": str(tmp_path / "run"), "data": data, "model": model, "run": {"steps": 2}}
    run = parse(RunConfig, {**base, "optimizer": {"name": "signs", "rate": 0.05}, "checkpoint": {"every_steps": 1}})
    train(run)
    assert set(built) == {2}
    longer = parse(RunConfig, {**base, "run": {"steps": 3}, "optimizer": "signs"})
    assert train(longer, resume=True, allow=["optimizer"]).step == 3
    assert {"blocks", "embedding"} < read_params(tmp_path / "run", run.model)[0].keys()
