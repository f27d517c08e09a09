"""Qwen2.5-VL and Qwen3-VL against transformers on PyTorch, both in float32."""

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
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from stack_core.abi.plugins import registries
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.checkpoint import named_leaves
from stack_train.huggingface import FORMAT
from stack_train.huggingface.source import open_source
from stack_train.variables.weights import read_params, run_config
from stack_train.vision.grid_images import GridImages
from stack_train.vision.grids import place_packed_features

from ..seeing import png
from .conftest import model_of

pytestmark = pytest.mark.parity

IMAGE, SEQ, PATCH, MERGE = 96, 24, 3, 2
TEXT = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 96,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0, "mrope_section": [2, 2, 1]},
    "pad_token_id": None,  # whose embedding PyTorch gives no gradient
    "eos_token_id": None,
    "bos_token_id": None,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [3]}
VISION = {
    "depth": 4,
    "hidden_size": 24,
    "intermediate_size": 26,
    "num_heads": 3,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": 36,
    "num_position_embeddings": 49,
    "deepstack_visual_indexes": [0, 2],
    "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
}
TOKENS = {"image_token_id": IMAGE, "video_token_id": 95, "vision_start_token_id": 93, "vision_end_token_id": 94}


# Heads have the width of the decoder, and windows of 2 x 2 tokens divide each image.
QWEN2_5 = {
    **{key: value for key, value in TEXT.items() if key not in ("head_dim", "attention_bias")},
    "hidden_size": 40,
}
WINDOWED = {
    key: value for key, value in VISION.items() if key not in ("num_position_embeddings", "deepstack_visual_indexes")
}
WINDOWED |= {"out_hidden_size": 40, "window_size": 13, "fullatt_block_indexes": [1]}
CASES = {
    "qwen2_5_vl": ("Qwen2_5_VL", QWEN2_5, WINDOWED),
    "qwen3_vl": ("Qwen3VL", TEXT, VISION),
    "qwen3_vl_moe": ("Qwen3VLMoe", {**TEXT, **EXPERTS}, VISION),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> Any:
    torch.manual_seed(0)
    name, text, vision = CASES[request.param]
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **TOKENS)
    theirs = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.2 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    directory = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(directory / "hf")
    Qwen2VLImageProcessorPil(**PROCESSOR).save_pretrained(directory / "hf")
    FORMAT.import_run(directory / "hf", directory / "run")
    ours = run_config(directory / "run").model
    params = read_params(directory / "run", ours)[0]
    return directory, theirs, model_of(ours, params)


PROCESSOR = {
    "size": {"shortest_edge": 72, "longest_edge": 36 * 12},
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}


def reader() -> GridImages:
    return GridImages("", IMAGE, patch=PATCH, merge=MERGE, channels=3, min_pixels=72, max_pixels=36 * 12)


def pictures() -> list[np.ndarray]:
    """Pictures of 2 x 3, 3 x 1 and 1 x 4 tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in ((13, 20), (19, 5), (7, 22))]


def inputs() -> dict[str, np.ndarray]:
    """Two rows: one image, and two images, the second of which is the last."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 90, (2, SEQ))
    tokens[0, 3:9] = tokens[1, 1:4] = tokens[1, 9:13] = IMAGE
    read = [reader().read(png(picture)) for picture in pictures()]
    assert [image.grid for image in read] == [(2, 3), (3, 1), (1, 4)]
    pixels, grids = np.zeros((2, 32, 27), np.uint8), np.zeros((2, 2, 2), np.int32)
    for row, images in enumerate((read[:1], read[1:])):
        packed = np.concatenate([image.pixels for image in images])
        pixels[row, : len(packed)], grids[row, : len(images)] = packed, [image.grid for image in images]
    return {"tokens": tokens, "pixels": pixels, "grids": grids}


def of_torch(given: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    images = [Image.fromarray(picture) for picture in pictures()]
    found = Qwen2VLImageProcessorPil(**PROCESSOR)(images=images, return_tensors="pt")
    tokens = torch.tensor(given["tokens"])
    return {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE).int(), **found}


def call(model: Any, given: dict[str, np.ndarray], **more: Any) -> Any:
    tokens, pixels, grids = (jnp.asarray(given[name]) for name in ("tokens", "pixels", "grids"))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model(tokens, positions, pixels=pixels, grids=grids, **more)


def published(model: Any, name: str) -> str:
    """Returns the name of a tensor in files; Qwen2.5-VL's differ from the names of transformers' parameters."""
    return getattr(registries.models[model.config.name], "published_name", str)(name)


def test_images_are_those_of_transformers() -> None:
    found = of_torch(inputs())
    ours = [reader().read(png(picture)) for picture in pictures()]
    # transformers repeats the frame, [channels, frames, patch, patch].
    frames = found["pixel_values"].numpy().reshape(-1, 3, 2, PATCH, PATCH)
    mean, std = (np.array(PROCESSOR[f"image_{name}"]).reshape(3, 1, 1) for name in ("mean", "std"))
    patches = np.concatenate([image.pixels for image in ours]).reshape(-1, 3, PATCH, PATCH)
    for frame in range(2):
        np.testing.assert_allclose(frames[:, :, frame], (patches / 255 - mean) / std, atol=1e-6)
    assert found["image_grid_thw"].tolist() == [[1, MERGE * a, MERGE * b] for a, b in (each.grid for each in ours)]


