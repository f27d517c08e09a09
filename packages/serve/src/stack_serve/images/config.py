"""Configuration of a server for one image model."""

from typing import Annotated

from pydantic import Field, PositiveInt

from stack_core.abi.config import config
from stack_serve.http.config import Seconds, ServerConfig

__all__ = ["ImageServerConfig"]


@config
class ImageServerConfig(ServerConfig):
    """Configuration of a server of images: model names and request limits.

    Attributes:
      model_names: names that clients may use for the model. None uses the model's own name.
      timeout_s: seconds after which a request ends with status 504. None sets no limit.
      max_images: maximum number of images that are computed concurrently; others wait.
      max_waiting: maximum number of waiting images; more are refused.
      max_choices: maximum number of images per request.
      max_steps: maximum number of sampling steps.
      max_pixels: maximum number of pixels of an image.
    """

    model_names: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    timeout_s: Seconds | None = None
    max_images: PositiveInt = 4
    max_waiting: PositiveInt = 64
    max_choices: PositiveInt = 10
    max_steps: PositiveInt = 200
    max_pixels: PositiveInt = 2**22
