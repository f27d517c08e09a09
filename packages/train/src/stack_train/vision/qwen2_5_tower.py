"""Qwen2.5-VL's vision tower: a transformer over the patches of images of any size, built like a Llama.

Rows and columns of patches are rotary positions. Most layers attend within square windows of an image, and some within
the complete image. Squares of patches are merged to tokens after the last layer. Outputs match transformers'
`Qwen2_5_VisionTransformerPretrainedModel`.

Source: Qwen Team, Qwen2.5-VL Technical Report, 2025 (arXiv:2502.13923), section 2.1.
"""

from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.models.reader import Reader
from stack_train.models.weight_map import WeightRule
from stack_train.nn.build import Build
from stack_train.nn.linear import FloatName
from stack_train.nn.residual import Norm
from stack_train.nn.stack import RematPolicy, scan_layers
from stack_train.vision.gated_block import GatedBlock
from stack_train.vision.grids import PatchPlaces, patch_places, windows
from stack_train.vision.packed_patches import PATCHES, Patches, embed_patches
from stack_train.vision.qwen_parts import (
    EPSILON,
    Merger,
    QwenTowerSettings,
    axial_frequencies,
    block_rules,
    linear_rules,
    patch_kernels,
    read_tower_settings,
    write_tower_settings,
)

__all__ = ["Qwen25Tower", "Qwen25TowerConfig", "qwen2_5_tower_rules", "read_qwen2_5_tower", "write_qwen2_5_tower"]

_NORM: Final = Norm(epsilon=EPSILON)


@config
class Qwen25TowerConfig(QwenTowerSettings):
    """Size of a Qwen2.5-VL tower; inherits the fields of `QwenTowerSettings`.

    Attributes:
      window: side of a window in pixels, at least the side of a token; a remainder below a token is ignored.
      full_layers: layers, from 0, that attend within the complete image.
    """

    patch: PositiveInt = 14
    window: PositiveInt = 112
    full_layers: tuple[NonNegativeInt, ...] = ()
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[PositiveFloat, ...] = (0.26862954, 0.26130258, 0.27577711)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.window_tokens:
            raise ConfigError(
                f"window={self.window} is smaller than a token of {self.merge * self.patch} pixels. Set window to a "
                "multiple of it."
            )
        if wrong := [layer for layer in self.full_layers if layer >= self.layers]:
            raise ConfigError(f"full_layers has {wrong}, and the tower layers={self.layers}. Take them out.")

    @property
    def window_tokens(self) -> int:
        """Side of a window in tokens."""
        return self.window // self.merge // self.patch


