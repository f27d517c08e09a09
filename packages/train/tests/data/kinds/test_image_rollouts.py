"""Rollouts of images: rows that follow from the weights, rewards by group, evaluation, resuming, refusals."""

import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.kinds.image_rollouts import ImageRolloutsData
from stack_train.diffusion import autoencoder_kl
from stack_train.diffusion.dit import DitConfig
from stack_train.diffusion.objectives import FlowMatchingConfig
from stack_train.diffusion.pipeline import save_encoders
from stack_train.run.config import RunConfig

from ...diffusion import shapes
from ...diffusion.test_captioned import AUTOENCODER, FLUX, TINY

DIT = DitConfig(image_size=4, channels=1, classes=5, patch=2, layers=1, heads=1, head_dim=8)
STATISTICS = SimpleNamespace(
    mean=lambda images, prompts: images.mean((1, 2, 3)),
    label=lambda images, prompts: [float(prompt) for prompt in prompts],
    nan=lambda images, prompts: np.where(np.arange(len(images)) == 2, np.nan, 1.0),
    single=lambda images, prompts: images.mean(),
    text=lambda images, prompts: ["good"] * len(images),
    number=3.0,
)


@pytest.fixture(autouse=True)
def rewards(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "statistics_of_images", STATISTICS)


class Learner:
    """An objective of two updates per batch, whose advantages are the rewards minus the mean of the group."""

    def __init__(self, minibatches=2):
        self.denoising, self.minibatches = FlowMatchingConfig(), minibatches

    def advantages(self, rewards):
        return rewards - rewards.mean(1, keepdims=True)


def data(reward="mean", **settings):
    sizes = {"groups": 3, "group_size": 4, "steps": 5, "evaluation_steps": 3, "evaluation_images": 7}
    return ImageRolloutsData(reward=f"statistics_of_images:{reward}", **sizes | settings).for_objective(Learner())


def score(scale, batch):
    """A denoiser that the label shifts."""
    shift = (
        batch["labels"].reshape(-1, 1, 1, 1) if "labels" in batch else batch["text"].mean((1, 2))[:, None, None, None]
    )
    return {"predictions": (scale * batch["images"] + 0.1 * shift).astype(np.float32)}


def built(config, model=DIT, seed=0):
    config.check(model)
    batches = config.build(seed=seed, model=model)
    batches.update_weights(0.5, 0, score)
    return batches


def test_rows_are_steps_of_images_in_groups_of_a_prompt():
    config = data()
    iterator = (batches := built(config)).train_iterator()
    updates = [next(iterator), next(iterator)]
    for batch in updates:
        assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
            name: (each.shape, each.dtype) for name, each in config.spec(DIT).items()
        }
    whole = {name: np.concatenate([batch[name] for batch in updates]) for name in updates[0]}
    a, b, s = whole["coefficients"].T.reshape(3, -1, 1, 1, 1)
    np.testing.assert_allclose(whole["velocities"], score(0.5, whole)["predictions"])
    new = (whole["next_images"] - a * whole["images"] - b * whole["velocities"]) / s
    assert abs(new.mean()) < 0.1 and new.std() == pytest.approx(1.0, abs=0.1)
    images = {name: array.reshape(12, 4, *array.shape[1:]) for name, array in whole.items()}
    # Four steps of each image, from pure noise; the fifth adds no noise.
    np.testing.assert_array_equal(images["images"][:, 1:], images["next_images"][:, :-1])
    assert (images["timesteps"][0] == [1000, 800, 600, 400]).all() and len(
        np.unique(images["images"][:, 0, 0, 0, 0])
    ) == 12
    labels, rewards, advantages = (images[name][:, 0] for name in ("labels", "rewards", "advantages"))
    assert sorted(np.unique(labels, return_counts=True)[1]) == [4, 4, 4]
    for label in np.unique(labels):
        of_group = labels == label
        np.testing.assert_allclose(advantages[of_group], rewards[of_group] - rewards[of_group].mean(), atol=1e-3)
    # The reward saw the final images.
    last = images["next_images"][:, -1]
    final = last - np.float32(0.2) * score(0.5, {"images": last, "labels": labels})["predictions"]
    pixels = np.round((np.clip(final, -1, 1) + 1) * 127.5)
    np.testing.assert_allclose(rewards, pixels.mean((1, 2, 3)), atol=0.1)
    assert iterator.data_metrics()["reward_std"] == pytest.approx(
        np.mean([rewards[labels == label].std() for label in np.unique(labels)]), rel=1e-3
    )
    assert batches.position() == 1


def test_a_batch_depends_on_the_seed_its_number_and_the_weights_and_resumes():
    iterator = built(data()).train_iterator()
    batches = [next(iterator) for _ in range(4)]
    state = iterator.get_state()
    again = built(data()).train_iterator()
    for expected in batches:
        found = next(again)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
    resumed = built(data()).train_iterator()
    resumed.set_state(state)
    np.testing.assert_array_equal(next(resumed)["images"], next(iterator)["images"])
    assert (next(built(data(), seed=1).train_iterator())["images"] != batches[0]["images"]).any()
    assert (batches[2]["images"] != batches[0]["images"]).any()
    with pytest.raises(DataError, match=r"data\.groups"):
        built(data(groups=2)).train_iterator().set_state(state)


