"""The examples of captioned pictures: denoisers are trained, and judged by a reader of drawn pictures."""

import random
import runpy
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from stack_core.cli import main
from stack_train.diffusion.controlnet import Control
from stack_train.diffusion.sampling import open_images

from .shapes import SIZE, Reader

EXAMPLES = Path(__file__).parents[4] / "examples"
SETTINGS = {"steps": 20, "guidance": 2.0}


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The names of examples/shapes.py, in a directory with its data and the encoders."""
    folder = tmp_path_factory.mktemp("shapes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for script in ("shapes.py", "encoders.py"):
            subprocess.run([sys.executable, EXAMPLES / script], check=True)
        yield runpy.run_path(str(EXAMPLES / "shapes.py"))


@pytest.fixture(scope="module")
def read(example):
    read, (pairs, pictures) = Reader(*drawn(example, 40, seed=1)), drawn(example, 40, seed=2)
    assert read(pictures) == pairs
    return read


@pytest.fixture(scope="module")
def unet(example):
    main(["train", str(EXAMPLES / "shapes_unet.yaml")])
    return open_images("runs/shapes-unet")


def small(picture):
    """Scales a picture as the data are scaled."""
    return np.asarray(picture.convert("RGB").resize((SIZE, SIZE), Image.Resampling.LANCZOS))


def drawn(example, count, seed):
    """Every pair of a color and a shape `count` times, and a picture of each."""
    rng = random.Random(seed)
    pairs = [(color, shape) for color in example["COLORS"] for shape in example["SHAPES"]] * count
    return pairs, np.stack([small(example["draw"](shape, example["COLORS"][color], rng)) for color, shape in pairs])


def sampled(opened, pairs, **options):
    sampler = opened.sampler.changed(SETTINGS)
    return opened.images_of([f"a {color} {shape}" for color, shape in pairs], sampler, **options)


def matches(found, asked):
    return np.mean([one == other for one, other in zip(found, asked, strict=True)])


def overlap(images, pictures):
    """Pixels in both shapes over pixels in either, on average over the images."""
    ours, theirs = (each.max(-1) > 100 for each in (images, pictures))
    return np.mean((ours & theirs).sum((1, 2)) / (ours | theirs).sum((1, 2)))


def test_the_autoencoder_of_the_examples_copies_pixels():
    autoencoder = runpy.run_path(str(EXAMPLES / "encoders.py"))["image_autoencoder"]()
    pixels = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (2, SIZE, SIZE, 3)), jnp.float32)
    np.testing.assert_allclose(autoencoder.images_of(autoencoder.scaled_latents(pixels)), pixels, atol=1e-3)


@pytest.mark.slow  # minutes: it trains a model
def test_a_unet_draws_shapes_and_colors_of_captions(example, read, unet):
    asked, _ = drawn(example, 10, seed=0)
    assert matches(read(sampled(unet, asked)), asked) >= 0.95


@pytest.mark.slow  # minutes: it trains a model
def test_an_mmdit_draws_shapes_and_colors_of_captions(example, read):
    main(["train", str(EXAMPLES / "shapes_sd3.yaml")])
    asked, _ = drawn(example, 10, seed=0)
    assert matches(read(sampled(open_images("runs/shapes-sd3"), asked)), asked) >= 0.95


@pytest.mark.slow  # minutes: it trains two models
def test_a_controlnet_draws_where_the_edges_are_in_the_color_of_the_caption(example, read, unet):
    main(["train", str(EXAMPLES / "shapes_edges.yaml")])
    steered, rng = open_images("runs/shapes-edges"), random.Random(3)
    images, pictures, asked = [], [], []
    for shape in 2 * example["SHAPES"]:
        picture = example["draw"](shape, example["COLORS"][rng.choice(list(example["COLORS"]))], rng)
        pairs = [(color, shape) for color in example["COLORS"]]
        images.append(sampled(steered, pairs, control=Control(small(example["edges"](picture)))))
        pictures += [small(picture)] * len(pairs)
        asked += pairs
    images, pictures = np.concatenate(images), np.stack(pictures)
    assert matches(read(images), asked) >= 0.9
    assert overlap(images, pictures) >= 0.8
    # Without the ControlNet, the same captions are drawn anywhere.
    assert overlap(sampled(unet, asked), pictures) <= 0.5
