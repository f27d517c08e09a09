"""Qwen3-VL's vision tower: a transformer over the patches of images of any size.

Learned positions are interpolated to the size of an image, and rows and columns of patches are also rotary positions.
Squares of patches are merged to tokens, after the last layer and after some earlier ones. Outputs match transformers'
`Qwen3VLVisionModel`.

Source: Qwen Team, Qwen3-VL Technical Report, 2025 (arXiv:2511.21631), section 2.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8
from pydantic import NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import constrain
from stack_train.models.reader import Reader
from stack_train.models.weight_map import WeightRule
from stack_train.nn.build import Build
from stack_train.nn.layer_norm import LayerNorm
from stack_train.nn.linear import FloatName
from stack_train.nn.residual import Norm
from stack_train.nn.stack import RematPolicy, scan_layers
from stack_train.vision.grids import PatchPlaces, patch_places, resample
from stack_train.vision.packed_patches import PATCHES, Patches, attend_patches, embed_patches, gather_table
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

__all__ = ["QwenTower", "QwenTowerConfig", "qwen_tower_rules", "read_qwen_tower", "write_qwen_tower"]


@config
class QwenTowerConfig(QwenTowerSettings):
    """Size of a Qwen3-VL tower; inherits the fields of `QwenTowerSettings`.

    Attributes:
      position_side: side of the square of learned positions.
      deepstack: layers, ascending from 0, after which features for later layers of the decoder are taken.
    """

    position_side: PositiveInt = 48
    deepstack: tuple[NonNegativeInt, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        ascending = all(left < right for left, right in zip(self.deepstack, self.deepstack[1:], strict=False))
        if not ascending or any(layer >= self.layers for layer in self.deepstack):
            raise ConfigError(
                f"deepstack={list(self.deepstack)} are not ascending layers below layers={self.layers}. Give each "
                "layer once, in order, or raise layers."
            )

    @property
    def segments(self) -> list[range]:
        """Consecutive layers, up to each layer after which features are taken."""
        ends = [layer + 1 for layer in self.deepstack]
        found = [range(start, end) for start, end in zip([0, *ends], [*ends, self.layers], strict=True)]
        return [layers for layers in found if layers]


class TowerBlock(nnx.Module):
    """h = x + attention(norm(x)); y = h + feed_forward(norm(h)). Parameters are stacked, [layers, ...]."""

    def __init__(self, config: QwenTowerConfig, build: Build) -> None:
        embed, self.config = config.embed, config
        self.query = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.key = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.value = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.output = build.linear((embed, embed), ("heads", "embed"), bias=True, residual=True)
        self.up = build.linear((embed, config.mlp), ("embed", "mlp"), bias=True)
        self.down = build.linear((config.mlp, embed), ("mlp", "embed"), bias=True, residual=True)
        self.attention_norm, self.feed_forward_norm = (LayerNorm.of_layers(build, PATCHES) for _ in range(2))

    def __call__(self, x: Patches, places: PatchPlaces) -> Patches:
        normed = self.attention_norm(x)
        projected = (linear(normed) for linear in (self.query, self.key, self.value))
        frequencies = axial_frequencies(self.config)
        attended = attend_patches(*projected, places=places, heads=self.config.heads, frequencies=frequencies)
        x = x + self.output(attended)
        return x + self.down(jax.nn.gelu(self.up(self.feed_forward_norm(x)), approximate=True))


class QwenTower(nnx.Module):
    """Packed patches of images to the features of their tokens.

    Initial values: matrices are normal with standard deviation `std`, or std / sqrt(2 layers) if they write to the
    residual stream; norms start as the identity, and biases are zero.

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
        config: QwenTowerConfig,
        width: int,
        *,
        std: float,
        dtype: FloatName,
        param_dtype: FloatName,
        remat: RematPolicy = "none",
        key: jax.Array,
    ) -> None:
        self.config, self.dtype, self.remat = config, dtype, remat
        patch_key, position_key, block_key, merger_key = jax.random.split(key, 4)
        self.patches = patch_kernels(config, std, param_dtype, patch_key)
        self.patch_bias = nnx.Param(jnp.zeros(config.embed, param_dtype), logical_axes=("embed",))
        positions = std * jax.random.normal(position_key, (config.position_side**2, config.embed), param_dtype)
        self.positions = nnx.Param(positions, logical_axes=(None, "embed"))
        residual_std, norm = std / (2 * config.layers) ** 0.5, Norm(epsilon=EPSILON)

        def blocks(layers: range) -> TowerBlock:
            key = jax.random.fold_in(block_key, layers.start)
            return TowerBlock(config, Build(config.embed, len(layers), std, residual_std, norm, param_dtype, key))

        def merger(number: int, late_norm: bool) -> Merger:
            key = jax.random.fold_in(merger_key, number)
            return Merger(config, width, late_norm=late_norm, std=std, param_dtype=param_dtype, key=key)

        self.blocks = nnx.List([blocks(layers) for layers in config.segments])
        self.merger = merger(0, late_norm=False)
        self.deep_mergers = nnx.List([merger(1 + number, late_norm=True) for number in range(len(config.deepstack))])

    def __call__(
        self, pixels: UInt8[Array, "batch patches values"], grids: Int[Array, "batch images 2"]
    ) -> Float[Array, "batch tokens features"]:
        """Returns the features of each token, in `dtype`: for the embeddings, then for each place in `deepstack`.

        Args:
          pixels: packed patches of each row's images, whose values are ordered [channels, patch, patch].
          grids: rows and columns of tokens of each image; 0 for images that a row lacks.
        """
        places = patch_places(grids, pixels.shape[1], self.config.merge)
        x = self._embedded(pixels, places)

        def run(block: TowerBlock, x: Patches, places: PatchPlaces, _: None) -> tuple[Patches, None]:
            return block(x, places), None

        options: Any = {"per_row": places, "remat": self.remat, "unroll": False, "moves": False}
        deep = []
        for number, block in enumerate(self.blocks):
            x, _ = scan_layers(run, [block], x, [None], **options)
            if number < len(self.deep_mergers):
                deep.append(self.deep_mergers[number](x))
        return jnp.concatenate([self.merger(x), *deep], axis=-1)

    def _embedded(self, pixels: jax.Array, places: PatchPlaces) -> Patches:
        config = self.config
        # All frames of a patch are equal. Adding their kernels first would halve this small product, but round the
        # sum: the error of bfloat16 embeddings would be 0.24 % instead of 0.17 %.
        kernel = self.patches[...].reshape(config.embed, -1).T
        options: Any = {"mean": config.mean, "std": config.std, "frames": config.frames, "dtype": self.dtype}
        x = embed_patches(pixels, kernel, self.patch_bias[...], **options)
        side = config.position_side
        table = gather_table(self.positions[...].reshape(side, side, -1))
        return x + constrain(resample(table, places), *PATCHES, name="positions of patches").astype(x.dtype)


