"""What families, settings and tensors are called in GGUF files.

Source: ggml's description of the format, and the converter of llama.cpp.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stack_core import ops
from stack_core.errors import ConversionError

__all__ = ["ARCHITECTURES", "ROPE_FREQUENCIES", "Architecture", "architecture_of", "gguf_name", "settings_of"]

_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PREFIX = "model.layers."

ROPE_FREQUENCIES = "rope_freqs.weight"
"""The tensor by which llama3's scaling divides frequencies."""


@dataclass(frozen=True)
class Architecture:
    """How a family is told in GGUF.

    Attributes:
      name: under which llama.cpp knows it.
      interleaves: it rotates neighbouring features, so that rows of queries and keys come in another order.
      fixed: fields of our config that it has one value of.
    """

    name: str
    interleaves: bool
    fixed: Mapping[str, Any]

    def stored(self, name: str, tensor: np.ndarray, heads: Mapping[str, int]) -> np.ndarray:
        """A tensor of Hugging Face's layout as the file has it.

        Args:
          heads: of each projection whose rows are reordered.
        """
        if (count := self._heads(name, heads)) is None:
            return tensor
        halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)

    def read(self, name: str, tensor: np.ndarray, heads: Mapping[str, int]) -> np.ndarray:
        """The inverse of `stored`."""
        if (count := self._heads(name, heads)) is None:
            return tensor
        pairs = tensor.reshape(count, tensor.shape[0] // count // 2, 2, *tensor.shape[1:])
        return pairs.swapaxes(1, 2).reshape(tensor.shape)

    def _heads(self, name: str, heads: Mapping[str, int]) -> int | None:
        place = name.rpartition(".")[0].rpartition(".")[2]
        return heads.get(place) if self.interleaves else None


_LLAMA = Architecture("llama", True, {})
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", True, {"attention_bias": False, "mlp_bias": False}),
    "mistral": Architecture("llama", True, {"window": None}),
    "qwen2": Architecture("qwen2", False, {"window": None}),
    "qwen3": Architecture("qwen3", False, {"window": None, "attention_bias": False}),
}
"""By our families; a file is read as the first that has its architecture."""


def architecture_of(config: Any) -> Architecture:
    """How a model's config is told in GGUF.

    Raises:
      ConversionError: its family, or a setting of it, is not.
    """
    architecture = ARCHITECTURES.get(config.family)
    if architecture is None:
        raise ConversionError(
            f"Models of family {config.family!r} are not written to GGUF; these are: {', '.join(ARCHITECTURES)}."
        )
    wrong = [
        f"{name}={getattr(config, name)!r}, not {value!r}"
        for name, value in architecture.fixed.items()
        if getattr(config, name) != value
    ]
    if not isinstance(config.rope_scaling, None | ops.LinearScaling | ops.Llama3Scaling):
        wrong.append(f"rope_scaling={config.rope_scaling!r}, not linear or llama3")
    if wrong:
        raise ConversionError(f"A {config.family} is written to GGUF without {'; '.join(wrong)}.")
    return architecture


def gguf_name(name: str) -> str:
    """What a tensor of a Hugging Face checkpoint is called.

    Raises:
      ConversionError: it has no name there.
    """
    if name in _OUTER:
        return _OUTER[name]
    layer, _, place = name.removeprefix(_PREFIX).partition(".")
    module, _, kind = place.rpartition(".")
    if module not in _LAYER:
        raise ConversionError(f"Tensor {name} has no name in GGUF.")
    return f"blk.{layer}.{_LAYER[module]}.{kind}"


def settings_of(config: Any, architecture: str) -> list[tuple[str, Any]]:
    """The numbers of a config under their keys; an int, a float or a string each."""
    found: Sequence[tuple[str, Any]] = [
        ("context_length", config.max_positions),
        ("embedding_length", config.embed),
        ("block_count", config.layers),
        ("feed_forward_length", config.mlp),
        ("attention.head_count", config.heads),
        ("attention.head_count_kv", config.kv_head_count),
        ("attention.key_length", config.head_size),
        ("attention.value_length", config.head_size),
        ("attention.layer_norm_rms_epsilon", float(config.norm_epsilon)),
        ("rope.dimension_count", config.head_size),
        ("rope.freq_base", float(config.rope_theta)),
        ("vocab_size", config.vocab_size),
    ]
    scaling: list[tuple[str, Any]] = []
    if isinstance(config.rope_scaling, ops.LinearScaling):
        scaling = [("rope.scaling.type", "linear"), ("rope.scaling.factor", float(config.rope_scaling.factor))]
    return [(f"{architecture}.{key}", value) for key, value in (*found, *scaling)]
