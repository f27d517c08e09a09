"""SigLIP's vision tower: a transformer over the patches of an image.

Outputs match transformers' `SiglipVisionModel` without its pooling head.

Source: Zhai et al., Sigmoid Loss for Language Image Pre-Training, 2023 (arXiv:2303.15343).
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, UInt8
from pydantic import PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import LogicalAxes
from stack_train.models.reader import Reader, Setting
from stack_train.models.weight_map import WeightRule
from stack_train.nn.build import Build
from stack_train.nn.layer_norm import LayerNorm
from stack_train.nn.linear import FloatName
from stack_train.nn.residual import Norm
from stack_train.nn.stack import RematPolicy, scan_layers
from stack_train.vision.packed_patches import gather_table, join_heads, project_patches, split_heads

__all__ = ["Siglip", "SiglipConfig", "read_siglip", "siglip_rules", "write_siglip"]

Patches = Float[Array, "images patches embed"]

# Patches are not split over devices: images are the batch, and sequence parallelism is for text.
_PATCHES: Final[LogicalAxes] = ("batch", None, None)
_HEADS: Final[LogicalAxes] = ("batch", None, "act_heads", None)
_ATTENTION: Final = {"query": _HEADS, "key": _HEADS, "value": _HEADS}


@config
class SiglipConfig:
    """Size of a SigLIP tower; its model has the dtypes.

    Attributes:
      embed: width of the residual stream.
      mlp: hidden width of the feed-forward layers.
      layers: number of layers.
      heads: number of attention heads, a divisor of `embed`.
      image_size: side of the square images in pixels.
      patch: side of a patch in pixels; pixels beyond the last complete patch are not read.
      channels: number of color channels.
      norm_epsilon: term added to the variance in layer norms.
    """

    embed: PositiveInt = 256
    mlp: PositiveInt = 1024
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    image_size: PositiveInt = 112
    patch: PositiveInt = 14
    channels: PositiveInt = 3
    norm_epsilon: PositiveFloat = 1e-6

    def __post_init__(self) -> None:
        if self.embed % self.heads:
            raise ConfigError(f"embed={self.embed} is no multiple of heads={self.heads}; change one of them.")
        if self.patch > self.image_size:
            raise ConfigError(f"patch={self.patch} is larger than image_size={self.image_size}; change one of them.")

    @property
    def side_patches(self) -> int:
        """Number of patches per side of an image."""
        return self.image_size // self.patch


class SiglipBlock(nnx.Module):
    """h = x + attention(norm(x)); y = h + feed_forward(norm(h)). Parameters are stacked, [layers, ...]."""

    def __init__(self, config: SiglipConfig, build: Build) -> None:
        embed, self.heads = config.embed, config.heads
        self.query = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.key = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.value = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.output = build.linear((embed, embed), ("heads", "embed"), bias=True, residual=True)
        self.up = build.linear((embed, config.mlp), ("embed", "mlp"), bias=True)
        self.down = build.linear((config.mlp, embed), ("mlp", "embed"), bias=True, residual=True)
        self.attention_norm, self.feed_forward_norm = (LayerNorm.of_layers(build, _PATCHES) for _ in range(2))

    def __call__(self, x: Patches) -> Patches:
        normed = self.attention_norm(x)
        heads = (split_heads(linear(normed), self.heads) for linear in (self.query, self.key, self.value))
        attended: Any = ops.attention(*heads, axes=_ATTENTION)
        x = x + self.output(join_heads(attended))
        return x + self.down(jax.nn.gelu(self.up(self.feed_forward_norm(x)), approximate=True))


class Siglip(nnx.Module):
    """Images to one feature vector per patch.

    Initial values: matrices are normal with standard deviation `std`, or std / sqrt(2 layers) if they write to the
    residual stream; norms start as the identity, and biases are zero.

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
        config: SiglipConfig,
        *,
        std: float,
        dtype: FloatName,
        param_dtype: FloatName,
        remat: RematPolicy = "none",
        key: jax.Array,
    ) -> None:
        self.config, self.dtype, self.remat = config, dtype, remat
        patch_key, position_key, block_key = jax.random.split(key, 3)
        # In torch's layout of a convolution, [d_out, channels, height, width].
        patch_shape = (config.embed, config.channels, config.patch, config.patch)
        self.patches = nnx.Param(
            std * jax.random.normal(patch_key, patch_shape, param_dtype), logical_axes=("embed", None, None, None)
        )
        self.patch_bias = nnx.Param(jnp.zeros(config.embed, param_dtype), logical_axes=("embed",))
        positions = std * jax.random.normal(position_key, (config.side_patches**2, config.embed), param_dtype)
        self.positions = nnx.Param(positions, logical_axes=(None, "embed"))
        residual_std = std / (2 * config.layers) ** 0.5
        norm = Norm(epsilon=config.norm_epsilon)
        self.blocks = SiglipBlock(
            config, Build(config.embed, config.layers, std, residual_std, norm, param_dtype, block_key)
        )
        self.norm = LayerNorm.single(config.embed, config.norm_epsilon, _PATCHES, param_dtype)

    def __call__(self, pixels: UInt8[Array, "images side side channels"]) -> Patches:
        """Returns the features of each patch, row by row, in `dtype`.

        Args:
          pixels: square images with sides of `config.image_size`; values in [0, 255] are scaled to [-1, 1].
        """
        x = self._embedded(pixels)

        def run(block: SiglipBlock, x: Patches, _: None, __: None) -> tuple[Patches, None]:
            return block(x), None

        x, _ = scan_layers(run, [self.blocks], x, [None], per_row=None, remat=self.remat, unroll=False, moves=False)
        return self.norm(x)

    def _embedded(self, pixels: jax.Array) -> Patches:
        config, count = self.config, self.config.side_patches
        images = pixels.astype(jnp.float32) / 127.5 - 1.0
        images = images[:, : count * config.patch, : count * config.patch].astype(self.dtype)
        cut = images.reshape(len(images), count, config.patch, count, config.patch, config.channels)
        # [images, patches, channels * patch * patch], in the order of the kernel's axes.
        flat = cut.transpose(0, 1, 3, 5, 2, 4).reshape(len(images), count**2, -1)
        kernel = self.patches[...].reshape(config.embed, -1).T
        x = project_patches(flat, kernel, self.patch_bias[...])
        return x + gather_table(self.positions[...]).astype(x.dtype)


