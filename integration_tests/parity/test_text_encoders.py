"""Text encoders and their tokenizers against transformers on PyTorch, and a whole pipeline against diffusers."""

import json
import sys

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from stack_core.abi.adapters import LowRankFactors
from stack_train.diffusion import clip, sd3, t5, unet
from stack_train.diffusion.components import load_component, save_component
from stack_train.diffusion.denoiser import image_tokens
from stack_train.diffusion.lora import merge_lora, write_lora
from stack_train.diffusion.pipeline import open_pipeline, save_pipeline
from stack_train.diffusion.prompts import load_prompt_tokenizer
from stack_train.diffusion.samplers import SamplerConfig, levels_of, sample, table_of
from stack_train.diffusion.sampling import open_images
from stack_train.diffusion.starts import Start

from .test_diffusers import drawn
from .test_wan import UNIPC, autoencoder

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
WORDS = ["a", "red", "blue", "circle", "square", "of", "the", "sea"]


def of_clip(activation="quick_gelu", end=2, vocab=99):
    return clip.COMPONENT, transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=vocab,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=16,
            hidden_act=activation,
            projection_dim=32,
            bos_token_id=0,
            eos_token_id=end,
            pad_token_id=1,
        )
    )


def of_projected_clip(vocab=99, projection=20):
    config = of_clip("gelu", vocab=vocab)[1].config
    config.projection_dim = projection
    return clip.PROJECTED, transformers.CLIPTextModelWithProjection(config)


def of_t5(vocab=99, width=32):
    return t5.COMPONENT, transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=vocab,
            d_model=width,
            d_kv=8,
            d_ff=48,
            num_layers=3,
            num_heads=6,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=20,
            feed_forward_proj="gated-gelu",
        )
    )


def of_umt5(vocab=99, width=32):
    return t5.UMT5, transformers.UMT5EncoderModel(
        transformers.UMT5Config(
            vocab_size=vocab,
            d_model=width,
            d_kv=8,
            d_ff=48,
            num_layers=3,
            num_heads=6,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=20,
        )
    )


MODELS = {
    "clip": of_clip,
    "clip_of_newer_checkpoints": lambda: of_clip("gelu", end=98),
    "clip_with_projection": of_projected_clip,
    "t5": of_t5,
    "umt5": of_umt5,
}


@pytest.fixture(params=MODELS)
def pair(request, tmp_path):
    component, model = MODELS[request.param]()
    drawn(model).save_pretrained(tmp_path / "theirs")
    return component, model, *load_component(component, tmp_path / "theirs"), tmp_path


def test_a_text_encoder_says_what_transformers_says(pair):
    component, theirs, _, ours, _ = pair
    tokens = np.random.default_rng(0).integers(3, 97, (3, 16))
    tokens[:, 10:] = 98
    with torch.no_grad():
        said = theirs(input_ids=torch.tensor(tokens), output_hidden_states=True)
    with jax.default_matmul_precision("highest"):
        found = ours(jnp.asarray(tokens, jnp.int32))
    pairs = [(found, said.last_hidden_state)]
    if component.family is not t5.FAMILY:
        pooled = said.text_embeds if component is clip.PROJECTED else said.pooler_output
        pairs = [(found.hidden, said.last_hidden_state), (found.pooled, pooled)]
        pairs.append((found.penultimate, said.hidden_states[-2]))
    for got, state in pairs:
        wanted = state.numpy()
        assert np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(got, wanted, atol=TOLERANCE * max(1.0, np.abs(wanted).max()), rtol=0)


def test_padding_of_a_umt5_is_not_read_and_has_no_states(tmp_path):
    component, theirs = of_umt5()
    drawn(theirs).save_pretrained(tmp_path)
    _, ours = load_component(component, tmp_path)
    tokens, mask = np.random.default_rng(0).integers(1, 97, (3, 16)), np.ones((3, 16), np.int64)
    for row, length in enumerate((16, 7, 1)):
        tokens[row, length:] = mask[row, length:] = 0
    tokens[1, 3] = 0  # the token in a text is not padding
    with torch.no_grad():
        said = theirs(input_ids=torch.tensor(tokens), attention_mask=torch.tensor(mask)).last_hidden_state.numpy()
    with jax.default_matmul_precision("highest"):
        found = ours(jnp.asarray(tokens, jnp.int32))
    wanted = said * mask[..., None]
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE * np.abs(wanted).max(), rtol=0)


