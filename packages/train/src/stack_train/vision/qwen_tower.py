"""Qwen3-VL's vision tower: a transformer over the patches of images of any size.

Learned positions are interpolated to the size of an image, and rows and columns of patches are also rotary positions.
Squares of patches are merged to tokens, after the last layer and after some earlier ones. Outputs match transformers'
`Qwen3VLVisionModel`.

Source: Qwen Team, Qwen3-VL Technical Report, 2025 (arXiv:2511.21631), section 2.
"""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.ops.references.rope_scaling import unscaled_frequencies
from stack_train.models.reader import Reader, Setting
from stack_train.models.weight_map import WeightRule
from stack_train.nn.build import Build
from stack_train.nn.layer_norm import LayerNorm
from stack_train.nn.linear import FloatName, Linear
from stack_train.nn.residual import Norm
from stack_train.nn.stack import RematPolicy, scan_layers
from stack_train.vision.grids import PatchPlaces, patch_places, resample
from stack_train.vision.packed_patches import PATCHES, Patches, attend_patches, check_color, check_heads, embed_patches

__all__ = ["QwenTower", "QwenTowerConfig", "qwen_tower_rules", "read_qwen_tower", "write_qwen_tower"]

_EPSILON: Final = 1e-6


@config
class QwenTowerConfig:
    """Size of a Qwen3-VL tower; its model has the dtypes and the width of its outputs.

    Attributes:
      embed: width of the residual stream.
      mlp: hidden width of the feed-forward layers.
      layers: number of layers.
      heads: number of attention heads; the width of a head is a multiple of 4.
      patch: side of a patch in pixels.
      merge: side, in patches, of the squares that are merged to one token.
      frames: number of equal frames that a patch of an image consists of; the tower is also published for videos.
      channels: number of color channels.
      position_side: side of the square of learned positions.
      deepstack: layers, ascending from 0, after which features for later layers of the decoder are taken.
      rope_theta: base of the rotary frequencies.
      mean: mean of each channel, subtracted from values between 0 and 1.
      std: divisor of each channel.
    """

    embed: PositiveInt = 256
    mlp: PositiveInt = 1024
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    patch: PositiveInt = 16
    merge: PositiveInt = 2
    frames: PositiveInt = 2
    channels: PositiveInt = 3
    position_side: PositiveInt = 48
    deepstack: tuple[NonNegativeInt, ...] = ()
    rope_theta: PositiveFloat = 10_000.0
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[PositiveFloat, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        check_heads(self.embed, self.heads)
        ascending = all(left < right for left, right in zip(self.deepstack, self.deepstack[1:], strict=False))
        if not ascending or any(layer >= self.layers for layer in self.deepstack):
            raise ConfigError(
                f"deepstack={list(self.deepstack)} are not ascending layers below layers={self.layers}. Give each "
                "layer once, in order, or raise layers."
            )
        check_color(self.mean, self.std, self.channels)

    @property
    def patch_values(self) -> int:
        """Number of values of a patch of one frame."""
        return self.channels * self.patch**2

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
        heads = self.config.heads
        # Rows and columns have equal frequencies.
        frequencies = np.tile(unscaled_frequencies(self.config.rope_theta, x.shape[-1] // heads // 2), 2)
        attended = attend_patches(*projected, places=places, heads=heads, frequencies=frequencies)
        x = x + self.output(attended)
        return x + self.down(jax.nn.gelu(self.up(self.feed_forward_norm(x)), approximate=True))


class Merger(nnx.Module):
    """Merges squares of patches to tokens, y = gelu(x' A) B, where x' are the patches of a square in a row.

    Args:
      config: size of the tower.
      width: width of a token.
      late_norm: normalizes x' instead of the patches.
      std, param_dtype, key: see `Linear`.
    """

    def __init__(
        self,
        config: QwenTowerConfig,
        width: int,
        *,
        late_norm: bool,
        std: float,
        param_dtype: FloatName,
        key: jax.Array,
    ) -> None:
        merged = config.embed * config.merge**2
        self.merged, self.late_norm = merged, late_norm
        self.norm = LayerNorm.single(merged if late_norm else config.embed, _EPSILON, PATCHES, param_dtype)
        keys, options = jax.random.split(key), {"use_bias": True, "std": std, "param_dtype": param_dtype}
        self.up = Linear((merged, merged), ("embed", "mlp"), **options, key=keys[0])
        self.down = Linear((merged, width), ("mlp", "embed"), **options, key=keys[1])

    def __call__(self, x: Patches) -> Float[Array, "batch tokens width"]:
        x = x if self.late_norm else self.norm(x)
        x = x.reshape(len(x), -1, self.merged)
        x = self.norm(x) if self.late_norm else x
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


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
        # In torch's layout of a convolution, [d_out, channels, frames, height, width].
        patch_shape = (config.embed, config.channels, config.frames, config.patch, config.patch)
        self.patches = nnx.Param(
            std * jax.random.normal(patch_key, patch_shape, param_dtype),
            logical_axes=("embed", None, None, None, None),
        )
        self.patch_bias = nnx.Param(jnp.zeros(config.embed, param_dtype), logical_axes=("embed",))
        positions = std * jax.random.normal(position_key, (config.position_side**2, config.embed), param_dtype)
        self.positions = nnx.Param(positions, logical_axes=(None, "embed"))
        residual_std, norm = std / (2 * config.layers) ** 0.5, Norm(epsilon=_EPSILON)

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
        return x + resample(self.positions[...].reshape(side, side, -1), places).astype(x.dtype)


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
        rules += _block_rules(layers, f"{parameter}blocks/{number}/", f"{tensor}blocks.{{layer}}.")
    rules += _merger_rules(f"{parameter}merger/", f"{tensor}merger.")
    for number in range(len(config.deepstack)):
        rules += _merger_rules(f"{parameter}deep_mergers/{number}/", f"{tensor}deepstack_merger_list.{number}.")
    return rules


def _block_rules(layers: Sequence[int], parameter: str, tensor: str) -> list[WeightRule]:
    rules = []
    for place, path in enumerate(("query", "key", "value")):
        name = f"{tensor}attn.qkv"
        part: Any = {"part": (place, 3)}
        rules.append(WeightRule(f"{parameter}{path}/kernel", f"{name}.weight", layers, transposed=True, **part))
        rules.append(WeightRule(f"{parameter}{path}/bias", f"{name}.bias", layers, part_axis=-1, **part))
    for path, name in _BLOCK_NAMES.items():
        weight = "scale" if path.endswith("norm") else "kernel"
        is_matrix = weight == "kernel"
        rules.append(WeightRule(f"{parameter}{path}/{weight}", f"{tensor}{name}.weight", layers, transposed=is_matrix))
        rules.append(WeightRule(f"{parameter}{path}/bias", f"{tensor}{name}.bias", layers))
    return rules


def _merger_rules(parameter: str, tensor: str) -> list[WeightRule]:
    rules = [WeightRule(f"{parameter}norm/{ours}", f"{tensor}norm.{name}") for ours, name in _NORM_NAMES.items()]
    for path, name in (("up", "linear_fc1"), ("down", "linear_fc2")):
        rules.append(WeightRule(f"{parameter}{path}/kernel", f"{tensor}{name}.weight", transposed=True))
        rules.append(WeightRule(f"{parameter}{path}/bias", f"{tensor}{name}.bias"))
    return rules


_NORM_NAMES = {"scale": "weight", "bias": "bias"}

_SETTINGS = (
    Setting("embed", ("hidden_size",), 1152),
    Setting("mlp", ("intermediate_size",), 4304),
    Setting("layers", ("depth", "num_hidden_layers"), 27),
    Setting("heads", ("num_heads", "num_attention_heads"), 16),
    Setting("patch", ("patch_size",), 16),
    Setting("merge", ("spatial_merge_size",), 2),
    Setting("frames", ("temporal_patch_size",), 2),
    Setting("channels", ("in_channels",), 3),
    Setting("deepstack", ("deepstack_visual_indexes",), (8, 16, 24)),
)
_POSITIONS, _ACTIVATION = "num_position_embeddings", "gelu_pytorch_tanh"


def read_qwen_tower(reader: Reader, width: int) -> dict[str, Any]:
    """Reads the fields of a `QwenTowerConfig` from a `vision_config`; unsupported settings are added to the problems.

    Args:
      width: width of the decoder.
    """
    reader.expect("hidden_act", _ACTIVATION)
    if (given := reader.get("out_hidden_size", default=3584)) != width:
        reader.problems.append(f"out_hidden_size={given}, not hidden_size={width} of the text_config")
    positions = reader.get(_POSITIONS, default=2304)
    side = round(positions**0.5)
    if side**2 != positions:
        reader.problems.append(f"{_POSITIONS}={positions}, not a square number")
    rope = reader.get("rope_parameters") or {}
    if unknown := {name: value for name, value in rope.items() if name not in ("rope_theta", "rope_type")}:
        reader.problems.append(f"rope_parameters with {unknown}")
    if (kind := rope.get("rope_type", "axial")) != "axial":
        reader.problems.append(f"rope_type={kind!r} of the tower, not 'axial'")
    reader.get("initializer_range")  # unused: the text_config repeats this key
    found = {each.ours: reader.get(*each.names, default=each.default) for each in _SETTINGS}
    return {**found, "position_side": side, "rope_theta": float(rope.get("rope_theta", 10_000.0))}


def write_qwen_tower(config: QwenTowerConfig, width: int) -> dict[str, Any]:
    """Returns the `vision_config` of a tower, without its `model_type`."""
    return {
        **{each.names[0]: getattr(config, each.ours) for each in _SETTINGS},
        "deepstack_visual_indexes": list(config.deepstack),
        "hidden_act": _ACTIVATION,
        "out_hidden_size": width,
        _POSITIONS: config.position_side**2,
        "rope_parameters": {"rope_type": "axial", "rope_theta": config.rope_theta},
    }
