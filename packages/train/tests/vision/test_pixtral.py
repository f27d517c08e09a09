"""Pixtral and Mistral 3: images, settings and errors; `integration_tests/parity` compares them with transformers."""

import io
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import ExifTags, Image
from tokenizers import Tokenizer, models

from stack_core.abi.errors import ArgumentError, ConfigError, ConversionError, DataError
from stack_core.abi.plugins import registries
from stack_core.text.images import ImageSize
from stack_train.data.kinds.chat import load_tokenizer
from stack_train.models.mistral3 import Mistral3Config
from stack_train.models.pixtral import PixtralConfig
from stack_train.vision.grids import feature_rows
from stack_train.vision.pixtral_images import (
    PixtralImages,
    read_pixtral_preprocessor,
    read_pixtral_processor,
    write_pixtral_preprocessor,
    write_pixtral_processor,
)
from stack_train.vision.pixtral_tower import PixtralTowerConfig
from stack_train.vision.reader import image_reader

from ..random_models import draw_model

TOWER = PixtralTowerConfig(embed=16, heads=2, mlp=18, layers=2, patch=3)
SIZES = {"vocab_size": 61, "embed": 24, "heads": 4, "kv_heads": 2, "head_dim": 10, "mlp": 40, "layers": 2}
SIZES |= {"max_positions": 32, "dtype": "float32", "image_token": 60, "longest_edge": 20, "vision": TOWER}
CONFIGS = [PixtralConfig(**SIZES), Mistral3Config(**SIZES)]
READER = PixtralImages(
    "<i>", 60, patch=3, merge=2, channels=3, image_break="<b>", image_end="<e>", longest_edge=20, resample="bilinear"
)


def file_of(height, width, kind="PNG", **options):
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, format=kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((6, 12), (1, 2)),  # fits
        ((7, 1), (2, 1)),  # rounded up
        ((20, 19), (4, 4)),  # the largest
        ((40, 10), (4, 1)),  # scaled down to 20 x 5
        ((21, 19), (4, 3)),  # to 20 x 18
    ],
)
def test_grids_cover_images_that_fit_in_the_square(size, grid):
    data = file_of(*size)
    image = READER.read(data)
    assert image.grid == grid and READER.count_tokens(data) == image.tokens == grid[0] * grid[1]
    assert READER.measure(data) == image.size
    assert image.pixels.shape == READER.shape(image.tokens) == (4 * image.tokens, 27)
    assert image.tokens <= READER.sizes[-1] == 16


def test_rows_end_with_breaks_and_images_with_an_end():
    assert READER.expansion(ImageSize(6, (2, 3))) == "<i><i><i><b><i><i><i><e>"
    assert READER.expansion(ImageSize(1, (1, 1))) == "<i><e>"
    assert replace(READER, longest_edge=1000).sizes == (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 27889)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_images_are_measured_upright(kind, orientation):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = file_of(6, 18, kind, exif=exif)
    assert READER.measure(data) == READER.read(data).size == ImageSize(3, (3, 1) if orientation > 3 else (1, 3))


def test_images_without_rows_are_refused():
    with pytest.raises(DataError, match=r"The image of 41 x 1 pixels has 20 x 0 after scaling it to longest_edge=20"):
        READER.count_tokens(file_of(1, 41))
    with pytest.raises(DataError, match="The image has 8192 x 8193 pixels; at most 67,108,864 are decoded"):
        file = io.BytesIO()
        Image.new("1", (8192, 8193)).save(file, format="PNG")
        READER.measure(file.getvalue())


