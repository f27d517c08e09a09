"""Gemma 4's vision tower: a transformer over the patches of images of any size.

Patches have learned and rotary positions by row and column, and attend to the patches of their image. A token is the
average of a square of patches. Outputs match transformers' `Gemma4VisionModel`.

Source: transformers, `Gemma4VisionModel`.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8
from pydantic import PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import LogicalAxes
from stack_core.ops.references.rope_scaling import unscaled_frequencies
from stack_train.models.reader import Reader, Setting
from stack_train.models.weight_map import WeightRule
from stack_train.nn.axial_rope import rotate_axes
from stack_train.nn.build import Build, Parameter
from stack_train.nn.linear import FloatName, take_rows
from stack_train.nn.residual import Norm
from stack_train.nn.stack import RematPolicy, scan_layers
from stack_train.vision.grids import PatchPlaces, patch_places
from stack_train.vision.packed_patches import PATCHES, Patches, embed_patches, gather_table, join_heads, split_heads

__all__ = [
    "CHANNELS",
    "Gemma4Tower",
    "Gemma4TowerConfig",
    "gemma4_tower_rules",
    "read_gemma4_tower",
    "write_gemma4_tower",
]

CHANNELS: Final = 3
_HALF: Final = (0.5,) * CHANNELS  # scales pixels to [-1, 1]
_HEADS: Final[LogicalAxes] = ("batch", None, "act_heads", None)
_KV_HEADS: Final[LogicalAxes] = ("batch", None, "act_kv_heads", None)
_ATTENTION: Final = {"query": _HEADS, "key": _KV_HEADS, "value": _KV_HEADS}

Heads = Float[Array, "batch patches heads head_dim"]


@config
class Gemma4TowerConfig:
    """Size of a Gemma 4 tower.

    Attributes:
      embed: width of the residual stream.
      mlp: hidden width of the feed-forward layers.
      layers: number of layers.
      heads: number of query heads.
      kv_heads: number of key-value heads, a divisor of `heads`; None has one per query head.
      head_dim: width of a head; divisible by 4.
      patch: side of a patch in pixels.
      merge: side, in patches, of the squares that are averaged to a token.
      positions: number of learned positions of rows and of columns, in patches.
      rope_theta: base of the rotary frequencies.
      norm_epsilon: term added to the mean square in RMS norms.
      clipped: clips the inputs and outputs of all matrices in the layers to stored limits.
      standardize: shifts and scales the features of tokens by stored vectors.
    """

    embed: PositiveInt = 256
    mlp: PositiveInt = 1024
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    kv_heads: PositiveInt | None = None
    head_dim: PositiveInt = 64
    patch: PositiveInt = 16
    merge: PositiveInt = 3
    positions: PositiveInt = 10_240
    rope_theta: PositiveFloat = 100.0
    norm_epsilon: PositiveFloat = 1e-6
    clipped: bool = False
    standardize: bool = False

    def __post_init__(self) -> None:
        if self.head_dim % 4:
            raise ConfigError(
                f"head_dim={self.head_dim} is not a multiple of 4: rotary positions turn pairs of features by rows and "
                "by columns. Change it."
            )
        if self.heads % self.kv_head_count:
            raise ConfigError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; change one of them.")

    @property
    def kv_head_count(self) -> int:
        """Number of key-value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def patch_values(self) -> int:
        """Number of values of a patch."""
        return CHANNELS * self.patch**2


class Limits(nnx.Module):
    """Limits of the inputs and outputs of a matrix, one each per layer, which are not trained."""

    def __init__(self, build: Build) -> None:
        def limit(value: float) -> Parameter:
            values = jnp.full(build.repeats, value, build.param_dtype)
            return nnx.Param(values, logical_axes=("layers",), trained=False)

        self.input_min, self.output_min = limit(-jnp.inf), limit(-jnp.inf)
        self.input_max, self.output_max = limit(jnp.inf), limit(jnp.inf)


