"""One token a sequence against pages of 128 slots that are partly used, even and uneven lengths; a part of a prompt."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from op_cases import Case, normal
from stack_core import ops

# heads, kv_heads, head_dim
HEADS = ((8, 4, 64), (8, 8, 128))
PADDED, SLOTS = 2048, 128


def _dense(query: Any, key_pages: Any, value_pages: Any, tables: Any, lengths: Any, starts: Any, *, layout: str) -> Any:
    """`jax.nn` on all pages that the tables name, gathered; each sequence has as many queries."""
    batch, head_dim = tables.shape[0], query.shape[-1]
    key, value = (
        jnp.einsum(f"{layout.replace('p', 'bp')}->bpshd", jnp.take(pages, tables, axis=layout.index("p")))
        for pages in (key_pages, value_pages)
    )
    key, value = (x.reshape(batch, -1, x.shape[3], head_dim) for x in (key, value))
    rows = query.reshape(batch, -1, *query.shape[1:])
    positions = lengths[:, None] - rows.shape[1] + jnp.arange(rows.shape[1])
    mask = jnp.arange(key.shape[1]) <= positions[:, None, :, None]
    return jax.nn.dot_product_attention(rows, key, value, mask=mask, implementation="xla").reshape(query.shape)


def _paged(query: Any, key_pages: Any, value_pages: Any, tables: Any, lengths: Any, starts: Any, **options: Any) -> Any:
    places = {"block_tables": tables, "kv_lengths": lengths, "query_starts": starts}
    return ops.paged_attention(query, key_pages, value_pages, **places, **options)


def _case(lengths: tuple[int, ...], sizes: tuple[int, int, int], dtype: str, layout: str, rows: int = 1) -> Case:
    heads, kv_heads, head_dim = sizes
    batch, pages_per_seq = len(lengths), PADDED // SLOTS
    axes = {"p": batch * pages_per_seq, "h": kv_heads, "s": SLOTS, "d": head_dim}

    def operands(rng: np.random.Generator) -> tuple[Any, ...]:
        pools = [normal(rng, [axes[axis] for axis in layout], dtype) for _ in range(2)]
        tables = rng.permutation(axes["p"]).reshape(batch, pages_per_seq).astype(np.int32)
        starts = rows * np.arange(batch + 1, dtype=np.int32)
        return normal(rng, (batch * rows, heads, head_dim), dtype), *pools, tables, np.array(lengths, np.int32), starts

    contenders = {
        "stack": partial(_paged, layout=layout),
        "core": partial(_paged, layout=layout, implementation="reference"),
        "dense": partial(_dense, layout=layout),
    }
    used = f"{min(lengths)} to {max(lengths)}" if min(lengths) < max(lengths) else str(lengths[0])
    name = f"{batch} x {rows}, {used} of {PADDED} used, {heads}/{kv_heads} heads of {head_dim}, {layout}, {dtype}"
    return Case(name=name, operands=operands, contenders=contenders)


def _uneven(batch: int) -> tuple[int, ...]:
    """Lengths of which few are long."""
    return tuple(64 + 1984 * row * row // (batch - 1) ** 2 for row in range(batch))


DECODING = ((64,), (2048,), (64,) * 8, (1024,) * 8, _uneven(8), (512,) * 32, _uneven(32))

CASES = (
    *(
        _case(lengths, sizes, dtype, "pshd")
        for dtype in ("float32", "bfloat16")
        for sizes in HEADS
        for lengths in DECODING
    ),
    *(_case((512,) * 8, HEADS[0], dtype, "phsd") for dtype in ("float32", "bfloat16")),
    *(_case((1024,), HEADS[0], dtype, "pshd", rows=256) for dtype in ("float32", "bfloat16")),
)
