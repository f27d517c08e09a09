"""Qwen3.5: gated delta rule in three of four layers, gated attention in the fourth, and dense feed-forward layers.

Outputs match transformers' `Qwen3_5ForCausalLM`. Training adds a multi-token prediction layer for the token after the
next one.

Source: Qwen Team, Qwen3.5, 2026; the layers are of Qwen3-Next.
"""

from functools import partial
from typing import Literal

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderSpec
from stack_train.models.family import DecoderFamily
from stack_train.models.qwen3_next import (
    DELTA_NAMES,
    DELTA_SETTINGS,
    DeltaConfig,
    delta_spec,
    read_delta,
    write_delta,
)
from stack_train.models.reader import ConfigMap, Setting
from stack_train.models.weight_map import Names
from stack_train.nn.feed_forward import Gated

__all__ = ["FAMILY", "QWEN35_FIXED", "QWEN35_NAMES", "QWEN35_SILENT", "Qwen35Config", "read_qwen35"]


@config
class Qwen35Config(DeltaConfig):
    """Size and numerics of a Qwen3.5; inherits the fields of `DeltaConfig`.

    Attributes:
      name: selects this family.
    """

    name: Literal["qwen3_5"] = "qwen3_5"


def spec(config: Qwen35Config) -> DecoderSpec:
    return delta_spec(config, lambda layer: Gated(width=config.mlp), separate=True)


read_qwen35 = partial(read_delta, handled=("mrope_section", "mrope_interleaved"))
"""`read_delta` for language models whose text tokens have three equal positions."""

QWEN35_FIXED = {"hidden_act": "silu", "attention_bias": False, "attn_output_gate": True, "output_gate_type": "swish"}
"""The `ConfigMap.fixed` of Qwen3.5."""

QWEN35_SILENT = ("mamba_ssm_dtype", "mlp_only_layers")
"""The `ConfigMap.silent` of Qwen3.5: the delta rule's state is float32, and no layer is an exception."""

QWEN35_NAMES: Names = {
    **DELTA_NAMES,
    "attention/query_key_value": "linear_attn.in_proj_qkv",
    "attention/gate": "linear_attn.in_proj_z",
    "attention/beta": "linear_attn.in_proj_b",
    "attention/decay": "linear_attn.in_proj_a",
}
"""Tensor names of the delta rule with separate projections, and of the multi-token prediction layer."""

FAMILY = DecoderFamily(
    name="qwen3_5",
    config_class=Qwen35Config,
    config_map=ConfigMap(
        architecture="Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        settings=(
            Setting("vocab_size", ("vocab_size",), 248_320),
            Setting("kv_heads", ("num_key_value_heads",), 4, "kv_head_count"),
            Setting("mlp", ("intermediate_size",), 12_288),
            *DELTA_SETTINGS,
        ),
        fixed=QWEN35_FIXED,
        silent=QWEN35_SILENT,
        read_others=partial(read_qwen35, layers=32),
        write_others=write_delta,
    ),
    spec=spec,
    names=QWEN35_NAMES,
    further_prefix="mtp.layers.{layer}.",
    published_in=("Qwen3_5ForConditionalGeneration",),
    sizes=("0.8B", "2B", "4B", "9B", "27B"),
    tested=("logits", "greedy", "gradients", "conversion", "pages"),
)
