"""Language models with images against transformers on PyTorch, both in float32."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

from stack_core.abi.plugins import registries
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.checkpoint import named_leaves
from stack_train.huggingface import FORMAT
from stack_train.huggingface.source import open_source
from stack_train.variables.weights import read_params, run_config

from .conftest import model_of

pytestmark = pytest.mark.parity

TEXT = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 96,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "query_pre_attn_scalar": 24,
    "pad_token_id": None,  # whose embedding PyTorch gives no gradient
    "eos_token_id": None,
    "bos_token_id": None,
}
# 5 x 5 whole patches with a rest of one pixel, averaged in squares of 2 to 2 x 2 tokens with a rest of one patch.
VISION = {"hidden_size": 22, "intermediate_size": 26, "num_hidden_layers": 3, "num_attention_heads": 2}
SIZES = {"image_size": 31, "patch_size": 6, "layer_norm_eps": 1e-5, "vision_use_head": False}
IMAGE, BEGIN, END = 96, 95, 94


@pytest.fixture(scope="module", params=[3, 6], ids=["window_in_an_image", "window"])
def pair(request, tmp_path_factory) -> Any:
    torch.manual_seed(0)
    text = transformers.Gemma3TextConfig(**TEXT, sliding_window=request.param)
    vision = transformers.SiglipVisionConfig(**VISION, **SIZES)
    tokens = {"image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.2 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    directory = tmp_path_factory.mktemp("images")
    theirs.save_pretrained(directory / "hf")
    FORMAT.import_run(directory / "hf", directory / "run")
    ours = run_config(directory / "run").model
    params = read_params(directory / "run", ours)[0]
    return directory, theirs, model_of(ours, params)


def inputs() -> dict[str, np.ndarray]:
    """Two rows of 24 tokens with two images each, and pixels of 0 to 255."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 90, (2, 24))
    tokens[0, 2:8] = tokens[0, 11:17] = tokens[1, 0:6] = tokens[1, 17:23] = [BEGIN, *[IMAGE] * 4, END]
    return {"tokens": tokens, "pixels": rng.integers(0, 256, (2, 2, 31, 31, 3)).astype(np.uint8)}


