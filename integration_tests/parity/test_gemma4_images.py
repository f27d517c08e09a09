"""Gemma 4 with images against transformers on PyTorch, which computes in float64 for logits and gradients.

Norms of narrow heads amplify rounding: with weights of 0.2 instead of 0.1, transformers' own float32 differs from its
float64 by 2.7e-4 (small) and 6e-5 (large).
"""

import contextlib
import json
from collections.abc import Iterator
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

from stack_core.abi.plugins import registries
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.checkpoint import named_leaves
from stack_train.huggingface import FORMAT
from stack_train.huggingface.source import open_source
from stack_train.variables.weights import read_params, run_config
from stack_train.vision.gemma4_images import Gemma4Images

from ..seeing import png
from .conftest import model_of

pytestmark = pytest.mark.parity
pil = pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4")

IMAGE, BEGIN, END, VIDEO, AUDIO, PAD = 96, 95, 94, 93, 92, 5
SEQ, PATCH, MERGE = 122, 3, 2
TEXT = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "global_head_dim": 12,
    "max_position_embeddings": 160,
    "sliding_window": 7,
    "vocab_size_per_layer_input": 97,
    "pad_token_id": PAD,
    "eos_token_id": None,
    "bos_token_id": None,
}
KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]}
VISION = {
    "hidden_size": 22,
    "intermediate_size": 26,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "patch_size": PATCH,
    "pooling_kernel_size": MERGE,
    "position_embedding_size": 140,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
}
# Of the kind of E2B, with per-layer embeddings, and of 31B, with images in both directions.
CASES = {
    "small": (
        {**TEXT, **KINDS, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 6},
        {**VISION, "use_clipped_linears": True},
    ),
    "large": (
        {**TEXT, **KINDS, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 5.0},
        {**VISION, "standardize": True},
    ),
}
AUDIO_TOWER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16}
TOKENS = {"image_token_id": IMAGE, "boi_token_id": BEGIN, "eoi_token_id": END}
TOKENS |= {"video_token_id": VIDEO, "audio_token_id": AUDIO}
PROCESSOR = {"max_soft_tokens": 70, "patch_size": PATCH, "pooling_kernel_size": MERGE, "resample": 2}


def randomize(model: Any) -> None:
    """Sets all parameters and buffers, such that limits clip some values."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.1 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith(("_min", "_max")):
                buffer.copy_((0.5 + torch.rand(())) * (-1 if name.endswith("_min") else 1))
            if name.endswith(("layer_scalar", "std_scale", "std_bias")):
                buffer.add_(0.1 * torch.randn_like(buffer))
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None  # gives the row of the padding token a gradient


@contextlib.contextmanager
def in_float64(model: Any) -> Iterator[None]:
    """Computes in float64, also where the model casts to float32."""
    original = torch.Tensor.float
    model.double()
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.Tensor.float = original
        model.float()


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> Any:
    torch.manual_seed(0)
    text, vision = CASES[request.param]
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, **TOKENS)
    theirs = transformers.Gemma4ForConditionalGeneration(config).eval()
    randomize(theirs)
    directory = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(directory / "hf")
    pil.Gemma4ImageProcessorPil(**PROCESSOR).save_pretrained(directory / "hf")
    FORMAT.import_run(directory / "hf", directory / "run")
    ours = run_config(directory / "run").model
    assert ours.name == "gemma4_vision"
    return directory, theirs, model_of(ours, read_params(directory / "run", ours)[0])


def reader() -> Gemma4Images:
    options: dict[str, Any] = {"patch": PATCH, "merge": MERGE, "channels": 3, "resample": "bilinear"}
    options |= {"max_tokens": 70, "positions": 140, "layout": "text"}
    return Gemma4Images("<i>", IMAGE, **options, before="<b>", after="<e>")


def pictures() -> list[np.ndarray]:
    """Pictures of 6 x 10, 2 x 30 and 23 x 2 tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in ((13, 20), (3, 40), (80, 10))]


