"""Mistral 3: a Mistral or a Ministral 3 with a Pixtral tower, whose projector merges squares of patches to tokens.

Outputs match transformers' `Mistral3ForConditionalGeneration`, on texts and images.

Source: Mistral AI, Mistral Small 3.1, 2025, https://mistral.ai/news/mistral-small-3-1; Ministral 3, 2026
(arXiv:2601.08584).
"""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import PositiveInt

from stack_core.abi.config import config
from stack_train.models import ministral3
from stack_train.models.pixtral import PixtralConfigMap, PixtralFamily, PixtralSettings, read_projector
from stack_train.models.reader import Reader

__all__ = ["FAMILY", "Mistral3Config"]


@config
class Mistral3Config(PixtralSettings):
    """Size and numerics of a Mistral 3; inherits the fields of `PixtralSettings`.

    Attributes:
      name: selects this family.
      merge: side, in patches, of the squares that are merged to one token.
    """

    name: Literal["mistral3"] = "mistral3"
    projector_bias: bool = False
    merge: PositiveInt = 2

    @property
    def merged_patches(self) -> int | None:
        """See `PixtralSettings`."""
        return self.merge


@dataclass(frozen=True, kw_only=True)
class _ConfigMap(PixtralConfigMap):
    """Mapping of a config with a merger."""

    def read_outer(self, reader: Reader) -> dict[str, Any]:
        reader.expect("vision_feature_layer", -1)
        return {
            **read_projector(reader, bias=False, image_token=10),
            "merge": reader.get("spatial_merge_size", default=2),
        }

    def write(self, config: Any) -> dict[str, Any]:
        """Returns the `config.json` of a config."""
        return self._written(config, {"spatial_merge_size": config.merge})


FAMILY = PixtralFamily(
    name="mistral3",
    config_class=Mistral3Config,
    config_map=_ConfigMap(architecture="Mistral3ForConditionalGeneration", model_type="mistral3"),
    text=ministral3.FAMILY,
    spec=ministral3.spec,
    sizes=("Small 3.1 24B", "Ministral 3B", "Ministral 8B", "Ministral 14B"),
    tested=("logits", "greedy", "gradients", "conversion", "pages"),
)