_NAMES = {
    "patches": "embeddings.patch_embedding.weight",
    "patch_bias": "embeddings.patch_embedding.bias",
    "positions": "embeddings.position_embedding.weight",
    "norm/scale": "post_layernorm.weight",
    "norm/bias": "post_layernorm.bias",
}
_BLOCK_NAMES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.out_proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "attention_norm": "layer_norm1",
    "feed_forward_norm": "layer_norm2",
}


def siglip_rules(config: SiglipConfig, *, parameter: str, tensor: str) -> list[WeightRule]:
    """Returns the locations of a tower's parameters in a Hugging Face checkpoint.

    Args:
      parameter: prefix of the parameters' paths, such as "vision/".
      tensor: prefix of the tensors' names, such as "vision_tower.vision_model.".
    """
    rules = [WeightRule(parameter + path, tensor + name) for path, name in _NAMES.items()]
    layers = range(config.layers)
    for path, name in _BLOCK_NAMES.items():
        base = f"{tensor}encoder.layers.{{layer}}.{name}"
        weight = "scale" if path.endswith("norm") else "kernel"
        matrix = weight == "kernel"
        rules.append(WeightRule(f"{parameter}blocks/{path}/{weight}", f"{base}.weight", layers, transposed=matrix))
        rules.append(WeightRule(f"{parameter}blocks/{path}/bias", f"{base}.bias", layers))
    return rules


_SETTINGS = (
    Setting("embed", ("hidden_size",), 768),
    Setting("mlp", ("intermediate_size",), 3072),
    Setting("layers", ("num_hidden_layers",), 12),
    Setting("heads", ("num_attention_heads",), 12),
    Setting("image_size", ("image_size",), 224),
    Setting("patch", ("patch_size",), 16),
    Setting("channels", ("num_channels",), 3),
    Setting("norm_epsilon", ("layer_norm_eps",), 1e-6),
)
# The pooling head serves contrastive training only.
_FIXED = {"hidden_act": "gelu_pytorch_tanh", "vision_use_head": False}


def read_siglip(reader: Reader) -> dict[str, Any]:
    """Reads the fields of a `SiglipConfig` from a `vision_config`; unsupported settings are added to the problems."""
    for name, value in _FIXED.items():
        reader.expect(name, value)
    return {each.ours: reader.get(*each.names, default=each.default) for each in _SETTINGS}


def write_siglip(config: SiglipConfig) -> dict[str, Any]:
    """Returns the `vision_config` of a tower."""
    settings = {each.names[0]: getattr(config, each.ours) for each in _SETTINGS}
    return {"model_type": "siglip_vision_model", **settings, **_FIXED}
