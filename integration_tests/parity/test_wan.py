"""Wan's models of image to video and of two denoisers against diffusers: calls, gradients, files and latents."""

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
from safetensors.numpy import load_file

from stack_core.abi.errors import ConversionError
from stack_train.diffusion import wan
from stack_train.diffusion.components import load_component, save_component
from stack_train.diffusion.pipeline import open_pipeline, save_pipeline
from stack_train.diffusion.sampling import open_images
from stack_train.diffusion.starts import Start

from .test_diffusers import drawn, of_numpy, of_torch

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

TOLERANCE = 1e-4
WORDS = ("a", "red", "circle")
# Latents of 3 channels, whose first frame adds a mask of 4 channels and 3 channels of latents.
IMAGE = {"in_channels": 10}
FEATURES = {"image_dim": 10, "added_kv_proj_dim": 28}
UNIPC = diffusers.UniPCMultistepScheduler(
    prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
)


def autoencoder():
    means, deviations = [0.3, -0.2, 0.1], [2.0, 0.5, 1.5]
    sizes = {"base_dim": 4, "z_dim": 3, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
    return diffusers.AutoencoderKLWan(**sizes, latents_mean=means, latents_std=deviations)


def denoiser(std=0.2, **settings):
    sizes = {"num_attention_heads": 2, "attention_head_dim": 14, "in_channels": 3, "out_channels": 3, "text_dim": 32}
    sizes |= {"freq_dim": 16, "ffn_dim": 40, "num_layers": 2, "rope_max_seq_len": 40}
    return drawn(diffusers.WanTransformer3DModel(**sizes | settings), std)


@pytest.mark.parametrize("features", [{}, FEATURES], ids=["latents", "features"])
def test_a_denoiser_that_reads_an_image_is_equivalent(features, tmp_path):
    theirs = denoiser(0.1, **IMAGE, **features)
    theirs.save_pretrained(tmp_path / "theirs")
    config, ours = load_component(wan.COMPONENT, tmp_path / "theirs")
    assert (config.channels, config.extra_channels) == (3, 7)
    rng = np.random.default_rng(0)
    # Three frames of 3 x 5 patches. diffusers finds the image before 512 tokens of text.
    videos, extra = (rng.standard_normal((2, 3, 6, 10, channels), np.float32) for channels in (3, 7))
    condition = {"text": rng.standard_normal((2, 512, 32), np.float32), wan.FIRST_FRAME: extra}
    image = None
    if features:
        condition[wan.IMAGE_FEATURES] = rng.standard_normal((2, 5, 10), np.float32)
        image = torch.tensor(condition[wan.IMAGE_FEATURES])
    timesteps = np.array([3.0, 700.0], np.float32)
    text = torch.tensor(condition["text"])
    predicted = theirs(of_torch(np.concatenate([videos, extra], -1)), torch.tensor(timesteps), text, image).sample
    weights = rng.standard_normal(videos.shape, np.float32)
    (predicted * of_torch(weights)).sum().backward()
    graph, state = nnx.split(ours)
    inputs = jax.tree.map(jnp.asarray, (videos, timesteps, condition))

    def loss(state):
        found = nnx.merge(graph, state)(*inputs)
        return jnp.sum(found * weights), found

    with jax.default_matmul_precision("highest"):
        gradients, found = jax.grad(loss, has_aux=True)(state)
    expected = of_numpy(predicted.detach())
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=TOLERANCE * np.abs(expected).max(), rtol=0)
    assert_same_gradients(wan.COMPONENT, config, gradients, theirs)
    assert_same_component(wan.COMPONENT, config, ours, tmp_path)


def assert_same_gradients(component, config, gradients, theirs):
    """Compares the gradient of each parameter with the one of the module in PyTorch."""
    named = {
        name: tensor
        for path, leaf in nnx.to_flat_state(gradients)
        for name, tensor in component.tensors_of(config, "/".join(map(str, path)), np.asarray(leaf[...])).items()
    }
    expected = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    assert named.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.any(), name
        tolerance = TOLERANCE * max(1.0, np.abs(gradient).max())
        np.testing.assert_allclose(named[name], gradient, atol=tolerance, rtol=0, err_msg=name)


def assert_same_component(component, config, ours, root):
    """Writes a model beside the one of diffusers in `root`; compares tensors bitwise and all keys of the configs."""
    save_component(component, root / "ours", config, ours)
    assert_same_tensors(root, "")
    configs = [json.loads((root / name / "config.json").read_text()) for name in ("theirs", "ours")]
    assert {name: value for name, value in configs[0].items() if name[0] != "_"}.items() <= configs[1].items()


