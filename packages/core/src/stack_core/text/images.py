"""Images in chat messages: content parts of OpenAI's API, and the tokens that stand for images in a prompt."""

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np

from stack_core.abi.errors import ChatTemplateError, ConfigError, DataError, GenerationError
from stack_core.abi.generation import PromptImage

__all__ = [
    "ImageLayout",
    "ImageReader",
    "ImageSize",
    "ReadImage",
    "ReadsImages",
    "SeesImages",
    "check_image_tokens",
    "data_of_url",
    "expand_images",
    "image_places",
    "image_reader_of",
    "join_images",
    "load_image",
    "place_images",
    "read_images",
    "resolve_url",
    "take_images",
]

ImageLayout = Literal["whole", "text", "rows", "axes"]
Messages = Sequence[Mapping[str, Any]]
Result = TypeVar("Result")


@dataclass(frozen=True)
class ImageSize:
    """The size of an image in tokens.

    Attributes:
      tokens: number of image tokens.
      grid: rows and columns of these tokens; may be None if the text of the prompt does not depend on them.
    """

    tokens: int
    grid: tuple[int, int] | None = None


@dataclass(frozen=True)
class ReadImage:
    """A decoded and scaled image.

    Attributes:
      pixels: uint8 array, input of the model's `image_features`; see `ImageReader.shape`.
      tokens: number of image tokens.
      grid: rows and columns of these tokens; None if images have one size.
    """

    pixels: np.ndarray
    tokens: int
    grid: tuple[int, int] | None = None

    @property
    def size(self) -> ImageSize:
        """Size in tokens."""
        return ImageSize(self.tokens, self.grid)


@runtime_checkable
class ImageReader(Protocol):
    """Preprocessing of a model's images.

    Attributes:
      placeholder: text of an image in the output of the chat template.
      token: id of the image token.
      sizes: padded numbers of tokens, ascending, which limit the number of compiled shapes. The last is the maximum.
      has_grids: True if images have a grid. False if images have one size.
      layout: "whole" if tokens attend to the rest of their image. Otherwise they attend to earlier tokens only: "text"
        has the positions of text, "rows" also a token of text after each row of the grid, and "axes" positions in two
        directions.
    """

    @property
    def placeholder(self) -> str: ...

    @property
    def token(self) -> int: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...

    @property
    def has_grids(self) -> bool: ...

    @property
    def layout(self) -> ImageLayout: ...

    def shape(self, tokens: int) -> tuple[int, ...]:
        """Returns the shape of the pixels for a number of tokens; padding extends the first axis."""
        ...

    def expansion(self, size: ImageSize) -> str:
        """Returns the replacement of the placeholder, whose image tokens are adjacent except for the breaks of rows."""
        ...

    def count_tokens(self, data: bytes) -> int:
        """Counts the tokens of an image file without decoding its pixels.

        Raises:
          DataError: see `read`.
        """
        ...

    def measure(self, data: bytes) -> ImageSize:
        """Returns the size that `expansion` needs; decodes the pixels only if the grid is needed and not in the header.

        Raises:
          DataError: see `read`.
        """
        ...

    def read(self, data: bytes) -> ReadImage:
        """Decodes and scales an image file.

        Raises:
          DataError: the data is not an image, the model does not take its proportions, or Pillow is not installed.
        """
        ...


@runtime_checkable
class ReadsImages(Protocol):
    """A `GenerativeCheckpoint` of models with `image_features`; `images` is None for a model of text.

    `image_features(uint8[1, *shape(tokens)])` returns [1, tokens, features] for `ImageTokens`. If images have a grid,
    it takes int32[1, 1, 2] as second argument.
    """

    images: ImageReader | None


@runtime_checkable
class SeesImages(Protocol):
    """The config of a language model with images; see `Gemma3VisionConfig` and `Qwen3VLConfig`."""

    @property
    def image_tokens_of_prompts(self) -> Mapping[str, int | None]:
        """Ids of the tokens that the reader writes, by the field of the config; the field is None until it is set."""
        ...

    def image_reader(self, texts: Mapping[str, str]) -> ImageReader | None:
        """Returns the preprocessing of images; None if Pillow does not support their number of channels.

        Args:
          texts: text of each token of `image_tokens_of_prompts`.
        """
        ...

    def image_arrays(self, row_images: int, seq_tokens: int) -> dict[str, Any]:
        """Returns the arrays of a row's images in a batch, without the axis of rows.

        They are "pixels" and, if images have a grid, "grids", each a `jax.ShapeDtypeStruct`.
        """
        ...


