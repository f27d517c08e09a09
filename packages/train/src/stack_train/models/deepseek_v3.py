"""DeepSeek-V3: latent attention, grouped and shared experts, and dense first layers.

Outputs match transformers' `DeepseekV3ForCausalLM`. Training adds multi-token prediction layers that match its
`MtpModel`.

Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024 (arXiv:2412.19437).
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.models.decoder import DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.mixtral import ExpertsConfig
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope, write_rope
from stack_train.nn.attention import Rope
from stack_train.nn.experts import Experts, Router
from stack_train.nn.feed_forward import Gated
from stack_train.nn.latent_attention import LatentAttention
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "DeepseekV3Config"]


@config
class DeepseekV3Config(ExpertsConfig):
    """Size and numerics of a DeepSeek-V3; inherits the fields of `ExpertsConfig`.

    Attributes:
      name: selects this family.
      mlp: hidden width of the dense feed-forward layers.
      query_rank: width of the query latent; None projects queries directly from the residual stream.
      kv_rank: width of the key-value latent.
      nope_dim: width of the part of query and key heads without rotary positions.
      rope_dim: width of the part of query and key heads with rotary positions.
      value_dim: width of value heads.
      rope_interleaved: rotates adjacent features as pairs, instead of features half of `rope_dim` apart.
      dense_layers: number of first layers with dense feed-forward layers.
      expert_mlp: hidden width of an expert.
      shared_experts: number of shared experts, which are applied to every token.
      expert_groups: number of groups that the experts are divided into.
      kept_groups: number of groups from which a token's experts are chosen.
      normalized: normalizes the weights of a token's experts to a sum of 1.
      expert_scale: factor of the experts' weights.
      bias_rate: change of the experts' selection biases per step, which balances their load; see `Router`.
      mtp_layers: number of multi-token prediction layers; see `MultiTokenLayer`.
    """

    name: Literal["deepseek_v3"] = "deepseek_v3"
    query_rank: PositiveInt | None = None
    kv_rank: PositiveInt = 128
    nope_dim: PositiveInt = 64
    rope_dim: PositiveInt = 32
    value_dim: PositiveInt = 64
    rope_interleaved: bool = True
    dense_layers: NonNegativeInt = 1
    expert_mlp: PositiveInt = 512
    shared_experts: NonNegativeInt = 1
    expert_groups: PositiveInt = 1
    kept_groups: PositiveInt = 1
    normalized: bool = True
    expert_scale: PositiveFloat = 1.0
    bias_rate: NonNegativeFloat = 0.001
    mtp_layers: NonNegativeInt = 0

    moved_keys: ClassVar[Mapping[str, str]] = MappingProxyType({"further_layers": "model.mtp_layers"})

    def check_heads(self) -> None:
        """Raises a ConfigError if attention does not support these sizes."""
        if self.head_dim is not None or self.kv_heads not in (None, self.heads):
            raise ConfigError(
                f"kv_heads={self.kv_heads} and head_dim={self.head_dim}: every head of latent attention has its own "
                "keys, of nope_dim + rope_dim features. Remove both settings."
            )
        if self.rope_dim % 2:
            raise ConfigError(f"rope_dim={self.rope_dim} is odd; rotary positions turn pairs of features.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts % self.expert_groups or self.kept_groups > self.expert_groups:
            raise ConfigError(
                f"expert_groups={self.expert_groups} has to divide experts={self.experts} and be at least "
                f"kept_groups={self.kept_groups}; change one of them."
            )
        size = self.experts // self.expert_groups
        if self.expert_groups > 1 and (size < 2 or self.kept_groups * size < self.active_experts):
            raise ConfigError(
                f"experts={self.experts} in expert_groups={self.expert_groups} hold {size} each; a group is scored "
                f"by its two best experts, and kept_groups={self.kept_groups} must hold at least "
                f"active_experts={self.active_experts} experts. Lower expert_groups, or raise kept_groups."
            )


def spec(config: DeepseekV3Config) -> DecoderSpec:
    """Returns the architecture, with the same attention in all layers and dense first layers."""
    attention = LatentAttention(
        heads=config.heads,
        query_rank=config.query_rank,
        kv_rank=config.kv_rank,
        nope_dim=config.nope_dim,
        rope_dim=config.rope_dim,
        value_dim=config.value_dim,
        rope=Rope(theta=config.rope_theta, scaling=config.rope_scaling, interleaved=config.rope_interleaved),
        scale=_scale(config),
        context_keys=config.context_keys,
    )
    router = Router(
        experts=config.experts,
        active=config.active_experts,
        score="sigmoid",
        normalized=config.normalized,
        scale=config.expert_scale,
        groups=config.expert_groups,
        kept_groups=config.kept_groups,
        bias_rate=config.bias_rate,
    )
    sparse = Experts(
        router=router,
        width=config.expert_mlp,
        shared=config.shared_experts * config.expert_mlp,
        buffer=config.expert_buffer,
    )
    kinds = [Gated(width=config.mlp) if layer < config.dense_layers else sparse for layer in range(config.layers)]
    layers = tuple(Layer(attention=attention, feed_forward=kind) for kind in kinds)
    further = (Layer(attention=attention, feed_forward=sparse),) * config.mtp_layers
    return DecoderSpec(layers=layers, norm=Norm(epsilon=config.norm_epsilon), further=further)


def _scale(config: DeepseekV3Config) -> float:
    """Returns the scale of attention scores, with YaRN's factor. YaRN also scales cosine and sine, in `ops.rope`."""
    scale = (config.nope_dim + config.rope_dim) ** -0.5
    match config.rope_scaling:
        case ops.YarnScaling(factor=factor, mscale_all_dim=mscale) if mscale and factor > 1:
            scale *= (0.1 * mscale * math.log(factor) + 1.0) ** 2
    return scale


