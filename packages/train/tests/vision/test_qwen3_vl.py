"""Qwen3-VL: positions of images, its tower, and features for later layers.

Images within documents and rows are tested for Qwen2.5-VL as well. `integration_tests/parity/test_grid_images.py`
compares the models with transformers.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_core.abi.errors import ArgumentError, ConfigError, ConversionError
from stack_core.abi.models import ImageTokens
from stack_core.abi.plugins import registries
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.models.qwen2_5_vl import Qwen25VLConfig
from stack_train.models.qwen3_vl import FAMILY, Qwen3VLConfig
from stack_train.nn.axial_rope import InterleavedRope, rotate_axes
from stack_train.nn.residual import ResidualStream, Rows
from stack_train.vision.grids import patch_places, place_packed_features, resample
from stack_train.vision.preprocessor import read_preprocessor
from stack_train.vision.qwen2_5_tower import Qwen25TowerConfig
from stack_train.vision.qwen_tower import QwenTowerConfig

IMAGE, SEQ = 60, 19
CONFIG = Qwen3VLConfig(
    vocab_size=61,
    embed=24,
    heads=4,
    kv_heads=2,
    head_dim=10,
    rope_sections=(2, 2, 1),
    mlp=40,
    layers=3,
    max_positions=32,
    dtype="float32",
    initializer_std=0.2,
    image_token=IMAGE,
    min_pixels=36,
    max_pixels=36 * 12,
    vision=QwenTowerConfig(embed=16, heads=2, mlp=18, layers=2, patch=3, position_side=5, deepstack=(0, 1)),
)
# Its windows are of 2 x 2 tokens, so that images have several.
WINDOWED = Qwen25VLConfig(
    vocab_size=61,
    embed=24,
    heads=4,
    kv_heads=2,
    rope_sections=(1, 1, 1),
    mlp=40,
    layers=2,
    max_positions=32,
    dtype="float32",
    initializer_std=0.2,
    image_token=IMAGE,
    min_pixels=36,
    max_pixels=36 * 12,
    vision=Qwen25TowerConfig(embed=16, heads=2, mlp=18, layers=2, patch=3, window=12, full_layers=(1,)),
)
BOTH = pytest.mark.parametrize("config", [CONFIG, WINDOWED], ids=lambda config: config.name)


@cache
def make_model(config=CONFIG):
    return jax.jit(lambda: registries.models[config.name].build(config, key=jax.random.key(0)))()


def inputs():
    """Two rows: an image of 2 x 3 tokens, and images of 1 x 4 and 2 x 1 tokens; both have patches of padding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50, (2, SEQ))
    tokens[0, 3:9] = tokens[1, 1:5] = tokens[1, 9:11] = IMAGE
    grids = np.array([[[2, 3], [0, 0]], [[1, 4], [2, 1]]], np.int32)
    return jnp.asarray(tokens), jnp.asarray(rng.integers(0, 256, (2, 28, 27)), jnp.uint8), jnp.asarray(grids)


def places_of(tokens):
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


@jax.jit
def run(model, tokens, positions, segments, pixels, grids):
    return model(tokens, positions, segments, pixels=pixels, grids=grids).hidden


def hidden(tokens, pixels, grids, positions=None, segments=None, config=CONFIG):
    positions = places_of(tokens) if positions is None else positions
    segments = jnp.ones_like(tokens) if segments is None else segments
    return np.asarray(run(make_model(config), tokens, positions, segments, pixels, grids))


def expected_rotation(x, coordinates, sections, theta, sign=1.0):
    pairs = x.shape[-1] // 2
    found = np.empty(x.shape, np.float64)
    for pair in range(pairs):
        axis = pair % 3 if pair < 3 * sections[pair % 3] else 0
        angle = sign * coordinates[..., axis, None] * theta ** (-pair / pairs)
        first, second = x[..., pair].astype(np.float64), x[..., pair + pairs].astype(np.float64)
        found[..., pair] = first * np.cos(angle) - second * np.sin(angle)
        found[..., pair + pairs] = second * np.cos(angle) + first * np.sin(angle)
    return found


