"""The example of captioned pictures: a UNet is trained, and judged by classifiers of drawn pictures."""

import random
import runpy
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from sklearn.svm import SVC

from stack_core.cli import main
from stack_train.diffusion.sampling import open_images

EXAMPLES = Path(__file__).parents[1] / "examples"
SIDE = 16
SETTINGS = {"steps": 20, "guidance": 2.0}


def written(name, *arguments):
    """Runs a script of the examples, and returns its names."""
    subprocess.run([sys.executable, EXAMPLES / name, *arguments], check=True)
    return runpy.run_path(str(EXAMPLES / name))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with the data of the examples of shapes, in which `runs/` is found."""
    folder = tmp_path_factory.mktemp("denoisers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def shapes(folder):
    written("encoders.py")
    return written("shapes.py")


def small(picture):
    """Scales a picture as the data are scaled."""
    return np.asarray(picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS))


def inside(images):
    """The pixels of each image that are at least half as bright as its brightest one."""
    light = images.max(-1).astype(float)
    return light >= light.max((1, 2), keepdims=True) / 2


class Judge:
    """Classifiers of the color and the shape of images, trained on drawn pictures."""

    def __init__(self, example, *, seed, each):
        rng = random.Random(seed)
        self.pairs = [(color, shape) for color in example["COLORS"] for shape in example["SHAPES"]]
        pairs = self.pairs * each
        images = np.stack([small(example["draw"](shape, example["COLORS"][color], rng)) for color, shape in pairs])
        self.classifiers = [
            SVC(C=10.0).fit(features(images), [pair[place] for pair in pairs])
            for place, features in enumerate((self._colors, self._outlines))
        ]
        self.images, self.asked = images, pairs

    def score(self, images, asked):
        """The fraction of images with both the color and the shape that were asked for."""
        colors, shapes = self.classifiers
        found = zip(colors.predict(self._colors(images)), shapes.predict(self._outlines(images)), strict=True)
        return np.mean([tuple(one) == other for one, other in zip(found, asked, strict=True)])

    @staticmethod
    def _colors(images):
        mask = inside(images)[..., None]
        return (images * mask).sum((1, 2)) / mask.sum((1, 2)) / 255.0

    @staticmethod
    def _outlines(images):
        """The brightness of the shape, cut out and scaled to 12 x 12 pixels."""
        found = []
        for image, mask in zip(images, inside(images), strict=True):
            rows, columns = np.nonzero(mask)
            box = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
            cut = Image.fromarray(image.max(-1)).crop([int(each) for each in box]).resize((12, 12))
            found.append(np.asarray(cut, float).ravel() / max(image.max(), 1))
        return np.stack(found)


@pytest.fixture(scope="module")
def judge(shapes):
    judge, fresh = (Judge(shapes, seed=seed, each=40) for seed in (1, 2))
    assert judge.score(fresh.images, fresh.asked) >= 0.97
    return judge


def accuracy(opened, judge):
    asked = judge.pairs * 10
    prompts = [f"a {color} {shape}" for color, shape in asked]
    return judge.score(opened.images_of(prompts, opened.sampler.changed(SETTINGS)), asked)


def test_the_autoencoder_of_the_examples_copies_pixels():
    autoencoder = runpy.run_path(str(EXAMPLES / "encoders.py"))["image_autoencoder"]()
    pixels = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (2, SIDE, SIDE, 3)), jnp.float32)
    np.testing.assert_allclose(autoencoder.images_of(autoencoder.scaled_latents(pixels)), pixels, atol=1e-3)


@pytest.mark.slow  # minutes: it trains a model
def test_a_unet_draws_shapes_and_colors_of_captions(shapes, judge):
    main(["train", str(EXAMPLES / "shapes_unet.yaml")])
    assert accuracy(open_images("runs/shapes-unet"), judge) >= 0.95
