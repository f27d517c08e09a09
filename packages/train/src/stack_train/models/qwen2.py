"""Qwen2 and Qwen2.5: a Llama with query, key and value biases, and optional sliding windows in later layers.

Outputs match transformers' `Qwen2ForCausalLM`.

Source: Qwen Team, Qwen2.5 Technical Report, 2024 (arXiv:2412.15115).
"""

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope, write_rope
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "Qwen2Config", "WindowedConfig", "read_windows", "write_windows"]


@config
class WindowedConfig(DecoderConfig):
    """Settings of a decoder with optional sliding windows in later layers; inherits the fields of `DecoderConfig`.

    Attributes:
      window: size of the attention window in tokens, the query included; None attends to all tokens in every layer.
      full_layers: number of first layers that attend to all tokens.
    """

    window: PositiveInt | None = None
    full_layers: NonNegativeInt = 0

    def window_of(self, layer: int) -> int | None:
        """Returns the window of a layer, or None if it attends to all tokens."""
        return None if layer < self.full_layers else self.window


@config
class Qwen2Config(WindowedConfig):
    """Size and numerics of a Qwen2; inherits the fields of `WindowedConfig`.

    Attributes:
      name: selects this family.
    """

    name: Literal["qwen2"] = "qwen2"


def spec(config: Qwen2Config) -> DecoderSpec:
    def layer(number: int) -> Layer:
        attention = config.attention(bias=True, window=config.window_of(number))
        return Layer(attention=attention, feed_forward=Gated(width=config.mlp))

    return DecoderSpec(layers=tuple(map(layer, range(config.layers))), norm=Norm(epsilon=config.norm_epsilon))


def read_windows(reader: Reader) -> dict[str, Any]:
    """Reads the rotary positions and the windows of layers."""
    window, full_layers = reader.get("sliding_window"), reader.get("max_window_layers", default=28)
    window = window if reader.get("use_sliding_window") else None
    layers = reader.get("num_hidden_layers")
    windowed = [window is not None and layer >= full_layers for layer in range(layers or 0)]
    reader.expect_layers(["sliding_attention" if each else "full_attention" for each in windowed])
    return {**read_rope(reader), "window": window, "full_layers": full_layers}


def write_windows(config: WindowedConfig) -> dict[str, Any]:
    """Returns the keys read by `read_windows`."""
    return {
        **write_rope(config),
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "max_window_layers": config.full_layers,
    }


FAMILY = DecoderFamily(
    name="qwen2",
    config_class=Qwen2Config,
    config_map=ConfigMap(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        settings=(
            Setting("mlp", ("intermediate_size",), 22_016),
            Setting("max_positions", ("max_position_embeddings",), 32_768),
        ),
        fixed={"hidden_act": "silu"},
        read_others=read_windows,
        write_others=write_windows,
    ),
    spec=spec,
    sizes=("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B"),
    tested=("logits", "greedy", "conversion", "pages", "w8a8 pages", "compiled"),
)
