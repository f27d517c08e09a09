"""Encoder-decoder families: config and Hugging Face tensor names."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx

from stack_train.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from stack_train.models.family import Tested
from stack_train.models.reader import ConfigMap, Reader, Setting
from stack_train.models.weight_map import WeightRule

__all__ = ["SETTINGS", "EncoderDecoderFamily", "read_kind", "write_kind"]

_HEAD = "lm_head.weight"
_OUTER = {"embedding": "shared.weight", "lm_head": _HEAD}
_SELF, _CROSS = "layer.0.SelfAttention.", "layer.1.EncDecAttention."
_BIASES = _SELF + "relative_attention_bias.weight"
# {ff} is the place of the feed-forward layer, after the attention to the source if there is one.
_FEED_FORWARD = "layer.{ff}.DenseReluDense."
_NAMES = {
    "biases": _BIASES,
    "attention_norm": "layer.0.layer_norm.weight",
    "attention/query/kernel": _SELF + "q.weight",
    "attention/key/kernel": _SELF + "k.weight",
    "attention/value/kernel": _SELF + "v.weight",
    "attention/output/kernel": _SELF + "o.weight",
    "source_norm": "layer.1.layer_norm.weight",
    "source_attention/query/kernel": _CROSS + "q.weight",
    "source_attention/key/kernel": _CROSS + "k.weight",
    "source_attention/value/kernel": _CROSS + "v.weight",
    "source_attention/output/kernel": _CROSS + "o.weight",
    "feed_forward_norm": "layer.{ff}.layer_norm.weight",
    "feed_forward/gate/kernel": _FEED_FORWARD + "wi_0.weight",
    "feed_forward/up/kernel": _FEED_FORWARD + "{up}.weight",
    "feed_forward/down/kernel": _FEED_FORWARD + "wo.weight",
}

SETTINGS = (
    Setting("vocab_size", ("vocab_size",), 32_128),
    Setting("embed", ("d_model",), 512),
    Setting("layers", ("num_layers",), 6),
    Setting("decoder_layers", ("num_decoder_layers",), None, "decoder_layer_count"),
    Setting("heads", ("num_heads",), 8),
    Setting("head_dim", ("d_kv",), 64),
    Setting("mlp", ("d_ff",), 2048),
    Setting("buckets", ("relative_attention_num_buckets",), 32),
    Setting("max_distance", ("relative_attention_max_distance",), 128),
    Setting("max_positions", ("n_positions",), 512),
    Setting("norm_epsilon", ("layer_norm_epsilon",), 1e-6),
    Setting("initializer_factor", ("initializer_factor",), 1.0),
)
"""Settings of T5; a family with other defaults overrides them."""

# `dense_act_fn` and `is_gated_act`, which transformers derives from `feed_forward_proj`.
_DERIVED = {"relu": ("relu", False), "gated-gelu": ("gelu_new", True), "gated-silu": ("silu", True)}


def read_kind(reader: Reader, *, default: str) -> dict[str, Any]:
    """Reads the kind of feed-forward layers, the head and the start token.

    Args:
      default: `feed_forward_proj` that transformers assumes if the key is missing.
    """
    kind = reader.get("feed_forward_proj", default=default)
    if kind not in _DERIVED:
        reader.problems.append(f"feed_forward_proj={kind!r}, not one of {', '.join(_DERIVED)}")
    for name, value in zip(("dense_act_fn", "is_gated_act"), _DERIVED.get(kind, ()), strict=False):
        reader.expect(name, value)
    # transformers 5 saves `tie_word_embeddings` as true for every model, and whether it scales in a key of its own.
    is_tied = reader.get("tie_word_embeddings", default=True) is not False
    scales, padding = reader.get("scale_decoder_outputs", default=is_tied), reader.get("pad_token_id", default=0)
    start = reader.get("decoder_start_token_id", default=padding)
    return {
        "feed_forward": kind,
        "tie_embeddings": is_tied,
        "scale_hidden": bool(scales),
        "start_token": padding if start is None else start,
    }


def write_kind(config: EncoderDecoderConfig) -> dict[str, Any]:
    """Returns the keys that `read_kind` reads."""
    activation, is_gated = _DERIVED[config.feed_forward]
    return {
        "feed_forward_proj": config.feed_forward,
        "dense_act_fn": activation,
        "is_gated_act": is_gated,
        "tie_word_embeddings": config.tie_embeddings,
        "scale_decoder_outputs": config.scale_hidden,
        "decoder_start_token_id": config.start_token,
        # transformers fills the decoder's inputs with it, and needs it for training.
        "pad_token_id": config.start_token,
    }


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderFamily:
    """A `ConvertibleFamily` of encoder-decoders with the tensor names of T5.

    Attributes:
      name: name of the family.
      config_class: config class of the family.
      config_map: mapping between the config and `config.json`.
      layer_biases: every layer has its own biases of relative positions; otherwise the layers of a stack share them.
      sizes: names of published models, for listings.
      tested: aspects covered by the project's tests.
    """

    name: str
    config_class: type
    config_map: ConfigMap
    layer_biases: bool = False
    sizes: tuple[str, ...] = ()
    tested: tuple[Tested, ...] = ()

    def build(self, config: EncoderDecoderConfig, *, key: jax.Array) -> EncoderDecoder:
        return EncoderDecoder(config, layer_biases=self.layer_biases, key=key)

    def weight_rules(self, config: EncoderDecoderConfig) -> tuple[WeightRule, ...]:
        """Returns one rule per parameter, in the order in which a checkpoint is read and written."""
        # Only the paths are needed, so nothing is allocated.
        model = nnx.eval_shape(lambda: self.build(config, key=jax.random.key(0)))
        return tuple(_rule(path, config) for path, _ in nnx.to_flat_state(nnx.state(model)))

    def redundant_tensors(self, config: EncoderDecoderConfig) -> Mapping[str, str | None]:
        """Returns optional tensors of a checkpoint: copies of the embedding, and biases that no attention uses."""
        copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
        tied = {_HEAD: "shared.weight"} if config.tie_embeddings else {}
        unused = f"decoder.block.0.{_CROSS}relative_attention_bias.weight"
        return {**dict.fromkeys(copies, "shared.weight"), **tied, unused: None}

    def fitting(self, config: Any, tensors: Container[str]) -> Any:
        """Ties the head to the embedding unless the checkpoint stores a separate head.

        transformers 5 writes `tie_word_embeddings: true` for every model. Models that scale their hidden states are
        tied, and a head in their checkpoint is a copy of the embedding.
        """
        has_head = _HEAD in tensors
        return replace(config, tie_embeddings=not has_head or (config.tie_embeddings and config.scale_hidden))


def _rule(path: Sequence[Any], config: EncoderDecoderConfig) -> WeightRule:
    parameter = "/".join(map(str, path))
    if parameter in _OUTER:
        return WeightRule(parameter, _OUTER[parameter], transposed=parameter == "lm_head")
    side, *rest = map(str, path)
    if rest[0] != "blocks":
        # The first layer stores the biases that all layers share.
        return WeightRule(
            parameter, f"{side}." + {"biases": f"block.0.{_BIASES}"}.get(rest[0], "final_layer_norm.weight")
        )
    is_decoder = side == "decoder"
    layers = range(config.decoder_layer_count if is_decoder else config.layers)
    up = "wi_1" if config.feed_forward.startswith("gated") else "wi"
    name = _NAMES["/".join(rest[1:])].replace("{ff}", "2" if is_decoder else "1").replace("{up}", up)
    tensor = f"{side}.block.{{layer}}.{name}"
    return WeightRule(parameter, tensor, layers, transposed=parameter.endswith("kernel"))
