"""Pixtral's vision tower: a transformer over the patches of images of any size, built like a Llama.

Rows and columns of patches are rotary positions, with frequencies that alternate between the two. Patches attend to the
patches of their image. Outputs match transformers' `PixtralVisionModel`.

Source: Agrawal et al., Pixtral 12B, 2024 (arXiv:2410.07073), section 2.2.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, UInt8
from pydantic import PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.ops.references.rope_scaling import unscaled_frequencies
from stack_train.models.reader import Reader, Setting
from stack_train.models.weight_map import WeightRule
from stack_train.nn.build import Build
from stack_train.nn.feed_forward import Activation
from stack_train.nn.linear import FloatName
from stack_train.nn.residual import Norm
from stack_train.nn.stack import RematPolicy, scan_layers
from stack_train.vision.gated_block import GatedBlock
from stack_train.vision.grids import PatchPlaces, patch_places
from stack_train.vision.packed_patches import PATCHES, Patches, check_color, check_heads, embed_patches

__all__ = ["PixtralTower", "PixtralTowerConfig", "pixtral_tower_rules", "read_pixtral_tower", "write_pixtral_tower"]

_NORM: Final = Norm(epsilon=1e-5)


@config
class PixtralTowerConfig:
    """Size of a Pixtral tower.

    Attributes:
      embed: width of the residual stream.
      mlp: hidden width of the feed-forward layers.
      layers: number of layers.
      heads: number of attention heads; 4 `heads` divide `embed`.
      patch: side of a patch in pixels.
      channels: number of color channels.
      activation: activation of the gated feed-forward layers.
      rope_theta: base of the rotary frequencies.
      mean: mean of each channel, subtracted from values between 0 and 1.
      std: divisor of each channel.
    """

    embed: PositiveInt = 256
    mlp: PositiveInt = 1024
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    patch: PositiveInt = 16
    channels: PositiveInt = 3
    activation: Activation = "silu"
    rope_theta: PositiveFloat = 10_000.0
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[PositiveFloat, ...] = (0.26862954, 0.26130258, 0.27577711)

    def __post_init__(self) -> None:
        check_heads(self.embed, self.heads)
        check_color(self.mean, self.std, self.channels)


class PixtralTower(nnx.Module):
    """Packed patches of images to one feature vector per patch.

    Initial values: matrices are normal with standard deviation `std`, or std / sqrt(2 layers) if they write to the
    residual stream; norms start as the identity.

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
        config: PixtralTowerConfig,
        *,
        std: float,
        dtype: FloatName,
        param_dtype: FloatName,
        remat: RematPolicy = "none",
        key: jax.Array,
    ) -> None:
        self.config, self.dtype, self.remat = config, dtype, remat
        patch_key, block_key = jax.random.split(key)
        # In torch's layout of a convolution, [d_out, channels, height, width].
        patch_shape = (config.embed, config.channels, config.patch, config.patch)
        self.patches = nnx.Param(
            std * jax.random.normal(patch_key, patch_shape, param_dtype), logical_axes=("embed", None, None, None)
        )
        self.norm = nnx.Param(jnp.ones(config.embed, param_dtype), logical_axes=("norm",))
        residual_std = std / (2 * config.layers) ** 0.5
        build = Build(config.embed, config.layers, std, residual_std, _NORM, param_dtype, block_key)
        options: Any = {"heads": config.heads, "mlp": config.mlp, "activation": config.activation}
        self.blocks = GatedBlock(build, **options, bias=False)

    def __call__(
        self, pixels: UInt8[Array, "batch patches values"], grids: Int[Array, "batch images 2"], *, merge: int
    ) -> Patches:
        """Returns the features of each patch in `dtype`.

        Args:
          pixels: packed patches of each row's images, whose values are ordered [channels, patch, patch].
          grids: rows and columns of tokens of each image; 0 for images that a row lacks.
          merge: side of a token in patches; the patches of a token are adjacent.
        """
        config, places = self.config, patch_places(grids, pixels.shape[1], merge)
        kernel = self.patches[...].reshape(config.embed, -1).T
        x = embed_patches(pixels, kernel, None, mean=config.mean, std=config.std, dtype=self.dtype)

        inverse = unscaled_frequencies(config.rope_theta, config.embed // config.heads)
        # Even frequencies turn by the row, odd ones by the column.
        frequencies = np.concatenate([inverse[0::2], inverse[1::2]])

        def run(block: GatedBlock, x: Patches, places: PatchPlaces, _: None) -> tuple[Patches, None]:
            return block(x, places, frequencies), None

        options: Any = {"per_row": places, "remat": self.remat, "unroll": False, "moves": False}
        x, _ = scan_layers(run, [self.blocks], _NORM(x, self.norm, PATCHES), [None], **options)
        return x


_NAMES = {"patches": "patch_conv.weight", "norm": "ln_pre.weight"}
_BLOCK_NAMES = {
    "query/kernel": "attention.q_proj",
    "key/kernel": "attention.k_proj",
    "value/kernel": "attention.v_proj",
    "output/kernel": "attention.o_proj",
    "gate/kernel": "feed_forward.gate_proj",
    "up/kernel": "feed_forward.up_proj",
    "down/kernel": "feed_forward.down_proj",
    "attention_norm": "attention_norm",
    "feed_forward_norm": "ffn_norm",
}


def pixtral_tower_rules(config: PixtralTowerConfig, *, parameter: str, tensor: str) -> list[WeightRule]:
    """Returns the locations of a tower's parameters in a Hugging Face checkpoint.

    Args:
      parameter: prefix of the parameters' paths, such as "vision/".
      tensor: prefix of the tensors' names, such as "vision_tower.".
    """
    rules = [WeightRule(parameter + path, tensor + name) for path, name in _NAMES.items()]
    for path, name in _BLOCK_NAMES.items():
        full = f"{tensor}transformer.layers.{{layer}}.{name}.weight"
        is_matrix = path.endswith("kernel")
        rules.append(WeightRule(f"{parameter}blocks/{path}", full, range(config.layers), transposed=is_matrix))
    return rules


_SETTINGS = (
    Setting("embed", ("hidden_size",), 1024),
    Setting("mlp", ("intermediate_size",), 4096),
    Setting("layers", ("num_hidden_layers",), 24),
    Setting("heads", ("num_attention_heads",), 16),
    Setting("patch", ("patch_size",), 16),
    Setting("channels", ("num_channels",), 3),
)
_KIND: Final = "pixtral"
# Our names of transformers' activations.
_ACTIVATIONS: Final[dict[str, Activation]] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}


