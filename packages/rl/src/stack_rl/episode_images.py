"""Images of episodes in training batches."""

from collections.abc import Mapping
from typing import Any, Final

import jax
import numpy as np
from jaxtyping import Int64

from stack_core.abi.data import Shapes
from stack_core.abi.errors import ConfigError, DataError
from stack_core.text.images import SeesImages, check_image_tokens, image_places, join_images
from stack_rl.contracts import Trajectory

__all__ = [
    "IMAGE_COUNTS",
    "IMAGE_INPUTS",
    "PACKED_IMAGES",
    "check_image_data",
    "image_inputs",
    "image_shapes",
    "images_per_row",
    "lay_out_images",
]

PACKED_IMAGES: Final = {"pixels": 0, "grids": 1}
"""Batch arrays with the images of a row one after another, and the column of `image_counts` with their used entries."""

IMAGE_INPUTS: Final = (*PACKED_IMAGES, "image_mask")
"""Batch arrays that a model with images takes; see `VisionDecoder` and `Gemma3Vision` of stack-train."""

IMAGE_COUNTS: Final = "image_counts"


def image_shapes(model: Any, rows: int, seq_tokens: int, row_images: int | None) -> Shapes:
    """Returns the arrays of a batch for images; empty if `row_images` is None.

    They are the model's pixels and grids, image_mask: bool[rows, seq_tokens], True at image tokens of observations, and
    image_counts: int32[rows, 2], the numbers of a row's entries in pixels and of its images.

    Args:
      model: config of the policy.
      rows: number of rows.
      seq_tokens: number of tokens per row.
      row_images: maximum number of images per row.
    """
    if row_images is None:
        return {}
    arrays = {**model.image_arrays(row_images, seq_tokens)}
    arrays["image_mask"] = jax.ShapeDtypeStruct((seq_tokens,), np.dtype(bool))
    arrays[IMAGE_COUNTS] = jax.ShapeDtypeStruct((2,), np.dtype(np.int32))
    return {name: jax.ShapeDtypeStruct((rows, *each.shape), each.dtype) for name, each in arrays.items()}


def lay_out_images(batch: Mapping[str, np.ndarray], row: int, trajectory: Trajectory) -> None:
    """Writes the images of an episode to its row.

    Raises:
      DataError: the episode has more images than a row of the batch.
    """
    images = trajectory.images
    if not images:
        return
    limit = _row_limit(batch) if IMAGE_COUNTS in batch else 0
    if len(images) > limit:
        setting = f"data.row_images is {limit}" if limit else "data.row_images is not set"
        raise DataError(
            f"An episode of task {trajectory.task} has {len(images)} images, but {setting}. Set data.row_images to at "
            f"least {len(images)}."
        )
    found = join_images(images)
    for name, values in found.items():
        batch[name][row, : len(values)] = values
    batch["image_mask"][row, np.concatenate([image_places(image) for image in images])] = True
    batch[IMAGE_COUNTS][row] = len(found["pixels"]), len(images)


def images_per_row(batch: Mapping[str, np.ndarray]) -> tuple[Int64[np.ndarray, " rows"], int] | None:
    """Returns the number of images of each row and the maximum, which packing must not exceed; None without images."""
    return (batch[IMAGE_COUNTS][:, 1].astype(np.int64), _row_limit(batch)) if IMAGE_COUNTS in batch else None


def image_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of a model with the images of a batch, empty for a batch without images."""
    return {name: batch[name] for name in IMAGE_INPUTS if name in batch}


def check_image_data(model: Any, data: Any) -> None:
    """Checks that the policy takes images if the data has some.

    Raises:
      ConfigError: the policy reads text only or lacks the ids of image tokens, or the number of images is not set.
    """
    if data.row_images is None:
        if getattr(data.environment, "has_images", False):
            raise ConfigError(
                f"The environment {data.environment.name!r} shows images, but data.row_images is not set. Set it "
                "to the maximum number of images per row, such as 1."
            )
        return
    if not isinstance(model, SeesImages):
        raise ConfigError(
            f"data.row_images is {data.row_images}, but the family {model.name!r} reads text only. Choose a language "
            "model with images, such as gemma3_vision or qwen3_vl, or leave data.row_images out."
        )
    check_image_tokens(model)


def _row_limit(batch: Mapping[str, np.ndarray]) -> int:
    # Only images with a grid share `pixels` in parts of different sizes.
    return batch["grids" if "grids" in batch else "pixels"].shape[1]
