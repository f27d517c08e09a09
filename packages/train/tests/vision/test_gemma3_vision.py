"""Gemma 3 with images; `integration_tests/parity/test_images.py` compares it with transformers."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_core.abi.errors import ArgumentError, ConfigError, ConversionError
from stack_core.abi.plugins import registries
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.models.gemma3_vision import FAMILY, Gemma3VisionConfig
from stack_train.vision.image_tokens import place_features
from stack_train.vision.siglip import SiglipConfig

from ..random_models import draw_model

IMAGE, SEQ = 60, 13
CONFIG = Gemma3VisionConfig(
    vocab_size=61,
    embed=24,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp=40,
    layers=2,
    period=2,
    window=3,
    max_positions=32,
    dtype="float32",
    image_token=IMAGE,
    image_tokens=4,
    vision=SiglipConfig(embed=14, heads=2, mlp=18, layers=1, image_size=23, patch=4),
)


@cache
def make_model():
    return draw_model(lambda: FAMILY.build(CONFIG, key=jax.random.key(0)))


def inputs():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50, (2, SEQ))
    tokens[0, 3:7] = tokens[1, 1:5] = tokens[1, 8:12] = IMAGE
    return jnp.asarray(tokens), jnp.asarray(rng.integers(0, 256, (2, 2, 23, 23, 3)), jnp.uint8)


@jax.jit
def run(model, tokens, positions, segments, pixels):
    return model(tokens, positions, segments, pixels=pixels).hidden


def hidden(tokens, pixels, positions=None, segments=None):
    positions = jnp.broadcast_to(jnp.arange(SEQ), tokens.shape) if positions is None else positions
    segments = jnp.ones_like(tokens) if segments is None else segments
    return np.asarray(run(make_model(), tokens, positions, segments, pixels))


def test_features_go_to_runs_of_image_tokens():
    features = jnp.arange(2 * 2 * 4.0).reshape(2, 2, 4, 1)
    tokens = jnp.array([[7, 7, 7, 7, 1, 2, 7, 7, 3], [1, 7, 7, 7, 7, 2, 2, 2, 2]])
    placed = place_features(features, tokens, 7)
    assert placed.rows.tolist() == [[0, 1, 2, 3, -1, -1, 4, 5, -1], [-1, 0, 1, 2, 3, -1, -1, -1, -1]]
    assert placed.ahead.tolist() == [[3, 2, 1, 0, 0, 0, 1, 0, 0], [0, 3, 2, 1, 0, 0, 0, 0, 0]]
    assert placed.features.shape == (2, 8, 1)


def test_tokens_see_images_before_them_and_an_image_sees_the_rest_of_itself():
    tokens, pixels = inputs()
    before = hidden(tokens, pixels)
    other = np.array(pixels)
    other[0, 0, -4:, -4:] ^= 255  # pixels of the last patch, which only the last token averages
    other[1, 1] ^= 255
    changed = np.abs(hidden(tokens, other) - before).max(axis=-1) > 1e-6
    assert changed[0].tolist() == [place >= 3 for place in range(SEQ)]
    assert changed[1].tolist() == [place >= 8 for place in range(SEQ)]


def test_a_cache_holds_images():
    tokens, pixels = inputs()
    model, whole = make_model(), hidden(tokens, pixels)
    positions = jnp.broadcast_to(jnp.arange(SEQ), tokens.shape)
    features = jax.jit(lambda model: model.image_features(pixels.reshape(4, 23, 23, 3)).reshape(2, 2, 4, -1))(model)
    call = jax.jit(lambda model, tokens, positions, cache, images: model(tokens, positions, cache=cache, images=images))
    images = place_features(features, tokens, IMAGE)
    cache, parts = DenseKVCache.empty(model.states, batch=2, capacity=16), []
    for part in (slice(0, 7), slice(7, 8), slice(8, SEQ)):
        own = jax.tree.map(lambda array, part=part: array[:, part] if array.ndim == 2 else array, images)
        outputs = call(model, tokens[:, part], positions[:, part], cache, own)
        cache = outputs.cache
        parts.append(outputs.hidden)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=2e-5)


def test_images_of_packed_documents_stay_in_their_document():
    tokens, pixels = inputs()
    positions = jnp.array([[*range(7), *range(6)]] * 2)
    segments = jnp.array([[1] * 7 + [2] * 6] * 2)
    packed = hidden(tokens, pixels, positions, segments)[1]
    # The second document is the first of a row, whose other tokens are padding.
    tokens, pixels = jnp.roll(tokens, -7, axis=1), pixels[:, ::-1]
    alone = hidden(tokens, pixels, segments=jnp.array([[1] * 6 + [0] * 7] * 2))[1]
    np.testing.assert_allclose(packed[7:], alone[:6], atol=2e-5)


def test_the_tower_gets_gradients_from_text():
    tokens, pixels = inputs()
    positions = jnp.broadcast_to(jnp.arange(SEQ), tokens.shape)
    loss = lambda model: jnp.sum(model(tokens, positions, pixels=pixels).hidden[:, -1] ** 2)
    gradients = nnx.to_flat_state(jax.jit(nnx.grad(loss))(make_model()))
    assert all(jnp.any(gradient[...]) for path, gradient in gradients if path[0] in ("vision", "projector"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_tokens": 5}, "image_tokens=5 do not come from 5 x 5 patches"),
        ({"image_tokens": 9}, "image_tokens=9 do not come from 5 x 5 patches"),
        ({"image_tokens": 36}, "image_tokens=36 do not come from 5 x 5 patches"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    fields = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}
    with pytest.raises(ConfigError, match=message):
        Gemma3VisionConfig(**{**fields, **changes})


def test_images_need_a_token_and_come_once():
    tokens, pixels = inputs()
    images = place_features(jnp.zeros((2, 1, 4, 24)), tokens, IMAGE)
    with pytest.raises(ArgumentError, match="Both pixels and images"):
        make_model()(tokens, tokens, pixels=pixels, images=images)
    without = Gemma3VisionConfig(embed=24, heads=4, layers=1, mlp=8)
    model = nnx.eval_shape(lambda: FAMILY.build(without, key=jax.random.key(0)))
    with pytest.raises(ArgumentError, match=r"Set model\.image_token"):
        model(tokens, tokens, pixels=pixels)


def test_a_config_without_a_part_or_with_a_pooling_head_is_refused():
    written = registries.models["gemma3_vision"].config_map.write(CONFIG)
    with pytest.raises(ConversionError, match="no text_config and no vision_config"):
        FAMILY.config_map.read({"architectures": written["architectures"]})
    with pytest.raises(ConversionError, match="vision_use_head=True, not False"):
        FAMILY.config_map.read({**written, "vision_config": {**written["vision_config"], "vision_use_head": True}})


def test_keys_of_the_preprocessor_are_the_models_or_refused():
    written = FAMILY.preprocessor(CONFIG)
    assert FAMILY.preprocessed(CONFIG, written) == FAMILY.preprocessed(CONFIG, {}) == CONFIG
    crops = {"do_pan_and_scan": False, "pan_and_scan_min_crop_size": 256, "pan_and_scan_max_num_crops": None}
    assert FAMILY.preprocessed(CONFIG, {**written, **crops}) == CONFIG
    refused = {"do_pan_and_scan": True, "size": {"height": 22, "width": 23}, "resample": 3, "image_mean": [0.4] * 3}
    refused |= {"image_std": [1.0] * 3, "image_seq_length": 9, "crop_size": {"height": 4}, "do_rescale": False}
    with pytest.raises(ConversionError) as caught:
        FAMILY.preprocessed(CONFIG, refused)
    for name, value in refused.items():
        assert f"{name}={value!r}" in str(caught.value)
