"""Parameter groups with their own optimizer settings."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import optax
from pydantic import NonNegativeFloat

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, nearest
from stack_core.runtime.tree_paths import path_matches, path_name
from stack_train.optim.axes import AxesTree

__all__ = ["REST", "GroupConfig", "check_groups", "group_names", "group_of"]

REST = "rest"
"""Name of the group of parameters that match no pattern."""


@config
class GroupConfig:
    """Settings of the parameters whose path matches a pattern.

    Attributes:
      rate_factor: factor of the learning rate.
      weight_decay: weight decay of this group; None uses the optimizer's.
      frozen: True excludes the parameters from training and from the optimizer state.
    """

    rate_factor: NonNegativeFloat = 1.0
    weight_decay: NonNegativeFloat | None = None
    frozen: bool = False

    def scale(self, rate: optax.Schedule) -> optax.Schedule:
        return lambda count: self.rate_factor * rate(count)


def group_of(groups: Iterable[str], path: str) -> str | None:
    """Returns the first pattern that matches the path of a parameter, or None.

    Raises:
      ConfigError: a pattern is malformed.
    """
    for pattern in groups:
        try:
            if path_matches(pattern, path):
                return pattern
        except re.error as error:
            raise ConfigError(f"optimizer.groups: {pattern!r} is not a regular expression: {error}.") from error
    return None


def group_names(groups: Mapping[str, GroupConfig], axes: AxesTree) -> Any:
    """Returns the group of every parameter in the structure of `axes`: its index in `groups` as a string, or `REST`."""
    # Indices, because Optax puts these names into the paths of its state, which checkpoints join by slashes.
    names = {None: REST, **{pattern: str(place) for place, pattern in enumerate(groups)}}
    return jax.tree.map_with_path(
        lambda path, _: names[group_of(groups, path_name(path))], axes, is_leaf=lambda node: isinstance(node, tuple)
    )


def check_groups(groups: Mapping[str, GroupConfig], paths: Iterable[str]) -> None:
    """Checks that every group contains a parameter of the model.

    Raises:
      ConfigError: a pattern is malformed, or its group is empty. The message suggests similar path segments.
    """
    paths = tuple(paths)
    taken = {group_of(groups, path) for path in paths}
    for pattern in groups:
        if pattern not in taken:
            raise ConfigError(
                f"optimizer.groups: {pattern!r} matches no parameter outside of earlier groups."
                f"{nearest(pattern, _segments(paths))} A pattern matches complete path segments, such as 'embedding' "
                f"or 'attention/.*'. The parameters: {', '.join(paths)}."
            )


def _segments(paths: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(segment for path in paths for segment in path.split("/")))
