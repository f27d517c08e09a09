"""Qwen2.5-VL: windows of its tower, settings and errors.

`integration_tests/parity/test_grid_images.py` compares the model with transformers.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ConfigError, ConversionError
from stack_train.models.qwen2_5_vl import FAMILY, Qwen25VLConfig
from stack_train.nn.axial_rope import SectionedRope
from stack_train.vision.grids import windows
from stack_train.vision.qwen2_5_tower import Qwen25Tower, Qwen25TowerConfig

TOWER = Qwen25TowerConfig(embed=16, heads=2, mlp=18, layers=2, patch=3, window=17)
CONFIG = Qwen25VLConfig(
    vocab_size=61,
    embed=24,
    heads=3,
    kv_heads=3,
    rope_sections=(2, 1, 1),
    mlp=40,
    layers=2,
    max_positions=32,
    dtype="float32",
    image_token=60,
    min_pixels=36,
    max_pixels=36 * 12,
    vision=TOWER,
)
# Images of 3 x 5 and 2 x 2 tokens, and a row without images.
GRIDS = np.array([[[3, 5], [2, 2]], [[0, 0], [0, 0]]], np.int32)
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 4 * 21, 27), np.uint8)


def test_tokens_of_a_window_become_adjacent():
    order, window = windows(jnp.asarray(GRIDS), 21, 2)
    first = [[0, 1, 5, 6], [2, 3, 7, 8], [4, 9], [10, 11], [12, 13], [14]]
    assert order[0].tolist() == [token for tokens in first for token in tokens] + [*range(15, 21)]
    sizes = [*map(len, first), 4]
    assert window[0].tolist() == [*np.repeat(np.arange(1, 8), sizes).tolist(), 0, 0]
    assert order[1].tolist() == list(range(21)) and not window[1].any()


def features(pixels, **changes):
    config = replace(TOWER, **changes)
    make = lambda: Qwen25Tower(config, 8, std=0.5, dtype="float32", param_dtype="float32", key=jax.random.key(0))
    return np.asarray(jax.jit(lambda pixels: make()(pixels, jnp.asarray(GRIDS)))(pixels))


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({}, [7, 8, 2, 3]),  # the window of 2 x 2 tokens
        ({"full_layers": (0,)}, range(15)),  # the image
        ({"window": 18}, [0, 1, 2, 5, 6, 7, 10, 11, 12]),  # the window of 3 x 3 tokens
    ],
)
def test_a_token_is_seen_within_its_window(changes, seen):
    other = PIXELS.copy()
    other[0, 4 * 7] ^= 255
    changed = np.abs(features(other, **changes) - features(PIXELS, **changes)).max(axis=-1) > 1e-6
    assert np.flatnonzero(changed[0]).tolist() == sorted(seen) and not changed[1].any()


def test_pairs_of_an_axis_are_adjacent():
    assert SectionedRope(sections=(2, 3, 1)).axis_of_pair.tolist() == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 5}, "window=5 is smaller than a token of 6 pixels"),
        ({"full_layers": (0, 2)}, r"full_layers has \[2\], and the tower layers=2"),
        ({"heads": 3}, "embed=16 is not a multiple of 4 heads=12"),
    ],
)
def test_towers_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(TOWER, **changes)


def test_heads_have_the_width_of_the_decoder():
    with pytest.raises(ConfigError, match=r"heads=3 of 6 features are not embed=24.*Remove head_dim"):
        replace(CONFIG, head_dim=6, rope_sections=(1, 1, 1))


def test_a_config_comes_back_nested_and_flat():
    written = FAMILY.config_map.write(CONFIG)
    found = FAMILY.config_map.read(written)
    own = {"dtype": "float32", "min_pixels": CONFIG.min_pixels, "max_pixels": CONFIG.max_pixels}
    assert Qwen25VLConfig(**{**found, **own, "vision": Qwen25TowerConfig(**found["vision"])}) == CONFIG
    outer = {name: value for name, value in written.items() if name != "text_config"}
    flat = {**written["text_config"], **outer, "bos_token_id": 1, "vision_token_id": 2}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 1, 1]}
    assert FAMILY.config_map.read(flat) == found
    assert FAMILY.published_name("model.language_model.norm.weight") == "model.norm.weight"
    assert FAMILY.published_name("model.visual.merger.ln_q.weight") == "visual.merger.ln_q.weight"
    assert FAMILY.published_name("lm_head.weight") == "lm_head.weight"


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("text_config", {"use_sliding_window": True}, "use_sliding_window=True, not False"),
        ("text_config", {"head_dim": 6}, "head_dim=6, not 8"),
        ("text_config", {"layer_types": ["sliding_attention"] * 2}, "layer_types="),
        (
            "text_config",
            {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}},
            "mrope_interleaved=True, not False",
        ),
        ("vision_config", {"hidden_act": "gelu"}, "hidden_act='gelu', not 'silu'"),
        ("vision_config", {"out_hidden_size": 25}, "out_hidden_size=25, not hidden_size=24 of the text_config"),
        ("vision_config", {"deepstack_visual_indexes": [1]}, r"deepstack_visual_indexes=\[1\]"),
        ("", {"audio_config": {"layers": 2}}, "audio_config="),
    ],
)
def test_settings_of_other_models_are_refused_by_name(part, changes, message):
    written = FAMILY.config_map.write(CONFIG)
    with pytest.raises(ConversionError, match=message):
        FAMILY.config_map.read({**written, part: {**written[part], **changes}} if part else {**written, **changes})


def test_the_preprocessor_comes_back():
    written = FAMILY.preprocessor(CONFIG)
    assert written["processor_class"] == "Qwen2_5_VLProcessor"
    assert FAMILY.preprocessed(replace(CONFIG, min_pixels=72), written) == CONFIG
