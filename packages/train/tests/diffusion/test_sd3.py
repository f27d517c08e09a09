"""Directories of Stable Diffusion 3 with tiny parts: encoders that are absent, and sizes that do not fit."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx.traversals import unflatten_mapping

from stack_core.abi.errors import ConfigError, ConversionError, GenerationError
from stack_core.text.image_models import ImageRequest
from stack_train.diffusion import autoencoder_kl, sd3
from stack_train.diffusion.image_model import DiffusionModel
from stack_train.diffusion.objectives import FlowMatchingConfig
from stack_train.diffusion.pipeline import Pipeline, open_encoders, open_pipeline, save_pipeline
from stack_train.diffusion.sampling import ImageSampler
from stack_train.variables.model_variables import ModelVariables, values_of

from . import shapes

FLOATS = {"dtype": "float32", "param_dtype": "float32"}
CONFIG = sd3.Sd3Config(
    image_size=8, channels=4, layers=3, dual_layers=1, heads=2, head_dim=8, text_dim=64, pooled_dim=64,
    text_tokens=12, max_patches=6, **FLOATS,
)  # fmt: skip
ZEROS = 256
INDEX = "model_index.json"


def drawn(family, config):
    """A model with values from NumPy, since JAX would compile a program for each shape."""
    variables, random = ModelVariables.of(nnx.eval_shape(lambda: family.build(config, key=jax.random.key(0)))), {}
    rng = np.random.default_rng(0)
    for path, leaf in variables.shapes.items():
        random[path] = jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)
    return variables.merge(unflatten_mapping(random))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    sizes = {"image_size": shapes.SIZE, "widths": (4, 8), "groups": 4, "blocks_per_level": 1, "attends": False}
    autoencoder = drawn(autoencoder_kl.FAMILY, autoencoder_kl.AutoencoderKlConfig(**sizes, **FLOATS))
    root = tmp_path_factory.mktemp("sd3")
    encoders = shapes.encoders(root / "none", autoencoder, name="StableDiffusion3Pipeline")
    objective = FlowMatchingConfig(shift=3.0)
    made = Pipeline(CONFIG, drawn(sd3.FAMILY, CONFIG), encoders, objective, encoders.pipeline.sampler)
    save_pipeline(root / "whole", made)
    return root / "whole"


@pytest.fixture
def without_t5(directory, tmp_path):
    return edited(directory, tmp_path / "without_t5", text_encoder_3=[None, None], tokenizer_3=[None, None])


def edited(directory, copy, **entries):
    """A copy with other entries in its index, without the folders whose entries are null."""
    shutil.copytree(directory, copy)
    index = json.loads((copy / INDEX).read_text())
    (copy / INDEX).write_text(json.dumps({**index, **entries}))
    for name, entry in entries.items():
        if entry == [None, None]:
            shutil.rmtree(copy / name)
    return copy


def test_a_directory_is_opened_as_it_was_saved(directory):
    opened = open_pipeline(directory)
    assert opened.config == CONFIG and opened.objective.shift == 3.0
    assert (opened.sampler.guidance, opened.sampler.spacing) == (7.0, "linspace")
    expected = values_of(drawn(sd3.FAMILY, CONFIG))
    for path, value in values_of(opened.model).items():
        np.testing.assert_array_equal(value, expected[path], err_msg=str(path))
    condition = opened.encoders.text(["a red ring"])
    assert condition["text"].shape == (1, 12, 64) and condition["pooled"].shape == (1, 64)


def test_zeros_are_in_the_place_of_an_absent_t5_and_stay_there(directory, without_t5, tmp_path):
    opened = open_pipeline(without_t5)
    assert opened.config == replace(CONFIG, text_tokens=6 + ZEROS)
    whole, text = (each.encoders.text(["a red ring"])["text"] for each in (open_pipeline(directory), opened))
    np.testing.assert_array_equal(text[:, :6], whole[:, :6])
    assert text.shape == (1, 6 + ZEROS, 64) and not text[:, 6:].any() and whole[:, 6:].any()
    save_pipeline(tmp_path / "back", opened)
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    assert index["text_encoder_3"] == index["tokenizer_3"] == [None, None]
    assert open_pipeline(tmp_path / "back").config == opened.config


@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_2", "tokenizer_3"])
def test_an_encoder_that_is_missing_is_named(name, directory, tmp_path):
    with pytest.raises(ConversionError, match=f"lacks {name}\\. A StableDiffusion3Pipeline needs"):
        open_pipeline(edited(directory, tmp_path / "copy", **{name: [None, None]}))


def test_texts_that_are_too_short_or_too_narrow_for_the_encoders_are_refused(directory, without_t5):
    with pytest.raises(ConversionError, match=r"text_tokens=6 leave none for T5, .* the 6 of CLIP"):
        open_encoders(directory, text_tokens=6)
    with pytest.raises(ConversionError, match=r"Both CLIPs give 64 features, more than .* 48"):
        open_encoders(without_t5, text_dim=48).text.sizes()
    with pytest.raises(ConversionError, match=f"its text_tokens is 12, and .* gives {6 + ZEROS}"):
        open_encoders(without_t5, text_tokens=12, text_dim=64).check(CONFIG)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((16, 18), r"The size is 18x16; .* multiple of 4 pixels\. Take 16x16 or 20x20"),
        ((16, 28), "Latents of 8 x 14 exceed 12, patch=2 times max_patches=6"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(size, message, directory):
    opened = open_pipeline(directory)
    sampler = ImageSampler(opened.model, opened.config, opened.objective, None, opened.encoders, opened.sampler)
    assert sampler.resized((16, 24)).sides == (8, 12)
    with pytest.raises(ConfigError, match=message):
        sampler.resized(size)
    with pytest.raises(GenerationError, match=message):
        DiffusionModel(sampler, "sd3").resolve(ImageRequest(prompt="a red ring", size=size))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_size": 7}, "Latents of 7 x 7 are not multiples of patch=2"),
        ({"image_size": 14}, "Latents of 14 x 14 exceed 12"),
        ({"dual_layers": 4}, "dual_layers=4 are more than layers=3"),
        ({"heads": 3, "head_dim": 6}, "18 wide; positions take a multiple of 4"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **settings)


def test_latents_that_the_patches_do_not_divide_are_refused():
    model = drawn(sd3.FAMILY, CONFIG)
    condition = {"text": jnp.zeros((1, 12, 64)), "pooled": jnp.zeros((1, 64))}
    with pytest.raises(ConfigError, match="Latents of 8 x 5 are not multiples"):
        jax.eval_shape(lambda: model(jnp.zeros((1, 8, 5, 4)), jnp.zeros(1), condition))


def test_images_have_the_positions_in_the_middle_of_the_table():
    model = sd3.FAMILY.build(CONFIG, key=jax.random.key(0))
    whole = model.positions[...].reshape(6, 6, 16)
    np.testing.assert_array_equal(model._positions(3, 4)[0], whole[1:4, 1:5].reshape(12, 16))
    # Columns come first, and 6 places span the 4 patches of a training image.
    np.testing.assert_allclose(whole[2, 5, 0], np.sin(5 * 4 / 6), rtol=1e-6)
    np.testing.assert_allclose(whole[2, 5, 8], np.sin(2 * 4 / 6), rtol=1e-6)


def test_the_default_sampler_ends_at_the_lowest_of_1000_times(directory):
    opened = open_pipeline(directory)
    sampler = ImageSampler(opened.model, opened.config, opened.objective, None, opened.encoders, opened.sampler)
    timesteps = sampler.table(opened.sampler.changed({"steps": 4})).rows[:, 0]
    np.testing.assert_allclose(timesteps, [1000.0, 857.6923, 602.1505, 8.9286], atol=1e-3)
    with pytest.raises(ConfigError, match="plms steps by equal numbers"):
        opened.sampler.changed({"name": "plms"})