def assert_same_tensors(root, part, stem="diffusion_pytorch_model", prefix=""):
    before, after = (load_file(root / name / part / f"{stem}.safetensors") for name in ("theirs", "ours"))
    before = {prefix + name.removeprefix(prefix): tensor for name, tensor in before.items()}
    before.pop(f"{prefix}embeddings.position_ids", None)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        pair = (np.atleast_1d(each).view(np.uint8) for each in (tensor, after[name]))
        np.testing.assert_array_equal(*pair, err_msg=name)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def make_tokenizer(directory):
    """Returns the tokenizer of T5 for a few words."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), *((f"▁{word}", -1.0) for word in WORDS)]
    transformers.T5Tokenizer(vocab=pieces, extra_ids=0).save_pretrained(directory)
    return transformers.AutoTokenizer.from_pretrained(directory)


def parts_of(tokenizer):
    """Returns the parts that all pipelines have."""
    text = transformers.UMT5Config(vocab_size=19, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=6)
    encoder = drawn(transformers.UMT5EncoderModel(text))
    return {"tokenizer": tokenizer, "text_encoder": encoder, "vae": drawn(autoencoder()), "scheduler": UNIPC}


def image_encoder():
    """Returns an encoder of images of 11 x 11 pixels, whose last pixels no patch reads, and its preprocessing."""
    sizes = {"hidden_size": 10, "intermediate_size": 14, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.CLIPVisionConfig(**sizes, image_size=11, patch_size=5, hidden_act="gelu")
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    side = {"height": 11, "width": 11}
    processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": 11}, crop_size=side, image_mean=mean, image_std=std
    )
    return {"image_encoder": drawn(transformers.CLIPVisionModel(config)), "image_processor": processor}


def second(**settings):
    """Returns another denoiser than `denoiser`."""
    model = denoiser(**settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.1)
    return model


TEXT, FRAMES = diffusers.WanPipeline, diffusers.WanImageToVideoPipeline
PIPELINES = {
    "2.1_image": (FRAMES, lambda: {"transformer": denoiser(**IMAGE, **FEATURES), **image_encoder()}, {}),
    "2.2_text": (
        TEXT,
        lambda: {"transformer": denoiser(), "transformer_2": second(), "boundary_ratio": 0.875},
        {"guidance_scale_2": 2.0},
    ),
    "2.2_image": (
        FRAMES,
        lambda: {"transformer": denoiser(**IMAGE), "transformer_2": second(**IMAGE), "boundary_ratio": 0.9},
        {},
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_latents_are_those_of_diffusers_and_directories_are_the_same(name, tokenizer, tmp_path, monkeypatch):
    # This module of diffusers calls ftfy without a check that it is installed; it does not change this prompt.
    monkeypatch.setattr("diffusers.pipelines.wan.pipeline_wan_i2v.prompt_clean", lambda text: text)
    pipeline_class, more, options = PIPELINES[name]
    made = pipeline_class(**parts_of(tokenizer), **more())
    made.save_pretrained(tmp_path / "theirs")
    opened = open_images(f"hf:{tmp_path / 'theirs'}", size=(32, 48), frames=9)
    assert opened.shape == (3, 4, 6, 3) and opened.config.text_tokens == 512
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((1, 3, 4, 6, 3)).astype(np.float32)
    pixels = rng.integers(0, 256, (32, 48, 3)).astype(np.uint8)

    def latents_of(pipeline):
        pipeline.set_progress_bar_config(disable=True)
        size = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 6, "guidance_scale": 3.0}
        image = {"image": Image.fromarray(pixels)} if pipeline_class is FRAMES else {}
        settings = {**size, **image, **options, "output_type": "latent"}
        return np.moveaxis(pipeline(prompt="a red circle", latents=of_torch(noise), **settings).frames.numpy(), 1, -1)

    low = {"low_noise_guidance": options["guidance_scale_2"]} if options else {}
    sampler = opened.sampler.changed({"steps": 6, "guidance": 3.0, **low})
    with jax.default_matmul_precision("highest"):
        condition = opened.condition(["a red circle"], sampler)
        if pipeline_class is FRAMES:
            condition |= opened._first_frame(Start(pixels), 1)
        latents = opened._sampled(condition, 1, sampler, 0, noise=jnp.asarray(noise))
    expected = latents_of(made)
    assert expected.std() > 0.1
    np.testing.assert_allclose(latents, expected, atol=TOLERANCE * max(1.0, np.abs(expected).max()), rtol=0)
    save_pipeline(tmp_path / "ours", open_pipeline(tmp_path / "theirs"))
    assert_same_tensors(tmp_path, "transformer")
    if name.startswith("2.2"):
        assert_same_tensors(tmp_path, "transformer_2")
    else:
        assert_same_tensors(tmp_path, "image_encoder", "model", "vision_model.")
    again = pipeline_class.from_pretrained(tmp_path / "ours")
    np.testing.assert_allclose(latents_of(again), expected, atol=1e-5)


def test_a_norm_that_nothing_reads_is_not_missed(tmp_path):
    """Published models of image to video have norms of queries to the image."""
    theirs = denoiser(**IMAGE, **FEATURES)
    for block in theirs.blocks:
        block.attn2.norm_added_q = torch.nn.RMSNorm(28)
    theirs.save_pretrained(tmp_path)
    assert "blocks.1.attn2.norm_added_q.weight" in load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    load_component(wan.COMPONENT, tmp_path)
    theirs.blocks[0].attn2.norm_other = torch.nn.RMSNorm(28)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ConversionError, match=r"blocks.0.attn2.norm_other.weight is unexpected"):
        load_component(wan.COMPONENT, tmp_path)
