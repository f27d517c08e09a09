"""Ministral 3: a Mistral whose queries grow with their position.

Outputs match transformers' `Ministral3ForCausalLM`.

Source: Mistral AI, Ministral 3, 2026 (arXiv:2601.08584).
"""

from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope, write_rope
from stack_train.nn.attention import Temperature
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "Ministral3Config", "Ministral3Settings", "spec"]


@config
class Ministral3Settings(DecoderConfig):
    """Settings of a Ministral 3, with images or without; inherits the fields of `DecoderConfig`.

    Attributes:
      window: size of the attention window in tokens, the query included; None attends to all tokens.
      temperature_rate: growth of queries with the logarithm of their position, in units of YaRN's pretrained context
        length; 0 leaves them unchanged.
    """

    norm_epsilon: PositiveFloat = 1e-5
    window: PositiveInt | None = None
    temperature_rate: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature_rate and not isinstance(self.rope_scaling, ops.YarnScaling):
            raise ConfigError(
                f"temperature_rate={self.temperature_rate} needs rope_scaling of rope_type yarn, whose "
                f"original_max_position_embeddings it uses; rope_scaling is {self.rope_scaling}. Set one, or "
                "temperature_rate=0."
            )

    @property
    def temperature(self) -> Temperature | None:
        """Scale of queries by their position."""
        if not isinstance(self.rope_scaling, ops.YarnScaling) or not self.temperature_rate:
            return None
        return Temperature(rate=self.temperature_rate, tokens=self.rope_scaling.original_max_position_embeddings)


@config
class Ministral3Config(Ministral3Settings):
    """Size and numerics of a Ministral 3; inherits the fields of `Ministral3Settings`.

    Attributes:
      name: selects this family.
    """

    name: Literal["ministral3"] = "ministral3"


def spec(config: Ministral3Settings) -> DecoderSpec:
    """Returns the architecture, with identical layers."""
    attention = config.attention(window=config.window, temperature=config.temperature)
    layer = Layer(attention=attention, feed_forward=Gated(width=config.mlp))
    return DecoderSpec(layers=(layer,) * config.layers, norm=Norm(epsilon=config.norm_epsilon))


def _read(reader: Reader) -> dict[str, Any]:
    nested = reader.get("rope_parameters", "rope_scaling")
    if not nested:
        reader.problems.append("no rope_parameters, for which transformers has defaults of one size only")
    # transformers reads these keys, but neither changes the rotation.
    rope = read_rope(reader, handled=("llama_4_scaling_beta", "max_position_embeddings"))
    return {**rope, "temperature_rate": (nested or {}).get("llama_4_scaling_beta") or 0.0}


def _write(config: Ministral3Settings) -> dict[str, Any]:
    rope = write_rope(config)
    scaling = rope["rope_scaling"] or {"rope_type": "default", "original_max_position_embeddings": config.max_positions}
    return {
        "rope_parameters": {
            **scaling,
            "rope_theta": config.rope_theta,
            "llama_4_scaling_beta": config.temperature_rate,
        }
    }


FAMILY = DecoderFamily(
    name="ministral3",
    config_class=Ministral3Config,
    config_map=ConfigMap(
        architecture="Ministral3ForCausalLM",
        model_type="ministral3",
        settings=(
            Setting("vocab_size", ("vocab_size",), 131_072),
            Setting("layers", ("num_hidden_layers",), 34),
            Setting("kv_heads", ("num_key_value_heads",), 8, "kv_head_count"),
            Setting("head_dim", ("head_dim",), 128, "head_size"),
            Setting("mlp", ("intermediate_size",), 14_336),
            Setting("max_positions", ("max_position_embeddings",), 262_144),
            Setting("norm_epsilon", ("rms_norm_eps",), 1e-5),
            Setting("window", ("sliding_window",)),
        ),
        fixed={"hidden_act": "silu"},
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    sizes=("3B", "8B", "14B"),
    tested=("logits", "greedy", "gradients", "conversion", "pages", "w8a8 pages"),
)