def test_evaluation_samples_held_out_images_without_noise():
    batches = built(config := data("label"))
    (batch,) = batches.validation_batches()
    assert {name: array.shape for name, array in batch.items()} == {
        name: each.shape for name, each in config.spec(DIT).items()
    }
    real = batch["weights"] == 1
    assert real.sum() == 7 and (batch["rewards"][real] == [0, 1, 2, 3, 4, 0, 1]).all()
    (again,) = batches.validation_batches()
    np.testing.assert_array_equal(again["rewards"], batch["rewards"])
    (batch,) = built(data()).validation_batches()
    batches.update_weights(0.9, 1, score)
    (other,) = built(data(evaluation_steps=1)).validation_batches()
    assert (other["rewards"][:7] != batch["rewards"][:7]).all()
    assert not list(built(data(evaluation_images=0, evaluation_steps=40)).validation_batches())


def test_texts_are_encoded_and_latents_decoded(tmp_path):
    config = autoencoder_kl.AutoencoderKlConfig(widths=(4, 8), scaling_factor=2.0, **AUTOENCODER)
    model = autoencoder_kl.FAMILY.build(config, key=jax.random.key(0))
    encoders = shapes.encoders(tmp_path / "encoders", model)
    save_encoders(tmp_path / "encoders", encoders)
    (tmp_path / "prompts.txt").write_text("a red ring\n\na blue bar\na red ring\n")
    (tmp_path / "held_out.txt").write_text("a green circle\n")
    flux = parse(RunConfig, {"output": "none", "model": {**FLUX, **TINY, "text_tokens": 6}}).model
    seen = []

    def of_images(images, prompts):
        seen.append((images, list(prompts)))
        return images.mean((1, 2, 3))

    STATISTICS.of_images = of_images
    files = {"prompts": str(tmp_path / "prompts.txt"), "held_out": str(tmp_path / "held_out.txt")}
    settings = data("of_images", pipeline=str(tmp_path / "encoders"), encoded_at_once=5, groups=2, **files)
    batches = built(settings, flux)
    batch = next(batches.train_iterator())
    assert {name: array.shape for name, array in batch.items()} == {
        name: each.shape for name, each in settings.spec(flux).items()
    }
    ((images, prompts),) = seen
    assert images.shape == (8, 16, 16, 3) and images.dtype == np.uint8
    assert sorted(prompts) == ["a blue bar"] * 4 + ["a red ring"] * 4
    expected = encoders.text(["a red ring", "a blue bar"])
    for name in ("text", "pooled"):
        rows = np.unique(batch[name], axis=0)
        np.testing.assert_allclose(rows, np.unique(expected[name], axis=0), atol=1e-5)
    list(batches.validation_batches())
    assert set(seen[1][1]) == {"a green circle"}
    batches.write(tmp_path)
    assert (tmp_path / "encoders.json").is_file()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("nan", r"Reward 'statistics_of_images:nan' is nan for 1 of 12 images, the first of which is of prompt"),
        ("single", r"returned an array of shape \[\] for 12 images; one number for each, \[12\], was expected"),
        ("text", "returned list, which holds no numbers"),
    ],
)
def test_rewards_that_are_no_finite_numbers_are_refused(reward, message):
    with pytest.raises(DataError, match=message):
        next(built(data(reward)).train_iterator())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward": "statistics_of_images:none"}, "cannot be imported: .*none"),
        ({"reward": "statistics_of_images:number"}, "is a float; a function was expected"),
        ({"reward": "brightness"}, "data.reward is 'brightness'. Give module:function"),
        ({"reward": "run:runs/none"}, "data.reward is 'run:runs/none', which is not a directory"),
        ({"pipeline": "encoders", "prompts": "a"}, "data.pipeline and data.prompts would have no effect"),
        ({"evaluation_images": 0, "evaluation_steps": 3}, "data.evaluation_images is 0, so data.evaluation_steps"),
    ],
)
def test_settings_without_effect_and_missing_rewards_are_refused(settings, message):
    settings = {"reward": "statistics_of_images:mean"} | settings
    with pytest.raises(ConfigError, match=message):
        ImageRolloutsData(**settings).for_objective(Learner()).check(DIT)


def test_an_objective_without_rewards_and_other_models_are_refused():
    with pytest.raises(ConfigError, match="is 'flow_matching', which does not learn from the rewards"):
        ImageRolloutsData(reward="a:b").for_objective(FlowMatchingConfig())
    with pytest.raises(ConfigError, match=r"has 64 images .*objective\.minibatches=3 does not divide"):
        ImageRolloutsData(reward="a:b").for_objective(Learner(3))
    flux = parse(RunConfig, {"output": "none", "model": {**FLUX, **TINY, "text_tokens": 6}}).model
    with pytest.raises(ConfigError, match=r"data\.pipeline and data\.prompts must be set"):
        data().check(flux)
    with pytest.raises(ConfigError, match="family 'unet' makes none"):
        data().check(parse(RunConfig, {"output": "none", "model": {"name": "unet"}}).model)
    with pytest.raises(ConfigError, match=r"data\.reward"):
        parse(RunConfig, {"output": "none", "model": {"name": "dit"}, "data": {"name": "image_rollouts"}})
