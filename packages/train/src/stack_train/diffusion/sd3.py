"""Stable Diffusion 3 and 3.5: text and image attend together in two streams, and positions are added to patches.

It is equivalent to diffusers' `SD3Transformer2DModel`. The last block updates the image only. In 3.5 medium, images
attend to themselves a second time in the first blocks.

Sources: Esser et al., Scaling Rectified Flow Transformers, 2024 (arXiv:2403.03206); Stability AI, Stable Diffusion 3.5,
2024.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.diffusion.components import Component
from stack_train.diffusion.denoiser import Condition, Images, Predicted, predicted_halfway, unconditional
from stack_train.diffusion.joint_blocks import (
    IMAGE_NAMES,
    TEXT_NAMES,
    WAVES,
    Embedder,
    HeadsOfStream,
    JointBlock,
    Projections,
    Stream,
    embedder_names,
    make_linear,
)
from stack_train.diffusion.layers import (
    Tokens,
    line_positions,
    modulated,
    patches_of,
    unmasked_attention,
    unpatched,
    waves,
)
from stack_train.models.reader import Reader, Setting
from stack_train.nn.build import Build
from stack_train.nn.linear import FloatName
from stack_train.nn.residual import Norm
from stack_train.nn.stack import RematPolicy, scan_layers

__all__ = ["COMPONENT", "FAMILY", "Sd3", "Sd3Config"]


@config
class Sd3Config:
    """Size and numerics of a Stable Diffusion 3. The defaults match Stable Diffusion 3 medium.

    Attributes:
      name: selects this family.
      image_size: height and width of the latents, a multiple of `patch`; sizes up to `patch * max_patches` fit.
      channels: channels of the latents.
      patch: height and width of a patch.
      layers: number of blocks.
      dual_layers: number of first blocks in which images attend to themselves a second time.
      heads: number of attention heads.
      head_dim: width of a head; the residual stream is heads * head_dim wide.
      qk_norm: norm queries and keys head by head, as in Stable Diffusion 3.5.
      text_dim, pooled_dim: features of each text token, and of the pooled text.
      text_tokens: number of tokens in a text, the sum for CLIP and T5.
      max_patches: rows and columns of the table of positions; images use its middle.
      initializer_std: standard deviation of the initial weights.
      dtype: dtype of the activations.
      param_dtype: dtype of the parameters.
      remat: values of each layer that are saved for the backward pass; the others are recomputed. "none" saves all,
        "dots" matrix products, "dots_no_batch" matrix products except attention's, "full" only the layer's input.
      unroll: compiles every layer separately in training instead of a loop, which makes steps faster and compilation
        slower. None does so for up to 32 layers on a single GPU.
    """

    name: Literal["sd3"] = "sd3"
    image_size: PositiveInt = 128
    channels: PositiveInt = 16
    patch: PositiveInt = 2
    layers: PositiveInt = 24
    dual_layers: NonNegativeInt = 0
    heads: PositiveInt = 24
    head_dim: PositiveInt = 64
    qk_norm: bool = False
    text_dim: PositiveInt = 4096
    pooled_dim: PositiveInt = 2048
    text_tokens: PositiveInt = 333
    max_patches: PositiveInt = 192
    initializer_std: PositiveFloat = 0.02
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"
    remat: RematPolicy = "none"
    unroll: bool | None = None

    def __post_init__(self) -> None:
        if self.dual_layers > self.layers:
            raise ConfigError(f"dual_layers={self.dual_layers} are more than layers={self.layers}. Take fewer.")
        if self.embed % 4:
            raise ConfigError(
                f"heads={self.heads} x head_dim={self.head_dim} is {self.embed} wide; positions take a multiple of 4: "
                "sines and cosines of rows and of columns."
            )
        self.check_size(self.image_size, self.image_size)

    @property
    def embed(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim

    @property
    def classes(self) -> int:
        """Labels, of which the model takes none."""
        return 0

    @property
    def zero_unconditional(self) -> bool:
        """Unconditional predictions use the encoded empty prompt, not zeros."""
        return False

    @property
    def groups(self) -> Mapping[str, tuple[int, int]]:
        """First layer and number of layers of each group of equal blocks, by the name of the module."""
        whole, dual = self.layers - 1, min(self.dual_layers, self.layers - 1)
        found = {"dual_blocks": (0, dual), "blocks": (dual, whole - dual), "last_block": (whole, 1)}
        return {name: group for name, group in found.items() if group[1]}

    def check_size(self, height: int, width: int) -> None:
        """Raises a ConfigError if the model does not support latents of this size."""
        if height % self.patch or width % self.patch:
            raise ConfigError(
                f"Latents of {height} x {width} are not multiples of patch={self.patch}. Take other sides (image_size)."
            )
        if max(height, width) > (limit := self.patch * self.max_patches):
            raise ConfigError(
                f"Latents of {height} x {width} exceed {limit}, patch={self.patch} times max_patches="
                f"{self.max_patches}, the sides of the table of positions. Take smaller images."
            )


class DualStream(Stream):
    """The stream of images with a second attention, to images only."""

    def __init__(self, build: Build, heads: int, *, normed: bool) -> None:
        super().__init__(build, heads, normed=normed, modulations=9)
        self.own_projections = Projections(build, heads, normed=normed)
        self.own_output = build.linear((build.embed, build.embed), ("heads", "embed"), bias=True)

    def before(self, x: Tokens, condition: Array) -> tuple[HeadsOfStream, list[Array]]:
        """Returns queries, keys and values, the remaining parts of the modulation, and the result of own attention."""
        shift, scale, *others, own_shift, own_scale, own_gate = jnp.split(self.modulation(condition), 9, axis=-1)
        own = unmasked_attention(*self.own_projections(modulated(x, own_shift, own_scale)))
        added = own_gate[:, None] * self.own_output(own)
        return self.projections(modulated(x, shift, scale)), [*others, added]

    def after(self, x: Tokens, attended: Tokens, modulation: list[Array]) -> Tokens:
        *others, added = modulation
        return super().after(x + added, attended, others)


class LastTextStream(nnx.Module):
    """The stream of text in the last block: images read it, and it does not change."""

    def __init__(self, build: Build, heads: int, *, normed: bool) -> None:
        # Scale and shift.
        self.modulation = build.linear((build.embed, 2 * build.embed), ("embed", None), bias=True, residual=True)
        self.projections = Projections(build, heads, normed=normed)

    def before(self, x: Tokens, condition: Array) -> tuple[HeadsOfStream, list[Array]]:
        """Returns queries, keys and values."""
        scale, shift = jnp.split(self.modulation(condition), 2, axis=-1)
        return self.projections(modulated(x, shift, scale)), []

    def after(self, x: Tokens, attended: Tokens, modulation: list[Array]) -> Tokens:
        return x


class Sd3(nnx.Module):
    """A `Denoiser` whose condition is "text", [batch, tokens, text_dim], and "pooled", [batch, pooled_dim].

    All modulation matrices (shift, scale, gate) start at 0 (adaLN-Zero). Each block therefore starts as the identity,
    and the last modulation does too.
    """

    def __init__(self, config: Sd3Config, *, key: jax.Array) -> None:
        self.config = config
        embed, features = config.embed, config.channels * config.patch**2
        keys = jax.random.split(key, 6)
        self.patches = make_linear(config, (features, embed), (None, "embed"), keys[0])
        # A buffer in diffusers, which is in its files, perhaps rounded.
        self.positions = nnx.Param(_table(config), logical_axes=(None, None, "embed"), trained=False)
        self.text_in = make_linear(config, (config.text_dim, embed), (None, "embed"), keys[1])
        self.time = Embedder(config, WAVES, keys[2])
        self.pooled = Embedder(config, config.pooled_dim, keys[3])
        for place, (name, (first, layers)) in enumerate(config.groups.items()):
            group_key = jax.random.fold_in(keys[4], place)
            build = Build(embed, layers, config.initializer_std, 0.0, Norm(epsilon=1e-6), config.param_dtype, group_key)
            image = DualStream if first < config.dual_layers else Stream
            text = LastTextStream if name == "last_block" else Stream
            streams = (each(build.child(), config.heads, normed=config.qk_norm) for each in (text, image))
            setattr(self, name, JointBlock(*streams))
        # Both start at 0, so sharing a key does not correlate any values.
        self.last_modulation = make_linear(config, (embed, 2 * embed), ("embed", None), keys[5], std=0.0)
        self.last = make_linear(config, (embed, features), ("embed", None), keys[5], std=0.0)

    def __call__(self, images: Images, timesteps: Float[Array, " batch"], condition: Condition) -> Predicted:
        config, (height, width) = self.config, images.shape[1:3]
        config.check_size(height, width)
        positions = self._positions(height // config.patch, width // config.patch)
        image = self.patches(patches_of(images.astype(config.dtype), config.patch)) + positions
        text = self.text_in(condition["text"].astype(config.dtype))
        embedded = self.time(waves(timesteps, WAVES, last=0).astype(config.dtype))
        embedded = jax.nn.silu(embedded + self.pooled(condition["pooled"].astype(config.dtype)))
        options: dict[str, Any] = {"remat": config.remat, "unroll": config.unroll, "moves": True}

        def run(block: Any, streams: Any, condition: Any, _: None) -> tuple[Any, None]:
            return block(streams, condition), None

        for name in config.groups:
            blocks = [getattr(self, name)]
            (text, image), _ = scan_layers(run, blocks, (text, image), [None], per_row=embedded, **options)
        # Scale before shift: the opposite order of the blocks, as in the published weights.
        scale, shift = jnp.split(self.last_modulation(embedded), 2, axis=-1)
        x = self.last(modulated(image, shift, scale))
        return unpatched(x, config.patch, height, width, channels_last=True).astype(jnp.float32)

    def on_batch(self, batch: Mapping[str, jax.Array]) -> Predicted:
        """See `RunsOnBatches`."""
        return predicted_halfway(self, batch)

    def unconditional(self, condition: Condition) -> Condition:
        """See `unconditional`."""
        return unconditional(condition)

    def _positions(self, rows: int, columns: int) -> Float[Array, "1 seq embed"]:
        """Returns the middle of the table of positions."""
        side = self.config.max_patches
        top, left = (side - rows) // 2, (side - columns) // 2
        table = self.positions[...].reshape(1, side, side, -1)[:, top : top + rows, left : left + columns]
        return table.reshape(1, rows * columns, -1).astype(self.config.dtype)


def _table(config: Sd3Config) -> Float[Array, "1 places embed"]:
    """Returns the initial positions, in which `max_patches` are as far apart as the patches of a training image."""
    side = config.max_patches
    unit = config.image_size // config.patch / side
    # The table of 3.5 medium has 0.9 GB. NumPy would compute it even if only shapes are needed.
    line = jnp.asarray(line_positions(unit * np.arange(side), config.embed // 2), config.param_dtype)
    across, down = (jnp.broadcast_to(each, (side, side, line.shape[1])) for each in (line[None], line[:, None]))
    return jnp.concatenate([across, down], axis=-1).reshape(1, side**2, config.embed)


class Sd3Family:
    """The `ModelFamily` of Stable Diffusion 3."""

    name = "sd3"
    config_class = Sd3Config

    def build(self, config: Sd3Config, *, key: jax.Array) -> Sd3:
        return Sd3(config, key=key)


FAMILY = Sd3Family()

_OWN = {
    "own_projections/query": "attn2.to_q",
    "own_projections/key": "attn2.to_k",
    "own_projections/value": "attn2.to_v",
    "own_projections/query_norm": "attn2.norm_q.weight",
    "own_projections/key_norm": "attn2.norm_k.weight",
    "own_output": "attn2.to_out.0",
}
_STREAMS = {"text": TEXT_NAMES, "image": {**IMAGE_NAMES, **_OWN}}
_NORMS = {None: False, "rms_norm": True}


def _read_settings(reader: Reader) -> dict[str, Any]:
    embed = reader.get("num_attention_heads", default=18) * reader.get("attention_head_dim", default=64)
    reader.expect("caption_projection_dim", embed)
    channels = reader.get("in_channels", default=16)
    if (predicted := reader.get("out_channels", default=16)) not in (None, channels):
        reader.problems.append(f"out_channels={predicted!r}, not in_channels, {channels}")
    if (norm := reader.get("qk_norm")) not in _NORMS:
        reader.problems.append(f"qk_norm={norm!r}, not None or 'rms_norm'")
    dual = list(reader.get("dual_attention_layers", default=()) or ())
    if dual != list(range(len(dual))):
        reader.problems.append(f"dual_attention_layers={dual}, which are not the first {len(dual)} layers in order")
    size = reader.get("pos_embed_max_size", default=96)
    if size is None:
        reader.problems.append("pos_embed_max_size=None, which is positions without a table")
    return {"dual_layers": len(dual), "qk_norm": _NORMS.get(norm, False), "max_patches": size}


COMPONENT = Component(
    class_name="SD3Transformer2DModel",
    family=FAMILY,
    settings=(
        Setting("image_size", ("sample_size",), 128),
        Setting("channels", ("in_channels",), 16),
        Setting("patch", ("patch_size",), 2),
        Setting("layers", ("num_layers",), 18),
        Setting("heads", ("num_attention_heads",), 18),
        Setting("head_dim", ("attention_head_dim",), 64),
        Setting("text_dim", ("joint_attention_dim",), 4096),
        Setting("pooled_dim", ("pooled_projection_dim",), 2048),
    ),
    read_others=_read_settings,
    write_others=lambda config: {
        "caption_projection_dim": config.embed,
        "out_channels": config.channels,
        "qk_norm": "rms_norm" if config.qk_norm else None,
        "dual_attention_layers": list(range(config.dual_layers)),
        "pos_embed_max_size": config.max_patches,
    },
    names={
        "patches": "pos_embed.proj",
        "positions": "pos_embed.pos_embed",
        "text_in": "context_embedder",
        **embedder_names({"time": "timestep_embedder", "pooled": "text_embedder"}),
        **{
            f"{group}/{stream}/{ours}": "transformer_blocks.{layer}." + theirs
            for group in ("dual_blocks", "blocks", "last_block")
            for stream, names in _STREAMS.items()
            for ours, theirs in names.items()
        },
        "last_modulation": "norm_out.linear",
        "last": "proj_out",
    },
    first_layers=lambda config: {name: first for name, (first, _) in config.groups.items()},
    squares=lambda config: {"patches": (config.channels, config.patch, config.patch)},
)
