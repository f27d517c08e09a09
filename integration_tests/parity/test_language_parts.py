"""Language models in larger models of transformers: read out of them, with equal logits of text."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from stack_train.huggingface import FORMAT
from stack_train.variables.weights import read_params, run_config

from .conftest import model_of

pytestmark = pytest.mark.parity

TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_scaling": None,
}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = np.random.default_rng(0).integers(0, 90, (2, 24))


def of_llama4():
    experts = {"num_local_experts": 4, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2}
    text = {**TEXT, **experts, "attention_chunk_size": 7, "pad_token_id": None}
    vision = VISION | {"intermediate_size": 64, "vision_output_dim": 16, "image_size": 28, "patch_size": 14}
    config = transformers.Llama4Config(
        text_config=text, vision_config=vision | {"projector_input_dim": 16, "projector_output_dim": 16}
    )
    return transformers.Llama4ForConditionalGeneration(config)


def of_qwen3_5():
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    text = TEXT | delta | {"linear_value_head_dim": 8, "head_dim": 16}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    text["rope_parameters"] = rope
    del text["rope_scaling"]
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision | {"num_position_embeddings": 16})
    return transformers.Qwen3_5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("family", "make", "left_out"),
    [
        ("qwen3_5", of_qwen3_5, {"visual"}),
        ("llama4", of_llama4, {"vision_model", "multi_modal_projector"}),
    ],
)
def test_logits_of_text_are_those_of_the_larger_model(family, make, left_out, tmp_path):
    torch.manual_seed(0)
    theirs = make().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(
                (0.1 if family == "qwen3_5" else 0.25) * noise if parameter.ndim > 1 else parameter + 0.1 * noise
            )
        # transformers 5.24 fails to make the outputs of Llama 4 with images from those of its language model.
        expected = (theirs.language_model if family == "llama4" else theirs)(torch.tensor(TOKENS)).logits.numpy()
    theirs.save_pretrained(tmp_path / "hf")
    result = FORMAT.import_run(tmp_path / "hf", tmp_path / "run")
    assert {each.partition(" ")[0] for each in result.left_out} == left_out
    config = run_config(tmp_path / "run").model
    assert config.name == family
    ours = model_of(config, read_params(tmp_path / "run", config)[0])
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    actual = ours.logits(ours(jnp.asarray(TOKENS), positions).hidden)
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-4)

    FORMAT.export_run(tmp_path / "run", tmp_path / "back")
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto").eval()
    with torch.no_grad():
        np.testing.assert_allclose(alone(torch.tensor(TOKENS)).logits.numpy(), expected, atol=1e-4, rtol=1e-4)
