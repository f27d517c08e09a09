"""Text encoders and their tokenizers against transformers on PyTorch, and a whole pipeline against diffusers."""

import json

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from stack_train.diffusion import clip, t5
from stack_train.diffusion.components import load_component, save_component
from stack_train.diffusion.denoiser import image_tokens
from stack_train.diffusion.pipeline import open_pipeline, save_pipeline
from stack_train.diffusion.prompts import load_prompt_tokenizer
from stack_train.diffusion.samplers import SamplerConfig, levels_of, sample, table_of

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
WORDS = ["a", "red", "blue", "circle", "square", "of", "the", "sea"]


def drawn(model):
    """The model with every parameter drawn anew, so that none is 0 or 1 and could go missing unnoticed."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


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


def of_t5(vocab=99):
    return t5.COMPONENT, transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=vocab,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=3,
            num_heads=6,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=20,
            feed_forward_proj="gated-gelu",
        )
    )


MODELS = {
    "clip": of_clip,
    "clip_of_newer_checkpoints": lambda: of_clip("gelu", end=98),
    "t5": of_t5,
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
        said = theirs(input_ids=torch.tensor(tokens))
    with jax.default_matmul_precision("highest"):
        found = ours(jnp.asarray(tokens, jnp.int32))
    pairs = [(found, said.last_hidden_state)]
    if component is clip.COMPONENT:
        pairs = [(found[0], said.last_hidden_state), (found[1], said.pooler_output)]
    for got, state in pairs:
        wanted = state.numpy()
        assert np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(got, wanted, atol=TOLERANCE * max(1.0, np.abs(wanted).max()), rtol=0)


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
    packed = made._pack_latents(torch.tensor(latents.transpose(0, 3, 1, 2)), 1, 4, 8, 8)
    return made(
        "a red circle",
        height=16,
        width=16,
        num_inference_steps=4,
        guidance_scale=2.0,
        max_sequence_length=8,
        latents=packed,
        output_type="np",
    ).images


def test_a_pipeline_makes_the_images_of_diffusers_and_is_opened_there_again(pipeline, tmp_path):
    made, directory = pipeline
    opened = open_pipeline(directory, text_tokens=8)
    noise = np.random.default_rng(0).standard_normal((1, 8, 8, 4)).astype(np.float32)
    condition = {**opened.encoders.text(["a red circle"]), "guidance": jnp.array([2.0])}
    levels = levels_of(opened.objective.schedule(image_tokens(opened.model, 8, 8)), 4)
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
    save_pipeline(tmp_path / "ours", opened.config, opened.model, opened.encoders, opened.objective.shift)
    again = diffusers.FluxPipeline.from_pretrained(tmp_path / "ours")
    np.testing.assert_allclose(images_of(again, noise), wanted, atol=1e-5)