def test_what_is_read_and_written_again_is_the_same_bit_by_bit(pair):
    component, theirs, config, ours, directory = pair
    save_component(component, directory / "ours", config, ours)
    before, after = (load_file(directory / name / "model.safetensors") for name in ("theirs", "ours"))
    before = {component.prefix + name.removeprefix(component.prefix): tensor for name, tensor in before.items()}
    assert {name for name in before if name not in component.redundant} == after.keys()
    for name, tensor in after.items():
        np.testing.assert_array_equal(tensor.view(np.uint8), before[name].view(np.uint8), err_msg=name)
    again = type(theirs).from_pretrained(directory / "ours")
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens).last_hidden_state, theirs(input_ids=tokens).last_hidden_state)


@pytest.fixture(scope="module")
def tokenizers_of(tmp_path_factory):
    """CLIP's two files, as the first checkpoints have them, and a T5 tokenizer of whole words."""
    root = tmp_path_factory.mktemp("tokenizers")
    letters = sorted({letter for word in WORDS for letter in word})
    vocabulary = [*letters, *(f"{letter}</w>" for letter in letters), *(f"{word}</w>" for word in ("red", "re"))]
    merges = ["#version: 0.2", "r e", "re d</w>"]
    vocabulary += ["re", "<|startoftext|>", "<|endoftext|>"]
    (root / "clip").mkdir()
    (root / "clip" / "vocab.json").write_text(json.dumps({token: place for place, token in enumerate(vocabulary)}))
    (root / "clip" / "merges.txt").write_text("\n".join(merges) + "\n")
    (root / "clip" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "CLIPTokenizer", "model_max_length": 16})
    )
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), *((f"\u2581{word}", -1.0) for word in WORDS)]
    backend = transformers.T5Tokenizer(vocab=pieces, extra_ids=0)
    backend.save_pretrained(root / "t5")
    return root


def test_prompts_are_cut_into_the_tokens_of_transformers(tokenizers_of):
    prompts = ["a Red  circle", "red red sea", "of the sea " * 9]
    theirs = transformers.CLIPTokenizer.from_pretrained(tokenizers_of / "clip")
    wanted = theirs(prompts, padding="max_length", truncation=True, max_length=16)["input_ids"]
    with pytest.warns(UserWarning, match="text_encoder reads 16 tokens(.|\n)*cut off"):
        found = load_prompt_tokenizer(tokenizers_of / "clip", "text_encoder", 16)(prompts)
    np.testing.assert_array_equal(found, wanted)
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizers_of / "t5")
    wanted = theirs(prompts[:2], padding="max_length", truncation=True, max_length=8)["input_ids"]
    np.testing.assert_array_equal(load_prompt_tokenizer(tokenizers_of / "t5", "text_encoder_2", 8)(prompts[:2]), wanted)


@pytest.fixture(scope="module")
def pipeline(tokenizers_of, tmp_path_factory):
    """A tiny FluxPipeline, saved by diffusers."""
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        latent_channels=4,
        sample_size=16,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    made = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=drawn(vae),
        text_encoder=drawn(of_clip(vocab=49)[1]),
        tokenizer=transformers.CLIPTokenizer.from_pretrained(tokenizers_of / "clip", model_max_length=16),
        text_encoder_2=drawn(of_t5()[1]),
        tokenizer_2=transformers.AutoTokenizer.from_pretrained(tokenizers_of / "t5"),
        transformer=drawn(transformer),
    )
    directory = tmp_path_factory.mktemp("pipeline") / "theirs"
    made.save_pretrained(directory)
    return made, directory


def images_of(made, latents):
    """What a pipeline of diffusers makes of a prompt from given noise."""
    packed = made._pack_latents(torch.tensor(latents.transpose(0, 3, 1, 2)), 1, 4, 8, 12)
    return made(
        "a red circle",
        height=16,
        width=24,
        num_inference_steps=4,
        guidance_scale=2.0,
        max_sequence_length=8,
        latents=packed,
        output_type="np",
    ).images


