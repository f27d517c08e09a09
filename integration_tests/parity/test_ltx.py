"""LTX-Video against diffusers on tiny random configurations: calls, gradients, autoencoders, files and sampling."""

import json

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from PIL import Image

from stack_train.diffusion import autoencoder_kl_ltx, ltx
from stack_train.diffusion.autoencoder_kl_ltx_layers import Call
from stack_train.diffusion.components import load_component, save_component
from stack_train.diffusion.convolution import FrameCache
from stack_train.diffusion.pipeline import open_pipeline, save_pipeline
from stack_train.diffusion.sampling import open_images
from stack_train.diffusion.starts import Start, keep_first_frame
from stack_train.diffusion.wan import FIRST_FRAME

from .test_diffusers import drawn, of_numpy, of_torch
from .test_wan import assert_same_component, assert_same_gradients, assert_same_tensors, make_tokenizer

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

TOLERANCE = 1e-4
SIZES = {"in_channels": 5, "out_channels": 5, "num_layers": 2, "caption_channels": 32}
# One pair of features, which the three axes do not divide, is not rotated.
WIDTHS = {"num_attention_heads": 2, "attention_head_dim": 10, "cross_attention_dim": 20}


def denoiser(std=0.2, **settings):
    return drawn(diffusers.LTXVideoTransformer3DModel(**SIZES | WIDTHS | settings), std)


def assert_close(found, expected, message=""):
    scale = np.abs(expected).max()
    assert scale > 0.1
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * max(1.0, scale), rtol=0, err_msg=message)


