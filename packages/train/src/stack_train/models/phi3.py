"""Phi-3, Phi-3.5 and Phi-4: a Mistral with fused projections, partial rotary positions and LongRoPE.

Outputs match transformers' `Phi3ForCausalLM`.

Source: Abdin et al., Phi-3, 2024 (arXiv:2404.14219); Phi-4-Mini, 2025 (arXiv:2503.01743).
"""

import math
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ConversionError
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope, read_rotary_share, write_rope
from stack_train.models.weight_map import Names, Stored
from stack_train.nn.attention import Rope
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "Phi3Config"]


@config
class Phi3Config(DecoderConfig):
    """Size and numerics of a Phi-3; inherits the fields of `DecoderConfig`.

    Attributes:
      name: selects this family.
      window: size of the attention window in tokens, the query included; None attends to all tokens.
      rotary_share: fraction of a head's features with rotary positions.
    """

    name: Literal["phi3"] = "phi3"
    norm_epsilon: PositiveFloat = 1e-5
    window: PositiveInt | None = None
    rotary_share: PositiveFloat = 1.0


def spec(config: Phi3Config) -> DecoderSpec:
    """Returns the architecture, with identical layers."""
    rotary_dim = int(config.head_size * config.rotary_share)
    rope = Rope(theta=config.rope_theta, scaling=config.rope_scaling, rotary_dim=rotary_dim)
    attention = config.attention(window=config.window, rope=rope)
    layer = Layer(attention=attention, feed_forward=Gated(width=config.mlp))
    return DecoderSpec(layers=(layer,) * config.layers, norm=Norm(epsilon=config.norm_epsilon))


def _names(config: Phi3Config) -> Names:
    """Returns the names of the fused projections, whose parts follow each other in torch's [d_out, d_in] layout."""
    queries = config.heads // config.kv_head_count
    parts = {"query": (0, queries), "key": (queries, 1), "value": (queries + 1, 1)}

    def fused(name: str, start: int, units: int, count: int) -> Stored:
        return Stored(name=f"{name}.weight", transposed=True, part=(start, count), units=units, part_axis=-2)

    return {
        **{f"attention/{part}/kernel": fused("self_attn.qkv_proj", *at, queries + 2) for part, at in parts.items()},
        "feed_forward/gate/kernel": fused("mlp.gate_up_proj", 0, 1, 2),
        "feed_forward/up/kernel": fused("mlp.gate_up_proj", 1, 1, 2),
    }


def _read(reader: Reader) -> dict[str, Any]:
    rope = read_rope(reader, handled=("partial_rotary_factor",), original=reader.get(_ORIGINAL, default=4096))
    return {**rope, "rotary_share": read_rotary_share(reader, 1.0)}


def _write(config: Phi3Config) -> dict[str, Any]:
    """Returns the keys in the form of transformers 4.

    Its `rope_scaling` has only the keys type, short_factor and long_factor, and the pretrained length is a key of the
    config.
    """
    rope, scaling = write_rope(config), config.rope_scaling
    if isinstance(scaling, ops.LongRopeScaling):
        original = scaling.original_max_position_embeddings
        if scaling.attention_factor is not None or not math.isclose(scaling.factor, config.max_positions / original):
            raise ConversionError(
                f"A Phi-3's config.json has no attention_factor, and derives factor from its lengths. Here factor is "
                f"{scaling.factor}, attention_factor {scaling.attention_factor}, max_positions {config.max_positions} "
                f"and original_max_position_embeddings {original}. Set factor to max_positions / "
                "original_max_position_embeddings, and no attention_factor."
            )
        kept = {name: rope["rope_scaling"][name] for name in ("short_factor", "long_factor")}
        rope |= {"rope_scaling": {"type": "longrope", **kept}, _ORIGINAL: original}
    return {**rope, "partial_rotary_factor": config.rotary_share}


_ORIGINAL = "original_max_position_embeddings"

FAMILY = DecoderFamily(
    name="phi3",
    config_class=Phi3Config,
    config_map=ConfigMap(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        settings=(
            Setting("vocab_size", ("vocab_size",), 32_064),
            Setting("embed", ("hidden_size",), 3072),
            Setting("mlp", ("intermediate_size",), 8192),
            Setting("max_positions", ("max_position_embeddings",), 4096),
            Setting("norm_epsilon", ("rms_norm_eps",), 1e-5),
            Setting("window", ("sliding_window",)),
        ),
        fixed={"hidden_act": "silu"},
        silent=("full_attn_mod", "interpolate_factor"),  # published with Phi-4-mini, but transformers reads neither
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names=_names,
    sizes=("3.8B", "7B", "14B"),
    tested=("logits", "greedy", "gradients", "conversion", "pages", "w8a8 pages"),
)