class ClippedLinear(nnx.Module):
    """y = clip(clip(x) W), or y = x W without limits."""

    def __init__(
        self, build: Build, shape: tuple[int, int], axes: tuple[str, str], *, clipped: bool, residual: bool = False
    ) -> None:
        self.linear = build.linear(shape, axes, residual=residual)
        self.limits = Limits(build) if clipped else None

    def __call__(self, x: Float[Array, "batch patches d_in"]) -> Float[Array, "batch patches d_out"]:
        if self.limits is None:
            return self.linear(x)
        x = jnp.clip(x, self.limits.input_min.astype(x.dtype), self.limits.input_max.astype(x.dtype))
        y = self.linear(x)
        return jnp.clip(y, self.limits.output_min.astype(y.dtype), self.limits.output_max.astype(y.dtype))


class TowerBlock(nnx.Module):
    """h = x + norm(attention(norm(x))); y = h + norm(feed_forward(norm(h))).

    Attention is softmax(rope(norm(x Q)) rope(norm(x K))^T) norm(x V) O; the norm of values lacks a scale.
    Parameters are stacked, [layers, ...].
    """

    def __init__(self, config: Gemma4TowerConfig, build: Build) -> None:
        embed, self.config, self.norm = config.embed, config, build.norm
        queries, keys = config.heads * config.head_dim, config.kv_head_count * config.head_dim

        def linear(shape: tuple[int, int], axes: tuple[str, str], *, residual: bool = False) -> ClippedLinear:
            return ClippedLinear(build, shape, axes, clipped=config.clipped, residual=residual)

        self.query = linear((embed, queries), ("embed", "heads"))
        self.key = linear((embed, keys), ("embed", "kv_heads"))
        self.value = linear((embed, keys), ("embed", "kv_heads"))
        self.output = linear((queries, embed), ("heads", "embed"), residual=True)
        self.gate = linear((embed, config.mlp), ("embed", "mlp"))
        self.up = linear((embed, config.mlp), ("embed", "mlp"))
        self.down = linear((config.mlp, embed), ("mlp", "embed"), residual=True)
        self.query_norm, self.key_norm = (build.scale(config.head_dim, "head_dim") for _ in range(2))
        self.attention_norm, self.attention_output_norm = build.scale(embed), build.scale(embed)
        self.feed_forward_norm, self.feed_forward_output_norm = build.scale(embed), build.scale(embed)

    def __call__(self, x: Patches, places: PatchPlaces) -> Patches:
        attended = self._attend(self.norm(x, self.attention_norm, PATCHES), places)
        x = x + self.norm(attended, self.attention_output_norm, PATCHES)
        normed = self.norm(x, self.feed_forward_norm, PATCHES)
        gated = jax.nn.gelu(self.gate(normed), approximate=True) * self.up(normed)
        return x + self.norm(self.down(gated), self.feed_forward_output_norm, PATCHES)

    def _attend(self, x: Patches, places: PatchPlaces) -> Patches:
        heads, kv_heads = self.config.heads, self.config.kv_head_count
        query = self.norm(split_heads(self.query(x), heads), self.query_norm, _HEADS)
        key = self.norm(split_heads(self.key(x), kv_heads, "act_kv_heads"), self.key_norm, _KV_HEADS)
        projected = split_heads(self.value(x), kv_heads, "act_kv_heads")
        value: Any = ops.norm(projected, epsilon=self.norm.epsilon, axes={"x": _KV_HEADS})
        segments = ops.PackedSegments.of(places.segments)
        query, key = (self._rotate(each, places) for each in (query, key))
        attended: Any = ops.attention(query, key, value, segment_ids=segments, scale=1.0, axes=_ATTENTION)
        return self.output(join_heads(attended))

    def _rotate(self, x: Heads, places: PatchPlaces) -> Heads:
        """Turns the first half of each head by the column and the second by the row.

        Pairs are within the halves. The result has the quarters of a head in the order 0, 2, 1, 3, which changes no
        score, because queries and keys have the same order.
        """
        quarters = x.reshape(*x.shape[:-1], 2, 2, -1).swapaxes(-3, -2).reshape(x.shape)
        inverse = unscaled_frequencies(self.config.rope_theta, self.config.head_dim // 2)
        return rotate_axes(quarters, places.places, np.repeat([1, 0], len(inverse)), np.tile(inverse, 2))


class Gemma4Tower(nnx.Module):
    """Packed patches of images to one feature vector per token.

    Initial values: matrices and learned positions are normal with standard deviation `std`, or std / sqrt(2 layers) if
    they write to the residual stream; norms start as the identity, and limits as infinite.

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
        config: Gemma4TowerConfig,
        *,
        std: float,
        dtype: FloatName,
        param_dtype: FloatName,
        remat: RematPolicy = "none",
        key: jax.Array,
    ) -> None:
        self.config, self.dtype, self.remat = config, dtype, remat
        patch_key, position_key, block_key = jax.random.split(key, 3)
        # In torch's layout, [d_out, d_in].
        patches = std * jax.random.normal(patch_key, (config.embed, config.patch_values), param_dtype)
        self.patches = nnx.Param(patches, logical_axes=("embed", None))
        positions = std * jax.random.normal(position_key, (2, config.positions, config.embed), param_dtype)
        self.positions = nnx.Param(positions, logical_axes=(None, None, "embed"))
        residual_std, norm = std / (2 * config.layers) ** 0.5, Norm(epsilon=config.norm_epsilon)
        build = Build(config.embed, config.layers, std, residual_std, norm, param_dtype, block_key)
        self.blocks = TowerBlock(config, build)

        def vector(value: float) -> Parameter | None:
            values = jnp.full(config.embed, value, param_dtype)
            return nnx.Param(values, logical_axes=(None,), trained=False) if config.standardize else None

        self.shift, self.scale = vector(0.0), vector(1.0)

    def __call__(
        self, pixels: UInt8[Array, "batch patches values"], grids: Int[Array, "batch images 2"]
    ) -> Float[Array, "batch tokens embed"]:
        """Returns the features of each token in `dtype`.

        Args:
          pixels: packed patches of each row's images, whose values are ordered [channels, patch, patch]. The patches of
            a token are adjacent.
          grids: rows and columns of tokens of each image; 0 for images that a row lacks.
        """
        config, places = self.config, patch_places(grids, pixels.shape[1], self.config.merge)

        def run(block: TowerBlock, x: Patches, places: PatchPlaces, _: None) -> tuple[Patches, None]:
            return block(x, places), None

        options: Any = {"per_row": places, "remat": self.remat, "unroll": False, "moves": False}
        x, _ = scan_layers(run, [self.blocks], self._embed(pixels, places), [None], **options)
        squares = x.reshape(len(x), -1, config.merge**2, config.embed)
        tokens = jnp.mean(squares, axis=2, dtype=jnp.float32) * config.embed**0.5
        if self.shift is not None and self.scale is not None:
            shift, scale = (each[...].astype(jnp.float32) for each in (self.shift, self.scale))
            tokens = (tokens - shift) * scale
        return tokens.astype(self.dtype)

    def _embed(self, pixels: UInt8[Array, "batch patches values"], places: PatchPlaces) -> Patches:
        config = self.config
        # The values of a patch are stored in the order [patch, patch, channels].
        kernel = self.patches[...].reshape(config.embed, config.patch, config.patch, CHANNELS)
        kernel = kernel.transpose(3, 1, 2, 0).reshape(-1, config.embed)
        x = embed_patches(pixels, kernel, None, mean=_HALF, std=_HALF, dtype=self.dtype)
        columns, rows = gather_table(self.positions[...])
        found = take_rows(columns, places.places[..., 1]) + take_rows(rows, places.places[..., 0])
        return x + found.astype(x.dtype)


_NAMES = {"patches": "patch_embedder.input_proj.weight", "positions": "patch_embedder.position_embedding_table"}
_VECTOR_NAMES = {"shift": "std_bias", "scale": "std_scale"}
_LINEAR_NAMES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_NORM_NAMES = {
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_output_norm": "post_feedforward_layernorm",
}
_LIMITS = ("input_min", "input_max", "output_min", "output_max")


def gemma4_tower_rules(config: Gemma4TowerConfig, *, parameter: str, tensor: str) -> list[WeightRule]:
    """Returns the locations of a tower's parameters in a Hugging Face checkpoint.

    Args:
      parameter: prefix of the parameters' paths, such as "vision/".
      tensor: prefix of the tensors' names, such as "model.vision_tower.".
    """
    names = {**_NAMES, **(_VECTOR_NAMES if config.standardize else {})}
    rules = [WeightRule(parameter + path, tensor + name) for path, name in names.items()]
    layers, blocks, prefix = range(config.layers), f"{parameter}blocks/", f"{tensor}encoder.layers.{{layer}}."
    for path, name in _LINEAR_NAMES.items():
        kernel = f"{prefix}{name}.linear.weight"
        rules.append(WeightRule(f"{blocks}{path}/linear/kernel", kernel, layers, transposed=True))
        limits = _LIMITS if config.clipped else ()
        rules += [WeightRule(f"{blocks}{path}/limits/{limit}", f"{prefix}{name}.{limit}", layers) for limit in limits]
    rules += [WeightRule(blocks + path, f"{prefix}{name}.weight", layers) for path, name in _NORM_NAMES.items()]
    return rules


_SETTINGS = (
    Setting("embed", ("hidden_size",), 768),
    Setting("mlp", ("intermediate_size",), 3072),
    Setting("layers", ("num_hidden_layers",), 16),
    Setting("heads", ("num_attention_heads",), 12),
    Setting("kv_heads", ("num_key_value_heads",), 12, "kv_head_count"),
    Setting("head_dim", ("head_dim",), 64),
    Setting("patch", ("patch_size",), 16),
    Setting("merge", ("pooling_kernel_size",), 3),
    Setting("positions", ("position_embedding_size",), 10_240),
    Setting("norm_epsilon", ("rms_norm_eps",), 1e-6),
    Setting("clipped", ("use_clipped_linears",), False),
    Setting("standardize", ("standardize",), False),
)
_KIND: Final = "gemma4_vision"
_FIXED: Final = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}


def read_gemma4_tower(reader: Reader) -> dict[str, Any]:
    """Reads the fields of a `Gemma4TowerConfig` from a `vision_config`; adds unsupported settings to `problems`."""
    found = {each.ours: reader.get(*each.names, default=each.default) for each in _SETTINGS}
    if (kind := reader.get("model_type", default=_KIND)) != _KIND:
        reader.problems.append(f"vision_config with model_type={kind!r}, not {_KIND!r}")
    for name, value in _FIXED.items():
        reader.expect(name, value)
    reader.expect("global_head_dim", found["head_dim"])
    # The processor bounds the number of tokens, and positions are bounded by the table of learned ones.
    reader.get("default_output_length", "max_position_embeddings", "initializer_range")
    rope = reader.get("rope_parameters") or {}
    if unknown := {name: value for name, value in rope.items() if name not in ("rope_theta", "rope_type")}:
        reader.problems.append(f"rope_parameters with {unknown}")
    # transformers reads "default", which published files have, as "axial".
    if (kind := rope.get("rope_type", "axial")) not in ("axial", "default"):
        reader.problems.append(f"rope_type={kind!r} of the tower, not 'axial'")
    kv_heads = None if found["kv_heads"] == found["heads"] else found["kv_heads"]
    return {**found, "kv_heads": kv_heads, "rope_theta": float(rope.get("rope_theta") or 100.0)}


def write_gemma4_tower(config: Gemma4TowerConfig) -> dict[str, Any]:
    """Returns the `vision_config` of a tower."""
    return {
        "model_type": _KIND,
        **{each.names[0]: getattr(config, each.resolved or each.ours) for each in _SETTINGS},
        **_FIXED,
        "rope_parameters": {"rope_type": "axial", "rope_theta": config.rope_theta},
    }