def test_a_pipeline_makes_the_images_of_diffusers_and_is_opened_there_again(pipeline, tmp_path):
    made, directory = pipeline
    opened = open_pipeline(directory, text_tokens=8)
    noise = np.random.default_rng(0).standard_normal((1, 8, 12, 4)).astype(np.float32)
    condition = {**opened.encoders.text(["a red circle"]), "guidance": jnp.array([2.0])}
    levels = levels_of(opened.objective.schedule(image_tokens(opened.model, 8, 12)), SamplerConfig(steps=4))
    table = table_of(SamplerConfig(steps=4), levels, "flow")
    with jax.default_matmul_precision("highest"):
        latents = sample(
            lambda x, t: opened.model(x, t[None], condition),
            table,
            jnp.asarray(noise),
            keys=jax.random.split(jax.random.key(0), len(noise)),
        )
        images = opened.encoders.autoencoder.images_of(latents)
    wanted = images_of(made, noise)
    found = np.clip(np.asarray(images) / 2 + 0.5, 0, 1)
    assert wanted.std() > 0.01
    np.testing.assert_allclose(found, wanted, atol=1e-3)
    save_pipeline(tmp_path / "ours", opened)
    again = diffusers.FluxPipeline.from_pretrained(tmp_path / "ours")
    np.testing.assert_allclose(images_of(again, noise), wanted, atol=1e-5)


def tiny_vae(**settings):
    return diffusers.AutoencoderKL(
        **{
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
            "block_out_channels": (4, 4, 4, 8),
            "norm_num_groups": 4,
            "latent_channels": 4,
            "sample_size": 64,
        }
        | settings
    )


def tiny_unet(**settings):
    return diffusers.UNet2DConditionModel(
        **{
            "block_out_channels": (8, 16),
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "norm_num_groups": 4,
            "cross_attention_dim": 32,
            "attention_head_dim": 2,
            "layers_per_block": 1,
            "sample_size": 8,
        }
        | settings
    )


