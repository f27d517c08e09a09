"""Parts of diffusers directories in their publishers' own layout: every key, and tensors in shards.

No copies of the files of Stable Diffusion, Wan and LTX-Video were available: their keys are those of diffusers'
classes, and their values come from model cards, for Wan's autoencoder from the defaults of its class, and for LTX-Video
from public projects that quote them. The parameter counts were compared with diffusers' and transformers' classes of
the same configs.
"""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from stack_core.abi.errors import ConversionError
from stack_train.diffusion import (
    autoencoder_kl,
    autoencoder_kl_ltx,
    autoencoder_kl_wan,
    clip,
    clip_vision,
    dit,
    exchange,
    flux,
    ltx,
    sd3,
    t5,
    unet,
    wan,
)
from stack_train.diffusion.components import load_component
from stack_train.diffusion.noise import DynamicShift
from stack_train.diffusion.samplers import SamplerConfig
from stack_train.diffusion.scheduler import read_scheduler
from stack_train.variables.model_variables import ModelVariables, values_of

FOLDER = Path(__file__).parent / "published"
PARAMETERS = {
    "FLUX.1-dev/transformer": (flux, 11_901_408_320),
    "FLUX.1-schnell/transformer": (flux, 11_891_178_560),
    "FLUX.1-dev/vae": (autoencoder_kl, 83_819_683),
    "FLUX.1-dev/text_encoder": (clip, 123_060_480),
    "FLUX.1-dev/text_encoder_2": (t5, 4_762_310_656),
    "DiT-XL-2-256/transformer": (dit, 749_826_464),  # each block has its own embedding of times and labels
    # With the table of positions, which diffusers does not count: 2,028,328,000, 8,056,627,520 and 2,243,171,520.
    "stable-diffusion-3-medium/transformer": (sd3, 2_084_951_104),
    "stable-diffusion-3.5-large/transformer": (sd3, 8_146_280_768),
    "stable-diffusion-3.5-medium/transformer": (sd3, 2_469_663_936),
    "stable-diffusion-v1-5/unet": (unet, 859_520_964),
    "stable-diffusion-xl-base-1.0/unet": (unet, 2_567_463_684),
    "Wan2.1-T2V-1.3B/transformer": (wan, 1_418_996_800),
    "Wan2.1-T2V-1.3B/vae": (autoencoder_kl_wan, 126_892_531),
    "Wan2.1-I2V-14B/transformer": (wan, 16_394_878_784),
    "Wan2.1-I2V-14B/image_encoder": (clip_vision, 630_766_080),
    "LTX-Video/transformer": (ltx, 1_923_385_472),
    "LTX-Video/vae": (autoencoder_kl_ltx, 419_193_905),
    "LTX-Video-0.9.1/vae": (autoencoder_kl_ltx, 934_976_690),
    "LTX-Video-0.9.5/vae": (autoencoder_kl_ltx, 1_246_913_778),
}
FLUX = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "num_single_layers": 2}
FLUX |= {"in_channels": 16, "out_channels": 16, "joint_attention_dim": 24, "pooled_projection_dim": 20}
FLUX |= {"axes_dims_rope": [4, 6, 6]}


def published(name):
    return json.loads((FOLDER / name / "config.json").read_text())


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_config_is_that_of_a_model_of_its_size(name):
    family, expected = PARAMETERS[name]
    config = family.COMPONENT.read_config(published(name))
    model = nnx.eval_shape(lambda: family.COMPONENT.family.build(config, key=jax.random.key(0)))
    assert sum(math.prod(leaf.shape) for leaf in ModelVariables.of(model).shapes.values()) == expected


