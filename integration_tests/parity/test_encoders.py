"""Encoders against transformers on PyTorch, in float32."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file

from stack_core.abi.plugins import registries
from stack_train.checkpoint import named_leaves
from stack_train.huggingface import FORMAT
from stack_train.models.encoder_family import EncoderFamily
from stack_train.variables.weights import read_params, run_config

from .conftest import model_of

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
SIZES = {
    "vocab_size": 97,
    "hidden_size": 42,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "max_position_embeddings": 29,  # of which RoBERTa uses 27
    "pad_token_id": None,  # whose embedding PyTorch gives no gradient
}
IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"num_attention_heads": 6, "type_vocab_size": 3}),
    "roberta": ("Roberta", {"num_attention_heads": 6, "type_vocab_size": 1, "pad_token_id": 1}),
    "xlm_roberta": ("XLMRoberta", {"num_attention_heads": 6, "type_vocab_size": 1, "pad_token_id": 1}),
    "modernbert": ("ModernBert", {"num_attention_heads": 3, "num_hidden_layers": 7, "local_attention": 10, **IDS}),
    "modernbert with biases": (
        "ModernBert",
        {"num_attention_heads": 3, "local_attention": 7, "global_attn_every_n_layers": 2, **IDS}
        | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "norm_eps": 1e-3}
        | {"global_rope_theta": 500.0, "local_rope_theta": 90.0},
    ),
}


@dataclass(frozen=True)
class Pair:
    """One model twice; `directory` has the Hugging Face checkpoint, `run` what it was converted to."""

    torch_model: Any
    directory: Path
    run: Path
    config: Any
    model: Any


@pytest.fixture(scope="module", params=ENCODERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    theirs, sizes = ENCODERS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{theirs}Config")(**{**SIZES, **sizes})
    torch_model = getattr(transformers, f"{theirs}Model")(config).eval()
    with torch.no_grad():  # no scale or bias at its initial value, which could go missing unnoticed
        for parameter in torch_model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.25 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    root = tmp_path_factory.mktemp("encoder")
    torch_model.save_pretrained(root / "hf")
    FORMAT.import_run(root / "hf", root / "run")
    config = run_config(root / "run").model
    assert config.name == request.param.split()[0]
    return Pair(torch_model, root / "hf", root / "run", config, model_of(config, read_params(root / "run", config)[0]))


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    # From 2, because RoBERTa derives positions from the ids that are not 1, the padding token's.
    return np.random.default_rng(0).integers(2, SIZES["vocab_size"], (2, 27))


def positions_of(tokens: np.ndarray) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def test_hidden_states(pair, tokens):
    """Of rows with and without padding, which both hide from the other tokens."""
    mask = np.ones_like(tokens)
    mask[1, 19:] = 0
    with torch.no_grad():
        expected = pair.torch_model(torch.tensor(tokens), attention_mask=torch.tensor(mask)).last_hidden_state.numpy()
    actual = jax.jit(lambda model, *inputs: model(*inputs).hidden)(
        pair.model, jnp.array(tokens), positions_of(tokens), jnp.array(mask)
    )
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(actual[0], expected[0], atol=TOLERANCE, rtol=TOLERANCE)
    np.testing.assert_allclose(actual[1, :19], expected[1, :19], atol=TOLERANCE, rtol=TOLERANCE)


def test_token_types_and_the_pooler_of_bert(pair, tokens):
    if pair.config.name != "bert":
        pytest.skip("BERT alone has both")
    types = np.random.default_rng(1).integers(0, 3, tokens.shape)
    with torch.no_grad():
        expected = pair.torch_model(torch.tensor(tokens), token_type_ids=torch.tensor(types)).pooler_output.numpy()
    hidden = pair.model(jnp.array(tokens), positions_of(tokens), token_types=jnp.array(types)).hidden
    np.testing.assert_allclose(pair.model.pooled(hidden), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_gradients(pair, tokens):
    """Of a loss with a weight of its own for every hidden state."""
    weights = np.random.default_rng(2).normal(size=(*tokens.shape, SIZES["hidden_size"])).astype(np.float32)
    pair.torch_model.zero_grad()
    torch.sum(pair.torch_model(torch.tensor(tokens)).last_hidden_state * torch.tensor(weights)).backward()

    def loss(model):
        return jnp.sum(model(jnp.array(tokens), positions_of(tokens)).hidden * weights)

    by_path = named_leaves(nnx.to_pure_dict(nnx.state(jax.jit(jax.grad(loss))(pair.model))))
    rules = registries.models[pair.config.name].weight_rules(pair.config)
    expected = {name: each.grad.numpy() for name, each in pair.torch_model.named_parameters() if each.grad is not None}
    compared = set()
    for rule in rules:
        for name, gradient in rule.tensors(by_path[rule.parameter]).items():
            if name.startswith("pooler"):  # which the loss does not use
                assert not np.any(gradient)
                continue
            part, scale = rule.part_of(expected[name]), max(1.0, np.abs(expected[name]).max())
            np.testing.assert_allclose(gradient, part, atol=TOLERANCE * scale, rtol=TOLERANCE, err_msg=name)
            compared.add(name)
    assert compared == expected.keys()


def test_import_export_import_is_bitwise(pair, tokens, tmp_path):
    (pair.run / "huggingface" / "config.json").unlink(missing_ok=True)  # so that the config is written anew
    FORMAT.export_run(pair.run, tmp_path / "back")
    original, written = (load_file(path / "model.safetensors") for path in (pair.directory, tmp_path / "back"))
    assert original.keys() == written.keys()
    for name, tensor in original.items():
        assert tensor.dtype == written[name].dtype and np.array_equal(tensor, written[name]), name
    pads: dict[str, Any] = {} if hasattr(pair.config, "padding_id") else {"pad_token_id": None}
    loaded = type(pair.torch_model).from_pretrained(tmp_path / "back", **pads).eval()
    with torch.no_grad():
        inputs = torch.tensor(tokens)
        expected = pair.torch_model(inputs).last_hidden_state
        torch.testing.assert_close(loaded(inputs).last_hidden_state, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("theirs", ["Bert", "Roberta", "XLMRoberta", "ModernBert"])
def test_an_encoder_is_read_out_of_a_model_with_a_head(theirs, tokens, tmp_path):
    sizes = next(sizes for name, sizes in ENCODERS.values() if name == theirs)
    config = getattr(transformers, f"{theirs}Config")(**{**SIZES, **sizes})
    whole = getattr(transformers, f"{theirs}ForMaskedLM")(config).eval()
    whole.save_pretrained(tmp_path / "hf")
    assert FORMAT.import_run(tmp_path / "hf", tmp_path / "run").left_out
    config = run_config(tmp_path / "run").model
    model = model_of(config, read_params(tmp_path / "run", config)[0])
    with torch.no_grad():
        expected = whole.base_model(torch.tensor(tokens)).last_hidden_state.numpy()
    hidden = model(jnp.array(tokens), positions_of(tokens)).hidden
    np.testing.assert_allclose(hidden, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_every_encoder_is_here():
    encoders = {name for name in registries.models.names() if isinstance(registries.models[name], EncoderFamily)}
    assert {name.split()[0] for name in ENCODERS} == encoders
