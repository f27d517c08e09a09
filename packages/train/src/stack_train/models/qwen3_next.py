"""Qwen3-Next: gated delta rule in three of four layers, gated attention in the fourth, and experts in all layers.

Outputs match transformers' `Qwen3NextForCausalLM`. Training adds a multi-token prediction layer for the token after the
next one.

Source: Qwen Team, Qwen3-Next, 2025.
"""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.qwen3_moe import QWEN_EXPERTS, SHARED_NAMES, SparseConfig
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope, read_rotary_share, write_rope
from stack_train.models.weight_map import Names
from stack_train.nn.attention import Rope
from stack_train.nn.delta import DeltaAttention
from stack_train.nn.feed_forward import TokenLayer
from stack_train.nn.residual import Norm

__all__ = [
    "DELTA_NAMES",
    "DELTA_SETTINGS",
    "FAMILY",
    "DeltaConfig",
    "Qwen3NextConfig",
    "delta_spec",
    "read_delta",
    "write_delta",
]

_LINEAR, _FULL = "linear_attention", "full_attention"


@config
class DeltaConfig(DecoderConfig):
    """Settings of a decoder with the gated delta rule in most layers; inherits the fields of `DecoderConfig`.

    Attributes:
      period: interval of layers with full attention; layer i (from 0) has it if (i + 1) % period == 0. All remaining
        layers use the gated delta rule.
      rotary_share: fraction of a head's features with rotary positions.
      key_heads: number of query and key heads of the delta rule.
      value_heads: number of value heads of the delta rule.
      key_dim: width of the delta rule's query and key heads.
      value_dim: width of the delta rule's value heads.
      kernel: size of the delta rule's causal convolution in tokens.
      mtp_layers: number of multi-token prediction layers (`MultiTokenLayer`), 0 or 1.
    """

    period: PositiveInt = 4
    rotary_share: PositiveFloat = 0.25
    key_heads: PositiveInt = 4
    value_heads: PositiveInt = 8
    key_dim: PositiveInt = 64
    value_dim: PositiveInt = 64
    kernel: PositiveInt = 4
    mtp_layers: Annotated[int, Field(ge=0, le=1)] = 0

    moved_keys: ClassVar[Mapping[str, str]] = MappingProxyType({"further_layers": "model.mtp_layers"})


@config
class Qwen3NextConfig(DeltaConfig, SparseConfig):
    """Size and numerics of a Qwen3-Next; inherits the fields of `DeltaConfig` and `SparseConfig`.

    Attributes:
      name: selects this family.
      shared_mlp: hidden width of the shared expert, which is applied to every token; 0 omits the shared expert.
    """

    name: Literal["qwen3_next"] = "qwen3_next"
    shared_mlp: NonNegativeInt = 512


def delta_spec(config: DeltaConfig, feed_forward: Callable[[int], TokenLayer], *, separate: bool) -> DecoderSpec:
    """Returns the architecture, with full attention in one layer of each period.

    Args:
      feed_forward: function from a layer's index to its feed-forward layer.
      separate: see `DeltaAttention`.
    """
    linear = DeltaAttention(
        key_heads=config.key_heads,
        value_heads=config.value_heads,
        key_dim=config.key_dim,
        value_dim=config.value_dim,
        kernel=config.kernel,
        separate=separate,
    )
    rotary_dim = int(config.head_size * config.rotary_share)
    rope = Rope(theta=config.rope_theta, scaling=config.rope_scaling, rotary_dim=rotary_dim)
    full = config.attention(head_norms=True, gated=True, rope=rope)

    def layer(number: int, kind: str) -> Layer:
        return Layer(attention=linear if kind == _LINEAR else full, feed_forward=feed_forward(number))

    layers = tuple(layer(number, kind) for number, kind in enumerate(_kinds(config.layers, config.period)))
    further = (layer(config.layers, _FULL),) * config.mtp_layers
    return DecoderSpec(layers=layers, norm=Norm(epsilon=config.norm_epsilon, offset=1.0), further=further)


