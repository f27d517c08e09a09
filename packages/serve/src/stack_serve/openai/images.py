"""Images of chat requests: from content parts to pixels and the text of the prompt."""

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stack_core.abi.errors import GenerationError
from stack_core.text.images import ImageReader, ReadImage, data_of_url, expand_images, read_images, take_images

__all__ = ["ImageInput", "ImageLoader"]

_FETCH_S = 10.0


@dataclass(frozen=True)
class ImageInput:
    """Reads the images of messages.

    Attributes:
      reader: preprocessing of the model's images; None for a model of text, whose template refuses image parts.
      remote: True if http(s) URLs are fetched.
      max_bytes: maximum total size of the fetched images of a request.
      max_tokens: maximum length of a prompt with its continuation.
    """

    reader: ImageReader | None
    remote: bool
    max_bytes: int
    max_tokens: int

    def render(
        self, render: Callable[[Sequence[Mapping[str, Any]]], str], messages: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[ReadImage]]:
        """Renders messages, and returns the text with the tokens of images, and the images.

        Raises:
          ChatTemplateError: a part or an image cannot be read, the images have too many tokens, or the template rejects
            the messages.
        """
        if self.reader is None:
            return render(messages), []
        taken, files = take_images(messages, ImageLoader(self.remote, self.max_bytes).load)
        text = render(taken)
        images = read_images(self.reader, files, self.max_tokens)
        return expand_images(text, self.reader, [image.size for image in images]), images


class ImageLoader:
    """Loads the images of one request.

    Args:
      remote: True if http(s) URLs are fetched.
      max_bytes: maximum total size of fetched images. The limit of request bodies applies to the images of data URLs.
    """

    def __init__(self, remote: bool, max_bytes: int) -> None:
        self._remote, self._max_bytes, self._left_bytes = remote, max_bytes, max_bytes

    def load(self, url: str) -> bytes:
        """Returns the image file of a URL.

        Raises:
          GenerationError: the URL is not valid, its file cannot be fetched, or the fetched files are too large.
        """
        if url.startswith("data:"):
            return data_of_url(url)
        if not url.startswith(("http://", "https://")) or not self._remote:
            raise GenerationError(
                f"The image {url[:60]!r} is not a data URL, and this server does not fetch other URLs. Send its "
                "contents: data:image/png;base64,... (or start the server with --remote-images)."
            )
        try:
            with urllib.request.urlopen(url, timeout=_FETCH_S) as answer:
                data: bytes = answer.read(self._left_bytes + 1)
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            raise GenerationError(f"The image {url[:60]!r} cannot be fetched: {error}") from error
        if len(data) > self._left_bytes:
            raise GenerationError(
                f"With the image {url[:60]!r}, the fetched images of the request have more than {self._max_bytes} "
                "bytes. Send smaller or fewer ones."
            )
        self._left_bytes -= len(data)
        return data
