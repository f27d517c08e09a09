"""MiniMax-M2 and M2.5: sigmoid-scored experts, partial rotary positions, and query and key norms over all heads.

Outputs match transformers' `MiniMaxM2ForCausalLM`.

Source: MiniMax, MiniMax-M2, 2025.
"""

from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.mixtral import MIXTRAL_NAMES, ExpertsConfig
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope, read_rotary_share, write_rope
from stack_train.nn.attention import Rope
from stack_train.nn.experts import Experts, Router
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "MiniMaxM2Config"]


@config
class MiniMaxM2Config(ExpertsConfig):
    """Size and numerics of a MiniMax-M2; inherits the fields of `ExpertsConfig`.

    Attributes:
      name: selects this family.
      mlp: hidden width of an expert.
      rotary_dim: number of leading features of a head with rotary positions; None rotates all.
      bias_rate: change of the experts' selection biases per step, which balances their load.
    """

    name: Literal["minimax_m2"] = "minimax_m2"
    rope_theta: PositiveFloat = 5_000_000.0
    rotary_dim: PositiveInt | None = None
    bias_rate: NonNegativeFloat = 0.001

    @property
    def rotary_size(self) -> int:
        """Number of features of a head with rotary positions."""
        return self.head_size if self.rotary_dim is None else self.rotary_dim


def spec(config: MiniMaxM2Config) -> DecoderSpec:
    """Returns the architecture, with identical layers."""
    rope = Rope(theta=config.rope_theta, scaling=config.rope_scaling, rotary_dim=config.rotary_size)
    router = Router(experts=config.experts, active=config.active_experts, score="sigmoid", bias_rate=config.bias_rate)
    layer = Layer(
        attention=config.attention(whole_norms=True, rope=rope),
        feed_forward=Experts(router=router, width=config.mlp, buffer=config.expert_buffer),
    )
    return DecoderSpec(layers=(layer,) * config.layers, norm=Norm(epsilon=config.norm_epsilon))


def _read(reader: Reader) -> dict[str, Any]:
    reader.expect("attn_type_list", [1] * reader.get("num_hidden_layers", default=62))  # 0 was lightning attention
    share, rotary_dim = read_rotary_share(reader, 1.0), reader.get("rotary_dim")
    if rotary_dim is None:
        rotary_dim = int(reader.get("head_dim", default=128) * share)
    rope = read_rope(reader, theta=5_000_000.0, handled=("partial_rotary_factor",))
    return {**rope, "rotary_dim": rotary_dim}


def _write(config: MiniMaxM2Config) -> dict[str, Any]:
    return {**write_rope(config), "rotary_dim": config.rotary_size}


FAMILY = DecoderFamily(
    name="minimax_m2",
    config_class=MiniMaxM2Config,
    config_map=ConfigMap(
        architecture="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        settings=(
            Setting("vocab_size", ("vocab_size",), 200_064),
            Setting("embed", ("hidden_size",), 3072),
            Setting("layers", ("num_hidden_layers",), 62),
            Setting("heads", ("num_attention_heads",), 48),
            Setting("kv_heads", ("num_key_value_heads",), 8, "kv_head_count"),
            Setting("head_dim", ("head_dim",), 128, "head_size"),
            Setting("mlp", ("intermediate_size",), 1536),
            Setting("max_positions", ("max_position_embeddings",), 196_608),
            Setting("experts", ("num_local_experts", "num_experts"), 256),
            Setting("active_experts", ("num_experts_per_tok",), 8),
        ),
        fixed={
            "hidden_act": "silu",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "shared_intermediate_size": 0,
            "router_jitter_noise": 0.0,
        },
        # The published checkpoints lack tensors for multi-token prediction. `mlp_intermediate_size` is the width of
        # dense layers, and the model consists of experts only.
        silent=("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size"),
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names={**MIXTRAL_NAMES, "feed_forward/selection_bias": "block_sparse_moe.e_score_correction_bias"},
    sizes=("229B-A10B",),
    tested=("logits", "greedy", "conversion", "pages", "w8a8 pages"),
)