def test_three_axes_rotate_alternating_pairs():
    rng = np.random.default_rng(0)
    x, gradient = jnp.asarray(rng.normal(size=(2, 2, 7, 3, 10)), jnp.float32)
    coordinates = rng.integers(0, 20, (2, 7, 3))
    rope = InterleavedRope(theta=300.0, sections=(2, 2, 1))
    found, pull = jax.vjp(lambda x: rope(x, jnp.asarray(coordinates), None), x)
    np.testing.assert_allclose(found, expected_rotation(np.asarray(x), coordinates, (2, 2, 1), 300.0), atol=2e-5)
    # The transpose of a rotation is its inverse.
    backward = expected_rotation(np.asarray(gradient), coordinates, (2, 2, 1), 300.0, sign=-1.0)
    np.testing.assert_allclose(pull(gradient)[0], backward, atol=2e-5)
    # Text has three equal coordinates.
    text = np.repeat(coordinates[..., :1], 3, axis=2)
    of_text = rope(x, jnp.asarray(text[..., 0]), None)
    np.testing.assert_allclose(rope(x, jnp.asarray(text), None), of_text, atol=1e-6)


def test_sections_of_published_models():
    axes = InterleavedRope(sections=(24, 20, 20)).axis_of_pair
    assert [axes.tolist().count(axis) for axis in range(3)] == [24, 20, 20]
    assert axes[:7].tolist() == [0, 1, 2, 0, 1, 2, 0] and axes[58:].tolist() == [1, 2, 0, 0, 0, 0]
    with pytest.raises(ConfigError, match="rotate the two halves of whole heads"):
        InterleavedRope(sections=(2, 1, 1), rotary_dim=8)


def test_rows_and_columns_rotate_one_half_each():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 1, 8)), jnp.float32)
    coordinates = jnp.array([[[3, 0], [0, 3]]])
    found = rotate_axes(x, coordinates, np.array([0, 0, 1, 1]), np.ones(4, np.float32))
    turned = np.abs(np.asarray(found) - x).max(axis=(0, 2)) > 1e-6
    assert turned.tolist() == [[True, True, False, False] * 2, [False, False, True, True] * 2]


def shares(count, side):
    """Shares of the entries of a line in `count` places from its first to its last, in float64."""
    places = np.arange(count) * (side - 1) / max(count - 1, 1)
    return np.stack([np.interp(places, range(side), one) for one in np.eye(side)], axis=1)


def test_learned_positions_are_interpolated_to_each_grid():
    grids, table = jnp.array([[[2, 3], [1, 1], [0, 0]]]), np.random.default_rng(0).normal(size=(5, 5, 3))
    places = patch_places(grids, 30, 2)
    assert places.segments[0].tolist() == [1] * 24 + [2] * 4 + [0] * 2
    # The patches of a token are adjacent.
    assert places.places[0, :8].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert places.places[0, 12:14].tolist() == [[2, 0], [2, 1]]
    found, pull = jax.vjp(lambda table: resample(table, places), table.astype(np.float32))
    which = np.asarray(places.places[0])
    sizes = [(4, 6)] * 24 + [(2, 2)] * 4
    weights = np.array(
        [
            np.outer(shares(rows, 5)[row], shares(columns, 5)[column]).ravel()
            for (rows, columns), (row, column) in zip(sizes, which[:28], strict=True)
        ]
    )
    np.testing.assert_allclose(found[0, :28], weights @ table.reshape(25, 3), atol=1e-5)
    gradient = np.random.default_rng(1).normal(size=(1, 30, 3)).astype(np.float32)
    gradient[0, 28:] = 0
    np.testing.assert_allclose(pull(gradient)[0].reshape(25, 3), weights.T @ gradient[0, :28], atol=1e-5)


def expected_positions(tokens, grids):
    """Positions of a document, token by token."""
    found, position, place, grids = [], 0, 0, list(grids)
    while place < len(tokens):
        if tokens[place] == IMAGE and grids:
            rows, columns = grids.pop(0)
            found += [(position, position + row, position + column) for row in range(rows) for column in range(columns)]
            position, place = position + max(rows, columns), place + rows * columns
        else:
            found.append((position,) * 3)
            position, place = position + 1, place + 1
    return found


