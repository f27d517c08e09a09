"""A 66M Llama's training step, decoding, a window, and 4k to 32k tokens, where scores do not fit."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from op_cases import Case, forward_and_gradient, normal
from stack_core import ops

_OFTEN = 8192  # tokens up to which everything is compared, and exactly


def _ours(query: Any, key: Any, value: Any, *, window: int | None, implementation: Any = None, **options: Any) -> Any:
    sides = None if window is None else (window, None)
    return ops.attention(query, key, value, window=sides, implementation=implementation, **options)


def _jnp(query: Any, key: Any, value: Any, *, causal: bool, window: int | None) -> Any:
    """Dense scores and a softmax in fp32 at least."""
    (q_seq, heads, head_dim), (kv_seq, kv_heads) = query.shape[1:], key.shape[1:3]
    key, value = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (key, value))
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=wide) * head_dim**-0.5
    distance = jnp.arange(q_seq)[:, None] + kv_seq - q_seq - jnp.arange(kv_seq)
    seen = (distance >= 0 if causal else True) & (distance <= window if window is not None else True)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(query.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def _jax(query: Any, key: Any, value: Any, *, causal: bool, window: int | None) -> Any:
    sides = None if window is None else (window, 0)
    causal = causal and query.shape[1] > 1  # it counts from the first key, and a single query sees all
    return jax.nn.dot_product_attention(query, key, value, is_causal=causal, local_window_size=sides)


def _tokamax(query: Any, key: Any, value: Any, *, causal: bool, window: int | None, implementation: str) -> Any:
    import tokamax

    sides = None if window is None else (window, 0)
    return tokamax.dot_product_attention(
        query,
        key,
        value,
        is_causal=causal and query.shape[1] > 1,
        local_window_size=sides,
        implementation=implementation,
    )


def _case(
    batch: int,
    q_seq: int,
    kv_seq: int,
    dtype: str,
    *,
    heads: tuple[int, int] = (8, 8),
    causal: bool = True,
    window: int | None = None,
) -> Case:
    def operands(rng: np.random.Generator) -> tuple[Any, ...]:
        keys = (batch, kv_seq, heads[1], 64)
        return normal(rng, (batch, q_seq, heads[0], 64), dtype), normal(rng, keys, dtype), normal(rng, keys, dtype)

    functions = {
        "stack": _ours,
        "core": partial(_ours, implementation="reference"),
        "jnp": _jnp,
        "jax": _jax,
        "tokamax xla": partial(_tokamax, implementation="xla"),
        "tokamax xla_chunked": partial(_tokamax, implementation="xla_chunked"),
    }
    kind = f"window {window}" if window is not None else "causal" if causal else "full"
    return Case(
        name=f"{batch} x {q_seq} of {kv_seq}, heads {heads[0]} of {heads[1]}, {dtype}, {kind}",
        operands=operands,
        contenders={name: partial(function, causal=causal, window=window) for name, function in functions.items()},
        exact_dtype="float64" if q_seq < _OFTEN else "float32",
        memory=q_seq >= 4096,
    )


DTYPES = ("float32", "bfloat16")
CASES = (
    *(case for dtype in DTYPES for case in forward_and_gradient(_case(4, 512, 512, dtype), (0, 1, 2))),
    *(_case(8, 1, 2048, dtype, heads=(8, kv_heads)) for dtype in DTYPES for kv_heads in (8, 2)),
    *(
        case
        for dtype in DTYPES
        for options in ({}, {"causal": False}, {"window": 511})
        for case in forward_and_gradient(_case(1, 4096, 4096, dtype, **options), (0, 1, 2))
    ),
    *(
        case
        for dtype in DTYPES
        for tokens in (8192, 16384, 32768)
        for case in forward_and_gradient(_case(1, tokens, tokens, dtype), (0, 1, 2))
    ),
)
