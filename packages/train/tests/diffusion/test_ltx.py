"""LTX-Video on moving squares: training, sampling of texts and images, directories, and settings that are refused."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, ConversionError, GenerationError
from stack_train.commands.sample import sample
from stack_train.diffusion import autoencoder_kl_ltx, ltx
from stack_train.diffusion.pipeline import save_encoders
from stack_train.diffusion.sampling import open_images
from stack_train.diffusion.starts import Start
from stack_train.huggingface import FORMAT
from stack_train.run.config import RunConfig
from stack_train.run.train import train

from . import motions, shapes

FLOATS = {"dtype": "float32", "param_dtype": "float32"}
# Latents of 4 x 4, and 5 for 9 frames.
AUTOENCODER = {"name": "autoencoder_kl_ltx", "image_size": motions.SIDE, "frames": motions.FRAMES, "patch": 2}
AUTOENCODER |= {"latent_channels": 4, "widths": [8, 8], "blocks": [1, 1], "downsamples": ["spatiotemporal"]}
AUTOENCODER |= {"decoder_widths": [8], "decoder_blocks": [1, 1], "upsamples": [True], "upsample_factors": [2]}
AUTOENCODER |= {"upsample_residual": [True], "adds_noise": [True, False], "timestep_conditioning": True, **FLOATS}
LTX = {"name": "ltx", "image_size": 4, "frames": 5, "channels": 4, "pixels_per_latent": 4, "frames_per_latent": 2}
LTX |= {"layers": 1, "heads": 2, "head_dim": 6, "text_dim": 32, "text_tokens": 6, **FLOATS}
CLIP = "a square moves up"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("ltx")
    motions.write_videos(root / "videos", 4)
    config = parse(autoencoder_kl_ltx.AutoencoderKlLtxConfig, AUTOENCODER)
    autoencoder = autoencoder_kl_ltx.FAMILY.build(config, key=jax.random.key(0))
    autoencoder.set_statistics(jnp.full(4, 0.1), jnp.full(4, 0.8))
    save_encoders(root / "encoders", shapes.encoders(root / "none", autoencoder, name="LTXPipeline"))
    data = {"name": "videos", "source": f"{root}/videos/*", "pipeline": str(root / "encoders"), "batch_size": 4}
    mapping = {
        "output": str(root / "run"),
        "model": LTX,
        "data": {**data, "validation_fraction": 0.0},
        "run": {"steps": 2},
        "objective": {"name": "flow_matching"},
    }
    config = parse(RunConfig, mapping)
    train(config)
    return config


def test_a_run_trains_is_sampled_and_becomes_a_directory_of_diffusers(run, tmp_path):
    batch = next(run.data.build(seed=0, model=run.model).train_iterator())
    expected = {name: (each.shape, each.dtype) for name, each in run.data.spec(run.model).items()}
    assert {name: (array.shape, array.dtype) for name, array in batch.items() if name != "row_ids"} == expected
    # Four words and the end of a caption, and the end of the empty one.
    assert batch["text_lengths"].tolist() == [5] * 4 and batch["negative_text_lengths"].tolist() == [1] * 4
    Image.fromarray(np.full((24, 24, 3), 200, np.uint8)).save(tmp_path / "image.png")
    out = tmp_path / "clip.webp"
    sample(run.output, prompt=(CLIP,), image=tmp_path / "image.png", size="16", out=out, steps=1, frames=5, fps=10.0)
    with Image.open(out) as image:
        image.load()
        assert image.size == (64, 64) and image.info["duration"] == 100
    FORMAT.export_run(Path(run.output), tmp_path / "pipeline")
    index = json.loads((tmp_path / "pipeline" / "model_index.json").read_text())
    assert index["_class_name"] == "LTXPipeline" and index["vae"] == ["diffusers", "AutoencoderKLLTXVideo"]
    FORMAT.import_run(tmp_path / "pipeline", tmp_path / "again")
    ours, again = open_images(run.output), open_images(str(tmp_path / "again"), size=(16, 16), frames=9)
    assert again.shape == ours.shape == (5, 4, 4, 4)
    for before, after in zip(jax.tree.leaves(ours.model), jax.tree.leaves(again.model), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.fixture(scope="module")
def opened(run):
    """The run with other last weights, which began at 0."""
    found = open_images(run.output)
    kernel = found.model.last.kernel
    kernel[...] = 0.3 * jax.random.normal(jax.random.key(1), kernel.shape)
    return found


def test_texts_frame_rates_and_first_frames_act_and_padding_does_not(opened):
    x = jax.random.normal(jax.random.key(0), (2, *opened.shape))
    text = jax.random.normal(jax.random.key(1), (2, 6, 32))
    plain = {"text": text, "text_lengths": jnp.array([4, 6])}

    @jax.jit
    def predict(condition):
        return opened.model(x, jnp.array([300.0, 700.0]), condition)

    def predicted(**condition):
        return np.asarray(predict({**plain, **condition}))

    expected = predicted()
    np.testing.assert_allclose(predicted(text=text.at[0, 4:].set(9.0)), expected, atol=1e-6)
    np.testing.assert_allclose(predicted(frame_rate=jnp.full(2, 25.0)), expected, atol=1e-6)
    changes = {
        "text": text.at[0, 3].set(9.0),
        "text_lengths": jnp.array([3, 6]),
        "frame_rate": jnp.array([12.0, 25.0]),
        "first_frame": x[:, 1],
    }
    for name, value in changes.items():
        assert np.abs(predicted(**{name: value}) - expected)[0].max() > 1e-4, name


def test_a_video_begins_with_its_image_and_depends_on_it(opened):
    grey = [Start(np.full((16, 16, 3), value, np.uint8)) for value in (30, 220)]
    sampler = opened.sampler.changed({"steps": 2, "guidance": 2.0})
    videos = [opened.images_of([CLIP], sampler, start=start, frame_rate=12.0) for start in grey]
    assert np.abs(videos[0][:, -1].astype(int) - videos[1][:, -1]).max() > 0
    # The decoder is not causal, and therefore the latents are compared.
    condition = opened.condition([CLIP], sampler) | opened._first_frame(grey[0], 1)
    latents = opened._sampled(condition, 1, sampler, 0, begun=opened._preserved(condition))
    np.testing.assert_allclose(latents[:, 0], condition["first_frame"], atol=1e-6)
    with pytest.raises(GenerationError, match="A mask is for models of images"):
        opened.images_of([CLIP], sampler, start=Start(grey[0].image, np.zeros((16, 16), np.uint8)))


def test_an_autoencoder_computes_the_same_in_chunks_and_its_statistics_scale_latents(opened):
    encoders, videos = opened.encoders, jax.random.normal(jax.random.key(2), (1, 9, 16, 16, 3))
    whole = jax.jit(lambda x: encoders.autoencoder.encode(x)[0])(videos)
    scaled = encoders.encode(videos)  # in chunks
    np.testing.assert_allclose(scaled, (whole - 0.1) / 0.8, atol=1e-4)
    np.testing.assert_array_equal(encoders.decode(scaled), encoders.decode(scaled))  # with the same noise


def test_settings_that_do_not_fit_are_refused(run, opened, tmp_path):
    with pytest.raises(ConfigError, match=r"has 8 frames. .* one frame and then 2 for each latent: give 7 or 9"):
        opened.with_frames(8)
    mapping = {**LTX, "pixels_per_latent": 32}
    config = parse(RunConfig, {"output": str(tmp_path), "model": mapping, "data": {**vars(run.data)}})
    with pytest.raises(ConversionError, match="its pixels_per_latent is 32, and vae gives 4"):
        config.data.build(seed=0, model=config.model)
    for settings, message in (
        ({"head_dim": 5}, "head_dim=5: positions rotate pairs of features"),
        ({"heads": 1, "head_dim": 4}, "heads=1 times head_dim=4 is below 6"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(ltx.LtxConfig, {**LTX, **settings})
    for settings, message in (
        ({"blocks": [1]}, "blocks has 1 entries for 1 and 1 levels; give 2"),
        ({"widths": [8, 12]}, "spatiotemporal moves 8 pixels to the channels"),
        ({"downsamples": [None], "upsamples": [False]}, r"upsample_factors=\[2\] divide channels of `upsamples` only"),
        ({"decoder_widths": [12]}, "doubling moves eighths of 12 channels"),
        ({"upsample_factors": [3]}, "divided by 3"),
        ({"upsamples": [False], "upsample_factors": [1]}, r"upsamples=\[False\] do not undo"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(autoencoder_kl_ltx.AutoencoderKlLtxConfig, {**AUTOENCODER, **settings})