def test_images_have_positions_in_two_directions():
    tokens, _, grids = inputs()
    features = jnp.zeros((2, 7, 4))
    placed = place_packed_features(features, tokens, places_of(tokens), grids, IMAGE)
    for row, own in enumerate(([(2, 3)], [(1, 4), (2, 1)])):
        assert placed.positions[row].tolist() == [list(each) for each in expected_positions(tokens[row].tolist(), own)]
    assert placed.rows[0, 2:10].tolist() == [-1, 0, 1, 2, 3, 4, 5, -1]
    assert placed.rows[1, 9:12].tolist() == [4, 5, -1]
    # Without an image for it, an image token is text.
    alone = place_packed_features(features, tokens, places_of(tokens), 0 * grids, IMAGE)
    assert (alone.rows == -1).all() and (alone.positions == places_of(tokens)[..., None]).all()


@BOTH
def test_documents_of_a_row_are_as_alone(config):
    tokens, pixels, grids = inputs()
    positions = jnp.array([[*range(7), *range(12)]] * 2)
    segments = jnp.array([[1] * 7 + [2] * 12] * 2)
    packed = hidden(*(array[jnp.array([1, 1])] for array in (tokens, pixels, grids)), positions, segments, config)[0]
    # Each document is the first of a row, whose other tokens are padding.
    place = jnp.arange(SEQ)
    alone = jnp.stack([tokens[1], jnp.roll(tokens[1], -7)])
    own = jnp.stack([grids[1], grids[1, ::-1]]) * jnp.array([1, 0])[:, None]
    real = (place < jnp.array([[7], [12]])).astype(jnp.int32)
    own_pixels = jnp.stack([pixels[1], jnp.roll(pixels[1], -16, axis=0)])
    first, second = hidden(alone, own_pixels, own, segments=real, config=config)
    np.testing.assert_allclose(packed[:7], first[:7], atol=2e-5)
    np.testing.assert_allclose(packed[7:], second[:12], atol=2e-5)


@BOTH
def test_images_are_causal_and_separate(config):
    tokens, pixels, grids = inputs()
    before = hidden(tokens, pixels, grids, config=config)
    other = np.array(pixels)
    other[1, 16:24] ^= 255  # the second image of the second row
    other[1, 24:] ^= 255  # padding
    changed = np.abs(hidden(tokens, other, grids, config=config) - before).max(axis=-1) > 1e-6
    assert not changed[0].any()
    assert changed[1].tolist() == [place >= 9 for place in range(SEQ)]


@jax.jit
def layer_by_layer(model, tokens, pixels, grids):
    """Computes a model without its loops, and the images that it sees."""
    images = place_packed_features(model.image_features(pixels, grids), tokens, places_of(tokens), grids, IMAGE)
    is_image = images.rows[..., None] >= 0
    own, *later = (
        jnp.take_along_axis(each, jnp.maximum(images.rows, 0)[..., None], axis=1)
        for each in jnp.split(images.features, 3, axis=-1)
    )
    x = jnp.where(is_image, own, model.embedding[...][tokens])
    rows = Rows(places_of(tokens), None, None, images.positions)
    for layer in range(CONFIG.layers):
        group, place = divmod(layer, 2)  # of two layers that add features, and one that does not
        graph, state = nnx.split(model.blocks[group][0])
        block = nnx.merge(graph, jax.tree.map(lambda array, place=place: array[place], state))
        x = block(ResidualStream(x, None), rows, None, None)[0].joined().x
        if layer < len(later):
            x = x + jnp.where(is_image, later[layer], 0)
    return ResidualStream(x, None).normed(model.norm_spec, model.norm)[0], images


def test_features_are_added_to_the_outputs_of_the_first_layers():
    tokens, pixels, grids = inputs()
    expected, images = layer_by_layer(make_model(), tokens, pixels, grids)
    assert images.features.shape == (2, 7, 3 * CONFIG.embed)
    np.testing.assert_allclose(hidden(tokens, pixels, grids), expected, atol=2e-5)


