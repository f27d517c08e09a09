"""Names of architectures, settings and tensors in GGUF files.

Sources: the specification of the format in ggml, and llama.cpp's `convert_hf_to_gguf.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stack_core import ops
from stack_core.abi.errors import ConversionError
from stack_core.abi.plugins import registries
from stack_train.models.weight_map import WeightRule

__all__ = [
    "ARCHITECTURES",
    "ROPE_FREQUENCIES",
    "ROUTER",
    "Architecture",
    "architecture_of",
    "reordered_heads",
    "settings_of",
]

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
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
}
_FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_PREFIX, _EXPERT = "model.layers.", "{expert}."

ROUTER = "ffn_gate_inp"
"""The name of the router of a mixture of experts, which is not quantized."""

ROPE_FREQUENCIES = "rope_freqs.weight"
"""The tensor of divisors of the rotary frequencies, for Llama 3 scaling."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The representation of a model family in GGUF.

    Attributes:
      name: name of the architecture in llama.cpp.
      interleaves: True if RoPE rotates pairs of adjacent features, which changes the order of the query and key rows.
      fixed: fields of the model config that can have only one value in GGUF, with that value.
      settings: GGUF keys of this architecture only, by field of the model config.
      names: names of a layer's modules that differ from other architectures.
      norm_offset: constant added to norm weights in the file. Gemma 3 scales by 1 + weight; the file has that sum.
    """

    name: str
    interleaves: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0

    @property
    def has_experts(self) -> bool:
        return "experts" in self.settings

    def rules(self, config: Any) -> list[WeightRule]:
        """Returns the weight rules of a model, with all experts of a layer in one tensor."""
        rules = registries.models[config.name].weight_rules(config)
        return [replace(rule, tensor=rule.tensor.replace(_EXPERT, ""), fused=None) for rule in rules]

    def name_of(self, name: str) -> str:
        """Returns the GGUF name of a tensor of a Hugging Face checkpoint.

        Raises:
          ConversionError: GGUF lacks a name for the tensor.
        """
        if name in _OUTER:
            return _OUTER[name]
        layer, _, place = name.removeprefix(_PREFIX).partition(".")
        module, _, kind = place.rpartition(".")
        names = {**_LAYER, **self.names}
        if module not in names:
            raise ConversionError(f"Tensor {name} has no name in GGUF.")
        return f"blk.{layer}.{names[module]}.{kind}"

    def stored(self, name: str, tensor: np.ndarray, heads: Mapping[str, int]) -> np.ndarray:
        """Converts a tensor from Hugging Face's layout to the layout of the file.

        Args:
          name: name of the tensor in Hugging Face checkpoints.
          tensor: values of the tensor.
          heads: number of heads of each projection whose rows are reordered.
        """
        if name.endswith("norm.weight"):
            return tensor + np.float32(self.norm_offset)
        if (count := self._heads(name, heads)) is None:
            return tensor
        # Hugging Face rotates feature i with feature i + head_dim / 2, llama.cpp rotates 2i with 2i + 1.
        halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)

    def read(self, name: str, tensor: np.ndarray, heads: Mapping[str, int]) -> np.ndarray:
        """Converts a tensor of the file to Hugging Face's layout, the inverse of `stored`."""
        if name.endswith("norm.weight"):
            return tensor - np.float32(self.norm_offset)
        if (count := self._heads(name, heads)) is None:
            return tensor
        pairs = tensor.reshape(count, tensor.shape[0] // count // 2, 2, *tensor.shape[1:])
        return pairs.swapaxes(1, 2).reshape(tensor.shape)

    def _heads(self, name: str, heads: Mapping[str, int]) -> int | None:
        place = name.rpartition(".")[0].rpartition(".")[2]
        return heads.get(place) if self.interleaves else None


_EXPERTS = {"experts": "expert_count", "active_experts": "expert_used_count"}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(name="llama", interleaves=True, fixed={"attention_bias": False, "mlp_bias": False}),
    "mistral": Architecture(name="llama", interleaves=True, fixed={"window": None}),
    "mixtral": Architecture(name="llama", interleaves=True, fixed={"window": None}, settings=_EXPERTS),
    "qwen2": Architecture(name="qwen2", fixed={"window": None, "dual_chunk": None}),
    "qwen3": Architecture(name="qwen3", fixed={"window": None, "attention_bias": False}),
    "qwen3_moe": Architecture(
        name="qwen3moe",
        fixed={"window": None, "attention_bias": False, "sparse_step": 1, "dense_layers": (), "normalized": True},
        settings={**_EXPERTS, "expert_mlp": "expert_feed_forward_length"},
    ),
    "gemma3": Architecture(
        name="gemma3",
        fixed={"period": 6, "local_theta": 10_000.0, "attention_softcap": None, "logit_softcap": None},
        settings={"window": "attention.sliding_window"},
        names=_FOUR_NORMS,
        norm_offset=1.0,
    ),
}
"""Architectures by model family. A file is imported as the first family with its architecture, with or without experts.
"""


def architecture_of(config: Any) -> Architecture:
    """Returns the GGUF architecture for a model config.

    Raises:
      ConversionError: GGUF cannot represent the family or a setting.
    """
    architecture = ARCHITECTURES.get(config.name)
    if architecture is None:
        raise ConversionError(
            f"Models of family {config.name!r} are not written to GGUF; these are: {', '.join(ARCHITECTURES)}."
        )
    wrong = [
        f"{name}={getattr(config, name)!r}, not {value!r}"
        for name, value in architecture.fixed.items()
        if getattr(config, name) != value
    ]
    if getattr(config, "query_scalar", config.head_size) != config.head_size:
        wrong.append(f"query_scalar={config.query_scalar}, not the head_dim {config.head_size}")
    if not isinstance(config.rope_scaling, None | ops.LinearScaling | ops.Llama3Scaling):
        wrong.append(f"rope_scaling={config.rope_scaling!r}, not linear or llama3")
    if wrong:
        raise ConversionError(f"A {config.name} is written to GGUF without {'; '.join(wrong)}.")
    return architecture


def settings_of(config: Any, architecture: Architecture) -> list[tuple[str, Any]]:
    """Returns the settings of a model config under their GGUF keys; each value is an int, a float or a string."""
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
    own = [(key, getattr(config, name)) for name, key in architecture.settings.items()]
    return [(f"{architecture.name}.{key}", value) for key, value in (*found, *scaling, *own)]


def reordered_heads(config: Any) -> dict[str, int]:
    """Returns the number of heads of each projection whose rows are reordered if RoPE rotates adjacent features."""
    return {"q_proj": config.heads, "k_proj": config.kv_head_count}
