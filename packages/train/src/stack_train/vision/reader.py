"""Preprocessing of images for language models: decoding, and the readers of models with images."""

import io
import math
from collections.abc import Callable
from typing import Any, TypeVar

from stack_core.abi.errors import ConfigError, DataError
from stack_core.text.images import ImageReader, ImageSize, SeesImages
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.diffusion.grid import pillow, turn_upright

__all__ = ["MODES", "apply_to_image", "decode", "image_reader", "upright_size"]

MODES = {1: "L", 3: "RGB"}
"""Pillow's mode of images with a number of channels."""

_ORIENTATION = 274  # tag of EXIF
_TURNED = (5, 6, 7, 8)  # orientations that swap width and height

Result = TypeVar("Result")
_MOST_PIXELS = 2**26  # 256 MiB with the four bytes that Pillow takes for a pixel


def image_reader(config: SeesImages, tokenizer: HuggingFaceTokenizer) -> ImageReader | None:
    """Returns the preprocessing of a model's images; None without image tokens in the config.

    Raises:
      ConfigError: the end of an image's rows is not one token of the tokenizer.
    """
    tokens = config.image_tokens_of_prompts
    if None in tokens.values():
        return None
    reader = config.image_reader({name: tokenizer.token_bytes(token or 0).decode() for name, token in tokens.items()})
    if reader is not None and reader.layout == "rows":
        text = reader.expansion(ImageSize(2, (2, 1)))
        found = tokenizer.encode(text, add_special_tokens=False)
        if [token == reader.token for token in found] != [True, False, True, False]:
            raise ConfigError(
                f"The tokenizer divides {text!r}, an image of two rows of one token, into {found}; expected "
                f"{reader.token}, the end of a row, {reader.token} and the end of the image. Set model.image_break and "
                "model.image_end to tokens of the tokenizer."
            )
    return reader


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
        raise DataError(f"The {len(data)} bytes are not an image that Pillow reads: {error}") from error


def upright_size(image: Any) -> tuple[int, int]:
    """Returns the width and height of an opened image after `decode`.

    Formats other than JPEG are decoded, because the orientation may follow the pixels.
    """
    if image.format != "JPEG":
        image.load()
    is_turned = image.getexif().get(_ORIENTATION) in _TURNED
    return image.size[::-1] if is_turned else image.size


def decode(image: Any, channels: int) -> Any:
    """Decodes an opened image, upright by its EXIF orientation, and converts it to a number of channels."""
    return turn_upright(image).convert(MODES[channels])
