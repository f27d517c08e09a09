"""CLIP: an image tower and a causal text tower, trained to find the text of each image in a batch and vice versa.

Outputs match transformers' `CLIPModel`.

Source: Radford et al., Learning Transferable Visual Models From Natural Language Supervision, 2021 (arXiv:2103.00020).
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8
from pydantic import Field, PositiveInt

from stack_core.abi.config import config
from stack_train.contrastive.dual_encoder import DualEncoder, DualEncoderConfig
from stack_train.contrastive.family import DualEncoderConfigMap, DualEncoderFamily
from stack_train.contrastive.objectives import SoftmaxContrastiveConfig
from stack_train.data.image_files import CropRule
from stack_train.diffusion.clip import COMPONENT, ClipText, ClipTextConfig, ClipTextSize
from stack_train.models.reader import Reader
from stack_train.models.weight_map import WeightRule
from stack_train.nn.linear import Linear
from stack_train.vision.clip import (
    ClipVision,
    ClipVisionConfig,
    clip_vision_rules,
    read_clip_vision,
    write_clip_vision,
)
from stack_train.vision.preprocessor import read_color
from stack_train.vision.text_tower import text_rules

__all__ = ["FAMILY", "ClipModelConfig"]


@config
class ClipModelConfig(DualEncoderConfig):
    """Size and numerics of a CLIP; inherits the fields of `DualEncoderConfig`.

    Attributes:
      name: selects this family.
      vision: size of the image tower.
      text: size of the text tower.
      features: number of features of an image or a text.
    """

    name: Literal["clip"] = "clip"
    vision: ClipVisionConfig = Field(default_factory=ClipVisionConfig)
    text: ClipTextSize = Field(default_factory=ClipTextSize)
    features: PositiveInt = 512

    crop: ClassVar[CropRule] = "after"

    @property
    def end_token(self) -> int | None:
        """See `DualEncoderConfig`."""
        return None if self.text.pools_largest else self.text.end

    @property
    def text_tower(self) -> ClipTextConfig:
        """Config of the text tower with its projection."""
        size = {field.name: getattr(self.text, field.name) for field in fields(self.text)}
        dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        return ClipTextConfig(
            **size, projection=self.features, projects=True, initializer_std=self.initializer_std, **dtypes
        )


class ClipModel(DualEncoder):
    """CLIP's towers and projections; the logits lack a bias."""

    def __init__(self, config: ClipModelConfig, *, key: jax.Array) -> None:
        self.config = config
        vision_key, text_key, project_key = jax.random.split(key, 3)
        self.vision = ClipVision(config.vision, **config.numerics, key=vision_key)
        self.project = Linear(
            (config.vision.embed, config.features),
            ("embed", None),
            use_bias=False,
            std=config.initializer_std,
            param_dtype=config.param_dtype,
            key=project_key,
        )
        self.text = ClipText(config.text_tower, remat=config.remat, key=text_key)
        scale = jnp.full((), config.initial_logit_scale, config.param_dtype)
        self.logit_scale, self.logit_bias = nnx.Param(scale, logical_axes=()), None

    def encode_images(self, pixels: UInt8[Array, "batch side side channels"]) -> Float[Array, "batch features"]:
        return self.project(self.vision.pooled(pixels))

    def encode_texts(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch features"]:
        return self.text.pooled(tokens)


# The projection and the standard deviation of initial weights are settings of the model.
_TEXT = tuple(each for each in COMPONENT.settings if each.ours not in ("projection", "initializer_std"))


class _ConfigMap(DualEncoderConfigMap):
    def read_parts(self, outer: Reader, vision: Reader, text: Reader) -> dict[str, Any]:
        """See `DualEncoderConfigMap`."""
        found = {each.ours: text.get(*each.names, default=each.default) for each in _TEXT}
        if found["activation"] not in ("quick_gelu", "gelu"):
            text.problems.append(f"hidden_act={found['activation']!r}, not 'quick_gelu' or 'gelu'")
        # `CLIPModel` reads the outer key only, and both towers have one standard deviation here.
        vision.get("projection_dim", "initializer_range")
        text.get("projection_dim")
        return {
            "vision": read_clip_vision(vision),
            "text": found,
            "features": outer.get("projection_dim", default=512),
            "initial_logit_scale": outer.get("logit_scale_init_value", default=2.6592),
            "initializer_std": text.get("initializer_range", default=0.02),
        }

    def write_parts(self, config: ClipModelConfig) -> dict[str, Any]:
        """See `DualEncoderConfigMap`."""
        text = {each.names[0]: getattr(config.text, each.ours) for each in _TEXT}
        more = {"projection_dim": config.features, "initializer_range": config.initializer_std}
        return {
            "text_config": {"model_type": "clip_text_model", **text, **more},
            "vision_config": {**write_clip_vision(config.vision), **more},
            "projection_dim": config.features,
            "logit_scale_init_value": config.initial_logit_scale,
        }


@dataclass(frozen=True, kw_only=True)
class _Family(DualEncoderFamily):
    """The family's tensors."""

    def build(self, config: ClipModelConfig, *, key: jax.Array) -> ClipModel:
        return ClipModel(config, key=key)

    def weight_rules(self, config: ClipModelConfig) -> tuple[WeightRule, ...]:
        return (
            WeightRule("logit_scale", "logit_scale"),
            WeightRule("project/kernel", "visual_projection.weight", transposed=True),
            WeightRule("text/project/kernel", "text_projection.weight", transposed=True),
            *text_rules(config.text.layers, parameter="text/", tensor="text_model."),
            *clip_vision_rules(config.vision, parameter="vision/", tensor="vision_model."),
        )

    def square_keys(self, config: ClipModelConfig) -> dict[str, Any]:
        """See `DualEncoderFamily`."""
        side = config.vision.image_size
        square = {"do_center_crop": True, "crop_size": {"height": side, "width": side}}
        return {"size": {"shortest_edge": side}, **square}

    def read_colors(self, mapping: dict[str, Any], config: Any) -> tuple[dict[str, Any], list[str]]:
        """See `DualEncoderFamily`."""
        # Earlier releases wrote one number.
        side = config.vision.image_size
        for name, square in (("size", {"shortest_edge": side}), ("crop_size", {"height": side, "width": side})):
            if mapping.get(name) == side:
                mapping[name] = square
        vision, problems = read_color(mapping, config.vision)
        return {"vision": vision}, problems

    def preprocessor(self, config: ClipModelConfig) -> dict[str, Any]:
        kinds = {"image_processor_type": "CLIPImageProcessor", "processor_class": "CLIPProcessor"}
        colors = {"image_mean": list(config.vision.mean), "image_std": list(config.vision.std)}
        return {**kinds, **super().preprocessor(config), **colors}


FAMILY = _Family(
    name="clip",
    config_class=ClipModelConfig,
    config_map=_ConfigMap(architecture="CLIPModel", model_type="clip"),
    objective=SoftmaxContrastiveConfig(),
    sizes=("ViT-B/32", "ViT-B/16", "ViT-L/14"),
    tested=("features", "loss", "gradients", "conversion"),
)