@pytest.mark.parametrize("begins", [False, True], ids=["text", "image"])
def test_a_denoiser_is_equivalent(begins, tmp_path):
    theirs = denoiser(0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    config, ours = load_component(ltx.COMPONENT, tmp_path / "theirs")
    rng = np.random.default_rng(0)
    videos, text = rng.standard_normal((2, 3, 3, 5, 5), np.float32), rng.standard_normal((2, 7, 32), np.float32)
    timesteps, lengths = np.array([3.0, 700.0], np.float32), np.array([7, 4], np.int32)
    condition = {"text": text, ltx.TEXT_LENGTHS: lengths, ltx.FRAME_RATE: np.array([24.0, 24.0], np.float32)}
    given, of_tokens = videos.copy(), np.repeat(timesteps[:, None], 45, axis=1)
    if begins:
        condition[FIRST_FRAME] = rng.standard_normal((2, 3, 5, 5), np.float32)
        given[:, 0], of_tokens[:, :15] = condition[FIRST_FRAME], 0.0
    predicted = theirs(
        torch.tensor(given.reshape(2, 45, 5)),
        torch.tensor(text),
        torch.tensor(of_tokens if begins else timesteps),
        torch.tensor((np.arange(7) < lengths[:, None]).astype(np.int64)),
        num_frames=3,
        height=3,
        width=5,
        rope_interpolation_scale=(8 / 24, 32, 32),
    ).sample
    weights = rng.standard_normal((2, 45, 5), np.float32)
    (predicted * torch.tensor(weights)).sum().backward()
    graph, state = nnx.split(ours)
    inputs = jax.tree.map(jnp.asarray, (videos, timesteps, condition))

    def loss(state):
        found = nnx.merge(graph, state)(*inputs).reshape(2, 45, 5)
        return jnp.sum(found * weights), found

    with jax.default_matmul_precision("highest"):
        gradients, found = jax.grad(loss, has_aux=True)(state)
    assert_close(found, predicted.detach().numpy())
    assert_same_gradients(ltx.COMPONENT, config, gradients, theirs)
    assert_same_component(ltx.COMPONENT, config, ours, tmp_path)


CONVOLVING = {"block_out_channels": (6, 10), "layers_per_block": (2, 1, 2), "spatio_temporal_scaling": (True, False)}
CONVOLVING |= {"down_block_types": ("LTXVideoDownBlock3D",) * 2, "downsample_type": ("conv",) * 2}
PLAIN = {"decoder_block_out_channels": (8, 12), "decoder_layers_per_block": (1, 2, 1)}
PLAIN |= {"decoder_spatio_temporal_scaling": (True, False), "decoder_inject_noise": (False,) * 3}
PLAIN |= {"upsample_residual": (False, False), "upsample_factor": (1, 1)}
RESIDUAL = {"decoder_block_out_channels": (8, 16), "decoder_layers_per_block": (1, 2, 1)}
RESIDUAL |= {"decoder_spatio_temporal_scaling": (True, True), "upsample_residual": (True, False)}
RESIDUAL |= {"upsample_factor": (2, 2), "timestep_conditioning": True}
MOVING = {"block_out_channels": (6, 12, 24, 16), "down_block_types": ("LTXVideo095DownBlock3D",) * 3}
MOVING |= {"layers_per_block": (1, 2, 1, 1), "spatio_temporal_scaling": (True,) * 3}
MOVING |= {"downsample_type": ("spatial", "temporal", "spatiotemporal")}
MOVING |= {"spatial_compression_ratio": 8, "temporal_compression_ratio": 4}
THREE = {"block_out_channels": (6, 10, 10), "layers_per_block": (1, 1, 2, 1), "downsample_type": ("conv",) * 3}
THREE |= {"spatio_temporal_scaling": (True, True, False), "down_block_types": ("LTXVideoDownBlock3D",) * 3}
AUTOENCODERS = {
    "0.9.0": CONVOLVING | PLAIN,
    "causality_exchanged": CONVOLVING | PLAIN | {"encoder_causal": False, "decoder_causal": True},
    "0.9.1": THREE | RESIDUAL | {"decoder_inject_noise": (True, True, False)},
    "0.9.5": MOVING | RESIDUAL | {"decoder_inject_noise": (False,) * 3},
}


def autoencoder(name, **settings):
    sizes = {"latent_channels": 5, "patch_size": 2, "resnet_norm_eps": 1e-3}
    model = drawn(diffusers.AutoencoderKLLTXVideo(**sizes | AUTOENCODERS[name] | settings))
    with torch.no_grad():
        model.latents_mean.copy_(torch.linspace(-0.3, 0.4, 5))
        model.latents_std.copy_(torch.linspace(0.5, 2.0, 5))
    return model


@pytest.fixture
def same_noise(monkeypatch):
    """Noise of decoders that depends on its place only."""

    def pattern(height, width):
        return np.sin(np.arange(height * width, dtype=np.float32)).reshape(height, width)

    monkeypatch.setattr(torch, "randn", lambda shape, **_: torch.tensor(pattern(*shape)))
    monkeypatch.setattr(Call, "noise", lambda self, x: jnp.asarray(pattern(*x.shape[2:4]))[..., None])


@pytest.mark.parametrize("name", AUTOENCODERS)
def test_an_autoencoder_is_equivalent(name, tmp_path, request):
    theirs = autoencoder(name, scaling_factor=1.5)
    theirs.save_pretrained(tmp_path / "theirs")
    request.getfixturevalue("same_noise")
    config, ours = load_component(autoencoder_kl_ltx.COMPONENT, tmp_path / "theirs")
    ratios = theirs.spatial_compression_ratio, theirs.temporal_compression_ratio
    assert (config.downsampling, config.frames_per_latent) == ratios
    rng, side = np.random.default_rng(0), config.downsampling
    videos = rng.standard_normal((2, 2 * config.frames_per_latent + 1, 3 * side, 2 * side, 3), np.float32)
    latents, times = rng.standard_normal((2, 3, 3, 2, 5), np.float32), np.array([0.3, 0.7], np.float32)
    with torch.no_grad():
        posterior = theirs.encode(of_torch(videos)).latent_dist
        decoded = theirs.decode(of_torch(latents), torch.tensor(times)).sample
    for by_chunks in (False, True):
        with jax.default_matmul_precision("highest"):
            z = jnp.asarray(latents)
            mean, log_variance = jax.jit(lambda x, by_chunks=by_chunks: ours.encode(x, by_chunks=by_chunks))(videos)
            if config.timestep_conditioning:
                again = ours.decoder(z, FrameCache(), timestep=jnp.asarray(times), key=jax.random.key(0))
            else:
                again = ours.run_decoder(z, by_chunks=by_chunks)
        for found, expected in ((mean, posterior.mean), (log_variance, posterior.logvar), (again, decoded)):
            assert_close(found, of_numpy(expected), f"by_chunks={by_chunks}")
    scaled = (of_numpy(posterior.mean) - theirs.latents_mean.numpy()) * 1.5 / theirs.latents_std.numpy()
    assert_close(ours.scaled_latents(jnp.asarray(videos)), scaled)
    save_component(autoencoder_kl_ltx.COMPONENT, tmp_path / "ours", config, ours)
    assert_same_tensors(tmp_path, "")
    again = type(theirs).load_config(tmp_path / "ours")
    for key, value in theirs.config.items():
        if key[0] != "_" and not (key.endswith("_ratio") and value is None):
            assert again[key] == json.loads(json.dumps(value)), key


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def pipeline_of(pipeline_class, tokenizer):
    text = {"vocab_size": 19, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**text, feed_forward_proj="gated-gelu")
    shifts = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "max_image_seq_len": 4096}
    return pipeline_class(
        tokenizer=tokenizer,
        text_encoder=drawn(transformers.T5EncoderModel(config)),
        vae=autoencoder("0.9.5"),
        transformer=denoiser(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1, **shifts),
    )


