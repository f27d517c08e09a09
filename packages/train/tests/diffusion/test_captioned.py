"""Text-to-image runs on captioned pictures: the whole way from a folder to images of new captions."""

import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, ConversionError, DataError, GenerationError
from stack_core.abi.run_directory import RunDirectory
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.commands.sample import sample
from stack_train.data import encoded_images
from stack_train.data.captions import captions_of
from stack_train.diffusion import autoencoder_kl, dit
from stack_train.diffusion.components import StoredComponent, load_component
from stack_train.diffusion.pipeline import open_encoders, save_encoders
from stack_train.diffusion.samplers import SamplerConfig
from stack_train.diffusion.sampling import open_images
from stack_train.huggingface import FORMAT
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program
from stack_train.run.train import train

from . import shapes

FLOATS = {"dtype": "float32", "param_dtype": "float32"}
AUTOENCODER = {"image_size": shapes.SIZE, "blocks_per_level": 1, "groups": 4, "attends": False, **FLOATS}
FLUX = {"name": "flux", "image_size": 8, "channels": 4, "guidance": None, "text_dim": 32, "pooled_dim": 32, **FLOATS}


def flux_config(output, folder, pipeline, *, steps, model, **sections):
    return parse(
        RunConfig,
        {
            "output": str(output),
            "model": model if "name" in model else {**FLUX, "text_tokens": 6, **model},
            "data": {"name": "captioned", "source": f"{folder}/*.png", "pipeline": str(pipeline)}
            | sections.pop("data"),
            "run": {"steps": steps},
            "objective": {"name": "flow_matching"},
            **sections,
        },
    )


TINY = {"double_layers": 1, "single_layers": 1, "heads": 2, "head_dim": 16, "rope_axes": [4, 6, 6]}
UNET = {"name": "unet", "image_size": 8, "channels": 4, "text_tokens": 6, "groups": 4, **FLOATS}
TINY_UNET = {"widths": [8, 8], "blocks_per_level": 1, "transformer_layers": [1, 0], "heads": [2, 2], **UNET}
FAMILIES = {
    "StableDiffusionPipeline": {**TINY_UNET, "text_dim": 32},
    "StableDiffusionXLPipeline": {**TINY_UNET, "text_dim": 64, "pooled_dim": 32, "size_features": 4}
    | {"zero_unconditional": True, "linear_projections": True},
    "StableDiffusion3Pipeline": {"name": "sd3", "image_size": 8, "channels": 4, "layers": 3, "dual_layers": 1}
    | {"heads": 2, "head_dim": 16, "text_dim": 64, "pooled_dim": 64, "text_tokens": 12, "max_patches": 6, **FLOATS},
}
BETAS = {"betas": "scaled_linear", "beta_start": 8.5e-4, "beta_end": 0.012}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("shapes") / "images"
    shapes.write_images(root, 24)
    return root


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """Encoders with random weights, on disk."""
    config = autoencoder_kl.AutoencoderKlConfig(widths=(4, 8), scaling_factor=2.0, **AUTOENCODER)
    model = autoencoder_kl.FAMILY.build(config, key=jax.random.key(0))
    directory = tmp_path_factory.mktemp("pipeline") / "encoders"
    save_encoders(directory, shapes.encoders(directory, model))
    return directory


