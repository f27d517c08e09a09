"""Pixtral: a Mistral with images of any size, whose rows of tokens end with a token of text.

Outputs match transformers' `LlavaForConditionalGeneration` with a Pixtral tower, on texts and images.

Source: Agrawal et al., Pixtral 12B, 2024 (arXiv:2410.07073), section 2.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8
from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConversionError
from stack_core.abi.models import ImageTokens
from stack_train.models import llama, ministral3, mistral
from stack_train.models.decoder import DecoderSpec
from stack_train.models.ministral3 import Ministral3Settings
from stack_train.models.reader import ConfigMap, Reader
from stack_train.models.vision_decoder import NestedFamily, VisionConfigMap, VisionDecoder
from stack_train.models.weight_map import WeightRule
from stack_train.nn.residual import Norm
from stack_train.vision.grids import feature_rows
from stack_train.vision.packed_images import Resampling
from stack_train.vision.pixtral_images import (
    PixtralImages,
    read_pixtral_preprocessor,
    read_pixtral_processor,
    write_pixtral_preprocessor,
    write_pixtral_processor,
)
from stack_train.vision.pixtral_projector import PixtralProjector, projector_rules
from stack_train.vision.pixtral_tower import (
    PixtralTower,
    PixtralTowerConfig,
    pixtral_tower_rules,
    read_pixtral_tower,
    write_pixtral_tower,
)
from stack_train.vision.reader import MODES

__all__ = ["FAMILY", "Pixtral", "PixtralConfig", "PixtralConfigMap", "PixtralFamily", "PixtralSettings"]

_TOWER, _PROJECTOR = "vision_tower.", "multi_modal_projector."


@config
class PixtralSettings(Ministral3Settings):
    """Settings of a Mistral with a Pixtral tower; inherits the fields of `Ministral3Settings`.

    Attributes:
      vision: size of the tower.
      projector_bias: adds biases to the projections of patches to tokens.
      image_token: id of the token that stands for a feature of an image; required for images.
      image_break: text of the token after each row of image tokens but the last.
      image_end: text of the token after the last row of an image.
      longest_edge: side, in pixels, of the square to which larger images are scaled down.
      resample: filter that scales images.
    """

    vision: PixtralTowerConfig = Field(default_factory=PixtralTowerConfig)
    projector_bias: bool = True
    image_token: NonNegativeInt | None = None
    image_break: str = "[IMG_BREAK]"
    image_end: str = "[IMG_END]"
    longest_edge: PositiveInt = 1024
    resample: Resampling = "bicubic"

    @property
    def merged_patches(self) -> int | None:
        """Side, in patches, of the squares that the projector merges; None without a merger."""
        return None

    @property
    def image_tokens_of_prompts(self) -> dict[str, int | None]:
        """See `SeesImages`."""
        return {"image_token": self.image_token}

    def image_reader(self, texts: Mapping[str, str]) -> PixtralImages | None:
        """See `SeesImages`."""
        size = self.vision
        if size.channels not in MODES:
            return None
        assert self.image_token is not None
        return PixtralImages(
            texts["image_token"],
            self.image_token,
            patch=size.patch,
            merge=self.merged_patches or 1,
            channels=size.channels,
            resample=self.resample,
            image_break=self.image_break,
            image_end=self.image_end,
            longest_edge=self.longest_edge,
        )

    def image_arrays(self, row_images: int, seq_tokens: int) -> dict[str, jax.ShapeDtypeStruct]:
        """See `SeesImages`."""
        size, merge = self.vision, self.merged_patches or 1
        image_tokens = math.ceil(self.longest_edge / (size.patch * merge)) ** 2
        patches = min(seq_tokens, row_images * image_tokens) * merge**2
        return {
            "pixels": jax.ShapeDtypeStruct((patches, size.channels * size.patch**2), jnp.uint8),
            "grids": jax.ShapeDtypeStruct((row_images, 2), jnp.int32),
        }


@config
class PixtralConfig(PixtralSettings):
    """Size and numerics of a Pixtral; inherits the fields of `PixtralSettings`.

    Attributes:
      name: selects this family.
    """

    name: Literal["pixtral"] = "pixtral"


class Pixtral(VisionDecoder):
    """A `Decoder` with a tower and a projector for images, whose tokens have the positions of text."""

    def __init__(self, config: PixtralSettings, spec: DecoderSpec, *, key: jax.Array) -> None:
        super().__init__(config, spec, key=key)
        self.image_token, self.merged_patches = config.image_token, config.merged_patches
        # The decoder folds in small numbers only.
        tower_key, projector_key = jax.random.split(jax.random.fold_in(key, 2**31 - 1))
        options: Any = {"std": config.initializer_std, "param_dtype": config.param_dtype}
        self.vision = PixtralTower(
            config.vision, dtype=config.dtype, remat=config.tower_remat, key=tower_key, **options
        )
        self.projector = PixtralProjector(
            config.vision.embed,
            config.embed,
            merge=config.merged_patches,
            bias=config.projector_bias,
            norm=Norm(epsilon=config.norm_epsilon),
            key=projector_key,
            **options,
        )

    def image_features(
        self, pixels: UInt8[Array, "batch patches values"], grids: Int[Array, "batch images 2"]
    ) -> Float[Array, "batch tokens embed"]:
        """Computes the features that replace the embeddings of image tokens."""
        return self.projector(self.vision(pixels, grids, merge=self.merged_patches or 1))

    def place(self, features: Any, tokens: Any, positions: Any, grids: Any, image_token: int) -> ImageTokens:
        return ImageTokens(features, feature_rows(tokens, grids, image_token))


@dataclass(frozen=True, kw_only=True)
class PixtralConfigMap(VisionConfigMap):
    """Mapping of a language model with a Pixtral tower, whose language model is a Mistral, a Ministral 3 or a Llama."""

    def text_map(self, model_type: str | None) -> ConfigMap:
        maps = {each.config_map.model_type: each.config_map for each in (mistral.FAMILY, ministral3.FAMILY)}
        # A Llama without biases is a Mistral whose queries attend to all tokens.
        maps["llama"] = _Plain(**vars(llama.FAMILY.config_map))
        if model_type not in maps:
            raise ConversionError(
                f"{self.architecture}: text_config has model_type={model_type!r}; expected one of {', '.join(maps)}. "
                "Use a checkpoint with such a language model."
            )
        return maps[model_type]

    def tied_default(self, text: Mapping[str, Any]) -> bool:
        return bool(text.get("tie_word_embeddings"))

    def read_tower(self, reader: Reader, text: Mapping[str, Any]) -> dict[str, Any]:
        return read_pixtral_tower(reader)

    def read_outer(self, reader: Reader) -> dict[str, Any]:
        reader.expect("vision_feature_select_strategy", "full")
        # The default of transformers selects the layer before the last.
        if (layer := reader.get("vision_feature_layer", default=-2)) != -1:
            reader.problems.append(f"vision_feature_layer={layer}, not -1")
        reader.get("image_seq_length", "ignore_index")
        return read_projector(reader, bias=True, image_token=32_000)

    def write(self, config: Any) -> dict[str, Any]:
        """Returns the `config.json` of a config."""
        # transformers before 5 requires the number of tokens of an image, which is not used.
        more = {"vision_feature_select_strategy": "full", "image_seq_length": 1}
        return self._written(config, more)

    def _written(self, config: PixtralSettings, more: Mapping[str, Any]) -> dict[str, Any]:
        text = ministral3.FAMILY if config.temperature_rate else mistral.FAMILY
        token = {} if config.image_token is None else {"image_token_index": config.image_token}
        keys = {
            **token,
            "multimodal_projector_bias": config.projector_bias,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -1,
            **more,
        }
        vision = write_pixtral_tower(config.vision, config.longest_edge)
        return self.written(config, text.config_map, vision, keys)


class _Plain(ConfigMap):
    """Mapping of a Llama without biases to the fields of a Mistral."""

    def read(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        found = super().read(mapping)
        if biases := [name for name in ("attention_bias", "mlp_bias") if found.pop(name)]:
            raise ConversionError(f"text_config of a Llama has {' and '.join(biases)}; expected no biases.")
        return found


def read_projector(reader: Reader, *, bias: bool, image_token: int) -> dict[str, Any]:
    """Reads the fields of the projector and the image token.

    Args:
      bias, image_token: values that transformers assumes if the keys are missing.
    """
    reader.expect("projector_hidden_act", "gelu")
    return {
        "projector_bias": reader.get("multimodal_projector_bias", default=bias),
        "image_token": reader.get("image_token_index", "image_token_id", default=image_token),
    }


@dataclass(frozen=True, kw_only=True)
class PixtralFamily(NestedFamily):
    """A family's tensors: the language model's, the tower's and the projector's."""

    def build(self, config: Any, *, key: jax.Array) -> Pixtral:
        return Pixtral(config, self.spec(config), key=key)

    def weight_rules(self, config: Any) -> tuple[WeightRule, ...]:
        merges, bias = config.merged_patches is not None, config.projector_bias
        return (
            *self.text_rules(config),
            *pixtral_tower_rules(config.vision, parameter="vision/", tensor=_TOWER),
            *projector_rules(merges=merges, bias=bias, parameter="projector/", tensor=_PROJECTOR),
        )

    def preprocessed(self, config: Any, mapping: Mapping[str, Any]) -> Any:
        """Returns a config with the settings of a `preprocessor_config.json`.

        Raises:
          ConversionError: the model does not support a setting; the message lists every problem.
        """
        return read_pixtral_preprocessor(config, mapping)

    def preprocessor(self, config: Any) -> dict[str, Any]:
        """Returns the `preprocessor_config.json` of a config."""
        return write_pixtral_preprocessor(config)

    def processed(self, config: Any, mapping: Mapping[str, Any]) -> Any:
        """Returns a config with the settings of a `processor_config.json`.

        Raises:
          ConversionError: the model does not support a setting, or a key is unknown; the message lists every problem.
        """
        return read_pixtral_processor(config, mapping)

    def processor(self, config: Any) -> dict[str, Any]:
        """Returns the `processor_config.json` of a config."""
        return write_pixtral_processor(config)


FAMILY = PixtralFamily(
    name="pixtral",
    config_class=PixtralConfig,
    config_map=PixtralConfigMap(architecture="LlavaForConditionalGeneration", model_type="llava"),
    text=ministral3.FAMILY,
    spec=ministral3.spec,
    sizes=("12B",),
    tested=("logits", "greedy", "gradients", "conversion", "pages"),
)
