"""XLM-RoBERTa: a RoBERTa for a hundred languages, and the architecture of many embedding models.

Outputs match transformers' `XLMRobertaModel`.

Source: Conneau et al., Unsupervised Cross-lingual Representation Learning at Scale, 2019 (arXiv:1911.02116).
"""

from typing import Literal

from stack_core.abi.config import config
from stack_train.models.roberta import RobertaSizes, roberta_family

__all__ = ["FAMILY", "XlmRobertaConfig"]


@config
class XlmRobertaConfig(RobertaSizes):
    """Size and numerics of an XLM-RoBERTa; inherits the fields of `RobertaSizes`.

    Attributes:
      name: selects this family.
    """

    name: Literal["xlm_roberta"] = "xlm_roberta"


FAMILY = roberta_family(
    XlmRobertaConfig, prefix="XLMRoberta", model_type="xlm-roberta", vocab_size=30_522, sizes=("base", "large")
)
