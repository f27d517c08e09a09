"""SigLIP's vision tower: a transformer over the patches of an image.

Outputs match transformers' `SiglipVisionModel`, with its pooling head or without.

Source: Zhai et al., Sigmoid Loss for Language Image Pre-Training, 2023 (arXiv:2303.15343).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, UInt8
from pydantic import PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ArgumentError, ConfigError
from stack_train.models.reader import Reader, Setting
from stack_train.models.weight_map import WeightRule
from stack_train.nn.build import Build
from stack_train.nn.layer_norm import LayerNorm
from stack_train.nn.linear import FloatName, Linear
from stack_train.nn.residual import Norm
from stack_train.nn.stack import RematPolicy
from stack_train.vision.packed_patches import PATCHES, gather_table, join_heads, project_patches, split_heads
from stack_train.vision.tower_block import ATTENTION, BLOCK_NAMES, TowerBlock, activate, run_blocks

__all__ = [
    "Siglip",
    "SiglipConfig",
    "block_rules",
    "cut_images",
    "pool_rules",
    "read_siglip",
    "siglip_rules",
    "write_siglip",
]

Patches = Float[Array, "images patches embed"]


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
            raise ConfigError(f"embed={self.embed} is not a multiple of heads={self.heads}; change one of them.")
        if self.patch > self.image_size:
            raise ConfigError(f"patch={self.patch} is larger than image_size={self.image_size}; change one of them.")

    @property
    def side_patches(self) -> int:
        """Number of patches per side of an image."""
        return self.image_size // self.patch


class AttentionPool(nnx.Module):
    """One feature vector per image: a learned query attends to the patches, and a feed-forward layer follows.

    y = h + feed_forward(norm(h)), h = attention(probe, patches); it is the `SiglipMultiheadAttentionPoolingHead` of
    transformers.
    """

    def __init__(
        self, config: SiglipConfig, *, std: float, residual_std: float, param_dtype: FloatName, key: jax.Array
    ) -> None:
        embed, self.heads = config.embed, config.heads
        keys = iter(jax.random.split(key, 7))

        def linear(shape: tuple[int, int], axes: tuple[str, str], std: float = std) -> Linear:
            return Linear(shape, axes, use_bias=True, std=std, param_dtype=param_dtype, key=next(keys))

        # In torch's layout, [1, 1, embed].
        probe = std * jax.random.normal(next(keys), (1, 1, embed), param_dtype)
        self.probe = nnx.Param(probe, logical_axes=(None, None, "embed"))
        self.query, self.key, self.value = (linear((embed, embed), ("embed", "heads")) for _ in range(3))
        self.output = linear((embed, embed), ("heads", "embed"))
        self.up = linear((embed, config.mlp), ("embed", "mlp"))
        self.down = linear((config.mlp, embed), ("mlp", "embed"), residual_std)
        self.norm = LayerNorm.single(embed, config.norm_epsilon, PATCHES, param_dtype)

    def __call__(self, patches: Patches) -> Float[Array, "images embed"]:
        probe = gather_table(self.probe[...]).astype(patches.dtype)
        # Repeated before its projection, because devices share rows.
        probe = jnp.broadcast_to(probe, (len(patches), 1, patches.shape[-1]))
        heads = (split_heads(x, self.heads) for x in (self.query(probe), self.key(patches), self.value(patches)))
        attended: Any = ops.attention(*heads, axes=ATTENTION)
        x = self.output(join_heads(attended))
        return (x + self.down(activate(self.up(self.norm(x)), "gelu_tanh")))[:, 0]


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
      pools: adds the pooling head, for `pooled`.
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
        pools: bool = False,
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
        build = Build(config.embed, config.layers, std, residual_std, norm, param_dtype, block_key)
        self.blocks = TowerBlock(config, build, activation="gelu_tanh")
        self.norm = LayerNorm.single(config.embed, config.norm_epsilon, PATCHES, param_dtype)
        # Its key leaves the keys of the tower unchanged.
        pool: dict[str, Any] = {"std": std, "residual_std": residual_std, "key": jax.random.fold_in(key, 3)}
        self.pool = AttentionPool(config, param_dtype=param_dtype, **pool) if pools else None

    def __call__(self, pixels: UInt8[Array, "images side side channels"]) -> Patches:
        """Returns the features of each patch, row by row, in `dtype`.

        Args:
          pixels: square images with sides of `config.image_size`; values in [0, 255] are scaled to [-1, 1].
        """
        return self.norm(run_blocks(self.blocks, self._embedded(pixels), remat=self.remat))

    def pooled(self, pixels: UInt8[Array, "images side side channels"]) -> Float[Array, "images embed"]:
        """Returns one feature vector per image, in `dtype`.

        Raises:
          ArgumentError: the tower was built without a pooling head.
        """
        if self.pool is None:
            raise ArgumentError("The tower has no pooling head. Build it with pools=True.")
        return self.pool(self(pixels))

    def _embedded(self, pixels: jax.Array) -> Patches:
        config = self.config
        flat = cut_images(pixels.astype(jnp.float32) / 127.5 - 1.0, config, self.dtype)
        x = project_patches(flat, self.patches[...].reshape(config.embed, -1).T, self.patch_bias[...])
        return x + gather_table(self.positions[...]).astype(x.dtype)


def cut_images(
    images: Float[Array, "images side side channels"], config: SiglipConfig, dtype: FloatName
) -> Float[Array, "images patches values"]:
    """Cuts images into patches, row by row, in `dtype`; values are ordered [channels, patch, patch]."""
    count = config.side_patches
    images = images[:, : count * config.patch, : count * config.patch].astype(dtype)
    cut = images.reshape(len(images), count, config.patch, count, config.patch, config.channels)
    return cut.transpose(0, 1, 3, 5, 2, 4).reshape(len(images), count**2, -1)


_NAMES = {
    "patches": "embeddings.patch_embedding.weight",
    "patch_bias": "embeddings.patch_embedding.bias",
    "positions": "embeddings.position_embedding.weight",
    "norm/scale": "post_layernorm.weight",
    "norm/bias": "post_layernorm.bias",
}


def siglip_rules(config: SiglipConfig, *, parameter: str, tensor: str) -> list[WeightRule]:
    """Returns the locations of a tower's parameters in a Hugging Face checkpoint.

    Args:
      parameter: prefix of the parameters' paths, such as "vision/".
      tensor: prefix of the tensors' names, such as "vision_tower.vision_model.".
    """
    rules = [WeightRule(parameter + path, tensor + name) for path, name in _NAMES.items()]
    return [*rules, *block_rules(config.layers, parameter=f"{parameter}blocks/", tensor=tensor)]


def block_rules(layers: int, *, parameter: str, tensor: str) -> list[WeightRule]:
    """Returns the locations of the parameters of stacked layers; see `siglip_rules`."""
    rules = []
    for path, name in BLOCK_NAMES.items():
        base = f"{tensor}encoder.layers.{{layer}}.{name}"
        weight = "scale" if path.endswith("norm") else "kernel"
        matrix = weight == "kernel"
        rules.append(WeightRule(f"{parameter}{path}/{weight}", f"{base}.weight", range(layers), transposed=matrix))
        rules.append(WeightRule(f"{parameter}{path}/bias", f"{base}.bias", range(layers)))
    return rules


def pool_rules(*, parameter: str, tensor: str) -> list[WeightRule]:
    """Returns the locations of the pooling head's parameters; see `siglip_rules`.

    torch stores the three projections of attention in one tensor.
    """
    rules = [WeightRule(f"{parameter}probe", f"{tensor}probe")]
    for place, path in enumerate(("query", "key", "value")):
        part: dict[str, Any] = {"part": (place, 3)}
        rules.append(
            WeightRule(f"{parameter}{path}/kernel", f"{tensor}attention.in_proj_weight", **part, transposed=True)
        )
        rules.append(WeightRule(f"{parameter}{path}/bias", f"{tensor}attention.in_proj_bias", **part, part_axis=-1))
    for path, name in (("output", "attention.out_proj"), ("up", "mlp.fc1"), ("down", "mlp.fc2")):
        rules.append(WeightRule(f"{parameter}{path}/kernel", f"{tensor}{name}.weight", transposed=True))
        rules.append(WeightRule(f"{parameter}{path}/bias", f"{tensor}{name}.bias"))
    for path, name in (("scale", "weight"), ("bias", "bias")):
        rules.append(WeightRule(f"{parameter}norm/{path}", f"{tensor}layernorm.{name}"))
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
_FIXED = {"hidden_act": "gelu_pytorch_tanh"}


def read_siglip(reader: Reader, *, pools: bool = False) -> dict[str, Any]:
    """Reads the fields of a `SiglipConfig` from a `vision_config`; unsupported settings are added to the problems.

    Args:
      pools: True for a tower with a pooling head, as in contrastive training; language models use the patches.
    """
    for name, value in {**_FIXED, "vision_use_head": pools}.items():
        reader.expect(name, value)
    return {each.ours: reader.get(*each.names, default=each.default) for each in _SETTINGS}


def write_siglip(config: SiglipConfig, *, pools: bool = False) -> dict[str, Any]:
    """Returns the `vision_config` of a tower."""
    settings = {each.names[0]: getattr(config, each.ours) for each in _SETTINGS}
    return {"model_type": "siglip_vision_model", **settings, **_FIXED, "vision_use_head": pools}
