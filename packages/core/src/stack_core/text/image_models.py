"""Models that generate images from texts or labels: the interface between servers and samplers."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from stack_core.abi.errors import ConversionError
from stack_core.abi.formats import ModelFormat
from stack_core.abi.local_paths import local_address
from stack_core.abi.model_formats import find_format
from stack_core.abi.plugins import registries

__all__ = ["ImageModel", "ImageRequest", "ImageState", "OpensImageModels", "has_image_model", "open_image_model"]


@dataclass(frozen=True, kw_only=True)
class ImageRequest:
    """Settings of one or more images.

    Attributes:
      prompt: text prompt; the number of a label for class-conditional models, empty for unconditional models.
      negative_prompt: prompt for the unwanted contents; acts through guidance. None uses the model's default.
      size: height and width in pixels. None uses the model's.
      steps: number of sampling steps. None uses the model's.
      guidance: scale of classifier-free guidance; 1 disables it. None uses the model's.
      embedded_guidance: guidance scale that is an input of guidance-distilled models. None uses the model's.
      seed: seed of the noise.
    """

    prompt: str
    negative_prompt: str | None = None
    size: tuple[int, int] | None = None
    steps: int | None = None
    guidance: float | None = None
    embedded_guidance: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class ImageState:
    """An image between two steps of the sampler.

    Attributes:
      group: images with equal groups can be computed in one batch.
      step, steps: number of evaluations of the denoiser so far and in total.
      value: state of the sampler, private to the model.
    """

    group: Hashable
    step: int
    steps: int
    value: Any


class ImageModel(ABC):
    """A model whose images are computed step by step, in batches that may change between steps.

    An image does not depend on the other images of its batches. Only one thread uses a model at a time, except for
    `resolve`.

    Attributes:
      name: name for people, and for clients that query the served model.
    """

    name: str

    def warm_up(self) -> None:  # noqa: B027  optional
        """Compiles the programs of one image with default settings."""

    @abstractmethod
    def resolve(self, request: ImageRequest) -> ImageRequest:
        """Returns the request with the model's defaults.

        Raises:
          GenerationError: the model cannot generate such images; names the parameter and the allowed values.
        """

    @abstractmethod
    def begin(self, request: ImageRequest, images: int) -> list[ImageState]:
        """Encodes the prompt and samples the initial noise of each image.

        The noise of image i depends only on i and the seed.

        Args:
          request: a result of `resolve`.
        """

    @abstractmethod
    def advance(self, states: Sequence[ImageState]) -> list[ImageState]:
        """Computes one step of images of the same group."""

    @abstractmethod
    def pixels(self, state: ImageState) -> np.ndarray:
        """Returns uint8[height, width, channels]: the image after its last step, and its current estimate before."""


@runtime_checkable
class OpensImageModels(ModelFormat, Protocol):
    """A format whose models may generate images."""

    def has_image_model(self, directory: Path) -> bool:
        """Returns whether the model in a directory of this format generates images."""
        ...

    def open_image_model(self, directory: Path) -> ImageModel:
        """Opens such a model.

        Raises:
          StackError: the checkpoint cannot be used.
        """
        ...


def has_image_model(address: str) -> bool:
    """Returns whether there is a model at this address that generates images."""
    address = local_address(address)
    scheme, separator, _ = address.partition(":")
    # Importing the other formats, for the error's list, takes a second.
    if separator and not isinstance(registries.model_formats.get(scheme, OpensImageModels), OpensImageModels):
        return False
    try:
        format_, directory = find_format(address, OpensImageModels)
    except ConversionError:  # another format, or none
        return False
    return format_.has_image_model(directory)


def open_image_model(address: str) -> ImageModel:
    """Opens a model that generates images.

    Raises:
      ConversionError: no format that opens such models recognizes the address.
      StackError: the checkpoint cannot be used.
    """
    format_, directory = find_format(local_address(address), OpensImageModels)
    return format_.open_image_model(directory)
