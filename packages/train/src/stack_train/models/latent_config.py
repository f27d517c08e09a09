"""Settings, tensor names and config.json keys of decoders with latent attention, which several families share."""

import math
from typing import Any

from pydantic import PositiveInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.models.decoder import DecoderConfig
from stack_train.models.reader import Reader, Setting, read_rope, write_rope
from stack_train.models.weight_map import Names
from stack_train.nn.attention import Rope
from stack_train.nn.latent_attention import LatentAttention

__all__ = ["LATENT_NAMES", "LATENT_SETTINGS", "LatentConfig", "read_latent", "write_latent"]


@config
class LatentConfig(DecoderConfig):
    """Settings of a decoder with latent attention; inherits the fields of `DecoderConfig`.

    Attributes:
      query_rank: width of the query latent; None projects queries directly from the residual stream.
      kv_rank: width of the key-value latent.
      nope_dim: width of the part of query and key heads without rotary positions.
      rope_dim: width of the part of query and key heads with rotary positions.
      value_dim: width of value heads.
    """

    query_rank: PositiveInt | None = None
    kv_rank: PositiveInt = 128
    nope_dim: PositiveInt = 64
    rope_dim: PositiveInt = 32
    value_dim: PositiveInt = 64

    def check_heads(self) -> None:
        """Raises a ConfigError if attention does not support these sizes."""
        if self.head_dim is not None or self.kv_heads not in (None, self.heads):
            raise ConfigError(
                f"kv_heads={self.kv_heads} and head_dim={self.head_dim}: every head of latent attention has its own "
                "keys, of nope_dim + rope_dim features. Remove both settings."
            )
        if self.rope_dim % 2:
            raise ConfigError(f"rope_dim={self.rope_dim} is odd; rotary positions turn pairs of features.")

    def latent_attention(self, *, interleaved: bool) -> LatentAttention:
        """Returns latent attention of this size; see `Rope` for `interleaved`."""
        return LatentAttention(
            heads=self.heads,
            query_rank=self.query_rank,
            kv_rank=self.kv_rank,
            nope_dim=self.nope_dim,
            rope_dim=self.rope_dim,
            value_dim=self.value_dim,
            rope=Rope(theta=self.rope_theta, scaling=self.rope_scaling, interleaved=interleaved),
            scale=_scale(self),
            context_keys=self.context_keys,
        )


def _scale(config: LatentConfig) -> float:
    """Returns the scale of attention scores, with YaRN's factor. YaRN also scales cosine and sine, in `ops.rope`."""
    scale = (config.nope_dim + config.rope_dim) ** -0.5
    match config.rope_scaling:
        case ops.YarnScaling(factor=factor, mscale_all_dim=mscale) if mscale and factor > 1:
            scale *= (0.1 * mscale * math.log(factor) + 1.0) ** 2
    return scale


def read_latent(reader: Reader) -> dict[str, Any]:
    """Reads the rotary positions and the widths of heads."""
    nope_dim, rope_dim = reader.get("qk_nope_head_dim", default=128), reader.get("qk_rope_head_dim", default=64)
    reader.expect("qk_head_dim", nope_dim + rope_dim)
    reader.get("head_dim", "num_key_value_heads")  # ignored: head_dim is rope_dim or nope_dim + rope_dim
    return {**read_rope(reader), "nope_dim": nope_dim, "rope_dim": rope_dim, "kv_heads": None, "head_dim": None}


def write_latent(config: LatentConfig) -> dict[str, Any]:
    """Returns the keys read by `read_latent`."""
    return {
        **write_rope(config),
        "num_key_value_heads": config.heads,
        "qk_nope_head_dim": config.nope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "head_dim": config.rope_dim,
    }


LATENT_NAMES: Names = {
    "attention/query_down": "self_attn.q_a_proj",
    "attention/query_up": "self_attn.q_b_proj",
    "attention/query_norm": "self_attn.q_a_layernorm.weight",
    "attention/kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention/kv_norm": "self_attn.kv_a_layernorm.weight",
    "attention/kv": "self_attn.kv_b_proj",
}
"""Tensor names of latent attention."""

LATENT_SETTINGS = (
    Setting("query_rank", ("q_lora_rank",), 1536),
    Setting("kv_rank", ("kv_lora_rank",), 512),
    Setting("value_dim", ("v_head_dim",), 128),
)
"""The settings of a `LatentConfig`."""
