"""Tests of prior preservation (DreamBooth); the encoders are those of `test_captioned`."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from stack_core.abi.errors import ConfigError, DataError
from stack_train.commands.sample import _write_each, sample
from stack_train.data.buckets import BucketsConfig
from stack_train.data.kinds.captioned import CaptionedData
from stack_train.data.prior_images import PriorConfig, PriorPairs
from stack_train.diffusion.flux import FluxConfig
from stack_train.diffusion.objectives import EpsilonConfig
from stack_train.run.train import train

from . import shapes
from .test_captioned import FLUX, TINY, flux_config, pipeline

__all__ = ["pipeline"]  # a fixture


class Zero:
    """A denoiser that predicts 0, so that the error of an image is the square of its noise."""

    def __call__(self, images, timesteps, condition):
        assert not condition
        return jnp.zeros_like(images)

    def unconditional(self, condition):
        return condition


def test_the_loss_is_of_the_subject_plus_the_weighted_loss_of_the_class():
    pairs = PriorPairs(np.arange(3), np.arange(3, 8), 0.7)
    row_ids = pairs.row_ids(np.array([0, 4, 9]))
    np.testing.assert_array_equal(pairs.places(row_ids), [0, 1, 1, 3, 7, 7])
    images = jnp.zeros((6, 2, 2, 3))
    batch = {"images": images, "weights": jnp.ones(6), "loss_weights": jnp.asarray(pairs.loss_weights(row_ids))}
    key = jax.random.key(0)
    loss, _ = EpsilonConfig(condition_dropout=0.0)(Zero(), batch, key=key)
    errors = np.square(jax.random.normal(jax.random.fold_in(key, 0), images.shape)).mean((1, 2, 3))
    np.testing.assert_allclose(loss, errors[:3].mean() + 0.7 * errors[3:].mean(), rtol=1e-6)


def test_each_batch_is_half_of_each_source(pipeline, tmp_path):
    for folder, count in (("subject", 1), ("class", 2)):
        shapes.write_images(tmp_path / folder, count * 6)
    config = FluxConfig(**{**FLUX, **TINY, "rope_axes": (4, 6, 6), "text_tokens": 6})
    prior = PriorConfig(source=f"{tmp_path}/class/*.png", caption="a ring", weight=0.5)
    data = CaptionedData(source=f"{tmp_path}/subject/*.png", pipeline=str(pipeline), batch_size=4, prior=prior)
    data.check(config)
    batches = data.build(seed=0, model=config)
    batch = next(batches.train_iterator())
    assert {name: batch[name].shape for name in data.spec(config)} == {
        name: each.shape for name, each in data.spec(config).items()
    }
    np.testing.assert_array_equal(batch["loss_weights"], [2.0, 2.0, 1.0, 1.0])
    names = batches.describe_rows(batch["row_ids"])
    assert all("/subject/" in name for name in names[:2])
    assert all("/class/" in name and name.endswith("'a ring'") for name in names[2:])
    with pytest.raises(ConfigError, match=r"batch_size is 3; with data\.prior"):
        CaptionedData(source="x", pipeline="x", batch_size=3, prior=prior).check(config)
    with pytest.raises(ConfigError, match=r"does not combine with data\.buckets"):
        CaptionedData(source="x", pipeline="x", prior=prior, buckets=BucketsConfig()).check(config)
    alone = replace(data, source=f"{next((tmp_path / 'subject').glob('*.png'))}", validation_fraction=0.92)
    with pytest.raises(DataError, match=r"holds out all 1 images of data\.source, so none is left to train on"):
        alone.build(seed=0, model=config)
    section = {"batch_size": 4, "prior": {"source": prior.source, "caption": "a ring"}}
    run = flux_config(tmp_path / "run", tmp_path / "subject", pipeline, steps=1, model=TINY, data=section)
    assert train(run).step == 1


def test_single_images_are_written_into_a_folder(tmp_path, capsys):
    def draw(*, seed):
        return np.full((2, 4, 4, 3), seed, np.uint8)

    _write_each(draw, 3, tmp_path / "class", seed=7)
    found = {path.name: np.asarray(Image.open(path)).max() for path in sorted((tmp_path / "class").iterdir())}
    assert found == {"00000.png": 7, "00001.png": 7, "00002.png": 8}
    assert capsys.readouterr().out == f"{tmp_path / 'class'}\n"
    with pytest.raises(ConfigError, match=r"--out is a\.png\. Give a folder"):
        sample("none", images=3, out=Path("a.png"))
