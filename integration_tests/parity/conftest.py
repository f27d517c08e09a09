"""Tiny random Llamas, built by transformers and converted by stack."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PLAIN = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    # Wide enough that the logits are far from equal, so that greedy generation has no ties.
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "no_groups": {"num_key_value_heads": 4, "rope_theta": 500.0},
    "one_kv_head": {"num_key_value_heads": 1, "rms_norm_eps": 1e-3},
    "odd_sizes": {
        "vocab_size": 101,
        "hidden_size": 42,
        "intermediate_size": 37,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 10,
    },
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear_rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "dynamic_rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 20},
    "llama3_rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        }
    },
    "yarn_rope": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}},
    "longrope": {
        "rope_scaling": {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.5, 2.0, 3.0, 4.0],
            "original_max_position_embeddings": 24,
        }
    },
    "longrope_throughout": {
        "rope_scaling": {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.5, 2.0, 3.0, 4.0],
            "long_factor": [1.5, 2.0, 3.0, 4.0],
            "original_max_position_embeddings": 24,
        }
    },
}


@dataclass(frozen=True)
class Pair:
    """One model twice.

    Attributes:
      directory: of the Hugging Face checkpoint.
      run: the run directory it was converted to.
      torch_model: computes in float32.
      config, model: stack's.
    """

    directory: Path
    run: Path
    torch_model: Any
    config: Any
    model: Any


def model_of(config: Any, params: Any) -> Any:
    """The model of a config with these parameters, nested dicts."""
    from flax import nnx

    from stack_train.run.model import abstract_model

    graph = nnx.split(abstract_model(config))[0]
    return nnx.merge(graph, nnx.State(params))


@pytest.fixture(scope="session", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    import torch
    import transformers

    from stack_train.huggingface import FORMAT
    from stack_train.run.config import run_config
    from stack_train.variables.weights import read_params

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**PLAIN, **MODELS[request.param]})
    torch_model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():  # biases and scales that could go missing unnoticed at their initial values
        for name, parameter in torch_model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    directory = tmp_path_factory.mktemp(request.param)
    torch_model.save_pretrained(directory / "hf")
    FORMAT.import_run(directory / "hf", directory / "run")
    config = run_config(directory / "run").model
    params = read_params(directory / "run", config)[0]
    return Pair(directory / "hf", directory / "run", torch_model, config, model_of(config, params))


@pytest.fixture
def tokens(pair: Pair) -> np.ndarray:
    """int[batch, seq], as long as the model's rotary scaling needs to show."""
    seq = min(40, pair.config.max_positions)
    return np.random.default_rng(0).integers(0, pair.config.vocab_size, (2, seq))