class Qwen25Tower(nnx.Module):
    """Packed patches of images to the features of their tokens.

    Initial values: see `QwenTower`.

    Args:
      config: size of the tower.
      width: width of the decoder.
      std: standard deviation of the initial weights.
      dtype: dtype of activations.
      param_dtype: dtype of parameters.
      remat: see `scan_layers`.
      key: PRNG key.
    """

    def __init__(
        self,
        config: Qwen25TowerConfig,
        width: int,
        *,
        std: float,
        dtype: FloatName,
        param_dtype: FloatName,
        remat: RematPolicy = "none",
        key: jax.Array,
    ) -> None:
        self.config, self.dtype, self.remat = config, dtype, remat
        patch_key, block_key, merger_key = jax.random.split(key, 3)
        self.patches = patch_kernels(config, std, param_dtype, patch_key)
        residual_std = std / (2 * config.layers) ** 0.5
        build = Build(config.embed, config.layers, std, residual_std, _NORM, param_dtype, block_key)
        self.blocks = GatedBlock(build, heads=config.heads, mlp=config.mlp, activation="silu", bias=True)
        self.norm = nnx.Param(jnp.ones(config.embed, param_dtype), logical_axes=("norm",))
        self.merger = Merger(config, width, late_norm=None, std=std, param_dtype=param_dtype, key=merger_key)

    def __call__(
        self, pixels: UInt8[Array, "batch patches values"], grids: Int[Array, "batch images 2"]
    ) -> Float[Array, "batch tokens features"]:
        """Returns the features of each token in `dtype`.

        Args:
          pixels: packed patches of each row's images, whose values are ordered [channels, patch, patch].
          grids: rows and columns of tokens of each image; 0 for images that a row lacks.
        """
        config, frequencies = self.config, axial_frequencies(self.config)
        square, places = config.merge**2, patch_places(grids, pixels.shape[1], config.merge)
        # Tokens of a window become adjacent, and attention needs a mask neither for windows nor for images.
        order, window = windows(grids, pixels.shape[1] // square, config.window_tokens)
        places = replace(places, places=_reordered(places.places, order))
        options: Any = {"mean": config.mean, "std": config.std, "frames": config.frames, "dtype": self.dtype}
        kernel = self.patches[...].reshape(config.embed, -1).T
        x = embed_patches(_reordered(pixels, order), kernel, None, **options)

        def run(block: GatedBlock, x: Patches, per_row: Any, is_full: jax.Array) -> tuple[Patches, None]:
            places, window = per_row
            segments = jnp.where(is_full, places.segments, window)
            return block(x, replace(places, segments=segments), frequencies), None

        is_full = jnp.asarray([layer in config.full_layers for layer in range(config.layers)])
        per_row: tuple[PatchPlaces, jax.Array] = (places, jnp.repeat(window, square, axis=1))
        options = {"per_row": per_row, "remat": self.remat, "unroll": False, "moves": False}
        x, _ = scan_layers(run, [self.blocks], x, [is_full], **options)
        return _reordered(self.merger(_NORM(x, self.norm, PATCHES)), jnp.argsort(order, axis=1))


def _reordered(x: jax.Array, order: Int[Array, "batch tokens"]) -> jax.Array:
    """Reorders the tokens, or the patches of tokens, on the second axis."""
    of_tokens = x.reshape(*order.shape, -1)
    return jnp.take_along_axis(of_tokens, order[..., None], axis=1).reshape(x.shape)


_NAMES = {"patches": "patch_embed.proj.weight", "norm": "merger.ln_q.weight"}
_LINEAR_NAMES = {"output": "attn.proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
_NORM_NAMES = {"attention_norm": "norm1", "feed_forward_norm": "norm2"}


def qwen2_5_tower_rules(config: Qwen25TowerConfig, *, parameter: str, tensor: str) -> list[WeightRule]:
    """Returns the locations of a tower's parameters; see `qwen_tower_rules`."""
    layers, block = range(config.layers), f"{tensor}blocks.{{layer}}."
    return [
        *(WeightRule(parameter + path, tensor + name) for path, name in _NAMES.items()),
        *block_rules(layers, f"{parameter}blocks/", block, _LINEAR_NAMES),
        *(
            WeightRule(f"{parameter}blocks/{path}", f"{block}{name}.weight", layers)
            for path, name in _NORM_NAMES.items()
        ),
        *linear_rules(f"{parameter}merger/", f"{tensor}merger.mlp.", {"up": "0", "down": "2"}),
    ]


_DEFAULTS = {"embed": 3584, "mlp": 3420, "layers": 32, "patch": 14}


def read_qwen2_5_tower(reader: Reader, width: int) -> dict[str, Any]:
    """Reads the fields of a `Qwen25TowerConfig` from a `vision_config`; see `read_tower_settings`."""
    reader.get("tokens_per_second", "spatial_patch_size")  # of videos, and a copy of patch_size that is not read
    found = read_tower_settings(reader, width, activation="silu", defaults=_DEFAULTS)
    full_layers = reader.get("fullatt_block_indexes", default=(7, 15, 23, 31))
    return {**found, "window": reader.get("window_size", default=112), "full_layers": full_layers}


def write_qwen2_5_tower(config: Qwen25TowerConfig, width: int) -> dict[str, Any]:
    """Returns the `vision_config` of a tower, without its `model_type`."""
    return {
        **write_tower_settings(config, width, "silu"),
        "window_size": config.window,
        "fullatt_block_indexes": list(config.full_layers),
    }
