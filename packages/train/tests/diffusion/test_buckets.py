"""Buckets of images of several sizes, and the caches of their latents and captions."""

import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.buckets import BatchOrder, BucketsConfig, bucket_sizes
from stack_train.data.image_files import crop_offset, read_bucketed_images
from stack_train.data.image_source import ImageFiles
from stack_train.data.kinds.captioned import CaptionedData
from stack_train.diffusion import autoencoder_kl, unet
from stack_train.diffusion.grid import turn_upright, upright_size
from stack_train.diffusion.objectives import EpsilonConfig
from stack_train.diffusion.pipeline import open_encoders
from stack_train.run.train import train
from stack_train.step.program import Program

from .test_captioned import AUTOENCODER, BETAS, FAMILIES, flux_config, leaves, saved_encoders

SDXL = "StableDiffusionXLPipeline"
MODEL = parse(unet.UnetConfig, FAMILIES[SDXL])
SIZES = ((16, 16), (20, 12), (40, 24), (24, 40), (9, 15), (60, 60))
BUCKETS = {"step_pixels": 4, "max_ratio": 2.0}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """36 images, a third each square, wide and tall, with ten captions."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number in range(36):
        height, width = SIZES[number % len(SIZES)]
        coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
        coarse.resize((width, height)).save(root / f"{number:02}.png")
        (root / f"{number:02}.txt").write_text(f"a {number % 10}")
    return root


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    config = autoencoder_kl.AutoencoderKlConfig(widths=(4, 8), scaling_factor=2.0, **AUTOENCODER)
    model = autoencoder_kl.FAMILY.build(config, key=jax.random.key(0))
    return saved_encoders(tmp_path_factory.mktemp("encoders") / SDXL, SDXL, model)


def data(folder, encoders, **fields):
    mapping = {"source": f"{folder}/*.png", "pipeline": str(encoders), "batch_size": 4, "buckets": BUCKETS}
    return parse(CaptionedData, {**mapping, "validation_fraction": 0.0, **fields})


def test_sizes_of_buckets_have_nearly_the_area_of_the_square():
    sizes = bucket_sizes(BucketsConfig(max_ratio=4.0), side=1024, factor=16)
    # Of the list in SDXL's appendix.
    assert {(1024, 1024), (512, 2048), (832, 1216), (1344, 768), (2048, 512)} <= set(sizes)
    assert all(height % 64 == 0 and width % 64 == 0 for height, width in sizes)
    assert all(0.9 <= height * width / 1024**2 <= 1.0 for height, width in sizes)
    assert set(sizes) == {size[::-1] for size in sizes}
    assert bucket_sizes(BucketsConfig(max_ratio=1.0), side=1024, factor=8) == [(1024, 1024)]
    with pytest.raises(ConfigError, match=r"divide sides by 16. Give 16 or 32\."):
        bucket_sizes(BucketsConfig(step_pixels=24), side=1024, factor=16)
    with pytest.raises(ConfigError, match="does not divide the 96 pixels"):
        bucket_sizes(BucketsConfig(), side=96, factor=8)


def test_every_row_comes_once_an_epoch_up_to_full_batches_of_one_bucket():
    buckets = np.random.default_rng(0).choice(3, 50, p=[0.6, 0.3, 0.1])
    order, counts = BatchOrder(buckets, 4, seed=1), np.bincount(buckets)
    per_epoch = int((counts // 4).sum())
    epochs = [np.stack([order[epoch * per_epoch + place] for place in range(per_epoch)]) for epoch in range(3)]
    for epoch, ids in enumerate(epochs):
        rows = ids - epoch * len(buckets)
        assert len(np.unique(rows)) == rows.size and rows.min() >= 0 and rows.max() < len(buckets)
        assert (buckets[rows] == buckets[rows[:, :1]]).all()
        assert np.bincount(buckets[rows[:, 0]], minlength=3).tolist() == (counts // 4).tolist()
    left_out = [set(range(50)) - set((ids - epoch * 50).ravel()) for epoch, ids in enumerate(epochs)]
    assert left_out[0] and left_out[0] != left_out[1]
    # Not the batches of one bucket after those of another.
    firsts = buckets[epochs[0][:, 0]]
    assert np.any(np.diff(firsts) < 0) and np.any(np.diff(firsts) > 0)
    np.testing.assert_array_equal(BatchOrder(buckets, 4, seed=1)[per_epoch + 2], epochs[1][2])
    assert np.any(BatchOrder(buckets, 4, seed=2)[0] != epochs[0][0])


def test_an_image_covers_its_size_and_its_crop_is_that_of_the_scaled_image(tmp_path):
    ramp = np.broadcast_to(np.arange(60, dtype=np.uint8)[None, :, None] * 4, (30, 60, 3))
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    (size, found), *others = read_bucketed_images(
        ImageFiles([tmp_path / "ramp.png"]), sizes=[(16, 16), (12, 20)], channels=3, unreadable="error", source="ramp"
    ).items()
    assert size == (12, 20) and not others and found.originals == [(30, 60)]
    top, left = crop_offset((30, 60), size)
    assert (top, left) == (0, 2)
    # Column c of the result is at (c + left + 0.5) / 0.4 of the original.
    expected = ((np.arange(20) + left + 0.5) / 0.4 - 0.5) * 4
    np.testing.assert_allclose(found.pixels[0, 5, 1:-1, 0], expected[1:-1], atol=2)


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("suffix", ["png", "jpg", "tiff"])
def test_the_size_in_the_head_of_a_file_is_the_size_of_the_upright_image(tmp_path, suffix, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    Image.new("RGB", (8, 5)).save(tmp_path / f"a.{suffix}", exif=exif)
    with Image.open(tmp_path / f"a.{suffix}") as image:
        assert upright_size(image) == turn_upright(image).size[::-1] == ((5, 8) if orientation == 1 else (8, 5))


def test_batches_have_the_latents_and_the_sizes_of_their_bucket(folder, encoders):
    section = data(folder, encoders, validation_fraction=0.1)
    batches = section.build(seed=0, model=MODEL)
    found, names = {}, []
    iterator = batches.train_iterator()
    for _ in range(6):
        batch = next(iterator)
        found[batch["images"].shape[1:3]] = batch
        names += batches.describe_rows(batch["row_ids"])
    assert len(set(names)) == len(names) == 24
    shapes = [{name: (each.shape, each.dtype) for name, each in spec.items()} for spec in batches.batch_shapes]
    for batch in found.values():
        assert {name: (a.shape, a.dtype) for name, a in batch.items() if name != "row_ids"} in shapes
    # 16 x 16 pixels, and the nearest to 12:20 with as large an area and sides of a multiple of 4.
    assert set(found) == {(8, 8), (6, 10), (10, 6)}
    name = batches.describe_rows(found[6, 10]["row_ids"])[0].split(": ")[0]
    with Image.open(name) as image:
        original = image.size[::-1]
        pixels = np.asarray(image.resize((20, 12), Image.Resampling.LANCZOS))[None]
    assert found[6, 10]["sizes"][0].tolist() == [*original, 0, 0, 12, 20]
    autoencoder = open_encoders(encoders).autoencoder
    expected = autoencoder.scaled_latents(jnp.asarray(pixels, jnp.float32) / 127.5 - 1.0)
    np.testing.assert_allclose(found[6, 10]["images"][:1], expected, atol=1e-5)
    held_out = list(batches.validation_batches())
    assert sum(batch["weights"].sum() for batch in held_out) == len(batches.validation) > 0
    assert not set(names) & {each for batch in held_out for each in batches.describe_rows(batch["row_ids"])}


def test_only_images_that_the_cache_lacks_are_encoded(folder, encoders, tmp_path, monkeypatch):
    copy = tmp_path / "images"
    shutil.copytree(folder, copy)
    first = data(copy, encoders).build(seed=0, model=MODEL)
    moments, encoded = autoencoder_kl.AutoencoderKl.scaled_moments, []

    def counted(self, images):
        jax.debug.callback(lambda rows: encoded.append(rows.shape[0]), images)
        return moments(self, images)

    monkeypatch.setattr(autoencoder_kl.AutoencoderKl, "scaled_moments", counted)
    again = data(copy, encoders).build(seed=0, model=MODEL)
    one, other = (next(each.train_iterator()) for each in (first, again))
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)
    assert not encoded
    Image.fromarray(np.eye(16, dtype=np.uint8) * 200).convert("RGB").save(copy / "new.png")
    (copy / "new.txt").write_text("a new one")
    grown = data(copy, encoders, encoded_at_once=2).build(seed=0, model=MODEL)
    jax.effects_barrier()
    assert len(grown.training) == 37 and encoded == [2]


def test_samples_of_latents_have_the_moments_of_the_autoencoder_and_differ_between_epochs(folder, encoders):
    mean = data(folder, encoders).build(seed=0, model=MODEL)
    batches = data(folder, encoders, latents="sample").build(seed=0, model=MODEL)
    ids = np.arange(4, dtype=np.int64)  # of one bucket
    places = np.flatnonzero(batches._bucket_of == 0)[:4]
    means, std = mean._batch(places, ids)["images"], batches._images.arrays(places)["std"]
    autoencoder = open_encoders(encoders).autoencoder
    samples = np.stack([batches._batch(places, ids + epoch * 36)["images"] for epoch in range(400)])
    assert std.min() > 0.1 and autoencoder.config.scaling_factor == 2.0
    np.testing.assert_allclose((samples.mean(0) - means) / std, 0.0, atol=6 / 20)
    np.testing.assert_allclose(samples.std(0) / std, 1.0, atol=0.25)
    np.testing.assert_array_equal(batches._batch(places, ids)["images"], samples[0])
    assert np.abs(samples[0] - samples[1]).min() > 0


@pytest.mark.slow
def test_the_loss_is_the_loss_of_images_encoded_in_the_step(folder, encoders):
    batches = data(folder, encoders).build(seed=0, model=MODEL)
    batch = next(batches.train_iterator())
    row_ids = batch.pop("row_ids")
    opened = open_encoders(encoders)
    names, captions = zip(*(each.split(": ", 1) for each in batches.describe_rows(row_ids)), strict=True)
    height, width = (2 * side for side in batch["images"].shape[1:3])
    pixels = []
    for name in names:
        with Image.open(name) as image:
            pixels.append(np.asarray(image.resize((width, height), Image.Resampling.LANCZOS), np.float32))
    model = unet.FAMILY.build(replace(MODEL, image_size=8), key=jax.random.key(0))
    objective, arrays = EpsilonConfig(), jax.tree.map(jnp.asarray, batch)

    @jax.jit
    def uncached(images):
        latents = opened.autoencoder.scaled_latents(images / 127.5 - 1.0)
        condition = dict(opened.text([each.strip("'") for each in captions]))
        return objective(model, {**arrays, **condition, "images": latents}, key=jax.random.key(1))[0]

    cached = jax.jit(lambda arrays: objective(model, arrays, key=jax.random.key(1))[0])(arrays)
    np.testing.assert_allclose(cached, uncached(jnp.asarray(np.stack(pixels))), rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"batch_size": 13}, DataError, r"3 buckets have fewer .* 20x12 \(12\), 16x16 \(12\), .*or lower data.batch_s"),
        ({"buckets": {**BUCKETS, "step_pixels": 3}}, ConfigError, "divide sides by 2. Give 2 or 4"),
        ({"buckets": {**BUCKETS, "step_pixels": 6}}, ConfigError, "does not divide the 16 pixels"),
    ],
)
def test_buckets_that_do_not_fit_are_refused(folder, encoders, fields, error, message):
    with pytest.raises(error, match=message):
        data(folder, encoders, **fields).build(seed=0, model=MODEL)


def test_buckets_of_fewer_images_than_a_batch_are_skipped_by_policy(folder, encoders, tmp_path):
    copy = tmp_path / "images"
    shutil.copytree(folder, copy)
    Image.new("RGB", (64, 16)).save(copy / "wide.png")
    (copy / "wide.txt").write_text("wide")
    buckets = {**BUCKETS, "max_ratio": 4.0}
    with pytest.raises(DataError, match=r"1 buckets .* 32x8 \(1\).*data.buckets.small to skip"):
        data(copy, encoders, buckets=buckets).build(seed=0, model=MODEL)
    with pytest.warns(UserWarning, match="They are not trained on"):
        batches = data(copy, encoders, buckets={**buckets, "small": "skip"}).build(seed=0, model=MODEL)
    iterator = batches.train_iterator()
    assert {next(iterator)["images"].shape[1:3] for _ in range(9)} == {(8, 8), (6, 10), (10, 6)}


@pytest.mark.slow
def test_a_model_that_limits_sizes_refuses_longer_buckets(folder, tmp_path):
    name = "StableDiffusion3Pipeline"
    config = autoencoder_kl.AutoencoderKlConfig(widths=(4, 8), scaling_factor=2.0, **AUTOENCODER)
    directory = saved_encoders(tmp_path / name, name, autoencoder_kl.FAMILY.build(config, key=jax.random.key(0)))
    run = flux_config(
        tmp_path / "run",
        folder,
        directory,
        steps=1,
        model={**FAMILIES[name], "max_patches": 4},
        data={"buckets": BUCKETS},
    )
    with pytest.raises(ConfigError, match="exceed 8, patch=2 times max_patches=4"):
        run.data.build(seed=0, model=run.model)


def bucketed_run(output, folder, encoders, **sections):
    return flux_config(
        output,
        folder,
        encoders,
        steps=8,
        model=FAMILIES[SDXL],
        data={"batch_size": 4, "validation_fraction": 0.2, "buckets": BUCKETS, "latents": "sample"},
        objective={"name": "epsilon", "noise": BETAS},
        checkpoint={"every_steps": 3, "keep": 3},
        **sections,
    )


@pytest.mark.slow
def test_a_run_with_buckets_resumes_bit_by_bit_and_compiles_one_step_for_each(folder, encoders, tmp_path, monkeypatch):
    compiled, trace = [], Program.trace

    def traced(self, batch):
        compiled.append(batch["images"].shape)
        return trace(self, batch)

    monkeypatch.setattr(Program, "trace", traced)
    run = bucketed_run(tmp_path / "run", folder, encoders)
    summary = train(run)
    # The square is compiled at the start.
    assert sorted(compiled) == [(4, 6, 10, 4), (4, 8, 8, 4), (4, 10, 6, 4)]
    assert summary.validation_loss is not None
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for path in (tmp_path / "copy" / "checkpoints").iterdir():
        if not path.name.endswith("3"):
            shutil.rmtree(path)
    resumed = replace(run, output=str(tmp_path / "copy"))
    train(resumed, resume=True)
    straight, again = leaves(run.output, run), leaves(resumed.output, resumed)
    for name, leaf in straight.items():
        np.testing.assert_array_equal(leaf, again[name], err_msg=name)
