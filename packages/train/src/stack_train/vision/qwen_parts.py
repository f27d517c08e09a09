"""Parts that the vision towers of Qwen2.5-VL and Qwen3-VL share: sizes, the merger of patches, and tensor names."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float
from pydantic import PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.ops.references.rope_scaling import unscaled_frequencies
from stack_train.models.reader import Reader, Setting
from stack_train.models.weight_map import WeightRule
from stack_train.nn.build import Parameter
from stack_train.nn.layer_norm import LayerNorm
from stack_train.nn.linear import FloatName, Linear
from stack_train.vision.packed_patches import PATCHES, Patches, check_color, check_heads

__all__ = [
    "EPSILON",
    "Merger",
    "QwenTowerSettings",
    "axial_frequencies",
    "block_rules",
    "linear_rules",
    "patch_kernels",
    "read_tower_settings",
    "write_tower_settings",
]

EPSILON = 1e-6


@config
class QwenTowerSettings:
    """Size of a tower; its model has the dtypes and the width of its outputs.

    Attributes:
      embed: width of the residual stream.
      mlp: hidden width of the feed-forward layers.
      layers: number of layers.
      heads: number of attention heads; the width of a head is a multiple of 4.
      patch: side of a patch in pixels.
      merge: side, in patches, of the squares that are merged to one token.
      frames: number of equal frames of a patch; the towers are also published for videos.
      channels: number of color channels.
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
    rope_theta: PositiveFloat = 10_000.0
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[PositiveFloat, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        check_heads(self.embed, self.heads)
        check_color(self.mean, self.std, self.channels)

    @property
    def patch_values(self) -> int:
        """Number of values of a patch of one frame."""
        return self.channels * self.patch**2


def axial_frequencies(config: QwenTowerSettings) -> np.ndarray:
    """Returns the rotary frequencies of the pairs of a head; rows and columns have equal ones."""
    return np.tile(unscaled_frequencies(config.rope_theta, config.embed // config.heads // 2), 2)


def patch_kernels(config: QwenTowerSettings, std: float, param_dtype: FloatName, key: jax.Array) -> Parameter:
    """Returns the kernels of patches in torch's layout of a convolution, [d_out, channels, frames, height, width]."""
    shape = (config.embed, config.channels, config.frames, config.patch, config.patch)
    return nnx.Param(std * jax.random.normal(key, shape, param_dtype), logical_axes=("embed", None, None, None, None))


class Merger(nnx.Module):
    """Merges squares of patches to tokens, y = gelu(x' A) B, where x' are the patches of a square in a row.

    Args:
      config: size of the tower.
      width: width of a token.
      late_norm: normalizes x' instead of the patches; None leaves the norm of the patches to the caller.
      std, param_dtype, key: see `Linear`.
    """

    def __init__(
        self,
        config: QwenTowerSettings,
        width: int,
        *,
        late_norm: bool | None,
        std: float,
        param_dtype: FloatName,
        key: jax.Array,
    ) -> None:
        merged = config.embed * config.merge**2
        self.merged, self.late_norm = merged, late_norm
        size = merged if late_norm else config.embed
        self.norm = None if late_norm is None else LayerNorm.single(size, EPSILON, PATCHES, param_dtype)
        keys, options = jax.random.split(key), {"use_bias": True, "std": std, "param_dtype": param_dtype}
        self.up = Linear((merged, merged), ("embed", "mlp"), **options, key=keys[0])
        self.down = Linear((merged, width), ("mlp", "embed"), **options, key=keys[1])

    def __call__(self, x: Patches) -> Float[Array, "batch tokens width"]:
        if self.norm is not None and not self.late_norm:
            x = self.norm(x)
        x = x.reshape(len(x), -1, self.merged)
        if self.norm is not None and self.late_norm:
            x = self.norm(x)
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


def block_rules(layers: Sequence[int], parameter: str, tensor: str, names: Mapping[str, str]) -> list[WeightRule]:
    """Returns the locations of stacked layers, whose queries, keys and values share a tensor.

    Args:
      names: tensor names of the linear layers and norms, without ".weight" and ".bias".
    """
    rules = []
    for place, path in enumerate(("query", "key", "value")):
        name = f"{tensor}attn.qkv"
        part: Any = {"part": (place, 3)}
        rules.append(WeightRule(f"{parameter}{path}/kernel", f"{name}.weight", layers, transposed=True, **part))
        rules.append(WeightRule(f"{parameter}{path}/bias", f"{name}.bias", layers, part_axis=-1, **part))
    return rules + linear_rules(parameter, tensor, names, layers)


def linear_rules(parameter: str, tensor: str, names: Mapping[str, str], layers: Sequence[int] = ()) -> list[WeightRule]:
    """Returns the locations of linear layers with biases and of layer norms, by their names."""
    rules = []
    for path, name in names.items():
        weight = "scale" if path.endswith("norm") else "kernel"
        is_matrix = weight == "kernel"
        rules.append(WeightRule(f"{parameter}{path}/{weight}", f"{tensor}{name}.weight", layers, transposed=is_matrix))
        rules.append(WeightRule(f"{parameter}{path}/bias", f"{tensor}{name}.bias", layers))
    return rules


_SETTINGS = (
    Setting("layers", ("depth", "num_hidden_layers")),
    Setting("heads", ("num_heads", "num_attention_heads"), 16),
    Setting("embed", ("hidden_size",)),
    Setting("mlp", ("intermediate_size",)),
    Setting("patch", ("patch_size",)),
    Setting("merge", ("spatial_merge_size",), 2),
    Setting("frames", ("temporal_patch_size",), 2),
    Setting("channels", ("in_channels", "in_chans"), 3),
)


def read_tower_settings(reader: Reader, width: int, *, activation: str, defaults: Mapping[str, int]) -> dict[str, Any]:
    """Reads the fields of a `QwenTowerSettings` from a `vision_config`; adds unsupported settings to the problems.

    Args:
      width: width of the decoder.
      activation: the supported activation.
      defaults: values that transformers assumes for missing sizes that differ by tower.
    """
    reader.expect("hidden_act", activation)
    if (given := reader.get("out_hidden_size", default=3584)) != width:
        reader.problems.append(f"out_hidden_size={given}, not hidden_size={width} of the text_config")
    rope = reader.get("rope_parameters") or {}
    if unknown := {name: value for name, value in rope.items() if name not in ("rope_theta", "rope_type")}:
        reader.problems.append(f"rope_parameters with {unknown}")
    if (kind := rope.get("rope_type", "axial")) != "axial":
        reader.problems.append(f"rope_type={kind!r} of the tower, not 'axial'")
    reader.get("initializer_range")  # unused: the text_config repeats this key
    found = {each.ours: reader.get(*each.names, default=defaults.get(each.ours, each.default)) for each in _SETTINGS}
    return {**found, "rope_theta": float(rope.get("rope_theta", 10_000.0))}


def write_tower_settings(config: QwenTowerSettings, width: int, activation: str) -> dict[str, Any]:
    """Returns the keys read by `read_tower_settings`."""
    return {
        **{each.names[0]: getattr(config, each.ours) for each in _SETTINGS},
        "hidden_act": activation,
        "out_hidden_size": width,
        "rope_parameters": {"rope_type": "axial", "rope_theta": config.rope_theta},
    }
