"""ModernBERT: an encoder with rotary positions, gated feed-forward layers, and windows in two of three layers.

Outputs match transformers' `ModernBertModel`.

Source: Warner et al., Smarter, Better, Faster, Longer, 2024 (arXiv:2412.13663).
"""

from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.models.encoder import EncoderConfig, EncoderLayer, EncoderSpec
from stack_train.models.encoder_family import EncoderFamily
from stack_train.models.reader import ConfigMap, Reader, Setting
from stack_train.models.weight_map import Stored
from stack_train.nn.attention import Rope
from stack_train.nn.feed_forward import Gated

__all__ = ["FAMILY", "ModernBertConfig"]


@config
class ModernBertConfig(EncoderConfig):
    """Size and numerics of a ModernBERT; inherits the fields of `EncoderConfig`.

    Attributes:
      name: selects this family.
      period: interval of layers that attend to all tokens, from the first layer on; layers in between have a window.
      window: number of tokens that the window spans, half of them in each direction, besides the query.
      rope_theta: base of the rotary frequencies in layers that attend to all tokens.
      local_rope_theta: base of the rotary frequencies in layers with a window.
      attention_bias: adds biases to the projections of attention.
      mlp_bias: adds biases to the projections of feed-forward layers.
      norm_bias: adds biases to norms.
    """

    name: Literal["modernbert"] = "modernbert"
    norm_epsilon: PositiveFloat = 1e-5
    max_positions: PositiveInt = 8192
    period: PositiveInt = 3
    window: PositiveInt = 128
    rope_theta: PositiveFloat = 160_000.0
    local_rope_theta: PositiveFloat = 10_000.0
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embed // self.heads % 2:
            raise ConfigError(
                f"embed={self.embed} and heads={self.heads} make heads of {self.embed // self.heads} features; rotary "
                "positions turn pairs of features."
            )


def spec(config: ModernBertConfig) -> EncoderSpec:
    """Returns the architecture; its first layer omits the attention norm because the embeddings are normalized."""

    def layer(number: int) -> EncoderLayer:
        is_local = number % config.period != 0
        return EncoderLayer(
            heads=config.heads,
            feed_forward=Gated(width=config.mlp, activation="gelu", bias=config.mlp_bias),
            attention_norm=number > 0,
            norm_bias=config.norm_bias,
            rope=Rope(theta=config.local_rope_theta if is_local else config.rope_theta),
            window=config.window // 2 if is_local else None,
            bias=config.attention_bias,
        )

    return EncoderSpec(layers=tuple(map(layer, range(config.layers))), final_norm=True)


_FULL, _LOCAL = "full_attention", "sliding_attention"
_THETAS = {_FULL: ("global_rope_theta", 160_000.0), _LOCAL: ("local_rope_theta", 10_000.0)}


def _read(reader: Reader) -> dict[str, Any]:
    layers, kinds = reader.get("num_hidden_layers", default=22), reader.get("layer_types")
    period = reader.get("global_attn_every_n_layers", default=3)
    if kinds is not None:
        # transformers 5 writes the kinds of the layers only.
        period = next((place for place, kind in enumerate(kinds) if place and kind == _FULL), max(layers, 1))
        reader.expect_layers([_FULL if layer % period == 0 else _LOCAL for layer in range(layers)])
    nested, thetas = reader.get("rope_parameters") or {}, list[float]()
    for kind, (key, default) in _THETAS.items():
        rope = nested.get(kind) or {}
        thetas.append(float(rope.get("rope_theta") or reader.get(key) or default))
        if rope.get("rope_type", "default") != "default":
            reader.problems.append(f"rope_parameters={nested!r}, not rope_type 'default'")
    return {"period": period, "rope_theta": thetas[0], "local_rope_theta": thetas[1]}


def _write(config: ModernBertConfig) -> dict[str, Any]:
    """Returns the keys of transformers 4, which transformers 5 also reads."""
    return {
        "global_attn_every_n_layers": config.period,
        "global_rope_theta": config.rope_theta,
        "local_rope_theta": config.local_rope_theta,
    }


_LAYER = "layers.{layer}."


def _part(name: str, index: int, count: int, kind: str) -> Stored:
    matrix = kind == "kernel"
    tensor = f"{_LAYER}{name}.{'weight' if matrix else 'bias'}"
    return Stored(name=tensor, transposed=matrix, part=(index, count), part_axis=-2 if matrix else -1)


_PARTS = {
    "attention/query": ("attn.Wqkv", 0, 3),
    "attention/key": ("attn.Wqkv", 1, 3),
    "attention/value": ("attn.Wqkv", 2, 3),
    "feed_forward/gate": ("mlp.Wi", 0, 2),
    "feed_forward/up": ("mlp.Wi", 1, 2),
}

FAMILY = EncoderFamily(
    name="modernbert",
    config_class=ModernBertConfig,
    config_map=ConfigMap(
        architecture="ModernBertModel",
        model_type="modernbert",
        common=(
            Setting("vocab_size", ("vocab_size",), 50_368),
            Setting("embed", ("hidden_size",), 768),
            Setting("layers", ("num_hidden_layers",), 22),
            Setting("heads", ("num_attention_heads",), 12),
            Setting("mlp", ("intermediate_size",), 1152),
            Setting("max_positions", ("max_position_embeddings",), 8192),
            Setting("norm_epsilon", ("norm_eps",), 1e-5),
            Setting("window", ("local_attention",), 128),
            Setting("attention_bias", ("attention_bias",), False),
            Setting("mlp_bias", ("mlp_bias",), False),
            Setting("norm_bias", ("norm_bias",), False),
            Setting("initializer_std", ("initializer_range",), 0.02),
        ),
        fixed={"hidden_activation": "gelu"},
        # Keys of heads, kernels and initial values, and copies of other keys.
        silent=(
            *("classifier_activation", "classifier_bias", "classifier_pooling", "decoder_bias", "tie_word_embeddings"),
            *("sparse_pred_ignore_index", "sparse_prediction", "reference_compile", "repad_logits_with_grad"),
            *("deterministic_flash_attn", "initializer_cutoff_factor", "mlp_dropout", "layer_norm_eps"),
            *("cls_token_id", "position_embedding_type"),
        ),
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names={
        "embedding": "embeddings.tok_embeddings.weight",
        "embedding_norm": "embeddings.norm",
        "attention_norm": _LAYER + "attn_norm",
        "attention/output": _LAYER + "attn.Wo",
        "feed_forward_norm": _LAYER + "mlp_norm",
        "feed_forward/down": _LAYER + "mlp.Wo",
        "norm": "final_norm",
        **{f"{place}/{kind}": _part(*at, kind) for place, at in _PARTS.items() for kind in ("kernel", "bias")},
    },
    base_prefix="model.",
    published_in=("ModernBertForMaskedLM",),
    sizes=("base", "large"),
    tested=("hidden states", "gradients", "conversion", "embeddings"),
)
