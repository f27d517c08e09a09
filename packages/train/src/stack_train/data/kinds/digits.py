"""`data.name: digits`: the handwritten digits of 8 x 8 pixels included in scikit-learn."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from stack_core.abi.config import config
from stack_core.abi.data import Shapes
from stack_core.abi.errors import DataError
from stack_core.abi.installing import install_command
from stack_train.data.image_batches import ImageBatches, ImageSettings, LabelledImages, check_images

__all__ = ["DigitsData", "digits"]

_SIZE, _CLASSES = 8, 10


@config
class DigitsData(ImageSettings):
    """1,797 images of handwritten digits in 17 shades of grey; needs stack-train[digits].

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.

    Attributes:
      name: selects this kind of data.
    """

    name: Literal["digits"] = "digits"

    def spec(self, model: Any) -> Shapes:
        return self.shapes(_SIZE, 1, labelled=model.classes > 0)

    def check(self, model: Any) -> None:
        check_images(model, size=_SIZE, channels=(1,), classes=_CLASSES, label="kind digits")

    def build(self, *, seed: int, model: Any) -> ImageBatches:
        images = digits()
        return ImageBatches(self, images if model.classes else replace(images, labels=None), seed=seed)


def digits() -> LabelledImages:
    """Loads all digits, in scikit-learn's order.

    Raises:
      DataError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets  # slow: takes a second and imports SciPy
    except ImportError as error:
        raise DataError(
            f"data.name digits reads its images from scikit-learn: {error}. Install it: "
            f"{install_command('stack-train[digits]')}"
        ) from error
    found: Any = datasets.load_digits()
    pixels = np.round(found.images * (255 / 16)).astype(np.uint8)
    names = [f"digit {number}, a {label}" for number, label in enumerate(found.target)]
    return LabelledImages(pixels[..., None], found.target.astype(np.int32), names)
