"""Paths of leaves in a pytree, and the patterns by which configs name them."""

import re
from collections.abc import Iterable
from typing import Any

import jax

__all__ = ["path_matches", "path_name"]


def path_name(path: Iterable[Any]) -> str:
    """Joins the path of a leaf with "/": "blocks/attention/query/kernel".

    Args:
      path: keys of `jax.tree_util`, or plain names and numbers.
    """
    return "/".join(_segment(key) for key in path)


def path_matches(pattern: str, path: str) -> bool:
    """Returns whether a regular expression matches one full segment of a path, or several consecutive segments.

    "query" and "attention/query" match "blocks/attention/query/kernel"; "quer" does not.
    """
    return re.fullmatch(rf"(.*/)?(?:{pattern})(/.*)?", path) is not None


def _segment(key: Any) -> str:
    return str(key) if isinstance(key, (str, int)) else jax.tree_util.keystr((key,), simple=True)
