"""ControlNets of UNets against diffusers on PyTorch, both in float32, on tiny random configurations."""

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from safetensors.numpy import load_file

from stack_core.abi.errors import ConversionError
from stack_train.diffusion import controlnet
from stack_train.diffusion.components import load_component, save_component
from stack_train.diffusion.controlnet import Control, load_controlnet
from stack_train.diffusion.sampling import open_images

from .test_diffusers import drawn, of_numpy, of_torch, of_unet, of_unet_xl
from .test_text_encoders import BETAS, stable_diffusion, stable_diffusion_xl, tokenizers_of

__all__ = ["tokenizers_of"]  # a fixture

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
UNETS = {"sd": of_unet, "xl": of_unet_xl}
WIDTHS = (4, 5, 6, 7)


def of_controlnet(unet, **settings):
    """A ControlNet with the settings of a UNet, and weights of its own."""
    options = {"conditioning_embedding_out_channels": WIDTHS, "load_weights_from_unet": False}
    made = diffusers.ControlNetModel.from_unet(unet, **options, **settings)
    return drawn(made)


@pytest.fixture(params=UNETS)
def pair(request, tmp_path):
    component, unet = UNETS[request.param]()
    drawn(unet).save_pretrained(tmp_path / "unet")
    theirs = of_controlnet(unet, controlnet_conditioning_channel_order="bgr" if request.param == "xl" else "rgb")
    theirs.save_pretrained(tmp_path / "controlnet")
    config, ours = load_component(component, tmp_path / "unet")
    ours.control = load_controlnet(tmp_path / "controlnet", config, 8)
    return unet, theirs, ours, tmp_path


def test_residuals_and_guided_predictions_are_those_of_diffusers(pair):
    unet, theirs, ours, _ = pair
    rng = np.random.default_rng(0)
    # Latents whose sides the levels do not divide.
    images, text = rng.standard_normal((2, 7, 10, 3), np.float32), rng.standard_normal((2, 5, 24), np.float32)
    control, timesteps = rng.random((2, 56, 80, 3), np.float32), np.array([3.0, 700.0], np.float32)
    condition, added = {"text": text, "control": control}, None
    if unet.config.addition_embed_type:
        sizes = np.array([[56, 80, 0, 0, 56, 80], [512, 300, 3, 9, 56, 80]], np.float32)
        condition |= {"pooled": rng.standard_normal((2, 20), np.float32), "sizes": sizes}
        added = {"text_embeds": torch.tensor(condition["pooled"]), "time_ids": torch.tensor(sizes)}
    given = of_torch(images), torch.tensor(timesteps), torch.tensor(text)
    with torch.no_grad():
        residuals = theirs(*given, of_torch(control), conditioning_scale=0.7, added_cond_kwargs=added)
        wanted = unet(
            *given,
            added_cond_kwargs=added,
            down_block_additional_residuals=residuals.down_block_res_samples,
            mid_block_additional_residual=residuals.mid_block_res_sample,
        ).sample
        plain = unet(*given, added_cond_kwargs=added).sample
    arguments = jax.tree.map(jnp.asarray, (images, timesteps, {**condition, "control_scale": np.full(2, 0.7, "f")}))
    with jax.default_matmul_precision("highest"):
        down, middle = jax.jit(ours.control.__call__)(*arguments)
        found = jax.jit(ours.__call__)(*arguments)
    expected = [*residuals.down_block_res_samples, residuals.mid_block_res_sample]
    for one, other in zip([*down, middle], map(of_numpy, expected), strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_allclose(one, other, atol=TOLERANCE * max(1.0, np.abs(other).max()), rtol=0)
    wanted, plain = of_numpy(wanted), of_numpy(plain)
    assert np.abs(wanted - plain).max() > 0.05
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE * max(1.0, np.abs(wanted).max()), rtol=0)


