"""Images and videos from the model of a run, or from a diffusers directory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import UInt8

from stack_core.abi.errors import ConfigError, ConversionError, GenerationError
from stack_core.abi.local_paths import hub_advice, local_path
from stack_core.chips.machine import trim_heap
from stack_train.data.image_batches import as_pixels
from stack_train.data.kinds.captioned import EncoderIdentity, drops_to_empty_prompt
from stack_train.diffusion.controlnet import Control, load_controlnet
from stack_train.diffusion.denoiser import (
    Condition,
    Denoiser,
    ImagesConfig,
    LimitsSize,
    VideosConfig,
    image_tokens,
)
from stack_train.diffusion.latents import Begun, initial_noise, sample_latents, sampling_table
from stack_train.diffusion.lora import merge_lora
from stack_train.diffusion.ltx import FRAME_RATE
from stack_train.diffusion.objectives import Denoises, denoising_of, sampler_of
from stack_train.diffusion.pipeline import INDEX, Encoders, open_encoders, open_pipeline
from stack_train.diffusion.samplers import SamplerConfig, Table
from stack_train.diffusion.starts import (
    Start,
    check_first_frame,
    check_pixels,
    check_start,
    encode_start,
    first_frame_condition,
    keep_first_frame,
)
from stack_train.diffusion.tiles import check_tile
from stack_train.diffusion.wan import FIRST_FRAME
from stack_train.run.config import run_config
from stack_train.variables.weights import read_model

__all__ = ["ImageSampler", "open_images", "open_run"]


@dataclass(frozen=True)
class ImageSampler:
    """Samples images for labels or prompts, or videos for prompts.

    Attributes:
      config: config of the denoiser.
      objective: objective of its training.
      step: number of training steps; None for a diffusers directory.
      encoders: encoders of prompts and latents; None for a model of pixels.
      sampler: settings of the directory's scheduler, or the defaults of the run's objective.
      size: height and width of the denoiser's input; None is the square of the config.
      frames: number of frames of the denoiser's input; None is the number of the config of a model of videos.
    """

    model: Denoiser
    config: ImagesConfig
    objective: Denoises
    step: int | None
    encoders: Encoders | None = None
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    size: tuple[int, int] | None = None
    frames: int | None = None

    @property
    def makes_videos(self) -> bool:
        return isinstance(self.config, VideosConfig)

    @property
    def shape(self) -> tuple[int, ...]:
        """Frames of a video, height, width and channels of the denoiser's input, without extra channels."""
        frames = (self.frames or self.config.frames,) if isinstance(self.config, VideosConfig) else ()
        return (*frames, *self.sides, self.config.channels)

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of the denoiser's input."""
        return self.size or (self.config.image_size, self.config.image_size)

    def resized(self, size: tuple[int, int]) -> "ImageSampler":
        """Returns a sampler of images of another height and width in pixels.

        Raises:
          ConfigError: the model does not support the size; gives the nearest ones.
        """
        height, width = size
        if self.encoders is None:
            if size == self.sides:
                return self
            raise ConfigError(f"The model makes images of {self.config.image_size} pixels; leave the size out.")
        # The latents must divide into the denoiser's patches.
        downsampling = self.encoders.autoencoder.config.downsampling
        factor = downsampling * getattr(self.config, "patch", 1)
        if any(side < factor or side % factor for side in size):
            lower, upper = ([max(side // factor + more, 1) * factor for side in size] for more in (0, 1))
            nearest = dict.fromkeys(f"{w}x{h}" for h, w in (lower, upper))
            raise ConfigError(
                f"The size is {width}x{height}; images of this model have sides of a multiple of {factor} pixels. "
                f"Take {' or '.join(nearest)}."
            )
        sides = (height // downsampling, width // downsampling)
        if isinstance(self.config, LimitsSize):
            self.config.check_size(*sides)
        return replace(self, size=sides)

    def with_frames(self, frames: int) -> "ImageSampler":
        """Returns a sampler of videos with another number of frames.

        Raises:
          ConfigError: the model makes images, or the autoencoder makes other numbers of frames; gives the nearest ones.
        """
        if not self.makes_videos:
            raise ConfigError("The model makes images, which have no frames. Leave the frames out.")
        latents = frames if self.encoders is None else self.encoders.autoencoder.config.latent_frames(frames)
        return replace(self, frames=latents)

    def with_tiles(self, pixels: int) -> "ImageSampler":
        """Returns a sampler with the given size of tiles for larger images.

        Raises:
          ConfigError: the model lacks an autoencoder, makes videos, or needs another size of tiles.
        """
        if self.encoders is None:
            raise ConfigError("The model makes pixels without an autoencoder. Leave the size of tiles out.")
        autoencoder = self.encoders.autoencoder.config
        if self.makes_videos:
            raise ConfigError(
                f"Autoencoders of images decode in tiles, and {autoencoder.name} decodes videos. Leave the size of "
                "tiles out."
            )
        check_tile(pixels, autoencoder.downsampling)
        return replace(self, encoders=replace(self.encoders, tile_pixels=pixels))

    def images(
        self, labels: Sequence[int], sampler: SamplerConfig, *, seed: int = 0
    ) -> UInt8[np.ndarray, "images height width channels"]:
        """Samples one image per label. For a model without labels, only their number matters.

        Args:
          seed: seed of the initial noise; the noise of image i does not depend on the number of images.

        Raises:
          GenerationError: a label is out of range, the model needs prompts, or guidance is set for a model without
            labels.
          ConfigError: the sampler has more steps than the schedule.
        """
        if self.encoders is not None:
            raise GenerationError("The model makes images of prompts, not of labels: give --prompt.", parameter="label")
        self.check_labels(labels)
        if sampler.guidance != 1.0 and not self.config.classes:
            raise GenerationError(
                f"guidance is {sampler.guidance}, and the model has no labels to be guided by. Set it to 1.",
                parameter="guidance",
            )
        condition = {"labels": jnp.asarray(labels, jnp.int32)} if self.config.classes else {}
        return as_pixels(self._sampled(condition, len(labels), sampler, seed))

    def images_of(
        self,
        prompts: Sequence[str],
        sampler: SamplerConfig,
        *,
        negative: Sequence[str] | None = None,
        seed: int = 0,
        embedded_guidance: float | None = None,
        start: "Start | None" = None,
        control: Control | None = None,
        frame_rate: float | None = None,
    ) -> UInt8[np.ndarray, "images *frames height width channels"]:
        """Samples one image or video per prompt. Prompts that are too long are truncated with a warning.

        Args:
          negative: negative prompt of each image; requires guidance.
          seed: see `images`.
          start: initial image; `sampler.strength` is the fraction of the steps that change this image.
          embedded_guidance: guidance scale, an input of guidance-distilled models; None uses the config's.
          control: control image of a model with a ControlNet.
          frame_rate: frames per second, an input of some models of videos (LTX-Video); None uses the config's.

        Raises:
          GenerationError: the model does not support prompts, control images, embedded guidance or frame rates, or
            `negative` is set without guidance.
        """
        reads_image = bool(getattr(self.config, "extra_channels", 0))
        if self.makes_videos:
            takes_image = getattr(self.config, "takes_image", False)
            check_first_frame(start, sampler, needs_image=reads_image, takes_image=takes_image)
        else:
            check_start(start, sampler, reads_mask=reads_image)
        if self.encoders is None:
            raise GenerationError(
                f"A {type(self.model).__name__} takes no prompts; give --label, or a model that is conditioned on "
                "texts, such as flux, sd3, unet, wan or ltx.",
                parameter="prompt",
            )
        condition = self.condition(prompts, sampler, negative=negative, embedded_guidance=embedded_guidance)
        condition |= self._control_condition(control, len(prompts))
        condition |= self._frame_rate_condition(frame_rate, len(prompts))
        begun = None
        if start is not None and self.makes_videos:
            condition |= self._first_frame(start, len(prompts))
            begun = self._preserved(condition)
        elif start is not None:
            begun = self._begun(start, len(prompts))
        latents = self._sampled(condition, len(prompts), sampler, seed, begun=begun, control=control)
        return as_pixels(self.encoders.decode(latents))

    def _control_condition(self, control: Control | None, count: int) -> dict[str, jax.Array]:
        """Returns the control image for each image.

        Raises:
          GenerationError: a model with a ControlNet lacks a control image, or vice versa, or the sizes differ.
        """
        if (control is None) != (getattr(self.model, "control", None) is None):
            problem = (
                "The model has a ControlNet. Give a control image."
                if control is None
                else "The model reads no control image. Give a ControlNet, too."
            )
            raise GenerationError(problem, parameter="control")
        if control is None:
            return {}
        encoders: Any = self.encoders
        check_pixels({"control": control.image}, encoders, self.sides)
        return {"control": jnp.broadcast_to(control.image, (count, *control.image.shape))}

    def _frame_rate_condition(self, frame_rate: float | None, count: int) -> dict[str, jax.Array]:
        """Returns the frame rate of each video; raises a GenerationError if the model does not read it."""
        if frame_rate is None:
            return {}
        if getattr(self.config, FRAME_RATE, None) is None:
            raise GenerationError("The model reads no frame rate. Leave it out.", parameter="frame_rate")
        return {FRAME_RATE: jnp.full(count, frame_rate, jnp.float32)}

    def _preserved(self, condition: Condition) -> Begun | None:
        """Returns the frame that sampling preserves if the model does not read it in additional channels."""
        if not getattr(self.config, "takes_image", False):
            return None
        return keep_first_frame(condition[FIRST_FRAME], self.shape[0])

    def _begun(self, start: Start, count: int) -> Begun:
        encoders: Any = self.encoders
        reads_mask = bool(getattr(self.config, "extra_channels", 0))
        return encode_start(start, encoders, self.sides, count=count, reads_mask=reads_mask)

    def _first_frame(self, start: Start, count: int) -> dict[str, jax.Array]:
        encoders: Any = self.encoders
        return first_frame_condition(start.image, encoders, self.shape[:3], count=count)

    def condition(
        self,
        prompts: Sequence[str],
        sampler: SamplerConfig,
        *,
        negative: Sequence[str] | None = None,
        embedded_guidance: float | None = None,
    ) -> dict[str, jax.Array]:
        """Encodes prompts and, for guidance, the negative or empty prompts; see `images_of`."""
        encoders: Any = self.encoders
        condition = dict(encoders.text(prompts))
        if negative is not None and sampler.guidance == 1.0:
            raise GenerationError(
                "Negative prompts act through guidance, which is 1. Set guidance above 1.", parameter="negative"
            )
        if negative is None and drops_to_empty_prompt(self.config):
            negative = [""] * len(prompts)
        if negative is not None and sampler.guidance != 1.0:
            condition |= {f"negative_{name}": array for name, array in encoders.text(negative).items()}
        if getattr(self.config, "size_features", 0):
            factor = encoders.autoencoder.config.downsampling
            height, width = (float(side * factor) for side in self.sides)
            sizes = jnp.array([height, width, 0.0, 0.0, height, width])
            condition["sizes"] = jnp.broadcast_to(sizes, (len(prompts), len(sizes)))
        if embedded_guidance is not None:
            if getattr(self.config, "guidance", None) is None:
                raise GenerationError("The model takes no guidance as an input.", parameter="embedded_guidance")
            condition["guidance"] = jnp.full(len(prompts), embedded_guidance)
        return condition

    def _sampled(
        self,
        condition: Condition,
        count: int,
        sampler: SamplerConfig,
        seed: int,
        *,
        noise: jax.Array | None = None,
        begun: Begun | None = None,
        control: Control | None = None,
    ) -> jax.Array:
        """Samples images or latents with the denoiser, starting from `noise`, by default from random noise."""
        scales = None if control is None else control.scales(len(self.table(sampler).rows))
        # The parameters are an argument of the program instead of constants.
        state = nnx.state(self.model)
        arguments = (state, condition, jax.random.key(seed), noise, begun, scales)
        images = self._run(*arguments, sampler=sampler, count=count)
        trim_heap()  # the call may have compiled
        return images

    @cached_property
    def _run(self) -> Callable[..., jax.Array]:
        """The program of sampling, which is compiled once for each sampler and shape."""
        graph = nnx.graphdef(self.model)

        @partial(jax.jit, static_argnames=("sampler", "count"))
        def run(
            state: Any,
            condition: Condition,
            key: jax.Array,
            noise: jax.Array | None,
            begun: Begun | None,
            control_scales: jax.Array | None,
            *,
            sampler: SamplerConfig,
            count: int,
        ) -> jax.Array:
            noise = initial_noise((count, *self.shape), key=key) if noise is None else noise
            options: Any = {"sampler": sampler, "table": self.table(sampler), "key": key}
            options |= {"begun": begun, "control_scales": control_scales}
            return sample_latents(nnx.merge(graph, state), condition, noise, **options)

        return run

    def table(self, sampler: SamplerConfig) -> Table:
        return sampling_table(sampler, self.objective, image_tokens(self.model, *self.shape[:-1]))

    def check_labels(self, labels: Sequence[int]) -> None:
        classes = self.config.classes
        if classes and (wrong := sorted({label for label in labels if not 0 <= label < classes})):
            raise GenerationError(
                f"The model has the labels 0 to {classes - 1}, not {', '.join(map(str, wrong))}.", parameter="label"
            )


def open_images(
    address: str,
    *,
    size: tuple[int, int] | None = None,
    frames: int | None = None,
    loras: Mapping[Path, float] | None = None,
    controlnet: Path | None = None,
    denoiser: str | None = None,
) -> ImageSampler:
    """Opens a run, or `hf:DIR`, a diffusers directory.

    Args:
      size: height and width of the images in pixels; None uses the size in the autoencoder's config, or of the run's
        images.
      frames: number of frames of the videos; None uses the run's, or for directories the default of diffusers.
      loras: LoRA files to merge into a diffusers directory, and their scales.
      controlnet: directory of a ControlNet of a diffusers directory's UNet.
      denoiser: gguf:FILE with the weights of a FLUX directory's denoiser; see `open_pipeline`.

    Raises:
      RunDirectoryError, GenerationError, CheckpointError: see `open_run`.
      ConversionError: see `open_pipeline`.
      ConfigError: the model does not support that size.
    """
    path = local_path(address.removeprefix("hf:"))
    if not path.exists():
        raise ConversionError(f"{address} is not a directory of a run or of diffusers.{hub_advice(address)}")
    if address.startswith("hf:") or (path / INDEX).is_file():
        pipeline = open_pipeline(path, denoiser=denoiser)
        for file, scale in (loras or {}).items():
            pipeline = merge_lora(pipeline, file, scale)
        if controlnet is not None:
            downsampling = pipeline.encoders.autoencoder.config.downsampling
            pipeline.model.control = load_controlnet(controlnet, pipeline.config, downsampling)
        parts = pipeline.model, pipeline.config, pipeline.objective
        opened = ImageSampler(*parts, None, pipeline.encoders, pipeline.sampler)
        if (default := pipeline.encoders.pipeline.video_size) is not None:
            size, frames = size or default[:2], default[2] if frames is None else frames
    elif loras or controlnet is not None or denoiser is not None:
        what = "LoRA files are merged into" if loras else "ControlNets are added to"
        what = what if denoiser is None else "Denoisers are replaced in"
        raise ConfigError(f"{what} diffusers directories. Convert the run: stack convert RUN hf:DIR.")
    else:
        opened = open_run(path)
    opened = opened if frames is None else opened.with_frames(frames)
    return opened if size is None else opened.resized(size)


def open_run(directory: Path) -> ImageSampler:
    """Opens the newest intact checkpoint of a run; averaged weights take precedence.

    Raises:
      RunDirectoryError: the directory does not contain a run.
      GenerationError: the run does not train a denoiser.
      CheckpointError: the run lacks a usable checkpoint.
      ConversionError, DataError: the encoders of the training are missing or have changed.
    """
    config = run_config(directory)
    objective = denoising_of(config.objective)
    if not isinstance(objective, Denoises) or not isinstance(config.model, ImagesConfig):
        raise GenerationError(
            f"{directory} trains family {config.model.name!r} by objective {config.objective.name!r}, which makes no "
            "images. Use `stack generate` for text."
        )
    encoders = None
    if getattr(config.data, "encoders", None) is not None:
        identity = EncoderIdentity.read(directory)
        text_dim = getattr(config.model, "text_dim", None)
        encoders = open_encoders(Path(identity.directory), text_tokens=identity.text_tokens, text_dim=text_dim)
        # The directory may have changed since the training.
        identity.check(encoders)
        encoders.check(config.model)
    model, step = read_model(directory, config)
    model.eval()
    return ImageSampler(model, config.model, objective, step, encoders, sampler_of(config.objective))
