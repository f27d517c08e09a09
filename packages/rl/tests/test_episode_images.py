"""Images in rows of batches: at the tokens of their episodes, also in shared rows, and not more than fit."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from stack_core.abi.errors import ConfigError, DataError
from stack_core.abi.generation import PromptImage
from stack_rl.contracts import Trajectory
from stack_rl.environments.cell import CellConfig
from stack_rl.environments.count_shapes import CountShapesConfig
from stack_rl.episode_images import check_image_data, image_inputs, image_shapes, images_per_row
from stack_rl.experience import batch_of, batch_shapes
from stack_rl.objectives.presets import GRPOConfig
from stack_rl.packing import PackedRows, row_counts
from stack_rl.rollouts import RolloutData

SEQ, IMAGE = 12, 9


class Family:
    """The config of a model with images of any size, four patches per token, or of squares."""

    name, image_tokens_of_prompts, grids = "seeing", {"image_token": IMAGE}, True

    def image_reader(self, texts): ...

    def image_arrays(self, row_images, seq_tokens):
        if not self.grids:
            return {"pixels": jax.ShapeDtypeStruct((row_images, 2, 2, 3), np.dtype(np.uint8))}
        return {
            "pixels": jax.ShapeDtypeStruct((seq_tokens * 4, 3), np.dtype(np.uint8)),
            "grids": jax.ShapeDtypeStruct((row_images, 2), np.dtype(np.int32)),
        }


class Squares(Family):
    grids = False


def episode(value: int, *sizes: int, model: Any) -> Trajectory:
    """An episode with images of these numbers of tokens, whose pixels have the given value and the following ones."""
    tokens, images = [1], []
    for number, size in enumerate(sizes):
        shape = (4 * size, 3) if model.grids else (2, 2, 3)
        pixels, grid = np.full(shape, value + number, np.uint8), (1, size) if model.grids else None
        images.append(PromptImage(len(tokens), size, pixels, bytes([value + number]), "text", grid))
        tokens += [IMAGE] * size + [1]
    tokens += [IMAGE, 2]  # sampled: an image token without an image
    sampled = np.arange(len(tokens)) >= len(tokens) - 2
    return Trajectory(
        group=value,
        task=value,
        tokens=np.asarray(tokens, np.int32),
        sampled=sampled,
        logprobs=-sampled.astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        rewards=sampled.astype(np.float32),
        images=images,
    )


def batch(model, trajectories, *, row_images=3):
    shapes = batch_shapes(len(trajectories), SEQ, GRPOConfig())
    shapes |= image_shapes(model, len(trajectories), SEQ, row_images)
    return batch_of(trajectories, shapes=shapes, version=0)


@pytest.mark.parametrize("row_images", [3, 4])  # the episodes 40 and 30 share a row, if it may have four images
@pytest.mark.parametrize("model", [Family(), Squares()], ids=["grids", "squares"])
def test_the_images_of_shared_rows_are_in_the_order_of_their_tokens(model, row_images):
    sizes = {10: (2, 1), 20: (), 30: (1,), 40: (1, 1, 1), 50: (3,), 60: ()}
    trajectories = [episode(value, *each, model=model) for value, each in sizes.items()]
    padded = batch(model, [*trajectories, None, None], row_images=row_images)
    packed = PackedRows.plan(padded["segment_ids"], row_counts(8, 1), images_per_row(padded)).pack(padded)
    assert len(packed["tokens"]) < 8 and packed["image_counts"][:, 1].max() == row_images
    names = {"pixels", "image_mask", "grids"} if model.grids else {"pixels", "image_mask"}
    assert image_inputs(packed).keys() == names
    for rows in (padded, packed):
        shown = [_shown(rows, row, model) for row in range(len(rows["tokens"]))]
        assert sorted(value for row in shown for value in row) == [10, 11, 30, 40, 41, 42, 50]
        # The pixels beyond the images of a row are 0.
        used = rows["image_counts"][:, 0]
        assert not any(each[count:].any() for each, count in zip(rows["pixels"], used, strict=True))
        assert (rows["tokens"][rows["image_mask"]] == IMAGE).all() and rows["image_mask"].sum() == 10
    assert (padded["tokens"] == IMAGE).sum() == 16


def _shown(rows, row, model):
    """Returns the value of each image of a row, and checks the number of its tokens in the row's order."""
    mask, found = rows["image_mask"][row], []
    runs = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]))).reshape(-1, 2)
    assert rows["image_counts"][row, 1] == len(runs)
    first = 0
    for number, (start, end) in enumerate(runs.tolist()):
        count = 4 * (end - start) if model.grids else 1
        assert not model.grids or rows["grids"][row, number].tolist() == [1, end - start]
        (value,) = np.unique(rows["pixels"][row, first : first + count])
        found.append(int(value))
        first += count
    assert rows["image_counts"][row, 0] == first
    return found


def test_images_without_room_in_a_row_are_an_error():
    model = Family()
    with pytest.raises(DataError, match=r"task 40 has 3 images, but data.row_images is 2. Set data.row_images to at l"):
        batch(model, [episode(40, 1, 1, 1, model=model)], row_images=2)
    with pytest.raises(DataError, match=r"task 40 has 1 images, but data.row_images is not set"):
        batch(model, [episode(40, 1, model=model)], row_images=None)


def test_images_need_a_model_with_images_and_a_number_of_images():
    data = RolloutData(environment=CountShapesConfig(), seq_tokens=SEQ)
    with pytest.raises(ConfigError, match=r"environment 'count_shapes' shows images, but data.row_images is not set"):
        check_image_data(Family(), data)
    data = RolloutData(environment=CellConfig(), seq_tokens=SEQ, row_images=1)
    check_image_data(Family(), data)
    with pytest.raises(ConfigError, match=r"data.row_images is 1, but the family 'llama' reads text only"):
        check_image_data(SimpleNamespace(name="llama"), data)
    incomplete = Family()
    incomplete.image_tokens_of_prompts = {"image_token": None, "image_end": 4}
    with pytest.raises(ConfigError, match=r"Set model.image_token to the ids of the tokenizer's tokens of images"):
        check_image_data(incomplete, data)
