"""Gated DeltaNet's sizes: a prompt or training sequence, and one token of decoding."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from op_cases import Case, forward_and_gradient, normal
from stack_core import ops

SEQUENCES = {"1 x 512 x 8 x 64": (1, 512, 8, 64), "1 x 2048 x 8 x 128": (1, 2048, 8, 128)}
DECODING = {"8 x 1 x 8 x 128": (8, 1, 8, 128)}


def _jnp(query: Any, key: Any, value: Any, decay: Any, beta: Any) -> Any:
    """A scan over tokens."""

    def read(state: Any, token: Any) -> Any:
        query, key, value, decay, beta = token
        state = jnp.exp(decay)[..., None, None] * state
        stored = jnp.einsum("bhkv,bhk->bhv", state, key)
        state = state + jnp.einsum("bhk,bhv->bhkv", key, beta[..., None] * (value - stored))
        return state, jnp.einsum("bhkv,bhk->bhv", state, query)

    batch, _, heads, dim = query.shape
    tokens = [jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (query, key, value, decay, beta)]
    _, output = jax.lax.scan(read, jnp.zeros((batch, heads, dim, dim)), tokens)
    return jnp.moveaxis(output, 0, 1).astype(value.dtype)


def _stack(*operands: Any, implementation: Any = None) -> Any:
    query, key, value, decay, beta = operands
    return ops.linear_attention(query, key, value, decay=decay, beta=beta, implementation=implementation)[0]


def _case(sizes: str, dtype: str) -> Case:
    shape = (SEQUENCES | DECODING)[sizes]

    def operands(rng: np.random.Generator) -> tuple[Any, ...]:
        query, key, value = (normal(rng, shape, dtype, shape[-1] ** -0.5) for _ in range(3))
        decay, beta = (rng.uniform(0, limit, shape[:3]).astype(np.float32) for limit in (0.1, 1))
        return query, key, value, -decay, beta

    contenders = {"stack": _stack, "core": partial(_stack, implementation="reference"), "jnp": _jnp}
    return Case(name=f"{sizes}, {dtype}", operands=operands, contenders=contenders, exact_dtype="float32")


CASES = (
    *(
        case
        for sizes in SEQUENCES
        for dtype in ("float32", "bfloat16")
        for case in forward_and_gradient(_case(sizes, dtype), moving=(0, 1, 2, 3, 4))
    ),
    *(_case(sizes, dtype) for sizes in DECODING for dtype in ("float32", "bfloat16")),
)