GRIDS = [(6, 10), (2, 30), (23, 2)]


def inputs() -> dict[str, np.ndarray]:
    """Two rows: one image and text, and two images with text after them."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 90, (2, SEQ))
    tokens[0, 3:65] = [BEGIN, *[IMAGE] * 60, END]
    tokens[1, 1:63] = [BEGIN, *[IMAGE] * 60, END]
    tokens[1, 63:111] = [BEGIN, *[IMAGE] * 46, END]
    tokens[0, 70:72] = [VIDEO, AUDIO]  # without their inputs
    read = [reader().read(png(picture)) for picture in pictures()]
    assert [image.grid for image in read] == GRIDS
    pixels, grids = np.zeros((2, 112 * MERGE**2, 27), np.uint8), np.zeros((2, 2, 2), np.int32)
    for row, images in enumerate((read[:1], read[1:])):
        packed = np.concatenate([image.pixels for image in images])
        pixels[row, : len(packed)], grids[row, : len(images)] = packed, [image.grid for image in images]
    return {"tokens": tokens, "pixels": pixels, "grids": grids}


def of_torch(given: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    images = [Image.fromarray(picture) for picture in pictures()]
    found = pil.Gemma4ImageProcessorPil(**PROCESSOR)(images=images, return_tensors="pt")
    del found["num_soft_tokens_per_image"]
    tokens = torch.tensor(given["tokens"])
    # Generation would mask the padding token.
    masks = {"attention_mask": torch.ones_like(tokens), "mm_token_type_ids": (tokens == IMAGE).int()}
    return {"input_ids": tokens, **masks, **found}


def call(model: Any, given: dict[str, np.ndarray], **more: Any) -> Any:
    tokens, pixels, grids = (jnp.asarray(given[name]) for name in ("tokens", "pixels", "grids"))
    return model(tokens, positions_of(tokens), pixels=pixels, grids=grids, **more)


def positions_of(tokens: Any) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def test_images_are_those_of_transformers() -> None:
    found = of_torch(inputs())
    for number, picture in enumerate(pictures()):
        image = reader().read(png(picture))
        rows, columns = image.grid
        # Patches of a token are adjacent here, and the values of a patch in another order.
        cut = image.pixels.reshape(rows, columns, MERGE, MERGE, 3, PATCH, PATCH).transpose(0, 2, 1, 3, 5, 6, 4)
        patches = cut.reshape(image.tokens * MERGE**2, -1)
        expected = found["pixel_values"][number].numpy()
        np.testing.assert_allclose(expected[: len(patches)], patches / 255, atol=1e-6)
        assert not expected[len(patches) :].any()
        assert found["image_position_ids"][number].max(dim=0)[0].tolist() == [columns * MERGE - 1, rows * MERGE - 1]


def test_sizes_are_those_of_transformers() -> None:
    rng = np.random.default_rng(0)
    sizes = {"patch_size": PATCH, "max_patches": 70 * MERGE**2, "pooling_kernel_size": MERGE}
    for height, width in [*rng.integers(1, 300, (400, 2)).tolist(), [1, 200], [900, 5]]:
        expected = pil.get_aspect_ratio_preserving_size(height, width, **sizes)
        assert tuple(PATCH * MERGE * each for each in reader().grid(height, width)) == expected, (height, width)


def test_logits(pair) -> None:
    _, theirs, ours = pair
    given = inputs()
    with torch.no_grad(), in_float64(theirs):
        expected = theirs(**of_torch(given)).logits.numpy()
        alone = theirs(torch.tensor(given["tokens"])).logits.numpy()
    outputs = jax.jit(lambda model: call(model, given))(ours)
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(ours.logits(outputs.hidden), expected, atol=1e-4, rtol=1e-4)
    tokens = jnp.asarray(given["tokens"])
    without = ours(tokens, positions_of(tokens))
    np.testing.assert_allclose(ours.logits(without.hidden), alone, atol=1e-4, rtol=1e-4)
    assert np.abs(alone - expected).max() > 0.1


def test_gradients(pair) -> None:
    directory, theirs, ours = pair
    given = inputs()
    labels = np.roll(given["tokens"], -1, axis=1)
    theirs.zero_grad()
    with in_float64(theirs):
        logits = theirs(**of_torch(given)).logits
        torch.nn.functional.cross_entropy(logits.reshape(-1, 97), torch.tensor(labels).reshape(-1)).backward()
        expected = {name: each.grad.numpy() for name, each in theirs.named_parameters() if each.grad is not None}

    def loss(model: Any) -> Any:
        return model.head().cross_entropy(call(model, given).hidden, jnp.asarray(labels))

    found = named_leaves(nnx.to_pure_dict(jax.jit(nnx.grad(loss))(ours)))
    compared = set()
    for rule in open_source(directory / "hf").rules:
        for name, gradient in rule.tensors(np.asarray(found[rule.parameter])).items():
            if name in expected:  # buffers have none
                scale = np.abs(expected[name]).max()
                scaled = gradient / scale, expected[name] / scale
                np.testing.assert_allclose(*scaled, atol=1e-4, rtol=1e-3, err_msg=name)
                compared.add(name)
    assert compared == set(expected)


def test_greedy_tokens_through_a_dense_cache(pair) -> None:
    _, theirs, ours = pair
    given = inputs()
    with torch.no_grad():
        expected = theirs.generate(**of_torch(given), max_new_tokens=12, do_sample=False).numpy()
    cache = DenseKVCache.empty(ours.states, batch=2, capacity=SEQ + 12)
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
    assert (ours.config.max_image_tokens, ours.config.resample, ours.config.pad_token) == (70, "bilinear", PAD)
    FORMAT.export_run(directory / "run", tmp_path / "back")
    back, first = (load_file(path / "model.safetensors") for path in (tmp_path / "back", directory / "hf"))
    assert back.keys() == first.keys()
    for name, array in first.items():
        assert (back[name].dtype, back[name].shape, back[name].tobytes()) == (array.dtype, array.shape, array.tobytes())
    loaded, report = type(theirs).from_pretrained(tmp_path / "back", dtype="auto", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, parameter in theirs.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], parameter), name
    processor = pil.Gemma4ImageProcessorPil.from_pretrained(tmp_path / "back")
    assert {name: getattr(processor, name) for name in PROCESSOR} == PROCESSOR


def test_a_config_of_our_own_is_read_by_transformers(pair, tmp_path) -> None:
    directory, theirs, ours = pair
    config_map = registries.models["gemma4_vision"].config_map
    mapping = json.loads(json.dumps(config_map.write(ours.config)))
    (tmp_path / "config.json").write_text(json.dumps(mapping))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    given = config_map.read(json.loads((directory / "hf/config.json").read_bytes()))
    assert config_map.read(mapping) == {**given, "max_image_tokens": 70}
    for name in ("hidden_size", "layer_types", "sliding_window", "use_bidirectional_attention", "pad_token_id"):
        assert getattr(config.text_config, name) == getattr(theirs.config.text_config, name)
    for name in CASES["small"][1].keys() | {"standardize"}:
        assert getattr(config.vision_config, name) == getattr(theirs.config.vision_config, name), name
    assert {name: getattr(config, name) for name in TOKENS} == TOKENS
    assert config.audio_config is None


def test_the_audio_tower_is_left_out(tmp_path) -> None:
    text, vision = CASES["small"]
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=AUDIO_TOWER, **TOKENS)
    theirs = transformers.Gemma4ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    result = FORMAT.import_run(tmp_path / "hf", tmp_path / "run")
    assert {each.partition(" ")[0] for each in result.left_out} == {"audio_tower", "embed_audio"}
    FORMAT.export_run(tmp_path / "run", tmp_path / "back")
    loaded, report = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert loaded.model.audio_tower is None
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, parameter in loaded.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], parameter), name
