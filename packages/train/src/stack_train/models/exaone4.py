"""EXAONE 4: sliding windows in three of four layers, and layers of global attention without positions.

Outputs match transformers' `Exaone4ForCausalLM`.

Source: LG AI Research, EXAONE 4.0, 2025 (arXiv:2507.11407).
"""

from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.olmo2 import OLMO_NAMES
from stack_train.models.reader import ConfigMap, Reader, Setting, periodic, read_rope, write_rope
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "Exaone4Config"]

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


@config
class Exaone4Config(DecoderConfig):
    """Size and numerics of an EXAONE 4; inherits the fields of `DecoderConfig`.

    Attributes:
      name: selects this family.
      period: interval of global layers; layer i (from 0) is global if (i + 1) % period == 0. Global layers attend to
        all tokens, without rotary positions.
      window: size of the attention window of local layers in tokens, the query included; None attends to all tokens in
        every layer, with rotary positions.
    """

    name: Literal["exaone4"] = "exaone4"
    norm_epsilon: PositiveFloat = 1e-5
    period: PositiveInt = 4
    window: PositiveInt | None = 4096


def spec(config: Exaone4Config) -> DecoderSpec:
    """Returns the architecture, with norms after attention and feed-forward layers, and of the heads."""

    def layer(kind: str) -> Layer:
        positions = dict[str, Any](rope=None) if kind == _GLOBAL and config.window is not None else {}
        window = config.window if kind == _LOCAL else None
        attention = config.attention(head_norms=True, window=window, **positions)
        feed_forward = Gated(width=config.mlp)
        return Layer(attention=attention, feed_forward=feed_forward, input_norms=False, output_norms=True)

    layers = tuple(map(layer, periodic(config.layers, config.period)))
    return DecoderSpec(layers=layers, norm=Norm(epsilon=config.norm_epsilon))


def _read(reader: Reader) -> dict[str, Any]:
    layers, window = reader.get("num_hidden_layers", default=32), reader.get("sliding_window", default=4096)
    # transformers reads the pattern only if `layer_types` is missing.
    kinds, pattern = reader.get("layer_types"), reader.get("sliding_window_pattern", default=4)
    if window is None:
        reader.expect_layers([_GLOBAL] * layers)
        return read_rope(reader)
    if kinds:
        pattern = kinds.index(_GLOBAL) + 1 if _GLOBAL in kinds else len(kinds) + 1
    elif type(pattern) is not int or pattern < 1:
        reader.problems.append(f"sliding_window_pattern={pattern!r} without layer_types, not a positive integer")
        return {}
    reader.expect_layers(periodic(layers, pattern))
    return {**read_rope(reader), "period": pattern}


def _write(config: Exaone4Config) -> dict[str, Any]:
    period = 1 if config.window is None else config.period
    return {**write_rope(config), "layer_types": periodic(config.layers, period)}


FAMILY = DecoderFamily(
    name="exaone4",
    config_class=Exaone4Config,
    config_map=ConfigMap(
        architecture="Exaone4ForCausalLM",
        model_type="exaone4",
        settings=(
            Setting("vocab_size", ("vocab_size",), 102_400),
            Setting("kv_heads", ("num_key_value_heads",), 32, "kv_head_count"),
            Setting("mlp", ("intermediate_size",), 16_384),
            Setting("norm_epsilon", ("rms_norm_eps",), 1e-5),
            Setting("window", ("sliding_window",), 4096),
        ),
        fixed={"hidden_act": "silu"},
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names=OLMO_NAMES,
    sizes=("1.2B", "32B"),
    tested=("logits", "greedy", "conversion", "pages", "w8a8 pages"),
)