def saved_encoders(directory, name, autoencoder, **settings):
    """Writes the encoders of a pipeline; returns their directory."""
    save_encoders(directory, shapes.encoders(directory, autoencoder, name=name, **settings))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_is_exported_and_samples_other_shapes(name, folder, tmp_path):
    flows = name == "StableDiffusion3Pipeline"
    config = autoencoder_kl.AutoencoderKlConfig(widths=(4, 8), scaling_factor=2.0, **AUTOENCODER)
    encoders = saved_encoders(tmp_path / "encoders", name, autoencoder_kl.FAMILY.build(config, key=jax.random.key(0)))
    run = flux_config(
        tmp_path / "run",
        folder,
        encoders,
        steps=2,
        model=FAMILIES[name],
        data={"batch_size": 4, "validation_fraction": 0.0},
        objective={"name": "flow_matching"} if flows else {"name": "epsilon", "noise": BETAS},
    )
    batch = next(run.data.build(seed=0, model=run.model).train_iterator())
    spec = run.data.spec(run.model)
    assert {key: (array.shape, array.dtype) for key, array in batch.items() if key != "row_ids"} == {
        key: (each.shape, each.dtype) for key, each in spec.items()
    }
    assert ("negative_text" in batch) == (name != "StableDiffusionXLPipeline")
    assert ("negative_pooled" in batch) == flows
    train(run)
    FORMAT.export_run(tmp_path / "run", tmp_path / "pipeline")
    FORMAT.import_run(tmp_path / "pipeline", tmp_path / "again")
    opened = open_images(f"hf:{tmp_path / 'pipeline'}", size=(12, 20))
    assert opened.sampler.guidance > 1.0 and opened.sampler.spacing == ("linspace" if flows else "leading")
    sampler = opened.sampler.changed({"steps": 2})
    images = opened.images_of(["a red ring"], sampler)
    assert images.shape == (1, 12, 20, 3) and images.std() > 0
    plain, other = (opened.condition(["a red ring"], sampler, negative=negative) for negative in (None, ["a blue bar"]))
    assert np.abs(other["negative_text"] - plain.get("negative_text", 0.0)).max() > 0
    again = open_images(str(tmp_path / "again"), size=(12, 20))
    np.testing.assert_array_equal(again.images_of(["a red ring"], sampler), images)
    with pytest.raises(GenerationError, match="act through guidance, which is 1"):
        opened.images_of(["a red ring"], sampler.changed({"guidance": 1.0}), negative=["a blue bar"])
    wrong = "leave none for T5" if flows else "encoders of a Stable.*, whose denoiser is of family unet, not flux"
    with pytest.raises(ConversionError, match=wrong):
        train(tiny(tmp_path / "flux", folder, encoders))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scheduler"),
    [("StableDiffusionPipeline", "LCMScheduler"), ("StableDiffusion3Pipeline", "FlowMatchLCMScheduler")],
)
def test_a_distilled_run_is_exported_with_the_scheduler_of_lcm(name, scheduler, folder, tmp_path):
    config = autoencoder_kl.AutoencoderKlConfig(widths=(4, 8), scaling_factor=2.0, **AUTOENCODER)
    encoders = saved_encoders(tmp_path / "encoders", name, autoencoder_kl.FAMILY.build(config, key=jax.random.key(0)))
    flows = name == "StableDiffusion3Pipeline"
    denoising = {"name": "flow_matching"} if flows else {"name": "epsilon", "noise": BETAS}
    common = {"steps": 1, "model": FAMILIES[name], "data": {"batch_size": 4, "validation_fraction": 0.0}}
    train(flux_config(tmp_path / "start", folder, encoders, **common, objective=denoising))
    objective = {"name": "consistency_distill", "denoising": denoising, "guidance": 2.0, "solver_steps": 25}
    student = flux_config(tmp_path / "run", folder, encoders, **common, objective=objective)
    train(replace(student, run=replace(student.run, init_from=str(tmp_path / "start"))))
    FORMAT.export_run(tmp_path / "run", tmp_path / "pipeline")
    written = json.loads((tmp_path / "pipeline" / "scheduler" / "scheduler_config.json").read_text())
    assert written["_class_name"] == scheduler and written.get("original_inference_steps", 25) == 25
    assert json.loads((tmp_path / "pipeline" / "model_index.json").read_text())["scheduler"] == ["diffusers", scheduler]
    own, opened = open_images(str(tmp_path / "run")), open_images(f"hf:{tmp_path / 'pipeline'}")
    assert opened.sampler.name == own.sampler.name == "lcm" and opened.sampler.steps == own.sampler.steps == 4
    assert opened.sampler.guidance == 1.0
    # Pipelines of Stable Diffusion 3 end at the lowest time.
    images = own.images_of(["a red ring"], replace(own.sampler, spacing="linspace" if flows else None))
    np.testing.assert_array_equal(opened.images_of(["a red ring"], opened.sampler), images)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def tiny(output, folder, pipeline, **fields):
    data = {"batch_size": 4, "validation_fraction": 0.0, **fields}
    return flux_config(
        output, folder, pipeline, steps=4, model=TINY, data=data, checkpoint={"every_steps": 2, "keep": 3}
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory, folder, pipeline):
    config = tiny(tmp_path_factory.mktemp("runs") / "run", folder, pipeline)
    train(config)
    return config


def leaves(output, config):
    program = build_program(config)
    with CheckpointStore(RunDirectory(Path(output)).checkpoints) as store:
        state = store.restore(program.abstract_state).state
    state = replace(state, key=jax.random.key_data(state.key))
    return {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}