def test_sizes_are_those_of_transformers() -> None:
    processor, rng = Qwen2VLImageProcessorPil(**PROCESSOR), np.random.default_rng(0)
    for height, width in rng.integers(3, 120, (200, 2)).tolist():
        image = Image.new("RGB", (width, height))
        grid = processor(images=[image])["image_grid_thw"][0]
        if grid[1] * grid[2] <= 48:  # others are refused
            found = reader().grid(height, width)
            assert [MERGE * each for each in found] == grid[1:].tolist(), (height, width)


def test_logits(pair) -> None:
    _, theirs, ours = pair
    given = inputs()
    with torch.no_grad():
        expected = theirs(**of_torch(given)).logits.numpy()
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
    given = inputs()
    labels = np.roll(given["tokens"], -1, axis=1)
    theirs.zero_grad()
    logits = theirs(**of_torch(given)).logits
    torch.nn.functional.cross_entropy(logits.reshape(-1, 97), torch.tensor(labels).reshape(-1)).backward()

    def loss(model: Any) -> Any:
        return model.head().cross_entropy(call(model, given).hidden, jnp.asarray(labels))

    found = named_leaves(nnx.to_pure_dict(jax.jit(nnx.grad(loss))(ours)))
    expected = {
        published(ours, name): parameter.grad.numpy()
        for name, parameter in theirs.named_parameters()
        if parameter.grad is not None
    }
    for rule in open_source(directory / "hf").rules:
        for name, gradient in rule.tensors(np.asarray(found[rule.parameter])).items():
            np.testing.assert_allclose(gradient, rule.part_of(expected[name]), atol=1e-4, rtol=1e-3, err_msg=name)


def test_greedy_tokens_through_a_dense_cache(pair) -> None:
    _, theirs, ours = pair
    given = inputs()
    with torch.no_grad():
        expected = theirs.generate(**of_torch(given), max_new_tokens=12, do_sample=False).numpy()
    cache = DenseKVCache.empty(ours.states, batch=2, capacity=40)
    outputs = jax.jit(lambda cache: call(ours, given, cache=cache))(cache)
    step = jax.jit(lambda token, place, cache: ours(token[:, None], place[:, None], cache=cache))
    tokens, grids = jnp.asarray(given["tokens"]), jnp.asarray(given["grids"])
    positions = jnp.broadcast_to(jnp.arange(SEQ), tokens.shape)
    last = place_packed_features(jnp.zeros((2, 8, 1)), tokens, positions, grids, IMAGE).positions[:, -1, 0]
    text = [np.asarray(tokens)]
    for number in range(12):
        token = jnp.argmax(ours.logits(outputs.hidden[:, -1]), axis=-1)
        text.append(np.asarray(token)[:, None])
        outputs = step(token, last + 1 + number, outputs.cache)
    np.testing.assert_array_equal(np.concatenate(text, axis=1), expected)


def test_checkpoints_go_back_bitwise(pair, tmp_path) -> None:
    directory, theirs, ours = pair
    assert (ours.config.min_pixels, ours.config.max_pixels) == (72, 36 * 12)
    assert ours.config.vision.mean == (0.5, 0.4, 0.3)
    FORMAT.export_run(directory / "run", tmp_path / "back")
    back, first = (load_file(path / "model.safetensors") for path in (tmp_path / "back", directory / "hf"))
    assert back.keys() == first.keys()
    for name, array in first.items():
        if ".mlp.experts." in name:  # transposed in the published layout, and not by new models of transformers
            array = np.ascontiguousarray(array.swapaxes(1, 2))  # noqa: PLW2901
        np.testing.assert_array_equal(back[name].view(np.uint8), array.view(np.uint8), err_msg=name)
    loaded, report = type(theirs).from_pretrained(tmp_path / "back", dtype="auto", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, parameter in theirs.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], parameter), name
    processor = Qwen2VLImageProcessorPil.from_pretrained(tmp_path / "back")
    for name, value in PROCESSOR.items():
        found = getattr(processor, name)
        assert (dict(found) if name == "size" else list(found) if isinstance(value, list) else found) == value, name


def test_a_config_of_our_own_is_read_by_transformers(pair, tmp_path) -> None:
    directory, theirs, ours = pair
    config_map = registries.models[ours.config.name].config_map
    mapping = json.loads(json.dumps(config_map.write(ours.config)))
    (tmp_path / "config.json").write_text(json.dumps(mapping))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config_map.read(mapping) == config_map.read(json.loads((directory / "hf/config.json").read_bytes()))
    for name in ("hidden_size", "num_key_value_heads", "attention_bias", "head_dim"):
        if name in theirs.config.text_config:
            assert getattr(config.text_config, name) == getattr(theirs.config.text_config, name)
    for name in ("rope_theta", "factor", "mrope_section"):
        assert config.text_config.rope_parameters[name] == theirs.config.text_config.rope_parameters[name]
    for name in CASES[ours.config.name][2]:
        assert getattr(config.vision_config, name) == getattr(theirs.config.vision_config, name), name
    assert config.image_token_id == IMAGE