def _read(reader: Reader) -> dict[str, Any]:
    nope_dim, rope_dim = reader.get("qk_nope_head_dim", default=128), reader.get("qk_rope_head_dim", default=64)
    reader.expect("qk_head_dim", nope_dim + rope_dim)
    reader.get("head_dim", "num_key_value_heads")  # ignored: head_dim is rope_dim or nope_dim + rope_dim
    return {**read_rope(reader), "nope_dim": nope_dim, "rope_dim": rope_dim, "kv_heads": None, "head_dim": None}


def _write(config: DeepseekV3Config) -> dict[str, Any]:
    return {
        **write_rope(config),
        "num_key_value_heads": config.heads,
        "qk_nope_head_dim": config.nope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "head_dim": config.rope_dim,
    }


_SHARED = "mlp.shared_experts."

FAMILY = DecoderFamily(
    name="deepseek_v3",
    config_class=DeepseekV3Config,
    config_map=ConfigMap(
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        settings=(
            Setting("vocab_size", ("vocab_size",), 129_280),
            Setting("embed", ("hidden_size",), 7168),
            Setting("layers", ("num_hidden_layers",), 61),
            Setting("heads", ("num_attention_heads",), 128),
            Setting("mlp", ("intermediate_size",), 18_432),
            Setting("max_positions", ("max_position_embeddings",), 4096),
            Setting("query_rank", ("q_lora_rank",), 1536),
            Setting("kv_rank", ("kv_lora_rank",), 512),
            Setting("value_dim", ("v_head_dim",), 128),
            Setting("rope_interleaved", ("rope_interleave",), True),
            Setting("dense_layers", ("first_k_dense_replace",), 3),
            Setting("experts", ("n_routed_experts", "num_local_experts", "num_experts"), 256),
            Setting("active_experts", ("num_experts_per_tok",), 8),
            Setting("expert_mlp", ("moe_intermediate_size",), 2048),
            Setting("shared_experts", ("n_shared_experts",), 1),
            Setting("expert_groups", ("n_group",), 8),
            Setting("kept_groups", ("topk_group",), 4),
            Setting("normalized", ("norm_topk_prob",), True),
            Setting("expert_scale", ("routed_scaling_factor",), 2.5),
            Setting("mtp_layers", ("num_nextn_predict_layers", "num_mtp_layers"), 1),
        ),
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "pretraining_tp": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        },
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names={
        "attention/query_down": "self_attn.q_a_proj",
        "attention/query_up": "self_attn.q_b_proj",
        "attention/query_norm": "self_attn.q_a_layernorm.weight",
        "attention/kv_down": "self_attn.kv_a_proj_with_mqa",
        "attention/kv_norm": "self_attn.kv_a_layernorm.weight",
        "attention/kv": "self_attn.kv_b_proj",
        "feed_forward/selection_bias": "mlp.gate.e_score_correction_bias",
        **{f"feed_forward/shared/{name}": f"{_SHARED}{name}_proj" for name in ("gate", "up", "down")},
        "further/embedding_norm": "enorm.weight",
        "further/hidden_norm": "hnorm.weight",
        "further/project": "eh_proj",
        "further/norm": "shared_head.norm.weight",
    },
    redundant={
        "model.layers.{layer}.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.{layer}.shared_head.head.weight": "lm_head.weight",
    },
    sizes=("671B",),
    tested=("logits", "greedy", "gradients", "conversion", "pages"),
)
