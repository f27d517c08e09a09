"""Gemma 3 with images: a SigLIP tower whose pooled patches become tokens of the language model.

The tokens of an image attend to each other in both directions. Outputs match transformers'
`Gemma3ForConditionalGeneration`.

Source: Gemma Team, Gemma 3 Technical Report, 2025 (arXiv:2503.19786), section 2.1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt8
from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.caches import KVCache
from stack_core.abi.config import config
from stack_core.abi.errors import ArgumentError, ConfigError
from stack_core.abi.models import ImageTokens, Outputs
from stack_train.models import gemma3
from stack_train.models.decoder import Decoder, DecoderSpec
from stack_train.models.gemma3 import Gemma3Settings
from stack_train.models.reader import ConfigMap, Reader
from stack_train.models.vision_decoder import NestedFamily, VisionConfigMap
from stack_train.models.weight_map import WeightRule
from stack_train.nn.linear import Linear
from stack_train.nn.residual import Norm
from stack_train.vision.image_tokens import place_features, select_image_tokens
from stack_train.vision.preprocessor import read_square_preprocessor, write_square_preprocessor
from stack_train.vision.reader import MODES
from stack_train.vision.siglip import Siglip, SiglipConfig, read_siglip, siglip_rules, write_siglip
from stack_train.vision.square_images import SquareImages

__all__ = ["FAMILY", "Gemma3Vision", "Gemma3VisionConfig"]

_TOWER, _PROJECTOR = "vision_tower.vision_model.", "multi_modal_projector."


@config
class Gemma3VisionConfig(Gemma3Settings):
    """Size and numerics of a Gemma 3 with images; inherits the fields of `Gemma3Settings`.

    Attributes:
      name: selects this family.
      vision: size of the tower.
      image_tokens: number of tokens per image, a square number; patches are averaged in squares.
      image_token: id of the token that stands for the features of an image; required for images.
      image_begin, image_end: ids of the tokens around an image; required for images.
    """

    name: Literal["gemma3_vision"] = "gemma3_vision"
    vision: SiglipConfig = Field(default_factory=SiglipConfig)
    image_tokens: PositiveInt = 16
    image_token: NonNegativeInt | None = None
    image_begin: NonNegativeInt | None = None
    image_end: NonNegativeInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        side, patches = math.isqrt(self.image_tokens), self.vision.side_patches
        if side**2 != self.image_tokens or patches // (patches // side or 1) != side:
            raise ConfigError(
                f"image_tokens={self.image_tokens} do not come from {patches} x {patches} patches: they are "
                "averaged in squares to a square of tokens. Change image_tokens, vision.image_size or vision.patch."
            )

    @property
    def image_tokens_of_prompts(self) -> dict[str, int | None]:
        """See `SeesImages`."""
        return {"image_token": self.image_token, "image_begin": self.image_begin, "image_end": self.image_end}

    def image_reader(self, texts: Mapping[str, str]) -> SquareImages | None:
        """See `SeesImages`."""
        size = self.vision
        if size.channels not in MODES:
            return None
        begin, token, end = texts["image_begin"], texts["image_token"], texts["image_end"]
        assert self.image_token is not None
        # Gemma's processor also writes the line breaks.
        expansion = (f"\n\n{begin}", token, f"{end}\n\n")
        return SquareImages(begin, *expansion, self.image_token, self.image_tokens, size.image_size, size.channels)

    def image_arrays(self, row_images: int, seq_tokens: int) -> dict[str, jax.ShapeDtypeStruct]:
        """See `SeesImages`."""
        size = self.vision
        shape = (row_images, size.image_size, size.image_size, size.channels)
        return {"pixels": jax.ShapeDtypeStruct(shape, jnp.uint8)}

    @property
    def pooled_patches(self) -> int:
        """Side, in patches, of the squares that are averaged to one token."""
        return self.vision.side_patches // math.isqrt(self.image_tokens)


class Projector(nnx.Module):
    """Averages patches in squares, y = norm(pool(x)) P."""

    def __init__(self, config: Gemma3VisionConfig, *, key: jax.Array) -> None:
        self.config, width = config, config.vision.embed
        # Stored scales start at 0, as in the language model.
        self.norm_spec = Norm(epsilon=config.vision.norm_epsilon, offset=1.0)
        self.norm = nnx.Param(jnp.zeros(width, config.param_dtype), logical_axes=("norm",))
        self.project = Linear(
            (width, config.embed),
            (None, "embed"),
            use_bias=False,
            std=config.initializer_std,
            param_dtype=config.param_dtype,
            key=key,
        )

    def __call__(self, patches: Float[Array, "images patches width"]) -> Float[Array, "images image_tokens embed"]:
        side, pool = math.isqrt(self.config.image_tokens), self.config.pooled_patches
        count = self.config.vision.side_patches
        grid = patches.reshape(len(patches), count, count, -1)[:, : side * pool, : side * pool]
        squares = grid.reshape(len(patches), side, pool, side, pool, -1)
        pooled = jnp.mean(squares, axis=(2, 4), dtype=jnp.float32).astype(patches.dtype)
        return self.project(self.norm_spec(pooled.reshape(len(patches), side**2, -1), self.norm))


class Gemma3Vision(Decoder):
    """A `Decoder` with a tower and a projector for images."""

    def __init__(self, config: Gemma3VisionConfig, spec: DecoderSpec, *, key: jax.Array) -> None:
        super().__init__(config, spec, key=key)
        self.image_token = config.image_token
        # The decoder folds in small numbers only.
        tower_key, projector_key = jax.random.split(jax.random.fold_in(key, 2**31 - 1))
        self.vision = Siglip(
            config.vision,
            std=config.initializer_std,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            remat=config.tower_remat,
            key=tower_key,
        )
        self.projector = Projector(config, key=projector_key)

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "batch seq"],
        segment_ids: Int[Array, "batch seq"] | None = None,
        cache: KVCache | None = None,
        *,
        images: ImageTokens | None = None,
        pixels: UInt8[Array, "batch images side side channels"] | None = None,
        image_mask: Bool[Array, "batch seq"] | None = None,
    ) -> Outputs:
        """Returns the normalized hidden states, see `Decoder`.

        Args:
          tokens, positions, segment_ids, cache, images: see `Decoder`.
          pixels: images of each row, in the order of its image tokens, padded to the same number.
          image_mask: the tokens of these images; None for all tokens with their id.

        Raises:
          ArgumentError: both `pixels` and `images`, or `image_token` is not set.
        """
        if pixels is not None:
            if images is not None:
                raise ArgumentError("Both pixels and images were given; leave one out.")
            if self.image_token is None:
                raise ArgumentError("The model has no image_token. Set model.image_token to the id of that token.")
            features = self.image_features(pixels.reshape(-1, *pixels.shape[2:]))
            features = features.reshape(*pixels.shape[:2], *features.shape[1:])
            images = place_features(features, select_image_tokens(tokens, image_mask), self.image_token)
        return super().__call__(tokens, positions, segment_ids, cache, images=images)

    def image_features(
        self, pixels: UInt8[Array, "images side side channels"]
    ) -> Float[Array, "images image_tokens embed"]:
        """Computes the features that stand for images in the language model."""
        return self.projector(self.vision(pixels))


class _ConfigMap(VisionConfigMap):
    """Mapping between the config and a `config.json` with a `text_config` and a `vision_config`."""

    def text_map(self, model_type: str | None) -> ConfigMap:
        return gemma3.FAMILY.config_map

    def tied_default(self, text: Mapping[str, Any]) -> bool:
        return True

    def read_tower(self, reader: Reader, text: Mapping[str, Any]) -> dict[str, Any]:
        return read_siglip(reader)

    def read_outer(self, reader: Reader) -> dict[str, Any]:
        reader.get("initializer_range")  # unused: each part repeats this key
        return {
            "image_tokens": reader.get("mm_tokens_per_image", default=256),
            "image_token": reader.get("image_token_index", "image_token_id", default=262_144),
            "image_begin": reader.get("boi_token_index", "boi_token_id", default=255_999),
            "image_end": reader.get("eoi_token_index", "eoi_token_id", default=256_000),
        }

    def write(self, config: Gemma3VisionConfig) -> dict[str, Any]:
        """Returns the `config.json` of a config."""
        tokens = {
            "image_token_index": config.image_token,
            "boi_token_index": config.image_begin,
            "eoi_token_index": config.image_end,
        }
        more = {
            "mm_tokens_per_image": config.image_tokens,
            **{name: token for name, token in tokens.items() if token is not None},
            "initializer_range": config.initializer_std,
        }
        return self.written(config, gemma3.FAMILY.config_map, write_siglip(config.vision), more)


@dataclass(frozen=True, kw_only=True)
class _Family(NestedFamily):
    """The family's tensors: the language model's, the tower's and the projector's."""

    def build(self, config: Any, *, key: jax.Array) -> Gemma3Vision:
        return Gemma3Vision(config, self.spec(config), key=key)

    def weight_rules(self, config: Any) -> tuple[WeightRule, ...]:
        return (
            *self.text_rules(config),
            WeightRule("projector/norm", f"{_PROJECTOR}mm_soft_emb_norm.weight"),
            # The only matrix that torch stores as [d_in, d_out].
            WeightRule("projector/project/kernel", f"{_PROJECTOR}mm_input_projection_weight"),
            *siglip_rules(config.vision, parameter="vision/", tensor=_TOWER),
        )

    def preprocessed(self, config: Any, mapping: Mapping[str, Any]) -> Any:
        """Returns the config; raises a ConversionError for a `preprocessor_config.json` of other preprocessing."""
        return read_square_preprocessor(config, mapping)

    def preprocessor(self, config: Any) -> dict[str, Any]:
        """Returns the `preprocessor_config.json` of a config."""
        return write_square_preprocessor(config)

    def published_name(self, tensor: str) -> str:
        """See `NestedFamily`."""
        name = super().published_name(tensor)
        if name.startswith("vision_tower.") and not name.startswith(_TOWER):
            return _TOWER + name.removeprefix("vision_tower.")
        return name


FAMILY = _Family(
    name="gemma3_vision",
    config_class=Gemma3VisionConfig,
    config_map=_ConfigMap(architecture="Gemma3ForConditionalGeneration", model_type="gemma3"),
    text=gemma3.FAMILY,
    spec=gemma3.spec,
    names=gemma3.GEMMA_NAMES,
    sizes=("4B", "12B", "27B"),
    tested=("logits", "greedy", "gradients", "conversion", "pages"),
)
