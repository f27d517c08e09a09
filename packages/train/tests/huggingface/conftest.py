"""Small Hugging Face checkpoints, written by the safetensors library."""

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 53,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": [1, 2],
}
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama checkpoint, spelled out once more and apart from the code under test."""
    embed, mlp = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or embed // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], embed), "model.norm.weight": (embed,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], embed)
    for layer in range(config["num_hidden_layers"]):
        linears = {
            "self_attn.q_proj": (queries, embed, config.get("attention_bias")),
            "self_attn.k_proj": (keys, embed, config.get("attention_bias")),
            "self_attn.v_proj": (keys, embed, config.get("attention_bias")),
            "self_attn.o_proj": (embed, queries, config.get("attention_bias")),
            "mlp.gate_proj": (mlp, embed, config.get("mlp_bias")),
            "mlp.up_proj": (mlp, embed, config.get("mlp_bias")),
            "mlp.down_proj": (embed, mlp, config.get("mlp_bias")),
        }
        for name, (d_out, d_in, bias) in linears.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (d_out, d_in)
            if bias:
                shapes[f"model.layers.{layer}.{name}.bias"] = (d_out,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (embed,)
    return shapes


def write_checkpoint(directory: Path, tensors: dict[str, np.ndarray], config: dict, *, files: int = 1) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    located = {name: f"model-{index % files}.safetensors" for index, name in enumerate(tensors)}
    for file in set(located.values()):
        save_file({name: tensors[name] for name in tensors if located[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": located}))


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, np.ndarray]]]:
    """Returns make(name, dtype, files, edit, **config) -> (directory, tensors); `edit` may change the tensors."""

    def make(name="hf", *, dtype="F32", files=1, edit=None, **config):
        mapping = {**CONFIG, **config}
        random = np.random.default_rng(0)
        tensors = {
            name: random.normal(size=shape).astype(DTYPES[dtype]) for name, shape in tensor_shapes(mapping).items()
        }
        if edit is not None:
            edit(tensors)
        write_checkpoint(tmp_path / name, tensors, mapping, files=files)
        return tmp_path / name, tensors

    return make