def test_published_schedulers_are_read():
    shifts = [read_scheduler(FOLDER / name / "scheduler").objective.shift for name in ("FLUX.1-dev", "FLUX.1-schnell")]
    assert shifts == [DynamicShift(), 1.0]
    wan_scheduler = read_scheduler(FOLDER / "Wan2.1-T2V-1.3B" / "scheduler")
    assert (wan_scheduler.objective.shift, wan_scheduler.sampler) == (3.0, SamplerConfig(name="unipc"))
    ltx_scheduler = read_scheduler(FOLDER / "LTX-Video" / "scheduler")
    shift = DynamicShift(base_shift=0.95, max_shift=2.05, base_tokens=1024)
    assert (ltx_scheduler.objective.shift, ltx_scheduler.sampler) == (shift, SamplerConfig(terminal=0.1))


def test_a_flux_that_predicts_other_channels_is_refused():
    mapping = published("FLUX.1-schnell/transformer") | {"out_channels": 128}
    with pytest.raises(ConversionError, match="out_channels=128, not in_channels, 64"):
        flux.COMPONENT.read_config(mapping)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"class_embed_type": "timestep"}, "class_embed_type='timestep'"),
        ({"act_fn": "gelu"}, "act_fn='gelu', not 'silu'"),
        ({"addition_embed_type": "image"}, "addition_embed_type='image' .* not text_time"),
        ({"down_block_types": ["AttnDownBlock2D"] * 4}, r"down_block_types=\['AttnDownBlock2D'\], not DownBlock2D or"),
        ({"up_block_types": ["UpBlock2D"] * 4}, "up_block_types="),
        ({"attention_head_dim": [8, 8]}, "heads have 4, 4 and 2 entries"),
        ({"norm_num_groups": 48}, "not multiples of groups=48"),
        ({"attention_head_dim": 7}, "a multiple of its number of heads"),
    ],
)
def test_a_unet_with_other_blocks_is_refused(settings, message):
    with pytest.raises(ConversionError, match=message):
        unet.COMPONENT.read_config(published("stable-diffusion-v1-5/unet") | settings)


@pytest.mark.parametrize("name", ["stable-diffusion-v1-5/unet", "stable-diffusion-xl-base-1.0/unet"])
def test_a_published_unet_config_is_written_with_the_same_values(name):
    mapping = published(name)
    written_again = unet.COMPONENT.write_config(unet.COMPONENT.read_config(mapping))
    heads = mapping["attention_head_dim"]
    expected = {key: value for key, value in mapping.items() if value and not key.startswith("_")}
    expected["attention_head_dim"] = heads if isinstance(heads, list) else [heads] * 4
    expected.pop("addition_embed_type_num_heads", None)
    assert {key: written_again[key] for key in expected} == expected


