"""`data.kind: images`: files of images, labelled by the folders that they lie in."""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from stack_core.abi.config import config
from stack_core.abi.data import Shapes
from stack_core.abi.errors import ConfigError
from stack_train.data.files import expand_glob
from stack_train.data.image_batches import ImageBatches, ImageSettings, LabelledImages, check_images
from stack_train.data.image_files import IMAGE_CHANNELS, OnUnreadable, read_images

__all__ = ["ImagesData"]

_NAMED = 10


@config
class ImagesData(ImageSettings):
    """Images in files, of any format that Pillow reads; needs stack-train[images].

    Each is cut to its middle square and scaled to the model's `image_size`, in colour or in grey by its `channels`; the
    result is kept in the user's cache and mapped from there. For a model with classes, the folders that images lie in
    are the labels, numbered by name.

    Attributes:
      source: files, as a glob; `**` matches any number of folders.
      unreadable: what becomes of files that are no images: "error", or "skip", which names and counts them.
    """

    source: str
    kind: Literal["images"] = "images"
    unreadable: OnUnreadable = "error"

    def spec(self, model: Any) -> Shapes:
        return self.shapes(model.image_size, model.channels, labelled=model.classes > 0)

    def check(self, model: Any) -> None:
        check_images(model, size=None, channels=IMAGE_CHANNELS, classes=0, what="kind images")

    def build(self, *, seed: int, model: Any) -> ImageBatches:
        """Reads every file that the cache does not hold.

        Raises:
          DataError: Pillow is not installed, a file cannot be read, or none is an image.
          ConfigError: there are more folders than the model has classes.
        """
        images = read_images(
            expand_glob(self.source, self.kind),
            size=model.image_size,
            channels=model.channels,
            unreadable=self.unreadable,
            source=self.source,
        )
        folders = sorted({Path(name).parent.name for name in images.names})
        if model.classes and len(folders) > model.classes:
            raise ConfigError(
                f"The images lie in {len(folders)} folders, {', '.join(folders[:_NAMED])}, and model.classes is "
                f"{model.classes}. Raise it, or set it to 0 to learn without labels."
            )
        labels = np.array([folders.index(Path(name).parent.name) for name in images.names], np.int32)
        held = LabelledImages(images.pixels, labels if model.classes else None, images.names)
        return ImageBatches(self, held, seed=seed)
