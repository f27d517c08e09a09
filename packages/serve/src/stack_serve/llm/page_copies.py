"""Device functions that copy pages out of the pools of an engine, and into the pools of another."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from stack_serve.llm.config import PageLayout

__all__ = ["HANDOVER_PAGES", "read_pages", "write_pages"]

HANDOVER_PAGES = 32
"""Number of pages that one launch exports or imports."""


def read_pages(pools: Any, pages: Int[Array, " pages"], layout: PageLayout) -> tuple[Any, ...]:
    """Copies pages of all pools.

    Returns:
      One array [pages, entries] for each dtype of the pools.
    """
    by_dtype: dict[Any, list[Any]] = {}
    for pool in jax.tree.leaves(pools):
        axis = _page_axis(pool, layout)
        rows = jnp.moveaxis(jnp.take(pool, pages, axis=axis, mode="clip"), axis, 0)
        by_dtype.setdefault(pool.dtype, []).append(rows.reshape(len(pages), -1))
    return tuple(jnp.concatenate(each, axis=1) for each in by_dtype.values())


def write_pages(pools: Any, pages: Int[Array, " pages"], arrays: tuple[Any, ...], layout: PageLayout) -> Any:
    """Returns pools with the contents of `arrays`, a result of `read_pages`, in `pages`; skips pages out of range."""
    dtypes = dict.fromkeys(pool.dtype for pool in jax.tree.leaves(pools))
    rests = dict(zip(dtypes, arrays, strict=True))

    def put(pool: Any) -> Any:
        axis = _page_axis(pool, layout)
        shape = [len(pages), *(size for place, size in enumerate(pool.shape) if place != axis)]
        rows, rests[pool.dtype] = jnp.split(rests[pool.dtype], [math.prod(shape[1:])], axis=1)
        new = jnp.moveaxis(rows.reshape(shape), 0, axis)
        return pool.at[(slice(None),) * axis + (pages,)].set(new, mode="drop")

    return jax.tree.map(put, pools)


def _page_axis(pool: Any, layout: PageLayout) -> int:
    return pool.ndim - len(layout) + layout.index("p")
