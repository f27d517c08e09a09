"""BERT: a bidirectional transformer with learned positions, token types, and norms after the residual sums.

Outputs match transformers' `BertModel`.

Source: Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers, 2018 (arXiv:1810.04805).
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import NonNegativeInt

from stack_core.abi.config import config
from stack_train.models.encoder import EncoderConfig, EncoderLayer, EncoderSpec
from stack_train.models.encoder_family import EncoderFamily
from stack_train.models.reader import ConfigMap, Setting
from stack_train.models.weight_map import Names
from stack_train.nn.feed_forward import Plain

__all__ = ["BERT_NAMES", "BERT_SETTINGS", "BERT_SILENT", "FAMILY", "BertConfig"]


@config
class BertConfig(EncoderConfig):
    """Size and numerics of a BERT; inherits the fields of `EncoderConfig`.

    Attributes:
      name: selects this family.
      token_types: number of token types.
      pooler: adds the layer tanh(x P + b) of a text's first hidden state, the input of classifiers.
    """

    name: Literal["bert"] = "bert"
    token_types: NonNegativeInt = 2
    pooler: bool = True


def spec(config: BertConfig) -> EncoderSpec:
    """Returns the architecture, with identical layers."""
    layer = EncoderLayer(heads=config.heads, feed_forward=Plain(width=config.mlp), norms_after=True)
    return EncoderSpec(
        layers=(layer,) * config.layers, positions=True, token_types=config.token_types, pooler=config.pooler
    )


@dataclass(frozen=True, kw_only=True)
class _Family(EncoderFamily):
    def published_name(self, tensor: str) -> str:
        """Returns the name of a tensor in newer checkpoints; the first ones have TensorFlow's names in norms."""
        return tensor.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


_LAYER = "encoder.layer.{layer}."

BERT_SETTINGS = (
    Setting("vocab_size", ("vocab_size",), 30_522),
    Setting("embed", ("hidden_size",), 768),
    Setting("layers", ("num_hidden_layers",), 12),
    Setting("heads", ("num_attention_heads",), 12),
    Setting("mlp", ("intermediate_size",), 3072),
    Setting("norm_epsilon", ("layer_norm_eps",), 1e-12),
    Setting("token_types", ("type_vocab_size",), 2),
    Setting("initializer_std", ("initializer_range",), 0.02),
)
"""Settings of a BERT and of RoBERTa, without the positions."""

BERT_SILENT = ("attention_probs_dropout_prob", "hidden_dropout_prob", "tie_word_embeddings")
"""Keys that act in training, or on the head that is not read."""

BERT_NAMES: Names = {
    "embedding": "embeddings.word_embeddings.weight",
    "positions": "embeddings.position_embeddings.weight",
    "token_types": "embeddings.token_type_embeddings.weight",
    "embedding_norm": "embeddings.LayerNorm",
    "attention/query": _LAYER + "attention.self.query",
    "attention/key": _LAYER + "attention.self.key",
    "attention/value": _LAYER + "attention.self.value",
    "attention/output": _LAYER + "attention.output.dense",
    "attention_norm": _LAYER + "attention.output.LayerNorm",
    "feed_forward/up": _LAYER + "intermediate.dense",
    "feed_forward/down": _LAYER + "output.dense",
    "feed_forward_norm": _LAYER + "output.LayerNorm",
    "pooler": "pooler.dense",
}
"""Tensor names of a BERT and of RoBERTa."""

FAMILY = _Family(
    name="bert",
    config_class=BertConfig,
    config_map=ConfigMap(
        architecture="BertModel",
        model_type="bert",
        common=(*BERT_SETTINGS, Setting("max_positions", ("max_position_embeddings",), 512)),
        fixed={"hidden_act": "gelu", "position_embedding_type": "absolute"},
        silent=BERT_SILENT,
        read_others=lambda reader: {},
        write_others=lambda config: {},
    ),
    spec=spec,
    names=BERT_NAMES,
    base_prefix="bert.",
    published_in=("BertForMaskedLM", "BertForPreTraining"),
    redundant={"embeddings.position_ids": None},
    sizes=("MiniLM-L6", "base", "large"),
    tested=("hidden states", "gradients", "conversion", "embeddings"),
)
