"""CWM, Code World Model: a Llama with sliding windows in three of four layers.

Outputs match transformers' `CwmForCausalLM`.

Source: Meta FAIR CodeGen Team, CWM: An Open-Weights LLM for Research on Code Generation with World Models, 2025
(arXiv:2510.02387).
"""

from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope, write_rope
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "CwmConfig"]

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


@config
class CwmConfig(DecoderConfig):
    """Size and numerics of a CWM; inherits the fields of `DecoderConfig`.

    Attributes:
      name: selects this family.
      period: interval of global layers; layer i (from 0) is global if i % period == 0.
      window: size of the attention window of local layers in tokens, the query included.
      mlp_bias: adds biases to the projections of feed-forward layers.
    """

    name: Literal["cwm"] = "cwm"
    norm_epsilon: PositiveFloat = 1e-5
    period: PositiveInt = 4
    window: PositiveInt = 8192
    mlp_bias: bool = False


def _kinds(layers: int, period: int) -> list[str]:
    return [_LOCAL if layer % period else _GLOBAL for layer in range(layers)]


def spec(config: CwmConfig) -> DecoderSpec:
    """Returns the architecture, with a window in all but every `period`-th layer."""

    def layer(kind: str) -> Layer:
        attention = config.attention(window=config.window if kind == _LOCAL else None)
        return Layer(attention=attention, feed_forward=Gated(width=config.mlp, bias=config.mlp_bias))

    layers = tuple(map(layer, _kinds(config.layers, config.period)))
    return DecoderSpec(layers=layers, norm=Norm(epsilon=config.norm_epsilon))


def _read(reader: Reader) -> dict[str, Any]:
    layers, kinds = reader.get("num_hidden_layers", default=64), reader.get("layer_types")
    period = 4
    if kinds:
        later = [number for number, kind in enumerate(kinds) if number and kind == _GLOBAL]
        period = later[0] if later else len(kinds)
        reader.expect_layers(_kinds(layers, period))
    rope = read_rope(reader, theta=1_000_000.0)
    if not (reader.get("rope_parameters") or reader.get("rope_scaling")):
        scaling = {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["rope_scaling"] = {"rope_type": "llama3", **scaling, "original_max_position_embeddings": 8192}
    return {**rope, "period": period}


def _write(config: CwmConfig) -> dict[str, Any]:
    rope = write_rope(config)
    # Without the key, transformers scales the frequencies.
    rope["rope_scaling"] = rope["rope_scaling"] or {"rope_type": "default"}
    return {**rope, "layer_types": _kinds(config.layers, config.period)}


FAMILY = DecoderFamily(
    name="cwm",
    config_class=CwmConfig,
    config_map=ConfigMap(
        architecture="CwmForCausalLM",
        model_type="cwm",
        settings=(
            Setting("vocab_size", ("vocab_size",), 128_256),
            Setting("embed", ("hidden_size",), 6144),
            Setting("layers", ("num_hidden_layers",), 64),
            Setting("heads", ("num_attention_heads",), 48),
            Setting("kv_heads", ("num_key_value_heads",), 8, "kv_head_count"),
            Setting("head_dim", ("head_dim",), 128, "head_size"),
            Setting("mlp", ("intermediate_size",), 21_504),
            Setting("max_positions", ("max_position_embeddings",), 131_072),
            Setting("norm_epsilon", ("rms_norm_eps",), 1e-5),
            Setting("window", ("sliding_window",), 8192),
            Setting("mlp_bias", ("mlp_bias",), False),
        ),
        fixed={"hidden_act": "silu"},
        silent=("pretraining_tp",),  # without an effect in transformers
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    sizes=("32B",),
    tested=("logits", "greedy", "conversion", "pages", "w8a8 pages"),
)
