"""Reading of images that keep their proportions; `integration_tests/parity` compares it with transformers."""

import io

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from stack_core.abi.errors import DataError
from stack_core.text.images import ImageSize
from stack_train.vision.grid_images import GridImages, scaled_size
from stack_train.vision.square_images import SquareImages

READER = GridImages("<pad>", 7, patch=3, merge=2, channels=3, min_pixels=72, max_pixels=36 * 12)
SQUARES = SquareImages("", "", "", "", 7, tokens=4, side=8, channels=3)


def png(height, width):
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue(), pixels


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((12, 18), (12, 18)),  # fits
        ((13, 20), (12, 18)),  # rounded
        ((15, 9), (12, 12)),  # halves are rounded to even numbers of units
        ((100, 50), (24, 12)),  # too large: rounded down
        ((2, 5), (6, 18)),  # too small: rounded up
    ],
)
def test_sizes_are_multiples_within_the_bounds(size, expected):
    found = scaled_size(*size, unit=6, min_pixels=72, max_pixels=36 * 12)
    assert found == expected
    data, _ = png(*size)
    image = READER.read(data)
    assert image.grid == (expected[0] // 6, expected[1] // 6)
    assert READER.count_tokens(data) == image.tokens == image.grid[0] * image.grid[1]
    assert READER.measure(data).tokens == image.tokens
    assert image.pixels.shape == READER.shape(image.tokens)


def test_proportions_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="The image has 402 x 2 pixels; the model takes sides up to 200 times"):
        READER.read(png(2, 402)[0])
    with pytest.raises(DataError, match=r"more than max_pixels=432\. Crop it, or raise model.max_pixels"):
        READER.count_tokens(png(2, 400)[0])
    with pytest.raises(DataError, match="The 3 bytes are not an image"):
        READER.count_tokens(b"GIF")


@pytest.mark.parametrize("reader", [READER, SQUARES])
def test_huge_images_are_not_decoded(reader):
    file = io.BytesIO()
    Image.new("1", (8192, 8193)).save(file, format="PNG")
    assert len(file.getvalue()) < 20_000
    with pytest.raises(DataError, match="The image has 8192 x 8193 pixels; at most 67,108,864 are decoded"):
        reader.read(file.getvalue())


@pytest.mark.parametrize("orientation", range(10))  # 0 and 9 are not defined
def test_images_are_upright(orientation):
    image = Image.new("RGB", (18, 12), (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, 12, 6))
    file, exif = io.BytesIO(), Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    image.save(file, format="JPEG", exif=exif, quality=95)
    upright = io.BytesIO()
    # As in transformers.
    ImageOps.exif_transpose(Image.open(file)).save(upright, format="PNG")
    found, expected = READER.read(file.getvalue()), READER.read(upright.getvalue())
    assert found.grid == expected.grid == ((3, 2) if 5 <= orientation <= 8 else (2, 3))
    np.testing.assert_array_equal(found.pixels, expected.pixels)
    np.testing.assert_array_equal(SQUARES.read(file.getvalue()).pixels, SQUARES.read(upright.getvalue()).pixels)


def test_the_patches_of_a_token_are_adjacent():
    data, pixels = png(12, 18)
    found = READER.read(data).pixels
    # Token (1, 2), its patch (0, 1).
    expected = pixels[6:9, 15:18].transpose(2, 0, 1).ravel()
    np.testing.assert_array_equal(found[4 * 5 + 1], expected)


def test_padded_sizes_double():
    assert READER.sizes == (2, 4, 8, 12)
    published = GridImages("", 0, patch=16, merge=2, channels=3, min_pixels=65_536, max_pixels=16_777_216)
    assert published.sizes == tuple(64 * 2**power for power in range(9))
    assert published.shape(64) == (256, 768)
    assert READER.expansion(ImageSize(3)) == "<pad><pad><pad>"
