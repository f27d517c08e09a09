"""Videos that begin with an image, and pairs of denoisers: training, sampling, directories and errors."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, ConversionError, GenerationError
from stack_train.commands.sample import sample
from stack_train.diffusion import autoencoder_kl_wan, wan
from stack_train.diffusion.lora import merge_lora
from stack_train.diffusion.objectives import FlowMatchingConfig
from stack_train.diffusion.pipeline import Pipeline, open_pipeline, save_encoders, save_pipeline
from stack_train.diffusion.samplers import SamplerConfig
from stack_train.diffusion.sampling import open_images
from stack_train.diffusion.starts import Start
from stack_train.diffusion.two_denoisers import TwoDenoisers
from stack_train.huggingface import FORMAT
from stack_train.run.config import RunConfig
from stack_train.run.train import train

from . import motions, shapes
from .test_videos import AUTOENCODER, TINY, WAN

# The mask has a channel for each of the 2 frames of a latent, and the latents have 4 channels.
FIRST = {"extra_channels": 6, "image_dim": 8, "image_tokens": 5}
CLIP = "a square moves up"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def autoencoder():
    config = parse(autoencoder_kl_wan.AutoencoderKlWanConfig, {**AUTOENCODER, "channels": 3, "width": 4})
    return autoencoder_kl_wan.FAMILY.build(config, key=jax.random.key(0))


def denoiser(number, **settings):
    """Returns a config and a random denoiser, whose last layer does not start at 0."""
    config = parse(wan.WanConfig, {**WAN, **TINY, **settings})
    model = wan.FAMILY.build(config, key=jax.random.key(number))
    model.last.kernel[...] = 0.1 * jax.random.normal(jax.random.key(number), model.last.kernel.shape)
    return config, model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("image_to_video")
    motions.write_videos(root / "videos", 4)
    save_encoders(root / "encoders", shapes.encoders(root / "none", autoencoder(), name="WanImageToVideoPipeline"))
    data = {"name": "videos", "source": f"{root}/videos/*", "pipeline": str(root / "encoders"), "batch_size": 4}
    mapping = {
        "output": str(root / "run"),
        "model": {**WAN, **TINY, **FIRST},
        "data": {**data, "validation_fraction": 0.0},
        "run": {"steps": 2},
        "objective": {"name": "flow_matching"},
    }
    config = parse(RunConfig, mapping)
    train(config)
    return config


def grey(value, side=16, channels=3):
    return Start(np.full((side, side, channels), value, np.uint8))


def latents_of(opened, start, seed=0, **settings):
    sampler = opened.sampler.changed({"steps": 2, **settings})
    condition = opened.condition([CLIP], sampler)
    if start is not None:
        condition |= opened._first_frame(start, 1)
    return np.asarray(opened._sampled(condition, 1, sampler, seed))


def test_a_run_trains_with_first_frames_and_is_sampled_from_an_image(run, tmp_path):
    batch = next(run.data.build(seed=0, model=run.model).train_iterator())
    expected = {name: (each.shape, each.dtype) for name, each in run.data.spec(run.model).items()}
    assert {name: (array.shape, array.dtype) for name, array in batch.items() if name != "row_ids"} == expected
    assert expected["first_frame"][0] == (4, 5, 8, 8, 6) and expected["image_features"][0] == (4, 5, 8)
    mask, latents = np.split(batch["first_frame"], [2], axis=-1)
    assert (mask[:, 0] == 1.0).all() and not mask[:, 1:].any()
    # No frame depends on later frames, so the first latent of a video is the latent of its first frame.
    np.testing.assert_allclose(latents[:, 0], batch["images"][:, 0], atol=1e-5)
    assert np.abs(latents[:, 1:] - batch["images"][:, 1:]).max() > 0.01
    Image.fromarray(grey(9, 24).image).save(tmp_path / "image.png")
    out = tmp_path / "clip.webp"
    sample(run.output, prompt=(CLIP,), image=tmp_path / "image.png", size="16", out=out, steps=1, frames=5)
    with Image.open(out) as image:
        assert image.size == (64, 64)
    opened = open_images(run.output)
    assert np.abs(latents_of(opened, grey(9)) - latents_of(opened, grey(200))).max() > 1e-4
    FORMAT.export_run(Path(run.output), tmp_path / "pipeline")
    index = json.loads((tmp_path / "pipeline" / "model_index.json").read_text())
    assert index["_class_name"] == "WanImageToVideoPipeline"
    assert index["image_encoder"] == ["transformers", "CLIPVisionModel"]
    assert index["image_processor"] == ["transformers", "CLIPImageProcessor"]
    FORMAT.import_run(tmp_path / "pipeline", tmp_path / "again")
    again = open_images(str(tmp_path / "again"), size=(16, 16), frames=9)
    for before, after in zip(jax.tree.leaves(opened.model), jax.tree.leaves(again.model), strict=True):
        np.testing.assert_array_equal(before, after)
    np.testing.assert_allclose(latents_of(again, grey(9)), latents_of(opened, grey(9)), atol=1e-6)


@pytest.mark.parametrize(
    ("start", "settings", "message"),
    [
        (None, {}, "makes videos that begin with an image. Give an image"),
        (Start(grey(9).image, np.zeros((16, 16), np.uint8)), {}, "A mask is for models of images"),
        (grey(9), {"strength": 0.5}, "strength=0.5 changes an image, and a video begins with its image"),
        (grey(9, 20), {}, "The image is 20x20 pixels; images of 16x16"),
        (grey(9, channels=1), {}, "The image has 1 channels, and the autoencoder 3"),
    ],
)
def test_images_that_do_not_fit_are_refused(run, start, settings, message):
    opened = open_images(run.output)
    with pytest.raises(GenerationError, match=message):
        opened.images_of([CLIP], opened.sampler.changed({"steps": 2, **settings}), start=start)


def test_sizes_and_denoisers_that_do_not_fit_are_refused(run, tmp_path):
    Image.fromarray(grey(9, 18).image).save(tmp_path / "image.png")
    with pytest.raises(ConfigError, match=r"The size is 18x18; .* multiple of 4 pixels. Take 16x16 or 20x20"):
        sample(run.output, prompt=(CLIP,), image=tmp_path / "image.png", out=tmp_path / "none.gif")
    with pytest.raises(ConversionError, match=r"extra_channels is 0, and a WanImageToVideoPipeline needs 6; .*image"):
        train(replace(run, output=str(tmp_path / "run"), model=parse(wan.WanConfig, {**WAN, **TINY})))
    with pytest.raises(ConfigError, match="image_dim=8 is for image to video, and extra_channels is 0"):
        wan.WanConfig(image_dim=8)
    with pytest.raises(ConfigError, match="image_tokens=5 would have no effect"):
        wan.WanConfig(image_tokens=5)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A directory of two denoisers, and both."""
    root = tmp_path_factory.mktemp("pair")
    config, high = denoiser(1)
    _, low = denoiser(2)
    encoders = shapes.encoders(root / "none", autoencoder(), name="WanPipeline")
    model = TwoDenoisers(high, low, boundary=0.5)
    save_pipeline(root / "pair", Pipeline(config, model, encoders, FlowMatchingConfig(), SamplerConfig()))
    return root / "pair", high, low


