"""mT5: a multilingual T5 1.1.

Outputs match transformers' `MT5ForConditionalGeneration`, which never scales the hidden states before the head.

Source: Xue et al., mT5: A Massively Multilingual Pre-trained Text-to-Text Transformer, 2021 (arXiv:2010.11934).
"""

from dataclasses import replace
from typing import Any, Literal

from pydantic import PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.models.encoder_decoder import EncoderDecoderConfig, FeedForwardKind
from stack_train.models.encoder_decoder_family import SETTINGS, EncoderDecoderFamily, read_kind, write_kind
from stack_train.models.reader import ConfigMap, Reader
from stack_train.models.t5 import SILENT

__all__ = ["FAMILY", "MULTILINGUAL_SETTINGS", "MT5Config"]


@config
class MT5Config(EncoderDecoderConfig):
    """Size and numerics of an mT5; inherits the fields of `EncoderDecoderConfig`. The defaults match mT5 small.

    Attributes:
      name: selects this family.
    """

    name: Literal["mt5"] = "mt5"
    vocab_size: PositiveInt = 250_112
    layers: PositiveInt = 8
    heads: PositiveInt = 6
    mlp: PositiveInt = 1024
    feed_forward: FeedForwardKind = "gated-gelu"
    tie_embeddings: bool = False
    scale_hidden: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_hidden:
            raise ConfigError("scale_hidden=True: an mT5 does not scale its hidden states. Set it to false, or use t5.")


def _read(reader: Reader) -> dict[str, Any]:
    return {**read_kind(reader, default="gated-gelu"), "scale_hidden": False}


_DEFAULTS = {"vocab_size": 250_112, "mlp": 1024, "layers": 8, "heads": 6}
# Keys of mT5's and UMT5's `config.json`, with the defaults of transformers.
MULTILINGUAL_SETTINGS = tuple(replace(each, default=_DEFAULTS.get(each.ours, each.default)) for each in SETTINGS)

FAMILY = EncoderDecoderFamily(
    name="mt5",
    config_class=MT5Config,
    config_map=ConfigMap(
        architecture="MT5ForConditionalGeneration",
        model_type="mt5",
        common=MULTILINGUAL_SETTINGS,
        fixed={"is_encoder_decoder": True},
        silent=SILENT,
        read_others=_read,
        write_others=write_kind,
    ),
    sizes=("small", "base", "large", "XL", "XXL"),
    tested=("logits", "greedy", "gradients", "conversion"),
)