def test_a_controlnet_is_written_as_it_was_read_and_one_of_another_unet_is_refused(pair):
    unet, theirs, ours, directory = pair
    save_component(controlnet.COMPONENT, directory / "ours", ours.control.config, ours.control)
    before, after = (
        load_file(directory / name / "diffusion_pytorch_model.safetensors") for name in ("controlnet", "ours")
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor.view(np.uint8), after[name].view(np.uint8), err_msg=name)
    again = diffusers.ControlNetModel.from_pretrained(directory / "ours")
    keys = ("controlnet_conditioning_channel_order", "conditioning_embedding_out_channels", "block_out_channels")
    assert [list(again.config[key]) for key in keys] == [list(theirs.config[key]) for key in keys]
    others = UNETS["xl" if unet.config.addition_embed_type is None else "sd"]()[1]
    of_controlnet(others).save_pretrained(directory / "other")
    with pytest.raises(ConversionError, match=r"does not fit the UNet: its blocks_per_level .*pooled_dim is .*Take a"):
        load_controlnet(directory / "other", ours.config, 8)


PIPELINES = {
    "sd": (
        stable_diffusion,
        diffusers.StableDiffusionControlNetPipeline,
        lambda: diffusers.DDIMScheduler(**BETAS, clip_sample=False),
    ),
    "xl": (
        stable_diffusion_xl,
        diffusers.StableDiffusionXLControlNetPipeline,
        lambda: diffusers.EulerDiscreteScheduler(**BETAS, timestep_spacing="leading"),
    ),
    "heun": (
        stable_diffusion,
        diffusers.StableDiffusionControlNetPipeline,
        lambda: diffusers.HeunDiscreteScheduler(**{**BETAS, "timestep_spacing": "trailing"}),
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_with_a_control_image_makes_the_images_of_diffusers(name, tokenizers_of, tmp_path):
    make, pipeline_class, scheduler = PIPELINES[name]
    made = make(tokenizers_of, scheduler())
    made.save_pretrained(tmp_path / "theirs")
    theirs = of_controlnet(made.unet)
    theirs.save_pretrained(tmp_path / "controlnet")
    parts = {each: part for each, part in made.components.items() if each != "image_encoder"}
    options = {"add_watermarker": False} if name == "xl" else {"requires_safety_checker": False}
    steered = pipeline_class(**parts, controlnet=theirs, **options)
    steered.set_progress_bar_config(disable=True)
    rng = np.random.default_rng(0)
    # An image of another size is scaled.
    drawing = Image.fromarray(rng.integers(0, 256, (30, 50, 3), np.uint8))
    noise = rng.standard_normal((1, 3, 5, 4)).astype(np.float32)
    wanted = steered(
        "a red circle",
        image=drawing,
        height=24,
        width=40,
        latents=torch.tensor(noise.transpose(0, 3, 1, 2)),
        num_inference_steps=5,
        guidance_scale=2.0,
        controlnet_conditioning_scale=0.8,
        control_guidance_start=0.2,
        control_guidance_end=0.7,
        output_type="np",
    ).images
    opened = open_images(f"hf:{tmp_path / 'theirs'}", size=(24, 40), controlnet=tmp_path / "controlnet")
    scaled = np.asarray(drawing.resize((40, 24), Image.Resampling.LANCZOS))
    processor = VaeImageProcessor(vae_scale_factor=8, do_convert_rgb=True, do_normalize=False)
    np.testing.assert_allclose(of_numpy(processor.preprocess(drawing, height=24, width=40))[0] * 255, scaled, atol=1e-3)
    control = Control(scaled, 0.8, 0.2, 0.7)
    sampler = opened.sampler.changed({"steps": 5, "guidance": 2.0})
    condition = {**opened.condition(["a red circle"], sampler), **opened._control_condition(control, 1)}

    def images(control):
        with jax.default_matmul_precision("highest"):
            latents = opened._sampled(condition, 1, sampler, 0, noise=jnp.asarray(noise), control=control)
            return np.clip(np.asarray(opened.encoders.autoencoder.images_of(latents)) / 2 + 0.5, 0, 1)

    assert np.abs(images(Control(scaled)) - wanted).max() > 10 * TOLERANCE
    np.testing.assert_allclose(images(control), wanted, atol=TOLERANCE)
