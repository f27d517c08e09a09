"""Preprocessing of images for language models: decoding, and the readers of models with images."""

import io
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax

from stack_core.abi.errors import DataError
from stack_core.text.images import ImageReader
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.diffusion.grid import pillow, turn_upright

__all__ = ["MODES", "SeesImages", "apply_to_image", "decode", "image_reader"]

MODES = {1: "L", 3: "RGB"}
"""Pillow's mode of images with a number of channels."""

Result = TypeVar("Result")
_MOST_PIXELS = 2**26  # 256 MiB with the four bytes that Pillow takes for a pixel


@runtime_checkable
class SeesImages(Protocol):
    """The config of a language model with images; see `Gemma3VisionConfig` and `Qwen3VLConfig`."""

    @property
    def image_tokens_of_prompts(self) -> Mapping[str, int | None]:
        """Ids of the tokens that the reader writes, by the field of the config; the field is None until it is set."""
        ...

    def image_reader(self, texts: Mapping[str, str]) -> ImageReader | None:
        """Returns the preprocessing of images; None if Pillow has no mode with this number of channels.

        Args:
          texts: text of each token of `image_tokens_of_prompts`.
        """
        ...

    def image_arrays(self, row_images: int, seq_tokens: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of a row's images in a batch, without the axis of rows."""
        ...


def image_reader(config: SeesImages, tokenizer: HuggingFaceTokenizer) -> ImageReader | None:
    """Returns the preprocessing of a model's images; None without image tokens in the config."""
    tokens = config.image_tokens_of_prompts
    if None in tokens.values():
        return None
    return config.image_reader({name: tokenizer.token_bytes(token or 0).decode() for name, token in tokens.items()})


def apply_to_image(data: bytes, use: Callable[[Any], Result]) -> Result:
    """Opens an image file, of which Pillow reads the header first, and returns the result of a function of the image.

    Raises:
      DataError: the data is not an image, it has more than 2**26 pixels, or Pillow is not installed.
    """
    image = pillow()
    try:
        with image.open(io.BytesIO(data)) as found:
            if math.prod(found.size) > _MOST_PIXELS:
                raise DataError(
                    f"The image has {found.width} x {found.height} pixels; at most {_MOST_PIXELS:,} are decoded. Scale "
                    "it down."
                )
            return use(found)
    # The exceptions of Pillow's decoders.
    except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
        raise DataError(f"The {len(data)} bytes are no image that Pillow reads: {error}") from error


def decode(image: Any, channels: int) -> Any:
    """Decodes an opened image, upright by its EXIF orientation, and converts it to a number of channels."""
    return turn_upright(image).convert(MODES[channels])
