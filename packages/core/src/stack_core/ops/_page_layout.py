"""Which layout of pages suits the target chip's implementations of `paged_attention`."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from stack_core.ops._check import check_known
from stack_core.ops._choosing import highest_priority
from stack_core.ops._dispatch import requested
from stack_core.ops._paged_attention import LAYOUTS, OP, checked_call, paged_attention
from stack_core.ops._splitting import LogicalNames

__all__ = ["page_layout"]


def page_layout(
    query: Any, key_pages: Any, value_pages: Any, *, layout: str, axes: LogicalNames | None = None, **call: Any
) -> str | None:
    """The layout in which the best implementation for the target chip takes a call of `paged_attention`.

    Implementations are compared by priority: a kernel that reads one layout alone stands before the reference, which
    reads all. Shapes and dtypes alone are read, so the arguments may be traced or be `jax.ShapeDtypeStruct`s.

    Args:
      query, key_pages, value_pages, axes, call: as `paged_attention` takes them, without an `implementation`.
      layout: that of the pages which are given.

    Returns:
      The name of the layout, or None where what runs is as good in every layout.

    Raises:
      ShapeError, ArgumentError, UnknownName: as `paged_attention`.
      UnsupportedOp: no implementation supports the call in some layout.
    """
    check_known("page_layout", "layout", layout, tuple(LAYOUTS))
    ranks = {}
    for name in LAYOUTS:
        pools = [_laid_out(pool, layout, name) for pool in (key_pages, value_pages)]
        given = inspect.signature(paged_attention).bind(query, *pools, layout=name, **call)
        given.apply_defaults()
        del given.arguments["implementation"], given.arguments["axes"]
        arrays, options = checked_call(**given.arguments)
        ranks[name] = highest_priority(*requested(OP, arrays, options, None, _renamed(axes, layout, name)))
    return None if len(set(ranks.values())) == 1 else max(ranks, key=ranks.__getitem__)


def _laid_out(pool: Any, given: str, wanted: str) -> Any:
    """The shapes of a pool, or of the parts of a quantized one, in another layout."""

    def leaf(array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(array.shape[given.index(axis)] for axis in wanted), array.dtype)

    return jax.tree.map(leaf, pool)


def _renamed(axes: LogicalNames | None, given: str, wanted: str) -> LogicalNames | None:
    """The logical names of the axes of pools in another layout."""
    if axes is None:
        return None
    pools: Mapping[str, Sequence[str | None]] = {
        name: [names[given.index(axis)] for axis in wanted]
        for name, names in axes.items()
        if name in ("key_pages", "value_pages")
    }
    return {**axes, **pools}
