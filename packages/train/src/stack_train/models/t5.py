"""T5: an encoder-decoder with relative position biases, and its successors T5 1.1, Flan-T5 and UL2.

Outputs match transformers' `T5ForConditionalGeneration`. Version 1.0 has a head that is tied to the embedding; the
hidden states are scaled before it. Version 1.1 and Flan-T5 have a head of their own and gated feed-forward layers.

Source: Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, 2020
(arXiv:1910.10683); Chung et al., Scaling Instruction-Finetuned Language Models, 2022 (arXiv:2210.11416).
"""

from functools import partial
from typing import Literal

from stack_core.abi.config import config
from stack_train.models.encoder_decoder import EncoderDecoderConfig
from stack_train.models.encoder_decoder_family import SETTINGS, EncoderDecoderFamily, read_kind, write_kind
from stack_train.models.reader import ConfigMap

__all__ = ["FAMILY", "SILENT", "T5Config"]


@config
class T5Config(EncoderDecoderConfig):
    """Size and numerics of a T5; inherits the fields of `EncoderDecoderConfig`. The defaults match T5 small.

    Attributes:
      name: selects this family.
    """

    name: Literal["t5"] = "t5"


SILENT = ("is_decoder", "output_past", "scalable_attention")
"""Keys of the T5 families without an effect on the model's outputs."""

FAMILY = EncoderDecoderFamily(
    name="t5",
    config_class=T5Config,
    config_map=ConfigMap(
        architecture="T5ForConditionalGeneration",
        model_type="t5",
        common=SETTINGS,
        fixed={"is_encoder_decoder": True},
        silent=SILENT,
        read_others=partial(read_kind, default="relu"),
        write_others=write_kind,
    ),
    sizes=("small", "base", "large", "3B", "11B", "Flan small to XXL", "UL2 20B"),
    tested=("logits", "greedy", "gradients", "conversion"),
)
