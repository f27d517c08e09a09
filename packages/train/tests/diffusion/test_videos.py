"""Text-to-video runs on moving squares: from a folder of videos to videos of captions."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, ConversionError, DataError, GenerationError
from stack_train.commands.sample import sample
from stack_train.data.kinds.videos import VideosData
from stack_train.data.video_files import find_videos, read_videos
from stack_train.diffusion import autoencoder_kl_wan, dit, sampling, wan
from stack_train.diffusion.components import load_component
from stack_train.diffusion.image_model import DiffusionModel
from stack_train.diffusion.pipeline import open_pipeline, save_encoders
from stack_train.diffusion.sampling import open_images
from stack_train.diffusion.starts import Start
from stack_train.huggingface import FORMAT
from stack_train.run.config import RunConfig
from stack_train.run.train import train

from . import motions, shapes

FLOATS = {"dtype": "float32", "param_dtype": "float32"}
# Latents of 8 x 8, and 5 for 9 frames.
AUTOENCODER = {"name": "autoencoder_kl_wan", "image_size": motions.SIDE, "frames": motions.FRAMES, "channels": 1}
AUTOENCODER |= {"latent_channels": 4, "multipliers": [1, 2], "halves_frames": [True], "blocks_per_level": 1, **FLOATS}
AUTOENCODER |= {"latents_mean": [0.0] * 4, "latents_std": [0.2] * 4}
WAN = {"name": "wan", "image_size": 8, "frames": 5, "channels": 4, "text_dim": 32, "text_tokens": 6, **FLOATS}
TINY = {"layers": 1, "heads": 2, "head_dim": 8, "mlp": 32, "time_features": 16}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("squares") / "videos"
    motions.write_videos(root, 6)
    return root


def saved_encoders(directory, autoencoder):
    """Writes a random text encoder next to an autoencoder; returns the directory."""
    save_encoders(directory, shapes.encoders(directory, autoencoder, name="WanPipeline"))
    return directory


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    config = parse(autoencoder_kl_wan.AutoencoderKlWanConfig, {**AUTOENCODER, "width": 4})
    model = autoencoder_kl_wan.FAMILY.build(config, key=jax.random.key(0))
    return saved_encoders(tmp_path_factory.mktemp("pipeline") / "encoders", model)


def wan_config(output, folder, pipeline, *, steps, model=None, data=None, **sections):
    mapping = {
        "output": str(output),
        "model": {**WAN, **(TINY if model is None else model)},
        "data": {"name": "videos", "source": f"{folder}/*", "pipeline": str(pipeline), **(data or {"batch_size": 4})},
        "run": {"steps": steps},
        "objective": {"name": "flow_matching"},
        **sections,
    }
    return parse(RunConfig, mapping)


@pytest.fixture(scope="module")
def run(tmp_path_factory, folder, pipeline):
    data = {"batch_size": 4, "validation_fraction": 0.0}
    config = wan_config(tmp_path_factory.mktemp("runs") / "run", folder, pipeline, steps=2, data=data)
    train(config)
    return config


def test_gif_webp_and_folders_are_read_frame_by_frame(tmp_path):
    videos = motions.write_videos(tmp_path / "videos", 3)
    settings = {"size": motions.SIDE, "channels": 1, "unreadable": "error", "source": "videos"}
    read = read_videos(find_videos(f"{tmp_path}/videos/*"), frames=motions.FRAMES, **settings)
    np.testing.assert_array_equal(read.pixels[..., 0], videos)
    # Encoders join equal frames and add up their durations.
    still = [Image.fromarray(videos[0][place]) for place in (0, 1, 1, 1, 2)]
    still[0].save(tmp_path / "still.gif", save_all=True, append_images=still[1:], duration=60)
    with Image.open(tmp_path / "still.gif") as image:
        assert image.n_frames == 3
    read = read_videos(find_videos(f"{tmp_path}/still.gif"), frames=5, **settings)
    np.testing.assert_array_equal(read.pixels[0, ..., 0], videos[0][[0, 1, 1, 1, 2]])


def test_a_run_trains_is_sampled_and_becomes_a_directory_of_diffusers(run, pipeline, tmp_path):
    batch = next(run.data.build(seed=0, model=run.model).train_iterator())
    expected = {name: (each.shape, each.dtype) for name, each in run.data.spec(run.model).items()}
    assert {name: (array.shape, array.dtype) for name, array in batch.items() if name != "row_ids"} == expected
    assert expected["images"][0] == (4, 5, 8, 8, 4) and "negative_text" in expected
    sample(run.output, prompt=("a square moves up", "a square"), out=tmp_path / "clip.webp", steps=1, frames=5)
    with Image.open(tmp_path / "clip.webp") as image:
        assert image.size == (2 * 65 - 1, 64) and image.n_frames == 5
    FORMAT.export_run(Path(run.output), tmp_path / "pipeline")
    index = json.loads((tmp_path / "pipeline" / "model_index.json").read_text())
    assert index["_class_name"] == "WanPipeline" and index["text_encoder"] == ["transformers", "UMT5EncoderModel"]
    FORMAT.import_run(tmp_path / "pipeline", tmp_path / "again")
    ours, again = open_images(run.output), open_images(str(tmp_path / "again"), size=(16, 16), frames=9)
    assert again.shape == ours.shape == (5, 8, 8, 4)
    for before, after in zip(jax.tree.leaves(ours.model), jax.tree.leaves(again.model), strict=True):
        np.testing.assert_array_equal(before, after)


def test_sampling_is_compiled_once_for_each_sampler_and_shape(run, monkeypatch):
    opened, traces, sample_latents = open_images(run.output), [], sampling.sample_latents

    def counted(*arguments, **options):
        traces.append(1)
        return sample_latents(*arguments, **options)

    monkeypatch.setattr(sampling, "sample_latents", counted)

    def latents(opened, seed, **settings):
        sampler = opened.sampler.changed({"steps": 1, **settings})
        return opened._sampled(opened.condition(["a square"], sampler), 1, sampler, seed)

    first, again, other = (latents(opened, seed) for seed in (0, 0, 1))
    assert len(traces) == 1
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1
    latents(opened, 0, steps=2)
    assert len(traces) == 2
    latents(opened.with_frames(1), 0)
    assert len(traces) == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"frames": 8}, ConfigError, "has 8 frames. .* one frame and then 2 for each latent: give 7 or 9"),
        ({"frames": 0}, ConfigError, "has 0 frames. .* give 1 or 3"),
        ({"size": "18x16"}, ConfigError, "The size is 18x16; .* multiple of 4 pixels"),
        ({"out": "clip.mp4"}, ConfigError, r"--out is clip.mp4; videos are written as .gif, .webp, .png files"),
        ({"fps": 0.0}, ConfigError, "--fps is 0"),
        ({"tile_pixels": 64}, ConfigError, "and autoencoder_kl_wan decodes videos"),
    ],
)
def test_videos_that_cannot_be_sampled_are_refused(run, options, error, message, tmp_path):
    given = {"out": tmp_path / "none.gif", **options}
    with pytest.raises(error, match=message):
        sample(run.output, prompt=("a square",), **{**given, "out": Path(given["out"])})


def test_videos_neither_begin_with_images_nor_are_served(run):
    opened = open_images(run.output)
    start = Start(np.zeros((16, 16, 1), np.uint8))
    with pytest.raises(GenerationError, match="makes videos of prompts only"):
        opened.images_of(["a square"], opened.sampler, start=start)
    with pytest.raises(GenerationError, match="tiny makes videos, and the server images"):
        DiffusionModel(opened, "tiny")


@pytest.mark.parametrize("name", ["text_encoder", "vae", "tokenizer"])
def test_a_missing_part_is_named(name, folder, pipeline, tmp_path):
    copy = tmp_path / "encoders"
    shutil.copytree(pipeline, copy)
    shutil.rmtree(copy / name)
    with pytest.raises(ConversionError, match=f"lacks {name}. A WanPipeline needs text_encoder, tokenizer, vae"):
        train(wan_config(tmp_path / "run", folder, copy, steps=1))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"boundary_ratio": 0.875}, "sets boundary_ratio=0.875 and transformer_2=.*None.*. Set both or neither"),
        ({"transformer_2": ["diffusers", "WanTransformer3DModel"]}, "boundary_ratio=None and .*. Set both or neither"),
        ({"expand_timesteps": True}, "expand_timesteps=True"),
        (
            {"_class_name": "WanVACEPipeline"},
            "is a WanVACEPipeline; .*WanPipeline, WanImageToVideoPipeline, .*are read",
        ),
    ],
)
def test_pipelines_that_are_not_implemented_are_refused_by_name(entries, message, pipeline, tmp_path):
    copy = tmp_path / "encoders"
    shutil.copytree(pipeline, copy)
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").write_text(json.dumps({**index, **entries}))
    with pytest.raises(ConversionError, match=message):
        open_pipeline(copy)


def test_videos_that_cannot_be_read_are_named(pipeline, tmp_path):
    def refused(message, folder):
        with pytest.raises(DataError, match=message):
            train(wan_config(tmp_path / "run", folder, pipeline, steps=1))

    refused("matches no MP4, WebM, MKV, GIF or WebP file and no folder of PNG files", tmp_path / "nothing")
    motions.write_videos(tmp_path / "short", 1, frames=6)
    refused(r"0000.gif: it has 6 frames, and the model reads 9", tmp_path / "short")
    (tmp_path / "empty" / "clip").mkdir(parents=True)
    refused(r"empty/clip: it has 0 frames", tmp_path / "empty")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "clip.gif").write_bytes(b"GIF89a")
    refused(r"1 of 1 files cannot be read as videos:(.|\n)*clip.gif", tmp_path / "broken")
    (tmp_path / "films").mkdir()
    (tmp_path / "films" / "clip.flv").write_bytes(b"")
    refused(r"clip.flv is not a video of .*ffmpeg -i clip.flv clip/%05d.png", tmp_path / "films")
    motions.write_videos(tmp_path / "silent", 1)
    (tmp_path / "silent" / "metadata.jsonl").unlink()
    refused(r"1 of 1 videos have no caption", tmp_path / "silent")


def test_data_that_do_not_fit_the_model_are_refused():
    videos, encoded = VideosData(source="videos/*"), VideosData(source="videos/*", pipeline="none")
    with pytest.raises(ConfigError, match=r"not for family 'dit'; use wan, ltx or an autoencoder"):
        videos.check(dit.DitConfig())
    with pytest.raises(ConfigError, match=r"Family 'wan' needs data.pipeline"):
        videos.check(wan.WanConfig())
    with pytest.raises(ConfigError, match=r"Family 'autoencoder_kl_wan' reads pixels. Leave data.pipeline out"):
        encoded.check(autoencoder_kl_wan.AutoencoderKlWanConfig())
    with pytest.raises(ConfigError, match=r"model.channels is 2; videos are read with 1 or 3"):
        videos.check(autoencoder_kl_wan.AutoencoderKlWanConfig(channels=2))
    captioned = {"name": "captioned", "source": "videos/*", "pipeline": "none"}
    config = parse(RunConfig, {"output": "none", "model": WAN | TINY, "data": captioned})
    with pytest.raises(ConfigError, match=r"a model of videos trains on kind videos"):
        config.data.check(config.model)
    with pytest.raises(ConfigError, match=r"The video has 80 frames. .* give 77 or 81"):
        autoencoder_kl_wan.AutoencoderKlWanConfig(frames=80)


@pytest.mark.slow
def test_an_autoencoder_trains_and_is_written_with_the_scale_of_its_latents(folder, tmp_path):
    mapping = {
        "output": str(tmp_path / "run"),
        "model": {**AUTOENCODER, "width": 4},
        "data": {"name": "videos", "source": f"{folder}/*", "batch_size": 4, "validation_fraction": 0.3},
        "objective": {"name": "reconstruction", "kl_weight": 1e-4},
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "run": {"steps": 8},
    }
    config = parse(RunConfig, mapping)
    train(config)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.8 * losses[0]
    FORMAT.export_run(tmp_path / "run", tmp_path / "vae")
    _, model = load_component(autoencoder_kl_wan.COMPONENT, tmp_path / "vae")
    batch = next(config.data.build(seed=0, model=config.model).validation_batches())
    latents = model.scaled_latents(jnp.asarray(batch["images"][batch["weights"] > 0]))
    np.testing.assert_allclose(latents.mean((0, 1, 2, 3)), 0.0, atol=1e-3)
    np.testing.assert_allclose(latents.std((0, 1, 2, 3)), 1.0, atol=1e-3)
    FORMAT.import_run(tmp_path / "vae", tmp_path / "again")
