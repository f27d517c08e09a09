"""ControlNets in training: from the UNet's weights, on a frozen UNet, with control images from a folder."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image, ImageDraw

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, ConversionError, DataError, GenerationError
from stack_core.abi.run_directory import RunDirectory
from stack_train.checkpoint import CheckpointStore
from stack_train.commands.sample import sample
from stack_train.data.kinds.captioned import CaptionedData
from stack_train.diffusion import autoencoder_kl, dit, unet
from stack_train.diffusion.controlnet import Control, ControlNetSection, ControlNetTraining
from stack_train.diffusion.image_model import DiffusionModel
from stack_train.diffusion.sampling import open_images
from stack_train.huggingface import FORMAT
from stack_train.run.checks import check_sections
from stack_train.run.program import build_program
from stack_train.run.train import train
from stack_train.variables.weights import read_model

from .test_captioned import AUTOENCODER, BETAS, TINY_UNET, flux_config, saved_encoders

SD = "StableDiffusionPipeline"
UNET = {**TINY_UNET, "text_dim": 32}
SECTION = {"conditioning_widths": [4, 4]}
CONTROLLED = {"control": jax.ShapeDtypeStruct((2, 16, 16, 3), np.uint8)}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of bright rectangles, half of them 16 x 16 and half 12 x 20, whose control images are their outlines."""
    root = tmp_path_factory.mktemp("rectangles")
    rng = np.random.default_rng(0)
    for part in ("images/a", "edges/a"):
        (root / part).mkdir(parents=True)
    for number in range(16):
        height, width = ((16, 16), (12, 20))[number % 2]
        left, top, *_ = corners = (*rng.integers(0, 5, 2), *rng.integers(7, 11, 2))
        for part, options in (("images", {"fill": (200, 80, number * 9)}), ("edges", {"outline": (255, 255, 255)})):
            drawing = Image.new("RGB", (width, height))
            ImageDraw.Draw(drawing).rectangle([int(each) for each in corners], **options)
            drawing.save(root / part / "a" / f"{number}.png")
        (root / "images" / "a" / f"{number}.txt").write_text(f"at {left} {top}")
    return root


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    config = autoencoder_kl.AutoencoderKlConfig(widths=(4, 8), scaling_factor=2.0, **AUTOENCODER)
    model = autoencoder_kl.FAMILY.build(config, key=jax.random.key(0))
    return saved_encoders(tmp_path_factory.mktemp("encoders") / SD, SD, model)


def data(folder, encoders, **fields):
    controls = {"folder": str(folder / "edges"), "pixels_per_latent": 2} | fields.pop("controls", {})
    mapping = {"source": f"{folder}/images/**/*.png", "pipeline": str(encoders), "controls": controls, "batch_size": 4}
    return parse(CaptionedData, {**mapping, "validation_fraction": 0.0, **fields})


def test_a_new_controlnet_copies_the_unet_changes_no_prediction_and_is_trained_alone():
    config = parse(unet.UnetConfig, UNET)
    transform = ControlNetTraining(parse(ControlNetSection, SECTION), CONTROLLED)

    @jax.jit
    def predictions(key):
        model = unet.FAMILY.build(config, key=key)
        # The last layers of a new UNet are 0.
        model.conv_out.kernel[...] = jax.random.normal(key, model.conv_out.kernel.shape)
        whole = transform.apply(model)
        rng = jax.random.split(key, 3)
        images, text = jax.random.normal(rng[0], (2, 8, 8, 4)), jax.random.normal(rng[1], (2, 6, 32))
        condition = {"text": text, "control": jax.random.uniform(rng[2], (2, 16, 16, 3))}
        arguments = images, jnp.array([3.0, 700.0]), condition
        plain = model(images, arguments[1], {"text": text})
        steered = whole(*arguments)
        for layer in whole.control.controlnet_down_blocks:
            layer.kernel[...] = jnp.ones_like(layer.kernel[...])
        return plain, steered, whole(*arguments), nnx.state(model), nnx.state(whole)

    plain, steered, changed, before, after = predictions(jax.random.key(0))
    np.testing.assert_allclose(steered, plain, atol=1e-6)
    assert np.abs(changed - plain).max() > 1e-3
    own, copies = dict(nnx.to_flat_state(before)), dict(nnx.to_flat_state(after.control))
    shared = own.keys() & copies.keys()
    assert {path[0] for path in shared} == {"conv_in", "time_embedding", "down_blocks", "mid_block"}
    for path in shared:
        np.testing.assert_array_equal(own[path].get_value(), copies[path].get_value(), err_msg=str(path))
    abstract = transform.apply(nnx.eval_shape(lambda: unet.FAMILY.build(config, key=jax.random.key(0))))
    flat = nnx.to_flat_state(nnx.state(abstract))
    assert all(isinstance(variable.get_value(), jax.ShapeDtypeStruct) for _, variable in flat)
    assert {path[0] for path, variable in flat if transform.trained(path, variable)} == {"control"}