def test_a_cache_holds_images():
    tokens, pixels, grids = inputs()
    model, whole = make_model(), hidden(tokens, pixels, grids)
    _, images = layer_by_layer(model, tokens, pixels, grids)
    cache, parts = DenseKVCache.empty(model.states, batch=2, capacity=24), []
    call = jax.jit(lambda model, tokens, positions, cache, images: model(tokens, positions, cache=cache, images=images))
    # The first part ends in an image, and the last has none, but positions behind the places.
    for part in (slice(0, 6), slice(6, 11), slice(11, SEQ)):
        own = replace(images, rows=images.rows[:, part], positions=images.positions[:, part])
        outputs = call(model, tokens[:, part], images.positions[:, part, 0], cache, own if part.start < 11 else None)
        cache = outputs.cache
        parts.append(outputs.hidden)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=2e-5)


@BOTH
def test_the_tower_gets_gradients_from_text(config):
    tokens, pixels, grids = inputs()
    segments = jnp.ones_like(tokens)
    loss = lambda model: jnp.sum(run(model, tokens, places_of(tokens), segments, pixels, grids)[:, -1] ** 2)
    gradients = nnx.to_flat_state(nnx.grad(loss)(make_model(config)))
    tower = [(path, jnp.any(gradient[...])) for path, gradient in gradients if path[0] == "vision"]
    # A softmax does not depend on what all keys share.
    assert [path for path, found in tower if not found and path[-2:] != ("key", "bias")] == []
    assert len(tower) == {CONFIG: 3 + 2 * 16 + 3 * 6, WINDOWED: 2 + 16 + 4}[config]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_sections": (2, 2, 2)}, r"rope_sections=\[2, 2, 2\] have 6 pairs; a head of 10 features has 5"),
        ({"layers": 1}, r"vision\.deepstack=\[0, 1\] has features for 2 layers, and the decoder layers=1"),
        ({"min_pixels": 35}, "expected 36 .the pixels of a token. <= min_pixels <= max_pixels"),
        ({"max_pixels": 35}, "expected 36 .the pixels of a token. <= min_pixels <= max_pixels"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "embed=16 is not a multiple of 4 heads=12"),
        ({"deepstack": (1, 1)}, r"deepstack=\[1, 1\] are not ascending layers below layers=2"),
        ({"deepstack": (2,)}, r"deepstack=\[2\] are not ascending layers below layers=2"),
        ({"mean": (0.5,)}, "need channels=3 values"),
    ],
)
def test_towers_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG.vision, **changes)


def test_a_patch_is_rounded_once_in_bf16():
    """As in transformers, which multiplies both frames of an image; the sum of their kernels would be rounded first."""
    model = nnx.clone(make_model()).vision
    model.dtype, model.positions[...] = "bfloat16", 0 * model.positions[...]
    _, pixels, grids = inputs()
    found = model._embedded(pixels, patch_places(grids, pixels.shape[1], 2))
    assert found.dtype == jnp.bfloat16
    values = jnp.asarray((np.asarray(pixels, np.float32) / 255 - 0.5) / 0.5, jnp.bfloat16)
    kernels = model.patches[...].astype(jnp.bfloat16)
    values, kernels = (np.asarray(each, np.float64) for each in (values, kernels))
    expected = values @ kernels.sum(axis=2).reshape(len(kernels), -1).T
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-8, atol=1e-4)


def test_images_need_a_token_and_grids_and_come_once():
    tokens, pixels, grids = inputs()
    model = make_model()
    images = ImageTokens(jnp.zeros((2, 1, 72)), tokens)
    with pytest.raises(ArgumentError, match="Both pixels and images"):
        model(tokens, tokens, pixels=pixels, grids=grids, images=images)
    with pytest.raises(ArgumentError, match="Pixels and grids belong together"):
        model(tokens, tokens, pixels=pixels)
    without = nnx.eval_shape(lambda: FAMILY.build(replace(CONFIG, image_token=None), key=jax.random.key(0)))
    with pytest.raises(ArgumentError, match=r"Set model\.image_token"):
        without(tokens, tokens, pixels=pixels, grids=grids)


