"""UMT5: a multilingual T5 1.1 whose layers each have their own biases of relative positions.

Outputs match transformers' `UMT5ForConditionalGeneration`.

Source: Chung et al., UniMax: Fairer and More Effective Language Sampling for Large-Scale Multilingual Pretraining, 2023
(arXiv:2304.09151).
"""

from functools import partial
from typing import Literal

from pydantic import PositiveInt

from stack_core.abi.config import config
from stack_train.models.encoder_decoder import EncoderDecoderConfig, FeedForwardKind
from stack_train.models.encoder_decoder_family import EncoderDecoderFamily, read_kind, write_kind
from stack_train.models.mt5 import MULTILINGUAL_SETTINGS
from stack_train.models.reader import ConfigMap
from stack_train.models.t5 import SILENT

__all__ = ["FAMILY", "UMT5Config"]


@config
class UMT5Config(EncoderDecoderConfig):
    """Size and numerics of a UMT5; inherits the fields of `EncoderDecoderConfig`. The defaults match UMT5 small.

    Attributes:
      name: selects this family.
    """

    name: Literal["umt5"] = "umt5"
    vocab_size: PositiveInt = 256_384
    layers: PositiveInt = 8
    heads: PositiveInt = 6
    mlp: PositiveInt = 1024
    feed_forward: FeedForwardKind = "gated-gelu"
    tie_embeddings: bool = False
    scale_hidden: bool = False


FAMILY = EncoderDecoderFamily(
    name="umt5",
    config_class=UMT5Config,
    config_map=ConfigMap(
        architecture="UMT5ForConditionalGeneration",
        model_type="umt5",
        common=MULTILINGUAL_SETTINGS,
        fixed={"is_encoder_decoder": True},
        silent=SILENT,
        read_others=partial(read_kind, default="gated-gelu"),
        write_others=write_kind,
    ),
    layer_biases=True,
    sizes=("small", "base", "XL", "XXL"),
    tested=("logits", "greedy", "gradients", "conversion"),
)
