"""Image parts of messages: OpenAI's content parts with data URLs, and images of Pillow."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stack_core.abi.errors import ChatTemplateError, DataError
from stack_core.text.images import ImageReader, ReadImage, read_images, take_images
from stack_rl.environments.tool_results import encode_png, image_part, is_pillow_image

__all__ = ["has_parts", "read_parts", "require_reader"]

Messages = Sequence[Mapping[str, Any]]


def read_parts(
    messages: Messages,
    reader: ImageReader | None,
    *,
    max_tokens: int,
    load: Callable[[str], bytes] | None = None,
) -> tuple[list[dict[str, Any]], list[ReadImage]]:
    """Reads the images of messages with the policy's preprocessing.

    Args:
      messages: messages whose contents are texts or lists of parts: `{"type": "text", "text": ...}`, `{"type":
        "image_url", "image_url": {"url": "data:..."}}`, or `{"type": "image", "image": ...}` with an image of Pillow or
        the bytes of an image file.
      reader: preprocessing of the policy's images; None for a policy of text.
      max_tokens: maximum number of tokens of an episode.
      load: reads the image of a URL; None takes data URLs only.

    Returns:
      The messages for the chat template, and the images in order.

    Raises:
      DataError: there are images, and the policy reads text only.
      ChatTemplateError: a part has another type, is no image, or the images have too many tokens.
    """
    found, files = take_images([_with_urls(each, f"messages.{place}") for place, each in enumerate(messages)], load)
    return found, read_images(require_reader(reader), files, max_tokens) if files else []


def require_reader(reader: ImageReader | None) -> ImageReader:
    """Returns the preprocessing of images; raises a DataError if the policy reads text only."""
    if reader is None:
        raise DataError(
            "A prompt has an image, but the policy reads text only. Choose a language model with images, such as "
            "gemma3_vision or qwen3_vl, or leave the image out."
        )
    return reader


def has_parts(messages: Messages) -> bool:
    """Returns whether a content is a list of parts, which may be images."""
    return any(isinstance(message.get("content"), list) for message in messages)


def _with_urls(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Replaces the parts of type "image" by parts with data URLs."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_as_url(part, f"{where}.content.{place}") for place, part in enumerate(content)]}


def _as_url(part: Any, where: str) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "image":
        return part
    image = part.get("image")
    if not isinstance(image, bytes) and not is_pillow_image(image):
        raise ChatTemplateError(
            f'{where} is {{"type": "image"}} with a {type(image).__name__}; expected an image of Pillow or the bytes '
            "of an image file.",
            parameter=where,
        )
    return image_part(image if isinstance(image, bytes) else encode_png(image))
