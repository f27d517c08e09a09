"""A 66M Llama's training steps and the quickstart's, short and long prompts, and one token against a cache."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from op_cases import Case, forward_and_gradient, normal
from stack_core import ops

# batch, q_seq, kv_seq, heads, kv_heads, head_dim
TRAINING = ((4, 512, 512, 8, 8, 64), (16, 128, 128, 3, 1, 64), (32, 32, 32, 8, 8, 64), (2, 256, 256, 8, 2, 128))
# What is dense needs 4 GiB for each copy of the longest one's scores.
LONG = ((1, 4096, 4096, 8, 8, 64), (1, 8192, 8192, 8, 8, 64), (1, 16384, 16384, 2, 2, 64), (1, 32768, 32768, 1, 1, 64))
CROSS = ((2, 64, 512, 8, 8, 64),)
DECODING = ((1, 1, 4096, 8, 8, 64), (8, 1, 1024, 8, 2, 64), (32, 1, 128, 8, 8, 64))


def _jnp(query: Any, key: Any, value: Any, *, causal: bool) -> Any:
    batch, q_seq, _, head_dim = query.shape
    grouped = query.reshape(batch, q_seq, key.shape[2], -1, head_dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, key, preferred_element_type=jnp.float32) * head_dim**-0.5
    if causal:
        scores = jnp.where(jnp.tri(q_seq, key.shape[1], key.shape[1] - q_seq, dtype=bool), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, value).reshape(query.shape)


def _xla(query: Any, key: Any, value: Any, *, causal: bool) -> Any:
    return jax.nn.dot_product_attention(query, key, value, **_causality(query, key, causal), implementation="xla")


def _tokamax(query: Any, key: Any, value: Any, *, causal: bool, implementation: str) -> Any:
    import tokamax

    return tokamax.dot_product_attention(
        query, key, value, **_causality(query, key, causal), implementation=implementation
    )


def _causality(query: Any, key: Any, causal: bool) -> dict[str, Any]:
    """The peers' causality aligns the first query with the first key, ours the last with the last."""
    offset = key.shape[1] - query.shape[1]
    mask = jnp.tri(query.shape[1], key.shape[1], offset, dtype=bool)[None, None] if causal and offset else None
    return {"mask": mask, "is_causal": causal and not offset}


def _case(sizes: tuple[int, ...], dtype: str, *, causal: bool = True, memory: bool = False) -> Case:
    batch, q_seq, kv_seq, heads, kv_heads, head_dim = sizes

    def operands(rng: np.random.Generator) -> tuple[Any, ...]:
        keys = [normal(rng, (batch, kv_seq, kv_heads, head_dim), dtype) for _ in range(2)]
        return normal(rng, (batch, q_seq, heads, head_dim), dtype), *keys

    contenders = {
        "stack": partial(ops.attention, causal=causal),
        "core": partial(ops.attention, causal=causal, implementation="reference"),
        "jax.nn": partial(_xla, causal=causal),
        "jnp": partial(_jnp, causal=causal),
        "tokamax xla": partial(_tokamax, causal=causal, implementation="xla"),
        "tokamax xla_chunked": partial(_tokamax, causal=causal, implementation="xla_chunked"),
    }
    kind = "causal" if causal else "full"
    name = f"{batch} x {q_seq} to {kv_seq}, {heads}/{kv_heads} heads of {head_dim}, {kind}, {dtype}"
    exact_dtype = "float32" if memory else "float64"
    return Case(name=name, operands=operands, contenders=contenders, exact_dtype=exact_dtype, memory=memory)


CASES = (
    *(
        case
        for dtype in ("float32", "bfloat16")
        for sizes in (*TRAINING, *LONG, *CROSS)
        for case in forward_and_gradient(_case(sizes, dtype, memory=sizes in LONG), moving=(0, 1, 2))
    ),
    *(_case(sizes, dtype, causal=False) for sizes in DECODING for dtype in ("float32", "bfloat16")),
)
