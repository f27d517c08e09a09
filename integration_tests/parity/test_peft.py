"""Adapters beside PEFT: gradients, and directories that each opens of the other's."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .conftest import PLAIN

# PEFT reads an attribute that this transformers calls by another name.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")]

TOKENS = np.random.default_rng(3).integers(0, 97, (2, 11))
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "lora_alpha": 5},
    "dora": {"use_dora": True},
    "head": {"target_modules": [*TARGETS, "lm_head"]},
    "patterns": {"rank_pattern": {"down_proj": 6}, "alpha_pattern": {"q_proj": 3}},
}


@pytest.fixture(scope="module", params=KINDS)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """PEFT's model with random adapters, the directory that PEFT saved, and stack's run of its base."""
    import peft
    import torch
    import transformers

    from stack_train.huggingface import FORMAT

    root = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**PLAIN)).save_pretrained(root / "hf")
    FORMAT.import_run(root / "hf", root / "base")
    settings = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS} | KINDS[request.param]
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM.from_pretrained(root / "hf"),
        peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=True, **settings),
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(root / "peft", save_embedding_layers="lm_head" in settings["target_modules"])
    return model, root / "peft", root / "base"


def torch_logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def stack_logits(model: Any) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    return np.asarray(model.logits(model(jnp.asarray(TOKENS), positions).hidden))


def test_each_opens_what_the_other_wrote(adapted, tmp_path):
    import peft

    from stack_train.peft import FORMAT
    from stack_train.run.config import run_config
    from stack_train.variables.weights import read_model, read_params

    from .conftest import model_of

    theirs, directory, base = adapted
    expected = torch_logits(theirs)
    FORMAT.import_run(directory, tmp_path / "run", base=base)
    config = run_config(tmp_path / "run")
    ours, _ = read_model(tmp_path / "run", config)
    np.testing.assert_allclose(stack_logits(ours), expected, atol=1e-4, rtol=1e-5)
    merged = model_of(config.model, read_params(tmp_path / "run", config.model)[0])
    np.testing.assert_allclose(stack_logits(merged), stack_logits(ours), atol=1e-5)

    FORMAT.export_run(tmp_path / "run", tmp_path / "peft", base_model=str(directory.parent / "hf"))
    back = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft").eval()
    np.testing.assert_allclose(torch_logits(back), expected, atol=1e-4, rtol=1e-5)


def test_gradients_are_those_of_peft(adapted, tmp_path):
    import torch

    from stack_train.peft import FORMAT
    from stack_train.peft.modules import modules_of
    from stack_train.run.config import run_config
    from stack_train.variables.model_variables import values_of
    from stack_train.variables.trained_adapters import run_adapters
    from stack_train.variables.weights import read_model

    theirs, directory, base = adapted
    theirs.zero_grad()
    labels = torch.tensor(TOKENS)
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad_("lora_" in name)
    theirs(labels, labels=labels).loss.backward()

    FORMAT.import_run(directory, tmp_path / "run", base=base)
    config = run_config(tmp_path / "run")
    model, _ = read_model(tmp_path / "run", config)

    from flax import nnx

    def loss(factors: Any, others: Any) -> jax.Array:
        merged = nnx.merge(graph, factors, others)
        positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
        logits = merged.logits(merged(jnp.asarray(TOKENS), positions).hidden)[:, :-1]
        scores = jax.nn.log_softmax(logits, axis=-1)
        return -jnp.mean(jnp.take_along_axis(scores, jnp.asarray(TOKENS)[:, 1:, None], axis=-1))

    graph, factors, others = nnx.split(model, nnx.LoRAParam, ...)
    gradients = nnx.merge(graph, jax.jit(jax.grad(loss))(factors, others), others)
    ours = {"/".join(map(str, path)): value for path, value in values_of(gradients).items()}
    modules = modules_of(config.model)
    compared = 0
    for name, parameter in theirs.named_parameters():
        if parameter.grad is None:
            continue
        stem, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        module = modules[stem]
        kind = {"A": "down", "B": "up", "m": "magnitude"}[part[0]]
        found = ours[f"lora/{module.parameter}/{kind}"]
        found = found if module.place is None else found[module.place]
        np.testing.assert_allclose(found.T, parameter.grad.numpy(), atol=1e-5, err_msg=name)
        compared += 1
    expected = 0
    for path, each in run_adapters(tmp_path / "run").adapters.items():
        layers = 1 if path == "lm_head" else PLAIN["num_hidden_layers"]
        expected += layers * (3 if each.magnitude is not None else 2)
    assert compared == expected