def of_torch(given: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    pixels = given["pixels"].reshape(-1, 31, 31, 3).transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1
    tokens = torch.tensor(given["tokens"])
    return {"input_ids": tokens, "pixel_values": torch.tensor(pixels), "token_type_ids": (tokens == IMAGE).long()}


def positions_of(tokens: np.ndarray) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def test_logits(pair) -> None:
    _, theirs, ours = pair
    given = inputs()
    with torch.no_grad():
        expected = theirs(**of_torch(given)).logits.numpy()
    tokens, pixels = jnp.asarray(given["tokens"]), jnp.asarray(given["pixels"])
    outputs = jax.jit(lambda: ours(tokens, positions_of(tokens), pixels=pixels))()
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(ours.logits(outputs.hidden), expected, atol=1e-4, rtol=1e-4)
    # Another image changes the logits after it, so that they do come from the pixels.
    other = ours(tokens, positions_of(tokens), pixels=255 - pixels)
    assert np.abs(np.asarray(ours.logits(other.hidden)) - expected)[0, 3:].max() > 0.1
    alone = theirs(torch.tensor(given["tokens"])).logits.detach().numpy()
    without = ours(tokens, positions_of(tokens))
    np.testing.assert_allclose(ours.logits(without.hidden), alone, atol=1e-4, rtol=1e-4)


def test_gradients(pair) -> None:
    directory, theirs, ours = pair
    given = inputs()
    labels = np.roll(given["tokens"], -1, axis=1)
    theirs.zero_grad()
    logits = theirs(**of_torch(given)).logits
    torch.nn.functional.cross_entropy(logits.reshape(-1, 97), torch.tensor(labels).reshape(-1)).backward()
    tokens, pixels = jnp.asarray(given["tokens"]), jnp.asarray(given["pixels"])

    def loss(model: Any) -> Any:
        outputs = model(tokens, positions_of(tokens), pixels=pixels)
        return model.head().cross_entropy(outputs.hidden, jnp.asarray(labels))

    found = named_leaves(nnx.to_pure_dict(nnx.grad(loss)(ours)))
    expected = {
        name: parameter.grad.numpy() for name, parameter in theirs.named_parameters() if parameter.grad is not None
    }
    source = open_source(directory / "hf")
    family = registries.models["gemma3_vision"]
    published = {family.published_name(name): value for name, value in expected.items()}
    for rule in source.rules:
        for name, gradient in rule.tensors(np.asarray(found[rule.parameter])).items():
            np.testing.assert_allclose(gradient, published[name], atol=1e-4, rtol=1e-3, err_msg=name)


def test_greedy_tokens_through_a_dense_cache(pair) -> None:
    _, theirs, ours = pair
    given = inputs()
    with torch.no_grad():
        expected = theirs.generate(**of_torch(given), max_new_tokens=12, do_sample=False, use_cache=False).numpy()
    cache = DenseKVCache.empty(ours.states, batch=2, capacity=40)
    tokens, pixels = jnp.asarray(given["tokens"]), jnp.asarray(given["pixels"])
    outputs = jax.jit(lambda cache: ours(tokens, positions_of(tokens), cache=cache, pixels=pixels))(cache)
    step = jax.jit(lambda token, place, cache: ours(token[:, None], place[:, None], cache=cache))
    text = [np.asarray(tokens)]
    for place in range(24, 36):
        token = jnp.argmax(ours.logits(outputs.hidden[:, -1]), axis=-1)
        text.append(np.asarray(token)[:, None])
        outputs = step(token, jnp.full(2, place), outputs.cache)
    np.testing.assert_array_equal(np.concatenate(text, axis=1), expected)


def test_checkpoints_go_back_bitwise(pair, tmp_path) -> None:
    directory, theirs, _ = pair
    FORMAT.export_run(directory / "run", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    family = registries.models["gemma3_vision"]
    first = {
        family.published_name(name): array for name, array in load_file(directory / "hf/model.safetensors").items()
    }
    assert back.keys() == first.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(back[name].view(np.uint8), array.view(np.uint8), err_msg=name)
    loaded, report = transformers.Gemma3ForConditionalGeneration.from_pretrained(
        tmp_path / "back", dtype="auto", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, parameter in theirs.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], parameter), name


@pytest.mark.parametrize("layout", ["published", "in_memory"])
def test_other_layouts_are_read(pair, layout, tmp_path) -> None:
    directory, theirs, _ = pair
    family = registries.models["gemma3_vision"]
    if layout == "published":
        tensors = {family.published_name(name): array for name, array in theirs.state_dict().items()}
    else:
        tensors = dict(theirs.state_dict())
    (tmp_path / "config.json").write_text((directory / "hf/config.json").read_text())
    plain = {name: np.ascontiguousarray(array.numpy()) for name, array in tensors.items() if "position_ids" not in name}
    save_file(plain, tmp_path / "model.safetensors")
    values = dict(open_source(tmp_path).leaves())
    for name, leaf in open_source(directory / "hf").leaves():
        np.testing.assert_array_equal(values[name], leaf)


def test_a_config_of_our_own_is_read_by_transformers(pair, tmp_path) -> None:
    directory, theirs, ours = pair
    mapping = registries.models["gemma3_vision"].config_map.write(ours.config)
    (tmp_path / "config.json").write_text(json.dumps(mapping))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    read = registries.models["gemma3_vision"].config_map.read
    assert read(mapping) == read(json.loads((directory / "hf/config.json").read_bytes()))
    for name in ("hidden_size", "sliding_window", "layer_types", "rope_parameters", "num_key_value_heads"):
        assert getattr(config.text_config, name) == getattr(theirs.config.text_config, name)
    for name in ("hidden_size", "image_size", "patch_size", "layer_norm_eps", "num_attention_heads"):
        assert getattr(config.vision_config, name) == getattr(theirs.config.vision_config, name)
    assert config.image_token_id == IMAGE
    assert config.mm_tokens_per_image == 4
