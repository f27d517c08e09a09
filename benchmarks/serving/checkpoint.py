"""The reference model as a Hugging Face directory: random weights, and a tokenizer that is made here."""

import itertools
import json
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from serving.workload import Workload

__all__ = ["write_checkpoint"]

_END = 0


def write_checkpoint(folder: Path, workload: Workload, *, dtype: str) -> Path:
    """Writes the model in `dtype`, the same values rounded, unless it is there; returns its directory.

    Ends the program where a model of another workload is there, as others in `folder` are made from it.
    """
    directory = folder / f"hugging_face-{dtype}"
    done = directory / "written.json"
    if done.exists():
        written = json.loads(done.read_text())
        if written != workload.title():
            sys.exit(f"{directory} holds the model of another workload ({written}). Delete {folder}.")
    else:
        directory.mkdir(parents=True, exist_ok=True)
        stored = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        tensors = {name: tensor.astype(stored) for name, tensor in _tensors(workload)}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(_config(workload, dtype), indent=2))
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": _END, "do_sample": False}))
        _write_tokenizer(directory, workload)
        done.write_text(json.dumps(workload.title()))
    return directory


def _config(workload: Workload, dtype: str) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": workload.embed,
        "intermediate_size": workload.mlp,
        "num_hidden_layers": workload.layers,
        "num_attention_heads": workload.heads,
        "num_key_value_heads": workload.kv_heads,
        "head_dim": workload.head_dim,
        "vocab_size": workload.vocab,
        "max_position_embeddings": workload.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": _END,
        "torch_dtype": dtype,
    }


def _tensors(workload: Workload) -> Iterator[tuple[str, np.ndarray]]:
    """Yields weights[out, in] with variance 1 / in, so that logits are as far apart as those of a trained model."""
    source = np.random.default_rng(0)

    def random(outputs: int, inputs: int) -> np.ndarray:
        return source.standard_normal((outputs, inputs), dtype=np.float32) / np.float32(inputs**0.5)

    embed, mlp, kv_width = workload.embed, workload.mlp, workload.kv_heads * workload.head_dim
    yield "model.embed_tokens.weight", random(workload.vocab, embed)
    for layer in range(workload.layers):
        prefix = f"model.layers.{layer}"
        for name, outputs in (("q", embed), ("k", kv_width), ("v", kv_width), ("o", embed)):
            yield f"{prefix}.self_attn.{name}_proj.weight", random(outputs, embed)
        for name, outputs, inputs in (("gate", mlp, embed), ("up", mlp, embed), ("down", embed, mlp)):
            yield f"{prefix}.mlp.{name}_proj.weight", random(outputs, inputs)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", np.ones(embed, np.float32)
    yield "model.norm.weight", np.ones(embed, np.float32)
    yield "lm_head.weight", 3 * random(workload.vocab, embed)


def _write_tokenizer(directory: Path, workload: Workload) -> None:
    """Byte-level pairs and triples, as many as the model has tokens: its random text decodes at a usual cost."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    common = string.ascii_lowercase + string.digits + "Ġ"
    pairs = [(left, right) for left, right in itertools.product(common, repeat=2)]
    triples = [(left + right, last) for left, right in pairs for last in common]
    merges = (pairs + triples)[: workload.vocab - len(letters) - 1]
    tokens = ["<|end|>", *letters, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
