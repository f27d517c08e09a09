"""Pixtral and Mistral 3 with images against transformers on PyTorch, both in float32."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from PIL import Image
from safetensors.numpy import load_file
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from stack_core.abi.plugins import registries
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.checkpoint import named_leaves
from stack_train.huggingface import FORMAT
from stack_train.huggingface.source import open_source
from stack_train.variables.weights import read_params, run_config
from stack_train.vision.pixtral_images import PixtralImages

from ..seeing import png
from .conftest import model_of

pytestmark = pytest.mark.parity

IMAGE, SEQ, PATCH = 96, 26, 3
TEXT = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 96,
    "pad_token_id": None,  # whose embedding PyTorch gives no gradient
    "eos_token_id": None,
    "bos_token_id": None,
}
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 300.0}
VISION = {
    "model_type": "pixtral",
    "hidden_size": 24,
    "intermediate_size": 26,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "patch_size": PATCH,
    "image_size": 30,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
}
MISTRAL = {**TEXT, "model_type": "mistral", "sliding_window": None, "rms_norm_eps": 1e-3}
CASES = {
    "pixtral": ("Llava", {"text_config": MISTRAL, "vision_config": {**VISION, "hidden_act": "silu"}}),
    "mistral3": ("Mistral3", {"text_config": MISTRAL, "vision_config": VISION}),
    "ministral3": (
        "Mistral3",
        {
            "text_config": {
                **TEXT,
                "model_type": "ministral3",
                "rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.3},
            },
            "vision_config": VISION,
            "spatial_merge_size": 1,
            "multimodal_projector_bias": True,
        },
    ),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> Any:
    torch.manual_seed(0)
    name, fields = CASES[request.param]
    if name == "Llava":
        fields = {**fields, "vision_feature_select_strategy": "full", "vision_feature_layer": -1}
    config = getattr(transformers, f"{name}Config")(**fields, image_token_index=IMAGE, tie_word_embeddings=False)
    theirs = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.2 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    directory = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(directory / "hf")
    PixtralImageProcessorPil(**PROCESSOR).save_pretrained(directory / "hf")
    FORMAT.import_run(directory / "hf", directory / "run")
    ours = run_config(directory / "run").model
    params = read_params(directory / "run", ours)[0]
    return directory, theirs, model_of(ours, params)


PROCESSOR = {
    "size": {"longest_edge": 20},
    "patch_size": {"height": PATCH, "width": PATCH},
    "resample": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}


def reader(merge: int, **changes: Any) -> PixtralImages:
    fields = {"patch": PATCH, "merge": merge, "channels": 3, "longest_edge": 20, "resample": "bilinear"}
    return PixtralImages("[IMG]", IMAGE, **{**fields, **changes}, image_break="[IMG_BREAK]", image_end="[IMG_END]")


def pictures(merge: int) -> list[np.ndarray]:
    """Pictures of 2 x 3, 3 x 1 and 1 x 4 tokens, the last of which is scaled down."""
    rng, unit = np.random.default_rng(0), PATCH * merge
    sizes = (2 * unit, 3 * unit - 2), (3 * unit - 1, unit), (unit - 2, min(4 * unit, 20))
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


def merge_of(model: Any) -> int:
    return model.merged_patches or 1


def inputs(merge: int) -> dict[str, Any]:
    """Two rows: one image, and two images, with tokens of text after each row of an image."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 90, (2, SEQ))
    read = [reader(merge).read(png(picture)) for picture in pictures(merge)]
    assert [image.grid for image in read] == [(2, 3), (3, 1), (1, 4)]
    tokens[0, 3:6] = tokens[0, 7:10] = tokens[1, [1, 3, 5]] = tokens[1, 7:11] = IMAGE
    pixels = np.zeros((2, 9 * merge**2, 27), np.uint8)
    grids = np.zeros((2, 2, 2), np.int32)
    for row, images in enumerate((read[:1], read[1:])):
        packed = np.concatenate([image.pixels for image in images])
        pixels[row, : len(packed)], grids[row, : len(images)] = packed, [image.grid for image in images]
    return {"tokens": tokens, "pixels": pixels, "grids": grids}


def of_torch(given: dict[str, Any], merge: int) -> dict[str, torch.Tensor]:
    images = [Image.fromarray(picture) for picture in pictures(merge)]
    # As `PixtralProcessor` calls it.
    found = PixtralImageProcessorPil(**PROCESSOR)(images=images, patch_size=PATCH * merge, return_tensors="pt")
    return {"input_ids": torch.tensor(given["tokens"]), **found}


def call(model: Any, given: dict[str, Any], **more: Any) -> Any:
    tokens, pixels, grids = (jnp.asarray(given[name]) for name in ("tokens", "pixels", "grids"))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model(tokens, positions, pixels=pixels, grids=grids, **more)


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize(("number", "name"), [(2, "bilinear"), (3, "bicubic")])
def test_pixels_are_those_of_transformers(merge, number, name) -> None:
    rng, unit = np.random.default_rng(0), PATCH * merge
    processor = PixtralImageProcessorPil(**{**PROCESSOR, "resample": number})
    mean, std = np.array(PROCESSOR["image_mean"]), np.array(PROCESSOR["image_std"])
    for height, width in [(13, 20), (31, 7), (21, 64), *rng.integers(3, 90, (8, 2)).tolist()]:
        picture = rng.integers(0, 256, (height, width, 3), np.uint8)
        found = processor(images=[Image.fromarray(picture)], patch_size=unit)
        ours = reader(merge, resample=name).read(png(picture))
        rows, columns = ours.grid
        assert tuple(found["image_sizes"][0]) == (rows * unit, columns * unit)
        assert reader(merge).measure(png(picture)) == ours.size
        cut = ours.pixels.reshape(rows, columns, merge, merge, 3, PATCH, PATCH).transpose(4, 0, 2, 5, 1, 3, 6)
        scaled = (cut.reshape(3, rows * unit, columns * unit).transpose(1, 2, 0) / 255 - mean) / std
        np.testing.assert_allclose(np.asarray(found["pixel_values"][0]).transpose(1, 2, 0), scaled, atol=1e-6)


