"""RoBERTa: a BERT whose positions begin after the padding token's id.

Outputs match transformers' `RobertaModel`.

Source: Liu et al., RoBERTa: A Robustly Optimized BERT Pretraining Approach, 2019 (arXiv:1907.11692).
"""

from typing import Any, Literal

from pydantic import NonNegativeInt

from stack_core.abi.config import config
from stack_train.models.bert import BERT_NAMES, BERT_SETTINGS, BERT_SILENT
from stack_train.models.encoder import EncoderConfig, EncoderLayer, EncoderSpec
from stack_train.models.encoder_family import EncoderFamily
from stack_train.models.reader import ConfigMap, Reader, Setting
from stack_train.nn.feed_forward import Plain

__all__ = ["FAMILY", "RobertaConfig", "RobertaSizes", "roberta_family", "spec"]


@config
class RobertaSizes(EncoderConfig):
    """Settings of a RoBERTa; inherits the fields of `EncoderConfig`.

    Attributes:
      token_types: number of token types.
      pooler: adds the layer tanh(x P + b) of a text's first hidden state, the input of classifiers.
      padding_id: id of the padding token. The embedding of position p is row padding_id + 1 + p of its table.
    """

    token_types: NonNegativeInt = 1
    pooler: bool = True
    padding_id: NonNegativeInt = 1


@config
class RobertaConfig(RobertaSizes):
    """Size and numerics of a RoBERTa; inherits the fields of `RobertaSizes`.

    Attributes:
      name: selects this family.
    """

    name: Literal["roberta"] = "roberta"


def spec(config: RobertaSizes) -> EncoderSpec:
    """Returns the architecture, with identical layers."""
    layer = EncoderLayer(heads=config.heads, feed_forward=Plain(width=config.mlp), norms_after=True)
    return EncoderSpec(
        layers=(layer,) * config.layers,
        positions=True,
        first_position=config.padding_id + 1,
        token_types=config.token_types,
        pooler=config.pooler,
    )


def _read(reader: Reader) -> dict[str, Any]:
    padding = reader.get("pad_token_id", default=1)
    rows = reader.get("max_position_embeddings", default=512)
    if padding is None:
        reader.problems.append("pad_token_id=None, not a token id, after which the positions begin")
        return {}
    return {"padding_id": padding, "max_positions": rows - padding - 1}


def _write(config: RobertaSizes) -> dict[str, Any]:
    rows = config.max_positions + config.padding_id + 1
    return {"pad_token_id": config.padding_id, "max_position_embeddings": rows}


def roberta_family(
    config_class: type, *, prefix: str, model_type: str, vocab_size: int, sizes: tuple[str, ...]
) -> EncoderFamily:
    """Returns a family with this architecture.

    Args:
      config_class: config class of the family, with its name.
      prefix: prefix of the architectures in `config.json`.
      model_type: `model_type` in `config.json`.
      vocab_size: default of transformers for `vocab_size`.
      sizes: names of published models, for listings.
    """
    return EncoderFamily(
        name=config_class.name,
        config_class=config_class,
        config_map=ConfigMap(
            architecture=f"{prefix}Model",
            model_type=model_type,
            common=BERT_SETTINGS,
            settings=(Setting("vocab_size", ("vocab_size",), vocab_size),),
            fixed={"hidden_act": "gelu", "position_embedding_type": "absolute"},
            silent=BERT_SILENT,
            read_others=_read,
            write_others=_write,
        ),
        spec=spec,
        names=BERT_NAMES,
        base_prefix="roberta.",
        published_in=(f"{prefix}ForMaskedLM",),
        redundant={"embeddings.position_ids": None},
        sizes=sizes,
        tested=("hidden states", "gradients", "conversion", "embeddings"),
    )


FAMILY = roberta_family(
    RobertaConfig, prefix="Roberta", model_type="roberta", vocab_size=50_265, sizes=("distilled", "base", "large")
)
