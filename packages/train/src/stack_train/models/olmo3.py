"""OLMo 3: an OLMo 2 with sliding windows in three of four layers, whose rotary positions are not scaled.

Outputs match transformers' `Olmo3ForCausalLM`.

Source: Team OLMo, Olmo 3, 2025 (arXiv:2512.13961).
"""

from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.olmo2 import OLMO_NAMES
from stack_train.models.reader import ConfigMap, Reader, Setting, periodic, read_rope, write_rope
from stack_train.nn.attention import Rope
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "Olmo3Config"]

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


@config
class Olmo3Config(DecoderConfig):
    """Size and numerics of an OLMo 3; inherits the fields of `DecoderConfig`.

    Attributes:
      name: selects this family.
      period: interval of global layers; layer i (from 0) is global if (i + 1) % period == 0. Global layers attend to
        all tokens, and only they use `rope_scaling`.
      window: size of the attention window of local layers in tokens, the query included.
      attention_bias: adds biases to the projections of attention.
    """

    name: Literal["olmo3"] = "olmo3"
    rope_theta: PositiveFloat = 500_000.0
    norm_epsilon: PositiveFloat = 1e-5
    period: PositiveInt = 4
    window: PositiveInt = 4096
    attention_bias: bool = False


def spec(config: Olmo3Config) -> DecoderSpec:
    bias = config.attention_bias

    def layer(kind: str) -> Layer:
        local = {"window": config.window, "rope": Rope(theta=config.rope_theta)} if kind == _LOCAL else {}
        attention = config.attention(whole_norms=True, bias=bias, output_bias=bias, **local)
        feed_forward = Gated(width=config.mlp)
        return Layer(attention=attention, feed_forward=feed_forward, input_norms=False, output_norms=True)

    layers = tuple(map(layer, periodic(config.layers, config.period)))
    return DecoderSpec(layers=layers, norm=Norm(epsilon=config.norm_epsilon))


def _read(reader: Reader) -> dict[str, Any]:
    # config.json lists the kinds of layers without their period, which is the place of the first global layer.
    kinds = reader.get("layer_types") or []
    period = kinds.index(_GLOBAL) + 1 if _GLOBAL in kinds else len(kinds) + 1 if kinds else 4
    reader.expect_layers(periodic(reader.get("num_hidden_layers", default=32), period))
    rope = read_rope(reader, theta=500_000.0, kind=_GLOBAL)
    local = (reader.get("rope_parameters") or {}).get(_LOCAL) or {}
    if (
        local.get("rope_type", "default") != "default"
        or local.get("rope_theta", rope["rope_theta"]) != rope["rope_theta"]
    ):
        reader.problems.append(f"rope_parameters.{_LOCAL}={local!r}, not the unscaled positions of {_GLOBAL}")
    return {**rope, "period": period}


def _write(config: Olmo3Config) -> dict[str, Any]:
    """Returns the keys of both versions: transformers 5 applies an outer `rope_theta` to one kind of layer only."""
    rope = write_rope(config)
    unscaled = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaled = {**unscaled, **(rope["rope_scaling"] or {})}
    return {
        **rope,
        "rope_parameters": {_GLOBAL: scaled, _LOCAL: unscaled},
        "layer_types": periodic(config.layers, config.period),
    }


FAMILY = DecoderFamily(
    name="olmo3",
    config_class=Olmo3Config,
    config_map=ConfigMap(
        architecture="Olmo3ForCausalLM",
        model_type="olmo3",
        settings=(
            Setting("vocab_size", ("vocab_size",), 50_304),
            Setting("norm_epsilon", ("rms_norm_eps",), 1e-5),
            Setting("window", ("sliding_window",), 4096),
            Setting("attention_bias", ("attention_bias",), False),
        ),
        fixed={"hidden_act": "silu"},
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names=OLMO_NAMES,
    sizes=("7B", "32B"),
    tested=("logits", "greedy", "conversion", "pages", "w8a8 pages"),
)
