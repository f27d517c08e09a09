"""SigLIP: an image tower and a text tower without causal mask, trained by a sigmoid loss over all pairs of a batch.

Outputs match transformers' `SiglipModel`, which the models of SigLIP 2 with a fixed resolution use as well.

Sources: Zhai et al., Sigmoid Loss for Language Image Pre-Training, 2023 (arXiv:2303.15343); Tschannen et al., SigLIP 2,
2025 (arXiv:2502.14786).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8
from pydantic import Field, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_train.contrastive.dual_encoder import DualEncoder, DualEncoderConfig
from stack_train.contrastive.family import DualEncoderConfigMap, DualEncoderFamily
from stack_train.contrastive.objectives import SigmoidContrastiveConfig
from stack_train.models.reader import Reader, Setting
from stack_train.models.weight_map import WeightRule
from stack_train.nn.linear import Linear
from stack_train.vision.siglip import Siglip, SiglipConfig, pool_rules, read_siglip, siglip_rules, write_siglip
from stack_train.vision.text_tower import TextTower, TextTowerConfig, text_rules
from stack_train.vision.tower_block import run_blocks

__all__ = ["FAMILY", "SiglipModelConfig", "SiglipText", "SiglipTextConfig"]


@config
class SiglipTextConfig(TextTowerConfig):
    """Size of a SigLIP text tower; inherits the fields of `TextTowerConfig`. The defaults match SigLIP B.

    Attributes:
      vocab_size: number of tokens.
      max_positions: number of tokens of every text, which is padded to it.
      norm_epsilon: added to the variance in layer norms.
    """

    vocab_size: PositiveInt = 32_000
    max_positions: PositiveInt = 64
    norm_epsilon: PositiveFloat = 1e-6


@config
class SiglipModelConfig(DualEncoderConfig):
    """Size and numerics of a SigLIP; inherits the fields of `DualEncoderConfig`.

    Attributes:
      name: selects this family.
      vision: size of the image tower, whose width is the number of features.
      text: size of the text tower.
      initial_logit_scale: logarithm of the initial factor of the logits; log 10 in the paper.
      initial_logit_bias: initial term added to the logits, which makes pairs improbable at first.
    """

    name: Literal["siglip"] = "siglip"
    vision: SiglipConfig = Field(default_factory=SiglipConfig)
    text: SiglipTextConfig = Field(default_factory=SiglipTextConfig)
    initial_logit_scale: float = math.log(10)
    initial_logit_bias: float = -10.0


class SiglipText(TextTower):
    """Token ids to one vector per text, a projection of the last token's state, which may be padding."""

    def __init__(self, config: SiglipTextConfig, features: int, *, key: jax.Array, **numerics: Any) -> None:
        super().__init__(config, activation="gelu_tanh", causal=False, **numerics, key=key)
        options: dict[str, Any] = {"std": numerics["std"], "param_dtype": numerics["param_dtype"]}
        shape, axes = (config.embed, features), ("embed", None)
        self.project = Linear(shape, axes, use_bias=True, key=jax.random.fold_in(key, 2), **options)

    def pooled(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch features"]:
        """Returns the vector of each text."""
        x = run_blocks(self.blocks, self.embedded(tokens), remat=self.remat)
        return self.project(self.norm(x[:, -1:])[:, 0])


class SiglipModel(DualEncoder):
    """SigLIP's towers, and the scale and bias of the logits."""

    def __init__(self, config: SiglipModelConfig, *, key: jax.Array) -> None:
        self.config = config
        vision_key, text_key = jax.random.split(key)
        self.vision = Siglip(config.vision, pools=True, **config.numerics, key=vision_key)
        self.text = SiglipText(config.text, config.vision.embed, **config.numerics, key=text_key)
        # In torch's layout, [1].
        self.logit_scale, self.logit_bias = (
            nnx.Param(jnp.full((1,), value, config.param_dtype), logical_axes=(None,))
            for value in (config.initial_logit_scale, config.initial_logit_bias)
        )

    def encode_images(self, pixels: UInt8[Array, "batch side side channels"]) -> Float[Array, "batch features"]:
        return self.vision.pooled(pixels)

    def encode_texts(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch features"]:
        return self.text.pooled(tokens)


_TEXT = (
    Setting("vocab_size", ("vocab_size",), 32_000),
    Setting("embed", ("hidden_size",), 768),
    Setting("mlp", ("intermediate_size",), 3072),
    Setting("layers", ("num_hidden_layers",), 12),
    Setting("heads", ("num_attention_heads",), 12),
    Setting("max_positions", ("max_position_embeddings",), 64),
    Setting("norm_epsilon", ("layer_norm_eps",), 1e-6),
)
_ACTIVATION = "gelu_pytorch_tanh"


class _ConfigMap(DualEncoderConfigMap):
    def read_parts(self, outer: Reader, vision: Reader, text: Reader) -> dict[str, Any]:
        """See `DualEncoderConfigMap`."""
        text.expect("hidden_act", _ACTIVATION)
        found = {each.ours: text.get(*each.names, default=each.default) for each in _TEXT}
        tower = read_siglip(vision, pools=True)
        features = text.get("projection_size", default=None)
        if (found["embed"] if features is None else features) != tower["embed"]:
            text.problems.append(f"projection_size={features!r}, not the width of the image tower, {tower['embed']!r}")
        return {"vision": tower, "text": found}

    def write_parts(self, config: SiglipModelConfig) -> dict[str, Any]:
        """See `DualEncoderConfigMap`."""
        text = {each.names[0]: getattr(config.text, each.ours) for each in _TEXT}
        more = {"hidden_act": _ACTIVATION, "projection_size": config.vision.embed}
        return {
            "text_config": {"model_type": "siglip_text_model", **text, **more},
            "vision_config": write_siglip(config.vision, pools=True),
            "initializer_factor": 1.0,
        }


@dataclass(frozen=True, kw_only=True)
class _Family(DualEncoderFamily):
    """The family's tensors."""

    def build(self, config: SiglipModelConfig, *, key: jax.Array) -> SiglipModel:
        return SiglipModel(config, key=key)

    def weight_rules(self, config: SiglipModelConfig) -> tuple[WeightRule, ...]:
        return (
            WeightRule("logit_scale", "logit_scale"),
            WeightRule("logit_bias", "logit_bias"),
            WeightRule("text/project/kernel", "text_model.head.weight", transposed=True),
            WeightRule("text/project/bias", "text_model.head.bias"),
            *text_rules(config.text.layers, parameter="text/", tensor="text_model."),
            *siglip_rules(config.vision, parameter="vision/", tensor="vision_model."),
            *pool_rules(parameter="vision/pool/", tensor="vision_model.head."),
        )

    def square_keys(self, config: SiglipModelConfig) -> dict[str, Any]:
        """See `DualEncoderFamily`."""
        side, half = config.vision.image_size, [0.5] * config.vision.channels
        size = {"size": {"height": side, "width": side}, "do_center_crop": False}
        return {**size, "image_mean": half, "image_std": half}

    def read_colors(self, mapping: dict[str, Any], config: Any) -> tuple[dict[str, Any], list[str]]:
        """See `DualEncoderFamily`; pixels are always scaled to [-1, 1]."""
        return {}, []

    def preprocessor(self, config: SiglipModelConfig) -> dict[str, Any]:
        kinds = {"image_processor_type": "SiglipImageProcessor", "processor_class": "SiglipProcessor"}
        return {**kinds, **super().preprocessor(config)}


FAMILY = _Family(
    name="siglip",
    config_class=SiglipModelConfig,
    config_map=_ConfigMap(architecture="SiglipModel", model_type="siglip"),
    objective=SigmoidContrastiveConfig(),
    sizes=(
        *(f"SigLIP {size}" for size in ("B", "L", "So400m")),
        *(f"SigLIP 2 {size}" for size in ("B", "L", "So400m", "g")),
    ),
    tested=("features", "loss", "gradients", "conversion"),
)
