"""Denoisers and samplers against diffusers on PyTorch, both in float32, on tiny random configurations."""

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from safetensors.numpy import load_file

from stack_train.diffusion import autoencoder_kl, dit, flux, unet
from stack_train.diffusion.components import load_component, save_component
from stack_train.diffusion.noise import NoiseConfig
from stack_train.diffusion.samplers import SamplerConfig, levels_of, table_of
from stack_train.diffusion.scheduler import read_scheduler

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
STEPS = 10
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
NOISE = NoiseConfig(betas="scaled_linear", beta_start=0.00085, beta_end=0.012)


def drawn(model):
    """The model with every parameter drawn anew, so that none is 0 or 1 and could go missing unnoticed."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
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


MODELS = {
    "dit": of_dit,
    "flux_dev": lambda: of_flux(guidance=True),
    "flux_schnell": lambda: of_flux(guidance=False),
    "unet": of_unet,
    "unet_xl": of_unet_xl,
    "unet_scale_shift": lambda: of_unet_xl(resnet_time_scale_shift="scale_shift", norm_eps=1e-3),
}


AUTOENCODERS = {
    "vae": of_vae,
    "vae_of_flux": lambda: of_vae(quantizes=False),
    "vae_without_attention": lambda: of_vae(attends=False),
}


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


@pytest.fixture(params=MODELS | AUTOENCODERS)
def written(request, tmp_path):
    component, model = (MODELS | AUTOENCODERS)[request.param]()
    drawn(model).save_pretrained(tmp_path / "theirs")
    return component, model, *load_component(component, tmp_path / "theirs"), tmp_path


@pytest.fixture(params=MODELS)
def pair(request, tmp_path):
    component, model = MODELS[request.param]()
    drawn(model).save_pretrained(tmp_path / "theirs")
    return component, model, *load_component(component, tmp_path / "theirs"), tmp_path


def of_torch(images):
    return torch.tensor(images.transpose(0, 3, 1, 2))


def of_numpy(images):
    return images.numpy().transpose(0, 2, 3, 1)


def predictions(family, ours, theirs):
    """What both say of the same images, conditions and timesteps."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((2, 8, 8, 3), np.float32)
    timesteps = np.array([3.0, 700.0], np.float32)
    given = jnp.asarray(images), jnp.asarray(timesteps)
    if family == "dit":
        labels = np.array([1, 10])
        with torch.no_grad():
            said = theirs(of_torch(images), torch.tensor(timesteps), torch.tensor(labels)).sample
        return ours(*given, {"labels": jnp.asarray(labels, jnp.int32)}), of_numpy(said)
    if family == "unet":
        return unet_predictions(ours, theirs, timesteps, rng)
    text, pooled = rng.standard_normal((2, 5, 24), np.float32), rng.standard_normal((2, 20), np.float32)
    guidance = np.array([1.5, 4.0], np.float32) if theirs.config.guidance_embeds else None
    patches = diffusers.FluxPipeline._pack_latents(of_torch(images), 2, 3, 8, 8)
    with torch.no_grad():
        said = theirs(
            patches,
            torch.tensor(text),
            torch.tensor(pooled),
            torch.tensor(timesteps / 1000.0),
            img_ids=diffusers.FluxPipeline._prepare_latent_image_ids(2, 4, 4, "cpu", torch.float32),
            txt_ids=torch.zeros(5, 3),
            guidance=None if guidance is None else torch.tensor(guidance),
        ).sample
    said = diffusers.FluxPipeline._unpack_latents(said, 64, 64, 8)
    condition = {"text": text, "pooled": pooled} | ({} if guidance is None else {"guidance": guidance})
    return ours(*given, jax.tree.map(jnp.asarray, condition)), of_numpy(said)


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


SCHEDULERS = {
    "ddim": (diffusers.DDIMScheduler, {"clip_sample": False}),
    "euler": (diffusers.EulerDiscreteScheduler, {}),
    "heun": (diffusers.HeunDiscreteScheduler, {}),
    "dpmpp_2m": (diffusers.DPMSolverMultistepScheduler, {}),
}


