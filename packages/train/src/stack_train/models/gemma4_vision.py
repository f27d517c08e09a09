"""Gemma 4 with images of any size: a tower whose averaged patches become tokens of the language model.

In larger models, the tokens of an image attend to each other in both directions in local layers. Outputs match
transformers' `Gemma4ForConditionalGeneration` on texts and images. Audio and videos are not supported: a checkpoint is
read without its audio tower, on which texts and images do not depend.

Source: transformers, `Gemma4ForConditionalGeneration`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8
from pydantic import Field, NonNegativeInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.models import ImageTokens
from stack_train.models import gemma4
from stack_train.models.decoder import DecoderSpec
from stack_train.models.family import DecoderFamily
from stack_train.models.gemma4 import Gemma4Settings
from stack_train.models.reader import ConfigMap, Reader
from stack_train.models.vision_decoder import VisionConfigMap, VisionDecoder
from stack_train.models.weight_map import WeightRule
from stack_train.nn.linear import Linear
from stack_train.vision.gemma4_images import (
    Gemma4Images,
    MaxImageTokens,
    check_gemma4_processor,
    read_gemma4_preprocessor,
    write_gemma4_preprocessor,
    write_gemma4_processor,
)
from stack_train.vision.gemma4_tower import (
    CHANNELS,
    Gemma4Tower,
    Gemma4TowerConfig,
    gemma4_tower_rules,
    read_gemma4_tower,
    write_gemma4_tower,
)
from stack_train.vision.grids import feature_rows
from stack_train.vision.image_tokens import count_later
from stack_train.vision.packed_images import Resampling
from stack_train.vision.packed_patches import PATCHES

__all__ = ["FAMILY", "Gemma4Vision", "Gemma4VisionConfig"]

_TEXT, _TOWER, _PROJECTOR = "model.language_model.", "model.vision_tower.", "model.embed_vision.embedding_projection."
_OMITTED = ("audio_tower", "embed_audio")


@config
class Gemma4VisionConfig(Gemma4Settings):
    """Size and numerics of a Gemma 4 with images; inherits the fields of `Gemma4Settings`.

    Attributes:
      name: selects this family.
      vision: size of the tower.
      max_image_tokens: most tokens per image.
      resample: filter that scales images.
      two_way_images: lets the tokens of an image attend to each other in both directions in local layers.
      image_token: id of the token that stands for a feature of an image; required for images.
      image_begin, image_end: ids of the tokens around an image; required for images.
      video_token, audio_token: ids of the tokens of videos and audio, or None.
      pad_token: id of the token whose embeddings tokens of images, videos and audio have; image features replace only
        the embedding at the bottom of the decoder.
    """

    name: Literal["gemma4_vision"] = "gemma4_vision"
    vision: Gemma4TowerConfig = Field(default_factory=Gemma4TowerConfig)
    max_image_tokens: MaxImageTokens = 280
    resample: Resampling = "bicubic"
    two_way_images: bool = False
    image_token: NonNegativeInt | None = None
    image_begin: NonNegativeInt | None = None
    image_end: NonNegativeInt | None = None
    video_token: NonNegativeInt | None = None
    audio_token: NonNegativeInt | None = None
    pad_token: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pad_token >= self.vocab_size:
            raise ConfigError(f"pad_token={self.pad_token} is outside of vocab_size={self.vocab_size}; change it.")

    @property
    def image_tokens_of_prompts(self) -> dict[str, int | None]:
        """See `SeesImages`."""
        return {"image_token": self.image_token, "image_begin": self.image_begin, "image_end": self.image_end}

    def image_reader(self, texts: Mapping[str, str]) -> Gemma4Images:
        """See `SeesImages`."""
        size = self.vision
        assert self.image_token is not None
        return Gemma4Images(
            texts["image_token"],
            self.image_token,
            patch=size.patch,
            merge=size.merge,
            channels=CHANNELS,
            resample=self.resample,
            before=texts["image_begin"],
            after=texts["image_end"],
            max_tokens=self.max_image_tokens,
            positions=size.positions,
            layout="whole" if self.two_way_images else "text",
        )

    def image_arrays(self, row_images: int, seq_tokens: int) -> dict[str, jax.ShapeDtypeStruct]:
        """See `SeesImages`."""
        patches = min(seq_tokens, row_images * self.max_image_tokens) * self.vision.merge**2
        return {
            "pixels": jax.ShapeDtypeStruct((patches, self.vision.patch_values), jnp.uint8),
            "grids": jax.ShapeDtypeStruct((row_images, 2), jnp.int32),
        }


class Gemma4Vision(VisionDecoder):
    """A `Decoder` with a tower and a projection for images, whose tokens have the positions of text."""

    def __init__(self, config: Gemma4VisionConfig, spec: DecoderSpec, *, key: jax.Array) -> None:
        super().__init__(config, spec, key=key)
        self.image_token, self.two_way_images = config.image_token, config.two_way_images
        self.media_tokens = (config.image_token, config.video_token, config.audio_token)
        self.pad_token, self.epsilon = config.pad_token, config.vision.norm_epsilon
        # The decoder folds in small numbers only.
        tower_key, projector_key = jax.random.split(jax.random.fold_in(key, 2**31 - 1))
        options: Any = {"std": config.initializer_std, "param_dtype": config.param_dtype}
        self.vision = Gemma4Tower(config.vision, dtype=config.dtype, remat=config.tower_remat, key=tower_key, **options)
        shape = (config.vision.embed, config.embed)
        self.projector = Linear(shape, (None, "embed"), use_bias=False, key=projector_key, **options)

    def image_features(
        self, pixels: UInt8[Array, "batch patches values"], grids: Int[Array, "batch images 2"]
    ) -> Float[Array, "batch tokens embed"]:
        """Computes the features that replace the embeddings of image tokens."""
        normed: Any = ops.norm(self.vision(pixels, grids), epsilon=self.epsilon, axes={"x": PATCHES})
        return self.projector(normed)

    def place(self, features: Any, tokens: Any, positions: Any, grids: Any, image_token: int) -> ImageTokens:
        ahead = count_later(tokens == image_token) if self.two_way_images else None
        return ImageTokens(features, feature_rows(tokens, grids, image_token), ahead)

    def embedded_tokens(self, tokens: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
        """Replaces the tokens of images, videos and audio by the padding token."""
        for token in self.media_tokens:
            tokens = tokens if token is None else jnp.where(tokens == token, self.pad_token, tokens)
        return tokens


class _ConfigMap(VisionConfigMap):
    """Mapping between the config and a `config.json` with a `text_config` and a `vision_config`."""

    def text_map(self, model_type: str | None) -> ConfigMap:
        return gemma4.FAMILY.config_map

    def tied_default(self, text: Mapping[str, Any]) -> bool:
        return True

    def read_tower(self, reader: Reader, text: Mapping[str, Any]) -> dict[str, Any]:
        return read_gemma4_tower(reader)

    def read_outer(self, reader: Reader) -> dict[str, Any]:
        # The parts of audio are not read, and the text_config repeats the last key.
        reader.get("audio_config", "boa_token_id", "eoa_token_id", "eoa_token_index", "initializer_range")
        return {
            "max_image_tokens": reader.get("vision_soft_tokens_per_image", default=280),
            "image_token": reader.get("image_token_id", default=258_880),
            "image_begin": reader.get("boi_token_id", default=255_999),
            "image_end": reader.get("eoi_token_id", default=258_882),
            "video_token": reader.get("video_token_id", default=258_884),
            "audio_token": reader.get("audio_token_id", default=258_881),
        }

    def read(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        found, text = super().read(mapping), mapping["text_config"]
        two_way = text.get("use_bidirectional_attention") == "vision"
        return {**found, "two_way_images": two_way, "pad_token": text.get("pad_token_id", 0)}

    def write(self, config: Gemma4VisionConfig) -> dict[str, Any]:
        """Returns the `config.json` of a config."""
        more = {
            "vision_soft_tokens_per_image": config.max_image_tokens,
            "image_token_id": config.image_token,
            "boi_token_id": config.image_begin,
            "eoi_token_id": config.image_end,
            "video_token_id": config.video_token,
            "audio_token_id": config.audio_token,
            "audio_config": None,
            "initializer_range": config.initializer_std,
        }
        found = self.written(config, gemma4.FAMILY.config_map, write_gemma4_tower(config.vision), more)
        found["text_config"] |= {
            "use_bidirectional_attention": "vision" if config.two_way_images else None,
            "pad_token_id": config.pad_token,
        }
        return found


@dataclass(frozen=True, kw_only=True)
class _Family(DecoderFamily):
    """The family's tensors: the language model's under a prefix, the tower's and the projection's."""

    def build(self, config: Any, *, key: jax.Array) -> Gemma4Vision:
        return Gemma4Vision(config, self.spec(config), key=key)

    def weight_rules(self, config: Any) -> tuple[WeightRule, ...]:
        text = gemma4.FAMILY.weight_rules(config)
        return (
            *(replace(rule, tensor=_nested(rule.tensor)) for rule in text),
            WeightRule("projector/kernel", f"{_PROJECTOR}weight", transposed=True),
            *gemma4_tower_rules(config.vision, parameter="vision/", tensor=_TOWER),
        )

    def redundant_tensors(self, config: Any) -> Mapping[str, str | None]:
        found = gemma4.FAMILY.redundant_tensors(config)
        return {_nested(name): None if same is None else _nested(same) for name, same in found.items()}

    def omit_parts(
        self, mapping: Mapping[str, Any], tensors: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Mapping[str, Any], tuple[str, ...]]:
        """See `OmitsParts`: leaves out the audio tower."""
        owners = {name: name.removeprefix("model.").partition(".")[0] for name in tensors}
        counts = Counter(owner for owner in owners.values() if owner in _OMITTED)
        kept = {name: each for name, each in tensors.items() if owners[name] not in _OMITTED}
        left_out = tuple(f"{owner} ({count} tensors)" for owner, count in counts.items())
        return {**mapping, "audio_config": None}, kept, left_out

    def preprocessed(self, config: Any, mapping: Mapping[str, Any]) -> Any:
        """Returns a config with the settings of a `preprocessor_config.json`.

        Raises:
          ConversionError: the model does not support a setting; the message lists every problem.
        """
        return read_gemma4_preprocessor(config, mapping)

    def preprocessor(self, config: Any) -> dict[str, Any]:
        """Returns the `preprocessor_config.json` of a config."""
        return write_gemma4_preprocessor(config)

    def processed(self, config: Any, mapping: Mapping[str, Any]) -> Any:
        """Returns the config; raises a ConversionError for unknown keys of a `processor_config.json`."""
        check_gemma4_processor(self.name, mapping)
        return config

    def processor(self, config: Any) -> dict[str, Any]:
        """Returns the `processor_config.json` of a config."""
        return write_gemma4_processor(config)


def _nested(tensor: str) -> str:
    name = tensor.removeprefix("model.")
    return tensor if name == tensor else _TEXT + name


FAMILY = _Family(
    name="gemma4_vision",
    config_class=Gemma4VisionConfig,
    config_map=_ConfigMap(architecture="Gemma4ForConditionalGeneration", model_type="gemma4"),
    spec=gemma4.spec,
    sizes=gemma4.FAMILY.sizes,
    tested=("logits", "greedy", "gradients", "conversion", "pages"),
)
