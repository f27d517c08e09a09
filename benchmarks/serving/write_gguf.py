"""Writes a Hugging Face Llama in fp32 as a GGUF file; runs inside llama.cpp's own environment.

python write_gguf.py HUGGING_FACE_DIR FILE --dtype f32|bf16|q8_0
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

_TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
_FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--dtype", choices=_TYPES, required=True)
    arguments = parser.parse_args()
    config = json.loads((arguments.directory / "config.json").read_text())
    writer = gguf.GGUFWriter(arguments.file, "llama")
    _add_metadata(writer, config)
    writer.add_file_type(_FILE_TYPES[arguments.dtype])
    for name, tensor in load_file(arguments.directory / "model.safetensors").items():
        kind = _TYPES["f32"] if tensor.ndim == 1 else _TYPES[arguments.dtype]
        writer.add_tensor(_name(name), gguf.quants.quantize(_interleaved(name, tensor, config), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _name(name: str) -> str:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if layer:
        return f"blk.{layer[1]}.{_NAMES[layer[2]]}.weight"
    return f"{_NAMES[name.removesuffix('.weight')]}.weight"


def _interleaved(name: str, tensor: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """llama.cpp rotates neighbours where Hugging Face's Llama rotates the halves of a head."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    count = next((count for key, count in heads.items() if key in name), None)
    if count is None:
        return tensor
    rows, columns = tensor.shape
    return tensor.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns)


if __name__ == "__main__":
    main()