@pytest.mark.parametrize("name", [name for name, (family, _) in PARAMETERS.items() if family is sd3])
def test_every_key_of_a_published_stable_diffusion_3_acts_and_is_written(name):
    mapping = {key: value for key, value in published(name).items() if key[0] != "_"}
    config = sd3.COMPONENT.read_config(mapping)
    written_again = sd3.COMPONENT.write_config(config)
    assert {key: written_again[key] for key in mapping} == mapping
    assert all(not written_again[key] for key in written_again.keys() - mapping.keys() - {"_class_name"})
    for key in mapping.keys() - {"caption_projection_dim", "out_channels"}:  # which others determine
        others = {key: [0] if key == "dual_attention_layers" else 2 * mapping[key] if key != "qk_norm" else None}
        others |= {"caption_projection_dim": 2 * config.embed} if key.endswith(("_heads", "_head_dim")) else {}
        others |= {"out_channels": 32} if key == "in_channels" else {}
        assert sd3.COMPONENT.read_config(mapping | others) != config, key


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"qk_norm": "layer_norm"}, "qk_norm='layer_norm', not None or 'rms_norm'"),
        ({"dual_attention_layers": [1, 2]}, r"dual_attention_layers=\[1, 2\], which are not the first 2"),
        ({"caption_projection_dim": 1152}, "caption_projection_dim=1152, not 1536"),
        ({"out_channels": 32}, "out_channels=32, not in_channels, 16"),
        ({"pos_embed_max_size": None}, "pos_embed_max_size=None"),
        ({"pos_embed_max_size": 60}, "128 x 128 exceed 120"),
        ({"force_zeros_for_pooled_projection": True}, "force_zeros_for_pooled_projection=True"),
        ({"sample_size": 127}, "are not multiples of patch=2"),
    ],
)
def test_another_stable_diffusion_3_is_refused(settings, message):
    with pytest.raises(ConversionError, match=message):
        sd3.COMPONENT.read_config(published("stable-diffusion-3-medium/transformer") | settings)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Wan2.1-T2V-1.3B/transformer", wan),
        ("Wan2.1-T2V-1.3B/vae", autoencoder_kl_wan),
        ("LTX-Video/transformer", ltx),
        ("LTX-Video/vae", autoencoder_kl_ltx),
        ("LTX-Video-0.9.1/vae", autoencoder_kl_ltx),
        ("LTX-Video-0.9.5/vae", autoencoder_kl_ltx),
    ],
)
def test_a_published_config_of_videos_is_written_with_the_same_values(name, family):
    mapping = {key: value for key, value in published(name).items() if key[0] != "_"}
    config = family.COMPONENT.read_config(mapping)
    # The first versions are the defaults.
    assert (config == family.FAMILY.config_class()) == ("-0.9" not in name)
    written_again = json.loads(json.dumps(family.COMPONENT.write_config(config)))
    mapping.pop("dropout", None)  # acts in training only, and published files set it to 0
    assert {key: written_again[key] for key in mapping} == mapping


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("transformer", {"image_dim": 1280, "added_kv_proj_dim": 5120}, "added_kv_proj_dim=5120, not 1536"),
        ("transformer", {"added_kv_proj_dim": 1536}, "added_kv_proj_dim=1536, not None"),
        (
            "transformer",
            {"image_dim": 1280, "added_kv_proj_dim": 1536},
            "image_dim=1280 is for image to video",
        ),
        ("transformer", {"pos_embed_seq_len": 514}, "pos_embed_seq_len=514, for a first and a last frame"),
        ("transformer", {"in_channels": 8}, "out_channels=16, more than in_channels, 8"),
        ("transformer", {"patch_size": [2, 2, 2]}, r"patch_size=\[2, 2, 2\], not of one frame"),
        ("transformer", {"patch_size": [1, 2, 4]}, r"patch_size=\[1, 2, 4\], not of one frame and square"),
        ("transformer", {"qk_norm": None}, "qk_norm=None, not 'rms_norm_across_heads'"),
        ("transformer", {"attention_head_dim": 9}, "head_dim=9: .* an even number"),
        ("vae", {"is_residual": True, "patch_size": 2}, "is_residual=True, not False; patch_size=2, not None"),
        ("vae", {"attn_scales": [0.5]}, r"attn_scales=\[0.5\]"),
        ("vae", {"scale_factor_spatial": 16}, "scale_factor_spatial=16, not 8"),
        ("vae", {"scale_factor_temporal": 8}, "scale_factor_temporal=8, not 4"),
        ("vae", {"temperal_downsample": [True]}, "every level but the last of the 4"),
        ("vae", {"latents_std": [1.0]}, "latents_std has 1 entries; latent_channels is 16"),
        ("vae", {"decoder_base_dim": 95, "dim_mult": [1, 1, 2, 2]}, r"width=95 times \[1\] .* is odd"),
    ],
)
def test_another_wan_is_refused(name, settings, message):
    with pytest.raises(ConversionError, match=message):
        {"transformer": wan, "vae": autoencoder_kl_wan}[name].COMPONENT.read_config(
            published(f"Wan2.1-T2V-1.3B/{name}") | settings
        )


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("/transformer", {"patch_size": 2, "patch_size_t": 2}, "patch_size=2, not 1; patch_size_t=2, not 1"),
        ("/transformer", {"out_channels": 64}, "out_channels=64, not in_channels, 128"),
        ("/transformer", {"cross_attention_dim": 4096}, "cross_attention_dim=4096, not 2048"),
        ("/transformer", {"norm_elementwise_affine": True}, "norm_elementwise_affine=True, not False"),
        ("/transformer", {"attention_bias": False}, "attention_bias=False, not True"),
        ("/transformer", {"activation_fn": "geglu"}, "activation_fn='geglu', not 'gelu-approximate'"),
        ("/vae", {"patch_size_t": 2}, "patch_size_t=2, not 1"),
        ("/vae", {"out_channels": 1}, "out_channels=1, not 3"),
        (
            "/vae",
            {"down_block_types": ["DownBlock"] * 4},
            "down_block_types=.*'DownBlock'.* not all LTXVideoDown",
        ),
        ("/vae", {"spatial_compression_ratio": 16}, "spatial_compression_ratio=16, not 32"),
        ("/vae", {"decoder_inject_noise": [False] * 4}, "adds_noise has 4 entries for 4 and 4 levels; give 5"),
        ("/vae", {"timestep_conditioning": True}, "a level gets 512 channels and has 256, which timesteps"),
        ("-0.9.5/vae", {"temporal_compression_ratio": None}, "temporal_compression_ratio=16, not 8"),
        ("-0.9.5/vae", {"downsample_type": ["conv"] * 4}, "downsample_type='conv' in a LTXVideo095DownBlock3D"),
        ("-0.9.5/vae", {"spatio_temporal_scaling": [True] * 3 + [False]}, "spatio_temporal_scaling=.* not all true"),
    ],
)
def test_another_ltx_video_is_refused(name, settings, message):
    component = (ltx if name == "/transformer" else autoencoder_kl_ltx).COMPONENT
    with pytest.raises(ConversionError, match=message):
        component.read_config(published(f"LTX-Video{name}") | settings)