def read_pixtral_tower(reader: Reader) -> dict[str, Any]:
    """Reads the fields of a `PixtralTowerConfig` from a `vision_config`; adds unsupported settings to `problems`.

    `image_size` is ignored, because `preprocessor_config.json` has the size of images.
    """
    found = {each.ours: reader.get(*each.names, default=each.default) for each in _SETTINGS}
    if (kind := reader.get("model_type", default="none")) != _KIND:
        reader.problems.append(f"vision_config with model_type={kind!r}, not {_KIND!r}")
    reader.expect("head_dim", found["embed"] // found["heads"])
    activation = reader.get("hidden_act", default="gelu")
    if activation not in _ACTIVATIONS:
        reader.problems.append(f"hidden_act={activation!r} of the tower, not one of {', '.join(_ACTIVATIONS)}")
    reader.get("image_size", "initializer_range", "is_composition")
    rope = reader.get("rope_parameters") or {}
    outer = reader.get("rope_theta", default=10_000.0)
    if unknown := {name: value for name, value in rope.items() if name not in ("rope_theta", "rope_type")}:
        reader.problems.append(f"rope_parameters with {unknown}")
    # Former releases of transformers wrote "default" for the same positions.
    if (kind := rope.get("rope_type", "axial")) not in ("axial", "default"):
        reader.problems.append(f"rope_type={kind!r} of the tower, not 'axial'")
    theta = float(rope.get("rope_theta") or outer)
    return {**found, "activation": _ACTIVATIONS.get(activation, "gelu"), "rope_theta": theta}


def write_pixtral_tower(config: PixtralTowerConfig, longest_edge: int) -> dict[str, Any]:
    """Returns the `vision_config` of a tower, whose positions cover images of `longest_edge` pixels."""
    names = {ours: name for name, ours in _ACTIVATIONS.items()}
    return {
        "model_type": _KIND,
        **{each.names[0]: getattr(config, each.ours) for each in _SETTINGS},
        "head_dim": config.embed // config.heads,
        "hidden_act": names[config.activation],
        "image_size": longest_edge,
        "rope_theta": config.rope_theta,
    }
