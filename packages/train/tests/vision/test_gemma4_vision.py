"""Gemma 4 with images; `integration_tests/parity/test_gemma4_images.py` compares it with transformers."""

import io
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from stack_core.abi.errors import ConfigError, ConversionError, DataError
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.models.gemma4_vision import FAMILY, Gemma4VisionConfig
from stack_train.vision.gemma4_tower import Gemma4TowerConfig

from ..random_models import draw_model

IMAGE, SEQ = 60, 14
CONFIG = Gemma4VisionConfig(
    vocab_size=61,
    embed=24,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp=40,
    layers=4,
    global_layers=(1, 3),
    shared_layers=2,
    per_layer_input=6,
    window=3,
    max_positions=32,
    dtype="float32",
    image_token=IMAGE,
    image_begin=58,
    image_end=59,
    two_way_images=True,
    max_image_tokens=70,
    pad_token=2,
    vision=Gemma4TowerConfig(embed=14, heads=2, head_dim=8, mlp=18, layers=1, patch=3, merge=2, positions=9),
)


@cache
def make_model(two_way_images=True):
    config = replace(CONFIG, two_way_images=two_way_images)
    model = draw_model(lambda: FAMILY.build(config, key=jax.random.key(0)))
    for block in (block for period in model.blocks for block in period):
        block.output_scale[...] = jnp.ones_like(block.output_scale[...])  # norms amplify the rounding of small outputs
    return model