_NAMES = {
    "patches": "patch_embed.proj.weight",
    "patch_bias": "patch_embed.proj.bias",
    "positions": "pos_embed.weight",
}
_BLOCK_NAMES = {
    "output": "attn.proj",
    "up": "mlp.linear_fc1",
    "down": "mlp.linear_fc2",
    "attention_norm": "norm1",
    "feed_forward_norm": "norm2",
}


def qwen_tower_rules(config: QwenTowerConfig, *, parameter: str, tensor: str) -> list[WeightRule]:
    """Returns the locations of a tower's parameters in a Hugging Face checkpoint.

    Args:
      parameter: prefix of the parameters' paths, such as "vision/".
      tensor: prefix of the tensors' names, such as "model.visual.".
    """
    rules = [WeightRule(parameter + path, tensor + name) for path, name in _NAMES.items()]
    for number, layers in enumerate(config.segments):
        rules += block_rules(layers, f"{parameter}blocks/{number}/", f"{tensor}blocks.{{layer}}.", _BLOCK_NAMES)
    rules += linear_rules(f"{parameter}merger/", f"{tensor}merger.", _MERGER_NAMES)
    for number in range(len(config.deepstack)):
        deep = f"{tensor}deepstack_merger_list.{number}."
        rules += linear_rules(f"{parameter}deep_mergers/{number}/", deep, _MERGER_NAMES)
    return rules


_MERGER_NAMES = {"norm": "norm", "up": "linear_fc1", "down": "linear_fc2"}
_POSITIONS, _ACTIVATION, _DEEPSTACK = "num_position_embeddings", "gelu_pytorch_tanh", "deepstack_visual_indexes"
_DEFAULTS = {"embed": 1152, "mlp": 4304, "layers": 27, "patch": 16}


def read_qwen_tower(reader: Reader, width: int) -> dict[str, Any]:
    """Reads the fields of a `QwenTowerConfig` from a `vision_config`; see `read_tower_settings`."""
    positions = reader.get(_POSITIONS, default=2304)
    side = round(positions**0.5)
    if side**2 != positions:
        reader.problems.append(f"{_POSITIONS}={positions}, not a square number")
    found = read_tower_settings(reader, width, activation=_ACTIVATION, defaults=_DEFAULTS)
    return {**found, "position_side": side, "deepstack": reader.get(_DEEPSTACK, default=(8, 16, 24))}


def write_qwen_tower(config: QwenTowerConfig, width: int) -> dict[str, Any]:
    """Returns the `vision_config` of a tower, without its `model_type`."""
    return {
        **write_tower_settings(config, width, _ACTIVATION),
        _DEEPSTACK: list(config.deepstack),
        _POSITIONS: config.position_side**2,
    }
