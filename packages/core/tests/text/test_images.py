"""Image files of a prompt: limits, errors and places."""

from dataclasses import dataclass

import numpy as np
import pytest

from stack_core.abi.errors import ChatTemplateError, DataError
from stack_core.text.images import ImageSize, ReadImage, expand_images, image_places, place_images, read_images


@dataclass(frozen=True)
class Letters:
    """A reader of "images" with a token per byte, which are decoded one file at a time."""

    decoded: list[bytes]
    layout: str = "whole"
    placeholder = "<i>"
    token = 7
    sizes = (4,)
    has_grids = False

    def shape(self, tokens: int) -> tuple[int, ...]:
        return (tokens,)

    def expansion(self, size: ImageSize) -> str:
        return "x" * size.tokens

    def count_tokens(self, data: bytes) -> int:
        if data == b"?":
            raise DataError("No image.")
        return len(data)

    def measure(self, data: bytes) -> ImageSize:
        return ImageSize(self.count_tokens(data))

    def read(self, data: bytes) -> ReadImage:
        self.decoded.append(data)
        return ReadImage(np.frombuffer(data, np.uint8), len(data))


def test_images_are_counted_before_the_first_is_decoded() -> None:
    reader = Letters([])
    with pytest.raises(ChatTemplateError, match=r"The 2 images have 5 tokens; prompt and continuation have at most 5"):
        read_images(reader, [b"abc", b"de"], max_tokens=5)
    with pytest.raises(ChatTemplateError, match=r"The image has 3 tokens; .*Send fewer or smaller images\."):
        read_images(reader, [b"abc"], max_tokens=3)
    with pytest.raises(ChatTemplateError, match=r"Image 2 of 2: No image\."):
        read_images(reader, [b"abc", b"?"], max_tokens=9)
    assert reader.decoded == []
    assert [image.tokens for image in read_images(reader, [b"abc", b"de"], max_tokens=6)] == [3, 2]
    assert read_images(reader, [], max_tokens=1) == []


def test_images_have_the_places_of_their_tokens() -> None:
    reader = Letters([])
    images = read_images(reader, [b"abc", b"de"], max_tokens=6)
    assert expand_images("a <i> b <i>", reader, [image.size for image in images]) == "a xxx b xx"
    found = place_images([1, 7, 7, 7, 2, 7, 7], reader, images)
    assert [(image.start, image.tokens) for image in found] == [(1, 3), (5, 2)]
    assert found[0].digest != found[1].digest
    reverse = [ReadImage(image.pixels[::-1].copy()[::-1], image.tokens) for image in images]
    assert [image.digest for image in place_images([7, 7, 7, 2, 7, 7], reader, reverse)] == [
        image.digest for image in found
    ]
    with pytest.raises(ChatTemplateError, match=r"runs of \[2, 1\]; expected runs of \[3, 2\]"):
        place_images([7, 7, 1, 7], reader, images)


def test_rows_of_an_image_are_divided_by_breaks() -> None:
    reader = Letters([], layout="rows")
    images = [ReadImage(np.zeros(6), 6, (3, 2)), ReadImage(np.zeros(3), 3, (1, 3))]
    tokens = [1, 7, 7, 2, 7, 7, 2, 7, 7, 3, 7, 7, 7, 3]
    found = place_images(tokens, reader, images)
    assert [(image.start, image.end, image.layout) for image in found] == [(1, 9, "rows"), (10, 13, "rows")]
    assert [image_places(image).tolist() for image in found] == [[1, 2, 4, 5, 7, 8], [10, 11, 12]]
    with pytest.raises(ChatTemplateError, match="with one token between the rows of an image"):
        place_images([*tokens[:4], 4, *tokens[4:]], reader, images)
    with pytest.raises(ChatTemplateError, match=r"runs of \[2, 2, 2, 3\]; expected runs of \[3, 3, 3\], with"):
        place_images(tokens, reader, [ReadImage(np.zeros(6), 6, (2, 3)), images[1]])
    assert place_images([1, 2], reader, []) == ()