def written(component, mapping, directory, *, files):
    """Writes a folder of random tensors in shards; returns the values of the parameters that they make up."""
    config, random = component.read_config(mapping), np.random.default_rng(0)
    abstract = nnx.eval_shape(lambda: component.family.build(config, key=jax.random.key(0)))
    values, tensors = {}, {}
    for path, leaf in ModelVariables.of(abstract).shapes.items():
        values[path] = random.normal(size=leaf.shape).astype(np.float32)
        tensors |= component.tensors_of(config, "/".join(map(str, path)), values[path])
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(mapping))
    names = [f"{component.stem}-{number:05}-of-{files:05}.safetensors" for number in range(1, files + 1)]
    located = {name: names[place % files] for place, name in enumerate(tensors)}
    for file in names:
        held = {name: np.ascontiguousarray(tensors[name]) for name in tensors if located[name] == file}
        save_file(held, directory / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": located}
    (directory / f"{component.stem}.safetensors.index.json").write_text(json.dumps(index))
    return values


def test_a_transformer_in_shards_opens(tmp_path):
    values = written(flux.COMPONENT, published("FLUX.1-schnell/transformer") | FLUX, tmp_path / "hf", files=3)
    opened = values_of(load_component(flux.COMPONENT, tmp_path / "hf")[1])
    assert opened.keys() == values.keys()
    for path, value in values.items():
        np.testing.assert_array_equal(opened[path], value, err_msg=str(path))


def test_a_dit_under_its_former_name_is_imported(tmp_path):
    mapping = published("DiT-XL-2-256/transformer") | {"num_layers": 1, "num_attention_heads": 2}
    mapping |= {"attention_head_dim": 8, "num_embeds_ada_norm": 3}
    values = written(dit.COMPONENT, mapping, tmp_path / "hf", files=2)
    parameters = sum(value.size for value in values.values())
    assert exchange.import_images(tmp_path / "hf", tmp_path / "run").parameters == parameters
