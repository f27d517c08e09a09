"""Qwen3-VL: a Qwen3 with images of any size, whose tokens have positions in two directions.

Features of earlier layers of the tower are added to the outputs of the decoder's first layers (DeepStack). Outputs
match transformers' `Qwen3VLForConditionalGeneration` on texts and images; videos are not supported.

Source: Qwen Team, Qwen3-VL Technical Report, 2025 (arXiv:2511.21631), section 2.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8
from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.models import ImageTokens
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope, write_rope
from stack_train.models.vision_decoder import VisionConfigMap, VisionDecoder
from stack_train.models.weight_map import WeightRule
from stack_train.nn.axial_rope import InterleavedRope
from stack_train.nn.feed_forward import Gated, TokenLayer
from stack_train.nn.residual import Norm
from stack_train.vision.grid_images import GridImages
from stack_train.vision.grids import place_packed_features
from stack_train.vision.preprocessor import read_preprocessor, write_preprocessor
from stack_train.vision.qwen_tower import (
    QwenTower,
    QwenTowerConfig,
    qwen_tower_rules,
    read_qwen_tower,
    write_qwen_tower,
)
from stack_train.vision.reader import MODES

__all__ = ["FAMILY", "Qwen3VL", "Qwen3VLConfig", "Qwen3VLSettings", "QwenConfigMap", "VisionFamily", "spec"]

_TOWER = "model.visual."


@config
class Qwen3VLSettings(DecoderConfig):
    """Settings of a Qwen3-VL, dense or not; inherits the fields of `DecoderConfig`.

    Attributes:
      attention_bias: adds biases to the projections of attention.
      rope_sections: numbers of pairs of features of a head that turn by time, row and column.
      vision: size of the tower.
      image_token: id of the token that stands for a feature of an image; required for images.
      min_pixels: least number of pixels to which an image is scaled.
      max_pixels: most pixels to which an image is scaled.
    """

    attention_bias: bool = False
    rope_sections: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt] = (12, 10, 10)
    vision: QwenTowerConfig = Field(default_factory=QwenTowerConfig)
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
        if len(self.vision.deepstack) > self.layers:
            raise ConfigError(
                f"vision.deepstack={list(self.vision.deepstack)} has features for {len(self.vision.deepstack)} layers, "
                f"and the decoder layers={self.layers}. Take out some."
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


@config
class Qwen3VLConfig(Qwen3VLSettings):
    """Size and numerics of a Qwen3-VL; inherits the fields of `Qwen3VLSettings`.

    Attributes:
      name: selects this family.
    """

    name: Literal["qwen3_vl"] = "qwen3_vl"


def spec(config: Any) -> DecoderSpec:
    """Returns the architecture; the first layers add features of images to their outputs."""
    bias = config.attention_bias
    rope = InterleavedRope(theta=config.rope_theta, scaling=config.rope_scaling, sections=config.rope_sections)
    attention = config.attention(head_norms=True, bias=bias, output_bias=bias, rope=rope)
    deep = len(config.vision.deepstack)
    layers = [
        Layer(attention=attention, feed_forward=config.feed_forward(number), adds_features=number < deep)
        for number in range(config.layers)
    ]
    return DecoderSpec(layers=tuple(layers), norm=Norm(epsilon=config.norm_epsilon))


class Qwen3VL(VisionDecoder):
    """A `Decoder` with a tower for images, whose tokens have positions in two directions.

    With `pixels`, positions are the places of tokens in their documents. In later calls with the same cache, they are
    the positions after the images, which `place_packed_features` computes.
    """

    def __init__(self, config: Qwen3VLSettings, spec: DecoderSpec, *, key: jax.Array) -> None:
        super().__init__(config, spec, key=key)
        self.image_token = config.image_token
        self.vision = QwenTower(
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
    """

    text: ConfigMap

    def text_map(self, model_type: str | None) -> ConfigMap:
        return self.text

    def read_tower(self, reader: Reader, text: Mapping[str, Any]) -> dict[str, Any]:
        return read_qwen_tower(reader, text["embed"])

    def read_outer(self, reader: Reader) -> dict[str, Any]:
        # Templates write the tokens around an image, and videos are not supported.
        reader.get("vision_start_token_id", "vision_end_token_id", "video_token_id")
        return {"image_token": reader.get("image_token_id", default=151_655)}

    def write(self, config: Any) -> dict[str, Any]:
        """Returns the `config.json` of a config."""
        vision = {"model_type": f"{self.model_type}_vision", **write_qwen_tower(config.vision, config.embed)}
        token = {} if config.image_token is None else {"image_token_id": config.image_token}
        return self.written(config, self.text, vision, token)


