"""Llama against transformers on PyTorch, both in float32."""

import copy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from stack_train.checkpoint import named_leaves
from stack_train.generation.generate import TokenGenerator
from stack_train.generation.sampling import SamplingConfig
from stack_train.huggingface import FORMAT
from stack_train.models.llama import FAMILY
from stack_train.variables.trained_model import RUN_FORMAT

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4


def positions_of(tokens):
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def test_logits(pair, tokens):
    with torch.no_grad():
        expected = pair.torch_model(torch.tensor(tokens)).logits.numpy()
    actual = jax.jit(lambda model, tokens: model.logits(model(tokens, positions_of(tokens)).hidden))(
        pair.model, jnp.array(tokens)
    )
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_loss_and_gradients(pair, tokens):
    pair.torch_model.zero_grad()
    labels = torch.tensor(tokens)
    expected = pair.torch_model(labels, labels=labels).loss
    expected.backward()
    targets = jnp.concatenate([jnp.array(tokens)[:, 1:], jnp.full((len(tokens), 1), -100)], axis=1)

    def loss(model):
        hidden = model(jnp.array(tokens), positions_of(tokens)).hidden
        return model.head().cross_entropy(hidden, targets)

    actual, gradients = jax.jit(jax.value_and_grad(loss))(pair.model)
    np.testing.assert_allclose(actual, expected.item(), atol=TOLERANCE, rtol=TOLERANCE)
    by_path = named_leaves(nnx.to_pure_dict(nnx.state(gradients)))
    expected_gradients = {name: parameter.grad.numpy() for name, parameter in pair.torch_model.named_parameters()}
    ours = {
        name: gradient
        for rule in FAMILY.weight_rules(pair.config)
        for name, gradient in rule.tensors(by_path.pop(rule.parameter)).items()
    }
    assert not by_path
    assert ours.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert np.abs(gradient).max() > 1e-4, name
        np.testing.assert_allclose(ours[name], gradient, atol=TOLERANCE, rtol=TOLERANCE, err_msg=name)


@pytest.mark.filterwarnings("ignore:.* generates up to 24 of its 96 positions")
@pytest.mark.parametrize("prompt_tokens", [1, 7, 16])
def test_greedy_generation(pair, tokens, prompt_tokens):
    prompt = tokens[0, :prompt_tokens].tolist()
    checkpoint = RUN_FORMAT.open_for_generation(pair.run)
    count = checkpoint.max_positions - prompt_tokens
    expected = pair.torch_model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, prompt_tokens, dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )[0, prompt_tokens:]
    actual = TokenGenerator(checkpoint).stream(prompt, SamplingConfig(max_tokens=count, temperature=0))
    assert list(actual) == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_export_is_what_transformers_saved(pair, tmp_path: Path, dtype):
    """Through the run and back; transformers loads the result with the same bits and the same config."""
    original = copy.deepcopy(pair.torch_model).to(dtype=dtype)
    original.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    state = original.state_dict()
    FORMAT.import_run(tmp_path / "hf", tmp_path / "run")
    (tmp_path / "run" / "huggingface" / "config.json").unlink()  # so that the config is written anew
    FORMAT.export_run(tmp_path / "run", tmp_path / "back", max_shard_bytes=20_000)
    loaded, report = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "back", dtype="auto", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.state_dict().keys() == state.keys()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, state[name]), name
    expected, actual = pair.torch_model.config.to_dict(), loaded.config.to_dict()
    differing = {key for key in expected if expected[key] != actual.get(key)}
    assert differing <= {"dtype", "_name_or_path", "bos_token_id", "eos_token_id", "architectures"}