def inputs():
    """One row with an image of 2 x 3 tokens and one of 1 x 2."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50, (1, SEQ))
    tokens[0, 2:8] = tokens[0, 10:12] = IMAGE
    return jnp.asarray(tokens), jnp.asarray(rng.integers(0, 256, (1, 40, 27)), jnp.uint8), jnp.array([[[2, 3], [1, 2]]])


@jax.jit
def run(model, tokens, pixels, grids):
    return model(tokens, jnp.arange(SEQ)[None], pixels=pixels, grids=grids).hidden[0]


@pytest.mark.parametrize("two_way", [False, True])
def test_local_layers_see_the_rest_of_an_image(two_way):
    tokens, pixels, grids = inputs()
    other = np.array(pixels)
    other[0, 20:24] ^= 255  # of the last token of the first image
    model = make_model(two_way)
    features = [model.image_features(each, grids)[0] for each in map(jnp.asarray, (pixels, other))]
    # All patches of the image attend to each other, and the second image is apart.
    assert (np.abs(features[0] - features[1]).max(axis=-1) > 1e-6).tolist() == [True] * 6 + [False] * 4
    placed = model.place(features[0][None], tokens, None, grids, IMAGE)
    assert placed.rows[0].tolist() == [-1, -1, 0, 1, 2, 3, 4, 5, -1, -1, 6, 7, -1, -1]
    assert (placed.ahead is None) == (not two_way)
    # Only the last token's feature changes.
    changed = replace(placed, features=placed.features.at[0, 5].add(1.0))
    call = jax.jit(lambda model, images: model(tokens, jnp.arange(SEQ)[None], images=images).hidden[0])
    differs = np.abs(call(model, placed) - call(model, changed)).max(axis=-1) > 1e-6
    assert differs.tolist() == [place >= (2 if two_way else 7) for place in range(SEQ)]


def test_global_layers_are_causal():
    model = make_model()
    causal = [layer.attention.causal_images for layer in FAMILY.spec(CONFIG).layers]
    assert causal == [False, True, False, True]
    assert model.embedded_tokens(jnp.array([[5, IMAGE, 6]])).tolist() == [[5, 2, 6]]


def test_a_cache_holds_images():
    tokens, pixels, grids = inputs()
    model = make_model()
    images = model.place(model.image_features(pixels, grids), tokens, None, grids, IMAGE)
    call = jax.jit(lambda model, tokens, positions, cache, images: model(tokens, positions, cache=cache, images=images))
    whole = call(model, tokens, jnp.arange(SEQ)[None], None, images).hidden[0]
    cache, parts = DenseKVCache.empty(model.states, batch=1, capacity=16), []
    for part in (slice(0, 8), slice(8, SEQ)):
        own = replace(images, rows=images.rows[:, part], ahead=images.ahead[:, part])
        outputs = call(model, tokens[:, part], jnp.arange(SEQ)[None, part], cache, own)
        cache = outputs.cache
        parts.append(outputs.hidden[0])
    np.testing.assert_allclose(jnp.concatenate(parts), whole, atol=2e-5)


def test_the_tower_gets_gradients_from_text():
    tokens, pixels, grids = inputs()
    loss = lambda model: jnp.sum(run(model, tokens, pixels, grids)[-1] ** 2)
    gradients = nnx.to_flat_state(nnx.grad(loss)(make_model()))
    assert all(jnp.any(gradient[...]) for path, gradient in gradients if path[0] in ("vision", "projector"))


def file_of(width, height):
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, format="PNG")
    return file.getvalue()


def test_images_are_scaled_to_their_number_of_tokens():
    config = replace(CONFIG, vision=replace(CONFIG.vision, positions=60))
    reader = config.image_reader({"image_token": "<i>", "image_begin": "<b>", "image_end": "<e>"})
    found = reader.read(file_of(20, 13))
    assert (found.grid, found.pixels.shape, reader.count_tokens(file_of(13, 20))) == ((6, 10), (240, 27), 60)
    assert reader.expansion(found.size) == "<b>" + "<i>" * 60 + "<e>"
    assert (reader.sizes, reader.layout) == ((70,), "whole")
    larger = replace(config, max_image_tokens=140, two_way_images=False).image_reader(
        {"image_token": "<i>", "image_begin": "<b>", "image_end": "<e>"}
    )
    assert (larger.count_tokens(file_of(20, 13)), larger.layout) == (9 * 14, "text")
    with pytest.raises(DataError, match="has 140 patches on a side; the model has 60 positions"):
        reader.read(file_of(300, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 6}, "head_dim=6 is not a multiple of 4"),
        ({"kv_heads": 3}, "heads=2 is not a multiple of kv_heads=3"),
    ],
)
def test_towers_of_other_sizes_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG.vision, **changes)
    with pytest.raises(ConfigError, match="pad_token=61 is outside of vocab_size=61"):
        replace(CONFIG, pad_token=61)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("vision_config", {"model_type": "siglip_vision_model"}, "model_type='siglip_vision_model', not"),
        ("vision_config", {"global_head_dim": 16}, "global_head_dim=16, not 8"),
        ("vision_config", {"attention_bias": True}, "attention_bias=True, not False"),
        ("vision_config", {"hidden_activation": "silu"}, "hidden_activation='silu'"),
        ("vision_config", {"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear' of the tower"),
        ("vision_config", {"rope_parameters": {"factor": 2.0}}, "rope_parameters with {'factor': 2.0}"),
        ("vision_config", {"pooling": "max"}, "pooling='max'"),
        ("text_config", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        (None, {"audio_style": "loud"}, "audio_style='loud'"),
        (None, {"vision_config": None}, "config.json has no vision_config"),
    ],
)
def test_keys_that_are_not_supported_are_refused_by_name(part, changes, message):
    written = FAMILY.config_map.write(CONFIG)
    written |= {part: written[part] | changes} if part else changes
    with pytest.raises(ConversionError, match=message):
        FAMILY.config_map.read(written)


def test_published_keys_are_read():
    written = FAMILY.config_map.write(CONFIG)
    written["vision_config"] |= {"default_output_length": 280, "rope_parameters": {"rope_type": "default"}}
    written |= {"audio_config": {"model_type": "gemma4_audio"}, "eoa_token_index": 57, "boa_token_id": 56}
    found = FAMILY.config_map.read(written)
    assert found["vision"]["rope_theta"] == 100.0
    assert (found["two_way_images"], found["pad_token"], found["max_image_tokens"]) == (True, 2, 70)


def test_keys_of_the_preprocessor_are_the_models_or_refused():
    written = FAMILY.preprocessor(CONFIG)
    assert FAMILY.preprocessed(CONFIG, written) == CONFIG
    colors = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "size": {"height": 224, "width": 224}}
    found = FAMILY.preprocessed(CONFIG, {**written, **colors, "max_soft_tokens": 280, "resample": 2})
    assert (found.max_image_tokens, found.resample) == (280, "bilinear")
    wrong = {"do_normalize": True, "pooling_kernel_size": 3, "patch_size": 16, "crop": 3, "resample": 7}
    with pytest.raises(ConversionError) as caught:
        FAMILY.preprocessed(CONFIG, {**written, **wrong})
    for name in wrong:
        assert f"{name}=" in str(caught.value)
    with pytest.raises(ConversionError, match="max_soft_tokens=100, not one of 70, 140, 280, 560, 1120"):
        FAMILY.preprocessed(CONFIG, {**written, "max_soft_tokens": 100})
    assert FAMILY.processed(CONFIG, {**FAMILY.processor(CONFIG), "audio_seq_length": 750}) == CONFIG
    with pytest.raises(ConversionError, match=r"processor_config\.json asks for .*pan_and_scan=True"):
        FAMILY.processed(CONFIG, {"pan_and_scan": True})
