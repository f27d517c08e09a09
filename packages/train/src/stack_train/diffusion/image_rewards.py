"""Rewards of images, as configs specify them."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float64, UInt8

from stack_core.abi.errors import ConfigError, DataError
from stack_core.abi.local_paths import local_path
from stack_core.functions import import_function
from stack_train.contrastive.loading import load_image_text

__all__ = ["ImageReward", "check_image_reward", "open_image_reward", "score_images"]

ImageReward: TypeAlias = Callable[[UInt8[np.ndarray, "images height width channels"], Sequence[str]], Any]
"""Function (images, prompts) -> a finite number per image; for models with labels, a prompt is a label's number."""

_MODELS = ("run:", "hf:")


def check_image_reward(reward: str) -> None:
    """Raises like `open_image_reward`, but loads no model: only its directory must exist."""
    if not reward.startswith(_MODELS):
        open_image_reward(reward)
    elif not local_path(reward.partition(":")[2]).is_dir():
        raise ConfigError(
            f"data.reward is {reward!r}, which is not a directory. Give the directory of an image-text model."
        )


def open_image_reward(reward: str) -> ImageReward:
    """Opens a reward.

    Args:
      reward: "module:function", an `ImageReward`; or "run:DIRECTORY" or "hf:DIRECTORY" of an image-text model, whose
        reward is the cosine similarity of an image and its prompt.

    Raises:
      ConfigError: the function cannot be imported, or is not callable.
      StackError: the model cannot be read.
    """
    if reward.startswith(_MODELS):
        model = load_image_text(reward.removeprefix("run:"))

        def similarity(images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
            grey = images.shape[-1] == 1
            features = model.image_features([image[..., 0] if grey else image for image in images])
            return np.sum(features * model.text_features(prompts), axis=-1)

        return similarity
    if ":" not in reward:
        raise ConfigError(
            f"data.reward is {reward!r}. Give module:function, or run:DIRECTORY or hf:DIRECTORY of an image-text model."
        )
    return import_function(reward, label="data.reward")


def score_images(
    function: ImageReward,
    images: UInt8[np.ndarray, "images height width channels"],
    prompts: Sequence[str],
    *,
    name: str,
) -> Float64[np.ndarray, " images"]:
    """Computes the reward of each image.

    Args:
      name: name of the reward in messages.

    Raises:
      DataError: the reward does not return one finite number for each image.
    """
    given = function(images, prompts)
    try:
        rewards = np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"Reward {name!r} returned {type(given).__name__}, which holds no numbers: {error}.") from error
    if rewards.shape != (len(images),):
        raise DataError(
            f"Reward {name!r} returned an array of shape {list(rewards.shape)} for {len(images)} images; one number "
            f"for each, [{len(images)}], was expected."
        )
    if not (finite := np.isfinite(rewards)).all():
        first = int(np.argmin(finite))
        raise DataError(
            f"Reward {name!r} is {rewards[first]} for {int((~finite).sum())} of {len(images)} images, the first of "
            f"which is of prompt {prompts[first]!r}. All rewards must be finite."
        )
    return rewards
