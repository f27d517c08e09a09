"""Qwen3-MoE: a Qwen3 in which some or all feed-forward layers are mixtures of experts.

Outputs match transformers' `Qwen3MoeForCausalLM`.

Source: Qwen Team, Qwen3 Technical Report, 2025 (arXiv:2505.09388).
"""

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.mixtral import ExpertsConfig
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope, write_rope
from stack_train.models.weight_map import Names
from stack_train.nn.experts import Experts, Router
from stack_train.nn.feed_forward import Gated, TokenLayer
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "QWEN_EXPERTS", "SHARED_NAMES", "Qwen3MoeConfig", "SparseConfig"]


@config
class SparseConfig(ExpertsConfig):
    """Settings of a decoder with mixtures of experts in some layers; inherits the fields of `ExpertsConfig`.

    Attributes:
      mlp: hidden width of dense feed-forward layers.
      expert_mlp: hidden width of an expert.
      sparse_step: interval of layers with mixtures; layer i (from 0) has one if (i + 1) % sparse_step == 0.
      dense_layers: indices of layers, from 0, that are dense regardless of `sparse_step`.
      normalized: divides the weights of a token's experts by their sum.
    """

    expert_mlp: PositiveInt = 768
    sparse_step: PositiveInt = 1
    dense_layers: tuple[NonNegativeInt, ...] = ()
    normalized: bool = True

    def feed_forward(self, layer: int, **fields: Any) -> TokenLayer:
        """Returns the mixture of a layer, with extra fields of `Experts`, or its dense layer."""
        if layer in self.dense_layers or (layer + 1) % self.sparse_step:
            return Gated(width=self.mlp)
        router = Router(experts=self.experts, active=self.active_experts, normalized=self.normalized)
        return Experts(router=router, width=self.expert_mlp, buffer=self.expert_buffer, **fields)


@config
class Qwen3MoeConfig(SparseConfig):
    """Size and numerics of a Qwen3-MoE; inherits the fields of `SparseConfig`.

    Attributes:
      name: selects this family.
      attention_bias: adds biases to the projections of attention.
      window: size of the attention window in tokens, the query included; None attends to all tokens.
    """

    name: Literal["qwen3_moe"] = "qwen3_moe"
    attention_bias: bool = False
    window: PositiveInt | None = None


def spec(config: Qwen3MoeConfig) -> DecoderSpec:
    """Returns the architecture, with the same attention in all layers."""
    bias = config.attention_bias
    attention = config.attention(head_norms=True, bias=bias, output_bias=bias, window=config.window)
    layers = [Layer(attention=attention, feed_forward=config.feed_forward(n)) for n in range(config.layers)]
    return DecoderSpec(layers=tuple(layers), norm=Norm(epsilon=config.norm_epsilon))


def _read(reader: Reader) -> dict[str, Any]:
    reader.get("max_window_layers")  # ignored: transformers uses one window for all layers
    window = reader.get("sliding_window")
    return {**read_rope(reader), "window": window if reader.get("use_sliding_window") else None}


def _write(config: Qwen3MoeConfig) -> dict[str, Any]:
    return {**write_rope(config), "use_sliding_window": config.window is not None, "sliding_window": config.window}


QWEN_EXPERTS = (
    Setting("experts", ("num_experts", "num_local_experts", "n_routed_experts"), 128),
    Setting("active_experts", ("num_experts_per_tok",), 8),
    Setting("expert_mlp", ("moe_intermediate_size",), 768),
    Setting("sparse_step", ("decoder_sparse_step",), 1),
    Setting("dense_layers", ("mlp_only_layers",), ()),
    Setting("normalized", ("norm_topk_prob",), False),
)
"""The settings of a `SparseConfig`."""

SHARED_NAMES: Names = {
    "feed_forward/shared_gate": "mlp.shared_expert_gate",
    **{f"feed_forward/shared/{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
}
"""Tensor names of a shared expert and its gate."""

FAMILY = DecoderFamily(
    name="qwen3_moe",
    config_class=Qwen3MoeConfig,
    config_map=ConfigMap(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        settings=(
            Setting("kv_heads", ("num_key_value_heads",), 4, "kv_head_count"),
            Setting("mlp", ("intermediate_size",), 6144),
            Setting("max_positions", ("max_position_embeddings",), 32_768),
            Setting("attention_bias", ("attention_bias",), False),
            *QWEN_EXPERTS,
        ),
        fixed={"hidden_act": "silu"},
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    sizes=("30B-A3B", "235B-A22B"),
    tested=("logits", "greedy", "gradients", "conversion", "pages", "w8a8 pages"),
)
