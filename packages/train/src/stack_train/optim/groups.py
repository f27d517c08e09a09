"""Groups of parameters that an optimizer treats in a way of their own."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import optax
from pydantic import NonNegativeFloat

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, nearest
from stack_core.abi.tree_paths import path_matches, path_name
from stack_train.optim.axes import AxesTree

__all__ = ["REST", "GroupConfig", "check_groups", "group_names", "group_of"]

REST = "rest"
"""The group of the parameters that no pattern matches."""


@config
class GroupConfig:
    """Settings of the parameters whose path a pattern matches.

    Attributes:
      rate_factor: multiplies the learning rate.
      weight_decay: in place of the optimizer's; None leaves that.
      frozen: the parameters are not trained, and the optimizer keeps nothing of them.
    """

    rate_factor: NonNegativeFloat = 1.0
    weight_decay: NonNegativeFloat | None = None
    frozen: bool = False

    def scale(self, rate: optax.Schedule) -> optax.Schedule:
        return lambda count: self.rate_factor * rate(count)


def group_of(groups: Iterable[str], path: str) -> str | None:
    """The first pattern that matches the path of a parameter; None if none does."""
    return next((pattern for pattern in groups if path_matches(pattern, path)), None)


def group_names(groups: Mapping[str, GroupConfig], axes: AxesTree) -> Any:
    """The place of every parameter's group among `groups`, or `REST`, in the structure of `axes`."""
    names = {None: REST, **{pattern: str(place) for place, pattern in enumerate(groups)}}
    return jax.tree.map_with_path(
        lambda path, _: names[group_of(groups, path_name(path))], axes, is_leaf=lambda node: isinstance(node, tuple)
    )


def check_groups(groups: Mapping[str, GroupConfig], paths: Iterable[str]) -> None:
    """Compares groups with the paths of a model's parameters.

    Raises:
      ConfigError: a pattern is malformed, or no parameter is in its group; names what is near.
    """
    paths = tuple(paths)
    for pattern in groups:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"optimizer.groups: {pattern!r} is no regular expression: {error}.") from error
    taken = {group_of(groups, path) for path in paths}
    for pattern in groups:
        if pattern not in taken:
            raise ConfigError(
                f"optimizer.groups: no parameter that an earlier group left has {pattern!r} in its path."
                f"{nearest(pattern, _segments(paths))} A pattern covers whole segments, such as 'embedding' or "
                f"'attention/.*'. The parameters: {', '.join(paths)}."
            )


def _segments(paths: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(segment for path in paths for segment in path.split("/")))