def test_a_controlnet_of_other_models_or_data_is_refused():
    section, model = ControlNetSection(), parse(unet.UnetConfig, UNET)
    small = dit.DitConfig(image_size=4, channels=1, classes=0, layers=1, heads=1, head_dim=4)
    for shapes, family, config, message in (
        (CONTROLLED, dit.FAMILY, small, "of a UNet .*, not a Dit"),
        (CONTROLLED, unet.FAMILY, replace(model, extra_channels=5), "not a UNet that reads a mask"),
        ({}, unet.FAMILY, model, "needs control images. Set data.controls"),
    ):
        abstract = nnx.eval_shape(lambda family=family, config=config: family.build(config, key=jax.random.key(0)))
        with pytest.raises(ConfigError, match=message):
            ControlNetTraining(section, shapes).apply(abstract)
    control = np.zeros((1, 16, 16, 3), np.uint8)
    arguments = np.zeros((1, 8, 8, 4), "f"), np.zeros(1, "f"), {"text": np.zeros((1, 6, 32), "f"), "control": control}
    plain = nnx.eval_shape(lambda: unet.FAMILY.build(model, key=jax.random.key(0)))

    def traced(model):
        graph, state = nnx.split(model)
        jax.eval_shape(lambda state: nnx.merge(graph, state)(*jax.tree.map(jnp.asarray, arguments)), state)

    with pytest.raises(ConfigError, match="Add the section controlnet"):
        traced(plain)
    with pytest.raises(ConfigError, match=r"has 16 x 16 pixels .*reads 64 x 64"):
        traced(ControlNetTraining(section, CONTROLLED).apply(plain))


@pytest.mark.parametrize(("start", "end", "acts"), [(0.0, 1.0, "11111"), (0.2, 0.7, "01100"), (0.0, 0.4, "11000")])
def test_a_controlnet_acts_in_the_steps_in_which_diffusers_lets_it_act(start, end, acts):
    control = Control(np.zeros((1, 1, 3), np.uint8), 0.5, start, end)
    np.testing.assert_array_equal(control.scales(5), [0.5 * int(each) for each in acts])
    with pytest.raises(ConfigError, match="the end is after the start"):
        replace(control, start=1.0)


def test_control_images_have_the_crops_of_their_images(folder, encoders):
    config = parse(unet.UnetConfig, UNET)
    # The images themselves are the control images, so both come to the same pixels.
    section = data(
        folder,
        encoders,
        buckets={"step_pixels": 4, "max_ratio": 2.0},
        controls={"folder": str(folder / "images")},
    )
    batches = section.build(seed=0, model=config)
    iterator, spec = batches.train_iterator(), section.spec(config)
    assert spec["control"].shape == (4, 16, 16, 3) and spec["control"].dtype == np.uint8
    found = {batch["images"].shape: batch for batch in (next(iterator) for _ in range(4))}
    assert found.keys() == {(4, 8, 8, 4), (4, 6, 10, 4)}
    assert {each["control"].shape for each in batches.batch_shapes} == {(4, 16, 16, 3), (4, 12, 20, 3)}
    for batch in found.values():
        for name, control in zip(batches.describe_rows(batch["row_ids"]), batch["control"], strict=True):
            with Image.open(name.split(": ")[0]) as image:
                np.testing.assert_array_equal(np.asarray(image), control)


def test_control_images_that_are_missing_or_do_not_fit_are_named(folder, encoders, tmp_path):
    config = parse(unet.UnetConfig, UNET)
    with pytest.raises(ConfigError, match=r"pixels_per_latent is 8, and the autoencoder .* Set it to 2"):
        data(folder, encoders, controls={"pixels_per_latent": 8}).build(seed=0, model=config)
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "edges" / "a" / "3.png").unlink()
    with pytest.raises(DataError, match=r"1 images have no control image(.|\n)*3.png"):
        data(tmp_path / "copy", encoders).build(seed=0, model=config)
    Image.new("RGB", (16, 30)).save(tmp_path / "copy" / "edges" / "a" / "3.jpg")
    with pytest.raises(DataError, match=r"another ratio of .*\n.*3.png \(20x12, control image 16x30\)"):
        data(tmp_path / "copy", encoders).build(seed=0, model=config)
    with pytest.raises(ConfigError, match="for ControlNets of family unet, not 'flux'"):
        flux_config(tmp_path, folder, encoders, steps=1, model={}, data={"controls": {"folder": "x"}}).data.check(
            flux_config(tmp_path, folder, encoders, steps=1, model={}, data={}).model
        )