def check_image_tokens(model: SeesImages) -> None:
    """Raises a ConfigError if the config lacks the id of an image token."""
    if missing := [f"model.{name}" for name, token in model.image_tokens_of_prompts.items() if token is None]:
        raise ConfigError(f"Set {', '.join(missing)} to the ids of the tokenizer's tokens of images.")


def image_reader_of(checkpoint: Any) -> ImageReader | None:
    """Returns the preprocessing of a checkpoint's images; None for a model of text."""
    return checkpoint.images if isinstance(checkpoint, ReadsImages) else None


def take_images(
    messages: Messages, load: Callable[[str], bytes] | None = None
) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Replaces the image parts of messages by `{"type": "image"}` for the chat template.

    Args:
      messages: messages whose contents are texts or lists of parts: `{"type": "text", "text": ...}`, or `{"type":
        "image_url", "image_url": {"url": ...}}`.
      load: reads the image of a URL; None takes data URLs only.

    Returns:
      The messages, and the image files in order.

    Raises:
      ChatTemplateError: a part has another type, or its image cannot be loaded; names the part.
    """
    found, images = list[dict[str, Any]](), list[bytes]()
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for place, part in enumerate(content):
                where = f"messages.{number}.content.{place}"
                url = _url_of(part, where)
                if url is not None:
                    images.append(_loaded(url, where, load or data_of_url))
                parts.append(part if url is None else {"type": "image"})
            message = {**message, "content": parts}  # noqa: PLW2901  a copy without the URLs
        found.append(dict(message))
    return found, images


def _url_of(part: Any, where: str) -> str | None:
    """Returns the URL of an image part, and None for a text part."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return None
    if kind != "image_url":
        raise ChatTemplateError(
            f"{where} is of type {kind!r}; the model reads parts of type 'text' and 'image_url'. Leave it out.",
            parameter=where,
        )
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    if not isinstance(url, str):
        message = f'{where} has no image; expected {{"type": "image_url", "image_url": {{"url": "data:..."}}}}.'
        raise ChatTemplateError(message, parameter=where)
    return url


def _loaded(url: str, where: str, load: Callable[[str], bytes]) -> bytes:
    try:
        return load(url)
    except GenerationError as error:
        raise ChatTemplateError(f"{where}: {error}", parameter=where) from error


def data_of_url(url: str) -> bytes:
    """Returns the contents of a data URL.

    Raises:
      GenerationError: it is not a base64 data URL of an image.
    """
    header, comma, data = url.partition(",")
    if not header.startswith("data:"):
        raise GenerationError(f"The image {url[:60]!r} is not a data URL. Send its contents: data:image/png;base64,...")
    if not comma or not header.startswith("data:image/") or not header.endswith(";base64"):
        raise GenerationError(f"The data URL begins with {header[:60]!r}; expected data:image/TYPE;base64,...")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise GenerationError(f"The data URL is not valid base64: {error}.") from error


def resolve_url(url: str, folder: Path) -> str:
    """Returns the URL of an image for `load_image`: data URLs unchanged, paths resolved against `folder`."""
    return url if url.startswith("data:") else str(folder / Path(url).expanduser())


def load_image(url: str) -> bytes:
    """Returns the contents of a data URL or a file.

    Raises:
      GenerationError: the URL is malformed, or the file cannot be read.
    """
    if url.startswith("data:"):
        return data_of_url(url)
    try:
        return Path(url).read_bytes()
    except OSError as error:
        raise GenerationError(f"{url} cannot be read: {error}.") from error


def expand_images(text: str, reader: ImageReader, sizes: Sequence[ImageSize]) -> str:
    """Replaces the placeholders of a rendered prompt by the tokens of its images.

    Args:
      sizes: size of each image.

    Raises:
      ChatTemplateError: the number of placeholders is not the number of images, because the template omits images or
        a text contains the placeholder.
    """
    first, *rest = text.split(reader.placeholder)
    if len(rest) != len(sizes):
        raise ChatTemplateError(
            f"The prompt has {len(rest)} times {reader.placeholder!r}, which stands for an image, and {len(sizes)} "
            "images. Leave it out of texts, and use a chat template that writes it for each image part.",
            parameter="messages",
        )
    return first + "".join(reader.expansion(size) + text for size, text in zip(sizes, rest, strict=True))


