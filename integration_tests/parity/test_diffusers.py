"""Denoisers and samplers against diffusers on PyTorch, both in float32, on tiny random configurations."""

import sys
from dataclasses import replace
from functools import partial

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from flax import nnx
from safetensors.numpy import load_file

from stack_train.diffusion import autoencoder_kl, autoencoder_kl_wan, dit, flux, sd3, unet, wan
from stack_train.diffusion.components import load_component, save_component
from stack_train.diffusion.samplers import levels_of, table_of
from stack_train.diffusion.scheduler import read_scheduler, write_scheduler

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
STEPS = 10
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def drawn(model, std=0.2):
    """The model with every parameter drawn anew, so that none is 0 or 1 and could go missing unnoticed."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * std)
    return model.eval()


def of_dit():
    return dit.COMPONENT, diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=3,
        out_channels=6,
        num_layers=3,
        sample_size=8,
        num_embeds_ada_norm=10,
        norm_num_groups=1,
    )


def of_vae(*, quantizes=True, attends=True):
    return autoencoder_kl.COMPONENT, diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 16),
        layers_per_block=2,
        norm_num_groups=4,
        sample_size=16,
        scaling_factor=0.3611,
        shift_factor=None if quantizes else 0.1159,
        use_quant_conv=quantizes,
        use_post_quant_conv=quantizes,
        mid_block_add_attention=attends,
    )


def of_flux(*, guidance):
    return flux.COMPONENT, diffusers.FluxTransformer2DModel(
        in_channels=12,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        guidance_embeds=guidance,
        out_channels=12,  # some published configs say it
        axes_dims_rope=(4, 6, 6),
    )


def of_sd3(**settings):
    return sd3.COMPONENT, diffusers.SD3Transformer2DModel(
        **{
            "sample_size": 8,
            "in_channels": 3,
            "out_channels": 3,
            "num_layers": 3,
            "attention_head_dim": 12,
            "num_attention_heads": 3,
            "joint_attention_dim": 24,
            "caption_projection_dim": 36,
            "pooled_projection_dim": 20,
            "pos_embed_max_size": 9,
        }
        | settings
    )


def of_unet(**settings):
    """Of Stable Diffusion 1.5, by default."""
    return unet.COMPONENT, diffusers.UNet2DConditionModel(
        **{
            "in_channels": 3,
            "out_channels": 3,
            "block_out_channels": (8, 24, 24),
            "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            "norm_num_groups": 4,
            "cross_attention_dim": 24,
            "attention_head_dim": 2,
            "layers_per_block": 1,
            "sample_size": 8,
        }
        | settings
    )


def of_unet_xl(**settings):
    return of_unet(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 3),
        attention_head_dim=(2, 4, 6),
        layers_per_block=2,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=6,
        projection_class_embeddings_input_dim=20 + 6 * 6,
        **settings,
    )


def of_wan(**settings):
    return wan.COMPONENT, diffusers.WanTransformer3DModel(
        **{
            "num_attention_heads": 3,
            "attention_head_dim": 14,  # frames rotate 6 features, rows and columns 4 each
            "in_channels": 3,
            "out_channels": 3,
            "text_dim": 24,
            "freq_dim": 18,
            "ffn_dim": 50,
            "num_layers": 3,
            "rope_max_seq_len": 40,
        }
        | settings
    )


MODELS = {
    "dit": of_dit,
    "flux_dev": lambda: of_flux(guidance=True),
    "flux_schnell": lambda: of_flux(guidance=False),
    "sd3": of_sd3,
    "sd35_large": lambda: of_sd3(qk_norm="rms_norm"),
    "sd35_medium": lambda: of_sd3(qk_norm="rms_norm", dual_attention_layers=(0, 1), num_layers=4),
    "sd3_dual_to_the_end": lambda: of_sd3(dual_attention_layers=(0, 1, 2), patch_size=1, pos_embed_max_size=15),
    "unet": of_unet,
    "unet_xl": of_unet_xl,
    "wan": of_wan,
    "wan_without_cross_norm": lambda: of_wan(cross_attn_norm=False, patch_size=(1, 1, 1), eps=1e-3),
    "unet_scale_shift": lambda: of_unet_xl(resnet_time_scale_shift="scale_shift", norm_eps=1e-3),
}


AUTOENCODERS = {
    "vae": of_vae,
    "vae_of_flux": lambda: of_vae(quantizes=False),
    "vae_without_attention": lambda: of_vae(attends=False),
}


def of_video_vae(**settings):
    """Levels of 4, 8 and 8 channels; frames are halved once, so that latents have 2 frames each."""
    return autoencoder_kl_wan.COMPONENT, diffusers.AutoencoderKLWan(
        **{
            "base_dim": 4,
            "decoder_base_dim": 6,
            "z_dim": 3,
            "dim_mult": [1, 2, 2],
            "num_res_blocks": 1,
            "temperal_downsample": [False, True],
            "latents_mean": [0.3, -0.2, 0.1],
            "latents_std": [2.0, 0.5, 1.5],
            "scale_factor_temporal": 2,
            "scale_factor_spatial": 4,
        }
        | settings
    )


VIDEO_AUTOENCODERS = {
    "video_vae": of_video_vae,
    "video_vae_of_wan": lambda: of_video_vae(
        decoder_base_dim=None,
        num_res_blocks=2,
        temperal_downsample=[False, True, True],
        dim_mult=[1, 2, 2, 2],
        scale_factor_temporal=4,
        scale_factor_spatial=8,
    ),
}


@pytest.mark.parametrize("name", VIDEO_AUTOENCODERS)
def test_an_autoencoder_of_videos_encodes_and_decodes_as_diffusers_does(name, tmp_path):
    component, theirs = VIDEO_AUTOENCODERS[name]()
    drawn(theirs).save_pretrained(tmp_path)
    config, ours = load_component(component, tmp_path)
    rng, side = np.random.default_rng(0), config.downsampling
    # diffusers encodes four frames at a time.
    videos = rng.standard_normal((2, 9, 3 * side, 2 * side, 3), np.float32)
    latents = rng.standard_normal((2, 3, 3, 2, 3), np.float32)
    with torch.no_grad():
        posterior, decoded = theirs.encode(of_torch(videos)).latent_dist, theirs.decode(of_torch(latents)).sample
    for by_chunks in (False, True):
        with jax.default_matmul_precision("highest"):
            mean, log_variance = jax.jit(partial(ours.encode, by_chunks=by_chunks))(videos)
            again = jax.jit(partial(ours.decode, by_chunks=by_chunks))(latents)
        for got, said in ((mean, posterior.mean), (log_variance, posterior.logvar), (again, decoded)):
            wanted = of_numpy(said)
            assert np.abs(wanted).max() > 0.1
            np.testing.assert_allclose(got, wanted, atol=TOLERANCE * max(1.0, np.abs(wanted).max()), rtol=0)
    assert np.mean(np.abs(of_numpy(decoded)) < 1.0) > 0.01  # not all clipped
    scaled = (of_numpy(posterior.mean) - theirs.config.latents_mean) / theirs.config.latents_std
    np.testing.assert_allclose(ours.scaled_latents(jnp.asarray(videos)), scaled, atol=TOLERANCE * np.abs(scaled).max())


@pytest.fixture(params=AUTOENCODERS)
def autoencoders(request, tmp_path):
    component, model = AUTOENCODERS[request.param]()
    drawn(model).save_pretrained(tmp_path / "theirs")
    return model, load_component(component, tmp_path / "theirs")[1]


def test_an_autoencoder_encodes_and_decodes_as_diffusers_does(autoencoders):
    theirs, ours = autoencoders
    rng = np.random.default_rng(0)
    images, latents = rng.standard_normal((2, 16, 16, 3), np.float32), rng.standard_normal((2, 4, 4, 4), np.float32)
    with torch.no_grad():
        posterior, decoded = theirs.encode(of_torch(images)).latent_dist, theirs.decode(of_torch(latents)).sample
    with jax.default_matmul_precision("highest"):
        (mean, log_variance), again = ours.encode(jnp.asarray(images)), ours.decode(jnp.asarray(latents))
    for got, said in ((mean, posterior.mean), (log_variance, posterior.logvar), (again, decoded)):
        wanted = of_numpy(said)
        assert np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(got, wanted, atol=TOLERANCE * max(1.0, np.abs(wanted).max()), rtol=0)
    shift = theirs.config.shift_factor or 0.0
    scaled = (of_numpy(posterior.mean) - shift) * 0.3611
    np.testing.assert_allclose(ours.scaled_latents(jnp.asarray(images)), scaled, atol=TOLERANCE * np.abs(scaled).max())


WRITTEN = MODELS | AUTOENCODERS | VIDEO_AUTOENCODERS


@pytest.fixture(params=WRITTEN)
def written(request, tmp_path):
    component, model = WRITTEN[request.param]()
    drawn(model).save_pretrained(tmp_path / "theirs")
    return component, model, *load_component(component, tmp_path / "theirs"), tmp_path


@pytest.fixture(params=MODELS)
def pair(request, tmp_path):
    component, model = MODELS[request.param]()
    drawn(model).save_pretrained(tmp_path / "theirs")
    return component, model, *load_component(component, tmp_path / "theirs"), tmp_path


def of_torch(images):
    return torch.tensor(np.moveaxis(images, -1, 1))


def of_numpy(images):
    return np.moveaxis(images.numpy(), 1, -1)


def predictions(family, ours, theirs):
    """What both say of the same images, conditions and timesteps."""
    rng = np.random.default_rng(0)
    timesteps = np.array([3.0, 700.0], np.float32)
    if family == "dit":
        images = rng.standard_normal((2, 8, 8, 3), np.float32)
        labels = np.array([1, 10])
        with torch.no_grad():
            said = theirs(of_torch(images), torch.tensor(timesteps), torch.tensor(labels)).sample
        condition = {"labels": jnp.asarray(labels, jnp.int32)}
        return ours(jnp.asarray(images), jnp.asarray(timesteps), condition), of_numpy(said)
    if family == "unet":
        return unet_predictions(ours, theirs, timesteps, rng)
    if family in JOINT:
        return joint_predictions(family, ours, theirs, timesteps, rng)
    # 3 x 7 patches, whose rows and columns rotate different features.
    images = rng.standard_normal((2, 6, 14, 3), np.float32)
    text, pooled = rng.standard_normal((2, 5, 24), np.float32), rng.standard_normal((2, 20), np.float32)
    guidance = np.array([1.5, 4.0], np.float32) if theirs.config.guidance_embeds else None
    patches = diffusers.FluxPipeline._pack_latents(of_torch(images), 2, 3, 6, 14)
    with torch.no_grad():
        said = theirs(
            patches,
            torch.tensor(text),
            torch.tensor(pooled),
            torch.tensor(timesteps / 1000.0),
            img_ids=diffusers.FluxPipeline._prepare_latent_image_ids(2, 3, 7, "cpu", torch.float32),
            txt_ids=torch.zeros(5, 3),
            guidance=None if guidance is None else torch.tensor(guidance),
        ).sample
    said = diffusers.FluxPipeline._unpack_latents(said, 48, 112, 8)
    condition = {"text": text, "pooled": pooled} | ({} if guidance is None else {"guidance": guidance})
    return ours(*jax.tree.map(jnp.asarray, (images, timesteps, condition))), of_numpy(said)


def unet_predictions(ours, theirs, timesteps, rng):
    # Sizes that the levels do not divide.
    images, text = rng.standard_normal((2, 7, 10, 3), np.float32), rng.standard_normal((2, 5, 24), np.float32)
    condition = {"text": text}
    added = None
    if theirs.config.addition_embed_type:
        pooled = rng.standard_normal((2, 20), np.float32)
        sizes = np.array([[56, 80, 0, 0, 56, 80], [512, 300, 3, 9, 56, 80]], np.float32)
        condition |= {"pooled": pooled, "sizes": sizes}
        added = {"text_embeds": torch.tensor(pooled), "time_ids": torch.tensor(sizes)}
    with torch.no_grad():
        said = theirs(of_torch(images), torch.tensor(timesteps), torch.tensor(text), added_cond_kwargs=added).sample
    found = ours(jnp.asarray(images), jnp.asarray(timesteps), jax.tree.map(jnp.asarray, condition))
    return found, of_numpy(said)


def sd3_inputs(timesteps, rng):
    """Images of 3 x 7 patches of 2 pixels, and texts of five tokens."""
    images, text = rng.standard_normal((2, 6, 14, 3), np.float32), rng.standard_normal((2, 5, 24), np.float32)
    return images, timesteps, {"text": text, "pooled": rng.standard_normal((2, 20), np.float32)}


def sd3_answer(theirs, images, timesteps, condition):
    text, pooled = (torch.tensor(condition[name]) for name in ("text", "pooled"))
    return theirs(of_torch(images), text, pooled, torch.tensor(timesteps)).sample


def wan_inputs(timesteps, rng):
    """Videos of three frames of 3 x 7 patches of 2 pixels, and texts of five tokens."""
    videos, text = rng.standard_normal((2, 3, 6, 14, 3), np.float32), rng.standard_normal((2, 5, 24), np.float32)
    return videos, timesteps, {"text": text}


def wan_answer(theirs, videos, timesteps, condition):
    return theirs(of_torch(videos), torch.tensor(timesteps), torch.tensor(condition["text"])).sample


JOINT = {"sd3": (sd3_inputs, sd3_answer), "wan": (wan_inputs, wan_answer)}


def joint_predictions(family, ours, theirs, timesteps, rng):
    inputs, answer = JOINT[family]
    images, timesteps, condition = inputs(timesteps, rng)
    with torch.no_grad():
        said = answer(theirs, images, timesteps, condition)
    return ours(*jax.tree.map(jnp.asarray, (images, timesteps, condition))), of_numpy(said)


@pytest.mark.parametrize("name", ["sd3", "sd35_medium", "wan"])
def test_gradients_are_those_of_diffusers(name, tmp_path):
    component, theirs = MODELS[name]()
    drawn(theirs, 0.1).save_pretrained(tmp_path)  # with larger values float32 has fewer digits than the tolerance
    config, ours = load_component(component, tmp_path)
    inputs, answer = JOINT[config.name]
    images, timesteps, condition = inputs(np.array([3.0, 700.0], np.float32), np.random.default_rng(1))
    weights = np.random.default_rng(2).standard_normal(images.shape).astype(np.float32)
    (answer(theirs, images, timesteps, condition) * of_torch(weights)).sum().backward()
    wanted = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    graph, params, others = nnx.split(ours, is_trained, ...)
    given = jax.tree.map(jnp.asarray, (images, timesteps, condition))

    def loss(params):
        return jnp.sum(nnx.merge(graph, params, others)(*given) * weights)

    with jax.default_matmul_precision("highest"):
        gradients = nnx.to_flat_state(jax.grad(loss)(params))
    found = {
        name: tensor
        for path, leaf in gradients
        for name, tensor in component.tensors_of(config, "/".join(map(str, path)), np.asarray(leaf[...])).items()
    }
    assert found.keys() == wanted.keys()
    last = f"transformer_blocks.{config.layers - 1}.attn."  # whose text has no queries that anything reads
    unread = [each for each in wanted if each.startswith((f"{last}add_q_proj", f"{last}norm_added_q"))]
    assert [each for each, gradient in wanted.items() if not gradient.any()] == unread
    for each, gradient in wanted.items():
        tolerance = TOLERANCE * max(1.0, np.abs(gradient).max())
        np.testing.assert_allclose(found[each], gradient, atol=tolerance, rtol=0, err_msg=each)


def is_trained(path, variable):
    return variable.get_metadata().get("trained", True)


def test_positions_of_a_new_model_are_those_of_diffusers():
    theirs = of_sd3()[1].pos_embed.pos_embed
    config = sd3.Sd3Config(
        image_size=8, channels=3, layers=1, heads=3, head_dim=12, text_dim=24, pooled_dim=20, max_patches=9
    )
    np.testing.assert_allclose(sd3.FAMILY.build(config, key=jax.random.key(0)).positions[...], theirs, atol=1e-6)


def test_a_denoiser_says_what_diffusers_says(pair):
    _, theirs, config, ours, _ = pair
    with jax.default_matmul_precision("highest"):
        got, wanted = predictions(config.name, ours, theirs)
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE * np.abs(wanted).max(), rtol=0)


def test_what_is_read_and_written_again_is_the_same_bit_by_bit(written):
    component, theirs, config, ours, directory = written
    save_component(component, directory / "ours", config, ours)
    before, after = (load_file(directory / name / "diffusion_pytorch_model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor.view(np.uint8), after[name].view(np.uint8), err_msg=name)
    again = type(theirs).from_pretrained(directory / "ours")
    settings = {"dtype": "float32", "param_dtype": "float32", "image_size": config.image_size}
    assert (
        component.read_config({name: value for name, value in again.config.items() if name[0] != "_"}, **settings)
        == config
    )


LEADING = {"timestep_spacing": "leading", "steps_offset": 1}
TRAILING = {"timestep_spacing": "trailing"}
SDE = {"algorithm_type": "sde-dpmsolver++"}
ZERO_SNR = {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction", **TRAILING}
COSINE = {"beta_schedule": "squaredcos_cap_v2"}
SCHEDULERS = {
    "ddim": (diffusers.DDIMScheduler, {**LEADING, "clip_sample": False, "set_alpha_to_one": False}),
    "ddim_trailing": (diffusers.DDIMScheduler, {"clip_sample": False, **TRAILING}),
    "ddim_linspace": (diffusers.DDIMScheduler, {"clip_sample": False, "timestep_spacing": "linspace"}),
    "ddim_cosine": (diffusers.DDIMScheduler, {"clip_sample": False, **COSINE}),
    "ddim_zero_snr": (diffusers.DDIMScheduler, {"clip_sample": False, **ZERO_SNR}),
    "pndm": (diffusers.PNDMScheduler, {**LEADING, "skip_prk_steps": True}),
    "pndm_to_one": (diffusers.PNDMScheduler, {"skip_prk_steps": True, "set_alpha_to_one": True}),
    "euler": (diffusers.EulerDiscreteScheduler, LEADING),
    "euler_linspace": (diffusers.EulerDiscreteScheduler, {"final_sigmas_type": "sigma_min"}),
    "euler_karras": (diffusers.EulerDiscreteScheduler, {"use_karras_sigmas": True, **LEADING}),
    "euler_karras_bounds": (
        diffusers.EulerDiscreteScheduler,
        {"use_karras_sigmas": True, "sigma_min": 0.05, "sigma_max": 9.0},
    ),
    "euler_exponential": (diffusers.EulerDiscreteScheduler, {"use_exponential_sigmas": True, **TRAILING}),
    "euler_beta": (diffusers.EulerDiscreteScheduler, {"use_beta_sigmas": True}),
    "euler_zero_snr": (diffusers.EulerDiscreteScheduler, ZERO_SNR),
    "euler_ancestral": (diffusers.EulerAncestralDiscreteScheduler, LEADING),
    "euler_ancestral_trailing": (diffusers.EulerAncestralDiscreteScheduler, TRAILING),
    "heun": (diffusers.HeunDiscreteScheduler, TRAILING),
    "heun_karras": (diffusers.HeunDiscreteScheduler, {"use_karras_sigmas": True}),
    "dpmpp_2m": (diffusers.DPMSolverMultistepScheduler, {}),
    "dpmpp_2m_heun": (diffusers.DPMSolverMultistepScheduler, {"solver_type": "heun", **LEADING}),
    "dpmpp_2m_karras": (diffusers.DPMSolverMultistepScheduler, {"use_karras_sigmas": True, **TRAILING}),
    "dpmpp_2m_exponential": (diffusers.DPMSolverMultistepScheduler, {"use_exponential_sigmas": True}),
    "dpmpp_2m_lu": (diffusers.DPMSolverMultistepScheduler, {"use_lu_lambdas": True}),
    "dpmpp_2m_euler_at_final": (
        diffusers.DPMSolverMultistepScheduler,
        {"euler_at_final": True, "lower_order_final": False, "final_sigmas_type": "sigma_min"},
    ),
    "dpmpp_2m_to_min": (
        diffusers.DPMSolverMultistepScheduler,
        {"lower_order_final": False, "final_sigmas_type": "sigma_min"},
    ),
    "dpmpp_3m": (diffusers.DPMSolverMultistepScheduler, {"solver_order": 3}),
    "dpmpp_3m_whole": (diffusers.DPMSolverMultistepScheduler, {"solver_order": 3, "lower_order_final": False}),
    "dpmpp_2m_sde": (diffusers.DPMSolverMultistepScheduler, SDE),
    "dpmpp_2m_sde_heun": (diffusers.DPMSolverMultistepScheduler, {**SDE, "solver_type": "heun"}),
    "unipc": (diffusers.UniPCMultistepScheduler, {}),
    "unipc_to_min": (
        diffusers.UniPCMultistepScheduler,
        {"lower_order_final": False, "final_sigmas_type": "sigma_min", **LEADING},
    ),
    "unipc_karras": (diffusers.UniPCMultistepScheduler, {"use_karras_sigmas": True, **COSINE}),
    "unipc_bounds": (
        diffusers.UniPCMultistepScheduler,
        {"use_exponential_sigmas": True, "sigma_min": 0.05, "sigma_max": 9.0, **TRAILING},
    ),
    "unipc_zero_snr": (diffusers.UniPCMultistepScheduler, ZERO_SNR),
    "dpmpp_3m_sde": (diffusers.DPMSolverMultistepScheduler, {**SDE, "solver_order": 3, "use_karras_sigmas": True}),
    "lcm": (diffusers.LCMScheduler, {}),
    # With the default scaling, c_skip is below 1e-5 at all timesteps.
    "lcm_scaling": (diffusers.LCMScheduler, {"timestep_scaling": 0.01, "original_inference_steps": 30}),
    "lcm_zero_snr": (
        diffusers.LCMScheduler,
        {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction", **COSINE},
    ),
}


def said(x, timestep, xp):
    return xp.tanh(0.7 * x) * 0.9 + 0.05 * xp.sin(timestep / 100.0)


def trajectory(table, noise, added=None):
    """Every x of a sampler, as `sample` computes it, with given noise."""
    found, x, history = [], table.start * noise, [jnp.zeros_like(noise)] * (table.rows.shape[1] - 6)
    for number, (timestep, p, q, a, n, *b) in enumerate(jnp.asarray(table.rows, jnp.float32)):
        history = [p * x + q * said(x, timestep, jnp), *history]
        x = a * x + sum(weight * each for weight, each in zip(b, history, strict=True))
        x, history = x if added is None else x + n * added[number], history[:-1]
        found.append(np.asarray(x))
    return found


def noise_of(monkeypatch, scheduler, added):
    """Lets a scheduler add the given noise, row by row."""
    rows = iter(added)
    module = sys.modules[type(scheduler).__module__]
    if hasattr(module, "randn_tensor"):
        monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: torch.tensor(next(rows)))


# diffusers makes NumPy arrays of tensors
@pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")
@pytest.mark.parametrize("steps", [STEPS, 21])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_sampler_goes_the_way_of_diffusers(name, prediction, steps, tmp_path, monkeypatch):
    scheduler_class, settings = SCHEDULERS[name]
    scheduler = scheduler_class(**{**BETAS, "prediction_type": prediction, **settings})
    scheduler.save_pretrained(tmp_path)
    read = read_scheduler(tmp_path)
    write_scheduler(tmp_path / "again", read)
    assert read_scheduler(tmp_path / "again") == read
    again = scheduler_class.from_pretrained(tmp_path / "again").config
    assert {key: again[key] for key in settings} == settings
    scheduler.set_timesteps(steps)
    if read.sampler.name == "unipc":
        scheduler.set_begin_index(0)  # otherwise it begins at the second of two equal timesteps
    shape = (2, 4, 4, 3)
    noise, added = np.split(np.random.default_rng(0).standard_normal((50, *shape)).astype(np.float32), [1])
    noise_of(monkeypatch, scheduler, added)
    sampler = replace(read.sampler, steps=steps)
    table = table_of(sampler, levels_of(read.objective.schedule(1), sampler), read.objective.prediction)
    x, wanted = torch.tensor(noise[0]) * scheduler.init_noise_sigma, []
    for step, timestep in enumerate(scheduler.timesteps):
        given = scheduler.scale_model_input(x, timestep)
        x = scheduler.step(said(given, timestep.float(), torch), timestep, x).prev_sample.float()
        # These keep y = x / alpha.
        scaled = sampler.name in ("euler", "euler_ancestral", "heun")
        wanted.append(x.numpy() / (np.sqrt(scheduler.sigmas[step + 1] ** 2 + 1).numpy() if scaled else 1.0))
    np.testing.assert_allclose(table.rows[:, 0], scheduler.timesteps.numpy(), atol=2e-3)
    # diffusers draws noise for every row, of which ours reads those that add any.
    got = trajectory(table, jnp.asarray(noise[0]), added)
    assert len(got) == len(wanted)
    for step, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        tolerance = TOLERANCE * max(1.0, np.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, atol=tolerance, rtol=0, err_msg=f"step {step}")


@pytest.mark.parametrize("eta", [0.4, 1.0])
def test_ddim_adds_the_noise_of_diffusers(eta, tmp_path):
    scheduler = diffusers.DDIMScheduler(**BETAS, clip_sample=False)
    scheduler.save_pretrained(tmp_path)
    read = read_scheduler(tmp_path)
    scheduler.set_timesteps(STEPS)
    noise, added = np.split(np.random.default_rng(0).standard_normal((50, 2, 4, 4, 3)).astype(np.float32), [1])
    sampler = replace(read.sampler, steps=STEPS, eta=eta)
    table = table_of(sampler, levels_of(read.objective.schedule(1), sampler), "epsilon")
    x, got = torch.tensor(noise[0]), trajectory(table, jnp.asarray(noise[0]), added)
    for step, timestep in enumerate(scheduler.timesteps):
        drawn_noise = torch.tensor(added[step])
        output = said(x, timestep.float(), torch)
        x = scheduler.step(output, timestep, x, eta=eta, variance_noise=drawn_noise).prev_sample
        np.testing.assert_allclose(got[step], x.numpy(), atol=TOLERANCE, err_msg=f"step {step}")


@pytest.mark.parametrize(
    ("settings", "pixels"),
    [
        ({"shift": 1.0}, 1024),
        ({"shift": 3.0}, 1024),
        ({"use_dynamic_shifting": True}, 1024),
        ({"use_dynamic_shifting": True, "shift": 3.0, "max_shift": 1.3}, 512),
        ({"use_dynamic_shifting": True, "time_shift_type": "linear"}, 256),
        ({"shift": 2.0, "shift_terminal": 0.1}, 512),
        ({"shift": 2.0, "use_karras_sigmas": True}, 512),
        ({"use_exponential_sigmas": True, "shift_terminal": 0.05}, 512),
        ({"use_beta_sigmas": True}, 512),
    ],
)
@pytest.mark.parametrize("spacing", [None, "linspace"])
@pytest.mark.parametrize(
    "scheduler_class", [diffusers.FlowMatchEulerDiscreteScheduler, diffusers.FlowMatchLCMScheduler]
)
def test_a_flow_goes_the_way_of_diffusers(scheduler_class, spacing, settings, pixels, tmp_path, monkeypatch):
    scheduler = scheduler_class(**settings)
    scheduler.save_pretrained(tmp_path)
    tokens, config = (pixels // 16) ** 2, scheduler.config
    line = config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    # Flux gives its times, and Stable Diffusion 3 takes those of the scheduler.
    times = {"sigmas": np.linspace(1.0, 1 / STEPS, STEPS)} if spacing is None else {"num_inference_steps": STEPS}
    scheduler.set_timesteps(**times, mu=calculate_shift(tokens, *line))
    noise, *added = np.random.default_rng(0).standard_normal((1 + STEPS, 2, 4, 4, 3)).astype(np.float32)
    noise_of(monkeypatch, scheduler, added)
    read = read_scheduler(tmp_path)
    write_scheduler(tmp_path / "again", read)
    assert read_scheduler(tmp_path / "again") == read
    assert isinstance(scheduler_class.from_pretrained(tmp_path / "again"), scheduler_class)
    sampler = replace(read.sampler, steps=STEPS, spacing=spacing)
    levels = levels_of(read.objective.schedule(tokens), sampler)
    np.testing.assert_allclose(levels.sigmas, scheduler.sigmas[:-1].numpy(), atol=1e-6)
    table = table_of(sampler, levels, "flow")
    x = torch.tensor(noise)
    for step, (timestep, ours) in enumerate(
        zip(scheduler.timesteps, trajectory(table, jnp.asarray(noise), added), strict=True)
    ):
        x = scheduler.step(said(x, timestep.float(), torch), timestep, x).prev_sample
        np.testing.assert_allclose(ours, x.numpy(), atol=TOLERANCE, err_msg=f"step {step}")


UNIPC_FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


@pytest.mark.parametrize("steps", [2, STEPS, 50])
@pytest.mark.parametrize(
    "settings", [{"flow_shift": 3.0}, {"flow_shift": 5.0, "lower_order_final": False}, {"shift_terminal": 0.1}]
)
def test_unipc_goes_the_way_of_diffusers_in_a_flow(settings, steps, tmp_path):
    scheduler = diffusers.UniPCMultistepScheduler(**UNIPC_FLOW, **settings)
    scheduler.save_pretrained(tmp_path)
    read = read_scheduler(tmp_path)
    write_scheduler(tmp_path / "again", read)
    assert read_scheduler(tmp_path / "again") == read
    again = diffusers.UniPCMultistepScheduler.from_pretrained(tmp_path / "again").config
    assert {key: again[key] for key in UNIPC_FLOW | settings} == UNIPC_FLOW | settings
    scheduler.set_timesteps(steps)
    noise = np.random.default_rng(0).standard_normal((2, 2, 4, 4, 3)).astype(np.float32)
    sampler = replace(read.sampler, steps=steps)
    table = table_of(sampler, levels_of(read.objective.schedule(1), sampler), "flow")
    np.testing.assert_array_equal(table.rows[:, 0], scheduler.timesteps.numpy())
    x, got = torch.tensor(noise), trajectory(table, jnp.asarray(noise))
    for step, timestep in enumerate(scheduler.timesteps):
        x = scheduler.step(said(x, timestep.float(), torch), timestep, x).prev_sample
        # Without lower orders at the end, diffusers divides by the last level, which is 0.
        if settings.get("lower_order_final", True) or step < steps - 1:
            np.testing.assert_allclose(got[step], x.numpy(), atol=TOLERANCE, err_msg=f"step {step}")
        assert np.isfinite(got[step]).all()
