"""Gemma 2: sliding windows in every second layer, norms before and after each layer, soft caps on scores and logits.

Outputs match transformers' `Gemma2ForCausalLM`.

Source: Gemma Team, Gemma 2, 2024 (arXiv:2408.00118).
"""

from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.gemma3 import GEMMA_NAMES, GEMMA_SETTINGS
from stack_train.models.reader import ConfigMap, Reader, Setting, periodic, read_rope, write_rope
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "Gemma2Config"]


@config
class Gemma2Config(DecoderConfig):
    """Size and numerics of a Gemma 2; inherits the fields of `DecoderConfig`.

    Attributes:
      name: selects this family.
      window: size of the attention window in tokens, the query included, in the first layer and every second one after.
      query_scalar: attention scores are scaled by query_scalar ** -0.5.
      attention_softcap: soft cap of the attention scores; None disables the cap.
      logit_softcap: soft cap of the logits; None disables the cap.
    """

    name: Literal["gemma2"] = "gemma2"
    tie_embeddings: bool = True
    window: PositiveInt = 4096
    query_scalar: PositiveInt = 256
    attention_softcap: PositiveFloat | None = 50.0
    logit_softcap: PositiveFloat | None = 30.0


def spec(config: Gemma2Config) -> DecoderSpec:
    def layer(number: int) -> Layer:
        window = config.window if number % 2 == 0 else None
        fields = {"scale": config.query_scalar**-0.5, "softcap": config.attention_softcap, "window": window}
        feed_forward = Gated(width=config.mlp, activation="gelu_tanh")
        return Layer(attention=config.attention(**fields), feed_forward=feed_forward, output_norms=True)

    return DecoderSpec(
        layers=tuple(map(layer, range(config.layers))),
        norm=Norm(epsilon=config.norm_epsilon, offset=1.0),
        embedding_scale=config.embed**0.5,
        logit_softcap=config.logit_softcap,
    )


def _read(reader: Reader) -> dict[str, Any]:
    reader.expect_layers(periodic(reader.get("num_hidden_layers", default=26), 2))
    return read_rope(reader)


def _write(config: Gemma2Config) -> dict[str, Any]:
    return {**write_rope(config), "layer_types": periodic(config.layers, 2)}


FAMILY = DecoderFamily(
    name="gemma2",
    config_class=Gemma2Config,
    config_map=ConfigMap(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        settings=(
            *GEMMA_SETTINGS,
            Setting("vocab_size", ("vocab_size",), 256_000),
            Setting("max_positions", ("max_position_embeddings",), 8192),
            Setting("attention_softcap", ("attn_logit_softcapping",), 50.0),
            Setting("logit_softcap", ("final_logit_softcapping",), 30.0),
        ),
        fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        silent=("hidden_act",),  # older name of the activation, which transformers ignores
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names=GEMMA_NAMES,
    sizes=("2B", "9B", "27B"),
    tested=("logits", "greedy", "conversion", "pages"),
)
