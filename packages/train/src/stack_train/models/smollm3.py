"""SmolLM3: a Llama that omits rotary positions in every fourth layer (NoPE).

Outputs match transformers' `SmolLM3ForCausalLM`.

Source: Hugging Face, SmolLM3, 2025; layers without positions as in Yang et al., 2025 (arXiv:2501.18795).
"""

from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope, write_rope
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "SmolLM3Config", "rope_layers"]


@config
class SmolLM3Config(DecoderConfig):
    """Size and numerics of a SmolLM3; inherits the fields of `DecoderConfig`.

    Attributes:
      name: selects this family.
      nope_interval: interval of layers without rotary positions; layer i (from 0) has none if
        (i + 1) % nope_interval == 0.
      attention_bias: adds biases to the projections of attention.
      mlp_bias: adds biases to the projections of feed-forward layers.
    """

    name: Literal["smollm3"] = "smollm3"
    rope_theta: PositiveFloat = 2_000_000.0
    tie_embeddings: bool = True
    nope_interval: PositiveInt = 4
    attention_bias: bool = False
    mlp_bias: bool = False


def spec(config: SmolLM3Config) -> DecoderSpec:
    def layer(has_rope: int) -> Layer:
        positions = {} if has_rope else {"rope": None}
        attention = config.attention(bias=config.attention_bias, output_bias=config.attention_bias, **positions)
        return Layer(attention=attention, feed_forward=Gated(width=config.mlp, bias=config.mlp_bias))

    layers = tuple(map(layer, rope_layers(config.layers, config.nope_interval)))
    return DecoderSpec(layers=layers, norm=Norm(epsilon=config.norm_epsilon))


def rope_layers(layers: int, interval: int) -> list[int]:
    """Returns `no_rope_layers` of config.json, which is 1 for layers with rotary positions and 0 for layers without."""
    return [int((layer + 1) % interval != 0) for layer in range(layers)]


def _read(reader: Reader) -> dict[str, Any]:
    layers, interval = reader.get("num_hidden_layers", default=36), reader.get("no_rope_layer_interval", default=4)
    reader.expect("no_rope_layers", rope_layers(layers, interval))
    reader.expect_layers(["full_attention"] * layers)
    reader.get("sliding_window", "max_window_layers")  # ignored: transformers reads them with use_sliding_window only
    return {**read_rope(reader, theta=2_000_000.0), "nope_interval": interval}


def _write(config: SmolLM3Config) -> dict[str, Any]:
    interval = config.nope_interval
    return {
        **write_rope(config),
        "no_rope_layer_interval": interval,
        "no_rope_layers": rope_layers(config.layers, interval),
    }


FAMILY = DecoderFamily(
    name="smollm3",
    config_class=SmolLM3Config,
    config_map=ConfigMap(
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        settings=(
            Setting("vocab_size", ("vocab_size",), 128_256),
            Setting("embed", ("hidden_size",), 2048),
            Setting("layers", ("num_hidden_layers",), 36),
            Setting("heads", ("num_attention_heads",), 16),
            Setting("kv_heads", ("num_key_value_heads",), 4, "kv_head_count"),
            Setting("max_positions", ("max_position_embeddings",), 32_768),
            Setting("tie_embeddings", ("tie_word_embeddings",), True),
            Setting("attention_bias", ("attention_bias",), False),
            Setting("mlp_bias", ("mlp_bias",), False),
        ),
        fixed={"hidden_act": "silu", "use_sliding_window": False},
        silent=("pretraining_tp",),  # published as 2, and without an effect in transformers
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    sizes=("3B",),
    tested=("logits", "greedy", "gradients", "conversion", "pages", "w8a8 pages"),
)
