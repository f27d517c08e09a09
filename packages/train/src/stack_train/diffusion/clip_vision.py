"""The image encoder of Wan 2.1: CLIP's vision tower up to its last layer, and the preprocessing of its images.

It is equivalent to transformers' `CLIPVisionModel` and `CLIPImageProcessor`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8
from pydantic import PositiveFloat

from stack_core.abi.config import config
from stack_core.abi.errors import ConversionError
from stack_train.data.image_files import ImageScaling
from stack_train.diffusion.components import Component, StoredComponent, open_component
from stack_train.diffusion.grid import pillow
from stack_train.models.reader import Setting
from stack_train.nn.linear import FloatName
from stack_train.vision.clip import CLIP_VISION_NAMES, CLIP_VISION_SETTINGS, ClipVision, ClipVisionConfig
from stack_train.vision.preprocessor import RESAMPLING, apply_preprocessor, read_color
from stack_train.vision.tower_block import BLOCK_NAMES

__all__ = [
    "COMPONENT",
    "FAMILY",
    "IMAGE_PROCESSOR",
    "ClipImageConfig",
    "ImageEncoder",
    "open_image_encoder",
    "write_image_processor",
]

IMAGE_PROCESSOR = "image_processor"
"""Folder of the preprocessing of an image encoder's images."""


_PREPROCESSOR = "preprocessor_config.json"
_BICUBIC = ImageScaling(resample="bicubic", crop="after")


@config
class ClipImageConfig(ClipVisionConfig):
    """Size and numerics of a CLIP image encoder; inherits the fields of `ClipVisionConfig`.

    Attributes:
      name: selects this family.
      initializer_std: standard deviation of the initial weights.
      dtype: dtype of the activations.
      param_dtype: dtype of the parameters.
    """

    name: Literal["clip_vision"] = "clip_vision"
    initializer_std: PositiveFloat = 0.02
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"

    @property
    def tokens(self) -> int:
        """Number of tokens of an image: a class token and the patches."""
        return self.side_patches**2 + 1


class ClipImageFamily:
    """The `ModelFamily` of CLIP's image encoders."""

    name = "clip_vision"
    config_class = ClipImageConfig

    def build(self, config: ClipImageConfig, *, key: jax.Array) -> ClipVision:
        return ClipVision(
            config, std=config.initializer_std, dtype=config.dtype, param_dtype=config.param_dtype, key=key
        )


FAMILY = ClipImageFamily()

_PREFIX = "vision_model."
_LAYER = _PREFIX + "encoder.layers.{layer}."

COMPONENT = Component(
    class_name="CLIPVisionModel",
    model_type="clip_vision_model",
    stem="model",
    family=FAMILY,
    settings=(*CLIP_VISION_SETTINGS, Setting("initializer_std", ("initializer_range",), 0.02)),
    silent=("projection_dim", "tie_word_embeddings"),
    prefix=_PREFIX,
    # Older checkpoints store the positions 0, 1, 2, ... as a tensor.
    redundant=(_PREFIX + "embeddings.position_ids",),
    names={
        **{path: _PREFIX + name for path, name in CLIP_VISION_NAMES.items() if "/" not in path},
        "first_norm": _PREFIX + "pre_layrnorm",  # spelled like this in every checkpoint
        "norm": _PREFIX + "post_layernorm",
        **{f"blocks/{ours}": _LAYER + theirs for ours, theirs in BLOCK_NAMES.items()},
    },
)


@dataclass(frozen=True)
class ImageEncoder:
    """An image encoder and its preprocessing.

    Attributes:
      source: the encoder, or its folder, whose tensors are read when the encoder is first used.
      config: config of the encoder, with the colors of the preprocessing.
    """

    source: Any
    config: ClipImageConfig

    @cached_property
    def model(self) -> ClipVision:
        return self.source.read() if isinstance(self.source, StoredComponent) else self.source

    def sizes(self) -> Mapping[str, int]:
        """Returns the sizes of the features by field of the denoiser's config."""
        return {"image_dim": self.config.embed, "image_tokens": self.config.tokens}

    def __call__(
        self, images: UInt8[np.ndarray, "images height width channels"]
    ) -> Float[Array, "images tokens embed"]:
        """Returns the features of each image, in float32."""
        side = self.config.image_size
        scaled = [np.asarray(_BICUBIC(pillow().fromarray(image), (side, side))) for image in images]
        return self._encode(nnx.state(self.model), jnp.asarray(np.stack(scaled)))

    @cached_property
    def _encode(self) -> Any:
        graph = nnx.graphdef(self.model)
        return jax.jit(lambda state, pixels: nnx.merge(graph, state).penultimate(pixels).astype(jnp.float32))


def open_image_encoder(encoder: Path, processor: Path) -> ImageEncoder:
    """Checks the folders of an image encoder and of its preprocessing.

    Raises:
      ConversionError: see `open_component`, or the preprocessing is missing or not supported.
    """
    opened = open_component(COMPONENT, encoder)
    path = processor / _PREPROCESSOR
    try:
        mapping = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise ConversionError(f"{path} cannot be read: {error}. Download the directory again.") from error

    def read_colors(keys: dict[str, Any], config: Any) -> tuple[dict[str, Any], list[str]]:
        colored, problems = read_color(keys, config)
        return {"mean": colored.mean, "std": colored.std}, problems

    config = apply_preprocessor(opened.config, mapping, fixed=_squares(opened.config), read_fields=read_colors)
    if config != opened.config:
        opened = open_component(COMPONENT, encoder, mean=config.mean, std=config.std)
    return ImageEncoder(opened, opened.config)


def write_image_processor(directory: Path, config: ClipImageConfig) -> None:
    """Writes the preprocessing of an image encoder, as for transformers' `CLIPImageProcessor`."""
    colors = {"image_mean": list(config.mean), "image_std": list(config.std)}
    mapping = {"image_processor_type": "CLIPImageProcessor", **_squares(config), **colors}
    directory.mkdir()
    (directory / _PREPROCESSOR).write_text(json.dumps(mapping, indent=2) + "\n", encoding="utf-8")


def _squares(config: ClipImageConfig) -> dict[str, Any]:
    side = config.image_size
    crop = {"do_center_crop": True, "crop_size": {"height": side, "width": side}}
    return {"size": {"shortest_edge": side}, **crop, "resample": RESAMPLING["bicubic"]}
