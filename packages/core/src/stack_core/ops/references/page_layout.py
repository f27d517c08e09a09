"""Choice of the page layout for `paged_attention` on the target chip."""

import inspect
from typing import Any

from stack_core.ops.definitions.paged_attention import OP, checked_call, paged_attention
from stack_core.ops.dispatch.check import check_known
from stack_core.ops.dispatch.choosing import highest_priority
from stack_core.ops.dispatch.dispatch import requested
from stack_core.ops.dispatch.splitting import LogicalNames
from stack_core.ops.references.paged_pools import LAYOUTS, holds_values, in_layout

__all__ = ["page_layout"]


def page_layout(
    query: Any, key_pages: Any, value_pages: Any, *, layout: str, axes: LogicalNames | None = None, **call: Any
) -> str | None:
    """Returns the layout supported by the best implementation of `paged_attention` for the target chip.

    Implementations are compared by priority: a kernel for a single layout has priority over the reference, which
    supports all layouts. Only shapes and dtypes are read, so arguments may be tracers or `jax.ShapeDtypeStruct`s.

    Args:
      query, key_pages, value_pages, axes, call: arguments of `paged_attention` except `implementation`.
      layout: layout of the given pages.

    Returns:
      Name of the layout, or None if no layout is better than the given layout.

    Raises:
      ShapeError, ArgumentError, UnknownName: as `paged_attention`.
      UnsupportedOp: no implementation supports the call in some layout.
    """
    check_known("page_layout", "layout", layout, tuple(LAYOUTS))
    ranks = {}
    for name in LAYOUTS:
        # Latents, or values of another width, do not fit into one pool with the keys.
        if (pools := in_layout((key_pages, value_pages), layout, name)) is None:
            continue
        bound = inspect.signature(paged_attention).bind(query, *pools, layout=name, **call)
        bound.apply_defaults()
        del bound.arguments["implementation"], bound.arguments["axes"]
        arrays, options = checked_call(**bound.arguments)
        ranks[name] = highest_priority(*requested(OP, arrays, options, None, _renamed(axes, layout, name)))
    best = max(ranks, key=ranks.__getitem__)
    # On a tie the present layout stays.
    return None if ranks[layout] == ranks[best] else best


def _renamed(axes: LogicalNames | None, layout: str, target_layout: str) -> LogicalNames | None:
    """Converts the logical axis names of pools to another layout."""
    if axes is None:
        return None
    pools = {name: dict(zip(layout, axes[name], strict=True)) for name in ("key_pages", "value_pages") if name in axes}
    if holds_values(layout) and "key_pages" in pools:
        pools["value_pages"] = pools["key_pages"]
    if holds_values(target_layout):
        pools.pop("value_pages", None)
    others = {name: names for name, names in axes.items() if name not in ("key_pages", "value_pages")}
    return others | {name: [of_one.get(axis) for axis in target_layout] for name, of_one in pools.items()}