def stable_diffusion(tokenizers_of, scheduler, made=diffusers.StableDiffusionPipeline, **settings):
    return made(
        scheduler=scheduler,
        vae=drawn(tiny_vae()),
        text_encoder=drawn(of_clip(vocab=49)[1]),
        tokenizer=transformers.CLIPTokenizer.from_pretrained(tokenizers_of / "clip", model_max_length=16),
        unet=drawn(tiny_unet(**settings)),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def stable_diffusion_xl(tokenizers_of, scheduler):
    tokenizer = transformers.CLIPTokenizer.from_pretrained(tokenizers_of / "clip", model_max_length=16)
    unet = tiny_unet(
        cross_attention_dim=64,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=6,
        projection_class_embeddings_input_dim=20 + 6 * 6,
    )
    return diffusers.StableDiffusionXLPipeline(
        scheduler=scheduler,
        vae=drawn(tiny_vae()),
        text_encoder=drawn(of_clip(vocab=49)[1]),
        text_encoder_2=drawn(of_projected_clip(vocab=49)[1]),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=drawn(unet),
        add_watermarker=False,
    )


BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
PIPELINES = {
    "sd": (
        stable_diffusion,
        diffusers.PNDMScheduler(**BETAS, skip_prk_steps=True, set_alpha_to_one=False),
        {"guidance_scale": 3.0},
    ),
    "sd_negative": (
        stable_diffusion,
        diffusers.DDIMScheduler(**BETAS, clip_sample=False, prediction_type="v_prediction"),
        {"guidance_scale": 2.0, "negative_prompt": "a blue sea", "guidance_rescale": 0.7},
    ),
    "sdxl": (
        stable_diffusion_xl,
        diffusers.EulerDiscreteScheduler(**BETAS, timestep_spacing="leading"),
        {"guidance_scale": 2.0},
    ),
    "sdxl_negative": (
        stable_diffusion_xl,
        diffusers.DPMSolverMultistepScheduler(**BETAS, use_karras_sigmas=True),
        {"guidance_scale": 2.0, "negative_prompt": "a blue sea"},
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", PIPELINES)
def test_stable_diffusion_makes_the_images_of_diffusers_and_is_opened_there_again(name, tokenizers_of, tmp_path):
    make, scheduler, settings = PIPELINES[name]
    made = make(tokenizers_of, scheduler)
    made.save_pretrained(tmp_path / "theirs")
    # Latents of 3 x 5, which the levels of the UNet do not divide.
    opened = open_images(f"hf:{tmp_path / 'theirs'}", size=(24, 40))
    noise = np.random.default_rng(0).standard_normal((1, 3, 5, 4)).astype(np.float32)

    def images_of(pipeline):
        pipeline.set_progress_bar_config(disable=True)
        latents = torch.tensor(noise.transpose(0, 3, 1, 2))
        size = {"height": 24, "width": 40, "num_inference_steps": 5}
        return pipeline("a red circle", latents=latents, output_type="np", **size, **settings).images

    changes = {"steps": 5, "guidance": settings["guidance_scale"]}
    changes |= {"guidance_rescale": settings["guidance_rescale"]} if "guidance_rescale" in settings else {}
    sampler = opened.sampler.changed(changes)
    negative = [settings["negative_prompt"]] if "negative_prompt" in settings else None
    condition = opened.condition(["a red circle"], sampler, negative=negative)
    with jax.default_matmul_precision("highest"):
        latents = opened._sampled(condition, 1, sampler, 0, noise=jnp.asarray(noise))
        found = np.clip(np.asarray(opened.encoders.autoencoder.images_of(latents)) / 2 + 0.5, 0, 1)
    wanted = images_of(made)
    assert wanted.std() > 0.01
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
    save_pipeline(tmp_path / "ours", open_pipeline(tmp_path / "theirs"))
    for part in ("unet", "vae"):
        before, after = (
            load_file(tmp_path / each / part / "diffusion_pytorch_model.safetensors") for each in ("theirs", "ours")
        )
        assert before.keys() == after.keys()
        assert all(np.array_equal(tensor, after[each]) for each, tensor in before.items())
    again = type(made).from_pretrained(tmp_path / "ours", **({"add_watermarker": False} if "xl" in name else {}))
    np.testing.assert_allclose(images_of(again), wanted, atol=1e-5)


def stable_diffusion_3(tokenizers_of, *, t5_of=of_t5, scheduler=None):
    """Tiny encoders; both CLIPs together are narrower than T5, whose place has zeros if `t5_of` is None."""
    tokenizer = transformers.CLIPTokenizer.from_pretrained(tokenizers_of / "clip", model_max_length=16)
    t5_tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizers_of / "t5", model_max_length=9)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        in_channels=16,
        num_layers=3,
        attention_head_dim=12,
        num_attention_heads=3,
        joint_attention_dim=70,
        caption_projection_dim=36,
        pooled_projection_dim=20 + 24,
        pos_embed_max_size=9,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return diffusers.StableDiffusion3Pipeline(
        scheduler=scheduler or diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=drawn(
            tiny_vae(
                latent_channels=16,
                scaling_factor=1.5,
                shift_factor=0.06,
                use_quant_conv=False,
                use_post_quant_conv=False,
            )
        ),
        text_encoder=drawn(of_projected_clip(vocab=49)[1]),
        tokenizer=tokenizer,
        text_encoder_2=drawn(of_projected_clip(vocab=49, projection=24)[1]),
        tokenizer_2=tokenizer,
        text_encoder_3=None if t5_of is None else drawn(t5_of(width=70)[1]),
        tokenizer_3=None if t5_of is None else t5_tokenizer,
        transformer=drawn(transformer),
    )


DYNAMIC = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
SD3 = {
    "t5": ({}, {"max_sequence_length": 9}, None),
    "t5_negative": ({"scheduler": DYNAMIC}, {"max_sequence_length": 9}, "a blue sea"),
    "without_t5": ({"t5_of": None}, {}, None),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", SD3)
def test_stable_diffusion_3_makes_the_images_of_diffusers_and_is_opened_there_again(name, tokenizers_of, tmp_path):
    parts, settings, negative = SD3[name]
    made = stable_diffusion_3(tokenizers_of, **parts)
    made.save_pretrained(tmp_path / "theirs")
    opened = open_images(f"hf:{tmp_path / 'theirs'}", size=(48, 80))  # latents of 6 x 10
    assert opened.config.text_tokens == 16 + (256 if name == "without_t5" else 9)
    noise = np.random.default_rng(0).standard_normal((1, 6, 10, 16)).astype(np.float32)

    def images_of(pipeline):
        pipeline.set_progress_bar_config(disable=True)
        latents = torch.tensor(noise.transpose(0, 3, 1, 2))
        size = {"height": 48, "width": 80, "num_inference_steps": 4, "guidance_scale": 3.0}
        chosen = {**size, **settings, "negative_prompt": negative}
        return pipeline("a red circle", latents=latents, output_type="np", **chosen).images

    assert opened.sampler.guidance == 7.0
    sampler = opened.sampler.changed({"steps": 4, "guidance": 3.0})
    condition = opened.condition(["a red circle"], sampler, negative=None if negative is None else [negative])
    with jax.default_matmul_precision("highest"):
        latents = opened._sampled(condition, 1, sampler, 0, noise=jnp.asarray(noise))
        found = np.clip(np.asarray(opened.encoders.autoencoder.images_of(latents)) / 2 + 0.5, 0, 1)
    wanted = images_of(made)
    assert wanted.std() > 0.01
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
    save_pipeline(tmp_path / "ours", open_pipeline(tmp_path / "theirs"))
    before, after = (
        load_file(tmp_path / each / "transformer" / "diffusion_pytorch_model.safetensors")
        for each in ("theirs", "ours")
    )
    assert before.keys() == after.keys()
    assert all(np.array_equal(tensor, after[each]) for each, tensor in before.items())
    # diffusers opens no directory without T5, its own neither, unless told.
    absent = {"text_encoder_3": None, "tokenizer_3": None} if name == "without_t5" else {}
    again = diffusers.StableDiffusion3Pipeline.from_pretrained(tmp_path / "ours", **absent)
    np.testing.assert_allclose(images_of(again), wanted, atol=1e-5)


def wan_pipeline(tokenizers_of, scheduler):
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=14,
        in_channels=3,
        out_channels=3,
        text_dim=32,
        freq_dim=16,
        ffn_dim=40,
        num_layers=2,
    )
    return diffusers.WanPipeline(
        tokenizer=transformers.AutoTokenizer.from_pretrained(tokenizers_of / "t5", model_max_length=9),
        text_encoder=drawn(of_umt5()[1]),
        vae=drawn(autoencoder()),
        scheduler=scheduler,
        transformer=drawn(transformer),
    )


WAN = {
    "unipc": (UNIPC, {"guidance_scale": 3.0}),
    "unipc_negative": (UNIPC, {"guidance_scale": 2.0, "negative_prompt": "a  blue &amp;amp; sea"}),
    "euler": (diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0), {"guidance_scale": 1.0}),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", WAN)
def test_wan_makes_the_videos_of_diffusers_and_is_opened_there_again(name, tokenizers_of, tmp_path):
    scheduler, settings = WAN[name]
    made = wan_pipeline(tokenizers_of, scheduler)
    made.save_pretrained(tmp_path / "theirs")
    default = open_images(f"hf:{tmp_path / 'theirs'}")
    assert default.shape == (21, 60, 104, 3) and default.sampler.guidance == 5.0
    opened = open_images(f"hf:{tmp_path / 'theirs'}", size=(32, 48), frames=9)
    assert opened.config.text_tokens == 9 and opened.shape == (3, 4, 6, 3)
    noise = np.random.default_rng(0).standard_normal((1, 3, 4, 6, 3)).astype(np.float32)

    def videos_of(pipeline, output_type):
        pipeline.set_progress_bar_config(disable=True)
        latents = torch.tensor(np.moveaxis(noise, -1, 1))
        size = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 6, "max_sequence_length": 9}
        frames = pipeline("a red circle", latents=latents, output_type=output_type, **size, **settings).frames
        return np.moveaxis(frames.numpy(), 1, -1) if output_type == "latent" else frames

    sampler = opened.sampler.changed({"steps": 6, "guidance": settings["guidance_scale"]})
    negative = [settings["negative_prompt"]] if "negative_prompt" in settings else None
    condition = opened.condition(["a red circle"], sampler, negative=negative)
    with jax.default_matmul_precision("highest"):
        latents = opened._sampled(condition, 1, sampler, 0, noise=jnp.asarray(noise))
        found = np.clip(np.asarray(opened.encoders.autoencoder.images_of(latents)) / 2 + 0.5, 0, 1)
    wanted = videos_of(made, "latent")
    assert wanted.std() > 0.1
    np.testing.assert_allclose(latents, wanted, atol=TOLERANCE * max(1.0, np.abs(wanted).max()), rtol=0)
    pixels = videos_of(made, "np")
    assert pixels.std() > 0.01
    np.testing.assert_allclose(found, pixels, atol=TOLERANCE)
    save_pipeline(tmp_path / "ours", open_pipeline(tmp_path / "theirs"))
    for part in ("transformer", "vae"):
        before, after = (
            load_file(tmp_path / each / part / "diffusion_pytorch_model.safetensors") for each in ("theirs", "ours")
        )
        assert before.keys() == after.keys()
        assert all(np.array_equal(tensor, after[each]) for each, tensor in before.items())
    again = diffusers.WanPipeline.from_pretrained(tmp_path / "ours")
    np.testing.assert_allclose(videos_of(again, "np"), pixels, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_diffusers_merges_a_lora_file_of_stable_diffusion_3_to_the_same_weights(tokenizers_of, tmp_path):
    made = stable_diffusion_3(tokenizers_of, t5_of=None)
    made.save_pretrained(tmp_path / "theirs")
    opened, random = open_pipeline(tmp_path / "theirs"), np.random.default_rng(0)
    # One module in each group of blocks: layers 0, 1 and 2.
    modules = ("dual_blocks/image/own_projections/query", "blocks/text/output", "last_block/text/projections/key")
    adapters = {
        f"{each}/kernel": LowRankFactors(
            random.normal(size=(1, 36, 3)).astype("f"), random.normal(size=(1, 3, 36)).astype("f"), 0.5
        )
        for each in modules
    }
    file = tmp_path / "lora.safetensors"
    write_lora(file, adapters, sd3.COMPONENT, opened.config, folder="transformer")
    save_pipeline(tmp_path / "ours", merge_lora(opened, file, 0.7))
    made.load_lora_weights(str(tmp_path), weight_name=file.name)
    made.fuse_lora(lora_scale=0.7)
    made.unload_lora_weights()
    made.save_pretrained(tmp_path / "fused")
    before, theirs, ours = (
        load_file(tmp_path / each / "transformer" / "diffusion_pytorch_model.safetensors")
        for each in ("theirs", "fused", "ours")
    )
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, rtol=1e-5, atol=1e-5, err_msg=name)
    changed = [name for name, tensor in theirs.items() if np.abs(tensor - before[name]).max() > 0.01]
    ends = ("0.attn2.to_q", "1.attn.to_add_out", "2.attn.add_k_proj")
    assert sorted(changed) == [f"transformer_blocks.{end}.weight" for end in ends]


EULER = diffusers.EulerDiscreteScheduler(**BETAS, timestep_spacing="leading")
DDIM = diffusers.DDIMScheduler(**BETAS, clip_sample=False)
TASKS = {
    "image": (diffusers.StableDiffusionImg2ImgPipeline, EULER, {}, 0.6),
    "image_dpmpp": (
        diffusers.StableDiffusionImg2ImgPipeline,
        diffusers.DPMSolverMultistepScheduler(**BETAS, use_karras_sigmas=True),
        {},
        0.8,
    ),
    "mask": (diffusers.StableDiffusionInpaintPipeline, DDIM, {}, 1.0),
    "mask_of_a_part": (diffusers.StableDiffusionInpaintPipeline, EULER, {}, 0.6),
    "masked_channels": (diffusers.StableDiffusionInpaintPipeline, DDIM, {"in_channels": 9}, 1.0),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", TASKS)
def test_an_image_is_changed_as_diffusers_changes_it(name, tokenizers_of, tmp_path, monkeypatch):
    pipeline_class, scheduler, settings, strength = TASKS[name]
    made = stable_diffusion(tokenizers_of, scheduler, pipeline_class, **settings)
    made.set_progress_bar_config(disable=True)
    made.save_pretrained(tmp_path)
    opened = open_images(f"hf:{tmp_path}", size=(24, 40))
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((1, 3, 5, 4)).astype(np.float32)
    image = rng.integers(0, 256, (24, 40, 3)).astype(np.uint8)
    mask = np.zeros((24, 40), np.uint8)
    mask[8:, 10:30] = 255
    module = sys.modules[pipeline_class.__module__]
    monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: torch.tensor(noise.transpose(0, 3, 1, 2)))
    # diffusers samples latents of the given image, of which ours takes the mean.
    monkeypatch.setattr(module, "retrieve_latents", lambda encoded, **_: encoded.latent_dist.mode())
    given = {"image": torch.tensor(image.transpose(2, 0, 1)[None] / 127.5 - 1.0, dtype=torch.float32)}
    start = Start(image, mask if "mask" in name else None)
    if "mask" in name:
        given |= {"mask_image": torch.tensor(mask[None, None] / 255.0, dtype=torch.float32), "height": 24, "width": 40}
    wanted = made(
        "a red circle", **given, strength=strength, num_inference_steps=5, guidance_scale=2.0, output_type="np"
    ).images
    sampler = opened.sampler.changed({"steps": 5, "guidance": 2.0, "strength": strength})
    condition = opened.condition(["a red circle"], sampler)
    with jax.default_matmul_precision("highest"):
        begun = opened._begun(start, 1)
        latents = opened._sampled(condition, 1, sampler, 0, noise=jnp.asarray(noise), begun=begun)
        found = np.clip(np.asarray(opened.encoders.autoencoder.images_of(latents)) / 2 + 0.5, 0, 1)
    assert wanted.std() > 0.01
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_diffusers_merges_a_lora_file_of_ours_to_the_same_weights(layout, tokenizers_of, tmp_path):
    made = stable_diffusion(tokenizers_of, EULER)
    made.save_pretrained(tmp_path / "theirs")
    opened, random = open_pipeline(tmp_path / "theirs"), np.random.default_rng(0)
    leaf = "down_blocks/0/attentions/0"
    adapters = {
        f"{leaf}/{name}/kernel": LowRankFactors(
            random.normal(size=(*lead, 8, 3)).astype("f"),
            random.normal(size=(*lead, 3, 8)).astype("f"),
            # diffusers ignores alphas of kohya's that differ, with a warning of PEFT.
            scale if layout == "diffusers" else 0.5,
        )
        for name, lead, scale in (
            ("blocks/attn1/to_q", (1,), 0.5),
            ("blocks/attn2/to_out", (1,), 2.0),
            ("proj_in", (), 1.0),
        )
    }
    file = tmp_path / "lora.safetensors"
    write_lora(file, adapters, unet.COMPONENT, opened.config, folder="unet", layout=layout)
    if layout == "diffusers":  # with an adapter of the text encoder
        name = "text_encoder.text_model.encoder.layers.1.self_attn.q_proj"
        down, up = random.normal(size=(3, 32)).astype("f"), random.normal(size=(32, 3)).astype("f")
        save_file({**load_file(file), f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, file)
    save_pipeline(tmp_path / "ours", merge_lora(opened, file, 0.7))
    made.load_lora_weights(str(tmp_path), weight_name=file.name)
    made.fuse_lora(lora_scale=0.7)
    made.unload_lora_weights()
    made.save_pretrained(tmp_path / "fused")
    for part, stem in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
        before, theirs, ours = (
            {
                key.removeprefix("text_model."): tensor
                for key, tensor in load_file(tmp_path / each / part / f"{stem}.safetensors").items()
                if "position_ids" not in key
            }
            for each in ("theirs", "fused", "ours")
        )
        assert theirs.keys() == ours.keys()
        for key, tensor in theirs.items():
            np.testing.assert_allclose(ours[key], tensor, rtol=1e-5, atol=1e-5, err_msg=key)
        changed = sum(np.abs(tensor - before[key]).max() > 0.01 for key, tensor in theirs.items())
        assert changed == {"unet": 3, "text_encoder": int(layout == "diffusers")}[part]
