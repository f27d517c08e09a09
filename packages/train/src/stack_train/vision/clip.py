"""CLIP's vision tower: a transformer over the patches of an image and a class token, which becomes its feature vector.

Outputs match transformers' `CLIPVisionModel`.

Source: Radford et al., Learning Transferable Visual Models From Natural Language Supervision, 2021 (arXiv:2103.00020).
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, UInt8
from pydantic import PositiveFloat

from stack_core.abi.config import config
from stack_train.models.reader import Reader, Setting
from stack_train.models.weight_map import WeightRule
from stack_train.nn.build import Build
from stack_train.nn.layer_norm import LayerNorm
from stack_train.nn.linear import FloatName
from stack_train.nn.residual import Norm
from stack_train.nn.stack import RematPolicy, scan_layers
from stack_train.vision.packed_patches import PATCHES, check_color, gather_table, project_patches
from stack_train.vision.siglip import SiglipConfig, block_rules, cut_images
from stack_train.vision.tower_block import Activation, TowerBlock, run_blocks

__all__ = [
    "CLIP_VISION_NAMES",
    "CLIP_VISION_SETTINGS",
    "ClipVision",
    "ClipVisionConfig",
    "clip_vision_rules",
    "read_clip_vision",
    "write_clip_vision",
]


@config
class ClipVisionConfig(SiglipConfig):
    """Size of a CLIP vision tower; inherits the fields of `SiglipConfig`.

    Attributes:
      norm_epsilon: term added to the variance in layer norms.
      activation: activation of the feed-forward layers; "quick_gelu" is x sigmoid(1.702 x).
      mean, std: constants that normalize each channel of pixels in [0, 1].
    """

    norm_epsilon: PositiveFloat = 1e-5
    activation: Activation = "quick_gelu"
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[PositiveFloat, ...] = (0.26862954, 0.26130258, 0.27577711)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_color(self.mean, self.std, self.channels)


class ClipVision(nnx.Module):
    """Images to one feature vector per image. Initial values are as in `Siglip`.

    Args:
      config: size of the tower.
      std: standard deviation of the initial weights.
      dtype: dtype of activations.
      param_dtype: dtype of parameters.
      remat: see `scan_layers`.
      key: PRNG key.
    """

    def __init__(
        self,
        config: ClipVisionConfig,
        *,
        std: float,
        dtype: FloatName,
        param_dtype: FloatName,
        remat: RematPolicy = "none",
        key: jax.Array,
    ) -> None:
        self.config, self.dtype, self.remat = config, dtype, remat
        patch_key, class_key, position_key, block_key = jax.random.split(key, 4)

        def normal(key: jax.Array, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param[jax.Array]:
            return nnx.Param(std * jax.random.normal(key, shape, param_dtype), logical_axes=axes)

        embed = config.embed
        patch_shape = (embed, config.channels, config.patch, config.patch)
        self.patches = normal(patch_key, patch_shape, ("embed", None, None, None))
        self.class_token = normal(class_key, (embed,), ("embed",))
        self.positions = normal(position_key, (config.side_patches**2 + 1, embed), (None, "embed"))
        norm, residual_std = Norm(epsilon=config.norm_epsilon), std / (2 * config.layers) ** 0.5
        build = Build(embed, config.layers, std, residual_std, norm, param_dtype, block_key)
        self.blocks = TowerBlock(config, build, activation=config.activation)
        self.first_norm, self.norm = (LayerNorm.single(embed, norm.epsilon, PATCHES, param_dtype) for _ in range(2))

    def pooled(self, pixels: UInt8[Array, "images side side channels"]) -> Float[Array, "images embed"]:
        """Returns the normalized last state of each image's class token, in `dtype`.

        Args:
          pixels: square images with sides of `config.image_size`.
        """
        x = self.first_norm(self._embedded(pixels))
        return self.norm(run_blocks(self.blocks, x, remat=self.remat)[:, :1])[:, 0]

    def penultimate(self, pixels: UInt8[Array, "images side side channels"]) -> Float[Array, "images places embed"]:
        """Returns the inputs of the last layer: the class token, then the patches row by row, in `dtype`."""

        def run(block: TowerBlock, xs: tuple[Any, Any], _: None, __: None) -> tuple[tuple[Any, Any], None]:
            return (block(xs[0]), xs[0]), None

        x = self.first_norm(self._embedded(pixels))
        options: dict[str, Any] = {"remat": self.remat, "unroll": False, "moves": False}
        (_, before), _ = scan_layers(run, [self.blocks], (x, x), [None], per_row=None, **options)
        return before

    def _embedded(self, pixels: jax.Array) -> Float[Array, "images places embed"]:
        config = self.config
        mean, std = (jnp.asarray(each, jnp.float32) for each in (config.mean, config.std))
        flat = cut_images((pixels.astype(jnp.float32) / 255 - mean) / std, config, self.dtype)
        x = project_patches(flat, self.patches[...].reshape(config.embed, -1).T, None)
        first = jnp.broadcast_to(gather_table(self.class_token[...]).astype(x.dtype), (len(x), 1, config.embed))
        return jnp.concatenate([first, x], axis=1) + gather_table(self.positions[...]).astype(x.dtype)


CLIP_VISION_NAMES: Final = {
    "class_token": "embeddings.class_embedding",
    "patches": "embeddings.patch_embedding.weight",
    "positions": "embeddings.position_embedding.weight",
    # Spelled like this in every checkpoint.
    "first_norm/scale": "pre_layrnorm.weight",
    "first_norm/bias": "pre_layrnorm.bias",
    "norm/scale": "post_layernorm.weight",
    "norm/bias": "post_layernorm.bias",
}
"""Names of a tower's parameters outside of its layers in checkpoints."""


def clip_vision_rules(config: ClipVisionConfig, *, parameter: str, tensor: str) -> list[WeightRule]:
    """Returns the locations of a tower's parameters; see `siglip_rules`."""
    rules = [WeightRule(parameter + path, tensor + name) for path, name in CLIP_VISION_NAMES.items()]
    return [*rules, *block_rules(config.layers, parameter=f"{parameter}blocks/", tensor=tensor)]


CLIP_VISION_SETTINGS = (
    Setting("embed", ("hidden_size",), 768),
    Setting("mlp", ("intermediate_size",), 3072),
    Setting("layers", ("num_hidden_layers",), 12),
    Setting("heads", ("num_attention_heads",), 12),
    Setting("image_size", ("image_size",), 224),
    Setting("patch", ("patch_size",), 32),
    Setting("channels", ("num_channels",), 3),
    Setting("activation", ("hidden_act",), "quick_gelu"),
    Setting("norm_epsilon", ("layer_norm_eps",), 1e-5),
)
"""Settings of a tower in a `vision_config`."""


def read_clip_vision(reader: Reader) -> dict[str, Any]:
    """Reads the fields of a `ClipVisionConfig` from a `vision_config`; adds unsupported settings to the problems."""
    found = {each.ours: reader.get(*each.names, default=each.default) for each in CLIP_VISION_SETTINGS}
    if found["activation"] not in ("quick_gelu", "gelu"):
        reader.problems.append(f"hidden_act={found['activation']!r}, not 'quick_gelu' or 'gelu'")
    return found


def write_clip_vision(config: ClipVisionConfig) -> dict[str, Any]:
    """Returns the `vision_config` of a tower."""
    return {
        "model_type": "clip_vision_model",
        **{each.names[0]: getattr(config, each.ours) for each in CLIP_VISION_SETTINGS},
    }
