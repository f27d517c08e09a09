"""Gemma 3: sliding windows in five of six layers, norms before and after each layer, per-head query and key norms.

Outputs match transformers' `Gemma3ForCausalLM`.

Source: Gemma Team, Gemma 3 Technical Report, 2025 (arXiv:2503.19786).
"""

from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Reader, Setting, periodic, read_rope, write_rope
from stack_train.models.weight_map import Names
from stack_train.nn.attention import Rope
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "GEMMA_NAMES", "GEMMA_SETTINGS", "Gemma3Config", "Gemma3Settings", "spec"]

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


@config
class Gemma3Settings(DecoderConfig):
    """Size and numerics of Gemma 3's language model; inherits the fields of `DecoderConfig`.

    Attributes:
      period: interval of global layers; layer i (from 0) is global if (i + 1) % period == 0. Global layers attend to
        all tokens and use `rope_theta` and `rope_scaling`.
      window: size of the attention window of local layers in tokens, the query included.
      local_theta: base of the rotary frequencies in local layers.
      query_scalar: attention scores are scaled by query_scalar ** -0.5.
      attention_softcap: soft cap of the attention scores; None disables the cap.
      logit_softcap: soft cap of the logits; None disables the cap.
    """

    rope_theta: PositiveFloat = 1_000_000.0
    tie_embeddings: bool = True
    period: PositiveInt = 6
    window: PositiveInt = 512
    local_theta: PositiveFloat = 10_000.0
    query_scalar: PositiveInt = 256
    attention_softcap: PositiveFloat | None = None
    logit_softcap: PositiveFloat | None = None


@config
class Gemma3Config(Gemma3Settings):
    """Size and numerics of a Gemma 3 text model; inherits the fields of `Gemma3Settings`.

    Attributes:
      name: selects this family.
    """

    name: Literal["gemma3"] = "gemma3"


def spec(config: Gemma3Settings) -> DecoderSpec:
    """Returns the architecture: sliding windows in all but every `period`-th layer."""

    def layer(kind: str) -> Layer:
        local = {"window": config.window, "rope": Rope(theta=config.local_theta)} if kind == _LOCAL else {}
        fields = {"head_norms": True, "scale": config.query_scalar**-0.5, "softcap": config.attention_softcap}
        feed_forward = Gated(width=config.mlp, activation="gelu_tanh")
        return Layer(attention=config.attention(**fields, **local), feed_forward=feed_forward, output_norms=True)

    return DecoderSpec(
        layers=tuple(map(layer, periodic(config.layers, config.period))),
        norm=Norm(epsilon=config.norm_epsilon, offset=1.0),
        embedding_scale=config.embed**0.5,
        logit_softcap=config.logit_softcap,
    )


def _read(reader: Reader) -> dict[str, Any]:
    period = reader.get("sliding_window_pattern", "_sliding_window_pattern", default=6)
    reader.expect_layers(periodic(reader.get("num_hidden_layers", default=26), period))
    local = (reader.get("rope_parameters") or {}).get(_LOCAL, {})
    if local.get("rope_type", "default") != "default":
        reader.problems.append(f"rope_parameters.{_LOCAL}={local!r}, not of rope_type 'default'")
    local_theta = local.get("rope_theta") or reader.get("rope_local_base_freq") or 10_000.0
    rope = read_rope(reader, theta=1_000_000.0, kind=_GLOBAL)
    return {**rope, "period": period, "local_theta": local_theta}


def _write(config: Gemma3Settings) -> dict[str, Any]:
    """Returns the keys of both versions: transformers 4 reads `sliding_window_pattern`, 5 reads `layer_types`."""
    return {
        **write_rope(config),
        "sliding_window_pattern": config.period,
        "layer_types": periodic(config.layers, config.period),
        "rope_local_base_freq": config.local_theta,
    }


GEMMA_NAMES: Names = {
    "attention_output_norm": "post_attention_layernorm.weight",
    "feed_forward_norm": "pre_feedforward_layernorm.weight",
    "feed_forward_output_norm": "post_feedforward_layernorm.weight",
}
"""Tensor names of the norms in layers with four norms."""

GEMMA_SETTINGS = (
    Setting("embed", ("hidden_size",), 2304),
    Setting("layers", ("num_hidden_layers",), 26),
    Setting("heads", ("num_attention_heads",), 8),
    Setting("kv_heads", ("num_key_value_heads",), 4, "kv_head_count"),
    Setting("head_dim", ("head_dim",), 256, "head_size"),
    Setting("mlp", ("intermediate_size",), 9216),
    Setting("tie_embeddings", ("tie_word_embeddings",), True),
    Setting("window", ("sliding_window",), 4096),
    Setting("query_scalar", ("query_pre_attn_scalar",), 256),
)
"""Settings with the same name and default in the `config.json` of Gemma 2 and 3."""

FAMILY = DecoderFamily(
    name="gemma3",
    config_class=Gemma3Config,
    config_map=ConfigMap(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        settings=(
            *GEMMA_SETTINGS,
            Setting("vocab_size", ("vocab_size",), 262_208),
            Setting("max_positions", ("max_position_embeddings",), 131_072),
            Setting("attention_softcap", ("attn_logit_softcapping",)),
            Setting("logit_softcap", ("final_logit_softcapping",)),
        ),
        fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "use_bidirectional_attention": False},
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names=GEMMA_NAMES,
    sizes=("270M", "1B"),
    tested=("logits", "greedy", "gradients", "conversion", "pages", "w8a8 pages"),
)
