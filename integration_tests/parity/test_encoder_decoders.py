"""Encoder-decoders against transformers on PyTorch, in float32."""

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
from stack_train.generation.generate import TokenGenerator
from stack_train.generation.sampling import SamplingConfig
from stack_train.huggingface import FORMAT
from stack_train.models.encoder_decoder_family import EncoderDecoderFamily
from stack_train.variables.trained_model import RUN_FORMAT
from stack_train.variables.weights import read_params, run_config

from .conftest import model_of

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
SIZES = {
    "vocab_size": 97,
    "d_model": 42,
    "d_kv": 9,
    "d_ff": 37,
    "num_heads": 5,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 11,
    "relative_attention_max_distance": 17,
    "eos_token_id": None,
    "pad_token_id": 96,
    "decoder_start_token_id": 3,
    "attn_implementation": "eager",
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {}),
    "t5 1.1": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5 1.1 with a head of its own": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5 of UL2": ("T5", {"feed_forward_proj": "gated-silu", "layer_norm_epsilon": 1e-3}),
    "mt5": ("MT5", {"tie_word_embeddings": False}),
    "umt5": ("UMT5", {"tie_word_embeddings": False}),
    "umt5 with scaled states": ("UMT5", {}),
}


@dataclass(frozen=True)
class Pair:
    """One model twice; `directory` has the Hugging Face checkpoint, `run` what it was converted to."""

    torch_model: Any
    directory: Path
    run: Path
    config: Any
    model: Any


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    theirs, sizes = MODELS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{theirs}Config")(**{**SIZES, **sizes})
    torch_model = getattr(transformers, f"{theirs}ForConditionalGeneration")(config).eval()
    if "head" in request.param:
        torch_model.lm_head.weight = torch.nn.Parameter(torch_model.lm_head.weight.clone())
    with torch.no_grad():  # far from equal logits, so that greedy generation has no ties; no scale at its start
        for name, parameter in torch_model.named_parameters():
            noise = torch.randn_like(parameter)
            # Scores have no scale: as in T5's initial values, queries do.
            std = 0.25 / 3 if name.endswith(".q.weight") else 0.25
            parameter.copy_(std * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    root = tmp_path_factory.mktemp("pair")
    torch_model.save_pretrained(root / "hf")
    FORMAT.import_run(root / "hf", root / "run")
    config = run_config(root / "run").model
    assert config.name == request.param.split()[0]
    return Pair(torch_model, root / "hf", root / "run", config, model_of(config, read_params(root / "run", config)[0]))


@dataclass(frozen=True)
class Batch:
    """Sources and targets; the second source is shorter."""

    source: np.ndarray
    mask: np.ndarray
    target: np.ndarray

    @property
    def for_torch(self) -> dict[str, torch.Tensor]:
        names = ("input_ids", "attention_mask", "decoder_input_ids")
        return dict(zip(names, map(torch.tensor, (self.source, self.mask, self.target)), strict=True))

    def hidden(self, model: Any) -> Any:
        positions = jnp.broadcast_to(jnp.arange(self.target.shape[1]), self.target.shape)
        source = {"source_tokens": jnp.array(self.source), "source_segment_ids": jnp.array(self.mask)}
        return model(jnp.array(self.target), positions, **source).hidden


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Longer than the distance from which all distances share a bucket."""
    rng = np.random.default_rng(0)
    source, target = rng.integers(0, 96, (2, 31)), rng.integers(0, 96, (2, 23))
    mask = np.ones_like(source)
    mask[1, 19:] = 0
    return Batch(source, mask, target)


def test_logits(pair, batch):
    with torch.no_grad():
        expected = pair.torch_model(**batch.for_torch).logits.numpy()
    actual = jax.jit(lambda model: model.logits(batch.hidden(model)))(pair.model)
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_loss_and_gradients(pair, batch):
    targets = np.roll(batch.target, -1, axis=1)
    targets[:, -3:] = -100
    pair.torch_model.zero_grad()
    expected = pair.torch_model(**batch.for_torch, labels=torch.tensor(targets)).loss
    expected.backward()

    def loss(model):
        return model.head().cross_entropy(batch.hidden(model), jnp.array(targets))

    actual, gradients = jax.jit(jax.value_and_grad(loss))(pair.model)
    np.testing.assert_allclose(actual, expected.item(), atol=TOLERANCE, rtol=TOLERANCE)
    by_path = named_leaves(nnx.to_pure_dict(nnx.state(gradients)))
    named = pair.torch_model.named_parameters()
    expected_gradients = {name: each.grad.numpy() for name, each in named if each.grad is not None}
    compared = set()
    for rule in registries.models[pair.config.name].weight_rules(pair.config):
        for name, gradient in rule.tensors(by_path[rule.parameter]).items():
            np.testing.assert_allclose(
                gradient, rule.part_of(expected_gradients[name]), atol=TOLERANCE, rtol=TOLERANCE, err_msg=name
            )
            compared.add(name)
    assert compared == expected_gradients.keys()


@pytest.mark.parametrize("source_tokens", [1, 19])
def test_greedy_generation(pair, batch, source_tokens):
    source = batch.source[0, :source_tokens].tolist()
    options = {"max_new_tokens": 30, "do_sample": False, "num_beams": 1}
    expected = pair.torch_model.generate(torch.tensor([source]), **options)[0, 1:]
    checkpoint = RUN_FORMAT.open_for_generation(pair.run)
    actual = TokenGenerator(checkpoint).stream(source, SamplingConfig(max_tokens=30, temperature=0))
    assert list(actual) == expected.tolist()


def test_import_export_import_is_bitwise(pair, batch, tmp_path):
    (pair.run / "huggingface" / "config.json").unlink(missing_ok=True)  # so that the config is written anew
    FORMAT.export_run(pair.run, tmp_path / "back")
    original, written = (load_file(path / "model.safetensors") for path in (pair.directory, tmp_path / "back"))
    assert original.keys() == written.keys()
    for name, tensor in original.items():
        assert tensor.dtype == written[name].dtype and np.array_equal(tensor, written[name]), name
    loaded = type(pair.torch_model).from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    with torch.no_grad():
        expected = pair.torch_model(**batch.for_torch).logits
        torch.testing.assert_close(loaded(**batch.for_torch).logits, expected, rtol=0, atol=1e-5)
    FORMAT.import_run(tmp_path / "back", tmp_path / "again")
    assert run_config(tmp_path / "again").model == pair.config


def test_every_encoder_decoder_is_here():
    names = {name for name in registries.models.names() if isinstance(registries.models[name], EncoderDecoderFamily)}
    assert {name.split()[0] for name in MODELS} == names