def test_each_of_two_denoisers_acts_in_its_part_of_the_timesteps(pair, tmp_path):
    directory, high, low = pair
    index = json.loads((directory / "model_index.json").read_text())
    assert (index["boundary_ratio"], index["transformer_2"]) == (0.5, ["diffusers", "WanTransformer3DModel"])
    opened = open_images(str(directory), size=(16, 16), frames=9)
    x = jax.random.normal(jax.random.key(3), (2, *opened.shape))
    condition = {"text": jax.random.normal(jax.random.key(4), (2, 6, 32))}
    for timestep, expected in ((999.0, high), (500.0, high), (499.0, low)):
        timesteps = jnp.full(2, timestep)
        np.testing.assert_allclose(
            opened.model(x, timesteps, condition), expected(x, timesteps, condition), atol=1e-5, err_msg=str(timestep)
        )
    guided = {"steps": 4, "guidance": 3.0}
    plain, same, other = (
        latents_of(opened, None, **guided, **low)
        for low in ({}, {"low_noise_guidance": 3.0}, {"low_noise_guidance": 30.0})
    )
    np.testing.assert_allclose(plain, same, atol=1e-6)
    assert np.abs(other - plain).max() > 1e-3
    save_pipeline(tmp_path / "again", open_pipeline(directory))
    for part in ("transformer", "transformer_2"):
        name = f"{part}/diffusion_pytorch_model.safetensors"
        assert (tmp_path / "again" / name).read_bytes() == (directory / name).read_bytes()


def test_what_two_denoisers_do_not_support_is_refused(pair, run, tmp_path):
    directory = pair[0]
    with pytest.raises(ConversionError, match=r"has two denoisers, and a run has one. Sample from the directory"):
        FORMAT.import_run(directory, tmp_path / "run")
    with pytest.raises(ConversionError, match="adapts one denoiser, and the model has two"):
        merge_lora(open_pipeline(directory), tmp_path / "lora.safetensors")
    with pytest.raises(ConfigError, match=r"low_noise_guidance=2.0 is for models of two denoisers"):
        latents_of(open_images(run.output), grey(9), guidance=3.0, low_noise_guidance=2.0)
    with pytest.raises(ConfigError, match=r"low_noise_guidance=2.0 acts with guidance, which is 1"):
        SamplerConfig(low_noise_guidance=2.0)
    path = directory / "transformer_2" / "config.json"
    mapping = json.loads(path.read_text())
    try:
        path.write_text(json.dumps(mapping | {"eps": 1e-3}))
        with pytest.raises(ConversionError, match=r"its norm_epsilon is 0.001, not 1e-06. Both denoisers"):
            open_pipeline(directory)
    finally:
        path.write_text(json.dumps(mapping))
