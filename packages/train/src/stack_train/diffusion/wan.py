"""Wan 2.1: patches of a video attend to each other and to a text; positions rotate by frame, row and column.

It is equivalent to diffusers' `WanTransformer3DModel` for text to video. Videos are [batch, frames, height, width,
channels], latents of `autoencoder_kl_wan`.

Source: Wan Team, Wan: Open and Advanced Large-Scale Video Generative Models, 2025 (arXiv:2503.20314).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import constrain
from stack_train.diffusion.components import Component
from stack_train.diffusion.denoiser import Condition, Images, Predicted, predicted_halfway, unconditional
from stack_train.diffusion.joint_blocks import Embedder, embedder_names, make_linear
from stack_train.diffusion.layers import (
    TOKENS,
    Heads,
    Tokens,
    modulated,
    patches_of,
    rotated,
    split_heads,
    unmasked_attention,
    unpatched,
    waves,
)
from stack_train.models.reader import Reader, Setting
from stack_train.nn.build import Build
from stack_train.nn.linear import FloatName
from stack_train.nn.residual import Norm
from stack_train.nn.stack import RematPolicy, scan_layers

__all__ = ["COMPONENT", "FAMILY", "Wan", "WanConfig"]

_ALL_HEADS = ("batch", "seq", "act_heads")


@config
class WanConfig:
    """Size and numerics of a Wan. The defaults match Wan 2.1 1.3B for 81 frames of 480 x 480 pixels.

    Attributes:
      name: selects this family.
      image_size: height and width of the latents, a multiple of `patch`.
      frames: number of frames of the latents: one for the first frame of a video, and one per four others.
      channels: channels of the latents.
      patch: height and width of a patch, which has one frame.
      layers: number of blocks.
      heads: number of attention heads.
      head_dim: width of a head; the residual stream is heads * head_dim wide. Rotary positions of rows and columns use
        2 floor(head_dim / 6) features each, and positions of frames use the rest.
      mlp: hidden width of the feed-forward layers.
      text_dim: features of each text token.
      text_tokens: number of tokens in a text.
      time_features: sines and cosines of an embedded timestep.
      cross_norm: norms the input of the attention to the text.
      max_positions: largest number of frames, and of rows and columns of patches.
      norm_epsilon: added to the variance or the mean square in norms.
      initializer_std: standard deviation of the initial weights.
      dtype: dtype of the activations.
      param_dtype: dtype of the parameters.
      remat: values of each layer that are saved for the backward pass; the others are recomputed. "none" saves all,
        "dots" matrix products, "dots_no_batch" matrix products except attention's, "full" only the layer's input.
      unroll: compiles every layer separately in training instead of a loop, which makes steps faster and compilation
        slower. None does so for up to 32 layers on a single GPU.
    """

    name: Literal["wan"] = "wan"
    image_size: PositiveInt = 60
    frames: PositiveInt = 21
    channels: PositiveInt = 16
    patch: PositiveInt = 2
    layers: PositiveInt = 30
    heads: PositiveInt = 12
    head_dim: PositiveInt = 128
    mlp: PositiveInt = 8960
    text_dim: PositiveInt = 4096
    text_tokens: PositiveInt = 512
    time_features: PositiveInt = 256
    cross_norm: bool = True
    max_positions: PositiveInt = 1024
    norm_epsilon: PositiveFloat = 1e-6
    initializer_std: PositiveFloat = 0.02
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"
    remat: RematPolicy = "none"
    unroll: bool | None = None

    def __post_init__(self) -> None:
        if self.head_dim % 2 or self.head_dim < 6:
            raise ConfigError(
                f"head_dim={self.head_dim}: frames, rows and columns rotate pairs of features. Take an even "
                "number from 6."
            )
        if self.time_features % 2:
            raise ConfigError(f"time_features={self.time_features} are sines and cosines. Take an even number.")
        if self.frames > self.max_positions:
            raise ConfigError(f"frames={self.frames} exceed max_positions={self.max_positions}. Take fewer frames.")
        self.check_size(self.image_size, self.image_size)

    @property
    def embed(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    @property
    def rope_axes(self) -> tuple[int, int, int]:
        """Features of a head that rotate with the frame, the row and the column."""
        side = 2 * (self.head_dim // 6)
        return self.head_dim - 2 * side, side, side

    @property
    def classes(self) -> int:
        """Labels, of which the model takes none."""
        return 0

    @property
    def pooled_dim(self) -> int:
        """Features of a pooled text, of which the model takes none."""
        return 0

    @property
    def zero_unconditional(self) -> bool:
        """Unconditional predictions use the encoded empty prompt, not zeros."""
        return False

    def check_size(self, height: int, width: int) -> None:
        """Raises a ConfigError if the model does not support latents of this size."""
        if height % self.patch or width % self.patch:
            raise ConfigError(
                f"Latents of {height} x {width} are not multiples of patch={self.patch}. Take other sides (image_size)."
            )
        if max(height, width) > (limit := self.patch * self.max_positions):
            raise ConfigError(
                f"Latents of {height} x {width} exceed {limit}, patch={self.patch} times max_positions="
                f"{self.max_positions}. Take smaller videos."
            )


class Attention(nnx.Module):
    """Attention from patches to a source; queries and keys are normed over all heads."""

    def __init__(self, build: Build, heads: int) -> None:
        embed, self.heads, self.norm = build.embed, heads, build.norm
        self.query = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.key = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.value = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.query_norm, self.key_norm = build.scale(embed, "heads"), build.scale(embed, "heads")
        self.output = build.linear((embed, embed), ("heads", "embed"), bias=True)

    def __call__(
        self,
        x: Tokens,
        source: Float[Array, "batch kv_seq embed"],
        rotate: Callable[[Heads], Heads] = lambda heads: heads,
    ) -> Tokens:
        query = split_heads(self.norm(self.query(x), self.query_norm, _ALL_HEADS), self.heads, "heads")
        key = split_heads(self.norm(self.key(source), self.key_norm, _ALL_HEADS), self.heads, "heads")
        value = split_heads(self.value(source), self.heads, "heads")
        return self.output(unmasked_attention(rotate(query), rotate(key), value))


class Block(nnx.Module):
    """Attention among patches, attention to the text, and a feed-forward layer; called with one layer's slice."""

    def __init__(self, config: WanConfig, build: Build) -> None:
        embed, self.epsilon = config.embed, config.norm_epsilon
        # Added to the embedded timestep: shift, scale and gate for the attention, and for the feed-forward layer.
        self.table = build.normal((1, 6, embed), (None, None, None), std=embed**-0.5)
        self.attention = Attention(build.child(), config.heads)
        self.cross_attention = Attention(build.child(), config.heads)
        self.cross_scale = build.full(embed, None, 1.0) if config.cross_norm else None
        self.cross_offset = build.full(embed, None, 0.0) if config.cross_norm else None
        self.up = build.linear((embed, config.mlp), ("embed", "mlp"), bias=True)
        self.down = build.linear((config.mlp, embed), ("mlp", "embed"), bias=True)

    def __call__(
        self, x: Tokens, text: Float[Array, "batch text embed"], modulation: Float[Array, "batch 6 embed"], rotate: Any
    ) -> Tokens:
        parts = (self.table[...].astype(modulation.dtype) + modulation).swapaxes(0, 1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
        normed = modulated(x, shift, scale, epsilon=self.epsilon)
        x = x + gate[:, None] * self.attention(normed, normed, rotate)
        x = x + self.cross_attention(self._cross_normed(x), text)
        normed = modulated(x, mlp_shift, mlp_scale, epsilon=self.epsilon)
        wide = constrain(self.up(normed), "batch", "seq", "act_mlp", name="a block's feed-forward layer")
        return x + mlp_gate[:, None] * self.down(jax.nn.gelu(wide, approximate=True))

    def _cross_normed(self, x: Tokens) -> Tokens:
        if self.cross_scale is None or self.cross_offset is None:
            return x
        scale, offset = self.cross_scale[...], self.cross_offset[...]
        normed: Any = ops.norm(x, scale, offset=offset, kind="layer", epsilon=self.epsilon, axes={"x": TOKENS})
        return normed


class Wan(nnx.Module):
    """A `Denoiser` of videos whose condition is "text", [batch, tokens, text_dim].

    The last layer starts at 0, so the model predicts 0 at first.
    """

    def __init__(self, config: WanConfig, *, key: jax.Array) -> None:
        self.config = config
        embed, features, std = config.embed, config.channels * config.patch**2, config.initializer_std
        keys = jax.random.split(key, 7)
        self.patches = make_linear(config, (features, embed), (None, "embed"), keys[0])
        self.text_in = Embedder(config, config.text_dim, keys[1], activation=partial(jax.nn.gelu, approximate=True))
        self.time = Embedder(config, config.time_features, keys[2])
        self.modulation = make_linear(config, (embed, 6 * embed), ("embed", None), keys[3])
        norm = Norm(epsilon=config.norm_epsilon)
        self.blocks = Block(config, Build(embed, config.layers, std, std, norm, config.param_dtype, keys[4]))
        values = embed**-0.5 * jax.random.normal(keys[5], (1, 2, embed), config.param_dtype)
        self.last_table = nnx.Param(values, logical_axes=(None, None, None))
        self.last = make_linear(config, (embed, features), ("embed", None), keys[6], std=0.0)

    def __call__(self, images: Images, timesteps: Float[Array, " batch"], condition: Condition) -> Predicted:
        config, (batch, frames, height, width, channels) = self.config, images.shape
        config.check_size(height, width)
        if frames > config.max_positions:
            raise ConfigError(f"Latents of {frames} frames exceed max_positions={config.max_positions}. Take fewer.")
        # Patches have one frame each, so frames are cut like images: [batch * frames, rows * columns, features].
        cut = patches_of(images.astype(config.dtype).reshape(-1, height, width, channels), config.patch)
        x = self.patches(cut.reshape(batch, -1, cut.shape[-1]))
        text = self.text_in(condition["text"].astype(config.dtype))
        time = self.time(waves(timesteps, config.time_features, last=0).astype(config.dtype))
        modulation = self.modulation(jax.nn.silu(time)).reshape(batch, 6, config.embed)
        places = _places(batch, frames, height // config.patch, width // config.patch)

        def run(block: Block, x: Tokens, per_row: Any, _: None) -> tuple[Tokens, None]:
            text, modulation, places = per_row
            return block(x, text, modulation, partial(rotated, places=places, axes=config.rope_axes)), None

        per_row, options = (text, modulation, places), {"remat": config.remat, "unroll": config.unroll}
        x, _ = scan_layers(run, [self.blocks], x, [None], per_row=per_row, moves=True, **options)
        shift, scale = (self.last_table[...].astype(time.dtype) + time[:, None]).swapaxes(0, 1)
        x = self.last(modulated(x, shift, scale, epsilon=config.norm_epsilon))
        x = x.reshape(batch * frames, -1, x.shape[-1])
        predicted = unpatched(x, config.patch, height, width, channels_last=True)
        return predicted.reshape(images.shape).astype(jnp.float32)

    def on_batch(self, batch: Mapping[str, jax.Array]) -> Predicted:
        """See `RunsOnBatches`."""
        return predicted_halfway(self, batch)

    def unconditional(self, condition: Condition) -> Condition:
        """See `unconditional`."""
        return unconditional(condition)


def _places(batch: int, frames: int, rows: int, columns: int) -> Int[Array, "batch seq axes"]:
    """Returns frame, row and column of each patch."""
    grid = jnp.stack(jnp.meshgrid(*map(jnp.arange, (frames, rows, columns)), indexing="ij"), axis=-1)
    return jnp.broadcast_to(grid.reshape(-1, 3), (batch, frames * rows * columns, 3))


class WanFamily:
    """The `ModelFamily` of Wan."""

    name = "wan"
    config_class = WanConfig

    def build(self, config: WanConfig, *, key: jax.Array) -> Wan:
        return Wan(config, key=key)


FAMILY = WanFamily()

_BLOCK = "blocks.{layer}."
_ATTENTION = {
    "query": "to_q",
    "key": "to_k",
    "value": "to_v",
    "query_norm": "norm_q.weight",
    "key_norm": "norm_k.weight",
    "output": "to_out.0",
}


def _read_patches(reader: Reader) -> dict[str, Any]:
    frames, *sides = reader.get("patch_size", default=[1, 2, 2])
    if frames != 1 or len(set(sides)) != 1:
        reader.problems.append(f"patch_size={[frames, *sides]}, not of one frame and square")
    channels = reader.get("in_channels", default=16)
    if (predicted := reader.get("out_channels", default=16)) not in (None, channels):
        reader.problems.append(f"out_channels={predicted!r}, not in_channels, {channels}")
    for key in ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len"):
        if (given := reader.get(key)) is not None:
            reader.problems.append(f"{key}={given!r}, of image to video, not None")
    # Files lack the sizes of videos.
    patches = reader.get("rope_max_seq_len", default=1024)
    return {"patch": sides[0], "image_size": sides[0] * min(30, patches), "frames": min(21, patches)}


COMPONENT = Component(
    class_name="WanTransformer3DModel",
    family=FAMILY,
    settings=(
        Setting("channels", ("in_channels",), 16),
        Setting("layers", ("num_layers",), 40),
        Setting("heads", ("num_attention_heads",), 40),
        Setting("head_dim", ("attention_head_dim",), 128),
        Setting("mlp", ("ffn_dim",), 13_824),
        Setting("text_dim", ("text_dim",), 4096),
        Setting("time_features", ("freq_dim",), 256),
        Setting("cross_norm", ("cross_attn_norm",), True),
        Setting("max_positions", ("rope_max_seq_len",), 1024),
        Setting("norm_epsilon", ("eps",), 1e-6),
    ),
    fixed={"qk_norm": "rms_norm_across_heads"},
    read_others=_read_patches,
    write_others=lambda config: {
        "patch_size": [1, config.patch, config.patch],
        "out_channels": config.channels,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "pos_embed_seq_len": None,
    },
    names={
        "patches": "patch_embedding",
        **embedder_names({"time": "time_embedder", "text_in": "text_embedder"}, "condition_embedder"),
        "modulation": "condition_embedder.time_proj",
        "blocks/table": _BLOCK + "scale_shift_table",
        **{f"blocks/attention/{ours}": f"{_BLOCK}attn1.{theirs}" for ours, theirs in _ATTENTION.items()},
        **{f"blocks/cross_attention/{ours}": f"{_BLOCK}attn2.{theirs}" for ours, theirs in _ATTENTION.items()},
        "blocks/cross_scale": _BLOCK + "norm2.weight",
        "blocks/cross_offset": _BLOCK + "norm2.bias",
        "blocks/up": _BLOCK + "ffn.net.0.proj",
        "blocks/down": _BLOCK + "ffn.net.2",
        "last_table": "scale_shift_table",
        "last": "proj_out",
    },
    squares=lambda config: {"patches": (config.channels, 1, config.patch, config.patch)},
)
