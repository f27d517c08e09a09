"""The example of captioned pictures: a UNet is trained, and judged by a reader of drawn pictures."""

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
from stack_train.diffusion.sampling import open_images

from .shapes import SIZE, Reader

EXAMPLES = Path(__file__).parents[4] / "examples"


def drawn(example, count, seed):
    """Every pair of a color and a shape `count` times, and a picture of each, scaled as the data are."""
    rng = random.Random(seed)
    pairs = [(color, shape) for color in example["COLORS"] for shape in example["SHAPES"]] * count
    pictures = [example["draw"](shape, example["COLORS"][color], rng).convert("RGB") for color, shape in pairs]
    return pairs, np.stack([np.asarray(each.resize((SIZE, SIZE), Image.Resampling.LANCZOS)) for each in pictures])


def test_the_autoencoder_of_the_examples_copies_pixels():
    autoencoder = runpy.run_path(str(EXAMPLES / "encoders.py"))["image_autoencoder"]()
    pixels = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (2, SIZE, SIZE, 3)), jnp.float32)
    np.testing.assert_allclose(autoencoder.images_of(autoencoder.scaled_latents(pixels)), pixels, atol=1e-3)


@pytest.mark.slow  # minutes: it trains a model
def test_a_unet_draws_shapes_and_colors_of_captions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for script in ("shapes.py", "encoders.py"):
        subprocess.run([sys.executable, EXAMPLES / script], check=True)
    example = runpy.run_path(str(EXAMPLES / "shapes.py"))
    read, (pairs, pictures) = Reader(*drawn(example, 40, seed=1)), drawn(example, 40, seed=2)
    assert read(pictures) == pairs
    main(["train", str(EXAMPLES / "shapes_unet.yaml")])
    opened, (asked, _) = open_images("runs/shapes-unet"), drawn(example, 10, seed=0)
    sampler = opened.sampler.changed({"steps": 20, "guidance": 2.0})
    found = read(opened.images_of([f"a {color} {shape}" for color, shape in asked], sampler))
    assert np.mean([one == other for one, other in zip(found, asked, strict=True)]) >= 0.95