def spec(config: Qwen3NextConfig) -> DecoderSpec:
    shared: dict[str, Any] = {"shared": config.shared_mlp, "shared_gate": config.shared_mlp > 0}
    return delta_spec(config, lambda layer: config.feed_forward(layer, **shared), separate=False)


def _kinds(layers: int, period: int) -> list[str]:
    return [_LINEAR if (layer + 1) % period else _FULL for layer in range(layers)]


def read_delta(reader: Reader, *, layers: int = 48, handled: Collection[str] = ()) -> dict[str, Any]:
    """Reads the kinds of layers and their rotary positions.

    Args:
      layers: default of transformers for `num_hidden_layers`.
      handled: further keys of `rope_parameters` without an effect on text.
    """
    period = reader.get("full_attention_interval", default=4)
    reader.expect_layers(_kinds(reader.get("num_hidden_layers", default=layers), period))
    rope = read_rope(reader, handled=("partial_rotary_factor", *handled))
    return {**rope, "period": period, "rotary_share": read_rotary_share(reader, 0.25)}


def write_delta(config: DeltaConfig) -> dict[str, Any]:
    """Returns the keys read by `read_delta`."""
    return {
        **write_rope(config),
        "partial_rotary_factor": config.rotary_share,
        "full_attention_interval": config.period,
        "layer_types": _kinds(config.layers, config.period),
    }


DELTA_SETTINGS = (
    Setting("heads", ("num_attention_heads",), 16),
    Setting("head_dim", ("head_dim",), 256, "head_size"),
    Setting("max_positions", ("max_position_embeddings",), 32_768),
    Setting("key_heads", ("linear_num_key_heads",), 16),
    Setting("value_heads", ("linear_num_value_heads",), 32),
    Setting("key_dim", ("linear_key_head_dim",), 128),
    Setting("value_dim", ("linear_value_head_dim",), 128),
    Setting("kernel", ("linear_conv_kernel_dim",), 4),
    Setting("mtp_layers", ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"), 1),
)
"""Settings of a `DeltaConfig` with the same defaults in Qwen3-Next and Qwen3.5."""

DELTA_NAMES: Names = {
    "attention/convolution": "linear_attn.conv1d.weight",
    "attention/log_rate": "linear_attn.A_log",
    "attention/step": "linear_attn.dt_bias",
    "attention/norm": "linear_attn.norm.weight",
    "attention/out": "linear_attn.out_proj",
    "further/embedding_norm": "/mtp.pre_fc_norm_embedding.weight",
    "further/hidden_norm": "/mtp.pre_fc_norm_hidden.weight",
    "further/project": "/mtp.fc",
    "further/norm": "/mtp.norm.weight",
}
"""Tensor names of the delta rule, without its projections, and of the multi-token prediction layer."""

FAMILY = DecoderFamily(
    name="qwen3_next",
    config_class=Qwen3NextConfig,
    config_map=ConfigMap(
        architecture="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        settings=(
            Setting("vocab_size", ("vocab_size",), 151_936),
            Setting("embed", ("hidden_size",), 2048),
            Setting("layers", ("num_hidden_layers",), 48),
            Setting("kv_heads", ("num_key_value_heads",), 2, "kv_head_count"),
            Setting("mlp", ("intermediate_size",), 5632),
            *DELTA_SETTINGS,
            *QWEN_EXPERTS,
            Setting("experts", ("num_experts", "num_local_experts", "n_routed_experts"), 512),
            Setting("active_experts", ("num_experts_per_tok",), 10),
            Setting("expert_mlp", ("moe_intermediate_size",), 512),
            Setting("normalized", ("norm_topk_prob",), True),
            Setting("shared_mlp", ("shared_expert_intermediate_size",), 512),
        ),
        fixed={"hidden_act": "silu", "attention_bias": False},
        read_others=read_delta,
        write_others=write_delta,
    ),
    spec=spec,
    names={
        **DELTA_NAMES,
        "attention/query_key_value_gate": "linear_attn.in_proj_qkvz",
        "attention/beta_decay": "linear_attn.in_proj_ba",
        **SHARED_NAMES,
    },
    further_prefix="mtp.layers.{layer}.",
    sizes=("80B-A3B",),
    tested=("logits", "greedy", "gradients", "conversion", "pages"),
)