def test_logits(pair) -> None:
    _, theirs, ours = pair
    given = inputs(merge_of(ours))
    with torch.no_grad():
        expected = theirs(**of_torch(given, merge_of(ours))).logits.numpy()
        alone = theirs(torch.tensor(given["tokens"])).logits.numpy()
    outputs = jax.jit(lambda: call(ours, given))()
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(ours.logits(outputs.hidden), expected, atol=1e-4, rtol=1e-4)
    tokens = jnp.asarray(given["tokens"])
    without = ours(tokens, jnp.broadcast_to(jnp.arange(SEQ), tokens.shape))
    np.testing.assert_allclose(ours.logits(without.hidden), alone, atol=1e-4, rtol=1e-4)
    assert np.abs(alone - expected).max() > 0.1


def test_gradients(pair) -> None:
    directory, theirs, ours = pair
    given = inputs(merge_of(ours))
    labels = np.roll(given["tokens"], -1, axis=1)
    theirs.zero_grad()
    logits = theirs(**of_torch(given, merge_of(ours))).logits
    torch.nn.functional.cross_entropy(logits.reshape(-1, 97), torch.tensor(labels).reshape(-1)).backward()

    def loss(model: Any) -> Any:
        return model.head().cross_entropy(call(model, given).hidden, jnp.asarray(labels))

    found = named_leaves(nnx.to_pure_dict(jax.jit(nnx.grad(loss))(ours)))
    published = registries.models[ours.config.name].published_name
    expected = {
        published(name): parameter.grad.numpy()
        for name, parameter in theirs.named_parameters()
        if parameter.grad is not None
    }
    for rule in open_source(directory / "hf").rules:
        for name, gradient in rule.tensors(np.asarray(found[rule.parameter])).items():
            np.testing.assert_allclose(gradient, rule.part_of(expected[name]), atol=1e-4, rtol=1e-3, err_msg=name)


def test_greedy_tokens_through_a_dense_cache(pair) -> None:
    _, theirs, ours = pair
    given = inputs(merge_of(ours))
    with torch.no_grad():
        expected = theirs.generate(**of_torch(given, merge_of(ours)), max_new_tokens=12, do_sample=False).numpy()
    cache = DenseKVCache.empty(ours.states, batch=2, capacity=40)
    outputs = jax.jit(lambda cache: call(ours, given, cache=cache))(cache)
    step = jax.jit(lambda token, place, cache: ours(token[:, None], place, cache=cache))
    text = [given["tokens"]]
    for number in range(12):
        token = jnp.argmax(ours.logits(outputs.hidden[:, -1]), axis=-1)
        text.append(np.asarray(token)[:, None])
        outputs = step(token, jnp.full((2, 1), SEQ + number), outputs.cache)
    np.testing.assert_array_equal(np.concatenate(text, axis=1), expected)


def test_checkpoints_go_back_bitwise(pair, tmp_path) -> None:
    directory, theirs, ours = pair
    assert (ours.config.longest_edge, ours.config.resample) == (20, "bilinear")
    assert ours.config.vision.mean == (0.5, 0.4, 0.3)
    FORMAT.export_run(directory / "run", tmp_path / "back")
    back, first = (load_file(path / "model.safetensors") for path in (tmp_path / "back", directory / "hf"))
    published = registries.models[ours.config.name].published_name
    assert back.keys() == {published(name) for name in first}
    for name, array in first.items():
        np.testing.assert_array_equal(back[published(name)].view(np.uint8), array.view(np.uint8), err_msg=name)
    loaded, report = type(theirs).from_pretrained(tmp_path / "back", dtype="auto", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, parameter in theirs.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], parameter), name
    sizes = json.loads((tmp_path / "back" / "processor_config.json").read_text())
    assert (sizes["patch_size"], sizes["spatial_merge_size"]) == (PATCH, merge_of(ours))
    processor = PixtralImageProcessorPil.from_pretrained(tmp_path / "back")
    for name, value in PROCESSOR.items():
        found = getattr(processor, name)
        found = dict(found) if isinstance(value, dict) else list(found) if isinstance(value, list) else found
        assert found == value, name


def test_a_config_of_our_own_is_read_by_transformers(pair, tmp_path) -> None:
    directory, theirs, ours = pair
    config_map = registries.models[ours.config.name].config_map
    mapping = json.loads(json.dumps(config_map.write(ours.config)))
    (tmp_path / "config.json").write_text(json.dumps(mapping))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config_map.read(mapping) == config_map.read(json.loads((directory / "hf/config.json").read_bytes()))
    for name in ("hidden_size", "num_key_value_heads", "head_dim"):
        assert getattr(config.text_config, name) == getattr(theirs.config.text_config, name)
    for name in ("hidden_size", "num_attention_heads", "patch_size", "hidden_act"):
        assert getattr(config.vision_config, name) == getattr(theirs.config.vision_config, name), name
    assert config.vision_config.rope_parameters["rope_theta"] == 50.0
    assert config.image_token_index == IMAGE
    assert getattr(config, "spatial_merge_size", 1) == merge_of(ours)
