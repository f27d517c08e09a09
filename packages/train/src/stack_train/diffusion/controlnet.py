"""ControlNet: a copy of the way down of a UNet that reads an image, such as edges, and steers the UNet by residuals.

It is equivalent to diffusers' `ControlNetModel`. `stack train` adds one to a UNet by the section `controlnet`.

Source: Zhang et al., Adding Conditional Control to Text-to-Image Diffusion Models, 2023 (arXiv:2302.05543).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.traversals import unflatten_mapping
from jaxtyping import Array, Float, UInt8
from pydantic import PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, ConversionError
from stack_train.diffusion.components import Component, load_component
from stack_train.diffusion.convolution import Features
from stack_train.diffusion.denoiser import Condition, Images
from stack_train.diffusion.unet import (
    DESCENT_KEYS,
    DESCENT_SETTINGS,
    SILENT_KEYS,
    Descent,
    Unet,
    component_name,
    projections,
    read_descent,
    skip_widths,
    write_descent,
)
from stack_train.diffusion.unet_blocks import Layers, UnetConfig
from stack_train.models.reader import Reader, Setting
from stack_train.variables.model_variables import values_of

__all__ = [
    "COMPONENT",
    "Control",
    "ControlNet",
    "ControlNetConfig",
    "ControlNetSection",
    "ControlNetTraining",
    "load_controlnet",
]

_CONTROL = "control"
_WIDTHS = (16, 32, 96, 256)
# Fields in which a ControlNet must agree with its UNet: shapes of residuals, and conditions.
_SHARED = ("channels", "widths", "blocks_per_level", "text_dim", "pooled_dim", "size_features")


@config
class ControlNetConfig(UnetConfig):
    """Size and numerics of a ControlNet: the fields of its UNet, and the layers that read the control image.

    Attributes:
      name: identifies this class.
      conditioning_widths: channels of the layers that read the control image; each but the last halves it, down to the
        size of the latents.
      bgr: reads blue first and red last.
    """

    name: Literal["controlnet"] = "controlnet"  # pyrefly: ignore[bad-override]
    conditioning_widths: tuple[PositiveInt, ...] = _WIDTHS
    bgr: bool = False

    @property
    def downsampling(self) -> int:
        """Side in pixels of the square of the control image above each latent."""
        return 2 ** (len(self.conditioning_widths) - 1)


class ControlEmbedding(nnx.Module):
    """Convolutions from a control image to features in the size of the latents; the last layer starts as zeros."""

    def __init__(self, config: ControlNetConfig, layers: Layers) -> None:
        widths = config.conditioning_widths
        self.conv_in = layers.convolution((3, widths[0]))
        convolutions = [
            (layers.convolution((width, width)), layers.convolution((width, following), stride=2))
            for width, following in pairwise(widths)
        ]
        self.convolutions = nnx.List([each for pair in convolutions for each in pair])
        self.conv_out = layers.convolution((widths[-1], config.widths[0]), zeros=True)

    def __call__(self, images: Features) -> Features:
        x = jax.nn.silu(self.conv_in(images))
        for convolution in self.convolutions:
            x = jax.nn.silu(convolution(x))
        return self.conv_out(x)


class ControlNet(Descent):
    """Residuals for a UNet, which start as zeros.

    Its condition has in addition "control", [batch, height, width, 3] in pixels of uint8 or floats from 0 to 1, and
    optionally "control_scale", [batch], which multiplies the residuals.
    """

    def __init__(self, config: ControlNetConfig, *, key: jax.Array) -> None:
        layers = Layers(config, key)
        super().__init__(config, layers)
        self.controlnet_cond_embedding = ControlEmbedding(config, layers)
        self.controlnet_down_blocks = nnx.List(
            [layers.convolution((width, width), side=1, zeros=True) for width in skip_widths(config)]
        )
        width = config.widths[-1]
        self.controlnet_mid_block = layers.convolution((width, width), side=1, zeros=True)

    def __call__(
        self, images: Images, timesteps: Float[Array, " batch"], condition: Condition
    ) -> tuple[list[Features], Features]:
        """Returns the residuals of the outputs on the way down, finest first, and of the middle."""
        dtype = self.config.dtype
        x = self.conv_in(images.astype(dtype)) + self.controlnet_cond_embedding(self._pixels(images, condition))
        x, skips = self.descend(x, self.embedded(timesteps, condition), condition["text"].astype(dtype))
        residuals = [layer(skip) for layer, skip in zip(self.controlnet_down_blocks, skips, strict=True)]
        residual = self.controlnet_mid_block(x)
        if (scale := condition.get("control_scale")) is not None:
            factor = scale.astype(dtype)[:, None, None, None]
            residuals, residual = [each * factor for each in residuals], residual * factor
        return residuals, residual

    def _pixels(self, images: Images, condition: Condition) -> Features:
        config: Any = self.config
        if (control := condition.get(_CONTROL)) is None:
            raise ConfigError("The denoiser has a ControlNet, which reads a control image. Give one (data.controls).")
        expected = tuple(side * config.downsampling for side in images.shape[1:3])
        if control.shape[1:3] != expected:
            raise ConfigError(
                f"The control image has {control.shape[1]} x {control.shape[2]} pixels (height x width); the "
                f"ControlNet reads {expected[0]} x {expected[1]} for latents of {images.shape[1]} x {images.shape[2]}."
            )
        pixels = control.astype(jnp.float32) / 255.0 if control.dtype == jnp.uint8 else control
        return (pixels[..., ::-1] if config.bgr else pixels).astype(config.dtype)


class _ControlNetFamily:
    """Builds ControlNets for `Component`. They are not denoisers, so `model.name` selects none."""

    name = "controlnet"
    config_class = ControlNetConfig

    def build(self, config: ControlNetConfig, *, key: jax.Array) -> ControlNet:
        return ControlNet(config, key=key)


def load_controlnet(directory: Path, unet: Any, downsampling: int) -> ControlNet:
    """Reads a directory of diffusers' `ControlNetModel`.

    Args:
      unet: config of the denoiser.
      downsampling: factor by which the autoencoder divides the sides of an image.

    Raises:
      ConversionError: the directory has another class or unsupported settings, or belongs to another UNet; names each.
    """
    if not isinstance(unet, UnetConfig) or unet.extra_channels:
        given = "a UNet that reads a mask" if isinstance(unet, UnetConfig) else f"of family {unet.name}"
        raise ConversionError(
            f"ControlNets of UNets without a mask are supported, and the denoiser is {given}. Leave the ControlNet out."
        )
    if not (directory / "config.json").is_file():
        raise ConversionError(f"{directory} is not a directory of a ControlNet: it lacks config.json.")
    loaded, model = load_component(COMPONENT, directory)
    wrong = [
        f"{name} is {getattr(loaded, name)}, and the UNet's is {getattr(unet, name)}"
        for name in _SHARED
        if getattr(loaded, name) != getattr(unet, name)
    ]
    if loaded.downsampling != downsampling:
        wrong.append(
            f"conditioning layers divide sides by {loaded.downsampling}, and the autoencoder by {downsampling}"
        )
    if wrong:
        raise ConversionError(
            f"The ControlNet in {directory} does not fit the UNet: its {'; its '.join(wrong)}. Take a ControlNet of "
            "this model."
        )
    model.eval()
    return model


@dataclass(frozen=True)
class Control:
    """The control image of a ControlNet, in the size of the output.

    Attributes:
      image: pixels of the control image.
      scale: factor of the ControlNet's residuals.
      start, end: fractions of the steps at which the ControlNet begins and ends to act.
    """

    image: UInt8[np.ndarray, "height width 3"]
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.start < self.end <= 1.0:
            raise ConfigError(
                f"The ControlNet acts from {self.start} to {self.end} of the steps; both are fractions of 0 to 1, and "
                "the end is after the start."
            )

    def scales(self, steps: int) -> Float[np.ndarray, " steps"]:
        """Returns the scale in each step, 0 outside of start and end; as in diffusers."""
        places = np.arange(steps)
        acts = (places / steps >= self.start) & ((places + 1) / steps <= self.end)
        return self.scale * acts.astype(np.float32)


@config
class ControlNetSection:
    """Trains a ControlNet on a frozen UNet: the section `controlnet` of a run.

    The way down of the UNet is copied, from `run.init_from`, and the layers that add its residuals start as zeros. Data
    of kind captioned reads the control images from `controls`.

    Attributes:
      conditioning_widths: channels of the layers that read the control image; each but the last halves it, down to the
        size of the latents.
      seed: seed of the initial values of these layers.
    """

    conditioning_widths: tuple[PositiveInt, ...] = _WIDTHS
    seed: int = 0


@dataclass(frozen=True)
class ControlNetTraining:
    """A `ModelTransform` that adds a ControlNet to a UNet; only the ControlNet is trained.

    Attributes:
      section: section of the run's config.
      shapes: shapes of a batch.
    """

    section: ControlNetSection
    shapes: Mapping[str, Any]

    def apply(self, model: Any) -> Any:
        """Returns the UNet with a ControlNet whose way down is a copy of the UNet's.

        Raises:
          ConfigError: the model is not a UNet without extra channels, or the batches lack control images.
        """
        if not isinstance(model, Unet) or model.config.extra_channels:
            given = "a UNet that reads a mask" if isinstance(model, Unet) else f"a {type(model).__name__}"
            raise ConfigError(f"Section controlnet trains a ControlNet of a UNet (model.name=unet), not {given}.")
        if _CONTROL not in self.shapes:
            raise ConfigError("Section controlnet needs control images. Set data.controls of data.name=captioned.")
        graph, state = nnx.split(model)
        values = values_of(model)
        control_config = controlnet_config(model.config, self.section)

        def build() -> ControlNet:
            return ControlNet(control_config, key=jax.random.key(self.section.seed))

        # An abstract model gets an abstract ControlNet.
        is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
        control = nnx.eval_shape(build) if is_abstract else build()
        if not is_abstract:
            own = values_of(control)
            copies = {path: values[path].astype(value.dtype) for path, value in own.items() if path in values}
            control = nnx.merge(nnx.split(control)[0], nnx.State(unflatten_mapping({**own, **copies})))
        whole = nnx.merge(graph, state)
        whole.control = control
        return whole

    def call(self, function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        return function(model, *args, **kwargs)

    def trained(self, path: tuple[Any, ...], variable: Any) -> bool:
        return path[0] == _CONTROL


def controlnet_config(unet: UnetConfig, section: ControlNetSection) -> ControlNetConfig:
    """Returns the config of a ControlNet for a UNet."""
    shared = {field.name: getattr(unet, field.name) for field in fields(unet) if field.name != "name"}
    return ControlNetConfig(**shared, conditioning_widths=section.conditioning_widths)


def _component_name(module: str) -> str:
    if module.startswith("controlnet_"):
        return module.replace("/convolutions/", "/blocks/").replace("/", ".")
    return component_name(module)


def _read_control(reader: Reader) -> dict[str, Any]:
    reader.expect("conditioning_channels", 3)
    order = reader.get("controlnet_conditioning_channel_order", default="rgb")
    if order not in ("rgb", "bgr"):
        reader.problems.append(f"controlnet_conditioning_channel_order={order!r}, not rgb or bgr")
    return {**read_descent(reader), "bgr": order == "bgr"}


COMPONENT = Component(
    class_name="ControlNetModel",
    family=_ControlNetFamily(),
    settings=(
        Setting("channels", ("in_channels",), 4),
        Setting("conditioning_widths", ("conditioning_embedding_out_channels",), _WIDTHS),
        *DESCENT_SETTINGS,
    ),
    fixed={**DESCENT_KEYS, "global_pool_conditions": False},
    silent=SILENT_KEYS,
    read_others=_read_control,
    write_others=lambda config: {
        **write_descent(config),
        "conditioning_channels": 3,
        "controlnet_conditioning_channel_order": "bgr" if config.bgr else "rgb",
    },
    names={},
    rename=_component_name,
    squares=lambda config: (
        {}
        if config.linear_projections
        else {path: (width, 1, 1) for path, width in projections(config) if not path.startswith("up_")}
    ),
)