PIPELINES = {"text": diffusers.LTXPipeline, "image": diffusers.LTXImageToVideoPipeline}


@pytest.mark.parametrize("name", PIPELINES)
def test_videos_are_those_of_diffusers_and_directories_are_the_same(name, tokenizer, tmp_path):
    made = pipeline_of(PIPELINES[name], tokenizer)
    made.save_pretrained(tmp_path / "theirs")
    default = open_images(f"hf:{tmp_path / 'theirs'}")
    assert default.shape == (41, 64, 88, 5) and default.sampler.guidance == 3.0
    opened = open_images(f"hf:{tmp_path / 'theirs'}", size=(32, 64), frames=9)
    assert opened.shape == (3, 4, 8, 5) and opened.config.text_tokens == 128
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((1, 3, 4, 8, 5)).astype(np.float32)
    pixels = rng.integers(0, 256, (32, 64, 3)).astype(np.uint8)
    sampler = opened.sampler.changed({"steps": 6, "guidance": 3.0, "guidance_rescale": 0.4})
    condition, begun = opened.condition(["a red circle"], sampler, negative=["a circle"]), None
    condition |= opened._frame_rate_condition(24.0, 1)
    with jax.default_matmul_precision("highest"):
        if name == "image":
            condition |= opened._first_frame(Start(pixels), 1)
            begun = keep_first_frame(condition[FIRST_FRAME], 3)
        latents = opened._sampled(condition, 1, sampler, 0, noise=jnp.asarray(noise), begun=begun)
        found = np.clip(np.asarray(opened.encoders.autoencoder.images_of(latents)) / 2 + 0.5, 0, 1)
    start, image = noise.copy(), {}
    if name == "image":
        image["image"] = Image.fromarray(pixels)
        given = of_torch(pixels[None, None].astype(np.float32) / 127.5 - 1.0)
        with torch.no_grad():
            mode = of_numpy(made.vae.encode(given).latent_dist.mode())
        # diffusers samples the image's latents, and here their mean takes their place.
        start[:, 0] = ((mode - made.vae.latents_mean.numpy()) / made.vae.latents_std.numpy())[:, 0]
        np.testing.assert_allclose(condition[FIRST_FRAME], start[:, 0], atol=TOLERANCE)

    def videos_of(pipeline, output_type):
        pipeline.set_progress_bar_config(disable=True)
        size = {"height": 32, "width": 64, "num_frames": 9, "num_inference_steps": 6, "frame_rate": 24}
        settings = {"guidance_scale": 3.0, "guidance_rescale": 0.4, "negative_prompt": "a circle"}
        packed = torch.tensor(start.reshape(1, -1, 5))
        return pipeline(
            prompt="a red circle", latents=packed, output_type=output_type, **size, **settings, **image
        ).frames

    expected = videos_of(made, "latent").numpy().reshape(noise.shape)
    assert_close(latents, expected)
    frames = videos_of(made, "np")
    assert frames.std() > 0.01
    np.testing.assert_allclose(found, frames, atol=TOLERANCE)
    save_pipeline(tmp_path / "ours", open_pipeline(tmp_path / "theirs"))
    assert_same_tensors(tmp_path, "transformer")
    assert_same_tensors(tmp_path, "vae")
    again = PIPELINES[name].from_pretrained(tmp_path / "ours")
    np.testing.assert_allclose(videos_of(again, "latent").numpy().reshape(noise.shape), expected, atol=1e-5)
