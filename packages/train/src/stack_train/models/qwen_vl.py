"""Shared parts of Qwen2.5-VL and Qwen3-VL: language models with images of any size.

Tokens of images have positions in two directions. Videos are not supported.

Sources: Qwen Team, Qwen2.5-VL Technical Report, 2025 (arXiv:2502.13923), section 2; Qwen3-VL Technical Report, 2025
(arXiv:2511.21631), section 2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8
from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.models import ImageTokens
from stack_train.models.decoder import DecoderConfig, DecoderSpec
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Reader, read_rope, write_rope
from stack_train.models.vision_decoder import VisionConfigMap, VisionDecoder
from stack_train.models.weight_map import WeightRule
from stack_train.nn.feed_forward import Gated, TokenLayer
from stack_train.vision.grid_images import GridImages
from stack_train.vision.grids import place_packed_features
from stack_train.vision.preprocessor import read_preprocessor, write_preprocessor
from stack_train.vision.qwen_parts import QwenTowerSettings
from stack_train.vision.reader import MODES

__all__ = ["QwenConfigMap", "QwenVL", "QwenVLFamily", "QwenVLSettings", "read_sections", "write_sections"]


@config
class QwenVLSettings(DecoderConfig):
    """Settings of a Qwen-VL; inherits the fields of `DecoderConfig`.

    Attributes:
      rope_sections: numbers of pairs of features of a head that turn by time, row and column.
      vision: size of the tower.
      image_token: id of the token that stands for a feature of an image; required for images.
      min_pixels: least number of pixels to which an image is scaled.
      max_pixels: most pixels to which an image is scaled.
    """

    rope_sections: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt] = (12, 10, 10)
    vision: QwenTowerSettings = Field(default_factory=QwenTowerSettings)
    image_token: NonNegativeInt | None = None
    min_pixels: PositiveInt = 65_536
    max_pixels: PositiveInt = 16_777_216

    def __post_init__(self) -> None:
        super().__post_init__()
        if 2 * sum(self.rope_sections) != self.head_size:
            raise ConfigError(
                f"rope_sections={list(self.rope_sections)} have {sum(self.rope_sections)} pairs; a head of "
                f"{self.head_size} features has {self.head_size // 2}. Change rope_sections or head_dim."
            )
        unit = (self.vision.patch * self.vision.merge) ** 2
        if not unit <= self.min_pixels <= self.max_pixels:
            raise ConfigError(
                f"min_pixels={self.min_pixels} and max_pixels={self.max_pixels}: expected {unit} (the pixels of a "
                "token) <= min_pixels <= max_pixels."
            )

    def feed_forward(self, layer: int) -> TokenLayer:
        """Returns the specification of a feed-forward layer."""
        return Gated(width=self.mlp)

    @property
    def image_tokens_of_prompts(self) -> dict[str, int | None]:
        """See `SeesImages`."""
        return {"image_token": self.image_token}

    def image_reader(self, texts: Mapping[str, str]) -> GridImages | None:
        """See `SeesImages`."""
        size = self.vision
        if size.channels not in MODES:
            return None
        assert self.image_token is not None
        bounds = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        sizes = {"patch": size.patch, "merge": size.merge, "channels": size.channels}
        return GridImages(texts["image_token"], self.image_token, **sizes, **bounds)

    def image_arrays(self, row_images: int, seq_tokens: int) -> dict[str, jax.ShapeDtypeStruct]:
        """See `SeesImages`."""
        size = self.vision
        image_tokens = self.max_pixels // (size.patch * size.merge) ** 2
        patches = min(seq_tokens, row_images * image_tokens) * size.merge**2
        return {
            "pixels": jax.ShapeDtypeStruct((patches, size.patch_values), jnp.uint8),
            "grids": jax.ShapeDtypeStruct((row_images, 2), jnp.int32),
        }


class QwenVL(VisionDecoder):
    """A `Decoder` with a tower for images, whose tokens have positions in two directions.

    With `pixels`, positions are the places of tokens in their documents. In later calls with the same cache, they are
    the positions after the images, which `place_packed_features` computes.

    Args:
      config, spec, key: see `Decoder`.
      tower: class of the tower.
    """

    def __init__(self, config: QwenVLSettings, spec: DecoderSpec, tower: Any, *, key: jax.Array) -> None:
        super().__init__(config, spec, key=key)
        self.image_token = config.image_token
        self.vision = tower(
            config.vision,
            config.embed,
            std=config.initializer_std,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            remat=config.tower_remat,
            # The decoder folds in small numbers only.
            key=jax.random.fold_in(key, 2**31 - 1),
        )

    def image_features(
        self, pixels: UInt8[Array, "batch patches values"], grids: Int[Array, "batch images 2"]
    ) -> Float[Array, "batch tokens features"]:
        """Computes the features for the embeddings of image tokens, and for the outputs of the first layers."""
        return self.vision(pixels, grids)

    def place(self, features: Any, tokens: Any, positions: Any, grids: Any, image_token: int) -> ImageTokens:
        return place_packed_features(features, tokens, positions, grids, image_token)


@dataclass(frozen=True, kw_only=True)
class QwenConfigMap(VisionConfigMap):
    """Mapping between the config and a `config.json` with a `text_config` and a `vision_config`.

    Attributes:
      text: mapping of the `text_config`.
      tower_reader: function of the reader of the `vision_config` and the decoder's width, to the fields of the tower.
      tower_writer: function of the tower's config and the decoder's width, to the `vision_config`.
    """

    text: ConfigMap
    tower_reader: Callable[[Reader, int], dict[str, Any]]
    tower_writer: Callable[[Any, int], dict[str, Any]]

    def text_map(self, model_type: str | None) -> ConfigMap:
        return self.text

    def read_tower(self, reader: Reader, text: Mapping[str, Any]) -> dict[str, Any]:
        return self.tower_reader(reader, text["embed"])

    def read_outer(self, reader: Reader) -> dict[str, Any]:
        # Templates write the tokens around an image, and videos are not supported.
        reader.get("vision_start_token_id", "vision_end_token_id", "vision_token_id", "video_token_id")
        return {"image_token": reader.get("image_token_id", default=151_655)}

    def write(self, config: Any) -> dict[str, Any]:
        """Returns the `config.json` of a config."""
        vision = {"model_type": f"{self.model_type}_vision", **self.tower_writer(config.vision, config.embed)}
        token = {} if config.image_token is None else {"image_token_id": config.image_token}
        return self.written(config, self.text, vision, token)


@dataclass(frozen=True, kw_only=True)
class QwenVLFamily(DecoderFamily):
    """A family's tensors: the language model's under a prefix, and the tower's.

    Attributes:
      text: family of the language model, for the names of its tensors.
      tower: class of the tower.
      tower_rules: function of its config to the locations of its parameters, with the prefixes of their names.
      text_prefix: prefix of the language model's tensors, except its head.
      tower_prefix: prefix of the tower's tensors.
      processor_class: class of transformers' processor.
    """

    text: DecoderFamily
    tower: Any
    tower_rules: Callable[..., list[WeightRule]]
    text_prefix: str = "model.language_model."
    tower_prefix: str = "model.visual."
    processor_class: str

    def build(self, config: Any, *, key: jax.Array) -> QwenVL:
        return QwenVL(config, self.spec(config), self.tower, key=key)

    def weight_rules(self, config: Any) -> tuple[WeightRule, ...]:
        return (
            *(self._outer_rule(rule) for rule in self.text.weight_rules(config)),
            *self.tower_rules(config.vision, parameter="vision/", tensor=self.tower_prefix),
        )

    def redundant_tensors(self, config: Any) -> Mapping[str, str | None]:
        found = self.text.redundant_tensors(config)
        return {self._outer(name): None if same is None else self._outer(same) for name, same in found.items()}

    def preprocessed(self, config: Any, mapping: Mapping[str, Any]) -> Any:
        """Returns a config with the settings of a `preprocessor_config.json`.

        Raises:
          ConversionError: the model does not support a setting; the message lists every problem.
        """
        return read_preprocessor(config, mapping)

    def preprocessor(self, config: Any) -> dict[str, Any]:
        """Returns the `preprocessor_config.json` of a config."""
        return write_preprocessor(config, self.processor_class)

    def _outer_rule(self, rule: WeightRule) -> WeightRule:
        rule = replace(rule, tensor=self._outer(rule.tensor))
        if ".experts." not in rule.tensor:
            return rule
        # transformers publishes [experts, d_in, d_out], and saves new models as [experts, d_out, d_in].
        return replace(rule, fused=replace(rule, transposed=True, part_axis=-2))

    def _outer(self, tensor: str) -> str:
        name = tensor.removeprefix("model.")
        return tensor if name == tensor else self.text_prefix + name


def read_sections(reader: Reader, *, theta: float, default: tuple[int, int, int]) -> dict[str, Any]:
    """Reads the rotary positions.

    Args:
      theta, default: values that transformers assumes for the base and the sections.
    """
    rope = reader.get("rope_parameters", "rope_scaling") or {}
    handled = ("mrope_section", "mrope_interleaved")
    found = read_rope(reader, theta=theta, handled=handled, unscaled=("mrope",))
    return {**found, "rope_sections": tuple(rope.get("mrope_section", default))}


def write_sections(config: Any, **more: Any) -> dict[str, Any]:
    """Returns the keys read by `read_sections`, with further keys of the rotary positions."""
    rope = write_rope(config)
    kind = rope["rope_scaling"] or {"rope_type": "default"}
    return {**rope, "rope_scaling": {**kind, **more, "mrope_section": list(config.rope_sections)}}