@pytest.mark.slow
def test_a_run_resumes_bit_by_bit_with_the_moments_of_adam(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run.output, copy)
    (last,) = [path for path in (copy / "checkpoints").iterdir() if path.name.endswith("4")]
    shutil.rmtree(last)
    train(replace(run, output=str(copy)), resume=True)
    straight, resumed = leaves(run.output, run), leaves(copy, replace(run, output=str(copy)))
    moments = [name for name in straight if "/mu/" in name or "/nu/" in name]
    assert moments and any(np.any(straight[name]) for name in moments)
    assert straight.keys() == resumed.keys()
    for name, leaf in straight.items():
        np.testing.assert_array_equal(leaf, resumed[name], err_msg=name)


def test_captions_and_latents_are_encoded_once_and_are_those_of_the_encoders(run, folder, pipeline, monkeypatch):
    batches = run.data.build(seed=0, model=run.model)
    monkeypatch.setattr("stack_train.data.encoded_cache._write", None)  # the cache is read again
    read, reads = StoredComponent.read, []
    monkeypatch.setattr(StoredComponent, "read", lambda self: reads.append(self.component.class_name) or read(self))
    batch = next(run.data.build(seed=0, model=run.model).train_iterator())
    spec = run.data.spec(run.model)
    assert {name: (array.shape, array.dtype) for name, array in batch.items() if name != "row_ids"} == {
        name: (each.shape, each.dtype) for name, each in spec.items()
    }
    name, caption = batches.describe_rows(batch["row_ids"])[0].split(": ", 1)
    encoders = open_encoders(pipeline, text_tokens=6)
    with Image.open(name) as image:
        pixels = np.asarray(image, np.float32)[None] / 127.5 - 1.0
    np.testing.assert_allclose(batch["images"][:1], encoders.autoencoder.scaled_latents(jnp.asarray(pixels)), atol=1e-5)
    assert reads == ["AutoencoderKL"] * 2  # no text encoder while all captions are in the cache
    np.testing.assert_allclose(batch["text"][:1], encoders.text([caption.strip("'")])["text"], atol=1e-5)
    assert reads[2:] == ["CLIPTextModel", "T5EncoderModel"]