def test_features_belong_to_image_tokens_in_order():
    tokens = jnp.asarray([[60, 60, 1, 60, 60, 2, 60, 3, 60], [1, 60, 2, 3, 4, 5, 6, 7, 8]])
    grids = jnp.asarray([[[2, 2], [1, 1]], [[0, 0], [0, 0]]])
    # Tokens behind the last image keep their embeddings.
    assert feature_rows(tokens, grids, 60).tolist() == [[0, 1, -1, 2, 3, -1, 4, -1, -1], [-1] * 9]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_images_do_not_see_each_other(config):
    model = draw_model(lambda: registries.models[config.name].build(config, key=jax.random.key(0)), scale=0.5)
    unit = (config.merged_patches or 1) ** 2
    rng = np.random.default_rng(0)
    pixels = jnp.asarray(rng.integers(0, 256, (1, 8 * unit, 27)), jnp.uint8)
    grids = jnp.asarray([[[2, 2], [1, 3]]], jnp.int32)
    features = jax.jit(model.image_features)
    both = features(pixels, grids)
    changed = features(pixels.at[:, 4 * unit :].set(0), grids)
    np.testing.assert_allclose(changed[:, :4], both[:, :4], atol=1e-5)
    assert np.abs(changed[:, 4:7] - both[:, 4:7]).max() > 1e-3
    # A row of four tokens has other positions than two rows of two.
    assert np.abs(features(pixels, grids.at[0, 0].set(jnp.asarray([1, 4])))[:, :4] - both[:, :4]).max() > 1e-3
    arrays = config.image_arrays(2, 32)
    assert arrays["pixels"].shape == (32 * unit, 27) and arrays["grids"].shape == (2, 2)
    with pytest.raises(ArgumentError, match="Pixels and grids belong together"):
        model(grids[..., 0], grids[..., 0], pixels=pixels)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_each_key_of_the_preprocessor_acts_or_is_refused(config):
    assert read_pixtral_preprocessor(config, write_pixtral_preprocessor(config)) == config
    given = {"size": {"longest_edge": 33}, "resample": 2, "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}
    found = read_pixtral_preprocessor(config, {**given, "do_pad": True, "patch_size": 3, "crop_size": None})
    assert (found.longest_edge, found.resample) == (33, "bilinear")
    assert (found.vision.mean, found.vision.std) == ((0.1, 0.2, 0.3), (1, 2, 3))
    for size in (44, {"height": 44, "width": 44, "longest_edge": None}):
        assert read_pixtral_preprocessor(config, {"size": size}).longest_edge == 44
    refused = {"patch_size": {"height": 3, "width": 4}, "do_resize": False, "resample": 1, "do_normalize": False}
    refused |= {"rescale_factor": 1.0, "do_center_crop": True, "sharpen": 0, "size": {"height": 4, "width": 5}}
    with pytest.raises(ConversionError) as caught:
        read_pixtral_preprocessor(config, refused)
    for name in refused:
        assert f"{name}=" in str(caught.value)
    for wrong in ({"size": {"longest_edge": 0}}, {"size": {"longest_edge": 9, "shortest_edge": 3}}, {"resample": [3]}):
        with pytest.raises(ConversionError, match=next(iter(wrong))):
            read_pixtral_preprocessor(config, wrong)


def mapping_of(config, part="", **changes):
    mapping = registries.models[config.name].config_map.write(config)
    return {**mapping, part: {**mapping[part], **changes}} if part else {**mapping, **changes}


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("vision_config", {"model_type": "clip_vision_model"}, "model_type='clip_vision_model', not 'pixtral'"),
        ("vision_config", {"head_dim": 12}, "head_dim=12, not 8"),
        ("vision_config", {"hidden_act": "tanh"}, "hidden_act='tanh' of the tower, not one of gelu"),
        ("vision_config", {"rope_parameters": {"rope_type": "linear", "factor": 2}}, "rope_type='linear' of the tower"),
        ("vision_config", {"window_size": 4}, "window_size=4"),
        (
            "text_config",
            {"model_type": "mistral4"},
            "model_type='mistral4'; expected one of mistral, ministral3, llama",
        ),
        ("text_config", {"sparse_heads": 4}, "sparse_heads=4"),
        ("", {"vision_feature_layer": -2}, "vision_feature_layer=-2, not -1"),
        ("", {"projector_hidden_act": "silu"}, "projector_hidden_act='silu', not 'gelu'"),
        ("", {"memory_tokens": 8}, "memory_tokens=8"),
    ],
)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_configs_of_other_models_are_refused_by_name(config, part, changes, message):
    config_map = registries.models[config.name].config_map
    with pytest.raises(ConversionError, match=message):
        config_map.read(mapping_of(config, part, **changes))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_a_config_comes_back(config):
    config_map = registries.models[config.name].config_map
    found = config_map.read(mapping_of(config))
    own = {"dtype": "float32", "longest_edge": config.longest_edge}
    assert type(config)(**{**found, **own, "vision": PixtralTowerConfig(**found["vision"])}) == config
    llama = {**mapping_of(config)["text_config"], "model_type": "llama", "attention_bias": False}
    del llama["sliding_window"]
    assert config_map.read(mapping_of(config, text_config=llama))["embed"] == 24
    with pytest.raises(ConversionError, match="a Llama has attention_bias; expected no biases"):
        config_map.read(mapping_of(config, text_config={**llama, "attention_bias": True}))


def test_the_layer_of_features_has_no_default():
    mapping = mapping_of(CONFIGS[0])
    del mapping["vision_feature_layer"]
    with pytest.raises(ConversionError, match="vision_feature_layer=-2, not -1"):
        registries.models["pixtral"].config_map.read(mapping)


def test_towers_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="embed=16 is not a multiple of 4 heads=12"):
        replace(TOWER, heads=3)
    with pytest.raises(ConfigError, match="need channels=3 values"):
        replace(TOWER, std=(1.0,))


def test_breaks_are_tokens_of_the_tokenizer(tmp_path):
    words = {"a": 0, "<i>": 1, "<b>": 2, "<e>": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.add_special_tokens(list(words)[1:])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<e>"}')
    found = load_tokenizer(str(tmp_path), "image_chat", None)
    config = replace(CONFIGS[1], image_token=1, image_break="<b>", image_end="<e>")
    assert image_reader(config, found).image_break == "<b>"
    for changes in ({"image_break": "<b><b>"}, {"image_end": ""}, {"image_break": "<i>"}):
        with pytest.raises(
            ConfigError, match=r"Set model\.image_break and model\.image_end to tokens of the tokenizer"
        ):
            image_reader(replace(config, **changes), found)
    assert image_reader(replace(config, image_token=None), found) is None


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_each_key_of_the_processor_acts_or_is_refused(config):
    own = replace(config, image_break="<b>", image_end="<e>")
    written = write_pixtral_processor(own)
    assert read_pixtral_processor(config, {**written, "image_token": "<i>", "image_processor": {}}) == own
    assert read_pixtral_processor(own, {}) == own
    merge = config.merged_patches or 1
    wrong = {**written, "patch_size": 4, "spatial_merge_size": merge + 1, "image_end_token": 5, "crops": 2}
    with pytest.raises(ConversionError) as caught:
        read_pixtral_processor(config, wrong)
    for part in ("patch_size=4, not 3", f"size={merge + 1}, not {merge}", "image_end=5, not a text", "crops=2"):
        assert part in str(caught.value)
