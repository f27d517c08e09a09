"""Image-text models: from a folder of captioned images to classes by name, and what is refused on the way."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import stack_train
from stack_core.abi.config import parse
from stack_core.abi.errors import ArgumentError, ConfigError, ConversionError, DataError, ShapeError, ShardingError
from stack_core.abi.mesh import DEFAULT_RULES, in_mesh
from stack_core.abi.plugins import registries
from stack_train.checkpoint import named_leaves
from stack_train.contrastive.loading import load_image_text
from stack_train.contrastive.objectives import SigmoidContrastiveConfig, SoftmaxContrastiveConfig
from stack_train.diffusion.image_rewards import open_image_reward, score_images
from stack_train.huggingface import FORMAT
from stack_train.huggingface.source import read_config
from stack_train.optim import OuterConfig, SgdConfig
from stack_train.panels.records import records
from stack_train.run.checks import check_sections
from stack_train.run.config import RunConfig
from stack_train.run.model import abstract_params
from stack_train.run.train import train
from stack_train.step.step import make_step
from stack_train.variables.weights import read_params, run_config

from ..diffusion import shapes

PUBLISHED = Path(__file__).parent / "published" / "clip-vit-base-patch32.json"
TOWER = {"embed": 32, "heads": 2, "mlp": 48, "layers": 1}
MODEL = {
    "name": "siglip",
    "dtype": "float32",
    "initializer_std": 0.15,
    "vision": {**TOWER, "image_size": shapes.SIZE, "patch": 8},
    "text": {**TOWER, "vocab_size": 20, "max_positions": 3},
}
CLIP = {**MODEL, "name": "clip", "features": 20, "text": {**MODEL["text"], "end": 1}}
BATCH, IMAGES, STEPS = 6, 96, 160
END = 1  # the end token of `shapes.word_tokenizer`


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures whose captions name the color, half of them in `metadata.jsonl`, and a tokenizer."""
    root = tmp_path_factory.mktemp("pictures")
    shapes.word_tokenizer().save(root / "tokenizer")
    rng, lines = np.random.default_rng(0), []
    for number in range(IMAGES):
        color = list(shapes.COLOURS)[number % len(shapes.COLOURS)]
        picture = shapes.drawn(color, shapes.SHAPES[number % 5], rng)
        Image.fromarray(picture).save(root / f"{number:03}.png")
        if number % 2:
            (root / f"{number:03}.txt").write_text(f"a {color}\n")
        else:
            lines.append(json.dumps({"file_name": f"{number:03}.png", "text": f"a {color}"}))
    (root / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return root


def mapping_of(output, folder, *, model=MODEL, data=None, **sections):
    text = {"source": f"{folder}/*.png", "tokenizer": str(folder / "tokenizer"), "batch_size": BATCH}
    rate = {"name": "adamw", "learning_rate": 5e-3, "weight_decay": 0.0}
    return {
        "output": str(output),
        "model": model,
        "data": {"name": "image_texts", **text, "validation_fraction": 0.25, **(data or {})},
        "objective": {"name": "sigmoid_contrastive"},
        "optimizer": {**rate, "schedule": {"warmup_steps": 5, "decay": "linear"}},
        "checkpoint": {"every_steps": STEPS // 2},
        **sections,
    }


def run_of(*arguments, **sections):
    return parse(RunConfig, mapping_of(*arguments, **sections))


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "colors"
    return train(run_of(output, folder, run={"steps": STEPS, "evaluate_every_steps": STEPS // 2}))


def test_held_out_images_are_matched_with_their_texts(trained):
    assert all(value >= 0.95 for value in trained.validation_metrics.values()), trained
    assert set(trained.validation_metrics) == {"image_recall", "text_recall"}
    found = [each for each in records(trained.directory / "metrics.jsonl") if each["kind"] == "evaluation"]
    assert len(found) == 2 and found[0]["loss"] > found[1]["loss"]


def test_a_resumed_run_ends_with_the_same_parameters(trained, folder, tmp_path):
    shutil.copytree(trained.directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"{STEPS:08}")
    config = run_of(tmp_path / "run", folder, run={"steps": STEPS, "evaluate_every_steps": STEPS // 2})
    train(config, resume=True)
    first, second = (named_leaves(read_params(each, config.model)[0]) for each in (trained.directory, tmp_path / "run"))
    assert first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def test_images_are_classified_by_names_and_so_are_those_of_an_export(trained, folder, tmp_path):
    model = load_image_text(trained.directory)
    rng, colors = np.random.default_rng(9), list(shapes.COLOURS)
    images = [shapes.drawn(color, "square", rng) for color in colors]
    found = model.classify(images, colors, template="a {}")
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)
    assert np.argmax(found, 1).tolist() == list(range(len(colors)))
    # Paths, bytes and images of Pillow are read alike.
    path = folder / "000.png"
    features = model.image_features([path, str(path), path.read_bytes(), Image.open(path)])
    np.testing.assert_array_equal(features, features[:1].repeat(4, 0))
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1, rtol=1e-5)
    FORMAT.export_run(trained.directory, tmp_path / "hf")
    exported = load_image_text(f"hf:{tmp_path / 'hf'}")
    np.testing.assert_allclose(exported.classify(images, colors, template="a {}"), found, atol=1e-6)
    assert "family 'siglip'" in repr(exported)


def test_the_similarity_of_image_and_prompt_is_a_reward(trained):
    reward, rng = open_image_reward(f"run:{trained.directory}"), np.random.default_rng(9)
    colors = list(shapes.COLOURS)
    images = np.stack([shapes.drawn(color, "square", rng) for color in colors])
    prompts = [f"a {color}" for color in colors]
    others = prompts[1:] + prompts[:1]
    matching, different = (score_images(reward, images, each, name="reward") for each in (prompts, others))
    assert (matching > different).all() and np.abs([matching, different]).max() <= 1.0 + 1e-6
    model = load_image_text(trained.directory)
    expected = np.diag(model.image_features(list(images)) @ model.text_features(prompts).T)
    np.testing.assert_allclose(matching, expected, atol=1e-6)
    grey = images.mean(-1, keepdims=True).astype(np.uint8)
    np.testing.assert_allclose(reward(grey, prompts), reward(np.repeat(grey, 3, axis=-1), prompts), atol=1e-6)


def test_bad_images_and_texts_are_named(trained, tmp_path):
    model = load_image_text(trained.directory)
    with pytest.raises(DataError, match=r"text 'a red red' has 4|that of text 'a red red' has 4"):
        model.text_features(["a red red"])
    with pytest.raises(ArgumentError, match="a list of one or more strings"):
        model.text_features("a red")
    with pytest.raises(ArgumentError, match=r"without \{\}"):
        model.classify([], ["red"], template="a")
    with pytest.raises(ArgumentError, match="no images"):
        model.image_features([])
    with pytest.raises(DataError, match=r"none\.png cannot be read"):
        model.image_features([tmp_path / "none.png"])
    with pytest.raises(DataError, match="not an image that Pillow reads"):
        model.image_features([b"text"])
    with pytest.raises(DataError, match="has no tokenizer"):
        replace(model, tokenizer=None).text_features(["a red"])


def test_every_held_out_pair_counts_once_among_a_whole_batch(folder):
    size = 7
    config = run_of("none", folder, data={"batch_size": size})
    data = config.batches.build(seed=0, model=config.model)
    batches, count = list(data.validation_batches()), len(data.validation)
    assert count % size, "the last batch is to be filled"
    assert sum(batch["weights"].sum() for batch in batches) == count
    for batch in batches:
        assert batch["present"].all() and len(batch["pixels"]) == size
        # No pair twice, which would be a wrong text for itself.
        assert len({pixels.tobytes() for pixels in batch["pixels"]}) == size
    # Fewer pairs than a batch leave rows without a pair.
    config = run_of("none", folder, data={"batch_size": size, "validation_fraction": 0.04})
    (batch,) = config.batches.build(seed=0, model=config.model).validation_batches()
    held_out = int(batch["present"].sum())
    assert 0 < held_out < size and batch["weights"].tolist() == batch["present"].tolist()


@pytest.mark.parametrize(
    "objective", [SoftmaxContrastiveConfig(), SigmoidContrastiveConfig()], ids=lambda each: each.name
)
def test_rows_without_a_pair_change_nothing(objective):
    rng = np.random.default_rng(0)
    images, texts = (jnp.array(rng.normal(size=(5, 4)), jnp.float32) for _ in range(2))
    present, scale, bias = jnp.array([1.0, 1.0, 1.0, 0.0, 0.0]), jnp.float32(2.0), jnp.float32(-1.0)
    found = objective.compare(images, texts, present, scale, bias)
    expected = objective.compare(images[:3], texts[:3], present[:3], scale, bias)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one[:3], other, rtol=1e-6)
    logits = np.asarray(2 * images[:3] @ texts[:3].T - 1)
    assert expected[1].tolist() == logits.argmax(1).tolist() and expected[2].tolist() == logits.argmax(0).tolist()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data": {"batch_size": 1}}, r"data\.batch_size is 1, and each image is compared"),
        ({"run": {"accumulation_steps": 2}}, "which microbatches would separate"),
        ({"model": {"name": "llama"}}, "for image-text models, not for family 'llama'"),
        ({"objective": {"name": "causal_lm"}}, "reads 'targets' of a batch"),
        ({"model": {**MODEL, "vision": {**MODEL["vision"], "channels": 4}}}, "channels is 4; image files have 1 or 3"),
    ],
)
def test_sections_that_contradict_each_other_are_refused(changes, problem, folder):
    with pytest.raises(ConfigError, match=problem):
        check_sections(run_of("none", folder, **changes))


def test_replicas_that_train_apart_are_refused():
    config = parse(registries.models["siglip"].config_class, MODEL)
    optimizer = SgdConfig(outer=OuterConfig(replicas=2, every_steps=1))
    with pytest.raises(ConfigError, match="compares the rows of a whole batch"):
        make_step(config, SigmoidContrastiveConfig(), optimizer)


@pytest.mark.parametrize(
    ("model", "data", "error", "problem"),
    [
        ({"max_positions": 2}, {}, DataError, r"96 of 96 texts are longer than the 2 tokens.*000\.png has 3"),
        ({"max_positions": 2}, {"too_long": "drop"}, DataError, "None of 96 texts fits"),
        ({"vocab_size": 8}, {}, ConfigError, r"tokenizer has 20 tokens, but model\.text\.vocab_size is 8"),
        ({"end": 7}, {}, DataError, r"000\.png have no token 7 \(model\.text\.end\)"),
        ({}, {"batch_size": 90}, DataError, "fewer than data.batch_size=90"),
        ({}, {"tokenizer": None}, ConfigError, "needs a tokenizer"),
    ],
)
def test_texts_that_do_not_fit_are_refused(model, data, error, problem, folder):
    base = CLIP if "end" in model else MODEL
    config = run_of("none", folder, model={**base, "text": {**base["text"], **model}}, data=data)
    with pytest.raises(error, match=problem):
        config.batches.build(seed=0, model=config.model)


def test_cut_texts_keep_their_end_and_an_image_without_caption_is_named(folder, tmp_path):
    config = run_of(
        "none", folder, model={**CLIP, "text": {**CLIP["text"], "max_positions": 2}}, data={"too_long": "cut"}
    )
    batch = next(config.batches.build(seed=0, model=config.model).train_iterator())
    assert batch["tokens"][:, -1].tolist() == [END] * BATCH
    shutil.copytree(folder, tmp_path / "pictures")
    (tmp_path / "pictures" / "001.txt").unlink()
    config = run_of("none", tmp_path / "pictures")
    with pytest.raises(DataError, match=r"1 of 96 images have no caption:\n  \S+001\.png"):
        config.batches.build(seed=0, model=config.model)


def test_towers_refuse_long_texts_and_split_sequences():
    config = parse(registries.models["siglip"].config_class, MODEL)
    model = registries.models["siglip"].build(config, key=jax.random.key(0))
    with pytest.raises(ShapeError, match="4 tokens; the text tower has max_positions=3"):
        model.text_features(jnp.zeros((2, 4), jnp.int32))
    axes = ("data", "fsdp", "tensor", "expert", "context", "stage")
    mesh = jax.sharding.AbstractMesh((1, 1, 1, 1, 2, 1), axes, axis_types=(jax.sharding.AxisType.Auto,) * 6)
    with in_mesh((mesh, DEFAULT_RULES)), pytest.raises(ShardingError, match=r"Set mesh\.context=1"):
        model.text_features(jnp.zeros((2, 3), jnp.int32))


def test_a_published_config_is_that_of_a_model_of_its_size():
    config = read_config(registries.models["clip"], json.loads(PUBLISHED.read_text()))
    leaves = named_leaves(abstract_params(config))
    assert sum(math.prod(leaf.shape) for leaf in leaves.values()) == 151_277_313
    assert config.end_token is None, "it pools at the largest token"


@pytest.mark.parametrize(
    ("part", "keys", "problem"),
    [
        ("text_config", {"hidden_act": "relu"}, "text_config: hidden_act='relu', not 'quick_gelu' or 'gelu'"),
        ("vision_config", {"hidden_act": "silu"}, "vision_config: hidden_act='silu'"),
        ("vision_config", {"use_mask": True}, "vision_config: use_mask=True"),
        (None, {"fusion": "late"}, "does not implement: fusion='late'. To ignore a key"),
        (None, {"text_config_dict": {"num_hidden_layers": 3}}, "num_hidden_layers=3 unlike text_config"),
        (None, {"vision_config": None}, "config.json has no vision_config"),
    ],
)
def test_unsupported_keys_are_refused_by_name(part, keys, problem):
    mapping = json.loads(PUBLISHED.read_text())
    (mapping if part is None else mapping[part]).update(keys)
    with pytest.raises(ConversionError, match=re.escape(problem)):
        read_config(registries.models["clip"], mapping)


@pytest.mark.parametrize(
    ("part", "keys", "problem"),
    [
        ("vision_config", {"vision_use_head": False}, "vision_use_head=False, not True"),
        ("text_config", {"projection_size": 8}, "projection_size=8, not the width of the image tower, 768"),
        ("text_config", {"hidden_act": "gelu"}, "hidden_act='gelu', not 'gelu_pytorch_tanh'"),
    ],
)
def test_unsupported_keys_of_siglip_are_refused_by_name(part, keys, problem):
    mapping = {"vision_config": {}, "text_config": {}}
    mapping[part] = keys
    with pytest.raises(ConversionError, match=re.escape(problem)):
        read_config(registries.models["siglip"], mapping)


@pytest.mark.parametrize(
    ("name", "keys", "problem"),
    [
        ("siglip", {"do_center_crop": True}, "do_center_crop=True, not False"),
        ("siglip", {"image_mean": [0.4, 0.5, 0.5]}, "image_mean=[0.4, 0.5, 0.5], not [0.5, 0.5, 0.5]"),
        ("siglip", {"resample": 0}, "resample=0, not 2 (bilinear) or 3 (bicubic)"),
        ("clip", {"size": {"shortest_edge": 256}}, "size={'shortest_edge': 256}, not {'shortest_edge': 16}"),
        ("clip", {"do_center_crop": False}, "do_center_crop=False, not True"),
    ],
)
def test_other_preprocessing_is_refused_by_name(name, keys, problem):
    family = registries.models[name]
    config = parse(family.config_class, MODEL if name == "siglip" else CLIP)
    with pytest.raises(ConversionError, match=re.escape(problem)):
        family.preprocessed(config, keys)


def test_preprocessing_is_read():
    family = registries.models["clip"]
    config = parse(family.config_class, CLIP)
    colors = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    found = family.preprocessed(config, {"size": 16, "crop_size": 16, "resample": 2, **colors})
    assert (found.vision.mean, found.vision.std, found.resample) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bilinear")
    assert family.preprocessed(config, family.preprocessor(found)) == found


def test_an_imported_checkpoint_starts_a_run(trained, folder, tmp_path):
    FORMAT.export_run(trained.directory, tmp_path / "hf")
    FORMAT.import_run(tmp_path / "hf", tmp_path / "imported")
    imported = run_config(tmp_path / "imported")
    assert (imported.data.name, imported.objective.name) == ("image_texts", "sigmoid_contrastive")
    with pytest.raises(ConversionError, match="not measured on documents"):
        FORMAT.open_model(tmp_path / "hf", data="stdlib")
    start = {"steps": 1, "init_from": f"hf:{tmp_path / 'hf'}"}
    # The model and the tokenizer are those of the start.
    mapping = mapping_of(tmp_path / "run", folder, data={"tokenizer": None}, run=start)
    del mapping["model"]
    summary = stack_train.train(mapping)
    assert summary.loss < 3, "it goes on from the trained model"