def read_images(reader: ImageReader, files: Sequence[bytes], max_tokens: int) -> list[ReadImage]:
    """Decodes image files in order, unless their headers show that their tokens do not fit in a prompt.

    Args:
      max_tokens: maximum length of a prompt with its continuation.

    Raises:
      ChatTemplateError: the images have too many tokens, or a file cannot be read; names its number.
    """
    # A file of 2 KB may have 50 MB of pixels, so nothing is decoded before the check.
    tokens = sum(_each(reader.count_tokens, files))
    if files and tokens >= max_tokens:
        images = "The image has" if len(files) == 1 else f"The {len(files)} images have"
        raise ChatTemplateError(
            f"{images} {tokens} tokens; prompt and continuation have at most {max_tokens}. Send fewer or smaller "
            "images.",
            parameter="messages",
            code="context_length_exceeded",
        )
    return list(_each(reader.read, files))


def _each(read: Callable[[bytes], Result], files: Sequence[bytes]) -> Iterator[Result]:
    for number, data in enumerate(files):
        try:
            yield read(data)
        except DataError as error:
            message = f"Image {number + 1} of {len(files)}: {error}"
            raise ChatTemplateError(message, parameter="messages") from error


def place_images(tokens: Sequence[int], reader: ImageReader, images: Sequence[ReadImage]) -> tuple[PromptImage, ...]:
    """Returns the images of a prompt with their places.

    Args:
      tokens: tokens of the prompt, with the expansion of each image.
      images: images as returned by `ImageReader.read`.

    Raises:
      ChatTemplateError: the prompt does not have the image tokens of each image in a row, or in rows of its grid with
        one token of text between them.
    """
    array = np.asarray(tokens)
    is_image = np.concatenate([[False], array == reader.token, [False]])
    starts, ends = np.flatnonzero(is_image[1:] & ~is_image[:-1]), np.flatnonzero(~is_image[1:] & is_image[:-1])
    runs_of = [_runs_of(image, reader.layout) for image in images]
    found, expected = (ends - starts).tolist(), [run for runs in runs_of for run in runs]
    if found == expected:
        firsts = np.cumsum([0, *map(len, runs_of)])[: len(images)]
        placed = tuple(
            PromptImage(start, image.tokens, image.pixels, _digest(image), reader.layout, image.grid)
            for start, image in zip(starts[firsts].tolist(), images, strict=True)
        )
        if array[np.concatenate([[], *map(image_places, placed)]).astype(int)].tolist() == [reader.token] * sum(found):
            return placed
    between = ", with one token between the rows of an image" if reader.layout == "rows" else ""
    raise ChatTemplateError(
        f"The prompt has image tokens in runs of {found}; expected runs of {expected}{between}. Leave the names of "
        "image tokens out of texts.",
        parameter="messages",
    )


def _runs_of(image: ReadImage, layout: ImageLayout) -> list[int]:
    """Returns the numbers of adjacent image tokens."""
    return [image.grid[1]] * image.grid[0] if layout == "rows" and image.grid is not None else [image.tokens]


def image_places(image: PromptImage) -> np.ndarray:
    """Returns the places of the tokens of an image in its prompt, int[tokens]."""
    number = np.arange(image.tokens)
    breaks = number // image.grid[1] if image.layout == "rows" and image.grid is not None else 0
    return image.start + number + breaks


def join_images(images: Sequence[ReadImage | PromptImage]) -> dict[str, np.ndarray]:
    """Returns the used entries of a row's `SeesImages.image_arrays`; empty without images.

    Images of one size are stacked, [images, ...]. Patches of images with a grid are concatenated.
    """
    if not images:
        return {}
    pixels = [image.pixels for image in images]
    grids = [image.grid for image in images if image.grid is not None]
    if not grids:
        return {"pixels": np.stack(pixels)}
    return {"pixels": np.concatenate(pixels), "grids": np.asarray(grids, np.int32)}


def _digest(image: ReadImage) -> bytes:
    # Patches of one color are equal in grids of different proportions.
    digest = sha256(f"{image.pixels.shape} {image.grid}".encode())
    digest.update(np.ascontiguousarray(image.pixels).reshape(-1).data)  # no copy; hashlib takes one axis
    return digest.digest()