def test_a_config_comes_back_and_other_settings_are_refused():
    written = FAMILY.config_map.write(CONFIG)
    bounds = {"min_pixels": CONFIG.min_pixels, "max_pixels": CONFIG.max_pixels, "dtype": "float32"}
    read = FAMILY.config_map.read(written)
    assert Qwen3VLConfig(**{**read, **bounds, "vision": QwenTowerConfig(**read["vision"])}) == CONFIG
    with pytest.raises(ConversionError, match="no text_config and no vision_config"):
        FAMILY.config_map.read({"architectures": written["architectures"]})
    text = {**written["text_config"], "rope_scaling": {"mrope_interleaved": False, "mrope_section": [2, 2, 1]}}
    with pytest.raises(ConversionError, match="mrope_interleaved=False, not True"):
        FAMILY.config_map.read({**written, "text_config": text})
    vision = {**written["vision_config"], "num_position_embeddings": 24, "out_hidden_size": 25, "hidden_act": "silu"}
    vision["rope_parameters"] = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(ConversionError) as caught:
        FAMILY.config_map.read({**written, "vision_config": {**vision, "window_size": 4}})
    for part in (
        "hidden_act='silu', not 'gelu_pytorch_tanh'",
        "out_hidden_size=25, not hidden_size=24 of the text_config",
        "num_position_embeddings=24, not a square number",
        "rope_parameters with {'factor': 2.0}",
        "rope_type='linear' of the tower, not 'axial'",
        "window_size=4",
    ):
        assert part in str(caught.value)


def test_each_key_of_the_preprocessor_acts_or_is_refused():
    written = FAMILY.preprocessor(CONFIG)
    assert read_preprocessor(CONFIG, written) == CONFIG
    given = {**written, "size": {"shortest_edge": 72, "longest_edge": 360}, "image_mean": [0.1, 0.2, 0.3]}
    found = read_preprocessor(CONFIG, {**given, "image_std": [1, 2, 3], "crop_size": None, "resample": 3})
    assert (found.min_pixels, found.max_pixels) == (72, 360)
    assert (found.vision.mean, found.vision.std) == ((0.1, 0.2, 0.3), (1, 2, 3))
    # The older keys take precedence, as in transformers.
    assert read_preprocessor(CONFIG, {**given, "min_pixels": 108}).min_pixels == 108
    refused = {"patch_size": 4, "merge_size": 3, "temporal_patch_size": 1, "do_resize": False, "resample": 2}
    refused |= {"do_normalize": False, "rescale_factor": 1.0, "do_center_crop": True, "crop_size": {"height": 4}}
    with pytest.raises(ConversionError) as caught:
        read_preprocessor(CONFIG, {**refused, "size": {"height": 9}})
    for name in (*refused, "size with 'height'"):
        assert name in str(caught.value)
    with pytest.raises(ConversionError, match=r"does not fit the model: .*expected 36"):
        read_preprocessor(CONFIG, {"size": {"shortest_edge": 1}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 224}, "size=224, not a mapping with 'shortest_edge'"),
        ({"size": {"shortest_edge": "72"}}, "min_pixels='72', not a positive integer"),
        ({"max_pixels": 360.0}, "max_pixels=360.0, not a positive integer"),
        ({"image_mean": 0.5}, "image_mean=0.5, not a list of 3 numbers"),
        ({"image_std": [0.5, None, 0.5]}, r"image_std=\[0.5, None, 0.5\], not a list of 3 positive numbers"),
        ({"image_std": "0.5"}, "image_std='0.5', not a list"),
        ({"image_mean": [0.5]}, r"image_mean=\[0.5\], not a list of 3 numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "3 positive numbers"),
        ({"min_pixels": -1}, "min_pixels=-1, not a positive integer"),
        ({"patch_size": "3"}, "patch_size='3', not 3"),
        ({"sharpen": 0}, "sharpen=0"),
        ({"do_sharpen": ""}, "do_sharpen=''"),
        ({"crop_size": {}}, "crop_size={}"),
        ({"crops": []}, r"crops=\[\]"),
        ({"sharpen": False}, "sharpen=False"),
    ],
)
def test_malformed_keys_of_the_preprocessor_are_refused_by_name(changes, message):
    with pytest.raises(ConversionError, match=message):
        read_preprocessor(CONFIG, changes)


def test_absent_keys_of_the_preprocessor_keep_the_fields():
    mapping = {"size": {"shortest_edge": None, "longest_edge": None}, "image_mean": None, "do_center_crop": False}
    assert read_preprocessor(CONFIG, mapping) == CONFIG