def said(x, timestep, xp):
    return xp.tanh(0.7 * x) * 0.9 + 0.05 * xp.sin(timestep / 100.0)


def trajectory(table, noise):
    """Every x of a sampler, as `sample` computes it."""
    found, x, before = [], noise, jnp.zeros_like(noise)
    for timestep, p, q, a, b, c, _ in jnp.asarray(table.rows, jnp.float32):
        expected = p * x + q * said(x, timestep, jnp)
        x, before = a * x + b * expected + c * before, expected
        found.append(np.asarray(x))
    return found


# diffusers makes NumPy arrays of tensors
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_sampler_goes_the_way_of_diffusers(name, prediction):
    scheduler_class, settings = SCHEDULERS[name]
    kind = {"epsilon": "epsilon", "v": "v_prediction"}[prediction]
    scheduler = scheduler_class(**BETAS, prediction_type=kind, timestep_spacing="trailing", **settings)
    scheduler.set_timesteps(STEPS)
    noise = np.random.default_rng(0).standard_normal((2, 4, 4, 3)).astype(np.float32)
    levels = levels_of(NOISE, STEPS, "trailing")
    table = table_of(SamplerConfig(name=name, steps=STEPS, spacing="trailing"), levels, prediction)
    scaled = name in ("euler", "heun")  # diffusers keeps x / alpha there
    x, wanted = torch.tensor(noise) / (levels.alphas[0] if scaled else 1.0), []
    for timestep in scheduler.timesteps:
        given = scheduler.scale_model_input(x, timestep)
        x = scheduler.step(said(given, timestep.float(), torch), timestep, x).prev_sample.float()
        wanted.append(x.numpy())
    got = trajectory(table, jnp.asarray(noise))
    assert len(got) == len(wanted)
    np.testing.assert_allclose(table.rows[:, 0], scheduler.timesteps.numpy(), atol=1e-3)
    alphas = np.interp(table.rows[1:, 0], levels.timesteps[::-1], levels.alphas[:-1][::-1])
    for step, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        scale = alphas[step] if scaled and step < len(alphas) else 1.0
        np.testing.assert_allclose(ours, theirs * scale, atol=TOLERANCE, err_msg=f"step {step}")


@pytest.mark.parametrize(
    ("settings", "pixels"),
    [
        ({"shift": 1.0}, 1024),
        ({"shift": 3.0}, 1024),
        ({"use_dynamic_shifting": True}, 1024),
        ({"use_dynamic_shifting": True, "shift": 3.0, "max_shift": 1.3}, 512),
        ({"use_dynamic_shifting": True, "time_shift_type": "linear"}, 256),
    ],
)
def test_a_flow_goes_the_way_of_diffusers(settings, pixels, tmp_path):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**settings)
    scheduler.save_pretrained(tmp_path)
    tokens, config = (pixels // 16) ** 2, scheduler.config
    line = config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / STEPS, STEPS), mu=calculate_shift(tokens, *line))
    noise = np.random.default_rng(0).standard_normal((2, 4, 4, 3)).astype(np.float32)
    levels = levels_of(read_scheduler(tmp_path).schedule(tokens), STEPS)
    np.testing.assert_allclose(levels.sigmas, scheduler.sigmas.numpy(), atol=1e-6)
    table = table_of(SamplerConfig(steps=STEPS), levels, "flow")
    x = torch.tensor(noise)
    for step, (timestep, ours) in enumerate(
        zip(scheduler.timesteps, trajectory(table, jnp.asarray(noise)), strict=True)
    ):
        x = scheduler.step(said(x, timestep.float(), torch), timestep, x).prev_sample
        np.testing.assert_allclose(ours, x.numpy(), atol=TOLERANCE, err_msg=f"step {step}")