def runs(root, folder, encoders, *, steps):
    """Returns the run of a UNet, and the run of a ControlNet that starts from it."""
    options = {
        "model": UNET,
        "objective": {"name": "epsilon", "noise": BETAS},
        "optimizer": {"name": "adamw", "learning_rate": 3e-3, "ema_decay": 0.9},
    }
    source = f"{folder}/images"
    base = {"batch_size": 4, "validation_fraction": 0.0, "source": f"{source}/**/*.png"}
    controls = {"folder": f"{folder}/edges", "pixels_per_latent": 2}
    first = flux_config(root / "base", source, encoders, steps=steps, data=base, **options)
    second = flux_config(
        root / "control",
        source,
        encoders,
        steps=steps,
        data={**base, "controls": controls},
        checkpoint={"every_steps": steps // 2, "keep": 3},
        controlnet=SECTION,
        **options,
    )
    return first, replace(second, run=replace(second.run, init_from=str(root / "base")))


def test_a_controlnet_needs_the_weights_of_a_unet_and_trains_without_other_sections(
    folder, encoders, tmp_path, monkeypatch
):
    _, run = runs(tmp_path, folder, encoders, steps=2)
    check_sections(run)
    with pytest.raises(ConfigError, match=r"whose weights come from run\.init_from"):
        check_sections(replace(run, run=replace(run.run, init_from=None)))
    monkeypatch.setattr("stack_train.run.program.transform_names", lambda _: ("controlnet", "lora"))
    with pytest.raises(ConfigError, match="leave the sections lora out"):
        build_program(run)


@pytest.mark.slow
def test_a_run_trains_a_controlnet_resumes_is_exported_and_sampled(folder, encoders, tmp_path):
    base, steered = runs(tmp_path, folder, encoders, steps=4)
    train(base)
    train(steered)
    before, after = (read_model(Path(run.output), run)[0] for run in (base, steered))
    own, others = (dict(nnx.to_flat_state(nnx.state(model))) for model in (before, after))
    for path, variable in own.items():
        np.testing.assert_array_equal(variable.get_value(), others[path].get_value(), err_msg=str(path))
    assert np.abs(after.control.controlnet_mid_block.kernel[...]).max() > 0
    with CheckpointStore(RunDirectory(Path(steered.output)).checkpoints) as store:
        manifest = json.loads(next(store.path(4).glob("*.json")).read_text())
    assert "control" in json.dumps(manifest) and "up_blocks" not in json.dumps(manifest)
    shutil.copytree(steered.output, tmp_path / "copy")
    shutil.rmtree(next((tmp_path / "copy" / "checkpoints").glob("*4")))
    train(replace(steered, output=str(tmp_path / "copy")), resume=True)
    again = read_model(tmp_path / "copy", replace(steered, output=str(tmp_path / "copy")))[0]
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again.control), nnx.state(after.control))
    # The run samples, and so does its ControlNet with the exported UNet.
    FORMAT.export_run(tmp_path / "base", tmp_path / "pipeline")
    FORMAT.export_run(tmp_path / "control", tmp_path / "controlnet")
    edges = Image.open(folder / "edges" / "a" / "0.png")
    control = Control(np.asarray(edges.convert("RGB")))
    opened = open_images(steered.output)
    sampler = opened.sampler.changed({"steps": 2, "guidance": 2.0})
    other = open_images(f"hf:{tmp_path / 'pipeline'}", controlnet=tmp_path / "controlnet")
    images = opened.images_of(["at 1 2"], sampler, control=control)
    exported = replace(other, sampler=opened.sampler).images_of(["at 1 2"], sampler, control=control)
    np.testing.assert_array_equal(images, exported)
    with pytest.raises(GenerationError, match=r"has a ControlNet. Give a control image"):
        opened.images_of(["at 1 2"], sampler)
    with pytest.raises(GenerationError, match="reads no control image"):
        open_images(base.output).images_of(["at 1 2"], sampler, control=control)
    with pytest.raises(GenerationError, match="The control is 16x16 pixels; images of 20x12 are made"):
        opened.resized((12, 20)).images_of(["at 1 2"], sampler, control=control)
    with pytest.raises(GenerationError, match="whose control image requests do not have"):
        DiffusionModel(opened, "steered")
    with pytest.raises(ConfigError, match="ControlNets are added to diffusers directories"):
        open_images(base.output, controlnet=tmp_path / "controlnet")
    with pytest.raises(ConversionError, match="is not a directory of a ControlNet"):
        open_images(f"hf:{tmp_path / 'pipeline'}", controlnet=tmp_path / "pipeline")
    arguments = {"prompt": ("at 1 2",), "control": folder / "edges" / "a" / "1.png", "steps": 2}
    sample(f"hf:{tmp_path / 'pipeline'}", controlnet=tmp_path / "controlnet", out=tmp_path / "a.png", **arguments)
    with pytest.raises(ConfigError, match=r"belong to a control image. Give --control"):
        sample(steered.output, prompt=("at 1 2",), control_scale=0.5)