@dataclass(frozen=True, kw_only=True)
class VisionFamily(DecoderFamily):
    """A family's tensors: the language model's under a prefix, and the tower's.

    Attributes:
      text: family of the language model, for the names of its tensors.
    """

    text: DecoderFamily

    def build(self, config: Any, *, key: jax.Array) -> Qwen3VL:
        return Qwen3VL(config, self.spec(config), key=key)

    def weight_rules(self, config: Any) -> tuple[WeightRule, ...]:
        return (
            *(_outer_rule(rule) for rule in self.text.weight_rules(config)),
            *qwen_tower_rules(config.vision, parameter="vision/", tensor=_TOWER),
        )

    def redundant_tensors(self, config: Any) -> Mapping[str, str | None]:
        found = self.text.redundant_tensors(config)
        return {_outer(name): None if same is None else _outer(same) for name, same in found.items()}

    def preprocessed(self, config: Any, mapping: Mapping[str, Any]) -> Any:
        """Returns a config with the settings of a `preprocessor_config.json`.

        Raises:
          ConversionError: the model does not support a setting; the message lists every problem.
        """
        return read_preprocessor(config, mapping)

    def preprocessor(self, config: Any) -> dict[str, Any]:
        """Returns the `preprocessor_config.json` of a config."""
        return write_preprocessor(config)


def _outer_rule(rule: WeightRule) -> WeightRule:
    rule = replace(rule, tensor=_outer(rule.tensor))
    if ".experts." not in rule.tensor:
        return rule
    # transformers publishes [experts, d_in, d_out], and saves new models as [experts, d_out, d_in].
    return replace(rule, fused=replace(rule, transposed=True, part_axis=-2))


def _outer(tensor: str) -> str:
    name = tensor.removeprefix("model.")
    return tensor if name == tensor else f"model.language_model.{name}"


def read_sections(reader: Reader) -> dict[str, Any]:
    """Reads the rotary positions, whose axes always alternate."""
    keys = ("mrope_section", "mrope_interleaved")
    rope = reader.get("rope_parameters", "rope_scaling") or {}
    if not rope.get("mrope_interleaved", True):
        reader.problems.append("mrope_interleaved=False, not True")
    found = read_rope(reader, theta=500_000.0, handled=keys)
    return {**found, "rope_sections": tuple(rope.get("mrope_section", (24, 20, 20)))}


def write_sections(config: Any) -> dict[str, Any]:
    """Returns the keys read by `read_sections`."""
    rope = write_rope(config)
    kind = rope["rope_scaling"] or {"rope_type": "default"}
    return {
        **rope,
        "rope_scaling": {**kind, "mrope_interleaved": True, "mrope_section": list(config.rope_sections)},
    }


def vision_family(
    name: str,
    architecture: str,
    config_class: type,
    settings: tuple[Setting, ...],
    *,
    fixed: Mapping[str, Any],
    **options: Any,
) -> VisionFamily:
    """Returns a family from the settings of its `text_config`; `options` are further fields of the family."""
    text = ConfigMap(
        architecture=architecture,
        model_type=f"{name}_text",
        settings=(
            Setting("vocab_size", ("vocab_size",), 151_936),
            Setting("max_positions", ("max_position_embeddings",), 128_000),
            Setting("attention_bias", ("attention_bias",), False),
            *settings,
        ),
        fixed={"hidden_act": "silu", **fixed},
        read_others=read_sections,
        write_others=write_sections,
    )
    shared: dict[str, Any] = {"name": name, "config_class": config_class, "spec": spec, **options}
    outer = QwenConfigMap(architecture=architecture, model_type=name, text=text)
    return VisionFamily(config_map=outer, text=DecoderFamily(config_map=text, **shared), **shared)


FAMILY = vision_family(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    Qwen3VLConfig,
    (
        Setting("mlp", ("intermediate_size",), 22_016),
        Setting("kv_heads", ("num_key_value_heads",), 32, "kv_head_count"),
        Setting("head_dim", ("head_dim",), 128, "head_size"),
    ),
    fixed={},
    sizes=("2B", "4B", "8B", "32B"),
    tested=("logits", "greedy", "gradients", "conversion", "pages"),
)
