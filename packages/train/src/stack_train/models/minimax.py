"""MiniMax-Text-01: layers of lightning attention and of softmax attention, with mixtures of experts.

A weighted residual sum adds the output of a sublayer to its normalized input. Outputs match transformers'
`MiniMaxForCausalLM`, with one departure: transformers 5.23 ignores `rotary_dim` and `partial_rotary_factor`. Here both
act, as in vLLM and SGLang.

Source: MiniMax, MiniMax-01: Scaling Foundation Models with Lightning Attention, 2025 (arXiv:2501.08313).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, ConversionError
from stack_train.models.decoder import DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.mixtral import MIXTRAL_NAMES, ExpertsConfig
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope, read_rotary_share, write_rope
from stack_train.nn.attention import Rope
from stack_train.nn.experts import Experts, Router
from stack_train.nn.lightning import LightningAttention
from stack_train.nn.residual import Norm, NormedSum

__all__ = ["FAMILY", "MiniMaxConfig"]

_LIGHTNING, _FULL = "linear_attention", "full_attention"
_THETA = 1_000_000.0
_ATTENTION = "model.layers.{layer}.self_attn."
# Decays that transformers computes from the config, and saves.
_DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


@config
class MiniMaxConfig(ExpertsConfig):
    """Size and numerics of a MiniMax-Text-01; inherits the fields of `ExpertsConfig`.

    Attributes:
      name: selects this family.
      mlp: hidden width of an expert.
      attention_layers: indices of the layers with softmax attention, from 0. The remaining ones use lightning.
      window: window of softmax attention in tokens, the query included; None attends to all tokens.
      rotary_dim: number of leading features of a head with rotary positions in softmax attention; None rotates all.
      attention_alpha: weight of the normalized input in the residual sum of softmax attention.
      attention_beta: weight of the output of softmax attention.
      lightning_alpha: weight of the normalized input in the residual sum of lightning attention.
      lightning_beta: weight of the output of lightning attention.
      mlp_alpha: weight of the normalized input in the residual sum of the experts.
      mlp_beta: weight of the output of the experts.
    """

    name: Literal["minimax"] = "minimax"
    rope_theta: PositiveFloat = _THETA
    norm_epsilon: PositiveFloat = 1e-5
    attention_layers: tuple[NonNegativeInt, ...] = ()
    window: PositiveInt | None = None
    rotary_dim: PositiveInt | None = None
    attention_alpha: float = 1.0
    attention_beta: float = 1.0
    lightning_alpha: float = 1.0
    lightning_beta: float = 1.0
    mlp_alpha: float = 1.0
    mlp_beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.attention_layers, default=0) >= self.layers:
            raise ConfigError(f"attention_layers={self.attention_layers}: expected indices below layers={self.layers}.")

    @property
    def rotary_size(self) -> int:
        """Number of features of a head with rotary positions."""
        return self.head_size if self.rotary_dim is None else self.rotary_dim

    @property
    def lightning(self) -> LightningAttention:
        """Lightning attention of this size."""
        return LightningAttention(heads=self.heads, head_dim=self.head_size, layers=self.layers)

    @property
    def kinds(self) -> list[str]:
        """Names of the kinds of all layers in `layer_types`."""
        return [_FULL if layer in self.attention_layers else _LIGHTNING for layer in range(self.layers)]


def spec(config: MiniMaxConfig) -> DecoderSpec:
    rope = Rope(theta=config.rope_theta, scaling=config.rope_scaling, rotary_dim=config.rotary_size)
    router = Router(experts=config.experts, active=config.active_experts)
    experts: Any = {
        "feed_forward": Experts(router=router, width=config.mlp, buffer=config.expert_buffer),
        "feed_forward_sum": NormedSum(alpha=config.mlp_alpha, beta=config.mlp_beta),
    }
    layers: Mapping[str, Layer] = {
        _FULL: Layer(
            attention=config.attention(window=config.window, rope=rope),
            attention_sum=NormedSum(alpha=config.attention_alpha, beta=config.attention_beta),
            **experts,
        ),
        _LIGHTNING: Layer(
            attention=config.lightning,
            attention_sum=NormedSum(alpha=config.lightning_alpha, beta=config.lightning_beta),
            **experts,
        ),
    }
    return DecoderSpec(layers=tuple(layers[kind] for kind in config.kinds), norm=Norm(epsilon=config.norm_epsilon))


def _read(reader: Reader) -> dict[str, Any]:
    layers = reader.get("num_hidden_layers", default=32)
    # transformers begins with softmax attention if the kinds are missing.
    kinds = reader.get("layer_types") or [_LIGHTNING if layer % 2 else _FULL for layer in range(layers)]
    if not set(kinds) <= {_LIGHTNING, _FULL} or len(kinds) != layers:
        reader.problems.append(f"layer_types={kinds!r}, not {layers} of {_LIGHTNING} and {_FULL}")
    found: dict[str, Any] = read_rope(reader, theta=_THETA, handled=("partial_rotary_factor",))
    found["attention_layers"] = tuple(layer for layer, kind in enumerate(kinds) if kind == _FULL)
    if (rotary_dim := reader.get("rotary_dim")) is None and (share := read_rotary_share(reader, 1.0)) != 1.0:
        width = reader.get("head_dim")
        if width is None:
            width = reader.get("hidden_size", default=4096) // reader.get("num_attention_heads", default=32)
        rotary_dim = int(width * share)
    return {**found, "rotary_dim": rotary_dim}


def _write(config: MiniMaxConfig) -> dict[str, Any]:
    return {**write_rope(config), "rotary_dim": config.rotary_size, "layer_types": config.kinds}


@dataclass(frozen=True, kw_only=True)
class _Family(DecoderFamily):
    def fitting(self, config: MiniMaxConfig, tensors: Any) -> MiniMaxConfig:
        """Checks the stored decay rates, which are not read: they follow from the config.

        Raises:
          ConversionError: a rate differs from the config's by more than the rounding of bfloat16.
        """
        rates = config.lightning.rates
        for layer in (layer for layer, kind in enumerate(config.kinds) if kind == _LIGHTNING):
            name = f"{_ATTENTION.format(layer=layer)}slope_rate"
            if name not in tensors:
                continue
            stored = np.asarray(tensors[name].read(), np.float32).reshape(-1)
            if stored.shape != rates[layer].shape or not np.allclose(stored, rates[layer], rtol=2**-8, atol=0):
                raise ConversionError(
                    f"{name} has the decay rates {stored}; a model of heads={config.heads} and layers={config.layers} "
                    f"has {rates[layer]}. Other decays of lightning attention are not supported."
                )
        return config


FAMILY = _Family(
    name="minimax",
    config_class=MiniMaxConfig,
    config_map=ConfigMap(
        architecture="MiniMaxForCausalLM",
        model_type="minimax",
        settings=(
            Setting("mlp", ("intermediate_size",), 14_336),
            Setting("kv_heads", ("num_key_value_heads",), 8, "kv_head_count"),
            Setting("max_positions", ("max_position_embeddings",), 131_072),
            Setting("norm_epsilon", ("rms_norm_eps",), 1e-5),
            Setting("window", ("sliding_window",)),
            Setting("experts", ("num_local_experts", "num_experts"), 8),
            Setting("active_experts", ("num_experts_per_tok",), 2),
            Setting("attention_alpha", ("full_attn_alpha_factor",), 1.0),
            Setting("attention_beta", ("full_attn_beta_factor",), 1.0),
            Setting("lightning_alpha", ("linear_attn_alpha_factor",), 1.0),
            Setting("lightning_beta", ("linear_attn_beta_factor",), 1.0),
            Setting("mlp_alpha", ("mlp_alpha_factor",), 1.0),
            Setting("mlp_beta", ("mlp_beta_factor",), 1.0),
        ),
        fixed={"hidden_act": "silu", "router_jitter_noise": 0.0},
        silent=("block_size",),  # the order of sums
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names={
        **MIXTRAL_NAMES,
        "attention/query_key_value": "self_attn.qkv_proj",
        "attention/gate": "self_attn.output_gate",
        "attention/norm": "self_attn.norm.weight",
        "attention/out": "self_attn.out_proj",
    },
    redundant=dict.fromkeys(_ATTENTION + name for name in _DECAYS),
    sizes=("Text-01 456B-A46B",),
    tested=("logits", "greedy", "gradients", "conversion", "pages", "w8a8 pages"),
)