@pytest.mark.slow
def test_a_run_becomes_a_directory_of_diffusers_and_a_run_again(run, tmp_path):
    config = SamplerConfig(steps=2)
    images = open_images(run.output).images_of(["a red ring", "a blue bar"], config)
    assert images.shape == (2, 16, 16, 3) and images.std() > 0
    FORMAT.export_run(Path(run.output), tmp_path / "pipeline")
    assert json.loads((tmp_path / "pipeline" / "model_index.json").read_text())["vae"][1] == "AutoencoderKL"
    FORMAT.import_run(tmp_path / "pipeline", tmp_path / "again")
    again = open_images(str(tmp_path / "again"))
    prompts = [open_images(each).encoders.text(["a red ring"]) for each in (run.output, f"hf:{tmp_path / 'pipeline'}")]
    jax.tree.map(np.testing.assert_array_equal, prompts[1], again.encoders.text(["a red ring"]))
    jax.tree.map(np.testing.assert_array_equal, *prompts)  # the model is told as many tokens as it was trained with
    before, after = open_images(run.output).model, again.model
    for ours, theirs in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_the_command_samples_prompts(run, tmp_path):
    sample(run.output, prompt=("a red ring", "a blue bar"), out=tmp_path / "two.png", steps=2)
    with Image.open(tmp_path / "two.png") as image:
        assert image.size == (2 * 65 - 1, 64)
    with pytest.warns(UserWarning, match=r"text_encoder.* reads 6 tokens(.|\n)*cut off: 'a green square'"):
        sample(run.output, prompt=("a red ring a blue a green square",), out=tmp_path / "cut.png", steps=1)
    sample(run.output, prompt=("a red ring",), out=tmp_path / "large.png", steps=1, size="48x32")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"label": (1,), "prompt": ("a",)}, ConfigError, "not both"),
        ({"prompt": ("a",), "size": "18"}, ConfigError, "multiple of 4"),
        ({"prompt": ("a",), "embedded_guidance": 2.0}, GenerationError, "takes no guidance as an input"),
        ({"label": (1,)}, GenerationError, "takes prompts: give --prompt"),
        ({"prompt": ("a",), "spacing": "trailing"}, ConfigError, "by flow matching, .* Leave it out"),
        ({"prompt": ("a",), "mask": Path("mask.png")}, ConfigError, "Give --image"),
        ({"prompt": ("a",), "image": Path("none.png")}, DataError, "none.png cannot be read as an image"),
        ({"prompt": ("a",), "strength": 0.5}, GenerationError, "Give an image"),
        ({"prompt": ("a",), "lora": ("a.safetensors",)}, ConfigError, "merged into diffusers directories"),
        ({"prompt": ("a",), "lora": ("a.safetensors=much",)}, ConfigError, "expected FILE or FILE=SCALE"),
        ({"prompt": ("a",), "size": "8x"}, ConfigError, "WIDTHxHEIGHT"),
        ({"prompt": ("a",), "tile_pixels": 20}, ConfigError, "multiples of 8 pixels. Take 16 or 24"),
        ({"prompt": ("a",), "denoiser": "gguf:a.gguf"}, ConfigError, "replaced in diffusers directories"),
    ],
)
def test_what_cannot_be_sampled_is_refused(run, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        sample(run.output, out=tmp_path / "none.png", **options)


def edited(pipeline, part, **changes):
    path = pipeline / part / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_encoders_that_do_not_fit_are_refused(run, folder, pipeline, tmp_path):
    copy = tmp_path / "encoders"
    shutil.copytree(pipeline, copy)
    edited(copy, "vae", scaling_factor=200.0)
    with pytest.raises(DataError, match=r"standard deviation of .*(\n|.)*Set scaling_factor in vae/config.json to"):
        train(tiny(tmp_path / "run", folder, copy))
    with pytest.raises(ConversionError, match="its channels is 3, and vae gives 4; its text_dim is 16"):
        config = tiny(tmp_path / "run", folder, pipeline)
        train(replace(config, model=replace(config.model, channels=3, text_dim=16)))
    shutil.rmtree(copy / "text_encoder_2")
    with pytest.raises(ConversionError, match="lacks text_encoder_2"):
        train(tiny(tmp_path / "run", folder, copy))
    moved = tmp_path / "moved"
    shutil.copytree(run.output, moved)
    facts = json.loads((moved / "encoders.json").read_text())
    (moved / "encoders.json").write_text(json.dumps({**facts, "scaling_factor": 1.0}))
    with pytest.raises(DataError, match=r"scaling_factor 2.0, not 1.0"):
        open_images(str(moved))


def test_captions_that_are_missing_or_malformed_are_named(folder, pipeline, tmp_path):
    copy = tmp_path / "images"
    shutil.copytree(folder, copy)
    (copy / "0001.txt").unlink()
    with pytest.raises(DataError, match=r"1 of 24 images have no caption:(.|\n)*0001.png"):
        train(tiny(tmp_path / "run", copy, pipeline))
    (copy / "metadata.jsonl").write_text('{"file_name": "0001.png", "text": "a\u2028b"}\n', encoding="utf-8")
    assert captions_of([str(copy / "0001.png")])[0].texts == ("a\u2028b",)
    (copy / "metadata.jsonl").write_text('{"file": "0000.png"}\n')
    with pytest.raises(DataError, match=r"Line 1 of .*metadata.jsonl"):
        train(tiny(tmp_path / "run", copy, pipeline))


def test_weighted_captions_of_a_shard_are_encoded_once_and_chosen_by_row(folder, pipeline, tmp_path, monkeypatch):
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for image in sorted(folder.glob("*.png"))[:8]:
            archive.add(image, image.name)
            record = {"text": [f"a {image.stem}", "a red ring"], "weights": [1, 3]}
            (tmp_path / "record.json").write_text(json.dumps(record))
            archive.add(tmp_path / "record.json", f"{image.stem}.json")
    encoded, encode_texts = [], encoded_images.encode_texts

    def counted(encoders, captions, *rest):
        encoded.append(list(captions))
        return encode_texts(encoders, captions, *rest)

    monkeypatch.setattr("stack_train.data.kinds.captioned.encode_texts", counted)
    config = tiny(tmp_path / "run", folder, pipeline, source=f"tar:{tmp_path}/shard.tar", caption_field="json.text")
    batches = config.data.build(seed=0, model=config.model)
    assert sorted(encoded[0]) == sorted([*(f"a {number:04}" for number in range(8)), "a red ring"])
    iterator = batches.train_iterator()
    found = [next(iterator) for _ in range(8)]
    again = config.data.build(seed=0, model=config.model).train_iterator()
    again.set_state({**iterator.get_state()})
    encoders = open_encoders(pipeline, text_tokens=6)
    common = np.asarray(encoders.text(["a red ring"])["text"][0])
    shared = [np.allclose(text, common, atol=1e-5) for batch in found for text in batch["text"]]
    assert 0.36 < np.mean(shared) < 1.0  # 3/4 of 32 rows, within five standard deviations of 0.077
    np.testing.assert_array_equal(next(again)["text"], next(iterator)["text"])
    assert "'a 0000' (0.25), 'a red ring' (0.75)" in " ".join(batches.describe_rows(np.arange(8)))


def test_a_model_without_texts_is_refused():
    with pytest.raises(ConfigError, match="not for family 'dit'"):
        parse(
            RunConfig,
            {"output": "none", "model": {"name": "dit"}, "data": {"name": "captioned", "source": "", "pipeline": ""}},
        ).data.check(parse(RunConfig, {"output": "none", "model": {"name": "dit"}}).model)


@pytest.mark.slow
def test_an_autoencoder_trains_and_is_written_with_the_scale_of_its_latents(folder, tmp_path):
    mapping = {
        "output": str(tmp_path / "run"),
        "model": {"name": "autoencoder_kl", "widths": [4, 8], **AUTOENCODER},
        "data": {"name": "images", "source": f"{folder}/*.png", "batch_size": 8, "validation_fraction": 0.3},
        "objective": {"name": "reconstruction", "kl_weight": 1e-4},
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "run": {"steps": 8},
    }
    config = parse(RunConfig, mapping)
    train(config)
    FORMAT.export_run(tmp_path / "run", tmp_path / "vae")
    written, model = load_component(autoencoder_kl.COMPONENT, tmp_path / "vae")
    (batch,) = config.data.build(seed=0, model=config.model).validation_batches()
    latents = model.scaled_latents(jnp.asarray(batch["images"][batch["weights"] > 0]))
    assert float(jnp.std(latents)) == pytest.approx(1.0, abs=1e-3) and written.scaling_factor != 0.18215
    FORMAT.import_run(tmp_path / "vae", tmp_path / "again")
    with pytest.raises(ConfigError, match="trains autoencoders, not a Dit"):
        train(replace(config, model=dit.DitConfig(image_size=16, channels=3, classes=0), output=str(tmp_path / "dit")))


@pytest.mark.slow  # about ten minutes on two cores
def test_shapes_and_colours_of_captions_that_no_image_had(tmp_path):
    folder = tmp_path / "images"
    shapes.write_images(folder, 1500)
    autoencoder = parse(
        RunConfig,
        {
            "output": str(tmp_path / "autoencoder"),
            "model": {"name": "autoencoder_kl", "widths": [16, 32], **AUTOENCODER},
            "data": {"name": "images", "source": f"{folder}/*.png", "batch_size": 32},
            "objective": {"name": "reconstruction", "kl_weight": 1e-4},
            "optimizer": {"name": "adamw", "learning_rate": 2e-3, "weight_decay": 0.0},
            "run": {"steps": 800},
        },
    )
    train(autoencoder)
    FORMAT.export_run(tmp_path / "autoencoder", tmp_path / "vae")
    vae = load_component(autoencoder_kl.COMPONENT, tmp_path / "vae")[1]
    encoders = saved_encoders(tmp_path / "encoders", "FluxPipeline", vae)
    config = flux_config(
        tmp_path / "run",
        folder,
        encoders,
        steps=3000,
        model={**TINY, "double_layers": 2, "single_layers": 2, "heads": 4},
        data={"batch_size": 64},
        optimizer={
            "name": "adamw",
            "learning_rate": 2e-3,
            "weight_decay": 0.0,
            "ema_decay": 0.995,
            "schedule": {"warmup_steps": 100, "decay": "cosine", "final_fraction": 0.01},
        },
    )
    train(config)
    FORMAT.export_run(tmp_path / "run", tmp_path / "pipeline")
    read = shapes.Reader(*shapes.drawn_of_each_pair(40))
    asked = [pair for pair in shapes.HELD_OUT for _ in range(20)]
    opened = open_images(f"hf:{tmp_path / 'pipeline'}")
    images = opened.images_of([shapes.caption(*pair) for pair in asked], SamplerConfig(steps=20, guidance=2.0))
    found = read(images)
    right = np.mean([one == other for one, other in zip(found, asked, strict=True)])
    assert right >= 0.8, (right, list(zip(asked, found, strict=True)))
